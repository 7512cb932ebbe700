"""Rows into blocks: one launch for all fields of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.cuda.rows_kernels import write_row
from rlstore.kernels.reference import FLAG_DTYPES

# What one program copies: little where there is little, so that all processors take part.
_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 8 << 10
_LARGE_ROW = 4 << 20
_WARPS = 8


# What tells rows apart that need kernels of their own: for each value its dtype, with the stride of its first dimension
# where it is not contiguous; None where there is no value.
_Kind = torch.dtype | tuple[torch.dtype, int] | None


@dataclass(frozen=True)
class _Target:
    """Where a field's value goes, and what fits there."""

    block: Tensor
    lead: int
    is_flag: bool
    optional: bool
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    count: int  # entries of a row


@dataclass(frozen=True)
class _Plan:
    """How rows of one kind are written: which values have something to copy, where to, and by what."""

    places: tuple[int, ...]
    blocks: tuple[Tensor, ...]
    launcher: Launcher
    grid: tuple[int, int, int]


class RowWriter:
    """As :class:`rlstore.kernels.reference.RowWriter`, without waiting for the device.

    So flags are not looked at: one that is NaN is taken for a yes. Values that are not contiguous are read as they are
    if their first dimension alone is to blame, as in an expanded row or in columns of a wider tensor; others are copied
    first.
    """

    def __init__(self, targets: Sequence[tuple[Tensor, int, bool, bool]], counters: Tensor) -> None:
        self._targets = [_target(*target) for target in targets]
        self._counters = counters.numpy()
        self._device = targets[0][0].device if targets else torch.device("cpu")
        self._number = targets[0][0].get_device() if targets else -1
        # Plain tuples: this is looked at with every row.
        self._checks = [(t.block.shape[0] - t.lead, t.optional, t.dtypes, t.shapes) for t in self._targets]
        self._plans: dict[tuple[_Kind, ...], _Plan] = {}

    def write(self, row: int, values: tuple[Tensor | None, ...]) -> int:
        """Write, and return -1; or the index of the first value that does not fit as it is, having written nothing.

        None leaves an optional field's row as it was.
        """
        number, strided = self._number, torch.strided
        if len(values) != len(self._targets):
            raise ValueError("a row has one value for each field")
        kinds: list[_Kind] = []
        plain: list[Tensor | None] = []
        for value, (rows, optional, dtypes, shapes) in zip(values, self._checks, strict=True):
            if value is None and optional:
                kinds.append(None)
                plain.append(None)
                continue
            if row >= rows:
                raise IndexError("a row beyond the end of its block")
            if not isinstance(value, Tensor) or value.get_device() != number or value.layout is not strided:
                return len(kinds)
            dtype = value.dtype
            if dtype not in dtypes or value.shape not in shapes:
                return len(kinds)
            if value.is_neg():
                value = value.resolve_neg()  # noqa: PLW2901
            if value.is_contiguous():
                kinds.append(dtype)
                plain.append(value)
            else:
                kind, readable = _strided(value)
                kinds.append(kind)
                plain.append(readable)
        self._launch(row, tuple(kinds), plain)
        self._counters += 1
        return -1

    def _launch(self, row: int, kinds: tuple[_Kind, ...], values: list[Tensor | None]) -> None:
        plan = self._plans.get(kinds)
        if plan is None:
            plan = self._plans[kinds] = self._plan(kinds)
        given = tuple([values[place] for place in plan.places])
        plan.launcher(plan.grid, self._device, given, plan.blocks, row)  # type: ignore[arg-type]

    def _plan(self, kinds: tuple[_Kind, ...]) -> _Plan:
        places = [place for place, kind in enumerate(kinds) if kind is not None and self._targets[place].count]
        targets = [self._targets[place] for place in places]
        sizes = [_itemsize(kinds[place], target) for place, target in zip(places, targets, strict=True)]
        row_bytes = sum(target.count * size for target, size in zip(targets, sizes, strict=True))
        program_bytes = _LARGE_BYTES if row_bytes >= _LARGE_ROW else _SMALL_BYTES
        entries = [program_bytes // size for size in sizes]
        programs = [-(-target.count // each) for target, each in zip(targets, entries, strict=True)]
        firsts = (0, *accumulate(programs))
        constants = (
            tuple(target.count for target in targets),
            tuple(target.count // target.block.shape[1] for target in targets),
            tuple(_stride(kinds[place]) for place in places),
            tuple(target.lead for target in targets),
            tuple(target.is_flag for target in targets),
            tuple(entries),
            firsts,
        )
        blocks = tuple(target.block for target in targets)
        return _Plan(tuple(places), blocks, Launcher(write_row, constants, _WARPS), (firsts[-1], 1, 1))


def _target(block: Tensor, lead: int, is_flag: bool, optional: bool) -> _Target:
    held = block.shape[1:]
    scalar_rows = (torch.Size((held[0],)), torch.Size((held[0], 1))) if len(held) else ()
    shapes = scalar_rows if held in scalar_rows else (held,)
    dtypes = FLAG_DTYPES if is_flag else (block.dtype,)
    return _Target(block, lead, is_flag, optional, dtypes, shapes, math.prod(held))


def _strided(value: Tensor) -> tuple[_Kind, Tensor]:
    """The kind of a value that is not contiguous, and the value; a copy of it that is, if a kernel cannot read it."""
    first, *strides = value.stride()
    plain = 1
    for size, stride in zip(reversed(value.shape[1:]), reversed(strides), strict=True):
        if stride != plain and size > 1:
            return value.dtype, value.detach().contiguous()
        plain *= size
    return (value.dtype, first), value


def _itemsize(kind: _Kind, target: _Target) -> int:
    """Bytes of an entry where it is the longer: as it is given, or as it is held."""
    dtype = kind[0] if isinstance(kind, tuple) else kind
    return max(target.block.element_size(), 0 if dtype is None else dtype.itemsize)


def _stride(kind: _Kind) -> int:
    return kind[1] if isinstance(kind, tuple) else -1
