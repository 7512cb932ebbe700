"""Rows in, tensors out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

from rlstore.engine.memory.tensors import (
    GroupAllocator,
    Recycler,
    ahead_bytes,
    allocate_group,
)
from rlstore.kernels import kernel
from rlstore.kernels.pieces import Pieces, pieces_for
from rlstore.kernels.plans import planned

# Small mini-batches are gathered together and then split: one call instead of hundreds.
GROUP_BYTES = 4 << 20
# Mini-batches of this size and more are gathered one by one.
LARGE_BYTES = 256 << 10
# On CUDA this many mini-batches are gathered in one launch, at most.
MOST_AHEAD = 32


def gather_rows(
    sources: tuple[Tensor, ...], rows: Tensor, dtypes: Sequence[torch.dtype], outputs: Recycler
) -> tuple[Tensor, ...]:
    """Row ``i`` of each result is row ``rows[i]`` of ``source.flatten(0, 1)``.

    Args:
        sources: Blocks ``[steps, lanes, *shape]``, contiguous, on one device.
        rows: Row ids ``time * lanes + lane``, int64 ``[n]``.
        dtypes: The dtype of each result.
        outputs: Where results on the CPU are.

    Returns:
        New tensors ``[n, *shape]``.
    """
    device, count = rows.device, rows.shape[0]
    if device.type == "cpu":
        return outputs.gather(sources, rows, dtypes)
    outs = allocate_group([(count, *source.shape[2:]) for source in sources], dtypes, device)
    kernel("gather", device.type)(sources, rows, outs)
    return outs


# Slots are in shared memory, and so on the CPU.
_gather_slots = kernel("gather_slots", "cpu")


def gather_slots(
    sources: tuple[Tensor, ...],
    slots: Sequence[int],
    empty: GroupAllocator = allocate_group,
    pin_memory: bool = False,
) -> tuple[Tensor, ...]:
    """The rollouts of some slots side by side: ``result[t, i] = source[slots[i], t]``.

    Args:
        sources: Blocks ``[slots, rows, *shape]`` on the CPU, each slot contiguous.
        slots: Slot numbers.
        empty: Allocates the results.
        pin_memory: Whether the results are page-locked; ``empty`` is not used then.

    Returns:
        New tensors ``[rows, len(slots), *shape]``.
    """
    count, dtypes = len(slots), [source.dtype for source in sources]
    shapes = [(source.shape[1], count, *source.shape[2:]) for source in sources]
    with torch.inference_mode(False):
        if pin_memory:
            forms = zip(shapes, dtypes, strict=True)
            outs = tuple([torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True) for shape, dtype in forms])
        else:
            outs = empty(shapes, dtypes, sources[0].device)
        _gather_slots(sources, torch.tensor(slots, dtype=torch.int64, device="cpu"), outs)
    return outs


def gather_batches(
    sources: tuple[Tensor, ...],
    rows: Tensor,
    count: int,
    dtypes: tuple[torch.dtype, ...],
    outputs: Recycler,
) -> Iterator[tuple[Tensor, ...]]:
    """The rows of an epoch ``[count * size]`` as ``count`` mini-batches ``[size, *shape]``, gathered when needed.

    Each tensor has memory of its own, or a part of it that no other tensor uses. Small mini-batches are gathered
    together; on CUDA any are, up to a part of the device's memory. On the CPU they are in the memory of ``outputs``.
    """
    if rows.is_cuda:
        yield from gather_ahead(sources, rows, count, dtypes, ahead_bytes(rows.device))
        return
    size = rows.shape[0] // count
    row_bytes = sum(source.shape[2:].numel() * dtype.itemsize for source, dtype in zip(sources, dtypes, strict=True))
    if size * row_bytes >= LARGE_BYTES:
        for group in torch.unsafe_split(rows, size):
            yield gather_rows(sources, group, dtypes, outputs)
        return
    for group in torch.unsafe_split(rows, max(1, GROUP_BYTES // max(1, size * row_bytes)) * size):
        gathered = gather_rows(sources, group, dtypes, outputs)
        # Not split(): each part has to be a tensor with a version counter of its own, which a caller may change.
        # Of the two that do this, the one that is given all sizes makes a tensor in two thirds of the time.
        sizes = [size] * max(1, len(group) // max(1, size))
        parts = tuple(map(torch.unsafe_split_with_sizes, gathered, repeat(sizes)))
        del gathered
        yield from zip(*parts, strict=True)


def gather_ahead(
    sources: tuple[Tensor, ...], rows: Tensor, count: int, dtypes: tuple[torch.dtype, ...], most_bytes: int
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
    layout = _layout(sources, size, dtypes)
    most = min(max(1, most_bytes // max(layout.nbytes, 1)), MOST_AHEAD)
    gather = kernel("gather_batches", rows.device.type)
    for first in range(0, count, most):
        last = min(first + most, count)
        pieces = layout.empties(last - first)
        group = rows if last - first == count else rows[first * size : last * size]
        gather(sources, group, layout.places, tuple(zip(*pieces, strict=True)))
        while pieces:
            yield layout.cut(pieces.pop(0))


@planned
def _layout(sources: tuple[Tensor, ...], size: int, dtypes: tuple[torch.dtype, ...]) -> Pieces:
    """How mini-batches of ``size`` rows lie in memory."""
    return pieces_for(tuple([(size, *source.shape[2:]) for source in sources]), dtypes, sources[0].device)
