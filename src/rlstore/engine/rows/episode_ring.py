"""The memory of replay: lanes that move alone and wrap, rows that belong to episodes, one copy of each observation.

The observation after a row is that of the row behind it. Where an episode ends it is kept in a table of final
observations instead, by the episode's index. A frame stack is kept as single frames; the table of episodes says what
stood before an episode's first frame, and a table of starts keeps it where it is neither zeros nor that frame again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.checks import check_positive
from rlstore.engine.disk.seal import RowFiles
from rlstore.engine.disk.snapshot import SavedRows, SnapshotReader
from rlstore.engine.guard import uninterrupted
from rlstore.engine.memory import capacity
from rlstore.engine.memory.backing import Backing
from rlstore.engine.memory.growth import ENDLESS, Counts, Growth, RowBlock
from rlstore.engine.rows.layout import Layout, Leaf, bytes_of
from rlstore.engine.rows.schema import Field, is_observation, read_form
from rlstore.errors import SnapshotError
from rlstore.kernels import kernel, protocol, restore_tables
from rlstore.kernels.protocol import RESUMED as RESUMED  # exported: rows from elsewhere are appended with it
from rlstore.kernels.protocol import WRITING
from rlstore.kernels.rules import invalid_counts

_FIRST_SLOTS = 16  # episodes a lane that there is room for at first
_FIRST_SLOTS_ON_DEVICE = 64  # more, because there they are made before it is known that they are needed
_COMPARED = 1 << 16  # entries of the table of free indices, at a time: they stay in the cache
_RESETS = {None: 0, "NextStep": 1, "Disabled": 2, "SameStep": 3}
# At most, of memory that is written for each lane before there are rows: counters, a table of few episodes, lists.
LANE_BYTES = 1200
# Where other processes write: rows more than are held, which a writer leaves alone while a reader reads them.
_LEAST_GUARD, _MOST_GUARD = 64, 4096
# What restore_tables() finds: the table, and what is wrong with it.
_FAULTS = {
    1: ("counters", "the rows written by environment {lane} cannot be so many or so few"),
    2: ("episode", "row {time} of environment {lane} has an episode index that is not one of its environment"),
    3: ("episodes", "the episode of row {time} of environment {lane} is not where the row is"),
    4: ("episodes", "what was before the episode of row {time} of environment {lane} is not known"),
    5: ("counters", "environment {lane} awaits a reset step, and no episode has just ended"),
}


class Hold(Protocol):
    """What needs rows that would be overwritten."""

    def room(self) -> int:
        """How many more steps may be written to any lane before a row that it needs is overwritten, at least 1.

        It is called with the guard of the storage, when the steps that it returned before are written.
        """
        ...

    def reach(self) -> Counts:
        """The row of each lane before which it needs nothing that is overwritten, int64 ``[lanes]``."""
        ...

    def copy_all(self) -> None:
        """Copy all rows that it needs; it is called with the guard of the storage, and may wait for the disk."""
        ...


class EpisodeRing:
    """Rows of ``lanes`` lanes, the newest ``steps`` of each.

    In shared memory other processes may write, each into lanes of its own (:meth:`part`). The ring then counts for
    itself which rows it has taken in: :meth:`catch_up` takes in what they wrote.

    On a device the counters and all tables are there too. To look at them is to wait for the device, and neither
    writing nor drawing does.

    Args:
        leaves: The leaves of the observations.
        columns: The other fields of a row; one is called "rewards".
        steps: Transitions held by each lane.
        lanes: Environments side by side.
        backing: Where the memory comes from.
        autoreset: What the step after an end is: "NextStep" (a reset step, which is no transition), "Disabled" (a step
            like any other), "SameStep" (likewise, and one that looks like a reset step is reported), or None: a reset
            step if it looks like one.
        beside: What else is kept with the rows, as JSON: a mapped folder is reopened only if it was the same.

    Attributes:
        holds: What needs rows that this process would overwrite; call :meth:`ask_again` when it has changed. Parts of
            shared memory and copies have none.
        beside: What the sampler keeps for each row, ``[lanes, steps]``, whose memory is taken as rows come; by name.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        columns: Sequence[Field],
        steps: int,
        lanes: int,
        backing: Backing,
        autoreset: str | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        self.leaves, self.columns = tuple(leaves), tuple(columns)
        self.steps, self.lanes, self.backing, self.autoreset = steps, lanes, backing, autoreset
        self.device = backing.device
        shared = backing.kind == "shared"
        self.kept = steps + (min(max(steps // 16, _LEAST_GUARD), _MOST_GUARD) if shared else 0)
        # One more for what follows the newest row, and the older frames of the oldest row's stack.
        self.rows = self.kept + max(leaf.stack for leaf in leaves)
        self.holds: list[Hold] = []
        self.beside: dict[str, Tensor] = {}
        self.first = 0  # the first of these lanes among all
        self._whole: EpisodeRing | None = None  # what this is a part of
        self._parts: weakref.WeakSet[EpisodeRing] = weakref.WeakSet()
        self.saved: dict[Path, SavedRows] = {}  # by folder, the rows that were saved to it or loaded from it
        self._layout = Layout(self.leaves, self.columns)
        what = f"{steps * lanes:,} transitions of {lanes} environments"
        if not backing.is_attached:
            backing.require(self._bytes_at_once() if backing.grows else self._expected_bytes(), what)
        if shared:
            backing.reserve(self._layout.nbytes(lanes, self.rows, (self.kept + 1) * lanes))
        self.reopened = backing.open({**self._schema(), **(beside or {})}, self._row_files())
        backing.charge(self.lanes * LANE_BYTES, f"tables of {lanes:,} environments")
        self._allocate()
        if backing.grows and not backing.is_attached:
            backing.warn_if_larger(self._expected_bytes(), what)

    def _bytes_at_once(self) -> int:
        """Bytes that are written as soon as there is a ring: counters and free episode indices, in three copies."""
        deep = self.kept + 1 if self.backing.kind == "shared" else _FIRST_SLOTS
        return 3 * self.lanes * (40 + 4 * min(deep, self.kept + 1))

    def _expected_bytes(self) -> int:
        apart = sum(bytes_of(shape, dtype) for _, shape, dtype in self._layout.apart)
        return self.rows * self.lanes * (self._layout.record_bytes + apart)

    def _schema(self) -> dict[str, Any]:
        fields = [*((leaf.field, leaf.stack, leaf.axis) for leaf in self.leaves), *((c, 1, 0) for c in self.columns)]
        described = {f.name: [list(f.shape), str(f.dtype), stack, axis] for f, stack, axis in fields}
        return {"steps": self.steps, "lanes": self.lanes, "fields": described}

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any], backing: Backing) -> EpisodeRing:
        """The ring that a mapped folder with this schema holds.

        Raises:
            LookupError, TypeError or ValueError: If it is not the schema of a ring.
        """
        steps, lanes, leaves, columns = schema["steps"], schema["lanes"], [], []
        for name, (shape, dtype, stack, axis) in schema["fields"].items():
            field = Field(name, *read_form(shape, dtype), "the folder")
            if is_observation(name):
                leaves.append(Leaf(field, stack, axis))
            else:
                columns.append(field)
            if not all(type(n) is int and n >= 0 for n in (stack, axis)) or (stack > 1 and shape[axis] % stack):
                raise ValueError(f"{name} cannot be {stack} frames along axis {axis} of {shape}")
        check_positive("a mapped storage", steps=steps, lanes=lanes, stack=min(leaf.stack for leaf in leaves))
        if "episode" in schema["fields"] or "rewards" not in schema["fields"]:
            raise ValueError(f"{sorted(schema['fields'])} are not the fields of a step")
        beside = {name: part for name, part in schema.items() if name not in ("steps", "lanes", "fields")}
        return cls(leaves, columns, steps, lanes, backing, None, beside)

    def _row_files(self) -> RowFiles:
        """Which blocks of a mapped folder hold rows."""
        apart = {name: bytes_of(shape, dtype) for name, shape, dtype in self._layout.apart}
        return RowFiles("counters", self.lanes, self.rows, {"records": self._layout.record_bytes, **apart})

    def _allocate(self) -> None:
        make = self.backing.zeros
        # In a mapped folder the counters are there first: without them nothing was ever written.
        self.counters = make("counters", (5, self.lanes), torch.int64)
        records = make("records", (self.lanes, self.rows, self._layout.record_bytes), torch.uint8)
        self.blocks = self._layout.views(records)
        for name, shape, dtype in self._layout.apart:
            self.blocks[name] = make(name, (self.lanes, self.rows, *shape), dtype)
        self.records = records
        shared = self.backing.kind == "shared"
        first = _FIRST_SLOTS if self.device.type == "cpu" else _FIRST_SLOTS_ON_DEVICE
        slots = (self.kept + 1 if shared else min(first, self.kept + 1)) * self.lanes
        most = (self.kept + 1) * self.lanes
        self.episodes = make("episodes", (slots, 4), torch.int64, most=most)
        self.free_slots = make("free_slots", (slots // self.lanes, self.lanes), torch.int32, most=self.kept + 1)
        self.finals = [make(*table, most=most) for table in self._layout.tables(slots)[: len(self.leaves)]]
        self.starts: list[Tensor | None] = [None for _ in self.leaves]
        if shared:
            self._make_starts()
        self._kernel: protocol.EpisodeRing | None = None
        self._known = 0  # rows of a device that are known to be held
        self._since = np.zeros(self.lanes, np.int64)  # the first row of each lane that this memory was taken for
        self._reach: Counts | None = None  # the rows of each lane that there is memory for
        self._view_counters()
        if self.reopened:
            self._reopen()
        elif not self.backing.is_attached:
            self.clear()

    def _reopen(self) -> None:
        """Reopen the blocks of an earlier run, which may have stopped in the middle of anything."""
        deep = min(len(self.episodes) // self.lanes, len(self.free_slots), *(len(f) // self.lanes for f in self.finals))
        slots = deep * self.lanes
        self.episodes, self.free_slots = self.episodes[:slots], self.free_slots[:deep]
        self.finals = [table[:slots] for table in self.finals]
        if all(self.backing.holds(f"start {leaf.field.name}") for leaf in self.leaves if leaf.stack > 1):
            self._make_starts()
            self.starts = [None if table is None else table[:slots] for table in self.starts]
        if self.backing.is_private:
            self._copy_tables()
        self.after_end.fill_(-1)
        tables = (self.counters, self.blocks["episode"], self.episodes, self.free_slots)
        has_starts = all(leaf.stack == 1 or t is not None for leaf, t in zip(self.leaves, self.starts, strict=True))
        self.restore(tables, self.kept, has_starts, self._damaged)
        self.resume()

    def _copy_tables(self) -> None:
        """Copy what tells of the rows: another process may go on writing, and what it overwrites is not held here."""
        self.counters = self.counters.clone()
        self._view_counters()
        if bool(self.written.any()):  # else nothing in them is looked at, and their files need not be there
            tables = (self.episodes, self.free_slots, self.blocks["episode"])
            self.episodes, self.free_slots, self.blocks["episode"] = (table.clone() for table in tables)
        written, _, current, *_ = self.backing.zeros("counters", (5, self.lanes), torch.int64)  # as they are by now
        oldest = torch.maximum(self.begun, written - self.steps + (current == WRITING))
        self.begun.copy_(torch.where(self.begun < 0, self.begun, oldest))  # one that cannot be is found by restore()

    def resume(self) -> None:
        """The next step of each lane may begin an episode: environments that were restarted have broken none off."""
        self.after_end.masked_fill_(self.current >= 0, RESUMED)

    def _damaged(self, name: str, how: str) -> SnapshotError:
        return self.backing.unusable("records" if name == "episode" else name, how)

    def restore(
        self,
        tables: tuple[Tensor, Tensor, Tensor, Tensor],
        kept: int,
        has_starts: bool,
        damaged: Callable[[str, str], SnapshotError],
    ) -> None:
        """Check tables that come from a disk, and derive what follows from the newest ``kept`` rows of each lane.

        Args:
            tables: ``counters``, the ``episode`` of each row, ``episodes``, and ``free_slots``, which is only written.
            kept: Rows of each lane that are there.
            has_starts: Whether there are tables of starts, or no leaf needs one.
            damaged: Makes the error from the name of a table and what is wrong with it.
        """
        fault, lane, time = restore_tables(*tables, kept, has_starts)
        if fault:
            name, how = _FAULTS[fault]
            raise damaged(name, how.format(lane=lane, time=time))

    def _rebuild(self, lane: int) -> int | None:
        """Derive the free episode indices of a lane; returns the episode index of its newest row."""
        written, begun = int(self.counters[0, lane]), int(self.begun[lane])
        places = torch.arange(max(begun, written - self.kept), written) % self.rows
        used = self.blocks["episode"][lane].cpu()[places].long()
        deep, all_lanes = self.free_slots.shape
        taken = torch.zeros(deep, dtype=torch.bool)
        taken[used // all_lanes] = True
        free = (~taken).nonzero().flatten().flip(0) * all_lanes + self.first + lane
        self.free_slots[: len(free), self.first + lane] = free.int().to(self.device)
        self.free_count[lane], self.current[lane], self.after_end[lane] = len(free), -1, -1
        return int(used[-1]) if len(used) else None

    def recover(self, lane: int) -> None:
        """Repair a lane whose writer died, perhaps in the middle of a write: what it had finished stays.

        The episode that was not over is cut off: its last row keeps what followed it.
        """
        newest, written = self._rebuild(lane), int(self.counters[0, lane])
        if newest is not None and not 0 <= self.episodes[newest, 1] <= written:
            self._close(lane, newest, written)

    def cut_off(self) -> None:
        """Close the open episodes of these lanes where they are, so that the next row of each begins another one.

        On a device this waits for it.
        """
        self.writing_kernel()  # with the tables as they are now
        for lane, (written, slot) in enumerate(zip(self.counters[0].tolist(), self.counters[2].tolist(), strict=True)):
            if slot >= 0:
                self._close(lane, slot, written)
        self.counters[2:4] = -1

    def _close(self, lane: int, slot: int, written: int) -> None:
        """End an open episode without a flag: its last row keeps what followed it."""
        for leaf, table in zip(self.leaves, self.finals, strict=True):
            table[slot] = self.blocks[leaf.field.name][lane, written % self.rows]
        self.episodes[slot, 2] = 0
        self.episodes[slot, 1] = written

    def _view_counters(self) -> None:
        self.written, self.begun, self.current, self.after_end, self.free_count = self.counters
        self._inner: EpisodeRing | None = None
        if self.backing.kind == "shared" and self._whole is None:
            self._inner = self.part(range(self.lanes))  # what this process writes with
            with torch.inference_mode(False):
                self.written = self.written.clone()
        # Whether others may write, whose rows are seen after catch_up(); and whether tables may change elsewhere.
        self.is_shared = self._inner is not None
        self.is_part = self.is_shared or self._whole is not None
        if self.device.type == "cpu":
            # The same memory, which Python reads faster through numpy.
            self._written, self._begun = self.written.numpy(), self.begun.numpy()

    # ---------------------------------------------------------------------------------------------- many writers

    def part(self, lanes: range) -> EpisodeRing:
        """Some lanes alone, on the same memory, for one who writes them."""
        part = object.__new__(EpisodeRing)
        part.__dict__.update(self.__dict__, lanes=len(lanes), first=self.first + lanes.start, _whole=self, _kernel=None)
        part.holds = [] if self.backing.kind == "shared" else self.holds
        part.beside, part._reach = {}, None
        part._since = self._since[lanes.start : lanes.stop]
        part.blocks = {name: block[lanes.start : lanes.stop] for name, block in self.blocks.items()}
        part.counters = self.counters[:, lanes.start : lanes.stop]
        part._view_counters()
        self._parts.add(part)
        return part

    @property
    def whole(self) -> EpisodeRing:
        """What this is a part of, or itself."""
        return self if self._whole is None else self._whole

    def catch_up(self) -> None:
        """Take in all rows that others have written by now."""
        self.kernel.catch_up()

    def overrun(self) -> Tensor | None:
        """The lanes, int64, in which rows that are taken to be held may be overwritten since; None if in none."""
        flags = torch.zeros(self.lanes, dtype=torch.uint8)
        return flags.nonzero().flatten() if self.kernel.overrun(flags) else None

    def _follow_whole(self, whole: EpisodeRing) -> None:
        """Take the tables of the whole ring, which may have grown for another part."""
        self.episodes, self.free_slots = whole.episodes, whole.free_slots
        self.finals, self.starts = whole.finals, whole.starts
        self._bind_tables()

    # ---------------------------------------------------------------------------------------------- counting

    @property
    def slots(self) -> int:
        """Episodes that there is room for."""
        return len(self.episodes)

    def held(self) -> Tensor:
        """The rows held by each lane, int64 ``[lanes]``."""
        held: Tensor = (self.written - self.begun).clamp(max=self.steps)
        return held

    @property
    def has_rows(self) -> bool:
        """True if any row is held. Once it is known a device is not asked again."""
        return self._known > 0 or self.size > 0

    @property
    def size(self) -> int:
        """The rows held by all lanes. Once it is known that they are full a device is not asked again."""
        if self.device.type != "cpu":
            if self._known < self.steps * self.lanes:
                self._known = int(self.held().sum())
            return self._known
        if self.lanes == 1:
            return min(int(self._written.item()) - int(self._begun.item()), self.steps)
        return int((self._written - self._begun).clip(max=self.steps).sum())

    @property
    def total_written(self) -> int:
        """Rows ever written to all lanes, as far as they were taken in."""
        return int((self._written if self.device.type == "cpu" else self.written).sum())

    def reached(self, places: int) -> int:
        """Of so many places in each lane's memory, how many were ever written, and at least 1; on a device all.

        The others are better not read: on the CPU memory is taken when it is first read.
        """
        return max(min(int(self._written.max()), places), 1) if self.device.type == "cpu" else places

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks and tables."""
        apart = [self.blocks[name] for name, _, _ in self._layout.apart]
        starts = [start for start in self.starts if start is not None]
        tensors = [self.records, *apart, self.counters, self.episodes, self.free_slots, *self.finals, *starts]
        return sum(tensor.nbytes for tensor in tensors)

    def clear(self) -> None:
        """Hold nothing. The counters continue, so that a row id from before is recognised as stale."""
        self.settle_holds()  # new episodes will have the table entries of those that were there
        self.written.copy_(self.counters[0])  # in shared memory it is not the same
        self.begun.copy_(self.written)
        self.current.fill_(-1)
        self.after_end.fill_(-1)
        self.free_count.fill_(self.slots // self.lanes)
        self._free_all(self.free_slots)
        self._known = 0
        self._bind_tables()

    def _free_all(self, free_slots: Tensor) -> None:
        """Fill the bottom of the stacks of free episode indices as when all are free, without a copy of them."""
        deep, lanes, device = len(self.free_slots), self.whole.lanes, self.device
        chunk = max(_COMPARED // lanes, 1)
        for begin in range(0, len(free_slots), chunk):
            part = free_slots[begin : begin + chunk]
            first = deep - 1 - begin
            highest = torch.arange(first, first - len(part), -1, dtype=torch.int32, device=device) * lanes
            torch.add(highest.unsqueeze(1), torch.arange(lanes, dtype=torch.int32, device=device), out=part)

    def _free_at_first(self, count: int) -> Tensor:
        """``count`` of each stack of free episode indices, from the bottom, when all are free: the lowest is on top."""
        deep, lanes = len(self.free_slots), self.whole.lanes
        return torch.arange((deep - count) * lanes, deep * lanes, dtype=torch.int32).view(-1, lanes).flip(0)

    # ---------------------------------------------------------------------------------------------- writing

    @property
    def kernel(self) -> protocol.EpisodeRing:
        """What writes into these blocks, bound to them when it is first needed."""
        if self._kernel is None:
            names = [column.name for column in self.columns]
            counters = (self.written, self.begun, self.current, self.after_end, self.free_count)
            leaves = tuple(
                (self.blocks[leaf.field.name], leaf.field.shape, leaf.stack, leaf.outer) for leaf in self.leaves
            )
            columns = tuple((self.blocks[column.name], column.shape) for column in self.columns)
            self._kernel = kernel("EpisodeRing", self.device.type)(
                self.steps,
                counters,
                self.blocks["episode"],
                leaves,
                columns,
                names.index("rewards"),
                _RESETS[self.autoreset],
                self.first,
                {i: column.rule for i, column in enumerate(self.columns) if column.rule is not None},
            )
            if self._inner is not None:
                self._kernel.watch(self.counters[0])
            self._bind_tables()
        return self._kernel

    def _bind_tables(self) -> None:
        # In the kernel that there is, because windows and priorities hold it too.
        if self._kernel is not None:
            self._kernel.set_tables(self.episodes, self.free_slots, tuple(self.finals), tuple(self.starts))

    def writing_kernel(self) -> protocol.EpisodeRing:
        """The kernel that writes steps of these lanes, with the tables as they are now."""
        if self._inner is not None:
            return self._inner.writing_kernel()
        whole = self._whole
        if whole is not None and not (self.episodes is whole.episodes and self.starts is whole.starts):
            self._follow_whole(whole)
        return self.kernel

    @property
    def invalid(self) -> Tensor | None:
        """The rewards and the actions that were stored although invalid, int64 ``[2]``; None where they are refused."""
        counts = [found for ring in (self, *self._parts) if (found := invalid_counts(ring.kernel)) is not None]
        return torch.stack(counts).sum(0) if counts else None

    def repeated(self) -> tuple[int, Tensor | None]:
        """Which row was last found to repeat a final observation.

        Returns:
            Its lane, among all lanes; and the rewards of the row before it and of itself, ``[2, ...]``: None if they
            are not held any more, or on a device, which would be waited for.
        """
        time, lane = divmod(self.writing_kernel().repeated(), self.lanes)
        is_there = self.device.type == "cpu" and int(self.counters[0, lane]) - time < self.steps
        places = torch.tensor([time - 1, time]) % self.rows
        return self.first + lane, self.blocks["rewards"][lane, places] if is_there else None

    def make_room(self) -> None:
        """Let some more steps be written: as many as there is memory for, and as all holds allow.

        Raises:
            DoesNotFitError: (a MemoryError) if there is no memory for the next step.
        """
        rooms = [self._memory_room(), *(hold.room() for hold in self.holds)]
        self.writing_kernel().allow(max(min(rooms), 1))

    def _memory_room(self) -> int:
        """How many steps there is memory for, before it has to be asked what is free."""
        if not self._asks:
            return ENDLESS
        written = self.counters[0].numpy()
        room = 0 if self._reach is None else int((self._reach - written).min())
        if room <= 0:
            room = self._growth(written).room(self.lanes / self.whole.lanes, *self._told())
            self._reach = written + room
        return room

    def require_room(self, steps: int) -> None:
        """Refuse so many steps, before any of them is written, if there is not enough memory for all of them.

        Raises:
            DoesNotFitError: (a MemoryError) if there is not.
        """
        if self._asks:
            written = self.counters[0].numpy()
            if self._reach is None or int((self._reach - written).min()) < steps:
                growth, told = self._growth(written), self._told()
                growth.require(steps, *told)
                self._reach = written + max(steps, growth.room(self.lanes / self.whole.lanes, *told))

    @property
    def _asks(self) -> bool:
        """Whether it is worth asking what is free."""
        return self.backing.grows and self.whole._expected_bytes() >= capacity.MUCH

    def _told(self) -> tuple[str, str]:
        """Whose rows these are and how many there are, for errors."""
        return self.backing.owner, f"{int(self.held().sum()):,} of {self.steps * self.lanes:,} transitions"

    def _growth(self, written: Counts) -> Growth:
        """The memory of rows that were written up to these counts."""
        lanes, page = self.lanes, self.backing.page
        count = np.minimum(written - self._since + 1, self.rows)
        apart = [self.blocks[name] for name, _, _ in self._layout.apart]
        records = self.records[self.first : self.first + lanes]
        blocks = [RowBlock(b.data_ptr(), lanes, self.rows, b[0, 0].nbytes, page) for b in (records, *apart)]
        blocks += [RowBlock(t.data_ptr(), lanes, self.steps, t.itemsize, page) for t in self.beside.values()]
        tables = [self.episodes, *self.finals, *(start for start in self.starts if start is not None)]
        deep = self.slots // self.whole.lanes
        of_slots = [RowBlock(t.data_ptr(), 1, deep, t[0].nbytes * lanes, page) for t in tables]
        return Growth(blocks, of_slots, self._since, count, self.rows)

    def settle_holds(self) -> None:
        """No hold needs a row any more: what is there may be overwritten by somebody who does not ask."""
        for hold in self.holds:
            hold.copy_all()

    def ask_again(self) -> None:
        """Let no step be written before :meth:`make_room` was called: what it depends on has changed."""
        writes = [self, *self._parts] if self._inner is None else [self._inner]
        for ring in writes:
            if ring._kernel is not None:
                ring._kernel.allow(0)

    def require_episodes(self, count: int) -> None:
        """Make room for so many more episodes of each lane, as far as it has rows for them."""
        self.writing_kernel()  # with the tables as they are now
        deep, short = self.slots // self.whole.lanes, count - int(self.free_count.min())
        if short > 0 and deep <= self.kept:
            self.extend(episodes=True, wanted=deep + short)

    def extend(self, *, episodes: bool, wanted: int = 0) -> None:
        """Make room for more episodes, ``wanted`` of each lane or more, or (False) the tables of starts."""
        with uninterrupted():
            if self._inner is not None:
                self._inner.extend(episodes=episodes, wanted=wanted)
            elif self._whole is not None:
                self._whole._extend(episodes, wanted)
                self._follow_whole(self._whole)
            else:
                self._extend(episodes, wanted)

    def _extend(self, episodes: bool, wanted: int) -> None:
        if episodes:
            self._grow(wanted)
        else:
            self._make_starts()
            self._bind_tables()

    def _grow(self, wanted: int) -> None:
        """Make room for half as many episodes again or for ``wanted`` a lane, at most for as many as there are rows."""
        deep = self.slots // self.lanes
        deeper = min(max(deep + max(deep // 2, 1), wanted), self.kept + 1)
        if deeper == deep:
            raise RuntimeError("every episode index is taken, although each has a row")
        self._extend_tables(deeper * self.lanes)
        self._free_from(deep)
        self._bind_tables()

    def fix_tables(self) -> None:
        """Make room for an episode for each row, and all tables: from now on none of them moves."""
        deep = self.slots // self.lanes
        if deep <= self.kept:
            self._extend_tables((self.kept + 1) * self.lanes)
            self._free_from(deep)
        if any(leaf.stack > 1 and start is None for leaf, start in zip(self.leaves, self.starts, strict=True)):
            self._make_starts()
        self._bind_tables()

    def _free_from(self, deep: int) -> None:
        """Push the episode indices from ``deep`` of each lane on its stack of free ones, the lowest last."""
        more = self.slots // self.lanes - deep
        lane, up = torch.arange(self.lanes, device=self.device), torch.arange(more, device=self.device).unsqueeze(1)
        new = (deep + more - 1 - up) * self.lanes + lane
        self.free_slots[self.free_count + up, lane] = new.int()
        self.free_count += more

    def _extend_tables(self, slots: int) -> None:
        """Make room for ``slots`` episodes, which are not yet free."""
        episodes = self.backing.extend("episodes", self.episodes, slots)
        free_slots = self.backing.extend("free_slots", self.free_slots, slots // self.lanes)
        longer: dict[tuple[str, int], Tensor] = {}
        # Files of starts first: of the others the shortest tells how many episodes there are, if this is interrupted.
        for kind, tables in (("start", self.starts), ("final", self.finals)):
            for k, (leaf, table) in enumerate(zip(self.leaves, tables, strict=True)):
                if table is not None:
                    longer[kind, k] = self.backing.extend(f"{kind} {leaf.field.name}", table, slots)
        self.episodes, self.free_slots = episodes, free_slots  # only now that there is memory for all of them
        self.finals = [longer["final", k] for k in range(len(self.leaves))]
        self.starts = [longer.get(("start", k)) for k in range(len(self.leaves))]

    def _make_starts(self) -> None:
        """Make the tables of starts, which only unusual frame stacks need."""
        tables = self._layout.tables(self.slots)[len(self.leaves) :]
        most = (self.kept + 1) * self.whole.lanes
        made = iter([self.backing.zeros(*table, most=most, is_late=True) for table in tables])
        self.starts = [next(made)[: self.slots] if leaf.stack > 1 else None for leaf in self.leaves]

    # ---------------------------------------------------------------------------------------------- saving

    @property
    def apart(self) -> list[str]:
        """The fields that are not in :attr:`records`."""
        return [name for name, _, _ in self._layout.apart]

    def described(self) -> dict[str, Any]:
        """Where each field of a record is, as JSON."""
        return self._layout.described()

    def begin_restore(self, oldest: Tensor, written: Tensor, slots: int, *, has_starts: bool) -> None:
        """Blocks and tables are about to be filled from a snapshot.

        Args:
            oldest: A row of each lane before which there are none, int64 ``[lanes]``.
            written: The rows that were ever written, int64 ``[lanes]``.
            slots: Episodes that there is to be room for.
            has_starts: Whether tables of starts are needed.

        Raises:
            DoesNotFitError: (a MemoryError) if there is no memory for the rows. Nothing was changed.
        """
        if self.backing.grows:
            self._since[:] = torch.maximum(oldest, written + 1 - self.rows).numpy()
            self._reach = None
            what = f"the {int((written - torch.from_numpy(self._since)).sum()):,} rows that it held"
            self.backing.require(self._growth(written.numpy()).taken, what)
        self.backing.break_seal()
        if slots > self.slots:
            self._extend_tables(slots)
        if has_starts:
            self._make_starts()
        self.begun.copy_(self.counters[0])  # a mapped folder holds nothing until it holds everything

    def end_restore(self, counters: Tensor, episodes: Tensor, free_slots: Tensor) -> None:
        """All rows are there: hold them."""
        slots = len(episodes)
        self.episodes[:slots].copy_(episodes)
        # A folder that was reopened, or shared memory, may have more: they are below the others, as they are at first.
        more = (self.slots - slots) // self.lanes
        self._free_all(self.free_slots[:more])
        self.free_slots[more:].copy_(free_slots)
        self.counters.copy_(counters)
        self.free_count += more
        self.resume()
        self._known = 0
        self._bind_tables()
        if self._inner is not None:
            self.catch_up()

    def disown_margin(self, written: Tensor) -> None:
        """Rows before those that are held, which a writer leaves alone, belong to no episode: they were not saved."""
        (wrapped,) = (written > self.steps).nonzero(as_tuple=True)  # else there are none
        if self.kept == self.steps or not len(wrapped):
            return
        behind = torch.arange(self.steps + 1, self.kept + 1, device=self.device)
        times = written[wrapped].to(self.device).unsqueeze(1) - behind
        lanes = wrapped.to(self.device).unsqueeze(1).expand_as(times)
        self.blocks["episode"][lanes, times % self.rows] = -1

    def set_state(self, reader: SnapshotReader) -> None:
        """Hold what a snapshot has that was saved before rows were apart; nothing, if the reader keeps no rows.

        Raises:
            SnapshotError: If tables cannot be those of a ring; nothing was changed then. Or if a tensor cannot be read.
        """
        counters, episodes, free_slots, extent = self._read_tables(reader)
        slots, written = len(episodes), counters[0].tolist()
        has_starts = any(name.startswith("start ") for name in reader.names)
        none = torch.zeros_like(counters[0])
        self.begin_restore(none, counters[0] if reader.keeps_rows else none, slots, has_starts=has_starts)
        for name, block in self.blocks.items():
            self._read_block(name, block, extent, written, reader)
        for kind, tables in (("final", self.finals), ("start", self.starts)):
            for leaf, table in zip(self.leaves, tables, strict=True):
                name = f"{kind} {leaf.field.name}"
                if table is not None and (kind == "final" or name in reader.names):
                    reader.read_rows(name, table[:slots])
        if reader.keeps_rows:
            self.end_restore(counters, episodes, free_slots)

    def _read_tables(self, reader: SnapshotReader) -> tuple[Tensor, Tensor, Tensor, int]:
        """Counters, episodes and free episode indices, all that is not rows, on the CPU; and the rows of each block."""
        counters = torch.empty((5, self.lanes), dtype=torch.int64)
        reader.read_into("counters", counters)
        extents = {name: (*reader.shape(name), 0, 0)[1] for name in self.blocks}
        extent, deepest, newest = extents["episode"], max(leaf.stack for leaf in self.leaves), int(counters[0].max())
        # Either all rows that were ever written, or those of a ring that has wrapped.
        is_whole = newest < extent
        if extent < 1 or (not is_whole and extent < self.steps + deepest) or set(extents.values()) != {extent}:
            raise reader.unusable("episode", f"fields have {extents} rows, and {newest} were written")
        episode_of = torch.empty((self.lanes, extent), dtype=torch.int32)
        reader.read_into("episode", episode_of)
        slots = (*reader.shape("episodes"), 0)[0]
        if slots < 1 or slots % self.lanes:
            raise reader.unusable("episodes", f"{slots} entries are not as many for each of {self.lanes} environments")
        episodes = torch.empty((slots, 4), dtype=torch.int64)
        reader.read_into("episodes", episodes)
        free_slots = torch.empty((slots // self.lanes, self.lanes), dtype=torch.int32)
        has_starts = all(leaf.stack == 1 or f"start {leaf.field.name}" in reader.names for leaf in self.leaves)
        kept = self.kept if is_whole else min(self.kept, extent - deepest)
        tables = (counters, episode_of, episodes, free_slots)
        self.restore(tables, kept, has_starts, reader.unusable)
        return counters, episodes, free_slots, extent

    def _read_block(self, name: str, block: Tensor, extent: int, written: list[int], reader: SnapshotReader) -> None:
        """Fill a block from one of ``extent`` rows, which lie elsewhere in a ring of another size."""
        if extent == min(max(written) + 1, self.rows):
            reader.read_rows(name, block[:, :extent])
            return
        there = torch.empty((self.lanes, extent, *block.shape[2:]), dtype=block.dtype)
        reader.read_rows(name, there)
        if not reader.keeps_rows:
            return
        if name == "episode":
            block.fill_(-1)  # rows that were not saved belong to no episode
        for lane, count in enumerate(written):
            times = torch.arange(max(0, count + 1 - min(extent, self.rows)), count + 1)
            block[lane, times % self.rows] = there[lane, times % extent].to(block.device)

    def __getstate__(self) -> dict[str, Any]:
        # The kernel holds raw pointers into this object's own blocks, and views of one tensor would become copies
        # apart.
        counters = ("written", "begun", "current", "after_end", "free_count", "_written", "_begun")
        views = ("_kernel", "blocks", *counters, "_inner", "_whole", "_parts", "holds", "beside", "saved")
        state = {k: v for k, v in self.__dict__.items() if k not in views}
        rows = [self.records, *(self.blocks[name] for name in self.apart)]
        if self.device.type == "cpu":  # of memory that is taken as rows come, a copy has what was taken
            extent = min(int(self.counters[0].max()) + 1, self.rows)
            rows = [block[:, :extent].clone() if extent < self.rows else block for block in rows]
            state.update(self._used_tables())
        return {**state, "records": None, "_reach": None, "row blocks": rows}

    def used_slots(self) -> int:
        """How many entries of the tables may have been used: shared memory is taken when it is read, too."""
        if self.backing.kind != "shared":
            return self.slots
        below = min(int(self.free_count.min()), len(self.free_slots) - 1)
        table, size = self.free_slots[:below].numpy(), max(_COMPARED // self.lanes, 1)
        at_first = self._free_at_first(size).numpy()
        for begin in range(0, below, size):
            part = table[begin : begin + size]
            differs = part != at_first[: len(part)]
            if differs.any():
                return self.slots - (begin + int(differs.any(1).argmax())) * self.lanes
            at_first -= size * self.lanes
        return self.slots - below * self.lanes

    def _used_tables(self) -> dict[str, Any]:
        """The counters and tables of a ring with no more entries than were ever used."""
        slots, counters = self.used_slots(), self.counters.clone()
        spare = (self.slots - slots) // self.lanes
        if spare == 0:
            return {}
        counters[4] -= spare
        return {
            "counters": counters,
            "episodes": self.episodes[:slots].clone(),
            "free_slots": self.free_slots[spare:].clone(),
            "finals": [table[:slots].clone() for table in self.finals],
            "starts": [None if table is None else table[:slots].clone() for table in self.starts],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state.pop("row blocks")
        self.__dict__.update(state)
        self.records, *apart = [self._with_all_rows(block) for block in rows]
        self.blocks = {**self._layout.views(self.records), **dict(zip(self.apart, apart, strict=True))}
        self._kernel, self._whole = None, None
        self.holds, self.beside, self.saved, self._parts = [], {}, {}, weakref.WeakSet()
        self._view_counters()

    def _with_all_rows(self, block: Tensor) -> Tensor:
        """A block with room for all rows, the first of which are these."""
        if block.shape[1] == self.rows:
            return block
        whole = self.backing.zeros("rows", (self.lanes, self.rows, *block.shape[2:]), block.dtype)
        whole[:, : block.shape[1]] = block
        return whole
