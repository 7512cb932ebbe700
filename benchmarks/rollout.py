"""PPO on a vectorized simulator: 24 steps of 512 environments, 5 epochs of 4 mini-batches, flat and recurrent.

A learner writes into the mini-batches, or keeps all of them.
"""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.contenders import Memcpy, Rlox, Rlstore, RslRl, Sb3, TorchRl, same_batches_and_returns
from benchmarks.data import Rollout, Shape, make_rollout
from benchmarks.harness import Phase, Target, Workload

SHAPE = Shape(steps=24, envs=512, obs=48, actions=12, epochs=5, mini_batches=4, distribution=True)
RECURRENT = replace(SHAPE, hidden=256)
PHASES = (
    Phase("add", "add a step", SHAPE.steps),
    Phase("returns", "GAE"),
    Phase("written", "5 x 4 mini-batches, each written into"),
    Phase("held", "5 x 4 mini-batches, all held"),
)
CYCLE_OF_TRAINING = ("add", "returns", "written")


def workload() -> Workload:
    rollout = make_rollout(SHAPE)
    return Workload(
        name="rollout",
        title="Rollout 24 x 512, observations 48, actions 12, Gaussian parameters",
        phases=PHASES,
        cycle=CYCLE_OF_TRAINING,
        contenders={
            "rlstore": partial(Rlstore, "rlstore", rollout),
            "rlstore, reshuffled": partial(Rlstore, "rlstore, reshuffled", rollout, reshuffle=True),
            "rlstore, reuse": partial(Rlstore, "rlstore, reuse", rollout, reuse=True),
            "rsl_rl": partial(RslRl, rollout),
            "SB3": partial(Sb3, rollout),
            "rlox": partial(Rlox, rollout),
            "TorchRL": partial(TorchRl, rollout),
            "memcpy": partial(Memcpy, SHAPE),
        },
        check=partial(same_batches_and_returns, SHAPE.epochs * SHAPE.mini_batches),
        rounds=15,
        targets=tuple(
            Target(phase, (peer,), ratio, ("rlstore",), f"24 x 512, 5 x 4 batches {words}")
            for phase, words in (("written", "written into"), ("held", "held"))
            for peer, ratio in (("SB3", 0.35), ("rsl_rl", 0.12), ("memcpy", 3.0))
        ),
    )


def recurrent() -> Workload:
    rollout = make_rollout(RECURRENT, episode_length=100.0)
    return Workload(
        name="recurrent",
        title="Recurrent rollout 24 x 512, GRU 256 for actor and critic",
        phases=PHASES,
        cycle=CYCLE_OF_TRAINING,
        contenders={
            "rlstore": partial(Rlstore, "rlstore", rollout),
            "rsl_rl": partial(RslRl, rollout),
            "memcpy": partial(Memcpy, RECURRENT, served=padded_bytes(rollout) // RECURRENT.mini_batches),
        },
        check=partial(same_batches_and_returns, RECURRENT.epochs * RECURRENT.mini_batches),
        rounds=12,
        targets=(
            Target("written", ("rsl_rl",), 0.2, row="recurrent 5 x 4 written into"),
            Target("held", ("rsl_rl",), 0.2, row="recurrent 5 x 4 held"),
        ),
    )


def padded_bytes(rollout: Rollout) -> int:
    """Bytes of all trajectories: padded observations, masks and initial hidden states.

    The other fields of a recurrent batch are slices of the stored data and need no copy.
    """
    shape = rollout.shape
    ends = torch.stack([step.dones for step in rollout.steps[:-1]]).sum()
    trajectories = shape.envs + int(ends)
    return trajectories * (shape.steps * (4 * shape.obs + 1) + 2 * 4 * shape.hidden)
