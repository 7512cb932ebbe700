"""What is counted of a served storage, and the file served.json in which it outlives all processes.

The file is in each folder that a served storage is saved to, beside the folders of the shards. It is replaced
atomically, after the shards have saved. What a shard has saved is exact for itself, with the inserts up to it: if that
is newer or older than the file, the difference was inserted or lost.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.json_text import dump_json, parse_json
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import InvalidInputError, SnapshotError
from rlstore.ray.places import Place

_FILE = "served.json"
_LARGEST = 1 << 24  # bytes of it
MOST = 1 << 62  # of anything that is counted
_SIGNED = ("inserted_offset", "sampled_offset")
_AnyCounts = TypeVar("_AnyCounts")


@dataclass
class ShardState:
    """What a shard reports with each heartbeat.

    Attributes:
        shard: Its number.
        where: Its node and process.
        generation: The start time of its process.
        lanes: Its environments; None until its first sample decides.
        splits: Whether several writers can share its lanes.
        inserted: Transitions ever inserted, counted on from what it was restored from.
        held: Transitions held.
        sampled: Rows sampled in this generation.
        restored: Transitions restored from what was saved.
        inserted_freely: Inserts of this generation without a permit, while there was no rate limit.
        sampled_freely: The same of samples.
        saved: Whether there is a snapshot or a journal of it.
        note: What went wrong when it was restored, or nothing.
    """

    shard: int
    where: str = "no node yet"
    generation: int = 0
    lanes: int | None = None
    splits: bool = False
    inserted: int = 0
    held: int = 0
    sampled: int = 0
    restored: int = 0
    inserted_freely: int = 0
    sampled_freely: int = 0
    saved: bool = False
    note: str = ""


@dataclass
class ShardCounts:
    """The counts of a shard over all its generations."""

    state: ShardState
    starts: int = 0
    inserted: int = 0
    sampled: int = 0
    lost: int = 0
    previous: ShardState | None = None  # the last known state of the previous generation
    restored_at: int = 0  # the inserts up to what the current generation was restored from

    def counted(self, state: ShardState) -> int:
        """The inserts of the previous generation: a folder may hold more than the ledger was told of."""
        return max(state.inserted, self.restored_at)

    def lost_with(self, state: ShardState) -> int:
        """Transitions lost with the previous generation: inserted since what was restored, and not overwritten."""
        return min(max(state.inserted - self.restored_at, 0), state.held)


@dataclass
class Counts:
    """The state of the ledger."""

    limit: RateLimit | None
    shards: list[ShardCounts]
    lost_in_flight: int = 0
    lost_updates: int = 0
    restarts: int = 0
    version: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    # The limiter's counts minus those of the shards.
    inserted_offset: int = 0
    sampled_offset: int = 0

    def for_new_run(self, limit: RateLimit | None) -> Counts:
        """What another run continues with: all that was counted, and nothing of the processes."""
        shards = []
        for index, counts in enumerate(self.shards):
            state = counts.state
            known = ShardState(index, inserted=state.inserted, held=state.held, saved=state.saved)
            shards.append(ShardCounts(known, 0, counts.inserted, counts.sampled, counts.lost))
        lost, offsets = (self.lost_in_flight, self.lost_updates), (self.inserted_offset, self.sampled_offset)
        return Counts(limit, shards, *lost, 0, self.version, {}, *offsets)

    def write(self, root: str) -> None:
        """Write the file in the folder of the shards."""
        with Directory(Path(root)) as folder:
            folder.write_whole(_FILE, dump_json(asdict(self)))

    @classmethod
    def read(cls, root: str) -> Counts | None:
        """What the file in a folder holds; None if there is none.

        Raises:
            SnapshotError: If it holds anything else.
        """
        found = read_small(Path(root), _FILE)
        if found is None:
            return None
        try:
            given = found.pop("limit")
            limit = None if given is None else RateLimit(**given)
            shards = [_shard_counts(index, counts) for index, counts in enumerate(found.pop("shards"))]
            places = {name: _place(place, len(shards)) for name, place in found.pop("places").items()}
            return _made(cls, found, limit=limit, shards=shards, places=places)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"{Path(root) / _FILE} does not hold the counts of a storage: {error!r}") from error


def read_small(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in a file of counts; None if there is no such file.

    Raises:
        SnapshotError: If it is no plain file, or larger than any that was written, or not an object in JSON.
    """
    try:
        with Directory(folder) as directory:
            return parse_json(directory.read(name, _LARGEST), str(folder / name))
    except (FileNotFoundError, NotADirectoryError):
        return None


def checked_count(name: str, value: object, least: int = 0) -> int:
    """A whole number from ``least`` to what can be counted.

    Raises:
        ValueError: If it is anything else.
    """
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError(f"{name} is {reprlib.repr(value)}")
    return value


def _shard_counts(index: int, found: dict[str, Any]) -> ShardCounts:
    state, previous = _shard_state(index, found.pop("state")), found.pop("previous")
    return _made(ShardCounts, found, state=state, previous=None if previous is None else _shard_state(index, previous))


def _shard_state(index: int, found: dict[str, Any]) -> ShardState:
    shard, lanes = checked_count("shard", found.pop("shard")), found.pop("lanes")
    if shard != index:
        raise ValueError(f"shard {index} is called {shard}")
    return _made(ShardState, found, shard=shard, lanes=None if lanes is None else checked_count("lanes", lanes, 1))


def _place(found: Sequence[Any], shards: int) -> Place:
    place = Place(*found)
    for name, number in zip(Place._fields, place, strict=True):
        if name != "whole":
            checked_count(name, number)
    if type(place.whole) is not bool or place.shard >= shards or place.first > place.stop:
        raise ValueError(f"a writer has {place}, of {shards} shards")
    return place


def _made(kind: type[_AnyCounts], found: dict[str, Any], **more: Any) -> _AnyCounts:
    """An instance with these values, each of the type of its default."""
    defaults = {known.name: known.default for known in fields(kind)}  # type: ignore[arg-type]
    for name, value in found.items():
        if type(value) is not type(defaults[name]):
            raise TypeError(f"{name} is {reprlib.repr(value)}")
        if type(value) is int:
            checked_count(name, value, -MOST if name in _SIGNED else 0)
    return kind(**found, **more)


def newest(counts: Sequence[Counts]) -> Counts:
    """The newest of some counts; of two of one version the later, which has counted for longer."""
    return max(reversed(counts), key=lambda one: one.version)


def check_shards(roots: Sequence[str], shards: int) -> None:
    """Refuse folders that hold what another number of shards has left, or not all of what they have.

    Args:
        roots: The folders that hold those of the shards.
        shards: The number of shards.

    Raises:
        InvalidInputError: (a ValueError) for another number.
        SnapshotError: (a RuntimeError) if all folders of a shard are missing.
    """
    found: set[int] = set()
    for root in roots:
        counts, path = Counts.read(root), Path(root)
        matches = (re.fullmatch("shard-([0-9]+)", entry.name) for entry in path.iterdir())
        here = {int(match[1]) for match in matches if match}
        number = len(counts.shards) if counts is not None else max(here, default=-1) + 1
        is_one = (path / manifest.NAME).exists()
        if is_one or number > shards or (counts is not None and number != shards):
            held = "a storage that was not served in shards" if is_one else f"a storage served in {number} shards"
            raise InvalidInputError(
                f"the folder {path} holds {held}, and shards is {shards}; give the same number, or another folder"
            )
        found |= here
    for root in roots:
        counts = Counts.read(root)
        for shard in counts.shards if counts is not None else ():
            if shard.state.saved and shard.state.shard not in found:
                raise SnapshotError(
                    f"{Path(root) / _FILE} counts {shard.state.inserted} inserts of shard {shard.state.shard}, and the "
                    "folder of that is missing. Restore it, or give another folder"
                )
