"""Bytes per transition: the growth of a process when a buffer is created and filled, divided by its transitions.

This counts everything that a buffer allocates: trees, tables, flags and the overhead of the allocator. Each buffer has
a separate process, in which a smaller one of the same kind is created first, so that imports and compiled code are not
counted.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import replay_nstep_pixels, replay_pixels, replay_vector
from benchmarks.harness import Role, alone
from benchmarks.replay_buffers import Buffer

SMALLER = 20


@dataclass(frozen=True)
class Kind:
    """A kind of transition, the buffers that hold it, and the target for our bytes per transition."""

    name: str
    title: str
    buffers: Mapping[str, Callable[[int], Buffer]]
    capacity: int
    at_most: int


@dataclass(frozen=True)
class Footprint:
    """Bytes per transition of one buffer."""

    buffer: str
    role: Role
    size: float


@dataclass
class Footprints:
    """The footprints of all buffers of one kind."""

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
        Kind("vector", "17 and 6 numbers", vector, 500_000, 110),
        Kind("pixels", "stacks of 4 frames of 84 x 84", replay_pixels.BUFFERS, replay_pixels.CAPACITY, 7_400),
        Kind("nstep_pixels", "3 RGB frames of 84 x 84, three-step", replay_nstep_pixels.BUFFERS, 6_000, 22_000),
    )


def measure(kind: Kind) -> Footprints:
    """Measure the buffers of a kind, one after the other."""
    result = Footprints(kind.name, kind.title, kind.capacity, kind.at_most)
    for name, make in kind.buffers.items():
        try:
            result.sizes.append(alone(_size, name, make, kind.capacity))
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
    """The resident bytes of this process, after freed memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
