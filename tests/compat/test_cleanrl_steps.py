"""The steps of CleanRL's off-policy programs in their buffer, which is that of Stable-Baselines3, and at once in ours.

Where an episode terminated, these programs give the first observation of the next one as the next observation, and the
final one only where it was truncated.
"""

import copy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from sb3_steps import forms, rows
from stable_baselines3.common import buffers as theirs

from rlstore.sb3 import ReplayBuffer

SIZE, STEPS = 64, 200
PROGRAMS = {  # the spaces, and the dtype that the program assigns to that of the observations
    "dqn, c51": (spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(2), None),
    "sac, td3, ddpg": (spaces.Box(-np.inf, np.inf, (11,), np.float64), spaces.Box(-1, 1, (3,), np.float32), np.float32),
    "atari": (spaces.Box(0, 255, (4, 6, 6), np.uint8), spaces.Discrete(4), None),
}


class Walk(gym.Env):
    """No observation is like another, in the dtype that the space had at first; episodes are of 2 to 8 steps."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space
        self.dtype, self.shape, self.count = observation_space.dtype, observation_space.shape, 0

    def observed(self):
        self.count += 1
        return np.resize(np.array([self.count // 256, self.count % 256]), self.shape).astype(self.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 9))
        return self.observed(), {}

    def step(self, action):
        self.left -= 1
        return self.observed(), self.count / 8, self.left == 0, False, {}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_row_of_every_batch_is_theirs(program):
    np.random.seed(0)
    observations, actions, assigned = copy.deepcopy(PROGRAMS[program])
    walk = TimeLimit(Walk(observations, actions), 6)
    envs = SyncVectorEnv([lambda: walk], autoreset_mode=AutoresetMode.SAME_STEP)
    envs.action_space.seed(0)
    if assigned is not None:
        envs.single_observation_space.dtype = assigned
    given = (SIZE, envs.single_observation_space, envs.single_action_space, "cpu")
    their, our = (kind(*given, handle_timeout_termination=False) for kind in (theirs.ReplayBuffer, ReplayBuffer))
    obs, _ = envs.reset(seed=0)
    terminated = truncated = 0
    for step in range(STEPS):
        taken = envs.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = envs.step(taken)
        real_next_obs = next_obs.copy()
        if truncations[0]:
            real_next_obs[0] = infos["final_obs"][0]
        for buffer in (their, our):
            buffer.add(obs, real_next_obs, taken, rewards, terminations, infos)
        obs = next_obs
        terminated, truncated = terminated + terminations.sum(), truncated + (truncations & ~terminations).sum()
        if step % 5 == 4:
            served, expected = our.sample(32), rows(their._get_samples(np.arange(their.size())))
            assert forms(served) == forms(their.sample(32))
            assert all(row == expected[key] for key, row in rows(served).items())
    assert rows(our.sample(1000)) == expected
    assert min(terminated, truncated) > 10
