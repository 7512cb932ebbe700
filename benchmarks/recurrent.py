"""Recurrent PPO: the rollout of rollout.py with the hidden states of two GRUs, served as padded trajectories."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.contenders import (
    CYCLE_OF_TRAINING,
    Memcpy,
    Rlstore,
    RslRl,
    rollout_phases,
    same_batches_and_returns,
)
from benchmarks.data import Rollout, make_rollout
from benchmarks.harness import Target, Workload
from benchmarks.rollout import SHAPE

RECURRENT = replace(SHAPE, hidden=256)


def workload() -> Workload:
    rollout = make_rollout(RECURRENT, episode_length=100.0)
    return Workload(
        name="recurrent",
        title="Recurrent rollout 24 x 512, GRU 256 for actor and critic",
        phases=rollout_phases("24 adds with hidden states", "5 x 4 padded mini-batches"),
        cycle=CYCLE_OF_TRAINING,
        contenders={
            "rlstore": partial(Rlstore, rollout),
            "rlstore, reuse": partial(Rlstore, rollout, reuse=True),
            "rsl_rl": partial(RslRl, rollout),
            "memcpy": partial(Memcpy, RECURRENT, served=padded_bytes(rollout)),
        },
        check=partial(same_batches_and_returns, RECURRENT.epochs * RECURRENT.mini_batches),
        rounds=50,
        targets=(Target("add", ("rsl_rl",), 0.6), Target("batches", ("rsl_rl",), 0.08)),
    )


def padded_bytes(rollout: Rollout) -> int:
    """Bytes of all trajectories, written once: padded observations, masks and initial hidden states.

    The other fields of a recurrent batch are slices of the stored data and need no copy.
    """
    shape = rollout.shape
    ends = torch.stack([step.dones for step in rollout.steps[:-1]]).sum()
    trajectories = shape.envs + int(ends)
    return trajectories * (shape.steps * (4 * shape.obs + 1) + 2 * 4 * shape.hidden)
