"""Drawing by priority on the device: sums of the leaves that are made anew for each draw.

Above the leaves lie three levels, each entry the sum of 32 below it: subs, blocks and supers. Rows written since the
last draw have no priority yet: they take the largest that is held. So with each sum of leaves that have one goes the
count of those that have not, and only when the largest is known are both the sum that counts.

A draw is two launches, and leaves two things to a third, which may do other work as well: to make weights of the leaves
that were drawn, once the smallest of them is known, and to give new rows their priority.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rlstore.kernels.cuda.replay_draw_kernels import move_on, units

WIDTH = tl.constexpr(32)
# What is kept of all leaves: their sum, and what a row without a priority takes.
SUM = tl.constexpr(0)
FIRST = tl.constexpr(1)
_TINY = tl.constexpr(2.0**-126)  # the smallest float32 that is held in full
_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _row_of(leaf, written, WRITTEN: tl.constexpr, STEPS: tl.constexpr, inside):
    """The lane of a leaf and the time of the newest row that it can stand for."""
    lane = leaf // STEPS
    newest = tl.load(written + WRITTEN + lane, mask=inside, other=0) - 1
    return lane, newest - (newest - leaf % STEPS + STEPS) % STEPS


@triton.jit
def _is_new(leaf, inside, written, seen, WRITTEN: tl.constexpr, STEPS: tl.constexpr):
    """Whether a leaf's row was written since the last draw."""
    lane, time = _row_of(leaf, written, WRITTEN, STEPS, inside)
    return inside & (time >= 0) & (time >= tl.load(seen + lane, mask=inside, other=0))


@triton.jit
def sum_leaves(
    leaves, sums, news, maxima, state, smallest, written, seen, ticket,
    LEAVES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BLOCKS: tl.constexpr, SUPERS: tl.constexpr,
):  # fmt: skip
    """The sums of 1024 leaves; and by the last program, those of the supers and of all."""
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    leaf = block * (WIDTH * WIDTH) + i[:, None] * WIDTH + i[None, :]
    inside = leaf < LEAVES
    value = tl.load(leaves + leaf, mask=inside, other=0.0)
    tl.store(maxima + block, tl.max(tl.max(value, 1), 0))
    is_new = _is_new(leaf, inside, written, seen, WRITTEN, STEPS)
    sub = tl.sum(tl.where(is_new, 0.0, value).to(tl.float64), 1)
    new_sub = tl.sum(is_new.to(tl.float32), 1)
    tl.store(sums + block * WIDTH + i, sub)
    tl.store(news + block * WIDTH + i, new_sub)
    above = BLOCKS * WIDTH + block
    tl.store(sums + above, tl.sum(sub, 0))
    tl.store(news + above, tl.sum(new_sub, 0))
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        _sum_all(sums, news, maxima, state, BLOCKS, SUPERS)
        tl.store(smallest, _INFINITY_BITS)
        tl.store(ticket, 0)


@triton.jit
def _sum_all(sums, news, maxima, state, BLOCKS: tl.constexpr, SUPERS: tl.constexpr):
    i = tl.arange(0, WIDTH)
    largest = tl.load(maxima, cache_modifier=".cg")
    for c in range(0, SUPERS, WIDTH):
        block = (c + i)[:, None] * WIDTH + i[None, :]
        there = block < BLOCKS
        most = tl.load(maxima + block, mask=there, other=0.0, cache_modifier=".cg")
        largest = tl.maximum(largest, tl.max(tl.max(most, 1), 0))
    first = tl.where(largest > 0, largest, 1.0).to(tl.float64)
    total = first * 0.0
    for c in range(0, SUPERS, WIDTH):
        block = (c + i)[:, None] * WIDTH + i[None, :]
        there = block < BLOCKS
        value = tl.load(sums + BLOCKS * WIDTH + block, mask=there, other=0.0, cache_modifier=".cg")
        new = tl.load(news + BLOCKS * WIDTH + block, mask=there, other=0.0, cache_modifier=".cg")
        upper = tl.sum(value + new.to(tl.float64) * first, 1)
        tl.store(sums + BLOCKS * WIDTH + BLOCKS + c + i, upper, mask=c + i < SUPERS)
        total += tl.sum(upper, 0)
    tl.store(state + SUM, total)
    tl.store(state + FIRST, first)


@triton.jit
def _pick(weight, target, COUNT: tl.constexpr):
    """Along axis 1, the child in which each target falls, and the target counted from its beginning.

    Rounding may put the target past the end, or on a child of nothing: then it is the last child before it that holds
    anything, or the first after it.
    """
    child = tl.arange(0, COUNT)[None, :]
    running = tl.cumsum(weight, 1)
    passed = tl.minimum(tl.sum((running <= target[:, None]).to(tl.int32), 1), COUNT - 1)
    target = target - tl.max(tl.where(child < passed[:, None], running, 0.0), 1)
    holds = weight > 0.0
    before = tl.max(tl.where(holds & (child <= passed[:, None]), child, -1), 1)
    after = tl.min(tl.where(holds, child, COUNT - 1), 1)
    target = tl.where(before < passed, 0.0, target)
    return tl.where(before < 0, after, before).to(tl.int64), target


@triton.jit
def _settle(
    leaves, state, written, seen, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr,
    SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
):  # fmt: skip
    """Give the rows written since the last draw what they take; the programs share the lanes."""
    first = tl.load(state + FIRST).to(tl.float32)
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
    leaves, state, written, seen, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr,
    SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
):  # fmt: skip
    """Give new rows their first priority."""
    _settle(leaves, state, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)


@triton.jit
def finish(
    number, alive, weights, smallest, leaves, state, written, seen, beta, LANES: tl.constexpr, STEPS: tl.constexpr,
    WRITTEN: tl.constexpr, SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
):  # fmt: skip
    """The weights ``(drawn / the smallest drawn) ** -beta``, 0 for what has no priority; and new rows' priorities."""
    drawn = tl.load(weights + number, mask=alive, other=0.0)
    holds = drawn > 0.0
    ratio = tl.where(holds, drawn, 1.0) / tl.load(smallest).to(tl.float32, bitcast=True)
    power = tl.exp2(-beta * tl.log2(tl.where(holds, ratio, 1.0).to(tl.float64)))
    tl.store(weights + number, tl.where(holds, power, 0.0).to(tl.float32), mask=alive)
    _settle(leaves, state, written, seen, LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)


@triton.jit(do_not_specialize=["count", "beta"])
def finish_draw(
    weights, smallest, leaves, state, written, seen, count: tl.int64, beta: tl.float64, LANES: tl.constexpr,
    STEPS: tl.constexpr, WRITTEN: tl.constexpr, SETTLED_LANES: tl.constexpr, SETTLED_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What a draw leaves to be done, where nothing else is done with it."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    finish(number, number < count, weights, smallest, leaves, state, written, seen, beta,
           LANES, STEPS, WRITTEN, SETTLED_LANES, SETTLED_ROWS)  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def draw_leaves(
    rows, drawn, smallest, generator, leaves, sums, news, state, written, seen, ticket, count: tl.int64,
    LEAVES: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BLOCKS: tl.constexpr,
    SUPERS: tl.constexpr, ALL_SUPERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw one row in each of ``count`` equal parts of the total, and tell the leaves drawn and their smallest."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = number < count
    first = tl.load(state + FIRST)
    part = (number.to(tl.float64) + units(generator, number)) / count.to(tl.float64)
    target = part * tl.load(state + SUM)
    upper = tl.arange(0, ALL_SUPERS)
    weight = tl.load(sums + BLOCKS * WIDTH + BLOCKS + upper, mask=upper < SUPERS, other=0.0)
    index, target = _pick(tl.zeros([BLOCK, ALL_SUPERS], tl.float64) + weight[None, :], target, ALL_SUPERS)
    child = tl.arange(0, WIDTH)[None, :]
    for level in tl.static_range(2):
        entry = index[:, None] * WIDTH + child
        inside = entry < BLOCKS
        if level == 1:
            inside = entry < BLOCKS * WIDTH
        at = entry + (1 - level) * (BLOCKS * WIDTH)
        weight = tl.load(sums + at, mask=inside, other=0.0)
        weight += tl.load(news + at, mask=inside, other=0.0).to(tl.float64) * first
        picked, target = _pick(weight, target, WIDTH)
        index = index * WIDTH + picked
    leaf = index[:, None] * WIDTH + child
    inside = leaf < LEAVES
    value = tl.load(leaves + leaf, mask=inside, other=0.0)
    value = tl.where(_is_new(leaf, inside, written, seen, WRITTEN, STEPS), first.to(tl.float32), value)
    picked, target = _pick(value.to(tl.float64), target, WIDTH)
    chosen = tl.sum(tl.where(child == picked[:, None], value, 0.0), 1)
    leaf = tl.minimum(index * WIDTH + picked, LEAVES - 1)
    lane, time = _row_of(leaf, written, WRITTEN, STEPS, alive)
    tl.store(rows + number, time * LANES + lane, mask=alive)
    tl.store(drawn + number, chosen, mask=alive)
    # The bits of floats that are not negative are in the order of the floats.
    bits = tl.where(alive & (chosen > 0.0), chosen.to(tl.int32, bitcast=True), _INFINITY_BITS)
    tl.atomic_min(smallest, tl.min(bits, 0), sem="relaxed")
    move_on(generator, ticket, count)


@triton.jit(do_not_specialize=["count", "alpha"])
def update_leaves(
    rows, priorities, leaves, dropped, written, begun, count: tl.int64, alpha: tl.float64,
    LANES: tl.constexpr, STEPS: tl.constexpr, WRITTEN: tl.constexpr, BEGUN: tl.constexpr, BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """``leaf = priority ** alpha`` of rows that are held; where a row comes twice, the later one counts.

    Each row is compared with all that come after it: a batch is short, and nothing has to be kept between launches.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = number < count
    row = tl.load(rows + number, mask=alive, other=-1)
    priority = tl.load(priorities + number, mask=alive, other=0.0)
    lane, time = tl.maximum(row, 0) % LANES, tl.maximum(row, 0) // LANES
    newest = tl.load(written + WRITTEN + lane, mask=alive, other=0)
    oldest = tl.maximum(tl.load(begun + BEGUN + lane, mask=alive, other=0), newest - STEPS)
    is_priority = (priority >= 0.0) & (priority < _INFINITY)
    fits = alive & (row >= 0) & (time >= oldest) & (time < newest) & is_priority
    later = number * 0
    done = tl.program_id(0).to(tl.int64) * BLOCK
    while done < count:
        other = done + tl.arange(0, OTHERS)
        there = other < count
        other_row = tl.load(rows + other, mask=there, other=-1)
        value = tl.load(priorities + other, mask=there, other=0.0)
        there = there & (value >= 0.0) & (value < _INFINITY)
        same = (other_row[None, :] == row[:, None]) & (other[None, :] > number[:, None]) & there[None, :]
        later = tl.maximum(later, tl.max(same.to(tl.int64), 1))
        done += OTHERS
    power = tl.exp2(alpha * tl.log2(tl.where(priority > 0.0, priority, 1.0).to(tl.float64))).to(tl.float32)
    power = tl.maximum(power, _TINY)
    nothing = tl.where(alpha == 0.0, 1.0, 0.0).to(tl.float32)
    leaf = lane * STEPS + time % STEPS
    tl.store(leaves + leaf, tl.where(priority > 0.0, power, nothing), mask=fits & (later == 0))
    lost = tl.sum((alive & (fits == 0)).to(tl.int64), 0)
    tl.atomic_add(dropped, lost, mask=lost > 0, sem="relaxed")
