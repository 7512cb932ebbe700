"""Journals: a thread saves a storage to one folder every few seconds.

A commit is a save to that folder (see snapshot.py): of replay it appends the rows that came since the last one, and it
counts when the manifest is replaced. So whenever the process is killed, the folder holds a commit, complete, and
``Storage.load(folder)`` is how it is read. A commit that fails leaves the one before. The thread only has a weak
reference to the storage, which is committed once more when it is collected, when it is closed, and when the process
ends.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Protocol

import numpy as np

from rlstore.engine.checks import check_path
from rlstore.engine.disk.snapshot import Content, Rows, SnapshotReader, SnapshotWriter
from rlstore.engine.measures import Measures, Most, Number
from rlstore.engine.threads import start_thread
from rlstore.errors import InvalidCallError, InvalidInputError, StorageClosedError


@dataclass(frozen=True)
class Journal:
    """Where and how often a storage is committed to disk in the background; the argument ``journal`` of a storage.

    ``storage.journal`` is then a ``RunningJournal``, with ``commit()``, ``close()``, ``path`` and ``error`` (the
    exception with which the last commit failed, or None); it is None for a storage without a journal.

    Attributes:
        path: The folder: new, or empty. One that holds a journal already is loaded,
            ``Storage.load(path, journal=path)``, and then goes on.
        interval: Seconds from one commit to the next. If the process is killed, what came after the last commit is
            lost.
        fsync: True: a commit waits until the disk has it, and survives a power failure. False: it survives the end of
            the process, however it ends, but not that of the machine: then the folder may hold an older commit, or one
            that :meth:`Storage.load` finds damaged and refuses.
    """

    path: str | os.PathLike[str]
    interval: float = 2.0
    fsync: bool = True

    def __post_init__(self) -> None:
        check_path("Journal", "path", self.path)
        is_number = isinstance(self.interval, (int, float, np.number)) and not isinstance(self.interval, bool)
        if not is_number or not 0 < float(self.interval) < math.inf:
            raise InvalidInputError(f"interval is {self.interval!r}; Journal needs a finite number of seconds above 0")
        if not isinstance(self.fsync, bool):
            raise InvalidInputError(f"fsync is {self.fsync!r}; Journal needs True or False")


def as_journal(owner: str, given: str | os.PathLike[str] | Journal | None) -> Journal | None:
    """The argument ``journal`` of a storage, once it is checked."""
    if given is None or isinstance(given, Journal):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidCallError(f"journal is {given!r}; {owner} needs the path of a folder, or a Journal")
    return Journal(given)


class Journaled(Protocol):
    """What a journal commits."""

    def _still(self) -> AbstractContextManager[None]:
        """Nothing changes meanwhile."""
        ...

    def _content(self, *, copy: bool) -> Content:
        """What a snapshot of the state as it is now holds, but for its rows."""
        ...

    def _rows_for(self, writer: SnapshotWriter) -> Rows | None:
        """The rows that a folder does not hold yet; None if they are not apart."""
        ...

    def _count_inserts(self) -> int:
        """Transitions ever added."""
        ...


class RunningJournal:
    """The journal of a storage, ``storage.journal``.

    A commit that fails, for example because the disk is full, warns once and is tried again: adding goes on, and the
    folder holds the commit before.

    Args:
        owner: The class of the storage, for errors.
        storage: The storage.
        journal: Where and how often.
        loaded: The snapshot that the storage was loaded from, with which the journal may go on; None for none.

    Attributes:
        path: The folder.
        error: The exception with which the last commit failed; None if it did not.

    Raises:
        InvalidInputError: If the folder holds something already, or another storage uses it. Nothing was changed.
        DoesNotFitError: (a MemoryError) if the system starts no more threads. Nothing was changed.
    """

    def __init__(self, owner: str, storage: Journaled, journal: Journal, loaded: SnapshotReader | None = None) -> None:
        self.error: BaseException | None = None
        self._owner, self._journal, self._storage = owner, journal, weakref.ref(storage)
        self._process, self._warned, self._time = os.getpid(), False, time.time()
        self._committed = time.monotonic(), 0  # when the last commit was cut, and the inserts up to then
        self._turn = threading.RLock()  # taken before the guard of the storage, never by a thread that has it
        self._closing = threading.Event()
        self.path = Path(journal.path).absolute()
        # It keeps the journal and its folder for the last commit of a storage that is collected as part of a cycle.
        self._thread = threading.Thread(target=self._run, name="rlstore journal", daemon=True)
        with self._turn:  # the thread waits for it; if there is none to be had, the folder is not touched
            start_thread("a journal", self._thread)
            try:
                self._begin(owner, storage, loaded)
            except BaseException:
                self._closing.set()
                raise
        # For processes of multiprocessing, whose end is none of the interpreter. Writers go on until then (15).
        self._end_of_worker = Finalize(None, _finish, args=(weakref.ref(self),), exitpriority=25)

    def _begin(self, owner: str, storage: Journaled, loaded: SnapshotReader | None) -> None:
        """Open the folder, and commit for the first time."""
        self._open()
        try:
            if not self._writer.is_empty and not self._goes_on_with(loaded):
                raise InvalidInputError(
                    f"the folder {self.path} already holds what a storage has saved. To go on with it, load it: "
                    f"{owner}.load(path, journal=path). Else give another folder as journal. Nothing was changed."
                )
            self._commit(storage)
        except BaseException:
            self._end.detach()
            self._writer.close()
            raise

    def _goes_on_with(self, loaded: SnapshotReader | None) -> bool:
        """Whether the folder holds just what the storage was loaded from."""
        return loaded is not None and os.path.samefile(loaded.folder, self.path) and loaded.id == self._writer.id

    def _open(self) -> None:
        self._writer = SnapshotWriter(self._owner, self.path, sync=self._journal.fsync)
        # Made after that of the folder, so that at the end of the interpreter it runs before the folder is released.
        self._end = weakref.finalize(self, _finish, weakref.ref(self))

    def commit(self) -> None:
        """Commit now; if anything has changed since the last commit, it is on disk when this returns.

        Any thread may call it, but no signal handler, which may have interrupted a call of the storage: raise
        ``SystemExit`` there, since the end of the process commits.

        Raises:
            OSError: If it failed. The folder holds the commit before, and the journal goes on trying.
            StorageClosedError: If the journal is closed.
        """
        storage = self._storage()
        if self._process != os.getpid():
            raise InvalidInputError(
                f"this process was forked, and the journal in {self.path} belongs to process {self._process}: commit "
                "there. Nothing was committed."
            )
        with self._turn:
            if storage is None or self._closing.is_set():
                raise StorageClosedError(f"the journal in {self.path} is closed; nothing was committed")
            self._commit(storage)

    def _commit(self, storage: Journaled) -> None:
        rows = None
        try:
            if self._writer.is_gone:
                self._reopen()
            with storage._still():
                content = storage._content(copy=True)
                content.rows = rows = storage._rows_for(self._writer)
                if rows is not None:
                    rows.hold()
                committed = time.monotonic(), storage._count_inserts()
            self._writer.write(content, if_changed=True)
        except BaseException as error:
            self.error = error
            if rows is not None:
                rows.close(None)  # if it was interrupted before it was written: whoever adds would wait for it
            raise
        self.error, self._warned, self._time, self._committed = None, False, time.time(), committed

    def measure(self, inserts: Number) -> Measures:
        """How old the last commit is, and what was added since.

        Args:
            inserts: Transitions ever added.
        """
        since, committed = self._committed
        return {"journal_lag_seconds": Most(time.monotonic() - since), "journal_lag_inserts": inserts - committed}

    def _reopen(self) -> None:
        """The folder was removed, or moved away: make it again. Everything is written anew."""
        self._writer.close()
        before = self._end
        self._open()
        before.detach()
        if not self._writer.is_empty:
            self._writer.close()
            raise InvalidInputError(f"the folder {self.path} was replaced by another one, which holds a snapshot")

    def close(self) -> None:
        """Commit, and release the folder, also if the commit fails. Calling it again has no effect.

        Raises:
            OSError: If the commit failed. The folder holds the one before.
        """
        storage = self._storage()
        if storage is not None:
            self._close(storage)

    def _close(self, storage: Journaled) -> None:
        if self._process != os.getpid():
            return  # it is the parent's
        with self._turn:
            if not self._closing.is_set():
                self._closing.set()
                self._end_of_worker.cancel()
                try:
                    self._commit(storage)
                finally:
                    self._writer.close()

    def leave(self, storage: Journaled) -> None:
        """The storage, or the process, is at its end: close the journal, and warn if the last commit fails."""
        if self._storage() not in (storage, None):
            return  # this is a shallow copy of its storage
        try:
            self._close(storage)
        except Exception as error:
            self._warn(error, "It was the last one")

    def _run(self) -> None:
        while self._storage() is not None and not _wait(self._closing, float(self._journal.interval)):
            self._commit_in_background()

    def _commit_in_background(self) -> None:
        try:
            self.commit()
        except StorageClosedError:  # meanwhile
            pass
        except Exception as error:
            if not self._warned:
                self._warned = True
                with suppress(RuntimeWarning):  # where warnings are errors: nobody would see them, and this must go on
                    self._warn(error, f"Adding goes on, and a commit is tried every {self._journal.interval:g} seconds")

    def _warn(self, error: Exception, outlook: str) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._time))
        warnings.warn(
            f"a commit to the journal in {self.path} failed: {error!r}. {outlook}. The folder still holds the commit "
            f"before; nothing that came after {since} is in it.",
            RuntimeWarning,
            stacklevel=3,
        )

    def __repr__(self) -> str:
        state = "closed" if self._closing.is_set() else "open" if self.error is None else f"failed: {self.error!r}"
        return f"journal of {self._owner} in {str(self.path)!r}: {state}"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a storage has no journal


def _wait(closing: threading.Event, seconds: float) -> bool:
    """Wait for the next commit; True if there will be none."""
    return closing.wait(min(seconds, threading.TIMEOUT_MAX))


def _finish(reference: weakref.ref[RunningJournal]) -> None:
    """The process ends."""
    journal = reference()
    storage = None if journal is None else journal._storage()
    if journal is not None and storage is not None:
        journal.leave(storage)
        journal._thread.join()
