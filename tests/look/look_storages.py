"""Storages to look at, of which everything is known: each step of each environment has an id."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import rlstore

ENVS = 2
# Of each environment how long its episodes are, and how each ends: terminated, truncated; None is broken off.
PLAN = [[(3, "terminated"), (5, None), (4, "truncated")], [(6, "terminated"), (2, "both"), (4, "open")]]
STEPS = 12
NAMES = gym.spaces.Dict(
    {"</script><b>state": gym.spaces.Box(-np.inf, np.inf, (3,)), "camera": gym.spaces.Box(0, 255, (2, 9, 8), np.uint8)}
)


def step_id(env: int, step: int) -> float:
    """The id of a step; that of a final observation is half a unit more than that of the step before."""
    return 100.0 * env + step


def state_of(number: float) -> Any:
    """An observation that carries an id."""
    state = np.array([number, -number, number / 2], np.float32)
    camera = np.stack([np.full((9, 8), number % 50, np.uint8), np.full((9, 8), number % 50 + 1, np.uint8)])
    return {"</script><b>state": state, "camera": camera}


def stacked(parts: list[Any]) -> Any:
    """Observations of all environments."""
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def episodes_planned() -> list[dict[str, Any]]:
    """All episodes, oldest first: the environment, the steps, how they end."""
    found = []
    for env, plan in enumerate(PLAN):
        step = 0
        for length, end in plan:
            found.append({"env": env, "steps": list(range(step, step + length)), "end": end})
            step += length
    return sorted(found, key=lambda episode: (episode["steps"][0], episode["env"]))


def filled(kind: type[Any] = rlstore.ReplayStorage, **more: Any) -> Any:
    """A storage with the planned episodes: rewards are a hundredth of ids, costs are negative ids."""
    arguments = {"storage_size": 40, "num_envs": ENVS, "extra_fields": {"costs": ((), torch.float32)}, **more}
    storage = kind(NAMES, gym.spaces.Discrete(4), autoreset="SameStep", **arguments)
    ends = [{sum(length for length, _ in plan[: i + 1]) - 1: end for i, (_, end) in enumerate(plan)} for plan in PLAN]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*observations")  # of the episode that is broken off
        _add_steps(storage, ends)
    return storage


def _add_steps(storage: Any, ends: list[dict[int, Any]]) -> None:
    for step in range(STEPS):
        now = [ends[env].get(step, "open") for env in range(ENVS)]
        finals = [step_id(env, step) + (1 if now[env] == "open" else 0.5) for env in range(ENVS)]
        storage.add(
            stacked([state_of(step_id(env, step)) for env in range(ENVS)]),
            [(step + env) % 4 for env in range(ENVS)],
            [step_id(env, step) / 100 for env in range(ENVS)],
            [end in ("terminated", "both") for end in now],
            [end in ("truncated", "both") for end in now],
            {},
            stacked([state_of(number) for number in finals]),
            costs=[-step_id(env, step) for env in range(ENVS)],
        )
