"""Rows in, tensors out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rlstore.engine.memory.tensors import Allocator, Pieces, ahead_bytes, allocate_empty
from rlstore.kernels import kernel

# Small mini-batches are gathered together and then split: one call instead of hundreds.
GROUP_BYTES = 4 << 20
# Mini-batches of this size and more are gathered one by one.
LARGE_BYTES = 256 << 10
# On CUDA this many mini-batches are gathered in one launch, at most.
MOST_AHEAD = 32


def gather_rows(
    sources: tuple[Tensor, ...], rows: Tensor, dtypes: Sequence[torch.dtype], empty: Allocator = allocate_empty
) -> tuple[Tensor, ...]:
    """Row ``i`` of each result is row ``rows[i]`` of ``source.flatten(0, 1)``.

    Args:
        sources: Blocks ``[steps, lanes, *shape]``, contiguous, on one device.
        rows: Row ids ``time * lanes + lane``, int64 ``[n]``.
        dtypes: The dtype of each result.
        empty: What makes the results.

    Returns:
        New tensors ``[n, *shape]``.
    """
    device = rows.device
    outs = tuple(
        empty((rows.shape[0], *source.shape[2:]), dtype, device) for source, dtype in zip(sources, dtypes, strict=True)
    )
    kernel("gather", device.type)(sources, rows, outs)
    return outs


def gather_slots(sources: tuple[Tensor, ...], slots: Tensor, empty: Allocator = allocate_empty) -> tuple[Tensor, ...]:
    """The rollouts of some slots side by side: ``result[t, i] = source[slots[i], t]``.

    Args:
        sources: Blocks ``[slots, rows, *shape]`` on the CPU, each slot contiguous.
        slots: Slot numbers, int64 ``[n]``.
        empty: What makes the results.

    Returns:
        New tensors ``[rows, n, *shape]``.
    """
    count = len(slots)
    outs = tuple(empty((source.shape[1], count, *source.shape[2:]), source.dtype, slots.device) for source in sources)
    kernel("gather_slots", slots.device.type)(sources, slots, outs)
    return outs


def gather_batches(
    sources: tuple[Tensor, ...],
    rows: Tensor,
    count: int,
    dtypes: Sequence[torch.dtype],
    empty: Allocator = allocate_empty,
) -> Iterator[tuple[Tensor, ...]]:
    """The rows of an epoch ``[count * size]`` as ``count`` mini-batches ``[size, *shape]``, gathered when needed.

    Each tensor has memory of its own, or a part of it that no other tensor uses. Small mini-batches are gathered
    together; on CUDA any are, up to a part of the device's memory.
    """
    if rows.is_cuda:
        yield from gather_ahead(sources, rows, count, dtypes, ahead_bytes(rows.device))
        return
    size = rows.shape[0] // count
    row_bytes = sum(source.shape[2:].numel() * dtype.itemsize for source, dtype in zip(sources, dtypes, strict=True))
    if size * row_bytes >= LARGE_BYTES:
        for group in torch.split(rows, size):
            yield gather_rows(sources, group, dtypes, empty)
        return
    for group in torch.split(rows, max(1, GROUP_BYTES // max(1, size * row_bytes)) * size):
        gathered = gather_rows(sources, group, dtypes, empty)
        # Not split(): each part has to be a tensor with a version counter of its own, which a caller may change.
        parts = [torch.unsafe_split(whole, size) for whole in gathered]
        del gathered
        yield from zip(*parts, strict=True)


def gather_ahead(
    sources: tuple[Tensor, ...], rows: Tensor, count: int, dtypes: Sequence[torch.dtype], most_bytes: int
) -> Iterator[tuple[Tensor, ...]]:
    """:func:`gather_batches` for CUDA: several mini-batches in one launch, each in memory of its own.

    Args:
        sources: As for :func:`gather_batches`, and so the others.
        rows: The rows of the epoch, ``[count * size]``.
        count: Mini-batches.
        dtypes: The dtype of each result.
        most_bytes: The most that is gathered in one launch.
    """
    size = rows.shape[0] // count
    layout = _batch_layout(size, tuple([source.shape for source in sources]), tuple(dtypes))
    most = min(max(1, most_bytes // max(layout.nbytes, 1)), MOST_AHEAD)
    for first in range(0, count, most):
        last = min(first + most, count)
        pieces = layout.empty(rows.device, last - first)
        group = rows if last - first == count else rows[first * size : last * size]
        kernel("gather_batches", rows.device.type)(sources, group, layout.places, tuple(zip(*pieces, strict=True)))
        while pieces:
            yield layout.cut(pieces.pop(0))


@lru_cache(64)
def _batch_layout(size: int, shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> Pieces:
    """How ``size`` rows of blocks ``[steps, lanes, *shape]`` are arranged in memory."""
    return Pieces([(size, *shape[2:]) for shape in shapes], dtypes)
