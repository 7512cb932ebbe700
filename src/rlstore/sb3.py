"""Buffers for Stable-Baselines3 whose data are held by rlstore's storages: ``pip install rlstore[sb3]``.

::

    model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer)
    model = PPO("MlpPolicy", "CartPole-v1", rollout_buffer_class=RolloutBuffer)
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from functools import cached_property, partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

try:
    import stable_baselines3
except ModuleNotFoundError as error:
    if error.name != "stable_baselines3":
        raise  # it is installed, and lacks a package itself
    raise ImportError(
        "rlstore.sb3 needs Stable-Baselines3, which is not installed: pip install stable-baselines3"
    ) from error
if tuple(map(int, stable_baselines3.__version__.split(".")[:2])) < (2, 7):
    raise ImportError(
        f"rlstore.sb3 needs Stable-Baselines3 2.7 or later, and {stable_baselines3.__version__} is installed: "
        "pip install --upgrade stable-baselines3"
    )

from stable_baselines3.common import buffers
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
from stable_baselines3.common.type_aliases import (
    DictReplayBufferSamples,
    DictRolloutBufferSamples,
    ReplayBufferSamples,
    RolloutBufferSamples,
)
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecNormalize

from rlstore import Journal, PrioritizedReplayStorage, ReplayStorage, RolloutStorage
from rlstore.engine.calls import check_known, warn_caller
from rlstore.engine.disk.journal import as_journal
from rlstore.engine.disk.manifest import NAME
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.errors import InvalidCallError, InvalidInputError, NotReadyError

__all__ = [
    "DictReplayBuffer",
    "DictRolloutBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
    "RolloutBuffer",
]

_Replay = ReplayStorage | PrioritizedReplayStorage
# Arrays of Stable-Baselines3's replay buffers that these buffers do not have.
_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
_PRIORITIES = ("alpha", "beta", "beta_steps")  # options of prioritized sampling
# Arguments of storages that follow from those of the buffers.
_REPLAY_GIVEN = ("observation_space", "action_space", "storage_size", "num_envs", "n_step", "discount", "autoreset")
_ROLLOUT_GIVEN = ("training_type", "num_envs", "num_transitions_per_env", "obs", "actions_shape", "lam")


def _refuse_get_samples(kind: type[buffers.BaseBuffer], method: str) -> None:
    """Refuse a class that overrides a method which is not called here."""
    if kind._get_samples.__module__ != buffers.__name__:
        raise InvalidCallError(
            f"{kind.__name__} overrides _get_samples(), which buffers of rlstore do not call; override {method} instead"
        )


class PrioritizedReplayBufferSamples(NamedTuple):
    """Stable-Baselines3's ``ReplayBufferSamples`` with two more fields.

    - ``weights`` ``[batch, 1]``: importance weights, by which to multiply the loss of each row;
    - ``rows`` ``[batch]``: what :meth:`ReplayBuffer.update_priorities` takes.
    """

    observations: Any
    actions: Tensor
    next_observations: Any
    dones: Tensor
    rewards: Tensor
    discounts: Tensor | None
    weights: Tensor
    rows: Tensor


class ReplayBuffer(buffers.ReplayBuffer):
    """A replay buffer for ``replay_buffer_class=`` of DQN, SAC, TD3 and DDPG; its options are ``replay_buffer_kwargs``.

    The transitions are in ``storage``, a :class:`~rlstore.ReplayStorage` or (``prioritized=True``)
    :class:`~rlstore.PrioritizedReplayStorage`, which holds each observation once. ``buffer_size`` (steps of each
    environment), ``n_envs``, ``pos``, ``full`` and ``size()`` are those of Stable-Baselines3; its arrays
    (``observations``, ``rewards`` and so on) do not exist: ``storage.get_all_buffer_data()`` copies the data.

    With ``prioritized=True``, ``sample`` returns :class:`PrioritizedReplayBufferSamples`. The algorithms that come with
    Stable-Baselines3 read neither ``weights`` nor ``rows`` and never call :meth:`update_priorities`, so with them all
    priorities stay equal and sampling stays uniform: override ``train`` of the algorithm to use them.

    The folder of ``journal`` or ``memory="mapped"`` is opened when ``storage`` is first used, for example by the first
    ``add``: a model that is loaded for prediction opens none. What a mapped folder holds is there again then; a journal
    goes on after :meth:`resume`.

    Args:
        buffer_size: The number of transitions held, over all environments; then the oldest are overwritten.
        observation_space: The observation space.
        action_space: The action space.
        device: The device of the batches. The data are in host memory; with ``memory="device"`` they are there too.
        n_envs: The number of environments.
        optimize_memory_usage: Accepted with any other argument, and changes nothing: each observation is stored once in
            any case, together with the final observations of episodes.
        handle_timeout_termination: An episode that ended by ``info["TimeLimit.truncated"]`` did not terminate: its last
            transition has ``dones`` 0. If False, every end is a termination.
        n_steps: Steps over which rewards are summed before the bootstrap. With more than one, samples have
            ``discounts``: ``gamma ** k`` after k steps (0 after a termination, where ``dones`` is 1).
        gamma: The discount factor of these sums, which should be that of the algorithm; without them it is not used.
            If it is 0, ``dones`` is 1 everywhere, as nothing is bootstrapped.
        prioritized: Draw transitions by priority.
        **options: Further options of the storage, such as ``alpha``, ``beta``, ``seed``, ``memory``, ``path``,
            ``frame_stack`` or ``journal``.
    """

    obs_shape: Any

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        prioritized: bool = False,
        **options: Any,
    ) -> None:
        # The base class is not initialised: it would allocate arrays and count what the storage counts.
        self.buffer_size, self.n_envs, self.device = max(buffer_size // n_envs, 1), n_envs, get_device(device)
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape, self.action_dim = get_obs_shape(observation_space), get_action_dim(action_space)
        self.optimize_memory_usage, self.handle_timeout_termination = optimize_memory_usage, handle_timeout_termination
        self.n_steps, self.gamma, self.prioritized = n_steps, gamma, prioritized
        needing = [name for name in _PRIORITIES if name in options]
        if needing and not prioritized:
            raise InvalidCallError(f"{needing[0]} needs prioritized=True beside it")
        storage_class = PrioritizedReplayStorage if prioritized else ReplayStorage
        _check_options(self, ReplayBuffer, storage_class, _REPLAY_GIVEN, options)
        options = {"memory": "ram", "seed": _drawn_seed(), **options}
        self._journal = as_journal(type(self).__name__, options.pop("journal", None))
        self._make = partial(
            storage_class,
            observation_space=_observations_held(observation_space),
            action_space=_actions_held(action_space),
            device=self.device if options["memory"] == "device" else "cpu",
            storage_size=self.buffer_size * n_envs,
            num_envs=n_envs,
            n_step=n_steps,
            discount=gamma if n_steps > 1 else 1.0,  # 0 only after a termination
            autoreset="Disabled",  # next_obs is the final observation, and may be the one that comes next
            **options,
        )
        if options["memory"] != "mapped" and self._journal is None:
            self.storage = self._opened(self._make())

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _refuse_get_samples(cls, "sample()")

    @cached_property
    def storage(self) -> _Replay:
        """The storage, which holds the transitions."""
        advice = "call resume() of this buffer before `learn`, or give another folder in replay_buffer_kwargs"
        _require_new(self._journal, advice)
        return self._opened(self._make(journal=self._journal))

    def _opened(self, storage: _Replay) -> _Replay:
        """The same storage; its environments are about to be reset."""
        # Algorithms reset environments in the middle of an episode, when they learn again or are resumed.
        storage._appender.warned = True
        storage._appender.cut_off()
        return storage

    def resume(self) -> None:
        """Go on with what the folder of ``journal`` holds; nothing is done if it holds nothing yet.

        Call it before ``learn``, when the program was killed or has ended, and a new one has loaded (or made) the
        model. Priorities, random state and options of the storage are those that were saved. The environments begin
        new episodes.

        Raises:
            InvalidInputError: (a ValueError) if there is no journal, it was made with other arguments, or it is in use.
                Nothing was changed.
        """
        journal = self._journal
        if journal is None:
            raise InvalidInputError(
                f"this {type(self).__name__} has no journal to go on with. Give its folder, as in replay_buffer_kwargs="
                '{"journal": "run"}. Nothing was changed.'
            )
        if not _is_saved(journal):
            return
        wanted = self._make.keywords
        with SnapshotReader(journal.path) as reader:
            for name in _REPLAY_GIVEN[:-1]:
                if reader.settings.get(name) != wanted[name]:
                    raise InvalidInputError(
                        f"{name} of this {type(self).__name__} is {wanted[name]}, and the journal in {reader.folder} "
                        f"was made with {reader.settings.get(name)}. Give the same arguments as before, or another "
                        "folder. Nothing was changed."
                    )
        storage_class: Any = self._make.func
        self.storage = self._opened(storage_class.load(journal.path, wanted["device"], journal=journal))

    def __getstate__(self) -> dict[str, Any]:
        storage = self.storage
        if storage._rows is not None and storage._rows.backing.kind == "mapped":
            warn_caller(
                f"a copy of a {type(self).__name__} with memory='mapped' holds all data in RAM, also when it is loaded "
                "from a file. The data are on disk already: the next buffer with the same arguments opens their "
                "folder. For a copy of the folder as it is now call storage.save(path) of the buffer.",
                UserWarning,
            )
        return {**self.__dict__, "storage": storage}

    @property
    def pos(self) -> int:  # type: ignore[override]
        """The position at which the next step is written, from 0 to ``buffer_size - 1``."""
        return self.storage.step

    @property
    def full(self) -> bool:  # type: ignore[override]
        """True if the next step overwrites the oldest one."""
        return self.storage.full

    @property
    def dones(self) -> _EpisodeEnds:  # type: ignore[override]
        """Takes the end that ``learn`` marks before it resets the environments; it cannot be read."""
        return _EpisodeEnds(self)

    def __getattr__(self, name: str) -> Any:
        raise _no_attribute(self, name)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one step of all environments.

        Args:
            obs: Observations before the step, ``[n_envs, ...]``; a dict of them for a Dict space.
            next_obs: Observations after the step; where an episode ended, its final observation.
            action: Actions, as the algorithm learns from them (scaled to [-1, 1] if they are continuous).
            reward: Rewards, ``[n_envs]``.
            done: The episode ended, ``[n_envs]``.
            infos: A dict for each environment; ``TimeLimit.truncated`` is read.
        """
        terminated = np.asarray(done, dtype=bool).reshape(self.n_envs)
        truncated = np.zeros_like(terminated)
        if self.handle_timeout_termination:
            truncated[:] = [info.get("TimeLimit.truncated", False) for info in infos]
            terminated = terminated & ~truncated
        self.storage.add(
            _as_held(obs, self.observation_space, self.n_envs),
            action.reshape(self.n_envs, self.action_dim),
            reward,
            terminated,
            truncated,
            {},
            _as_held(next_obs, self.observation_space, self.n_envs),
        )

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw a random batch, on ``device``.

        Args:
            batch_size: The number of transitions.
            env: Normalizes observations and rewards, with its present statistics. Sums of ``n_steps > 1`` rewards are
                scaled like a single reward, and not clipped.

        Returns:
            ``ReplayBufferSamples``, ``DictReplayBufferSamples`` for a Dict space, or (with priorities)
            :class:`PrioritizedReplayBufferSamples`: ``actions`` ``[batch, action_dim]``, ``dones`` (of terminations
            only) and ``rewards`` ``[batch, 1]``; ``discounts`` ``[batch, 1]``, or None if ``n_steps`` is 1.
        """
        batch: Any = self.storage.sample(batch_size)
        parts = (
            self._served(batch.observations, env),
            batch.actions.to(self.device),
            self._served(batch.next_observations, env),
            (batch.discounts == 0).to(self.device, torch.float32),
            self._rewards(batch.rewards, env).to(self.device),
            batch.discounts.to(self.device) if self.n_steps > 1 else None,
        )
        if self.prioritized:
            return PrioritizedReplayBufferSamples(*parts, batch.weights.to(self.device), batch.rows)
        is_dict = isinstance(self.observation_space, spaces.Dict)
        return DictReplayBufferSamples(*parts) if is_dict else ReplayBufferSamples(*parts)

    def _served(self, observations: Any, env: VecNormalize | None) -> Any:
        """Observations of a batch, normalized, on the device of the batches."""
        if isinstance(observations, TensorDict):
            parts = dict(observations.items())
            if env is not None:
                normalized: Any = env.normalize_obs({key: part.numpy(force=True) for key, part in parts.items()})
                parts = {key: torch.from_numpy(part) for key, part in normalized.items()}
            return {key: part.to(self.device) for key, part in parts.items()}
        if env is not None:
            observations = torch.from_numpy(env.normalize_obs(observations.numpy(force=True)))
        return observations.to(self.device)

    def _rewards(self, rewards: Tensor, env: VecNormalize | None) -> Tensor:
        if env is None:
            return rewards
        if self.n_steps == 1:
            return torch.from_numpy(env.normalize_reward(rewards.numpy(force=True)))
        return rewards / float(np.sqrt(env.ret_rms.var + env.epsilon)) if env.norm_reward else rewards

    def update_priorities(self, rows: Any, priorities: Any) -> None:
        """Set the priorities of transitions, if they are ``prioritized``.

        Args:
            rows: ``rows`` of a batch. Those that were overwritten since are left out.
            priorities: Finite and not negative, for example ``|TD error| + 1e-6``, ``[n]`` or ``[n, 1]``.
        """
        self.storage.update(rows, priorities)

    def reset(self) -> None:
        """Remove all transitions."""
        self.storage.reset()


class DictReplayBuffer(ReplayBuffer, buffers.DictReplayBuffer):
    """:class:`ReplayBuffer` under the name that Stable-Baselines3 gives it for Dict observation spaces."""


class _EpisodeEnds:
    """Stands for ``dones`` of Stable-Baselines3, of which its algorithms write one entry and read none.

    Args:
        buffer: The buffer.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def __setitem__(self, position: int, ended: bool) -> None:
        """With ``optimize_memory_usage`` ``learn`` marks the newest step as an end before it resets the environments.

        It is not always seen otherwise: the observations after a reset may be those before it.
        """
        buffer = self._buffer
        if not ended or position != (buffer.pos - 1) % buffer.buffer_size:
            raise self._unreadable()
        buffer.storage._appender.cut_off()

    def __getitem__(self, position: Any) -> Any:
        raise self._unreadable()

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise self._unreadable()

    def __getattr__(self, name: str) -> Any:
        raise self._unreadable()

    def _unreadable(self) -> AttributeError:
        return _no_attribute(self._buffer, "dones")


class _Block:
    """A block of a :class:`RolloutStorage` as an array ``[buffer_size, n_envs, ...]``; on the CPU it shares memory.

    Args:
        name: What the storage calls it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._shown = name

    def __get__(self, buffer: RolloutBuffer | None, owner: type) -> Any:
        return self if buffer is None else self._block(buffer).numpy(force=True)

    def __set__(self, buffer: RolloutBuffer, value: Any) -> None:
        block, given = self._block(buffer), torch.as_tensor(value)
        if given.shape != block.shape:
            raise InvalidInputError(
                f"{self._shown} is {tuple(block.shape)} and cannot become {tuple(given.shape)}; it was not changed"
            )
        block.copy_(given)

    def _block(self, buffer: RolloutBuffer) -> Tensor:
        block: Tensor = getattr(buffer.storage, self._name)
        return block if self._name == "actions" else block.squeeze(-1)


class RolloutBuffer(buffers.RolloutBuffer):
    """A rollout buffer for ``rollout_buffer_class=`` of PPO and A2C; its options are ``rollout_buffer_kwargs``.

    The steps are in ``storage``, a :class:`~rlstore.RolloutStorage` on ``device``. ``rewards``, ``values``,
    ``log_probs``, ``returns``, ``advantages`` and ``episode_starts`` are arrays ``[buffer_size, n_envs]``, also after
    :meth:`get`, ``actions`` is ``[buffer_size, n_envs, action_dim]`` float32, and ``observations`` is
    ``[buffer_size, n_envs, ...]``, or a dict of such arrays. On the CPU they share the memory of the storage; elsewhere
    they are copies, and what is written into them is lost. All but ``observations`` can be assigned, also there
    (``buffer.rewards = array``); ``pos`` and ``full`` cannot.

    The folder of ``journal`` is opened when ``storage`` is first used. It must hold nothing yet: algorithms collect a
    new rollout, and never go on with one.

    As in Stable-Baselines3, the algorithm has added the value of the final observation to the reward of a step that was
    truncated. Advantages are not normalized here; PPO does that.

    Args:
        buffer_size: The steps of a rollout.
        observation_space: The observation space.
        action_space: The action space.
        device: The device of the data and of the batches.
        gae_lambda: The GAE lambda.
        gamma: The discount factor.
        n_envs: The number of environments.
        **options: Further options of the storage, such as ``seed`` or ``journal``.
    """

    obs_shape: Any
    generator_ready = False  # arrays are never flattened
    actions = _Block("actions")
    rewards = _Block("rewards")
    values = _Block("values")
    log_probs = _Block("actions_log_prob")
    returns = _Block("returns")
    advantages = _Block("advantages")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        **options: Any,
    ) -> None:
        # The base class is not initialised: it would allocate arrays and count what the storage counts.
        self.buffer_size, self.n_envs, self.device = buffer_size, n_envs, get_device(device)
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape, self.action_dim = get_obs_shape(observation_space), get_action_dim(action_space)
        self.gae_lambda, self.gamma = gae_lambda, gamma
        _check_options(self, RolloutBuffer, RolloutStorage, _ROLLOUT_GIVEN, options)
        example = _example(_observations_held(observation_space), n_envs)
        options = {"gamma": gamma, "lam": gae_lambda, "seed": _drawn_seed(), **options}
        self._journal = as_journal(type(self).__name__, options.pop("journal", None))
        self._make = partial(
            RolloutStorage, "rl", n_envs, buffer_size, example, [self.action_dim], self.device, **options
        )
        if self._journal is None:
            self.storage = self._make()
        self.episode_starts = np.zeros((buffer_size, n_envs), dtype=np.float32)
        self._no_ends = torch.zeros(n_envs, dtype=torch.uint8, device=self.device)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _refuse_get_samples(cls, "get()")

    @cached_property
    def storage(self) -> RolloutStorage:
        """The storage, which holds the steps."""
        _require_new(self._journal, "rollouts are not resumed: give another folder in rollout_buffer_kwargs")
        return self._make(journal=self._journal)

    @property
    def pos(self) -> int:  # type: ignore[override]
        """Steps added since :meth:`reset`."""
        return self.storage.step

    @property
    def full(self) -> bool:  # type: ignore[override]
        """True if the rollout is complete."""
        return self.storage.step == self.buffer_size

    @property
    def observations(self) -> Any:  # type: ignore[override]
        """Observations before each step, ``[buffer_size, n_envs, ...]``; a dict of such arrays for a Dict space."""
        held = self.storage.observations
        if isinstance(held, TensorDict):
            return {key: leaf.numpy(force=True) for key, leaf in held.items()}
        return held.numpy(force=True)

    def reset(self) -> None:
        """Begin a new rollout."""
        self.storage.clear()

    def add(
        self,
        obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        episode_start: np.ndarray,
        value: Tensor,
        log_prob: Tensor,
    ) -> None:
        """Add one step of all environments.

        Args:
            obs: Observations before the step, ``[n_envs, ...]``; a dict of them for a Dict space.
            action: Actions, ``[n_envs, ...]``.
            reward: Rewards, ``[n_envs]``.
            episode_start: The step is the first of an episode, ``[n_envs]``.
            value: The values of the observations, ``[n_envs]`` or ``[n_envs, 1]``.
            log_prob: The log-probabilities of the actions, ``[n_envs]``.
        """
        step = RolloutStorage.Transition()
        step.observations = _as_held(obs, self.observation_space, self.n_envs)
        step.actions = action.reshape(self.n_envs, self.action_dim)  # type: ignore[assignment]
        step.rewards, step.values = reward, value  # type: ignore[assignment]
        step.actions_log_prob = log_prob.reshape(self.n_envs)
        step.dones = self._no_ends  # known with the next step
        self.storage.add_transition(step)
        self.episode_starts[self.storage.step - 1] = episode_start

    def compute_returns_and_advantage(self, last_values: Tensor, dones: np.ndarray) -> None:
        """Compute ``returns`` and ``advantages`` by generalized advantage estimation.

        Args:
            last_values: The values of the observations after the last step, ``[n_envs]`` or ``[n_envs, 1]``.
            dones: The episode ended with the last step, ``[n_envs]``.
        """
        steps = self.storage.step
        # A step was the last of its episode if the next one is the first.
        ended = np.concatenate([self.episode_starts[1:steps], np.reshape(dones, (1, self.n_envs))])
        self.storage.dones[:steps, :, 0] = torch.from_numpy(ended != 0)
        self.storage.compute_returns(last_values, self.gamma, self.gae_lambda, normalize_advantage=False)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield mini-batches of all steps in a new random order; the last is smaller if ``batch_size`` does not divide.

        Args:
            batch_size: Steps in a mini-batch; None for all in one.

        Yields:
            ``RolloutBufferSamples``, or ``DictRolloutBufferSamples`` for a Dict space: ``actions``
            ``[batch, action_dim]`` float32; ``old_values``, ``old_log_prob``, ``advantages`` and ``returns``
            ``[batch]``.
        """
        if not self.full:
            raise NotReadyError(
                f"the rollout has {self.pos} of {self.buffer_size} steps; mini-batches are served when it is complete"
            )
        epoch: Any
        for epoch in self.storage.mini_batch_generator(num_mini_batches=1, num_epochs=1):
            scalars = [
                part.squeeze(-1) for part in (epoch.values, epoch.old_actions_log_prob, epoch.advantages, epoch.returns)
            ]
            rows = len(scalars[0])
            size = rows if batch_size is None else batch_size
            for first in range(0, rows, size):
                part = slice(first, first + size)
                others = (epoch.actions[part], *(scalar[part] for scalar in scalars))
                if isinstance(epoch.observations, TensorDict):
                    yield DictRolloutBufferSamples(
                        {key: leaf[part] for key, leaf in epoch.observations.items()}, *others
                    )
                else:
                    yield RolloutBufferSamples(epoch.observations[part], *others)


class DictRolloutBuffer(RolloutBuffer, buffers.DictRolloutBuffer):  # type: ignore[override]
    """:class:`RolloutBuffer` under the name that Stable-Baselines3 gives it for Dict observation spaces."""


def _drawn_seed() -> int:
    """From the generator that Stable-Baselines3 seeds and that its own buffers draw from; torch's draws the weights."""
    return int(np.random.randint(2**31))


def _observations_held(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The space of observations as Stable-Baselines3 serves them: one of Discrete has an axis of 1."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _observations_held(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Discrete):
        return spaces.MultiDiscrete([space.n], start=[space.start])
    return space


def _actions_held(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The space of actions as Stable-Baselines3 serves them: flat, Discrete with an axis of 1, float64 as float32."""
    if isinstance(space, spaces.Box):
        dtype: Any = np.float32 if space.dtype == np.float64 else space.dtype
        return spaces.Box(-np.inf, np.inf, (get_action_dim(space),), dtype)  # algorithms scale what they add
    return _observations_held(space)


def _as_held(observations: Any, space: spaces.Space[Any], n_envs: int) -> Any:
    """Observations with the axis of 1 that those of Discrete get, and whole numbers in the dtype of their space.

    Some vector environments serve the dtype that an environment returns, and not that of its space.
    """
    if isinstance(space, spaces.Dict):
        return {key: _as_held(observations[key], part, n_envs) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        observations = np.reshape(observations, (n_envs, 1))
    dtype = np.dtype(space.dtype)  # CleanRL's programs assign a type: space.dtype = np.float32
    if isinstance(observations, np.ndarray) and observations.dtype is not dtype and dtype.kind != "f":
        with np.errstate(invalid="ignore"):
            whole = observations.astype(dtype)
        if np.array_equal(whole, observations):
            return whole  # others are refused, as they are
    return observations


def _example(space: spaces.Space[Any], n_envs: int) -> Any:
    """Observations of this space."""
    if isinstance(space, spaces.Dict):
        return TensorDict({key: _example(part, n_envs) for key, part in space.spaces.items()}, [n_envs])
    return torch.from_numpy(np.zeros((n_envs, *(space.shape or ())), dtype=space.dtype))


def _no_attribute(buffer: ReplayBuffer, name: str) -> AttributeError:
    hint = ": its data are in `storage`, and storage.get_all_buffer_data() copies them" if name in _ARRAYS else ""
    return AttributeError(f"this {type(buffer).__name__} has no {name!r}{hint}")


def _check_options(buffer: Any, kind: type, storage: type, given: tuple[str, ...], options: Iterable[str]) -> None:
    """Refuse options that neither the buffer nor its storage has, or that follow from those of the buffer."""
    own = [name for name in signature(kind).parameters if name != "options"]
    further = [name for name in signature(storage).parameters if name not in (*own, *given)]
    check_known(f"{type(buffer).__name__}()", options, [*own, *further])


def _is_saved(journal: Journal) -> bool:
    """Whether the folder of a journal holds what a storage has saved."""
    return os.path.lexists(os.path.join(journal.path, NAME))


def _require_new(journal: Journal | None, advice: str) -> None:
    """Refuse the folder of a journal that holds something, which must not be overwritten."""
    if journal is not None and _is_saved(journal):
        raise InvalidInputError(
            f"the folder {os.path.abspath(journal.path)} already holds what a storage has saved: {advice}. Nothing was "
            "changed."
        )
