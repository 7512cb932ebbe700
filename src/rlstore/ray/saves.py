"""What a shard leaves on disk for the next process of it, and what that process begins with."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlstore import HindsightReplayStorage
from rlstore.engine.disk.directory import Directory
from rlstore.errors import SnapshotError
from rlstore.ray.counts import check_shards
from rlstore.storage import Storage


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
        """The folders of all shards."""
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


class Saves:
    """The folders of one shard.

    Args:
        shard: The number of the shard.
        saving: Where it is saved.
    """

    def __init__(self, shard: int, saving: Saving) -> None:
        self._shard, self._saving = shard, saving
        self._snapshots = None if saving.snapshot_dir is None else _Snapshots(saving.snapshot_dir, shard)
        self._count: _FolderCount | None = None

    def restore(self, factory: Callable[..., Storage], *, is_restart: bool) -> Restored:
        """The storage with the newest of what is there: a snapshot, or what it keeps in folders of its own.

        Args:
            factory: Creates the storage.
            is_restart: Continue without a snapshot that cannot be read; else it is an error.
        """
        fresh = self._create(factory)
        folders = _own_folders(fresh)
        self._count = _FolderCount(next(iter(folders.values()))) if folders else None
        inserted, said = 0 if self._count is None else self._count.read(fresh), ""
        try:
            loaded = None if self._snapshots is None else self._snapshots.load(fresh, folders, inserted)
        except SnapshotError as error:
            if not is_restart:
                raise
            loaded, said = None, f"the snapshot could not be read ({error})"
            fresh = self._create(factory)
        if loaded is None:
            return Restored(fresh, inserted, False, said)
        return Restored(*loaded, True, said)

    def _create(self, factory: Callable[..., Storage]) -> Storage:
        """A storage of the factory; of several shards each gets folders of its own, if it uses any."""
        takes_subfolder = "subfolder" in inspect.signature(factory).parameters
        if self._saving.shards == 1 or not takes_subfolder:
            return factory("cpu", None, None)
        storage = factory("cpu", None, None, subfolder=f"shard-{self._shard}")
        for folder in _own_folders(storage).values():
            check_shards(os.path.dirname(folder), self._saving.shards)
        return storage

    def record(self, storage: Storage, inserted: int) -> None:
        """Record the inserts up to now beside the rows, if the storage keeps them in a folder of its own."""
        if self._count is not None:
            self._count.write(storage, inserted)

    def save(self, storage: Storage, inserted: int) -> None:
        """Save the storage and the number of transitions that were ever inserted."""
        if self._snapshots is None:
            raise SnapshotError("this storage is served without a snapshot_dir; give one to serve()")
        self._snapshots.save(storage, inserted)


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
        self._path = Path(folder).absolute() / "inserted"
        self._descriptor: int | None = None

    def read(self, storage: Storage) -> int:
        """The inserts that the folder covers."""
        inserted = written = 0
        if self._path.is_file() and self._path.stat().st_size == self._FORM.size:
            inserted, written = self._FORM.unpack(self._path.read_bytes())
        rows = storage._rows_in_folders()  # None: the folder is opened with the first sample
        return inserted if rows is None else inserted + max(rows[0] - written, 0)

    def write(self, storage: Storage, inserted: int) -> None:
        """Write it in one call: a process that is killed leaves the old count or the new one."""
        rows = storage._rows_in_folders()
        if rows is None:
            return
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        written, unfinished = rows
        os.pwrite(self._descriptor, self._FORM.pack(inserted - unfinished, written), 0)


class _Snapshots:
    """The snapshots of one shard.

    Each is a folder, and a file names the newest one together with the inserts up to it. A crash leaves the previous
    snapshot or the new one, each with its own count.

    Args:
        root: The folder of all shards.
        shard: The number of the shard.
    """

    def __init__(self, root: str, shard: int) -> None:
        self._folder = Path(root) / f"shard-{shard}"
        self._file = self._folder / "newest.json"

    def save(self, storage: Storage, inserted: int) -> None:
        """Save the storage and the number of transitions that were ever inserted."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _, count, _ = self._newest() or ("", 0, 0)
        name = f"snapshot-{count + 1}"
        shutil.rmtree(self._folder / name, ignore_errors=True)  # left by a crash
        storage.save(self._folder / name)
        newest = {"folder": name, "count": count + 1, "numbers": {"inserted": inserted}}
        with Directory(self._folder) as folder:
            folder.write_whole(self._file.name, json.dumps(newest).encode())
        for other in self._folder.glob("snapshot-*"):
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)

    def load(self, fresh: Storage, folders: dict[str, str], least: int) -> tuple[Storage, int] | None:
        """The newest snapshot and its inserts; None if there is none with ``least`` inserts.

        Args:
            fresh: A new storage of the same kind. It is given up if there is a snapshot.
            folders: Its own folders.
            least: The inserts that its own folders cover.
        """
        newest = self._newest()
        if newest is None or newest[2] < least:
            return None
        fresh._give_up()  # a folder is used by one storage at a time
        storage = type(fresh).load(self._folder / newest[0], device="cpu", folders=folders)
        if isinstance(storage, HindsightReplayStorage) and isinstance(fresh, HindsightReplayStorage):
            storage.compute_reward = fresh.compute_reward
        return storage, newest[2]

    def _newest(self) -> tuple[str, int, int] | None:
        """The name of the newest snapshot, how many there were, and its inserts."""
        if not self._file.exists():
            return None
        try:
            newest = json.loads(self._file.read_bytes())
            if newest["folder"] != f"snapshot-{newest['count']}":
                raise ValueError(f"folder is {newest['folder']!r}, and count {newest['count']!r}")
            return newest["folder"], newest["count"], newest["numbers"]["inserted"]
        except (ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"{self._file} does not name a snapshot: {error}") from error
