"""Replay on a GPU: a million vector transitions of thousands of environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from benchmarks.gpu_measure import Group, Work, Works
from benchmarks.replay_buffers import require_tree

ADD, SAMPLE, PRIORITIZED = "add", "sample", "prioritized: sample and update"
FLOAT, FLAG, ROW_ID = 4, 1, 8


@dataclass(frozen=True)
class ReplaySizes:
    """Sizes of the replay; all episodes end every ``episode`` steps."""

    envs: int = 4096
    steps: int = 256
    observations: int = 48
    actions: int = 12
    batch: int = 4096
    episode: int = 64


class ReplayData:
    """Steps that can be repeated in a cycle."""

    def __init__(self, sizes: ReplaySizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        random = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device)

        n = sizes.envs
        seen = [normal(n, sizes.observations) for _ in range(sizes.episode + 1)]
        never = torch.zeros(n, dtype=torch.bool, device=device)
        self.steps = [
            {
                "observations": seen[t],
                "actions": normal(n, sizes.actions),
                "rewards": normal(n),
                "terminated": ~never if t == sizes.episode - 1 else never,
                "truncated": never,
                "next_observations": seen[t + 1],
            }
            for t in range(sizes.episode)
        ]
        self.priorities = normal(sizes.batch).abs() + 1e-3

    def filled(self, storage: Any) -> Callable[[], None]:
        """Fill a storage, and return a function that appends one more step."""
        steps = cycle(self.steps)

        def add() -> None:
            step = next(steps)
            given = (step["observations"], step["actions"], step["rewards"], step["terminated"], step["truncated"])
            storage.add(*given, {}, step["next_observations"])

        for _ in range(self.sizes.steps):
            add()
        return add


def _space(width: int) -> Box:
    return Box(-np.inf, np.inf, (width,), np.float32)


def _ours(data: ReplayData) -> Works:
    from rlstore import PrioritizedReplayStorage, ReplayStorage

    sizes = data.sizes
    shape = (_space(sizes.observations), _space(sizes.actions), data.device, sizes.envs * sizes.steps, sizes.envs)
    uniform, prioritized = ReplayStorage(*shape, sizes.batch), PrioritizedReplayStorage(*shape, sizes.batch)
    add = data.filled(uniform)
    data.filled(prioritized)

    def sample_and_update() -> None:
        batch = prioritized.sample()
        prioritized.update(batch.rows, data.priorities)

    return {ADD: Work(add), SAMPLE: Work(uniform.sample), PRIORITIZED: Work(sample_and_update)}


def _by_hand(data: ReplayData) -> Works:
    """What a program writes that needs no library: a tensor for each field, ``randint`` and ``index_select``."""
    sizes, capacity = data.sizes, data.sizes.envs * data.sizes.steps
    blocks = {
        name: torch.zeros((sizes.steps, *value.shape), dtype=value.dtype, device=data.device)
        for name, value in data.steps[0].items()
    }
    rows = {name: block.flatten(0, 1) for name, block in blocks.items()}
    priorities = torch.ones(capacity, device=data.device)
    steps, times = cycle(data.steps), cycle(range(sizes.steps))

    def add() -> None:
        at = next(times)
        for name, value in next(steps).items():
            blocks[name][at].copy_(value)

    def gather(picked: Tensor) -> dict[str, Tensor]:
        return {name: block.index_select(0, picked) for name, block in rows.items()}

    def sample() -> dict[str, Tensor]:
        return gather(torch.randint(capacity, (sizes.batch,), device=data.device))

    def sample_and_update() -> object:
        sums = priorities.cumsum(0)
        picked = torch.searchsorted(sums, torch.rand(sizes.batch, device=data.device) * sums[-1]).clamp_(
            max=capacity - 1
        )
        weights = priorities.index_select(0, picked).pow(-0.4)
        batch = (gather(picked), weights / weights.max())
        priorities.index_copy_(0, picked, data.priorities.pow(0.6))
        return batch

    for _ in range(sizes.steps):
        add()
    return {ADD: Work(add), SAMPLE: Work(sample), PRIORITIZED: Work(sample_and_update)}


def _torchrl(data: ReplayData) -> Works:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

    require_tree()
    sizes, capacity = data.sizes, data.sizes.envs * data.sizes.steps

    def buffer(kind: Any, **options: Any) -> Any:
        return kind(storage=LazyTensorStorage(capacity, device=data.device), batch_size=sizes.batch, **options)

    uniform = buffer(TensorDictReplayBuffer)
    prioritized = buffer(TensorDictPrioritizedReplayBuffer, alpha=0.6, beta=0.4)
    steps = [TensorDict(step, batch_size=[sizes.envs]) for step in data.steps]
    for t in range(sizes.steps):
        for each in (uniform, prioritized):
            each.extend(steps[t % len(steps)])
    following = cycle(steps)

    def sample_and_update() -> None:
        batch = prioritized.sample()
        prioritized.update_priority(batch["index"], data.priorities)

    return {
        ADD: Work(lambda: uniform.extend(next(following))),
        SAMPLE: Work(uniform.sample),
        PRIORITIZED: Work(sample_and_update),
    }


def replay(sizes: ReplaySizes, device: torch.device) -> Group:
    """Adds of all environments, and batches, uniform and prioritized."""
    data = ReplayData(sizes, device)
    # The next observation of a step is stored once, as the observation of the next step.
    observed, rest = FLOAT * sizes.observations, FLOAT * (sizes.actions + 1) + 2 * FLAG
    served = 2 * observed + FLOAT * (sizes.actions + 2)
    drawn = sizes.batch * (2 * observed + rest + served)
    return Group(
        name="replay",
        title=f"Replay of {sizes.envs * sizes.steps:,} transitions of {sizes.envs} environments, observations "
        f"{sizes.observations}, actions {sizes.actions}, batches of {sizes.batch}",
        floors={
            ADD: sizes.envs * 2 * (observed + rest),
            SAMPLE: drawn,
            # Rows and weights are served; rows and priorities are read, and priorities are written.
            PRIORITIZED: drawn + sizes.batch * (ROW_ID + FLOAT + ROW_ID + 2 * FLOAT),
        },
        contenders={
            "rlstore": partial(_ours, data),
            "torch, by hand": partial(_by_hand, data),
            "TorchRL": partial(_torchrl, data),
        },
    )
