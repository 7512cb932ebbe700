"""Batches gathered on the host, copied to the learner's device while it computes.

Copies to CUDA run on a stream of their own, from whichever thread, so that they neither wait for what the learner has
launched nor hold it up. Three things keep a batch intact:

- the stream that takes a batch waits for its copies, on the device, before anything that is launched there afterwards;
- the allocator knows of that stream. So the memory of a batch that is freed, early or late, is reused only after all
  that had been launched on it there;
- page-locked memory is torch's, which reuses a block only when the copies from it have ended. So host memory for
  :meth:`Staging.send` is allocated with ``pin_memory=True`` for each batch, and simply dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import cuda

# For each of some tensors the dtype that it is converted to on the device, None to leave it; none at all if empty.
Casts = tuple[torch.dtype | None, ...]


class Staged:
    """A nest of tensors on its way to a device. :meth:`receive` may be called more than once.

    Args:
        nest: The tensors on the device.
        copied: The event after the copies; None where they have ended.
    """

    def __init__(self, nest: Any, copied: Any = None) -> None:
        self._nest, self._copied = nest, copied

    def receive(self) -> Any:
        """The nest, for use on the current stream of the calling thread. The host waits for nothing."""
        if self._copied is not None:
            stream = None
            for tensor in _leaves(self._nest):
                if stream is None:
                    stream = cuda.current_stream(tensor.device)
                    stream.wait_event(self._copied)
                tensor.record_stream(stream)
        return self._nest

    def __reduce__(self) -> tuple[Any, ...]:
        if self._copied is not None:
            self._copied.synchronize()
        return Staged, (self._nest,)


class Staging:
    """Sends batches to a device. Any number of threads may send at once.

    Args:
        device: The device of the batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._lock = threading.Lock()

    def send(self, nest: Any, casts: Casts = ()) -> Staged:
        """Begin to copy a nest of tensors (dicts, tuples, lists, TensorDicts) to the device.

        Args:
            nest: Tensors on the host. They must not be written to any more.
            casts: For a tuple of tensors, what each is converted to.
        """
        with torch.inference_mode(False):  # whatever mode the caller is in, a learner may train on it
            if self._device.type != "cuda":
                return Staged(converted(_moved(nest, self._device), casts))
            with self._lock:
                if self._stream is None:
                    self._stream = cuda.Stream(self._device)
            with cuda.stream(self._stream):
                moved = converted(_moved(nest, self._device), casts)
                return Staged(moved, self._stream.record_event())

    def __reduce__(self) -> tuple[Any, ...]:
        return Staging, (self._device,)


def launched(tensors: tuple[Any, ...], casts: Casts = ()) -> Staged:
    """Tensors that the current stream of their device writes, for later use on whichever stream."""
    made = converted(tensors, casts)
    return Staged(made, cuda.current_stream(made[0].device).record_event())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor on the device, for the current stream; the host does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def received(prepared: Any) -> Any:
    """What was staged, for use on the current stream; anything else as it is."""
    return prepared.receive() if isinstance(prepared, Staged) else prepared


def _moved(nest: Any, device: torch.device) -> Any:
    if isinstance(nest, dict):
        return {key: _moved(part, device) for key, part in nest.items()}
    if isinstance(nest, (tuple, list)):
        return type(nest)(_moved(part, device) for part in nest)
    return nest.to(device, non_blocking=True) if hasattr(nest, "to") else nest


def converted(nest: Any, casts: Casts) -> Any:
    """A tuple of tensors, each as the dtype that ``casts`` has for it."""
    if not casts:
        return nest
    return tuple(tensor if cast is None else tensor.to(cast) for tensor, cast in zip(nest, casts, strict=True))


def _leaves(nest: Any) -> Iterator[Any]:
    if isinstance(nest, (Mapping, tuple, list)):
        for part in nest.values() if isinstance(nest, Mapping) else nest:
            yield from _leaves(part)
    elif hasattr(nest, "record_stream"):
        yield nest
