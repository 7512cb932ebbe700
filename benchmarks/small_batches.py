"""PPO as Stable-Baselines3 runs it by default: 2048 steps of 8 environments, 10 epochs of mini-batches of 64."""

from functools import partial

from benchmarks.contenders import (
    CYCLE_OF_TRAINING,
    Memcpy,
    Rllte,
    Rlstore,
    Sb3,
    TorchRl,
    rollout_phases,
    same_batches_and_returns,
)
from benchmarks.data import Shape, make_rollout
from benchmarks.harness import CYCLE, Target, Workload

SHAPE = Shape(steps=2048, envs=8, obs=17, actions=6, epochs=10, mini_batches=256)


def workload() -> Workload:
    rollout = make_rollout(SHAPE)
    return Workload(
        name="small_batches",
        title="Rollout 2048 x 8, observations 17, actions 6, mini-batches of 64",
        phases=rollout_phases("2048 adds", "10 x 256 mini-batches"),
        cycle=CYCLE_OF_TRAINING,
        contenders={
            "rlstore": partial(Rlstore, rollout),
            "rlstore, reshuffled": partial(Rlstore, rollout, reshuffle=True),
            "rlstore, reuse": partial(Rlstore, rollout, reuse=True),
            "SB3": partial(Sb3, rollout),
            "rllte": partial(Rllte, rollout),
            "TorchRL": partial(TorchRl, rollout),
            "memcpy": partial(Memcpy, SHAPE),
        },
        check=partial(same_batches_and_returns, SHAPE.epochs * SHAPE.mini_batches),
        rounds=10,
        targets=(Target(CYCLE, ("SB3",), 0.18),),
    )
