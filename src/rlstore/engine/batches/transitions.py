"""Transitions and sequences gathered from a ring of episodes, with their n-step targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.batches.gather import LARGE_BYTES
from rlstore.engine.batches.priorities import Priorities
from rlstore.engine.memory.tensors import Recycler
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.kernels import kernel, protocol
from rlstore.kernels.protocol import Part as Part  # exported: requests are made of it


@dataclass(frozen=True)
class Request:
    """One tensor of a batch.

    Attributes:
        part: What it holds.
        index: Which leaf of the observations, or which column.
        shape: The shape of one row of it.
        dtype: Its dtype; another float32 than stored is converted.
    """

    part: Part
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class TransitionGather:
    """Gathers transitions from a ring of episodes, the n-step fold included, in one call.

    Args:
        ring: Where from.
        requests: The tensors of a batch.
        n_step: Steps of a window, at most.
        gamma: The discount factor.
        pin_memory: Whether the results lie in page-locked memory.
    """

    def __init__(
        self, ring: EpisodeRing, requests: Sequence[Request], n_step: int, gamma: float, *, pin_memory: bool = False
    ) -> None:
        self._ring, self._requests, self._fold = ring, tuple(requests), (n_step, gamma)
        self._pin_memory = pin_memory
        self._row_bytes = max(math.prod(request.shape) * request.dtype.itemsize for request in requests)
        self._outputs, self._served = Recycler(), 0
        self._kernel: protocol.ReplayGather | None = None
        self._bound_to: protocol.EpisodeRing | None = None

    def sample(self, count: int, random: Tensor) -> tuple[Tensor, ...] | None:
        """The tensors of ``count`` rows in one call, drawn as ``select.uniform_rows`` draws them."""
        bound = self._bind()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return bound.sample(random, count)
        return bound.sample(random, count)

    def sample_by_priority(
        self, priorities: Priorities, count: int, beta: float, random: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor] | None:
        """The tensors, weights and rows of ``count`` rows drawn as :meth:`Priorities.draw` draws them.

        None where there is no shorter way than to draw and then to gather.
        """
        bound = self._bind()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return bound.sample_by_priority(priorities.kernel, random, beta, count)
        return bound.sample_by_priority(priorities.kernel, random, beta, count)

    def is_small(self, count: int) -> bool:
        """True if the memory of the results of ``count`` rows need not serve again: on a device, or if it is small."""
        if self._ring.device.type != "cpu":
            return True
        return self._row_bytes * count < LARGE_BYTES and not self._pin_memory

    def __call__(self, rows: Tensor) -> tuple[Tensor, ...]:
        """:meth:`attempt`, where nobody else writes."""
        tensors = self.attempt(rows)
        if tensors is None:
            raise RuntimeError("rows were overwritten while they were read")
        return tensors

    def attempt(self, rows: Tensor) -> tuple[Tensor, ...] | None:
        """One tensor ``[*rows.shape, ...]`` for each request; None if another process overwrote rows meanwhile.

        Args:
            rows: Row ids ``time * lanes + lane`` of rows that are held, int64 where the ring is; -1 gives zeros.
        """
        bound = self._bind()
        if self._ring.device.type != "cpu":
            return bound.gather(rows, None)
        outs: tuple[Tensor | None, ...] | None = None
        count = rows.numel()
        if self._pin_memory:
            outs = tuple(torch.empty((*rows.shape, *r.shape), dtype=r.dtype, pin_memory=True) for r in self._requests)
        elif self._row_bytes * count >= LARGE_BYTES:
            self._served += 1
            if self._served % 256 == 0:
                self._outputs.begin()  # what has not served for so long is let go
            outs = tuple(self._large_output(request, rows.shape, count) for request in self._requests)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return bound.gather(rows, outs)
        return bound.gather(rows, outs)

    def _large_output(self, request: Request, lead: torch.Size, count: int) -> Tensor | None:
        """Memory that may have served before, for a large output; None lets the kernel make a small one."""
        if math.prod(request.shape) * request.dtype.itemsize * count < LARGE_BYTES:
            return None
        return self._outputs.empty((*lead, *request.shape), request.dtype, self._ring.device)

    def _bind(self) -> protocol.ReplayGather:
        """The kernel, made when it is first needed, and again for a ring that was copied."""
        ring = self._ring
        if self._kernel is None or self._bound_to is not ring._kernel:
            stored = [*(leaf.field.dtype for leaf in ring.leaves)], [column.dtype for column in ring.columns]
            self._kernel = kernel("ReplayGather", ring.device.type)(
                ring.kernel, tuple(_native_request(request, *stored) for request in self._requests), *self._fold
            )
            self._bound_to = ring.kernel
        return self._kernel

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None, "_bound_to": None}


def _native_request(
    request: Request, leaf_dtypes: Sequence[torch.dtype], column_dtypes: Sequence[torch.dtype]
) -> tuple[int, int, bool, tuple[int, ...]]:
    stored = {
        Part.OBSERVATION: leaf_dtypes,
        Part.NEXT_OBSERVATION: leaf_dtypes,
        Part.COLUMN: column_dtypes,
    }.get(request.part)
    as_float = stored is not None and request.dtype != stored[request.index]
    return int(request.part), request.index, as_float, request.shape
