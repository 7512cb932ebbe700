"""A folder that is open: its files are reached by bare names, and no link in it is followed.

Whatever becomes of the path meanwhile, an open folder stays the same one; and nothing that its files say can lead out
of it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from rlstore.errors import SnapshotError

_BARE_NAME = re.compile(r"[\w%.~ -]{1,255}", re.ASCII)


class Room:
    """The memory that may be written because a folder says so: 64 MiB, and 16 bytes for each that the folder has.

    Args:
        path: What says so, for errors.
        nbytes: The bytes that the folder has.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes, self._left = path, nbytes, (64 << 20) + 16 * nbytes

    def charge(self, nbytes: int, what: str) -> None:
        """Count memory that is about to be written.

        Raises:
            SnapshotError: If all that was counted is more than there may be.
        """
        self._left -= nbytes
        if self._left < 0:
            raise SnapshotError(
                f"{self._path} is damaged: it tells of {nbytes:,} bytes of {what}, and there are {self._nbytes:,} "
                "bytes of all files"
            )


class Directory:
    """An open folder; use it in a ``with`` statement, or close it.

    Args:
        path: The folder, which must exist.

    Attributes:
        path: Its path when it was opened, for errors.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.waits = path, True
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it. Calling it again has no effect."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """The descriptor of a file.

        Raises:
            FileNotFoundError: If there is none of this name.
            SnapshotError: If it is not a plain file, or the name is not one of a file in this folder.
        """
        if not _BARE_NAME.fullmatch(name) or name in (".", ".."):
            raise SnapshotError(f"{name!r} is not the name of a file in {self.path}")
        try:
            # Without a wait: opening a FIFO would take until somebody writes to it.
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO, errno.ENODEV):
                raise self._not_a_file(name) from error
            error.filename = str(self.path / name)  # the name alone does not say where
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._not_a_file(name)
        return descriptor

    def _not_a_file(self, name: str) -> SnapshotError:
        return SnapshotError(f"{self.path / name} is not a plain file but a link, a folder or a device")

    def read(self, name: str, most: int) -> bytes:
        """All of a file of at most ``most`` bytes: one that only says it is larger is not read into memory."""
        with open(self.open(name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise SnapshotError(f"{self.path / name} has {size:,} bytes, and no more than {most:,} are read")
            return file.read(size)

    def create(self, name: str) -> int:
        """The descriptor of a new, empty file; one of this name that is left from an earlier run is removed before."""
        self.remove(name)
        return self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def remove(self, name: str) -> None:
        """Remove a file, or a link but not what it leads to; nothing, if there is none."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            self.require_no_folder(name)
            raise

    def require_no_folder(self, name: str) -> None:
        """Refuse a folder of a name that files are to have."""
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode):
                raise self._not_a_file(name)

    def write_whole(self, name: str, content: bytes) -> None:
        """Write a file atomically: after a crash at any moment the old version or the new one is there, complete."""
        beside = f"{name}.new"
        try:
            with open(self.create(beside), "wb") as file:
                file.write(content)
                file.flush()
                if self.waits:
                    os.fsync(file.fileno())
            self.replace(beside, name)
        except BaseException:
            self.remove(beside)
            raise

    def replace(self, beside: str, name: str) -> None:
        """Give a file another name, and so replace the one of that name atomically."""
        os.replace(beside, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        self.sync()

    def names(self) -> list[str]:
        """The names of all that it holds, sorted."""
        return sorted(os.listdir(self.descriptor))

    def room(self, name: str) -> Room:
        """The memory that may be written because the file of this name says so."""
        nbytes = 0
        for other in self.names():
            with suppress(FileNotFoundError):  # another process may replace a snapshot meanwhile
                found = os.stat(other, dir_fd=self.descriptor, follow_symlinks=False)
                nbytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
        return Room(self.path / name, nbytes)

    def sync(self) -> None:
        """Write the names to the disk, so that they survive a power failure."""
        if self.waits:
            os.fsync(self.descriptor)
