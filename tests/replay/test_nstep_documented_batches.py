"""NStepReplayStorage as its document and the contract have it: what add takes, what sample serves, reset and copies."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from like_configs import LikeDictConfig
from nstep_steps import BOX, assert_tables, fill, ids_of, make_step, make_storage, obs_of, served, table
from tensordict import TensorDict

from rlstore import ReplayStorage

# ------------------------------------------------------------------------------------------------- batches


def test_a_batch_is_a_named_tuple():
    storage = make_storage(batch_size=7)
    fill(storage, 4)
    batch = storage.sample()
    assert isinstance(batch, tuple)
    assert batch._fields == ("observations", "actions", "rewards", "discounts", "next_observations")
    observations, actions, rewards, discounts, next_observations = batch
    assert observations is batch.observations
    assert observations.shape == next_observations.shape == (7, 2)
    assert actions.shape == (7,)
    assert rewards.shape == discounts.shape == (7, 1)
    assert {tensor.dtype for tensor in batch} == {torch.float32}
    assert {tensor.device for tensor in batch} == {storage.device}


@pytest.mark.parametrize("space", [spaces.Box(-1e9, 1e9, (3,)), spaces.MultiDiscrete([9, 9, 9]), spaces.MultiBinary(3)])
def test_actions_of_several_numbers_are_served_as_they_were_given(space):
    storage = make_storage(action_space=space, batch_size=64)
    given = [[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [1, 1, 0]]
    for step, actions in enumerate(given):
        storage.add(**make_step(step, actions=torch.tensor(actions)))
    batch = storage.sample()
    assert batch.actions.shape == (64, 3)
    assert batch.actions.dtype == torch.float32
    got = {int(obs[0]) // 10: action.tolist() for obs, action in zip(batch.observations, batch.actions, strict=True)}
    assert got == {1: [1, 0, 0], 2: [0, 1, 0], 3: [0, 0, 1], 4: [1, 1, 0]}


@pytest.mark.parametrize("kept", [np.uint8, np.float16, np.float32, np.float64, np.int16], ids=lambda t: t.__name__)
@pytest.mark.parametrize("dtype", ["default", torch.float32, torch.float16, torch.float64, None], ids=str)
def test_observations_are_kept_in_their_dtype_and_served_in_that_of_the_keyword(kept, dtype):
    options = {} if dtype == "default" else {"dtype": dtype}
    storage = make_storage(1, observation_space=spaces.Box(0, 120, (2,), kept), batch_size=64, **options)
    for step in range(3):
        numbers = np.array([[10 * step + 1, 10 * step + 2]], dtype=kept)
        storage.add(**make_step(step, 1, observations=numbers, next_observations=numbers + kept(10)))
    held = storage.get_all_buffer_data()["observations"]
    as_kept = torch.from_numpy(np.empty(0, kept)).dtype
    assert held.dtype == as_kept
    assert held.flatten().tolist() == [1, 2, 11, 12, 21, 22]
    batch = storage.sample()
    expected = {"default": torch.float32, None: as_kept}.get(dtype, dtype)
    assert batch.observations.dtype == batch.next_observations.dtype == expected
    assert {tuple(obs) for obs in batch.observations.tolist()} == {(1, 2), (11, 12), (21, 22)}
    assert batch.rewards.dtype == batch.discounts.dtype == torch.float32


def test_bytes_are_bytes_in_memory():
    small = make_storage(1, 1000, observation_space=spaces.Box(0, 255, (3, 8, 8), np.uint8))
    assert small.nbytes < 1000 * (3 * 8 * 8 + 60)
    assert make_storage(1, 1000, observation_space=spaces.Box(0, 1, (3, 8, 8))).nbytes > 1000 * 3 * 8 * 8 * 4


def test_the_iterator_is_there_as_an_attribute_and_as_a_method():
    storage = make_storage(batch_size=33, seed=0)
    fill(storage, 5)
    observations, actions, rewards, discounts, next_observations = next(storage.replay_iter)
    assert observations.shape == next_observations.shape == (33, 2)
    assert actions.shape == (33,)
    assert rewards.shape == discounts.shape == (33, 1)
    assert next(storage.replay_iter).observations.tolist() != observations.tolist()
    for number, batch in enumerate(storage.replay_iter()):
        assert batch.observations.shape == (33, 2)
        assert table(batch).keys() <= set(range(1, 11))
        if number == 3:
            break
    iterator = storage.replay_iter
    assert next(iter(iterator)).observations.shape == (33, 2)


def test_the_iterator_and_sample_draw_from_the_same_stream():
    by_iterator, by_sample, mixed = (make_storage(batch_size=9, seed=5) for _ in range(3))
    for storage in (by_iterator, by_sample, mixed):
        fill(storage, 5)
    drawn = [
        [next(by_iterator.replay_iter).observations.tolist() for _ in range(4)],
        [by_sample.sample().observations.tolist() for _ in range(4)],
        [(next(mixed.replay_iter) if i % 2 else mixed.sample()).observations.tolist() for i in range(4)],
    ]
    assert drawn[0] == drawn[1] == drawn[2]


def test_a_seed_makes_the_draws_the_same_and_another_seed_makes_others():
    drawn = []
    for seed in (0, 0, 1):
        storage = make_storage(batch_size=50, seed=seed)
        fill(storage, 8)
        drawn.append([storage.sample().observations.tolist() for _ in range(3)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_update_returns_none_whatever_it_is_given():
    storage = make_storage()
    fill(storage, 3)
    before = served(storage)
    assert storage.update() is None
    assert storage.update({"loss": 1.0}) is None
    assert storage.update(1, "two", None) is None
    assert_tables(served(storage), before)


def test_add_returns_none():
    storage = make_storage()
    assert storage.add(*make_step(0).values()) is None


# ------------------------------------------------------------------------------------------------- what add takes


def test_positional_arguments_mean_the_same_as_keywords():
    by_name, by_place = make_storage(), make_storage()
    for step in range(5):
        arguments = make_step(step, 2, (1,) if step == 2 else (), (0,) if step == 3 else ())
        by_name.add(**arguments)
        by_place.add(*arguments.values())
    assert_tables(served(by_place), served(by_name))


FORMS = {
    "tensor": lambda x: x,
    "double": lambda x: x.double(),
    "numpy": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "with gradient": lambda x: x.float().requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_values_come_in_any_form(form):
    plain, formed = make_storage(), make_storage()
    for step in range(4):
        arguments = make_step(step, 2, (0,) if step == 1 else ())
        plain.add(**arguments)
        names = ["observations", "rewards", "next_observations"]
        if form not in ("double", "with gradient"):  # a real number is no choice among some
            names.append("actions")
        formed.add(**{**arguments, **{name: FORMS[form](arguments[name]) for name in names}})
    assert_tables(served(formed), served(plain))


@pytest.mark.parametrize("name", ["rewards", "terminateds", "truncateds", "actions"])
def test_scalars_come_as_n_or_n_by_1(name):
    flat, column = make_storage(), make_storage()
    for step in range(4):
        arguments = make_step(step, 2, (0,) if step == 1 else (), (1,) if step == 2 else ())
        flat.add(**arguments)
        column.add(**{**arguments, name: arguments[name].unsqueeze(-1)})
    assert_tables(served(column), served(flat))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64])
def test_flags_come_in_any_dtype(dtype):
    plain, cast = make_storage(), make_storage()
    for step in range(4):
        arguments = make_step(step, 2, (0,) if step == 1 else (), (1,) if step == 2 else ())
        plain.add(**arguments)
        flags = {name: arguments[name].to(dtype) for name in ("terminateds", "truncateds")}
        cast.add(**{**arguments, **flags})
    assert_tables(served(cast), served(plain))


def test_a_single_environment_may_leave_its_axis_out():
    with_axis, without = make_storage(1), make_storage(1)
    for step in range(5):
        end = (0,) if step == 2 else ()
        arguments = make_step(step, 1, end)
        with_axis.add(**arguments)
        infos = {"final_obs": arguments["infos"]["final_obs"][0]} if end else {}
        without.add(
            arguments["observations"][0].numpy(),
            int(arguments["actions"][0]),
            float(arguments["rewards"][0]),
            bool(end),
            False,
            infos,
            arguments["next_observations"][0].numpy(),
        )
    assert_tables(served(without), served(with_axis))


def test_data_are_copied_not_referenced():
    storage = make_storage()
    given = [make_step(step, 2, (0,) if step == 1 else ()) for step in range(3)]
    for arguments in given:
        storage.add(**arguments)
    before = served(storage)
    for arguments in given:
        for name, value in arguments.items():
            if name != "infos":
                value.fill_(1)
        for final in arguments["infos"].get("final_obs", ()):
            if final is not None:
                final[:] = 99
    assert_tables(served(storage), before)


def test_a_batch_belongs_to_its_caller():
    storage = make_storage(batch_size=64)
    fill(storage, 5, terminated=(0,))
    expected, batch = served(storage), storage.sample()
    kept = copy.deepcopy(batch)
    for _ in range(5):
        for tensor in storage.sample():
            tensor.fill_(-5)
    fill(storage, 8, first=5)
    for mine, other in zip(batch, kept, strict=True):
        assert torch.equal(mine, other)
    assert_tables({number: expected[number] for number in table(batch)}, table(batch))


def test_what_is_added_in_inference_mode_can_be_learnt_from():
    with torch.inference_mode():
        storage = make_storage(batch_size=8)
        fill(storage, 3, terminated=(0,))
        storage.sample()
    weight = torch.ones(2, requires_grad=True)
    batch = storage.sample()
    assert not any(tensor.is_inference() for tensor in batch)
    (batch.observations * weight).sum().backward()
    assert weight.grad.tolist() == batch.observations.sum(0).tolist()


# ------------------------------------------------------------------------------------------------- reset and copies


def test_reset_really_makes_the_storage_empty():
    storage = make_storage(steps=4)
    fill(storage, 6)
    assert storage.reset() is None
    assert (len(storage), storage.step, storage.full) == (0, 0, False)
    with pytest.raises((RuntimeError, ValueError)):
        storage.sample()
    fill(storage, 2, first=50)
    # Two steps of each environment, and nothing of what was there before.
    assert served(storage).keys() == {101, 102, 103, 104}
    assert len(storage) == 4


def test_nothing_of_the_episode_before_a_reset_reaches_the_one_after_it():
    storage = make_storage(1, n_step=3, discount=0.5)
    fill(storage, 3)
    storage.reset()
    storage.add(**make_step(7, 1))
    assert served(storage) == {8: (8, 8.25, 0.5, 9)}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_copy_goes_on_by_itself(way, num_workers):
    storage = make_storage(steps=4, batch_size=40, seed=0, num_workers=num_workers)
    fill(storage, 5, terminated=(0, 1))
    storage.sample()
    other = way(storage)
    for _ in range(3):
        for mine, copied in zip(storage.sample(), other.sample(), strict=True):
            assert torch.equal(mine, copied)
    fill(other, 4, first=90)
    assert set(range(181, 189)) >= served_ids(other)
    assert served_ids(storage) <= set(range(3, 11))
    storage.close()
    other.close()


def served_ids(storage, batches=8):
    """The ids in several batches: the first few may have been prepared before the last add."""
    drawn = [storage.sample() for _ in range(batches)]
    return {number for batch in drawn[batches // 2 :] for number in table(batch)}


# ------------------------------------------------------------------------------------------------- nests


def nested_step(storage, step, make):
    here, after = (ids_of(step + i, storage.num_envs) for i in (0, 1))
    storage.add(**make_step(step, storage.num_envs, observations=make(here), next_observations=make(after)))


def test_dict_observations_are_served_as_a_tensordict_of_float32():
    space = spaces.Dict(
        {"image": spaces.Box(0, 255, (2,), np.uint8), "inner": spaces.Dict({"speed": spaces.Box(-1e9, 1e9, (1,))})}
    )
    storage = make_storage(observation_space=space, batch_size=64, n_step=1)
    for step in range(3):
        nested_step(
            storage,
            step,
            lambda ids: {"image": torch.stack([ids, ids + 100], -1).byte(), "inner": {"speed": -ids.unsqueeze(-1)}},
        )
    batch = storage.sample()
    assert isinstance(batch.observations, TensorDict)
    assert batch.observations.batch_size == (64,)
    assert {leaf.dtype for leaf in batch.observations.values(True, True)} == {torch.float32}
    ids = batch.actions.unsqueeze(-1)
    for observations, shift in ((batch.observations, 0), (batch.next_observations, 2)):
        assert torch.equal(observations["image"], torch.cat([ids + shift, ids + shift + 100], -1))
        assert torch.equal(observations["inner", "speed"], -(ids + shift))
    held = storage.get_all_buffer_data()["observations"]
    assert held["image"].dtype == torch.uint8


def test_tuple_observations_are_served_as_tuples():
    space = spaces.Tuple([BOX, spaces.Box(-1e9, 1e9, (1,))])
    storage = make_storage(observation_space=space, batch_size=64, n_step=1)
    for step in range(3):
        nested_step(storage, step, lambda ids: (obs_of(ids), -ids.unsqueeze(-1)))
    batch = storage.sample()
    assert isinstance(batch.observations, tuple)
    ids = batch.actions
    assert torch.equal(batch.observations[0], obs_of(ids))
    assert torch.equal(batch.observations[1], -ids.unsqueeze(-1))
    assert torch.equal(batch.next_observations[0], obs_of(ids + 2))
    assert torch.equal(batch.next_observations[1], -(ids + 2).unsqueeze(-1))


@pytest.mark.parametrize("space", [{"shape": (2,)}, LikeDictConfig(shape=(2,))], ids=["dict", "DictConfig"])
def test_spaces_come_as_hydra_passes_them(space):
    plain = make_storage(action_space=spaces.Discrete(1000))
    mapped = make_storage(
        observation_space=space, action_space={"shape": (1000,), "type": "Discrete", "range": [0, 999]}
    )
    beside = make_storage(observation_space=space, action_space=spaces.Discrete(1000))
    for storage in (plain, mapped, beside):
        fill(storage, 5, truncated=(1,))
    assert_tables(served(mapped), served(plain))
    assert_tables(served(beside), served(plain))


def test_plain_numbers_of_one_environment_are_each_their_own():
    """An observation was read as half a double, and the action took the reward's place."""
    storage = ReplayStorage(spaces.Box(-10, 10, (1,)), spaces.Box(-10, 10, (1,)), storage_size=4, batch_size=2)
    storage.add(0.25, 0.5, 2.0, False, False, {}, 0.75)
    storage.add(0.75, -0.5, 3.0, True, False, {}, 1.25)
    data = storage.get_all_buffer_data()
    assert data["observations"].flatten().tolist() == [0.25, 0.75]
    assert data["actions"].flatten().tolist() == [0.5, -0.5]
    assert data["rewards"].flatten().tolist() == [2.0, 3.0]
    assert data["next_observations"].flatten().tolist() == [0.75, 1.25]
