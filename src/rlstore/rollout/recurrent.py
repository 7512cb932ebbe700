"""Recurrent mini-batches of a rollout: trajectories padded to one length, with masks and first hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from rlstore.engine.batches import trajectories as segments
from rlstore.engine.checks import check_positive
from rlstore.engine.memory.tensors import Allocator, Arena
from rlstore.engine.rows.ring import Ring
from rlstore.engine.rows.schema import Structure
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.rollout.transition import HIDDEN_STATES, HiddenState, RolloutBatch, TransitionLayout, group_blocks


def recurrent_batches(
    ring: Ring,
    layout: TransitionLayout,
    sources: Callable[[int], tuple[Tensor, ...]],
    rows: int,
    count: int,
    num_epochs: int,
    room: int | None,
    empty: Allocator,
) -> Iterator[RolloutBatch]:
    """The recurrent mini-batches of some epochs, as the sources hold them when they are served.

    Args:
        ring: Holds ``dones`` and the hidden states.
        layout: What the ring's columns are.
        sources: Gives the blocks of the batch's fields ``[rows, envs, ...]``, observations first.
        rows: The steps that are held.
        count: Mini-batches in each epoch, of as many environments each.
        num_epochs: Epochs.
        room: Trajectories in each mini-batch; None for as many as there are.
        empty: What makes the memory.
    """
    given = {} if room is None else {"max_trajectories": room}
    check_positive("recurrent_mini_batch_generator()", num_mini_batches=count, num_epochs=num_epochs, **given)
    if count > ring.lanes:
        raise InvalidInputError(f"{count} mini-batches were asked for of {ring.lanes} environments")
    for _ in range(num_epochs):
        if ring.size < rows:
            raise NotReadyError("the rollout was begun anew while a generator was still serving the one before")
        epoch = _Epoch(ring, layout, sources(rows), rows, count, room, empty)
        states = [layout.groups.get(group, 0) for group in HIDDEN_STATES]
        for index in range(count):
            yield _batch(epoch.make(index), layout.observations, *states)


class _Epoch:
    """Makes the tensors of mini-batches, each from its own environments, in the order in which :func:`_batch` takes."""

    def __init__(
        self,
        ring: Ring,
        layout: TransitionLayout,
        blocks: tuple[Tensor, ...],
        rows: int,
        count: int,
        room: int | None,
        empty: Allocator,
    ) -> None:
        leaves = len(layout.observations.paths)
        self._observations, self._others = blocks[:leaves], blocks[leaves:]
        self._width, self._count, self._room, self._empty = ring.lanes // count, count, room, empty
        self._dones = ring.first("dones", rows)
        groups = [(group, layout.groups.get(group, 0)) for group in HIDDEN_STATES]
        self._states = tuple([ring.first(name, rows) for own in groups for name in group_blocks(*own)])
        self._table: segments.TrajectoryTable | None = None

    def make(self, index: int) -> tuple[Tensor, ...]:
        """The tensors of mini-batch ``index``."""
        if not self._dones.is_cuda:
            return self._make_here(index * self._width, (index + 1) * self._width)
        if self._table is None:
            fields = (self._observations, self._states, self._others)
            self._table = segments.TrajectoryTable(self._dones, self._width, self._count, self._room, *fields)
        return self._table.make(index)

    def _make_here(self, first: int, last: int) -> tuple[Tensor, ...]:
        rows, lanes = self._dones.shape[:2]
        trajectories = segments.split(self._dones, first, last, self._room)
        # Bytes of one environment's step in the observations with their mask, in the other fields, and in the states.
        padded_step, step, start = (
            sum(block.nbytes for block in blocks) // (rows * lanes)
            for blocks in (self._observations, self._others, self._states)
        )
        count = trajectories.lanes.shape[0]
        nbytes = rows * (count * (padded_step + 1) + (last - first) * step) + count * start
        number = len(self._observations) + len(self._others) + len(self._states) + 1
        arena = Arena(nbytes, number, self._dones.device, self._empty)
        padded, masks = segments.pad(self._observations, trajectories, rows, arena.empty)
        first_states = [segments.first_states(state, trajectories, arena.empty) for state in self._states]
        others = segments.cut(self._others, first, last, arena.empty)
        return (*padded, masks, *first_states, *others)


def _batch(tensors: tuple[Tensor, ...], structure: Structure, actor: int, critic: int) -> RolloutBatch:
    """The tensors as a batch: observations, masks, the states of actor and critic, and the other fields."""
    leaves = len(structure.paths)
    first = leaves + 1
    second, others = first + actor, first + actor + critic
    masks = tensors[leaves]
    states = hidden_state(tensors[first:second]), hidden_state(tensors[second:others])
    actions, values, advantages, returns, log_prob = tensors[others : others + 5]
    params = tensors[others + 5 :] or None
    observations = structure.build(tensors[:leaves], masks.shape)
    return RolloutBatch(observations, actions, values, advantages, returns, log_prob, params, states, masks)


def hidden_state(states: Sequence[Tensor]) -> HiddenState:
    """A GRU's single state as a tensor, an LSTM's as a tuple, none as None."""
    return None if not states else states[0] if len(states) == 1 else tuple(states)
