"""A game that every replay storage can follow, for comparing its batches between devices and between kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

ENVS, STEPS, STACK = 3, 70, 3
VECTOR = spaces.Box(-np.inf, np.inf, (2,))
FRAMES = spaces.Box(0, 255, (2 * STACK, 2, 3), np.uint8)
BOTH = spaces.Dict({"frames": FRAMES, "more": spaces.Box(0, 255, (STACK,), np.int16)})
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), VECTOR))
MOVES = spaces.Discrete(5)


def distance(achieved: torch.Tensor, desired: torch.Tensor, info: dict[str, Any]) -> torch.Tensor:
    return -(achieved - desired).abs().sum(-1)


# What makes each storage, its observation space first; powers of 1 are exact everywhere.
STORAGES: dict[str, tuple[spaces.Space, Callable[..., Any]]] = {
    "uniform": (VECTOR, ReplayStorage),
    "n-step": (VECTOR, lambda *a, **k: ReplayStorage(*a, n_step=4, discount=0.9, reward_shape=(2,), **k)),
    "frame stacks": (BOTH, lambda *a, **k: ReplayStorage(*a, n_step=2, frame_stack=STACK, dtype=torch.float32, **k)),
    "prioritized": (VECTOR, lambda *a, **k: PrioritizedReplayStorage(*a, n_step=2, alpha=1.0, beta_steps=20, **k)),
    "sequences": (
        VECTOR,
        lambda *a, **k: SequenceReplayStorage(*a, sequence_length=3, burn_in=1, overlap=1, hidden_shape=(2, 4), **k),
    ),
    "sequences by priority": (VECTOR, lambda *a, **k: SequenceReplayStorage(*a, sequence_length=4, alpha=1.0, **k)),
    "sequences across episodes": (
        BOTH,
        lambda *a, **k: SequenceReplayStorage(*a, sequence_length=5, across_episodes=True, frame_stack=STACK, **k),
    ),
    "hindsight": (GOALS, lambda *a, **k: HindsightReplayStorage(*a, compute_reward=distance, **k)),
    "hindsight, whole episodes": (
        GOALS,
        lambda *a, **k: HindsightReplayStorage(*a, compute_reward=distance, strategy="episode", **k),
    ),
    "in RAM, prepared ahead": (VECTOR, lambda *a, **k: NStepReplayStorage(*a, num_workers=2, fetch_every=3, **k)),
}


def make(name: str, device: str) -> Any:
    space, storage = STORAGES[name]
    return storage(space, MOVES, device, storage_size=20 * ENVS, num_envs=ENVS, batch_size=16, seed=11)


def play(name: str, storage: Any) -> list[list[torch.Tensor]]:
    """The tensors of every batch, on the CPU, while the storage fills, wraps and is emptied once.

    Environments end in both ways, with final observations and without, sit out, and jump; the storage warns of that.
    """
    random, batches = np.random.default_rng(5), []
    space, _ = STORAGES[name]
    observations = [_start(space, random) for _ in range(ENVS)]
    for step in range(STEPS):
        if step == 45:
            storage.reset()
        mask, jumps = random.random(ENVS) < 0.9, random.random(ENVS) < 0.03
        observations = [_start(space, random) if jump else o for jump, o in zip(jumps, observations, strict=True)]
        following = [_after(space, o, random) for o in observations]
        terminated, truncated = random.random((2, ENVS)) < 0.1
        ended, finals = (terminated | truncated) & mask, np.full(ENVS, None)
        shown = list(following)
        if random.random() < 0.7:  # the new episode begins with the step that ended the old one
            for env in np.flatnonzero(ended):
                finals[env], shown[env] = following[env], _start(space, random)
        infos = {} if all(final is None for final in finals) else {"final_obs": list(finals)}
        given = {"mask": mask}
        if getattr(storage, "hidden_shape", None):
            given["hidden_states"] = torch.from_numpy(random.normal(size=(2, ENVS, 4))).float()
        rewards = random.normal(size=(ENVS, *((2,) if name == "n-step" else ()))).astype(np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            storage.add(
                _stack(observations),
                random.integers(5, size=ENVS),
                rewards,
                terminated,
                truncated,
                infos,
                _stack(shown),
                **given,
            )
        # An environment that ended and sat out is taken up where it was left.
        observations = [
            s if m else o
            for s, o, m in zip(_restarted(space, shown, ended, finals, random), observations, mask, strict=True)
        ]
        if len(storage) > 30:
            batches.append(_learn(storage, random))
    return batches


def _learn(storage: Any, random: np.random.Generator) -> list[torch.Tensor]:
    batch = storage.sample()
    if getattr(storage, "alpha", 0) > 0:
        storage.update(batch.rows, torch.from_numpy(random.exponential(size=16)))
    return flat(batch)


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a nest, on the CPU."""
    if isinstance(value, torch.Tensor):
        return [value.cpu()]
    parts = value.values() if isinstance(value, (dict, TensorDictBase)) else value
    return [] if value is None else [tensor for part in parts for tensor in flat(part)]


def _start(space: spaces.Space, random: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _start(part, random) for key, part in space.items()}
    if space.dtype == np.float32:
        return random.normal(size=space.shape).astype(np.float32)
    frame = random.integers(1, 255, size=(space.shape[0] // STACK, *space.shape[1:]))
    padding = random.integers(3)  # repeated, zeros, or anything
    older = [frame, np.zeros_like(frame), frame + 1][padding]
    return np.concatenate([older] * (STACK - 1) + [frame]).astype(space.dtype)


def _after(space: spaces.Space, observation: Any, random: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _after(part, observation[key], random) for key, part in space.items()}
    if space.dtype == np.float32:
        return random.normal(size=space.shape).astype(np.float32)
    size = space.shape[0] // STACK
    frame = random.integers(255, size=(size, *space.shape[1:])).astype(space.dtype)
    return np.concatenate([observation[size:], frame])


def _restarted(
    space: spaces.Space, shown: list, ended: np.ndarray, finals: np.ndarray, random: np.random.Generator
) -> list:
    """What each environment shows next: where it ended without a final observation, it begins anew."""
    anew = [end and final is None for end, final in zip(ended, finals, strict=True)]
    return [_start(space, random) if new else s for new, s in zip(anew, shown, strict=True)]


def _stack(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: np.stack([o[key] for o in observations]) for key in observations[0]}
    return np.stack(observations)
