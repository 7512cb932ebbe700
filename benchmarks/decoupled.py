"""Decoupled actor-critic (DAAC): 128 steps of 16 environments, one epoch for the policy and nine for the value."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.contenders import GAMMA, LAMBDA, Memcpy, Rllte, RolloutContender, box, same_batches_and_returns
from benchmarks.data import Rollout, Shape, make_rollout
from benchmarks.harness import Phase, Workload

SHAPE = Shape(steps=128, envs=16, obs=4, actions=2, epochs=10, mini_batches=8)


class RlstoreDecoupled(RolloutContender):
    """Our DecoupledRolloutStorage. Unlike rllte's, it also stores and serves predicted advantages."""

    role = "ours"

    def __init__(self, rollout: Rollout) -> None:
        from rlstore import DecoupledRolloutStorage

        super().__init__("rlstore")
        shape = rollout.shape
        self._shape = shape
        self._storage = DecoupledRolloutStorage(
            box(shape.obs), box(shape.actions), "cpu", shape.steps, shape.envs, discount=GAMMA, gae_lambda=LAMBDA
        )
        alive = torch.zeros(shape.envs, dtype=torch.bool)
        following = [*(s.obs for s in rollout.steps[1:]), rollout.last_obs]
        self._last_values = rollout.last_values
        self._steps = [
            (s.obs, s.actions, s.rewards, s.dones, alive, after, s.log_probs, s.values, s.values.clone())
            for s, after in zip(rollout.steps, following, strict=True)
        ]

    def add(self) -> None:
        for step in self._steps:
            self._storage.add(*step)

    def compute_returns(self) -> None:
        self._storage.compute_returns_and_advantages(self._last_values)

    def serve(self) -> Iterator[Any]:
        for _ in range(self._shape.epochs):
            yield from self._storage.sample(self._shape.mini_batches)
        self._storage.update()

    @staticmethod
    def observations(batch: Any) -> torch.Tensor:
        observations: torch.Tensor = batch.observations
        return observations

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._storage.returns
        return returns


def workload() -> Workload:
    rollout = make_rollout(SHAPE)
    return Workload(
        name="decoupled",
        title="Decoupled rollout 128 x 16, observations 4, actions 2",
        phases=(
            Phase("add", "add a step", SHAPE.steps),
            Phase("returns", "GAE"),
            Phase("batches", "10 x 8 mini-batches"),
        ),
        cycle=("add", "returns", "batches"),
        contenders={
            "rlstore": partial(RlstoreDecoupled, rollout),
            "rllte": partial(Rllte, rollout),
            "memcpy": partial(Memcpy, SHAPE),
        },
        check=partial(same_batches_and_returns, SHAPE.epochs * SHAPE.mini_batches),
        rounds=10,
    )
