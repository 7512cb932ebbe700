"""RolloutStorage as its users know it: the attributes, adding, distillation, copies."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from rollout_ids import (
    ACTIONS,
    BATCH_FIELDS,
    DEFAULT_DONES,
    ENVS,
    STEPS,
    TRANSITION_FIELDS,
    assert_equal,
    build,
    fields_of,
    fill,
    filled,
    ids_in,
    ids_of_step,
    observations_of,
    snapshot,
    tensors_of,
    transition_of,
)
from tensordict import TensorDict

from rlstore import RolloutStorage

# Most of these read other fields of batches whose returns and advantages nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages:RuntimeWarning")

ROWS = ENVS * STEPS
DTYPES = {
    "policy": torch.float32,
    "scalar": torch.float32,
    "double": torch.float64,
    "count": torch.int64,
    "odd": torch.bool,
    "image": torch.uint8,
}


# ---------------------------------------------------------------------------------------------------------------------
# Names and signatures


def parameters_of(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name != "self"]


def test_documented_arguments_come_first_with_their_defaults():
    empty = inspect.Parameter.empty
    names = ("training_type", "num_envs", "num_transitions_per_env", "obs", "actions_shape")
    assert parameters_of(RolloutStorage.__init__)[:6] == [*((name, empty) for name in names), ("device", "cpu")]
    for method in ("mini_batch_generator", "recurrent_mini_batch_generator"):
        expected = [("num_mini_batches", empty), ("num_epochs", 8)]
        assert parameters_of(getattr(RolloutStorage, method))[:2] == expected
    defaults = [(name, (None, None) if name == "hidden_states" else None) for name in BATCH_FIELDS]
    assert parameters_of(RolloutStorage.Batch)[: len(BATCH_FIELDS)] == defaults


def test_what_we_added_to_the_signatures_is_keyword_only():
    documented = {RolloutStorage.__init__: 7, RolloutStorage.mini_batch_generator: 3, RolloutStorage.generator: 1}
    for function, count in documented.items():
        added = list(inspect.signature(function).parameters.values())[count:]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added)


def test_a_transition_starts_empty_is_assigned_freely_and_clears():
    names = [name for name in TRANSITION_FIELDS if name != "hidden_states"]
    transition = RolloutStorage.Transition()
    for _ in range(2):
        assert [getattr(transition, name) for name in names] == [None] * len(names)
        assert transition.hidden_states == (None, None)
        for name in names:
            setattr(transition, name, torch.ones(1))
        transition.hidden_states = (torch.ones(1), None)
        transition.clear()


def test_a_batch_holds_what_it_was_given_in_the_documented_order_and_can_be_changed():
    batch = RolloutStorage.Batch(*range(len(BATCH_FIELDS)))
    assert [getattr(batch, name) for name in BATCH_FIELDS] == list(range(len(BATCH_FIELDS)))
    batch.advantages = batch.advantages + 1
    assert batch.advantages == 4
    assert RolloutStorage.Batch().hidden_states == (None, None)


# ---------------------------------------------------------------------------------------------------------------------
# Attributes


@pytest.mark.parametrize("training_type", ["rl", "distillation"])
def test_attributes_shared_by_both_modes(training_type):
    storage = build(training_type)
    assert isinstance(storage.observations, TensorDict)
    assert storage.observations.batch_size == (STEPS, ENVS)
    assert {key: storage.observations[key].dtype for key in DTYPES} == DTYPES
    assert storage.observations["policy"].shape == (STEPS, ENVS, 3)
    assert storage.observations["scalar"].shape == (STEPS, ENVS)
    assert storage.observations["image"].shape == (STEPS, ENVS, 2, 3)
    assert storage.observations["nested", "deeper", "deepest"].shape == (STEPS, ENVS, 1)
    for name, width, dtype in (("rewards", 1, torch.float32), ("actions", ACTIONS, torch.float32)):
        assert getattr(storage, name).shape == (STEPS, ENVS, width)
        assert getattr(storage, name).dtype == dtype
    assert storage.dones.shape == (STEPS, ENVS, 1)
    assert storage.dones.dtype == torch.uint8
    assert (storage.step, storage.num_envs, storage.num_transitions_per_env) == (0, ENVS, STEPS)
    assert storage.training_type == training_type
    assert storage.saved_hidden_state_a is None
    assert storage.saved_hidden_state_c is None


def test_attributes_of_reinforcement_learning():
    storage = build("rl")
    for name in ("values", "actions_log_prob", "returns", "advantages"):
        assert getattr(storage, name).shape == (STEPS, ENVS, 1)
        assert getattr(storage, name).dtype == torch.float32
    assert storage.distribution_params is None
    assert not hasattr(storage, "privileged_actions")
    storage.add_transition(transition_of(ids_of_step(0)))
    assert isinstance(storage.distribution_params, tuple)
    assert [tuple(p.shape) for p in storage.distribution_params] == [(STEPS, ENVS, 2), (STEPS, ENVS, 1)]


def test_attributes_of_distillation():
    storage = build("distillation")
    assert storage.privileged_actions.shape == (STEPS, ENVS, ACTIONS)
    assert storage.privileged_actions.dtype == torch.float32
    for name in ("values", "actions_log_prob", "returns", "advantages", "distribution_params"):
        assert not hasattr(storage, name)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_device_is_kept_as_given(device):
    storage = RolloutStorage("rl", 2, 3, TensorDict({"policy": torch.zeros(2, 1)}, batch_size=[2]), (4, 5), device)
    assert storage.device is device
    assert storage.actions.shape == (3, 2, 4, 5)


def test_every_field_of_every_step_is_kept_in_its_place():
    storage = filled()
    ids = torch.stack([ids_of_step(step) for step in range(STEPS)])
    fields = fields_of(ids)
    assert storage.step == STEPS
    assert_equal(storage.observations, observations_of(ids))
    assert torch.equal(storage.actions, fields["actions"])
    assert torch.equal(storage.rewards, ids + 0.375)
    assert torch.equal(storage.values, fields["values"])
    assert torch.equal(storage.actions_log_prob, fields["old_actions_log_prob"])
    assert torch.equal(storage.dones.squeeze(-1), torch.tensor(DEFAULT_DONES, dtype=torch.uint8))
    assert_equal(storage.distribution_params, fields["old_distribution_params"])


# ---------------------------------------------------------------------------------------------------------------------
# What may be given to add_transition


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(ENVS,), (ENVS, 1)])
def test_dones_of_any_dtype_become_flags(dtype, shape):
    storage = build()
    storage.add_transition(transition_of(ids_of_step(0), torch.tensor([0, 1, 0, 1, 1]).to(dtype).view(shape)))
    assert storage.dones[0].flatten().tolist() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("shape", [(ENVS,), (ENVS, 1)])
def test_rewards_and_log_probabilities_come_flat_or_as_columns(shape):
    storage, ids = build(), ids_of_step(0, offset=40)
    transition = transition_of(ids)
    transition.rewards = transition.rewards.view(shape)
    transition.actions_log_prob = transition.actions_log_prob.view(shape)
    storage.add_transition(transition)
    assert torch.equal(storage.rewards[0], ids + 0.375)
    assert torch.equal(storage.actions_log_prob[0], -ids - 0.125)


def read_only(tensor):
    array = np.asarray(tensor)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("convert", [np.asarray, read_only, torch.Tensor.tolist], ids=["numpy", "read-only", "lists"])
def test_arrays_and_lists_are_taken_as_tensors_are(convert):
    storage, ids = build(), ids_of_step(0, offset=40)
    transition = transition_of(ids)
    for name in ("actions", "rewards", "dones", "values", "actions_log_prob"):
        setattr(transition, name, convert(getattr(transition, name)))
    storage.add_transition(transition)
    assert torch.equal(storage.actions[0], fields_of(ids)["actions"])
    assert torch.equal(storage.rewards[0], ids + 0.375)
    assert torch.equal(storage.values[0], ids + 0.5)


def test_numbers_of_another_precision_are_converted():
    storage, ids = build(), ids_of_step(0, offset=40)
    transition = transition_of(ids)
    transition.rewards = transition.rewards.double()
    transition.values = transition.values.double()
    transition.actions = torch.ones(ENVS, ACTIONS, dtype=torch.int64)
    transition.observations["policy"] = transition.observations["policy"].double()
    storage.add_transition(transition)
    assert torch.equal(storage.rewards[0], ids + 0.375)
    assert torch.equal(storage.actions[0], torch.ones(ENVS, ACTIONS))
    assert_equal(storage.observations[0], observations_of(ids))


def test_strided_input_is_stored_by_value():
    storage, ids = build(), ids_of_step(0)
    transition = transition_of(ids)
    transition.actions = transition.actions.t().contiguous().t()
    transition.rewards = torch.stack([transition.rewards, torch.zeros(ENVS)], dim=1)[:, 0]
    transition.values = torch.tensor([[7.0]]).expand(ENVS, 1)
    storage.add_transition(transition)
    assert torch.equal(storage.actions[0], fields_of(ids)["actions"])
    assert torch.equal(storage.rewards[0], ids + 0.375)
    assert torch.equal(storage.values[0], torch.full((ENVS, 1), 7.0))


def test_a_lazily_negated_tensor_is_stored_with_its_sign():
    storage = build(envs=1)
    transition = transition_of(ids_of_step(0, envs=1))
    # The imaginary part of a conjugate is the old memory with a bit that says "negate when read".
    transition.rewards = torch.complex(torch.zeros(1), torch.full((1,), 5.0)).conj().imag
    storage.add_transition(transition)
    assert storage.rewards[0].item() == -5.0


def test_data_given_are_copied_and_leave_no_graph():
    storage = build()
    transition = transition_of(ids_of_step(0), DEFAULT_DONES[0])
    weights = torch.ones(ENVS, 1, requires_grad=True)
    transition.values = transition.values * weights
    storage.add_transition(transition)
    before = snapshot(storage)
    for tensor in tensors_of(transition).values():
        tensor.detach().zero_()
    assert_equal(snapshot(storage), before)
    assert not storage.values.requires_grad


def test_one_transition_object_serves_a_whole_rollout():
    storage, transition = build(), RolloutStorage.Transition()
    for step in range(STEPS):
        given = transition_of(ids_of_step(step), DEFAULT_DONES[step])
        for name in TRANSITION_FIELDS:
            setattr(transition, name, getattr(given, name))
        storage.add_transition(transition)
        transition.clear()
    assert_equal(storage.observations, filled().observations)


def test_clear_moves_the_cursor_only_and_the_next_rollout_overwrites():
    storage = filled()
    before = snapshot(storage)
    storage.clear()
    assert storage.step == 0
    assert_equal({**snapshot(storage), "step": before["step"]}, before)
    fill(storage, offset=500)
    assert_equal(snapshot(storage), snapshot(fill(build(), offset=500)))


# ---------------------------------------------------------------------------------------------------------------------
# Distillation


@pytest.mark.parametrize("written", [1, 4, STEPS])
def test_distillation_serves_one_batch_for_every_written_step(written):
    storage = filled("distillation")
    storage.clear()
    fill(storage, written, offset=100)
    batches = list(storage.generator())
    assert len(batches) == written
    for step, batch in enumerate(batches):
        ids = ids_of_step(step, 100)
        assert_equal(batch.observations, observations_of(ids))
        assert batch.observations.batch_size == (ENVS,)
        assert torch.equal(batch.privileged_actions, fields_of(ids)["actions"] + 5000.0)
        assert batch.dones.view(-1).tolist() == list(DEFAULT_DONES[step])
        assert batch.dones.shape == (ENVS, 1)
        assert batch.dones.dtype == torch.uint8
        assert batch.values is batch.advantages is batch.masks is None


def test_distillation_needs_no_values():
    storage = build("distillation")
    transition = transition_of(ids_of_step(0))
    transition.values = transition.actions_log_prob = transition.distribution_params = None
    storage.add_transition(transition)
    assert storage.step == 1


# ---------------------------------------------------------------------------------------------------------------------
# Inference mode, copies, seeds


@pytest.mark.parametrize("built_inside", [False, True])
def test_a_rollout_in_inference_mode_leaves_ordinary_tensors(built_inside):
    def states(step, ids):
        return (torch.zeros(1, ENVS, 2) + ids, (torch.zeros(1, ENVS, 2), torch.ones(1, ENVS, 2)))

    with torch.inference_mode(built_inside):
        storage = build()
    with torch.inference_mode():
        fill(storage, hidden=states)
    names = ("observations", "actions", "rewards", "dones", "values", "actions_log_prob", "returns", "advantages")
    held = [getattr(storage, name) for name in (*names, "distribution_params")]
    held += [storage.saved_hidden_state_a, storage.saved_hidden_state_c]
    for name, tensor in tensors_of(held).items():
        assert not tensor.is_inference(), name
        tensor.zero_()
    generators = (storage.mini_batch_generator(2, 2), storage.recurrent_mini_batch_generator(2, 2))
    for batch in (batch for generator in generators for batch in generator):
        assert not [name for name, tensor in tensors_of(batch).items() if tensor.is_inference()]
        weight = torch.ones(1, requires_grad=True)
        (weight * batch.advantages * batch.values).sum().backward()


def copies_of(storage):
    return {"deepcopy": copy.deepcopy(storage), "pickle": pickle.loads(pickle.dumps(storage))}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("training_type", ["rl", "distillation"])
def test_a_copy_holds_the_same_and_goes_its_own_way(how, training_type):
    storage = fill(build(training_type), 4)
    twin = copies_of(storage)[how]
    before = snapshot(storage)
    assert_equal(snapshot(twin), before)
    assert (twin.num_envs, twin.num_transitions_per_env, twin.training_type, twin.device) == (
        ENVS,
        STEPS,
        training_type,
        "cpu",
    )
    twin.add_transition(transition_of(ids_of_step(4)))
    twin.rewards.zero_()
    assert_equal(snapshot(storage), before)
    assert twin.step == 5


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_with_the_same_randomness(how):
    storage = filled(seed=5)
    list(storage.mini_batch_generator(2, 1))
    twin = copies_of(storage)[how]
    for _ in range(3):
        pairs = zip(storage.mini_batch_generator(4, 2), twin.mini_batch_generator(4, 2), strict=True)
        assert all(ids_in(ours) == ids_in(its) for ours, its in pairs)


def test_a_seed_decides_every_permutation_and_nothing_else_does():
    def draws(seed):
        storage = filled(seed=seed)
        state = torch.get_rng_state()
        drawn = [ids_in(batch) for _ in range(2) for batch in storage.mini_batch_generator(4, 2, reshuffle=True)]
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        return drawn

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)


def test_storages_without_a_seed_do_not_share_their_permutations():
    first, second = (ids_in(next(filled().mini_batch_generator(1, 1))) for _ in range(2))
    assert first != second
