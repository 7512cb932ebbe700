"""Gathering: a permutation in one launch, and all fields of all mini-batches of an epoch in another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from rlstore.kernels.cuda.gather_kernels import gather_fields, permute
from rlstore.kernels.cuda.launch import Launcher, next_power_of_2

# What one program makes of a permutation: little, because it waits for the slowest of its entries.
_PLACES, _PLACES_WARPS = 64, 1
# What one program copies of a field: bytes, rows and columns at most.
_PROGRAM_BYTES, _MOST_ROWS, _MOST_COLUMNS = 4 << 10, 512, 2048
_WARPS = 4


def permutation(keys: Tensor, held: int, rows: Tensor) -> None:
    """The first entries of the permutation of ``[0, held)`` that each key gives: see the reference."""
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
    """An epoch's rows as mini-batches, each in pieces of memory of its own: see the reference."""
    fields = tuple([(math.prod(source.shape[2:]), source.dtype) for source in sources])
    if not all(width for width, _ in fields):
        there = [index for index, (width, _) in enumerate(fields) if width]
        sources, places = tuple(sources[index] for index in there), tuple(places[index] for index in there)
        fields = tuple(fields[index] for index in there)
    if not sources:
        return
    batches = len(pieces[0])
    size = rows.shape[0] // batches
    dtypes = tuple([of_batches[0].dtype for of_batches in pieces])
    launcher, programs = _gather_fields(fields, places, dtypes, batches, size % 16 == 0)
    grid = (sum([-(-size // own_rows) * parts for own_rows, parts in programs]), batches, 1)
    memory = tuple([piece for of_batches in pieces for piece in of_batches])
    launcher(grid, rows.device, sources, rows, memory, size)


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
