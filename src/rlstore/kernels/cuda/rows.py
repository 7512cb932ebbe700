"""Rows into blocks: one launch for all fields of a row."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels._native import RowLauncher
from rlstore.kernels.cuda.launch import Fixed, Launcher
from rlstore.kernels.cuda.rules import Counts, count_invalid, rule_table
from rlstore.kernels.protocol import Target
from rlstore.kernels.rules import NO_RULES, Rule

_PROGRAM_BYTES, _WARPS = 16 << 10, 8  # what one program copies of a field


@triton.jit(do_not_specialize=["row"])
def write_row(
    values, blocks, invalid, limits, row: tl.int64, COUNTS: tl.constexpr, WIDTHS: tl.constexpr, STRIDES: tl.constexpr,
    LEADS: tl.constexpr, FLAGS: tl.constexpr, ENTRIES: tl.constexpr, FIRSTS: tl.constexpr,
    RULES: tl.constexpr, FIRST_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """``blocks[f][row + LEADS[f]] = values[f]`` for every field f.

    A value is plain memory; or, where STRIDES[f] is not -1, WIDTHS[f] entries of plain memory every STRIDES[f] entries.
    A program copies ENTRIES[f] of the COUNTS[f] entries of one field: those from FIRSTS[f] to FIRSTS[f + 1] field f.
    """
    program = tl.program_id(0)
    for f in tl.static_range(len(COUNTS)):
        if (program >= FIRSTS[f]) & (program < FIRSTS[f + 1]):
            begin = program - FIRSTS[f]
            # Short numbers, unless the value or the memory that it is spread over is too long for them.
            if (COUNTS[f] >= 2**31) | (COUNTS[f] // WIDTHS[f] * STRIDES[f] >= 2**31):
                begin = begin.to(tl.int64)
            begin = begin * ENTRIES[f]
            entry = tl.arange(0, ENTRIES[f])
            inside = entry < COUNTS[f] - begin
            if STRIDES[f] == -1:
                source = values[f] + begin + entry
            else:
                source = values[f] + (begin + entry) // WIDTHS[f] * STRIDES[f] + (begin + entry) % WIDTHS[f]
            value = tl.load(source, mask=inside, other=0)
            target = blocks[f] + (row + LEADS[f]) * COUNTS[f] + begin + entry
            if FLAGS[f]:
                tl.store(target, (value != 0).to(blocks[f].dtype.element_ty), mask=inside)
            else:
                tl.store(target, value, mask=inside)
            if RULES[f] != 0:
                count_invalid(invalid, value, (begin + entry) % WIDTHS[f], inside, limits,
                              RULES[f], FIRST_PAIRS[f], PAIRS[f])  # fmt: skip


@dataclass(frozen=True)
class _Target:
    """Where a field's value goes."""

    block: Tensor
    lead: int
    is_flag: bool
    count: int  # entries of a row


@dataclass(frozen=True)
class _Plan:
    """How rows of one kind are written: which values have something to copy, where to, and by what."""

    places: tuple[int, ...]
    blocks: tuple[Tensor, ...]
    launcher: Launcher
    grid: tuple[int, int, int]


class RowWriter:
    """Writes one time row into several blocks without waiting for the device.

    Values that are strided in their first dimension alone are read as they are, as an expanded row or the columns of a
    wider tensor; others that are not contiguous are copied first.
    """

    def __init__(self, targets: Sequence[Target], rules: Mapping[int, Rule] = NO_RULES) -> None:
        self._targets = [
            _Target(block, lead, is_flag, math.prod(block.shape[1:])) for block, lead, is_flag, _ in targets
        ]
        self._device = targets[0][0].device if targets else torch.device("cpu")
        self._launcher = RowLauncher(targets)
        self._plans: dict[bytes, _Plan] = {}  # by what the launcher calls the kind of a row
        self._bound: set[bytes] = set()  # kinds of rows that the launcher writes alone
        self._rules, self._invalid = rule_table(rules, len(targets), self._device), Counts(self._device)
        self._has_rules = bool(rules)
        self._own = Fixed((self._invalid.memory, self._rules.limits))

    @property
    def invalid(self) -> Tensor:
        """Rewards that were not finite and actions outside of their space that were written, int64 ``[2]``."""
        return self._invalid.memory

    def write(self, row: int, values: tuple[Tensor | None, ...]) -> int:
        """Write, and return -1; or the index of the first value that does not fit as it is, having written nothing."""
        if row == 0 and self._has_rules:  # a rollout begins
            self._invalid.look()
        found = self._launcher.write(row, values)
        while isinstance(found, int):
            if found >= 0:
                return found
            values = _with_copy(values, ~found)
            found = self._launcher.write(row, values)
        if found is not None:
            self._launch(found, row, values)
        return -1

    def _launch(self, kind: bytes, row: int, values: tuple[Tensor | None, ...]) -> None:
        """Write a row that :class:`RowLauncher` cannot, and let it write the next ones of its kind."""
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plans[kind] = self._plan(values)
        given = tuple([values[place] for place in plan.places])
        plan.launcher(plan.grid, self._device, given, plan.blocks, self._own, row)  # type: ignore[arg-type]
        bound = plan.launcher.bound(self._device)
        if bound is not None and kind not in self._bound:
            self._bound.add(kind)
            self._launcher.bind(kind, bound, plan.grid[0], plan.places, self._own)

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
            *(tuple(part[place] for place in places) for part in self._rules[1:]),
        )
        return _Plan(
            places,
            tuple(target.block for _, target in copied),
            Launcher(write_row, constants, _WARPS),
            (firsts[-1], 1, 1),
        )


def _with_copy(values: tuple[Tensor | None, ...], place: int) -> tuple[Tensor | None, ...]:
    """The values with one of them in plain memory."""
    value: Any = values[place]
    return (*values[:place], value.detach().resolve_conj().resolve_neg().contiguous(), *values[place + 1 :])
