"""A trainer that knows only the ten methods drives DistributedStorage: whole rollouts, one environment in each."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from rollout_model import leaves, same_data
from where import DEVICE, SEES_VALUES

from rlstore import DistributedStorage, RolloutFullError, Storage

STEPS, ENVS, SLOTS = 4, 3, 7
ENDS = [((0,), (1,)), ((), ()), ((2,), (0, 2)), ((), ()), ((1,), ())]


def make(num_storages=SLOTS, size=STEPS, **options):
    factory = DistributedStorage.create_factory(size, num_storages=num_storages, batch_size=2, seed=5, **options)
    return factory(DEVICE, None, None)


def sample_of(step, envs=ENVS):
    """Environment ``e`` sees ``1 + step * N + e``, and then what it will see in the next step."""
    ids = torch.arange(1, envs + 1) + float(step * envs)
    flags = [torch.tensor([env in ended for env in range(envs)]) for ended in ENDS[step % len(ENDS)]]
    return {
        "observations": torch.stack([ids, -ids], -1),
        "actions": ids.long() % 6,
        "rewards": ids / 4,
        "terminated": flags[0],
        "truncated": flags[1],
        "next_observations": torch.stack([ids + envs, -ids - envs], -1),
        "values": ids / 8,
        "distribution_params": (torch.stack([ids, ids + 0.5, ids - 0.5], -1),),
    }


def collect(*storages, first=0, steps=STEPS, envs=ENVS):
    for storage in storages:
        for step in range(first, first + steps):
            storage.insert_transition(sample_of(step, envs))


def check_columns(batch, envs=ENVS):
    """Every column of ``[STEPS, B, ...]`` is a rollout of one environment; returns ``(first step, environment)``."""
    numbers = batch["observations"][..., 0].long() - 1
    columns = [divmod(number, envs) for number in numbers[0].tolist()]
    for column, (first, env) in enumerate(columns):
        assert numbers[:, column].tolist() == [(first + t) * envs + env for t in range(STEPS)]
        for t in range(STEPS):
            for name, value in sample_of(first + t, envs).items():
                if name == "next_observations" and name not in batch:
                    continue  # a slice of everything holds the last ones alone
                served = batch[name][0] if isinstance(value, tuple) else batch[name]
                expected = value[0][env] if isinstance(value, tuple) else value[env]
                assert served[t, column].tolist() == (
                    [expected.item()] if name in ("rewards", "values", "terminated", "truncated") else expected.tolist()
                ), name
    return columns


def rollouts(first=0, envs=ENVS):
    return [(first, env) for env in range(envs)]


# ------------------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize("prepared", [True, False], ids=["init_tensors", "first sample"])
@pytest.mark.parametrize("workers_way", [True, False], ids=["batch, info", "actor, algo, info"])
def test_one_loop_drives_it(prepared, workers_way):
    storage = make()
    if prepared:
        storage.init_tensors(sample_of(900))
        assert len(storage) == 0
    for first in (0, STEPS, 2 * STEPS):
        collect(storage, first=first)
        assert len(storage) == STEPS * ENVS
        storage.before_gradients() if workers_way else storage.before_gradients(None, None)
        epochs = [[], []]
        for number, batch in enumerate(storage.generate_batches(3, 1, 2)):
            assert batch["rows"].shape == (STEPS, 1)
            epochs[number // 3] += check_columns(batch)
        assert [sorted(epoch) for epoch in epochs] == [rollouts(first)] * 2
        info = {"loss": first}
        done = storage.after_gradients(batch, info) if workers_way else storage.after_gradients(None, None, info)
        assert done["loss"] == first
    assert len(storage) == 0


def test_rollouts_are_served_in_their_order_on_demand():
    storage = make()
    collect(storage, steps=2 * STEPS)
    served = [check_columns(batch) for batch in storage.generate_batches(3, 2, 2, shuffle=False)]
    assert [column for columns in served for column in columns] == [*rollouts(), *rollouts(STEPS)] * 2


def test_what_a_learner_does_to_a_batch_stays_with_it():
    storage = make()
    collect(storage)
    for batch in storage.generate_batches(3, 1, 3):
        check_columns(batch)
        for _, leaf in leaves(batch):
            leaf.fill_(1)
    check_columns(storage.get_all_buffer_data())


def test_what_is_inserted_is_served_by_handles_too():
    storage = make()
    collect(storage)
    batch = next(storage.learner(batch_size=ENVS, prefetch=0))
    numbers = torch.arange(1.0, STEPS * ENVS + 1).view(STEPS, ENVS)
    assert torch.equal(batch["obs"][:-1, :, 0], numbers)
    assert torch.equal(batch["obs"][1:, :, 0], numbers + ENVS)
    assert torch.equal(batch["reward"][1:], numbers / 4)
    assert torch.equal(batch["last_action"][1:], numbers.long() % 6)
    assert torch.equal(batch["action"][:-1], numbers.long() % 6)
    assert torch.equal(batch["baseline"][:-1], numbers / 8)
    assert torch.equal(batch["policy_outputs"][:-1, :, 1], numbers + 0.5)
    for place, name in enumerate(("terminated", "truncated")):
        expected = [[env in ENDS[step][place] for env in range(ENVS)] for step in range(STEPS)]
        assert batch[name][1:].tolist() == expected
    for name in ("action", "baseline", "policy_outputs"):  # the actor has not seen the last observation yet
        assert not batch[name][-1].any()


def test_the_next_rollout_begins_with_the_end_of_the_one_before():
    storage = make()
    collect(storage, steps=2 * STEPS)
    batch = next(storage.learner(batch_size=2 * ENVS, prefetch=0))
    before, after = slice(0, ENVS), slice(ENVS, 2 * ENVS)
    for name in ("obs", "reward", "terminated", "truncated", "last_action", "episode_return", "episode_step"):
        assert torch.equal(batch[name][STEPS, before], batch[name][0, after]), name
    # what an episode brought so far, and its length
    rewards, totals, lengths = batch["reward"], [0.0] * ENVS, [0] * ENVS
    for step in range(2 * STEPS):
        column, row = (before, step + 1) if step < STEPS else (after, step - STEPS + 1)
        totals = [total + float(reward) for total, reward in zip(totals, rewards[row, column], strict=True)]
        lengths = [length + 1 for length in lengths]
        assert batch["episode_return"][row, column].tolist() == totals
        assert batch["episode_step"][row, column].tolist() == lengths
        ended = (batch["terminated"] | batch["truncated"])[row, column].tolist()
        totals = [0.0 if end else total for end, total in zip(ended, totals, strict=True)]
        lengths = [0 if end else length for end, length in zip(ended, lengths, strict=True)]


def test_recurrent_states_are_those_before_the_first_step():
    storage = make(state_shapes=((2, 5),))
    for step in range(2 * STEPS):
        state = torch.arange(ENVS).view(1, ENVS, 1) + 10.0 * step + torch.zeros(2, 1, 5)
        storage.insert_transition({**sample_of(step), "hidden_states": (state,)})
    for place, batch in enumerate(storage.generate_batches(2, ENVS, shuffle=False)):
        assert check_columns(batch) == rollouts(place * STEPS)
        assert batch["hidden_states"][0].shape == (2, ENVS, 5)
        assert batch["hidden_states"][0][1, :, 4].tolist() == [40.0 * place + env for env in range(ENVS)]


# ------------------------------------------------------------------------------------------------- the whole


def test_all_data_come_out_and_go_into_another():
    storage, other = make(), make()
    assert storage.get_all_buffer_data() == {}
    collect(storage, steps=2 * STEPS)
    collect(other, first=50)
    data = storage.get_all_buffer_data()
    assert check_columns(data) == [*rollouts(), *rollouts(STEPS)]
    same_data(data, storage.get_all_buffer_data(data_to_cpu=True))
    other.insert_data_slice(data)  # replaces
    same_data(data, other.get_all_buffer_data())
    for _, leaf in leaves(data):
        leaf.zero_()
    assert check_columns(other.get_all_buffer_data()) == [*rollouts(), *rollouts(STEPS)]


def test_reset_makes_it_empty():
    storage = make()
    collect(storage, steps=STEPS + 2)
    storage.reset()
    assert len(storage) == 0
    assert storage.get_all_buffer_data() == {}
    with pytest.raises(ValueError, match=r"no complete|no data"):
        next(storage.generate_batches(1, 1))
    assert (storage.report().free, storage.report().committed) == (SLOTS, 0)
    collect(storage, first=20)
    assert [check_columns(batch) for batch in storage.generate_batches(1, 3, shuffle=False)] == [rollouts(20)]


def saved_and_loaded(storage, folder):
    storage.save(folder / "snapshot")
    return Storage.load(folder / "snapshot")


TWINS = {
    "deepcopy": lambda storage, _: copy.deepcopy(storage),
    "pickle": lambda storage, _: pickle.loads(pickle.dumps(storage)),
    "save and load": saved_and_loaded,
}


@pytest.mark.parametrize("twin_of", TWINS)
@pytest.mark.parametrize("steps", [0, 2, STEPS, STEPS + 3])
def test_a_copy_goes_on_in_the_same_way_with_memory_of_its_own(twin_of, steps, tmp_path):
    storage = make()
    collect(storage, steps=steps)
    twin = TWINS[twin_of](storage, tmp_path)
    assert (type(twin), len(twin)) == (type(storage), len(storage))
    collect(storage, twin, first=steps, steps=2 * STEPS - steps)
    same_data(storage.get_all_buffer_data(), twin.get_all_buffer_data())
    drawn = [[batch["rows"].tolist() for batch in one.generate_batches(3, 2, 2)] for one in (storage, twin)]
    assert drawn[0] == drawn[1]
    storage.reset()
    assert check_columns(twin.get_all_buffer_data()) == [*rollouts(), *rollouts(STEPS)]


# ------------------------------------------------------------------------------------------------- refusals


def test_a_rollout_too_many_is_refused_and_nothing_changes():
    storage = make(num_storages=2 * ENVS + 1)
    collect(storage, steps=2 * STEPS)
    before = storage.get_all_buffer_data()
    with pytest.raises(RolloutFullError):
        storage.insert_transition(sample_of(9))
    same_data(before, storage.get_all_buffer_data())
    storage.after_gradients(next(storage.generate_batches(1, 6)), {})
    collect(storage, first=8)
    assert [check_columns(batch) for batch in storage.generate_batches(1, 3, shuffle=False)] == [rollouts(8)]


BAD_SAMPLES = {
    "no rewards": {"rewards": None},
    "no next observations": {"next_observations": None},
    "two rewards an environment": {"rewards": torch.zeros(ENVS, 2)},
    "another observation": {"observations": torch.zeros(ENVS, 3)},
    "fewer actions": {"actions": torch.zeros(ENVS - 1, dtype=torch.int64)},
    "half an action": {"actions": torch.full((ENVS,), 0.5)},
    "a flag that is nan": {"terminated": torch.tensor([0.0, 1.0, float("nan")])},
    "other parameters": {"distribution_params": (torch.zeros(ENVS, 4),)},
    "an unknown name": {"reward": torch.zeros(ENVS)},
    "states that it does not hold": {"hidden_states": (torch.zeros(1, ENVS, 4),)},
}


@pytest.mark.parametrize("steps", [0, 1, STEPS + 1])
def test_a_bad_sample_is_refused_and_nothing_changes(steps):
    storage, twin = make(), make()
    for one in (storage, twin):
        one.init_tensors(sample_of(0))
    collect(storage, twin, steps=steps)
    for what, changes in BAD_SAMPLES.items():
        if what == "a flag that is nan" and not SEES_VALUES:
            continue
        with pytest.raises(ValueError, match="Nothing was"):
            storage.insert_transition({**sample_of(steps), **changes})
        assert len(storage) == len(twin)
    collect(storage, twin, first=steps, steps=2 * STEPS - steps)
    same_data(twin.get_all_buffer_data(), storage.get_all_buffer_data())


def test_batches_that_cannot_be_had_are_refused():
    storage, twin = make(), make()
    collect(storage, twin)
    for arguments in ((0, 1), (1, 0), (-1, 1), (2.0, 1), (1, 2.5), (None, 1), (1, 1, 0), (4, 1), (1, 8)):
        with pytest.raises(ValueError, match=r"batch|epochs"):
            next(storage.generate_batches(*arguments))
    drawn = [[batch["rows"].tolist() for batch in one.generate_batches(3, 1)] for one in (storage, twin)]
    assert drawn[0] == drawn[1]


def test_an_unknown_parameter_is_refused_and_the_known_are_named():
    storage = make()
    for name in ("gama", "_memory", "device", "", "storages"):
        with pytest.raises(ValueError, match="num_storages") as caught:
            storage.update_storage_parameter(name, 1)
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["num_steps", "num_storages", "batch_size"])
def test_sizes_change_while_it_is_empty_or_are_refused(name):
    storage = make()
    storage.init_tensors(sample_of(0))
    for value in (0, -1, 2.5, None, True):
        with pytest.raises(ValueError, match=name):
            storage.update_storage_parameter(name, value)
    storage.update_storage_parameter(name, 6)
    assert getattr(storage, name) == 6
    assert storage.max_size == storage.num_steps
    collect(storage, steps=storage.num_steps)
    if name != "batch_size":
        with pytest.raises(ValueError, match=name):
            storage.update_storage_parameter(name, 5)
        assert getattr(storage, name) == 6
    assert len(storage) == ENVS * storage.num_steps
