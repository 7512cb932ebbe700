"""What a contender that serves replay is told to do. Only numpy is imported: Reverb has an environment of its own.

A contender is a process that has two writers and one learner in processes of their own, or is the learner itself. It
reads orders, one JSON object a line, and answers each with the rows that went in and out. An order names the time of
the monotonic clock from which rows count and the time at which everybody stops.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BATCH = 256
WRITERS = 2
EPISODE = 64
_ANSWER = "rows: "


@dataclass(frozen=True)
class Work:
    """What a row is, how many are held, and whether they are drawn by priority."""

    shape: tuple[int, ...]
    dtype: str
    actions: int
    capacity: int
    by_priority: bool = False


WORKS = {
    "vectors": Work((17,), "float32", 6, 20_000),
    "priority": Work((17,), "float32", 6, 20_000, by_priority=True),
    "pixels": Work((4, 84, 84), "uint8", 1, 4_000),
}


class Order(NamedTuple):
    """Work to do.

    Attributes:
        work: A name in ``WORKS``.
        learns: Whether the learner draws meanwhile.
        start: When rows begin to count.
        stop: When everybody stops.
        writer: The kind of writer, where a contender has several.
    """

    work: str
    learns: bool
    start: float
    stop: float
    writer: str = ""


class Rows(NamedTuple):
    """Rows that were added and rows that were drawn."""

    added: int
    drawn: int


class Step(NamedTuple):
    """One step of one environment."""

    observation: Array
    action: Array
    reward: np.float32
    ends: bool
    next_observation: Array


def episode(work: Work) -> list[Step]:
    """An episode that can be repeated; pixels are stacks of the last four frames of a simple game."""
    random = np.random.default_rng(0)
    if work.dtype == "uint8":
        frames = _frames(random)
        observations = [frames[t : t + 4] for t in range(EPISODE + 1)]
        actions = random.integers(0, 18, (EPISODE, 1))
    else:
        observations = list(random.normal(size=(EPISODE + 1, *work.shape)).astype(work.dtype))
        actions = random.normal(size=(EPISODE, work.actions)).astype(np.float32)
    return [
        Step(observations[t].copy(), actions[t].copy(), np.float32(t), t == EPISODE - 1, observations[t + 1].copy())
        for t in range(EPISODE)
    ]


def _frames(random: np.random.Generator) -> Array:
    """Frames of a square that moves over a background of stripes: Reverb compresses what it is sent."""
    stripes = np.repeat(random.integers(0, 256, 21, dtype=np.uint8), 4)
    frames: Array = np.tile(stripes, (EPISODE + 4, 84, 1))
    for t, frame in enumerate(frames):
        frame[t : t + 12, t : t + 12] = random.integers(0, 256, (12, 12))
    return frames


def repeat(do: Callable[[], int], order: Order) -> int:
    """Call ``do``, which returns how many rows it moved, until the end of an order; the rows since its start."""
    rows = 0
    while (now := monotonic()) < order.stop:
        moved = do()
        rows += moved if now >= order.start else 0
    return rows


def obey(work: Callable[[Order], Rows]) -> None:
    """Carry out orders until there are no more."""
    print(_ANSWER, flush=True)
    for line in sys.stdin:
        print(_ANSWER + json.dumps(work(Order(**json.loads(line)))), flush=True)


def answer(line: str) -> Rows | None:
    """What a line of a contender says: None if it is something else that it prints."""
    if not line.startswith(_ANSWER):
        return None
    return Rows(*json.loads(line.removeprefix(_ANSWER).strip() or "[0, 0]"))
