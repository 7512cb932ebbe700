"""Blocks of a storage in mapped files, which may be larger than RAM and outlive the process.

manifest.json    see manifest.py; "schema": what the storage holds and in which form
NAME.bin         the rows of one block, contiguous
seal.json        see seal.py: checksums of what the files held when the folder was left
lock             held while a storage uses the folder
"""

from __future__ import annotations

import atexit
import math
import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory, Room
from rlstore.engine.disk.files import raising_disk_full, reserve
from rlstore.engine.disk.folder import Folder
from rlstore.engine.disk.seal import RowFiles, Seal
from rlstore.errors import SnapshotError

KIND, FIELDS = "mapped storage", {"schema": dict}
NEED_LESS = (
    "Give a smaller storage_size, store each frame once with frame_stack, keep pixels as uint8, or give "
    'memory="mapped" with a path on a {larger} disk.'
)


class MappedFiles:
    """The mapped files of one storage.

    Args:
        owner: The class name of the storage, for errors.
        path: The folder.
    """

    _flags, _access = os.O_RDWR, mmap.ACCESS_WRITE  # how files are opened and mapped

    def __init__(self, owner: str, path: str | os.PathLike[str]) -> None:
        self.path, self._owner = Path(path).absolute(), owner
        self._folder: Folder | None = None
        self._directory: Directory | None = None  # while it is open
        self._seal: Seal | None = None
        self._mapped: set[str] = set()
        self._has_rows = False  # of an earlier run

    def open(self, schema: Mapping[str, Any], rows: RowFiles | None = None) -> bool:
        """Lock the folder, created if it does not exist.

        Args:
            schema: See :meth:`rlstore.engine.disk.folder.Folder.match`.
            rows: Which blocks hold rows, by the names that :meth:`map` is given; None if none do.

        Returns:
            True if it holds a storage of this schema: :meth:`map` then returns the blocks of that.

        Raises:
            InvalidInputError: If it holds anything else, or another storage uses it. Nothing was changed.
            SnapshotError: If its files are not what they were when it was left. Nothing was changed.
        """
        if_full = "Give a path on a larger disk."
        folder = Folder(self._owner, self.path, KIND, FIELDS, lambda name: True, if_full)
        found = folder.match(schema)
        seal = _seal_of(folder.directory, rows)
        try:
            seal.open()
            self._has_rows = any(seal.written())
        except BaseException:
            folder.release()
            raise
        self._folder, self._directory, self._seal = folder, folder.directory, seal
        self._leave = weakref.finalize(self, _leave, folder, seal, self._mapped)
        self._leave.atexit = False
        _OPEN.add(self)
        return found

    def map(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, most: int = 0, is_late: bool = False
    ) -> Tensor:
        """The block of this name; a new file holds zeros.

        Args:
            name: The name.
            shape: The shape.
            dtype: The dtype.
            most: The file of an earlier run may have up to so many rows; the block then has as many. A block that was
                mapped before is extended with zeros.
            is_late: It may be made although there are rows already.

        Raises:
            SnapshotError: If there are rows, and the file is missing or of another size.
        """
        if self._directory is None:
            raise RuntimeError(f"{self._owner} must open the folder {self.path} before it maps {name}")
        file, row = file_name(name), math.prod(shape[1:]) * dtype.itemsize
        descriptor = self._opened(file, shape[0] * row, most * row, is_late=is_late)
        if descriptor is None:
            anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # taken when it is written
            empty = mmap.mmap(-1, shape[0] * row, flags=anonymous) if shape[0] * row else None
            return tensor_over(empty, shape, dtype)
        try:
            held = os.fstat(descriptor).st_size
            if held < shape[0] * row:
                self._extend(descriptor, file, held, shape[0] * row)
            rows = max(shape[0], held // row) if row else shape[0]
            memory = mmap.mmap(descriptor, rows * row, access=self._access) if rows * row else None
        finally:
            os.close(descriptor)
        self._mapped.add(file)
        return tensor_over(memory, (rows, *shape[1:]), dtype)

    def _opened(self, file: str, nbytes: int, most: int, *, is_late: bool) -> int | None:
        """The descriptor of a file of ``nbytes``, or of up to ``most``; it is created if it may be missing."""
        assert self._directory is not None
        assert self._seal is not None
        self._seal.check_use(file)
        try:
            descriptor = self._directory.open(file, self._flags)
        except FileNotFoundError:
            if self._has_rows and not is_late:
                raise self._damaged(file, 0, nbytes) from None
            return self._created(file, nbytes)
        held = os.fstat(descriptor).st_size
        # Before there are rows it may be left over from a run that was killed before it had made all files.
        is_short = held < nbytes and self._has_rows
        if file not in self._mapped and (is_short or held > max(nbytes, most)):
            os.close(descriptor)
            raise self._damaged(file, held, nbytes)
        return descriptor

    def _created(self, file: str, nbytes: int) -> int | None:
        """A file of zeros. It has its name only once it is complete: one that is shorter was cut."""
        assert self._directory is not None
        directory = self._directory
        descriptor = directory.create(f"{file}.new")
        try:
            self._extend(descriptor, file, 0, nbytes)
            directory.replace(f"{file}.new", file)
        except BaseException:
            os.close(descriptor)
            directory.remove(f"{file}.new")
            raise
        return descriptor

    def _extend(self, descriptor: int, file: str, held: int, nbytes: int) -> None:
        advice = f"{self._owner} needs {size_text(nbytes - held)} more for it. {NEED_LESS.format(larger='larger')}"
        try:
            with raising_disk_full(self.path / file, advice):
                if nbytes > held:
                    reserve(descriptor, held, nbytes)
        except BaseException:
            os.ftruncate(descriptor, held)
            raise

    def _damaged(self, file: str, held: int, nbytes: int) -> SnapshotError:
        return SnapshotError(
            f"{self.path / file} is damaged: it has {held:,} bytes and should have {nbytes:,}. Restore it from a copy, "
            "or give another path."
        )

    def holds(self, name: str) -> bool:
        """True if there is a file of this block."""
        return os.path.lexists(self.path / file_name(name))

    def unusable(self, name: str, how: str) -> SnapshotError:
        """The error for a block whose file holds what cannot be."""
        return SnapshotError(
            f"{self.path / file_name(name)} is damaged: {how}. Load a snapshot into another folder, or begin a new one."
        )

    def unmapped_bytes(self) -> int:
        """The size of the files of an earlier run that :meth:`map` has not returned yet."""
        return sum(file.lstat().st_size for file in self.path.glob("*.bin") if file.name not in self._mapped)

    def break_seal(self) -> None:
        """Rows are about to be written in another order than one after another."""
        if self._seal is not None:
            self._seal.remove()

    def close(self, *, still: bool = True) -> None:
        """Seal and release the folder. The blocks stay mapped as long as they are referenced.

        Args:
            still: Nobody can write any more.
        """
        if self._folder is not None and self._seal is not None:
            self._leave.detach()
            _leave(self._folder, self._seal, self._mapped, still=still)
            self._folder = self._directory = self._seal = None

    def seal_at_exit(self) -> None:
        """The process ends; other threads, and what else is called at its end, may still write."""
        if self._seal is not None:
            _try_to_seal(self._seal, self._mapped, still=False)


class PrivateFiles(MappedFiles):
    """The same blocks for somebody who only looks: what is written to them stays in memory.

    The folder is neither locked nor changed, and its storage may go on writing.

    Attributes:
        seal: Its seal, once it is open; what that says of the files is not verified then.
        room: The memory that may be written because the folder says so, likewise.
    """

    seal: Seal | None = None
    room: Room

    _flags, _access = os.O_RDONLY, mmap.ACCESS_COPY

    def open(self, schema: Mapping[str, Any], rows: RowFiles | None = None) -> bool:
        """Open the folder, whose schema it must be."""
        self._directory = Directory(self.path)
        self.room = self._directory.room(manifest.NAME)
        seal = _seal_of(self._directory, rows)
        seal.read()
        self._has_rows = any(seal.written())
        self.seal = self._seal = seal
        return True

    def _created(self, file: str, nbytes: int) -> None:
        """There is no file: what nobody has written is zero."""
        return

    def _opened(self, file: str, nbytes: int, most: int, *, is_late: bool) -> int | None:
        descriptor = super()._opened(file, nbytes, most, is_late=is_late)
        if descriptor is None or os.fstat(descriptor).st_size >= nbytes:
            return descriptor
        os.close(descriptor)  # what was never used is as good as what is not there
        return None

    def close(self, *, still: bool = True) -> None:
        """Close the folder."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _seal_of(directory: Directory, rows: RowFiles | None) -> Seal:
    if rows is not None:
        row_bytes = {file_name(name): nbytes for name, nbytes in rows.row_bytes.items()}
        rows = rows._replace(counters=file_name(rows.counters), row_bytes=row_bytes)
    return Seal(directory, rows)


def _leave(folder: Folder, seal: Seal, files: set[str], *, still: bool = True) -> None:
    _try_to_seal(seal, files, still=still)
    folder.release()


def _try_to_seal(seal: Seal, files: set[str], *, still: bool) -> None:
    # The seal that is there, open, holds as well: a full disk is no reason to fail.
    with suppress(OSError, SnapshotError):
        seal.close(files, still=still)


_OPEN: weakref.WeakSet[MappedFiles] = weakref.WeakSet()


@atexit.register
def _seal_all() -> None:
    for files in list(_OPEN):
        files.seal_at_exit()


def file_name(name: str) -> str:
    """The file of a block."""
    quoted = quote(name, safe="")
    return f"{quoted if len(quoted) < 200 else sha256(name.encode()).hexdigest()}.bin"


def tensor_over(memory: mmap.mmap | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Mapped memory as a tensor that is not an inference tensor; None for a tensor without entries."""
    with torch.inference_mode(False):
        if memory is None:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def size_text(nbytes: int) -> str:
    """A number of bytes for errors."""
    return f"{nbytes / 1e9:.2f} GB ({nbytes:,} bytes)"
