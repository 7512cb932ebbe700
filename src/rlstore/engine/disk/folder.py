"""A folder that one storage at a time writes: its lock, its manifest, and what is refused."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.files import raising_disk_full
from rlstore.errors import InvalidInputError, SnapshotError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


class FolderInUseError(InvalidInputError):
    """Another storage uses the folder."""


class Folder:
    """A folder locked for one owner until it is released or collected, or the process ends, however it ends.

    Args:
        owner: Who writes it, for errors: a class name, or "save()".
        path: The folder; created if it does not exist.
        kind: What its manifest calls it: "snapshot", "mapped storage" or "episodes".
        fields: The fields of that manifest.
        is_foreign: Whether a file of this name, in a folder without a manifest, means that the folder is not ours.
        if_full: What to do about a full disk, for errors.

    Attributes:
        manifest: The manifest found when the folder was opened; None in a new folder.
        directory: The open folder, until it is released.

    Raises:
        InvalidInputError: If the path is a file, holds something else, or (FolderInUseError) another storage uses it.
            Nothing was changed.
        SnapshotError: If what a mapped storage or episodes are to be read from has a damaged manifest.
    """

    def __init__(
        self,
        owner: str,
        path: str | os.PathLike[str],
        kind: str,
        fields: manifest.Fields,
        is_foreign: Callable[[str], bool],
        if_full: str,
    ) -> None:
        self.path, self._owner, self._kind, self._if_full = Path(path).absolute(), owner, kind, if_full
        self._fields, self._is_foreign = fields, is_foreign
        if not os.path.lexists(self.path / LOCK):
            self._read()  # before anything is created in a folder that is not ours
        with raising_disk_full(self.path, if_full):
            self.path.mkdir(parents=True, exist_ok=True)
            self.directory = Directory(self.path)
            try:
                self._descriptor = self._open_lock()
            except BaseException:
                self.directory.close()
                raise
        # Made before the lock is taken, so that no interrupt can leave it behind.
        self._unlock = weakref.finalize(self, _unlock, self._descriptor, self.directory)
        try:
            _LOCKED.add(self)
            self._lock()
            self.manifest = self._manifest_in(self.directory)
        except BaseException:
            self.release()
            raise

    def _read(self) -> dict[str, Any] | None:
        """The manifest, None if there is no folder yet; refuses a folder that is not ours."""
        if not os.path.lexists(self.path):
            return None
        if not self.path.is_dir():
            raise InvalidInputError(f"{self.path} is a file; {self._owner} needs a folder. Nothing was changed.")
        with Directory(self.path) as directory:
            return self._manifest_in(directory)

    def _manifest_in(self, directory: Directory) -> dict[str, Any] | None:
        """The manifest, None if the folder is new; refuses a folder that is not ours."""
        names = directory.names()
        if manifest.NAME in names:
            try:
                return manifest.read_manifest(directory, self._kind, self._fields)
            except SnapshotError as error:
                # For save() the folder is a wrong argument; for the others it holds the data that they are to use.
                kind = InvalidInputError if self._kind == "snapshot" else SnapshotError
                raise kind(
                    f"{str(error).rstrip('.')}. {self._owner} cannot write to this folder; give another path. "
                    "Nothing was changed."
                ) from error
        ours = (LOCK, f"{manifest.NAME}.new")
        foreign = [name for name in names if name not in ours and self._is_foreign(name)]
        if foreign:
            raise InvalidInputError(
                f"the folder {self.path} has no {manifest.NAME} and holds other files: {foreign[:5]}. {self._owner} "
                "needs a new or an empty folder. Nothing was changed."
            )
        return None

    def _open_lock(self) -> int:
        """The descriptor of the file that is locked."""
        if fcntl is None:
            raise InvalidInputError(f"{self._owner} cannot lock the folder {self.path}: this system has no file locks")
        try:
            return self.directory.open(LOCK, os.O_RDWR | os.O_CREAT)
        except SnapshotError as error:
            raise InvalidInputError(
                f"{error}; {self._owner} cannot lock this folder. Give another path. Nothing was changed."
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUseError(
                f"the folder {self.path} is in use by another storage, a journal or a save in the background, in this "
                f"process or in another; {self._owner} needs one of its own. Close that storage or journal, wait() for "
                "that save, or give another path. Nothing was changed."
            ) from error

    def release(self) -> None:
        """Give up the lock: another storage may use the folder. Calling it again has no effect."""
        self._unlock()

    def leave_to_parent(self) -> None:
        """In a forked child: the lock is the parent's, and the child must neither release it nor keep it alive."""
        if self._unlock.detach():
            os.close(self._descriptor)
            self.directory.close()

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Replace the manifest atomically."""
        with raising_disk_full(self.path, self._if_full):
            manifest.write_manifest(self.directory, self._kind, content)

    def match(self, schema: Mapping[str, Any]) -> bool:
        """Compare what the folder holds with a schema; a new folder gets a manifest with it.

        Args:
            schema: What a storage keeps in the folder and in which form, as JSON: two storages can use the same files
                if and only if their schemas are equal.

        Returns:
            True if the folder holds data of this schema, False if it is new.

        Raises:
            InvalidInputError: If it holds data of another schema. Nothing was changed, and the folder is released.
        """
        schema = json.loads(json.dumps(schema))
        try:
            if self.manifest is None:
                self.write_manifest({"schema": schema})
                return False
            differences = _differences(self.manifest["schema"], schema)
            if differences:
                raise InvalidInputError(
                    f"the folder {self.path} holds {self._kind} of another form than {self._owner} has: "
                    f"{'; '.join(differences)}. Give another path, or the same arguments as before. "
                    "Nothing was changed."
                )
        except BaseException:
            self.release()
            raise
        return True


def _unlock(descriptor: int, directory: Directory) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that is being forked right now may have the file open, too
    os.close(descriptor)
    directory.close()


_LOCKED: weakref.WeakSet[Folder] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for folder in list(_LOCKED):
        folder.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _differences(there: Any, here: Any, where: str = "") -> list[str]:
    """Each place in which two JSON values differ, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        parts = [(there.get(name), here.get(name), f"{where}.{name}" if where else name) for name in {**there, **here}]
        return [difference for part in parts for difference in _differences(*part)]
    return [] if there == here else [f"{where} is {json.dumps(there)} there and {json.dumps(here)} here"]
