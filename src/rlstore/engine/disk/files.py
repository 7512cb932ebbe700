"""Files that are there whole or not at all, on a disk that may be full."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstore.engine.memory.capacity import free_disk
from rlstore.errors import DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextmanager
def telling_full_disk(path: Path, advice: str) -> Iterator[None]:
    """Turn the system's error for a full disk (or quota) into a DiskFullError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFullError):
            raise
        free = free_disk(path)
        raise DiskFullError(
            error.errno,
            f"the disk is full: {free:,} bytes are free on it. {advice} What was there before is as it was",
            str(path),
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its old version and put it in its place: whatever happens, one of the two is there, whole."""
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, so that they survive a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, start: int, end: int) -> None:
    """Lengthen a file with zeros that really have their space: writing into them cannot fail for want of it."""
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
