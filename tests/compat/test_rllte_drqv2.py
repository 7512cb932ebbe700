"""rllte's own DrQ-v2 agent, unchanged, with our NStepReplayStorage in the place of theirs."""

import resource
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from rllte_toy_env import ReachVector

from rlstore import NStepReplayStorage
from rlstore.engine.memory import capacity

GAMMA, N_STEP = 0.99, 3  # those of the document, which the agent leaves as they are


class WatchedStorage(NStepReplayStorage):
    """Ours, with an eye on every batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.updates = [], []

    def sample(self, *args):
        self.batches.append(super().sample(*args))
        return self.batches[-1]

    def update(self, *args):
        self.updates.append(args)
        return super().update(*args)


@pytest.fixture
def make_agent(rllte, monkeypatch, tmp_path):
    """Agents that keep their experience in our storage; they log, and change directory, below a temporary one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rllte.agent.drqv2, "NStepReplayStorage", WatchedStorage)
    rllte.common.prototype.BaseStorage.register(WatchedStorage)
    made = []

    def make(env, **options):
        small = {"num_init_steps": 50, "storage_size": 2000, "batch_size": 32, "hidden_dim": 64, "feature_dim": 16}
        agent = rllte.agent.drqv2.DrQv2(env=env, device="cpu", seed=1, **{**small, **options})
        made.append(agent.storage)
        return agent

    yield make
    for storage in made:
        storage.close()


def train(agent, steps):
    """With neither a log nor a checkpoint on the way: their logger leaves its files open."""
    agent.train(num_train_steps=steps, save_interval=10**9, log_interval=10**9)


def n_step_lines(transitions):
    """What each transition of one environment must be served as, by its first observation."""
    lines = {}
    for start, (observation, action, *_) in enumerate(transitions):
        total, factor, last = 0.0, 1.0, None
        for _, _, reward, terminated, truncated, after in transitions[start : start + N_STEP]:
            total, last = total + factor * float(reward), after
            factor *= 0.0 if terminated else GAMMA
            if terminated or truncated:
                break
        lines[tuple(observation.flatten().tolist())] = (action, total, factor, last)
    return lines


def assert_served_from(batch, lines):
    """Every row of a batch is one of these lines."""
    for observation, action, reward, discount, after in zip(*batch, strict=True):
        expected = lines[tuple(observation.flatten().tolist())]
        torch.testing.assert_close(action, expected[0].float(), rtol=0, atol=0)
        assert reward.item() == pytest.approx(expected[1], rel=1e-5, abs=1e-5)
        assert discount.item() == pytest.approx(expected[2], rel=1e-6)
        torch.testing.assert_close(after, expected[3].float(), rtol=0, atol=0)


def test_the_agent_takes_batches_of_pixels(make_agent):
    env = ReachVector(pixels=True, limit=7)
    agent = make_agent(env, batch_size=8, storage_size=500)
    train(agent, 70)
    storage = agent.storage
    assert isinstance(storage, WatchedStorage)
    assert len(storage) == 70
    assert len(storage.batches) == 10  # every second of the steps after the first 50
    assert storage.updates == [(agent.metrics,)] * 20
    for batch in storage.batches:
        assert batch.observations.shape == batch.next_observations.shape == (8, 3, 84, 84)
        assert batch.actions.shape == (8, 1)
        assert batch.rewards.shape == batch.discounts.shape == (8, 1)
        assert {tensor.dtype for tensor in batch} == {torch.float32}
        assert {float(value) for value in batch.observations.unique()} == {0.0, 255.0}


def test_the_agent_trains_with_its_own_storage_size(rllte, make_agent, monkeypatch):
    """A million transitions of pixels, more than most machines have memory for: it is taken as they come."""
    size = signature(rllte.agent.drqv2.DrQv2).parameters["storage_size"].default
    assert size == 1_000_000
    monkeypatch.setattr(capacity, "free_ram", lambda: (12 << 30, "as the test says"))
    before = resident()
    # Observations of 3 x 84 x 84 bytes, an action, a reward and the index of the episode; one more for what follows.
    nbytes = (size + 1) * (3 * 84 * 84 + 4 + 4 + 4)
    with pytest.warns(RuntimeWarning, match=rf"WatchedStorage takes .* \({nbytes:,} bytes\) when it is full"):
        agent = make_agent(ReachVector(pixels=True, limit=7), storage_size=size, batch_size=8)
    train(agent, 60)
    storage = agent.storage
    assert (len(storage), storage.storage_size) == (60, size)
    assert len(storage.batches) == 5
    assert {float(value) for value in storage.batches[-1].observations.unique()} == {0.0, 255.0}
    assert resident() - before < 1 << 30  # 60 rows are 1.3 MB; the rest is the agent


def resident():
    """Bytes of this process that are in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_number_the_agent_learns_from_is_one_the_environment_gave(make_agent, num_envs):
    env = ReachVector(num_envs, limit=6)
    agent = make_agent(env)
    agent.aug = None  # shifts are for images
    train(agent, 60 * num_envs)
    storage = agent.storage
    assert len(storage) == 60 * num_envs
    ends = [terminated or truncated for _, _, _, terminated, truncated, _ in env.transitions]
    assert sum(ends) >= 6
    # The steps are over: what is drawn now, and not what was prepared, has seen them all.
    drawn = [storage.sample() for _ in range(storage.num_workers + 20)]
    lines = n_step_lines(env.transitions)
    for batch in drawn[storage.num_workers :]:
        first_env = batch.observations[:, 2] == 0
        assert_served_from([tensor[first_env] for tensor in batch], lines)


def test_the_agent_learns(make_agent):
    env = ReachVector(limit=10, seed=3)
    agent = make_agent(env, num_init_steps=300, batch_size=64, lr=1e-3)
    agent.aug = None
    train(agent, 800)
    assert share_reached(env.transitions[550:]) > share_reached(env.transitions[:300]) + 0.2


def share_reached(transitions):
    """Of the episodes that ended in these steps, how many ended at the goal."""
    return np.mean([terminated for _, _, _, terminated, truncated, _ in transitions if terminated or truncated])


def test_what_their_storage_serves_ours_serves_as_well(rllte, monkeypatch, tmp_path):
    """Theirs leaves out the last steps of every episode; the others have to be the same, number by number."""
    monkeypatch.chdir(tmp_path)
    env = ReachVector(limit=12, nearest=2.0, seed=2)  # an episode no longer than n makes theirs fail
    spaces = (env.observation_space, env.action_space)
    theirs = rllte.xploit.storage.NStepReplayStorage(*spaces, batch_size=200, num_workers=0, pin_memory=False)
    ours = NStepReplayStorage(*spaces, batch_size=200, num_workers=0, pin_memory=False, storage_size=1000)
    observations, _ = env.reset()
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        actions = 0.3 * torch.randn(1, 1, generator=generator)
        after, rewards, terminated, truncated, infos = env.step(actions)
        real = after.clone()
        if infos:
            real[0] = torch.as_tensor(infos["final_observation"][0])
        for storage in (theirs, ours):
            storage.add(observations, actions, rewards, terminated, truncated, infos, real)
        observations = after
    lines = n_step_lines(env.transitions)
    assert_served_from(ours.sample(), lines)
    drawn = [ours.sample() for _ in range(20)]
    mine = {tuple(o.tolist()): line for batch in drawn for o, *line in zip(*batch, strict=True)}
    assert mine.keys() == lines.keys()
    for observation, *line in zip(*theirs.sample(), strict=True):
        for their_value, our_value in zip(line, mine[tuple(observation.tolist())], strict=True):
            torch.testing.assert_close(our_value, their_value, rtol=1e-5, atol=1e-5)
