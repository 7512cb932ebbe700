"""Episodes with an id in every value, storages of every class for them, and the same added step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import rlstore
from rlstore.replay.core import ReplayCore

# How the episodes end: terminated, truncated, both, or cut off without a flag.
ENDS = ((True, False), (False, True), (True, True), (False, False))


@dataclass(frozen=True)
class Form:
    """What observations look like: a space, and the observation with an id, of the step ``step`` of an episode."""

    name: str
    space: spaces.Space[Any]
    observe: Callable[[int, int], Any]
    frame_stack: int = 1


def _flat(number: int, step: int) -> Any:
    return np.array([number, number + 0.5], np.float32)


def _goals(number: int, step: int) -> Any:
    return {
        "observation": np.array([number, -number], np.float32),
        "achieved_goal": np.array([number * 2], np.float32),
        "desired_goal": np.array([number // 100], np.float32),
    }


def _frames(number: int, step: int) -> Any:
    """Three frames, the oldest first; before the first one it is repeated."""
    return np.stack([np.full((3, 3), (number - min(back, step)) % 251, np.uint8) for back in (2, 1, 0)])


_BOX = {name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in (("one", 1), ("two", 2))}
FLAT = Form("flat", _BOX["two"], _flat)
GOALS = Form(
    "goals",
    spaces.Dict({"observation": _BOX["two"], "achieved_goal": _BOX["one"], "desired_goal": _BOX["one"]}),
    _goals,
)
FRAMES = Form("frames", spaces.Box(0, 255, (3, 3, 3), np.uint8), _frames, frame_stack=3)
ACTIONS = spaces.Discrete(10_000)
EXTRA = {"costs": ((), torch.float32)}


def number_of(episode: int, step: int) -> int:
    """The id of a step; its final observation has that of the step behind the last."""
    return 100 * (episode + 1) + step


def stacked(parts: Sequence[Any]) -> Any:
    """Observations of some steps as one nest of arrays."""
    if isinstance(parts[0], dict):
        return {key: stacked([part[key] for part in parts]) for key in parts[0]}
    return np.stack(parts)


def episode_of(form: Form, index: int, length: int, *, extra: bool = False) -> dict[str, Any]:
    """An episode as a caller gives it: observations with the final one, flags of the last step."""
    numbers = [number_of(index, step) for step in range(length)]
    terminated, truncated = ENDS[index % 4]
    given = {
        "observations": stacked([form.observe(number_of(index, step), step) for step in range(length + 1)]),
        "actions": np.array(numbers),
        "rewards": np.array(numbers, np.float32) / 4,
        "terminations": np.array([False] * (length - 1) + [terminated]),
        "truncations": np.array([False] * (length - 1) + [truncated]),
    }
    return {**given, "costs": -np.array(numbers, np.float32)} if extra else given


def add_step_by_step(storage: Any, form: Form, index: int, length: int, env: int, *, extra: bool = False) -> None:
    """The same episode, one step after another, to one environment."""
    lanes = storage.num_envs
    mask = np.arange(lanes) == env

    def of_all(value: Any) -> Any:
        return stacked([value] * lanes)

    for step in range(length):
        number, is_last = number_of(index, step), step == length - 1
        following = form.observe(number_of(index, step + 1), step + 1)
        terminated, truncated = (flag and is_last for flag in ENDS[index % 4])
        storage.add(
            of_all(form.observe(number, step)),
            of_all(np.int64(number)),
            of_all(np.float32(number / 4)),
            of_all(np.bool_(terminated)),
            of_all(np.bool_(truncated)),
            {"final_obs": of_all(following)},
            of_all(following),
            mask=mask,
            **({"costs": of_all(np.float32(-number))} if extra else {}),
        )


def no_reward(achieved: Any, desired: Any, info: Any) -> Any:
    return -(achieved - desired).abs().squeeze(-1)


@dataclass(frozen=True)
class Case:
    """A class of storages with its arguments."""

    kind: type[ReplayCore]
    form: Form
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind.__name__}-{self.form.name}"

    def given(self, **more: Any) -> dict[str, Any]:
        return {"frame_stack": self.form.frame_stack, "batch_size": 16, "seed": 3, **self.arguments, **more}

    def make(self, **more: Any) -> Any:
        return self.kind(self.form.space, ACTIONS, **self.given(**more))  # type: ignore[call-arg]


CASES = [
    Case(rlstore.ReplayStorage, FLAT, {"n_step": 3}),
    Case(rlstore.ReplayStorage, FRAMES, {}),
    Case(rlstore.ReplayStorage, GOALS, {}),
    Case(rlstore.NStepReplayStorage, FLAT, {"num_workers": 0, "pin_memory": False}),
    Case(rlstore.PrioritizedReplayStorage, FLAT, {"n_step": 2}),
    Case(rlstore.SequenceReplayStorage, FLAT, {"sequence_length": 4, "overlap": 2}),
    Case(rlstore.SequenceReplayStorage, FRAMES, {"sequence_length": 3, "alpha": 0.6}),
    Case(rlstore.HindsightReplayStorage, GOALS, {"compute_reward": no_reward}),
]


def contents(storage: Any) -> dict[str, torch.Tensor]:
    """Everything that the ring of a storage holds, by name: rows, counters and, of each row, its episode."""
    ring = storage._rows
    held = torch.minimum(ring.written - ring.begun, torch.tensor(ring.steps))
    found = {"written": ring.written.clone(), "free": ring.free_count.clone()}
    for lane in range(ring.lanes):
        times = torch.arange(int(ring.written[lane] - held[lane]), int(ring.written[lane]))
        places, slots = times % ring.rows, ring.blocks["episode"][lane, times % ring.rows].long()
        found[f"episodes {lane}"] = ring.episodes[slots]
        for name, block in ring.blocks.items():
            if name != "episode":
                found[f"{name} {lane}"] = block[lane, places].clone()
        for leaf, final in zip(ring.leaves, ring.finals, strict=True):
            over = ring.episodes[slots, 1] >= 0
            found[f"final {leaf.field.name} {lane}"] = final[slots[over]]
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a batch."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None:
        return []
    parts = value if isinstance(value, tuple) else value.values()
    return [tensor for part in parts for tensor in flat(part)]
