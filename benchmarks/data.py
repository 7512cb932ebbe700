"""Synthetic rollouts: the same numbers for all contenders, as separate tensors for each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """Sizes of a rollout and of the passes over it."""

    steps: int
    envs: int
    obs: int
    actions: int
    epochs: int
    mini_batches: int
    distribution: bool = False
    hidden: int = 0

    @property
    def rows(self) -> int:
        """Transitions in a rollout."""
        return self.steps * self.envs

    @property
    def batch_size(self) -> int:
        """Transitions in a mini-batch."""
        return self.rows // self.mini_batches


@dataclass(frozen=True)
class Step:
    """The outputs of a network and of all environments in one step.

    ``dones`` are terminations: no episode is truncated, so that all contenders agree on the returns.
    """

    obs: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    values: torch.Tensor
    rewards: torch.Tensor
    dones: torch.Tensor
    distribution: tuple[torch.Tensor, ...]
    hidden: tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Rollout:
    """The steps of a rollout and what follows the last one."""

    shape: Shape
    steps: tuple[Step, ...]
    last_obs: torch.Tensor
    last_values: torch.Tensor


def make_rollout(shape: Shape, episode_length: float = 100.0, seed: int = 0) -> Rollout:
    """Random data of a shape; each step ends an episode with probability ``1 / episode_length``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    def step() -> Step:
        n = shape.envs
        # A state-independent standard deviation is an expanded view, as in torch.distributions.
        deviation = normal(shape.actions).exp().expand(n, shape.actions)
        return Step(
            obs=normal(n, shape.obs),
            actions=normal(n, shape.actions),
            log_probs=normal(n),
            values=normal(n, 1),
            rewards=normal(n),
            dones=torch.rand(n, generator=generator) < 1.0 / episode_length,
            distribution=(normal(n, shape.actions), deviation) if shape.distribution else (),
            hidden=(normal(1, n, shape.hidden), normal(1, n, shape.hidden)) if shape.hidden else (None, None),
        )

    steps = tuple(step() for _ in range(shape.steps))
    return Rollout(shape, steps, last_obs=normal(shape.envs, shape.obs), last_values=normal(shape.envs, 1))
