"""How a storage of the state machines is made, and how its batches are read and compared with the model's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from replay_model import Transition
from replay_world import ACTIONS, LARGE_KINDS, PLAIN_KINDS, STACK_KINDS, Vector

ENVS = 3


@dataclass(frozen=True)
class Config:
    """How a storage is made; ``options`` are the arguments of its class alone."""

    kind: Vector = PLAIN_KINDS[0]
    action: Any = ACTIONS[0]
    num_envs: int = 1
    capacity: int = 4
    spare: int = 0
    n_step: int = 1
    discount: float = 0.5
    autoreset: Any = None
    reward_size: int = 0
    batch_size: int = 3
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The arguments of every replay storage."""
        return {
            "observation_space": self.kind.space,
            "action_space": self.action.space,
            "storage_size": self.capacity * self.num_envs + self.spare % self.num_envs,
            "num_envs": self.num_envs,
            "batch_size": self.batch_size,
            "autoreset": self.autoreset,
            "seed": self.seed,
            **({"reward_shape": (self.reward_size,)} if self.reward_size else {}),
            **self.kind.options,
            **self.options,
        }


@st.composite
def configs(draw, kinds=None, largest=12, **options):
    """Any small storage; ``options`` are strategies."""
    every_kind = [st.sampled_from(some) for some in (PLAIN_KINDS, STACK_KINDS, LARGE_KINDS)]
    kinds = st.one_of(every_kind) if kinds is None else kinds
    capacity = draw(st.integers(1, largest))
    return Config(
        kind=draw(kinds),
        action=draw(st.sampled_from(ACTIONS)),
        num_envs=draw(st.integers(1, ENVS)),
        capacity=capacity,
        spare=draw(st.integers(0, 2)),
        n_step=min(draw(st.integers(1, 4)), capacity),
        discount=draw(st.sampled_from([0.5, 0.9, 1.0, 0.0])),
        autoreset=draw(st.sampled_from([None, None, "NextStep", "SameStep", "Disabled"])),
        reward_size=draw(st.sampled_from([0, 0, 1, 2])),
        batch_size=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 99)),
        options={name: draw(strategy) for name, strategy in options.items()},
    )


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)


def read_batch(config: Config, batch: Any, size: int) -> list[Transition]:
    """What was served, as transitions; the rows are -1 where the batch does not name them."""
    get = batch.get if isinstance(batch, dict) else lambda name: getattr(batch, name, None)
    rewards, discounts = get("rewards"), get("discounts")
    assert tuple(rewards.shape) == (size, config.reward_size or 1)
    assert tuple(discounts.shape) == (size, 1)
    rows = [-1] * size if get("rows") is None else get("rows").tolist()
    columns = (
        rows,
        config.kind.read(get("observations")),
        config.action.read(get("actions")),
        [tuple(reward) for reward in rewards.tolist()],
        discounts.flatten().tolist(),
        config.kind.read(get("next_observations")),
    )
    assert all(len(column) == size for column in columns)
    return [Transition(*served) for served in zip(*columns, strict=True)]


def match(served: list[Transition], expected: list[Transition]) -> set[int]:
    """Every transition served is one of those expected; returns the places of those that were served.

    Steps that were put in twice, by a slice, may be alike: one that is served stands for all that are.
    """
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, wanted in enumerate(expected):
        places.setdefault((wanted.observation, wanted.action, wanted.following), []).append(place)
    seen: set[int] = set()
    for one in served:
        key = (one.observation, one.action, one.following)
        assert key in places, f"{one} is none of {expected}"
        fits = [
            place
            for place in places[key]
            if one.row in (-1, expected[place].row)
            and close(one.discount, expected[place].discount)
            and all(map(close, one.reward, expected[place].reward))
        ]
        assert fits, f"{one} is not as in {[expected[place] for place in places[key]]}"
        seen.update(fits)
    return seen


def flattened(nest: Any, space: Any) -> Any:
    """The first two axes of every leaf made one."""
    return each_leaf(nest, space, lambda leaf: leaf.flatten(0, 1))


def each_leaf(nest: Any, space: Any, function: Any) -> Any:
    """The nest with every leaf passed through a function."""
    if hasattr(space, "spaces"):
        if isinstance(space.spaces, dict):
            return {key: each_leaf(nest[key], part, function) for key, part in space.spaces.items()}
        return tuple(each_leaf(part, sub, function) for part, sub in zip(nest, space.spaces, strict=True))
    return function(nest)


def same_nest(one: Any, other: Any) -> bool:
    """Two nests of tensors are equal to the bit, dtypes included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_nest, one, other))
    if one is None:
        return other is None
    return set(one.keys()) == set(other.keys()) and all(same_nest(part, other[key]) for key, part in one.items())
