"""Rows in, transitions out, in Triton: one launch for all tensors of a batch, the draw included."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.cuda.replay_gather_kernels import gather_rows
from rlstore.kernels.cuda.replay_memory import place_of, plain, tile_of
from rlstore.kernels.cuda.replay_priorities import Priorities, as_float
from rlstore.kernels.cuda.replay_ring import EpisodeRing
from rlstore.kernels.replay_blocks import Block

_OBSERVATION, _NEXT, _COLUMN, _REWARDS, _DISCOUNTS, _HELD = 0, 1, 2, 3, 4, 8
_TILE_ELEMENTS = 2048  # of a program
_MOST_ROWS = 16  # that a program makes
_MOST_SHARES = 32  # programs that share wide rows

Request = tuple[int, int, bool, tuple[int, ...]]


class ReplayGather:
    """What a batch consists of, bound to a ring; see the reference.

    A row that is not held gives zeros, as -1 does: the host would have to wait to tell of it.

    Args:
        ring: Where from.
        requests: ``(part, leaf or column, as float32, shape of one row)`` for each output.
        n_step: Steps of a window, at most.
        gamma: The discount factor.
    """

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
        self._most_rows = min(max(_TILE_ELEMENTS // max(tiles), 1), _MOST_ROWS)
        powers = torch.tensor([gamma**k for k in range(self._n_step + 1)], dtype=torch.float64)
        with torch.inference_mode(False):
            self._powers = powers.to(torch.float32).to(ring.device)
            self._ticket = torch.zeros(1, dtype=torch.int32, device=ring.device)
        self._launchers: dict[tuple[bool, bool, int], Launcher] = {}
        self._settled = (1, 1)
        self._bound: object = None
        self._tables: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())

    def _block_of(self, request: Request) -> Block:
        part, index, _, shape = request
        ring = self._ring
        if part not in range(_HELD + 1):
            raise ValueError("a request for a part that there is not")
        if part in (_OBSERVATION, _NEXT):
            block = ring.leaves[index]
        else:
            block = ring.columns[index if part == _COLUMN else ring.reward]
        elements = block.size * block.stack if part <= _REWARDS else 1
        if math.prod(shape) != elements:
            raise ValueError("a request's shape is not that of its rows")
        return block

    def _is_early(self, index: int, tile: int) -> bool:
        """True if an output is what a row shows in one place that its number tells, and one look takes all of it."""
        part, block = self._requests[index][0], self._blocks[index]
        if block.stack > 1 or block.size > self._shares * tile:
            return False
        return part in (_OBSERVATION, _COLUMN) or (part in (_NEXT, _REWARDS) and self._n_step == 1)

    def sample(self, generator: Tensor, count: int) -> tuple[Tensor, ...]:
        """:meth:`gather` of ``count`` rows drawn as the ring draws them, in the same launch."""
        self._ring.check_generator(generator)
        outputs = self._outputs((count,), None)
        self._launch(outputs, generator, generator, count, draws=True)
        return outputs

    def sample_by_priority(
        self, priorities: Priorities, generator: Tensor, beta: float, count: int
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """:meth:`gather` of ``count`` rows drawn by priority, in three launches.

        Returns:
            The tensors, the weights ``[count, 1]`` and the rows ``[count]``; see :meth:`Priorities.draw`.
        """
        rows = torch.empty(count, dtype=torch.int64, device=self._device)
        weights = torch.empty((count, 1), dtype=torch.float32, device=self._device)
        unfinished = (weights, *priorities.begin_draw(generator, rows, weights))
        outputs = self._outputs((count,), None)
        self._settled = priorities.settled[-2:]
        self._launch(outputs, rows, generator, count, draws=False, unfinished=unfinished, beta=as_float(beta))
        return outputs, weights, rows

    def gather(self, rows: Tensor, given: tuple[Tensor | None, ...] | None) -> tuple[Tensor, ...]:
        """One tensor ``[*rows.shape, ...]`` for each request: those given or (None) new ones.

        A row of -1, or one that is not held, gives zeros.
        """
        if rows.dtype != torch.int64:
            raise ValueError("rows are int64")
        if given is not None and len(given) != len(self._requests):
            raise ValueError("gather: an output for each request")
        outputs = self._outputs(tuple(rows.shape), given)
        rows = rows.to(self._device, non_blocking=True).contiguous()
        self._launch(outputs, rows, rows, rows.numel(), draws=False)
        return outputs

    def _outputs(self, lead: tuple[int, ...], given: tuple[Tensor | None, ...] | None) -> tuple[Tensor, ...]:
        outputs = []
        for k, (_, _, _, shape) in enumerate(self._requests):
            out = None if given is None else given[k]
            if out is None:
                out = torch.empty((*lead, *shape), dtype=self._dtypes[k], device=self._device)
            elif out.dtype != self._dtypes[k] or out.numel() != math.prod(lead) * math.prod(shape):
                raise ValueError("gather: an output does not fit")
            outputs.append(out)
        return tuple(outputs)

    def _launch(
        self,
        outputs: tuple[Tensor, ...],
        rows: Tensor,
        generator: Tensor,
        count: int,
        *,
        draws: bool,
        unfinished: tuple[Tensor, ...] | None = None,
        beta: float = 0.0,
    ) -> None:
        ring = self._ring
        ring.check_capture()
        if self._bound is not ring.tables:
            self._bind()
        block = self._most_rows if count >= 128 * self._most_rows else max(self._most_rows // 4, 1)
        kind = (draws, unfinished is not None, block)
        launcher = self._launchers.get(kind)
        if launcher is None:
            launcher = self._launchers[kind] = Launcher(gather_rows, (*self._constants, self._settled, *kind))
        launcher(
            (-(-count // block), self._shares, 1),
            self._device,
            tuple([plain(output) for output in outputs]),
            rows,
            generator,
            self._sources,
            *self._tables,
            self._rewards,
            self._powers,
            ring.episode_place.memory,
            ring.episodes,
            ring.counter_places[0].memory,
            ring.counter_places[1].memory,
            ring.ends,
            ring.words,
            self._ticket,
            (self._powers,) if unfinished is None else unfinished,
            count,
            beta,
        )

    def _bind(self) -> None:
        """Take the tables that the ring has now."""
        ring = self._ring
        finals, starts = list(self._sources), list(self._sources)  # from which nothing is read where there is no table
        for k, (part, index, _, _) in enumerate(self._requests):
            leaf = ring.leaves[index] if part in (_OBSERVATION, _NEXT) else None
            if leaf is not None and leaf.finals is not None:
                finals[k] = plain(leaf.finals.view(leaf.dtype))
            if leaf is not None and leaf.starts is not None:
                starts[k] = plain(leaf.starts.view(leaf.dtype))
        self._tables, self._bound = (tuple(finals), tuple(starts)), ring.tables


def _dtype(request: Request, block: Block) -> torch.dtype:
    part, _, as_float, _ = request
    if as_float or part in (_REWARDS, _DISCOUNTS):
        return torch.float32
    return block.dtype if part <= _COLUMN else torch.bool
