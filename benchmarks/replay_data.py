"""Synthetic experience for replay: all values of a transition follow from its id, so that any batch can be checked.

An id counts observations: each episode has one more observation than steps, so the next observation of a step, final
observations included, has the next id of the same environment. An observation contains its id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box, Discrete

Array = npt.NDArray[Any]
GAMMA = 0.99
NOISE_ROWS = 4093


@dataclass(frozen=True)
class Steps:
    """Steps of all environments, each array ``[steps, envs, ...]``; a step is one index of the first axis."""

    observations: Array
    actions: Array
    rewards: Array
    terminated: Array
    truncated: Array
    next_observations: Array

    def each(self) -> Iterator[Steps]:
        """The steps one by one, ``[envs, ...]``, as separate copies, as an environment returns them."""
        for t in range(len(self.rewards)):
            yield Steps(*(values[t].copy() for values in vars(self).values()))

    def flat(self) -> Steps:
        """The same, with steps and environments flattened to one axis."""
        return Steps(*(values.reshape(-1, *values.shape[2:]) for values in vars(self).values()))

    def shuffled(self) -> Steps:
        """The same in random order, so that no observation follows on the step before, as in offline data."""
        order = np.random.default_rng(0).permutation(len(self.rewards))
        return Steps(*(values[order] for values in vars(self).values()))

    def infos(self) -> list[dict[str, Any]]:
        """For each step the infos of a MuJoCo environment of Gymnasium, or of a vector of them.

        A vector has arrays, and a mask beside each. Where an episode ended it has the final observation, because it
        has been reset: ``after_reset`` gives what it returns as the next observation.
        """
        return [self._vector_infos(t) if self.rewards.shape[1] > 1 else _infos(t) for t in range(len(self.rewards))]

    def _vector_infos(self, t: int) -> dict[str, Any]:
        envs = self.rewards.shape[1]
        infos: dict[str, Any] = {}
        for key, value in _infos(t).items():
            infos |= {key: np.full(envs, value), f"_{key}": np.ones(envs, dtype=bool)}
        ended = self.terminated[t] | self.truncated[t]
        if ended.any():
            final = np.full(envs, None, dtype=object)
            for env in np.flatnonzero(ended):
                final[env] = self.next_observations[t, env].copy()
            infos |= {"final_obs": final, "_final_obs": ended, "final_info": {}, "_final_info": ended}
        return infos

    def listed_infos(self) -> list[list[dict[str, Any]]]:
        """The same infos as Stable-Baselines3 has them: a dict for each environment."""
        return [
            [_infos(t) | ({"TimeLimit.truncated": True} if cut else {}) for cut in self.truncated[t]]
            for t in range(len(self.rewards))
        ]

    def after_reset(self) -> Steps:
        """The same, with the observation that the next episode begins with where one ended."""
        ended = (self.terminated | self.truncated)[..., None]
        following = np.where(ended, np.roll(self.observations, -1, axis=0), self.next_observations)
        return replace(self, next_observations=following)


def _infos(t: int) -> dict[str, Any]:
    """What Hopper says of a step."""
    names = ("x_position", "z_distance_from_origin", "x_velocity", "reward_forward", "reward_ctrl", "reward_survive")
    return {name: np.float64(0.01 * t + i) for i, name in enumerate(names)}


class Source(ABC):
    """An infinite stream of steps from ``envs`` environments, ``chunk`` transitions at a time.

    All episodes have the same length, and those of different environments end at different steps. Every second one is
    terminated, the others are truncated.
    """

    def __init__(
        self, observation_space: Box, action_space: Box | Discrete, envs: int, episode_length: int, chunk: int
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.obs_shape: tuple[int, ...] = observation_space.shape
        self.action_shape: tuple[int, ...] = action_space.shape or ()
        self.envs = envs
        self._chunk = chunk
        self.episode_length = episode_length
        self._ahead = np.arange(envs) * episode_length // envs

    @abstractmethod
    def observations(self, ids: Array) -> Array:
        """The observations of some ids, ``[*ids.shape, ...]``."""

    @abstractmethod
    def ids(self, observations: torch.Tensor) -> Array:
        """The ids that observations contain."""

    @abstractmethod
    def actions(self, ids: Array) -> Array:
        """The actions of some ids."""

    def rewards(self, ids: Array) -> Array:
        """The rewards of some ids."""
        return ((ids * 7) % 101 - 50).astype(np.float32)

    def place(self, ids: Array) -> Array:
        """The number of steps since the episode began."""
        place: Array = ids // self.envs % (self.episode_length + 1)
        return place

    def steps_left(self, ids: Array) -> Array:
        """The number of steps left in the episode, including the one from this observation."""
        left: Array = self.episode_length - self.place(ids)
        return left

    def terminates(self, ids: Array) -> Array:
        """Whether the episode ends in a termination."""
        terminates: Array = ids // self.envs // (self.episode_length + 1) % 2 == 0
        return terminates

    def fill(self, transitions: int) -> Iterator[Steps]:
        """This many transitions, in pieces. The last step ends the episode of every environment."""
        steps = transitions // self.envs
        size = max(1, self._chunk // self.envs)
        for first in range(0, steps, size):
            clock = np.arange(first, min(first + size, steps))
            piece = self._steps(*np.divmod(clock[:, None] + self._ahead, self.episode_length))
            if clock[-1] == steps - 1:
                piece.truncated[-1] = ~piece.terminated[-1]
            yield piece

    def loop(self, length: int = 40) -> Steps:
        """Steps that may follow those of ``fill`` and then be repeated: the ends of two episodes.

        They are few, so that they stay in the cache, like data that an environment has just produced.
        """
        episode, place = np.divmod(np.arange(2 * length)[:, None] + self._ahead, length)
        return self._steps(episode % 2, place + self.episode_length - length)

    def _steps(self, episode: Array, place: Array) -> Steps:
        ids = (episode * (self.episode_length + 1) + place) * self.envs + np.arange(self.envs)
        ended = self.steps_left(ids) == 1
        return Steps(
            observations=self.observations(ids),
            actions=self.actions(ids),
            rewards=self.rewards(ids),
            terminated=ended & self.terminates(ids),
            truncated=ended & ~self.terminates(ids),
            next_observations=self.observations(ids + self.envs),
        )

    def expected(self, ids: Array, n_step: int = 1) -> dict[str, torch.Tensor]:
        """The batch that is correct for some ids."""
        taken = np.minimum(n_step, self.steps_left(ids))
        rewards = np.zeros(ids.shape)
        for i in range(n_step):
            rewards += np.where(i < taken, GAMMA**i * self.rewards(ids + i * self.envs), 0.0)
        terminated = self.terminates(ids) & (taken == self.steps_left(ids))
        batch = {
            "observations": self.observations(ids),
            "actions": self.actions(ids),
            "rewards": rewards.astype(np.float32),
            "discounts": np.where(terminated, 0.0, GAMMA**taken).astype(np.float32),
            "next_observations": self.observations(ids + taken * self.envs),
        }
        return {name: torch.from_numpy(values) for name, values in batch.items()}


def unbounded(size: int) -> Box:
    """A float32 space."""
    return Box(-np.inf, np.inf, (size,), np.float32)


class VectorSource(Source):
    """Float32 vectors for observations and actions."""

    def __init__(self, envs: int = 1, obs: int = 17, actions: int = 6, episode_length: int = 200) -> None:
        super().__init__(unbounded(obs), unbounded(actions), envs, episode_length, chunk=10_000)
        rng = np.random.default_rng(0)
        self._obs = rng.normal(size=(NOISE_ROWS, obs)).astype(np.float32)
        self._actions = rng.normal(size=(NOISE_ROWS, actions)).astype(np.float32)

    def observations(self, ids: Array) -> Array:
        values: Array = self._obs[ids % NOISE_ROWS]
        values[..., 0] = ids
        return values

    def ids(self, observations: torch.Tensor) -> Array:
        return observations[..., 0].numpy().astype(np.int64)

    def actions(self, ids: Array) -> Array:
        values: Array = self._actions[ids % NOISE_ROWS]
        return values


class PixelSource(Source):
    """Frame stacks, ``(stack * channels, 84, 84)`` uint8; an episode begins with its first frame repeated.

    ``actions`` is the length of a float32 vector, or 0 for 18 discrete actions. With ``last`` the frames are the last
    axis, ``(84, 84, stack)``.
    """

    SIDE = 84

    def __init__(
        self, stack: int, channels: int, actions: int, episode_length: int = 200, *, last: bool = False
    ) -> None:
        self._last = last
        pixels = Box(0, 255, (stack * channels, self.SIDE, self.SIDE), np.uint8)
        if last:
            pixels = Box(0, 255, (self.SIDE, self.SIDE, stack), np.uint8)
        super().__init__(
            pixels, unbounded(actions) if actions else Discrete(18), 1, episode_length, chunk=episode_length
        )
        self.stack = stack
        self.channels = channels
        self._frame = channels * self.SIDE**2
        rng = np.random.default_rng(0)
        noise = rng.integers(0, 256, NOISE_ROWS + self._frame, dtype=np.uint8)
        self._noise = np.lib.stride_tricks.sliding_window_view(noise, self._frame)
        self._actions = rng.normal(size=(NOISE_ROWS, actions)).astype(np.float32) if actions else None

    def observations(self, ids: Array) -> Array:
        place = self.place(ids)
        frames = [self._frames(ids - np.minimum(place, back)) for back in range(self.stack - 1, -1, -1)]
        if self._last:
            return np.stack(frames, axis=-1).reshape(*ids.shape, *self.obs_shape)
        return np.concatenate(frames, axis=-1).reshape(*ids.shape, *self.obs_shape)

    def _frames(self, ids: Array) -> Array:
        pixels: Array = self._noise[ids % NOISE_ROWS]
        pixels[..., :4] = ids.astype(np.int32)[..., None].view(np.uint8)
        return pixels

    def ids(self, observations: torch.Tensor) -> Array:
        newest = observations.numpy()[..., -self.channels, 0, :4]
        ids: Array = np.ascontiguousarray(newest).view(np.int32)[..., 0].astype(np.int64)
        return ids

    def actions(self, ids: Array) -> Array:
        values: Array = ids % 18 if self._actions is None else self._actions[ids % NOISE_ROWS]
        return values


def check_batches(
    source: Source, shape: tuple[int, ...], n_step: int, evidence: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Raise if a batch has a wrong shape or dtype, or a value that does not match its id.

    Rows for which "compared" is False are not checked.
    """
    for name, batch in evidence.items():
        if not batch:
            continue
        ids = source.ids(batch["observations"])
        if ids.shape != shape:
            raise RuntimeError(f"{name} served {ids.shape} transitions, not {shape}")
        if len(np.unique(ids)) < ids.shape[0] // 2:
            raise RuntimeError(f"{name} served the same transitions repeatedly")
        compared = batch.get("compared", torch.ones(shape, dtype=torch.bool))
        for field, values in source.expected(ids, n_step).items():
            served = batch[field]
            if (served.shape, served.dtype) != (values.shape, values.dtype):
                raise RuntimeError(
                    f"{name} served {field} {served.shape} {served.dtype}, not {values.shape} {values.dtype}"
                )
            if not torch.allclose(served[compared].double(), values[compared].double(), rtol=1e-5, atol=1e-5):
                raise RuntimeError(f"{name} served {field} that do not match its ids")
