"""Random numbers, windows and priorities of a ring.

Random numbers are a pure function of a seed and a counter, the same as in ``csrc/random.h``. Sums are added in the
order of the C++ version, to the last bit. Everything is where the counters of the ring are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlstore.kernels.protocol import NEVER_WRITTEN, NO_WINDOW, NOT_A_PRIORITY, NOT_READ
from rlstore.kernels.ring_memory import RingMemory, WindowQueues, as_float32
from rlstore.kernels.rules import are_priorities

# The constants of SplitMix64 (Steele, Lea and Flood 2014), as the signed numbers that torch multiplies.
_STEP, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_WIDTH = 16  # children of a node in the tree of sums
_SMALLEST = torch.finfo(torch.float32).tiny


def take_units(generator: Tensor, count: int) -> Tensor:
    """The next ``count`` numbers of a generator, which is advanced: multiples of 2^-53 in [0, 1).

    Args:
        generator: int64 ``[seed, draws made]``.
        count: How many.

    Returns:
        float64 ``[count]`` where the generator is.
    """
    if generator.dtype != torch.int64 or generator.numel() != 2:
        raise ValueError("a generator is int64 [seed, draws made]")
    seed, made = generator.unbind()
    bits = seed + (made + torch.arange(1, count + 1, device=generator.device)) * _STEP
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    bits = bits ^ _shift(bits, 31)
    generator[1] += count
    return _shift(bits, 11).double() * 2.0**-53


def take_below(generator: Tensor, count: int, limit: int) -> Tensor:
    """The next ``count`` whole numbers from 0 to ``limit - 1``, int64 ``[count]``."""
    return (take_units(generator, count) * limit).long().clamp(max=limit - 1)


def _shift(bits: Tensor, places: int) -> Tensor:
    """To the right, with zeros coming in whatever the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def draw_units(generator: Tensor, units: Tensor) -> None:
    """Fill ``units``, float64, with numbers uniform in [0, 1)."""
    units.copy_(take_units(generator, units.numel()).view(units.shape))


class WindowIndex(WindowQueues):
    """Windows of a ring, followed one row of every lane at a time."""

    def __init__(self, ring: RingMemory, length: int, stride: int, across: bool, memory: tuple[Tensor, ...]) -> None:
        super().__init__(ring, length, stride, across, memory)
        # Rows of windows that the last follow() added and dropped.
        self.added = self.dropped = torch.empty(0, dtype=torch.int64, device=ring.home)

    def follow(self) -> None:
        """Add and drop windows for what was written since."""
        added: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=self._ring.home)]
        dropped: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=self._ring.home)]
        self._restart((self._seen < self._ring.oldest()).nonzero().flatten(), dropped)
        while True:
            lanes = (self._seen < self._ring.written).nonzero().flatten()
            if len(lanes) == 0:
                break
            oldest = self._ring.oldest()  # of all that is written: what is dropped in this call must not be added
            self._drop(lanes, oldest, dropped)
            self._add(lanes, oldest, added)
            self._seen[lanes] += 1
        self.added, self.dropped = torch.cat(added), torch.cat(dropped)

    def _restart(self, lanes: Tensor, dropped: list[Tensor]) -> None:
        """More was written than is held: drop all that was known."""
        if len(lanes) == 0:
            return
        oldest = self._ring.oldest()
        self._drop(lanes, torch.full_like(oldest, torch.iinfo(torch.int64).max), dropped)
        self._open[lanes] = 0
        self._seen[lanes] = oldest[lanes]

    def _drop(self, lanes: Tensor, oldest: Tensor, dropped: list[Tensor]) -> None:
        ring = self._ring
        while True:
            heads = self._heads[lanes]
            starts = self._starts[lanes, heads % ring.steps]
            gone = (heads < self._tails[lanes]) & (starts < oldest[lanes])
            if not bool(gone.any()):
                return
            lanes = lanes[gone]
            dropped.append(starts[gone] * ring.lanes + lanes)
            self._heads[lanes] += 1

    def _add(self, lanes: Tensor, oldest: Tensor, added: list[Tensor]) -> None:
        """One row of each of these lanes."""
        ring, time = self._ring, self._seen[lanes]
        stop = time + 1
        if self._across:
            taken = stop - ring.begun[lanes]
            self._push(lanes, stop - self._length, self._completes(taken), oldest, added)
            return
        start, end = ring.episodes[ring.episodes_of(lanes, time), :2].unbind(1)
        opened = self._open[lanes]
        broken_off = (opened > 0) & (opened - 1 != start)
        self._finish(lanes, opened - 1, time, broken_off, oldest, added)
        self._push(lanes, stop - self._length, self._completes(stop - start), oldest, added)
        over = end == stop
        self._finish(lanes, start, stop, over, oldest, added)
        self._open[lanes] = torch.where(over, 0, start + 1)

    def _finish(
        self, lanes: Tensor, start: Tensor, stop: Tensor, which: Tensor, oldest: Tensor, added: list[Tensor]
    ) -> None:
        """Episodes from ``start`` to ``stop`` are over, where ``which`` says so."""
        first = torch.maximum(start, stop - self._length)
        self._push(lanes, first, which & ~self._completes(stop - start), oldest, added)

    def _push(self, lanes: Tensor, starts: Tensor, which: Tensor, oldest: Tensor, added: list[Tensor]) -> None:
        which = which & (starts >= oldest[lanes])
        lanes, starts = lanes[which], starts[which]
        self._starts[lanes, self._tails[lanes] % self._ring.steps] = starts
        self._tails[lanes] += 1
        added.append(starts * self._ring.lanes + lanes)

    def draw(self, generator: Tensor, rows: Tensor) -> None:
        """Fill ``rows`` with the first rows of windows, each as likely as any other."""
        counts = self._tails - self._heads
        ends = counts.cumsum(0)
        if int(ends[-1]) == 0:
            raise ValueError("draw: there are no windows")
        drawn = take_below(generator, rows.numel(), int(ends[-1]))
        lane = torch.searchsorted(ends, drawn, right=True)
        place = (self._heads[lane] + drawn - (ends - counts)[lane]) % self._ring.steps
        rows.copy_((self._starts[lane, place] * self._ring.lanes + lane).view(rows.shape))

    def keep_priorities(self, leaves: Tensor) -> None:
        """Nothing: :meth:`Priorities.follow_windows` sets the priorities of windows."""


def _raised(priorities: Tensor, alpha: float) -> Tensor:
    """``priority ** alpha``; what is above 0 stays so."""
    raised = (priorities.double() ** as_float32(alpha)).to(torch.float32).clamp(min=_SMALLEST)
    return torch.where(priorities > 0, raised, 1.0 if as_float32(alpha) == 0 else 0.0)


class Priorities:
    """Priorities of the rows of a ring in a tree of sums and maxima, 16 children a node."""

    def __init__(self, ring: RingMemory, memory: tuple[Tensor, ...]) -> None:
        self._dropped = 0
        self._ring = ring
        self._leaves, sums, maxima, self._seen = memory
        if len(self._leaves) != -(-ring.lanes * ring.steps // _WIDTH) * _WIDTH:
            raise ValueError("priorities: a leaf for each row")
        sizes = self.level_sizes(len(self._leaves))
        self._sums, self._maxima = sums.split(sizes), maxima.split(sizes)
        self.rebuild()

    @staticmethod
    def level_sizes(leaves: int) -> list[int]:
        """Entries of each level above so many leaves; the last has 16, whose sum is the total."""
        entries = leaves
        sizes: list[int] = []
        while not sizes or entries > _WIDTH:
            entries = -(-entries // _WIDTH)
            sizes.append(-(-entries // _WIDTH) * _WIDTH)
        return sizes

    def total(self) -> float:
        """The sum of all leaves."""
        return float(_sum_groups(self._sums[-1].view(1, _WIDTH)))

    def rebuild(self) -> None:
        """Every sum from the leaves."""
        self._refresh(torch.arange(len(self._leaves), device=self._leaves.device))

    def _set(self, leaves: Tensor, values: Tensor) -> None:
        """Set distinct leaves and what is above them."""
        self._leaves[leaves] = values
        self._refresh(leaves)

    def _refresh(self, changed: Tensor) -> None:
        below: tuple[Tensor, Tensor] = (self._leaves, self._leaves)
        for sums, maxima in zip(self._sums, self._maxima, strict=True):
            changed = torch.unique(changed // _WIDTH)
            sums[changed] = _sum_groups(below[0].view(-1, _WIDTH)[changed].double())
            maxima[changed] = below[1].view(-1, _WIDTH)[changed].amax(1)
            below = sums, maxima

    def _first_value(self) -> Tensor:
        """What a new row gets: the largest that is held, or 1 if none is above 0."""
        largest = self._maxima[-1].max()
        return torch.where(largest > 0, largest, torch.ones_like(largest))

    def _leaf_of(self, lane: Tensor, time: Tensor) -> Tensor:
        return lane * self._ring.steps + time % self._ring.steps

    def follow(self) -> None:
        """Give the rows written since their first priority."""
        ring = self._ring
        new = (ring.written - self._seen).clamp(min=0)
        lane = torch.repeat_interleave(torch.arange(ring.lanes, device=ring.home), new)
        time = torch.arange(len(lane), device=ring.home) - (new.cumsum(0) - new - self._seen)[lane]
        self._set(torch.unique(self._leaf_of(lane, time)), self._first_value())
        self._seen.copy_(torch.maximum(self._seen, ring.written))

    def begin(self, before: Tensor, priorities: Tensor, alpha: float) -> None:
        """Set the first priorities of the newest rows of lanes that have written since."""
        lane = (self._ring.written > before).nonzero().flatten()
        given = priorities[lane]
        if not bool(((given >= 0) & (given < torch.inf)).all()):
            raise ValueError("begin: not a priority")
        self._set(self._leaf_of(lane, self._ring.written[lane] - 1), _raised(given, alpha))

    def follow_windows(self, windows: WindowIndex) -> None:
        """Only rows at which a window begins have a priority."""
        first, lanes = self._first_value(), self._ring.lanes
        for rows, value in ((windows.dropped, torch.zeros_like(first)), (windows.added, first)):
            self._set(torch.unique(self._leaf_of(rows % lanes, rows // lanes)), value)
        self._seen.copy_(windows.seen)

    def settle(self) -> None:
        """Nothing is left undone by :meth:`follow`."""

    def dropped(self) -> int:
        """Priorities that updates dropped, as their rows were overwritten."""
        return self._dropped

    def draw(self, generator: Tensor, beta: float, rows: Tensor, weights: Tensor) -> bool:
        """Draw one row in each of as many equal parts of the total, and its weight over the largest of them."""
        count, total, ring = rows.numel(), self.total(), self._ring
        if weights.numel() != count:
            raise ValueError("draw: a weight for each row")
        if not total > 0:
            return False
        target = (torch.arange(count, device=ring.home) + take_units(generator, count)) / count * total
        leaf = torch.zeros(count, dtype=torch.int64, device=ring.home)
        for level in (*reversed(self._sums), self._leaves):
            leaf, target = _descend(level, leaf, target)
        chosen = self._leaves[leaf]
        ratio = chosen / chosen.min() if count else chosen
        weights.copy_((ratio.double() ** -as_float32(beta)).view(weights.shape))
        lane, place = leaf // ring.steps, leaf % ring.steps
        newest = ring.written[lane] - 1
        time = newest - (newest - place) % ring.steps
        rows.copy_((time * ring.lanes + lane).view(rows.shape))
        return True

    def update(self, rows: Any, priorities: Any, alpha: float, windows: WindowIndex | None) -> tuple[int, int, int]:
        """Set priorities, or none if any is refused.

        Returns:
            What is wrong (0 for nothing), at which index, and how many rows were dropped because they are overwritten.
        """
        if not are_priorities(rows, priorities, self._ring.device):
            return NOT_READ, 0, 0
        ring, given = self._ring, priorities.flatten()
        lane, time = rows % ring.lanes, rows // ring.lanes
        held = time >= ring.oldest()[lane]
        wrong = torch.zeros_like(rows)
        if windows is not None:
            wrong[held & ~windows.contain(rows)] = NO_WINDOW
        wrong[(rows < 0) | (time >= ring.written[lane])] = NEVER_WRITTEN
        wrong[~((given >= 0) & (given < torch.inf))] = NOT_A_PRIORITY
        refused = wrong.nonzero().flatten()
        if len(refused):
            return int(wrong[refused[0]]), int(refused[0]), 0
        leaves, values = self._leaf_of(lane, time)[held], _raised(given, alpha)[held]
        # Where a row comes twice, the later priority counts.
        leaves, which = torch.unique(leaves, return_inverse=True)
        last = torch.zeros_like(leaves).scatter_reduce_(0, which, torch.arange(len(which), device=which.device), "amax")
        self._set(leaves, values[last])
        dropped = int((~held).sum())
        self._dropped += dropped
        return 0, 0, dropped


def _sum_groups(groups: Tensor) -> Tensor:
    """The sum of each row of 16, in four running sums: the order in which the C++ version adds, to the last bit."""
    first, second, third, fourth = groups.view(-1, 4, 4).unbind(1)
    a, b, c, d = (first + second + third + fourth).unbind(1)
    return (a + b) + (c + d)


def _descend(level: Tensor, index: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The child in which each target falls, and the target counted from its beginning."""
    groups = level.view(-1, _WIDTH)[index].double()
    fours = groups.view(-1, 4, 4)
    a, b, c, d = fours.unbind(2)
    quarter, target = _pick((a + b) + (c + d), target)
    picked, target = _pick(fours[torch.arange(len(fours), device=fours.device), quarter], target)
    child = quarter * 4 + picked
    # Rounding may put the target past the end: then it is the last child before it that holds anything, or the first
    # after it.
    place, holds = torch.arange(_WIDTH, device=groups.device), groups > 0
    before = torch.where(holds & (place <= child[:, None]), place, -1).amax(1)
    after = torch.where(holds, place, _WIDTH - 1).amin(1)
    empty = before < child
    child, target = torch.where(before < 0, after, before), torch.where(empty, 0.0, target)
    return index * _WIDTH + child, target


def _pick(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first of four whose running sum passes the target, from which is taken what came before."""
    running = torch.cat((torch.zeros_like(sums[:, :1]), sums[:, :3].cumsum(1)), 1)
    passed = (running[:, 1:] <= target[:, None]).sum(1)
    return passed, target - running.gather(1, passed[:, None])[:, 0]
