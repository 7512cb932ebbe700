"""Tensors whose values are in no memory: each is refused by its name, wherever it is given, and nothing is changed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from rlstore import (
    DistributedStorage,
    InvalidInputError,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
)
from rlstore.engine import returns

STEPS, ENVS = 3, 4
BOX = spaces.Box(-1e9, 1e9, (3,))
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Representing(torch.Tensor):
    """A tensor that stands for another one."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def inner(value):
            return value.inner if isinstance(value, Representing) else value

        return function(*map(inner, args), **{name: inner(value) for name, value in (kwargs or {}).items()})


def freed(tensor, before=0):
    """A view of memory that is gone, ``before`` elements after its beginning."""
    memory = torch.cat([torch.zeros(before, dtype=tensor.dtype), tensor.flatten()])
    view = memory[before:].view(tensor.shape)
    memory.untyped_storage().resize_(0)
    return view


UNREADABLE = {
    "meta": lambda tensor: tensor.to("meta"),
    "fake": FAKE.from_tensor,
    "freed": freed,
    "freed view": lambda tensor: freed(tensor, 5),
    "freed view far from the beginning": lambda tensor: freed(tensor, 1 << 21),
    "sparse": lambda tensor: tensor.to_sparse(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 1.0, 0, torch.qint8),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "zeros without memory": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "representing": Representing,
    "functional": torch._to_functional_tensor,
    "mkldnn": lambda tensor: tensor.float().to_mkldnn(),
    "a list of fake ones": lambda tensor: [FAKE.from_tensor(part) for part in tensor],
    "a list of freed ones": lambda tensor: [freed(part) for part in tensor],
    "an object": lambda tensor: object(),
}


def replay(kind=ReplayStorage, steps=3, **options):
    storage = kind(BOX, spaces.Discrete(5), storage_size=64, num_envs=ENVS, batch_size=8, seed=0, **options)
    for _ in range(steps):
        storage.add(**step_of())
    return storage


def step_of(**changed):
    flags = torch.zeros(ENVS, dtype=torch.bool)
    step = {
        "observations": torch.ones(ENVS, 3),
        "actions": torch.ones(ENVS, dtype=torch.int64),
        "rewards": torch.ones(ENVS),
        "terminateds": flags,
        "truncateds": flags,
        "infos": {},
        "next_observations": torch.ones(ENVS, 3),
    }
    return {**step, **changed}


def rollout(steps=STEPS):
    observations = TensorDict({"policy": torch.ones(ENVS, 3)}, batch_size=[ENVS])
    storage = RolloutStorage("rl", ENVS, STEPS, observations, [2], "cpu")
    for _ in range(steps):
        storage.add_transition(transition_of())
    return storage


def transition_of(**changed):
    transition = RolloutStorage.Transition()
    transition.observations = TensorDict({"policy": torch.ones(ENVS, 3)}, batch_size=[ENVS])
    transition.actions, transition.rewards, transition.dones = torch.ones(ENVS, 2), torch.ones(ENVS), torch.zeros(ENVS)
    transition.values, transition.actions_log_prob = torch.ones(ENVS, 1), torch.ones(ENVS)
    transition.distribution_params = (torch.ones(ENVS, 2), torch.ones(ENVS, 2))
    for name, value in changed.items():
        setattr(transition, name, value)
    return transition


SCANNED = {
    "rewards": torch.ones(STEPS, ENVS),
    "values": torch.ones(STEPS, ENVS),
    "last_values": torch.ones(ENVS),
    "terminated": torch.zeros(STEPS, ENVS, dtype=torch.bool),
    "truncated": torch.zeros(STEPS, ENVS, dtype=torch.bool),
    "final_values": torch.ones(STEPS, ENVS),
}


def entries():
    """Every place where a tensor is given: what takes it, and a tensor that fits."""
    storage = replay()
    for name, example in step_of().items():
        if name != "infos":
            yield f"add {name}", lambda value, name=name: storage.add(**step_of(**{name: value})), example
    ends = torch.ones(ENVS, dtype=torch.bool)
    yield "add mask", lambda value: storage.add(**step_of(), mask=value), ends
    last = step_of(terminateds=ends)
    yield "final_obs", lambda value: storage.add(**{**last, "infos": {"final_obs": value}}), torch.ones(ENVS, 3)
    extra = replay(steps=0, extra_fields={"costs": ((), torch.float32)})
    yield "an extra field", lambda value: extra.add(**step_of(), costs=value), torch.ones(ENVS)
    data = replay().get_all_buffer_data()
    yield "a slice", lambda value: storage.insert_data_slice({**data, "rewards": value}), torch.ones(3, ENVS)
    drawn = replay(PrioritizedReplayStorage)
    yield "rows", lambda value: drawn.update(value, torch.ones(8)), torch.arange(8)
    yield "priorities", lambda value: drawn.update(torch.arange(8), value), torch.ones(8)
    shared = replay(steps=0, memory="shared").writer()
    yield "a writer", lambda value: shared.add(**step_of(observations=value)), torch.ones(ENVS, 3)
    slots = DistributedStorage(BOX, spaces.Discrete(5), num_steps=2, num_storages=2, batch_size=1)
    yield "a slot", lambda value: slots.add(0, 0, None, {"obs": value}), torch.ones(3)
    full, fresh = rollout(), rollout(0)
    for name in ("actions", "rewards", "dones", "values", "actions_log_prob"):
        yield (
            f"a transition's {name}",
            lambda value, name=name: (fresh.clear(), fresh.add_transition(transition_of(**{name: value}))),
            getattr(transition_of(), name),
        )
    for name in ("rewards", "values", "dones", "returns", "advantages", "actions"):
        yield f"assigned {name}", lambda value, name=name: setattr(full, name, value), getattr(full, name).clone()
    yield "last values", lambda value: full.compute_returns(value, 0.9, 0.9), torch.ones(ENVS, 1)
    for name, example in SCANNED.items():
        yield f"gae {name}", lambda value, name=name: returns.gae(**{**SCANNED, name: value}, gamma=1, lam=1), example
    yield "log_rhos", lambda value: returns.vtrace(**SCANNED, log_rhos=value, gamma=1.0), torch.ones(STEPS, ENVS)


@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantized tensor):UserWarning")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_refused_wherever_it_is_given(kind):
    for where, give, example in entries():
        try:
            give(UNREADABLE[kind](example.clone()))
        except InvalidInputError as refused:
            told = str(refused)
        else:
            told = "it was taken"
        assert "Nothing was" in told or "It was not changed" in told, (where, told)
        give(example.clone())  # and this is taken


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_what_a_function_transform_wraps_is_refused(transform):
    for where, give, example in entries():
        told = []

        def within(value, give=give, told=told):
            with pytest.raises(InvalidInputError) as refused:
                give(value)
            told.append(str(refused.value))
            return value.sum()

        transform(within)(torch.stack([example.float()] * 2) if transform is torch.vmap else example.float())
        assert "Nothing was" in told[0] or "It was not changed" in told[0], (where, told)


def test_no_target_is_computed_where_every_new_tensor_is_fake():
    with FAKE, pytest.raises(InvalidInputError, match="the result is a FakeTensor"):
        returns.gae(**SCANNED, gamma=1.0, lam=1.0)


def test_a_block_that_a_caller_frees_is_named_when_it_is_used_next():
    for use in (
        lambda storage: storage.compute_returns(torch.ones(ENVS, 1), 0.9, 0.9),
        lambda storage: next(storage.mini_batch_generator(2, 1)),
        lambda storage: next(storage.generate_batches(2)),
        lambda storage: storage.get_all_buffer_data(),
        lambda storage: storage.reset(),
        copy.deepcopy,
        lambda storage: (storage.clear(), storage.add_transition(transition_of())),
    ):
        storage = rollout()
        storage.compute_returns(torch.ones(ENVS, 1), 0.9, 0.9)
        storage.values.untyped_storage().resize_(0)
        with pytest.raises(
            InvalidInputError, match=r"values has no memory any more.*Assign a tensor \(3, 4, 1\) to it"
        ):
            use(storage)
        storage.values = torch.full((STEPS, ENVS, 1), 2.0)
        use(storage)


def test_memory_that_was_made_smaller_than_its_tensor_is_refused():
    short = torch.ones(STEPS, ENVS, 1)
    short.untyped_storage().resize_(8)
    with pytest.raises(InvalidInputError, match=r"rewards is a Tensor .* no plain memory, or none any more"):
        rollout().rewards = short


def test_complex_numbers_do_not_become_real_ones():
    given = torch.ones(STEPS, ENVS, dtype=torch.complex64)
    with pytest.raises(InvalidInputError, match=r"values is torch.complex64; returns need real numbers"):
        returns.gae(**{**SCANNED, "values": given}, gamma=1.0, lam=1.0)
    with pytest.raises(
        InvalidInputError, match=r"rewards cannot become complex64; it is a tensor \(3, 4, 1\) of float32"
    ):
        rollout().rewards = given.unsqueeze(-1)


@pytest.mark.filterwarnings("ignore:the returns and advantages of this rollout are NaN")
@pytest.mark.parametrize(
    "given",
    [
        lambda x: torch._neg_view(-x),
        lambda x: torch.complex(x, -x).conj().imag,
        lambda x: x.as_subclass(type("Own", (torch.Tensor,), {})),
        lambda x: x.clone().requires_grad_(),
        lambda x: x.T.contiguous().T,
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["negated", "conjugated", "subclass", "requires grad", "transposed", "parameter"],
)
def test_what_holds_its_values_in_another_way_is_read_as_what_it_is(given):
    numbers = torch.arange(1.0, 13.0).view(STEPS, ENVS)
    expected = returns.gae(**{**SCANNED, "rewards": numbers}, gamma=0.5, lam=0.5)
    for one, other in zip(
        returns.gae(**{**SCANNED, "rewards": given(numbers)}, gamma=0.5, lam=0.5), expected, strict=True
    ):
        assert one.tolist() == other.tolist()
    storage = rollout()
    storage.rewards = given(numbers).unsqueeze(-1)
    assert storage.rewards.squeeze(-1).tolist() == numbers.tolist()
    assert next(storage.mini_batch_generator(1, 1)).values.shape == (12, 1)
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == list(range(1, 13))


@pytest.mark.parametrize("given", [lambda x: x[::-1], lambda x: _read_only(x)])
def test_arrays_of_any_layout_are_read_as_what_they_are(given):
    numbers = np.arange(1.0, 5.0, dtype=np.float32)
    storage = replay(steps=0)
    storage.add(**step_of(rewards=given(numbers)))
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == given(numbers).tolist()
    with pytest.raises(InvalidInputError, match="rewards"):
        storage.add(**step_of(rewards=numbers.astype(object)))


def _read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array


class Freeing(TorchFunctionMode):
    """Frees a tensor as soon as another one is asked for anything."""

    def __init__(self, victim):
        super().__init__()
        self._victim = victim

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "is_neg":
            self._victim.untyped_storage().resize_(0)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reward", [torch.tensor(1.0), torch.tensor([1.0])])
def test_nothing_can_free_a_value_while_a_later_one_is_read(reward):
    storage = ReplayStorage(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), storage_size=8, batch_size=1)
    storage.add(torch.zeros(2), 1, 1.0, False, False, {}, torch.ones(2))
    storage.add(torch.ones(2), 1, 1.0, False, False, {}, torch.zeros(2))
    observations = torch.zeros(2)
    with Freeing(observations):
        storage.add(observations, 1, reward, False, False, {}, torch.zeros(2))
    assert len(storage) == 3


def test_bytes_are_no_numbers():
    storage = ReplayStorage(spaces.Box(-9, 9, (2,)), spaces.Discrete(3), storage_size=8, batch_size=1)
    with pytest.raises(InvalidInputError, match="rewards"):
        storage.add(np.zeros(2, np.float32), 1, b"5", False, False, {}, np.zeros(2, np.float32))
    assert len(storage) == 0
