"""Files and folders that are written beside the old ones and replace them when they are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstore.engine.disk.files import raising_disk_full
from rlstore.errors import InvalidInputError


@contextmanager
def workplace(path: Path) -> Iterator[Path]:
    """A new folder on the disk of ``path``, removed at the end; errors of a full disk say what to do.

    Raises:
        InvalidInputError: If the folder of ``path`` does not exist.
    """
    parent = path.resolve().parent
    if not parent.is_dir():
        raise InvalidInputError(f"there is no folder {parent} for {path.name}; create it. Nothing was written.")
    with raising_disk_full(parent, f"{path.name} was not written; free some space, or write it to another disk."):
        folder = Path(tempfile.mkdtemp(prefix=".rlstore.", dir=parent))  # a longer name than that of path may not do
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
