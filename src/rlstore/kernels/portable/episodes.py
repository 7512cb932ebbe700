"""The ring of episodes: a step of all lanes is looked at, planned and written with one indexing operation each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlstore.kernels.portable.draws import take_below
from rlstore.kernels.protocol import (
    NEEDS_EPISODES,
    NEEDS_ROOM,
    NEEDS_STARTS,
    RESUMED,
    WRITTEN,
    WRITTEN_WITH_BREAK,
    WRITTEN_WITH_REPEAT,
)
from rlstore.kernels.ring_memory import (
    ALWAYS,
    DETECT,
    END,
    KEPT,
    NEVER,
    REPEATED,
    STOP,
    TERMINATED,
    TRUNCATED,
    ZEROS,
    Block,
    RingMemory,
    raw,
)
from rlstore.kernels.rules import obeys


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
    given: Tensor  # where final observations are given
    rewards: Tensor


@dataclass
class _Seen:
    """What follows from the data of each lane, ``[lanes]`` where the counters are."""

    goes_on: Tensor  # the observation is the one that was to follow
    repeats_final: Tensor  # it is the final observation of the episode before, without a flag
    has_reward: Tensor
    padding: Tensor
    oldest_index: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    given: Tensor


class EpisodeRing(RingMemory):
    """The ring of episodes in plain torch."""

    _written_now: Tensor | None = None  # the count of other writers

    # ---------------------------------------------------------------------------------------------- other writers

    def watch(self, written: Tensor) -> None:
        """Other rings write to this memory: ``written`` is their count."""
        self._written_now = written

    def catch_up(self) -> None:
        """Take over the count of other writers."""
        if self._written_now is not None:
            self.written.copy_(self._written_now)

    def overrun(self, flags: Tensor) -> bool:
        """Set flags where rows that count as held may have been overwritten; True if any."""
        flags.zero_()
        if self._written_now is not None:
            held = self.written > self.begun
            flags.copy_(held & (self._written_now - self.oldest() >= self.kept))
        return bool(flags.any())

    # ---------------------------------------------------------------------------------------------- writing

    def write(self, values: tuple[object, ...]) -> int:
        """Write one step of all lanes: see the protocol for what it takes and returns."""
        misfit = self.misfit(values)
        if misfit is not None:
            return misfit
        step = self._step(values)
        for index, rule in self.rules.items():
            column = self.columns[index]
            given = step.columns[index].view(column.dtype).view(self.lanes, *column.shape)
            if bool((~obeys(given, rule).view(self.lanes, -1).all(1) & step.mask).any()):
                return 2 * len(self.leaves) + index
        seen = self._see(step)
        episodes, going, after = self.episodes, self._current >= 0, self._after_end >= 0
        follows, may_be = seen.mask & ~going & after, seen.repeats_final & ~seen.has_reward
        is_reset = follows & ((self._resets == ALWAYS) | ((self._resets == DETECT) & may_be))
        is_odd = follows & ~is_reset & seen.repeats_final & (self._resets != NEVER)
        acts = seen.mask & ~is_reset
        breaks = acts & going & ~seen.goes_on
        is_told = bool((breaks & (self._after_end != RESUMED)).any())
        begins = breaks | (acts & ~going)
        if bool((begins & (self._free_count == 0)).any()):
            return NEEDS_EPISODES
        lacks_starts = any(leaf.stack > 1 and leaf.starts is None for leaf in self.leaves)
        if lacks_starts and bool((begins & (seen.padding == KEPT)).any()):
            return NEEDS_STARTS
        if self._room == 0:
            return NEEDS_ROOM
        self._room -= 1
        odd = (self.written * self.lanes + self._every.to(self.home))[is_odd].tolist()
        self._break(episodes, breaks)
        self._free_oldest(episodes, acts, seen)
        self._begin(episodes, begins, seen, step)
        self._put(episodes, acts, seen, step)
        self._after_end[is_reset] = -1  # a reset step is dropped, and the next one is a step again
        if is_told:
            return WRITTEN_WITH_BREAK
        self._repeated = max(odd, default=self._repeated)
        return WRITTEN_WITH_REPEAT if odd else WRITTEN

    def _is_flags(self, value: object) -> bool:
        if not super()._is_flags(value) or not isinstance(value, Tensor):
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
        repeats = ~step.terminated & ~step.truncated
        for leaf, frames in zip(self.leaves, step.observations, strict=True):
            goes_on = goes_on & (leaf.rows[self._every, place] == frames[:, -1]).all(1)
            repeats = repeats & (leaf.finals[ended] == frames[:, -1]).all(1)
            if leaf.stack > 1:
                goes_on = goes_on & (self._older(leaf, self._current) == frames[:, :-1]).flatten(1).all(1)
                repeats = repeats & (self._older(leaf, self._after_end) == frames[:, :-1]).flatten(1).all(1)
        oldest_index = self._episode_of[self._every, oldest]
        parts = (goes_on, repeats, (step.rewards != 0).any(1), self._padding(step), oldest_index)
        flags = (step.terminated, step.truncated, step.mask, step.given)
        seen = torch.stack([part.long() for part in (*parts, *flags)]).to(self.home).unbind()
        told = [part != 0 for part in seen[:3]]
        return _Seen(told[0], told[1], told[2], seen[3], seen[4], *(flag != 0 for flag in seen[5:]))

    def _older(self, leaf: Block, indices: Tensor) -> Tensor:
        """All but the newest frame of the stack that follows each lane's newest row, ``[lanes, stack - 1, frame]``."""
        indices, back = indices.clamp(min=0), torch.arange(leaf.stack - 1, 0, -1, device=self.home)
        start, _, _, padding = self.episodes[indices].unbind(1)
        time = self.written[:, None] - back
        kept = (leaf.stack - 1 - (start[:, None] - time)).clamp(0, leaf.stack - 2)
        every = self._every[:, None]
        needed = (time % self.rows, start % self.rows, time < start[:, None], padding, indices, kept)
        place, first, before, padding, index, kept = (part.to(self.device) for part in needed)
        frames, padding = leaf.rows[every, place], padding[:, None, None]
        filling = torch.where(padding == REPEATED, leaf.rows[self._every, first][:, None], 0)
        if leaf.starts is not None:
            filling = torch.where(padding == KEPT, leaf.starts[index[:, None], kept], filling)
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
        """The observation that was to follow is where the new one goes: it becomes the final observation."""
        lanes = _where(breaks)
        if len(lanes) == 0:
            return
        indices, count = self._current[lanes], self.written[lanes]
        episodes[indices, STOP] = count
        index, lane, place = self._send(indices, lanes, count % self.rows)
        for leaf in self.leaves:
            leaf.finals[index] = leaf.rows[lane, place]

    def _free_oldest(self, episodes: Tensor, acts: Tensor, seen: _Seen) -> None:
        """Free the indices of episodes whose last row is overwritten now."""
        gone = self.written - self.kept
        lanes = _where(acts & (gone >= self.begun))
        lanes = lanes[episodes[seen.oldest_index[lanes], STOP] == gone[lanes] + 1]
        self._free_slots[self._free_count[lanes], lanes] = seen.oldest_index[lanes].int()
        self._free_count[lanes] += 1

    def _begin(self, episodes: Tensor, begins: Tensor, seen: _Seen, step: _Step) -> None:
        lanes = _where(begins)
        if len(lanes) == 0:
            return
        self._free_count[lanes] -= 1
        indices = self._free_slots[self._free_count[lanes], lanes].long()
        padding, still_open = seen.padding[lanes], torch.full_like(indices, -1)
        episodes[indices] = torch.stack((self.written[lanes], still_open, torch.zeros_like(indices), padding), 1)
        self._current[lanes] = indices
        kept = padding == KEPT
        index, lane = self._send(indices[kept], lanes[kept])
        for leaf, frames in zip(self.leaves, step.observations, strict=True):
            if leaf.stack > 1 and leaf.starts is not None:
                leaf.starts[index] = frames[lane, :-1]

    def _put(self, episodes: Tensor, acts: Tensor, seen: _Seen, step: _Step) -> None:
        """Write the rows, and what follows them."""
        lanes, count = _where(acts), self.written[acts]
        self._after_end[lanes] = -1
        lane, place, index = self._send(lanes, count % self.rows, self._current[lanes])
        for leaf, frames in zip(self.leaves, step.observations, strict=True):
            leaf.rows[lane, place] = frames[lane, -1]
        for column, values in zip(self.columns, step.columns, strict=True):
            column.rows[lane, place] = values[lane]
        self._episode_of[lane, place] = index.int()
        ends = (seen.terminated | seen.truncated)[lanes]
        lane, place = self._send(lanes[~ends], (count[~ends] + 1) % self.rows)
        for leaf, frames in zip(self.leaves, step.following, strict=True):
            leaf.rows[lane, place] = frames[lane, -1]
        self._end(episodes, lanes[ends], seen, step)
        self.written[lanes] += 1

    def _end(self, episodes: Tensor, lanes: Tensor, seen: _Seen, step: _Step) -> None:
        if len(lanes) == 0:
            return
        indices = self._current[lanes]
        lane, index = self._send(lanes, indices)
        for k, leaf in enumerate(self.leaves):
            final = step.following[k][lane, -1]
            if step.finals:
                final = torch.where(step.given[lane, None], step.finals[k][lane, -1], final)
            leaf.finals[index] = final
        episodes[indices, END] = seen.terminated[lanes] * TERMINATED + seen.truncated[lanes] * TRUNCATED
        episodes[indices, STOP] = self.written[lanes] + 1
        self._current[lanes] = -1
        # With a final observation of its own, the new episode has begun, unless resets are known to take a step.
        may_repeat = (self._resets == ALWAYS) | ((self._resets != NEVER) & ~seen.given[lanes])
        self._after_end[lanes] = torch.where(may_repeat, indices, -1)

    # ---------------------------------------------------------------------------------------------- reading

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The lanes and times of rows that are held.

        Raises:
            IndexError: If one is not.
        """
        lane, time = rows % self.lanes, rows // self.lanes
        if bool(((rows < 0) | (time < self.oldest()[lane]) | (time >= self.written[lane])).any()):
            raise IndexError("a row is not held")
        return lane, time

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


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()
