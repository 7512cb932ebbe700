"""Trajectories: a rollout split where episodes end, padded to one length, with masks and first hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlstore.engine.memory.tensors import Allocator, Arena, Pieces, allocate, allocate_empty, pieces_for
from rlstore.errors import InvalidInputError
from rlstore.kernels import kernel


@dataclass(frozen=True)
class Trajectories:
    """Stretches of lanes between episode ends, lane by lane; each tensor is int64 ``[trajectories]``.

    Where only the first ``held`` are trajectories, the others stand for nothing: they have no steps.
    """

    lanes: Tensor
    starts: Tensor
    lengths: Tensor
    held: int | None = None


def split(dones: Tensor, first: int, last: int, room: int | None = None) -> Trajectories:
    """The trajectories of the lanes ``[first, last)``; with ``room`` for so many, whether or not there are.

    Args:
        dones: One-byte flags ``[steps, lanes]`` or ``[steps, lanes, 1]``: the episode ended with this step. The last
            step ends a trajectory in any case.
        first: The first lane.
        last: The lane after the last.
        room: How many the result is to hold; None for as many as there are.

    Raises:
        InvalidInputError: If there is no room for all of them.
    """
    device = dones.device
    count = kernel("count_segments", device.type)(dones, first, last)
    if room is not None and count > room:
        raise InvalidInputError(
            f"environments {first} to {last - 1} fall into {count} trajectories; there is room for {room}"
        )
    lanes, starts, lengths = (allocate((count if room is None else room,), torch.int64, device) for _ in range(3))
    kernel("split_segments", device.type)(dones, first, last, lanes[:count], starts[:count], lengths[:count])
    return Trajectories(lanes, starts, lengths, count)


def pad(
    sources: tuple[Tensor, ...], trajectories: Trajectories, steps: int, empty: Allocator = allocate_empty
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Each source ``[time, lanes, *shape]`` as ``[steps, trajectories, *shape]``, zeros after a trajectory's end.

    Returns:
        The padded tensors, dtypes kept, and the mask, bool ``[steps, trajectories]``.
    """
    device, count = trajectories.lanes.device, trajectories.lanes.shape[0]
    outs = tuple(empty((steps, count, *source.shape[2:]), source.dtype, device) for source in sources)
    mask = empty((steps, count), torch.bool, device)
    kernel("pad_segments", device.type)(
        sources, trajectories.lanes, trajectories.starts, trajectories.lengths, outs, mask
    )
    return outs, mask


def cut(sources: tuple[Tensor, ...], first: int, last: int, empty: Allocator = allocate_empty) -> tuple[Tensor, ...]:
    """The lanes ``[first, last)`` of each source ``[steps, lanes, *shape]``, as copies."""
    outs = tuple(
        empty((source.shape[0], last - first, *source.shape[2:]), source.dtype, source.device) for source in sources
    )
    kernel("copy_lanes", sources[0].device.type)(sources, first, last, outs)
    return outs


def first_states(states: Tensor, trajectories: Trajectories, empty: Allocator = allocate_empty) -> Tensor:
    """The hidden state at each trajectory's start.

    Args:
        states: ``[steps, layers, lanes, hidden]``.
        trajectories: Where they start.
        empty: What makes the result.

    Returns:
        ``[layers, trajectories, hidden]``, contiguous.
    """
    shape = (states.shape[1], trajectories.lanes.shape[0], states.shape[3])
    out = empty(shape, states.dtype, states.device)
    kernel("first_states", states.device.type)(states, trajectories.lanes, trajectories.starts, out)
    if trajectories.held is not None:
        out[:, trajectories.held :] = 0
    return out


class TrajectoryBatch(NamedTuple):
    """The tensors of a mini-batch of whole trajectories.

    Attributes:
        observations: ``[steps, trajectories, ...]`` each, zeros after a trajectory's end.
        masks: True where they hold data, bool ``[steps, trajectories]``.
        states: The first state of each trajectory, ``[layers, trajectories, hidden]`` each.
        others: ``[steps, lanes, ...]`` each.
    """

    observations: tuple[Tensor, ...]
    masks: Tensor
    states: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


def trajectory_batches(
    dones: Tensor,
    count: int,
    room: int | None,
    observations: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    empty: Allocator = allocate_empty,
) -> Iterator[TrajectoryBatch]:
    """``count`` mini-batches of ``lanes // count`` lanes each, in order, made when they are needed.

    Args:
        dones: As for :func:`split`.
        count: Mini-batches.
        room: Trajectories in each mini-batch; None for as many as there are.
        observations: ``[steps, lanes, ...]`` each, to be padded.
        states: ``[steps, layers, lanes, hidden]`` each; the first one of each trajectory is taken.
        others: ``[steps, lanes, ...]`` each, to be copied.
        empty: Allocates the memory of a mini-batch, on the CPU.
    """
    width = dones.shape[1] // count
    if dones.is_cuda:
        table = TrajectoryTable(dones, width, count, room, observations, states, others)
        yield from map(table.make, range(count))
        return
    for first in range(0, count * width, width):
        yield _lane_batch(dones, first, first + width, room, observations, states, others, empty)


def _lane_batch(
    dones: Tensor,
    first: int,
    last: int,
    room: int | None,
    observations: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    empty: Allocator,
) -> TrajectoryBatch:
    """The mini-batch of the lanes ``[first, last)``, all in one piece of memory."""
    rows, lanes = dones.shape[:2]
    trajectories = split(dones, first, last, room)
    # Bytes of one lane's step in the observations with their mask, in the other fields, and in the states.
    padded_step, step, start = (
        sum(block.nbytes for block in blocks) // (rows * lanes) for blocks in (observations, others, states)
    )
    count = trajectories.lanes.shape[0]
    nbytes = rows * (count * (padded_step + 1) + (last - first) * step) + count * start
    arena = Arena(nbytes, len(observations) + len(others) + len(states) + 1, dones.device, empty)
    padded, masks = pad(observations, trajectories, rows, arena.empty)
    initial = tuple([first_states(state, trajectories, arena.empty) for state in states])
    return TrajectoryBatch(padded, masks, initial, cut(others, first, last, arena.empty))


class TrajectoryTable:
    """The trajectories of all mini-batches, found in two launches: for CUDA.

    Args:
        dones: As for :func:`split`.
        width: Lanes of each mini-batch, those from ``b * width`` on for mini-batch b.
        count: Mini-batches.
        most: Room for trajectories in each; None makes as much as each one needs, and waits for the device to tell.
        observations: ``[steps, lanes, ...]`` each, to be padded.
        states: ``[steps, layers, lanes, hidden]`` each; the first one of each trajectory is taken.
        others: ``[steps, lanes, ...]`` each, to be copied.
    """

    def __init__(
        self,
        dones: Tensor,
        width: int,
        count: int,
        most: int | None,
        observations: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
    ) -> None:
        device = dones.device
        self._observations, self._states, self._others = observations, states, others
        self._layouts: dict[int, Pieces] = {}  # of mini-batches, by their trajectories
        self._table = allocate_empty((3, count * width * dones.shape[0]), torch.int32, device)
        self._totals = allocate_empty((count,), torch.int32, device)
        self._width, self._steps = width, dones.shape[0]
        kernel("tabulate_trajectories", device.type)(dones, width, self._table, self._totals)
        self._counts = self._totals.tolist() if most is None else [most] * count

    def make(self, index: int) -> TrajectoryBatch:
        """A mini-batch."""
        count = self._counts[index]
        if count not in self._layouts:
            self._layouts[count] = self._layout(count)
        (pieces,) = self._layouts[count].empty(self._table.device)
        tensors = self._layouts[count].cut(pieces)
        place = len(self._observations)
        targets, mask = (*tensors[:place], *tensors[place + 1 :]), tensors[place]
        fields = (self._observations, self._states, self._others, self._table, self._totals)
        kernel("fill_trajectories", mask.device.type)(*fields, index, self._width, targets, mask)
        states = place + 1 + len(self._states)
        return TrajectoryBatch(tensors[:place], mask, tensors[place + 1 : states], tensors[states:])

    def _layout(self, count: int) -> Pieces:
        """How the tensors of a mini-batch of ``count`` trajectories are arranged in memory."""
        steps, observations, states, others = self._steps, self._observations, self._states, self._others
        padded = [((steps, count, *source.shape[2:]), source.dtype) for source in observations]
        first = [((source.shape[1], count, source.shape[3]), source.dtype) for source in states]
        copied = [((steps, self._width, *source.shape[2:]), source.dtype) for source in others]
        shapes, dtypes = zip(*padded, ((steps, count), torch.bool), *first, *copied, strict=True)
        return pieces_for(shapes, dtypes)
