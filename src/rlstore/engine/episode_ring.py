"""The memory of replay: lanes that move alone and wrap, rows that belong to episodes, one copy of each observation.

The observation after a row is that of the row behind it. Where an episode ends it is kept in a table of final
observations instead, by the episode's slot. A frame stack is kept as single frames; what stood before an episode's
first frame is told in the table of episodes, or kept in a table of starts where it is neither zeros nor that frame
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.backing import Backing
from rlstore.engine.schema import Field, as_tensor
from rlstore.kernels import kernel

# Fields of up to this many bytes lie together in one record: a row of them costs one cache miss instead of several.
RECORD_FIELD_BYTES = 1024
_FIRST_SLOTS = 16  # episodes a lane that there is room for at first
# What the kernel's write returns, besides the index of a value that does not fit.
_DONE, _NEED_SLOTS, _DONE_WITH_BREAK = -1, -2, -4
_RESETS = {None: 0, "NextStep": 1, "SameStep": 2, "Disabled": 2}


@dataclass(frozen=True)
class Leaf:
    """One leaf of the observations: what a caller gives and gets, and how many frames are stacked in it.

    Attributes:
        field: The whole stack.
        stack: Frames in it; 1 for no stack.
        axis: The axis of the frames in ``field.shape``.
    """

    field: Field
    stack: int = 1
    axis: int = 0

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of what is stored in a row."""
        shape = list(self.field.shape)
        if self.stack > 1:
            shape[self.axis] //= self.stack
        return tuple(shape)

    @property
    def outer(self) -> int:
        """Pieces into which the stack axis cuts a frame."""
        return math.prod(self.field.shape[: self.axis]) if self.stack > 1 else 1


class EpisodeRing:
    """Rows of ``lanes`` lanes, the newest ``steps`` of each.

    Args:
        leaves: The leaves of the observations.
        columns: The other fields of a row; one is called "rewards".
        steps: Transitions held by each lane.
        lanes: Environments side by side.
        backing: Where the memory comes from.
        autoreset: What the step after an end is: "NextStep" (a reset step, which is no transition), "SameStep" or
            "Disabled" (a step like any other), or None: a reset step if it looks like one.
        beside: What else is kept with the rows, as JSON: a mapped folder is taken up only if it was the same.
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
        # One more for what follows the newest row, and the older frames of the oldest row's stack.
        self.rows = steps + max(leaf.stack for leaf in leaves)
        self._layout = _Layout(self.leaves, self.columns)
        backing.require(self._expected_bytes(), f"{steps * lanes:,} transitions of {lanes} environments")
        self.reopened = backing.open({**self._schema(), **(beside or {})})
        self._allocate()

    def _expected_bytes(self) -> int:
        apart = sum(bytes_of(shape, dtype) for _, shape, dtype in self._layout.apart)
        return self.rows * self.lanes * (self._layout.record_bytes + apart)

    def _schema(self) -> dict[str, Any]:
        fields = [*((leaf.field, leaf.stack, leaf.axis) for leaf in self.leaves), *((c, 1, 0) for c in self.columns)]
        described = {f.name: [list(f.shape), str(f.dtype), stack, axis] for f, stack, axis in fields}
        return {"steps": self.steps, "lanes": self.lanes, "fields": described}

    def _allocate(self) -> None:
        make = self.backing.zeros
        records = make("records", (self.lanes, self.rows, self._layout.record_bytes), torch.uint8)
        self.blocks = self._layout.views(records)
        for name, shape, dtype in self._layout.apart:
            self.blocks[name] = make(name, (self.lanes, self.rows, *shape), dtype)
        self._records = records
        on_host = self.backing.on_host()
        self.counters = on_host.zeros("counters", (5, self.lanes), torch.int64)
        self._view_counters()
        slots = min(_FIRST_SLOTS, self.steps + 1) * self.lanes
        self.episodes = on_host.zeros("episodes", (slots, 4), torch.int64)
        self.free_slots = on_host.zeros("free_slots", (slots // self.lanes, self.lanes), torch.int32)
        self.finals = [
            make(f"final {leaf.field.name}", (slots, *leaf.frame_shape), leaf.field.dtype) for leaf in self.leaves
        ]
        self.starts: list[Tensor | None] = [None for _ in self.leaves]
        self._kernel: Any = None
        if self.reopened:
            self._take_up()
        else:
            self.clear()

    def _take_up(self) -> None:
        """Go on with the blocks of an earlier run, which may have stopped in the middle of anything."""
        deep = min(len(self.episodes) // self.lanes, len(self.free_slots), *(len(f) // self.lanes for f in self.finals))
        slots = deep * self.lanes
        self.episodes, self.free_slots = self.episodes[:slots], self.free_slots[:deep]
        self.finals = [table[:slots] for table in self.finals]
        if all(self.backing.holds(f"start {leaf.field.name}") for leaf in self.leaves if leaf.stack > 1):
            self._make_starts()
            self.starts = [None if table is None else table[:slots] for table in self.starts]
        self.after_end.fill_(-1)
        self.rebuild()

    def rebuild(self) -> None:
        """Derive the episodes that go on and the free slots from the rows that are held."""
        taken = torch.zeros(self.slots, dtype=torch.bool)
        for lane, (written, held) in enumerate(zip(self.written.tolist(), self.held().tolist(), strict=True)):
            self.current[lane] = -1
            if held == 0:
                continue
            places = torch.arange(written - held, written) % self.rows
            used = self.blocks["episode"][lane].cpu()[places].long()
            taken[used] = True
            newest = self.episodes[used[-1]]
            if newest[1] < 0 or newest[1] > written:  # it goes on
                newest[1:3] = torch.tensor([-1, 0])
                self.current[lane] = used[-1]
        for lane in range(self.lanes):
            free = (~taken[lane :: self.lanes]).nonzero().flatten().flip(0) * self.lanes + lane
            self.free_slots[: len(free), lane] = free.int()
            self.free_count[lane] = len(free)

    def _view_counters(self) -> None:
        self.written, self.begun, self.current, self.after_end, self.free_count = self.counters
        self._counts = self.counters.numpy()  # the same memory, which Python reads faster through numpy

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
    def size(self) -> int:
        """The rows held by all lanes."""
        counts = self._counts
        if self.lanes == 1:
            return min(int(counts.item(0)) - int(counts.item(1)), self.steps)  # written and begun of the only lane
        return int((counts[0] - counts[1]).clip(max=self.steps).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks and tables."""
        apart = [self.blocks[name] for name, _, _ in self._layout.apart]
        starts = [start for start in self.starts if start is not None]
        tensors = [self._records, *apart, self.counters, self.episodes, self.free_slots, *self.finals, *starts]
        return sum(tensor.nbytes for tensor in tensors)

    def clear(self) -> None:
        """Hold nothing. The counters go on, so that a row from before can be told."""
        self.begun.copy_(self.written)
        self.current.fill_(-1)
        self.after_end.fill_(-1)
        self.free_count.fill_(self.slots // self.lanes)
        # The slot on top of the stack is the first to be taken: the lowest.
        order = torch.arange(self.slots, dtype=torch.int32).reshape(-1, self.lanes)
        self.free_slots.copy_(order.flip(0))

    # ---------------------------------------------------------------------------------------------- writing

    @property
    def kernel(self) -> Any:
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
            )
            self._bind_tables()
        return self._kernel

    def _bind_tables(self) -> None:
        # In the kernel that there is, because windows and priorities hold it too.
        if self._kernel is not None:
            self._kernel.set_tables(self.episodes, self.free_slots, tuple(self.finals), tuple(self.starts))

    def write(self, values: tuple[Any, ...]) -> bool:
        """Write one step of all lanes; every value fits, or nothing is written.

        Args:
            values: The observation leaves, those of the next observations, the columns; whether the episode terminated
                and whether it was truncated ``[lanes]``; which lanes take part (None: all); the leaves of final
                observations, each None if there are none, and which lanes have one (None: all that end).

        Returns:
            True if an episode was broken off: its observations did not go on, and no end was flagged.

        Raises:
            InvalidInputError: If a value does not fit.
        """
        outcome = (self._kernel or self.kernel).write(values)
        if outcome == _DONE:
            return False
        fitted = -1
        while outcome not in (_DONE, _DONE_WITH_BREAK):
            if outcome >= 0:
                # Not ready to be copied byte for byte: convert it if that can be, refuse it if not.
                if outcome == fitted:
                    raise RuntimeError(f"{self._field(outcome).name} was checked and still does not fit its block")
                fitting = self._fit(outcome, values)
                values, fitted = (*values[:outcome], fitting, *values[outcome + 1 :]), outcome
            elif outcome == _NEED_SLOTS:
                self._grow()
            else:
                self._make_starts()
                self._bind_tables()
            outcome = self.kernel.write(values)
        return bool(outcome == _DONE_WITH_BREAK)

    def _field(self, index: int) -> Field:
        """The field of the value at a place in what :meth:`write` takes."""
        leaves = [leaf.field for leaf in self.leaves]
        origin = f"num_envs={self.lanes}"
        flags = [Field(n, (), torch.uint8, origin, is_flag=True) for n in ("terminateds", "truncateds", "mask")]
        following = [_renamed(field, "next_observations") for field in leaves]
        finals = [_renamed(field, "final observations") for field in leaves]
        given = Field("which final observations are given", (), torch.uint8, origin, is_flag=True)
        return [*leaves, *following, *self.columns, *flags, *finals, given][index]

    def _fit(self, index: int, values: tuple[Any, ...]) -> Tensor:
        field, value = self._field(index), values[index]
        if self.lanes == 1 and value is not None:
            value = as_tensor(value, field.name)
            if tuple(value.shape) == field.shape or (value.dim() == 0 and field.shape == (1,)):
                value = value.reshape(1, *field.shape)
        mask = values[2 * len(self.leaves) + len(self.columns) + 2]
        if field.is_flag and field.name != "mask" and mask is not None:
            # Nothing is read of a lane that sat out, not even that its flags are no flags.
            given, taken = as_tensor(value, field.name), self._fit(2 * len(self.leaves) + len(self.columns) + 2, values)
            if given.numel() == self.lanes:
                value = torch.where(taken.to(given.device).reshape(given.shape) != 0, given, torch.zeros_like(given))
        fitted = field.fit(value, self.lanes, self.device)
        # A single element counts as contiguous whatever its strides; the kernel wants them plain.
        return fitted.clone(memory_format=torch.contiguous_format) if fitted.numel() == 1 else fitted

    def _grow(self) -> None:
        """Make room for half as many episodes again, and at most for as many as there are rows."""
        deep = self.slots // self.lanes
        deeper = min(deep + max(deep // 2, 1), self.steps + 1)
        if deeper == deep:
            raise RuntimeError("every slot is taken, which cannot be: each holds a row")
        self._extend_tables(deeper * self.lanes)
        self._free_from(deep)
        self._bind_tables()

    def _free_from(self, deep: int) -> None:
        """Put the slots from ``deep`` a lane on on top of each stack, the lowest uppermost: they are free."""
        deeper = self.slots // self.lanes
        for lane in range(self.lanes):
            count, new = int(self.free_count[lane]), torch.arange(deeper - 1, deep - 1, -1) * self.lanes + lane
            self.free_slots[count : count + deeper - deep, lane] = new
        self.free_count += deeper - deep

    def _extend_tables(self, slots: int) -> None:
        """Make room for ``slots`` episodes, which are not yet free."""
        longer: dict[tuple[str, int], Tensor] = {}
        for kind, tables in (("final", self.finals), ("start", self.starts)):
            for k, (leaf, table) in enumerate(zip(self.leaves, tables, strict=True)):
                if table is not None:
                    longer[kind, k] = self.backing.extend(f"{kind} {leaf.field.name}", table, slots)
        on_host = self.backing.on_host()
        self.episodes = on_host.extend("episodes", self.episodes, slots)
        self.free_slots = on_host.extend("free_slots", self.free_slots, slots // self.lanes)
        self.finals = [longer["final", k] for k in range(len(self.leaves))]
        self.starts = [longer.get(("start", k)) for k in range(len(self.leaves))]

    def _make_starts(self) -> None:
        """Make the tables of starts, which only unusual frame stacks need."""
        make = self.backing.zeros
        self.starts = [
            make(f"start {leaf.field.name}", (self.slots, leaf.stack - 1, *leaf.frame_shape), leaf.field.dtype)[
                : self.slots
            ]
            if leaf.stack > 1
            else None
            for leaf in self.leaves
        ]

    # ---------------------------------------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        """Everything held, as tensors by name: of the blocks, the rows that were ever written."""
        extent = min(int(self.written.max()) + 1, self.rows)
        blocks = {name: block[:, :extent] for name, block in self.blocks.items()}
        tables = {f"final {leaf.field.name}": table for leaf, table in zip(self.leaves, self.finals, strict=True)}
        for leaf, table in zip(self.leaves, self.starts, strict=True):
            if table is not None:
                tables[f"start {leaf.field.name}"] = table
        own = {"counters": self.counters, "episodes": self.episodes, "free_slots": self.free_slots}
        return {**blocks, **tables, **own}

    def set_state(
        self, shape: Callable[[str], Sequence[int]], read_into: Callable[[str, Tensor], None], names: Sequence[str]
    ) -> None:
        """Hold what :meth:`state` gave, told by its names, shapes and a function that fills a tensor."""
        slots = shape("episodes")[0]
        if slots > self.slots:
            self._extend_tables(slots)
        if any(name.startswith("start ") for name in names):
            self._make_starts()
        for name, block in self.blocks.items():
            read_into(name, block[:, : shape(name)[1]])
        for kind, tables in (("final", self.finals), ("start", self.starts)):
            for leaf, table in zip(self.leaves, tables, strict=True):
                if table is not None and f"{kind} {leaf.field.name}" in names:
                    read_into(f"{kind} {leaf.field.name}", table[:slots])
        read_into("counters", self.counters)
        read_into("episodes", self.episodes[:slots])
        read_into("free_slots", self.free_slots[: slots // self.lanes])
        self._free_from(slots // self.lanes)  # a folder that was taken up may have more
        self._bind_tables()

    def __getstate__(self) -> dict[str, Any]:
        # The kernel holds raw pointers into this object's own blocks, and views of one tensor would become copies
        # apart.
        views = ("_kernel", "blocks", "written", "begun", "current", "after_end", "free_count", "_counts")
        apart = {name: self.blocks[name] for name, _, _ in self._layout.apart}
        return {**{k: v for k, v in self.__dict__.items() if k not in views}, "apart": apart}

    def __setstate__(self, state: dict[str, Any]) -> None:
        apart = state.pop("apart")
        self.__dict__.update(state)
        self.blocks = {**self._layout.views(self._records), **apart}
        self._view_counters()
        self._kernel = None


class _Layout:
    """Where each field lies: the small ones in one record, each of the others in a block of its own."""

    def __init__(self, leaves: Sequence[Leaf], columns: Sequence[Field]) -> None:
        fields = [(leaf.field.name, leaf.frame_shape, leaf.field.dtype) for leaf in leaves]
        fields += [(column.name, column.shape, column.dtype) for column in columns]
        self.apart = [field for field in fields if bytes_of(*field[1:]) > RECORD_FIELD_BYTES]
        together = [field for field in fields if field not in self.apart]
        together.append(("episode", (), torch.int32))
        # The widest first, so that each is aligned.
        together.sort(key=lambda field: -field[2].itemsize)
        self._offsets: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        offset = 0
        for name, shape, dtype in together:
            self._offsets.append((name, shape, dtype, offset))
            offset += bytes_of(shape, dtype)
        widest = max(dtype.itemsize for _, _, dtype in together)
        self.record_bytes = -(-offset // widest) * widest

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Each field of the record as a tensor ``[lanes, rows, *shape]`` on its memory."""
        return {name: self._view(records, *rest) for name, *rest in self._offsets}  # type: ignore[arg-type]

    def _view(self, records: Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        whole, item = records.view(dtype), dtype.itemsize
        lanes, rows = records.shape[:2]
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        strides = (whole.stride(0), whole.stride(1), *inner)
        return whole.as_strided((lanes, rows, *shape), strides, offset // item)


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of an entry."""
    return math.prod(shape) * dtype.itemsize


def _renamed(field: Field, name: str) -> Field:
    """The field as errors call it when it is given under another name."""
    rest = field.name.removeprefix("observations")
    return Field(name + rest, field.shape, field.dtype, field.origin)
