"""Trajectories: a rollout split where episodes end, padded to one length, with masks and first hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlstore.engine.memory.tensors import GroupAllocator, allocate, allocate_empty, allocate_group
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


def split(dones: Tensor, first: int, last: int, room: int | None = None, resets: Tensor | None = None) -> Trajectories:
    """The trajectories of the lanes ``[first, last)``; with ``room`` for so many, whether or not there are.

    Args:
        dones: One-byte flags ``[steps, lanes]`` or ``[steps, lanes, 1]``: the episode ended with this step. The last
            step ends a trajectory in any case.
        first: The first lane.
        last: The lane after the last.
        room: How many the result is to hold; None for as many as there are.
        resets: Flags like ``dones`` of steps that are part of no trajectory; ``dones`` has to be :func:`ends_around`
            them. None for none.

    Raises:
        InvalidInputError: If there is no room for all of them.
    """
    device = dones.device
    found = allocate((3, kernel("count_segments", device.type)(dones, first, last)), torch.int64, device)
    kernel("split_segments", device.type)(dones, first, last, *found)
    if resets is not None:
        found = found[:, resets.view(dones.shape[:2])[found[1], found[0]] == 0]
    count = found.shape[1]
    if room is not None and count > room:
        raise InvalidInputError(
            f"environments {first} to {last - 1} fall into {count} trajectories; there is room for {room}"
        )
    if room is not None:
        found = torch.nn.functional.pad(found, (0, room - count))
    lanes, starts, lengths = found
    return Trajectories(lanes.contiguous(), starts.contiguous(), lengths.contiguous(), count)


def ends_around(dones: Tensor, resets: Tensor) -> Tensor:
    """Flags that make every reset step a trajectory by itself: it is an end, and so is the step before it."""
    ends = dones | resets
    ends[:-1] |= resets[1:]
    return ends


def first_states(states: Tensor, trajectories: Trajectories, out: Tensor) -> None:
    """Write the hidden state at each trajectory's start.

    Args:
        states: ``[steps, layers, lanes, hidden]``.
        trajectories: Where they start.
        out: ``[layers, trajectories, hidden]``.
    """
    kernel("first_states", states.device.type)(states, trajectories.lanes, trajectories.starts, out)
    if trajectories.held is not None and trajectories.held < out.shape[1]:
        out[:, trajectories.held :] = 0


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
        resets: As for :func:`split`.
    """

    def __init__(self, dones: Tensor, count: int, room: int | None, resets: Tensor | None = None) -> None:
        self._steps, self._width = dones.shape[0], dones.shape[1] // count
        firsts = range(0, count * self._width, self._width)
        self._found = [(first, split(dones, first, first + self._width, room, resets)) for first in firsts]

    def batches(
        self,
        observations: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
        empty: GroupAllocator = allocate_group,
    ) -> Iterator[TrajectoryBatch]:
        """The mini-batches of an epoch, made when they are needed.

        Args:
            observations: ``[steps, lanes, ...]`` each, to be padded.
            states: ``[steps, layers, lanes, hidden]`` each; the first one of each trajectory is taken.
            others: ``[steps, lanes, ...]`` each, to be copied.
            empty: Allocates the tensors of a mini-batch.
        """
        place, behind = len(observations), len(observations) + 1 + len(states)
        device = observations[0].device
        pad_segments, copy_lanes = kernel("pad_segments", device.type), kernel("copy_lanes", device.type)
        for first, found in self._found:
            forms = batch_forms(self._steps, found.lanes.shape[0], self._width, observations, states, others)
            tensors = empty(*forms, device)
            made = TrajectoryBatch(tensors[:place], tensors[place], tensors[place + 1 : behind], tensors[behind:])
            pad_segments(observations, found.lanes, found.starts, found.lengths, made.observations, made.masks)
            for state, out in zip(states, made.states, strict=True):
                first_states(state, found, out)
            copy_lanes(others, first, first + self._width, made.others)
            yield made


def batch_forms(
    steps: int,
    count: int,
    width: int,
    observations: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """The shapes and dtypes of the tensors of a mini-batch of ``count`` trajectories of ``width`` lanes."""
    padded = [((steps, count, *source.shape[2:]), source.dtype) for source in observations]
    first = [((source.shape[1], count, source.shape[3]), source.dtype) for source in states]
    copied = [((steps, width, *source.shape[2:]), source.dtype) for source in others]
    shapes, dtypes = zip(*padded, ((steps, count), torch.bool), *first, *copied, strict=True)
    return shapes, dtypes


class TabulatedTrajectories:
    """:class:`SplitTrajectories` for CUDA: all trajectories are found in two launches.

    Args:
        dones: As for :func:`split`.
        count: Mini-batches.
        room: Trajectories in each; None for as many as there are, which waits for the device.
        resets: As for :func:`split`.
    """

    def __init__(self, dones: Tensor, count: int, room: int | None, resets: Tensor | None = None) -> None:
        self._steps, self._width = dones.shape[0], dones.shape[1] // count
        self._layouts: dict[int, Pieces] = {}  # of mini-batches, by their number of trajectories
        self._table = allocate_empty((3, count * self._width * self._steps), torch.int32, dones.device)
        self._totals = allocate_empty((count,), torch.int32, dones.device)
        kernel("tabulate_trajectories", dones.device.type)(dones, self._width, self._table, self._totals)
        if resets is not None:
            self._leave_out(resets.view(dones.shape[:2]))
        self._counts = self._totals.tolist() if room is None else [room] * count

    def _leave_out(self, resets: Tensor) -> None:
        """Remove the trajectories that begin with a reset step from the table; the host does not wait."""
        table = self._table.view(3, len(self._totals), -1)
        room = table.shape[2]
        there = torch.arange(room, device=table.device) < self._totals[:, None]
        # What the table holds behind the trajectories means nothing.
        lane, start = torch.where(there, table[:2], 0).long()
        kept = there & (resets[start, lane] == 0)
        self._totals = kept.sum(1, dtype=torch.int32)
        places = torch.where(kept, kept.cumsum(1) - 1, room)  # one behind the end for what is left out
        moved = allocate_empty((3, len(self._totals), room + 1), torch.int32, table.device)
        moved.scatter_(2, places.expand(3, -1, -1), table)
        self._table = moved[:, :, :room].reshape(3, -1)

    def batches(
        self,
        observations: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
        empty: GroupAllocator = allocate_group,
    ) -> Iterator[TrajectoryBatch]:
        """The mini-batches of an epoch, one launch each; ``empty`` is not used: the memory is torch's own."""
        fill, place = kernel("fill_trajectories", self._table.device.type), len(observations)
        behind = place + 1 + len(states)
        for index, count in enumerate(self._counts):
            if count not in self._layouts:
                forms = batch_forms(self._steps, count, self._width, observations, states, others)
                self._layouts[count] = pieces_for(*forms, self._table.device)
            tensors = self._layouts[count].tensors()
            targets, mask = (*tensors[:place], *tensors[place + 1 :]), tensors[place]
            fill(observations, states, others, self._table, self._totals, index, self._width, targets, mask)
            yield TrajectoryBatch(tensors[:place], mask, tensors[place + 1 : behind], tensors[behind:])


def find_trajectories(
    dones: Tensor, count: int, room: int | None, resets: Tensor | None = None
) -> SplitTrajectories | TabulatedTrajectories:
    """The trajectories of ``count`` mini-batches, found in the way of the device; see :func:`split` for ``resets``."""
    ends = dones if resets is None else ends_around(dones, resets)
    return (TabulatedTrajectories if dones.is_cuda else SplitTrajectories)(ends, count, room, resets)
