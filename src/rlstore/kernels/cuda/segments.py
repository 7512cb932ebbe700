"""Recurrent mini-batches: two launches to find all trajectories, and one for each mini-batch.

Loops are written with ``while``: Triton's interpreter cannot count to a number that was an argument.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.cuda.gather import programs_of
from rlstore.kernels.cuda.launch import Launcher, next_power_of_2

# Lanes of a program that looks for trajectories, and the most steps that it looks at together.
_LANES, _MOST_STEPS = 32, 64
_COUNTED = 1024
_MASKED = 1024
_WARPS = 2


@triton.jit(do_not_specialize=["steps", "lanes"])
def count_trajectories(dones, counts, steps: tl.int64, lanes: tl.int64, STEPS: tl.constexpr, LANES: tl.constexpr):
    """How many trajectories each lane falls into: one more than episodes ended before the last step."""
    own_lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    lane = own_lane[None, :]
    found = tl.full([LANES], 1, tl.int32)
    first = 0
    while first < steps - 1:
        t = first + tl.arange(0, STEPS)[:, None]
        done = tl.load(dones + t * lanes + lane, mask=(t < steps - 1) & (lane < lanes), other=0) != 0
        found += tl.sum(done.to(tl.int32), 0)
        first += STEPS
    tl.store(counts + own_lane, found, mask=own_lane < lanes)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["steps", "lanes", "width", "room"])
def tabulate(
    dones, counts, table, totals, steps: tl.int64, lanes: tl.int64, width: tl.int64, room: tl.int64,
    STEPS: tl.constexpr, LANES: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Lane, first step and length of every trajectory of each mini-batch of ``width`` lanes, lane by lane.

    The three stand ``room`` entries apart in ``table``; mini-batch b has the entries from ``b * width * steps`` on.
    """
    batch = tl.program_id(1).to(tl.int64)
    first_lane = tl.program_id(0).to(tl.int64) * LANES
    # Trajectories of the lanes before: no program waits for another.
    before = tl.zeros([COUNTED], tl.int32)
    counted = 0
    while counted < first_lane:
        place = counted + tl.arange(0, COUNTED)
        before += tl.load(counts + batch * width + place, mask=place < first_lane, other=0)
        counted += COUNTED
    own_lane = first_lane + tl.arange(0, LANES)
    own = tl.load(counts + batch * width + own_lane, mask=own_lane < width, other=0)
    following = tl.sum(before, 0) + tl.cumsum(own, 0)
    place = following - own  # of each lane's first trajectory
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(totals + batch, tl.max(following, 0))

    lane = batch * width + own_lane[None, :]
    entries = table + batch * width * steps
    begun = tl.zeros([LANES], tl.int32)  # where the trajectory began that the step before the present ones is in
    first = 0
    while first < steps:
        t = first + tl.arange(0, STEPS)[:, None]
        inside = (t < steps) & (own_lane[None, :] < width)
        at = t * lanes + lane
        ends = (tl.load(dones + at, mask=inside, other=0) != 0) | (t == steps - 1)
        ends = (ends & inside).to(tl.int32)
        ended_before = tl.load(dones + at - lanes, mask=inside & (t > 0), other=0) != 0
        starts = tl.where(ended_before, t, 0).to(tl.int32)
        starts = tl.maximum(tl.associative_scan(starts, 0, _later), begun[None, :])
        entry = (place[None, :] + tl.cumsum(ends, 0) - ends).to(tl.int64)
        stored = ends != 0
        tl.store(entries + entry, (lane + 0 * t).to(tl.int32), mask=stored)
        tl.store(entries + room + entry, starts, mask=stored)
        tl.store(entries + 2 * room + entry, (t + 1 - starts).to(tl.int32), mask=stored)
        place += tl.sum(ends, 0)
        begun = tl.maximum(begun, tl.max(tl.where(inside, starts, 0), 0))
        first += STEPS


# What a field of a recurrent mini-batch is made of.
PADDED = tl.constexpr(0)
STATE = tl.constexpr(1)
COPIED = tl.constexpr(2)


@triton.jit
def _source_rows(
    entries, room, outer, inner, inside, total, lanes, first_lane, KIND: tl.constexpr, LAYERS: tl.constexpr
):
    """The rows of the source that stand at ``[outer, inner]`` of the target, and whether there are any."""
    if KIND == COPIED:
        row = outer * lanes + first_lane + inner
        there = inside
    else:
        # What the table holds from ``total`` on means nothing, but it is read without waiting for the total.
        lane = tl.load(entries + inner, mask=inside, other=0).to(tl.int64)
        start = tl.load(entries + room + inner, mask=inside, other=0).to(tl.int64)
        if KIND == PADDED:
            length = tl.load(entries + 2 * room + inner, mask=inside, other=0)
            there = inside & (inner < total) & (outer < length)
            row = (start + outer) * lanes + lane
        else:
            there = inside & (inner < total)
            row = (start * LAYERS + outer) * lanes + lane
    return row, there


@triton.jit(do_not_specialize=["batch", "steps", "lanes", "width", "trajectories", "room"])
def fill_fields(
    sources, targets, mask, table, totals, batch: tl.int64, steps: tl.int64, lanes: tl.int64, width: tl.int64,
    trajectories: tl.int64, room: tl.int64, KINDS: tl.constexpr, LAYERS: tl.constexpr, WIDTHS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All tensors of recurrent mini-batch ``batch``: padded ones, first states, copies, and the mask.

    A program copies ROWS[f] rows of one field, side by side in the target, or one of the PARTS[f] parts of a wide row,
    in a tile of COLUMNS[f] columns; or MASKED entries of the mask.
    """
    program = tl.program_id(0).to(tl.int64)
    entries = table + batch * width * steps
    total = tl.minimum(tl.load(totals + batch).to(tl.int64), trajectories)
    most = tl.minimum(trajectories, width * steps)  # that the table has room for
    first_program = program * 0
    for f in tl.static_range(len(WIDTHS)):
        across = width if KINDS[f] == COPIED else trajectories
        blocks = (across + ROWS[f] - 1) // ROWS[f] * PARTS[f]
        programs = blocks * (LAYERS[f] if KINDS[f] == STATE else steps)
        if (program >= first_program) & (program < first_program + programs):
            number = (program - first_program).to(tl.int32)
            outer = number // blocks.to(tl.int32)
            number = number % blocks.to(tl.int32)
            inner = (number // PARTS[f]).to(tl.int64) * ROWS[f] + tl.arange(0, ROWS[f])[:, None]
            column = number % PARTS[f] * COLUMNS[f] + tl.arange(0, COLUMNS[f])[None, :]
            known = inner < (width if KINDS[f] == COPIED else most)
            row, there = _source_rows(
                entries, room, outer, inner, known, total, lanes, batch * width, KINDS[f], LAYERS[f]
            )
            inside = column < WIDTHS[f]
            x = tl.load(sources[f] + row * WIDTHS[f] + column, mask=there & inside, other=0)
            tl.store(targets[f] + (outer * across + inner) * WIDTHS[f] + column, x, mask=inside & (inner < across))
        first_program += programs
    blocks = (trajectories + MASKED - 1) // MASKED
    if program >= first_program:
        number = (program - first_program).to(tl.int32)
        t = number // blocks.to(tl.int32)
        inner = (number % blocks.to(tl.int32)).to(tl.int64) * MASKED + tl.arange(0, MASKED)
        length = tl.load(entries + 2 * room + inner, mask=inner < most, other=0)
        tl.store(mask + t * trajectories + inner, (t < length) & (inner < total), mask=inner < trajectories)


def tabulate_trajectories(dones: Tensor, width: int, table: Tensor, totals: Tensor) -> None:
    """Lane, first step and length of the trajectories of each mini-batch."""
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
    padded: tuple[Tensor, ...], states: tuple[Tensor, ...], copied: tuple[Tensor, ...], table: Tensor, totals: Tensor,
    batch: int, width: int, targets: tuple[Tensor, ...], mask: Tensor,
) -> None:  # fmt: skip
    """All tensors of one recurrent mini-batch, and its mask."""
    sources = (*padded, *states, *copied)
    steps, trajectories = mask.shape
    lanes = (padded or copied)[0].shape[1]
    fields: tuple[tuple[int, int, int, torch.dtype], ...] = (
        *((PADDED.value, 1, math.prod(source.shape[2:]), source.dtype) for source in padded),
        *((STATE.value, source.shape[1], source.shape[3], source.dtype) for source in states),
        *((COPIED.value, 1, math.prod(source.shape[2:]), source.dtype) for source in copied),
    )
    there = [index for index, (_, layers, own_width, _) in enumerate(fields) if layers * own_width]
    if len(there) < len(fields):  # nothing is copied of a field without entries
        fields = tuple(fields[index] for index in there)
        sources, targets = (tuple(group[index] for index in there) for group in (sources, targets))
    launcher, programs = _filler(fields)
    count = steps * -(-trajectories // _MASKED)
    for (kind, layers, _, _), (rows, parts) in zip(fields, programs, strict=True):
        across = width if kind == COPIED.value else trajectories
        count += -(-across // rows) * parts * (layers if kind == STATE.value else steps)
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
