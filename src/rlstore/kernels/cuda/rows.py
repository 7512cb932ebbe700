"""Rows into blocks: one launch for all fields of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlstore.kernels._native import RowChecker
from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.cuda.rows_kernels import write_row

_PROGRAM_BYTES, _WARPS = 16 << 10, 8  # what one program copies of a field


@dataclass(frozen=True)
class _Target:
    """Where a field's value goes."""

    block: Tensor
    lead: int
    is_flag: bool
    count: int  # entries of a row


@dataclass(frozen=True)
class _Plan:
    """How rows of one kind are written: which values have something to copy (None: all), where to, and by what."""

    places: tuple[int, ...] | None
    blocks: tuple[Tensor, ...]
    launcher: Launcher
    grid: tuple[int, int, int]


class RowWriter:
    """As :class:`rlstore.kernels.reference.RowWriter`, without waiting for the device.

    So flags are not looked at: one that is NaN is taken for a yes. Values that are not contiguous are read as they are
    if their first dimension alone is to blame, as in an expanded row or in columns of a wider tensor; others are copied
    first.
    """

    def __init__(self, targets: Sequence[tuple[Tensor, int, bool, bool]]) -> None:
        self._targets = [
            _Target(block, lead, is_flag, math.prod(block.shape[1:])) for block, lead, is_flag, _ in targets
        ]
        self._device = targets[0][0].device if targets else torch.device("cpu")
        self._checker = RowChecker(targets)
        self._plans: dict[bytes, _Plan] = {}  # by what the checker calls the kind of a row

    def write(self, row: int, values: tuple[Tensor | None, ...]) -> int:
        """Write, and return -1; or the index of the first value that does not fit as it is, having written nothing.

        None leaves an optional field's row as it was.
        """
        found = self._checker.look(row, values)
        while isinstance(found, int):
            if found >= 0:
                return found
            values = _with_copy(values, ~found)
            found = self._checker.look(row, values)
        plan = self._plans.get(found)
        if plan is None:
            plan = self._plans[found] = self._plan(values)
        given = values if plan.places is None else tuple([values[place] for place in plan.places])
        plan.launcher(plan.grid, self._device, given, plan.blocks, row)  # type: ignore[arg-type]
        return -1

    def _plan(self, values: tuple[Tensor | None, ...]) -> _Plan:
        """For rows of the same kind as this one."""
        row = [(place, value, self._targets[place]) for place, value in enumerate(values) if value is not None]
        places = tuple(place for place, _, target in row if target.count)
        copied = [(value, target) for _, value, target in row if target.count]
        sizes = [max(value.element_size(), target.block.element_size()) for value, target in copied]
        counts = [target.count for _, target in copied]
        entries = [_PROGRAM_BYTES // size for size in sizes]
        firsts = (0, *accumulate(-(-count // each) for count, each in zip(counts, entries, strict=True)))
        constants = (
            tuple(counts),
            tuple(target.count // target.block.shape[1] for _, target in copied),
            tuple(-1 if value.is_contiguous() else value.stride(0) for value, _ in copied),
            tuple(target.lead for _, target in copied),
            tuple(target.is_flag for _, target in copied),
            tuple(entries),
            firsts,
        )
        return _Plan(
            None if len(places) == len(values) else places,
            tuple(target.block for _, target in copied),
            Launcher(write_row, constants, _WARPS),
            (firsts[-1], 1, 1),
        )


def _with_copy(values: tuple[Tensor | None, ...], place: int) -> tuple[Tensor | None, ...]:
    """The values with one of them in plain memory."""
    value: Any = values[place]
    return (*values[:place], value.detach().resolve_conj().resolve_neg().contiguous(), *values[place + 1 :])
