"""Windows of a ring in Triton: each lane's queue of where they begin follows what is written in one launch.

A program follows a block of lanes, one row of each after another. Where windows have priorities, the leaf of a window
that is dropped becomes 0, and that of a new one the largest there was before.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.cuda.draws import below, lane_of, move_on
from rlstore.kernels.cuda.launch import Launcher, next_power_of_2
from rlstore.kernels.cuda.memory import place_of
from rlstore.kernels.cuda.ring import EpisodeRing
from rlstore.kernels.ring_memory import WindowQueues

_LANES, _SUMMARY, _DRAWN = 64, 1024, 128  # lanes that a program follows, lanes counted at once, windows drawn
_FAR = tl.constexpr(2**62)


@triton.jit
def _completes(taken, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """True if a window ends with the last of so many rows of an episode."""
    return (taken >= LENGTH) & ((tl.maximum(taken, LENGTH) - LENGTH) % STRIDE == 0)


@triton.jit
def _push(queue, leaves, first, lane, tail, start, which, oldest, STEPS: tl.constexpr, HAS_LEAVES: tl.constexpr):
    """One more window, where ``which`` says so and its first row is held."""
    which = which & (start >= oldest)
    tl.store(queue + lane * STEPS + tail % STEPS, start, mask=which)
    if HAS_LEAVES:
        tl.store(leaves + lane * STEPS + tl.maximum(start, 0) % STEPS, first + lane.to(tl.float32) * 0.0, mask=which)
    return tail + which.to(tl.int64)


@triton.jit
def follow_rows(
    queue, heads, tails, seen, opened, written, begun, episode_of, episodes, leaves, largest, ends, total, ticket,
    LANES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    ACROSS: tl.constexpr, HAS_LEAVES: tl.constexpr, PLACES: tl.constexpr, EPISODE_OF: tl.constexpr,
    COUNTERS: tl.constexpr, BLOCK: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """Follow what was written since; and by the last program, how many windows there are up to each lane.

    ``PLACES`` says where heads, tails, rows seen and open episodes begin in their memory.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = lane < LANES
    head = tl.load(heads + PLACES[0] + lane, mask=there, other=0)
    tail = tl.load(tails + PLACES[1] + lane, mask=there, other=0)
    saw = tl.load(seen + PLACES[2] + lane, mask=there, other=0)
    open_since = tl.load(opened + PLACES[3] + lane, mask=there, other=0)
    count = tl.load(written + COUNTERS[0] + lane, mask=there, other=0)
    begin = tl.load(begun + COUNTERS[1] + lane, mask=there, other=0)
    first = tl.load(largest).to(tl.float32)
    first = tl.where(first > 0.0, first, 1.0)
    oldest = tl.maximum(begin, count - STEPS)
    # Where more was written than is held, all that was known is dropped.
    restarts = there & (saw < oldest)
    limit = tl.where(restarts, _FAR, oldest)
    follows = there & (restarts | (saw < count))
    more = tl.max(follows.to(tl.int32), 0)
    while more > 0:
        known = follows & (head < tail)
        start = tl.load(queue + lane * STEPS + head % STEPS, mask=known, other=0)
        gone = known & (start < limit)
        if HAS_LEAVES:
            tl.store(leaves + lane * STEPS + start % STEPS, lane.to(tl.float32) * 0.0, mask=gone)
        head += gone.to(tl.int64)
        more = tl.max(gone.to(tl.int32), 0)
    tl.debug_barrier()
    open_since = tl.where(restarts, 0, open_since)
    saw = tl.where(restarts, oldest, saw)
    while tl.max(count - saw, 0) > 0:
        new = there & (saw < count)
        stop = saw + 1
        if ACROSS:
            tail = _push(queue, leaves, first, lane, tail, stop - LENGTH,
                         new & _completes(stop - begin, LENGTH, STRIDE), oldest, STEPS, HAS_LEAVES)  # fmt: skip
        else:
            row = EPISODE_OF[0] + lane * EPISODE_OF[1] + (saw % ROWS) * EPISODE_OF[2]
            episode = tl.load(episode_of + row, mask=new, other=0).to(tl.int64)
            start = tl.load(episodes + episode * 4, mask=new, other=0)
            end = tl.load(episodes + episode * 4 + 1, mask=new, other=-1)
            # The episode that was open may have been broken off before this row.
            before = open_since - 1
            broken = new & (before >= 0) & (before != start) & (_completes(saw - before, LENGTH, STRIDE) == 0)
            tail = _push(queue, leaves, first, lane, tail, tl.maximum(before, saw - LENGTH), broken, oldest, STEPS,
                         HAS_LEAVES)  # fmt: skip
            whole = _completes(stop - start, LENGTH, STRIDE)
            tail = _push(queue, leaves, first, lane, tail, stop - LENGTH, new & whole, oldest, STEPS, HAS_LEAVES)
            over = new & (end == stop)
            tail = _push(queue, leaves, first, lane, tail, tl.maximum(start, stop - LENGTH), over & (whole == 0),
                         oldest, STEPS, HAS_LEAVES)  # fmt: skip
            open_since = tl.where(new, tl.where(over, 0, start + 1), open_since)
        saw += new.to(tl.int64)
    tl.store(heads + PLACES[0] + lane, head, mask=there)
    tl.store(tails + PLACES[1] + lane, tail, mask=there)
    tl.store(seen + PLACES[2] + lane, saw, mask=there)
    tl.store(opened + PLACES[3] + lane, open_since, mask=there)
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        _count(heads, tails, ends, total, PLACES, LANES, SUMMARY)
        tl.store(ticket, 0)


@triton.jit
def _count(heads, tails, ends, total, PLACES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    windows = tl.load(heads + PLACES[0], cache_modifier=".cg") * 0
    for c in range(0, LANES, BLOCK):
        lane = c + tl.arange(0, BLOCK)
        there = lane < LANES
        head = tl.load(heads + PLACES[0] + lane, mask=there, other=0, cache_modifier=".cg")
        tail = tl.load(tails + PLACES[1] + lane, mask=there, other=0, cache_modifier=".cg")
        tl.store(ends + lane, windows + tl.cumsum(tail - head, 0), mask=there)
        windows += tl.sum(tail - head, 0)
    tl.store(total, windows)


@triton.jit
def count_windows(heads, tails, ends, total, PLACES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """How many windows there are up to each lane, by one program."""
    _count(heads, tails, ends, total, PLACES, LANES, BLOCK)


@triton.jit(do_not_specialize=["count"])
def draw_windows(
    rows, generator, queue, heads, ends, total, ticket, count: tl.int64,
    PLACES: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill ``rows`` with the first rows of windows drawn uniformly; -1 if there is none."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    made = tl.load(generator + 1) + count
    windows = tl.load(total)
    drawn = below(generator, number, windows)
    lane, before = lane_of(drawn, windows, ends, LANES)
    place = tl.load(heads + PLACES[0] + lane) + drawn - before
    row = tl.load(queue + lane * STEPS + place % STEPS) * LANES + lane
    tl.store(rows + number, tl.where(windows > 0, row, -1), mask=number < count)
    move_on(generator + 1, ticket, made)


class WindowIndex(WindowQueues):
    """Windows of a ring, followed and drawn from without waiting for the device."""

    def __init__(self, ring: EpisodeRing, length: int, stride: int, across: bool, memory: tuple[Tensor, ...]) -> None:
        super().__init__(ring, length, stride, across, memory)
        self._device_ring, device = ring, ring.device
        self._queue = memory[0]
        places = [place_of(counter) for counter in memory[1:]]
        self._counters = tuple(place.memory for place in places)
        with torch.inference_mode(False):
            self._ends = torch.zeros(ring.lanes, dtype=torch.int64, device=device)
            self._total = torch.zeros(1, dtype=torch.int64, device=device)
            self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
            self._largest = torch.zeros(1, dtype=torch.float32, device=device)
        self._leaves: Tensor | None = None
        self._places = tuple(place.offset for place in places)
        self._block, self._summary = (
            min(next_power_of_2(ring.lanes), _LANES),
            min(next_power_of_2(ring.lanes), _SUMMARY),
        )
        self._draw = Launcher(draw_windows, (self._places, ring.lanes, ring.steps, _DRAWN))
        self._recount = Launcher(count_windows, (self._places, ring.lanes, self._summary))
        self._follow = self._follower()
        self._count_lanes()  # a copy of an index has some from the beginning

    def _follower(self) -> Launcher:
        ring = self._device_ring
        constants = (
            *(ring.lanes, ring.steps, ring.rows, self._length, self._stride, self._across, self._leaves is not None),
            self._places,
            (ring.episode_place.offset, *ring.episode_place.strides),
            tuple(place.offset for place in ring.counter_places),
            *(self._block, self._summary),
        )
        return Launcher(follow_rows, constants)

    def keep_priorities(self, leaves: Tensor) -> None:
        """Windows have priorities, which :meth:`follow` sets."""
        self._leaves = leaves
        self._follow = self._follower()

    def follow(self) -> None:
        """Add and drop windows for what was written since."""
        ring = self._device_ring
        if self._leaves is not None:
            torch.amax(self._leaves, 0, keepdim=True, out=self._largest)
        self._follow(
            (-(-ring.lanes // self._block), 1, 1),
            ring.device,
            self._queue,
            *self._counters,
            ring.counter_places[0].memory,
            ring.counter_places[1].memory,
            ring.episode_place.memory,
            ring.episodes,
            self._largest if self._leaves is None else self._leaves,
            self._largest,
            self._ends,
            self._total,
            self._ticket,
        )

    def rebuild(self) -> None:
        """Index all rows that are held, all at once."""
        super().rebuild()
        self._count_lanes()

    def _count_lanes(self) -> None:
        self._recount((1, 1, 1), self._device_ring.device, *self._counters[:2], self._ends, self._total)

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows`` with the first rows of windows, each as likely as any other."""
        ring, count = self._device_ring, rows.numel()
        ring.check_generator(generator)
        grid = (-(-count // _DRAWN), 1, 1)
        index = (self._queue, self._counters[0], self._ends, self._total, self._ticket)
        self._draw(grid, ring.device, rows, generator, *index, count)
