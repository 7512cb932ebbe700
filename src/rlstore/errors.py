"""The exceptions of rlstore. Each one is also a subclass of the matching builtin exception."""

from __future__ import annotations


class StorageError(Exception):
    """The base class of all exceptions that rlstore raises."""


class InvalidInputError(StorageError, ValueError):
    """A value has a wrong shape, dtype, name or range. Nothing was changed."""


class InvalidCallError(InvalidInputError, TypeError):
    """A function was called with arguments that it does not take. Nothing was changed."""


class RowNotHeldError(StorageError, IndexError):
    """A row is not held: it was overwritten or removed, or there never was one. Nothing was read."""


class RolloutFullError(StorageError, OverflowError):
    """The rollout is full. Nothing was written."""


class NotReadyError(StorageError, RuntimeError, ValueError):
    """The call was made too early: there are no data yet, or the rollout is not complete."""


class UnknownParameterError(StorageError, AttributeError, ValueError):
    """The storage has no parameter with this name."""


class UnsupportedSpaceError(StorageError, NotImplementedError):
    """The space is not supported."""


class DoesNotFitError(StorageError, MemoryError):
    """There is not enough memory or disk space, or no thread to be had. Nothing was allocated."""


class DiskFullError(StorageError, OSError):
    """The disk is full. The data that were on it before are unchanged."""


class SnapshotError(StorageError, RuntimeError):
    """The snapshot cannot be loaded: it does not exist, is damaged, or is of another class or of a newer version."""


class PeerLostError(StorageError, ConnectionError):
    """A process, actor or machine that this process depends on has died. The message names it."""


class WaitTimeoutError(StorageError, TimeoutError):
    """A wait reached its timeout although no process has died. The message names the processes that were waited for."""


class StorageClosedError(NotReadyError):
    """The storage, or the handle, was closed, in this process or in another one. Nothing was done."""
