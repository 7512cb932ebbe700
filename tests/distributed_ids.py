"""Rollouts of shared storages in which every number tells its rollout and its row, and the check of what is served.

Row ``t`` of rollout ``r`` has the number ``r * (steps + 1) + t``. Every field is a different function of that number,
so a row that is swapped, doubled, torn or put together from two rollouts cannot pass. Whole numbers below 2**24 are
exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlstore import DistributedStorage

KEYS = (
    "obs",
    "reward",
    "terminated",
    "truncated",
    "episode_return",
    "episode_step",
    "last_action",
    "policy_outputs",
    "baseline",
    "action",
)
ENV_KEYS = ("obs", "reward", "terminated", "truncated", "episode_return", "episode_step", "last_action")
ACTOR_KEYS = ("policy_outputs", "baseline", "action")
APART = 7919  # what sets the elements of a vector apart
IMAGES = spaces.Box(0, 255, (4, 2, 3), np.uint8)
VECTORS = spaces.Box(-np.inf, np.inf, (3,))


@dataclass(frozen=True)
class World:
    """Spaces, and the rollouts that are played in them.

    Attributes:
        observation_space: A Box of uint8 or float32.
        action_space: Discrete, Box, MultiDiscrete or MultiBinary.
        steps: T; a rollout has T + 1 rows.
        state_shapes: (layers, hidden) of each recurrent state.
    """

    observation_space: spaces.Box
    action_space: spaces.Space
    steps: int = 4
    state_shapes: tuple[tuple[int, int], ...] = ()

    def make(self, num_storages: int = 3, **options: Any) -> DistributedStorage:
        given = {"state_shapes": self.state_shapes} if self.state_shapes else {}
        return DistributedStorage(
            self.observation_space,
            self.action_space,
            num_steps=self.steps,
            num_storages=num_storages,
            **{"batch_size": min(num_storages, 2), **given, **options},
        )

    @property
    def action_shape(self) -> tuple[int, ...]:
        return () if isinstance(self.action_space, spaces.Discrete) else tuple(self.action_space.shape)

    @property
    def policy_size(self) -> int:
        """How many numbers describe the policy of one step."""
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return int(space.n)
        if isinstance(space, spaces.MultiDiscrete):
            return int(space.nvec.sum())
        return int(np.prod(space.shape)) * (2 if isinstance(space, spaces.Box) else 1)

    def numbers(self, rollouts: torch.Tensor | list[int]) -> torch.Tensor:
        """The numbers of all rows, int64 ``[T + 1, B]``."""
        first = torch.as_tensor(rollouts, dtype=torch.int64) * (self.steps + 1)
        return first + torch.arange(self.steps + 1).unsqueeze(-1)

    def rows(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every field of rows: numbers of shape S to tensors ``[*S, ...]``."""
        return {
            "obs": self._observe(numbers),
            "reward": numbers.float(),
            "terminated": numbers % 2 == 1,
            "truncated": numbers // 2 % 2 == 1,
            "episode_return": -numbers.float(),
            "episode_step": numbers.int(),
            "last_action": self._act(numbers + 1),
            "policy_outputs": (numbers.unsqueeze(-1) + APART * torch.arange(self.policy_size)).float(),
            "baseline": (numbers + 3).float(),
            "action": self._act(numbers),
        }

    def row(self, rollout: int, step: int) -> dict[str, torch.Tensor]:
        """One row as an actor has it, every field ``[1, 1, ...]``."""
        return self.rows(torch.tensor([[rollout * (self.steps + 1) + step]]))

    def states(self, rollouts: torch.Tensor | list[int]) -> tuple[torch.Tensor, ...]:
        """The recurrent states at the start of rollouts, each ``[layers, B, hidden]``."""
        numbers = torch.as_tensor(rollouts, dtype=torch.float32).view(1, -1, 1)
        return tuple(
            numbers + APART * (place + 1) + 31 * torch.arange(layers).view(-1, 1, 1) + torch.arange(hidden)
            for place, (layers, hidden) in enumerate(self.state_shapes)
        )

    def _observe(self, numbers: torch.Tensor) -> torch.Tensor:
        shape = self.observation_space.shape
        places = torch.arange(int(np.prod(shape)))
        if self.observation_space.dtype == np.uint8:  # the bytes of the number, over and over
            found = numbers.unsqueeze(-1) >> 8 * (places % 3) & 255
            return found.to(torch.uint8).view(*numbers.shape, *shape)
        return (numbers.unsqueeze(-1) - APART * places).float().view(*numbers.shape, *shape)

    def _act(self, numbers: torch.Tensor) -> torch.Tensor:
        space, places = self.action_space, torch.arange(int(np.prod(self.action_shape)))
        if isinstance(space, spaces.Discrete):
            return numbers % int(space.n)
        if isinstance(space, spaces.Box):
            return (numbers.unsqueeze(-1) + 2 * APART * places).float()
        highs = torch.as_tensor(space.nvec) if isinstance(space, spaces.MultiDiscrete) else 2
        return (numbers.unsqueeze(-1) >> places) % highs


DISCRETE = World(IMAGES, spaces.Discrete(6))
BOX = World(VECTORS, spaces.Box(-np.inf, np.inf, (2,)))
WORLDS = {
    "discrete": DISCRETE,
    "box": BOX,
    "multi-discrete": World(VECTORS, spaces.MultiDiscrete([3, 5, 2])),
    "multi-binary": World(IMAGES, spaces.MultiBinary(4)),
    "one step": World(IMAGES, spaces.Discrete(2), steps=1),
}
LSTM = World(IMAGES, spaces.Discrete(6), state_shapes=((2, 5), (2, 5)))


def write(world: World, storages: Any, states: Any, index: int, rollout: int) -> None:
    """What an actor of torchbeast does: every field of every row, ``[1, 1, ...]``, into slot ``index``."""
    for target, value in zip(states[index] if states else (), world.states([rollout]), strict=False):
        target[...] = value
    for step in range(world.steps + 1):
        for key, value in world.row(rollout, step).items():
            storages[key][index][step, ...] = value


def rollouts_in(world: World, batch: Any, states: Any = ()) -> list[int]:
    """The rollouts of a batch, once every row of every field was found to be theirs, in order, and the states too."""
    assert set(batch) == set(KEYS)
    found = batch["episode_step"].long()
    rollouts = (found[0] // (world.steps + 1)).tolist()
    assert torch.equal(found, world.numbers(rollouts))
    for key, expected in world.rows(found).items():
        same(batch[key], expected, key)
    assert isinstance(states, tuple)
    expected_states = world.states(rollouts)
    assert len(states) == len(expected_states)
    for state, expected in zip(states, expected_states, strict=True):
        same(state, expected, "state")
    return rollouts


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert isinstance(found, torch.Tensor), what
    assert (found.dtype, tuple(found.shape)) == (expected.dtype, tuple(expected.shape)), what
    assert torch.equal(found, expected), what


class ListQueue:
    """The least that a queue can be."""

    def __init__(self, items=()):
        self.items = list(items)

    def get(self):
        return self.items.pop(0)

    def put(self, item):
        self.items.append(item)


def copy_of(storage: DistributedStorage) -> list[torch.Tensor]:
    """Everything that the slots hold, as copies."""
    slots = [storage.storages[key][index] for key in KEYS for index in range(storage.num_storages)]
    states = [state for states in storage.init_actor_state_storages for state in states]
    return [tensor.clone() for tensor in (*slots, *states)]


def assert_as_copied(storage: DistributedStorage, before: list[torch.Tensor]) -> None:
    for found, expected in zip(copy_of(storage), before, strict=True):
        assert torch.equal(found, expected)
