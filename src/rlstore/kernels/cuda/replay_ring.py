"""The ring of episodes in Triton: everything is on the device, and a write is one launch that nobody waits for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlstore.kernels import replay_reference
from rlstore.kernels.cuda.launch import Argument, Launcher, next_power_of_2
from rlstore.kernels.cuda.replay_draw_kernels import draw_rows
from rlstore.kernels.cuda.replay_memory import layout_of, place_of, plain
from rlstore.kernels.cuda.replay_ring_kernels import summarise, write_step
from rlstore.kernels.cuda.replay_watch import Watch
from rlstore.kernels.reference import FLAG_DTYPES

_DONE, _NEED_SLOTS, _NEED_STARTS, _DONE_WITH_BREAK = -1, -2, -3, -4
_WORDS = 8
_TILE_ELEMENTS = 1024  # of a program that writes
_SUMMARY = 1024  # lanes that the summary takes at once
_DRAWN = 128  # rows that a program draws


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
            self._marks = torch.zeros(_WORDS, dtype=torch.int64, device=self.device)
            self._ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._watch, self._asked = Watch(self.words), False
        self._deep = 0
        self._launchers: dict[tuple[Any, ...], tuple[Launcher, tuple[int, int, int]]] = {}
        # The values of a step, before its flags; and whether some of them are flags of one byte.
        blocks = [*self.leaves, *self.leaves, *self.columns]
        self._fields = [(block.dtype, torch.Size((self.lanes, *block.shape))) for block in blocks]
        self._has_bools = any(block.dtype == torch.bool for block in blocks)
        widest = max(*self.leaf_layout.tiles, *self.column_layout.tiles)
        self._block = min(max(_TILE_ELEMENTS // widest, 1), 32, next_power_of_2(self.lanes))  # lanes of a program
        offsets = tuple(place.offset for place in self.counter_places)
        self._summary = (self.lanes, steps, offsets, min(next_power_of_2(self.lanes), _SUMMARY))
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
        self.is_fixed = deep > self.kept  # there is a slot for each row, so that no table has to grow
        self._lacks_starts = any(leaf.stack > 1 and leaf.starts is None for leaf in self.leaves)
        # Where frames are not stacked nothing is read of the starts.
        self.tables = (
            tuple(leaf.finals for leaf in self.leaves if leaf.finals is not None),
            tuple(self.words if leaf.starts is None else leaf.starts for leaf in self.leaves),
        )
        self._own: tuple[Argument, ...] = (
            *(self.leaf_memory, self.column_memory, *self.tables, self.episode_place.memory, episodes, free_slots),
            *(place.memory for place in self.counter_places),
            *(self.ends, self.words, self._marks, self._ticket),
        )
        self.refresh()

    def refresh(self) -> None:
        """Count anew what all lanes hold."""
        counters = [place.memory for place in self.counter_places]
        self._summarise(
            (1, 1, 1), self.device, counters[0], counters[1], counters[4], self.ends, self.words, self._marks
        )

    def watch(self, written: Tensor) -> None:
        """Others write into memory of the CPU alone."""
        raise NotImplementedError("rings on a device have no writers in other processes")

    def catch_up(self) -> None:
        """Take notice of what was written through other rings on the same memory."""
        self._watch.forget()
        self.refresh()

    def check_capture(self) -> None:
        """Refuse to be read in a CUDA graph while the tables may still move from under it."""
        if not self.is_fixed and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call register_graph(graph) of the storage before the graph is captured")

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The lanes and times of rows that are held; of others, of the nearest one that may be."""
        lane, time = rows % self.lanes, rows // self.lanes
        return lane, torch.minimum(torch.maximum(time, self.oldest()[lane]), self.written[lane] - 1).clamp(min=0)

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
        if len(values) != len(self._fields) + len(self.leaves) + 4:
            raise ValueError("a step has a value for each field")
        misfit = None if self._is_usual(values) else self._misfit(values)
        if misfit is not None:
            return misfit
        if self._lacks_starts:
            return _NEED_STARTS
        # With a slot for each row there always is one.
        if not self.is_fixed and self._watch.is_short(self._deep):
            self._asked = True
            return _NEED_SLOTS
        self._launch(values)
        self._watch.count_write()
        return _DONE_WITH_BREAK if self._watch.has_broken() else _DONE

    def _is_usual(self, values: tuple[Any, ...]) -> bool:
        """True if all that is given apart from final observations is ready as it most often is; seen at a glance."""
        device, flags, lanes = self.device, len(self._fields), (self.lanes,)
        for value, (dtype, shape) in zip(values, self._fields, strict=False):
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape or value.device != device:
                return False
            if not value.is_contiguous() or value.is_neg() or value.numel() == 1:
                return False
        for value in values[flags : flags + 2]:
            if type(value) is not Tensor or value.dtype is not torch.bool or value.shape != lanes:
                return False
            if value.device != device or not value.is_contiguous() or value.numel() == 1:
                return False
        return all(value is None for value in values[flags + 2 :])

    def _is_flags(self, value: object) -> bool:
        # That there is no NaN among them cannot be seen without a wait.
        if not isinstance(value, Tensor) or value.dtype not in FLAG_DTYPES:
            return False
        return self._is_ready(value, value.dtype, ())

    def _launch(self, values: tuple[Any, ...]) -> None:
        if self._has_bools:
            values = tuple(None if value is None else plain(value) for value in values)
        leaves, flags = len(self.leaves), len(self._fields)
        terminated, truncated, mask = values[flags : flags + 3]
        finals, given = values[flags + 3 : -1], values[-1]
        has_finals = finals[0] is not None
        mask_dtype = None if mask is None else mask.dtype
        given_dtype = None if given is None or not has_finals else given.dtype
        key = (terminated.dtype, truncated.dtype, mask_dtype, given_dtype, has_finals)
        arguments: tuple[Argument, ...] = (
            values[:leaves],
            values[leaves : 2 * leaves],
            values[2 * leaves : flags],
            terminated,
            truncated,
            self.words if mask is None else mask,
            finals if has_finals else values[:leaves],
            self.words if given_dtype is None else given,
            *self._own,
        )
        known = self._launchers.get(key)
        if known is None:
            self._launch_first(key, arguments)
        else:
            known[0](known[1], self.device, *arguments)

    def _launch_first(self, key: tuple[Any, ...], arguments: tuple[Argument, ...]) -> None:
        """The launch that compiles. In tiles of some shapes the compiler fails, and not in the next larger ones."""
        for block in (self._block, 2 * self._block, 4 * self._block):
            launcher, grid = self._launcher(key, block), (-(-self.lanes // block), 1, 1)
            try:
                launcher(grid, self.device, *arguments)
            except RuntimeError as error:
                if "PassManager" not in str(error) or block == 4 * self._block:
                    raise
            else:
                self._launchers[key] = launcher, grid
                return

    def _launcher(self, key: tuple[Any, ...], block: int) -> Launcher:
        columns = self.column_layout
        constants = (
            *self.leaf_layout,
            *(columns.sizes, columns.lane_strides, columns.row_strides, columns.offsets, columns.tiles),
            (self.episode_place.offset, *self.episode_place.strides),
            tuple(place.offset for place in self.counter_places),
            *(self.lanes, self._all_lanes, self._first, self.steps, self.rows, self.kept),
            *(self.reward, columns.sizes[self.reward], self._resets),
            *(key[2] is not None, key[4], key[3] is not None),
            *(block, self._summary[-1]),
        )
        return Launcher(write_step, constants)
