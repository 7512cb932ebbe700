"""Recurrent mini-batches of a rollout: trajectories padded to one length, with masks and first hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlstore.engine import segments
from rlstore.engine.memory import Allocator
from rlstore.engine.ring import Ring
from rlstore.transition import HIDDEN_STATES, HiddenState, RolloutBatch, TransitionLayout, group_blocks


def recurrent_tensors(
    ring: Ring,
    layout: TransitionLayout,
    sources: tuple[Tensor, ...],
    rows: int,
    lanes: tuple[int, int],
    empty: Allocator,
) -> tuple[Tensor, ...]:
    """Fresh tensors of a recurrent batch, in the order in which :func:`recurrent_batch` takes them.

    Args:
        ring: Holds ``dones`` and the hidden states.
        layout: What the ring's columns are.
        sources: The blocks of the batch's fields ``[rows, envs, ...]``, observations first.
        rows: The steps that are held.
        lanes: The first environment and the one after the last.
        empty: What makes the tensors.
    """
    first, last = lanes
    leaves = len(layout.observations.paths)
    trajectories = segments.split(ring.first("dones", rows), first, last)
    padded, masks = segments.pad(sources[:leaves], trajectories, rows, empty)
    others = segments.cut(sources[leaves:], first, last, empty)
    states = [
        segments.first_states(ring.first(name, rows), trajectories, empty)
        for group in HIDDEN_STATES
        for name in group_blocks(group, layout.groups.get(group, 0))
    ]
    return (*padded, masks, *states, *others)


def recurrent_batch(tensors: tuple[Tensor, ...], layout: TransitionLayout) -> RolloutBatch:
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
