"""Every replay class as the contract suite sees it: how it is made, what its samples are and what batches must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from where import DEVICE

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

ENVS = 2
STEPS = 6
SIZE = STEPS * ENVS
GAMMA = 0.5


def no_reward(achieved, desired, info):
    return -achieved[:, 0]


@dataclass(frozen=True)
class ReplayCase:
    """A replay class: its options, and what its samples look like."""

    name: str
    cls: Any
    observe: Callable[[torch.Tensor], Any]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, size: int = SIZE, **options: Any) -> Any:
        return self.cls.create_factory(size // ENVS, **{"seed": 3, **self.options, **options})(DEVICE, None, None)

    def sample(self, step: int, terminated=(), truncated=()) -> dict[str, Any]:
        """Environment ``e`` shows ``1 + step * N + e`` and goes on to the next; ends show 1000 more than that."""
        ids = torch.arange(1, ENVS + 1) + float(step * ENVS)
        flags = [torch.tensor([env in ended for env in range(ENVS)]) for ended in (terminated, truncated)]
        sample = {
            "observations": self.observe(ids),
            "actions": torch.stack([ids, ids / 2], -1),
            "rewards": ids / 4 + 1,
            "terminated": flags[0],
            "truncated": flags[1],
            "next_observations": self.observe(ids + ENVS),
        }
        if terminated or truncated:
            sample["final_observations"] = self.observe(ids + 1000)
        return sample


def vector(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([ids, -ids], -1)


def nest(ids: torch.Tensor) -> dict[str, Any]:
    return {"policy": vector(ids), "camera": {"image": (ids % 256).to(torch.uint8).view(-1, 1, 1)}}


def goal(ids: torch.Tensor) -> dict[str, Any]:
    return {"observation": vector(ids), "achieved_goal": vector(ids + 0.25), "desired_goal": vector(0 * ids + 0.5)}


def ids_in(observations: Any) -> torch.Tensor:
    """The ids in observations of any of the forms above."""
    for name in ("policy", "observation"):
        if not isinstance(observations, torch.Tensor) and name in observations:
            return observations[name][..., 0]
    return observations[..., 0]


REPLAY_CASES = [
    ReplayCase("uniform", ReplayStorage, vector, {"discount": GAMMA}),
    ReplayCase("uniform nest", ReplayStorage, nest, {"discount": GAMMA}),
    ReplayCase("n-step", NStepReplayStorage, vector, {"discount": GAMMA, "n_step": 1, "num_workers": 0}),
    ReplayCase("prioritized", PrioritizedReplayStorage, nest, {"discount": GAMMA}),
    ReplayCase("sequence", SequenceReplayStorage, vector, {"sequence_length": 1}),
    ReplayCase("sequence prioritized", SequenceReplayStorage, nest, {"sequence_length": 1, "alpha": 0.5}),
    ReplayCase(
        "hindsight",
        HindsightReplayStorage,
        goal,
        {"discount": GAMMA, "compute_reward": no_reward, "relabel_fraction": 0.0},
    ),
]
ENDS = [((), ()), ((0,), ()), ((), (1,)), ((0,), (0, 1)), ((), ())]


def collect(case: ReplayCase, *storages: Any, first: int = 0, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        for storage in storages:
            storage.insert_transition(case.sample(step, *ENDS[step % len(ENDS)]))


def check_row(case: ReplayCase, batch: dict[str, Any], place: int, row: int) -> None:
    """One entry of a batch is what was inserted for its row."""
    step, env = divmod(row, ENVS)
    sample = case.sample(step, *ENDS[step % len(ENDS)])
    ended = bool(sample["terminated"][env] | sample["truncated"][env])
    number = float(1 + row)
    found = {name: batch[name][place].flatten().tolist() for name in ("actions", "rewards")}
    assert ids_in(batch["observations"])[place].item() == number
    assert found["actions"] == [number, number / 2]
    assert ids_in(batch["next_observations"])[place].item() == number + (1000 if ended else ENVS)
    assert found["rewards"] == [number / 4 + 1]
    if case.cls is SequenceReplayStorage:
        assert batch["masks"][place].item() is True
        assert batch["terminated"][place].flatten().tolist() == [bool(sample["terminated"][env])]
    else:
        assert batch["discounts"][place].item() == (0.0 if sample["terminated"][env] else GAMMA)


def check_batch(case: ReplayCase, batch: dict[str, Any], size: int, steps: range) -> list[int]:
    """Every row of a batch is of one of the steps, and as it was inserted; returns the rows."""
    assert isinstance(batch, dict)
    rows = batch["rows"].tolist()
    if case.cls is SequenceReplayStorage:
        batch = {name: _only_step(value) for name, value in batch.items() if name not in ("weights", "hidden_states")}
    assert len(rows) == size
    for place, row in enumerate(rows):
        assert row // ENVS in steps
        check_row(case, batch, place, row)
    return rows


def _only_step(value: Any) -> Any:
    """Sequences of one step without their axis of time."""
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        return value
    return value[:, 0]
