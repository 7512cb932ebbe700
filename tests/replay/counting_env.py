"""An environment that counts, and a loop that drives a storage with a vector of them as a training loop would."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

# How long each episode of each environment is, and whether it terminates (else: is truncated), over and over.
PLANS = (
    ((3, True), (1, False), (5, False), (2, True)),
    ((4, False), (1, True), (1, True), (6, True)),
    ((30, True),),
)


class CountingEnv(gymnasium.Env):
    """Observation: [number, -number] with a number for each (environment, episode, step). Keeps a list of what it did.

    ``steps`` holds (number, action, reward, end, number of the observation after it) of every real step.
    """

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Discrete(1000)

    def __init__(self, index):
        self.index, self.episode, self.time, self.steps = index, -1, 0, []

    def _number(self):
        return 100_000 * (self.index + 1) + 100 * self.episode + self.time

    def _observe(self):
        return np.array([self._number(), -self._number()], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.time = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action):
        length, terminates = PLANS[self.index][self.episode % len(PLANS[self.index])]
        before = self._number()
        self.time += 1
        over = self.time == length
        end = {True: "terminated", False: "truncated"}[terminates] if over else None
        # A reward of 0 in every third step: only a reset step may be told by its reward.
        reward = float(self.time % 3)
        self.steps.append((before, int(action), reward, end, self._number()))
        return self._observe(), reward, end == "terminated", end == "truncated", {"time": self.time}


def make_vector(mode, envs=3):
    return SyncVectorEnv([lambda i=i: CountingEnv(i) for i in range(envs)], autoreset_mode=mode)


def drive(vector, storage, steps):
    """The usual loop; with AutoresetMode.DISABLED it resets ended environments itself."""
    by_hand = vector.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observations, _ = vector.reset()
    for number in range(steps):
        actions = np.arange(vector.num_envs) + 10 * number
        after, rewards, terminated, truncated, infos = vector.step(actions)
        storage.add(observations, actions, rewards, terminated, truncated, infos, after)
        observations = after
        ended = terminated | truncated
        if by_hand and ended.any():
            observations, _ = vector.reset(options={"reset_mask": ended})
        observations = observations.copy()
    return [env.steps for env in vector.envs]
