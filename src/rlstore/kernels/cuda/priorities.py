"""Priorities of the rows of a ring in Triton: three launches draw, one updates, and adding a row costs none.

Every draw sums the leaves again. Above the leaves are two levels, each entry the sum of ``WIDTH`` below it: subs and
blocks. There are at most 1024 blocks, so a program that needs a sum of all leaves, or of 32 blocks, computes it itself
instead of waiting for another to do so. Rows written since the last draw have no priority yet: they take the largest
that is held. So beside each sum of leaves that have one is the count of those that have not; when the largest is known,
the two together give the sum.

A draw is two launches, and leaves three things to a third, which may do other work as well: to compute weights from the
leaves that were drawn, once the smallest of them is known, to set the priorities of new rows, and to advance the
generator.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.cuda.draws import units
from rlstore.kernels.cuda.launch import Fixed, Launcher, count_readable, next_power_of_2
from rlstore.kernels.cuda.ring import EpisodeRing
from rlstore.kernels.protocol import NOT_READ
from rlstore.kernels.ring_memory import as_float32

SUPER = tl.constexpr(32)  # blocks that are summed where they are needed
_TINY = tl.constexpr(2.0**-126)  # the smallest float32 that is held in full
_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NO_ROW = tl.constexpr(-(2**62))
_LARGE = tl.constexpr(2.0**24)
_ROOT_OF_HALF = tl.constexpr(0x3F3504F3)  # the bits of a float32
UPDATE = tl.constexpr(1 << 26)  # from the stamps of one update to those of the next

_MOST_BLOCKS, _SUPERS = 1024, 32  # sums at the top, and groups of 32 of them, summed where needed
_LEAST_WIDTH = 32
_DRAWN, _DRAW_WARPS, _UPDATED, _UPDATE_WARPS = 32, 8, 32, 1  # rows of a program that draws, and of one that updates
_MOST_UPDATED = UPDATE.value  # rows of an update
_FINISHED = 256  # weights of a program
_BEGUN = 256  # lanes of a program that sets first priorities
_SETTLED_LANES, _SETTLED = 64, 1024  # lanes and rows that get their first priority at once


@triton.jit
def _row_of(leaf, written, WRITTEN: tl.constexpr, STEPS: tl.constexpr, inside):
    """The lane of a leaf and the time of the newest row that it can stand for."""
    lane = leaf // STEPS
    newest = tl.load(written + WRITTEN + lane, mask=inside, other=0) - 1
    return lane, newest - (newest - leaf % STEPS + STEPS) % STEPS


@triton.jit
def _is_new(sub, written, seen, LEAVES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, WIDTH: tl.constexpr):
    """Whether the row of each leaf of ``sub`` was written since the last draw, ``[subs, WIDTH]``.

    The new rows of a lane are consecutive, from the place of the first of them on.
    """
    child = tl.arange(0, WIDTH)[None, :]
    leaf = sub[:, None] * WIDTH
    if STEPS % WIDTH != 0:  # else all leaves of a sub are of the same lane
        leaf = leaf + child
    inside = leaf < LEAVES
    lane = leaf // STEPS
    count = tl.load(written + WRITTEN + lane, mask=inside, other=0)
    oldest = tl.maximum(tl.load(seen + lane, mask=inside, other=0), count - STEPS)
    after = (leaf % STEPS - oldest % STEPS).to(tl.int32)
    if STEPS % WIDTH == 0:
        after = after + child
    return inside & (after + tl.where(after < 0, STEPS, 0) < (count - oldest).to(tl.int32))


@triton.jit
def sum_leaves(
    leaves, sums, news, maxima, smallest, written, seen,
    LEAVES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums of the subs of a block and of the block."""
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    leaf = i[:, None] * WIDTH + i[None, :]
    begin = block * (WIDTH * WIDTH)
    value = tl.load(leaves + begin + leaf, mask=leaf < LEAVES - begin, other=0.0)
    is_new = _is_new(block * WIDTH + i, written, seen, LEAVES, STEPS, WRITTEN, WIDTH)
    tl.store(maxima + block, tl.max(tl.max(value, 1), 0))
    sub = tl.sum(tl.where(is_new, 0.0, value).to(tl.float64), 1)
    new_sub = tl.sum(tl.where(is_new, 1.0, value * 0.0), 1)
    tl.store(sums + block * WIDTH + i, sub)
    tl.store(news + block * WIDTH + i, new_sub)
    above = BLOCKS * WIDTH + block
    tl.store(sums + above, tl.sum(sub, 0))
    tl.store(news + above, tl.sum(new_sub, 0))
    if block == 0:
        tl.store(smallest, _INFINITY_BITS)


@triton.jit
def _first_priority(maxima, BLOCKS: tl.constexpr, SUPERS: tl.constexpr):
    """What a row without a priority takes: the largest that is held, or 1 if none is above 0."""
    block = tl.arange(0, SUPERS * SUPER)
    largest = tl.max(tl.load(maxima + block, mask=block < BLOCKS, other=0.0), 0)
    return tl.where(largest > 0.0, largest, 1.0)


@triton.jit
def _pick(weight, target, COUNT: tl.constexpr):
    """Along axis 1, the child in which each target falls, and the target counted from its beginning.

    Rounding may put the target past the end: then it is the last child that holds anything.
    """
    child = tl.arange(0, COUNT)[None, :]
    running = tl.cumsum(weight, 1)
    holds = weight > 0.0
    picked = tl.min(tl.where(holds & (running > target[:, None]), child, COUNT), 1)
    picked = tl.minimum(picked, tl.max(tl.where(holds, child, 0), 1))
    before = tl.max(tl.where(child < picked[:, None], running, 0.0), 1)
    return picked, target - before


@triton.jit
def new_rows(
    turn, written, seen, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The rows ever written to the lanes of a program's turn, and the first of them that has no priority yet."""
    lane = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    there = lane < LANES
    count = tl.load(written + WRITTEN + lane, mask=there, other=0)
    return count, tl.maximum(tl.load(seen + lane, mask=there, other=0), count - STEPS)


@triton.jit
def settle(
    count, oldest, leaves, first, written, seen, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr,
    SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
):  # fmt: skip
    """Give the rows written since the last draw ``first``; the programs share the lanes.

    ``count`` and ``oldest`` are what :func:`new_rows` gives for the first turn, loaded early so that nothing waits for
    it here.
    """
    turn = 0
    begin = tl.program_id(0).to(tl.int64) * SETTLED_LANES
    while begin < LANES:
        lane = begin + tl.arange(0, SETTLED_LANES)
        there = lane < LANES
        longest = tl.max(count - oldest, 0)
        back = longest * 0
        while back < longest:
            time = count[:, None] - 1 - (back + tl.arange(0, SETTLED_ROWS))[None, :]
            new = there[:, None] & (time >= oldest[:, None])
            leaf = lane[:, None] * STEPS + tl.maximum(time, 0) % STEPS
            tl.store(leaves + leaf, tl.zeros([SETTLED_LANES, SETTLED_ROWS], tl.float32) + first, mask=new)
            back += SETTLED_ROWS
        tl.debug_barrier()  # all threads have looked at what was seen
        tl.store(seen + lane, count, mask=there)
        turn += 1
        begin += tl.num_programs(0).to(tl.int64) * SETTLED_LANES
        count, oldest = new_rows(turn, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES)


@triton.jit
def settle_rows(
    leaves, maxima, written, seen, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr,
    SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr, BLOCKS: tl.constexpr, SUPERS: tl.constexpr,
):  # fmt: skip
    """Set the first priorities of new rows."""
    count, oldest = new_rows(0, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES)
    first = _first_priority(maxima, BLOCKS, SUPERS)
    settle(count, oldest, leaves, first, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)


@triton.jit
def _power(number, exponent):
    """``number ** exponent`` of a float32 above 0, to the last places of one.

    Only the whole part of the logarithm is multiplied in float64; for the rest float32 is enough, in a tenth of the
    time.
    """
    scaled = tl.where(number < _TINY, number * _LARGE, number)  # the smallest ones have no leading bit
    bits = scaled.to(tl.int32, bitcast=True)
    whole = (bits - _ROOT_OF_HALF) >> 23  # the rest is between the roots of 1/2 and of 2
    rest = tl.log2((bits - (whole << 23)).to(tl.float32, bitcast=True))
    whole = tl.where(number < _TINY, whole - 24, whole)
    logarithm = exponent * (whole.to(tl.float64) + rest.to(tl.float64))
    logarithm = tl.minimum(tl.maximum(logarithm, -200.0), 200.0)  # far beyond what a float32 holds
    up = tl.floor(logarithm)
    scale = ((up.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    power = (tl.exp2((logarithm - up).to(tl.float32)).to(tl.float64) * scale).to(tl.float32)
    return tl.where(exponent == 1.0, number, power)


@triton.jit
def weigh(number, alive, weights, smallest, beta):
    """The weights ``(drawn / the smallest drawn) ** -beta``, 0 for what has no priority."""
    drawn = tl.load(weights + number, mask=alive, other=0.0)
    holds = drawn > 0.0
    ratio = tl.where(holds, drawn, 1.0) / tl.load(smallest).to(tl.float32, bitcast=True)
    return tl.where(holds, _power(tl.where(holds, ratio, 1.0), -beta), 0.0)


@triton.jit(do_not_specialize=["count", "beta"])
def finish_draw(
    generator, weights, smallest, leaves, first, written, seen, count: tl.int64, beta: tl.float64, LANES: tl.constexpr,
    STEPS: tl.constexpr, WRITTEN: tl.constexpr, SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What a draw leaves to be done, where nothing else is done with it."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows, oldest = new_rows(0, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES)
    priority = tl.load(first)
    tl.store(weights + number, weigh(number, number < count, weights, smallest, beta), mask=number < count)
    settle(rows, oldest, leaves, priority, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)
    if tl.program_id(0) == 0:
        tl.store(generator + 1, tl.load(generator + 1) + count)


@triton.jit(do_not_specialize=["count"])
def draw_leaves(
    rows, drawn, smallest, generator, leaves, sums, news, maxima, taken, written, seen, count: tl.int64,
    LEAVES: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BLOCKS: tl.constexpr,
    SUPERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw one row in each of ``count`` equal parts of the total: the leaves drawn, and their smallest.

    ``taken`` is set to what a row without a priority takes.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = number < count
    part = (number.to(tl.float64) + units(generator, number)) / count.to(tl.float64)
    child = tl.arange(0, SUPER)[None, :]
    block = tl.arange(0, SUPERS)[:, None] * SUPER + child
    above = BLOCKS * WIDTH
    weight = tl.load(sums + above + block, mask=block < BLOCKS, other=0.0)
    new = tl.load(news + above + block, mask=block < BLOCKS, other=0.0)
    first = _first_priority(maxima, BLOCKS, SUPERS)
    if tl.program_id(0) == 0:
        tl.store(taken, first)
    upper = tl.sum(weight + new.to(tl.float64) * first, 1)
    target = part * tl.sum(upper, 0)
    index, target = _pick(tl.zeros([BLOCK, SUPERS], tl.float64) + upper[None, :], target, SUPERS)
    block = index[:, None] * SUPER + child
    weight = tl.load(sums + above + block, mask=block < BLOCKS, other=0.0)
    new = tl.load(news + above + block, mask=block < BLOCKS, other=0.0)
    picked, target = _pick(weight + new.to(tl.float64) * first, target, SUPER)
    child = tl.arange(0, WIDTH)[None, :]
    index = tl.minimum(index * SUPER + picked, BLOCKS - 1) * WIDTH
    sub = index[:, None] + child
    picked, target = _pick(tl.load(sums + sub) + tl.load(news + sub).to(tl.float64) * first, target, WIDTH)
    index = (index + picked).to(tl.int64)
    leaf = index[:, None] * WIDTH + child
    value = tl.load(leaves + leaf, mask=leaf < LEAVES, other=0.0)
    value = tl.where(_is_new(index, written, seen, LEAVES, STEPS, WRITTEN, WIDTH), first, value)
    picked, target = _pick(value.to(tl.float64), target, WIDTH)
    chosen = tl.sum(tl.where(child == picked[:, None], value, 0.0), 1)
    leaf = tl.minimum(index * WIDTH + picked, LEAVES - 1)
    lane, time = _row_of(leaf, written, WRITTEN, STEPS, alive)
    tl.store(rows + number, time * LANES + lane, mask=alive)
    tl.store(drawn + number, chosen, mask=alive)
    # The bits of floats that are not negative are in the order of the floats.
    bits = tl.where(alive & (chosen > 0.0), chosen.to(tl.int32, bitcast=True), _INFINITY_BITS)
    tl.atomic_min(smallest, tl.min(bits, 0), sem="relaxed")


@triton.jit
def _valid_rows(rows, priorities, number, count):
    """The rows of priorities that are some, and elsewhere one that there is not; with the priorities."""
    alive = number < count
    row = tl.load(rows + number, mask=alive, other=_NO_ROW)
    priority = tl.load(priorities + number, mask=alive, other=0.0)
    return tl.where((priority >= 0.0) & (priority < _INFINITY), row, _NO_ROW), priority


@triton.jit(do_not_specialize=["count", "alpha"])
def update_leaves(
    rows, priorities, leaves, dropped, stamps, updates, written, begun, count: tl.int64, alpha: tl.float64,
    LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BEGUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``leaf = priority ** alpha`` of rows that are held; where a row comes twice, the later one counts.

    Programs that have the same row may run at the same time. So each entry stamps its row with a number that is larger
    than those of all entries before it, writes the priority of the largest that it finds there, and looks again: if a
    larger one has come meanwhile it writes that one's. Whoever stamps a row after another has looked for the last time
    also writes after it; so the largest is written last.

    A stamp holds the update and, within it, the entry. All programs add to the counter of updates, but only all of them
    together add a whole one: so all read the same, and none waits for another.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(updates) // UPDATE * UPDATE
    row, priority = _valid_rows(rows, priorities, number, count)
    lane, time = tl.maximum(row, 0) % LANES, tl.maximum(row, 0) // LANES
    newest = tl.load(written + WRITTEN + lane)
    oldest = tl.maximum(tl.load(begun + BEGUN + lane), newest - STEPS)
    fits = (row >= 0) & (time >= oldest) & (time < newest)
    leaf = lane * STEPS + time % STEPS
    own = before + number + 1
    found = tl.maximum(tl.atomic_max(stamps + leaf, own, mask=fits, sem="acquire"), own)
    value = _leaf_value(priority, alpha)
    is_open = fits
    while tl.max(is_open.to(tl.int32), 0) > 0:
        later = tl.load(priorities + (found - before - 1), mask=is_open & (found != own), other=1.0)
        tl.store(leaves + leaf, tl.where(found == own, value, _leaf_value(later, alpha)), mask=is_open)
        tl.debug_barrier()  # whichever thread looks again, it has written
        again = tl.atomic_max(stamps + leaf, own, mask=is_open, sem="acq_rel")
        is_open = is_open & (again != found)
        found = tl.where(is_open, again, found)
    lost = tl.sum(((number < count) & (fits == 0)).to(tl.int64), 0)
    tl.atomic_add(dropped, lost, mask=lost > 0, sem="relaxed")
    share = UPDATE // tl.num_programs(0)
    rest = UPDATE - share * tl.num_programs(0)
    tl.atomic_add(updates, (share + tl.where(tl.program_id(0) == 0, rest, 0)).to(tl.int64), sem="relaxed")


@triton.jit
def _leaf_value(priority, alpha):
    power = tl.maximum(_power(tl.where(priority > 0.0, priority, 1.0), alpha), _TINY)
    return tl.where(priority > 0.0, power, tl.where(alpha == 0.0, 1.0, 0.0).to(tl.float32))


@triton.jit(do_not_specialize=["alpha"])
def begin_leaves(
    priorities, before, leaves, dropped, written, alpha: tl.float64,
    LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``leaf = priority ** alpha`` of the newest row of each lane that has written since."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = lane < LANES
    count = tl.load(written + WRITTEN + lane, mask=there, other=0)
    is_new = there & (count > tl.load(before + lane, mask=there, other=0))
    priority = tl.load(priorities + lane, mask=is_new, other=0.0)
    fits = is_new & (priority >= 0.0) & (priority < _INFINITY)
    leaf = lane * STEPS + tl.maximum(count - 1, 0) % STEPS
    tl.store(leaves + leaf, _leaf_value(priority, alpha), mask=fits)
    lost = tl.sum((is_new & (fits == 0)).to(tl.int64), 0)
    tl.atomic_add(dropped, lost, mask=lost > 0, sem="relaxed")


class Priorities:
    """Priorities of the rows of a ring, drawn and updated without waiting for the device.

    New rows get their first priority with the next draw; what that is does not depend on when, because adding rows
    never changes the largest priority.
    """

    def __init__(self, ring: EpisodeRing, memory: tuple[Tensor, ...]) -> None:
        self._ring = ring
        self._leaves, self._sums, self._maxima, self._seen = memory
        leaves, device = ring.lanes * ring.steps, ring.device
        if len(self._leaves) < leaves or len(self._sums) != sum(self.level_sizes(len(self._leaves))):
            raise ValueError("priorities: a leaf for each row")
        width = _width(len(self._leaves))
        self._blocks = -(-len(self._leaves) // width**2)
        supers = _SUPERS
        with torch.inference_mode(False):
            self._news = torch.zeros(len(self._sums), dtype=torch.float32, device=device)
            self._first = torch.ones(1, dtype=torch.float32, device=device)
            self._dropped = torch.zeros(1, dtype=torch.int64, device=device)
            self._smallest = torch.zeros(1, dtype=torch.int32, device=device)  # the bits of a float32
            # The stamp that each leaf was last updated with, and the updates so far, in multiples of UPDATE.
            self._stamps = torch.zeros(leaves, dtype=torch.int64, device=device)
            self._updates = torch.zeros(1, dtype=torch.int64, device=device)
        self._written, self._begun = (place.memory for place in ring.counter_places[:2])
        written, begun = (place.offset for place in ring.counter_places[:2])
        lanes = min(next_power_of_2(ring.lanes), _SETTLED_LANES)
        self.settled = (ring.lanes, ring.steps, written, lanes, _SETTLED // lanes)
        every = (leaves, ring.lanes, ring.steps, written, self._blocks, supers, width)
        self._sum = Launcher(sum_leaves, (leaves, ring.steps, written, self._blocks, width), min(width // 32, 32))
        self._draw = Launcher(draw_leaves, (*every, _DRAWN), _DRAW_WARPS)
        self._finish = Launcher(finish_draw, (*self.settled, _FINISHED))
        self._settle = Launcher(settle_rows, (*self.settled, self._blocks, supers))
        self._begin = Launcher(begin_leaves, (ring.lanes, ring.steps, written, _BEGUN))
        self._update = Launcher(update_leaves, (ring.lanes, ring.steps, written, begun, _UPDATED), _UPDATE_WARPS)
        self._is_behind = False
        self._on_cuda = device.type == "cuda"
        self._updated = Fixed((self._leaves, self._dropped, self._stamps, self._updates, self._written, self._begun))
        self._bind()

    def _bind(self) -> None:
        """Look up what the launches of a draw have in common."""
        counts, sums = (self._written, self._seen), (self._sums, self._news, self._maxima)
        self._summed = Fixed((self._leaves, *sums, self._smallest, *counts))
        self._drawn_from = Fixed((self._leaves, *sums, self._first, *counts))
        self.unfinished = Fixed((self._smallest, self._leaves, self._first, *counts))

    @staticmethod
    def level_sizes(leaves: int) -> list[int]:
        """Entries of each level above so many leaves: subs and blocks."""
        width = _width(leaves)
        blocks = -(-leaves // width**2)
        return [blocks * width, blocks]

    def total(self) -> float:
        """The sum of all leaves; waits for the device."""
        self.settle()
        return float(self._leaves.double().sum())

    def dropped(self) -> Tensor:
        """Priorities that were dropped, int64 ``[]`` on the device."""
        return self._dropped[0]

    def rebuild(self) -> None:
        """The leaves were changed from outside."""
        self._is_behind = False

    def _sum_leaves(self) -> None:
        self._sum((self._blocks, 1, 1), self._ring.device, self._summed)

    def settle(self) -> None:
        """Set the first priorities of the rows written since the last draw."""
        if self._is_behind:
            self._settle_now()
            self._is_behind = False

    def _settle_now(self) -> None:
        self._sum_leaves()
        grid = (min(-(-self._ring.lanes // _SETTLED_LANES), 128), 1, 1)
        self._settle(grid, self._ring.device, self._leaves, self._maxima, self._written, self._seen)

    def follow(self) -> None:
        """Leave the first priorities of rows written since to the next draw."""
        self._is_behind = True

    def begin(self, before: Tensor, priorities: Tensor, alpha: float) -> None:
        """Set the first priorities of the newest rows of lanes that have written since, but for those that are none."""
        self._settle_now()  # whatever is behind: a graph that is captured now will run again
        grid = (-(-self._ring.lanes // _BEGUN), 1, 1)
        tensors = (priorities, before, self._leaves, self._dropped, self._written)
        self._begin(grid, self._ring.device, *tensors, as_float32(alpha))

    def follow_windows(self, windows: Any) -> None:
        """Nothing more: :meth:`WindowIndex.follow` has set the priorities of windows."""
        if self._seen is not self._ring.written:
            self._seen = self._ring.written  # no row is new
            self._bind()

    def draw(self, generator: Tensor, beta: float, rows: Tensor, weights: Tensor) -> bool:
        """Draw one row in each of as many equal parts of the total, and its weight over the largest of them."""
        count = rows.numel()
        if weights.numel() != count:
            raise ValueError("draw: a weight for each row")
        self.begin_draw(generator, rows, weights, count)
        grid = (max(-(-count // _FINISHED), 1), 1, 1)
        self._finish(grid, self._ring.device, generator, weights, self.unfinished, count, as_float32(beta))
        return True

    def begin_draw(self, generator: Tensor, rows: Tensor, drawn: Tensor, count: int) -> None:
        """Draw ``count`` rows and the leaf of each, float32.

        :func:`finish_draw` or :func:`gather_rows` does the rest, with the leaves drawn and :attr:`unfinished`.
        """
        self._ring.check_generator(generator)
        self._sum_leaves()
        grid = (max(-(-count // _DRAWN), 1), 1, 1)
        self._draw(grid, self._ring.device, rows, drawn, self._smallest, generator, self._drawn_from, count)
        if self._is_behind and not (self._on_cuda and torch.cuda.is_current_stream_capturing()):  # else nothing ran yet
            self._is_behind = False

    def update(self, rows: Any, priorities: Any, alpha: float, windows: Any) -> tuple[int, int, int]:
        """Set priorities, but for those that are dropped; see :meth:`dropped`.

        Returns:
            (0, 0, 0): what was refused, where, and how many were dropped is not known yet; or that they are not read.
        """
        count = count_readable(rows, self._dropped)
        if count < 0 or count_readable(priorities, self._leaves) != count:
            return NOT_READ, 0, 0
        if count >= _MOST_UPDATED:
            raise ValueError(f"update: {count} priorities at once; at most one less than {_MOST_UPDATED}")
        self.settle()
        if windows is not None:
            rows = torch.where(windows.contain(rows), rows, -1)
        grid = (-(-count // _UPDATED), 1, 1)
        self._update(grid, self._ring.device, rows, priorities, self._updated, count, as_float32(alpha))
        return 0, 0, 0


def _width(leaves: int) -> int:
    """Entries below each sum, so that there are few enough at the top."""
    width = _LEAST_WIDTH
    while width**2 * _MOST_BLOCKS < leaves:
        width *= 2
    return width
