"""Random numbers as a function of a seed and a counter, and the rows that they fall on: kernels that others call."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

# Words that describe the ring as a whole, int64.
TOTAL = tl.constexpr(0)  # rows held
ALIKE = tl.constexpr(1)  # 1 if all lanes hold the same times
OLDEST = tl.constexpr(2)  # the oldest of them, if so
LEAST_FREE = tl.constexpr(3)  # free episode indices of the lane that has the fewest
BREAKS = tl.constexpr(4)  # episodes that were broken off
INVALID = tl.constexpr(5)  # two of them: rewards that were not finite, actions outside of their space
REPEAT = tl.constexpr(7)  # one more than a row that repeats a final observation and was not taken to be a reset step
# The constants of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers.
_STEP = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)
_ULP = tl.constexpr(2.0**-53)
# What is left of a number that was moved to the right by so many bits, with zeros coming in.
_LOW_34 = tl.constexpr((1 << 34) - 1)
_LOW_37 = tl.constexpr((1 << 37) - 1)
_LOW_33 = tl.constexpr((1 << 33) - 1)
_LOW_53 = tl.constexpr((1 << 53) - 1)


@triton.jit
def units(generator, number):
    """The numbers that come ``number`` places after those already drawn, in [0, 1): the same as on the CPU."""
    bits = tl.load(generator) + (tl.load(generator + 1) + number + 1) * _STEP
    bits = (bits ^ ((bits >> 30) & _LOW_34)) * _FIRST
    bits = (bits ^ ((bits >> 27) & _LOW_37)) * _SECOND
    bits = bits ^ ((bits >> 31) & _LOW_33)
    return ((bits >> 11) & _LOW_53).to(tl.float64) * _ULP


@triton.jit
def lane_of(drawn, total, ends, LANES: tl.constexpr):
    """The lane that number ``drawn`` falls in, where ``ends`` are cumulative counts; and what comes before the lane.

    It is guessed as if all lanes had equally many, and looked for where the guess is wrong.
    """
    low = tl.minimum(drawn * LANES // tl.maximum(total, 1), LANES - 1)
    right = tl.load(ends + low) > drawn
    right = right & (tl.load(ends + low - 1, mask=low > 0, other=0) <= drawn)
    high = tl.where(right, low, LANES - 1)
    low = tl.where(right, low, 0)
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        is_past = tl.load(ends + middle) <= drawn
        low, high = tl.where(is_past & (low < high), middle + 1, low), tl.where(is_past, high, middle)
    return low, tl.load(ends + low - 1, mask=low > 0, other=0)


@triton.jit
def below(generator, number, total):
    """Whole numbers from 0 to ``total - 1``."""
    drawn = (units(generator, number) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(drawn, total - 1), 0)


@triton.jit
def uniform_rows(
    generator, number, ends, words, written, begun, LANES: tl.constexpr, STEPS: tl.constexpr, COUNTERS: tl.constexpr
):
    """The lanes and times of rows drawn uniformly from all that are held.

    Where the lanes hold the same times, rows are counted by time; else lane by lane.
    """
    total = tl.load(words + TOTAL)
    drawn = below(generator, number, total)
    lane = drawn % LANES
    time = tl.load(words + OLDEST) + drawn // LANES
    if tl.load(words + ALIKE) == 0:
        lane, before = lane_of(drawn, total, ends, LANES)
        oldest = tl.maximum(tl.load(begun + COUNTERS[1] + lane), tl.load(written + COUNTERS[0] + lane) - STEPS)
        time = oldest + drawn - before
    return lane, time


@triton.jit
def move_on(counter, ticket, count):
    """Set the counter to ``count`` once every program, each of which has read it, is here.

    No program waits for what it wrote to be seen by others: the last one reads nothing of it.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(ticket, 1, sem="relaxed") == programs - 1:
        tl.store(counter, count)
        tl.store(ticket, 0)


@triton.jit(do_not_specialize=["count"])
def draw_rows(
    rows, generator, ends, words, written, begun, ticket, count: tl.int64,
    LANES: tl.constexpr, STEPS: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill ``rows`` with rows drawn uniformly."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    made = tl.load(generator + 1) + count
    lane, time = uniform_rows(generator, number, ends, words, written, begun, LANES, STEPS, COUNTERS)
    tl.store(rows + number, time * LANES + lane, mask=number < count)
    move_on(generator + 1, ticket, made)
