"""Recurrent mini-batches: two launches to find all trajectories, and one for each mini-batch."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from rlstore.kernels.cuda.gather import programs_of
from rlstore.kernels.cuda.launch import Launcher, next_power_of_2
from rlstore.kernels.cuda.segments_kernels import count_trajectories, fill_fields, tabulate

# Lanes of a program that looks for trajectories, and the most steps that it looks at together.
_LANES, _MOST_STEPS = 32, 64
_COUNTED = 1024
_MASKED = 1024
_WARPS = 2
_PADDED, _STATE, _COPIED = 0, 1, 2


def tabulate_trajectories(dones: Tensor, width: int, table: Tensor, totals: Tensor) -> None:
    """Lane, first step and length of the trajectories of each mini-batch: see the reference."""
    steps, lanes = dones.shape[:2]
    device, batches = dones.device, totals.shape[0]
    at_once = min(max(next_power_of_2(steps), 4), _MOST_STEPS)
    counts = torch.empty(lanes, dtype=torch.int32, device=device)
    count, make_table = _finders(dones.dtype, at_once)
    count((-(-lanes // _LANES), 1, 1), device, dones, counts, steps, lanes)
    grid = (-(-width // _LANES), batches, 1)
    make_table(grid, device, dones, counts, table, totals, steps, lanes, width, table.shape[1])


@cache
def _finders(dtype: torch.dtype, at_once: int) -> tuple[Launcher, Launcher]:
    return Launcher(count_trajectories, (at_once, _LANES)), Launcher(tabulate, (at_once, _LANES, _COUNTED))


def fill_trajectories(
    padded: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    copied: tuple[Tensor, ...],
    table: Tensor,
    totals: Tensor,
    batch: int,
    width: int,
    targets: tuple[Tensor, ...],
    mask: Tensor,
) -> None:
    """All tensors of one recurrent mini-batch, and its mask: see the reference."""
    sources = (*padded, *states, *copied)
    steps, trajectories = mask.shape
    lanes = (padded or copied)[0].shape[1]
    fields: tuple[tuple[int, int, int, torch.dtype], ...] = (
        *((_PADDED, 1, math.prod(source.shape[2:]), source.dtype) for source in padded),
        *((_STATE, source.shape[1], source.shape[3], source.dtype) for source in states),
        *((_COPIED, 1, math.prod(source.shape[2:]), source.dtype) for source in copied),
    )
    there = [index for index, (_, layers, own_width, _) in enumerate(fields) if layers * own_width]
    if len(there) < len(fields):  # nothing is copied of a field without entries
        fields = tuple(fields[index] for index in there)
        sources, targets = (tuple(group[index] for index in there) for group in (sources, targets))
    launcher, programs = _filler(fields)
    count = steps * -(-trajectories // _MASKED)
    for (kind, layers, _, _), (rows, parts) in zip(fields, programs, strict=True):
        across = width if kind == _COPIED else trajectories
        count += -(-across // rows) * parts * (layers if kind == _STATE else steps)
    numbers = (batch, steps, lanes, width, trajectories, table.shape[1])
    launcher((count, 1, 1), mask.device, sources, targets, mask, table, totals, *numbers)


@cache
def _filler(fields: tuple[tuple[int, int, int, torch.dtype], ...]) -> tuple[Launcher, list[tuple[int, int]]]:
    """What fills these fields, and for each the rows that a program takes and the parts of a row."""
    shared = [programs_of(width, dtype.itemsize) for _, _, width, dtype in fields]
    constants = (
        tuple(kind for kind, _, _, _ in fields),
        tuple(layers for _, layers, _, _ in fields),
        tuple(width for _, _, width, _ in fields),
        tuple(rows for rows, _, _ in shared),
        tuple(parts for _, parts, _ in shared),
        tuple(columns for _, _, columns in shared),
        _MASKED,
    )
    return Launcher(fill_fields, constants, _WARPS), [(rows, parts) for rows, parts, _ in shared]
