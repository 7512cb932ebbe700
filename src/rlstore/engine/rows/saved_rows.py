"""Rows of a ring on disk: how they are copied while the ring goes on, and how they are put back.

A record holds rows of all lanes by their times, so that it does not matter where a ring of another size keeps them:

    first, stop      int64 [lanes]: the rows of each lane in it, from one time up to another
    episode          int32 [n]: the episode index of each row, the lanes one after another
    records          uint8 [n, bytes]: the small fields of the rows, see layout.py
    rows NAME        uint8 [n, bytes]: a field apart
    slots            int64 [m]: the indices of episodes that begin or end in it
    final NAME       uint8 [m, bytes]: their final observations
    start NAME       uint8 [m, bytes]: what was before their first frames, where there is a table of it

Counters, the table of episodes and what follows the newest row of each lane are saved beside the records, as they were
at the moment of the save.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlstore.engine.disk.files import free_disk
from rlstore.engine.disk.segments import Record
from rlstore.engine.disk.snapshot import SavedRows, SavedSegment, SnapshotReader, SnapshotWriter
from rlstore.engine.guard import taken, uninterrupted
from rlstore.engine.memory import capacity
from rlstore.engine.memory.backing import lazy_zeros
from rlstore.engine.memory.growth import ENDLESS
from rlstore.engine.memory.tensors import Recycler
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.errors import SnapshotError
from rlstore.kernels import Guard, gather_at_once, kernel

# Copied at a time, while nobody can write: a quarter of a millisecond, or some if its memory is new.
_CHUNK_BYTES = 3 << 18
_LARGE_CHUNK_BYTES = 10 << 20  # where nobody adds: few large records are written and read faster
_MOST_BYTES_AHEAD = 640 << 20  # of copies in memory: whoever would make more waits for the disk
_PATIENCE = 50  # milliseconds


def _blocks(ring: EpisodeRing) -> dict[str, Tensor]:
    """The memory of the rows as bytes, ``[lanes, rows, bytes]``, by the names that they have in a record."""
    blocks = {"records": ring.records, **{f"rows {name}": ring.blocks[name] for name in ring.apart}}
    return {name: block.flatten(2).view(torch.uint8) for name, block in blocks.items()}


def _tables(ring: EpisodeRing) -> dict[str, Tensor]:
    """The tables by episode as bytes, ``[1, slots, bytes]``, by the names that they have in a record."""
    kinds = (("final", ring.finals), ("start", ring.starts))
    tables = {f"{kind} {leaf.field.name}": t for kind, ts in kinds for leaf, t in zip(ring.leaves, ts, strict=True)}
    return {name: t.reshape(1, len(t), -1).view(torch.uint8) for name, t in tables.items() if t is not None}


class RowCut:
    """The rows of a ring as they are at one moment, copied one part after another while others go on writing.

    It is a hold on the ring: rows that were not copied yet are not overwritten. Whoever is about to overwrite them
    copies them first.

    Args:
        ring: The ring. The caller has the guard, and no writers of other lanes are at work.
        guard: The guard.
        writer: Where they are to be saved.
        limit: Tells writers of other processes how far the holds let them write, and returns whether there are any.
            They cannot copy what they overwrite: rows are copied ahead of them.

    Attributes:
        saved: See :class:`rlstore.engine.disk.snapshot.Rows`.
        first: Likewise.
        oldest: The oldest row of each lane that is needed: also the older frames of the first stack.
        nbytes: The bytes of all rows that are needed.
        tensors: What is saved beside the records, as it is now.
    """

    def __init__(self, ring: EpisodeRing, guard: Guard, writer: SnapshotWriter, limit: Callable[[], bool]) -> None:
        self._ring, self._guard, self._path, self._limit = ring, guard, writer.path, limit
        counters = ring.counters.cpu().clone()
        self._stop = counters[0].clone()
        deepest = max(leaf.stack for leaf in ring.leaves)
        self.oldest = torch.maximum(counters[1], self._stop - ring.steps - (deepest - 1))
        row_bytes = sum(block.shape[2] for block in _blocks(ring).values())
        self.nbytes = int((self._stop - self.oldest).sum()) * row_bytes
        self._row_bytes = row_bytes * ring.lanes
        self.saved = ring.saved.get(writer.path)
        if self.saved is not None and (not writer.holds(self.saved) or self._is_better_anew(self.saved, writer.path)):
            self.saved = None
        self.first = self.oldest if self.saved is None else torch.maximum(self.oldest, self.saved.stop)
        self._next = self.first.clone()
        self._episodes = ring.episodes[: ring.used_slots()].cpu().clone()
        self._spares = Recycler()
        self.tensors: Mapping[str, Tensor] = {"counters": counters, "episodes": self._episodes, **self._following()}
        counters[3].clamp_(min=-1)  # whoever loads it resumes it
        self._copied = deque(self._broken_off())
        self._taken_one, self._closed = Event(), False
        self._awaits_guard = False
        left = int((self._stop - self.first).sum()) * row_bytes
        ram = capacity.free_ram() if left >= capacity.MUCH else None
        ahead = _MOST_BYTES_AHEAD if ram is None else min(_MOST_BYTES_AHEAD, ram[0] // 4)
        self._most_ahead = max(ahead // max(_CHUNK_BYTES, self._row_bytes), 2)
        self._has_others = False

    def hold(self) -> None:
        """From now on nobody overwrites a row that is not copied; see :class:`rlstore.engine.disk.snapshot.Rows`."""
        with uninterrupted():
            self._ring.holds.append(self)
            self._ring.ask_again()
            self._has_others = self._limit()

    def _is_better_anew(self, saved: SavedRows, path: Path) -> bool:
        """Whether to write all rows anew, beside those that are there: where the disk has no room, they are kept."""
        return not saved.are_mostly_needed(self.nbytes) and free_disk(path) > 2 * self.nbytes

    def _following(self) -> dict[str, Tensor]:
        """What was written behind the newest row of each lane: the observation after it."""
        ring = self._ring
        at = (torch.arange(ring.lanes) * ring.rows + self._stop % ring.rows).to(ring.device)
        return {f"following {name}": rows for name, rows in self._taken(_blocks(ring), at).items()}

    def _broken_off(self) -> list[dict[str, Tensor]]:
        """A record of the episodes that ended with the last row that is saved already, after it was."""
        ring, lanes = self._ring, torch.arange(self._ring.lanes)
        held = self.first - 1 >= torch.maximum(self.oldest, self._stop - ring.steps)
        lanes, times = lanes[held], (self.first - 1)[held]
        slots = ring.blocks["episode"][lanes.to(ring.device), (times % ring.rows).to(ring.device)].long().cpu()
        slots = slots[self._episodes[slots, 1] == times + 1]
        return [self._record(self.first, self.first, slots)] if len(slots) else []

    # ---------------------------------------------------------------------------------------------- copying

    def room(self) -> int:
        """Steps that may be written before a row is overwritten that is not copied yet; at least one."""
        while True:
            if self._closed or not bool((self._next < self._stop).any()):
                return ENDLESS
            room = int((self.reach() - self._ring.counters[0].cpu().numpy()).min())
            if room > 0:
                return room
            self._copy_ahead()

    def reach(self) -> npt.NDArray[np.int64]:
        """The row of each lane before which nothing is overwritten that is not copied yet, int64 ``[lanes]``."""
        left = (self._next < self._stop) & (not self._closed)
        # A step overwrites a row, and frees the table entries of its episode, ``kept`` rows after it was written.
        return torch.where(left, self._next + self._ring.kept, ENDLESS).numpy()

    def copy_all(self) -> None:
        """Copy everything that is left, while it is written."""
        while not self._closed and bool((self._next < self._stop).any()):
            self._copy_ahead()

    def _copy_ahead(self) -> None:
        # The guard is not released: whoever writes a step has made sure that nobody reads.
        while len(self._copied) >= self._most_ahead and not (self._closed or self._awaits_guard):
            self._taken_one.clear()
            self._taken_one.wait(0.1)
        self._copy(_CHUNK_BYTES)

    def _copy_for_others(self) -> None:
        """Copy rows that writers of other processes may come to, ahead of the disk."""
        while self._has_others and len(self._copied) < self._most_ahead:
            with taken(self._guard):
                if self._closed or not bool((self._next < self._stop).any()):
                    return
                self._copy(_CHUNK_BYTES)

    def _copy(self, nbytes: int) -> None:
        stop = torch.minimum(self._next + max(nbytes // self._row_bytes, 1), self._stop)
        self._copied.append(self._record(self._next, stop, None))
        self._next = stop
        self._has_others = self._limit()

    def _record(self, first: Tensor, stop: Tensor, slots: Tensor | None) -> dict[str, Tensor]:
        """A record of rows, and of the episodes with these indices or (None) those that begin or end in it."""
        ring = self._ring
        lane, time = (part.to(ring.device) for part in _lanes_and_times(first, stop))
        place = time % ring.rows
        made = {"first": first, "stop": stop, "episode": ring.blocks["episode"][lane, place].cpu()}
        made.update(self._taken(_blocks(ring), lane * ring.rows + place))
        if slots is None:
            slots = self._touched(made["episode"], first, stop)
        return {**made, "slots": slots, **self._taken(_tables(ring), slots.to(ring.device))}

    def _taken(self, tables: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        """Copies of some rows of tables, on the CPU."""
        device = self._ring.device
        taken = [self._spares.empty((len(rows), table.shape[2]), torch.uint8, device) for table in tables.values()]
        gather = gather_at_once if device.type == "cpu" else kernel("gather", device.type)
        gather(tuple(tables.values()), rows, tuple(taken))
        return dict(zip(tables, (rows.cpu() for rows in taken), strict=True))

    def _touched(self, episode: Tensor, first: Tensor, stop: Tensor) -> Tensor:
        """The indices of episodes that, at the moment of the cut, had begun or ended among these rows."""
        # In numpy, whose operations on few numbers take a microsecond.
        slots = np.unique(episode.numpy()).astype(np.int64)
        # The older frames of a stack may lie before all that is known to be right.
        slots = slots[(slots >= 0) & (slots < len(self._episodes))]
        begin, end = self._episodes.numpy()[slots, :2].T
        lane, low, high = slots % self._ring.lanes, first.numpy(), stop.numpy()
        found = (end > low[lane]) & (end <= high[lane])
        if any(table is not None for table in self._ring.starts):
            found |= (begin >= low[lane]) & (begin < high[lane])
        return torch.from_numpy(slots[found])

    # ---------------------------------------------------------------------------------------------- writing

    def records(self) -> Iterator[Mapping[str, Tensor]]:
        """All records, one after another; see :class:`rlstore.engine.disk.snapshot.Rows`."""
        written, unchanged = -1, 0
        while True:
            self._await_turn()
            self._copy_for_others()
            if not self._copied:
                self._awaits_guard = True
                with taken(self._guard):  # the storage may be closed meanwhile
                    self._awaits_guard = False
                    if not self._copied:
                        if not bool((self._next < self._stop).any()):
                            return
                        before, written = written, int(self._ring.counters[0].sum())
                        # Who adds may have waited for the guard until now, so it takes a few to be sure.
                        unchanged = unchanged + 1 if written == before else 0
                        self._copy(_CHUNK_BYTES if unchanged < 4 else _LARGE_CHUNK_BYTES)
            record = self._copied.popleft()  # without the guard, which somebody may hold who waits for this
            self._taken_one.set()
            yield record

    def _await_turn(self) -> None:
        """Wait, but not forever, until the guard is free, or who has it has copied rows and may wait for this."""
        for _ in range(_PATIENCE):
            if self._copied or not self._guard.is_taken:
                return
            time.sleep(0.001)

    def close(self, saved: SavedRows | None) -> None:
        """Hold nothing any more; see :class:`rlstore.engine.disk.snapshot.Rows`."""
        ring = self._ring
        self._closed = True
        self._taken_one.set()
        with taken(self._guard), uninterrupted():
            self._next = self._stop
            self._copied.clear()
            self._spares = Recycler()  # an error that is kept keeps this, too
            if saved is not None:
                ring.saved.pop(self._path, None)
                ring.saved[self._path] = saved
                if len(ring.saved) > _MOST_FOLDERS:
                    del ring.saved[next(iter(ring.saved))]
            elif self.saved is not None:
                self.saved.is_trusted = False
            if self in ring.holds:
                ring.holds.remove(self)
                ring.ask_again()
                self._limit()


_MOST_FOLDERS = 8  # whose rows are remembered


def _lanes_and_times(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The lane and the time of each row from ``first`` up to ``stop``, the lanes one after another."""
    begin, count = first.numpy(), (stop - first).numpy()
    lane = np.repeat(np.arange(len(count)), count)
    time = np.arange(len(lane)) - (np.cumsum(count) - count - begin)[lane]
    return torch.from_numpy(lane), torch.from_numpy(time)


# ---------------------------------------------------------------------------------------------------- reading


def restore_rows(ring: EpisodeRing, reader: SnapshotReader) -> SavedRows:
    """Fill an empty ring with the rows of a snapshot; it stays empty if the reader keeps no rows.

    Returns:
        What is known of the snapshot, for a save to the same folder.

    Raises:
        SnapshotError: If tables cannot be those of a ring; nothing was changed then. Or if a record cannot be read.
    """
    index = RowIndex(ring, reader)
    oldest, written = index.counters[1], index.counters[0 if reader.keeps_rows else 1]  # no memory for what is not kept
    ring.begin_restore(oldest, written, len(index.episodes), has_starts=index.has_starts)
    blocks = {name: block.flatten(0, 1) for name, block in _blocks(ring).items()}
    tables = {name: table[0] for name, table in _tables(ring).items()}
    fill = _fill if reader.keeps_rows else _verify
    for record, (first, stop) in zip(index.records, index.times, strict=True):
        count = int((stop - first).sum())
        places, kept = index.places(first, stop) if reader.keeps_rows else (first, None)
        for name, block in blocks.items():
            fill(block, places, kept, record, name, count)
        if reader.keeps_rows:
            # As it was checked: the bytes of the rows could say something else.
            episode = record.tensor("episode", (count,), torch.int32)
            at, episode = places.to(ring.device), (episode if kept is None else episode[kept]).to(ring.device)
            ring.blocks["episode"][at // ring.rows, at % ring.rows] = episode
        slots = record.tensor("slots", record.shapes.get("slots", ())[:1], torch.int64)
        if bool((slots < 0).any()):
            raise record.damaged("it has episodes that there cannot be")
        known = slots < len(index.episodes)  # the table may have been longer then: those episodes are gone
        kept = None if bool(known.all()) else known.nonzero().flatten()
        for name, table in tables.items():
            if name in record.shapes:
                fill(table, slots[known], kept, record, name, len(slots))
    newest = torch.arange(ring.lanes) * ring.rows + index.counters[0] % ring.rows
    for name, block in blocks.items():
        following = torch.empty((ring.lanes, block.shape[1]), dtype=torch.uint8)
        reader.read_into(f"following {name}", following)
        if reader.keeps_rows:
            block[newest.to(ring.device)] = following.to(ring.device)
    if reader.keeps_rows:
        ring.disown_margin(index.counters[0])
        ring.end_restore(index.counters, index.episodes, index.free_slots)
    return index.saved


class RowIndex:
    """Which rows a snapshot holds, and to which episodes they belong, checked.

    Args:
        ring: A ring of the form that was saved.
        reader: The snapshot.

    Attributes:
        counters: The counters of the ring.
        episodes: Its table of episodes.
        free_slots: The indices of the table that are free.
        records: The records, oldest first.
        times: The rows of each lane in each record, from one time up to another.
        has_starts: Whether there is a table of starts.
        saved: What is known of the snapshot.

    Raises:
        SnapshotError: If it cannot be that of such a ring.
    """

    def __init__(self, ring: EpisodeRing, reader: SnapshotReader) -> None:
        self._ring, self._reader = ring, reader
        self.counters = torch.empty((5, ring.lanes), dtype=torch.int64)
        reader.read_into("counters", self.counters)
        slots = (*reader.shape("episodes"), 0)[0]
        if slots < 1 or slots % ring.lanes:
            raise reader.unusable("episodes", f"{slots} entries are not as many for each of {ring.lanes} environments")
        self.episodes = torch.empty((slots, 4), dtype=torch.int64)
        reader.read_into("episodes", self.episodes)
        self.free_slots = torch.empty((slots // ring.lanes, ring.lanes), dtype=torch.int32)
        self.records: list[Record] = []
        self.times: list[tuple[Tensor, Tensor]] = []
        self.has_starts = False
        # Its pages are committed when they are written, so a size that was made up costs nothing.
        episode_of = lazy_zeros((ring.lanes, ring.rows), torch.int32)
        self.saved = self._read(episode_of)
        has_starts = self.has_starts or all(leaf.stack == 1 for leaf in ring.leaves)
        tables = (self.counters, episode_of, self.episodes, self.free_slots)
        ring.restore(tables, ring.steps, has_starts, reader.unusable)

    def _read(self, episode_of: Tensor) -> SavedRows:
        """Read of each record which rows it has, and their episodes."""
        lanes, segments = self._ring.lanes, self._reader.segments
        stops, counts = [torch.zeros(lanes, dtype=torch.int64) for _ in segments], [0] * len(segments)
        begin = end = torch.zeros(lanes, dtype=torch.int64)  # the newest rows without a gap
        for segment, record in self._reader.records():
            first, stop = (record.tensor(name, (lanes,), torch.int64) for name in ("first", "stop"))
            are_possible = (first >= 0) & (first <= stop) & (stop <= self.counters[0])
            are_possible &= stop - first <= record.nbytes  # else their sum could be beyond all numbers
            if not bool(are_possible.all()):
                raise record.damaged("its rows are not among those that were written")
            begin, end = torch.where(first <= end, begin, first), torch.maximum(stop, end)
            stops[segment], counts[segment] = end, counts[segment] + 1
            self.records.append(record)
            self.times.append((first, stop))
            self.has_starts |= any(name.startswith("start ") for name in record.shapes)
            episode = record.tensor("episode", (int((stop - first).sum()),), torch.int32)
            places, kept = self.places(first, stop)
            episode_of.view(-1)[places] = episode if kept is None else episode[kept]
        written, begun = self.counters[:2]
        held = torch.maximum(begun, written - self._ring.steps)
        for lane in ((held < written) & ((begin > held) | (end < written))).nonzero().flatten().tolist():
            raise SnapshotError(
                f"the snapshot in {self._reader.folder} is not complete: of environment {lane} it should have rows "
                f"{int(held[lane])} to {int(written[lane]) - 1}, and it has {int(begin[lane])} to {int(end[lane]) - 1}"
            )
        known = zip(segments, stops, counts, strict=True)
        found = [SavedSegment(segment["name"], segment["bytes"], stop, count) for segment, stop, count in known]
        return SavedRows(self._reader.id or "", end, found)

    def places(self, first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where rows go, in blocks ``[lanes * rows, ...]``, and which of the record they are; None for all of them."""
        low = self.counters[0] + 1 - self._ring.rows  # what is older was overwritten; what follows has a place, too
        lane, time = _lanes_and_times(first, stop)
        places = lane * self._ring.rows + time % self._ring.rows
        if bool((first >= low).all()):
            return places, None
        kept = (time >= low[lane]).nonzero().flatten()
        return places[kept], kept


def _fill(table: Tensor, places: Tensor, kept: Tensor | None, record: Record, name: str, count: int) -> None:
    """``table[places]`` = those of the ``count`` rows of a record that are ``kept`` (None: all)."""
    form = (count, table.shape[1]), torch.uint8
    begin = int(places[0]) if len(places) else 0
    is_one_piece = kept is None and table.device.type == "cpu" and bool((places.diff() == 1).all())
    if is_one_piece:
        record.tensor(name, *form, table[begin : begin + count].view(-1))  # read where it belongs
        return
    rows = record.tensor(name, *form)
    rows = rows if kept is None else rows[kept]
    if table.device.type == "cpu":
        table.numpy()[places.numpy()] = rows.numpy()  # faster than torch, which uses threads
    else:
        table[places.to(table.device)] = rows.to(table.device)


def _verify(table: Tensor, places: Tensor, kept: Tensor | None, record: Record, name: str, count: int) -> None:
    """In the place of :func:`_fill`, where rows are only read."""
    record.tensor(name, (count, table.shape[1]), torch.uint8)
