"""Stable-Baselines3's own algorithms train with our buffers, save them and go on exactly where they were."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_steps import leaves
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from where import DEVICE

from rlstore.sb3 import DictReplayBuffer, DictRolloutBuffer, RolloutBuffer


class DictEnv(gym.Env):
    """A clock: episodes are truncated after ten steps."""

    observation_space = spaces.Dict({"time": spaces.Box(0, 10, (1,), np.float32), "last": spaces.Discrete(3)})

    def __init__(self, continuous=False):
        self.action_space = spaces.Box(-2, 2, (1,), np.float32) if continuous else spaces.Discrete(3)

    def observed(self, action):
        return {"time": np.array([self.time], np.float32), "last": int(action)}

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.observed(0), {}

    def step(self, action):
        self.time += 1
        last = 0 if isinstance(self.action_space, spaces.Box) else action
        return self.observed(last), float(self.time), False, self.time == 10, {}


def dqn(n_envs=2, **arguments):
    env = DummyVecEnv([DictEnv] * n_envs)
    options = {"learning_starts": 20, "buffer_size": 60, "batch_size": 8, "train_freq": 5, "device": DEVICE, "seed": 3}
    return DQN("MultiInputPolicy", env, replay_buffer_class=DictReplayBuffer, **options, **arguments)


@pytest.mark.parametrize("options", [{}, {"n_steps": 3, "gamma": 0.99}, {"prioritized": True, "alpha": 0.7}], ids=str)
def test_dqn_trains_and_a_seed_gives_the_same_weights(options):
    weights = []
    for _ in range(2):
        model = dqn(replay_buffer_kwargs=options).learn(100)
        assert model._n_updates > 0
        assert (model.replay_buffer.pos, model.replay_buffer.full) == (50 % 30, True)
        weights.append(torch.cat([parameter.flatten() for parameter in model.policy.parameters()]))
    assert torch.equal(*weights)


def test_sac_trains_with_normalized_observations():
    env = VecNormalize(DummyVecEnv([lambda: DictEnv(continuous=True)]), norm_obs_keys=["time"])
    options = {"replay_buffer_kwargs": {"n_steps": 3}, "learning_starts": 20, "buffer_size": 100, "device": DEVICE}
    options["policy_kwargs"] = {"net_arch": [8]}
    model = SAC("MultiInputPolicy", env, replay_buffer_class=DictReplayBuffer, **options).learn(40)
    assert model._n_updates == 20
    held = model.replay_buffer.storage.get_all_buffer_data()
    assert held["observations"]["time"].flatten().tolist() == list(range(10)) * 4  # as they were before normalization
    assert held["next_observations"]["time"][9::10].flatten().tolist() == pytest.approx([10] * 4)
    assert not held["terminated"].any()
    assert held["truncated"].flatten().nonzero().flatten().tolist() == [9, 19, 29, 39]
    assert held["actions"].abs().max() <= 1  # scaled, as SAC learns from them


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_on_policy_algorithms_train(algorithm):
    env = DummyVecEnv([DictEnv] * 2)
    model = algorithm("MultiInputPolicy", env, rollout_buffer_class=DictRolloutBuffer, n_steps=32, device=DEVICE)
    before = torch.cat([parameter.flatten().clone() for parameter in model.policy.parameters()])
    model.learn(128)
    assert model.num_timesteps == 128
    assert not torch.equal(before, torch.cat([parameter.flatten() for parameter in model.policy.parameters()]))
    assert np.isfinite(model.logger.name_to_value["train/explained_variance"])


@pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")
def test_ppo_collects_the_rollout_that_it_collects_without_us():
    """A seed gives the same weights and actions: our buffer draws its own seed from another generator."""
    rollouts = []
    for buffer in (None, RolloutBuffer):
        model = PPO("MlpPolicy", "CartPole-v1", rollout_buffer_class=buffer, n_steps=64, device=DEVICE, seed=1)
        model._setup_learn(64)
        model.collect_rollouts(model.env, model._init_callback(None), model.rollout_buffer, 64)
        rollouts.append(model.rollout_buffer)
    for name in ("rewards", "values", "log_probs", "advantages", "returns", "episode_starts"):
        their, our = (getattr(rollout, name) for rollout in rollouts)
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-5, err_msg=name)
    assert rollouts[0].episode_starts.sum() > 1


def batches(model, count=3):
    return [leaves(model.replay_buffer.sample(16)) for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"prioritized": True, "n_steps": 3}], ids=str)
def test_a_saved_replay_buffer_goes_on_exactly(options, tmp_path):
    model = dqn(replay_buffer_kwargs=options)
    model.learn(90)
    model.save_replay_buffer(tmp_path / "replay.pkl")
    model.save(tmp_path / "model.zip")
    expected = batches(model)
    resumed = DQN.load(tmp_path / "model.zip", env=DummyVecEnv([DictEnv] * 2))
    assert type(resumed.replay_buffer) is DictReplayBuffer
    assert resumed.replay_buffer.size() == 0
    resumed.load_replay_buffer(tmp_path / "replay.pkl")
    for one, other in zip(batches(resumed), expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    for name in ("pos", "full", "buffer_size", "n_envs", "n_steps", "gamma", "prioritized"):
        assert getattr(resumed.replay_buffer, name) == getattr(model.replay_buffer, name)
    resumed.learn(40, reset_num_timesteps=False)
    assert resumed.replay_buffer.pos == (90 + 40) // 2 % 30


def test_learning_again_with_optimized_memory_cuts_the_episode_off():
    model = dqn(n_envs=1, optimize_memory_usage=True).learn(15)
    with pytest.warns(UserWarning, match="last trajectory in the replay buffer will be truncated"):
        model.learn(15)
    held = model.replay_buffer.storage.get_all_buffer_data()
    assert held["observations"]["time"].flatten().tolist() == [*range(10), *range(5)] * 2
    assert held["next_observations"]["time"].flatten().tolist() == [*range(1, 11), *range(1, 6)] * 2
