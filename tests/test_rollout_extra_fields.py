"""Extra fields of on-policy storages: given by name, held with their own shape and dtype, served by name everywhere."""

import copy
import pickle

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict

from rlstore import DecoupledBatch, DecoupledRolloutStorage, InvalidInputError, RolloutStorage, Storage

# Most of these read other fields of batches whose returns and advantages nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages:RuntimeWarning")

ENVS, STEPS = 3, 4
EXTRA = {
    "costs": ((), torch.float32),
    "task_id": gym.spaces.Discrete(7),
    "image": gym.spaces.Box(0, 255, (2, 2), dtype="uint8"),
}
NAMES = tuple(EXTRA)


def ids_of(step):
    return step * ENVS + torch.arange(ENVS)


def extras_of(ids):
    """The extra fields of rows, as they must be served."""
    return {
        "costs": (ids.float() + 0.5).unsqueeze(-1),
        "task_id": (ids % 7).unsqueeze(-1),
        "image": (ids % 256).to(torch.uint8)[..., None, None].expand(*ids.shape, 2, 2),
    }


def given_extras(step):
    """As an environment gives them: scalars [N], an array, another dtype."""
    extras = extras_of(ids_of(step))
    costs = extras["costs"].squeeze(-1).double()
    return {"costs": costs, "task_id": extras["task_id"].int(), "image": extras["image"].numpy()}


def assert_extras(found, ids):
    for name, expected in extras_of(ids).items():
        got = found[name] if isinstance(found, dict) else getattr(found, name)
        assert got.dtype == expected.dtype, name
        assert torch.equal(got, expected), name


def observations(step):
    return TensorDict({"policy": ids_of(step).float().unsqueeze(-1)}, batch_size=[ENVS])


def make(mode="rl", **options):
    return RolloutStorage(mode, ENVS, STEPS, observations(0), [1], seed=0, extra_fields=EXTRA, **options)


def transition_of(step):
    ids = ids_of(step).float().unsqueeze(-1)
    transition = RolloutStorage.Transition()
    transition.observations, transition.actions, transition.rewards = observations(step), ids, ids
    transition.values = transition.actions_log_prob = transition.privileged_actions = ids
    transition.dones = torch.tensor([step == 1, False, step == 2])
    for name, value in given_extras(step).items():
        setattr(transition, name, value)
    return transition


def filled(mode="rl"):
    storage = make(mode)
    for step in range(STEPS):
        storage.add_transition(transition_of(step))
    return storage


def row_ids(batch):
    return batch.observations["policy"].squeeze(-1).long()


# ---------------------------------------------------------------------------------------------------- RolloutStorage


def test_flat_batches_have_them_as_attributes():
    batches = list(filled().mini_batch_generator(2, 2))
    assert len(batches) == 4
    for batch in batches:
        assert_extras(batch, row_ids(batch))


def test_recurrent_batches_have_them_as_the_other_fields():
    ids = torch.arange(STEPS * ENVS).reshape(STEPS, ENVS)
    for env, batch in enumerate(filled().recurrent_mini_batch_generator(ENVS, 1)):
        assert_extras(batch, ids[:, env : env + 1])


def test_the_generator_of_distillation_has_them():
    for step, batch in enumerate(filled("distillation").generator()):
        assert_extras(batch, ids_of(step))
        assert batch.actions is None


def test_dicts_have_them_by_name():
    storage = filled()
    storage.returns.zero_()
    for batch in storage.generate_batches(2):
        assert_extras(batch, batch["rows"])
    for batch in storage.generate_batches(1, recurrent=True):
        assert_extras(batch, torch.arange(STEPS * ENVS).reshape(STEPS, ENVS))
    assert_extras(storage.get_all_buffer_data(), torch.arange(STEPS * ENVS).reshape(STEPS, ENVS))


@pytest.mark.parametrize("mode", ["rl", "distillation"])
def test_the_blocks_are_live(mode):
    storage = filled(mode)
    assert tuple(storage.extra) == NAMES
    assert {name: tuple(block.shape) for name, block in storage.extra.items()} == {
        "costs": (STEPS, ENVS, 1),
        "task_id": (STEPS, ENVS, 1),
        "image": (STEPS, ENVS, 2, 2),
    }
    assert storage.extra["image"].dtype == torch.uint8
    storage.extra["costs"][2] = -1.0
    served = storage.get_all_buffer_data()["costs"]
    assert served[2].eq(-1).all()
    assert torch.equal(served[3], extras_of(ids_of(3))["costs"])
    with pytest.raises(TypeError):
        storage.extra["costs"] = torch.zeros(STEPS, ENVS, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_field_is_refused_and_nothing_is_written(name):
    storage = make()
    transition = transition_of(0)
    delattr(transition, name)
    with pytest.raises(InvalidInputError, match=f"{name} is missing"):
        storage.add_transition(transition)
    assert storage.step == 0
    assert not any(block.any() for block in storage._ring.blocks.values())


BAD = {
    "costs": torch.zeros(ENVS, 2),
    "task_id": torch.full((ENVS,), 0.5),
    "image": torch.full((ENVS, 2, 2), 256),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_does_not_fit_is_refused_and_nothing_is_written(name):
    storage = make()
    transition = transition_of(1)
    setattr(transition, name, BAD[name])
    with pytest.raises(InvalidInputError, match=f"{name} is .*the extra_fields given to RolloutStorage"):
        storage.add_transition(transition)
    assert storage.step == 0
    assert not any(block.any() for block in storage._ring.blocks.values())


def test_clear_resets_them():
    transition = transition_of(0)
    transition.clear()
    assert all(getattr(transition, name) is None for name in (*NAMES, "observations", "rewards"))
    with pytest.raises(InvalidInputError, match="missing"):
        make().add_transition(transition)


def test_a_batch_takes_them_by_keyword():
    batch = RolloutStorage.Batch(actions=torch.ones(1), costs=torch.zeros(2, 1))
    assert torch.equal(batch.costs, torch.zeros(2, 1))
    loaded = pickle.loads(pickle.dumps(batch))
    assert type(loaded) is RolloutStorage.Batch
    assert torch.equal(loaded.costs, batch.costs)


@pytest.mark.parametrize(
    "name", ["observations", "rewards", "values", "log_probs", "masks", "hidden_states", "privileged_actions", "rows"]
)
def test_names_of_the_storage_are_refused(name):
    with pytest.raises(InvalidInputError, match=name):
        RolloutStorage("rl", ENVS, STEPS, observations(0), [1], extra_fields={name: ((), torch.float32)})


def sample_of(step):
    ids = ids_of(step).float().unsqueeze(-1)
    return {
        "observations": observations(step),
        "next_observations": observations(step + 1),
        "actions": ids,
        "rewards": ids,
        "terminated": torch.zeros(ENVS, dtype=torch.bool),
        "truncated": torch.zeros(ENVS, dtype=torch.bool),
        "values": ids,
        "log_probs": ids,
        **given_extras(step),
    }


def decoupled_sample_of(step):
    return {**sample_of(step), "adv_preds": ids_of(step).float()}


FACTORIES = {
    "rollout": (RolloutStorage.create_factory(STEPS, seed=0, extra_fields=EXTRA), sample_of),
    "decoupled": (DecoupledRolloutStorage.create_factory(STEPS, seed=0, extra_fields=EXTRA), decoupled_sample_of),
}


@pytest.fixture(params=FACTORIES)
def learnt(request):
    """A storage that learnt its shapes from samples, full."""
    factory, sample = FACTORIES[request.param]
    storage = factory()
    for step in range(STEPS):
        storage.insert_transition(sample(step))
    return storage


def assert_holds_all(storage):
    assert_extras(storage.get_all_buffer_data(), torch.arange(STEPS * ENVS).reshape(STEPS, ENVS))
    storage.returns.zero_()
    for batch in storage.generate_batches(3):
        assert_extras(batch, batch["rows"])


def test_samples_bring_them_by_name(learnt):
    assert_holds_all(learnt)


@pytest.mark.parametrize("name", NAMES)
def test_samples_without_one_are_refused(learnt, name):
    before = learnt.get_all_buffer_data()
    sample = decoupled_sample_of(9) if "adv_preds" in before else sample_of(9)
    learnt.after_gradients()
    for bad in ({key: value for key, value in sample.items() if key != name}, {**sample, "unknown": torch.ones(ENVS)}):
        with pytest.raises(InvalidInputError, match=rf"{name}|unknown"):
            learnt.insert_transition(bad)
    after = learnt.get_all_buffer_data()
    assert all(torch.equal(after[key], before[key]) for key in (*NAMES, "rewards"))


def test_all_data_round_trips(learnt):
    data = learnt.get_all_buffer_data()
    learnt.reset()
    learnt.insert_data_slice(data)
    assert_holds_all(learnt)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))], ids=["deepcopy", "pickle"]
)
def test_copies_have_them(learnt, again):
    twin = again(learnt)
    assert_holds_all(twin)
    twin.extra["costs"].zero_()
    assert_holds_all(learnt)


def test_they_are_saved_and_loaded(learnt, tmp_path):
    learnt.save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    assert type(loaded) is type(learnt)
    assert_holds_all(loaded)
    loaded.after_gradients()
    sample = decoupled_sample_of(0) if isinstance(loaded, DecoupledRolloutStorage) else sample_of(0)
    loaded.insert_transition(sample)
    loaded.save(tmp_path / "snapshot")


def test_built_with_shapes_they_are_saved_and_loaded(tmp_path):
    storage = filled()
    storage.save(tmp_path / "snapshot")
    assert_holds_all(Storage.load(tmp_path / "snapshot"))


def test_an_empty_storage_is_saved_with_them(tmp_path):
    FACTORIES["rollout"][0]().save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    for step in range(STEPS):
        loaded.insert_transition(sample_of(step))
    assert_holds_all(loaded)


def test_another_number_of_steps_keeps_them():
    storage = filled()
    storage.reset()
    storage.update_storage_parameter("num_transitions_per_env", STEPS + 1)
    assert storage.extra["image"].shape == (STEPS + 1, ENVS, 2, 2)
    for step in range(STEPS + 1):
        storage.add_transition(transition_of(step))
    assert_extras(storage.get_all_buffer_data(), torch.arange((STEPS + 1) * ENVS).reshape(STEPS + 1, ENVS))


# ---------------------------------------------------------------------------------------------------- decoupled


def make_decoupled(**options):
    box = gym.spaces.Box(-100, 100, (1,), dtype="float32")
    return DecoupledRolloutStorage(
        box, gym.spaces.Discrete(2), num_steps=STEPS, num_envs=ENVS, seed=0, extra_fields=EXTRA, **options
    )


def arguments_of(step):
    ids = ids_of(step).float()
    flags = torch.zeros(ENVS, dtype=torch.bool)
    return {
        "obs": ids.unsqueeze(-1),
        "actions": torch.zeros(ENVS),
        "rewards": ids,
        "terminateds": flags,
        "truncateds": flags,
        "next_obs": ids.unsqueeze(-1) + ENVS,
        "log_probs": ids,
        "values": ids,
        "adv_preds": ids,
        **given_extras(step),
    }


def filled_decoupled():
    storage = make_decoupled()
    for step in range(STEPS):
        storage.add(**arguments_of(step))
    storage.compute_returns_and_advantages(torch.zeros(ENVS))
    return storage


def test_decoupled_batches_have_them_behind_the_documented_fields():
    storage = filled_decoupled()
    seen = []
    for batch in storage.sample(2):
        assert isinstance(batch, DecoupledBatch)
        assert batch._fields == (*DecoupledBatch._fields, *NAMES)
        ids = batch.obs.squeeze(-1).long()
        assert_extras(batch, ids)
        assert torch.equal(batch[9], batch.costs)
        assert batch._asdict()["task_id"] is batch.task_id
        assert type(pickle.loads(pickle.dumps(batch))) is type(batch)
        assert type(batch._replace(costs=None)) is type(batch)
        seen += ids.tolist()
    assert sorted(seen) == list(range(STEPS * ENVS))
    assert_holds_all(storage)


def test_decoupled_blocks_are_live():
    storage = filled_decoupled()
    assert {name: tuple(block.shape) for name, block in storage.extra.items()} == {
        "costs": (STEPS, ENVS),
        "task_id": (STEPS, ENVS),
        "image": (STEPS, ENVS, 2, 2),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_decoupled_step_needs_them_all(name):
    storage = make_decoupled()
    arguments = arguments_of(1)
    for bad in (
        {key: value for key, value in arguments.items() if key != name},
        {**arguments, name: BAD[name]},
        {**arguments, "unknown": torch.ones(ENVS)},
    ):
        with pytest.raises(InvalidInputError, match=rf"{name}|unknown"):
            storage.add(**bad)
    assert storage._ring.size == 0
    known = {key: block for key, block in storage._ring.blocks.items() if key != "final_values"}
    assert not any(block.any() for block in known.values())


def test_without_extra_fields_a_batch_is_a_plain_one():
    storage = DecoupledRolloutStorage(gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2), num_steps=1, num_envs=2)
    flags = torch.zeros(2)
    storage.add(torch.zeros(2, 1), flags, flags, flags, flags, torch.zeros(2, 1), flags, flags, flags)
    (batch,) = storage.sample(1)
    assert type(batch) is DecoupledBatch
    assert dict(storage.extra) == {}
    with pytest.raises(InvalidInputError, match="costs"):
        storage.add(torch.zeros(2, 1), flags, flags, flags, flags, torch.zeros(2, 1), flags, flags, flags, costs=flags)
