"""The ring of episodes on the device: one step of all lanes in one launch.

A program writes a block of lanes, so nothing that belongs to one lane is touched by two programs. Frames are compared
and copied as raw whole numbers, in tiles ``[lanes, elements]``. The barriers part reading from writing, because two
accesses to the same tile may be spread over the threads in different ways.

Of a leaf or a column ``f``, ``SIZES[f]`` are the elements of a frame, ``STACKS[f]`` the frames of a stack,
``INNERS[f]`` the elements of a frame that lie together in a stack, ``LANE_STRIDES``, ``ROW_STRIDES`` and ``OFFSETS``
say where its rows lie, and ``TILES[f]`` how many elements a tile has.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# How an episode ended, as bits; and what stood before its first frame.
TERMINATED = tl.constexpr(1)
TRUNCATED = tl.constexpr(2)
KEPT = tl.constexpr(0)
REPEATED = tl.constexpr(-1)
ZEROS = tl.constexpr(-2)
# What the step after an end is: a reset step if it looks like one, always, never.
TELL = tl.constexpr(0)
ALWAYS = tl.constexpr(1)
NEVER = tl.constexpr(2)
# Words that tell of the ring as a whole.
TOTAL = tl.constexpr(0)  # rows held
ALIKE = tl.constexpr(1)  # 1 if all lanes hold the same times
OLDEST = tl.constexpr(2)  # the oldest of them, if so
LEAST_FREE = tl.constexpr(3)  # free slots of the lane that has the fewest
BREAKS = tl.constexpr(4)  # episodes that were broken off
# Marks that the programs of a write leave for the last of them: least and most rows written, least and most oldest
# rows, least free slots; far off before any.
_FAR = tl.constexpr(2**62)


@triton.jit
def _whole_row(equal, inside):
    """1 for each row of a tile that is true wherever it is inside, int32."""
    return tl.min((equal | (inside == 0)).to(tl.int32), 1)


@triton.jit
def _older_frame(
    block, starts, at, e, inside, slot, start, padding, time, kept,
    SIZE: tl.constexpr, STACK: tl.constexpr, ROW_STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The frame of ``time`` in the episode of ``slot``, which may be one that stood before its first."""
    known = inside & (slot >= 0)[:, None]
    before = (time < start)[:, None]
    held = tl.load(block + (at + (tl.maximum(time, 0) % ROWS) * ROW_STRIDE)[:, None] + e[None, :],
                   mask=known & (before == 0), other=0)  # fmt: skip
    first = tl.load(block + (at + (start % ROWS) * ROW_STRIDE)[:, None] + e[None, :],
                    mask=known & before & (padding == REPEATED)[:, None], other=0)  # fmt: skip
    table = (tl.maximum(slot, 0) * (STACK - 1) + kept) * SIZE
    other = tl.load(starts + table[:, None] + e[None, :], mask=known & before & (padding == KEPT)[:, None], other=0)
    return held | first | other  # two of them are zeros


@triton.jit
def _compare_leaf(
    block, starts, finals, given, lane, there, written, current, ended,
    SIZE: tl.constexpr, STACK: tl.constexpr, INNER: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, episodes,
):  # fmt: skip
    """Whether a leaf goes on, whether it repeats the final observation, whether its older frames are zeros, or equal.

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
    block, finals, lane, breaks, place, slot,
    SIZE: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What was to follow stands where the new observation goes: it becomes the final observation."""
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        inside = breaks[:, None] & (e < SIZE)[None, :]
        row = OFFSET + lane * LANE_STRIDE + place * ROW_STRIDE
        frame = tl.load(block + row[:, None] + e[None, :], mask=inside, other=0)
        tl.store(finals + (slot * SIZE)[:, None] + e[None, :], frame, mask=inside)


@triton.jit
def _put_leaf(
    block, starts, finals, given, following, final_given, lane, acts, ends, has_final, keeps, place, after, slot,
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
        tl.store(finals + (slot * SIZE)[:, None] + e[None, :], shown, mask=inside & ends[:, None])
        for j in tl.static_range(STACK - 1):
            older = tl.load(given + taken + j * INNER, mask=keeps[:, None] & fits, other=0)
            older = older.to(block.dtype.element_ty, bitcast=True)
            table = (slot * (STACK - 1) + j) * SIZE
            tl.store(starts + table[:, None] + e[None, :], older, mask=keeps[:, None] & fits)


@triton.jit
def _put_column(
    block, given, lane, acts, place,
    SIZE: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        inside = acts[:, None] & (e < SIZE)[None, :]
        value = tl.load(given + (lane * SIZE)[:, None] + e[None, :], mask=inside, other=0)
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
    """What draws and slots need of all lanes, by one program, from the marks of all: the words.

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
    """Tell of all lanes anew, by one program."""
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
    observations, rewards, blocks, starts, finals, episodes, lane, there, count, slot, ended, is_over,
    SIZES: tl.constexpr, STACKS: tl.constexpr, INNERS: tl.constexpr, LANE_STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    REWARD_SIZE: tl.constexpr,
):  # fmt: skip
    """Whether each lane goes on, whether it repeats its final observation, and what its older frames are."""
    goes_on = (lane >= 0).to(tl.int32)
    repeats = (is_over == 0).to(tl.int32)
    for c in tl.static_range(REWARD_SIZE):
        reward = tl.load(rewards + lane * REWARD_SIZE + c, mask=there, other=0)
        repeats = repeats & (reward == 0).to(tl.int32)
    padding = (lane * 0 + REPEATED).to(tl.int64)
    first_stack = (lane >= 0).to(tl.int32)
    for f in tl.static_range(len(SIZES)):
        same, final, zeros, equal = _compare_leaf(
            blocks[f], starts[f], finals[f], observations[f], lane, there, count, slot, ended,
            SIZES[f], STACKS[f], INNERS[f], LANE_STRIDES[f], ROW_STRIDES[f], OFFSETS[f], TILES[f], ROWS, episodes,
        )  # fmt: skip
        goes_on = goes_on & same
        repeats = repeats & final
        if STACKS[f] > 1:
            # One word for all leaves, so older frames that are not of one kind are kept.
            found = tl.where(equal != 0, REPEATED, tl.where(zeros != 0, ZEROS, KEPT)).to(tl.int64)
            padding = tl.where((first_stack != 0) | (found == padding), found, KEPT)
            first_stack = first_stack * 0
    return goes_on != 0, repeats != 0, padding


@triton.jit
def _find_slots(
    episode_of, episodes, free_slots, lane, acts, breaks, begins, count, oldest, slot, free,
    EPISODE_OF: tl.constexpr, ALL_LANES: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr,
):  # fmt: skip
    """The slot of the row that is overwritten now, whether it becomes free with it, and the slot of the new row."""
    gone = count - KEPT_ROWS
    leaves = acts & (gone >= oldest)
    row = EPISODE_OF[0] + lane * EPISODE_OF[1] + (tl.maximum(gone, 0) % ROWS) * EPISODE_OF[2]
    old = tl.load(episode_of + row, mask=leaves, other=0)
    stop = tl.load(episodes + old.to(tl.int64) * 4 + 1, mask=leaves, other=-1)
    stop = tl.where(breaks & (old.to(tl.int64) == slot), count, stop)
    frees = leaves & (stop == gone + 1)
    top = tl.load(free_slots + (tl.maximum(free, 1) - 1) * ALL_LANES + FIRST + lane, mask=begins, other=0)
    return old, frees, tl.where(begins, tl.where(frees, old, top).to(tl.int64), slot)


@triton.jit
def write_step(
    observations, following, values, terminated, truncated, mask, final_values, given,
    blocks, columns, finals, starts, episode_of, episodes, free_slots,
    written, begun, current, after_end, free_count, ends, words, marks, ticket,
    SIZES: tl.constexpr, STACKS: tl.constexpr, INNERS: tl.constexpr, LANE_STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr,
    COLUMN_SIZES: tl.constexpr, COLUMN_LANE_STRIDES: tl.constexpr, COLUMN_ROW_STRIDES: tl.constexpr,
    COLUMN_OFFSETS: tl.constexpr, COLUMN_TILES: tl.constexpr, EPISODE_OF: tl.constexpr, COUNTERS: tl.constexpr,
    LANES: tl.constexpr, ALL_LANES: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr, REWARD: tl.constexpr, REWARD_SIZE: tl.constexpr, RESETS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_FINALS: tl.constexpr, HAS_GIVEN: tl.constexpr,
    BLOCK: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """Write one step of ``BLOCK`` lanes; see ``kernels/replay_reference.py``, whose every byte this gives."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = lane < LANES
    count = tl.load(written + COUNTERS[0] + lane, mask=there, other=0)
    oldest = tl.load(begun + COUNTERS[1] + lane, mask=there, other=0)
    slot = tl.load(current + COUNTERS[2] + lane, mask=there, other=-1)
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
    goes_on, repeats, padding = _look(
        observations, values[REWARD], blocks, starts, finals, episodes, lane, there, count, slot, ended, is_over,
        SIZES, STACKS, INNERS, LANE_STRIDES, ROW_STRIDES, OFFSETS, TILES, ROWS, REWARD_SIZE,
    )  # fmt: skip
    going = slot >= 0
    is_reset = takes_part & (going == 0) & (ended >= 0)
    if RESETS != ALWAYS:
        is_reset = is_reset & repeats
    acts = takes_part & (is_reset == 0)
    breaks = acts & going & (goes_on == 0)
    begins = breaks | (acts & (going == 0))
    # The host has seen to it that there are slots; without one nothing is written.
    acts = acts & ((begins == 0) | (free > 0))
    breaks, begins = breaks & acts, begins & acts
    ends_now = acts & is_over
    place, after = count % ROWS, (count + 1) % ROWS
    old, frees, new = _find_slots(
        episode_of, episodes, free_slots, lane, acts, breaks, begins, count, oldest, slot, free,
        EPISODE_OF, ALL_LANES, FIRST, ROWS, KEPT_ROWS,
    )  # fmt: skip
    tl.debug_barrier()
    for f in tl.static_range(len(SIZES)):
        _break_leaf(blocks[f], finals[f], lane, breaks, place, slot,
                    SIZES[f], LANE_STRIDES[f], ROW_STRIDES[f], OFFSETS[f], TILES[f])  # fmt: skip
    tl.store(episodes + slot * 4 + 1, count, mask=breaks)
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
        _put_column(columns[f], values[f], lane, acts, place, COLUMN_SIZES[f], COLUMN_LANE_STRIDES[f],
                    COLUMN_ROW_STRIDES[f], COLUMN_OFFSETS[f], COLUMN_TILES[f])  # fmt: skip
    row = EPISODE_OF[0] + lane * EPISODE_OF[1] + place * EPISODE_OF[2]
    tl.store(episode_of + row, new.to(tl.int32), mask=acts)
    tl.store(written + COUNTERS[0] + lane, count + 1, mask=acts)
    tl.store(current + COUNTERS[2] + lane, tl.where(ends_now, -1, new), mask=acts)
    # Where a final observation came apart, the new episode has begun, unless it is known that it has not.
    may_reset = ends_now
    if RESETS == TELL:
        may_reset = ends_now & (has_final == 0)
    elif RESETS == NEVER:
        may_reset = lane < 0
    tl.store(after_end + COUNTERS[3] + lane, tl.where(may_reset, new, -1), mask=begins | ends_now | is_reset)
    count += acts.to(tl.int64)
    free += frees.to(tl.int64) - begins.to(tl.int64)
    tl.store(free_count + COUNTERS[4] + lane, free, mask=acts)
    broken = tl.sum(breaks.to(tl.int64), 0)
    tl.atomic_add(words + BREAKS, broken, mask=broken > 0, sem="relaxed")
    _leave_marks(marks, there, count, tl.maximum(oldest, count - STEPS), free)
    # The last program to get here tells of all lanes.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        _summarise(written, begun, ends, words, marks, LANES, STEPS, COUNTERS, SUMMARY)
        tl.store(ticket, 0)
