"""Windows of a ring in Triton: following what was written is one launch, and drawing is one."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstore.kernels import draws_reference
from rlstore.kernels.cuda.launch import Launcher, next_power_of_2
from rlstore.kernels.cuda.replay_memory import place_of
from rlstore.kernels.cuda.replay_ring import EpisodeRing
from rlstore.kernels.cuda.replay_windows_kernels import count_windows, draw_windows, follow_rows

_LANES, _SUMMARY, _DRAWN = 64, 1024, 128  # lanes that a program follows, lanes counted at once, windows drawn


class WindowIndex(draws_reference.WindowIndex):
    """The reference's index, followed and drawn from without a wait.

    If there are no windows, what is drawn is -1. To rebuild it all is left to the reference.
    """

    def __init__(self, ring: EpisodeRing, length: int, stride: int, across: bool, memory: tuple[Tensor, ...]) -> None:
        super().__init__(ring, length, stride, across, memory)
        self._device_ring, device = ring, ring.device
        self._queue = memory[0]
        places = [place_of(counter) for counter in memory[1:]]
        self._counters = tuple(place.memory for place in places)
        with torch.inference_mode(False):
            self._ends = torch.zeros(ring.lanes, dtype=torch.int64, device=device)
            self._total = torch.zeros(1, dtype=torch.int64, device=device)
            self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
            self._largest = torch.zeros(1, dtype=torch.float32, device=device)
        self._leaves: Tensor | None = None
        self._places = tuple(place.offset for place in places)
        self._block, self._summary = (
            min(next_power_of_2(ring.lanes), _LANES),
            min(next_power_of_2(ring.lanes), _SUMMARY),
        )
        self._draw = Launcher(draw_windows, (self._places, ring.lanes, ring.steps, _DRAWN))
        self._recount = Launcher(count_windows, (self._places, ring.lanes, self._summary))
        self._follow = self._follower()
        self._count_anew()  # a copy of an index has some from the beginning

    def _follower(self) -> Launcher:
        ring = self._device_ring
        constants = (
            *(ring.lanes, ring.steps, ring.rows, self._length, self._stride, self._across, self._leaves is not None),
            self._places,
            (ring.episode_place.offset, *ring.episode_place.strides),
            tuple(place.offset for place in ring.counter_places),
            *(self._block, self._summary),
        )
        return Launcher(follow_rows, constants)

    def keep_priorities(self, leaves: Tensor) -> None:
        """Windows have priorities, float32 by row, which go and come with them."""
        self._leaves = leaves
        self._follow = self._follower()

    def follow(self) -> None:
        """Take in what was written since."""
        ring = self._device_ring
        if self._leaves is not None:
            torch.amax(self._leaves, 0, keepdim=True, out=self._largest)
        self._follow(
            (-(-ring.lanes // self._block), 1, 1),
            ring.device,
            self._queue,
            *self._counters,
            ring.counter_places[0].memory,
            ring.counter_places[1].memory,
            ring.episode_place.memory,
            ring.episodes,
            self._largest if self._leaves is None else self._leaves,
            self._largest,
            self._ends,
            self._total,
            self._ticket,
        )

    def rebuild(self) -> None:
        """Forget everything and take in all rows that are held, all at once."""
        super().rebuild()
        self._count_anew()

    def _count_anew(self) -> None:
        self._recount((1, 1, 1), self._device_ring.device, *self._counters[:2], self._ends, self._total)

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows`` with the first rows of windows, each as likely as any other."""
        ring, count = self._device_ring, rows.numel()
        ring.check_generator(generator)
        grid = (-(-count // _DRAWN), 1, 1)
        index = (self._queue, self._counters[0], self._ends, self._total, self._ticket)
        self._draw(grid, ring.device, rows, generator, *index, count)

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
