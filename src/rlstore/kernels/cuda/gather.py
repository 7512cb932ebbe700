"""Gathering: a permutation in one launch, and all fields of all mini-batches of an epoch in another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import triton
from torch import Tensor

from rlstore.kernels.cuda.gather_kernels import gather_fields, permute
from rlstore.kernels.cuda.launch import Launcher

# What one program makes of a permutation, and of a field.
_PLACES = 512
_PROGRAM_BYTES, _WIDE_ENTRIES = 4 << 10, 2048


def permutation(keys: Tensor, held: int, rows: Tensor) -> None:
    """The first entries of the permutation of ``[0, held)`` that each key gives: see the reference."""
    epochs, wanted = rows.shape
    half = max(3, -(-(held - 1).bit_length() // 2))
    if half > 16:
        raise ValueError(f"a permutation of {held} rows is longer than 2**32")
    grid = (-(-wanted // _PLACES), epochs, 1)
    _permute(half)(grid, rows.device, keys, rows, held, wanted, rows.stride(0))


@cache
def _permute(half: int) -> Launcher:
    return Launcher(permute, (half, _PLACES))


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
        tuple(entries for _, _, entries in shared),
        even,
    )
    return Launcher(gather_fields, constants), [(rows, parts) for rows, parts, _ in shared]


def programs_of(width: int, itemsize: int) -> tuple[int, int, int]:
    """How the rows of a field are shared out.

    Returns:
        The rows that one program takes, or 1; the parts of a row that programs take, or 1; and the entries of a
        program, a power of 2.
    """
    most = min(_PROGRAM_BYTES // itemsize, _WIDE_ENTRIES)
    rows = 1 << max(most // width, 1).bit_length() - 1
    entries = min(triton.next_power_of_2(rows * width), _WIDE_ENTRIES)
    return rows, -(-width // entries) if width > entries else 1, entries
