"""Trajectories: a rollout split where episodes end, padded to one length, with masks and first hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlstore.engine.memory.tensors import Allocator, Arena, allocate, allocate_empty
from rlstore.errors import InvalidInputError
from rlstore.kernels import kernel
from rlstore.kernels.pieces import Pieces, pieces_for


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


class SplitTrajectories:
    """The trajectories of ``count`` mini-batches of ``lanes // count`` lanes each, in order: on the CPU.

    They are found once, and any number of epochs is made of them.

    Args:
        dones: As for :func:`split`.
        count: Mini-batches.
        room: Trajectories in each; None for as many as there are.
    """

    def __init__(self, dones: Tensor, count: int, room: int | None) -> None:
        self._steps, self._width = dones.shape[0], dones.shape[1] // count
        firsts = range(0, count * self._width, self._width)
        self._found = [(first, split(dones, first, first + self._width, room)) for first in firsts]

    def batches(
        self,
        observations: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
        empty: Allocator = allocate_empty,
    ) -> Iterator[TrajectoryBatch]:
        """The mini-batches of an epoch, made when they are needed, each in one piece of memory.

        Args:
            observations: ``[steps, lanes, ...]`` each, to be padded.
            states: ``[steps, layers, lanes, hidden]`` each; the first one of each trajectory is taken.
            others: ``[steps, lanes, ...]`` each, to be copied.
            empty: Allocates that memory.
        """
        rows, fields = self._steps, (observations, others, states)
        # Bytes of one lane's step in the observations, in the other fields, and in the states.
        lane_steps = rows * observations[0].shape[1]
        padded_step, step, start = (sum(block.nbytes for block in blocks) // lane_steps for blocks in fields)
        for first, found in self._found:
            count, last = found.lanes.shape[0], first + self._width
            nbytes = rows * (count * (padded_step + 1) + self._width * step) + count * start  # with a mask
            arena = Arena(nbytes, sum(map(len, fields)) + 1, found.lanes.device, empty)
            padded, masks = pad(observations, found, rows, arena.empty)
            initial = tuple([first_states(state, found, arena.empty) for state in states])
            yield TrajectoryBatch(padded, masks, initial, cut(others, first, last, arena.empty))


class TabulatedTrajectories:
    """:class:`SplitTrajectories` for CUDA: all trajectories are found in two launches.

    Args:
        dones: As for :func:`split`.
        count: Mini-batches.
        room: Trajectories in each; None for as many as there are, which waits for the device.
    """

    def __init__(self, dones: Tensor, count: int, room: int | None) -> None:
        self._steps, self._width = dones.shape[0], dones.shape[1] // count
        self._layouts: dict[int, Pieces] = {}  # of mini-batches, by their number of trajectories
        self._table = allocate_empty((3, count * self._width * self._steps), torch.int32, dones.device)
        self._totals = allocate_empty((count,), torch.int32, dones.device)
        kernel("tabulate_trajectories", dones.device.type)(dones, self._width, self._table, self._totals)
        self._counts = self._totals.tolist() if room is None else [room] * count

    def batches(
        self,
        observations: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
        empty: Allocator = allocate_empty,
    ) -> Iterator[TrajectoryBatch]:
        """The mini-batches of an epoch, one launch each; ``empty`` is not used: the memory is torch's own."""
        fill, place = kernel("fill_trajectories", self._table.device.type), len(observations)
        behind = place + 1 + len(states)
        for index, count in enumerate(self._counts):
            if count not in self._layouts:
                self._layouts[count] = self._layout(count, observations, states, others)
            tensors = self._layouts[count].tensors()
            targets, mask = (*tensors[:place], *tensors[place + 1 :]), tensors[place]
            fill(observations, states, others, self._table, self._totals, index, self._width, targets, mask)
            yield TrajectoryBatch(tensors[:place], mask, tensors[place + 1 : behind], tensors[behind:])

    def _layout(
        self, count: int, observations: tuple[Tensor, ...], states: tuple[Tensor, ...], others: tuple[Tensor, ...]
    ) -> Pieces:
        """How the tensors of a mini-batch of ``count`` trajectories are arranged in memory."""
        steps = self._steps
        padded = [((steps, count, *source.shape[2:]), source.dtype) for source in observations]
        first = [((source.shape[1], count, source.shape[3]), source.dtype) for source in states]
        copied = [((steps, self._width, *source.shape[2:]), source.dtype) for source in others]
        shapes, dtypes = zip(*padded, ((steps, count), torch.bool), *first, *copied, strict=True)
        return pieces_for(shapes, dtypes, self._table.device)


def find_trajectories(dones: Tensor, count: int, room: int | None) -> SplitTrajectories | TabulatedTrajectories:
    """The trajectories of ``count`` mini-batches, found in the way of the device."""
    return (TabulatedTrajectories if dones.is_cuda else SplitTrajectories)(dones, count, room)
