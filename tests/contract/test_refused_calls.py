"""Every storage refuses what it cannot take, and a refused call changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from rollout_model import HELD, SIZE, RolloutModel, collect, leaves, make, same_data
from storages import CASES, NUM_ENVS, Actor, Algorithm
from where import SEES_VALUES

NAN = float("nan")
SCALARS = ("rewards", "values", "log_probs", "adv_preds", "final_values")
FLAGS = ("terminated", "truncated")

# What makes a sample bad: the field that is changed, and the change.
CHANGES = {
    **{
        f"{name} missing": (name, "missing")
        for name in (*SCALARS, *FLAGS, "actions", "privileged_actions", "observations")
    },
    **{
        f"{name} None": (name, None) for name in (*SCALARS[:4], *FLAGS, "actions", "privileged_actions", "observations")
    },
    **{f"{name} of 4 envs": (name, torch.zeros(NUM_ENVS + 1)) for name in (*SCALARS, *FLAGS)},
    **{f"{name} of 1 env": (name, torch.zeros(1)) for name in (*SCALARS, *FLAGS)},
    **{f"{name} with two columns": (name, torch.zeros(NUM_ENVS, 2)) for name in (*SCALARS, *FLAGS)},
    **{f"{name} complex": (name, torch.zeros(NUM_ENVS) * 1j) for name in (*SCALARS, *FLAGS)},
    **{f"{name} text": (name, ["a", "b", "c"]) for name in (*SCALARS, *FLAGS, "actions", "privileged_actions")},
    **{f"{name} nan": (name, torch.tensor([0.0, NAN, 0.0])) for name in FLAGS if SEES_VALUES},
    **{f"{name} too wide": (name, torch.zeros(NUM_ENVS, 9)) for name in ("actions", "privileged_actions")},
    **{f"{name} of 4 envs": (name, torch.zeros(NUM_ENVS + 1, 2)) for name in ("actions", "privileged_actions")},
}


def bad_samples(case, step=30):
    """Samples that must be refused, by what is wrong with them."""
    for what, (name, value) in CHANGES.items():
        sample = case.sample(step, (0,), (1,))
        if name not in sample or (value in ("missing",) and name in case.optional):
            continue
        if isinstance(value, str):
            del sample[name]
        else:
            sample[name] = value
        yield what, sample
    for what, change in _bad_observations(case).items():
        for name in ("observations", "next_observations"):
            sample = case.sample(step)
            sample[name] = change(sample[name])
            yield f"{name} {what}", sample
    yield "an unknown name", {**case.sample(step), "reward": torch.zeros(NUM_ENVS)}
    yield "empty", {}


def _bad_observations(case):
    vector = torch.zeros(NUM_ENVS, 2)
    if isinstance(case.sample(0)["observations"], torch.Tensor):
        return {
            "too wide": lambda obs: torch.zeros(NUM_ENVS, 3),
            "of 4 envs": lambda obs: torch.zeros(NUM_ENVS + 1, 2),
            "complex": lambda obs: vector * 1j,
            "a dict": lambda obs: {"policy": obs},
        }
    return {
        "too wide": lambda obs: {**obs, "policy": torch.zeros(NUM_ENVS, 3)},
        "of 4 envs": lambda obs: {**obs, "policy": torch.zeros(NUM_ENVS + 1, 2)},
        "complex": lambda obs: {**obs, "policy": vector * 1j},
        "with an unknown key": lambda obs: {**obs, "extra": vector},
        "without a key": lambda obs: {name: part for name, part in obs.items() if name != "policy"},
        "no dict": lambda obs: vector,
        "with None": lambda obs: {**obs, "policy": None},
    }


def state_of(storage):
    """All that can be told of a storage from outside, and the state of its generator."""
    attributes = {
        name: getattr(storage, name).clone()
        for name in ("rewards", "actions", "returns", "advantages", "terminateds", "truncateds", "dones")
        if hasattr(storage, name)
    }
    return (
        storage.get_all_buffer_data(),
        attributes,
        (len(storage), repr(storage), storage._generator.get_state().tolist()),
    )


def assert_unchanged(storage, before):
    data, attributes, rest = state_of(storage)
    same_data(before[0], data)
    assert attributes.keys() == before[1].keys()
    for name, tensor in attributes.items():
        assert torch.equal(tensor, before[1][name]), name
    assert rest == before[2]


def refusal(storage, sample, what):
    """What the storage says to a bad sample."""
    try:
        storage.insert_transition(sample)
    except ValueError as error:
        return str(error)
    return pytest.fail(f"a sample was taken that is bad: {what}")


@pytest.mark.parametrize("moment", ["midway", "full", "learnt from"])
def test_a_bad_sample_is_refused_and_nothing_changes(case, moment):
    storage, model = make(case)
    collect(case, storage, model, first=60)
    storage.before_gradients(Actor(), None)
    if moment == "midway":
        storage.after_gradients(None, None, {})
        model.spent = True
        collect(case, storage, model, steps=2)
    elif moment == "learnt from":
        storage.after_gradients(None, None, {})
        model.spent = True
    if moment == "full" and not case.restarts:
        before = state_of(storage)
        with pytest.raises(OverflowError):
            storage.insert_transition(case.sample(0))
        assert_unchanged(storage, before)
        return
    before = state_of(storage)
    for what, sample in bad_samples(case):
        assert "Nothing was" in refusal(storage, sample, what)
        assert_unchanged(storage, before)
    # and a good one is taken where it belongs
    collect(case, storage, model, first=2, steps=2)
    model.check_data(storage.get_all_buffer_data())


def test_a_bad_first_sample_leaves_no_shapes_behind(case):
    for what, sample in bad_samples(case):
        storage, model = make(case)
        if case.is_lazy and _could_be_a_first_sample(what):
            continue
        refusal(storage, sample, what)
        assert len(storage) == 0
        assert storage.get_all_buffer_data() == {}
        collect(case, storage, model)
        model.check_data(storage.get_all_buffer_data())


def _could_be_a_first_sample(what):
    """Some samples are bad only beside others: alone they are samples of another environment."""
    return "too wide" in what or what in (
        "observations with an unknown key",
        "observations without a key",
        "observations no dict",
        "observations a dict",
        "observations complex",
        "next_observations with an unknown key",
    )


@pytest.mark.parametrize("allocated", [True, False])
def test_init_tensors_refuses_a_sample_of_unequal_numbers_of_environments(case, allocated):
    storage, model = make(case)
    if allocated:
        storage.init_tensors(case.sample(0))
    for name in ("observations", "actions"):
        sample = case.sample(1)
        nest = sample[name]
        if isinstance(nest, torch.Tensor):
            sample[name] = torch.cat([nest, nest])
        else:
            sample[name] = {**nest, "policy": torch.zeros(NUM_ENVS + 1, 2)}
        with pytest.raises(ValueError, match=name if name == "actions" else "obs"):
            storage.init_tensors(sample)
    collect(case, storage, model)
    model.check_data(storage.get_all_buffer_data())


def test_init_tensors_stores_nothing_and_may_be_called_again(case):
    storage, model = make(case)
    for step in (70, 71):
        storage.init_tensors(case.sample(step))
        assert len(storage) == 0
        assert storage.get_all_buffer_data() == {}
    collect(case, storage, model, steps=2)
    storage.init_tensors(case.sample(72))
    model.check_data(storage.get_all_buffer_data())


# ------------------------------------------------------------------------------------------------- learning


TOO_MANY = [(13, 1), (1, 13), (4, 4)]
NO_NUMBERS = [(0, 1), (1, 0), (-1, 1), (1, -1), (2.0, 1), (1, 2.5), (None, 1), (1, 1, 0), (1, 1, None)]


def test_batches_that_cannot_be_had_are_refused_and_nothing_changes(case):
    storage, model = make(case)
    collect(case, storage, model)
    before = state_of(storage)
    for arguments in TOO_MANY + NO_NUMBERS:
        with pytest.raises(ValueError, match=r"batch|epochs"):
            next(storage.generate_batches(*arguments))
        assert_unchanged(storage, before)


def test_an_empty_storage_says_so(case):
    storage, model = make(case)
    for allocated in (False, True):
        if allocated:
            storage.init_tensors(case.sample(0))
        with pytest.raises(ValueError, match=r"no data|first sample"):
            next(storage.generate_batches(1, 1))
        with pytest.raises(ValueError, match=r"no data|first sample"):
            storage.before_gradients(Actor(), None)
    collect(case, storage, model)
    model.check_data(storage.get_all_buffer_data())


class Broken:
    """An actor whose values cannot be used."""

    def __init__(self, values):
        self.values = values

    def get_values(self, observations):
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


WITH_TARGETS = pytest.mark.parametrize("case", [case for case in CASES if case.computes_targets], ids=lambda c: c.name)


@WITH_TARGETS
def test_values_and_discounts_that_cannot_be_used_are_refused_and_nothing_changes(case):
    storage, model = make(case)
    collect(case, storage, model)
    storage.before_gradients(Actor(), None)
    before = state_of(storage)
    wrong = (torch.zeros(NUM_ENVS + 1), torch.zeros(1), torch.zeros(NUM_ENVS, 2))
    for values in (*wrong, None, "no", ValueError("broken")):
        with pytest.raises(ValueError, match=r"last_values|broken"):
            storage.before_gradients(Broken(values), None)
        assert_unchanged(storage, before)
    for name, value in (("gamma", 1.5), ("lam", -0.1), ("gamma", NAN), ("lam", NAN)):
        with pytest.raises(ValueError, match=name):
            storage.before_gradients(Actor(), Algorithm(**{name: value}))
        assert_unchanged(storage, before)


@WITH_TARGETS
def test_without_an_actor_there_are_no_targets(case):
    storage, model = make(case)
    collect(case, storage, model)
    before = state_of(storage)
    with pytest.raises(ValueError, match="actor"):
        storage.before_gradients()
    with pytest.raises((AttributeError, ValueError, TypeError), match="get_values"):
        storage.before_gradients(object(), None)
    assert_unchanged(storage, before)


# ------------------------------------------------------------------------------------------------- both ways of driving


def test_samples_go_on_where_the_storage_s_own_verbs_left_off(case):
    """After after_gradients the rollout may be begun with the class's own verbs, and what they wrote is kept."""
    storage, model = make(case)
    collect(case, storage, model)
    storage.after_gradients(None, None, {})
    donor = RolloutModel(case, SIZE)
    collect(case, donor, first=10)
    _own_verb(storage, donor.rows[0])
    storage.insert_transition(donor.rows[1])
    donor.rows = donor.rows[:2]
    donor.check_data(storage.get_all_buffer_data())


def _own_verb(storage, sample):
    """Write a sample with add() or with clear() and add_transition()."""
    if not hasattr(storage, "add_transition"):
        words = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations", "log_probs")
        storage.add(*(sample[name] for name in (*words, "values", "adv_preds", "final_values")))
        return
    storage.clear()
    transition = storage.Transition()
    for name, value in sample.items():
        setattr(transition, {"log_probs": "actions_log_prob"}.get(name, name), value)
    transition.dones = sample["terminated"] | sample["truncated"]
    transition.truncated = sample["truncated"] & ~sample["terminated"] if "values" in sample else None
    storage.add_transition(transition)


def test_a_rollout_given_up_midway_hands_its_newest_flags_on(case):
    """The flags before the first step of a rollout are those of the step before it, wherever that stood."""
    storage, _ = make(case)
    if not hasattr(storage, "update"):
        return
    storage.insert_transition(case.sample(0, (0,), (1,)))
    storage.after_gradients(None, None, {})
    storage.insert_transition(case.sample(1))
    assert storage.terminateds[0].tolist() == [1, 0, 0]
    assert storage.truncateds[0].tolist() == [0, 1, 0]


def test_a_copy_of_a_storage_that_refused_is_as_good_as_new(case):
    storage, model = make(case)
    collect(case, storage, model, steps=2)
    with pytest.raises(ValueError, match="rewards"):
        storage.insert_transition({**case.sample(5), "rewards": torch.zeros(NUM_ENVS + 1)})
    twin = copy.deepcopy(storage)
    collect(case, twin, model, first=2, steps=2)
    assert len(twin) == HELD
    model.check_data(twin.get_all_buffer_data())
    assert all(leaf.shape[:2] == (SIZE, NUM_ENVS) for _, leaf in leaves(twin.get_all_buffer_data()["observations"]))
