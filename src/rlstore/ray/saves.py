"""What a shard leaves on disk for the next process of it, and what that process begins with."""

from __future__ import annotations

import inspect
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlstore import HindsightReplayStorage
from rlstore.engine.disk import manifest
from rlstore.engine.disk.background import BackgroundSave
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.folder import LOCK
from rlstore.engine.disk.journal import Journal, Journaled, RunningJournal
from rlstore.engine.disk.snapshot import SnapshotReader, remove_snapshot
from rlstore.errors import InvalidInputError, SnapshotError
from rlstore.ray.counts import check_shards, checked_count, read_small
from rlstore.storage import Storage

_BEFORE = "newest.json"  # of earlier versions: it names the newest snapshot of a shard


@dataclass(frozen=True)
class Saving:
    """Where and when the shards of a served storage are saved.

    Attributes:
        shards: The number of shards.
        snapshot_dir: The folder of the snapshots, or None.
        snapshot_every: Transitions inserted into a shard between its snapshots, or None.
        journal: The folder of the journals, or None.
        interval: Seconds between the commits of a journal.
        fsync: Whether a commit survives a power failure.
    """

    shards: int = 1
    snapshot_dir: str | None = None
    snapshot_every: int | None = None
    journal: str | None = None
    interval: float = 2.0
    fsync: bool = True

    @property
    def roots(self) -> list[str]:
        """The folders that hold those of the shards."""
        return [folder for folder in (self.snapshot_dir, self.journal) if folder is not None]


class Restored(NamedTuple):
    """A storage that a shard begins with.

    Attributes:
        storage: The storage, new or with what was saved.
        inserted: Transitions inserted up to what it holds.
        seeded: Whether it continues the random numbers of the one that was saved.
        said: What could not be read, or nothing.
    """

    storage: Storage
    inserted: int
    seeded: bool
    said: str


class _Saved(NamedTuple):
    """A storage on disk: in which folder, with how many inserts up to it, and as which save."""

    folder: Path
    inserted: int
    reader: SnapshotReader


class Saves:
    """The folders of one shard.

        shard-0/snapshot    of save() and of snapshot_every
        shard-0/journal     of the journal
        shard-0/newest.json and the folder that it names: the snapshot of an earlier version of rlstore

    The note of each (see engine/disk/snapshot.py) is the number of transitions inserted up to it.

    Args:
        shard: The number of the shard.
        saving: Where it is saved.
    """

    def __init__(self, shard: int, saving: Saving) -> None:
        self._name, self._saving = f"shard-{shard}", saving
        root, journal = saving.snapshot_dir, saving.journal
        self.snapshot = None if root is None else Path(root) / self._name / "snapshot"
        self.journal = None if journal is None else Path(journal) / self._name / "journal"
        self._goes_on: SnapshotReader | None = None  # with which save the journal goes on
        self._count: _FolderCount | None = None

    # ---------------------------------------------------------------------------------------------- reading

    def restore(self, factory: Callable[..., Storage], *, is_restart: bool) -> Restored:
        """The storage with the newest of what is there: its journal, a snapshot, what it keeps in folders of its own.

        Args:
            factory: Creates the storage.
            is_restart: Continue with the next if one cannot be read, and set that aside; else it is an error.
        """
        fresh = self._create(factory)
        folders = _own_folders(fresh)
        self._count = _FolderCount(next(iter(folders.values()))) if folders else None
        said: list[str] = []
        inserted = 0 if self._count is None else self._counted(self._count, fresh, said if is_restart else None)
        for saved in self._saved(said if is_restart else None):
            if saved.inserted < inserted:
                continue
            fresh._give_up()  # a folder is used by one storage at a time
            try:
                storage = type(fresh).load(saved.folder, device="cpu", folders=folders)
            except SnapshotError as error:
                if not is_restart:
                    raise
                said.append(_set_aside(saved.folder, error))
                fresh = self._create(factory)
                continue
            if isinstance(storage, HindsightReplayStorage) and isinstance(fresh, HindsightReplayStorage):
                storage.compute_reward = fresh.compute_reward
            self._goes_on = saved.reader if saved.folder == self.journal else None
            return Restored(storage, saved.inserted, True, "; ".join(said))
        return Restored(fresh, inserted, False, "; ".join(said))

    def _counted(self, count: _FolderCount, storage: Storage, said: list[str] | None) -> int:
        """The inserts that a folder covers. If that cannot be read, it is an error, or is set aside and ``said``."""
        try:
            return count.read(storage)
        except SnapshotError as error:
            if said is None:
                storage._give_up()
                raise
            said.append(_set_aside(count.path, error))
            return count.read(storage)

    def _create(self, factory: Callable[..., Storage]) -> Storage:
        """A storage of the factory; of several shards each gets folders of its own, if it uses any."""
        takes_subfolder = "subfolder" in inspect.signature(factory).parameters
        if self._saving.shards == 1 or not takes_subfolder:
            return factory("cpu", None, None)
        storage = factory("cpu", None, None, subfolder=self._name)
        for folder in _own_folders(storage).values():
            check_shards([os.path.dirname(folder)], self._saving.shards)
        return storage

    def _saved(self, said: list[str] | None) -> list[_Saved]:
        """What was saved, the newest first. What cannot be read is an error, or is set aside and ``said``."""
        found = []
        for folder in (self.journal, self.snapshot):
            try:
                saved = None if folder is None else _saved_in(folder)
            except SnapshotError as error:
                if said is None or folder is None:
                    raise
                said.append(_set_aside(folder, error))
                continue
            found += [] if saved is None else [saved]
        return sorted(found, key=lambda saved: saved.inserted, reverse=True)  # of two that are equal, the journal

    # ---------------------------------------------------------------------------------------------- writing

    @property
    def records_steps(self) -> bool:
        """True if the inserts are recorded beside the rows: after each step, since the process may die any time."""
        return self._count is not None

    def record(self, storage: Storage, inserted: int) -> None:
        """Record the inserts up to now beside the rows, if the storage keeps them in a folder of its own."""
        if self._count is not None:
            self._count.write(storage, inserted)

    def save(self, storage: Storage, inserted: int) -> BackgroundSave:
        """Begin to write a snapshot of the state as it is now."""
        assert self.snapshot is not None
        saving = storage._save(self.snapshot, background=True, note={"inserted": inserted})
        assert saving is not None
        return saving

    def forget_before(self) -> None:
        """Remove what an earlier version has written: there is a snapshot that is newer."""
        if self.snapshot is not None and (self.snapshot.parent / _BEFORE).exists():
            for old in self.snapshot.parent.glob("snapshot-[0-9]*"):
                with suppress(InvalidInputError, OSError):  # it holds something else, which is left there
                    remove_snapshot("serve()", old)
                    (old / LOCK).unlink()
                    old.rmdir()
            (self.snapshot.parent / _BEFORE).unlink()

    def begin_journal(self, shard: Journaled) -> RunningJournal | None:
        """Begin to commit what a shard holds, if it has a journal: to what it was restored from, or to a new folder."""
        if self.journal is None:
            return None
        if self._goes_on is None:  # what is there is older
            remove_snapshot("serve()", self.journal)
        journal = Journal(self.journal, self._saving.interval, self._saving.fsync)
        return RunningJournal("serve()", shard, journal, self._goes_on)


def _saved_in(folder: Path) -> _Saved | None:
    """What a folder of a shard holds, None if nothing."""
    if not (folder / manifest.NAME).exists():
        return _saved_before(folder.parent) if folder.name == "snapshot" else None
    with SnapshotReader(folder) as reader:
        try:
            return _Saved(folder, checked_count("inserted", reader.note.get("inserted")), reader)
        except ValueError as error:
            raise reader.damaged("note.inserted", reader.note.get("inserted")) from error


def _saved_before(folder: Path) -> _Saved | None:
    """The snapshot that an earlier version of rlstore has written for a shard, None if there is none."""
    newest = read_small(folder, _BEFORE)
    if newest is None:
        return None
    try:
        name = f"snapshot-{checked_count('count', newest['count'])}"
        inserted = checked_count("inserted", newest["numbers"]["inserted"])
        if newest["folder"] != name:
            raise ValueError(f"folder is not {name!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{folder / _BEFORE} does not name a snapshot: {error}") from error
    with SnapshotReader(folder / name) as reader:
        return _Saved(folder / name, inserted, reader)


def _set_aside(folder: Path, error: SnapshotError) -> str:
    """Rename what cannot be read, so that another one can be written; what is to be said of it."""
    found = folder if os.path.lexists(folder) else folder.parent / _BEFORE
    aside = found.with_name(f"damaged-{time.time_ns()}-{found.name}")
    found.rename(aside)
    return f"{found} could not be read, and is now {aside.name} ({error})"


def _own_folders(storage: Storage) -> dict[str, str]:
    """The folders in which a storage keeps its rows, by the argument that names each."""
    if type(storage)._settings is Storage._settings:  # a class that cannot be saved
        return {}
    return storage._used_folders(storage._settings())


class _FolderCount:
    """The count of inserts of a storage that keeps its rows in a folder of its own, in a file beside them.

    It is written after each step, so a process may be killed in between. Rows that were written since are told by the
    counters of the rows.

    Args:
        folder: The folder.
    """

    _FORM = struct.Struct("<qq")  # the inserts that the folder covers, and the rows written at that time

    def __init__(self, folder: str) -> None:
        self.path = Path(folder).absolute() / "inserted"
        self._descriptor: int | None = None

    def read(self, storage: Storage) -> int:
        """The inserts that the folder covers.

        Raises:
            SnapshotError: If the file is a link or a device, or does not hold two numbers from 0 on.
        """
        try:
            with Directory(self.path.parent) as directory:
                found = directory.read(self.path.name, self._FORM.size)
        except FileNotFoundError:
            found = b""
        try:  # it is empty if a process was killed when it had just made it
            counts = self._FORM.unpack(found) if found else (0, 0)
            inserted, written = (checked_count("a count", count) for count in counts)
        except (struct.error, ValueError) as error:
            raise SnapshotError(f"{self.path} is damaged: it does not hold two counts ({error})") from error
        rows = storage._rows_in_folders()  # None: the folder is opened with the first sample
        return inserted if rows is None else inserted + max(rows[0] - written, 0)

    def write(self, storage: Storage, inserted: int) -> None:
        """Write it in one call: a process that is killed leaves the old count or the new one."""
        rows = storage._rows_in_folders()
        if rows is None:
            return
        if self._descriptor is None:
            with Directory(self.path.parent) as directory:
                self._descriptor = directory.open(self.path.name, os.O_RDWR | os.O_CREAT)
        written, unfinished = rows
        os.pwrite(self._descriptor, self._FORM.pack(inserted - unfinished, written), 0)
