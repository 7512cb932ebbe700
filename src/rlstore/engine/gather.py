"""Rows in, tensors out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlstore.engine.ring import allocate_empty
from rlstore.kernels import kernel

# Small mini-batches are gathered together and handed out as views: one call instead of hundreds.
GROUP_BYTES = 4 << 20
# An epoch's batches are kept for the next one up to this size; beyond it memory matters more than a second gather.
KEEP_BYTES = 256 << 20


def gather_rows(sources: tuple[Tensor, ...], rows: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """Row ``i`` of each result is row ``rows[i]`` of ``source.flatten(0, 1)``.

    Args:
        sources: Blocks ``[steps, lanes, *shape]``, contiguous, on one device.
        rows: Row ids ``time * lanes + lane``, int64 ``[n]``.
        dtypes: The dtype of each result.

    Returns:
        New tensors ``[n, *shape]``.
    """
    device = rows.device
    outs = tuple(
        allocate_empty((rows.shape[0], *source.shape[2:]), dtype, device)
        for source, dtype in zip(sources, dtypes, strict=True)
    )
    kernel("gather", device.type)(sources, rows, outs)
    return outs


class MiniBatches:
    """An epoch's rows cut into equal mini-batches, which may be served epoch after epoch.

    A batch is served again only while nobody has changed it and nobody else still holds it; else it is gathered anew.
    So a caller that works on a batch in place never meets its own change again.

    Args:
        sources: Blocks ``[steps, lanes, *shape]``.
        rows: The rows of the epoch, ``[count * size]``.
        count: The number of mini-batches.
        dtypes: The dtype of each served tensor.
        keep: Whether the same rows will be asked for again.
    """

    def __init__(
        self, sources: tuple[Tensor, ...], rows: Tensor, count: int, dtypes: Sequence[torch.dtype], *, keep: bool
    ) -> None:
        self._sources, self._rows, self._count, self._dtypes = sources, rows, count, dtypes
        self._size = rows.shape[0] // count
        row_bytes = sum(source[0, 0].numel() * dtype.itemsize for source, dtype in zip(sources, dtypes, strict=True))
        self._per_group = max(1, min(count, GROUP_BYTES // max(1, self._size * row_bytes)))
        self._keep = keep and rows.shape[0] * row_bytes <= KEEP_BYTES
        self._groups: dict[int, list[tuple[Tensor, ...]]] = {}
        self._versions: dict[int, list[int]] = {}  # of batches handed out, as they were then

    def rows(self, index: int) -> Tensor:
        """The row ids of mini-batch ``index``."""
        return self._rows[index * self._size : (index + 1) * self._size]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        number, place = divmod(index, self._per_group)
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = self._gather(number)
        if not self._keep:
            if place == len(group) - 1:
                del self._groups[number]
            return group[place]
        versions = self._versions.get(index)
        if versions is not None:
            if untouched(group[place], versions):
                return group[place]
            # Only this batch: others of its group may be clean, and may still be in somebody's hands.
            group[place] = gather_rows(self._sources, self.rows(index), self._dtypes)
        self._versions[index] = [tensor._version for tensor in group[place]]
        return group[place]

    def _gather(self, number: int) -> list[tuple[Tensor, ...]]:
        first = number * self._per_group
        count = min(self._per_group, self._count - first)
        rows = self._rows[first * self._size : (first + count) * self._size]
        gathered = gather_rows(self._sources, rows, self._dtypes)
        if count == 1:
            return [gathered]
        views = (whole.view(count, self._size, *whole.shape[1:]).unbind(0) for whole in gathered)
        return list(zip(*views, strict=True))


class KeptBatches:
    """Batches of any making, served again under the same rule as :class:`MiniBatches`.

    Args:
        keep: Whether the same batches will be asked for again.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._kept: dict[int, tuple[tuple[Tensor, ...], list[int]]] = {}
        self._bytes = 0
        self._stamp: object = None

    def follow(self, stamp: object) -> None:
        """Forget everything if the data changed, as its stamp tells."""
        if stamp != self._stamp:
            self._kept.clear()
            self._stamp, self._bytes = stamp, 0

    def get(self, index: int, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Batch ``index``, made anew unless it is still as it was handed out."""
        if index in self._kept:
            tensors, versions = self._kept.pop(index)
            if untouched(tensors, versions):
                self._kept[index] = tensors, versions
                return tensors
            self._bytes -= sum(tensor.nbytes for tensor in tensors)
        tensors = make()
        self._bytes += sum(tensor.nbytes for tensor in tensors)
        if self._keep and self._bytes <= KEEP_BYTES:
            self._kept[index] = tensors, [tensor._version for tensor in tensors]
        return tensors


def untouched(tensors: tuple[Tensor, ...], versions: list[int]) -> bool:
    """True if nobody has changed a tensor in place since it had its version, and nobody else holds one now.

    Views share the version of the tensor that they look into, so a change of one counts for its neighbours too.
    """
    return max(map(sys.getrefcount, tensors)) <= _UNHELD and [tensor._version for tensor in tensors] == versions


# What sys.getrefcount says, asked in this way, of a tensor that only its tuple holds.
_UNHELD = max(map(sys.getrefcount, (torch.empty(0),)))
