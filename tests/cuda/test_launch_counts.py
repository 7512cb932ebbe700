"""How many launches each piece of work of a rollout takes, as the device sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile

from rlstore import RolloutStorage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STEPS, ENVS = 24, 256


def transition(*, truncated: bool = False) -> RolloutStorage.Transition:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    made = RolloutStorage.Transition()
    made.observations = TensorDict({"policy": some(ENVS, 48)}, [ENVS], device="cuda")
    made.actions, made.rewards, made.values = some(ENVS, 12), some(ENVS), some(ENVS, 1)
    made.actions_log_prob, made.dones = some(ENVS), some(ENVS) > 1.5
    made.distribution_params = (some(ENVS, 12), some(12).expand(ENVS, 12))  # as a deviation of its own comes
    made.hidden_states = (some(1, ENVS, 256), some(1, ENVS, 256))
    if truncated:
        made.truncated, made.final_values = some(ENVS) > 1.5, some(ENVS)
    return made


def storage(*, truncated: bool = False) -> RolloutStorage:
    observations = TensorDict({"policy": torch.zeros(ENVS, 48, device="cuda")}, [ENVS], device="cuda")
    made = RolloutStorage("rl", ENVS, STEPS, observations, [12], "cuda")
    for _ in range(STEPS):
        made.add_transition(transition(truncated=truncated))
    made.compute_returns(torch.zeros(ENVS, 1, device="cuda"), 0.99, 0.95)  # without them a generator looks at the data
    return made


def launches(work: Callable[[], Any]) -> list[str]:
    """The kernels that the work runs on the device, copies apart; after it was done once before."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
        torch.cuda.synchronize()
    on_device = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in on_device if not name.startswith(("Memcpy", "Memset"))]


def consume(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


@pytest.mark.parametrize(("truncated", "most"), [(False, 1), (True, 2)])
def test_a_row_is_one_launch(truncated, most):
    made, step = storage(truncated=truncated), transition(truncated=truncated)

    def work() -> None:
        made.clear()
        made.add_transition(step)

    assert len(launches(work)) <= most


@pytest.mark.parametrize("truncated", [False, True])
def test_returns_and_their_normalisation_are_two(truncated):
    made, last = storage(truncated=truncated), torch.zeros(ENVS, 1, device="cuda")
    assert len(launches(lambda: made.compute_returns(last, 0.99, 0.95))) == 2


@pytest.mark.parametrize(("reuse", "most"), [(False, 2 + 5), (True, 2 + 1)])
def test_flat_batches_are_a_shuffle_and_one_for_each_epoch_that_is_gathered(reuse, most):
    made = storage()
    assert len(launches(lambda: consume(made.mini_batch_generator(4, 5, reuse=reuse)))) <= most


def test_flat_batches_with_a_shuffle_for_each_epoch_are_two_an_epoch():
    made = storage()
    assert len(launches(lambda: consume(made.mini_batch_generator(4, 5, reshuffle=True)))) <= 2 * 5


@pytest.mark.parametrize(("reuse", "most"), [(False, 2 + 5 * 4 + 4), (True, 2 + 4 + 4)])
@pytest.mark.parametrize("room", [None, 900])
def test_recurrent_batches_are_two_launches_and_one_for_each(room, reuse, most):
    made = storage()
    found = launches(lambda: consume(made.recurrent_mini_batch_generator(4, 5, max_trajectories=room, reuse=reuse)))
    assert len(found) <= most
