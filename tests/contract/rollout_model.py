"""What a rollout must hold and serve: a list of the samples inserted, and targets computed in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from storages import NUM_ENVS, Case, ids_in
from where import DEVICE

MADE_LATER = ("returns", "advantages")
SIZE = 4
HELD = SIZE * NUM_ENVS
ENDS = [((0,), (1,)), ((), ()), ((2,), (0, 2)), ((1,), (2,)), ((), (0,))]


class RolloutModel:
    """The samples since the rollout began, as they were given.

    ``targets`` holds ``(return, advantage)`` by row, for the rows that were there when they were last computed.
    """

    def __init__(self, case: Case, size: int, gamma: float = 0.99, lam: float = 0.95) -> None:
        self.case, self.size, self.gamma, self.lam = case, size, gamma, lam
        self.spent = False
        self.flags_before = [(False, False)] * NUM_ENVS
        self.rows: list[dict[str, Any]] = []
        self.targets: dict[int, tuple[float, float]] = {}

    # ---------------------------------------------------------------------------------------------- what happens to it

    def insert(self, sample: dict[str, Any]) -> None:
        if self.spent or (self.case.restarts and len(self.rows) == self.size):
            self.clear(carry=True)
        self.rows.append(sample)

    def is_full(self) -> bool:
        return len(self.rows) == self.size and not self.spent and not self.case.restarts

    def clear(self, carry: bool = False) -> None:
        if carry and len(self.rows) == self.size:
            newest = self.rows[-1]
            self.flags_before = list(zip(newest["terminated"].tolist(), newest["truncated"].tolist(), strict=True))
        self.rows, self.targets, self.spent = [], {}, False

    def reset(self) -> None:
        self.clear()
        self.flags_before = [(False, False)] * NUM_ENVS

    def compute(self, gamma: float | None = None, lam: float | None = None) -> None:
        gamma, lam = self.gamma if gamma is None else gamma, self.lam if lam is None else lam
        raw = [0.0] * (len(self.rows) * NUM_ENVS)
        for env in range(NUM_ENVS):
            following = float(ids_in(self.rows[-1]["next_observations"])[env]) / 8
            ahead = 0.0
            for t in reversed(range(len(self.rows))):
                ahead = self._advantage(t, env, following, gamma, gamma * lam * ahead)
                raw[t * NUM_ENVS + env] = ahead
                following = self._scalar("values", t, env)
        returns = [a + self._scalar("values", *divmod(row, NUM_ENVS)) for row, a in enumerate(raw)]
        mean = sum(raw) / len(raw)
        std = math.sqrt(sum((a - mean) ** 2 for a in raw) / (len(raw) - 1))
        scaled = [(a - mean) / (std + self.case.epsilon) for a in raw]
        self.targets = dict(enumerate(zip(returns, scaled, strict=True)))

    def _advantage(self, t: int, env: int, following: float, gamma: float, ahead: float) -> float:
        reward, value = self._scalar("rewards", t, env), self._scalar("values", t, env)
        if self.rows[t]["terminated"][env]:
            return reward - value
        if self.rows[t]["truncated"][env]:
            final = self._scalar("final_values", t, env) if "final_values" in self.rows[t] else math.nan
            return 0.0 if math.isnan(final) else reward + gamma * final - value
        return reward + gamma * following - value + ahead

    def _scalar(self, name: str, t: int, env: int) -> float:
        return float(self.rows[t][name][env])

    # ---------------------------------------------------------------------------------------------- what it must serve

    def check_batch(self, batch: dict[str, Any], size: int) -> list[int]:
        """Every value of a batch is the one that was inserted for its row; returns the rows."""
        rows = batch["rows"].tolist()
        assert len(rows) == size
        names = set(self.rows[0]) - {"next_observations", "final_values"}
        assert set(batch) - {"rows", *MADE_LATER} == names
        assert set(batch) >= set(MADE_LATER) or not self.case.computes_targets
        for place, row in enumerate(rows):
            step, env = divmod(row, NUM_ENVS)
            sample = self.rows[step]
            assert int(ids_in(batch["observations"])[place]) == int(ids_in(sample["observations"])[env])
            for name in names:
                self._check_value(name, batch[name], place, sample, env)
            if row in self.targets:
                for name, expected in zip(MADE_LATER, self.targets[row], strict=True):
                    assert batch[name].shape == (size, 1)
                    assert math.isclose(batch[name][place].item(), expected, rel_tol=1e-4, abs_tol=1e-4), name
        return rows

    def check_data(self, data: dict[str, Any]) -> None:
        """get_all_buffer_data gives every row that was inserted."""
        if not self.rows:
            assert data == {}
            return
        for t, sample in enumerate(self.rows):
            for env in range(NUM_ENVS):
                for name in set(sample) - {"next_observations", "final_values"}:
                    self._check_value(name, _step(data[name], t, len(self.rows)), env, sample, env)
                target = self.targets.get(t * NUM_ENVS + env)
                if target is not None:
                    for name, expected in zip(MADE_LATER, target, strict=True):
                        assert math.isclose(data[name][t, env].item(), expected, rel_tol=1e-4, abs_tol=1e-4)

    def _check_value(self, name: str, served: Any, place: int, sample: dict[str, Any], env: int) -> None:
        if name == "truncated" and sample["terminated"][env]:
            return  # termination wins; a storage may forget that there was a time limit too
        if name in ("terminated", "truncated") and not self.case.computes_targets:
            return  # why an episode ended is asked in a test of its own
        found, given = dict(leaves(served)), dict(leaves(sample[name]))
        assert found.keys() == given.keys()
        for path, leaf in given.items():
            one, other = found[path][place].flatten().tolist(), leaf[env].flatten().float().tolist()
            if leaf.dtype is torch.float64:
                other = leaf[env].flatten().tolist() if found[path].dtype is torch.float64 else other
            assert one == other, f"{name}{path} of id {int(ids_in(sample['observations'])[env])}"


def leaves(nest: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(nest, torch.Tensor):
        yield path, nest
        return
    for key, part in enumerate(nest) if isinstance(nest, tuple) else nest.items():
        yield from leaves(part, f"{path}/{key}")


def _step(nest: Any, t: int, steps: int) -> Any:
    """Entry t of each tensor of a nest."""
    if isinstance(nest, torch.Tensor):
        assert nest.shape[:2] == (steps, NUM_ENVS)
        return nest[t]
    if isinstance(nest, tuple):
        return tuple(_step(part, t, steps) for part in nest)
    return {key: _step(part, t, steps) for key, part in nest.items()}


def same_data(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two answers of get_all_buffer_data are equal to the bit."""
    assert one.keys() == other.keys()
    for name in one:
        first, second = dict(leaves(one[name])), dict(leaves(other[name]))
        assert first.keys() == second.keys()
        for path, leaf in first.items():
            assert leaf.dtype is second[path].dtype
            torch.testing.assert_close(
                second[path].cpu(), leaf.cpu(), rtol=0, atol=0, equal_nan=True, msg=f"{name}{path}"
            )


def make(
    case: Case, size: int = SIZE, actor: Any = None, algorithm: Any = None, **options: Any
) -> tuple[Any, RolloutModel]:
    """An empty storage of a class, and the model of what it must do."""
    options = {"gamma": 0.9, "lam": 0.5, "seed": 11, **options}
    storage = case.create_factory(size, **options)(DEVICE, actor, algorithm)
    return storage, RolloutModel(case, size, options["gamma"], options["lam"])


def collect(case: Case, *takers: Any, first: int = 0, steps: int = SIZE) -> None:
    """Insert the steps numbered from ``first`` into storages and models."""
    for step in range(first, first + steps):
        for taker in takers:
            insert = taker.insert if isinstance(taker, RolloutModel) else taker.insert_transition
            insert(case.sample(step, *ENDS[step % len(ENDS)]))
