"""Drawing by priority on the device: sums of the leaves that are made anew for each draw.

Above the leaves lie two levels, each entry the sum of ``WIDTH`` below it: subs and blocks. There are at most 1024
blocks, so whoever needs a sum of all leaves, or of 32 blocks, makes it anew instead of waiting for another to do so.
Rows written since the last draw have no priority yet: they take the largest that is held. So with each sum of leaves
that have one goes the count of those that have not, and only when the largest is known are both the sum that counts.

A draw is two launches, and leaves three things to a third, which may do other work as well: to make weights of the
leaves that were drawn, once the smallest of them is known, to give new rows their priority, and to move the generator
on.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rlstore.kernels.cuda.replay_draw_kernels import units

SUPER = tl.constexpr(32)  # blocks that are summed where they are needed
_TINY = tl.constexpr(2.0**-126)  # the smallest float32 that is held in full
_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NO_ROW = tl.constexpr(-(2**62))


@triton.jit
def _row_of(leaf, written, WRITTEN: tl.constexpr, STEPS: tl.constexpr, inside):
    """The lane of a leaf and the time of the newest row that it can stand for."""
    lane = leaf // STEPS
    newest = tl.load(written + WRITTEN + lane, mask=inside, other=0) - 1
    return lane, newest - (newest - leaf % STEPS + STEPS) % STEPS


@triton.jit
def _is_new(sub, written, seen, LEAVES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, WIDTH: tl.constexpr):
    """Whether the row of each leaf of ``sub`` was written since the last draw, ``[subs, WIDTH]``.

    The new rows of a lane lie one after another from the place of the first of them on.
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
def _settle(
    leaves, first, written, seen, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr,
    SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
):  # fmt: skip
    """Give the rows written since the last draw ``first``; the programs share the lanes."""
    begin = tl.program_id(0).to(tl.int64) * SETTLED_LANES
    while begin < LANES:
        lane = begin + tl.arange(0, SETTLED_LANES)
        there = lane < LANES
        count = tl.load(written + WRITTEN + lane, mask=there, other=0)
        oldest = tl.maximum(tl.load(seen + lane, mask=there, other=0), count - STEPS)
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
        begin += tl.num_programs(0) * SETTLED_LANES


@triton.jit
def settle_rows(
    leaves, maxima, written, seen, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr,
    SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr, BLOCKS: tl.constexpr, SUPERS: tl.constexpr,
):  # fmt: skip
    """Give new rows their first priority."""
    first = _first_priority(maxima, BLOCKS, SUPERS)
    _settle(leaves, first, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)


@triton.jit
def weigh(number, alive, weights, smallest, beta):
    """The weights ``(drawn / the smallest drawn) ** -beta``, 0 for what has no priority."""
    drawn = tl.load(weights + number, mask=alive, other=0.0)
    holds = drawn > 0.0
    ratio = tl.where(holds, drawn, 1.0) / tl.load(smallest).to(tl.float32, bitcast=True)
    power = tl.exp2(-beta * tl.log2(tl.where(holds, ratio, 1.0).to(tl.float64)))
    return tl.where(holds, power, 0.0).to(tl.float32)


@triton.jit
def finish(
    generator, leaves, first, written, seen, count, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr,
    SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
):  # fmt: skip
    """What else a draw leaves to be done."""
    _settle(leaves, tl.load(first), written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)
    if tl.program_id(0) == 0:
        tl.store(generator + 1, tl.load(generator + 1) + count)


@triton.jit(do_not_specialize=["count", "beta"])
def finish_draw(
    generator, weights, smallest, leaves, first, written, seen, count: tl.int64, beta: tl.float64, LANES: tl.constexpr,
    STEPS: tl.constexpr, WRITTEN: tl.constexpr, SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What a draw leaves to be done, where nothing else is done with it."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(weights + number, weigh(number, number < count, weights, smallest, beta), mask=number < count)
    finish(generator, leaves, first, written, seen, count, LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)


@triton.jit(do_not_specialize=["count"])
def draw_leaves(
    rows, drawn, smallest, generator, leaves, sums, news, maxima, taken, written, seen, count: tl.int64,
    LEAVES: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BLOCKS: tl.constexpr,
    SUPERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw one row in each of ``count`` equal parts of the total; tell the leaves drawn and their smallest.

    And into ``taken``, what a row without a priority takes.
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


@triton.jit
def _leaf_of(row, LANES: tl.constexpr, STEPS: tl.constexpr):
    row = tl.maximum(row, 0)
    return (row % LANES) * STEPS + (row // LANES) % STEPS


@triton.jit(do_not_specialize=["count", "alpha"])
def update_leaves(
    rows, priorities, leaves, dropped, written, begun, count: tl.int64, alpha: tl.float64,
    LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BEGUN: tl.constexpr, BLOCK: tl.constexpr,
    LOOK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """``leaf = priority ** alpha`` of rows that are held; where a row comes twice, the later one counts.

    Rows are compared with those that come after them, but only from the first to the last whose leaf lies between
    theirs. Drawn rows come in the order of their leaves, so of these hardly any do.
    """
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    number = begin + tl.arange(0, BLOCK)
    row, priority = _valid_rows(rows, priorities, number, count)
    other = begin + BLOCK + tl.arange(0, LOOK)
    later = tl.load(rows + other, mask=other < count, other=-1)
    lane, time = tl.maximum(row, 0) % LANES, tl.maximum(row, 0) // LANES
    newest = tl.load(written + WRITTEN + lane)
    oldest = tl.maximum(tl.load(begun + BEGUN + lane), newest - STEPS)
    follows = tl.arange(0, BLOCK)[None, :] > tl.arange(0, BLOCK)[:, None]
    again = tl.max(((row[None, :] == row[:, None]) & follows).to(tl.int32), 1)
    leaf = _leaf_of(row, LANES, STEPS)
    least, most = tl.min(tl.where(row >= 0, leaf, LANES * STEPS), 0), tl.max(tl.where(row >= 0, leaf, -1), 0)
    done = begin + BLOCK
    while done < count:
        later_leaf = _leaf_of(later, LANES, STEPS)
        near = (later >= 0) & (later_leaf >= least) & (later_leaf <= most)
        place = tl.min(tl.where(near, other, count), 0)
        last = tl.max(tl.where(near, other, -1), 0)
        while place <= last:
            later_row, _ = _valid_rows(rows, priorities, place + tl.arange(0, OTHERS), count)
            again = tl.maximum(again, tl.max((later_row[None, :] == row[:, None]).to(tl.int32), 1))
            place += OTHERS
        other += LOOK
        done += LOOK
        later = tl.load(rows + other, mask=other < count, other=-1)
    power = tl.exp2(alpha * tl.log2(tl.where(priority > 0.0, priority, 1.0).to(tl.float64))).to(tl.float32)
    power = tl.maximum(power, _TINY)
    nothing = tl.where(alpha == 0.0, 1.0, 0.0).to(tl.float32)
    fits = (row >= 0) & (time >= oldest) & (time < newest)
    tl.store(leaves + leaf, tl.where(priority > 0.0, power, nothing), mask=fits & (again == 0))
    lost = tl.sum(((number < count) & (fits == 0)).to(tl.int64), 0)
    tl.atomic_add(dropped, lost, mask=lost > 0, sem="relaxed")
