"""CartPole with a time limit, collected with both autoreset modes of Gymnasium: the same episodes, the same numbers."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from rlstore import InvalidInputError, RolloutStorage

LANES, STEPS, LIMIT = 4, 150, 14


def environments(mode):
    return gym.vector.SyncVectorEnv(
        [lambda: gym.make("CartPole-v1", max_episode_steps=LIMIT)] * LANES, autoreset_mode=mode
    )


def act(observations):
    """As good as random, and the same for the same observation: which step of which mode it comes from is no matter."""
    return (np.abs(observations).sum(1) * 1e5).astype(np.int64) % 2


def critic(observations):
    return torch.as_tensor(observations) @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + 2.0


def collect(storage, envs):
    """One rollout; returns how many episodes terminated and how many were truncated."""
    observations, _ = envs.reset(seed=5)
    ends = np.zeros(2, int)
    for _ in range(STEPS):
        actions = act(observations)
        following, rewards, terminated, truncated, infos = envs.step(actions)
        storage.add(
            observations=observations,
            actions=actions,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            values=critic(observations),
            log_probs=-torch.as_tensor(rewards),
            infos=infos,
        )
        observations = following
        ends += [terminated.sum(), truncated.sum()]
    envs.close()
    storage.compute_returns(critic(observations), 0.9, 0.8, normalize_advantage=False)
    return ends


def transitions(storage, lane):
    """Those of the episodes that ended: observation, action, return, advantage."""
    own = ~storage.reset_steps[:, lane]
    last = int(storage.dones[:, lane].nonzero().max())
    own[last + 1 :] = False
    columns = (storage.observations, storage.actions, storage.rewards, storage.returns, storage.advantages)
    return [column[:, lane][own] for column in columns]


def test_next_step_and_same_step_autoreset_give_the_same_transitions():
    storages = []
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        envs = environments(mode)
        given = None if mode is AutoresetMode.NEXT_STEP else critic
        spaces = envs.single_observation_space, envs.single_action_space
        storage = RolloutStorage.from_spaces(*spaces, LANES, STEPS, autoreset=mode, critic=given)
        terminated, truncated = collect(storage, envs)
        assert min(terminated, truncated) > 5
        storages.append(storage)
    for lane in range(LANES):
        one, other = (transitions(storage, lane) for storage in storages)
        common = min(len(one[0]), len(other[0]))
        assert common > 100
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours[:common], theirs[:common], rtol=1e-5, atol=1e-5)


def test_a_vectorized_environment_has_reset_steps_too():
    """CartPole's own vector environment, which gym.make_vec() gives: it says nothing of resets but by its steps."""
    envs = gym.make_vec("CartPole-v1", num_envs=LANES, max_episode_steps=LIMIT)
    storage = RolloutStorage.from_spaces(envs.single_observation_space, envs.single_action_space, LANES, STEPS)
    assert collect(storage, envs).sum() > 20
    assert torch.equal(storage.reset_steps, storage.rewards == 0)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_an_environment_of_another_mode_is_noticed(mode):
    envs = environments(mode)
    storage = RolloutStorage.from_spaces(envs.single_observation_space, envs.single_action_space, LANES, STEPS)
    if mode is AutoresetMode.DISABLED:
        envs = ResetByHand(envs)
    with pytest.raises(InvalidInputError, match=r"autoreset=\"(SameStep|Disabled)\""):
        collect(storage, envs)


class ResetByHand(gym.vector.VectorWrapper):
    """Resets the environments whose episode ended before the next step."""

    def step(self, actions):
        result = list(self.env.step(actions))
        ended = result[2] | result[3]
        if ended.any():
            result[0] = self.env.reset(options={"reset_mask": ended})[0]
        return tuple(result)
