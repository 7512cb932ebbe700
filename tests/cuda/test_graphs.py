"""The storage's work of a whole update as one CUDA graph: replayed, it gives what calling it again would give.

What is captured and what is checked also run without a graph, so that they can be tried where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from rlstore import RolloutStorage

STEPS, ENVS, BATCHES, EPOCHS = 6, 21, 3, 2
IDS = STEPS * ENVS
Batches = list[dict[str, torch.Tensor]]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def build(device: torch.device) -> RolloutStorage:
    storage = RolloutStorage(
        "rl", ENVS, STEPS, TensorDict({"policy": torch.zeros(ENVS, 3)}, [ENVS]), [2], device, seed=3
    )
    for step in range(STEPS):
        storage.add_transition(transition(step, device))
    return storage


def transition(step: int, device: torch.device) -> RolloutStorage.Transition:
    """Observations tell step and environment."""
    ids = (step * ENVS + torch.arange(ENVS, dtype=torch.float32, device=device)).unsqueeze(1)
    made = RolloutStorage.Transition()
    made.observations = TensorDict({"policy": torch.cat([ids, ids + 0.5, -ids], 1)}, [ENVS], device=device)
    made.actions, made.values, made.actions_log_prob = torch.cat([ids, ids], 1), ids / 7, ids.squeeze(1)
    made.rewards, made.dones = ids.squeeze(1) % 5, ids.squeeze(1) % 4 == 0
    made.hidden_states = (ids.expand(ENVS, 4)[None].contiguous(), None)
    return made


def change(storage: RolloutStorage, seed: int) -> None:
    """Other rewards and ends, in the same memory."""
    generator = torch.Generator().manual_seed(seed)
    storage.rewards.copy_(torch.randn(STEPS, ENVS, 1, generator=generator))
    storage.dones.copy_(torch.rand(STEPS, ENVS, 1, generator=generator) < 0.3)


def flat_update(storage: RolloutStorage, last_values: torch.Tensor, *, reshuffle: bool = True) -> Batches:
    storage.compute_returns(last_values, 0.99, 0.95)
    return [
        {"ids": batch.observations["policy"][:, :1], "advantages": batch.advantages, "returns": batch.returns}
        for batch in storage.mini_batch_generator(BATCHES, EPOCHS, reshuffle=reshuffle)
    ]


def trainer_update(storage: RolloutStorage, last_values: torch.Tensor) -> Batches:
    storage.compute_returns(last_values, 0.99, 0.95)
    return [
        {"ids": batch["observations"]["policy"][:, :1], **{name: batch[name] for name in ("advantages", "returns")}}
        for batch in storage.generate_batches(BATCHES, num_epochs=EPOCHS)
    ]


def recurrent_update(storage: RolloutStorage, last_values: torch.Tensor) -> Batches:
    storage.compute_returns(last_values, 0.99, 0.95)
    return [
        {
            "padded": batch.observations["policy"],
            "masks": batch.masks,
            "states": batch.hidden_states[0],
            "advantages": batch.advantages,
        }
        for batch in storage.recurrent_mini_batch_generator(BATCHES, EPOCHS, max_trajectories=STEPS * ENVS // BATCHES)
    ]


def order(batches: Batches) -> list[float]:
    return torch.cat([batch["ids"] for batch in batches]).flatten().tolist()


def assert_flat(storage: RolloutStorage, batches: Batches) -> None:
    """Every row once in each epoch, with the advantages and returns that a storage on the CPU makes of the data."""
    expected = build(torch.device("cpu"))
    for name in ("rewards", "dones"):
        getattr(expected, name).copy_(getattr(storage, name).cpu())
    expected.compute_returns(torch.ones(ENVS, 1), 0.99, 0.95)
    rows = order(batches)
    assert len(rows) == EPOCHS * IDS
    for epoch in range(EPOCHS):
        assert sorted(rows[epoch * IDS : (epoch + 1) * IDS]) == [float(row) for row in range(IDS)]
    places = torch.tensor(rows).long()
    for name in ("advantages", "returns"):
        served = torch.cat([batch[name] for batch in batches]).cpu()
        torch.testing.assert_close(served, getattr(expected, name).view(-1, 1)[places], rtol=1e-5, atol=1e-5)


def assert_recurrent(storage: RolloutStorage, batches: Batches) -> None:
    expected = build(torch.device("cpu"))
    for name in ("rewards", "dones"):
        getattr(expected, name).copy_(getattr(storage, name).cpu())
    truth = recurrent_update(expected, torch.ones(ENVS, 1))
    for ours, theirs in zip(batches, truth, strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name].cpu(), tensor, rtol=1e-5, atol=1e-5)


UPDATES: dict[str, tuple[Callable, Callable]] = {
    "flat": (flat_update, assert_flat),
    "trainer": (trainer_update, assert_flat),
    "recurrent": (recurrent_update, assert_recurrent),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_what_is_captured_is_right_without_a_graph(kind, device):
    update, check = UPDATES[kind]
    storage = build(device)
    for seed in range(2):
        change(storage, seed)
        check(storage, update(storage, torch.ones(ENVS, 1, device=device)))


@needs_cuda
@pytest.mark.parametrize("kind", UPDATES)
def test_a_replay_gives_what_calling_again_would(kind, device):
    update, check = UPDATES[kind]
    storage, last_values = build(device), torch.ones(ENVS, 1, device=device)
    update(storage, last_values)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    storage.register_graph(graph)
    with torch.cuda.graph(graph):
        batches = update(storage, last_values)
    orders = []
    for seed in range(3):
        change(storage, seed)
        graph.replay()
        check(storage, batches)
        if kind != "recurrent":
            orders.append(tuple(order(batches)))
    if kind != "recurrent":
        assert len(set(orders)) == 3, "each replay has an order of its own"


@needs_cuda
def test_one_order_for_all_epochs_is_drawn_anew_by_each_replay(device):
    storage, last_values = build(device), torch.ones(ENVS, 1, device=device)
    flat_update(storage, last_values, reshuffle=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    storage.register_graph(graph)
    with torch.cuda.graph(graph):
        batches = flat_update(storage, last_values, reshuffle=False)
    orders = set()
    for _ in range(3):
        graph.replay()
        assert_flat(storage, batches)
        rows = order(batches)
        assert rows[:IDS] == rows[IDS:]
        orders.add(tuple(rows))
    assert len(orders) == 3


@needs_cuda
def test_an_update_waits_for_the_device_not_once(device):
    storage, last_values = build(device), torch.ones(ENVS, 1, device=device)
    for update, _ in UPDATES.values():
        update(storage, last_values)
    storage.clear()
    steps = [transition(step, device) for step in range(STEPS)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            storage.add_transition(step)
        for update, _ in UPDATES.values():
            update(storage, last_values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
