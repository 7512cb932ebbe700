"""Rows in, transitions out, on the device: every tensor of a batch in one launch.

It may draw the rows too, or finish what drew them by priority.

A program makes a few rows of every tensor. Where rows are wide, several programs share them: those of the second axis
of the grid take the tiles of a row in turn. Of request ``k``, ``PARTS[k]`` says what it holds and ``LAYOUT``'s lists
where its field lies, as in ``replay_ring_kernels.py``.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rlstore.kernels.cuda.replay_draw_kernels import move_on, uniform_rows
from rlstore.kernels.cuda.replay_priorities_kernels import new_rows, settle, weigh
from rlstore.kernels.cuda.replay_ring_kernels import KEPT, REPEATED, TERMINATED, TOTAL, TRUNCATED

# What an output holds.
OBSERVATION = tl.constexpr(0)
NEXT = tl.constexpr(1)
COLUMN = tl.constexpr(2)
REWARDS = tl.constexpr(3)
DISCOUNTS = tl.constexpr(4)
TERMINATED_PART = tl.constexpr(5)
TRUNCATED_PART = tl.constexpr(6)
FIRST = tl.constexpr(7)


@triton.jit
def _single_frames(
    out, early, source, finals, number, alive, there, at_end, row, slot,
    SIZE: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, IS_EARLY: tl.constexpr, HAS_FINALS: tl.constexpr,
):  # fmt: skip
    """Rows that are not stacked; where ``at_end`` those of the table of final observations."""
    for c in range(0, SIZE, SHARES * TILE):
        e = c + tl.program_id(1) * TILE + tl.arange(0, TILE)
        fits = (e < SIZE)[None, :]
        if IS_EARLY:
            value = tl.where(there[:, None], early, tl.zeros_like(early))
        else:
            value = tl.load(source + row[:, None] + e[None, :], mask=(there & (at_end == 0))[:, None] & fits, other=0)
        if HAS_FINALS:
            ended = (there & at_end)[:, None] & fits
            final = tl.load(finals + (slot * SIZE)[:, None] + e[None, :], mask=ended, other=0)
            value = tl.where(ended, final, value)
        tl.store(out + (number * SIZE)[:, None] + e[None, :], value.to(out.dtype.element_ty),
                 mask=alive[:, None] & fits)  # fmt: skip


@triton.jit
def _stacked_frames(
    out, source, finals, starts, number, alive, there, at_end, lane, time, slot, start, padding,
    SIZE: tl.constexpr, STACK: tl.constexpr, INNER: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stacks put together from the frames of rows, and what stood before the first one of the episode."""
    first = OFFSET + lane * LANE_STRIDE
    for c in range(0, SIZE * STACK, SHARES * TILE):
        w = c + tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = there[:, None] & (w < SIZE * STACK)[None, :]
        frame = (w // INNER) % STACK
        e = ((w // (STACK * INNER)) * INNER + w % INNER)[None, :]
        at = time[:, None] - (STACK - 1 - frame)[None, :]
        before = inside & (at < start[:, None])
        ended = inside & at_end[:, None] & (frame == STACK - 1)[None, :]
        is_kept, is_repeated = before & (padding == KEPT)[:, None], before & (padding == REPEATED)[:, None]
        value = tl.load(source + first[:, None] + (tl.maximum(at, 0) % ROWS) * ROW_STRIDE + e,
                        mask=inside & (before == 0) & (ended == 0), other=0)  # fmt: skip
        final = tl.load(finals + (slot * SIZE)[:, None] + e, mask=ended, other=0)
        repeated = tl.load(source + (first + (start % ROWS) * ROW_STRIDE)[:, None] + e, mask=is_repeated, other=0)
        place = tl.minimum(tl.maximum(STACK - 1 + at - start[:, None], 0), STACK - 2)
        kept = tl.load(starts + ((slot * (STACK - 1))[:, None] + place) * SIZE + e, mask=is_kept, other=0)
        value = tl.where(ended, final, tl.where(is_repeated, repeated, tl.where(is_kept, kept, value)))
        tl.store(out + (number * (SIZE * STACK))[:, None] + w[None, :], value.to(out.dtype.element_ty),
                 mask=alive[:, None] & (w < SIZE * STACK)[None, :])  # fmt: skip


@triton.jit
def _folded_rewards(
    out, rewards, powers, number, alive, there, lane, time, taken,
    SIZE: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``sum_{i < taken} gamma^i r_i``."""
    longest = tl.max(taken, 0)
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        fits = (e < SIZE)[None, :]
        total = (number[:, None] * 0 + e[None, :] * 0).to(tl.float32)
        i = longest * 0
        while i < longest:
            inside = (there & (i < taken))[:, None] & fits
            row = OFFSET + lane * LANE_STRIDE + ((time + i) % ROWS) * ROW_STRIDE
            reward = tl.load(rewards + row[:, None] + e[None, :], mask=inside, other=0)
            total = tl.where(inside, total + tl.load(powers + i) * reward, total)
            i += 1
        tl.store(out + (number * SIZE)[:, None] + e[None, :], total, mask=alive[:, None] & fits)


@triton.jit(do_not_specialize=["count", "beta"])
def gather_rows(
    outputs, rows, generator, sources, finals, starts, rewards, powers, episode_of, episodes,
    written, begun, ends, words, ticket, unfinished, count: tl.int64, beta: tl.float64,
    PARTS: tl.constexpr, SIZES: tl.constexpr, STACKS: tl.constexpr, INNERS: tl.constexpr, LANE_STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr, EPISODE_OF: tl.constexpr,
    COUNTERS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, N_STEP: tl.constexpr,
    SHARES: tl.constexpr, EARLY: tl.constexpr, SETTLED: tl.constexpr, DRAWS: tl.constexpr, FINISHES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every output of ``BLOCK`` rows, given or drawn; zeros for a row that is not held."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = number < count
    if DRAWS:
        made = tl.load(generator + 1) + count
        lane, time = uniform_rows(generator, number, ends, words, written, begun, LANES, STEPS, COUNTERS)
        known = alive & (tl.load(words + TOTAL) > 0)
    else:
        row = tl.load(rows + number, mask=alive, other=-1)
        known = row >= 0
        lane, time = tl.maximum(row, 0) % LANES, tl.maximum(row, 0) // LANES
    here = (time % ROWS) * EPISODE_OF[2]
    slot = tl.load(episode_of + EPISODE_OF[0] + lane * EPISODE_OF[1] + here, mask=known, other=0).to(tl.int64)
    # All that depends on the row alone is loaded before the first of it is stored, so that it is waited for once. What
    # stands after a row may not be the next one, and the row may not be held: what must not be used is seen later.
    early = ()
    for k in tl.static_range(len(PARTS)):
        if EARLY[k]:
            e = tl.program_id(1) * TILES[k] + tl.arange(0, TILES[k])
            shown = (time % ROWS + 1) % ROWS if PARTS[k] == NEXT else time % ROWS
            source = OFFSETS[k] + lane * LANE_STRIDES[k] + shown * ROW_STRIDES[k]
            frame = tl.load(sources[k] + source[:, None] + e[None, :],
                            mask=known[:, None] & (e < SIZES[k])[None, :], other=0)  # fmt: skip
            early = early + (frame,)  # noqa: RUF005  (Triton unpacks no tuples)
        else:
            early = early + (number,)  # noqa: RUF005
    newest = tl.load(written + COUNTERS[0] + lane)
    there = known
    if not DRAWS:  # what was drawn is held
        there = there & (time >= tl.load(begun + COUNTERS[1] + lane)) & (time >= newest - STEPS) & (time < newest)
    if FINISHES:
        made = tl.load(generator + 1) + count
        weight = weigh(number, alive, unfinished[0], unfinished[1], beta)
        priority = tl.load(unfinished[3])
        new, oldest = new_rows(0, unfinished[4], unfinished[5], LANES, STEPS, COUNTERS[0], SETTLED[0])
    start = tl.load(episodes + slot * 4, mask=there, other=0)
    stop = tl.load(episodes + slot * 4 + 1, mask=there, other=0)
    how = tl.load(episodes + slot * 4 + 2, mask=there, other=0)
    padding = tl.load(episodes + slot * 4 + 3, mask=there, other=0)
    time = tl.where(there, time, 0)
    is_over = (stop >= 0) & (stop <= newest)
    stop = tl.where(is_over, stop, newest)
    taken = tl.minimum(tl.maximum(stop - time, 0), N_STEP)
    at_end = there & is_over & (time + taken == stop)
    nowhere = number < 0
    for k in tl.static_range(len(PARTS)):
        if (PARTS[k] <= COLUMN) | EARLY[k]:
            shown = time
            ended = nowhere
            if PARTS[k] == NEXT:
                shown = time + taken
                ended = at_end
            if STACKS[k] == 1:
                source = OFFSETS[k] + lane * LANE_STRIDES[k] + (shown % ROWS) * ROW_STRIDES[k]
                _single_frames(outputs[k], early[k], sources[k], finals[k], number, alive, there, ended, source, slot,
                               SIZES[k], TILES[k], SHARES, EARLY[k], PARTS[k] == NEXT)  # fmt: skip
            else:
                _stacked_frames(outputs[k], sources[k], finals[k], starts[k], number, alive, there, ended, lane, shown,
                                slot, start, padding, SIZES[k], STACKS[k], INNERS[k], LANE_STRIDES[k], ROW_STRIDES[k],
                                OFFSETS[k], TILES[k], SHARES, ROWS)  # fmt: skip
        elif tl.program_id(1) == 0:
            if PARTS[k] == REWARDS:
                _folded_rewards(outputs[k], rewards, powers, number, alive, there, lane, time, taken, SIZES[k],
                                LANE_STRIDES[k], ROW_STRIDES[k], OFFSETS[k], TILES[k], ROWS)  # fmt: skip
            elif PARTS[k] == DISCOUNTS:
                power = tl.load(powers + taken, mask=there, other=0.0)
                power = tl.where(at_end & ((how & TERMINATED) != 0), 0.0, power)
                tl.store(outputs[k] + number, power, mask=alive)
            else:
                flag = there
                if PARTS[k] == TERMINATED_PART:
                    flag = at_end & ((how & TERMINATED) != 0)
                elif PARTS[k] == TRUNCATED_PART:
                    flag = at_end & ((how & TRUNCATED) != 0)
                elif PARTS[k] == FIRST:
                    flag = there & (start == time)
                tl.store(outputs[k] + number, flag.to(tl.uint8), mask=alive)
    if DRAWS:
        move_on(generator + 1, ticket, made)
    if FINISHES:  # noqa: SIM102  (this is known when it is compiled, the other not)
        if tl.program_id(1) == 0:
            tl.store(unfinished[0] + number, weight, mask=alive)
            settle(new, oldest, unfinished[2], priority, unfinished[4], unfinished[5],
                   LANES, STEPS, COUNTERS[0], SETTLED[0], SETTLED[1])  # fmt: skip
            if tl.program_id(0) == 0:
                tl.store(generator + 1, made)
