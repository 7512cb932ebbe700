"""Disk space: how much is free, reserving it, and errors of a full disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstore.errors import DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


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
