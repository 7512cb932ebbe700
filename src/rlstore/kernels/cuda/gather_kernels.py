"""The device's side of gathering: permutations, and rows of many fields into many mini-batches."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _shuffled(x, low, high, HALF: tl.constexpr):
    """A keyed bijection of ``[0, 4**HALF)``: a Feistel network of six rounds. Its twin is in the reference."""
    MASK: tl.constexpr = (1 << HALF) - 1
    right = x & MASK
    left = x >> HALF
    for r in tl.static_range(6):
        key = low if r % 2 == 0 else high
        mixed = (right ^ (key + r * 0x9E3779B)) * 0x5BD1E995
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
        mixed = (mixed ^ (mixed >> 13)) & MASK
        left, right = right, (left ^ mixed) & MASK
    return (left << HALF) | right


@triton.jit(do_not_specialize=["held", "wanted", "stride"])
def permute(keys, rows, held: tl.int64, wanted: tl.int64, stride: tl.int64, HALF: tl.constexpr, ENTRIES: tl.constexpr):
    """The first entries of the permutation of ``[0, held)`` that each key gives, each ``stride`` after the other."""
    epoch = tl.program_id(1).to(tl.int64)
    key = tl.load(keys + epoch)
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    place = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = place < wanted
    x = _shuffled(tl.where(inside, place, 0).to(tl.uint32), low, high, HALF)
    # What falls outside is shuffled on until it falls inside, which no two entries do at one place.
    while tl.max((x.to(tl.int64) >= held).to(tl.int32), 0) > 0:
        x = tl.where(x.to(tl.int64) >= held, _shuffled(x, low, high, HALF), x)
    tl.store(rows + epoch * stride + place, x.to(tl.int64), mask=inside)


@triton.jit
def _gather_rows(source, target, rows, first, size, WIDTH: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr):
    """ROWS rows of one field, side by side, from row ``first`` of the target on."""
    entry = tl.arange(0, ENTRIES)
    own = first + entry // WIDTH
    inside = (entry < ROWS * WIDTH) & (own < size)
    row = tl.load(rows + own, mask=inside, other=0)
    x = tl.load(source + row * WIDTH + entry % WIDTH, mask=inside, other=0)
    tl.store(target + first * WIDTH + entry, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _gather_part(source, target, rows, own, part, WIDTH: tl.constexpr, ENTRIES: tl.constexpr):
    """A part of one wide row."""
    entry = part * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < WIDTH
    x = tl.load(source + tl.load(rows + own) * WIDTH + entry, mask=inside, other=0)
    tl.store(target + own * WIDTH + entry, x.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
def gather_fields(
    sources,
    rows,
    pieces,
    size: tl.int64,
    BATCHES: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTHS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Row i of field f of mini-batch b is row ``rows[b * size + i]`` of ``sources[f]``, in the target's dtype.

    Mini-batch b has the fields f with ``PIECES[f] == p`` in ``pieces[p * BATCHES + b]``, one after another, each at a
    multiple of 16 entries. A program copies ROWS[f] rows of one field, or one of the PARTS[f] parts of a wide row.
    EVEN says that the size is a multiple of 16, which makes for wider accesses.
    """
    if EVEN:
        size = size // 16 * 16
    program = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1)
    first_program = program * 0
    for f in tl.static_range(len(WIDTHS)):
        programs = (size + ROWS[f] - 1) // ROWS[f] * PARTS[f]
        if (program >= first_program) & (program < first_program + programs):
            target = pieces[PIECES[f] * BATCHES]
            for b in tl.static_range(1, BATCHES):
                target = tl.where(batch == b, pieces[PIECES[f] * BATCHES + b], target)
            for g in tl.static_range(f):
                if PIECES[g] == PIECES[f]:
                    target += (size * WIDTHS[g] + 15) // 16 * 16
            own = rows + batch * size
            number = program - first_program
            if PARTS[f] == 1:
                _gather_rows(sources[f], target, own, number * ROWS[f], size, WIDTHS[f], ROWS[f], ENTRIES[f])
            else:
                row = number // PARTS[f]
                _gather_part(sources[f], target, own, row, number % PARTS[f], WIDTHS[f], ENTRIES[f])
        first_program += programs
