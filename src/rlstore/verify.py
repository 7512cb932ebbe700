"""What ``rlstore verify`` finds in a folder: every checksum and every table, without changing anything.

Tables are checked by what loads them: a storage is made whose rows are read and forgotten.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.batches.priorities import kept_priorities
from rlstore.engine.checks import check_positive
from rlstore.engine.disk import episode_files, manifest, mapped, seal
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.episode_files import EpisodeReader, episode_name
from rlstore.engine.disk.folder import LOCK
from rlstore.engine.disk.json_text import parse_json
from rlstore.engine.disk.mapped import PrivateFiles
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.memory.backing import Backing
from rlstore.engine.rows.episode_ring import LANE_BYTES, EpisodeRing
from rlstore.engine.rows.layout import Leaf
from rlstore.engine.rows.saved_rows import RowIndex
from rlstore.engine.rows.schema import Field
from rlstore.errors import DoesNotFitError, SnapshotError, StorageError
from rlstore.plain import plain
from rlstore.storage import check_snapshot

_LOOKS = 5  # at a folder that changes while it is looked at
_DEPTH = 2  # of the folders of a served storage: root/shard-0/snapshot
_SERVED = "served.json"  # the counts of a served storage
_MOST_SHOWN = 3  # things that are wrong with one file


class Report:
    """What was found in a folder.

    Args:
        what: The folder, and what it holds.

    Attributes:
        files: What is to be said of each file, and of the tables, in the order in which they were looked at.
        damages: What is wrong with some of them.
        parts: What was found in folders inside of it.
        saved: What can be loaded, or saved of what is damaged.
    """

    def __init__(self, what: str) -> None:
        self.what, self.saved = what, ""
        self.files: dict[str, str] = {}
        self.damages: dict[str, list[str]] = {}
        self.parts: list[Report] = []

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages and all(part.is_whole for part in self.parts)

    def looked_at(self, name: str, text: str = "") -> None:
        """A file was looked at."""
        self.files.setdefault(name, text)

    def damaged(self, name: str, how: str) -> None:
        """Something is wrong with a file."""
        self.files.setdefault(name, "")
        self.damages.setdefault(name, []).append(how)

    def refused(self, error: Exception, folder: Path, name: str) -> None:
        """Something is wrong with the file that an error names, else with ``name``."""
        text = str(error) if isinstance(error, StorageError) else repr(error)
        begin, is_named, how = text.partition(" is damaged: ")
        if is_named and Path(begin).parent == folder:
            name, text = Path(begin).name, how
        self.damaged(name, text)

    def lines(self) -> Iterator[str]:
        """One line for what it is, one for each file, and one that sums it up."""
        yield self.what
        for part in self.parts:
            yield from part.lines()
        for name, text in self.files.items():
            damages = self.damages.get(name, [])
            more = [f"and {len(damages) - _MOST_SHOWN} more"] if len(damages) > _MOST_SHOWN else []
            said = " ".join(damages[:_MOST_SHOWN] + more) or text
            yield plain(f"{'damaged' if damages else 'whole  '}  {name}{': ' if said else ''}{said}")
        yield plain(f"{'whole' if self.is_whole else 'damaged'}: {self.saved}")


def verify(path: Path, depth: int = _DEPTH) -> Report | None:
    """Look at a folder, and change nothing. Whatever it holds, this raises nothing but an OSError.

    Args:
        path: The folder.
        depth: How deep to look for folders of rlstore in one that is none.

    Returns:
        What was found; None if it is not a folder of rlstore.
    """
    with Directory(path) as directory:
        kind = kind_of(directory)
        if kind is None:
            return _verify_folders(directory, depth) if depth else None
        report = Report(plain(f"{directory.path}: {WORDS.get(kind, kind)}"))
        report.saved = "nothing can be loaded"  # until it is known better
        try:
            _KINDS[kind](directory, report)
        except Exception as error:  # nothing that a folder says is trusted
            report.refused(error, directory.path, manifest.NAME)
        return report


def _verify_folders(directory: Directory, depth: int) -> Report | None:
    """Look at the folders in a folder, as a served storage has one for each of its shards."""
    folders = [Path(entry.path) for entry in os.scandir(directory.path) if entry.is_dir(follow_symlinks=False)]
    parts = [part for part in (verify(folder, depth - 1) for folder in sorted(folders)) if part is not None]
    if not parts:
        return None
    report = Report(plain(f"{directory.path}: {len(parts)} folders"))
    report.parts = parts
    if _SERVED in directory.names():
        try:
            parse_json(directory.read(_SERVED, manifest.MOST_BYTES), _SERVED)
            report.looked_at(_SERVED)
        except SnapshotError as error:
            report.refused(error, directory.path, _SERVED)
    report.saved = f"{sum(part.is_whole for part in parts)} of {len(parts)} folders are whole"
    return report


def kind_of(directory: Directory) -> str | None:
    """What a folder holds: by its manifest or, if that is damaged, by the names of its files."""
    names = directory.names()
    try:
        told = parse_json(directory.read(manifest.NAME, manifest.MOST_BYTES), manifest.NAME).get("format")
    except (OSError, SnapshotError):
        told = None
    kind = str(told).removeprefix("rlstore ")
    if kind in _KINDS:
        return kind
    return next((kind for kind, of in _FILES.items() if any(map(of.fullmatch, names))), None)


def _verify_lock(directory: Directory, report: Report) -> None:
    """What is in the place of the lock must be a file: else no storage can use the folder."""
    try:
        os.close(directory.open(LOCK))
    except FileNotFoundError:
        return
    except SnapshotError as error:
        report.refused(error, directory.path, LOCK)


# ---------------------------------------------------------------------------------------------------- episodes


def _verify_episodes(directory: Directory, report: Report) -> None:
    _verify_lock(directory, report)
    found = manifest.read_manifest(directory, episode_files.KIND, episode_files.FIELDS)
    reader = EpisodeReader(directory, found["schema"])
    report.looked_at(manifest.NAME)
    steps, numbers = [], reader.numbers()
    for number in numbers:
        name = episode_name(number)
        try:
            entry = reader.entry(number)
            reader.read(entry)
            report.looked_at(name, f"{entry.steps} steps of environment {entry.lane}")
            steps.append(entry.steps)
        except FileNotFoundError:
            report.looked_at(name, "evicted meanwhile")
        except (SnapshotError, OSError) as error:
            report.refused(error, directory.path, name)
    report.saved = f"{len(steps):,} of {len(numbers):,} episodes can be read, {sum(steps):,} transitions"


# ---------------------------------------------------------------------------------------------------- mapped storages


def _verify_mapped(directory: Directory, report: Report) -> None:
    _verify_lock(directory, report)
    found = manifest.read_manifest(directory, mapped.KIND, mapped.FIELDS)
    report.looked_at(manifest.NAME)
    for _ in range(_LOOKS):
        before = _state_of(directory)
        _look(directory, found["schema"], report)
        if report.is_whole or _state_of(directory) == before:
            return
        report.damages.clear()
    report.saved = "a process writes to it: its tables change while they are read, and were not checked"


def _state_of(directory: Directory) -> list[bytes]:
    """What changes whenever somebody writes."""
    names = (name for name in (seal.NAME, mapped.file_name("counters")) if name in directory.names())
    return [directory.read(name, manifest.MOST_BYTES) for name in names]


def _look(directory: Directory, schema: Mapping[str, Any], report: Report) -> None:
    """Take the folder up as a storage does, but for itself, and hold its files against the seal."""
    files, ring = PrivateFiles("a mapped storage", directory.path), None
    try:
        ring = EpisodeRing.of_schema(schema, Backing.private("a mapped storage", files))
        kept_priorities(ring, schema.get("priorities"))
        report.looked_at("tables")
    except Exception as error:
        report.refused(error, directory.path, "tables")
    for name in directory.names():
        if name.endswith(".bin"):
            report.looked_at(name)
    damages = [] if files.seal is None else _verify_seal(files.seal, report)
    if ring is None or any(damage.lane < 0 for damage in damages):
        report.saved = "nothing can be loaded"
    elif damages:
        count = _undamaged(ring, damages)
        report.saved = f"{count:,} of {ring.size:,} transitions can be read; remove {seal.NAME} to load all as they are"
    else:
        report.saved = f"{ring.size:,} transitions of {ring.lanes} environments can be loaded"
    files.close()


def _verify_seal(own: seal.Seal, report: Report) -> list[seal.Damage]:
    found = own.read()
    if found is None:
        report.looked_at(seal.NAME, "there is none: rows have no checksums")
        return []
    is_open = "open: the folder is in use, or its process was killed; what was written since has no checksums"
    report.looked_at(seal.NAME, "closed" if found["closed"] else is_open)
    damages = list(own.damages(found))
    for damage in damages:
        report.refused(damage.error, own.path, damage.file)
    return damages


def _undamaged(ring: EpisodeRing, damages: list[seal.Damage]) -> int:
    """The rows held that none of these damages concerns."""
    lost = torch.zeros((ring.lanes, ring.rows), dtype=torch.bool)
    for damage in damages:
        lost[damage.lane, damage.places.start : damage.places.stop] = True
    newest = zip(ring.written.tolist(), ring.held().tolist(), strict=True)
    kept = [~lost[lane, torch.arange(stop - held, stop) % ring.rows] for lane, (stop, held) in enumerate(newest)]
    return int(torch.cat(kept).sum())


# ---------------------------------------------------------------------------------------------------- snapshots


def _verify_snapshot(directory: Directory, report: Report) -> None:
    with SnapshotReader(directory.path, keeps_rows=False) as reader, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a storage of this size needs
        report.looked_at(manifest.NAME, reader.class_name)
        for name in reader.files:
            report.looked_at(name)
        for name in directory.names():
            if _FILES["snapshot"].fullmatch(name):
                report.looked_at(name, "no part of it: a save is in progress, or one did not finish")
        try:
            is_checked, why_not = check_snapshot(reader), f"no class {reader.class_name} is imported"
        except DoesNotFitError as error:
            is_checked, why_not = False, str(error)
        except SnapshotError as error:
            report.saved = _scan(reader, report)
            if not report.damages:  # every checksum is right
                report.refused(error, directory.path, "tables")
                report.saved = "nothing can be loaded"
            return
        if is_checked:
            report.saved = _loadable(reader)
            report.looked_at("tables")
            return
        report.saved = _scan(reader, report)
        if reader.has_rows and not report.damages:
            _check_rows(reader)
        checked = "only those of the rows were" if reader.has_rows else "not"
        report.looked_at("tables", f"{checked} checked: {why_not}")


def _loadable(reader: SnapshotReader) -> str:
    """What can be loaded of a snapshot that :func:`check_snapshot` has accepted; it need not have read everything."""
    for name in sorted(reader.unread):
        reader.verify(name)
    coverage = _coverage(reader)
    return "it can be loaded" if coverage is None else f"{coverage.needed:,} transitions can be loaded"


def _check_rows(reader: SnapshotReader) -> None:
    """Refuse tables of rows that no replay storage of this size could have, whatever its rows hold."""
    lanes, stack = reader.shape("counters")[1], reader.settings["options"]["frame_stack"]
    reader.room.charge(lanes * LANE_BYTES, f"tables of {lanes:,} environments")
    steps = reader.settings["storage_size"] // lanes
    check_positive("a snapshot", steps=steps, frame_stack=stack)
    leaf, rewards = (
        Leaf(Field("observations", (stack,), torch.uint8, ""), stack),
        Field("rewards", (), torch.float32, ""),
    )
    RowIndex(EpisodeRing([leaf], [rewards], steps, lanes, Backing("a snapshot", "ram", torch.device("cpu"))), reader)


def _scan(reader: SnapshotReader, report: Report) -> str:
    """Look for everything that is damaged; says what is not."""
    whole = set()
    for name in reader.names:
        try:
            reader.verify(name)
            whole.add(name)
        except SnapshotError as error:
            report.refused(error, reader.folder, manifest.NAME)
    told = f"{len(whole)} of {len(reader.names)} tensors can be read"
    if not reader.has_rows:
        return told
    coverage = _coverage(reader) if "counters" in whole else None
    for index in range(len(reader.segments)):
        _scan_segment(reader, index, coverage, report)
    return told if coverage is None else f"{coverage.count:,} of {coverage.needed:,} transitions, and {told}"


def _scan_segment(reader: SnapshotReader, index: int, coverage: _Coverage | None, report: Report) -> None:
    """Look for damaged records; the rows of the others are covered."""
    name, records = reader.segments[index]["name"], reader.records_in(index)
    while True:
        times: list[Tensor] = []
        try:
            record = next(records, None)  # none comes after one whose length is not known
            if record is None:
                return
            times = [record.tensor(name, record.shapes.get(name, ()), torch.int64) for name in ("first", "stop")]
            record.verify()
            if coverage is not None:
                coverage.add(*times)
        except SnapshotError as error:
            where = str(error).replace(f" of {reader.folder / name}", "")
            report.damaged(name, where + (_rows_text(*times) if len(times) == 2 else ""))


def _rows_text(first: Tensor, stop: Tensor) -> str:
    """The rows of a record, in words."""
    if not bool((first < stop).any()):
        return ""
    low, high = int(first.min()), int(stop.max())
    whose = "all" if bool((first == low).all()) and bool((stop == high).all()) else "the"
    return f" It has rows {low:,} to {high - 1:,} of {whose} environments."


class _Coverage:
    """How many of the rows that a snapshot should hold it has.

    Args:
        first: The oldest row of each lane that it should have, int64 ``[lanes]``.
        stop: One past the newest.
    """

    def __init__(self, first: Tensor, stop: Tensor) -> None:
        self._end, self._stop, self.count = first, stop, 0
        self.needed = int((stop - first).sum())

    def add(self, first: Tensor, stop: Tensor) -> None:
        """There are these rows, which come after those that were added before."""
        stop = torch.minimum(stop, self._stop)
        self.count += int((stop - torch.maximum(first, self._end)).clamp(min=0).sum())
        self._end = torch.maximum(self._end, stop)


def _coverage(reader: SnapshotReader) -> _Coverage | None:
    """The rows that a snapshot of replay should hold; None of another one."""
    size = reader.settings.get("storage_size")
    if "counters" not in reader.names or type(size) is not int:
        return None
    written, begun, *_ = reader.tensor("counters")
    return _Coverage(torch.maximum(begun, written - size // len(written)), written)


_KINDS: dict[str, Callable[[Directory, Report], None]] = {
    "snapshot": _verify_snapshot,
    mapped.KIND: _verify_mapped,
    episode_files.KIND: _verify_episodes,
}
WORDS = {"snapshot": "snapshot or journal"}  # which are the same
# By the names of its files, what a folder without a manifest was.
_FILES: dict[str, re.Pattern[str]] = {
    "snapshot": re.compile(r"(tensors-[0-9]+\.safetensors|rows-[0-9]+\.bin)"),
    episode_files.KIND: re.compile(r"episode-[0-9]+\.safetensors"),
    mapped.KIND: re.compile(r"(seal\.json|counters\.bin)"),
}
