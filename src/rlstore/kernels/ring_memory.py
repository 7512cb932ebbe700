"""The memory of a ring of episodes as the versions in Python see it: what the portable one and that for CUDA share."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rlstore.kernels.protocol import (
    BUSY,
    DONE,
    FLAG_DTYPES,
    RESUMED,
    Column,
    Guard,
    Leaf,
    Priorities,
    WindowIndex,
)
from rlstore.kernels.rules import NO_RULES, Rule, obeys

# How an episode ended, as bits; and what was before its first frame.
TERMINATED, TRUNCATED = 1, 2
KEPT, REPEATED, ZEROS = 0, -1, -2
# Columns of the table of episodes.
STOP, END = 1, 2
# What the step after an end is: a reset step if it looks like one, always, never, never and reported if it looks so.
DETECT, ALWAYS, NEVER, REPORT = 0, 1, 2, 3

_RUN_BYTES = 1 << 21  # elements of observations, roughly, that are compared and copied at once

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers of the same size, which every device can compare, index and fill."""
    return tensor.detach().view(_RAW[tensor.dtype.itemsize])


@lru_cache(256)
def as_float32(number: float) -> float:
    """The float32 nearest to a number."""
    narrowed: float = struct.unpack("f", struct.pack("f", number))[0]
    return narrowed


class Block:
    """One field: rows ``[lanes, rows, elements]``, as raw numbers."""

    def __init__(self, block: Tensor, shape: Sequence[int], stack: int = 1, outer: int = 1) -> None:
        if block.dim() < 2 or stack < 1 or outer < 1:
            raise ValueError("a block is [lanes, rows, ...], of at least one frame in at least one piece")
        self.dtype, self.shape = block.dtype, tuple(shape)
        self.stack, self.outer = stack, outer
        self.size = math.prod(block.shape[2:])  # elements of one frame
        if math.prod(self.shape) != self.size * stack or self.size % outer:
            raise ValueError("the shape of a field is that of its block's rows")
        self.rows = raw(block).view(*block.shape[:2], self.size)
        self._finals: Tensor | None = None
        self.starts: Tensor | None = None  # [episodes, stack - 1, elements]

    def set_tables(self, finals: Tensor, starts: Tensor | None, episodes: int) -> None:
        """Use these tables, of so many episodes."""
        self._finals = raw(finals).view(episodes, self.size)
        self.starts = None if starts is None else raw(starts).view(episodes, self.stack - 1, self.size)

    @property
    def finals(self) -> Tensor:
        """The newest frame of each final observation, ``[episodes, elements]``."""
        return _require(self._finals)

    def frames(self, given: Tensor, count: int) -> Tensor:
        """Stacks ``[count, *shape]`` as frames ``[count, stack, elements]``, the newest last."""
        pieces = raw(given).reshape(count, self.outer, self.stack, self.size // self.outer)
        return pieces.transpose(1, 2).reshape(count, self.stack, self.size)

    def stacks(self, frames: Tensor) -> Tensor:
        """Frames ``[n, stack, elements]`` as stacks ``[n, *shape]`` of the field's own dtype."""
        count = len(frames)
        pieces = frames.reshape(count, self.stack, self.outer, self.size // self.outer)
        return pieces.transpose(1, 2).reshape(count, *self.shape).view(self.dtype)


class RingMemory:
    """The tensors of an :class:`~rlstore.kernels.protocol.EpisodeRing`: checked, viewed and looked up in.

    Blocks and ``episode_of`` are on ``device``; counters, the table of episodes and row ids are at ``home``.
    """

    def __init__(
        self, steps: int, counters: tuple[Tensor, ...], episode_of: Tensor, leaves: tuple[Leaf, ...],
        columns: tuple[Column, ...], reward: int, resets: int, first: int, rules: Mapping[int, Rule] = NO_RULES,
    ) -> None:  # fmt: skip
        self.steps = steps
        self.lanes, self.rows = episode_of.shape
        self.written, self.begun, self._current, self._after_end, self._free_count = counters
        self.device, self.home = episode_of.device, self.written.device
        self._episode_of = episode_of
        self.leaves = [Block(*leaf) for leaf in leaves]
        self.columns = [Block(*column) for column in columns]
        self.reward, self._resets, self._first, self.rules = reward, resets, first, rules
        self.kept = self.rows - max(leaf.stack for leaf in self.leaves)  # rows that a writer leaves alone
        if steps < 1 or self.kept < steps:
            raise ValueError("a ring has steps, and at least steps + stack rows")
        if any(block.rows.shape[:2] != episode_of.shape for block in (*self.leaves, *self.columns)):
            raise ValueError("every block has the ring's lanes and rows")
        if self.columns[reward].dtype != torch.float32:
            raise ValueError("rewards are float32")
        self._every = torch.arange(self.lanes, device=self.device)
        self._episodes: Tensor | None = None
        self._free_slots = torch.empty(0, self.lanes, dtype=torch.int32, device=self.home)
        self._room = 0  # steps that may still be written
        self._repeated = -1

    def set_tables(
        self, episodes: Tensor, free_slots: Tensor, finals: tuple[Tensor, ...], starts: tuple[Tensor | None, ...]
    ) -> None:
        """Use these tables from now on: see the protocol."""
        count = len(episodes)
        all_lanes = free_slots.shape[1]
        if episodes.shape != (count, 4) or free_slots.numel() != count or count % all_lanes:
            raise ValueError("the tables of a ring have room for as many episodes")
        if not 0 <= self._first <= all_lanes - self.lanes:
            raise ValueError("lanes that the tables do not serve")
        for leaf, final, start in zip(self.leaves, finals, starts, strict=True):
            leaf.set_tables(final, start, count)
        self._episodes, self._free_slots = episodes, free_slots[:, self._first : self._first + self.lanes]

    def guard_with(
        self,
        guard: Guard,
        steps: Tensor,
        whole: object,
        windows: WindowIndex | None,
        priorities: Priorities | None,
    ) -> bool:
        """False: a step is many calls here, which other threads may interrupt."""
        return False

    def write_held(self, values: tuple[object, ...]) -> int:
        """Never called: :meth:`guard_with` refuses."""
        raise NotImplementedError

    def repeated(self) -> int:
        """The row for which ``WRITTEN_WITH_REPEAT`` was returned last; -1 before any."""
        return self._repeated

    def allow(self, steps: int) -> None:
        """So many steps may be written from now on."""
        if steps < 0:
            raise ValueError("no fewer steps than none may be written")
        self._room = steps

    def write(self, values: tuple[object, ...]) -> int:
        """Write one step of all lanes: see the protocol."""
        raise NotImplementedError

    def write_steps(
        self, values: tuple[object, ...], steps: int, begin: int, end: int, resumed: bool, checked: bool
    ) -> tuple[int, int]:
        """Write the step ``begin``, and with ``resumed`` what continues it in a single lane: see the protocol."""
        if not checked:
            return begin, 0
        row = tuple(value[begin] if isinstance(value, Tensor) else None for value in values)
        mask = row[2 * len(self.leaves) + len(self.columns) + 2]
        if resumed:
            self._after_end[... if mask is None else mask.to(self.home) != 0] = -1 if begin else RESUMED
        outcome = self.write(row)
        if outcome not in DONE:
            return begin, outcome
        done = begin + 1
        if resumed and self.lanes == 1:
            done += self._write_run([v if isinstance(v, Tensor) else None for v in values], done, end)
        return done, outcome

    def _write_run(self, values: Sequence[Tensor | None], begin: int, end: int) -> int:
        """Write the steps from ``begin`` on that continue the episode of the single lane, without one that ends it.

        They are written all at once, as far as no row is overwritten; a device is waited for. Returns how many.
        """
        leaves, columns = len(self.leaves), len(self.columns)
        most = min(end - begin, self._room, max(_RUN_BYTES // (sum(leaf.size for leaf in self.leaves) + 1), 1))
        if most <= 0 or any(leaf.stack > 1 for leaf in self.leaves):
            return 0
        given = [None if value is None else value[begin : begin + most].detach() for value in values]
        fields = [*self.leaves, *self.leaves, *self.columns]
        rows = [raw(v).reshape(most, f.size) for v, f in zip(given, fields, strict=False) if v is not None]
        observations, following = rows[:leaves], rows[leaves : 2 * leaves]
        flags = [v.reshape(most) != 0 for v in given[2 * leaves + columns :][:3] if v is not None]
        stops = flags[0] | flags[1] | ~flags[2] if len(flags) > 2 else flags[0] | flags[1]
        place = (self.written % self.rows).to(self.device)
        for leaf, now, after in zip(self.leaves, observations, following, strict=True):
            stops = stops | (torch.cat((leaf.rows[0, place], after[:-1])) != now).any(1)
        for index, rule in self.rules.items():  # what breaks one is for write() to refuse or count
            column, value = self.columns[index], given[2 * leaves + index]
            if value is not None:
                stops = stops | ~obeys(value.reshape(most, *column.shape), rule).view(most, -1).all(1)
        until = torch.where(stops.any(), stops.byte().argmax(), most).reshape(1).to(self.home)
        counters = (self.written, self.begun, self._current)
        numbers: list[int] = torch.cat((until, *(counter.to(until) for counter in counters))).tolist()
        until_step, written, begun, slot = numbers
        first = written % self.rows
        count = min(until_step, self.kept - (written - begun), self.rows - 1 - first)
        if slot < 0 or count <= 0:
            return 0
        for leaf, now, after in zip(self.leaves, observations, following, strict=True):
            leaf.rows[0, first : first + count] = now[:count]
            leaf.rows[0, first + count] = after[count - 1]
        for column, value in zip(self.columns, rows[2 * leaves :], strict=True):
            column.rows[0, first : first + count] = value[:count]
        self._episode_of[0, first : first + count] = slot
        self._after_end.fill_(-1)
        self.written += count
        self._room -= count
        self._tell_of_run()
        return count

    def _tell_of_run(self) -> None:
        """Rows were written that :meth:`write` does not know of."""

    def append(self, values: tuple[object, ...]) -> int:
        """Nothing: see :meth:`guard_with`."""
        return BUSY

    @property
    def episodes(self) -> Tensor:
        """The table of episodes, int64 ``[episodes, 4]``: start, stop (-1 while it is open), end, padding."""
        return _require(self._episodes)

    # ---------------------------------------------------------------------------------------------- values of a step

    def misfit(self, values: Sequence[object]) -> int | None:
        """The index of the first value that cannot be written as it is."""
        fields = [*self.leaves, *self.leaves, *self.columns]
        flags, count = len(fields), len(self.leaves)
        if len(values) != flags + count + 4:
            raise ValueError("a step has a value for each field")
        for index, field in enumerate(fields):
            if not self._is_ready(values[index], field.dtype, field.shape):
                return index
        last = flags + 3 + count
        for index in (flags, flags + 1, flags + 2, last):
            if values[index] is None and index > flags + 1:
                continue
            if not self._is_flags(values[index]):
                return index
        if values[flags + 3] is not None:
            for index, field in enumerate(self.leaves, flags + 3):
                if not self._is_ready(values[index], field.dtype, field.shape):
                    return index
        return None

    def _is_ready(self, value: object, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device != self.device:
            return False
        if value.dtype != dtype or dtype.is_complex or value.dim() > 8 or value.is_neg() or not value.is_contiguous():
            return False
        given, is_scalar = tuple(value.shape), shape in ((), (1,))
        if given == (self.lanes, *shape) or (is_scalar and given in ((self.lanes,), (self.lanes, 1))):
            return True
        return self.lanes == 1 and (given == shape or (is_scalar and given == ()))

    def _is_flags(self, value: object) -> bool:
        """True for flags of all lanes; values are not looked at."""
        if not isinstance(value, Tensor) or value.dtype not in FLAG_DTYPES:
            return False
        return self._is_ready(value, value.dtype, ())

    # ---------------------------------------------------------------------------------------------- reading

    def _send(self, *indices: Tensor) -> tuple[Tensor, ...]:
        """Indices on the blocks' device, in one transfer."""
        return torch.stack(indices).to(self.device).unbind()

    def oldest(self) -> Tensor:
        """The time of the oldest row that each lane holds."""
        return torch.maximum(self.begun, self.written - self.steps)

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The lanes and times of rows that are held; for others, of the nearest one that may be."""
        lane, time = rows % self.lanes, rows // self.lanes
        return lane, torch.minimum(torch.maximum(time, self.oldest()[lane]), self.written[lane] - 1).clamp(min=0)

    def episodes_of(self, lane: Tensor, time: Tensor) -> Tensor:
        """The indices of rows' episodes, int64 where the counters are."""
        lanes, places = self._send(lane, time % self.rows)
        return self._episode_of[lanes, places].to(self.home).long()

    def bounds(self, rows: Tensor, first: Tensor, stop: Tensor) -> None:
        """The times of the first held row of each row's episode and of one past its last."""
        lane, time = self.part(rows)
        begin, end = self.episodes[self.episodes_of(lane, time), :2].unbind(1)
        first.copy_(torch.maximum(begin, self.oldest()[lane]))
        stop.copy_(torch.where((end < 0) | (end > self.written[lane]), self.written[lane], end))

    def windows(self, starts: Tensor, length: int, across: bool, rows: Tensor) -> None:
        """The rows of windows that begin at ``starts``; -1 after the end of the episode."""
        lane, time = self.part(starts)
        stop = self.episodes[self.episodes_of(lane, time), STOP]
        stop = torch.where((stop < 0) | (stop > self.written[lane]) | across, self.written[lane], stop)
        at = time[:, None] + torch.arange(length, device=self.home)
        found = torch.where(at < stop[:, None], at * self.lanes + lane[:, None], -1)
        rows.copy_(found.view(rows.shape))


class WindowQueues:
    """The queues of a :class:`~rlstore.kernels.protocol.WindowIndex`: built from a ring, counted and searched."""

    def __init__(self, ring: RingMemory, length: int, stride: int, across: bool, memory: tuple[Tensor, ...]) -> None:
        if length < 1 or stride < 1:
            raise ValueError("windows: lengths of at least 1")
        self._ring, self._length, self._stride, self._across = ring, length, stride, across
        starts, self._heads, self._tails, self._seen, self._open = memory
        self._starts = starts.view(ring.lanes, ring.steps)

    def _completes(self, taken: Tensor) -> Tensor:
        """True if a window ends with the last of so many rows."""
        return (taken >= self._length) & ((taken - self._length) % self._stride == 0)

    def rebuild(self) -> None:
        """Index all rows that are held, all at once."""
        ring, oldest = self._ring, self._ring.oldest()
        held = ring.written - oldest
        lane = torch.repeat_interleave(torch.arange(ring.lanes, device=ring.home), held)
        time = torch.arange(len(lane), device=ring.home) - (held.cumsum(0) - held - oldest)[lane]
        stop = time + 1
        if self._across:
            starts, begins = stop - self._length, self._completes(stop - ring.begun[lane])
        else:
            start, end = ring.episodes[ring.episodes_of(lane, time), :2].unbind(1)
            completes, over = self._completes(stop - start), end == stop
            starts = torch.maximum(start, stop - self._length)
            begins = completes | over
            newest = (held.cumsum(0) - 1)[held > 0]
            self._open.zero_()
            self._open[held > 0] = torch.where(over, 0, start + 1)[newest]
        begins = begins & (starts >= oldest[lane])
        lane, starts = lane[begins], starts[begins]
        count = torch.bincount(lane, minlength=ring.lanes)
        self._heads.zero_()
        self._tails.copy_(count)
        self._starts[lane, torch.arange(len(lane), device=ring.home) - (count.cumsum(0) - count)[lane]] = starts
        self._seen.copy_(ring.written)

    @property
    def seen(self) -> Tensor:
        """Rows of each lane that were taken in, int64 ``[lanes]``."""
        return self._seen

    def count(self) -> int:
        """The number of windows."""
        return int((self._tails - self._heads).sum())

    def contains(self, row: int) -> bool:
        """True if a window begins at this row."""
        return bool(self.contain(torch.tensor([row], device=self._ring.home))[0])

    def contain(self, rows: Tensor) -> Tensor:
        """True for each row at which a window begins."""
        ring = self._ring
        lane, time = rows % ring.lanes, rows // ring.lanes
        low, high = self._heads[lane], self._tails[lane]
        for _ in range(ring.steps.bit_length()):  # as often as the longest queue can be halved
            middle = (low + high) // 2
            before = (self._starts[lane, middle % ring.steps] < time) & (low < high)
            low, high = torch.where(before, middle + 1, low), torch.where(before, high, torch.minimum(middle, high))
        return (low < self._tails[lane]) & (self._starts[lane, low % ring.steps] == time) & (rows >= 0)


def _require(table: Tensor | None) -> Tensor:
    if table is None:
        raise ValueError("the ring has no tables yet")
    return table
