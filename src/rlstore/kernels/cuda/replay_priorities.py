"""Priorities of the rows of a ring in Triton: three launches draw, one updates, and adding a row costs none."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from rlstore.kernels.cuda.launch import Launcher, next_power_of_2
from rlstore.kernels.cuda.replay_priorities_kernels import (
    UPDATE,
    draw_leaves,
    finish_draw,
    settle_rows,
    sum_leaves,
    update_leaves,
)
from rlstore.kernels.cuda.replay_ring import EpisodeRing

_MOST_BLOCKS, _SUPERS = 1024, 32  # sums at the top, and of 32 of them, which are summed where they are needed
_LEAST_WIDTH = 32
_DRAWN, _DRAW_WARPS, _UPDATED, _UPDATE_WARPS = 32, 8, 32, 1  # rows of a program that draws, and of one that updates
_MOST_UPDATED = UPDATE.value  # rows of an update
_FINISHED = 256  # weights of a program
_SETTLED_LANES, _SETTLED = 64, 1024  # lanes and rows that get their first priority at once


class Priorities:
    """Priorities of the rows of a ring: leaf ``lane * steps + time % steps`` holds ``priority ** alpha``.

    Nothing is kept up above the leaves: every draw sums them anew. New rows get their first priority with the next
    draw; what that is does not depend on when, because adding rows never changes the largest priority.

    What the host would have to wait for is not refused: priorities that are none, and rows that are not held, are
    dropped and counted. If all priorities are 0, what is drawn has a weight of 0.

    Args:
        ring: The rows.
        memory: Leaves float32; the sums (float64) and maxima (float32) of :meth:`level_sizes`; and the rows that were
            seen, int64 ``[lanes]``.
    """

    def __init__(self, ring: EpisodeRing, memory: tuple[Tensor, ...]) -> None:
        self._ring = ring
        self._leaves, self._sums, self._maxima, self._seen = memory
        leaves, device = ring.lanes * ring.steps, ring.device
        if len(self._leaves) < leaves or len(self._sums) != sum(self.level_sizes(len(self._leaves))):
            raise ValueError("priorities: a leaf for each row")
        width = _width(len(self._leaves))
        self._blocks = -(-len(self._leaves) // width**2)
        supers = _SUPERS
        with torch.inference_mode(False):
            self._news = torch.zeros(len(self._sums), dtype=torch.float32, device=device)
            self._first = torch.ones(1, dtype=torch.float32, device=device)
            self._dropped = torch.zeros(1, dtype=torch.int64, device=device)
            self._smallest = torch.zeros(1, dtype=torch.int32, device=device)  # the bits of a float32
            # The stamp that each leaf was last updated with, and the updates so far, in multiples of UPDATE.
            self._stamps = torch.zeros(leaves, dtype=torch.int64, device=device)
            self._updates = torch.zeros(1, dtype=torch.int64, device=device)
        self._written, self._begun = (place.memory for place in ring.counter_places[:2])
        written, begun = (place.offset for place in ring.counter_places[:2])
        lanes = min(next_power_of_2(ring.lanes), _SETTLED_LANES)
        self.settled = (ring.lanes, ring.steps, written, lanes, _SETTLED // lanes)
        every = (leaves, ring.lanes, ring.steps, written, self._blocks, supers, width)
        self._sum = Launcher(sum_leaves, (leaves, ring.steps, written, self._blocks, width), min(width // 32, 32))
        self._draw = Launcher(draw_leaves, (*every, _DRAWN), _DRAW_WARPS)
        self._finish = Launcher(finish_draw, (*self.settled, _FINISHED))
        self._settle = Launcher(settle_rows, (*self.settled, self._blocks, supers))
        self._update = Launcher(update_leaves, (ring.lanes, ring.steps, written, begun, _UPDATED), _UPDATE_WARPS)
        self._is_behind = False

    @staticmethod
    def level_sizes(leaves: int) -> list[int]:
        """Entries of each level above so many leaves: subs and blocks."""
        width = _width(leaves)
        blocks = -(-leaves // width**2)
        return [blocks * width, blocks]

    def total(self) -> float:
        """The sum of all leaves, for which the device is waited for."""
        self.settle()
        return float(self._leaves.double().sum())

    def dropped(self) -> int:
        """Priorities that were dropped, for which the device is waited for."""
        return int(self._dropped)

    def rebuild(self) -> None:
        """The leaves were changed from outside."""
        self._is_behind = False

    def _sum_anew(self) -> None:
        tree = (self._leaves, self._sums, self._news, self._maxima, self._smallest)
        self._sum((self._blocks, 1, 1), self._ring.device, *tree, self._written, self._seen)

    def settle(self) -> None:
        """Give the rows written since the last draw their first priority now."""
        if self._is_behind:
            self._sum_anew()
            grid = (min(-(-self._ring.lanes // _SETTLED_LANES), 128), 1, 1)
            self._settle(grid, self._ring.device, self._leaves, self._maxima, self._written, self._seen)
            self._is_behind = False

    def follow(self) -> None:
        """Rows were written; they get their first priority with the next draw."""
        self._is_behind = True

    def follow_windows(self, windows: Any) -> None:
        """Only rows at which a window begins have a priority: the index of windows sees to that when it follows."""
        self._seen = self._ring.written  # no row is new

    def draw(self, generator: Tensor, beta: float, rows: Tensor, weights: Tensor) -> bool:
        """Draw one row in each of as many equal parts of the total, and its weight over the largest of them."""
        count = rows.numel()
        if weights.numel() != count:
            raise ValueError("draw: a weight for each row")
        unfinished = self.begin_draw(generator, rows, weights)
        grid = (max(-(-count // _FINISHED), 1), 1, 1)
        self._finish(grid, self._ring.device, generator, weights, *unfinished, count, as_float(beta))
        return True

    def begin_draw(self, generator: Tensor, rows: Tensor, drawn: Tensor) -> tuple[Tensor, ...]:
        """Draw rows, and tell the leaf of each, float32: what is left to be done is the kernels' ``finish``.

        Returns:
            What that takes besides the leaves drawn.
        """
        self._ring.check_generator(generator)
        self._sum_anew()
        tree = (self._leaves, self._sums, self._news, self._maxima, self._first, self._written, self._seen)
        count = rows.numel()
        grid = (max(-(-count // _DRAWN), 1), 1, 1)
        self._draw(grid, self._ring.device, rows, drawn, self._smallest, generator, *tree, count)
        if self._ring.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # else nothing ran yet
            self._is_behind = False
        return self._smallest, self._leaves, self._first, self._written, self._seen

    def update(self, rows: Tensor, priorities: Tensor, alpha: float, windows: Any) -> tuple[int, int, int]:
        """Set priorities, but for those that are dropped; see :meth:`dropped`.

        Returns:
            (0, 0, 0): what was refused, where, and how many were dropped is not known yet.
        """
        if rows.numel() != priorities.numel():
            raise ValueError("update: a priority for each row")
        if rows.numel() >= _MOST_UPDATED:
            raise ValueError(f"update: {rows.numel()} priorities at once; there is room for fewer than {_MOST_UPDATED}")
        self.settle()
        if windows is not None:
            rows = torch.where(windows.contain(rows), rows, -1)
        count = rows.numel()
        tensors = (
            rows,
            priorities,
            self._leaves,
            self._dropped,
            self._stamps,
            self._updates,
            self._written,
            self._begun,
        )
        self._update((-(-count // _UPDATED), 1, 1), self._ring.device, *tensors, count, as_float(alpha))
        return 0, 0, 0


def _width(leaves: int) -> int:
    """Entries below each sum, so that there are few enough at the top."""
    width = _LEAST_WIDTH
    while width**2 * _MOST_BLOCKS < leaves:
        width *= 2
    return width


def as_float(number: float) -> float:
    """The number as a float32 holds it."""
    narrowed: float = struct.unpack("f", struct.pack("f", number))[0]
    return narrowed
