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


@pytest.mark.parametrize(("world", "form"), list(zip(WORLDS, FORMS, strict=True)))
def test_add_writes_one_row_of_one_slot(world, form):
    world = WORLDS[world]
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


# ------------------------------------------------------------------------------------------------- refusals

# Values of a row that add() refuses, and Rollout.write() too.
BAD_VALUES = {
    "an unknown key": ({"colour": torch.zeros(1, 1)}, "colour"),
    "observations of another shape": ({"obs": torch.zeros(1, 1, 4, 2, 4)}, "obs"),
    "observations of two environments": ({"obs": torch.zeros(1, 2, 4, 2, 3)}, "obs"),
    "fractions into uint8": ({"obs": torch.zeros(4, 2, 3)}, "float32 cannot be held as uint8"),
    "300 into uint8": ({"obs": np.full((1, 1, 4, 2, 3), 300)}, "obs"),
    "policy outputs of another size": ({"policy_outputs": torch.zeros(1, 1, 5)}, "policy_outputs"),
    "two rewards": ({"reward": torch.zeros(2)}, "reward"),
    "half an action": ({"action": torch.tensor([[1.5]])}, "action"),
    "a flag that is nan": ({"terminated": torch.tensor([[float("nan")]])}, "a flag is 0 or 1"),
    "a reward that is a word": ({"reward": "much"}, "reward"),
}


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_bad_values_are_refused_and_nothing_is_written(bad):
    values, name = BAD_VALUES[bad]
    storage = DISCRETE.make()
    add_rollout(DISCRETE, storage, 1, 7)
    rollout = storage.actor().reserve()
    before, row = copy_of(storage), DISCRETE.row(9, 2)
    actor_output, env_output = outputs(DISCRETE, 9, 2)
    for refused in (
        lambda: storage.add(1, 2, {**actor_output, **values}, env_output),
        lambda: storage.add(1, 2, None, {**env_output, **values}),
        lambda: rollout.write(2, **{**row, **values}),
    ):
        with pytest.raises(ValueError, match=name):
            refused()
        assert_as_copied(storage, before)


def test_bad_places_are_refused_and_nothing_is_written():
    storage = DISCRETE.make()
    add_rollout(DISCRETE, storage, 1, 7)
    rollout = storage.actor().reserve()
    before, row = copy_of(storage), outputs(DISCRETE, 9, 2)
    for index in (3, -4, 1.5, None, "1"):
        with pytest.raises(ValueError, match="is no slot; there are 0 to 2"):
            storage.add(index, 0, *row)
    for step in (5, -1, 0.5, None, True):
        for refused in (lambda step=step: storage.add(0, step, *row), lambda step=step: rollout.write(step, reward=1)):
            with pytest.raises(ValueError, match="rows 0 to 4"):
                refused()
    for given in ((3, row[1]), (row[0], torch.zeros(3))):
        with pytest.raises(ValueError, match="actor_output and env_output are mappings"):
            storage.add(1, 2, *given)
    for count in (0, 1, 3, 5):
        with pytest.raises(TypeError, match="index, timestep, actor_output and env_output"):
            storage.add(*(1, 2, *row, 8)[:count])
    assert_as_copied(storage, before)


@pytest.mark.parametrize("ours", [True, False], ids=["our mapping", "a dict"])
def test_bad_arguments_are_refused_before_an_index_is_taken(ours):
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
    for name, value in [("device", "moon"), *(("batch_size", size) for size in (0, -1, 2.5, None, True))]:
        with pytest.raises(ValueError, match=name):
            DistributedStorage.sample(**{**given, name: value})
    assert (free.items, full.items) == ([], [2, 0, 1])


class FailingQueue(ListQueue):
    def get(self):
        if len(self.items) == 1:
            raise ConnectionError("mine")
        return super().get()


def test_numbers_go_back_if_one_of_them_is_no_slot_or_the_queue_fails():
    storage = LSTM.make()
    free, states = ListQueue(), storage.init_actor_state_storages
    for index in (3, 99, -4, "1", 1.5, None):
        full = ListQueue([2, index])
        with pytest.raises(ValueError, match=rf"{index!r} is no slot; there are 0 to 2"):
            storage.sample("cpu", 2, free, full, storage.storages, states)
        assert (free.items, full.items) == ([], [2, index])
    full = FailingQueue([2, 1, 0])
    with pytest.raises(ConnectionError, match="mine"):
        storage.sample("cpu", 3, free, full, storage.storages, states)
    assert (free.items, sorted(full.items)) == ([], [0, 1, 2])
