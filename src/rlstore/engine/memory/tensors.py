"""Memory for tensors: blocks of storages, and outputs that reuse memory no tensor uses any more."""

from __future__ import annotations

import math
import mmap
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

# The most memory that a Recycler holds back for later outputs.
KEEP_BYTES = 256 << 20
_HUGE_PAGE = 2 << 20
# The part of a CUDA device's memory that is gathered in one launch, at most.
_CUDA_AHEAD_PART = 256

Allocator = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
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


def allocate_huge(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As :func:`allocate_empty`, in pages of 2 MiB where the system has them: for large outputs that are recycled."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_PAGE or device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return allocate_empty(shape, dtype, device)
    # One page more than needed: the tensor starts at the first page boundary.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        first = -whole.data_ptr() % _HUGE_PAGE
        made = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=first)
        return made.view(tuple(shape)).data  # not a view of another tensor, which would count as a user of the memory


@cache
def ahead_bytes(device: torch.device) -> int:
    """The most that is gathered ahead on a CUDA device, in one launch."""
    return int(torch.cuda.get_device_properties(device).total_memory) // _CUDA_AHEAD_PART


class Recycler:
    """Allocates CPU tensors in memory of earlier ones that no tensor, view, array or graph uses any more.

    New memory costs a page fault for every four kilobytes, which takes longer than gathering into it: without recycling
    a cycle of 24 steps of 512 environments (observations of 48 and 235 floats, 5 epochs of 4 mini-batches) takes 27 ms
    of CPU time instead of 19.

    Args:
        allocate: Allocates new memory.
    """

    def __init__(self, allocate: Allocator = allocate_empty) -> None:
        self._allocate = allocate
        self._spares: dict[tuple[torch.Size, torch.dtype], deque[Tensor]] = {}
        self._used: set[int] = set()  # ids of the spares that were used since begin()
        self._addresses: dict[int, int] = {}  # of each spare; one that moved is shared with another process
        self._bytes = 0

    def begin(self) -> None:
        """Begin an update: memory that the one before it did not use is released."""
        used = [spare for spares in self._spares.values() for spare in spares if id(spare) in self._used]
        self._spares, self._used, self._bytes = {}, set(), sum(spare.nbytes for spare in used)
        self._addresses = {id(spare): self._addresses[id(spare)] for spare in used}
        for spare in used:
            self._spares.setdefault((spare.shape, spare.dtype), deque()).append(spare)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with whatever was in its memory before."""
        if device.type != "cpu" or not _CAN_COUNT:
            return allocate_empty(shape, dtype, device)
        spares = self._spares.setdefault((torch.Size(shape), dtype), deque())
        for _ in range(len(spares)):
            spare = spares[0]
            spares.rotate(-1)  # the one that was used longest ago is the likeliest to be free
            if spare.data_ptr() == self._addresses[id(spare)] and _count_holders(spare) == _UNHELD:
                self._used.add(id(spare))
                return spare.detach()  # another tensor on the same memory: as long as it exists, the count differs
        fresh = self._allocate(shape, dtype, device)
        if self._bytes + fresh.nbytes > KEEP_BYTES:
            return fresh
        spares.append(fresh)
        self._addresses[id(fresh)] = fresh.data_ptr()
        self._used.add(id(fresh))
        self._bytes += fresh.nbytes
        return fresh.detach()

    def empty_group(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> tuple[Tensor, ...]:
        """:meth:`empty` for several tensors."""
        return tuple([self.empty(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)])

    def __getstate__(self) -> dict[str, object]:
        return Recycler(self._allocate).__dict__  # a copy shares no memory


class Arena:
    """Tensors cut from one piece of memory, for a batch of many tensors whose shapes change from update to update.

    Args:
        nbytes: Bytes of all tensors together.
        count: How many there will be.
        device: The device.
        empty: Allocates the piece.
    """

    def __init__(self, nbytes: int, count: int, device: torch.device, empty: Allocator) -> None:
        # Rounded up to an eighth of its power of two, so that a piece is recycled if the next size differs a little.
        needed = nbytes + count * _ALIGNMENT
        grain = max(1 << max(needed.bit_length() - 4, 0), _ALIGNMENT)
        self.piece = empty((-(-needed // grain) * grain,), torch.uint8, device)
        self._typed: dict[torch.dtype, Tensor] = {}  # the whole piece, seen as each dtype
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.empty(shape, dtype, device)
        if dtype not in self._typed:
            self._typed[dtype] = self.piece.view(dtype)
        strides, count = [], 1
        for size in reversed(shape):
            strides.append(count)
            count *= size
        first = self._used
        self._used += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        # Through .data, so that each has a version counter of its own: for autograd they are independent.
        return self._typed[dtype].as_strided(tuple(shape), strides[::-1], first // dtype.itemsize).data


_ALIGNMENT = 64


# Private, and not in every torch; without it no memory is recycled. What it saves: see Recycler.
_CAN_COUNT = hasattr(torch._C, "_storage_Use_Count")


def _count_holders(tensor: Tensor) -> tuple[int, int]:
    """The tensors that use a tensor's memory, and the references to the Python object of its storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _count_when_unheld() -> tuple[int, int]:
    tensor = torch.empty(1)
    return _count_holders(tensor) if _CAN_COUNT else (0, 0)


_UNHELD = _count_when_unheld()
