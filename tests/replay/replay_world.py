"""Observations made of numbers, and the forms in which they are given: what the replay tests feed to storages.

A token says what an observation is: a tuple of ids, each used once. A kind of observation turns a token into arrays and
arrays back into the token, looking at every entry on the way, so that half a frame of another step cannot pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

Token = tuple[int, ...]
BOX = spaces.Box(-1e9, 1e9, (2,), np.float32)
MANY = 1 << 20
_READ: dict[tuple[Any, ...], dict[bytes, Token]] = {}  # by kind and dtypes, what was read before


def vector(number: int) -> np.ndarray:
    return np.array([number, -number], np.float32)


def digits(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array that tells its number in its first three bytes and confirms it in the others; 0 is all zeros."""
    if number == 0:
        return np.zeros(shape, np.uint8)
    told = (7 * number + np.arange(max(4, np.prod(shape)))) % 256
    told[:4] = number % 256, number // 256 % 256, number // 65536, 255 - number % 256
    return told[: np.prod(shape)].astype(np.uint8).reshape(shape)


class Vector:
    """Two floats. Its token is one id, and so for the kinds below that do not say otherwise."""

    space: spaces.Space[Any] = BOX
    options: Mapping[str, Any] = MappingProxyType({})
    frames = 1

    @property
    def name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        return self.name

    def render(self, token: Token) -> Any:
        """One observation: an array, or a nest of them."""
        return vector(token[0])

    def peek(self, flat: np.ndarray) -> Token:
        """The token that these entries seem to tell."""
        return (int(flat[0]),)

    def start(self, ids: Iterator[int], padding: str = "any") -> Token:
        """The first observation of an episode."""
        return (next(ids),)

    def follow(self, token: Token, ids: Iterator[int]) -> Token:
        """The observation after a token."""
        return (next(ids),)

    def resemble(self, token: Token, ids: Iterator[int]) -> Token:
        """Another observation, as like to this one as can be."""
        return (next(ids),)

    def read(self, nest: Any) -> list[Token]:
        """The tokens of served observations ``[B, ...]``; every entry is looked at."""
        columns = [leaf.reshape(len(leaf), -1).contiguous().numpy() for leaf in leaves_in(nest, self.space)]
        known = _READ.setdefault((self.name, *(column.dtype for column in columns)), {})
        tokens = []
        for row in zip(*columns, strict=True):
            key = b"".join(part.tobytes() for part in row)
            if key not in known:
                known[key] = self.decode(np.concatenate(row, dtype=np.float64))
            tokens.append(known[key])
        return tokens

    def decode(self, flat: np.ndarray) -> Token:
        """The token of an observation whose entries these are, all of them."""
        token = self.peek(flat)
        parts = [np.asarray(part).flatten() for part in leaves_in(self.render(token), self.space)]
        wanted = np.concatenate(parts, dtype=np.float64)
        assert np.array_equal(wanted, flat), f"{flat} is no observation; the nearest is {token}, {wanted}"
        return token


class Number(Vector):
    """A single integer."""

    space = spaces.Discrete(MANY)

    def render(self, token):
        return np.int64(token[0])


class Image(Vector):
    """Four bytes."""

    space = spaces.Box(0, 255, (1, 2, 2), np.uint8)

    def render(self, token):
        return digits(token[0], (1, 2, 2))

    def peek(self, flat):
        return (_number(flat),)


class Nest(Vector):
    """A dict within a dict, of three dtypes."""

    space = spaces.Dict(
        {
            "policy": BOX,
            "camera": spaces.Dict(
                {"image": Image.space, "exposure": spaces.Box(-1e9, 1e9, (), np.float64)},
            ),
        }
    )

    def render(self, token):
        number = token[0]
        return {
            "camera": {
                "image": digits(number, (1, 2, 2)),
                "exposure": np.array(number / 4),
            },
            "policy": vector(number),
        }

    def peek(self, flat):
        return (int(4 * flat[0]),)


class Pair(Vector):
    """A tuple of a vector and a number."""

    space = spaces.Tuple([BOX, spaces.Discrete(MANY)])

    def render(self, token):
        return vector(token[0]), np.int64(token[0])


class Goal(Vector):
    """What goal-conditioned environments show. The token is (observation, achieved goal, desired goal)."""

    space = spaces.Dict(
        {"observation": BOX, "achieved_goal": BOX, "desired_goal": spaces.Box(-1e9, 1e9, (2,), np.float32)}
    )

    def render(self, token):
        observation, achieved, desired = token
        return {
            "observation": vector(observation),
            "achieved_goal": vector(achieved),
            "desired_goal": vector(desired),
        }

    def peek(self, flat):
        return (int(flat[4]), int(flat[0]), int(flat[2]))  # the parts in the order of their names

    def start(self, ids, padding="any"):
        return (next(ids), next(ids), next(ids))

    def follow(self, token, ids):
        return (next(ids), next(ids), token[2])

    def resemble(self, token, ids):
        return (*token[:2], next(ids))


class Stack(Vector):
    """Stacks of frames along an axis; the token names its frames, the oldest first.

    Args:
        frame: The shape of one frame; uint8, or a vector of two floats.
        count: Frames in a stack.
        axis: The axis of the stack.
        told: Whether the axis is told to the storage, or left to its rule.
    """

    def __init__(self, frame: tuple[int, ...], count: int, axis: int, told: bool = False) -> None:
        self.frame, self.frames, self.axis = frame, count, axis
        self.is_bytes = frame != (2,)
        shape = list(frame)
        shape[axis] *= count
        low, high, dtype = (0, 255, np.uint8) if self.is_bytes else (-1e9, 1e9, np.float32)
        self.space = spaces.Box(low, high, tuple(shape), dtype)
        self.options = {"frame_stack": count, **({"stack_axis": axis} if told else {})}

    @property
    def name(self):
        return f"stack of {self.frames} of {self.frame} along {self.axis}"

    def render(self, token):
        frames = [digits(number, self.frame) if self.is_bytes else vector(number) for number in token]
        return np.concatenate(frames, self.axis)

    def peek(self, flat):
        parts = np.split(flat.reshape(self.space.shape), self.frames, self.axis)
        return tuple(_number(part.flatten()) if self.is_bytes else int(part.flatten()[0]) for part in parts)

    def start(self, ids, padding="any"):
        newest = next(ids)
        older = {"repeat": itertools.repeat(newest), "zeros": itertools.repeat(0), "any": ids}[padding]
        return (*itertools.islice(older, self.frames - 1), newest)

    def follow(self, token, ids):
        return (*token[1:], next(ids))

    def resemble(self, token, ids):
        return (next(ids), *token[1:])


def _number(flat: Any) -> int:
    return int(flat[0] + 256 * flat[1] + 65536 * flat[2])


def stack_kind(count: int, form: str) -> Stack:
    """Channels first with one channel or two, channels last, vectors, and an axis in the middle that must be told."""
    if form == "first":
        return Stack((1, 1, 8), count, 0)
    if form == "first of two":
        return Stack((2, 1, 8), count, 0)
    if form == "last":
        return Stack((9, 1, 1), count, -1)
    if form == "last of two":
        return Stack((9, 1, 2), count, -1)
    return Stack((2,), count, 0) if form == "vectors" else Stack((2, 1, 3), count, 1, told=True)


STACK_FORMS = ("first", "first of two", "last", "last of two", "vectors", "middle")
PLAIN_KINDS = (Vector(), Number(), Image(), Nest(), Pair())
# Frames of more than a kilobyte lie apart from the other fields.
LARGE_KINDS = (Stack((1, 5, 300), 1, 0), Stack((1, 5, 300), 2, 0), Stack((1, 5, 300), 4, 0), Stack((700, 1, 2), 3, -1))
STACK_KINDS = tuple(stack_kind(count, form) for count in (1, 2, 3, 4) for form in STACK_FORMS)


class BoxAction:
    """Actions of two floats that tell a number."""

    space = spaces.Box(-1e9, 1e9, (2,), np.float32)

    def render(self, number: int) -> np.ndarray:
        return np.array([number, number / 2], np.float32)

    def read(self, actions: torch.Tensor) -> list[int]:
        assert (actions[:, 1] * 2 == actions[:, 0]).all()
        assert actions.shape[1:] == (2,)
        return actions[:, 0].long().tolist()


class DiscreteAction:
    """The number itself."""

    space = spaces.Discrete(MANY)

    def render(self, number: int) -> np.ndarray:
        return np.int64(number)

    def read(self, actions: torch.Tensor) -> list[int]:
        assert actions.dim() == 1
        return actions.long().tolist()


ACTIONS = (BoxAction(), DiscreteAction())


def leaves_in(nest: Any, space: spaces.Space[Any]) -> list[Any]:
    """The parts of a nest, those of a dict in the order of their names; nothing may be missing or too much."""
    if isinstance(space, spaces.Dict):
        assert set(nest.keys()) == set(space.spaces)
        return [leaf for key in sorted(space.spaces) for leaf in leaves_in(nest[key], space[key])]
    if isinstance(space, spaces.Tuple):
        assert isinstance(nest, tuple)
        return [leaf for part, sub in zip(nest, space.spaces, strict=True) for leaf in leaves_in(part, sub)]
    return [nest]


def stacked(nests: list[Any]) -> Any:
    """One nest of arrays ``[N, ...]`` of the nests of N environments."""
    first = nests[0]
    if isinstance(first, dict):
        return {key: stacked([nest[key] for nest in nests]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([nest[place] for nest in nests]) for place in range(len(first)))
    return np.stack(nests)


def mapped(nest: Any, function: Any) -> Any:
    """The nest with every leaf passed through a function."""
    if isinstance(nest, dict):
        return {key: mapped(part, function) for key, part in nest.items()}
    if isinstance(nest, tuple):
        return tuple(mapped(part, function) for part in nest)
    return function(nest)


FORMS = {
    "tensors": lambda array: torch.from_numpy(np.array(array)),
    "arrays": lambda array: array,
    "lists": lambda array: array.tolist(),
    "strided": lambda array: torch.from_numpy(np.stack([array, array], -1))[..., 0],
}
FINAL_FORMS = ("nothing", "objects", "list", "array", "tensor", "parts")


def as_objects(items: list[Any]) -> np.ndarray:
    """An object array, as gymnasium makes them, with None for those that go on."""
    array = np.empty(len(items), dtype=object)
    for place, item in enumerate(items):
        array[place] = item
    return array


@dataclass
class Given:
    """What one environment gives in one call of add.

    Attributes:
        observation: What the agent saw.
        action: The number that the action tells.
        reward: One number, or several.
        following: What is given for it in ``next_observations``.
        terminated: The flag.
        truncated: The flag.
        final: What is given for it in ``infos``, if anything.
        hidden: The number that its recurrent state tells.
    """

    observation: Token
    action: int
    reward: tuple[float, ...]
    following: Token
    terminated: bool = False
    truncated: bool = False
    final: Token | None = None
    hidden: int = 0

    @property
    def ends(self) -> bool:
        return self.terminated or self.truncated


def reward_of(number: int, size: int = 1) -> tuple[float, ...]:
    """Rewards of eighths, some of them zero or below, so that sums of a few are exact."""
    return tuple(((37 * number) % 61 - 20) / 8 + place for place in range(size))


def final_info(kind: Vector, step: list[Given | None], form: str, key: str, ids: Iterator[int]) -> dict[str, Any]:
    """The infos that bring the final observations of a step, in one of the forms that exist.

    Whole arrays hold something for every environment, and can only be given if every end comes with an observation.
    """
    finals = [None if given is None else given.final for given in step]
    entries = [None if token is None else kind.render(token) for token in finals]
    told = np.array([token is not None for token in finals])
    if form in ("array", "tensor") and all(given is None or given.final or not given.ends for given in step):
        rendered = stacked([kind.render(token or kind.start(ids)) for token in finals])
        return {key: mapped(rendered, FORMS["tensors"]) if form == "tensor" else rendered}
    if form == "nothing" and not told.any():
        return {}
    if form == "parts" and isinstance(kind.space, spaces.Dict):
        return {key: _parts(entries, kind.space), f"_{key}": told}
    if form == "list":
        return {key: entries}
    return {key: as_objects(entries), f"_{key}": told, "final_info": {}, "other": np.zeros(len(step))}


def _parts(entries: list[Any], space: spaces.Dict) -> dict[str, Any]:
    """A dict of object arrays."""
    made = {}
    for key, sub in space.spaces.items():
        column = [None if entry is None else entry[key] for entry in entries]
        made[key] = _parts(column, sub) if isinstance(sub, spaces.Dict) else as_objects(column)
    return made
