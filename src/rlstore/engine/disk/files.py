"""Writing fast; disk space: how much is free, reserving it, and errors of a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from rlstore.errors import DiskFullError, InvalidInputError
from rlstore.kernels import start_writeback

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# Written in one call: for more, Linux takes huge pages, and where none are at hand that is several times as slow.
_PIECE_BYTES = 1 << 20
_MOST_PARTS = 64
_EARLY_BYTES = 8 << 20  # the disk is told of so much at a time
_MOST_PENDING = 2  # writes that wait for their turn


def replaceable(path: str | os.PathLike[str]) -> Path:
    """The file that a new one is to replace: where links lead, since a link stays one.

    Raises:
        InvalidInputError: If something else than a plain file is there, or there is no folder for it.
        OSError: If the system cannot have a file of this name.
    """
    file = Path(os.path.realpath(path))
    try:
        mode = os.stat(file).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not file.parent.is_dir():
            raise InvalidInputError(
                f"there is no folder {file.parent} for {file.name}; create it. Nothing was written."
            ) from None
    else:
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a FIFO, a socket or a device"
            raise InvalidInputError(f"{file} is {what}; give the name of a file. Nothing was written.")
    return file


def free_disk(path: Path) -> int:
    """The bytes free on the disk of a path, which need not exist yet."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free


@contextmanager
def raising_disk_full(path: Path, advice: str) -> Iterator[None]:
    """Raise the system's error for a full disk (or quota) as a DiskFullError with what to do about it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFullError):
            raise
        free = free_disk(path)
        raise DiskFullError(
            error.errno,
            f"the disk is full: {free:,} bytes are free on it. {advice} What was there before is unchanged",
            str(path),
        ) from error


class FileWriter:
    """A file that is written while the caller prepares what comes next.

    Many bytes are written by a thread, in the order in which they are given; an error is raised by a later call. The
    disk begins with them early, so that little is left to an fsync.

    Args:
        descriptor: The open file, which this object closes.
        offset: Where to begin.

    Attributes:
        end: The offset behind all that was given.
    """

    def __init__(self, descriptor: int, offset: int = 0) -> None:
        self._descriptor, self.end = descriptor, offset
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write bytes, one part after another. They must not change before the file is closed."""
        begin, nbytes = self.end, sum(map(len, parts))
        self.end += nbytes
        if nbytes >= _PIECE_BYTES:
            self._thread = self._thread or ThreadPoolExecutor(1, "rlstore writes a file")
            with suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
                self._pending.append(self._thread.submit(self._write, parts, begin))
                self._wait(_MOST_PENDING)
                return
        self._wait(0)
        self._write(parts, begin)

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()

    def _write(self, parts: Sequence[bytes | memoryview], offset: int) -> None:
        begin, left = offset, deque(memoryview(part) for part in parts)
        while left:
            batch: list[memoryview] = []
            room = _PIECE_BYTES
            while left and room and len(batch) < _MOST_PARTS:
                part = left.popleft()
                if len(part) > room:
                    left.appendleft(part[room:])
                batch.append(part[:room])
                room -= len(batch[-1])
            written = os.pwritev(self._descriptor, batch, offset)
            offset += written
            if written < _PIECE_BYTES - room:  # a signal, or the disk is about to be full
                left.appendleft(memoryview(b"".join(batch))[written:])
        first, stop = begin // _EARLY_BYTES, offset // _EARLY_BYTES
        if stop > first:
            start_writeback(self._descriptor, first * _EARLY_BYTES, (stop - first) * _EARLY_BYTES)

    def close(self, *, sync: bool) -> None:
        """Close the file when everything is written, if ``sync`` when it is on the disk."""
        try:
            self._wait(0)
            if sync:
                os.fsync(self._descriptor)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            os.close(self._descriptor)


def reserve(descriptor: int, start: int, end: int) -> None:
    """Extend a file with zeros whose disk space is allocated: writing to them cannot fail for lack of it."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, start, end - start)
            return
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
    zeros = bytes(1 << 20)
    while start < end:
        start += os.pwrite(descriptor, zeros[: end - start], start)
