"""Bytes a transition: by how much a process grows when a buffer is made and filled, over the transitions that it holds.

That counts all that a buffer really takes: trees, tables, flags and what the allocator adds. Each buffer has a process
of its own, in which a smaller one of the same kind was made first, so that what it imports and compiles is not counted.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import replay_nstep_pixels, replay_pixels, replay_vector
from benchmarks.harness import Role
from benchmarks.replay_buffers import Buffer

SMALLER = 20


@dataclass(frozen=True)
class Kind:
    """A kind of transitions, the buffers that hold them, and how many bytes ours may take for each."""

    name: str
    title: str
    buffers: Mapping[str, Callable[[int], Buffer]]
    capacity: int
    at_most: int


@dataclass(frozen=True)
class Footprint:
    """Bytes a transition of one buffer."""

    buffer: str
    role: Role
    size: float


@dataclass
class Footprints:
    """What the buffers of one kind take."""

    kind: str
    title: str
    capacity: int
    at_most: int
    sizes: list[Footprint] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def kinds() -> tuple[Kind, ...]:
    makers = replay_vector.BUFFERS.items()
    vector = {name: partial(make, replay_vector.source()) for name, make in makers if "," not in name}
    return (
        Kind("vector", "17 and 6 numbers", vector, replay_vector.CAPACITY, 110),
        Kind("pixels", "stacks of 4 frames of 84 x 84", replay_pixels.BUFFERS, replay_pixels.CAPACITY, 7_400),
        Kind(
            "nstep_pixels",
            "stacks of 3 RGB frames of 84 x 84, three-step",
            replay_nstep_pixels.BUFFERS,
            replay_nstep_pixels.CAPACITY,
            22_000,
        ),
    )


def measure(kind: Kind) -> Footprints:
    """Measure the buffers of a kind, one after the other."""
    result = Footprints(kind.name, kind.title, kind.capacity, kind.at_most)
    for name, make in kind.buffers.items():
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                result.sizes.append(pool.submit(_size, name, make, kind.capacity).result())
            except ImportError as error:
                result.missing[name] = f"{type(error).__name__}: {error}"
    return result


def _size(name: str, make: Callable[[int], Buffer], capacity: int) -> Footprint:
    _made(make, capacity // SMALLER).close()
    before = _resident()
    buffer = _made(make, capacity)
    grown = _resident() - before
    buffer.close()
    return Footprint(name, buffer.role, grown / capacity)


def _made(make: Callable[[int], Buffer], capacity: int) -> Buffer:
    buffer = make(capacity)
    buffer.fill()
    return buffer


def _resident() -> int:
    """Bytes of this process that lie in memory, without what is free in it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
