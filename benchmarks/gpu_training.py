"""Iterations of rsl_rl's PPO on a synthetic environment, with its own storage and with ours."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.contenders import rsl_rl_storage
from benchmarks.gpu_measure import synchronize

PARTS = ("iteration", "collection", "returns", "update")


@dataclass(frozen=True)
class TrainingSizes:
    """Sizes of a training, and how much of it is timed."""

    envs: int = 4096
    steps: int = 24
    observations: int = 48
    actions: int = 12
    hidden: int = 256
    warm_up: int = 3
    turns: int = 4
    iterations: int = 5  # per turn


class SyntheticEnv:
    """A linear system with noise, in a few tensor operations; episodes end after 100 to 131 steps."""

    def __init__(self, sizes: TrainingSizes, device: torch.device) -> None:
        self.num_envs, self.num_actions, self.device = sizes.envs, sizes.actions, device
        self.cfg: dict[str, Any] = {}
        self.max_episode_length = 100 + torch.arange(sizes.envs, device=device) % 32
        # As if the episodes had begun at different times, so that they end at different steps.
        self.episode_length_buf = torch.arange(sizes.envs, device=device) % 100
        self._state = torch.randn(sizes.envs, sizes.observations, device=device)
        self._effect = torch.randn(sizes.actions, sizes.observations, device=device) / 10

    @property
    def unwrapped(self) -> SyntheticEnv:
        """Itself."""
        return self

    def get_observations(self) -> TensorDict:
        """The observations of all environments."""
        return TensorDict({"policy": self._state}, batch_size=[self.num_envs], device=self.device)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Tensor]]:
        """One step of all environments."""
        self._state = 0.95 * self._state + actions.clamp(-1, 1) @ self._effect
        self.episode_length_buf = self.episode_length_buf + 1
        ended = self.episode_length_buf >= self.max_episode_length
        rewards = -self._state.square().mean(-1)
        self._state = torch.where(ended.unsqueeze(-1), torch.randn_like(self._state), self._state)
        self.episode_length_buf = self.episode_length_buf * ~ended
        return self.get_observations(), rewards, ended.long(), {"time_outs": ended}


def _config(sizes: TrainingSizes, *, recurrent: bool) -> dict[str, Any]:
    model: dict[str, Any] = {"class_name": "MLPModel", "hidden_dims": [sizes.hidden, sizes.hidden // 2]}
    if recurrent:
        model |= {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": sizes.hidden}
    deviation = {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}}
    return {
        "num_steps_per_env": sizes.steps,
        "save_interval": 1_000_000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 5, "num_mini_batches": 4},
        "actor": {**model, **deviation},
        "critic": model,
    }


@contextmanager
def storage_in_rsl_rl(storage_class: Any) -> Iterator[None]:
    """Make rsl_rl create storages of this class."""
    theirs = rsl_rl_storage()
    import rsl_rl.runners

    assert rsl_rl.runners
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "rsl_rl"]
    sites = [module for module in modules if getattr(module, "RolloutStorage", None) is theirs]
    for module in sites:
        module.RolloutStorage = storage_class  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in sites:
            module.RolloutStorage = theirs  # type: ignore[attr-defined]


class Training:
    """A training whose iterations are timed; the GPU is synchronized between its parts.

    Args:
        storage_class: The storage that rsl_rl uses.
        sizes: The sizes.
        device: The device.
        recurrent: Whether actor and critic have a GRU.
        own_returns: Whether the storage computes the returns, instead of rsl_rl's loop over steps.
    """

    def __init__(
        self, storage_class: Any, sizes: TrainingSizes, device: torch.device, *, recurrent: bool, own_returns: bool
    ) -> None:
        with storage_in_rsl_rl(storage_class):
            from rsl_rl.runners import OnPolicyRunner

            torch.manual_seed(0)
            env: Any = SyntheticEnv(sizes, device)
            with redirect_stdout(StringIO()):  # it prints its networks
                self.runner = OnPolicyRunner(env, _config(sizes, recurrent=recurrent), device=str(device))
        self.algorithm = self.runner.alg
        assert type(self.algorithm.storage) is storage_class
        self._times: list[float] = []
        self._iterations: list[dict[str, float]] = []
        self._act, self._update = self.algorithm.act, self.algorithm.update
        self._compute_returns = self._own_returns if own_returns else self.algorithm.compute_returns
        self.algorithm.act = self._timed_act
        self.algorithm.compute_returns = self._timed_returns
        self.algorithm.update = self._timed_update

    def learn(self, iterations: int) -> list[dict[str, float]]:
        """Train for some iterations and return the seconds of each part of each iteration."""
        self._iterations = []
        self.runner.learn(iterations)
        return self._iterations

    def _own_returns(self, obs: TensorDict) -> None:
        algorithm = self.algorithm
        state = algorithm.critic.get_hidden_state()
        last_values = algorithm.critic(obs).detach()
        algorithm.critic.reset(hidden_state=state)
        algorithm.storage.compute_returns(last_values, algorithm.gamma, algorithm.lam)

    def _mark(self) -> None:
        synchronize()
        self._times.append(perf_counter())

    def _timed_act(self, obs: TensorDict) -> Any:
        if not self._times:
            self._mark()
        return self._act(obs)

    def _timed_returns(self, obs: TensorDict) -> None:
        self._mark()
        self._compute_returns(obs)

    def _timed_update(self) -> Any:
        self._mark()
        losses = self._update()
        self._mark()
        begin, collected, computed, end = self._times
        lengths = (end - begin, collected - begin, computed - collected, end - computed)
        self._iterations.append(dict(zip(PARTS, lengths, strict=True)))
        self._times = []
        return losses


@dataclass
class TrainingTimes:
    """Median seconds of the parts of an iteration, by contender."""

    title: str
    medians: dict[str, dict[str, float]]
    iterations: int


def time_training(sizes: TrainingSizes, device: torch.device, *, recurrent: bool) -> TrainingTimes:
    """Time the contenders in turn, a few iterations each."""
    from rlstore import RolloutStorage

    def training(storage_class: Any, *, own_returns: bool = False) -> Training:
        return Training(storage_class, sizes, device, recurrent=recurrent, own_returns=own_returns)

    contenders = {
        "rsl_rl": training(rsl_rl_storage()),
        "rlstore": training(RolloutStorage),
        "rlstore, its compute_returns": training(RolloutStorage, own_returns=True),
    }
    for each in contenders.values():
        each.learn(sizes.warm_up)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(sizes.turns):
        for name, each in contenders.items():
            times[name] += each.learn(sizes.iterations)
    medians = {
        name: {part: statistics.median(iteration[part] for iteration in found) for part in PARTS}
        for name, found in times.items()
    }
    kind = f"GRU {sizes.hidden}" if recurrent else "feed-forward"
    title = f"PPO of rsl_rl, {kind}, {sizes.steps} x {sizes.envs}, observations {sizes.observations}"
    return TrainingTimes(title, medians, sizes.turns * sizes.iterations)
