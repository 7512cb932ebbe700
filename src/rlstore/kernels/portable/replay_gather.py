"""The tensors of batches of transitions and sequences, gathered from a ring of episodes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlstore.kernels.portable.episodes import EpisodeRing
from rlstore.kernels.protocol import Part, Request
from rlstore.kernels.ring_memory import KEPT, REPEATED, TERMINATED, TRUNCATED, Block, raw


class _Found(NamedTuple):
    """Where each row is and what followed it, ``[n]`` on the device."""

    lane: Tensor
    time: Tensor
    episode: Tensor
    start: Tensor
    padding: Tensor
    taken: Tensor  # steps of its n-step window
    end: Tensor
    there: Tensor
    at_end: Tensor  # the window ends with the episode: what followed is its final observation


class ReplayGather:
    """The tensors of a batch, each gathered by indexing."""

    def __init__(self, ring: EpisodeRing, requests: tuple[Request, ...], n_step: int, gamma: float) -> None:
        if n_step < 1:
            raise ValueError("n_step is at least 1")
        self._ring, self._requests = ring, requests
        self._n_step = min(n_step, ring.steps)
        powers = torch.tensor([gamma**k for k in range(self._n_step + 1)], dtype=torch.float64)
        self._powers = powers.to(torch.float32).to(ring.device)

    def sample(self, generator: Tensor, count: int) -> tuple[Tensor, ...]:
        """:meth:`gather` of ``count`` rows drawn as the ring draws them."""
        rows = torch.empty(count, dtype=torch.int64, device=self._ring.home)
        self._ring.draw(generator, rows)
        return self.gather(rows, None)

    def sample_by_priority(self, priorities: object, generator: Tensor, beta: float, count: int) -> None:
        """None: drawing by priority and gathering are two calls here."""

    def sample_windows(self, windows: object, priorities: object, generator: Tensor, beta: float, count: int) -> None:
        """None: drawing windows and gathering are two calls here."""

    def gather(self, rows: Tensor, given: tuple[Tensor | None, ...] | None) -> tuple[Tensor, ...]:
        """One tensor ``[*rows.shape, ...]`` for each request: those given or (None) new ones on the blocks' device.

        A row of -1 gives zeros. Rows ``[windows, length]`` are windows of rows that follow one another.
        """
        if rows.dtype != torch.int64:
            raise ValueError("rows are int64")
        if given is not None and len(given) != len(self._requests):
            raise ValueError("gather: an output for each request")
        if rows.dim() == 2:
            after = torch.arange(rows.shape[1], device=rows.device) * self._ring.lanes
            follows = ((rows == rows[:, :1] + after) & (rows[:, :1] >= 0)).long().cumprod(1) > 0
            if bool((~follows & (rows != -1)).any()):
                raise IndexError("a row is not held")
        found = self._find(rows.flatten().to(self._ring.home))
        made = tuple(self._make(found, *request).unflatten(0, rows.shape) for request in self._requests)
        if given is None:
            return made
        for target, result in zip(given, made, strict=True):
            if target is None:
                continue
            if target.dtype != result.dtype or target.numel() != result.numel():
                raise ValueError("gather: an output does not fit")
            target.copy_(result.view(target.shape))
        return tuple(result if target is None else target for target, result in zip(given, made, strict=True))

    def _find(self, rows: Tensor) -> _Found:
        ring = self._ring
        there = rows >= 0
        ring.part(rows[there])
        lane, time = torch.where(there, rows, 0) % ring.lanes, torch.where(there, rows, 0) // ring.lanes
        episode = torch.where(there, ring.episodes_of(lane, time), 0)
        start, stop, end, padding = ring.episodes[episode].unbind(1)
        over = (stop >= 0) & (stop <= ring.written[lane])
        stop = torch.where(over, stop, ring.written[lane])
        taken = (stop - time).clamp(0, self._n_step)
        at_end = over & (time + taken == stop)
        parts = (lane, time, episode, start, padding, taken, end, there.long(), at_end.long())
        lane, time, episode, start, padding, taken, end, there, at_end = torch.stack(parts).to(ring.device).unbind()
        return _Found(lane, time, episode, start, padding, taken, end, there != 0, at_end != 0)

    def _make(self, found: _Found, part: int, index: int, as_float: bool, shape: tuple[int, ...]) -> Tensor:
        ring, there = self._ring, found.there
        if part in (Part.OBSERVATION, Part.NEXT_OBSERVATION):
            observations = self._observation(found, ring.leaves[index], part == Part.NEXT_OBSERVATION)
            return _finish(observations, there, as_float, shape)
        if part == Part.COLUMN:
            column = ring.columns[index]
            values = column.rows[found.lane, found.time % ring.rows].view(column.dtype)
            return _finish(values, there, as_float, shape)
        if part == Part.REWARDS:
            return _finish(self._rewards(found), there, False, shape)
        at_end = found.at_end
        terminated = at_end & (found.end & TERMINATED != 0)
        if part == Part.DISCOUNTS:
            return _finish(torch.where(terminated, 0.0, self._powers[found.taken]), there, False, shape)
        made: dict[int, Tensor] = {
            Part.TERMINATED: terminated,
            Part.TRUNCATED: at_end & (found.end & TRUNCATED != 0),
            Part.IS_FIRST: found.start == found.time,
            Part.IS_HELD: there,
        }
        if part not in made:
            raise ValueError("a request for a part that there is not")
        return _finish(made[part], there, False, shape)

    def _rewards(self, found: _Found) -> Tensor:
        ring = self._ring
        rewards = ring.columns[ring.reward].rows.view(torch.float32)
        total = torch.zeros(len(found.lane), rewards.shape[2], dtype=torch.float32, device=ring.device)
        for i in range(int(found.taken.max()) if len(found.taken) else 0):
            earned = total + self._powers[i] * rewards[found.lane, (found.time + i) % ring.rows]
            total = torch.where(i < found.taken[:, None], earned, total)
        return total

    def _observation(self, found: _Found, leaf: Block, after: bool) -> Tensor:
        """The observation before the row's step, or the one after its n-step window."""
        time = found.time + found.taken if after else found.time
        at = time[:, None] - torch.arange(leaf.stack - 1, -1, -1, device=time.device)  # of each frame
        frames = leaf.rows[found.lane[:, None], at % self._ring.rows]
        if after:
            frames[:, -1] = torch.where(found.at_end[:, None], leaf.finals[found.episode], frames[:, -1])
        if leaf.stack > 1:
            before = at < found.start[:, None]
            frames = torch.where(before[..., None], self._padding(found, leaf, at), frames)
        return leaf.stacks(frames)

    def _padding(self, found: _Found, leaf: Block, at: Tensor) -> Tensor:
        """What was before the first frame of an episode, at each time ``at``, ``[n, stack, elements]``."""
        first = leaf.rows[found.lane, found.start % self._ring.rows].unsqueeze(1)
        padding = found.padding[:, None, None]
        frames = torch.where(padding == REPEATED, first, 0)
        if leaf.starts is None:
            return frames
        # The first stack was [starts..., first frame].
        place = (leaf.stack - 1 + at - found.start[:, None]).clamp(0, leaf.stack - 2)
        return torch.where(padding == KEPT, leaf.starts[found.episode[:, None], place], frames)


def _finish(values: Tensor, there: Tensor, as_float: bool, shape: tuple[int, ...]) -> Tensor:
    """Zeros where there is no row, as float32 if asked for, ``[n, *shape]``."""
    count = len(there)
    if math.prod(values.shape[1:]) != math.prod(shape):
        raise ValueError("a request's shape is not that of its rows")
    made = values.to(torch.float32) if as_float else values
    made = made.reshape(count, *shape)
    if not bool(there.all()):
        mask = there.view(-1, *[1] * len(shape))
        made = torch.where(mask, raw(made), 0).view(made.dtype)
    return made
