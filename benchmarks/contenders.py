"""The contenders for rollouts: each drives one buffer as its own library's training loop does, with data as used there.

Libraries are imported when a contender is created, so that a missing one is reported and the others still run.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict

from benchmarks.data import Rollout, Shape, Step
from benchmarks.harness import Contender, Phase

GAMMA = 0.99
LAMBDA = 0.95
CYCLE_OF_TRAINING = ("add", "returns", "batches")


def rollout_phases(added: str, batches: str) -> tuple[Phase, ...]:
    """The phases of rollouts; "returns again" finds its data in the cache and is not part of the cycle."""
    return (
        Phase("add", added),
        Phase("returns", "GAE"),
        Phase("returns again", "GAE, data in cache"),
        Phase("batches", batches),
    )


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
    def serve(self) -> int:
        """Iterate over the mini-batches of all epochs and return their number."""

    def returns(self) -> torch.Tensor | None:
        """The returns ``[steps, envs]`` of the last cycle, or None where they are not accessible."""
        return None

    def phases(self) -> Mapping[str, Callable[[], object]]:
        again = self.compute_returns
        return {"add": self.add, "returns": self.compute_returns, "returns again": again, "batches": self.serve}

    def evidence(self) -> Mapping[str, torch.Tensor]:
        batches = {"batches": torch.tensor(self.serve())}
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
        """Count the bytes of a shape; ``served`` replaces the bytes of the mini-batches of one epoch."""
        super().__init__("memcpy")
        self._shape = shape
        floats = shape.obs + shape.actions * (3 if shape.distribution else 1) + 2 * shape.hidden
        scalars_added, scalars_served, scalars_of_gae = 3, 4, 4
        row, flag = 4, 1
        self._added = self._pair(shape.rows * ((floats + scalars_added) * row + flag))
        self._folded = self._pair(shape.rows * (scalars_of_gae * row + flag))
        self._served = self._pair(served or shape.batch_size * (floats + scalars_served) * row)
        self._passes = 1 if served else shape.epochs * shape.mini_batches

    @staticmethod
    def _pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def add(self) -> None:
        self._added[0].copy_(self._added[1])

    def compute_returns(self) -> None:
        self._folded[0].copy_(self._folded[1])

    def serve(self) -> int:
        for _ in range(self._passes):
            self._served[0].copy_(self._served[1])
        return self._shape.epochs * self._shape.mini_batches


class TransitionLoop(RolloutContender):
    """What rlstore and rsl_rl share: transitions appended in inference mode, served outside it."""

    _options: Mapping[str, bool] = {}

    def __init__(self, name: str, storage_class: Any, rollout: Rollout) -> None:
        super().__init__(name)
        shape = rollout.shape
        self._shape = shape
        self._last_values = rollout.last_values
        obs = TensorDict({"policy": rollout.last_obs}, batch_size=[shape.envs])
        self._storage = storage_class("rl", shape.envs, shape.steps, obs, [shape.actions], "cpu")
        self._transitions = [self._transition(storage_class.Transition(), step) for step in rollout.steps]

    @staticmethod
    def _transition(transition: Any, step: Step) -> Any:
        transition.observations = TensorDict({"policy": step.obs}, batch_size=[len(step.obs)])
        transition.actions = step.actions
        transition.rewards = step.rewards
        # Vectorized simulators return dones as integers.
        transition.dones = step.dones.long()
        transition.values = step.values
        transition.actions_log_prob = step.log_probs
        transition.distribution_params = step.distribution or None
        transition.hidden_states = step.hidden
        return transition

    def add(self) -> None:
        storage = self._storage
        with torch.inference_mode():
            storage.clear()
            for transition in self._transitions:
                storage.add_transition(transition)

    def serve(self) -> int:
        return drain(self._batches())

    def _batches(self) -> Iterable[object]:
        storage, shape = self._storage, self._shape
        serve = storage.recurrent_mini_batch_generator if shape.hidden else storage.mini_batch_generator
        batches: Iterable[object] = serve(shape.mini_batches, shape.epochs, **self._options)
        return batches

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._storage.returns
        return returns.squeeze(-1)


class Rlstore(TransitionLoop):
    """Our RolloutStorage.

    Args:
        rollout: The data.
        reshuffle: Draw a new permutation in every epoch.
        reuse: Gather the first epoch only, and yield its batches again in every epoch.
    """

    role = "ours"

    def __init__(self, rollout: Rollout, *, reshuffle: bool = False, reuse: bool = False) -> None:
        from rlstore import RolloutStorage

        name = "rlstore, reshuffled" if reshuffle else "rlstore, reuse" if reuse else "rlstore"
        super().__init__(name, RolloutStorage, rollout)
        self._options = {"reshuffle": True} if reshuffle else {"reuse": True} if reuse else {}

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

    def serve(self) -> int:
        return sum(drain(self._buffer.get(self._shape.batch_size)) for _ in range(self._shape.epochs))

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

    def serve(self) -> int:
        self._buffer.extend(self._data.reshape(-1))
        return sum(drain(self._buffer) for _ in range(self._shape.epochs))

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._data["returns"]
        return returns.squeeze(-1).T


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

    def serve(self) -> int:
        served = sum(drain(self._storage.sample()) for _ in range(self._shape.epochs))
        self._storage.update()
        return served

    def returns(self) -> torch.Tensor:
        returns: torch.Tensor = self._storage.returns
        return returns
