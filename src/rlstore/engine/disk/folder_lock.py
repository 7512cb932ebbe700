"""A folder that one live storage has for itself."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from rlstore.errors import InvalidInputError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "lock"


class FolderLock:
    """Holds a folder until it is released, collected, or its process ends, however that ends.

    Args:
        owner: Who wants it, for errors.
        folder: An existing folder; a file named "lock" is made in it.

    Raises:
        InvalidInputError: If another has it, in this process or in another.
    """

    def __init__(self, owner: str, folder: Path) -> None:
        if fcntl is None:
            raise InvalidInputError(f"{owner} cannot hold the folder {folder}: this system has no file locks")
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InvalidInputError(
                f"the folder {folder} is in use by another storage, in this process or in another; {owner} needs one "
                "of its own. Close the other one, or give another path. Nothing was changed."
            ) from error
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, _unlock, descriptor)
        _HELD.add(self)

    def release(self) -> None:
        """Let go of the folder; once is enough, and more does no harm."""
        self._finalizer()

    def leave_to_parent(self) -> None:
        """In a forked child: the lock is the parent's, and must neither be given up here nor outlive it."""
        if self._finalizer.detach():
            os.close(self._descriptor)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that is just being forked may have the file open too
    os.close(descriptor)


_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for lock in list(_HELD):
        lock.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
