"""Files of numpy: what ``numpy.load`` reads. Members are read and written in chunks, whatever their size.

``write_npz`` writes, for ``N`` steps of ``E`` episodes, one after another:

======================= ================================================================================================
``observations``        ``[N, ...]``; of nested observations ``observations/name`` for each part
``actions``             ``[N, ...]``
``rewards``             ``[N, ...]``
``terminations``        bool ``[N]``
``truncations``         bool ``[N]``
extra fields            by their names, ``[N, ...]``
``episode_lengths``     int64 ``[E]``: how many steps each episode has
``final_observations``  ``[E, ...]``: the observation after the last step of each episode, nested likewise
``final_episodes``      int64 ``[E]``: the numbers of the episodes that these are of; rollouts do not know all of them
``rlstore``             the spaces and the names, as JSON
======================= ================================================================================================
"""

from __future__ import annotations

import math
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlstore.data.columns import EPISODE, GivenColumns, Layout, checked_columns
from rlstore.data.described import MOST_BYTES, Description, source_of
from rlstore.data.replaced import sync, workplace
from rlstore.data.source import Array, EpisodeSource, Form, plain_file
from rlstore.data.table import CHUNK_BYTES, Ends, Rows, common_length
from rlstore.data.written import spaces_of, written_episodes
from rlstore.engine.checks import check_path
from rlstore.engine.disk.files import replaceable
from rlstore.engine.disk.json_text import parse_json
from rlstore.engine.rows.schema import Path as FieldPath
from rlstore.errors import InvalidInputError

_LENGTHS, _ABOUT = "episode_lengths", "rlstore"
_FINALS, _FINAL_EPISODES = "final_observations", "final_episodes"
_OTHERS = {"terminated": "terminations", "truncated": "truncations"}
_COPIED = 1 << 20
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, LookupError, RuntimeError)


def read_npz(
    path: str | os.PathLike[str],
    columns: GivenColumns | None = None,
    *,
    ends: Ends = "terminated",
    rewards: float | None = None,
) -> EpisodeSource:
    """The episodes of an npz file: of :func:`write_npz`, or arrays of steps ``[N, ...]`` as d4rl and others name them.

    Nothing but the list of its arrays is read before the episodes are iterated, and then a few MiB and one episode are
    in memory at a time.

    Args:
        path: The file.
        columns: By field the name of its array, where it has another name than usual, and of each extra field:
            ``{"observations": "s", "costs": "info_cost"}``. Other arrays are left out.
        ends: How an episode ended where the file has one flag, ``dones``, for both.
        rewards: The reward of every step, if the file has none.

    Raises:
        InvalidInputError: (a ValueError) if the file is damaged or not complete, or lacks an array. Damage inside of an
            array is found when the episodes are iterated.
    """
    table = _NpzTable(Path(check_path("read_npz()", "path", path, "a file")))
    about = table.description
    if _LENGTHS in table.columns and (about is None or columns is not None):
        columns = {"episodes": _LENGTHS, **checked_columns(columns)}
    return source_of(table, table, about, columns, ends, rewards)


def write_npz(source: Any, path: str | os.PathLike[str], *, progress: bool = False) -> None:
    """Write episodes to an npz file, which ``numpy.load`` and :func:`read_npz` read.

    The file is not compressed, and replaces one of this name when it is complete; until then its arrays are collected
    beside it, so twice its size has to be free on the disk. One episode is in memory at a time.

    Args:
        source: A storage, some of its episodes, what a reader returned, or episodes as ``add_episodes`` takes them.
        path: The file.
        progress: Show a progress bar.

    Raises:
        InvalidInputError: (a ValueError) if there is no episode, or they differ in form.
        DiskFullError: (an OSError) if the disk is full. In either case a file that was there still is.
    """
    file = replaceable(check_path("write_npz()", "path", path, "a file"))
    with workplace(file) as folder:
        with _Arrays(folder) as arrays:
            about = _collect(source, arrays, progress=progress)
            new = folder / "new.npz"
            with zipfile.ZipFile(new, "w") as archive:
                # It comes first: if the list of members is damaged, it is known which are missing.
                with archive.open(f"{_ABOUT}.npy", "w") as member:
                    np.lib.format.write_array(member, np.array(about.as_json()))
                arrays.write_to(archive)
        sync(new)
        os.replace(new, replaceable(file))
        sync(file.parent)


def _collect(source: Any, arrays: _Arrays, *, progress: bool) -> Description:
    """The arrays of all episodes."""
    layout: dict[FieldPath, str] = {}
    finals: dict[FieldPath, str] = {}
    num_finals = 0
    for number, episode in enumerate(written_episodes(source, "write_npz()", progress=progress)):
        layout = {field: _name(_OTHERS.get(str(field[0]), field[0]), *field[1:]) for field in episode.steps}
        for field, column in layout.items():
            arrays.append(column, episode.steps[field])
        if episode.final:
            ends = {**episode.final, EPISODE: np.array(number)}
            finals = {leaf: _FINAL_EPISODES if leaf == EPISODE else _name(_FINALS, *leaf) for leaf in ends}
            for leaf, value in ends.items():
                arrays.append(finals[leaf], value[None])
            num_finals += 1
        arrays.append(_LENGTHS, np.array([len(episode)]))
    names = (*layout.values(), *finals.values(), _LENGTHS, _ABOUT)
    if len(set(names)) < len(names):
        raise InvalidInputError(f"two arrays would have the same name: {sorted(names)}. Nothing was written.")
    return Description(spaces_of(source), {**layout, EPISODE: _LENGTHS}, finals, num_finals)


def _name(*parts: str | int) -> str:
    return "/".join(map(str, parts))


class _Arrays:
    """Arrays that grow along their first axis, in files of a folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._forms: dict[str, tuple[int, Form]] = {}

    def __enter__(self) -> _Arrays:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, name: str, entries: Array) -> None:
        """Append entries to an array; it begins with the first."""
        if name not in self._files:
            self._files[name] = open(self._folder / str(len(self._files)), "w+b")  # noqa: SIM115 - closed by __exit__
        count = self._forms[name][0] if name in self._forms else 0
        self._forms[name] = (count + len(entries), (entries.shape[1:], entries.dtype))
        self._files[name].write(np.ascontiguousarray(entries).data)

    def write_to(self, archive: zipfile.ZipFile) -> None:
        """Write all of them, as members that numpy reads."""
        for name, file in self._files.items():
            count, (shape, dtype) = self._forms[name]
            head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count, *shape)}
            file.seek(0)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, head)
                shutil.copyfileobj(file, member, _COPIED)


class _NpzTable:
    """The arrays of an npz file, as :class:`~rlstore.data.table.Table`.

    Args:
        file: The file.

    Raises:
        InvalidInputError: If it is damaged or not complete.
    """

    def __init__(self, file: Path) -> None:
        self._file, self.origin = file, str(file)
        self.description: Description | None = None
        self._heads: dict[str, _Head] = {}
        with self._opened() as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                with archive.open(entry) as member:  # which refuses a name that the list and the member do not share
                    if name == _ABOUT:
                        about = parse_json(_read_text(member), self.origin)
                        self.description = Description.of(about, self.origin)
                    elif entry.filename.endswith(".npy"):
                        self._heads[name] = _read_head(member, entry.file_size)
        self.num_rows = 0
        self.columns: Sequence[str] = list(self._heads)

    def require(self, layout: Layout) -> None:
        """Take the number of rows from the columns of a layout, unless it is that of final observations.

        Raises:
            InvalidInputError: If they differ in it, one of them cannot be read, or none of them has bytes.
        """
        for column in layout.values():
            if column not in self._heads:
                raise InvalidInputError(f"{self.origin} is damaged: {column} is missing. Nothing was read.")
            if problem := self._heads[column].problem:
                raise InvalidInputError(f"{column} of {self.origin} {problem}. Nothing was read.")
        heads = {column: self._heads[column] for column in layout.values() if column != _LENGTHS}
        counts = {column: head.count for column, head in heads.items()}
        rows = common_length(counts, self.origin)
        if rows and not any(head.nbytes for head in heads.values()):
            raise InvalidInputError(f"{self.origin} has {rows:,} steps without a number in them. Nothing was read.")
        if _LENGTHS in layout.values():
            counts[f"the sum of {_LENGTHS}"] = int(self._lengths(rows).sum())
            common_length(counts, self.origin)
        self.num_rows = self.num_rows or rows

    def read(self, columns: Collection[str]) -> Iterator[Rows]:
        """Some columns of all rows, in chunks of about 4 MiB."""
        arrays = [column for column in columns if column != _LENGTHS]
        stops = np.cumsum(self._lengths(self.num_rows)) if _LENGTHS in columns else None
        begin = 0
        for rows, count in self._chunks(arrays, self._heads[arrays[0]].count if arrays else self.num_rows):
            if stops is not None:
                rows[_LENGTHS] = np.searchsorted(stops, np.arange(begin, begin + count), "right")
            begin += count
            yield rows

    def _chunks(self, columns: Collection[str], total: int) -> Iterator[tuple[Rows, int]]:
        heads = {column: self._heads[column] for column in columns}
        size = max(1, CHUNK_BYTES // max(1, sum(head.nbytes for head in heads.values())))
        with self._opened() as archive, ExitStack() as stack:
            members = {column: stack.enter_context(archive.open(f"{column}.npy")) for column in columns}
            for column, member in members.items():
                if _read_head(member, archive.getinfo(f"{column}.npy").file_size) != heads[column]:
                    raise InvalidInputError(f"{self.origin} was changed since it was opened; open it again")
            for begin in range(0, total, size):
                count = min(size, total - begin)
                rows = {column: heads[column].take(members[column], count) for column in columns}
                if begin + count == total and any(member.read(1) for member in members.values()):
                    raise EOFError("an array goes on behind its end")  # where its checksum is looked at
                yield rows, count

    def _lengths(self, rows: int) -> Array:
        """The steps of each episode, int64 ``[episodes]``, of a file with so many rows."""
        head = self._heads[_LENGTHS]
        if head.form[0] or head.count > rows:
            raise InvalidInputError(
                f"{_LENGTHS} of {self.origin} has the shape {(head.count, *head.form[0])}; one number is needed for "
                f"each episode, of which {rows:,} steps are at most as many. Nothing was read."
            )
        chunks = [rows[_LENGTHS] for rows, _ in self._chunks((_LENGTHS,), head.count)]
        lengths = np.concatenate([np.zeros(0, head.form[1].newbyteorder("=")), *chunks])
        with np.errstate(invalid="ignore"):  # what is no number is none from 1 on
            wrong = ~((lengths >= 1) & (lengths <= rows) & (lengths % 1 == 0))
        if wrong.any():
            place = int(wrong.argmax())
            raise InvalidInputError(
                f"{_LENGTHS}[{place}] of {self.origin} is {lengths[place]}; a whole number from 1 to its {rows:,} "
                "steps is needed. Nothing was read."
            )
        return lengths.astype(np.int64)

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        """The open file. Errors of what it holds say that it is damaged."""
        with open(plain_file(self._file), "rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    yield archive
            except _DAMAGED as error:
                if isinstance(error, InvalidInputError):
                    raise
                raise InvalidInputError(
                    f"{self.origin} is damaged or not complete, or no npz file: {error}. Write or copy it again"
                ) from error


@dataclass(frozen=True)
class _Head:
    """What the head of a member says.

    Attributes:
        count: Its entries.
        form: The form of an entry.
        problem: Why it cannot be read in chunks; empty if it can.
    """

    count: int
    form: Form
    problem: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of an entry."""
        return math.prod(self.form[0]) * self.form[1].itemsize

    def take(self, member: IO[bytes], count: int) -> Array:
        """The next entries of a member."""
        entries = np.empty((count, *self.form[0]), self.form[1])
        left = entries.reshape(-1).view(np.uint8).data
        while len(left):
            taken = member.readinto(left)  # type: ignore[attr-defined]
            if not taken:
                raise EOFError("an array ends too early")
            left = left[taken:]
        return entries.astype(entries.dtype.newbyteorder("="), copy=False)


def _read_text(member: IO[bytes]) -> bytes:
    """The text that a member holds, whose size is looked at before it is taken into memory."""
    np.lib.format.read_magic(member)
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    if shape or dtype.kind != "U" or dtype.itemsize > 4 * MOST_BYTES:
        raise ValueError(f"{_ABOUT} is {dtype} {shape}; a text is needed")
    return str(np.frombuffer(member.read(dtype.itemsize), dtype)[0]).encode()


def _read_head(member: IO[bytes], nbytes: int) -> _Head:
    """The head of a member; what follows are its entries."""
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        return _Head(0, ((), np.dtype(object)), f"is of version {version} of numpy's format, which is not read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_transposed, dtype = read(member)
    form = (tuple(shape[1:]), dtype)
    if dtype.kind not in "biuf" or not shape:
        return _Head(0, form, f"is {dtype} {shape}; an array of numbers is needed")
    head = _Head(shape[0], form)
    if is_transposed and len(shape) > 1:
        return _Head(shape[0], form, "is in Fortran order; save numpy.ascontiguousarray() of it")
    if member.tell() + head.count * head.nbytes != nbytes:
        raise EOFError(f"an array {shape} of {dtype} has {nbytes} bytes")
    return head
