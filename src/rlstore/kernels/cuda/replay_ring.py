"""The ring of episodes in Triton: everything is on the device, and a write is one launch that nobody waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlstore.kernels import replay_reference
from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.cuda.replay_draw_kernels import draw_rows
from rlstore.kernels.cuda.replay_memory import layout_of, next_power, place_of, plain
from rlstore.kernels.cuda.replay_ring_kernels import summarise, write_step

_DONE, _NEED_SLOTS, _NEED_STARTS, _DONE_WITH_BREAK = -1, -2, -3, -4
_WORDS, _LEAST_FREE, _BREAKS = 8, 3, 4
_TILE_ELEMENTS = 2048  # of a program that writes
_SUMMARY = 4096  # lanes that the summary takes at once
_DRAWN = 128  # rows that a program draws
_FIRST_LOOK, _LAST_LOOK = 8, 256  # writes between two looks at the words


class Watch:
    """What the host knows of a ring's slots, learnt from the device without a wait.

    A write takes at most one slot of a lane, so the free slots that there were at the last look, less the writes since,
    are a bound from below. A look is a copy into page-locked memory, whose end is asked for at later writes. Only if
    the bound reaches 0 before it has ended is it waited for.

    Args:
        words: Where the device keeps the count, int64.
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words
        on_cuda = words.device.type == "cuda"
        with torch.inference_mode(False):
            self._seen = torch.zeros(_WORDS, dtype=torch.int64, pin_memory=on_cuda)
        self._event: Any = torch.cuda.Event() if on_cuda else None
        self._told = 0  # breaks that were told of
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        self.free: int | None = None  # in every lane, at least
        self._since = 0  # writes since the last look
        self._looking = False
        self._interval = _FIRST_LOOK

    def grow(self, slots: int) -> None:
        """Every lane has so many free slots more."""
        if self.free is not None:
            self.free += slots

    def before_write(self, deep: int) -> tuple[bool, bool]:
        """Whether slots have to be made first, where there are ``deep`` a lane; and whether an episode broke off."""
        if self._looking and (self._event is None or self._event.query()):
            self._take()
        while self.free is None or self.free < 1:
            if not self._looking:
                self._look()
            if self._event is not None:
                self._event.synchronize()
            self._take()
            if self.free == 0 and not self._since:
                return True, False
        broken = int(self._seen[_BREAKS]) > self._told
        if broken:
            self._told = int(self._seen[_BREAKS])
        is_short = not self._looking and self.free + self._since <= max(deep // 8, 1)
        return is_short, broken

    def after_write(self, deep: int) -> None:
        """A write was launched."""
        assert self.free is not None
        self.free -= 1
        self._since += 1
        if not self._looking and (self._since >= self._interval or self.free < deep // 2):
            self._interval = min(2 * self._interval, _LAST_LOOK)
            self._look()

    def _look(self) -> None:
        self._seen.copy_(self._words, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._looking, self._since = True, 0

    def _take(self) -> None:
        self._looking = False
        self.free = int(self._seen[_LEAST_FREE]) - self._since


class EpisodeRing(replay_reference.EpisodeRing):
    """The reference's ring, with counters and tables on the device too.

    What the host would have to wait for is not told at once: that an episode was broken off is told by a later write,
    slots are asked for before they are needed, tables of starts from the beginning. A NaN among flags counts as True.
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
        super().__init__(steps, counters, episode_of, leaves, columns, reward, resets, first)
        self.leaf_memory, self.leaf_layout = layout_of(self.leaves)
        self.column_memory, self.column_layout = layout_of(self.columns)
        self.episode_place = place_of(episode_of)
        self.counter_places = [place_of(counter) for counter in counters]
        with torch.inference_mode(False):
            self.ends = torch.zeros(self.lanes, dtype=torch.int64, device=self.device)
            self.words = torch.zeros(_WORDS, dtype=torch.int64, device=self.device)
            self._ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._watch, self._asked = Watch(self.words), False
        self._deep = 0
        self._launchers: dict[tuple[Any, ...], Launcher] = {}
        offsets = tuple(place.offset for place in self.counter_places)
        self._summary = (self.lanes, steps, offsets, min(next_power(self.lanes), _SUMMARY))
        self._summarise = Launcher(summarise, self._summary)
        self._draw = Launcher(draw_rows, (*self._summary[:3], _DRAWN))

    def set_tables(
        self, episodes: Tensor, free_slots: Tensor, finals: tuple[Tensor, ...], starts: tuple[Tensor | None, ...]
    ) -> None:
        """Take other tables, or notice that counters were changed from outside."""
        super().set_tables(episodes, free_slots, finals, starts)
        deep, self._all_lanes = free_slots.shape
        if self._asked:
            self._watch.grow(deep - self._deep)
        else:
            self._watch.forget()
        self._deep, self._asked = deep, False
        self._all_free = free_slots
        self._lacks_starts = any(leaf.stack > 1 and leaf.starts is None for leaf in self.leaves)
        # Where frames are not stacked nothing is read of the starts.
        self.tables = (
            tuple(leaf.finals for leaf in self.leaves if leaf.finals is not None),
            tuple(self.words if leaf.starts is None else leaf.starts for leaf in self.leaves),
        )
        self.refresh()

    def refresh(self) -> None:
        """Count anew what all lanes hold."""
        counters = [place.memory for place in self.counter_places]
        self._summarise((1, 1, 1), self.device, counters[0], counters[1], counters[4], self.ends, self.words)

    def watch(self, written: Tensor) -> None:
        """Others write into memory of the CPU alone."""
        raise NotImplementedError("rings on a device have no writers in other processes")

    def catch_up(self) -> None:
        """Take notice of what was written through other rings on the same memory."""
        self._watch.forget()
        self.refresh()

    # ---------------------------------------------------------------------------------------------- drawing

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows``, on the device, with rows drawn uniformly from all that are held, which there have to be."""
        self.check_generator(generator)
        counters = [place.memory for place in self.counter_places]
        grid, count = (-(-rows.numel() // _DRAWN), 1, 1), rows.numel()
        self._draw(grid, self.device, rows, generator, self.ends, self.words, *counters[:2], self._ticket, count)

    def check_generator(self, generator: Tensor) -> None:
        """Refuse what is no generator on this device."""
        if generator.dtype != torch.int64 or generator.numel() != 2 or generator.device != self.device:
            raise ValueError("a generator is int64 [seed, draws made], where the ring is")

    # ---------------------------------------------------------------------------------------------- writing

    def write(self, values: tuple[Any, ...]) -> int:
        """Write one step of all lanes, in one launch; see the reference.

        That an episode was broken off is told by a write that comes after.
        """
        leaves, columns = len(self.leaves), len(self.columns)
        if len(values) != 3 * leaves + columns + 4:
            raise ValueError("a step has a value for each field")
        misfit = self._misfit(values)
        if misfit is not None:
            return misfit
        if self._lacks_starts:
            return _NEED_STARTS
        broken, is_short = False, False
        if self._deep <= self.kept:
            is_short, broken = self._watch.before_write(self._deep)
        if is_short:
            self._asked = True
            return _NEED_SLOTS
        self._launch(tuple(None if value is None else plain(value) for value in values), leaves, columns)
        if self._deep <= self.kept:
            self._watch.after_write(self._deep)
        return _DONE_WITH_BREAK if broken else _DONE

    def _is_flags(self, value: object) -> bool:
        # That there is no NaN among them cannot be seen without a wait.
        if not isinstance(value, Tensor) or value.dtype not in replay_reference.FLAG_DTYPES:
            return False
        return self._is_ready(value, value.dtype, ())

    def _launch(self, values: tuple[Any, ...], leaves: int, columns: int) -> None:
        flags = 2 * leaves + columns
        terminated, truncated, mask = values[flags : flags + 3]
        finals, given = values[flags + 3 : flags + 3 + leaves], values[-1]
        has_finals = finals[0] is not None
        key = (
            terminated.dtype,
            truncated.dtype,
            None if mask is None else mask.dtype,
            None if given is None or not has_finals else given.dtype,
            has_finals,
        )
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._launcher(key)
        nothing = self.words
        launcher(
            (-(-self.lanes // self._block), 1, 1),
            self.device,
            values[:leaves],
            values[leaves : 2 * leaves],
            values[2 * leaves : flags],
            terminated,
            truncated,
            nothing if mask is None else mask,
            finals if has_finals else values[:leaves],
            nothing if key[3] is None else given,
            self.leaf_memory,
            self.column_memory,
            *self.tables,
            self.episode_place.memory,
            self.episodes,
            self._all_free,
            *(place.memory for place in self.counter_places),
            self.ends,
            self.words,
            self._ticket,
        )

    @property
    def _block(self) -> int:
        """Lanes that a program writes."""
        widest = max(*self.leaf_layout.tiles, *self.column_layout.tiles)
        return min(max(_TILE_ELEMENTS // widest, 1), 32, next_power(self.lanes))

    def _launcher(self, key: tuple[Any, ...]) -> Launcher:
        columns = self.column_layout
        constants = (
            *self.leaf_layout,
            *(columns.sizes, columns.lane_strides, columns.row_strides, columns.offsets, columns.tiles),
            (self.episode_place.offset, *self.episode_place.strides),
            tuple(place.offset for place in self.counter_places),
            *(self.lanes, self._all_lanes, self._first, self.steps, self.rows, self.kept),
            *(self.reward, columns.sizes[self.reward], self._resets),
            *(key[2] is not None, key[4], key[3] is not None),
            *(self._block, self._summary[-1]),
        )
        return Launcher(write_step, constants)
