"""The same steps for Stable-Baselines3's buffers and ours, every observation unlike any other, and what they serve."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

NUMBERS = 4096  # observations and actions are coded from numbers below


def coded(space: spaces.Space, number: int) -> Any:
    """A value of the space that tells the number."""
    if isinstance(space, spaces.Dict):
        return {key: coded(part, number) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return space.start + number % space.n
    if isinstance(space, spaces.MultiDiscrete):
        return np.array([number // 64, number % 64]) % space.nvec
    if isinstance(space, spaces.MultiBinary):
        return np.array([number >> place & 1 for place in range(space.n)], dtype=space.dtype)
    if space.dtype == np.uint8:
        return np.resize(np.array([number // 256, number % 256], dtype=np.uint8), space.shape)
    return (number + np.arange(np.prod(space.shape)).reshape(space.shape) / 8).astype(space.dtype)


def stacked(space: spaces.Space, numbers: list[int]) -> Any:
    values = [coded(space, number) for number in numbers]
    return (
        {key: np.stack([v[key] for v in values]) for key in space.spaces}
        if isinstance(space, spaces.Dict)
        else np.stack(values)
    )


def steps(
    observation_space: spaces.Space, action_space: spaces.Space, n_envs: int, count: int
) -> list[tuple[Any, ...]]:
    """The arguments of ``add`` of a replay buffer: episodes of four steps, of which every second one is truncated."""
    made = []
    for step in range(count):
        numbers = [step * n_envs + env for env in range(n_envs)]
        ended = np.array([(step + env) % 4 == 3 for env in range(n_envs)])
        truncated = [(step + env) % 8 == 7 for env in range(n_envs)]
        # Ids of final observations are odd.
        following = [
            2 * number + 1 if end else 2 * (number + n_envs) for number, end in zip(numbers, ended, strict=True)
        ]
        made.append(
            (
                stacked(observation_space, [2 * number for number in numbers]),
                stacked(observation_space, following),
                stacked(action_space, numbers),
                np.array(numbers, dtype=np.float32) / 8,
                ended,
                [{"TimeLimit.truncated": True} if cut else {} for cut in truncated],
            )
        )
    return made


def add_all(buffer: Any, made: list[tuple[Any, ...]]) -> None:
    for step in made:
        buffer.add(*copy.deepcopy(step))  # one of theirs changes what it is given


def leaves(samples: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch by name, without importance weights."""
    found = {}
    for name, value in samples._asdict().items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        found.update({f"{name} {key}": part for key, part in parts if part is not None})
    return found


def forms(samples: Any) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in leaves(samples).items()}


def rows(samples: Any) -> dict[Any, dict[str, Any]]:
    """By observation everything that a batch says of it, which must be the same every time."""
    named = {name: tensor.tolist() for name, tensor in leaves(samples).items()}
    found: dict[Any, dict[str, Any]] = {}
    for place in range(len(samples.actions)):
        row = {name: values[place] for name, values in named.items()}
        key = str([value for name, value in row.items() if name.startswith("observations")])
        assert found.setdefault(key, row) == row
    return found
