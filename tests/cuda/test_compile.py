"""A training step that is compiled whole takes our batches, and is compiled once for all of them."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import PrioritizedReplayStorage, ReplayStorage, RolloutStorage

ENVS, STEPS = 8, 6


class Compiled:
    """A step without a break in its graph, which counts how often it is compiled."""

    def __init__(self, step, dynamic=False):
        torch._dynamo.reset()
        self.graphs = 0
        self._step = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=self._backend)

    def _backend(self, graph, inputs):
        self.graphs += 1
        return graph.forward

    def __call__(self, *arguments):
        return self._step(*arguments)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def rollout(device, hidden=0):
    """A full rollout whose observations tell the (step, environment) that they are of."""

    def observations(ids):
        return TensorDict({"policy": ids.expand(ENVS, 4), "critic": -ids.expand(ENVS, 2)}, batch_size=[ENVS])

    storage = RolloutStorage("rl", ENVS, STEPS, observations(torch.zeros(ENVS, 1, device=device)), [2], device, seed=0)
    for step in range(STEPS):
        ids = (step * ENVS + torch.arange(ENVS, dtype=torch.float32, device=device)).unsqueeze(1)
        transition = RolloutStorage.Transition()
        transition.observations, transition.actions = observations(ids), ids.expand(ENVS, 2)
        transition.rewards, transition.dones = ids.squeeze(1), ids.squeeze(1) % 11 == 10
        transition.values, transition.actions_log_prob = ids, ids.squeeze(1)
        transition.distribution_params = (ids.expand(ENVS, 2), ids.expand(ENVS, 2))
        if hidden:
            transition.hidden_states = (ids.expand(1, ENVS, hidden), ids.expand(1, ENVS, hidden))
        storage.add_transition(transition)
    storage.compute_returns(torch.zeros(ENVS, device=device), 0.9, 0.9)
    return storage


def loss_of(policy, batch):
    """Something that reads every field of a batch."""
    predicted = policy(batch.observations["policy"])
    ratio = torch.exp(predicted.mean(-1, keepdim=True) - batch.old_actions_log_prob)
    parts = (
        (predicted - batch.actions).square().mean(),
        (ratio * batch.advantages).mean(),
        (batch.returns - batch.values).square().mean(),
        batch.observations["critic"].mean(),
        sum(part.mean() for part in batch.old_distribution_params),
    )
    return sum(parts)


@pytest.mark.parametrize("reshuffle", [False, True])
def test_a_compiled_step_takes_the_batches_of_a_rollout(device, reshuffle):
    storage, policy = rollout(device), torch.nn.Linear(4, 2, device=device)
    step = Compiled(lambda batch: loss_of(policy, batch))
    losses = []
    for _ in range(3):
        for batch in storage.mini_batch_generator(4, 2, reshuffle=reshuffle):
            losses.append(step(batch))
            torch.testing.assert_close(losses[-1], loss_of(policy, batch))
    losses[-1].backward()
    assert len(losses) == 24
    assert policy.weight.grad is not None
    assert step.graphs == 1


def test_a_compiled_step_takes_recurrent_batches_and_leaves_their_width_open(device):
    """Trajectories differ in number from batch to batch: the compiler sees it once, and leaves that size open."""
    storage, policy = rollout(device, hidden=3), torch.nn.Linear(4, 2, device=device)

    def loss(batch):
        predicted = policy(batch.observations["policy"]) * batch.masks.unsqueeze(-1)
        return predicted.sum() + batch.hidden_states[0].sum() + (batch.returns - batch.values).sum()

    step, widths = Compiled(loss, dynamic=None), set()
    for _ in range(3):
        for batch in storage.recurrent_mini_batch_generator(4, 2):
            widths.add(batch.masks.shape[1])
            torch.testing.assert_close(step(batch), loss(batch))
    assert len(widths) > 1
    assert step.graphs <= 2


@pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayStorage])
def test_a_compiled_step_takes_batches_of_replay(device, kind):
    storage = kind(spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(3), device, 64, 2, 16, seed=0)
    never = torch.zeros(2, dtype=torch.bool)
    for step in range(20):
        seen, shown = torch.full((2, 4), float(step)), torch.full((2, 4), step + 1.0)
        storage.add(seen, torch.tensor([step % 3] * 2), torch.ones(2), never, never, {}, shown)
    critic = torch.nn.Linear(4, 3, device=device)

    def loss(batch):
        chosen = critic(batch.observations).gather(1, batch.actions.view(-1, 1))
        target = batch.rewards + batch.discounts * critic(batch.next_observations).amax(1, keepdim=True).detach()
        weights = batch.weights if kind is PrioritizedReplayStorage else 1.0
        return (weights * (chosen - target).square()).mean()

    step = Compiled(loss)
    for _ in range(6):
        batch = storage.sample()
        torch.testing.assert_close(step(batch), loss(batch))
        if kind is PrioritizedReplayStorage:
            storage.update(batch.rows, batch.rewards.abs() + 1)
    assert step.graphs == 1
