"""One piece of memory that several processes have, without a name that a crash could leave behind.

It is a file in memory that only its descriptors lead to: the kernel takes it back when the last process that has it
ends, in whatever way. Nothing lies in ``/dev/shm``. Another process of the same user opens it through
``/proc/<pid>/fd``, so a :class:`SharedMemory` can be pickled in any way and sent along any road on one machine.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.errors import DoesNotFitError, InvalidInputError, PeerLostError
from rlstore.kernels import process_start

_ALIGNED = 64  # a cache line: two pieces never share one


class SharedMemory:
    """Zeros, whose pages are taken when they are touched; see :meth:`create`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes, self._carved = nbytes, 0
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, nbytes)  # type: ignore[attr-defined]
        except RuntimeError as error:
            os.close(descriptor)
            raise DoesNotFitError(f"{nbytes:,} bytes of shared memory cannot be had: {error}") from error
        self._descriptor = descriptor
        with torch.inference_mode(False):
            self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """A new segment of ``nbytes`` bytes."""
        if not hasattr(os, "memfd_create"):
            raise InvalidInputError(f"memory shared between processes needs Linux; this is {sys.platform}")
        descriptor = os.memfd_create("rlstore")
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
        except OSError as error:
            os.close(descriptor)
            raise DoesNotFitError(f"{nbytes:,} bytes of shared memory cannot be had: {error}") from error
        return cls(descriptor, max(nbytes, 1))

    @staticmethod
    def bytes_of(pieces: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
        """The bytes that :meth:`carve` takes for pieces of these shapes and dtypes."""
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in pieces)

    @property
    def left(self) -> int:
        """Bytes that are not carved yet."""
        return self.nbytes - self._carved

    def carve(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next piece that is not in use, as a tensor. In every process the same order gives the same pieces."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._carved + nbytes > self.nbytes:
            raise InvalidInputError(f"{nbytes:,} bytes more than the {self.nbytes:,} of this segment")
        piece = self._bytes[self._carved : self._carved + nbytes]
        self._carved += _aligned(nbytes)
        with torch.inference_mode(False):
            return piece.view(dtype).view(tuple(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        # This process is named, not the one that made it: a forked child has the descriptor too, and may outlive that.
        pid, descriptor = os.getpid(), self._descriptor
        return _attach, (pid, process_start(pid), descriptor, os.fstat(descriptor).st_ino, self.nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMemory:
        raise TypeError("a segment is shared, and cannot be copied")

    def __del__(self) -> None:
        descriptor = self.__dict__.get("_descriptor")
        if descriptor is not None:
            os.close(descriptor)


def _attach(pid: int, started: int, descriptor: int, inode: int, nbytes: int) -> SharedMemory:
    """The segment that a process has under a descriptor, carved from the beginning."""
    gone = f"process {pid}, which shared this memory, is gone; whoever uses it must begin before that process ends"
    if process_start(pid) != started:
        raise PeerLostError(gone)
    try:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise
    except OSError as error:  # nothing is there any more, or something that cannot be opened
        raise PeerLostError(f"{gone}, or has let it go") from error
    if os.fstat(own).st_ino != inode:
        os.close(own)
        raise PeerLostError(f"process {pid} has let go of the memory that it shared")
    return SharedMemory(own, nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
