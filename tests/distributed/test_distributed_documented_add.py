"""DistributedStorage.add, and what add and sample refuse: a clear error, and nothing changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributed_ids import (
    ACTOR_KEYS,
    DISCRETE,
    ENV_KEYS,
    LSTM,
    WORLDS,
    ListQueue,
    assert_as_copied,
    copy_of,
    rollouts_in,
)

from rlstore import DistributedStorage


def outputs(world, rollout, step, form=lambda value: value):
    """(actor_output, env_output) of one row."""
    row = {key: form(value) for key, value in world.row(rollout, step).items()}
    return {key: row[key] for key in ACTOR_KEYS}, {key: row[key] for key in ENV_KEYS}


def add_rollout(world, storage, index, rollout, form=lambda value: value):
    for step in range(world.steps + 1):
        storage.add(index, step, *outputs(world, rollout, step, form))


FORMS = {
    "tensors": lambda value: value,
    "arrays": lambda value: value.numpy(),
    "lists": lambda value: value.tolist(),
    "without the two axes": lambda value: value[0, 0],
    "doubles": lambda value: value.double() if value.is_floating_point() else value,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_add_writes_one_row_of_one_slot(world, form):
    storage = world.make(4)
    for index in (2, 0, 3):
        add_rollout(world, storage, index, 40 + index, FORMS[form])
    free = ListQueue()
    states = storage.init_actor_state_storages
    batch, _ = storage.sample("cpu", 3, free, ListQueue([3, 0, 2]), storage.storages, states)
    assert rollouts_in(world, batch) == [43, 40, 42]
    assert not storage.storages["episode_step"][1].any()


def test_add_returns_nothing_and_takes_numpy_indices():
    storage = DISCRETE.make()
    assert storage.add(np.int64(1), np.int32(2), *outputs(DISCRETE, 9, 2)) is None
    assert storage.storages["reward"][1].tolist() == [0, 0, 9 * 5 + 2, 0, 0]


def test_what_add_is_not_given_stays_as_it_was():
    storage = DISCRETE.make()
    actor_output, env_output = outputs(DISCRETE, 9, 2)
    storage.add(1, 2, None, env_output)
    assert storage.storages["reward"][1][2] == 9 * 5 + 2
    assert not storage.storages["policy_outputs"][1].any()
    storage.add(1, 2, actor_output, None)
    storage.add(1, 2, None, {"reward": 0.5})
    for key, expected in DISCRETE.row(9, 2).items():
        assert torch.equal(storage.storages[key][1][2], expected[0, 0] if key != "reward" else torch.tensor(0.5)), key


def test_what_add_was_given_is_copied():
    storage = DISCRETE.make()
    actor_output, env_output = outputs(DISCRETE, 9, 2)
    storage.add(1, 2, actor_output, env_output)
    before = copy_of(storage)
    for value in (*actor_output.values(), *env_output.values()):
        value.fill_(0)
    assert_as_copied(storage, before)


def with_(part, **changes):
    """Outputs with something else in them; None takes a key out."""

    def change(actor_output, env_output):
        given = (actor_output, env_output)[part]
        for key, value in changes.items():
            given.pop(key, None)
            if value is not None:
                given[key] = value
        return actor_output, env_output

    return change


BAD_OUTPUTS = {
    "an unknown key": (with_(1, colour=torch.zeros(1, 1)), "colour"),
    "an unknown key of the actor": (with_(0, value=torch.zeros(1, 1)), "value"),
    "observations of another shape": (with_(1, obs=torch.zeros(1, 1, 4, 2, 4)), "obs"),
    "observations of two environments": (with_(1, obs=torch.zeros(1, 2, 4, 2, 3)), "obs"),
    "policy outputs of another size": (with_(0, policy_outputs=torch.zeros(1, 1, 5)), "policy_outputs"),
    "two rewards": (with_(1, reward=torch.zeros(2)), "reward"),
    "300 into uint8": (with_(1, obs=torch.full((1, 1, 4, 2, 3), 300)), "obs"),
    "half an action": (with_(0, action=torch.tensor([[1.5]])), "action"),
    "a flag that is nan": (with_(1, terminated=torch.tensor([[float("nan")]])), "terminated"),
    "a reward that is a word": (with_(1, reward="much"), "reward"),
    "no mapping": (lambda actor_output, env_output: (actor_output, torch.zeros(3)), "env_output"),
    "no mapping of the actor": (lambda actor_output, env_output: (3, env_output), "actor_output"),
}


@pytest.mark.parametrize("bad", BAD_OUTPUTS)
def test_bad_outputs_are_refused_and_nothing_is_written(bad):
    change, name = BAD_OUTPUTS[bad]
    storage = DISCRETE.make()
    add_rollout(DISCRETE, storage, 1, 7)
    before = copy_of(storage)
    with pytest.raises((ValueError, TypeError), match=name):
        storage.add(1, 2, *change(*outputs(DISCRETE, 9, 2)))
    assert_as_copied(storage, before)


@pytest.mark.parametrize(("index", "step"), [(3, 0), (-4, 0), (0, 5), (0, -6), (1.5, 0), (0, 0.5), (None, 0), ("1", 0)])
def test_a_place_that_is_not_there_is_refused_and_nothing_is_written(index, step):
    storage = DISCRETE.make()
    add_rollout(DISCRETE, storage, 1, 7)
    before = copy_of(storage)
    with pytest.raises((ValueError, IndexError, TypeError)):
        storage.add(index, step, *outputs(DISCRETE, 9, 2))
    assert_as_copied(storage, before)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_another_number_of_arguments_is_refused(count):
    storage = DISCRETE.make()
    before = copy_of(storage)
    with pytest.raises((ValueError, TypeError), match="index"):
        storage.add(*(1, 2, *outputs(DISCRETE, 9, 2), 8)[:count])
    assert_as_copied(storage, before)


# ------------------------------------------------------------------------------------------------- sample


@pytest.mark.parametrize("ours", [True, False], ids=["our mapping", "a dict"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", -1),
        ("batch_size", 2.5),
        ("batch_size", None),
        ("batch_size", True),
        ("device", "moon"),
    ],
)
def test_a_batch_that_cannot_be_had_is_refused_before_anything_is_taken(ours, name, value):
    storage = LSTM.make()
    free, full = ListQueue(), ListQueue([2, 0, 1])
    given = {
        "device": "cpu",
        "batch_size": 2,
        "free_queue": free,
        "full_queue": full,
        "storages": storage.storages if ours else dict(storage.storages),
        "init_actor_state_storages": storage.init_actor_state_storages,
    }
    with pytest.raises(ValueError, match=name):
        DistributedStorage.sample(**{**given, name: value})
    assert (free.items, full.items) == ([], [2, 0, 1])


@pytest.mark.parametrize("index", [3, 99, -4, "1", 1.5])
def test_an_index_that_is_no_slot_is_an_error_and_is_not_given_back(index):
    storage = LSTM.make()
    free, states = ListQueue(), storage.init_actor_state_storages
    before = copy_of(storage)
    with pytest.raises((ValueError, IndexError, TypeError)):
        storage.sample("cpu", 2, free, ListQueue([2, index]), storage.storages, states)
    assert index not in free.items
    assert_as_copied(storage, before)


def test_none_in_the_full_queue_is_an_error_and_not_a_slot():
    storage = LSTM.make()
    free, states = ListQueue(), storage.init_actor_state_storages
    with pytest.raises((ValueError, TypeError), match="None"):
        storage.sample("cpu", 2, free, ListQueue([2, None]), storage.storages, states)
    assert None not in free.items
