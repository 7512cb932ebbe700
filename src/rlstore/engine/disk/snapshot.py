"""Snapshots: a folder with a manifest, the tensors in the safetensors format, and the rows of replay in segments.

The manifest names the other files. A save writes new ones beside them, or appends to a segment, then replaces the
manifest atomically, and then removes the files that it does not name. So a crash at any moment leaves the old snapshot
or the new one, complete; what an unfinished save leaves is removed by the next.

    manifest.json                see manifest.py; "contents", "id": another one with each save, "class", "device",
                                 "settings", "numbers", "note": what the caller wants to know of it,
                                 "file": {"name", "bytes"}, "tensors": {name: {"dtype", "shape", "crc32"}},
                                 and "segments": [{"name", "bytes"}], oldest rows first
    tensors-000001.safetensors   the tensors; complex ones as pairs of real numbers
    rows-000001.bin              rows, see segments.py
    lock                         held during a save

"contents" is "whole" if the tensors are everything, or "segments" if there are rows. A save to a folder that holds what
this storage saved there last, or was loaded from, only appends the rows that were written since.
"""

from __future__ import annotations

import os
import re
import struct
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.files import raising_disk_full
from rlstore.engine.disk.folder import LOCK, Folder
from rlstore.engine.disk.segments import SEGMENT_BYTES, SEGMENT_NAME, Record, SegmentFile, records_of
from rlstore.engine.disk.space_json import from_json, to_json
from rlstore.engine.disk.tensor_file import TensorFile, checksum_of, storable, write_tensors
from rlstore.engine.rows.schema import DTYPES, dtype_name
from rlstore.errors import InvalidInputError, SnapshotError

_TENSOR_FILE = re.compile(r"tensors-([0-9]{6,})\.safetensors")
_MANIFESTS = (manifest.NAME, f"{manifest.NAME}.new")
_CONTENTS = ("whole", "segments")
_FIELDS = {
    "contents": str,
    "class": str,
    "device": str,
    "settings": dict,
    "numbers": dict,
    "file": {"name": str, "bytes": int},
    "tensors": dict,
}
_TENSOR_FIELDS = {"dtype": str, "shape": list, "crc32": int}
_SEGMENT_FIELDS = {"name": str, "bytes": int}
_MOST_SEGMENTS = 128  # that a ring which is held all at once would fill: a reader opens all of them
_MOST_RECORDS = 8192  # and one more for each _LEAST_RECORD bytes of rows: many small ones take long to read
_LEAST_RECORD = 256 << 10
_IF_FULL = "Save to a larger disk."

# ---------------------------------------------------------------------------------------------------- writing


@dataclass
class SavedSegment:
    """A segment of a snapshot.

    Attributes:
        name: Its file.
        nbytes: The bytes of it that count.
        stop: One past the newest row of each lane in it, int64 ``[lanes]``.
        records: The records in it.
    """

    name: str
    nbytes: int
    stop: Tensor
    records: int = 0


@dataclass
class SavedRows:
    """The rows that a snapshot holds.

    Attributes:
        id: That of the save.
        stop: One past the newest row of each lane, int64 ``[lanes]``.
        segments: The segments, oldest rows first.
        is_trusted: Whether the last segment may be appended to. After an error nobody knows what is in it.
    """

    id: str
    stop: Tensor
    segments: list[SavedSegment]
    is_trusted: bool = True

    def are_mostly_needed(self, nbytes: int) -> bool:
        """False if it is better to write all rows anew, of which ``nbytes`` are needed."""
        held = sum(segment.nbytes for segment in self.segments)
        records = sum(segment.records for segment in self.segments)
        return held <= 2 * nbytes + SEGMENT_BYTES and records <= _MOST_RECORDS + nbytes // _LEAST_RECORD


class Rows(Protocol):
    """Rows to be saved.

    Attributes:
        saved: The rows that are in the folder already; None for none.
        first: Where :meth:`records` begin in each lane, int64 ``[lanes]``.
        oldest: The oldest row of each lane that is needed, int64 ``[lanes]``.
        nbytes: The bytes of all rows that are needed.
        tensors: What else is saved, by name.
    """

    saved: SavedRows | None
    first: Tensor
    oldest: Tensor
    nbytes: int
    tensors: Mapping[str, Tensor]

    def hold(self) -> None:
        """Keep the rows as they are until :meth:`close`, which whoever calls this has to call, whatever happens."""
        ...

    def records(self) -> Iterator[Mapping[str, Tensor]]:
        """The rows from ``first`` on, as records; each says in "stop" up to which row of each lane there are all."""
        ...

    def close(self, saved: SavedRows | None) -> None:
        """Nothing more is read: the folder holds these rows now, or (None) the save has failed."""
        ...


@dataclass
class Content:
    """What a save writes.

    Attributes:
        class_name: The ``class_name`` of :class:`SnapshotReader`.
        device: The device of the tensors.
        settings: The arguments of the storage (see :mod:`rlstore.engine.disk.space_json` for what they may hold).
        numbers: The rest of its state that is not a tensor, likewise.
        tensors: By name; views are fine.
        note: What the caller wants to know of it, as JSON.
        rows: Its rows, if they are apart.

    Raises:
        InvalidInputError: If something cannot be saved.
    """

    class_name: str
    device: str
    settings: Mapping[str, Any]
    numbers: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    note: Mapping[str, Any] = field(default_factory=dict)
    rows: Rows | None = None

    def __post_init__(self) -> None:
        self.settings, self.numbers = to_json(self.settings), to_json(self.numbers, "numbers")
        for name, tensor in self.tensors.items():
            storable(name, tensor)

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        """The tensors, with those of the rows."""
        return {**self.tensors, **({} if self.rows is None else self.rows.tensors)}


class SnapshotWriter:
    """A folder for snapshots, locked until it is closed.

    Args:
        owner: Who writes it, for errors.
        path: The folder; created if it does not exist.
        sync: Whether a save waits until the disk has everything. If not, a snapshot survives the end of the process,
            and need not survive that of the machine.

    Attributes:
        id: That of the save that the folder holds; None if it holds none.
        is_empty: Whether there was no snapshot in it when it was opened.

    Raises:
        InvalidInputError: If the folder holds something else, or another save to it is in progress.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str], *, sync: bool = True) -> None:
        self._folder = Folder(owner, path, "snapshot", _FIELDS, _is_foreign, _IF_FULL)
        self._folder.directory.waits = sync
        self.path, self._sync = self._folder.path, sync
        self._held = self._folder.manifest  # None after an error as well: nobody knows what is there
        self.is_empty = self._held is None
        self.id: str | None = None if self._held is None else self._held.get("id")

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed or moved, or is closed."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._folder.directory.descriptor))
        except OSError:
            return True

    def holds(self, saved: SavedRows) -> bool:
        """Whether these rows are in the folder: nobody else has saved there, or removed a file."""
        try:
            sizes = [os.stat(part.name, dir_fd=self._folder.directory.descriptor).st_size for part in saved.segments]
        except OSError:
            return False
        are_there = (size >= part.nbytes for size, part in zip(sizes, saved.segments, strict=True))
        return saved.id == self.id and all(are_there)

    def write(self, content: Content, *, if_changed: bool = False) -> None:
        """Save, replacing the snapshot that is there, if any. No second copy of the tensors is made.

        Args:
            content: What to save.
            if_changed: Write nothing if the folder holds just that already.

        Raises:
            DiskFullError: If the disk is full. As after any other error, the snapshot that was there still is.
        """
        saved = None
        try:
            if if_changed and self._holds(content):
                saved = None if content.rows is None else content.rows.saved
                return
            with raising_disk_full(self.path, _IF_FULL):
                try:
                    saved = self._write(content)
                finally:
                    self._remove_unnamed()
        finally:
            if content.rows is not None:
                content.rows.close(saved)

    def _holds(self, content: Content) -> bool:
        """Whether all but the rows is as in the folder; so are the rows then, which the counters among it count."""
        held = self._held
        if content.rows is not None and content.rows.saved is None:
            return False
        if held is None or any(held.get(name) != value for name, value in _described(content).items()):
            return False
        tensors = content.all_tensors
        smallest_first = sorted(tensors.items(), key=lambda item: item[1].numel())  # which tell most changes
        return held["tensors"].keys() == tensors.keys() and all(
            held["tensors"][name] == _entry_of(tensor, checksum_of(storable(name, tensor)))
            for name, tensor in smallest_first
        )

    def _write(self, content: Content) -> SavedRows | None:
        """Write everything, the manifest last; the rows that are in the folder then."""
        found = {**_described(content), "id": uuid.uuid4().hex}
        self._held, tensors = None, content.all_tensors
        forms = {name: storable(name, tensor) for name, tensor in tensors.items()}
        directory = self._folder.directory
        segments = [] if content.rows is None else self._append(content.rows)
        file = f"tensors-{_last_number(directory, _TENSOR_FILE) + 1:06}.safetensors"
        checksums = write_tensors(directory.create(file), forms, sync=self._sync)
        directory.sync()
        found["file"] = {"name": file, "bytes": os.stat(file, dir_fd=directory.descriptor).st_size}
        found["tensors"] = {name: _entry_of(tensor, checksums[name]) for name, tensor in tensors.items()}
        if content.rows is not None:
            found["segments"] = [{"name": segment.name, "bytes": segment.nbytes} for segment in segments]
        self._folder.write_manifest(found)
        self._held, self.id = found, found["id"]
        if content.rows is None:
            return None
        stops = torch.stack([content.rows.first, *(segment.stop for segment in segments)])
        return SavedRows(self.id, stops.amax(0), segments)

    def _append(self, rows: Rows) -> list[SavedSegment]:
        """Append rows to the segments that are still needed, and return those with all that they hold then."""
        saved = rows.saved
        known = [] if saved is None else saved.segments
        segments = [replace(segment) for segment in known if bool((segment.stop > rows.oldest).any())]
        limit, file = max(SEGMENT_BYTES, rows.nbytes // _MOST_SEGMENTS), None
        if saved is not None and saved.is_trusted and segments and segments[-1].name == known[-1].name:
            file = SegmentFile(self._folder.directory, segments[-1].name, segments[-1].nbytes)
        try:
            for record in rows.records():
                if file is None or file.nbytes >= limit:
                    if file is not None:
                        full, file = file, None
                        full.close(sync=self._sync)
                    number = _last_number(self._folder.directory, SEGMENT_NAME) + 1
                    file = SegmentFile(self._folder.directory, f"rows-{number:06}.bin")
                    segments.append(SavedSegment(file.name, 0, rows.first))
                file.append(record)
                newest = segments[-1]
                newest.nbytes, newest.stop, newest.records = file.nbytes, record["stop"], newest.records + 1
        finally:
            if file is not None:
                file.close(sync=self._sync)
        return segments

    def _remove_unnamed(self) -> None:
        """Remove what the manifest does not name: files of earlier saves, or of one that did not finish."""
        directory = self._folder.directory
        names, named = directory.names(), set()
        if manifest.NAME in names:
            found = manifest.read_manifest(directory, "snapshot", _FIELDS)
            if found.get("id") != self.id:  # the save failed after the manifest was replaced: the disk has either one
                self.id = None
                return
            named = {found["file"]["name"], *(segment["name"] for segment in found.get("segments", ()))}
        for name in names:
            if name == _MANIFESTS[1] or (not _is_foreign(name) and name not in named):
                with suppress(SnapshotError):  # a folder of this name is not ours
                    directory.remove(name)

    def close(self) -> None:
        """Release the folder."""
        self._folder.release()


def remove_snapshot(owner: str, path: Path) -> None:
    """Remove the snapshot or journal in a folder, if there is one, and leave the folder with its lock alone in it.

    Raises:
        InvalidInputError: If there is something else in it, or somebody else uses it. Nothing was removed.
    """
    if not os.path.lexists(path):
        return
    folder = Folder(owner, path, "snapshot", _FIELDS, _is_foreign, _IF_FULL)
    try:
        ours = [name for name in folder.directory.names() if name != LOCK]
        foreign = [name for name in ours if _is_foreign(name) and name not in _MANIFESTS]
        if foreign:
            raise InvalidInputError(
                f"the folder {path} holds a snapshot or a journal, which is to be replaced, and other files: "
                f"{foreign[:5]}. Move these away; {owner} removes nothing that rlstore has not written. "
                "Nothing was changed."
            )
        for name in sorted(ours, key=_MANIFESTS.__contains__, reverse=True):  # first what names the others
            folder.directory.remove(name)
    finally:
        folder.release()


def _described(content: Content) -> dict[str, Any]:
    """What a manifest says of a snapshot besides its id, its files and its tensors."""
    return {
        "contents": "whole" if content.rows is None else "segments",
        "class": content.class_name,
        "device": content.device,
        "settings": content.settings,
        "numbers": content.numbers,
        **({"note": dict(content.note)} if content.note else {}),
    }


def _entry_of(tensor: Tensor, checksum: int) -> dict[str, Any]:
    """What a manifest says of a tensor."""
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "crc32": checksum}


def _is_foreign(name: str) -> bool:
    return not (_TENSOR_FILE.fullmatch(name) or SEGMENT_NAME.fullmatch(name))


def _last_number(directory: Directory, pattern: re.Pattern[str]) -> int:
    found = (pattern.fullmatch(name) for name in directory.names())
    return max((int(match[1]) for match in found if match), default=0)


# ---------------------------------------------------------------------------------------------------- reading


class SnapshotReader:
    """A snapshot, open for reading; use it in a ``with`` statement.

    A save that replaces it meanwhile changes nothing: what is open stays readable until it is closed.

    Args:
        path: The folder.
        keeps_rows: False to verify the rows only: :meth:`read_rows` reads them and forgets them.

    Attributes:
        id: That of the save; None in older snapshots.
        note: What the caller of the save wanted to know of it.
        has_rows: Whether rows are apart, in :meth:`records`.
        segments: The name of each file of rows, and the bytes of it that count.
        unread: The names of tensors that nobody has read.
        room: The memory that may be written because the snapshot says so.

    Raises:
        SnapshotError: If there is none, or it is of a newer version, or a file is missing, truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, keeps_rows: bool = True) -> None:
        self.folder, self.keeps_rows = Path(path).absolute(), keeps_rows
        if not self.folder.is_dir():
            raise SnapshotError(f"there is no snapshot in {self.folder}: it is not a folder")
        with Directory(self.folder) as directory:
            found, (descriptor, *self._descriptors) = _open_newest(directory)
            self.room = directory.room(manifest.NAME)
        self.manifest, file = self.folder / manifest.NAME, found["file"]
        self.has_rows: bool = found["contents"] == "segments"
        self.segments: list[dict[str, Any]] = found["segments"]
        try:
            self._file = TensorFile(descriptor, self.folder / file["name"])
        except BaseException:
            self._close_segments()
            raise
        try:
            if self._file.nbytes != file["bytes"]:
                raise self._file.damaged(f"it has {self._file.nbytes:,} bytes and should have {file['bytes']:,}")
            self._tensors: dict[str, Any] = found["tensors"]
            self.unread = set(self._tensors)
            self._check_tensors()
            self._check_segments()
            self.class_name: str = found["class"]
            self.device: str = found["device"]
            self.settings, self.numbers = (self._decoded(field, found[field]) for field in ("settings", "numbers"))
            self.id: str | None = found.get("id")
            self.note: Any = found.get("note", {})
            if not isinstance(self.note, dict):
                raise self.damaged("note", self.note)
        except BaseException:
            self.close()
            raise

    def _check_segments(self) -> None:
        for segment, descriptor in zip(self.segments, self._descriptors, strict=True):
            held = os.fstat(descriptor).st_size
            if not 0 <= segment["bytes"] <= held:
                raise SnapshotError(
                    f"{self.folder / segment['name']} is damaged: it has {held:,} bytes and should have at least "
                    f"{segment['bytes']:,}."
                )

    def _check_tensors(self) -> None:
        """Hold what the manifest says of the tensors against the header of the file."""
        shapes, dtypes = self._file.shapes, self._file.dtypes
        manifest.check_fields(self.manifest, self._tensors, dict.fromkeys(self._tensors, _TENSOR_FIELDS), "tensors.")
        if shapes.keys() != self._tensors.keys():
            other = sorted(shapes.keys() ^ self._tensors.keys())[0]
            raise self._file.damaged(f"{other} is in the file or in {manifest.NAME}, and not in both")
        for name, entry in self._tensors.items():
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                raise self.damaged(f"tensors.{name}.dtype", entry["dtype"])
            form = (dtype.to_real(), (*entry["shape"], 2)) if dtype.is_complex else (dtype, tuple(entry["shape"]))
            if (dtypes[name], shapes[name]) != form:
                raise self._file.damaged(f"{name} is not of the form that was saved")

    def _decoded(self, field: str, form: Any) -> dict[str, Any]:
        try:
            decoded: dict[str, Any] = from_json(form, self.room)
        except SnapshotError:
            raise
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
            AssertionError,
            RuntimeError,
        ) as error:
            raise SnapshotError(f'{self.manifest} is damaged: "{field}" cannot be read ({error!r})') from error
        return decoded

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._file.close()
        self._close_segments()

    def _close_segments(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def records(self) -> Iterator[tuple[int, Record]]:
        """All records, oldest first, each with the index of its segment."""
        for index in range(len(self.segments)):
            for record in self.records_in(index):
                yield index, record

    def records_in(self, index: int) -> Iterator[Record]:
        """The records of one segment, oldest first."""
        segment = self.segments[index]
        return records_of(self._descriptors[index], self.folder / segment["name"], segment["bytes"])

    @property
    def files(self) -> list[str]:
        """The names of all files but the manifest."""
        return [self._file.path.name, *(segment["name"] for segment in self.segments)]

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and rows."""
        return self._file.nbytes + sum(int(segment["bytes"]) for segment in self.segments)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return DTYPES[self._entry(name)["dtype"]]

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """A tensor, in new memory. It is never an inference tensor."""
        with torch.inference_mode(False):
            made = torch.empty(self.shape(name), dtype=self.dtype(name), device=device)
        self.read_into(name, made)
        return made

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill a tensor of the same shape and dtype, which may be a view, on any device.

        Raises:
            SnapshotError: If it is not of the same shape and dtype, or what was read is not what was saved.
        """
        self._check_form(name, target)
        self._file.read_into(name, target, self._entry(name)["crc32"])
        self.unread.discard(name)

    def _check_form(self, name: str, target: Tensor) -> None:
        if (self.shape(name), self.dtype(name)) != (tuple(target.shape), target.dtype):
            raise SnapshotError(
                f"{name} was saved as {self.shape(name)} {dtype_name(self.dtype(name))} in {self.folder}, and is to be "
                f"read into {tuple(target.shape)} {dtype_name(target.dtype)}"
            )

    def read_rows(self, name: str, target: Tensor) -> None:
        """As :meth:`read_into`; but ``target`` is left as it is if no rows are kept."""
        if self.keeps_rows:
            self.read_into(name, target)
        else:
            self._check_form(name, target)
            self.verify(name)

    def verify(self, name: str) -> None:
        """Read a tensor and forget it.

        Raises:
            SnapshotError: If it is not what was saved.
        """
        self._file.verify(name, self._entry(name)["crc32"])
        self.unread.discard(name)

    def check_numbers(self, numbers: Mapping[str, Any], fields: manifest.Fields) -> None:
        """Refuse numbers that lack a field, or have one of another type; see :func:`manifest.check_fields`."""
        manifest.check_fields(self.manifest, numbers, fields, "numbers.")

    def damaged(self, field: str, found: object) -> SnapshotError:
        """The error for a field of the manifest whose value cannot be."""
        return SnapshotError(f'{self.manifest} is damaged: "{field}" is {str(found)[:80]!r}')

    def unusable(self, name: str, how: str) -> SnapshotError:
        """The error for a tensor that holds what cannot be."""
        return self._file.damaged(f"{name}: {how}")

    def _entry(self, name: str) -> Any:
        if name not in self._tensors:
            raise SnapshotError(f"the snapshot in {self.folder} has no tensor {name!r}; it has {self.names}")
        return self._tensors[name]


def _open_newest(directory: Directory) -> tuple[dict[str, Any], list[int]]:
    """The manifest, and the descriptors of the files that it names: that of the tensors, and those of rows.

    A save may replace the manifest and remove a file in between. Then there is a newer manifest: it is read instead.
    """
    before = None
    while True:
        found = manifest.read_manifest(directory, "snapshot", _FIELDS)
        path, contents = directory.path / manifest.NAME, found["contents"]
        if contents not in _CONTENTS:
            raise manifest.newer_version(path, "contents", contents, " or ".join(_CONTENTS))
        segments = found.setdefault("segments", []) if contents == "whole" else found.get("segments")
        if not isinstance(segments, list) or (contents == "whole" and segments):
            raise SnapshotError(f'{path} is damaged: "segments" is {str(segments)[:80]!r}')
        for segment in segments:
            if not isinstance(segment, dict):
                raise SnapshotError(f'{path} is damaged: "segments" has {str(segment)[:80]!r}')
            manifest.check_fields(path, segment, _SEGMENT_FIELDS, "segments.")
        names = [found["file"]["name"], *(segment["name"] for segment in segments)]
        patterns = (_TENSOR_FILE, *(SEGMENT_NAME,) * len(segments))
        for name, pattern in zip(names, patterns, strict=True):
            if not pattern.fullmatch(name):
                raise SnapshotError(f'{path} is damaged: a "name" of a file in it is {name!r}')
        descriptors: list[int] = []
        try:
            for name in names:
                descriptors.append(directory.open(name))
            return found, descriptors
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if not isinstance(error, FileNotFoundError):
                raise
            if found == before:
                missing = names[len(descriptors)]
                raise SnapshotError(
                    f"the snapshot in {directory.path} is not complete: {missing} is missing"
                ) from error
            before = found


def generator_state(generator: torch.Generator) -> dict[str, Tensor]:
    """The state of a generator, as a tensor named after its kind of device."""
    return {f"generator[{generator.device.type}]": generator.get_state()}


def restore_generator(generator: torch.Generator, reader: SnapshotReader) -> None:
    """Restore the state of a generator from :func:`generator_state`.

    A generator of another kind of device is seeded instead, with a seed derived from the saved state.
    """
    (name,) = (name for name in reader.names if name.startswith("generator["))
    state = reader.tensor(name)
    if name == f"generator[{generator.device.type}]":
        if generator.device.type == "cpu" and not _is_twister(state):
            raise reader.unusable(name, "its place in the numbers is beyond them")
        generator.set_state(state)
    else:
        generator.manual_seed(checksum_of(state))


def _is_twister(state: Tensor) -> bool:
    """Whether the state of a generator on the CPU is at one of its numbers: torch reads on from any place it is given.

    At byte 8 it says how many of the 624 numbers are left, at byte 16 which comes next: a new one (1, 0).
    """
    if state.dtype is not torch.uint8 or state.numel() < 24:
        return False
    left, following = struct.unpack_from("=i4xQ", state.numpy().tobytes(), 8)
    return (left, following) == (1, 0) or (1 <= left <= 624 and left + following == 625)


# ------------------------------------------------------------------------------------------------- as one dict


def snapshot_files(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The files of a snapshot by name, uint8 each: for state dicts, which ``torch.load`` reads without pickle."""
    names = [name for name in sorted(os.listdir(path)) if _is_of_snapshot(name)]
    return {name: torch.from_numpy(np.fromfile(os.path.join(path, name), dtype=np.uint8)) for name in names}


def write_snapshot_files(files: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what :func:`snapshot_files` returned to an empty folder.

    Raises:
        InvalidInputError: If it is something else. Nothing was written.
        DiskFullError: If the disk is full.
    """
    for name, content in files.items():
        if not isinstance(name, str) or not _is_of_snapshot(name):
            raise InvalidInputError(f"{name!r} is no file of a snapshot. Nothing was changed.")
        if not isinstance(content, Tensor) or content.dtype != torch.uint8:
            found = content.dtype if isinstance(content, Tensor) else type(content).__name__
            raise InvalidInputError(f"{name!r} is {found}; a file of a snapshot is uint8. Nothing was changed.")
    with raising_disk_full(Path(path), _IF_FULL):
        for name, content in files.items():
            content.numpy(force=True).tofile(os.path.join(path, name))


def _is_of_snapshot(name: str) -> bool:
    return name == manifest.NAME or not _is_foreign(name)
