"""The ring of episodes in plain torch: the truth that the C++ version is tested against.

Blocks, final observations and starts may lie on any device. Counters, the table of episodes, free slots, rows and
generators are on the CPU, or all with the blocks. Frames are compared and copied as bytes: a NaN equals itself, and
-0.0 is not 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstore.kernels.random import take_below
from rlstore.kernels.reference import FLAG_DTYPES
from rlstore.kernels.replay_blocks import END, KEPT, REPEATED, STOP, TERMINATED, TRUNCATED, ZEROS, Block, raw, require

# What write() returns, besides the index of a value that does not fit.
_DONE, _NEED_SLOTS, _NEED_STARTS, _DONE_WITH_BREAK = -1, -2, -3, -4
# What the step after an end is: a reset step if it looks like one, always, never.
_TELL, _ALWAYS = 0, 1


@dataclass
class _Step:
    """One step of all lanes, on the device: frames ``[lanes, stack, elements]`` of each leaf, flags ``[lanes]``."""

    observations: list[Tensor]
    following: list[Tensor]
    columns: list[Tensor]
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    finals: list[Tensor]
    given: Tensor  # where final observations are given apart
    rewards: Tensor


@dataclass
class _Seen:
    """What the data say of each lane, ``[lanes]`` where the counters are."""

    goes_on: Tensor  # the observation is the one that was to follow
    repeats_final: Tensor  # it is the final observation of the episode before, without a reward or an end
    padding: Tensor
    oldest_slot: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    given: Tensor


class EpisodeRing:
    """A ring of lanes whose rows belong to episodes.

    Args:
        steps: Rows that a lane holds.
        counters: written, begun, current, after_end, free_count, int64 ``[lanes]`` each.
        episode_of: The slot of each row's episode, int32 ``[lanes, rows]``.
        leaves: ``(block [lanes, rows, *frame], shape of a whole stack, stack, outer)`` for each observation leaf.
        columns: ``(block, shape)`` for each other field.
        reward: Which column holds the rewards.
        resets: What the step after an end is: 0 a reset step if it looks like one, 1 always, 2 never.
        first: Of the lanes that the tables serve, the one that is the first here.
    """

    def __init__(
        self,
        steps: int,
        counters: tuple[Tensor, ...],
        episode_of: Tensor,
        leaves: tuple[tuple[Tensor, tuple[int, ...], int, int], ...],
        columns: tuple[tuple[Tensor, tuple[int, ...]], ...],
        reward: int,
        resets: int,
        first: int,
    ) -> None:
        self.steps = steps
        self.lanes, self.rows = episode_of.shape
        self.written, self.begun, self._current, self._after_end, self._free_count = counters
        self.device, self.home = episode_of.device, self.written.device
        self._episode_of = episode_of
        self.leaves = [Block(*leaf) for leaf in leaves]
        self.columns = [Block(*column) for column in columns]
        self.reward, self._resets, self._first = reward, resets, first
        self.kept = self.rows - max(leaf.stack for leaf in self.leaves)  # rows that a writer leaves alone
        self._written_now: Tensor | None = None
        if steps < 1 or self.rows < steps + max(leaf.stack for leaf in self.leaves):
            raise ValueError("a ring has steps, and at least steps + stack rows")
        if any(block.rows.shape[:2] != episode_of.shape for block in (*self.leaves, *self.columns)):
            raise ValueError("every block has the ring's lanes and rows")
        if self.columns[reward].dtype != torch.float32:
            raise ValueError("rewards are float32")
        self._every = torch.arange(self.lanes, device=self.device)
        self._episodes: Tensor | None = None
        self._free_slots = torch.empty(0, self.lanes, dtype=torch.int32, device=self.home)

    def set_tables(
        self, episodes: Tensor, free_slots: Tensor, finals: tuple[Tensor, ...], starts: tuple[Tensor | None, ...]
    ) -> None:
        """Take other tables: episodes int64 ``[slots, 4]``, free slots, and what each leaf keeps for an episode."""
        slots = len(episodes)
        all_lanes = free_slots.shape[1]
        if episodes.shape != (slots, 4) or free_slots.numel() != slots or slots % all_lanes:
            raise ValueError("the tables of a ring have as many slots")
        if not 0 <= self._first <= all_lanes - self.lanes:
            raise ValueError("lanes that the tables do not serve")
        for leaf, final, start in zip(self.leaves, finals, starts, strict=True):
            leaf.set_tables(final, start, slots)
        self._episodes, self._free_slots = episodes, free_slots[:, self._first : self._first + self.lanes]

    @property
    def episodes(self) -> Tensor:
        """The table of episodes, int64 ``[slots, 4]``: start, stop (-1 while it goes on), end, padding."""
        if self._episodes is None:
            raise ValueError("the ring has no tables yet")
        return self._episodes

    # ---------------------------------------------------------------------------------------------- other writers

    def watch(self, written: Tensor) -> None:
        """Others write: ``written`` is their count, and that of this ring what it has taken notice of."""
        self._written_now = written

    def catch_up(self) -> None:
        """Take notice of what was written."""
        if self._written_now is not None:
            self.written.copy_(self._written_now)

    def overrun(self, flags: Tensor) -> bool:
        """Flags, uint8 ``[lanes]``: where rows that this ring takes to be held may have been overwritten."""
        flags.zero_()
        if self._written_now is not None:
            held = self.written > self.begun
            flags.copy_(held & (self._written_now - self.oldest() >= self.kept))
        return bool(flags.any())

    # ---------------------------------------------------------------------------------------------- writing

    def write(self, values: tuple[object, ...]) -> int:
        """Write one step of all lanes.

        Returns:
            -1, or -4 if an episode was broken off. Or, having written nothing, the index of the first value that has to
            be converted or refused; -2 if slots are needed first, and -3 if tables of starts are.
        """
        if len(values) != 3 * len(self.leaves) + len(self.columns) + 4:
            raise ValueError("a step has a value for each field")
        misfit = self._misfit(values)
        if misfit is not None:
            return misfit
        step = self._step(values)
        seen = self._see(step)
        episodes, going, after = self.episodes, self._current >= 0, self._after_end >= 0
        is_reset = seen.mask & ~going & after & ((self._resets == _ALWAYS) | seen.repeats_final)
        acts = seen.mask & ~is_reset
        breaks = acts & going & ~seen.goes_on
        begins = breaks | (acts & ~going)
        if bool((begins & (self._free_count == 0)).any()):
            return _NEED_SLOTS
        lacks_starts = any(leaf.stack > 1 and leaf.starts is None for leaf in self.leaves)
        if lacks_starts and bool((begins & (seen.padding == KEPT)).any()):
            return _NEED_STARTS
        self._break(episodes, breaks)
        self._free_oldest(episodes, acts, seen)
        self._begin(episodes, begins, seen, step)
        self._put(episodes, acts, seen, step)
        self._after_end[is_reset] = -1  # the reset step is let go, and the next one is a step again
        return _DONE_WITH_BREAK if bool(breaks.any()) else _DONE

    def _misfit(self, values: Sequence[object]) -> int | None:
        """The index of the first value that cannot be taken as it is."""
        fields = [*self.leaves, *self.leaves, *self.columns]
        flags, count = len(fields), len(self.leaves)
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
        # The C++ version tells a negated tensor of one element by its stride alone.
        if value.numel() == 1 and value.dim() and value.stride(-1) != 1:
            return False
        given, is_scalar = tuple(value.shape), shape in ((), (1,))
        if given == (self.lanes, *shape) or (is_scalar and given in ((self.lanes,), (self.lanes, 1))):
            return True
        return self.lanes == 1 and (given == shape or (is_scalar and given == ()))

    def _is_flags(self, value: object) -> bool:
        if not isinstance(value, Tensor) or value.dtype not in FLAG_DTYPES:
            return False
        if not self._is_ready(value, value.dtype, ()):
            return False
        return not (value.dtype.is_floating_point and bool(value.isnan().any()))

    def _step(self, values: tuple[object, ...]) -> _Step:
        tensors = [value if isinstance(value, Tensor) else None for value in values]
        leaves, columns = len(self.leaves), len(self.columns)

        def frames(first: int) -> list[Tensor]:
            given = tensors[first : first + leaves]
            return [leaf.frames(v, self.lanes) for leaf, v in zip(self.leaves, given, strict=True) if v is not None]

        def flags(index: int) -> Tensor:
            value = tensors[index]
            if value is None:
                return torch.ones(self.lanes, dtype=torch.bool, device=self.device)
            return value.detach().reshape(self.lanes) != 0

        given = [v for v in tensors[2 * leaves : 2 * leaves + columns] if v is not None]
        first = 2 * leaves + columns
        finals = frames(first + 3)
        return _Step(
            frames(0),
            frames(leaves),
            [raw(v).reshape(self.lanes, c.size) for c, v in zip(self.columns, given, strict=True)],
            flags(first),
            flags(first + 1),
            flags(first + 2),
            finals,
            flags(first + 3 + leaves) if finals else torch.zeros_like(flags(first)),
            given[self.reward].detach().reshape(self.lanes, self.columns[self.reward].size),
        )

    def _see(self, step: _Step) -> _Seen:
        """Everything that the moves depend on, brought to the counters at once."""
        gone = self.written - self.kept
        ended = self._after_end.clamp(min=0)
        place, oldest, ended = self._send(self.written % self.rows, gone % self.rows, ended)
        goes_on = torch.ones(self.lanes, dtype=torch.bool, device=self.device)
        repeats = (step.rewards == 0).all(1) & ~step.terminated & ~step.truncated
        for leaf, frames in zip(self.leaves, step.observations, strict=True):
            goes_on = goes_on & (leaf.rows[self._every, place] == frames[:, -1]).all(1)
            repeats = repeats & (require(leaf.finals)[ended] == frames[:, -1]).all(1)
            if leaf.stack > 1:
                goes_on = goes_on & (self._older(leaf, self._current) == frames[:, :-1]).flatten(1).all(1)
                repeats = repeats & (self._older(leaf, self._after_end) == frames[:, :-1]).flatten(1).all(1)
        oldest_slot = self._episode_of[self._every, oldest]
        parts = (goes_on, repeats, self._padding(step), oldest_slot)
        flags = (step.terminated, step.truncated, step.mask, step.given)
        seen = torch.stack([part.long() for part in (*parts, *flags)]).to(self.home).unbind()
        return _Seen(seen[0] != 0, seen[1] != 0, seen[2], seen[3], *(flag != 0 for flag in seen[4:]))

    def _older(self, leaf: Block, slots: Tensor) -> Tensor:
        """All but the newest frame of the stack that follows each lane's newest row, ``[lanes, stack - 1, frame]``."""
        slots, back = slots.clamp(min=0), torch.arange(leaf.stack - 1, 0, -1, device=self.home)
        start, _, _, padding = self.episodes[slots].unbind(1)
        time = self.written[:, None] - back
        kept = (leaf.stack - 1 - (start[:, None] - time)).clamp(0, leaf.stack - 2)
        every = self._every[:, None]
        needed = (time % self.rows, start % self.rows, time < start[:, None], padding, slots, kept)
        place, first, before, padding, slot, kept = (part.to(self.device) for part in needed)
        frames, padding = leaf.rows[every, place], padding[:, None, None]
        filling = torch.where(padding == REPEATED, leaf.rows[self._every, first][:, None], 0)
        if leaf.starts is not None:
            filling = torch.where(padding == KEPT, leaf.starts[slot[:, None], kept], filling)
        return torch.where(before[..., None], filling, frames)

    def _padding(self, step: _Step) -> Tensor:
        """What the older frames of each lane's stacks are: one word for all leaves, so leaves that differ are kept."""
        padding: Tensor | None = None
        for leaf, frames in zip(self.leaves, step.observations, strict=True):
            if leaf.stack == 1:
                continue
            older = frames[:, :-1]
            zeros = (older == 0).flatten(1).all(1)
            repeated = (older == frames[:, -1:]).flatten(1).all(1)
            found = torch.where(repeated, REPEATED, torch.where(zeros, ZEROS, KEPT))
            padding = found if padding is None else torch.where(found == padding, found, KEPT)
        return torch.full_like(self._every, REPEATED) if padding is None else padding

    def _break(self, episodes: Tensor, breaks: Tensor) -> None:
        """What was to follow stands where the new observation goes: it becomes the final observation."""
        lanes = _where(breaks)
        if len(lanes) == 0:
            return
        slots, count = self._current[lanes], self.written[lanes]
        episodes[slots, STOP] = count
        slot, lane, place = self._send(slots, lanes, count % self.rows)
        for leaf in self.leaves:
            require(leaf.finals)[slot] = leaf.rows[lane, place]

    def _free_oldest(self, episodes: Tensor, acts: Tensor, seen: _Seen) -> None:
        """Give back the slots of episodes whose last row is overwritten now."""
        gone = self.written - self.kept
        lanes = _where(acts & (gone >= self.begun))
        lanes = lanes[episodes[seen.oldest_slot[lanes], STOP] == gone[lanes] + 1]
        self._free_slots[self._free_count[lanes], lanes] = seen.oldest_slot[lanes].int()
        self._free_count[lanes] += 1

    def _begin(self, episodes: Tensor, begins: Tensor, seen: _Seen, step: _Step) -> None:
        lanes = _where(begins)
        if len(lanes) == 0:
            return
        self._free_count[lanes] -= 1
        slots = self._free_slots[self._free_count[lanes], lanes].long()
        padding, goes_on = seen.padding[lanes], torch.full_like(slots, -1)
        episodes[slots] = torch.stack((self.written[lanes], goes_on, torch.zeros_like(slots), padding), 1)
        self._current[lanes] = slots
        self._after_end[lanes] = -1
        kept = padding == KEPT
        slot, lane = self._send(slots[kept], lanes[kept])
        for leaf, frames in zip(self.leaves, step.observations, strict=True):
            if leaf.stack > 1 and leaf.starts is not None:
                leaf.starts[slot] = frames[lane, :-1]

    def _put(self, episodes: Tensor, acts: Tensor, seen: _Seen, step: _Step) -> None:
        """Write the rows, and what follows them."""
        lanes, count = _where(acts), self.written[acts]
        lane, place, slot = self._send(lanes, count % self.rows, self._current[lanes])
        for leaf, frames in zip(self.leaves, step.observations, strict=True):
            leaf.rows[lane, place] = frames[lane, -1]
        for column, values in zip(self.columns, step.columns, strict=True):
            column.rows[lane, place] = values[lane]
        self._episode_of[lane, place] = slot.int()
        ends = (seen.terminated | seen.truncated)[lanes]
        lane, place = self._send(lanes[~ends], (count[~ends] + 1) % self.rows)
        for leaf, frames in zip(self.leaves, step.following, strict=True):
            leaf.rows[lane, place] = frames[lane, -1]
        self._end(episodes, lanes[ends], seen, step)
        self.written[lanes] += 1

    def _end(self, episodes: Tensor, lanes: Tensor, seen: _Seen, step: _Step) -> None:
        if len(lanes) == 0:
            return
        slots = self._current[lanes]
        lane, slot = self._send(lanes, slots)
        for k, leaf in enumerate(self.leaves):
            final = step.following[k][lane, -1]
            if step.finals:
                final = torch.where(step.given[lane, None], step.finals[k][lane, -1], final)
            require(leaf.finals)[slot] = final
        episodes[slots, END] = seen.terminated[lanes] * TERMINATED + seen.truncated[lanes] * TRUNCATED
        episodes[slots, STOP] = self.written[lanes] + 1
        self._current[lanes] = -1
        # Where a final observation came apart, the new episode has begun, unless it is known that it has not.
        may_reset = (self._resets == _ALWAYS) | ((self._resets == _TELL) & ~seen.given[lanes])
        self._after_end[lanes] = torch.where(may_reset, slots, -1)

    def _send(self, *indices: Tensor) -> tuple[Tensor, ...]:
        """Indices on the blocks' device, in one transfer."""
        return torch.stack(indices).to(self.device).unbind()

    # ---------------------------------------------------------------------------------------------- reading

    def oldest(self) -> Tensor:
        """The time of the oldest row that each lane holds."""
        return torch.maximum(self.begun, self.written - self.steps)

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The lanes and times of rows that are held.

        Raises:
            IndexError: If one is not.
        """
        lane, time = rows % self.lanes, rows // self.lanes
        if bool(((rows < 0) | (time < self.oldest()[lane]) | (time >= self.written[lane])).any()):
            raise IndexError("a row is not held")
        return lane, time

    def slots_of(self, lane: Tensor, time: Tensor) -> Tensor:
        """The slots of rows' episodes, int64 where the counters are."""
        lanes, places = self._send(lane, time % self.rows)
        return self._episode_of[lanes, places].to(self.home).long()

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows`` with rows drawn uniformly from all that are held."""
        oldest = self.oldest()
        held = (self.written - oldest).cumsum(0)
        if int(held[-1]) == 0:
            raise ValueError("draw: there are no rows")
        drawn = take_below(generator, rows.numel(), int(held[-1]))
        if bool((oldest == oldest[0]).all()) and bool((self.written == self.written[0]).all()):
            found = oldest[0] * self.lanes + drawn
        else:
            lane = torch.searchsorted(held, drawn, right=True)
            before = held[lane] - (self.written - oldest)[lane]
            found = (oldest[lane] + drawn - before) * self.lanes + lane
        rows.copy_(found.view(rows.shape))

    def bounds(self, rows: Tensor, first: Tensor, stop: Tensor) -> None:
        """The first and one past the last held row of each row's episode, as times."""
        lane, time = self.part(rows)
        begin, end = self.episodes[self.slots_of(lane, time), :2].unbind(1)
        first.copy_(torch.maximum(begin, self.oldest()[lane]))
        stop.copy_(torch.where((end < 0) | (end > self.written[lane]), self.written[lane], end))

    def windows(self, starts: Tensor, length: int, across: bool, rows: Tensor) -> None:
        """The rows of windows that begin at ``starts``, each ``length`` long; -1 after the end of its episode."""
        lane, time = self.part(starts)
        stop = self.episodes[self.slots_of(lane, time), STOP]
        stop = torch.where((stop < 0) | (stop > self.written[lane]) | across, self.written[lane], stop)
        at = time[:, None] + torch.arange(length, device=self.home)
        found = torch.where(at < stop[:, None], at * self.lanes + lane[:, None], -1)
        rows.copy_(found.view(rows.shape))


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()
