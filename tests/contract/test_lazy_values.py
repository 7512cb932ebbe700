"""Tensors that torch negates or conjugates when they are read: what is stored are their values, by every way in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from replay_cases import REPLAY_CASES
from rollout_model import same_data
from storages import CASES
from tensordict import TensorDict
from test_distributed_trainer import make as make_distributed
from test_distributed_trainer import sample_of as distributed_sample

from rlstore import (
    DecoupledRolloutStorage,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
)
from rlstore.kernels import _native

STEPS = 2


def negated(x: torch.Tensor) -> torch.Tensor:
    """Contiguous memory with the opposite sign."""
    return torch._neg_view((-x).contiguous())


def imaginary(x: torch.Tensor) -> torch.Tensor:
    """The imaginary part of a conjugate, which has the opposite sign and a stride."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


LAZY = {"negated": negated, "imaginary part": imaginary}


def lazily(value: Any, change: Any) -> Any:
    """A sample whose floats are all lazy."""
    if isinstance(value, (dict, TensorDict)):
        return {name: lazily(part, change) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(lazily(part, change) for part in value)
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
        return value
    lazy = change(value)
    assert lazy.is_neg()
    assert torch.equal(lazy, value) or bool(value.isnan().any())
    return lazy


def all_storages() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for case in CASES:
        made[case.name] = (lambda c=case: c.create_factory(STEPS, seed=3)("cpu", None, None), case.sample)
    for case in REPLAY_CASES:
        made[case.name] = (case.make, case.sample)
    made["distributed"] = (lambda: make_distributed(size=STEPS), distributed_sample)
    return made


STORAGES = all_storages()


@pytest.mark.parametrize("form", LAZY)
@pytest.mark.parametrize("name", STORAGES)
def test_every_field_of_a_step_is_read_with_its_sign(name, form):
    make, sample = STORAGES[name]
    plain, lazy = make(), make()
    for step in range(STEPS):
        plain.insert_transition(sample(step))
        lazy.insert_transition(lazily(sample(step), LAZY[form]))
    same_data(lazy.get_all_buffer_data(), plain.get_all_buffer_data())


@pytest.mark.parametrize("form", LAZY)
@pytest.mark.parametrize("name", STORAGES)
def test_every_field_of_a_slice_is_read_with_its_sign(name, form):
    make, sample = STORAGES[name]
    plain, lazy = make(), make()
    for step in range(STEPS):
        plain.insert_transition(sample(step))
    data = plain.get_all_buffer_data()
    lazy.insert_data_slice(lazily(data, LAZY[form]))
    same_data(lazy.get_all_buffer_data(), data)


BOX = spaces.Box(-9, 9, (2,))
NUMBERS = torch.arange(1.0, 9.0).view(4, 2)


@pytest.mark.parametrize("form", LAZY)
def test_add_and_arrays_are_read_with_their_sign(form):
    lazy = LAZY[form]
    added = ReplayStorage(BOX, BOX, storage_size=8, num_envs=4, extra_fields={"costs": ((2,), torch.float32)})
    ends = torch.zeros(4, dtype=torch.bool)
    for number in (1, 2):  # the first add takes another path than those that follow
        obs, rewards = number * NUMBERS, number * NUMBERS[:, 0].contiguous()
        ended = lazy(torch.ones(4)) if number == 2 else ends
        step = (lazy(obs), lazy(obs / 2), lazy(rewards), ends, ended, {}, lazy(obs + NUMBERS))
        added.add(*step, costs=lazy(obs), mask=lazy(torch.ones(4)))
    data = added.get_all_buffer_data()
    assert data["observations"].tolist() == [NUMBERS.tolist(), (2 * NUMBERS).tolist()]
    assert data["next_observations"].tolist() == [(2 * NUMBERS).tolist(), (3 * NUMBERS).tolist()]
    assert data["actions"].tolist() == [(NUMBERS / 2).tolist(), NUMBERS.tolist()]
    assert data["rewards"].squeeze(-1).tolist() == [[1, 3, 5, 7], [2, 6, 10, 14]]
    assert data["costs"].tolist() == data["observations"].tolist()
    arrays = {
        "observations": lazy(NUMBERS),
        "actions": lazy(NUMBERS / 2),
        "rewards": lazy(NUMBERS[:, 0].contiguous()),
        "terminated": lazy(torch.tensor([0.0, 0.0, 0.0, 1.0])),
        "truncated": lazy(torch.zeros(4)),
        "next_observations": lazy(NUMBERS + 2),
    }
    filled = ReplayStorage.from_arrays(arrays)
    data = filled.get_all_buffer_data()
    assert data["observations"].squeeze(1).tolist() == NUMBERS.tolist()
    assert data["actions"].squeeze(1).tolist() == (NUMBERS / 2).tolist()
    assert data["rewards"].flatten().tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize("form", LAZY)
def test_priorities_are_read_with_their_sign(form):
    lazy = LAZY[form]
    storage = PrioritizedReplayStorage(BOX, BOX, storage_size=8, num_envs=4, alpha=1.0, batch_size=4)
    ends, obs = torch.zeros(4, dtype=torch.bool), torch.zeros(4, 2)
    storage.add(obs, obs, torch.zeros(4), ends, ends, {}, obs, priorities=lazy(torch.tensor([4.0, 3.0, 2.0, 1.0])))
    assert storage.priorities(torch.arange(4)).tolist() == [4, 3, 2, 1]
    storage.update(torch.arange(4), lazy(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    assert storage.priorities(torch.arange(4)).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("form", LAZY)
def test_values_for_returns_and_attributes_are_read_with_their_sign(form):
    lazy = LAZY[form]
    storage = RolloutStorage("rl", 4, 1, {"policy": torch.zeros(4, 2)}, [2])
    transition = RolloutStorage.Transition()
    transition.observations, transition.actions = {"policy": lazy(NUMBERS)}, lazy(NUMBERS / 2)
    transition.rewards, transition.dones = lazy(NUMBERS[:, 0].contiguous()), lazy(torch.tensor([0.0, 0, 0, 1]))
    transition.values = transition.actions_log_prob = lazy(NUMBERS[:, 1].contiguous())
    transition.distribution_params = (lazy(NUMBERS), lazy(NUMBERS + 1))
    storage.add_transition(transition)
    assert storage.observations["policy"][0].tolist() == NUMBERS.tolist()
    assert storage.dones.flatten().tolist() == [0, 0, 0, 1]
    assert storage.distribution_params[1][0].tolist() == (NUMBERS + 1).tolist()
    storage.compute_returns(lazy(torch.full((4, 1), 10.0)), 0.5, 1.0, normalize_advantage=False)
    assert storage.returns.flatten().tolist() == [1 + 5, 3 + 5, 5 + 5, 7]
    storage.advantages = lazy(NUMBERS[:, :1].contiguous().view(1, 4, 1))
    assert storage.advantages.flatten().tolist() == [1, 3, 5, 7]
    decoupled = DecoupledRolloutStorage(BOX, BOX, num_steps=1, num_envs=4)
    zeros = torch.zeros(4)
    one = lazy(NUMBERS[:, 0].contiguous())
    decoupled.add(lazy(NUMBERS), lazy(NUMBERS), one, zeros, zeros, lazy(NUMBERS), one, one, one)
    data = decoupled.get_all_buffer_data()
    assert {data[name].abs().sum().item() for name in ("rewards", "values", "log_probs", "adv_preds")} == {16}
    assert all(bool((data[name] >= 0).all()) for name in ("rewards", "values", "log_probs", "adv_preds", "actions"))


def test_a_negated_truth_value_is_refused_by_name():
    storage = ReplayStorage(BOX, BOX, storage_size=8, num_envs=4)
    ends, obs = torch.zeros(4, dtype=torch.bool), torch.zeros(4, 2)
    with pytest.raises(InvalidInputError, match=r"terminated.*Nothing was written"):
        storage.add(obs, obs, torch.zeros(4), torch._neg_view(ends), ends, {}, obs)
    assert len(storage) == 0


def test_integers_that_are_negated_lazily_keep_their_sign():
    storage = NStepReplayStorage(BOX, spaces.Discrete(5), storage_size=20, num_envs=4, num_workers=0)
    ends, obs, actions = torch.zeros(4, dtype=torch.bool), torch.zeros(4, 2), torch.tensor([0, -1, -2, -3])
    for _ in range(2):
        storage.add(obs, torch._neg_view(actions), torch.zeros(4), ends, ends, {}, obs)
    assert storage.get_all_buffer_data()["actions"].tolist() == [[0, 1, 2, 3]] * 2


def test_whether_a_tensor_is_lazy_is_known_without_asking_it():
    numbers = torch.arange(6.0).view(3, 2)
    complexes = [torch.zeros(3, 2, dtype=dtype) for dtype in (torch.complex64, torch.complex128)]
    plain = [numbers, numbers.half(), numbers.long(), numbers > 1, numbers[:, 0], torch.nn.Parameter(numbers)]
    plain += [
        numbers.clone().requires_grad_() * 2,
        torch.zeros(()),
        torch.zeros(0),
        torch.from_numpy(np.zeros(3)),
        *complexes,
    ]
    with torch.inference_mode():
        plain.append(torch.zeros(2))
    lazy = [torch._neg_view(tensor.detach()) for tensor in plain] + [part.conj() for part in complexes]
    lazy += [part.conj().imag for part in complexes] + [torch._neg_view(part.conj()) for part in complexes]
    back = [part.conj().conj() for part in complexes] + [torch._neg_view(tensor) for tensor in lazy[:2]]
    for tensor in plain + lazy + back:
        expected = tensor.is_neg() or tensor.is_conj()
        assert _native.is_lazy(tensor) is expected
        assert _native.asked_is_lazy(tensor) is expected  # where the place of the bits is not known
