"""What RolloutStorage refuses: the error names the field, and a refused call leaves the storage as it was."""

from itertools import chain

import numpy as np
import pytest
import torch
from gymnasium import spaces
from rollout_ids import (
    ACTIONS,
    ENVS,
    STEPS,
    assert_equal,
    build,
    fill,
    filled,
    hidden_of,
    ids_in,
    ids_of_step,
    observations_of,
    recurrent_batch,
    snapshot,
    transition_of,
)
from tensordict import TensorDict

from rlstore import DecoupledRolloutStorage, RolloutStorage

NAN = float("nan")


def setter(name, value):
    """A change to a good transition, with the field that the error has to name."""
    return lambda transition: setattr(transition, name, value)


def observation(key, value):
    return lambda transition: transition.observations.set(key, value)


def without(key):
    return lambda transition: transition.observations.del_(key)


def observations_for(envs):
    return setter("observations", observations_of(ids_of_step(0, envs=envs)))


def wide(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


# (what is wrong, the change, what the message must name)
BAD = [
    ("no observations", setter("observations", None), "observations"),
    ("no actions", setter("actions", None), "actions"),
    ("no rewards", setter("rewards", None), "rewards"),
    ("no dones", setter("dones", None), "dones"),
    ("a tensor instead of observations", setter("observations", wide(ENVS, 3)), "observations"),
    ("observations of fewer environments", observations_for(ENVS - 1), "observations"),
    ("observations of more environments", observations_for(ENVS + 1), "observations"),
    ("observations of one environment", observations_for(1), "observations"),
    ("a wider observation", observation("policy", wide(ENVS, 4)), "policy"),
    ("a narrower observation, which could be broadcast", observation("policy", wide(ENVS, 1)), "policy"),
    ("an observation with a dimension more", observation("policy", wide(ENVS, 3, 1)), "policy"),
    ("an observation with a dimension less", observation("policy", wide(ENVS)), "policy"),
    ("a transposed image", observation("image", wide(ENVS, 3, 2, dtype=torch.uint8)), "image"),
    ("a wider nested observation", observation(("nested", "deeper", "deepest"), wide(ENVS, 2)), "deepest"),
    ("float for uint8", observation("image", wide(ENVS, 2, 3)), "image"),
    ("float for int64", observation("count", wide(ENVS, 1)), "count"),
    ("float for bool", observation("odd", wide(ENVS, 1)), "odd"),
    ("int64 for uint8", observation("image", wide(ENVS, 2, 3, dtype=torch.int64) * 300), "image"),
    ("complex for float", observation("policy", wide(ENVS, 3, dtype=torch.complex64)), "policy"),
    ("a missing observation", without("scalar"), "scalar"),
    ("a missing nested observation", without(("nested", "deep")), "deep"),
    ("a missing group of observations", without("nested"), "nested"),
    ("an unknown observation", observation("surprise", wide(ENVS, 1)), "surprise"),
    ("an unknown nested observation", observation(("nested", "surprise"), wide(ENVS, 1)), "surprise"),
    ("a group in the place of an observation", observation("policy", TensorDict({}, [ENVS])), "policy"),
    ("an observation in the place of a group", observation("nested", wide(ENVS, 1)), "nested"),
    ("actions of fewer environments", setter("actions", wide(ENVS - 1, ACTIONS)), "actions"),
    ("actions of one environment", setter("actions", wide(1, ACTIONS)), "actions"),
    ("wider actions", setter("actions", wide(ENVS, ACTIONS + 1)), "actions"),
    ("narrower actions", setter("actions", wide(ENVS, 1)), "actions"),
    ("actions without environments", setter("actions", wide(ACTIONS)), "actions"),
    ("transposed actions", setter("actions", wide(ACTIONS, ENVS)), "actions"),
    ("complex actions", setter("actions", wide(ENVS, ACTIONS, dtype=torch.complex64)), "actions"),
    ("actions without memory", setter("actions", torch.empty(ENVS, ACTIONS, device="meta")), "actions"),
    ("sparse actions", setter("actions", wide(ENVS, ACTIONS).to_sparse()), "actions"),
    ("text for actions", setter("actions", "left"), "actions"),
    ("ragged lists for actions", setter("actions", [[1.0, 2.0]] * (ENVS - 1) + [[1.0]]), "actions"),
    ("an array of objects for rewards", setter("rewards", np.array([None] * ENVS)), "rewards"),
    ("one reward", setter("rewards", wide(1)), "rewards"),
    ("a bare number for rewards", setter("rewards", torch.tensor(1.0)), "rewards"),
    ("rewards of fewer environments", setter("rewards", wide(ENVS - 1)), "rewards"),
    ("rewards of more environments", setter("rewards", wide(ENVS + 1, 1)), "rewards"),
    ("rewards in two columns", setter("rewards", wide(ENVS, 2)), "rewards"),
    ("rewards in a row", setter("rewards", wide(1, ENVS)), "rewards"),
    ("complex rewards", setter("rewards", wide(ENVS, dtype=torch.complex64)), "rewards"),
    ("one done", setter("dones", wide(1, dtype=torch.bool)), "dones"),
    ("dones of fewer environments", setter("dones", wide(ENVS - 1, dtype=torch.bool)), "dones"),
    ("dones in two columns", setter("dones", wide(ENVS, 2, dtype=torch.bool)), "dones"),
    ("dones that are not a number", setter("dones", torch.tensor([0.0, NAN, 1.0, 0.0, 0.0])), "dones"),
    ("complex dones", setter("dones", wide(ENVS, dtype=torch.complex64)), "dones"),
]

BAD_FOR_RL = [
    ("no values", setter("values", None), "values"),
    ("no log-probabilities", setter("actions_log_prob", None), "actions_log_prob"),
    ("one value", setter("values", wide(1, 1)), "values"),
    ("values of fewer environments", setter("values", wide(ENVS - 1, 1)), "values"),
    ("values in two columns", setter("values", wide(ENVS, 2)), "values"),
    ("values in a row", setter("values", wide(1, ENVS)), "values"),
    ("one log-probability", setter("actions_log_prob", wide(1)), "actions_log_prob"),
    ("log-probabilities for each action", setter("actions_log_prob", wide(ENVS, ACTIONS)), "actions_log_prob"),
    (
        "distribution parameters of fewer environments",
        setter("distribution_params", (wide(ENVS - 1, 2), wide(ENVS - 1, 1))),
        "distribution_params",
    ),
    (
        "distribution parameters of one environment, the last of them",
        setter("distribution_params", (wide(ENVS, 2), wide(1, 1))),
        "distribution_params",
    ),
    (
        "complex distribution parameters",
        setter("distribution_params", (wide(ENVS, 2, dtype=torch.complex64), wide(ENVS, 1))),
        "distribution_params",
    ),
    ("text for distribution parameters", setter("distribution_params", "normal"), "distribution_params"),
    ("hidden states of fewer environments", setter("hidden_states", (wide(1, ENVS - 1, 3), None)), "hidden"),
    ("hidden states without layers", setter("hidden_states", (wide(ENVS, 3), None)), "hidden"),
    (
        "a cell state of fewer environments",
        setter("hidden_states", (None, (wide(1, ENVS, 3), wide(1, ENVS - 1, 3)))),
        "hidden",
    ),
    ("one hidden state instead of a pair", setter("hidden_states", (wide(1, ENVS, 3),)), "hidden"),
    ("complex hidden states", setter("hidden_states", (wide(1, ENVS, 3, dtype=torch.complex64), None)), "hidden"),
]

BAD_FOR_DISTILLATION = [
    ("no privileged actions", setter("privileged_actions", None), "privileged_actions"),
    ("privileged actions of one environment", setter("privileged_actions", wide(1, ACTIONS)), "privileged_actions"),
    ("wider privileged actions", setter("privileged_actions", wide(ENVS, ACTIONS + 1)), "privileged_actions"),
]

# Only wrong once the storage knows what the first transition looked like.
BAD_LATER = [
    ("fewer parameters", setter("distribution_params", (wide(ENVS, 2),)), "distribution_params"),
    (
        "more parameters",
        setter("distribution_params", (wide(ENVS, 2), wide(ENVS, 1), wide(ENVS, 1))),
        "distribution_params",
    ),
    ("wider parameters", setter("distribution_params", (wide(ENVS, 3), wide(ENVS, 1))), "distribution_params"),
    ("parameters gone missing", setter("distribution_params", None), "distribution_params"),
    ("a wider actor state", setter("hidden_states", (wide(1, ENVS, 4), None)), "hidden"),
    ("another layer in the actor state", setter("hidden_states", (wide(2, ENVS, 3), None)), "hidden"),
    ("a pair for the actor's one state", setter("hidden_states", ((wide(1, ENVS, 3),) * 2, None)), "hidden"),
    ("one state for the critic's pair", setter("hidden_states", (None, wide(1, ENVS, 3))), "hidden"),
    ("a wider cell state", setter("hidden_states", (None, (wide(1, ENVS, 3), wide(1, ENVS, 4)))), "hidden"),
]


def states_of(ids):
    return (hidden_of(ids), (hidden_of(ids, sign=-1), hidden_of(ids + 1)))


def assert_refused(storage, *lists):
    """Each is refused with its field's name, nothing changes, and the next good transition is taken."""
    before, step = snapshot(storage), storage.step
    for _, change, field in chain(*lists):
        transition = transition_of(ids_of_step(step, 50), hidden_states=(None, None))
        change(transition)
        with pytest.raises(ValueError, match=field):
            storage.add_transition(transition)
        assert_equal(snapshot(storage), before)
    good = transition_of(ids_of_step(step, 50))
    storage.add_transition(good)
    assert storage.step == step + 1
    assert torch.equal(storage.actions[step], good.actions)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_bad_transition_is_refused(steps):
    assert_refused(fill(build(), steps), BAD, BAD_FOR_RL)


def test_a_bad_transition_is_refused_in_distillation():
    assert_refused(fill(build("distillation"), 2), BAD, BAD_FOR_DISTILLATION)


def test_a_transition_unlike_the_first_one_is_refused():
    storage = fill(build(), 2, hidden=lambda _, ids: states_of(ids))
    assert_refused(storage, BAD_FOR_RL, BAD_LATER)


def test_a_first_transition_that_is_refused_leaves_the_layout_open():
    storage = build()
    transition = transition_of(ids_of_step(0), hidden_states=(wide(4, ENVS, 9), None))
    transition.distribution_params = (wide(ENVS, 8),)
    transition.dones = wide(ENVS + 1)
    with pytest.raises(ValueError, match="dones"):
        storage.add_transition(transition)
    assert storage.distribution_params is None
    assert storage.saved_hidden_state_a is None
    fill(storage, hidden=lambda _, ids: states_of(ids))
    assert storage.saved_hidden_state_a[0].shape == (STEPS, 1, ENVS, 3)
    assert len(ids_in(next(storage.mini_batch_generator(1)))) == ENVS * STEPS


def test_flat_values_are_refused_or_stored_right_but_never_broadcast():
    storage, ids = build(), ids_of_step(0)
    transition = transition_of(ids)
    transition.values = transition.values.squeeze(-1)
    try:
        storage.add_transition(transition)
    except ValueError:
        assert storage.step == 0
    else:
        assert torch.equal(storage.values[0], ids + 0.5)


@pytest.mark.parametrize("training_type", ["rl", "distillation"])
def test_a_full_rollout_overflows_before_anything_is_written(training_type):
    storage = filled(training_type)
    before = snapshot(storage)
    for _ in range(2):
        with pytest.raises(OverflowError, match="clear"):
            storage.add_transition(transition_of(ids_of_step(0, 90), hidden_states=states_of(ids_of_step(0))))
        assert_equal(snapshot(storage), before)
    storage.clear()
    storage.add_transition(transition_of(ids_of_step(0, 90)))
    assert storage.step == 1


# ---------------------------------------------------------------------------------------------------------------------
# Generators


def assert_generator_refused(storage, start, match=None):
    before = snapshot(storage)
    with pytest.raises(ValueError, match=match):
        next(start(storage))
    assert_equal(snapshot(storage), before)


GENERATORS = {
    "mini_batch_generator": lambda storage: storage.mini_batch_generator(2),
    "recurrent_mini_batch_generator": lambda storage: storage.recurrent_mini_batch_generator(2),
    "generator": lambda storage: storage.generator(),
}


def wrong_mode(name):
    return "rl" if name == "generator" else "distillation"


def right_mode(name):
    return "distillation" if name == "generator" else "rl"


@pytest.mark.parametrize("name", GENERATORS)
def test_the_wrong_mode_is_refused_at_the_first_batch(name):
    storage = filled(wrong_mode(name))
    batches = GENERATORS[name](storage)
    with pytest.raises(ValueError, match=right_mode(name) if name == "generator" else "rl|reinforcement"):
        next(batches)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_before_any_transition_says_so(name):
    assert_generator_refused(build(right_mode(name)), GENERATORS[name], "no data|empty|add")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_right_after_clear_says_so(name):
    storage = filled(right_mode(name))
    storage.clear()
    assert_generator_refused(storage, GENERATORS[name])
    fill(storage, 1)
    assert next(GENERATORS[name](storage)).observations is not None


@pytest.mark.parametrize("count", [ENVS * 3 + 1, 1000])
def test_more_mini_batches_than_rows_are_refused(count):
    storage = fill(build(), 3)
    assert_generator_refused(storage, lambda s: s.mini_batch_generator(count), str(count))
    assert sum(len(ids_in(batch)) for batch in storage.mini_batch_generator(ENVS * 3, 1)) == ENVS * 3


@pytest.mark.parametrize("count", [ENVS + 1, 1000])
def test_more_recurrent_mini_batches_than_environments_are_refused(count):
    storage = filled()
    assert_generator_refused(storage, lambda s: s.recurrent_mini_batch_generator(count), str(count))


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("name", ["mini_batch_generator", "recurrent_mini_batch_generator"])
def test_no_or_fewer_mini_batches_are_refused(name, count):
    assert_generator_refused(filled(), lambda s: getattr(s, name)(count), "mini.batches")


@pytest.mark.parametrize("name", ["mini_batch_generator", "recurrent_mini_batch_generator"])
def test_a_negative_number_of_epochs_is_refused(name):
    assert_generator_refused(filled(), lambda s: getattr(s, name)(2, -1), "num_epochs")


def test_a_refused_generator_does_not_disturb_the_next():
    storage, untouched = filled(seed=2), filled(seed=2)
    assert_generator_refused(storage, lambda s: s.mini_batch_generator(1000))
    drawn, expected = ([ids_in(batch) for batch in s.mini_batch_generator(3, 1)] for s in (storage, untouched))
    assert drawn == expected
    batch = next(storage.recurrent_mini_batch_generator(1, 1))
    dones = storage.dones.squeeze(-1).tolist()
    assert_equal(batch, recurrent_batch(dones, (0, ENVS), lambda _: (None, None)))


# ---------------------------------------------------------------------------------------------------------------------
# The constructor

GOOD = {
    "training_type": "rl",
    "num_envs": 3,
    "num_transitions_per_env": 4,
    "obs": TensorDict({"policy": torch.zeros(3, 2)}, batch_size=[3]),
    "actions_shape": [1],
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"training_type": "supervised"}, "training_type|supervised"),
        ({"training_type": None}, "training_type"),
        ({"num_envs": 0, "obs": TensorDict({"policy": torch.zeros(0, 2)}, batch_size=[0])}, "num_envs"),
        ({"num_envs": -3}, "num_envs"),
        ({"num_transitions_per_env": 0}, "num_transitions_per_env"),
        ({"num_transitions_per_env": -1}, "num_transitions_per_env"),
        ({"num_envs": 4}, "obs|num_envs"),
        ({"obs": None}, "obs"),
        ({"actions_shape": [-1]}, "actions_shape"),
        ({"device": "toaster"}, "device|toaster"),
    ],
)
def test_a_storage_that_cannot_be_built_says_why(changes, field):
    assert RolloutStorage(**GOOD).step == 0
    with pytest.raises(ValueError, match=field):
        RolloutStorage(**{**GOOD, **changes})


# ---------------------------------------------------------------------------------------------------------------------
# Uses that are easily half-done: one number for each field


def plain_sample(t, following=0.0):
    ids = torch.arange(ENVS) + 10.0 * t
    return {
        "observations": ids[:, None].clone(),
        "actions": ids[:, None].clone(),
        "rewards": ids,
        "terminated": torch.zeros(ENVS),
        "truncated": torch.zeros(ENVS),
        "next_observations": torch.full((ENVS, 1), following),
        "values": torch.zeros(ENVS),
        "log_probs": torch.zeros(ENVS),
    }


def plain_rollout(following=0.0):
    storage = RolloutStorage.create_factory(STEPS)()
    for t in range(STEPS):
        storage.insert_transition(plain_sample(t, following))
    return storage


def plain_transition():
    made = RolloutStorage.Transition()
    made.observations, made.actions = torch.zeros(ENVS, 1), torch.zeros(ENVS, 1)
    made.rewards, made.dones = torch.zeros(ENVS), torch.zeros(ENVS)
    made.values, made.actions_log_prob = torch.zeros(ENVS, 1), torch.zeros(ENVS)
    return made


def test_nested_lists_in_a_data_slice_are_not_transposed():
    storage = plain_rollout()
    data = storage.get_all_buffer_data()
    data["rewards"] = data["rewards"].squeeze(-1).tolist()
    storage.insert_data_slice(data)
    assert storage.rewards.squeeze(-1).tolist() == [[10.0 * t + env for env in range(ENVS)] for t in range(STEPS)]


def test_one_tensor_for_two_attributes_does_not_mix_their_values():
    storage = plain_rollout()
    storage.advantages = storage.returns
    storage.compute_returns(torch.zeros(ENVS), 0.0, 0.0)
    assert torch.equal(storage.returns, storage.rewards)
    assert abs(float(storage.advantages.mean())) < 1e-5


def test_last_observations_of_another_rollout_are_not_bootstrapped_from():
    class Critic:
        def get_values(self, observations):
            return observations

    storage = plain_rollout(following=100.0)
    storage.clear()
    for _ in range(STEPS):
        storage.add_transition(plain_transition())
    with pytest.raises(ValueError, match="next_observations"):
        storage.before_gradients(Critic(), None)


def test_a_wrong_tensor_put_into_the_observations_is_refused_once_and_not_for_ever():
    obs = TensorDict({"policy": torch.zeros(ENVS, 1)}, batch_size=[ENVS])
    storage = RolloutStorage("rl", ENVS, STEPS, obs, [1])
    step = plain_transition()
    step.observations = obs
    storage.observations["policy"] = torch.zeros(STEPS, ENVS, 5)
    with pytest.raises(ValueError, match="policy"):
        storage.add_transition(step)
    storage.add_transition(step)
    assert storage.step == 1
    assert storage.observations["policy"].shape == (STEPS, ENVS, 1)


def test_rows_are_not_half_written_after_a_rebinding_in_inference_mode():
    storage = plain_rollout()
    with torch.inference_mode():
        storage.rewards = storage.rewards * 2
    storage.rewards[0] = 1.0  # raises for an inference tensor
    assert storage.rewards[1].flatten().tolist() == [2 * (10.0 + env) for env in range(ENVS)]


def test_a_number_of_environments_that_was_given_is_not_ignored():
    storage = DecoupledRolloutStorage.create_factory(STEPS, num_envs=16)()
    with pytest.raises(ValueError, match="16"):
        storage.insert_transition({**plain_sample(0), "adv_preds": torch.zeros(ENVS)})


def test_attributes_that_hold_several_tensors_say_why_they_cannot_become_none():
    storage = plain_rollout()
    step = plain_transition()
    step.distribution_params = (torch.zeros(ENVS, 1),)
    step.hidden_states = (torch.zeros(1, ENVS, 2), None)
    storage.clear()
    storage.add_transition(step)
    for name in ("distribution_params", "saved_hidden_state_a"):
        with pytest.raises(ValueError, match=name):
            setattr(storage, name, None)
    storage.saved_hidden_state_a.append(torch.zeros(1))
    with pytest.raises(ValueError, match="saved_hidden_state_a"):
        storage.add_transition(step)
    storage.add_transition(step)
    assert storage.step == 2


def test_what_is_no_transition_is_refused():
    storage = plain_rollout()
    storage.clear()
    for bad in (None, {"observations": 1}, 5):
        with pytest.raises(ValueError, match="Transition"):
            storage.add_transition(bad)
    assert storage.step == 0


def test_observations_without_any_part_are_refused():
    with pytest.raises(ValueError, match="observations"):
        RolloutStorage("rl", ENVS, STEPS, TensorDict({}, batch_size=[ENVS]), [1])


def test_flags_before_of_the_wrong_shape_are_refused():
    storage = DecoupledRolloutStorage(spaces.Box(0, 1, (1,)), spaces.Discrete(2), num_steps=1, num_envs=2)
    pair = np.zeros(2, dtype=np.float32)
    storage.add(pair[:, None], pair, pair, pair, pair, pair[:, None], pair, pair, pair)
    data = storage.get_all_buffer_data()
    data["flags_before"] = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="flags_before"):
        storage.insert_data_slice(data)
    assert len(storage) == 2
