"""PPO as Stable-Baselines3 runs it by default: 2048 steps of 8 environments, 10 epochs of mini-batches of 64."""

from functools import partial

from benchmarks.contenders import Memcpy, Rlox, Rlstore, Sb3, TorchRl, same_batches_and_returns
from benchmarks.data import Shape, make_rollout
from benchmarks.harness import CYCLE, Phase, Target, Workload

SHAPE = Shape(steps=2048, envs=8, obs=17, actions=6, epochs=10, mini_batches=256)
NUMPY = "rlstore, from numpy"


def workload() -> Workload:
    rollout = make_rollout(SHAPE)
    return Workload(
        name="ppo",
        title="PPO 2048 x 8, observations 17, actions 6, ten epochs of mini-batches of 64",
        phases=(
            Phase("add", "add a step of 8 environments, a Transition made each", SHAPE.steps),
            Phase("returns", "GAE"),
            Phase("batches", "a mini-batch of 64", SHAPE.epochs * SHAPE.mini_batches),
        ),
        cycle=("add", "returns", "batches"),
        contenders={
            "rlstore": partial(Rlstore, "rlstore", rollout),
            NUMPY: partial(Rlstore, NUMPY, rollout, numpy=True),
            "rlstore, reshuffled": partial(Rlstore, "rlstore, reshuffled", rollout, reshuffle=True),
            "SB3": partial(Sb3, rollout),
            "rlox": partial(Rlox, rollout),
            "TorchRL": partial(TorchRl, rollout),
            "memcpy": partial(Memcpy, SHAPE),
        },
        check=partial(same_batches_and_returns, SHAPE.epochs * SHAPE.mini_batches),
        rounds=6,
        targets=(
            Target("add", ("SB3",), 0.5, (NUMPY,), "rollout add, 8 environments, from numpy"),
            Target("add", ("SB3",), 0.25, ("rlstore",), "rollout add, 8 environments, from tensors"),
            Target(CYCLE, ("rlox",), 0.45, ("rlstore",), "PPO 2048 x 8, whole cycle from tensors"),
            Target(CYCLE, ("rlox",), 0.7, (NUMPY,), "PPO 2048 x 8, whole cycle from numpy"),
        ),
    )
