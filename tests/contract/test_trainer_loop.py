"""One trainer loop over every storage class, which knows nothing of the class but the ten methods of Storage."""

from __future__ import annotations

import pytest
import torch
from combinations import pairs
from rollout_model import HELD, SIZE, RolloutModel, collect, make
from storages import CASES, NUM_ENVS, Actor, Algorithm
from where import DEVICE

# ------------------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize(
    ("case", "prepared", "given", "workers_way"), pairs(CASES, [True, False], [True, False], [True, False])
)
def test_one_loop_drives_every_storage(case, prepared, given, workers_way):
    actor, algorithm = Actor(), Algorithm(gamma=0.8, lam=0.7)
    storage, model = make(case, actor=None if given else actor, algorithm=None if given else algorithm)
    if prepared:
        storage.init_tensors(case.sample(1000))
        assert len(storage) == 0
    for rollout in range(3):
        collect(case, storage, model, first=rollout * SIZE)
        assert len(storage) == HELD
        if given:
            storage.before_gradients(actor, algorithm)
        else:
            storage.before_gradients()
        if case.computes_targets:
            model.compute(0.8, 0.7)
        epochs = [[] for _ in range(3)]
        for number, batch in enumerate(storage.generate_batches(4, 3, 3)):
            epochs[number // 4] += model.check_batch(batch, 3)
        assert [sorted(rows) for rows in epochs] == [list(range(HELD))] * 3
        assert epochs[0] != epochs[1]
        info = {"loss": rollout}
        done = storage.after_gradients(batch, info) if workers_way else storage.after_gradients(actor, algorithm, info)
        assert done["loss"] == rollout
        model.spent = True
    if case.computes_targets:
        newest = [SIZE * (rollout + 1) * NUM_ENVS for rollout in range(3)]
        assert actor.seen == [[first + 1, first + 2, first + 3] for first in newest]


def test_the_order_of_time_is_served_on_demand(case):
    storage, model = make(case)
    collect(case, storage, model)
    rows = [row for batch in storage.generate_batches(3, 4, 2, shuffle=False) for row in model.check_batch(batch, 4)]
    assert rows == list(range(HELD)) * 2


def test_shuffle_can_be_given_by_place_as_the_document_lists_it(case):
    storage, model = make(case)
    collect(case, storage, model)
    for _ in range(3):  # a shuffled order could be the order of time by chance, but not three times
        rows = [row for batch in storage.generate_batches(3, 4, 1, False) for row in model.check_batch(batch, 4)]
        assert rows == list(range(HELD))


def test_batches_are_as_many_and_as_large_as_asked_for(case):
    storage, model = make(case)
    collect(case, storage, model)
    for count, size in ((1, 12), (12, 1), (2, 5), (5, 2), (1, 1), (3, None), (5, None)):
        served = [model.check_batch(batch, size or HELD // count) for batch in storage.generate_batches(count, size, 2)]
        assert len(served) == 2 * count
        for epoch in (served[:count], served[count:]):
            rows = [row for batch in epoch for row in batch]
            assert len(set(rows)) == len(rows)


def test_rows_that_fill_no_batch_are_left_out_at_random(case):
    storage, model = make(case)
    collect(case, storage, model)
    left_out = set()
    for batch in storage.generate_batches(1, HELD - 1, 80):
        left_out |= set(range(HELD)) - set(model.check_batch(batch, HELD - 1))
    assert left_out == set(range(HELD))


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_a_learner_does_to_a_batch_is_not_met_again(case, shuffle):
    storage, model = make(case)
    collect(case, storage, model)
    kept = []
    for batch in storage.generate_batches(3, 4, 4, shuffle=shuffle):
        model.check_batch(batch, 4)
        kept.append((batch["actions"], batch["actions"].clone()))
        batch["rewards"].fill_(-99)
        batch["observations"].zero_()
        batch["rows"].fill_(0)
    for held, as_served in kept:
        assert torch.equal(held, as_served)
    model.check_data(storage.get_all_buffer_data())


def test_what_an_environment_does_to_its_tensors_later_is_not_stored(case):
    storage, model = make(case)
    for step in range(SIZE):
        sample = case.sample(step)
        storage.insert_transition(sample)
        model.insert(case.sample(step))
        sample["rewards"].fill_(-99)
        sample["terminated"].fill_(True)
        for nest in (sample["observations"], sample["next_observations"]):
            (nest if isinstance(nest, torch.Tensor) else nest["policy"]).fill_(-99)
    model.check_data(storage.get_all_buffer_data())
    if case.computes_targets:
        storage.before_gradients(Actor(), None)
        model.compute()
    for batch in storage.generate_batches(3, 4):
        model.check_batch(batch, 4)


def test_a_loop_in_inference_mode_leaves_batches_that_can_be_learnt_from(case):
    storage, model = make(case)
    with torch.inference_mode():
        collect(case, storage, model)
        storage.before_gradients(Actor(), None)
    for batch in storage.generate_batches(3, 4, 2):
        rows = model.check_batch(batch, 4)
        weight = torch.ones(1, requires_grad=True)
        (batch["rewards"] * weight).sum().backward()
        assert weight.grad.item() == sum((row + 1) / 4 + 1 for row in rows)
        batch["rewards"].add_(1)
    storage.after_gradients(None, None, {})
    collect(case, storage, RolloutModel(case, SIZE), first=SIZE)


def test_a_truncated_episode_comes_back_as_truncated_not_as_terminated(case):
    storage, _ = make(case)
    storage.insert_transition(case.sample(0, (1,), (2,)))
    data = storage.get_all_buffer_data()
    assert data["terminated"].flatten().tolist() == [False, True, False]
    assert data["truncated"].flatten().tolist() == [False, False, True]


# ------------------------------------------------------------------------------------------------- targets


# Attributes of an algorithm, and the gamma and lambda that follow.
ALGORITHMS = [
    ({}, 0.9, 0.5),
    ({"gamma": 0.6}, 0.6, 0.5),
    ({"lam": 0.2}, 0.9, 0.2),
    ({"gamma": 0.6, "lam": 0.2}, 0.6, 0.2),
    ({"discount": 0.6, "gae_lambda": 0.2}, 0.6, 0.2),
    ({"gamma": 0.0, "lam": 1.0}, 0.0, 1.0),
    ({"learning_rate": 7.0}, 0.9, 0.5),
]


@pytest.mark.parametrize(
    ("case", "discounts", "way", "column"),
    pairs(CASES, ALGORITHMS, ["given", "factory", "given before factory"], [True, False]),
)
def test_discounts_are_the_algorithm_s_where_it_has_them(case, discounts, way, column):
    attributes, gamma, lam = discounts
    algorithm, other = Algorithm(**attributes), Algorithm(gamma=0.1, lam=0.1)
    actor, blind = Actor(column), Actor()
    if way == "given":
        storage, model = make(case)
        collect(case, storage, model)
        storage.before_gradients(actor, algorithm)
    elif way == "factory":
        storage, model = make(case, actor=actor, algorithm=algorithm)
        collect(case, storage, model)
        storage.before_gradients()
    else:
        storage, model = make(case, actor=blind, algorithm=other)
        collect(case, storage, model)
        storage.before_gradients(actor, algorithm)
    assert blind.seen == []
    if case.computes_targets:
        model.compute(gamma, lam)
    for batch in storage.generate_batches(3, 4):
        model.check_batch(batch, 4)


def test_preparing_twice_is_the_same_as_once(case):
    storage, model = make(case)
    collect(case, storage, model)
    for _ in range(2):
        storage.before_gradients(Actor(), None)
    if case.computes_targets:
        model.compute()
    model.check_data(storage.get_all_buffer_data())


def test_a_rollout_that_is_not_complete_is_learnt_from_or_refused(case):
    storage, model = make(case)
    collect(case, storage, model, steps=2)
    if case.learns_midway:
        storage.before_gradients(Actor(), None)
        if case.computes_targets:
            model.compute()
        rows = [row for batch in storage.generate_batches(2, 3) for row in model.check_batch(batch, 3)]
        assert sorted(rows) == list(range(2 * NUM_ENVS))
        return
    with pytest.raises(ValueError, match="2 of 4"):
        storage.before_gradients(Actor(), None)
    with pytest.raises(ValueError, match="2 of 4"):
        next(storage.generate_batches(2, 3))


# ------------------------------------------------------------------------------------------------- the next rollout


def test_the_sample_after_after_gradients_begins_a_new_rollout(case):
    storage, model = make(case)
    collect(case, storage, model)
    storage.after_gradients(None, None, {})
    model.check_data(storage.get_all_buffer_data())  # still there until the next sample
    model.spent = True
    collect(case, storage, model, first=50, steps=2)
    assert len(storage) == 2 * NUM_ENVS
    model.check_data(storage.get_all_buffer_data())


def test_a_sample_too_many_is_refused_or_begins_a_new_rollout(case):
    storage, model = make(case)
    collect(case, storage, model)
    if not case.restarts:
        with pytest.raises(OverflowError, match="4 of 4"):
            storage.insert_transition(case.sample(9))
    else:
        storage.insert_transition(case.sample(9))
        model.insert(case.sample(9))
    model.check_data(storage.get_all_buffer_data())


@pytest.mark.parametrize("how", ["actor, algo, info", "batch, info", "nothing"])
def test_after_gradients_gives_back_info_with_the_size(case, how):
    storage, model = make(case)
    collect(case, storage, model)
    info = {"loss": 2}
    if how == "nothing":
        assert storage.after_gradients() == {"storage_size": HELD}
    elif how == "batch, info":
        assert storage.after_gradients(next(storage.generate_batches(1, 2)), info) == {"loss": 2, "storage_size": HELD}
    else:
        assert storage.after_gradients(Actor(), Algorithm(), info) == {"loss": 2, "storage_size": HELD}


def test_sizes_and_names_are_told(case):
    storage, model = make(case)
    assert storage.max_size == SIZE
    assert len(storage) == 0
    assert storage
    name = type(storage).__name__
    assert repr(storage).startswith(f"{name}(4 steps")
    for step in range(SIZE):
        collect(case, storage, model, first=step, steps=1)
        assert len(storage) == NUM_ENVS * (step + 1)
        assert repr(storage).startswith(f"{name}(4 steps x 3 envs on {DEVICE}: {step + 1} steps held")
    storage.reset()
    assert len(storage) == 0
    assert storage


@pytest.mark.parametrize("form", [lambda x: x.cpu().numpy(), lambda x: x.tolist(), lambda x: x.double()])
def test_samples_of_arrays_and_lists_mean_the_same(case, form):
    storage, model = make(case)
    storage.init_tensors(case.sample(0))
    for step in range(SIZE):
        sample = case.sample(step)
        model.insert(case.sample(step))
        for name in set(sample) - {"observations", "next_observations", "distribution_params"}:
            sample[name] = form(sample[name])
        storage.insert_transition(sample)
    model.check_data(storage.get_all_buffer_data())
    for batch in storage.generate_batches(3, 4):
        model.check_batch(batch, 4)
