"""Rows in, tensors out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from rlstore.engine.memory.tensors import (
    CAN_KEEP,
    KEEP_BYTES,
    Allocator,
    KeptBatch,
    Made,
    Pieces,
    ahead_bytes,
    allocate_empty,
    keep_bytes_on_cuda,
)
from rlstore.kernels import kernel

# Small mini-batches are gathered together and then parted: one call instead of hundreds.
GROUP_BYTES = 4 << 20
# Mini-batches of this size and more are gathered one by one, and kept for the next epoch.
LARGE_BYTES = 256 << 10
# On CUDA so many mini-batches are gathered in one launch, at most.
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


# Slots are in shared memory, and so on the CPU.
_gather_slots = kernel("gather_slots", "cpu")
# Outputs of this size and more come from the allocator that the caller gives.
_LARGE_OUTPUT_BYTES = 256 << 10


def gather_slots(
    sources: tuple[Tensor, ...], slots: Sequence[int], empty: Allocator = allocate_empty, pin_memory: bool = False
) -> tuple[Tensor, ...]:
    """The rollouts of some slots side by side: ``result[t, i] = source[slots[i], t]``.

    Args:
        sources: Blocks ``[slots, rows, *shape]`` on the CPU, each slot contiguous.
        slots: Slot numbers.
        empty: What allocates large results.
        pin_memory: Whether the results are page-locked; ``empty`` is not used then.

    Returns:
        New tensors ``[rows, len(slots), *shape]``.
    """
    count, outs = len(slots), []
    with torch.inference_mode(False):
        for source in sources:
            shape = (source.shape[1], count, *source.shape[2:])
            if pin_memory or math.prod(shape) * source.itemsize < _LARGE_OUTPUT_BYTES:
                outs.append(torch.empty(shape, dtype=source.dtype, device="cpu", pin_memory=pin_memory))
            else:
                outs.append(empty(shape, source.dtype, source.device))
        results = tuple(outs)
        _gather_slots(sources, torch.tensor(slots, dtype=torch.int64, device="cpu"), results)
    return results


def gather_batches(
    sources: tuple[Tensor, ...],
    rows: Tensor,
    count: int,
    dtypes: Sequence[torch.dtype],
    kept: KeptBatches,
    empty: Allocator = allocate_empty,
) -> Iterator[tuple[Tensor, ...]]:
    """An epoch's rows ``[count * size]`` as ``count`` mini-batches ``[size, *shape]``, gathered as they are needed.

    Large ones are taken from ``kept`` where they are still as they were handed out. On CUDA all count as large, and
    many are gathered in one launch.
    """
    if rows.is_cuda:
        epoch = GatheredAhead(sources, rows, count, dtypes, kept, ahead_bytes(rows.device))
        for index in range(count):
            yield kept.get(index, partial(epoch.make, index))
        return
    size = rows.shape[0] // count
    row_bytes = sum(source.shape[2:].numel() * dtype.itemsize for source, dtype in zip(sources, dtypes, strict=True))
    if size * row_bytes >= LARGE_BYTES:
        for index, group in enumerate(torch.split(rows, size)):
            yield kept.get(index, partial(_gather_alone, sources, group, dtypes, empty))
        return
    for group in torch.split(rows, max(1, GROUP_BYTES // max(1, size * row_bytes)) * size):
        gathered = gather_rows(sources, group, dtypes, empty)
        # Not split(): the parts are to be tensors in their own right, which a caller may change in any way.
        parts = [torch.unsafe_split(whole, size) for whole in gathered]
        del gathered
        yield from zip(*parts, strict=True)


def _gather_alone(sources: tuple[Tensor, ...], rows: Tensor, dtypes: Sequence[torch.dtype], empty: Allocator) -> Made:
    tensors = gather_rows(sources, rows, dtypes, empty)
    return tensors, tensors


class GatheredAhead:
    """The mini-batches of an epoch, gathered several in one launch, each in memory of its own.

    Args:
        sources: As for :func:`gather_batches`, and so the others.
        rows: The rows of the epoch, ``[count * size]``.
        count: Mini-batches.
        dtypes: What to serve each source as.
        kept: Those that it serves need not be gathered.
        most_bytes: What is gathered in one launch.
    """

    def __init__(
        self,
        sources: tuple[Tensor, ...],
        rows: Tensor,
        count: int,
        dtypes: Sequence[torch.dtype],
        kept: KeptBatches,
        most_bytes: int,
    ) -> None:
        self._sources, self._rows, self._count, self._kept = sources, rows, count, kept
        self._size, self._dtypes, self._most_bytes = rows.shape[0] // count, dtypes, most_bytes
        self._layout: Pieces | None = None  # nothing is to be done for an epoch that is served what is kept
        self._pieces: dict[int, tuple[Tensor, ...]] = {}

    def make(self, index: int) -> Made:
        """The tensors of a mini-batch, and their memory; with it those that follow are gathered too."""
        if self._layout is None:
            shapes = tuple([source.shape for source in self._sources])
            self._layout = _batch_layout(self._size, shapes, tuple(self._dtypes))
        if index not in self._pieces:
            most = min(max(1, self._most_bytes // max(self._layout.nbytes, 1)), MOST_AHEAD)
            last = index + 1
            while last < min(index + most, self._count) and not self._kept.serves(last):
                last += 1
            self._gather(self._layout, index, last)
        pieces = self._pieces.pop(index)
        return self._layout.cut(pieces), pieces

    def _gather(self, layout: Pieces, first: int, last: int) -> None:
        device = self._rows.device
        pieces = layout.empty(device, last - first)
        rows = self._rows if last - first == self._count else self._rows[first * self._size : last * self._size]
        by_place = tuple(zip(*pieces, strict=True))
        kernel("gather_batches", device.type)(self._sources, rows, layout.places, by_place)
        self._pieces = dict(enumerate(pieces, first))


@lru_cache(64)
def _batch_layout(size: int, shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> Pieces:
    """How ``size`` rows of blocks ``[steps, lanes, *shape]`` lie in memory."""
    return Pieces([(size, *shape[2:]) for shape in shapes], dtypes)


class KeptBatches:
    """Batches that cost much to make, served epoch after epoch.

    A batch is served again only if nobody could tell (see :class:`KeptBatch`); else it is made anew. So a caller that
    works on a batch in place does not meet its own change again. (A change through ``.data`` or ``.numpy()`` is one
    that torch does not count.)

    Args:
        keep: Whether the same batches will be asked for again.
        device: Where they lie.
    """

    def __init__(self, *, keep: bool, device: torch.device | None = None) -> None:
        self.keeps, self._device = keep and CAN_KEEP, device
        self._kept: dict[int, KeptBatch] = {}
        self._bytes = 0
        self._stamp: object = None

    def follow(self, stamp: object) -> None:
        """Forget everything if the data changed, as its stamp tells."""
        if stamp != self._stamp:
            self._kept.clear()
            self._stamp, self._bytes = stamp, 0

    def serves(self, index: int) -> bool:
        """True if batch ``index`` is still as it was handed out."""
        return index in self._kept and self._kept[index].is_untouched()

    def get(self, index: int, make: Callable[[], Made]) -> tuple[Tensor, ...]:
        """Batch ``index``, made anew unless it is still as it was handed out.

        What ``make`` gives are the tensors of the batch and those whose memory they lie in.
        """
        kept = self._kept.get(index)
        if kept is not None:
            if kept.is_untouched():
                return kept.tensors
            self._bytes -= self._kept.pop(index).nbytes
        tensors, pieces = make()
        if not self.keeps:
            return tensors
        batch = KeptBatch(tensors, pieces)
        if self._bytes + batch.nbytes > self._most():
            return tensors
        self._bytes += batch.nbytes
        self._kept[index] = batch
        return batch.tensors

    def _most(self) -> int:
        on_cuda = self._device is not None and self._device.type == "cuda"
        return keep_bytes_on_cuda(self._device) if on_cuda else KEEP_BYTES
