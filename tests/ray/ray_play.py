"""Steps with a unique id for each (step, environment), and bounds for what is drawn at random."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from rlstore import PrioritizedReplayStorage, ReplayStorage

OBSERVATIONS = Box(-1e9, 1e9, (2,), np.float32)
ACTIONS = Discrete(1 << 30)


def step_of(writer: int, step: int, num_envs: int, *, ends: bool = False) -> dict[str, Any]:
    """A step of a writer's environments. The id is the action and the reward; observations go on from step to step."""
    ids = id_of(writer, step, torch.arange(num_envs))
    return {
        "observations": torch.stack([ids, -ids], 1).float(),
        "actions": ids,
        "rewards": ids.float(),
        "terminated": torch.full((num_envs,), ends),
        "truncated": torch.zeros(num_envs, dtype=torch.bool),
        "next_observations": torch.stack([ids + 100, -ids - 100], 1).float(),
    }


def id_of(writer: int, step: int, env: Any) -> Any:
    """Below 2**24, so that a float32 tells them apart."""
    return 1_000_000 * writer + 100 * step + env + 1


def ids_of(writer: int, steps: int, num_envs: int) -> set[int]:
    return {id_of(writer, step, env) for step in range(steps) for env in range(num_envs)}


def check_batch(batch: Any) -> None:
    """Every part of each row is of the same step."""
    ids = batch["actions"]
    assert torch.equal(batch["rewards"].flatten(), ids.float())
    assert torch.equal(batch["observations"], torch.stack([ids, -ids], 1).float())
    assert torch.equal(batch["next_observations"], torch.stack([ids + 100, -ids - 100], 1).float())


def held_ids(data: dict[str, Any]) -> set[int]:
    """The ids in what get_all_buffer_data() gave."""
    if not data:
        return set()
    ids = data["actions"][data["masks"]].flatten().tolist()
    assert len(ids) == len(set(ids))
    return set(ids)


def prioritized(size: int = 4000, num_envs: int = 4, **arguments: Any) -> Any:
    given: dict[str, Any] = {"alpha": 1.0, "beta": 0.5, **arguments}
    return PrioritizedReplayStorage.create_factory(size // num_envs, OBSERVATIONS, ACTIONS, num_envs, **given)


def uniform(size: int = 4000, num_envs: int = 4, **arguments: Any) -> Any:
    return ReplayStorage.create_factory(size // num_envs, OBSERVATIONS, ACTIONS, num_envs, **arguments)


def until(condition: Any, what: str, seconds: float = 60.0) -> None:
    """Wait for something of which nobody tells."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def chi_square(counts: Any, expected: Any) -> tuple[float, float]:
    """The statistic, and what a right draw exceeds once in ten thousand times (Wilson and Hilferty)."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert expected.min() >= 5
    freedom = len(counts) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), float(bound)
