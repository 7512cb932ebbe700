"""The ring of episodes in Triton: everything is on the device, and a write is one launch that nothing waits for.

A program writes a block of lanes, so nothing that belongs to one lane is touched by two programs. Frames are compared
and copied as raw whole numbers, in tiles ``[lanes, elements]``. The barriers separate reading from writing, because two
accesses to the same tile may be spread over the threads in different ways.

Of a leaf or a column ``f``, ``SIZES[f]`` are the elements of a frame, ``STACKS[f]`` the frames of a stack,
``INNERS[f]`` the elements of a frame that are contiguous in a stack; ``LANE_STRIDES``, ``ROW_STRIDES`` and ``OFFSETS``
say where its rows are, and ``TILES[f]`` how many elements a tile has.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.cuda.draws import ALIKE, BREAKS, INVALID, LEAST_FREE, OLDEST, REPEAT, TOTAL, draw_rows
from rlstore.kernels.cuda.launch import Argument, Fixed, Launcher, next_power_of_2
from rlstore.kernels.cuda.memory import layout_of, place_of, plain
from rlstore.kernels.cuda.rules import count_invalid, rule_table
from rlstore.kernels.cuda.watch import Watch
from rlstore.kernels.protocol import (
    NEEDS_EPISODES,
    NEEDS_ROOM,
    NEEDS_STARTS,
    WRITTEN,
    WRITTEN_WITH_BREAK,
    WRITTEN_WITH_REPEAT,
    Column,
    Leaf,
)
from rlstore.kernels.ring_memory import RingMemory
from rlstore.kernels.rules import NO_RULES, Rule

_WORDS = 8
_TILE_ELEMENTS = 1024  # of a program that writes
_SUMMARY = 1024  # lanes that the summary takes at once
_DRAWN = 128  # rows that a program draws
# As in ring_memory: how an episode ended, and what was before its first frame.
TERMINATED = tl.constexpr(1)
TRUNCATED = tl.constexpr(2)
KEPT = tl.constexpr(0)
REPEATED = tl.constexpr(-1)
ZEROS = tl.constexpr(-2)
# What the step after an end is: a reset step if it looks like one, always, never; (3) never, and reported if it does.
DETECT = tl.constexpr(0)
ALWAYS = tl.constexpr(1)
NEVER = tl.constexpr(2)
# In after_end, as in the protocol.
RESUMED = tl.constexpr(-2)
# Marks that the programs of a write leave for the last of them: least and most rows written, least and most oldest
# rows, least free episode indices; far off before any.
_FAR = tl.constexpr(2**62)


@triton.jit
def _whole_row(equal, inside):
    """1 for each row of a tile that is true wherever it is inside, int32."""
    return tl.min((equal | (inside == 0)).to(tl.int32), 1)


@triton.jit
def _older_frame(
    block, starts, at, e, inside, episode, start, padding, time, kept,
    SIZE: tl.constexpr, STACK: tl.constexpr, ROW_STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The frame of ``time`` in an episode, which may be one that was before its first."""
    known = inside & (episode >= 0)[:, None]
    before = (time < start)[:, None]
    held = tl.load(block + (at + (tl.maximum(time, 0) % ROWS) * ROW_STRIDE)[:, None] + e[None, :],
                   mask=known & (before == 0), other=0)  # fmt: skip
    first = tl.load(block + (at + (start % ROWS) * ROW_STRIDE)[:, None] + e[None, :],
                    mask=known & before & (padding == REPEATED)[:, None], other=0)  # fmt: skip
    table = (tl.maximum(episode, 0) * (STACK - 1) + kept) * SIZE
    other = tl.load(starts + table[:, None] + e[None, :], mask=known & before & (padding == KEPT)[:, None], other=0)
    return held | first | other  # two of them are zeros


@triton.jit
def _compare_leaf(
    block, starts, finals, given, lane, there, written, current, ended,
    SIZE: tl.constexpr, STACK: tl.constexpr, INNER: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, episodes,
):  # fmt: skip
    """Whether a leaf continues its episode, repeats the final observation, has older frames of zeros, or equal ones.

    Each int32 ``[lanes]``.
    """
    goes_on = (lane >= 0).to(tl.int32)
    repeats, zeros, equal = goes_on, goes_on, goes_on
    at = OFFSET + lane * LANE_STRIDE
    going, over = there & (current >= 0), there & (ended >= 0)
    of_current, of_ended = episodes + tl.maximum(current, 0) * 4, episodes + tl.maximum(ended, 0) * 4
    start, padding = tl.load(of_current, mask=going, other=0), tl.load(of_current + 3, mask=going, other=0)
    start_ended, padding_ended = tl.load(of_ended, mask=over, other=0), tl.load(of_ended + 3, mask=over, other=0)
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        inside = there[:, None] & (e < SIZE)[None, :]
        taken = (lane * (SIZE * STACK))[:, None] + ((e // INNER) * (STACK * INNER) + e % INNER)[None, :]
        newest = tl.load(given + taken + (STACK - 1) * INNER, mask=inside, other=0)
        newest = newest.to(block.dtype.element_ty, bitcast=True)
        follows = tl.load(block + (at + (written % ROWS) * ROW_STRIDE)[:, None] + e[None, :], mask=inside, other=0)
        goes_on = goes_on & _whole_row(follows == newest, inside)
        final = tl.load(finals + (tl.maximum(ended, 0) * SIZE)[:, None] + e[None, :],
                        mask=inside & over[:, None], other=0)  # fmt: skip
        repeats = repeats & _whole_row(final == newest, inside)
        for j in tl.static_range(STACK - 1):
            older = tl.load(given + taken + j * INNER, mask=inside, other=0)
            older = older.to(block.dtype.element_ty, bitcast=True)
            zeros = zeros & _whole_row(older == 0, inside)
            equal = equal & _whole_row(older == newest, inside)
            time = written - (STACK - 1 - j)
            kept = tl.minimum(tl.maximum(STACK - 1 - (start - time), 0), STACK - 2)
            was = _older_frame(block, starts, at, e, inside, current, start, padding, time, kept,
                               SIZE, STACK, ROW_STRIDE, ROWS)  # fmt: skip
            goes_on = goes_on & _whole_row(was == older, inside)
            kept = tl.minimum(tl.maximum(STACK - 1 - (start_ended - time), 0), STACK - 2)
            was = _older_frame(block, starts, at, e, inside, ended, start_ended, padding_ended, time, kept,
                               SIZE, STACK, ROW_STRIDE, ROWS)  # fmt: skip
            repeats = repeats & _whole_row(was == older, inside)
    return goes_on, repeats, zeros, equal


@triton.jit
def _break_leaf(
    block, finals, lane, breaks, place, episode,
    SIZE: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The observation that was to follow is where the new one goes: it becomes the final observation."""
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        inside = breaks[:, None] & (e < SIZE)[None, :]
        row = OFFSET + lane * LANE_STRIDE + place * ROW_STRIDE
        frame = tl.load(block + row[:, None] + e[None, :], mask=inside, other=0)
        tl.store(finals + (episode * SIZE)[:, None] + e[None, :], frame, mask=inside)


@triton.jit
def _put_leaf(
    block, starts, finals, given, following, final_given, lane, acts, ends, has_final, keeps, place, after, episode,
    SIZE: tl.constexpr, STACK: tl.constexpr, INNER: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, TILE: tl.constexpr, HAS_FINALS: tl.constexpr,
):  # fmt: skip
    """The frame of the row, what follows it, and what is kept for its episode."""
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        fits = (e < SIZE)[None, :]
        inside = acts[:, None] & fits
        taken = (lane * (SIZE * STACK))[:, None] + ((e // INNER) * (STACK * INNER) + e % INNER)[None, :]
        newest = taken + (STACK - 1) * INNER
        row = OFFSET + lane * LANE_STRIDE
        frame = tl.load(given + newest, mask=inside, other=0).to(block.dtype.element_ty, bitcast=True)
        tl.store(block + (row + place * ROW_STRIDE)[:, None] + e[None, :], frame, mask=inside)
        shown = tl.load(following + newest, mask=inside, other=0).to(block.dtype.element_ty, bitcast=True)
        goes_on = inside & (ends == 0)[:, None]
        tl.store(block + (row + after * ROW_STRIDE)[:, None] + e[None, :], shown, mask=goes_on)
        if HAS_FINALS:
            apart = inside & has_final[:, None]
            final = tl.load(final_given + newest, mask=apart, other=0).to(block.dtype.element_ty, bitcast=True)
            shown = tl.where(apart, final, shown)
        tl.store(finals + (episode * SIZE)[:, None] + e[None, :], shown, mask=inside & ends[:, None])
        for j in tl.static_range(STACK - 1):
            older = tl.load(given + taken + j * INNER, mask=keeps[:, None] & fits, other=0)
            older = older.to(block.dtype.element_ty, bitcast=True)
            table = (episode * (STACK - 1) + j) * SIZE
            tl.store(starts + table[:, None] + e[None, :], older, mask=keeps[:, None] & fits)


@triton.jit
def _put_column(
    block, given, lane, acts, place, words, limits,
    SIZE: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
    RULE: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        inside = acts[:, None] & (e < SIZE)[None, :]
        value = tl.load(given + (lane * SIZE)[:, None] + e[None, :], mask=inside, other=0)
        if RULE != 0:
            count_invalid(words + INVALID, value, e[None, :], inside, limits, RULE, FIRST, PAIRS)
        value = value.to(block.dtype.element_ty, bitcast=True)
        row = OFFSET + lane * LANE_STRIDE + place * ROW_STRIDE
        tl.store(block + row[:, None] + e[None, :], value, mask=inside)


@triton.jit
def _reset_marks(marks):
    for mark in tl.static_range(5):
        tl.store(marks + mark, _FAR if mark % 2 == 0 else -_FAR)


@triton.jit
def _leave_marks(marks, there, written, oldest, free):
    tl.atomic_min(marks, tl.min(tl.where(there, written, _FAR), 0), sem="relaxed")
    tl.atomic_max(marks + 1, tl.max(tl.where(there, written, -_FAR), 0), sem="relaxed")
    tl.atomic_min(marks + 2, tl.min(tl.where(there, oldest, _FAR), 0), sem="relaxed")
    tl.atomic_max(marks + 3, tl.max(tl.where(there, oldest, -_FAR), 0), sem="relaxed")
    tl.atomic_min(marks + 4, tl.min(tl.where(there, free, _FAR), 0), sem="relaxed")


@triton.jit
def _summarise(
    written, begun, ends, words, marks,
    LANES: tl.constexpr, STEPS: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What draws and writes need of all lanes, by one program, from the marks of all: the words.

    Where lanes do not hold the same times, the cumulative rows ``ends[lanes]`` too.
    """
    most = tl.load(marks + 1, cache_modifier=".cg")
    oldest = tl.load(marks + 3, cache_modifier=".cg")
    is_alike = (tl.load(marks, cache_modifier=".cg") == most) & (tl.load(marks + 2, cache_modifier=".cg") == oldest)
    total = (most - oldest) * LANES
    if is_alike == 0:
        total = total * 0
        for c in range(0, LANES, BLOCK):
            lane = c + tl.arange(0, BLOCK)
            there = lane < LANES
            count = tl.load(written + COUNTERS[0] + lane, mask=there, other=0, cache_modifier=".cg")
            first = tl.load(begun + COUNTERS[1] + lane, mask=there, other=0, cache_modifier=".cg")
            held = tl.where(there, count - tl.maximum(first, count - STEPS), 0)
            tl.store(ends + lane, total + tl.cumsum(held, 0), mask=there)
            total += tl.sum(held, 0)
    tl.store(words + TOTAL, total)
    tl.store(words + ALIKE, is_alike.to(tl.int64))
    tl.store(words + OLDEST, oldest)
    tl.store(words + LEAST_FREE, tl.load(marks + 4, cache_modifier=".cg"))
    tl.debug_barrier()
    _reset_marks(marks)


@triton.jit
def summarise(
    written, begun, free_count, ends, words, marks,
    LANES: tl.constexpr, STEPS: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The words of all lanes, by one program."""
    _reset_marks(marks)
    tl.debug_barrier()
    for c in range(0, LANES, BLOCK):
        lane = c + tl.arange(0, BLOCK)
        there = lane < LANES
        count = tl.load(written + COUNTERS[0] + lane, mask=there, other=0)
        oldest = tl.maximum(tl.load(begun + COUNTERS[1] + lane, mask=there, other=0), count - STEPS)
        free = tl.load(free_count + COUNTERS[4] + lane, mask=there, other=0)
        _leave_marks(marks, there, count, oldest, free)
    tl.debug_barrier()
    _summarise(written, begun, ends, words, marks, LANES, STEPS, COUNTERS, BLOCK)


@triton.jit
def _look(
    observations, rewards, blocks, starts, finals, episodes, lane, there, count, episode, ended, is_over,
    SIZES: tl.constexpr, STACKS: tl.constexpr, INNERS: tl.constexpr, LANE_STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    REWARD_SIZE: tl.constexpr,
):  # fmt: skip
    """Whether each lane continues its episode or repeats its final observation, has a reward, and its older frames."""
    goes_on = (lane >= 0).to(tl.int32)
    repeats = (is_over == 0).to(tl.int32)
    rewarded = (lane < 0).to(tl.int32)
    for c in tl.static_range(REWARD_SIZE):
        reward = tl.load(rewards + lane * REWARD_SIZE + c, mask=there, other=0)
        rewarded = rewarded | (reward != 0).to(tl.int32)
    padding = (lane * 0 + REPEATED).to(tl.int64)
    first_stack = (lane >= 0).to(tl.int32)
    for f in tl.static_range(len(SIZES)):
        same, final, zeros, equal = _compare_leaf(
            blocks[f], starts[f], finals[f], observations[f], lane, there, count, episode, ended,
            SIZES[f], STACKS[f], INNERS[f], LANE_STRIDES[f], ROW_STRIDES[f], OFFSETS[f], TILES[f], ROWS, episodes,
        )  # fmt: skip
        goes_on = goes_on & same
        repeats = repeats & final
        if STACKS[f] > 1:
            # One word for all leaves, so older frames that are not of one kind are kept.
            found = tl.where(equal != 0, REPEATED, tl.where(zeros != 0, ZEROS, KEPT)).to(tl.int64)
            padding = tl.where((first_stack != 0) | (found == padding), found, KEPT)
            first_stack = first_stack * 0
    return goes_on != 0, repeats != 0, rewarded != 0, padding


@triton.jit
def _find_episodes(
    episode_of, episodes, free_slots, lane, acts, breaks, begins, count, oldest, episode, free,
    EPISODE_OF: tl.constexpr, ALL_LANES: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr,
):  # fmt: skip
    """The episode of the row that is overwritten now, whether it becomes free, and the episode of the new row."""
    gone = count - KEPT_ROWS
    leaves = acts & (gone >= oldest)
    row = EPISODE_OF[0] + lane * EPISODE_OF[1] + (tl.maximum(gone, 0) % ROWS) * EPISODE_OF[2]
    old = tl.load(episode_of + row, mask=leaves, other=0)
    stop = tl.load(episodes + old.to(tl.int64) * 4 + 1, mask=leaves, other=-1)
    stop = tl.where(breaks & (old.to(tl.int64) == episode), count, stop)
    frees = leaves & (stop == gone + 1)
    top = tl.load(free_slots + (tl.maximum(free, 1) - 1) * ALL_LANES + FIRST + lane, mask=begins, other=0)
    return old, frees, tl.where(begins, tl.where(frees, old, top).to(tl.int64), episode)


@triton.jit
def write_step(
    observations, following, values, terminated, truncated, mask, final_values, given,
    blocks, columns, finals, starts, episode_of, episodes, free_slots,
    written, begun, current, after_end, free_count, ends, words, marks, ticket, limits,
    SIZES: tl.constexpr, STACKS: tl.constexpr, INNERS: tl.constexpr, LANE_STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr,
    COLUMN_SIZES: tl.constexpr, COLUMN_LANE_STRIDES: tl.constexpr, COLUMN_ROW_STRIDES: tl.constexpr,
    COLUMN_OFFSETS: tl.constexpr, COLUMN_TILES: tl.constexpr, RULES: tl.constexpr, FIRST_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr, EPISODE_OF: tl.constexpr, COUNTERS: tl.constexpr,
    LANES: tl.constexpr, ALL_LANES: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr, REWARD: tl.constexpr, REWARD_SIZE: tl.constexpr, RESETS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_FINALS: tl.constexpr, HAS_GIVEN: tl.constexpr,
    BLOCK: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """Write one step of ``BLOCK`` lanes: byte for byte what ``portable/episodes.py`` writes."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = lane < LANES
    count = tl.load(written + COUNTERS[0] + lane, mask=there, other=0)
    oldest = tl.load(begun + COUNTERS[1] + lane, mask=there, other=0)
    episode = tl.load(current + COUNTERS[2] + lane, mask=there, other=-1)
    ended = tl.load(after_end + COUNTERS[3] + lane, mask=there, other=-1)
    free = tl.load(free_count + COUNTERS[4] + lane, mask=there, other=0)
    is_terminated = tl.load(terminated + lane, mask=there, other=0) != 0
    is_truncated = tl.load(truncated + lane, mask=there, other=0) != 0
    takes_part = there
    if HAS_MASK:
        takes_part = there & (tl.load(mask + lane, mask=there, other=0) != 0)
    has_final = lane < 0
    if HAS_FINALS:
        has_final = there
    if HAS_GIVEN:
        has_final = there & (tl.load(given + lane, mask=there, other=0) != 0)
    is_over = is_terminated | is_truncated
    goes_on, repeats, rewarded, padding = _look(
        observations, values[REWARD], blocks, starts, finals, episodes, lane, there, count, episode, ended, is_over,
        SIZES, STACKS, INNERS, LANE_STRIDES, ROW_STRIDES, OFFSETS, TILES, ROWS, REWARD_SIZE,
    )  # fmt: skip
    going = episode >= 0
    is_reset = takes_part & (going == 0) & (ended >= 0)
    odd = is_reset & repeats  # looks like a reset step, and is not taken to be one
    if RESETS == DETECT:
        is_reset = odd & (rewarded == 0)
        odd = odd & rewarded
    elif RESETS == ALWAYS:
        odd = lane < 0
    else:
        is_reset = lane < 0
    acts = takes_part & (is_reset == 0)
    breaks = acts & going & (goes_on == 0)
    begins = breaks | (acts & (going == 0))
    # The host has made sure that there are free episode indices; without one nothing is written.
    acts = acts & ((begins == 0) | (free > 0))
    breaks, begins = breaks & acts, begins & acts
    ends_now = acts & is_over
    place, after = count % ROWS, (count + 1) % ROWS
    old, frees, new = _find_episodes(
        episode_of, episodes, free_slots, lane, acts, breaks, begins, count, oldest, episode, free,
        EPISODE_OF, ALL_LANES, FIRST, ROWS, KEPT_ROWS,
    )  # fmt: skip
    tl.debug_barrier()
    for f in tl.static_range(len(SIZES)):
        _break_leaf(blocks[f], finals[f], lane, breaks, place, episode,
                    SIZES[f], LANE_STRIDES[f], ROW_STRIDES[f], OFFSETS[f], TILES[f])  # fmt: skip
    tl.store(episodes + episode * 4 + 1, count, mask=breaks)
    tl.store(free_slots + free * ALL_LANES + FIRST + lane, old, mask=frees)
    tl.debug_barrier()
    tl.store(episodes + new * 4, count, mask=begins)
    tl.store(episodes + new * 4 + 1, tl.where(ends_now, count + 1, -1), mask=begins | ends_now)
    how = is_terminated.to(tl.int64) * TERMINATED + is_truncated.to(tl.int64) * TRUNCATED
    tl.store(episodes + new * 4 + 2, tl.where(ends_now, how, 0), mask=begins | ends_now)
    tl.store(episodes + new * 4 + 3, padding, mask=begins)
    for f in tl.static_range(len(SIZES)):
        _put_leaf(blocks[f], starts[f], finals[f], observations[f], following[f], final_values[f], lane, acts, ends_now,
                  has_final, begins & (padding == KEPT), place, after, new,
                  SIZES[f], STACKS[f], INNERS[f], LANE_STRIDES[f], ROW_STRIDES[f], OFFSETS[f], TILES[f],
                  HAS_FINALS)  # fmt: skip
    for f in tl.static_range(len(COLUMN_SIZES)):
        _put_column(columns[f], values[f], lane, acts, place, words, limits, COLUMN_SIZES[f], COLUMN_LANE_STRIDES[f],
                    COLUMN_ROW_STRIDES[f], COLUMN_OFFSETS[f], COLUMN_TILES[f],
                    RULES[f], FIRST_PAIRS[f], PAIRS[f])  # fmt: skip
    row = EPISODE_OF[0] + lane * EPISODE_OF[1] + place * EPISODE_OF[2]
    tl.store(episode_of + row, new.to(tl.int32), mask=acts)
    tl.store(written + COUNTERS[0] + lane, count + 1, mask=acts)
    tl.store(current + COUNTERS[2] + lane, tl.where(ends_now, -1, new), mask=acts)
    # With a final observation of its own, the new episode has begun, unless resets are known to take a step.
    may_reset = ends_now
    if RESETS == NEVER:
        may_reset = lane < 0
    elif RESETS != ALWAYS:
        may_reset = ends_now & (has_final == 0)
    tl.store(after_end + COUNTERS[3] + lane, tl.where(may_reset, new, -1), mask=acts | is_reset)
    repeat = tl.max(tl.where(odd & acts, count * LANES + lane + 1, 0), 0)
    tl.atomic_max(words + REPEAT, repeat, mask=repeat > 0, sem="relaxed")
    count += acts.to(tl.int64)
    free += frees.to(tl.int64) - begins.to(tl.int64)
    tl.store(free_count + COUNTERS[4] + lane, free, mask=acts)
    broken = tl.sum((breaks & (ended != RESUMED)).to(tl.int64), 0)
    tl.atomic_add(words + BREAKS, broken, mask=broken > 0, sem="relaxed")
    _leave_marks(marks, there, count, tl.maximum(oldest, count - STEPS), free)
    # The last program to get here sums up all lanes.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        _summarise(written, begun, ends, words, marks, LANES, STEPS, COUNTERS, SUMMARY)
        tl.store(ticket, 0)


class EpisodeRing(RingMemory):
    """The ring of episodes, with counters and tables on the device too.

    Nothing waits for the device: that an episode was broken off is returned by a later write, episode indices are asked
    for before they are needed, tables of starts from the beginning.
    """

    def __init__(
        self, steps: int, counters: tuple[Tensor, ...], episode_of: Tensor, leaves: tuple[Leaf, ...],
        columns: tuple[Column, ...], reward: int, resets: int, first: int, rules: Mapping[int, Rule] = NO_RULES,
    ) -> None:  # fmt: skip
        super().__init__(steps, counters, episode_of, leaves, columns, reward, resets, first, rules)
        self.leaf_memory, self.leaf_layout = layout_of(self.leaves)
        self.column_memory, self.column_layout = layout_of(self.columns)
        self.episode_place = place_of(episode_of)
        self.counter_places = [place_of(counter) for counter in counters]
        with torch.inference_mode(False):
            self.ends = torch.zeros(self.lanes, dtype=torch.int64, device=self.device)
            self.words = torch.zeros(_WORDS, dtype=torch.int64, device=self.device)
            self._marks = torch.zeros(_WORDS, dtype=torch.int64, device=self.device)
            self._ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._watch, self._asked = Watch(self.words), False
        self._rules = rule_table(rules, len(columns), self.device)
        self._deep = 0
        self._on_cuda = self.device.type == "cuda"
        self._generator: Tensor | None = None  # the last that was looked at
        self._launchers: dict[tuple[Any, ...], tuple[Launcher, tuple[int, int, int]]] = {}
        # The values of a step, before its flags; and whether some of them are flags of one byte.
        blocks = [*self.leaves, *self.leaves, *self.columns]
        self._fields = [(block.dtype, torch.Size((self.lanes, *block.shape))) for block in blocks]
        self._has_bools = any(block.dtype == torch.bool for block in blocks)
        widest = max(*self.leaf_layout.tiles, *self.column_layout.tiles)
        self._block = min(max(_TILE_ELEMENTS // widest, 1), 32, next_power_of_2(self.lanes))  # lanes of a program
        offsets = tuple(place.offset for place in self.counter_places)
        self._summary = (self.lanes, steps, offsets, min(next_power_of_2(self.lanes), _SUMMARY))
        self._summarise = Launcher(summarise, self._summary)
        self._draw = Launcher(draw_rows, (*self._summary[:3], _DRAWN))

    def set_tables(
        self, episodes: Tensor, free_slots: Tensor, finals: tuple[Tensor, ...], starts: tuple[Tensor | None, ...]
    ) -> None:
        """Use these tables from now on; counters may have been changed from outside."""
        super().set_tables(episodes, free_slots, finals, starts)
        deep, self._all_lanes = free_slots.shape
        if self._asked:
            self._watch.grow(deep - self._deep)
        else:
            self._watch.forget()
        self._deep, self._asked = deep, False
        self.is_fixed = deep > self.kept  # an episode index for each row: no table has to grow
        self._lacks_starts = any(leaf.stack > 1 and leaf.starts is None for leaf in self.leaves)
        # Where frames are not stacked nothing is read of the starts.
        self.tables = (
            tuple(leaf.finals for leaf in self.leaves),
            tuple(self.words if leaf.starts is None else leaf.starts for leaf in self.leaves),
        )
        own: tuple[Tensor | tuple[Tensor, ...], ...] = (
            *(self.leaf_memory, self.column_memory, *self.tables, self.episode_place.memory, episodes, free_slots),
            *(place.memory for place in self.counter_places),
            *(self.ends, self.words, self._marks, self._ticket, self._rules.limits),
        )
        self._own = Fixed(own)
        self._refresh()

    def _refresh(self) -> None:
        """Sum up what all lanes hold."""
        counters = [place.memory for place in self.counter_places]
        self._summarise(
            (1, 1, 1), self.device, counters[0], counters[1], counters[4], self.ends, self.words, self._marks
        )

    def _tell_of_run(self) -> None:
        """Rows were written that :meth:`write` does not know of."""
        self._refresh()

    def watch(self, written: Tensor) -> None:
        """Not here: other processes write to memory of the CPU alone."""
        raise NotImplementedError("rings on a device have no writers in other processes")

    def catch_up(self) -> None:
        """See what was written through other rings on the same memory."""
        self._watch.forget()
        self._refresh()

    @property
    def invalid(self) -> Tensor:
        """Rewards that were not finite and actions outside of their space that were stored, int64 ``[2]``."""
        first = int(INVALID)
        return self.words[first : first + 2]

    def check_capture(self) -> None:
        """Raise RuntimeError if a CUDA graph is being captured while the tables may still be replaced."""
        if not self.is_fixed and self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call register_graph(graph) of the storage before the graph is captured")

    def overrun(self, flags: Tensor) -> bool:
        """False: nothing else writes here."""
        flags.zero_()
        return False

    # ---------------------------------------------------------------------------------------------- drawing

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows`` with rows drawn uniformly from all that are held; there has to be one."""
        self.check_generator(generator)
        counters = [place.memory for place in self.counter_places]
        grid, count = (-(-rows.numel() // _DRAWN), 1, 1), rows.numel()
        self._draw(grid, self.device, rows, generator, self.ends, self.words, *counters[:2], self._ticket, count)

    def check_generator(self, generator: Tensor) -> None:
        """Raise ValueError for what is no generator on this device."""
        if generator is self._generator:  # as nearly always
            return
        if generator.dtype != torch.int64 or generator.numel() != 2 or generator.device != self.device:
            raise ValueError("a generator is int64 [seed, draws made], where the ring is")
        self._generator = generator

    # ---------------------------------------------------------------------------------------------- writing

    def write(self, values: tuple[Any, ...]) -> int:
        """Write one step of all lanes, in one launch: see the protocol for what it takes and returns."""
        misfit = None if self._is_usual(values) else self.misfit(values)
        if misfit is not None:
            return misfit
        self._watch.report.tell()
        if self._lacks_starts:
            return NEEDS_STARTS
        # With an episode index for each row there always is one.
        if not self.is_fixed and self._watch.is_short(self._deep):
            self._asked = True
            return NEEDS_EPISODES
        if self._room == 0:
            return NEEDS_ROOM
        self._room -= 1
        self._launch(values)
        self._watch.count_write()
        if self._watch.has_broken():
            return WRITTEN_WITH_BREAK
        row = self._watch.repeat()
        self._repeated = self._repeated if row is None else row
        return WRITTEN if row is None else WRITTEN_WITH_REPEAT

    def _is_usual(self, values: tuple[Any, ...]) -> bool:
        """True if the values are as they most often are, without final observations; a short look at each."""
        device, flags, lanes = self.device, len(self._fields), (self.lanes,)
        if len(values) != flags + len(self.leaves) + 4:
            return False
        for value, (dtype, shape) in zip(values, self._fields, strict=False):
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape or value.device != device:
                return False
            if not value.is_contiguous() or value.is_neg() or value.numel() == 1:
                return False
        for value in values[flags : flags + 2]:
            if type(value) is not Tensor or value.dtype is not torch.bool or value.shape != lanes:
                return False
            if value.device != device or not value.is_contiguous() or value.numel() == 1:
                return False
        return all(value is None for value in values[flags + 2 :])

    def _launch(self, values: tuple[Any, ...]) -> None:
        if self._has_bools:
            values = tuple(None if value is None else plain(value) for value in values)
        leaves, flags = len(self.leaves), len(self._fields)
        terminated, truncated, mask = values[flags : flags + 3]
        finals, given = values[flags + 3 : -1], values[-1]
        has_finals = finals[0] is not None
        mask_dtype = None if mask is None else mask.dtype
        given_dtype = None if given is None or not has_finals else given.dtype
        key = (terminated.dtype, truncated.dtype, mask_dtype, given_dtype, has_finals)
        arguments: tuple[Argument, ...] = (
            values[:leaves],
            values[leaves : 2 * leaves],
            values[2 * leaves : flags],
            terminated,
            truncated,
            self.words if mask is None else mask,
            finals if has_finals else values[:leaves],
            self.words if given_dtype is None else given,
            self._own,
        )
        known = self._launchers.get(key)
        if known is None:
            self._launch_first(key, arguments)
        else:
            known[0](known[1], self.device, *arguments)

    def _launch_first(self, key: tuple[Any, ...], arguments: tuple[Argument, ...]) -> None:
        """The launch that compiles. In tiles of some shapes the compiler fails, and not in the next larger ones."""
        for block in (self._block, 2 * self._block, 4 * self._block):
            launcher, grid = self._launcher(key, block), (-(-self.lanes // block), 1, 1)
            try:
                launcher(grid, self.device, *arguments)
            except RuntimeError as error:
                if "PassManager" not in str(error) or block == 4 * self._block:
                    raise
            else:
                self._launchers[key] = launcher, grid
                return

    def _launcher(self, key: tuple[Any, ...], block: int) -> Launcher:
        columns = self.column_layout
        constants = (
            *self.leaf_layout,
            *(columns.sizes, columns.lane_strides, columns.row_strides, columns.offsets, columns.tiles),
            *self._rules[1:],
            (self.episode_place.offset, *self.episode_place.strides),
            tuple(place.offset for place in self.counter_places),
            *(self.lanes, self._all_lanes, self._first, self.steps, self.rows, self.kept),
            *(self.reward, columns.sizes[self.reward], self._resets),
            *(key[2] is not None, key[4], key[3] is not None),
            *(block, self._summary[-1]),
        )
        return Launcher(write_step, constants)
