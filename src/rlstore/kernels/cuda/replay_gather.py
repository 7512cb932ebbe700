"""Batches of a ring in Triton: every tensor in one launch, which may draw the rows too, or finish a draw by priority.

A program makes a few rows of every tensor. Where rows are wide, several programs share them: those of the second axis
of the grid take the tiles of a row in turn. Of request ``k``, ``PARTS[k]`` says what it holds; the other lists say
where its field is, as in ``ring.py``.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.cuda.draws import TOTAL, move_on, uniform_rows
from rlstore.kernels.cuda.launch import Fixed, Launcher
from rlstore.kernels.cuda.memory import place_of, plain, tile_of
from rlstore.kernels.cuda.priorities import Priorities, new_rows, settle, weigh
from rlstore.kernels.cuda.ring import KEPT, REPEATED, TERMINATED, TRUNCATED, EpisodeRing
from rlstore.kernels.pieces import Pieces
from rlstore.kernels.protocol import Part, Request
from rlstore.kernels.ring_memory import Block, as_float32

# Elements and rows of a program at most; and as many as are best where a batch is not large.
_TILE_ELEMENTS, _MOST_ROWS = 2048, 16
_ELEMENTS, _FEW_ROWS = 256, 4
_FEW_PROGRAMS, _MANY_PROGRAMS = 128, 1024  # where there would be fewer or more, a program makes fewer or more rows
_WARPS, _FEW_WARPS, _FEW_ELEMENTS = 4, 2, 512  # groups of threads of a program, and of one with few elements
_MOST_SHARES = 32  # programs that share wide rows
_MOST_PLANS = 64  # that are remembered

# What an output holds: see Part.
OBSERVATION = tl.constexpr(Part.OBSERVATION.value)
NEXT = tl.constexpr(Part.NEXT_OBSERVATION.value)
COLUMN = tl.constexpr(Part.COLUMN.value)
REWARDS = tl.constexpr(Part.REWARDS.value)
DISCOUNTS = tl.constexpr(Part.DISCOUNTS.value)
TERMINATED_PART = tl.constexpr(Part.TERMINATED.value)
TRUNCATED_PART = tl.constexpr(Part.TRUNCATED.value)
FIRST = tl.constexpr(Part.IS_FIRST.value)


@triton.jit
def _single_frames(
    out, early, source, finals, number, alive, there, at_end, row, episode,
    SIZE: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, IS_EARLY: tl.constexpr, HAS_FINALS: tl.constexpr,
):  # fmt: skip
    """Rows that are not stacked; where ``at_end`` those of the table of final observations."""
    for c in range(0, SIZE, SHARES * TILE):
        e = c + tl.program_id(1) * TILE + tl.arange(0, TILE)
        fits = (e < SIZE)[None, :]
        if IS_EARLY:
            value = tl.where(there[:, None], early, tl.zeros_like(early))
        else:
            value = tl.load(source + row[:, None] + e[None, :], mask=(there & (at_end == 0))[:, None] & fits, other=0)
        if HAS_FINALS:
            ended = (there & at_end)[:, None] & fits
            final = tl.load(finals + (episode * SIZE)[:, None] + e[None, :], mask=ended, other=0)
            value = tl.where(ended, final, value)
        tl.store(out + (number * SIZE)[:, None] + e[None, :], value.to(out.dtype.element_ty),
                 mask=alive[:, None] & fits)  # fmt: skip


@triton.jit
def _stacked_frames(
    out, source, finals, starts, number, alive, there, at_end, lane, time, episode, start, padding,
    SIZE: tl.constexpr, STACK: tl.constexpr, INNER: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stacks put together from the frames of rows, and what was before the first one of the episode."""
    first = OFFSET + lane * LANE_STRIDE
    for c in range(0, SIZE * STACK, SHARES * TILE):
        w = c + tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = there[:, None] & (w < SIZE * STACK)[None, :]
        frame = (w // INNER) % STACK
        e = ((w // (STACK * INNER)) * INNER + w % INNER)[None, :]
        at = time[:, None] - (STACK - 1 - frame)[None, :]
        before = inside & (at < start[:, None])
        ended = inside & at_end[:, None] & (frame == STACK - 1)[None, :]
        is_kept, is_repeated = before & (padding == KEPT)[:, None], before & (padding == REPEATED)[:, None]
        value = tl.load(source + first[:, None] + (tl.maximum(at, 0) % ROWS) * ROW_STRIDE + e,
                        mask=inside & (before == 0) & (ended == 0), other=0)  # fmt: skip
        final = tl.load(finals + (episode * SIZE)[:, None] + e, mask=ended, other=0)
        repeated = tl.load(source + (first + (start % ROWS) * ROW_STRIDE)[:, None] + e, mask=is_repeated, other=0)
        place = tl.minimum(tl.maximum(STACK - 1 + at - start[:, None], 0), STACK - 2)
        kept = tl.load(starts + ((episode * (STACK - 1))[:, None] + place) * SIZE + e, mask=is_kept, other=0)
        value = tl.where(ended, final, tl.where(is_repeated, repeated, tl.where(is_kept, kept, value)))
        tl.store(out + (number * (SIZE * STACK))[:, None] + w[None, :], value.to(out.dtype.element_ty),
                 mask=alive[:, None] & (w < SIZE * STACK)[None, :])  # fmt: skip


@triton.jit
def _folded_rewards(
    out, rewards, powers, number, alive, there, lane, time, taken,
    SIZE: tl.constexpr, LANE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``sum_{i < taken} gamma^i r_i``."""
    longest = tl.max(taken, 0)
    for c in range(0, SIZE, TILE):
        e = c + tl.arange(0, TILE)
        fits = (e < SIZE)[None, :]
        total = (number[:, None] * 0 + e[None, :] * 0).to(tl.float32)
        i = longest * 0
        while i < longest:
            inside = (there & (i < taken))[:, None] & fits
            row = OFFSET + lane * LANE_STRIDE + ((time + i) % ROWS) * ROW_STRIDE
            reward = tl.load(rewards + row[:, None] + e[None, :], mask=inside, other=0)
            total = tl.where(inside, total + tl.load(powers + i) * reward, total)
            i += 1
        tl.store(out + (number * SIZE)[:, None] + e[None, :], total, mask=alive[:, None] & fits)


@triton.jit(do_not_specialize=["count", "beta"])
def gather_rows(
    outputs, rows, generator, sources, finals, starts, rewards, powers, episode_of, episodes,
    written, begun, ends, words, ticket, unfinished, count: tl.int64, beta: tl.float64,
    PARTS: tl.constexpr, SIZES: tl.constexpr, STACKS: tl.constexpr, INNERS: tl.constexpr, LANE_STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr, EPISODE_OF: tl.constexpr,
    COUNTERS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, N_STEP: tl.constexpr,
    SHARES: tl.constexpr, EARLY: tl.constexpr, SETTLED: tl.constexpr, DRAWS: tl.constexpr, FINISHES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every output of ``BLOCK`` rows, given or drawn; zeros for a row that is not held."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = number < count
    if DRAWS:
        made = tl.load(generator + 1) + count
        lane, time = uniform_rows(generator, number, ends, words, written, begun, LANES, STEPS, COUNTERS)
        known = alive & (tl.load(words + TOTAL) > 0)
    else:
        row = tl.load(rows + number, mask=alive, other=-1)
        known = row >= 0
        lane, time = tl.maximum(row, 0) % LANES, tl.maximum(row, 0) // LANES
    here = (time % ROWS) * EPISODE_OF[2]
    episode = tl.load(episode_of + EPISODE_OF[0] + lane * EPISODE_OF[1] + here, mask=known, other=0).to(tl.int64)
    # All that depends on the row alone is loaded before the first of it is stored, so that it is waited for once. What
    # stands after a row may not be the next one, and the row may not be held: what must not be used is seen later.
    early = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(len(PARTS)):
        if EARLY[k]:
            e = tl.program_id(1) * TILES[k] + tl.arange(0, TILES[k])
            shown = (time % ROWS + 1) % ROWS if PARTS[k] == NEXT else time % ROWS
            source = OFFSETS[k] + lane * LANE_STRIDES[k] + shown * ROW_STRIDES[k]
            frame = tl.load(sources[k] + source[:, None] + e[None, :],
                            mask=known[:, None] & (e < SIZES[k])[None, :], other=0)  # fmt: skip
            early = early + (frame,)  # noqa: RUF005  (Triton unpacks no tuples)
        else:
            early = early + (number,)  # noqa: RUF005
    newest = tl.load(written + COUNTERS[0] + lane)
    there = known
    if not DRAWS:  # what was drawn is held
        there = there & (time >= tl.load(begun + COUNTERS[1] + lane)) & (time >= newest - STEPS) & (time < newest)
    if FINISHES:
        made = tl.load(generator + 1) + count
        weight = weigh(number, alive, unfinished[0], unfinished[1], beta)
        priority = tl.load(unfinished[3])
        new, oldest = new_rows(0, unfinished[4], unfinished[5], LANES, STEPS, COUNTERS[0], SETTLED[0])
    start = tl.load(episodes + episode * 4, mask=there, other=0)
    stop = tl.load(episodes + episode * 4 + 1, mask=there, other=0)
    how = tl.load(episodes + episode * 4 + 2, mask=there, other=0)
    padding = tl.load(episodes + episode * 4 + 3, mask=there, other=0)
    time = tl.where(there, time, 0)
    is_over = (stop >= 0) & (stop <= newest)
    stop = tl.where(is_over, stop, newest)
    taken = tl.minimum(tl.maximum(stop - time, 0), N_STEP)
    at_end = there & is_over & (time + taken == stop)
    nowhere = number < 0
    for k in tl.static_range(len(PARTS)):
        if (PARTS[k] <= COLUMN) | EARLY[k]:
            shown = time
            ended = nowhere
            if PARTS[k] == NEXT:
                shown = time + taken
                ended = at_end
            if STACKS[k] == 1:
                source = OFFSETS[k] + lane * LANE_STRIDES[k] + (shown % ROWS) * ROW_STRIDES[k]
                _single_frames(outputs[k], early[k], sources[k], finals[k], number, alive, there, ended, source,
                               episode, SIZES[k], TILES[k], SHARES, EARLY[k], PARTS[k] == NEXT)  # fmt: skip
            else:
                _stacked_frames(outputs[k], sources[k], finals[k], starts[k], number, alive, there, ended, lane, shown,
                                episode, start, padding, SIZES[k], STACKS[k], INNERS[k], LANE_STRIDES[k],
                                ROW_STRIDES[k], OFFSETS[k], TILES[k], SHARES, ROWS)  # fmt: skip
        elif tl.program_id(1) == 0:
            if PARTS[k] == REWARDS:
                _folded_rewards(outputs[k], rewards, powers, number, alive, there, lane, time, taken, SIZES[k],
                                LANE_STRIDES[k], ROW_STRIDES[k], OFFSETS[k], TILES[k], ROWS)  # fmt: skip
            elif PARTS[k] == DISCOUNTS:
                power = tl.load(powers + taken, mask=there, other=0.0)
                power = tl.where(at_end & ((how & TERMINATED) != 0), 0.0, power)
                tl.store(outputs[k] + number, power, mask=alive)
            else:
                flag = there
                if PARTS[k] == TERMINATED_PART:
                    flag = at_end & ((how & TERMINATED) != 0)
                elif PARTS[k] == TRUNCATED_PART:
                    flag = at_end & ((how & TRUNCATED) != 0)
                elif PARTS[k] == FIRST:
                    flag = there & (start == time)
                tl.store(outputs[k] + number, flag.to(tl.uint8), mask=alive)
    if DRAWS:
        move_on(generator + 1, ticket, made)
    if FINISHES:  # noqa: SIM102  (this is known when it is compiled, the other not)
        if tl.program_id(1) == 0:
            tl.store(unfinished[0] + number, weight, mask=alive)
            settle(new, oldest, unfinished[2], priority, unfinished[4], unfinished[5],
                   LANES, STEPS, COUNTERS[0], SETTLED[0], SETTLED[1])  # fmt: skip
            if tl.program_id(0) == 0:
                tl.store(generator + 1, made)


class _Plan(NamedTuple):
    """How batches of one size are made."""

    outputs: Pieces  # drawn by priority, with their weights and rows
    launcher: Launcher
    grid: tuple[int, int, int]


class ReplayGather:
    """The tensors of a batch, gathered without waiting for the device: a row that is not held gives zeros."""

    def __init__(self, ring: EpisodeRing, requests: tuple[Request, ...], n_step: int, gamma: float) -> None:
        if n_step < 1:
            raise ValueError("n_step is at least 1")
        self._ring, self._requests = ring, requests
        self._n_step, self._device = min(n_step, ring.steps), ring.device
        self._blocks = [self._block_of(request) for request in requests]
        self._dtypes = [_dtype(request, block) for request, block in zip(requests, self._blocks, strict=True)]
        places = [place_of(plain(block.rows.view(block.dtype))) for block in self._blocks]
        self._sources = tuple(place.memory for place in places)
        reward = ring.columns[ring.reward]
        self._rewards = place_of(reward.rows.view(reward.dtype)).memory
        tiles = tuple(tile_of(math.prod(shape)) for _, _, _, shape in requests)
        self._shares = min(-(-max(math.prod(shape) for _, _, _, shape in requests) // max(tiles)), _MOST_SHARES)
        self._constants = (
            tuple(part for part, _, _, _ in requests),
            tuple(block.size for block in self._blocks),
            tuple(block.stack for block in self._blocks),
            tuple(block.size // block.outer for block in self._blocks),
            tuple(place.strides[0] for place in places),
            tuple(place.strides[1] for place in places),
            tuple(place.offset for place in places),
            tiles,
            (ring.episode_place.offset, *ring.episode_place.strides),
            tuple(place.offset for place in ring.counter_places),
            *(ring.lanes, ring.steps, ring.rows, self._n_step, self._shares),
            tuple(self._is_early(k, tiles[k]) for k in range(len(requests))),
        )
        self._tile = max(tiles)
        self._most_rows = min(max(_TILE_ELEMENTS // self._tile, 1), _MOST_ROWS)
        powers = torch.tensor([gamma**k for k in range(self._n_step + 1)], dtype=torch.float64)
        with torch.inference_mode(False):
            self._powers = powers.to(torch.float32).to(ring.device)
            self._ticket = torch.zeros(1, dtype=torch.int32, device=ring.device)
        self._has_bools = torch.bool in self._dtypes
        self._launchers: dict[tuple[bool, bool, int], Launcher] = {}
        self._plans: dict[tuple[tuple[int, ...], bool, bool], _Plan] = {}  # by leading axes, whether it draws, finishes
        self._unfinished: tuple[Tensor | Fixed, ...] = (self._powers,)  # from which nothing is read
        self._settled = (1, 1)
        self._bound: object = None
        self._memory: Fixed  # that of the ring, as it was when it was bound

    def _block_of(self, request: Request) -> Block:
        part, index, _, shape = request
        ring = self._ring
        if part not in list(Part):
            raise ValueError("a request for a part that there is not")
        if part in (Part.OBSERVATION, Part.NEXT_OBSERVATION):
            block = ring.leaves[index]
        else:
            block = ring.columns[index if part == Part.COLUMN else ring.reward]
        elements = block.size * block.stack if part <= Part.REWARDS else 1
        if math.prod(shape) != elements:
            raise ValueError("a request's shape is not that of its rows")
        return block

    def _is_early(self, index: int, tile: int) -> bool:
        """True if an output is at one place that the row id alone determines, and one tile holds all of it."""
        part, block = self._requests[index][0], self._blocks[index]
        if block.stack > 1 or block.size > self._shares * tile:
            return False
        return part in (Part.OBSERVATION, Part.COLUMN) or (
            part in (Part.NEXT_OBSERVATION, Part.REWARDS) and self._n_step == 1
        )

    def sample(self, generator: Tensor, count: int) -> tuple[Tensor, ...]:
        """:meth:`gather` of ``count`` rows drawn as the ring draws them, in the same launch."""
        self._ring.check_generator(generator)
        plan = self._plans.get(((count,), True, False)) or self._plan((count,), draws=True)
        outputs = plan.outputs.tensors()
        self._launch(plan, outputs, generator, generator, self._unfinished, count, 0.0)
        return outputs

    def sample_by_priority(
        self, priorities: Priorities, generator: Tensor, beta: float, count: int
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """:meth:`gather` of ``count`` rows drawn by priority, in three launches.

        Returns:
            The tensors, the weights ``[count, 1]`` and the rows ``[count]``; see :meth:`Priorities.draw`.
        """
        self._settled = priorities.settled[-2:]
        plan = self._plans.get(((count,), False, True)) or self._plan((count,), finishes=True)
        tensors = plan.outputs.tensors()
        outputs, weights, rows = tensors[:-2], tensors[-2], tensors[-1]
        priorities.begin_draw(generator, rows, weights, count)
        unfinished = (weights, priorities.unfinished)
        self._launch(plan, outputs, rows, generator, unfinished, count, as_float32(beta))
        return outputs, weights, rows

    def sample_windows(self, windows: object, priorities: object, generator: Tensor, beta: float, count: int) -> None:
        """None: drawing windows and gathering are two calls here."""

    def gather(self, rows: Tensor, given: tuple[Tensor | None, ...] | None) -> tuple[Tensor, ...]:
        """One tensor ``[*rows.shape, ...]`` for each request: those given or (None) new ones.

        A row of -1, or one that is not held, gives zeros.
        """
        if rows.dtype != torch.int64:
            raise ValueError("rows are int64")
        if given is not None and len(given) != len(self._requests):
            raise ValueError("gather: an output for each request")
        lead = tuple(rows.shape)
        plan = self._plans.get((lead, False, False)) or self._plan(lead)
        outputs = plan.outputs.tensors() if given is None else self._outputs(lead, given)
        rows = rows.to(self._device, non_blocking=True).contiguous()
        self._launch(plan, outputs, rows, rows, self._unfinished, rows.numel(), 0.0)
        return outputs

    def _plan(self, lead: tuple[int, ...], *, draws: bool = False, finishes: bool = False) -> _Plan:
        """For batches ``[*lead, ...]`` of rows that are given, are drawn too, or finish a draw by priority."""
        if len(self._plans) == _MOST_PLANS:
            self._plans.clear()
        count = math.prod(lead)
        block = self._rows_of_program(count)
        kind = (draws, finishes, block)
        if kind not in self._launchers:
            warps = _FEW_WARPS if block * self._tile <= _FEW_ELEMENTS else _WARPS
            self._launchers[kind] = Launcher(gather_rows, (*self._constants, self._settled, *kind), warps)
        shapes, dtypes = [(*lead, *shape) for _, _, _, shape in self._requests], list(self._dtypes)
        if finishes:
            shapes, dtypes = [*shapes, (*lead, 1), lead], [*dtypes, torch.float32, torch.int64]
        outputs, grid = Pieces(shapes, dtypes, self._device), (-(-count // block), self._shares, 1)
        plan = self._plans[lead, draws, finishes] = _Plan(outputs, self._launchers[kind], grid)
        return plan

    def _rows_of_program(self, count: int) -> int:
        """The rows that a program makes of a batch of ``count``: few, unless there are enough for all processors."""
        few = min(max(_ELEMENTS // self._tile, _FEW_ROWS), self._most_rows)
        if count >= _MANY_PROGRAMS * self._most_rows:
            return self._most_rows
        return few if count >= _FEW_PROGRAMS * few else max(few // 4, 1)

    def _outputs(self, lead: tuple[int, ...], given: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """The outputs that are given, and for each that is not a new one."""
        outputs = []
        for place, dtype, (_, _, _, shape) in zip(given, self._dtypes, self._requests, strict=True):
            out = torch.empty((*lead, *shape), dtype=dtype, device=self._device) if place is None else place
            if out.dtype != dtype or out.numel() != math.prod(lead) * math.prod(shape):
                raise ValueError("gather: an output does not fit")
            outputs.append(out)
        return tuple(outputs)

    def _launch(
        self, plan: _Plan, outputs: tuple[Tensor, ...], rows: Tensor, generator: Tensor,
        unfinished: tuple[Tensor | Fixed, ...], count: int, beta: float,
    ) -> None:  # fmt: skip
        ring = self._ring
        ring.check_capture()
        if self._bound is not ring.tables:
            self._bind()
        served = tuple([plain(output) for output in outputs]) if self._has_bools else outputs
        plan.launcher(
            plan.grid, self._device, served, rows, generator, self._memory, unfinished, count, beta
        )  # fmt: skip

    def _bind(self) -> None:
        """Use the tables that the ring has now."""
        ring = self._ring
        finals, starts = list(self._sources), list(self._sources)  # from which nothing is read where there is no table
        for k, (part, index, _, _) in enumerate(self._requests):
            leaf = ring.leaves[index] if part in (Part.OBSERVATION, Part.NEXT_OBSERVATION) else None
            if leaf is not None:
                finals[k] = plain(leaf.finals.view(leaf.dtype))
            if leaf is not None and leaf.starts is not None:
                starts[k] = plain(leaf.starts.view(leaf.dtype))
        counters = ring.counter_places[0].memory, ring.counter_places[1].memory
        tables = (self._sources, tuple(finals), tuple(starts), self._rewards, self._powers)
        rest = (ring.episode_place.memory, ring.episodes, *counters, ring.ends, ring.words, self._ticket)
        self._memory, self._bound = Fixed((*tables, *rest)), ring.tables


def _dtype(request: Request, block: Block) -> torch.dtype:
    part, _, as_float, _ = request
    if as_float or part in (Part.REWARDS, Part.DISCOUNTS):
        return torch.float32
    return block.dtype if part <= Part.COLUMN else torch.bool
