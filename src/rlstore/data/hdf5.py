"""HDF5 files of steps, as d4rl has them."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlstore.data.columns import GivenColumns, Layout
from rlstore.data.described import source_of
from rlstore.data.source import EpisodeSource, plain_file, required
from rlstore.data.table import CHUNK_BYTES, Ends, Rows, common_length
from rlstore.engine.checks import check_path
from rlstore.errors import InvalidInputError


def read_hdf5(
    path: str | os.PathLike[str],
    columns: GivenColumns | None = None,
    *,
    ends: Ends = "terminated",
    rewards: float | None = None,
) -> EpisodeSource:
    """The episodes of an HDF5 file with arrays of steps ``[N, ...]``, as d4rl has them.

    A few MiB and one episode are in memory at a time. Datasets of Minari are read by :func:`read_minari`. An array
    whose numbers are in other files is refused: those of anybody could be meant.

    Args:
        path: The file.
        columns: By field the name of its array, where it has another name than usual, and of each extra field:
            ``{"qpos": "infos/qpos"}``. Arrays that are not named are left out.
        ends: How an episode ended where the file has one flag, ``dones``, for both.
        rewards: The reward of every step, if the file has none.

    Raises:
        InvalidInputError: (a ValueError) if the file is damaged or not complete, or lacks an array.
        ImportError: If h5py is not installed.
    """
    table = _Hdf5Table(Path(check_path("read_hdf5()", "path", path, "a file")))
    return source_of(table, None, None, columns, ends, rewards)


def is_elsewhere(array: Any) -> bool:
    """Whether the numbers of an array of h5py are in other files."""
    return bool(array.is_virtual or array.external)


class _Hdf5Table:
    """The arrays of an HDF5 file, as :class:`~rlstore.data.table.Table`.

    Args:
        file: The file.
    """

    num_rows = 0

    def __init__(self, file: Path) -> None:
        self._h5py = required("h5py", "read_hdf5()")
        self._file, self.origin = file, str(file)
        self._heads: dict[str, tuple[tuple[int, ...], Any]] = {}
        self._elsewhere: set[str] = set()  # those whose numbers are in other files
        with self._opened() as arrays:
            arrays.visititems(self._note)
        self.columns: Sequence[str] = list(self._heads)

    def _note(self, name: str, item: Any) -> None:
        if isinstance(item, self._h5py.Dataset) and item.ndim:
            self._heads[name] = (item.shape, item.dtype)
            if is_elsewhere(item):
                self._elsewhere.add(name)

    def require(self, layout: Layout) -> None:
        """Take the number of rows from the columns that are read.

        Raises:
            InvalidInputError: If they differ in it, or one of them has no numbers, or has them in another file.
        """
        for column in layout.values():
            if column in self._elsewhere:
                raise InvalidInputError(
                    f"{column} of {self.origin} has its numbers in another file, which is not read; copy them into "
                    "this file. Nothing was read."
                )
            if self._heads[column][1].kind not in "biuf":
                raise InvalidInputError(
                    f"{column} of {self.origin} is {self._heads[column][1]}; an array of numbers is needed. "
                    "Nothing was read."
                )
        counts = {column: self._heads[column][0][0] for column in layout.values()}
        self.num_rows = common_length(counts, self.origin)

    def read(self, columns: Collection[str]) -> Iterator[Rows]:
        """Some columns of all rows, in chunks of about 4 MiB."""
        forms = [self._heads[column] for column in columns]
        size = max(1, CHUNK_BYTES // max(1, sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in forms)))
        with self._opened() as arrays:
            for begin in range(0, self.num_rows, size):
                yield {column: arrays[column][begin : begin + size] for column in columns}

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The open file. Errors of what it holds say that it is damaged."""
        try:
            with self._h5py.File(plain_file(self._file), "r") as file:
                yield file
        except (FileNotFoundError, PermissionError, InvalidInputError):
            raise
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            raise InvalidInputError(
                f"{self.origin} is damaged or not complete, or no HDF5 file: {error}. Write or copy it again"
            ) from error
