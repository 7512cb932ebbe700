"""What every storage does as a whole: give out and take in all its data, be emptied, be changed, be copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from combinations import pairs
from rollout_model import HELD, SIZE, collect, leaves, make, same_data
from storages import CASES, NUM_ENVS, Actor, Algorithm
from where import DEVICE


def prepare(case, storage, model):
    """before_gradients, where the rollout allows it."""
    if case.learns_midway or len(model.rows) == SIZE:
        storage.before_gradients(Actor(), None)
        if case.computes_targets:
            model.compute()


def drawn(storage, count=3):
    return [batch["rows"].tolist() for batch in storage.generate_batches(count, None, 2)]


# ------------------------------------------------------------------------------------------------- all the data


@pytest.mark.parametrize(
    ("case", "steps", "computed", "target"),
    pairs(CASES, [1, 3, SIZE], [True, False], ["itself", "itself, emptied", "another", "another with data"]),
)
def test_all_data_come_out_and_go_in_again_to_the_bit(case, steps, computed, target):
    storage, model = make(case)
    collect(case, storage, model, first=20)
    prepare(case, storage, model)
    storage.after_gradients(None, None, {})
    model.spent = True
    collect(case, storage, model, first=40, steps=steps)
    if computed:
        prepare(case, storage, model)
    data = storage.get_all_buffer_data()
    model.check_data(data)
    same_data(data, storage.get_all_buffer_data(data_to_cpu=True))
    other = storage
    if target.startswith("another"):
        other, _ = make(case)
        if target == "another with data":
            collect(case, other, first=90, steps=3)
    if target == "itself, emptied":
        storage.reset()
    other.insert_data_slice(data)
    assert len(other) == steps * NUM_ENVS
    same_data(data, other.get_all_buffer_data())
    # and the rollout goes on from there
    collect(case, other, model, first=40 + steps, steps=SIZE - steps)
    prepare(case, other, model)
    rows = [row for batch in other.generate_batches(3, 4) for row in model.check_batch(batch, 4)]
    assert sorted(rows) == list(range(HELD))


def test_what_is_given_out_is_a_copy(case):
    storage, model = make(case)
    collect(case, storage, model)
    data = storage.get_all_buffer_data()
    for name in data:
        for _, leaf in leaves(data[name]):
            leaf.zero_()
    model.check_data(storage.get_all_buffer_data())


def test_what_is_taken_in_is_copied(case):
    storage, model = make(case)
    collect(case, storage, model)
    data = storage.get_all_buffer_data()
    storage.insert_data_slice(data)
    for name in data:
        for _, leaf in leaves(data[name]):
            leaf.zero_()
    model.check_data(storage.get_all_buffer_data())


def test_an_empty_storage_gives_nothing_and_takes_nothing(case):
    storage, _ = make(case)
    assert storage.get_all_buffer_data() == {}
    storage.insert_data_slice({})
    assert len(storage) == 0
    collect(case, storage)
    storage.insert_data_slice({})
    assert len(storage) == 0
    assert storage.get_all_buffer_data() == {}


def test_a_slice_replaces_what_was_there_and_leaves_the_order_of_drawing_alone(case):
    storage, model = make(case)
    other, _ = make(case)
    collect(case, storage, other, model)
    storage.insert_data_slice(other.get_all_buffer_data())
    assert drawn(storage) == drawn(other)


def _doubled(value):
    if isinstance(value, tuple):
        return tuple(_doubled(part) for part in value)
    return torch.cat([value, value])


BAD_SLICES = {
    "too many steps": lambda data: {
        name: _doubled(value) for name, value in data.items() if name != "last_observations"
    },
    "too many steps, without targets": lambda data: {
        name: _doubled(value)
        for name, value in data.items()
        if name not in ("last_observations", "returns", "advantages", "flags_before")
    },
    "no observations": lambda data: {name: value for name, value in data.items() if name != "observations"},
    "no rewards": lambda data: {name: value for name, value in data.items() if name != "rewards"},
    "fewer rewards than steps": lambda data: {**data, "rewards": data["rewards"][:-1]},
    "rewards of too many environments": lambda data: {**data, "rewards": torch.zeros(SIZE, NUM_ENVS + 1, 1)},
    "actions of another shape": lambda data: {**data, "actions": torch.zeros(SIZE, NUM_ENVS, 9)},
    "an unknown name": lambda data: {**data, "reward": data["rewards"]},
    "None": lambda data: {**data, "rewards": None},
}


def test_a_bad_slice_is_refused_and_nothing_changes(case):
    storage, model = make(case)
    twin, _ = make(case)
    collect(case, storage, twin, model)
    prepare(case, storage, model)
    before = storage.get_all_buffer_data()
    for bad in BAD_SLICES.values():
        with pytest.raises((ValueError, OverflowError, TypeError)):
            storage.insert_data_slice(bad(storage.get_all_buffer_data()))
        same_data(before, storage.get_all_buffer_data())
        assert len(storage) == HELD
    assert drawn(storage) == drawn(twin)


@pytest.mark.parametrize("name", ["returns", "advantages"])
def test_targets_of_another_shape_in_a_slice_are_refused(case, name):
    if not case.computes_targets:
        return
    storage, model = make(case)
    collect(case, storage, model)
    before = storage.get_all_buffer_data()
    with pytest.raises(ValueError, match=name):
        storage.insert_data_slice({**before, name: torch.zeros(SIZE, NUM_ENVS + 1, 1)})
    same_data(before, storage.get_all_buffer_data())


# ------------------------------------------------------------------------------------------------- reset


@pytest.mark.parametrize("steps", [0, 1, SIZE])
@pytest.mark.parametrize("spent", [True, False])
def test_reset_leaves_nothing_behind(case, steps, spent):
    storage, model = make(case)
    collect(case, storage, model, first=30, steps=steps)
    if steps:
        prepare(case, storage, model)
        if spent:
            storage.after_gradients(None, None, {})
    storage.reset()
    assert len(storage) == 0
    assert storage.get_all_buffer_data() == {}
    with pytest.raises(ValueError, match=r"no data|first sample"):
        next(storage.generate_batches(1, 1))
    with pytest.raises(ValueError, match=r"no data|first sample"):
        storage.before_gradients(Actor(), None)
    model.reset()
    # A storage that was reset goes on like a new one.
    fresh, _ = make(case)
    collect(case, storage, fresh, model)
    same_data(fresh.get_all_buffer_data(), storage.get_all_buffer_data())
    prepare(case, storage, model)
    for batch in storage.generate_batches(3, 4):
        model.check_batch(batch, 4)


def test_reset_zeroes_every_tensor_that_can_be_seen(case):
    storage, model = make(case)
    collect(case, storage, model)
    prepare(case, storage, model)
    storage.reset()
    for name in ("rewards", "actions", "values", "returns", "advantages", "terminateds", "truncateds", "dones"):
        if hasattr(storage, name):
            assert not getattr(storage, name).any(), name
    seen = storage.obs if hasattr(type(storage), "obs") else storage.observations
    assert not any(leaf.any() for _, leaf in leaves(seen))


# ------------------------------------------------------------------------------------------------- parameters


def test_discounts_can_be_changed_at_any_time(case):
    storage, model = make(case)
    collect(case, storage, model)
    for name, attribute, value in zip(case.discount_names, ("gamma", "lam"), (0.3, 0.2), strict=False):
        storage.update_storage_parameter(name, value)
        assert getattr(storage, name) == value
        setattr(model, attribute, value)
    prepare(case, storage, model)
    model.check_data(storage.get_all_buffer_data())


def test_a_discount_out_of_range_is_refused(case):
    storage, _ = make(case)
    for name in case.discount_names:
        before = getattr(storage, name)
        for value in (-0.1, 1.5, float("nan"), None, "0.5"):
            with pytest.raises(ValueError, match=name):
                storage.update_storage_parameter(name, value)
            assert getattr(storage, name) == before


def test_an_unknown_parameter_is_refused_and_the_known_ones_are_named(case):
    storage, model = make(case)
    collect(case, storage, model)
    for name in ("gama", "rewards", "_ring", "device", "num_envs", "", "update_storage_parameter"):
        with pytest.raises((AttributeError, ValueError)) as caught:
            storage.update_storage_parameter(name, 1)
        for known in (case.size_name, *case.discount_names):
            assert known in str(caught.value)
        assert repr(name) in str(caught.value)
    model.check_data(storage.get_all_buffer_data())


@pytest.mark.parametrize(
    ("case", "size", "before"),
    pairs(CASES, [2, 7], ["never filled", "allocated", "looked at", "filled and reset", "learnt from and reset"]),
)
def test_the_size_of_an_empty_storage_can_be_changed(case, size, before):
    storage, model = make(case)
    if before in ("allocated", "looked at"):
        storage.init_tensors(case.sample(3))
    if before == "looked at":
        _ = storage.obs if hasattr(type(storage), "obs") else storage.observations
    if before.endswith("reset"):
        collect(case, storage, model)
        if before.startswith("learnt"):
            prepare(case, storage, model)
            storage.after_gradients(None, None, {})
        storage.reset()
    storage.update_storage_parameter(case.size_name, size)
    assert storage.max_size == getattr(storage, case.size_name) == size
    assert len(storage) == 0
    _, model = make(case, size)
    collect(case, storage, model, steps=size)
    assert len(storage) == size * NUM_ENVS
    storage.before_gradients(Actor(), None)
    if case.computes_targets:
        model.compute()
    rows = [row for batch in storage.generate_batches(size, NUM_ENVS) for row in model.check_batch(batch, NUM_ENVS)]
    assert sorted(rows) == list(range(size * NUM_ENVS))
    model.check_data(storage.get_all_buffer_data())


@pytest.mark.parametrize("steps", [1, SIZE])
def test_the_size_of_a_storage_with_data_cannot_be_changed(case, steps):
    storage, model = make(case)
    collect(case, storage, model, steps=steps)
    for size in (2, 7, 0, -1, 2.5, None):
        with pytest.raises(ValueError, match=case.size_name):
            storage.update_storage_parameter(case.size_name, size)
        assert storage.max_size == getattr(storage, case.size_name) == SIZE
    collect(case, storage, model, first=steps, steps=SIZE - steps)
    model.check_data(storage.get_all_buffer_data())


def test_a_size_that_is_none_is_refused(case):
    storage, model = make(case)
    for size in (0, -1, 2.5, None, True):
        with pytest.raises(ValueError, match=r"size|num_"):
            make(case, size)
        with pytest.raises(ValueError, match=case.size_name):
            storage.update_storage_parameter(case.size_name, size)
    collect(case, storage, model)
    model.check_data(storage.get_all_buffer_data())


# ------------------------------------------------------------------------------------------------- copies


TWINS = [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))]


@pytest.mark.parametrize(
    ("case", "twin_of", "steps", "earlier"),
    pairs(CASES, TWINS, [0, 2, SIZE], ["", "rollout", "rollout learnt from"]),
)
def test_a_copy_in_the_middle_of_a_rollout_goes_on_in_the_same_way(case, twin_of, steps, earlier):
    storage, model = make(case)
    if earlier:
        collect(case, storage, model, first=70)
        prepare(case, storage, model)
        drawn(storage)  # the generator is somewhere on its way
        if earlier.endswith("learnt from") or not case.restarts:
            storage.after_gradients(None, None, {})
            model.spent = True
    collect(case, storage, model, first=10, steps=steps)
    twin = twin_of(storage)
    assert type(twin) is type(storage)
    assert len(twin) == len(storage)
    same_data(storage.get_all_buffer_data(), twin.get_all_buffer_data())
    collect(case, storage, twin, model, first=10 + steps, steps=SIZE - steps)
    for one in (storage, twin):
        prepare(case, one, model)
        model.check_data(one.get_all_buffer_data())
    assert drawn(storage) == drawn(twin)
    # and neither feels what happens to the other
    storage.reset()
    model.check_data(twin.get_all_buffer_data())


def test_a_deep_copy_asks_the_same_actor_and_a_pickled_one_needs_to_be_given_it(case):
    actor = Actor()
    storage, model = make(case, actor=actor, algorithm=Algorithm(gamma=0.25))
    collect(case, storage, model)
    twin, thawed = copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))
    twin.before_gradients()
    if not case.computes_targets:
        return
    model.compute(gamma=0.25)
    model.check_data(twin.get_all_buffer_data())
    assert len(actor.seen) == 1
    with pytest.raises(ValueError, match="actor"):
        thawed.before_gradients()
    thawed.before_gradients(actor, Algorithm(gamma=0.25))
    model.check_data(thawed.get_all_buffer_data())


def test_an_actor_that_cannot_be_copied_is_no_obstacle(case):
    actor = Actor()
    actor.connection = (number for number in range(3))  # a generator can be neither copied nor pickled
    storage, model = make(case, actor=actor)
    collect(case, storage, model)
    for twin in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        model.check_data(twin.get_all_buffer_data())


def test_storages_of_one_factory_share_nothing(case):
    factory = case.create_factory(SIZE, seed=1)
    one, other = factory(DEVICE, None, None), factory(DEVICE, None, None)
    collect(case, one)
    assert len(other) == 0
    collect(case, other, first=8)
    _, model = make(case)
    collect(case, model)
    model.check_data(one.get_all_buffer_data())
