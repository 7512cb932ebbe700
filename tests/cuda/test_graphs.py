"""On a GPU: what an update asks of a storage, captured as one CUDA graph and replayed."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import PrioritizedReplayStorage, ReplayStorage, RolloutStorage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ENVS, STEPS, BATCHES = 40, 6, 4
GAMMA, LAMBDA = 0.9, 0.8


def fill(storage: RolloutStorage, first_id: int) -> None:
    """A rollout whose numbers tell the (step, environment) that they are of."""
    storage.clear()
    for step in range(STEPS):
        ids = (first_id + step * ENVS + torch.arange(ENVS, device="cuda")).float().unsqueeze(1)
        transition = RolloutStorage.Transition()
        transition.observations = TensorDict({"policy": ids.expand(ENVS, 3)}, batch_size=[ENVS])
        transition.actions, transition.values, transition.rewards = ids.expand(ENVS, 2), -ids, ids.squeeze(1) / 7
        transition.actions_log_prob, transition.dones = ids.squeeze(1) + 0.5, ids.squeeze(1) % 13 == 12
        storage.add_transition(transition)


def made(seed: int) -> RolloutStorage:
    observations = TensorDict({"policy": torch.zeros(ENVS, 3, device="cuda")}, batch_size=[ENVS])
    return RolloutStorage("rl", ENVS, STEPS, observations, [2], "cuda", seed=seed)


def capture(storage, work):
    """A graph of ``work``, and what it gives, which each replay writes anew."""
    for _ in range(2):  # so that all kernels are compiled
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    storage.register_graph(graph)
    with torch.cuda.graph(graph):
        given = work()
    return graph, given


def test_an_update_in_a_graph_is_the_same_as_call_by_call_and_shuffles_anew():
    storage, eager = made(0), made(1)
    fill(storage, 0)
    last = torch.linspace(0, 1, ENVS, device="cuda")

    def update():
        storage.compute_returns(last, GAMMA, LAMBDA)
        return list(storage.mini_batch_generator(BATCHES, 1))

    graph, batches = capture(storage, update)
    orders = []
    for first_id in (0, 1000, 2000, 2000):
        fill(storage, first_id)
        fill(eager, first_id)
        eager.compute_returns(last, GAMMA, LAMBDA)
        graph.replay()
        torch.testing.assert_close(storage.returns, eager.returns)
        torch.testing.assert_close(storage.advantages, eager.advantages)
        ids = torch.cat([batch.actions[:, 0] for batch in batches])
        assert ids.sort().values.tolist() == list(range(first_id, first_id + ENVS * STEPS))
        rows = ids.long() - first_id
        for name in ("returns", "advantages", "values"):
            served = torch.cat([getattr(batch, name) for batch in batches])
            torch.testing.assert_close(served, getattr(storage, name).flatten(0, 1)[rows])
        orders.append(rows.tolist())
    assert len({tuple(order) for order in orders}) == len(orders)


def test_the_order_of_a_graph_is_that_of_the_seed():
    def orders(seed: int) -> list[list[int]]:
        storage = made(seed)
        fill(storage, 0)
        graph, batches = capture(storage, lambda: list(storage.mini_batch_generator(BATCHES, 1)))
        storage.seed(seed + 1)
        found = []
        for _ in range(2):
            graph.replay()
            found.append(torch.cat([batch.actions[:, 0] for batch in batches]).tolist())
        return found

    assert orders(3) == orders(3)
    assert orders(3) != orders(4)


@pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayStorage])
def test_batches_of_replay_in_a_graph_are_drawn_anew_and_whole(kind):
    space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    storage = kind(space, spaces.Box(-np.inf, np.inf, (1,), np.float32), "cuda", ENVS * STEPS, ENVS, 64, seed=0)
    never = torch.zeros(ENVS, dtype=torch.bool, device="cuda")
    for step in range(STEPS):
        ids = (step * ENVS + torch.arange(ENVS, device="cuda")).float().unsqueeze(1)
        storage.add(ids.expand(ENVS, 3), ids, ids[:, 0], never, never, {}, (ids + ENVS).expand(ENVS, 3))

    def learn():
        batch = storage.sample()
        if kind is PrioritizedReplayStorage:
            storage.update(batch.rows, batch.rewards.abs().squeeze(1) + 1)
        return batch

    graph, batch = capture(storage, learn)
    drawn = []
    for _ in range(3):
        graph.replay()
        ids = batch.actions[:, 0]
        assert torch.equal(batch.observations, ids.unsqueeze(1).expand(-1, 3))
        assert torch.equal(batch.next_observations, ids.unsqueeze(1).expand(-1, 3) + ENVS)
        drawn.append(tuple(ids.tolist()))
    assert len(set(drawn)) == 3
