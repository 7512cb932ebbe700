"""The errors of rlstore. Each is also the builtin that a caller would catch."""

from __future__ import annotations


class StorageError(Exception):
    """The base of every error that rlstore raises on purpose."""


class InvalidInputError(StorageError, ValueError):
    """A value that a storage cannot take: its shape, dtype, name or range is wrong. Nothing was changed."""


class RolloutFullError(StorageError, OverflowError):
    """A rollout already holds all the steps it has room for. Nothing was written."""


class NotReadyError(StorageError, RuntimeError, ValueError):
    """A call that came too early: there is no data yet, or the rollout is not finished."""


class UnknownParameterError(StorageError, AttributeError, ValueError):
    """A parameter name that the storage does not have."""


class UnsupportedSpaceError(StorageError, NotImplementedError):
    """A space that no storage can hold."""


class DoesNotFitError(StorageError, MemoryError):
    """Memory or disk that is not there. Nothing was allocated."""


class DiskFullError(StorageError, OSError):
    """The disk became full. What was there before is as it was."""


class SnapshotError(StorageError, RuntimeError):
    """A snapshot that cannot be loaded: there is none, it is damaged, or it is of another class or a newer version."""


class PeerLostError(StorageError, ConnectionError):
    """Somebody who was waited for is gone: a process, an actor, a machine. The message names it."""


class WaitTimeoutError(StorageError, TimeoutError):
    """What was waited for did not come before the deadline, and nobody is gone. The message says who could bring it."""


class StorageClosedError(StorageError, RuntimeError):
    """The storage was closed, here or in another process."""
