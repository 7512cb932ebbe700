"""The memory of batches that a learner hands out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.batches.staging import Staging, received
from rlstore.engine.memory.tensors import Recycler, allocate_empty

# Smaller tensors cost little to make.
_RECYCLED_BYTES = 1 << 16
_CPU = torch.device("cpu")


class Output:
    """Makes the tensors of batches, which threads fill, and moves whole batches to the learner's device.

    On the CPU the memory of batches that nobody holds any more serves again. For another device batches are put
    together in page-locked memory, and copied on a stream of their own as soon as they are whole.

    Args:
        device: Where batches are served.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._recycler, self._lock = device, Recycler(), threading.Lock()
        self._staging = Staging(device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the host, with whatever was in its memory."""
        if self._device.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        count = 1
        for size in shape:
            count *= size
        if count * dtype.itemsize < _RECYCLED_BYTES:
            return allocate_empty(shape, dtype, _CPU)
        with self._lock:
            return self._recycler.empty(tuple(shape), dtype, _CPU)

    def own(self, tensor: Tensor) -> Tensor:
        """A small tensor, in the memory in which batches are put together."""
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def send(self, nest: Any) -> Any:
        """A nest of tensors, whole now, for :meth:`hand_out`. It may be called in any thread."""
        return nest if self._device.type == "cpu" else self._staging.send(nest)

    def hand_out(self, sent: Any) -> Any:
        """What was sent, for use by the calling thread."""
        return received(sent)
