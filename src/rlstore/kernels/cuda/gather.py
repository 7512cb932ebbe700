"""Gathering: a permutation in one launch, and all fields of all mini-batches of an epoch in another."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.cuda.launch import Launcher, next_power_of_2
from rlstore.kernels.plans import planned

# What one program makes of a permutation: little, because it waits for the slowest of its entries.
_PLACES, _PLACES_WARPS = 64, 1
# What one program copies of a field: bytes, rows and columns at most.
_PROGRAM_BYTES, _MOST_ROWS, _MOST_COLUMNS = 4 << 10, 512, 2048
_WARPS = 4


@triton.jit
def _mixed(x, key):
    """32 bits that depend on all bits of x and of the key."""
    x = (x ^ key) * 0x5BD1E995
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    return x ^ (x >> 16)


@triton.jit
def _shuffled(x, low, high, BITS: tl.constexpr):
    """A keyed bijection of ``[0, 2**BITS)``: a Feistel network of six rounds. The portable version has the same."""
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
    # What falls outside is shuffled again until it falls inside, which no two entries do at one place.
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
    sources, rows, pieces, size: tl.int64, BATCHES: tl.constexpr, PIECES: tl.constexpr, WIDTHS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Row i of field f of mini-batch b is row ``rows[b * size + i]`` of ``sources[f]``, in the target's dtype.

    Mini-batch b has the fields f with ``PIECES[f] == p`` in ``pieces[p * BATCHES + b]``, one after another, each at a
    multiple of 16 entries. A program copies ROWS[f] rows of one field, or one of the PARTS[f] parts of a wide row; its
    tile has COLUMNS[f] columns, so that the place of a row is looked up once, not for each entry.
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


def permutation(keys: Tensor, held: int, rows: Tensor) -> None:
    """The first entries of the permutation of ``[0, held)`` that each key gives."""
    epochs, wanted = rows.shape
    bits = max(6, (held - 1).bit_length())
    if bits > 32:
        raise ValueError(f"a permutation of {held} rows is longer than 2**32")
    grid = (-(-wanted // _PLACES), epochs, 1)
    _permute(bits)(grid, rows.device, keys, rows, held, wanted, rows.stride(0))


@cache
def _permute(bits: int) -> Launcher:
    return Launcher(permute, (bits, _PLACES), _PLACES_WARPS)


def gather(sources: tuple[Tensor, ...], rows: Tensor, targets: tuple[Tensor, ...]) -> None:
    """``targets[k][i] = sources[k].flatten(0, 1)[rows[i]]``, converted to the target's dtype."""
    gather_batches(sources, rows, tuple(range(len(sources))), tuple([(target,) for target in targets]))


def gather_batches(
    sources: tuple[Tensor, ...], rows: Tensor, places: tuple[int, ...], pieces: Sequence[Sequence[Tensor]]
) -> None:
    """An epoch's rows as mini-batches, each in pieces of memory of its own."""
    if not sources:
        return
    batches = len(pieces[0])
    size = rows.shape[0] // batches
    plan = _plan_gather(sources, places, tuple([of_batches[0].dtype for of_batches in pieces]), batches, size)
    if plan is None:
        return
    launcher, grid, there = plan
    memory = tuple([piece for of_batches in pieces for piece in of_batches])
    launcher(grid, rows.device, sources if there is None else tuple([sources[k] for k in there]), rows, memory, size)


@planned
def _plan_gather(
    sources: tuple[Tensor, ...],
    places: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    batches: int,
    size: int,
) -> tuple[Launcher, tuple[int, int, int], tuple[int, ...] | None] | None:
    """What gathers from sources like these, its grid, and which of them have entries (None: all); None if none has."""
    widths = [(source.shape[2:].numel(), source.dtype) for source in sources]
    there = tuple(k for k, (width, _) in enumerate(widths) if width)
    if not there:
        return None
    copied, own_places = tuple(widths[k] for k in there), tuple(places[k] for k in there)
    launcher, programs = _gather_fields(copied, own_places, dtypes, batches, size % 16 == 0)
    grid = (sum(-(-size // own_rows) * parts for own_rows, parts in programs), batches, 1)
    return launcher, grid, None if len(there) == len(sources) else there


@cache
def _gather_fields(
    fields: tuple[tuple[int, torch.dtype], ...],
    places: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    batches: int,
    even: bool,
) -> tuple[Launcher, list[tuple[int, int]]]:
    """What gathers these fields, and for each the rows that a program takes and the parts of a row that it takes."""
    shared = [
        programs_of(width, max(dtype.itemsize, dtypes[place].itemsize))
        for (width, dtype), place in zip(fields, places, strict=True)
    ]
    constants = (
        batches,
        places,
        tuple(width for width, _ in fields),
        tuple(rows for rows, _, _ in shared),
        tuple(parts for _, parts, _ in shared),
        tuple(columns for _, _, columns in shared),
        even,
    )
    return Launcher(gather_fields, constants, _WARPS), [(rows, parts) for rows, parts, _ in shared]


def programs_of(width: int, itemsize: int) -> tuple[int, int, int]:
    """How the rows of a field are shared out.

    Returns:
        The rows that one program takes, a power of 2; the parts of a row that programs take, or 1; and the columns of
        a program's tile, a power of 2.
    """
    columns = min(next_power_of_2(width), _MOST_COLUMNS)
    if width > columns:
        return 1, -(-width // columns), columns
    return min(max(_PROGRAM_BYTES // itemsize // columns, 1), _MOST_ROWS), 1, columns
