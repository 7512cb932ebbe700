"""Blocks of a storage in mapped files, which may be larger than RAM and outlive the process.

manifest.json    see manifest.py; "schema": what the storage holds and in which form
NAME.bin         the rows of one block, contiguous
lock             held while a storage uses the folder
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from rlstore.engine.disk.files import raising_disk_full, reserve, sync_folder
from rlstore.engine.disk.folder import Folder
from rlstore.errors import SnapshotError

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

    def __init__(self, owner: str, path: str | os.PathLike[str]) -> None:
        self.path, self._owner = Path(path).absolute(), owner
        self._folder: Folder | None = None
        self._mapped: set[str] = set()

    def open(self, schema: Mapping[str, Any]) -> bool:
        """Lock the folder, created if it does not exist.

        Args:
            schema: See :meth:`rlstore.engine.disk.folder.Folder.match`.

        Returns:
            True if it holds a storage of this schema: :meth:`map` then returns the blocks of that.

        Raises:
            InvalidInputError: If it holds anything else, or another storage uses it. Nothing was changed.
        """
        if_full = "Give a path on a larger disk."
        folder = Folder(self._owner, self.path, "mapped storage", {"schema": dict}, lambda name: True, if_full)
        found = folder.match(schema)
        self._folder = folder
        return found

    def map(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The block of this name, with at least ``shape[0]`` rows: its file is extended with zeros if it is shorter."""
        if self._folder is None:
            raise RuntimeError(f"{self._owner} must open the folder {self.path} before it maps {name}")
        path = self._file(name)
        row = math.prod(shape[1:]) * dtype.itemsize
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            held = os.fstat(descriptor).st_size
            if held < shape[0] * row:
                self._extend(descriptor, path, held, shape[0] * row)
            rows = max(shape[0], held // row) if row else shape[0]
            memory = mmap.mmap(descriptor, rows * row) if rows * row else None
        finally:
            os.close(descriptor)
        self._mapped.add(path.name)
        return tensor_over(memory, (rows, *shape[1:]), dtype)

    def _extend(self, descriptor: int, path: Path, held: int, nbytes: int) -> None:
        advice = f"{self._owner} needs {size_text(nbytes - held)} more for it. {NEED_LESS.format(larger='larger')}"
        try:
            with raising_disk_full(path, advice):
                reserve(descriptor, held, nbytes)
                sync_folder(self.path)
        except BaseException:
            if held:
                os.ftruncate(descriptor, held)
            else:
                path.unlink()
            raise

    def holds(self, name: str) -> bool:
        """True if there is a file of this block."""
        return self._file(name).exists()

    def unusable(self, name: str, how: str) -> SnapshotError:
        """The error for a block whose file holds what cannot be."""
        return SnapshotError(
            f"{self._file(name)} is damaged: {how}. Load a snapshot into another folder, or begin a new one."
        )

    def unmapped_bytes(self) -> int:
        """The size of the files of an earlier run that :meth:`map` has not returned yet."""
        return sum(file.stat().st_size for file in self.path.glob("*.bin") if file.name not in self._mapped)

    def close(self) -> None:
        """Release the folder. The blocks stay mapped as long as they are referenced."""
        if self._folder is not None:
            self._folder.release()
            self._folder = None

    def _file(self, name: str) -> Path:
        quoted = quote(name, safe="")
        return self.path / f"{quoted if len(quoted) < 200 else sha256(name.encode()).hexdigest()}.bin"


def tensor_over(memory: mmap.mmap | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Mapped memory as a tensor that is not an inference tensor; None for a tensor without entries."""
    with torch.inference_mode(False):
        if memory is None:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def size_text(nbytes: int) -> str:
    """A number of bytes for errors."""
    return f"{nbytes / 1e9:.2f} GB ({nbytes:,} bytes)"
