"""The contenders for rollouts: each drives one buffer as its own library's training loop does, with data as used there.

Libraries are imported when a contender is created, so that a missing one is reported and the others still run.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict

from benchmarks.data import Rollout, Shape, Step
from benchmarks.harness import Contender

GAMMA = 0.99
LAMBDA = 0.95


def same_batches_and_returns(batches: int, evidence: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise if a contender served a different number of batches, or computed different returns than the first."""
    first: tuple[str, torch.Tensor] | None = None
    for name, shown in evidence.items():
        if shown["batches"] != batches:
            raise RuntimeError(f"{name} served {shown['batches']} batches, not {batches}")
        if "returns" not in shown:
            continue
        if first is None:
            first = name, shown["returns"].clone()
        elif not torch.allclose(shown["returns"], first[1], rtol=1e-4, atol=1e-4):
            raise RuntimeError(f"{name} and {first[0]} computed different returns")


class RolloutContender(Contender):
    """A rollout buffer: a rollout is appended, returns are computed, and the mini-batches of all epochs are served."""

    @abstractmethod
    def add(self) -> None:
        """Write one rollout."""

    @abstractmethod
    def compute_returns(self) -> None:
        """Compute returns and advantages of the rollout."""

    @abstractmethod
    def serve(self) -> Iterator[Any]:
        """The mini-batches of all epochs."""

    @staticmethod
    @abstractmethod
    def observations(batch: Any) -> torch.Tensor:
        """The observations of a mini-batch."""

    def returns(self) -> torch.Tensor | None:
        """The returns ``[steps, envs]`` of the last cycle, or None where they are not accessible."""
        return None

    def phases(self) -> Mapping[str, Callable[[], object]]:
        return {
            "add": self.add,
            "returns": self.compute_returns,
            "batches": lambda: drain(self.serve()),
            "written": self._write_into,
            "held": lambda: list(self.serve()),
        }

    def _write_into(self) -> None:
        """Change the observations of each mini-batch in place, as a learner that normalizes them does."""
        for batch in self.serve():
            self.observations(batch).neg_()

    def evidence(self) -> Mapping[str, torch.Tensor]:
        batches = {"batches": torch.tensor(drain(self.serve()))}
        returns = self.returns()
        return batches if returns is None else batches | {"returns": returns}


def drain(batches: Iterable[object]) -> int:
    """Consume an iterable and return its length."""
    count = 0
    for _ in batches:
        count += 1
    return count


def box(size: int) -> Box:
    """An unbounded float32 space."""
    return Box(-np.inf, np.inf, (size,), np.float32)


class Memcpy(RolloutContender):
    """The floor: a flat copy of the bytes of each phase between preallocated tensors."""

    role = "floor"

    def __init__(self, shape: Shape, served: int | None = None) -> None:
        """Count the bytes of a shape; ``served`` replaces the bytes of a mini-batch."""
        super().__init__("memcpy")
        self._shape = shape
        floats = shape.obs + shape.actions * (3 if shape.distribution else 1) + 2 * shape.hidden
        scalars_added, scalars_served, scalars_of_gae = 3, 4, 4
        row, flag = 4, 1
        self._added = self._pair(shape.rows * ((floats + scalars_added) * row + flag))
        self._folded = self._pair(shape.rows * (scalars_of_gae * row + flag))
        self._served = self._pair(served or shape.batch_size * (floats + scalars_served) * row)

    @staticmethod
    def _pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def add(self) -> None:
        self._added[0].copy_(self._added[1])

    def compute_returns(self) -> None:
        self._folded[0].copy_(self._folded[1])

    def serve(self) -> Iterator[Any]:
        target, source = self._served
        for _ in range(self._shape.epochs * self._shape.mini_batches):
            yield target.copy_(source)

    @staticmethod
    def observations(batch: Any) -> torch.Tensor:
        return torch.empty(0)


class TransitionLoop(RolloutContender):
    """What rlstore and rsl_rl share: a transition made and added for each step, in inference mode; served outside it.

    Args:
        name: The name of the contender.
        storage_class: The class of the storage.
        rollout: The data.
        numpy: Observations, rewards and dones are given as arrays, as Gymnasium returns them, and the observations in
            a dict; otherwise they are tensors as vectorized simulators return them: a TensorDict, and integer dones.
    """

    _options: Mapping[str, bool] = {}

    def __init__(self, name: str, storage_class: Any, rollout: Rollout, *, numpy: bool = False) -> None:
        super().__init__(name)
        shape = rollout.shape
        self._shape = shape
        self._last_values = rollout.last_values
        obs = TensorDict({"policy": rollout.last_obs}, batch_size=[shape.envs])
        self._storage = storage_class("rl", shape.envs, shape.steps, obs, [shape.actions], "cpu")
        given = self._arrays if numpy else self._tensors
        self._steps = [
            (*given(s), s.actions, s.values, s.log_probs, s.distribution or None, s.hidden) for s in rollout.steps
        ]

    @staticmethod
    def _arrays(step: Step) -> tuple[Any, ...]:
        return {"policy": step.obs.numpy()}, step.rewards.numpy(), step.dones.numpy()

    @staticmethod
    def _tensors(step: Step) -> tuple[Any, ...]:
        return TensorDict({"policy": step.obs}, batch_size=[len(step.obs)]), step.rewards, step.dones.long()

    def add(self) -> None:
        storage, transition_class = self._storage, self._storage.Transition
        with torch.inference_mode():
            storage.clear()
            for observations, rewards, dones, actions, values, log_probs, distribution, hidden in self._steps:
                transition = transition_class()
                transition.observations = observations
                transition.rewards = rewards
                transition.dones = dones
                transition.actions = actions
                transition.values = values
                transition.actions_log_prob = log_probs
                transition.distribution_params = distribution
                transition.hidden_states = hidden
                storage.add_transition(transition)

    def serve(self) -> Iterator[Any]:
        storage, shape = self._storage, self._shape
        serve = storage.recurrent_mini_batch_generator if shape.hidden else storage.mini_batch_generator
        batches: Iterator[Any] = serve(shape.mini_batches, shape.epochs, **self._options)
        return batches

    @staticmethod
    def observations(batch: Any) -> torch.Tensor:
        observations: torch.Tensor = batch.observations["policy"]
        return observations

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._storage.returns
        return returns.squeeze(-1)


class Rlstore(TransitionLoop):
    """Our RolloutStorage, with options of ``mini_batch_generator``, which are named after a comma."""

    role = "ours"

    def __init__(self, name: str, rollout: Rollout, *, numpy: bool = False, **options: bool) -> None:
        from rlstore import RolloutStorage

        super().__init__(name, RolloutStorage, rollout, numpy=numpy)
        self._options = options

    def compute_returns(self) -> None:
        with torch.inference_mode():
            self._storage.compute_returns(self._last_values, GAMMA, LAMBDA)


def rsl_rl_storage() -> Any:
    """Import rsl_rl's storage without TensorBoard, which only its log writers need."""
    if "torch.utils.tensorboard" not in sys.modules:
        stand_in: Any = ModuleType("torch.utils.tensorboard")
        stand_in.SummaryWriter = type("SummaryWriter", (), {})
        sys.modules["torch.utils.tensorboard"] = stand_in
    from rsl_rl.storage import RolloutStorage

    return RolloutStorage


class RslRl(TransitionLoop):
    """rsl_rl's RolloutStorage. Its GAE is part of the algorithm, as a loop over the storage's tensors."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__("rsl_rl", rsl_rl_storage(), rollout)

    @torch.inference_mode()
    def compute_returns(self) -> None:
        st = self._storage
        following, advantage = self._last_values, torch.zeros(())
        for t in range(self._shape.steps - 1, -1, -1):
            alive = 1.0 - st.dones[t].float()
            delta = st.rewards[t] + alive * GAMMA * following - st.values[t]
            advantage = delta + alive * GAMMA * LAMBDA * advantage
            st.returns[t] = advantage + st.values[t]
            following = st.values[t]
        st.advantages = st.returns - st.values
        st.advantages = (st.advantages - st.advantages.mean()) / (st.advantages.std() + 1e-8)


class Sb3(RolloutContender):
    """Stable-Baselines3's RolloutBuffer: numpy from the environment, one get() per epoch, no distribution parameters.

    The algorithm normalizes the advantages in each mini-batch, which is not timed here.
    """

    def __init__(self, rollout: Rollout) -> None:
        from stable_baselines3.common.buffers import RolloutBuffer

        super().__init__("SB3")
        shape = rollout.shape
        self._shape = shape
        self._buffer = RolloutBuffer(
            shape.steps, box(shape.obs), box(shape.actions), "cpu", gae_lambda=LAMBDA, gamma=GAMMA, n_envs=shape.envs
        )
        dones = [np.ones(shape.envs, dtype=bool), *(step.dones.numpy() for step in rollout.steps)]
        self._last = rollout.last_values, dones[-1]
        self._steps = [
            (s.obs.numpy(), s.actions.numpy(), s.rewards.numpy(), starts, s.values, s.log_probs)
            for s, starts in zip(rollout.steps, dones, strict=False)
        ]

    def add(self) -> None:
        self._buffer.reset()
        for step in self._steps:
            self._buffer.add(*step)

    def compute_returns(self) -> None:
        self._buffer.compute_returns_and_advantage(*self._last)

    def serve(self) -> Iterator[Any]:
        for _ in range(self._shape.epochs):
            yield from self._buffer.get(self._shape.batch_size)

    @staticmethod
    def observations(batch: Any) -> torch.Tensor:
        observations: torch.Tensor = batch.observations
        return observations

    def returns(self) -> torch.Tensor:
        # get() leaves them as [envs * steps, 1].
        return torch.as_tensor(self._buffer.returns).view(self._shape.envs, self._shape.steps).T


class TorchRl(RolloutContender):
    """TorchRL: steps stacked as its collectors do, its GAE, and a replay buffer sampled without replacement."""

    def __init__(self, rollout: Rollout) -> None:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
        from torchrl.objectives.value import functional

        super().__init__("TorchRL")
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        shape = rollout.shape
        self._shape = shape
        # The faster of its two versions for this rollout length.
        few_steps = shape.steps < 256
        self._gae: Any = (
            functional.generalized_advantage_estimate if few_steps else functional.vec_generalized_advantage_estimate
        )
        self._buffer: Any = TensorDictReplayBuffer(
            storage=LazyTensorStorage(shape.rows), sampler=SamplerWithoutReplacement(), batch_size=shape.batch_size
        )
        self._last_values = rollout.last_values.unsqueeze(1)
        self._steps = [self._step(step) for step in rollout.steps]
        self._data = TensorDict({})

    @staticmethod
    def _step(step: Step) -> TensorDict:
        names = ("mean", "deviation")
        fields = {
            "obs": step.obs,
            "actions": step.actions,
            "log_probs": step.log_probs.unsqueeze(-1),
            "values": step.values,
            "rewards": step.rewards.unsqueeze(-1),
            "dones": step.dones.unsqueeze(-1),
            **dict(zip(names, step.distribution, strict=False)),
        }
        return TensorDict(fields, batch_size=[len(step.obs)])

    def add(self) -> None:
        self._data = torch.stack(self._steps, dim=1)

    def compute_returns(self) -> None:
        data = self._data
        values = data["values"]
        following = torch.cat([values[:, 1:], self._last_values], dim=1)
        advantages, returns = self._gae(GAMMA, LAMBDA, values, following, data["rewards"], data["dones"])
        data["returns"] = returns
        data["advantages"] = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    def serve(self) -> Iterator[Any]:
        self._buffer.extend(self._data.reshape(-1))
        for _ in range(self._shape.epochs):
            yield from self._buffer

    @staticmethod
    def observations(batch: Any) -> torch.Tensor:
        observations: torch.Tensor = batch["obs"]
        return observations

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._data["returns"]
        return returns.squeeze(-1).T


class Rlox(RolloutContender):
    """rlox: what its RolloutCollector does with the steps of an environment, its GAE, and its RolloutBatch.

    It has no buffer: steps are tensors in lists, which are stacked at the end. No distribution parameters.
    """

    def __init__(self, rollout: Rollout) -> None:
        import rlox
        from rlox.batch import RolloutBatch

        super().__init__("rlox")
        self._shape = rollout.shape
        self._gae: Any = rlox.compute_gae_batched
        self._batch_class: Any = RolloutBatch
        self._last_values = rollout.last_values.squeeze(-1)
        self._steps = [
            (s.obs.numpy(), s.actions, s.log_probs, s.values.squeeze(-1), s.rewards.numpy(), s.dones.numpy())
            for s in rollout.steps
        ]
        self._lists: tuple[list[torch.Tensor], ...] = ()
        self._batch: Any = None

    def add(self) -> None:
        observations, actions, log_probs, values, rewards, dones = self._lists = ([], [], [], [], [], [])
        for obs, action, log_prob, value, reward, terminated in self._steps:
            observations.append(torch.as_tensor(obs, dtype=torch.float32))
            actions.append(action)
            log_probs.append(log_prob)
            values.append(value)
            rewards.append(torch.as_tensor(reward.astype(np.float32)))
            dones.append(torch.as_tensor(terminated.astype(np.float32)))

    def compute_returns(self) -> None:
        shape = self._shape
        obs, actions, log_probs, values, rewards, dones = map(torch.stack, self._lists)
        flat = [x.T.contiguous().numpy().astype(np.float64).ravel() for x in (rewards, values, dones)]
        last = self._last_values.numpy().astype(np.float64)
        made = self._gae(*flat, last_values=last, n_steps=shape.steps, gamma=GAMMA, lam=LAMBDA)
        advantages, returns = (torch.as_tensor(x, dtype=torch.float32).reshape(shape.envs, -1).T for x in made)
        columns = (obs, actions, rewards, dones, log_probs, values, advantages, returns)
        self._batch = self._batch_class(*(column.reshape(shape.rows, *column.shape[2:]) for column in columns))

    def serve(self) -> Iterator[Any]:
        for _ in range(self._shape.epochs):
            yield from self._batch.sample_minibatches(self._shape.batch_size)

    @staticmethod
    def observations(batch: Any) -> torch.Tensor:
        observations: torch.Tensor = batch.obs
        return observations

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._batch.returns
        return returns.view(self._shape.steps, self._shape.envs)


class Rllte(RolloutContender):
    """rllte's VanillaRolloutStorage, which its decoupled agent (DAAC) uses too."""

    def __init__(self, rollout: Rollout) -> None:
        from rllte.xploit.storage import VanillaRolloutStorage

        super().__init__("rllte")
        shape = rollout.shape
        self._shape = shape
        self._storage: Any = VanillaRolloutStorage(
            box(shape.obs), box(shape.actions), "cpu", shape.steps, shape.batch_size, shape.envs, GAMMA, LAMBDA
        )
        following = [*(s.obs for s in rollout.steps[1:]), rollout.last_obs]
        alive = torch.zeros(shape.envs, dtype=torch.bool)
        self._last_values = rollout.last_values
        infos: dict[str, object] = {}
        self._steps = [
            (s.obs, s.actions, s.rewards, s.dones, alive, infos, after, s.log_probs, s.values)
            for s, after in zip(rollout.steps, following, strict=True)
        ]

    def add(self) -> None:
        for step in self._steps:
            self._storage.add(*step)

    def compute_returns(self) -> None:
        self._storage.compute_returns_and_advantages(self._last_values)

    def serve(self) -> Iterator[Any]:
        for _ in range(self._shape.epochs):
            yield from self._storage.sample()
        self._storage.update()

    @staticmethod
    def observations(batch: Any) -> torch.Tensor:
        observations: torch.Tensor = batch.observations
        return observations

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._storage.returns
        return returns
