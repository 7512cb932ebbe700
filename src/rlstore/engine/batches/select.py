"""Which rows. Selectors see counts, episodes and a generator, never data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.memory.backing import lazy_zeros
from rlstore.engine.memory.tensors import allocate, allocate_empty
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.kernels import kernel, protocol

# The orders of so many epochs are made in one launch; and the longest permutation that is made so.
_ORDER_BYTES = 32 << 20
_LONGEST_PERMUTATION = 1 << 32
_MOST_ORDERS = 1 << 15  # a launch has room for twice as many


def epoch_rows(held: int, wanted: int, generator: torch.Generator, *, shuffle: bool = True) -> Tensor:
    """``wanted`` of the ``held`` rows for one epoch, none twice: int64 ``[wanted]``.

    Shuffled, any row may be among those left out; in order, the last ones are.
    """
    return next(epoch_orders(held, wanted, generator, 1, shuffle=shuffle))


def epoch_orders(
    held: int, wanted: int, generator: torch.Generator, epochs: int, *, shuffle: bool = True
) -> Iterator[Tensor]:
    """:func:`epoch_rows` for each of some epochs, drawn as they are asked for; on CUDA several of them ahead."""
    device = generator.device
    if not shuffle:
        yield from repeat(torch.arange(wanted, device=device), epochs)
    elif device.type != "cuda" or held > _LONGEST_PERMUTATION:
        for _ in range(epochs):
            yield torch.randperm(held, generator=generator, device=device)[:wanted]
    else:
        ahead = min(max(1, _ORDER_BYTES // max(8 * wanted, 1)), _MOST_ORDERS)
        for first in range(0, epochs, ahead):
            yield from keyed_orders(held, wanted, generator, min(ahead, epochs - first))


def keyed_orders(held: int, wanted: int, generator: torch.Generator, epochs: int) -> Tensor:
    """Orders of an epoch's rows, int64 ``[epochs, wanted]``, in two launches: keys, and the permutations they give."""
    device = generator.device
    keys = torch.randint(-(2**63), 2**63 - 1, (epochs,), generator=generator, device=device)
    # Each order begins at a multiple of 16 bytes, as all memory that kernels read at their best does.
    rows = allocate_empty((epochs, wanted + wanted % 2), torch.int64, device)[:, :wanted]
    kernel("permutation", device.type)(keys, held, rows)
    return rows


def new_random(seed: int) -> Tensor:
    """The generator of replay, int64 ``[seed, draws made]``: what it draws is a function of these two numbers.

    It has to be where the ring is that it draws rows of: see :func:`moved_random`.
    """
    with torch.inference_mode(False):
        return torch.tensor([seed, 0])


def moved_random(random: Tensor, device: torch.device) -> Tensor:
    """The generator on a device; no inference tensor, whatever mode the caller is in: every draw writes into it."""
    with torch.inference_mode(False):
        return random.to(device)


def uniform_rows(ring: EpisodeRing, count: int, random: Tensor) -> Tensor:
    """``count`` rows of all that are held, each as likely as any other, int64 ``[count]``; some may come twice."""
    rows = allocate_empty((count,), torch.int64, ring.device)
    ring.kernel.draw(random, rows)
    return rows


def random_units(count: int, random: Tensor) -> Tensor:
    """``count`` numbers uniform in [0, 1), float64 ``[count]``."""
    units = allocate_empty((count,), torch.float64, random.device)
    kernel("draw_units", random.device.type)(random, units)
    return units


def rows_in_order(ring: EpisodeRing) -> Tensor:
    """All rows held, oldest first, int64 ``[steps, envs]``; -1 where an environment holds fewer than others."""
    held, lane = ring.held(), torch.arange(ring.lanes, device=ring.device)
    step = torch.arange(int(held.max()), device=ring.device).unsqueeze(1)
    return torch.where(step < held, (ring.written - held + step) * ring.lanes + lane, -1)


class Windows:
    """The windows of a fixed length that there are in a ring, by the row at which each begins.

    Windows begin every ``stride`` rows of an episode, as far as they fit into it. An episode that is over gives one
    more, which ends with it, if none does; and if it is shorter than a window, a single shorter one. Adding, dropping
    and drawing take the same time however many there are.

    Args:
        ring: The rows.
        length: Rows of a window.
        stride: Rows from the beginning of one to the beginning of the next.
        across: Windows of lanes instead: every ``stride`` rows, whatever ends inside them.
    """

    def __init__(self, ring: EpisodeRing, length: int, stride: int, *, across: bool = False) -> None:
        self.length = length
        self._ring, self._stride, self._across = ring, stride, across
        shape = (ring.lanes, ring.steps)
        is_lazy = ring.device.type == "cpu"
        self._queue = lazy_zeros(shape, torch.int64) if is_lazy else allocate(shape, torch.int64, ring.device)
        ring.beside["windows"] = self._queue
        self._counters = allocate((4, ring.lanes), torch.int64, ring.device)
        self._leaves: Tensor | None = None
        self._kernel: protocol.WindowIndex | None = None
        self._has_windows = False
        self.rebuild()

    @property
    def kernel(self) -> protocol.WindowIndex:
        """The index itself, bound to the ring when it is first needed."""
        if self._kernel is None:
            memory = (self._queue, *self._counters)
            make = kernel("WindowIndex", self._ring.device.type)
            self._kernel = make(self._ring.kernel, self.length, self._stride, self._across, memory)
            self._hand_leaves()
        return self._kernel

    def keep_priorities(self, leaves: Tensor) -> None:
        """Windows have priorities, float32 by row: an index on a device sets those of windows that come and go."""
        self._leaves = leaves
        self._hand_leaves()

    def _hand_leaves(self) -> None:
        if self._leaves is not None:
            self.kernel.keep_priorities(self._leaves)

    @property
    def has_windows(self) -> bool:
        """True if there is any. A device is not asked again once it has some and so many rows that some always stay."""
        if self._ring.device.type == "cpu" or self._ring.steps < 2 * (self.length + self._stride):
            return len(self) > 0
        if not self._has_windows:
            self._has_windows = len(self) > 0
        return self._has_windows

    def __len__(self) -> int:
        """Windows that there are."""
        return self.kernel.count()

    @property
    def count(self) -> Tensor:
        """Windows that there are, int64 ``[]`` where the ring is: a device is not waited for."""
        head, tail = self._counters[:2].unbind()
        return (tail - head).sum()

    def follow(self) -> None:
        """Take in what was written since."""
        self.kernel.follow()

    def rebuild(self) -> None:
        """Take in all rows that are held, from the beginning."""
        self._has_windows = False
        self.kernel.rebuild()

    def forget(self, lanes: Tensor) -> None:
        """Take in the rows of some lanes from the beginning at the next follow(): what is known may be wrong."""
        self._counters[2, lanes] = 0

    def of_lane(self, lane: int) -> tuple[Tensor, Tensor]:
        """The windows of a lane, int64 ``[n]`` each: the time at which each begins, and that at which it was known."""
        ring, (head, tail) = self._ring, self._counters[:2, lane].tolist()
        starts = self._queue[lane, torch.arange(head, tail, device=ring.device) % ring.steps]
        if self._across:
            return starts, starts + self.length - 1
        start, stop, end, _ = ring.episodes[ring.blocks["episode"][lane, starts % ring.rows].long()].unbind(1)
        stop = torch.where(stop < 0, ring.written[lane], stop)
        is_full = (starts + self.length <= stop) & ((starts - start) % self._stride == 0)
        # One more, which ends with its episode: that it was broken off was known with the row after it.
        return starts, torch.where(is_full, starts + self.length - 1, torch.where(end == 0, stop, stop - 1))

    def in_order(self) -> Tensor:
        """The first rows of all windows, oldest first, int64 ``[n]``."""
        lanes = self._ring.lanes
        return torch.cat([self.of_lane(lane)[0] * lanes + lane for lane in range(lanes)]).sort().values

    def draw(self, count: int, random: Tensor) -> Tensor:
        """The first rows of ``count`` windows, each as likely as any other."""
        rows = allocate_empty((count,), torch.int64, self._ring.device)
        self.kernel.draw(random, rows)
        return rows

    def rows(self, starts: Tensor) -> Tensor:
        """All rows of the windows that begin at ``starts``, int64 ``[windows, length]``; -1 after their end."""
        rows = allocate_empty((starts.shape[0], self.length), torch.int64, self._ring.device)
        self._ring.kernel.windows(starts, self.length, self._across, rows)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None}
