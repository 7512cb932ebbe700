"""Memory for tensors: blocks of storages, and outputs that reuse memory no tensor uses any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from rlstore.kernels import OutputPool

# The most memory that a Recycler keeps while nobody uses it.
KEEP_BYTES = 512 << 20
# The part of a CUDA device's memory that is gathered in one launch, at most.
_CUDA_AHEAD_PART = 256

GroupAllocator = Callable[[Sequence[Sequence[int]], Sequence[torch.dtype], torch.device], tuple[Tensor, ...]]


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float = 0.0) -> Tensor:
    """A filled tensor that is never an inference tensor, whatever mode the caller is in.

    An inference tensor could not be written in place, nor take part in a backward pass, once the mode is left.
    """
    with torch.inference_mode(False):
        return torch.full(tuple(shape), fill, dtype=dtype, device=device)


def allocate_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As :func:`allocate`, with whatever was in the memory before: for outputs that are written at once."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def allocate_group(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[Tensor, ...]:
    """:func:`allocate_empty` for several tensors."""
    return tuple([allocate_empty(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)])


@cache
def ahead_bytes(device: torch.device) -> int:
    """The most that is gathered ahead on a CUDA device, in one launch."""
    return int(torch.cuda.get_device_properties(device).total_memory) // _CUDA_AHEAD_PART


class Recycler:
    """Allocates CPU tensors in memory of earlier ones that no tensor, view, array or graph uses any more.

    New memory costs a page fault for every four kilobytes, which takes longer than gathering into it. Memory of 2 MiB
    and more is in huge pages where the system has them. Each tensor tells when its memory is free again, whoever drops
    it, in whichever thread; what serves next is what came back last, and may still be in the cache.
    """

    def __init__(self) -> None:
        self._pool = OutputPool(KEEP_BYTES)

    @property
    def idle_bytes(self) -> int:
        """Memory that is kept and used by nobody."""
        return self._pool.idle_bytes

    def begin(self) -> None:
        """Begin an update: memory that the one before it did not use is released."""
        self._pool.begin()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with whatever was in its memory before."""
        return self.empty_group((shape,), (dtype,), device)[0]

    def empty_group(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> tuple[Tensor, ...]:
        """:meth:`empty` for several tensors; those of less than 256 KiB share memory."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.empty_group(shapes, dtypes, device)
        if device.type != "cpu" or not _DLPACK_TYPES.keys() >= set(dtypes):
            return allocate_group(shapes, dtypes, device)
        return tuple(self._pool.empty(shapes, [_DLPACK_TYPES[dtype] for dtype in dtypes]))

    def gather(self, sources: tuple[Tensor, ...], rows: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        """The kernel ``gather`` of CPU tensors into an :meth:`empty_group`, in one call."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.gather(sources, rows, dtypes)
        as_float = [source.dtype != dtype for source, dtype in zip(sources, dtypes, strict=True)]
        return tuple(self._pool.gather(sources, rows, as_float))

    def __reduce__(self) -> tuple[type[Recycler], tuple[()]]:
        return Recycler, ()  # a copy shares no memory


# The code of each dtype in DLPack, and its bits.
_DLPACK_TYPES = {
    torch.bool: (6, 8),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
}
