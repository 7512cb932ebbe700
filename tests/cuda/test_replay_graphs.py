"""On a GPU: replay adds, draws and updates without a wait, and a captured draw sees what is added between replays."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import HindsightReplayStorage, PrioritizedReplayStorage, ReplayStorage, SequenceReplayStorage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ENVS, STEPS = 37, 100
SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
KINDS = [ReplayStorage, PrioritizedReplayStorage]


def made(kind, **options):
    return kind(SPACE, spaces.Discrete(5), "cuda", ENVS * STEPS, ENVS, 64, n_step=3, seed=0, **options)


class World:
    """Environments whose observations count (step, environment), and that end every seventh step in turn."""

    def __init__(self) -> None:
        self.step, self.env = 0, torch.arange(ENVS, device="cuda")
        self.actions, self.never = torch.zeros_like(self.env), torch.zeros(ENVS, dtype=torch.bool, device="cuda")

    def add(self, storage, count: int) -> None:
        for _ in range(count):
            ids = (self.step * ENVS + self.env).float()
            ends = (self.env + self.step) % 7 == 6
            shown, following = ids.unsqueeze(1).expand(ENVS, 3).contiguous(), (ids + ENVS).unsqueeze(1).expand(ENVS, 3)
            storage.add(shown, self.actions, ids, ends, self.never, {}, following.contiguous())
            self.step += 1


@contextlib.contextmanager
def no_wait():
    """What makes the host wait for the device raises, as far as torch sees it."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def learn(storage):
    batch = storage.sample()
    if isinstance(storage, PrioritizedReplayStorage):
        storage.update(batch.rows, batch.rewards.abs().squeeze(1) + 1)
    return batch


def assert_whole(batch) -> torch.Tensor:
    """The ids of the first steps, after a look at the n-step windows of three steps."""
    ids = batch.observations[:, 0]
    time, env = ids.long() // ENVS, ids.long() % ENVS
    assert torch.equal(batch.observations, ids.unsqueeze(1).expand(-1, 3))
    left, discounts = 7 - (env + time) % 7, batch.discounts.squeeze(1)  # steps to the end of the episode
    ended = discounts == 0
    taken = torch.where(ended, left, (discounts.clamp(min=0.5).log() / np.log(0.99)).round().long())
    assert bool(((taken >= 1) & (taken <= 3) & (taken <= left)).all())
    assert torch.equal(batch.next_observations[:, 0], ids + ENVS * taken)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_adding_drawing_and_updating_do_not_wait(kind):
    storage, world = made(kind), World()
    world.add(storage, 90)
    learn(storage)
    with no_wait():
        for _ in range(40):
            world.add(storage, 1)
            batch = learn(storage)
    assert_whole(batch)
    assert len(storage) == ENVS * STEPS


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_sequences_do_not_wait(alpha):
    storage = SequenceReplayStorage(
        SPACE, spaces.Discrete(5), "cuda", ENVS * STEPS, ENVS, 64, sequence_length=5, burn_in=2, alpha=alpha, seed=0
    )
    world = World()
    world.add(storage, 90)

    def learn_from_sequences():
        batch = storage.sample()
        if alpha:
            storage.update(batch.rows, torch.ones_like(batch.weights))
        return batch

    learn_from_sequences()
    with no_wait():
        for _ in range(40):
            world.add(storage, 1)
            batch = learn_from_sequences()
    ids, there = batch.observations[:, :, 0], batch.observations[:, :, 0] > 0
    assert bool((ids[:, 1:] - ids[:, :-1] == ENVS)[there[:, 1:] & there[:, :-1]].all())
    assert bool(batch.masks.any())


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_does_not_wait(strategy):
    space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), SPACE))
    storage = HindsightReplayStorage(
        space,
        spaces.Discrete(5),
        "cuda",
        ENVS * STEPS,
        ENVS,
        64,
        compute_reward=lambda achieved, desired, info: -(achieved - desired).abs().sum(-1),
        strategy=strategy,
        seed=0,
    )
    shown = torch.arange(ENVS, device="cuda").float().unsqueeze(1).expand(ENVS, 3).contiguous()
    never, actions = torch.zeros(ENVS, dtype=torch.bool, device="cuda"), torch.zeros(ENVS, device="cuda").long()

    def step(shown: torch.Tensor) -> torch.Tensor:
        observed, following = dict.fromkeys(space, shown), dict.fromkeys(space, shown + ENVS)
        storage.add(observed, actions, shown[:, 0], never, never, {}, following)
        return shown + ENVS

    shown = step(shown)
    storage.sample()
    with no_wait():
        for _ in range(20):
            shown = step(shown)
            batch = storage.sample()
    assert bool((batch.observations["observation"][:, 0] < 21 * ENVS).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_draw_is_another_each_time_and_sees_what_was_added(kind):
    storage, world = made(kind), World()
    world.add(storage, 20)
    learn(storage), learn(storage)
    graph = torch.cuda.CUDAGraph()
    storage.register_graph(graph)
    learn(storage)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        batch = learn(storage)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(tuple(assert_whole(batch).tolist()))
    assert len(set(seen)) == 3
    world.add(storage, STEPS)  # all that was there is overwritten
    for _ in range(3):
        graph.replay()
        assert float(assert_whole(batch).min()) >= 20 * ENVS


def test_a_graph_of_tables_that_may_move_is_refused():
    storage, world = made(ReplayStorage), World()
    world.add(storage, 3)
    storage.sample()
    with pytest.raises(RuntimeError, match="register_graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        storage.sample()
