"""The device's side of normalisation: moments of parts of a tensor, and what is made of them."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def add_pairs(a, b, other_a, other_b):
    """For sums of two tensors in one pass: threads meet once, not twice."""
    return a + other_a, b + other_b


@triton.jit
def _add_triples(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def store_moments(moments, count, shift, total, squares):
    """What a program's part counts, a number near it, and the sums of the differences from that and of their squares.

    One row of ``moments[4, programs]`` each.
    """
    parts = tl.num_programs(0)
    place = moments + tl.program_id(0)
    tl.store(place, count)
    tl.store(place + parts, shift)
    tl.store(place + 2 * parts, total)
    tl.store(place + 3 * parts, squares)


@triton.jit(do_not_specialize=["count"])
def measure(x, moments, count: tl.int64, ENTRIES: tl.constexpr):
    """The moments of each program's part of ``x``: see :func:`store_moments`."""
    first = tl.program_id(0).to(tl.int64) * ENTRIES
    entry = first + tl.arange(0, ENTRIES)
    inside = entry < count
    shift = tl.load(x + first).to(tl.float64)
    away = tl.where(inside, tl.load(x + entry, mask=inside, other=0.0).to(tl.float64) - shift, 0.0)
    held = tl.minimum(count - first, ENTRIES).to(tl.float64)
    store_moments(moments, held, shift, tl.sum(away, 0), tl.sum(away * away, 0))


@triton.jit(do_not_specialize=["parts", "count", "epsilon"])
def normalize_entries(
    x,
    moments,
    parts: tl.int64,
    count: tl.int64,
    epsilon: tl.float64,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """``x = (x - mean) / (std + epsilon)`` in place, with the moments that its parts were found to have."""
    if EVEN:  # a multiple of 16: this makes for wider accesses
        count = count // 16 * 16
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    own = tl.load(x + entry, mask=inside, other=0.0).to(tl.float64)
    base = tl.load(moments + parts)
    counts = tl.zeros([PARTS], tl.float64)
    sums = tl.zeros([PARTS], tl.float64)
    squares = tl.zeros([PARTS], tl.float64)
    first = 0
    while first < parts:
        part = first + tl.arange(0, PARTS)
        there = part < parts
        held = tl.load(moments + part, mask=there, other=0.0)
        away = tl.load(moments + parts + part, mask=there, other=0.0) - base
        own_sum = tl.load(moments + 2 * parts + part, mask=there, other=0.0)
        own_squares = tl.load(moments + 3 * parts + part, mask=there, other=0.0)
        counts += held
        sums += own_sum + held * away
        squares += own_squares + away * (2 * own_sum + held * away)
        first += PARTS
    total, summed, squared = tl.reduce((counts, sums, squares), 0, _add_triples)
    mean = summed / total
    spread = squared - mean * mean * total
    # Of a single entry there is no spread; rounding may leave a little less than none.
    variance = tl.where(total > 1, spread / tl.where(total > 1, total - 1, total), 0.0)
    std = tl.sqrt(tl.where(variance < 0, 0.0, variance))
    scale = 1.0 / (std + epsilon)  # one division in all: those of float64 are slow
    tl.store(x + entry, (((own - base) - mean) * scale).to(x.dtype.element_ty), mask=inside)
