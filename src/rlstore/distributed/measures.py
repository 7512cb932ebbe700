"""What ``stats()`` of a DistributedStorage tells of complete rollouts, of slots and of peers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlstore.distributed.held_steps import SlotSteps, fragments_of
from rlstore.distributed.memory import RolloutMemory
from rlstore.engine.measures import Measures, Most, episodes, newest_steps, nonfinite, spread
from rlstore.engine.processes.handoff import Handoff
from rlstore.engine.processes.slots import State


def measured_rollouts(memory: RolloutMemory, steps: SlotSteps) -> Measures:
    """The episodes in complete rollouts, what is not finite, and how old the policies are that played them."""
    slots, columns = steps.columns(("terminated", "truncated", "reward", "episode_return"))
    terminated, truncated, rewards, reported = columns
    ended = (terminated | truncated)[:, 1:]
    lags = memory.handoff.published - memory.versions[slots, 0]
    floats = {name: size for name in memory.fields.structure.names if (size := _numbers(memory.blocks[name]))}
    seen = steps.columns(tuple(floats), newest_steps(memory.count, memory.steps, sum(floats.values())))[1]
    return {
        **episodes(**fragments_of(terminated, truncated, rewards)._asdict()),
        **spread("reported_return", reported[:, 1:].flatten(), ended.flatten()),
        **spread("policy_lag", lags, torch.ones_like(lags, dtype=torch.bool)),
        **nonfinite(rewards[:, 1:], [leaf[:, :-1] for leaf in seen], memory.steps),
        "policy_version": Most(memory.handoff.published),
    }


def _numbers(block: Tensor) -> int:
    """The floating-point numbers in a row of a block."""
    return math.prod(block.shape[2:]) if block.is_floating_point() else 0


def measured_handoff(handoff: Handoff) -> Measures:
    """Who takes part, what became of slots, and how often and how long either side has waited."""
    peers, counts, slots = handoff.peers, handoff.counts(), handoff.slots.counts()
    measures: Measures = {f"slots_{state.name.lower()}": slots[state] for state in State}
    for role in ("actor", "learner"):
        measures.update({f"{role}s": len(peers.here(role)), f"lost_{role}s": peers.lost_count(role)})
    for side, waits in (("insert", handoff.actor_waits), ("sample", handoff.learner_waits)):
        measures.update(waits.measure(side))
    return {
        **measures,
        "abandoned_rollouts": counts["abandoned"],
        "reclaimed_rollouts": counts["reclaimed"],
    }
