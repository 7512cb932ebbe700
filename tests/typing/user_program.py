"""A user's program with every storage, and the types that a type checker has to find; it also runs."""

import tempfile
from collections.abc import Iterator

import gymnasium as gym
import torch
from typing_extensions import assert_type

import rlstore
from rlstore import NStepReplayStorage, PrioritizedReplayStorage, ReplayStorage, RolloutStorage

box, choice = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
obs, zeros, no, picks = torch.zeros(4, 3), torch.zeros(4), [False] * 4, [0, 1, 0, 1]

rollout = RolloutStorage.from_spaces(box, choice, num_envs=4, num_steps=1)
rollout.add(observations=obs, actions=picks, rewards=zeros, terminated=no, truncated=no, values=zeros, log_probs=zeros)
rollout.compute_returns(zeros, gamma=0.99, lam=0.95)
assert_type(rollout.mini_batch_generator(2), Iterator[RolloutStorage.Batch])
assert_type(next(rollout.mini_batch_generator(2)).advantages, torch.Tensor)
with tempfile.TemporaryDirectory() as folder:
    assert_type(rollout.save(folder), None)
    assert_type(RolloutStorage.load(folder), RolloutStorage)
    assert_type(rlstore.Storage.load(folder), rlstore.Storage)

decoupled = rlstore.DecoupledRolloutStorage(box, choice, num_steps=1, num_envs=4)
decoupled.add(obs, zeros, zeros, zeros, zeros, obs, zeros, zeros, zeros)
decoupled.compute_returns_and_advantages(zeros)
assert_type(next(decoupled.sample(num_mini_batch=2)), rlstore.DecoupledBatch)

n_step = NStepReplayStorage(box, choice, num_envs=4, n_step=3)
prioritized = PrioritizedReplayStorage(box, choice, num_envs=4)
sequences = rlstore.SequenceReplayStorage(box, choice, num_envs=4, sequence_length=1)
for replay in (ReplayStorage(box, choice, num_envs=4), n_step, prioritized, sequences):
    replay.add(obs, picks, zeros, no, no, {}, obs + 0.5)
assert_type(n_step.sample().rewards + n_step.sample().discounts, torch.Tensor)
assert_type(drawn := prioritized.sample(), rlstore.PrioritizedBatch)
prioritized.update(drawn.rows, drawn.weights)
assert_type(sequences.sample(), rlstore.SequenceBatch)
keys = ("observation", "achieved_goal", "desired_goal")
hindsight = rlstore.HindsightReplayStorage(
    gym.spaces.Dict(dict.fromkeys(keys, box)), choice, compute_reward=lambda reached, wanted, info: reached.sum(-1)
)
hindsight.add(dict.fromkeys(keys, obs[0]), 1, 0.0, False, False, {}, dict.fromkeys(keys, obs[0]))
assert_type(hindsight.sample(), rlstore.ReplayBatch)

handoff = rlstore.DistributedStorage(box, choice, num_steps=1, num_storages=1, batch_size=1)
with handoff.actor().rollout(version=1) as writing:
    writing.write(0, obs=obs[0], reward=1.0)
assert_type(next(handoff.learner())["reward"], torch.Tensor)
