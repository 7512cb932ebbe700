"""Memory shared between processes, without a name that a crash could leave behind.

It is an anonymous file in memory, reachable only through its descriptors: the kernel frees it when the last process
that has it open ends, however it ends. There is nothing in ``/dev/shm``. Another process of the same user opens it
through ``/proc/<pid>/fd``, so a :class:`SharedMemory` can be pickled and sent in any way on one machine. Its size is
sealed: a process that could shorten it would end all others with a SIGBUS.
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

_ALIGNED = 64  # bytes of a cache line: no two pieces share one


class SharedMemory:
    """A segment of zeros, whose pages are committed when they are first written; see :meth:`create`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes, self._carved = nbytes, 0
        try:
            self._bytes = _map(descriptor, nbytes)
        except RuntimeError as error:
            os.close(descriptor)
            raise DoesNotFitError(f"{nbytes:,} bytes of shared memory are not available: {error}") from error
        self._descriptor = descriptor

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """A new segment of ``nbytes`` bytes."""
        if not hasattr(os, "memfd_create"):
            raise InvalidInputError(f"memory shared between processes needs Linux; this is {sys.platform}")
        import fcntl  # not on every system

        descriptor = os.memfd_create("rlstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, max(nbytes, 1))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except (OSError, OverflowError) as error:
            os.close(descriptor)
            raise DoesNotFitError(f"{nbytes:,} bytes of shared memory are not available: {error}") from error
        return cls(descriptor, max(nbytes, 1))

    @staticmethod
    def bytes_of(pieces: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
        """The bytes that :meth:`carve` takes for pieces of these shapes and dtypes."""
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in pieces)

    @property
    def left(self) -> int:
        """The bytes not carved yet."""
        return self.nbytes - self._carved

    def carve(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next free piece, as a tensor. The same calls in the same order give the same pieces in every process."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._carved + nbytes > self.nbytes:
            raise InvalidInputError(f"{nbytes:,} bytes more than the {self.nbytes:,} of this segment")
        piece = self._bytes[self._carved : self._carved + nbytes]
        self._carved += _aligned(nbytes)
        with torch.inference_mode(False):
            return piece.view(dtype).view(tuple(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        # The sender is named, not the creator: a forked child has the descriptor, too, and may outlive its parent.
        pid, descriptor = os.getpid(), self._descriptor
        return _attach, (pid, process_start(pid), descriptor, os.fstat(descriptor).st_ino, self.nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMemory:
        raise TypeError("shared memory cannot be copied")

    def __del__(self) -> None:
        descriptor = self.__dict__.get("_descriptor")
        if descriptor is not None:
            os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> Tensor:
    with torch.inference_mode(False):
        # Keeps the descriptor, with which torch.multiprocessing sends a tensor; one of torch.from_file cannot be sent.
        make = getattr(torch.UntypedStorage, "_new_shared_fd_cpu", None)
        if make is None:
            return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
        return torch.empty(0, dtype=torch.uint8).set_(make(descriptor, nbytes))


def _attach(pid: int, started: int, descriptor: int, inode: int, nbytes: int) -> SharedMemory:
    """The segment that a process has open under a descriptor, with nothing carved yet."""
    gone = f"process {pid}, which shared this memory, is gone; attach to the memory before that process ends"
    if process_start(pid) != started:
        raise PeerLostError(gone)
    try:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise
    except OSError as error:  # the descriptor was closed, or reused for something that cannot be opened
        raise PeerLostError(f"{gone}, or has closed it") from error
    if os.fstat(own).st_ino != inode:
        os.close(own)
        raise PeerLostError(f"process {pid} has closed the memory that it shared")
    return SharedMemory(own, nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
