"""Recurrent mini-batches of a rollout: trajectories padded to one length, with masks and first hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from rlstore.engine import segments
from rlstore.engine.gather import KeptBatches, Made
from rlstore.engine.memory import Allocator, Arena
from rlstore.engine.ring import Ring
from rlstore.errors import NotReadyError
from rlstore.transition import HIDDEN_STATES, HiddenState, RolloutBatch, TransitionLayout, group_blocks


def recurrent_batches(
    ring: Ring,
    layout: TransitionLayout,
    sources: Callable[[int], tuple[Tensor, ...]],
    rows: int,
    count: int,
    num_epochs: int,
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
        empty: What makes the memory.
    """
    width, kept = ring.lanes // count, KeptBatches(keep=num_epochs > 1, device=ring.device)
    for _ in range(num_epochs):
        if ring.size < rows:
            raise NotReadyError("the rollout was begun anew while a generator was still serving the one before")
        blocks = sources(rows)
        kept.follow(ring.stamp())
        for index in range(count):
            make = partial(_tensors, ring, layout, blocks, rows, (index * width, (index + 1) * width), empty)
            yield _batch(kept.get(index, make), layout)


def _tensors(
    ring: Ring,
    layout: TransitionLayout,
    sources: tuple[Tensor, ...],
    rows: int,
    lanes: tuple[int, int],
    empty: Allocator,
) -> Made:
    """Fresh tensors of a recurrent batch, in the order in which :func:`_batch` takes them, and their memory.

    Args:
        ring: Holds ``dones`` and the hidden states.
        layout: What the ring's columns are.
        sources: The blocks of the batch's fields ``[rows, envs, ...]``, observations first.
        rows: The steps that are held.
        lanes: The first environment and the one after the last.
        empty: What makes the memory.
    """
    first, last = lanes
    observations, others = sources[: len(layout.observations.paths)], sources[len(layout.observations.paths) :]
    groups = [(group, layout.groups.get(group, 0)) for group in HIDDEN_STATES]
    states = [ring.first(name, rows) for group, count in groups for name in group_blocks(group, count)]
    trajectories = segments.split(ring.first("dones", rows), first, last)
    # Bytes of one environment's step in the observations with their mask, in the other fields, and in the states.
    padded_step, step, start = (
        sum(block.nbytes for block in blocks) // (rows * ring.lanes) for blocks in (observations, others, states)
    )
    count = trajectories.lanes.shape[0]
    nbytes = rows * (count * (padded_step + 1) + (last - first) * step) + count * start
    arena = Arena(nbytes, len(sources) + len(states) + 1, ring.device, empty)
    padded, masks = segments.pad(observations, trajectories, rows, arena.empty)
    first_states = [segments.first_states(state, trajectories, arena.empty) for state in states]
    return (*padded, masks, *first_states, *segments.cut(others, first, last, arena.empty)), (arena.piece,)


def _batch(tensors: tuple[Tensor, ...], layout: TransitionLayout) -> RolloutBatch:
    """The tensors as a batch."""
    rest = iter(tensors)
    leaves = [next(rest) for _ in layout.observations.paths]
    masks = next(rest)
    actor, critic = (hidden_state([next(rest) for _ in range(layout.groups.get(group, 0))]) for group in HIDDEN_STATES)
    actions, values, advantages, returns, log_prob, *params = rest
    observations = layout.observations.build(leaves, masks.shape)
    fields = (actions, values, advantages, returns, log_prob, tuple(params) or None)
    return RolloutBatch(observations, *fields, hidden_states=(actor, critic), masks=masks)


def hidden_state(states: Sequence[Tensor]) -> HiddenState:
    """A GRU's single state as a tensor, an LSTM's as a tuple, none as None."""
    return None if not states else states[0] if len(states) == 1 else tuple(states)
