"""What a user's program can name besides the storages, with the types that a type checker has to find; it also runs."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import assert_type

import rlstore
import rlstore.data
from rlstore import RolloutStorage, Storage

folder = Path(tempfile.mkdtemp())
box, choice = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
seen, zeros, no, choices = torch.zeros(4, 3), torch.zeros(4), np.zeros(4, dtype=bool), [0, 1, 0, 1]

# Rollouts.
storage = RolloutStorage.from_spaces(box, choice, num_envs=4, num_steps=2, journal=rlstore.Journal(folder / "run"))
assert_type(storage, RolloutStorage)
for _ in range(2):
    storage.add(
        observations=seen,
        actions=choices,
        rewards=zeros,
        terminated=no,
        truncated=no,
        values=zeros,
        log_probs=zeros,
        infos={},
    )
storage.compute_returns(zeros, gamma=0.99, lam=0.95)
assert_type(storage.mini_batch_generator(2), Iterator[RolloutStorage.Batch])
for batch in storage.mini_batch_generator(num_mini_batches=2, num_epochs=1):
    assert_type(batch.advantages - batch.returns * batch.old_actions_log_prob, Tensor)
for batch in storage.recurrent_mini_batch_generator(2, num_epochs=1):
    assert_type(batch.masks.sum() + batch.step_masks.sum(), Tensor)
assert_type(storage.rewards, Tensor)
assert_type(storage.save(folder / "saved"), None)
saving = storage.save(folder / "saved", background=True)
assert_type(saving, rlstore.BackgroundSave)
saving.wait()
assert_type(RolloutStorage.load(folder / "saved"), RolloutStorage)
assert_type(Storage.load(folder / "saved"), Storage)

documented = RolloutStorage("rl", 4, 2, TensorDict({"policy": seen}, batch_size=[4]), [2], device="cpu")
transition = RolloutStorage.Transition()
transition.observations, transition.actions = TensorDict({"policy": seen}, batch_size=[4]), torch.zeros(4, 2)
transition.rewards = transition.values = transition.actions_log_prob = transition.dones = zeros
documented.add_transition(transition)


class Values:
    def get_values(self, observations: Tensor) -> Tensor:
        return observations.sum(-1)


critic: rlstore.Critic = Values()
make_decoupled = rlstore.DecoupledRolloutStorage.create_factory(1, box, choice, 4)
assert_type(make_decoupled, Callable[..., rlstore.DecoupledRolloutStorage])
decoupled = make_decoupled("cpu", critic)
decoupled.add(seen, zeros, zeros, zeros, zeros, seen, zeros, zeros, zeros)
decoupled.compute_returns_and_advantages(zeros)
assert_type(next(decoupled.sample(num_mini_batch=2)), rlstore.DecoupledBatch)

# Replay.
step = (seen, choices, zeros, no, no, {"reason": 1}, seen + 0.5)
uniform = rlstore.ReplayStorage(box, choice, num_envs=4, batch_size=8)
uniform.add(*step)
assert_type(uniform.sample(), rlstore.ReplayBatch)
assert_type(uniform.sample().rewards + uniform.sample().discounts, Tensor)
assert_type(uniform.episodes(), rlstore.Episodes)
assert_type(uniform.episodes()[uniform.episodes().returns > 0], rlstore.Episodes)
for episode in uniform.episodes():
    assert_type(episode, rlstore.Episode)
    assert_type(episode.rows + uniform.held_rows()[0], Tensor)
    assert_type(uniform[episode.rows], dict[str, Any])
copied = rlstore.PrioritizedReplayStorage.from_episodes(uniform.episodes(), box, choice)
assert_type(copied, rlstore.PrioritizedReplayStorage)
assert_type(copied.add_episodes(uniform.episodes()), int)
rlstore.data.write_npz(uniform, folder / "experience.npz")
assert_type(rlstore.data.read_npz(folder / "experience.npz"), rlstore.data.EpisodeSource)
limit = rlstore.RateLimit(samples_per_insert=8.0, min_size=1)
prioritized = rlstore.PrioritizedReplayStorage(box, choice, num_envs=4, memory="shared", rate_limit=limit)
assert_type(prioritized.rate_limit, rlstore.RateLimit | None)
with prioritized.writer(4, name="left") as writer:
    assert_type(writer, rlstore.ReplayWriter)
    writer.add(*step)
drawn = prioritized.sample(4)
assert_type(drawn, rlstore.PrioritizedBatch)
prioritized.update(drawn.rows, drawn.weights)
mixed = rlstore.MixedReplay(prioritized, copied, share=0.5, batch_size=8)
assert_type(mixed.sample(), rlstore.PrioritizedBatch)
nstep = rlstore.NStepReplayStorage(box, choice, num_envs=4, n_step=3)
nstep.add(*step)
assert_type(next(nstep.replay_iter), rlstore.ReplayBatch)
make_windows = rlstore.SequenceReplayStorage.create_factory(100, box, choice, 4, sequence_length=1)
assert_type(make_windows, Callable[..., rlstore.SequenceReplayStorage])
windows = make_windows("cpu")
windows.add(*step)
assert_type(windows.sample(), rlstore.SequenceBatch)
goals = gym.spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), box))
hindsight = rlstore.HindsightReplayStorage(goals, choice, compute_reward=lambda achieved, desired, info: zeros)
assert_type(hindsight.relabel_fraction, float)
try:
    hindsight.sample()
except rlstore.NotReadyError as error:
    assert_type(error, rlstore.NotReadyError)

# Rollouts from other processes.
handoff = rlstore.DistributedStorage(box, choice, num_steps=1, num_storages=1, batch_size=1)
assert_type(handoff.actor("left"), rlstore.ActorHandle)
with handoff.actor("right").rollout(version=1) as rollout:
    assert_type(rollout, rlstore.Rollout)
    rollout.write(0, obs=[0.0, 0.0, 0.0], reward=1.0)
with handoff.learner(timeout=5.0) as learner:
    assert_type(learner, rlstore.Learner)
    received = next(learner)
    assert_type(received, rlstore.RolloutBatch)
    assert_type(received["obs"] + received.versions, Tensor)
assert_type(handoff.report(), rlstore.HandoffReport)
queue = rlstore.SlotQueue(1)
queue.put(0)
assert_type(queue.get(timeout=1.0), int | None)
