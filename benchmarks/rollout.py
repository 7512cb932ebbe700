"""PPO on a vectorized simulator: 24 steps of 512 environments, 5 epochs of 4 mini-batches."""

from functools import partial

from benchmarks.contenders import (
    CYCLE_OF_TRAINING,
    Memcpy,
    Rlstore,
    RslRl,
    Sb3,
    TorchRl,
    rollout_phases,
    same_batches_and_returns,
)
from benchmarks.data import Shape, make_rollout
from benchmarks.harness import CYCLE, Target, Workload

SHAPE = Shape(steps=24, envs=512, obs=48, actions=12, epochs=5, mini_batches=4, distribution=True)


def workload() -> Workload:
    rollout = make_rollout(SHAPE)
    return Workload(
        name="rollout",
        title="Rollout 24 x 512, observations 48, actions 12, Gaussian parameters",
        phases=rollout_phases("24 adds", "5 x 4 mini-batches"),
        cycle=CYCLE_OF_TRAINING,
        contenders={
            "rlstore": partial(Rlstore, rollout),
            "rlstore, reshuffled": partial(Rlstore, rollout, reshuffle=True),
            "rlstore, reuse": partial(Rlstore, rollout, reuse=True),
            "rsl_rl": partial(RslRl, rollout),
            "SB3": partial(Sb3, rollout),
            "TorchRL": partial(TorchRl, rollout),
            "memcpy": partial(Memcpy, SHAPE),
        },
        check=partial(same_batches_and_returns, SHAPE.epochs * SHAPE.mini_batches),
        rounds=50,
        targets=(
            Target("returns", ("rsl_rl",), 0.02),
            Target("returns again", ("rsl_rl",), 0.02),
            Target(CYCLE, ("rsl_rl",), 0.15),
            Target(CYCLE, ("SB3",), 0.33),
        ),
    )
