"""The seal of a mapped folder: checksums of what its files held when the folder was left.

seal.json        see manifest.py; "closed", "segment": the bytes of a segment, "written": the rows that each lane had
                 ever written, and "files": by name {"bytes", "extent", "crc32"}

A file is cut into segments with a checksum each. Those of a file of rows lie within one lane, and only the first
"extent" rows of each lane are covered, the others being zeros; other files are covered from the beginning to the end.

While the seal is closed nobody writes: everything must match. Before anybody writes the seal is marked open. If the
process is then killed, rows that can have been written since are told by the counters: "written" when the folder was
left, and what they are now. The segments without such rows must match still; of the others, and of tables, nothing is
known. So data that are whole are never refused, wherever the process was killed. Rewriting rows in another order, as
loading a snapshot into the folder does, breaks the seal: it is removed before.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory
from rlstore.errors import SnapshotError
from rlstore.kernels import crc32

NAME = "seal.json"
_KIND = "seal"
_FIELDS = {"closed": bool, "segment": int, "written": list, "files": dict}
_FILE_FIELDS = {"bytes": int, "extent": int, "crc32": list}
_SEGMENT_BYTES = 4 << 20
_MANY_BYTES = 64 << 20  # from here on it pays to use threads
_REMEDY = f"If the files are to be used as they are, remove {NAME}."


class RowFiles(NamedTuple):
    """Which files of a folder hold rows, ``[lanes, rows, bytes of a row]``.

    Attributes:
        counters: The file that begins with the rows ever written by each lane, int64. Rows are written in this order,
            in places that wrap; with a row the one after it is written too.
        lanes: The lanes.
        rows: The rows of a lane.
        row_bytes: By file, the bytes of a row.
    """

    counters: str
    lanes: int
    rows: int
    row_bytes: Mapping[str, int]


class Damage(NamedTuple):
    """Something in which a file is not what it was.

    Attributes:
        file: The name of the file.
        error: What is wrong.
        lane: The lane of the rows that are concerned; -1 if it is not single rows.
        places: The places of these rows in their lane.
    """

    file: str
    error: SnapshotError
    lane: int = -1
    places: range = range(0)


class _Segment(NamedTuple):
    offset: int
    length: int
    lane: int = -1  # of a file of rows
    first: int = 0  # its first row, and one past its last
    stop: int = 0


class Seal:
    """The seal of a folder, which this process has locked.

    Args:
        directory: The folder.
        rows: Which files hold rows; None if none do.
    """

    def __init__(self, directory: Directory, rows: RowFiles | None) -> None:
        self.path, self._directory, self._rows, self._process = directory.path, directory, rows, os.getpid()
        self._found: dict[str, Any] | None = None
        self._planted: frozenset[str] = frozenset()  # files that came while the folder was closed

    # ---------------------------------------------------------------------------------------------- counters

    def written(self) -> list[int]:
        """The rows ever written by each lane; empty if it was never told.

        Raises:
            SnapshotError: If the counters are cut short, although there is more than them.
        """
        if self._rows is None:
            return []
        name, lanes = self._rows.counters, self._rows.lanes
        try:
            with _opened(self._directory, name) as descriptor:
                told = array("q", os.pread(descriptor, 8 * lanes, 0)[: 8 * lanes])
        except (FileNotFoundError, ValueError):  # or only a part of a number
            told = array("q")
        if len(told) == lanes:
            return told.tolist()
        others = [other for other in _files(self._directory) if other != name]
        if others:
            raise self._damaged(name, f"it is missing or cut short, and {others[0]} is there")
        return []

    # ---------------------------------------------------------------------------------------------- opening

    def open(self) -> None:
        """Verify what is there as far as it is sealed, and mark the seal open: from now on there may be writes.

        Raises:
            SnapshotError: If a file is not what it was. The seal stays as it was.
        """
        found = self.read()
        if found is None:
            self.remove()
            return
        for damage in self.damages(found):
            raise damage.error
        if found["closed"]:
            found["closed"] = False
            self._write(found)
        self._found = found

    def read(self) -> dict[str, Any] | None:
        """The seal; None if there is none that tells anything.

        Raises:
            SnapshotError: If it is damaged.
        """
        self._directory.require_no_folder(f"{NAME}.new")  # whoever opens the folder to write makes a new seal
        if NAME not in self._directory.names():
            return None
        path = self._directory.path / NAME
        try:
            found = manifest.read_manifest(self._directory, _KIND, _FIELDS, NAME)
            manifest.check_fields(path, found["files"], dict.fromkeys(found["files"], _FILE_FIELDS), "files.")
        except SnapshotError as error:
            raise SnapshotError(f"{error}. {_REMEDY}") from error
        if found["segment"] != _SEGMENT_BYTES:  # another version made it, with checksums of other parts
            return None
        lanes = 0 if self._rows is None else self._rows.lanes
        if len(found["written"]) != lanes or not all(type(n) is int and n >= 0 for n in found["written"]):
            raise SnapshotError(f'{path} is damaged: "written" is not a number for each of {lanes} lanes. {_REMEDY}')
        if found["closed"]:
            self._planted = frozenset(_files(self._directory)) - found["files"].keys()
        return found

    def damages(self, found: Mapping[str, Any]) -> Iterator[Damage]:
        """Hold the files against the seal: everything in which they differ from it."""
        there = _files(self._directory)
        for name, sealed in found["files"].items():
            try:
                if name not in there:
                    raise self._damaged(name, "it is missing")
                yield from self._damages_of(name, sealed, found, None if found["closed"] else self.written())
            except SnapshotError as error:
                yield Damage(name, error)

    def check_use(self, name: str) -> None:
        """Refuse a file that was not there when the folder was closed."""
        if name in self._planted:
            raise self._damaged(name, "it was not there when the folder was closed")

    def _damages_of(
        self, name: str, sealed: Mapping[str, Any], found: Mapping[str, Any], now: list[int] | None
    ) -> Iterator[Damage]:
        """Hold a file against its entry; ``now`` are the rows written, if there were writes since."""
        is_rows = self._rows is not None and name in self._rows.row_bytes
        with _opened(self._directory, name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != sealed["bytes"] and (now is None or is_rows or size < sealed["bytes"]):
                raise self._damaged(name, f"it has {size:,} bytes and should have {sealed['bytes']:,}")
            if now is not None and not is_rows:
                return
            segments = list(self._segments(name, size, sealed["extent"]))
            if len(segments) != len(sealed["crc32"]):
                raise self._damaged(name, f"{NAME} has {len(sealed['crc32'])} checksums for {len(segments)} segments")
            expected = dict(zip(segments, sealed["crc32"], strict=True))
            if now is not None:
                segments = [one for one in segments if not self._may_have_changed(one, found["written"], now)]
            for segment, checksum in zip(segments, _checksums(descriptor, segments), strict=True):
                if checksum == expected[segment]:
                    continue
                # Whoever only looks does not keep others from writing meanwhile.
                if now is not None and self._may_have_changed(segment, found["written"], self.written()):
                    continue
                begin, end = segment.offset, segment.offset + segment.length
                error = self._damaged(name, f"the bytes from {begin:,} to {end:,} are not what was written")
                yield Damage(name, error, segment.lane, range(segment.first, segment.stop))

    def _may_have_changed(self, segment: _Segment, before: list[int], now: list[int]) -> bool:
        """Whether a segment has rows that can have been written since: up to two after the last that was counted."""
        assert self._rows is not None
        rows, then = self._rows.rows, before[segment.lane]
        changed = (now[segment.lane] if now else 0) + 2 - then
        if changed < 2 or changed >= rows:  # they were set back, or all were written
            return True
        begin = then % rows
        ranges = [(begin, min(begin + changed, rows)), (0, begin + changed - rows)]
        return any(first < segment.stop and segment.first < stop for first, stop in ranges)

    def _segments(self, name: str, size: int, extent: int) -> Iterator[_Segment]:
        """The segments of a file."""
        row_bytes = 0 if self._rows is None else self._rows.row_bytes.get(name, 0)
        if self._rows is None or not row_bytes:
            for offset in range(0, size, _SEGMENT_BYTES):
                yield _Segment(offset, min(_SEGMENT_BYTES, size - offset))
            return
        rows = self._rows.rows
        if size != self._rows.lanes * rows * row_bytes or not 0 <= extent <= rows:
            raise self._damaged(name, f"it has {size:,} bytes, {self._rows.lanes * rows * row_bytes:,} are needed")
        step = max(1, _SEGMENT_BYTES // row_bytes)
        for lane in range(self._rows.lanes):
            for first in range(0, extent, step):
                stop = min(first + step, extent)
                yield _Segment((lane * rows + first) * row_bytes, (stop - first) * row_bytes, lane, first, stop)

    # ---------------------------------------------------------------------------------------------- leaving

    def close(self, names: Iterable[str], *, still: bool) -> None:
        """Seal what files hold now.

        Args:
            names: The files that are in use. If there are others the seal stays as it is: opening them failed.
            still: Nobody can write any more: the seal is closed. Otherwise it is open, and tells what rows were.
        """
        names = sorted(names)
        there = _files(self._directory) if self._found is None else self._found["files"]  # besides files of others
        if os.getpid() != self._process or not set(names) >= set(there):  # a child's, or half open
            return
        written = self.written()
        if self._rows is not None and not written:  # the folder was not even completed
            return
        extent = 0 if self._rows is None else min(max(written, default=-1) + 1, self._rows.rows)
        files = {name: self._entry(name, extent, written, still=still) for name in names}
        self._write({"closed": still, "segment": _SEGMENT_BYTES, "written": written, "files": files})

    def _entry(self, name: str, extent: int, written: list[int], *, still: bool) -> dict[str, Any]:
        is_rows = self._rows is not None and name in self._rows.row_bytes
        with _opened(self._directory, name) as descriptor:
            size = os.fstat(descriptor).st_size
            if not is_rows and not still:
                return {"bytes": size, "extent": 0, "crc32": []}
            extent = extent if is_rows else 0
            segments = list(self._segments(name, size, extent))
            known = self._known(name, size, written) if is_rows else {}
            new = [segment for segment in segments if segment not in known]
            known.update(zip(new, _checksums(descriptor, new), strict=True))
            return {"bytes": size, "extent": extent, "crc32": [known[segment] for segment in segments]}

    def _known(self, name: str, size: int, written: list[int]) -> dict[_Segment, int]:
        """The checksums of rows that have not changed since the seal was made: those are not read again."""
        sealed = None if self._found is None else self._found["files"].get(name)
        if self._found is None or sealed is None:
            return {}
        segments = zip(self._segments(name, size, sealed["extent"]), sealed["crc32"], strict=True)
        before = self._found["written"]
        return {one: checksum for one, checksum in segments if not self._may_have_changed(one, before, written)}

    def remove(self) -> None:
        """Break the seal: rows are about to be written anywhere."""
        self._directory.remove(NAME)
        self._found = None

    def _write(self, content: Mapping[str, Any]) -> None:
        manifest.write_manifest(self._directory, _KIND, content, NAME)

    def _damaged(self, name: str, how: str) -> SnapshotError:
        return SnapshotError(f"{self._directory.path / name} is damaged: {how}. {_REMEDY}")


@contextmanager
def _opened(directory: Directory, name: str) -> Iterator[int]:
    descriptor = directory.open(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _files(directory: Directory) -> list[str]:
    return [name for name in directory.names() if name.endswith(".bin")]


def _checksums(descriptor: int, segments: Iterable[_Segment]) -> list[int]:
    """The checksum of each segment; several threads read, where there is much to read."""
    listed = list(segments)

    def checksum(segment: _Segment) -> int:
        return crc32(os.pread(descriptor, segment.length, segment.offset))

    if sum(segment.length for segment in listed) >= _MANY_BYTES:
        try:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                return list(pool.map(checksum, listed))
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            pass
    return [checksum(segment) for segment in listed]
