"""The device's side of gathering: permutations, and rows of many fields into many mini-batches."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _mixed(x, key):
    """32 bits that depend on all bits of x and of the key."""
    x = (x ^ key) * 0x5BD1E995
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    return x ^ (x >> 16)


@triton.jit
def _shuffled(x, low, high, BITS: tl.constexpr):
    """A keyed bijection of ``[0, 2**BITS)``: a Feistel network of six rounds. Its twin is in the reference."""
    HALF: tl.constexpr = BITS // 2
    LEFT: tl.constexpr = (1 << (BITS - HALF)) - 1
    RIGHT: tl.constexpr = (1 << HALF) - 1
    left = x >> HALF
    right = x & RIGHT
    for r in tl.static_range(3):
        left = (left ^ _mixed(right, low + r * 0x13C6EF36)) & LEFT
        right = (right ^ _mixed(left, high + r * 0x13C6EF36)) & RIGHT
    return (left << HALF) | right


@triton.jit(do_not_specialize=["held", "wanted", "stride"])
def permute(keys, rows, held: tl.int64, wanted: tl.int64, stride: tl.int64, BITS: tl.constexpr, ENTRIES: tl.constexpr):
    """The first entries of the permutation of ``[0, held)`` that each key gives, each ``stride`` after the other."""
    epoch = tl.program_id(1).to(tl.int64)
    key = tl.load(keys + epoch)
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    last = (held - 1).to(tl.uint32)
    place = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = place < wanted
    x = _shuffled(tl.where(inside, place, 0).to(tl.uint32), low, high, BITS)
    # What falls outside is shuffled on until it falls inside, which no two entries do at one place.
    while tl.max((x > last).to(tl.int32), 0) > 0:
        x = tl.where(x > last, _shuffled(x, low, high, BITS), x)
    tl.store(rows + epoch * stride + place, x.to(tl.int64), mask=inside)


@triton.jit
def _gather_tile(
    source, target, rows, first, part, size, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """ROWS rows of one field from row ``first`` of the target on, or the COLUMNS of them that are a part."""
    own = first + tl.arange(0, ROWS)[:, None]
    column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (own < size) & (column < WIDTH)
    row = tl.load(rows + own, mask=own < size, other=0)
    x = tl.load(source + row * WIDTH + column, mask=inside, other=0)
    # What is written is not read here again, and leaves the cache to the sources.
    x = x.to(target.dtype.element_ty)
    tl.store(target + own * WIDTH + column, x, mask=inside, eviction_policy="evict_first")


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
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Row i of field f of mini-batch b is row ``rows[b * size + i]`` of ``sources[f]``, in the target's dtype.

    Mini-batch b has the fields f with ``PIECES[f] == p`` in ``pieces[p * BATCHES + b]``, one after another, each at a
    multiple of 16 entries. A program copies ROWS[f] rows of one field, or one of the PARTS[f] parts of a wide row; its
    tile has COLUMNS[f] columns, so that where a row lies is looked up once, not for each entry.
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
            number = (program - first_program).to(tl.int32)
            first = (number // PARTS[f]).to(tl.int64) * ROWS[f]
            _gather_tile(sources[f], target, own, first, number % PARTS[f], size, WIDTHS[f], ROWS[f], COLUMNS[f])
        first_program += programs
