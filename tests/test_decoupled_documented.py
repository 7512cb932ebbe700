"""DecoupledRolloutStorage as its document and the contract have it: spaces, attributes, and what add() writes where."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from decoupled_ids import BLOCKS, fill, ids_of, leaves, make_step, make_storage, obs_of
from gymnasium import spaces
from like_configs import LikeDictConfig

from rlstore import DecoupledRolloutStorage

# Most of these read other fields of batches whose returns and advantages nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages:RuntimeWarning")

BOX = spaces.Box(-1.0, 1.0, (2,))


# ------------------------------------------------------------------------------------------------- construction


def test_the_constructor_has_the_documented_arguments_in_the_documented_order():
    parameters = list(inspect.signature(DecoupledRolloutStorage).parameters.values())
    documented = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert documented == [
        ("observation_space", inspect.Parameter.empty),
        ("action_space", inspect.Parameter.empty),
        ("device", "cpu"),
        ("num_steps", 256),
        ("num_envs", 8),
        ("discount", 0.99),
        ("gae_lambda", 0.95),
    ]


def test_add_has_the_documented_arguments_in_the_documented_order():
    names = list(inspect.signature(DecoupledRolloutStorage.add).parameters)
    assert names[1:10] == [
        *("obs", "actions", "rewards", "terminateds", "truncateds", "next_obs", "log_probs", "values", "adv_preds"),
    ]
    assert inspect.signature(DecoupledRolloutStorage.sample).parameters["num_mini_batch"].default == 8


def test_all_positional_arguments_are_taken():
    storage = DecoupledRolloutStorage(BOX, spaces.Discrete(4), "cpu", 5, 3, 0.9, 0.8)
    assert (storage.num_steps, storage.num_envs, storage.discount, storage.gae_lambda) == (5, 3, 0.9, 0.8)
    assert (storage.device, storage.max_size, len(storage)) == ("cpu", 5, 0)


def test_the_defaults_are_those_of_the_document():
    storage = DecoupledRolloutStorage(BOX, spaces.Discrete(4))
    assert storage.obs.shape == (257, 8, 2)
    assert storage.rewards.shape == (256, 8)


@pytest.mark.parametrize(
    ("action_space", "shape"),
    [
        (spaces.Discrete(5), ()),
        (spaces.Box(-1.0, 1.0, (3,)), (3,)),
        (spaces.Box(-1.0, 1.0, (2, 3)), (2, 3)),
        (spaces.MultiDiscrete([3, 4]), (2,)),
        (spaces.MultiBinary(6), (6,)),
        ({"shape": (5,), "type": "Discrete", "range": [0, 4]}, ()),
        ({"shape": [5], "type": "Discrete", "n": 5}, ()),
        ({"shape": (1,), "type": "Discrete", "n": 5}, ()),
        ({"shape": (3,), "type": "Box", "range": [-1.0, 1.0]}, (3,)),
        ({"shape": (2,), "type": "MultiDiscrete", "nvec": [3, 4]}, (2,)),
        ({"shape": (6,), "type": "MultiBinary"}, (6,)),
        (LikeDictConfig(shape=(5,), type="Discrete", range=[0, 4]), ()),
        (LikeDictConfig(shape=(3,), type="Box", range=[-1.0, 1.0]), (3,)),
    ],
    ids=repr,
)
def test_every_block_has_the_documented_shape_and_dtype(action_space, shape):
    storage = make_storage(4, 3, action_space)
    shapes = {name: tuple(getattr(storage, name).shape) for name in BLOCKS}
    assert shapes.pop("actions") == (4, 3, *shape)
    assert shapes.pop("terminateds") == shapes.pop("truncateds") == (5, 3)
    assert set(shapes.values()) == {(4, 3)}
    assert {getattr(storage, name).dtype for name in BLOCKS} == {torch.float32}
    assert storage.obs.shape == (5, 3, 2)
    for flags in (storage.terminateds, storage.truncateds):
        assert not flags[0].any()


@pytest.mark.parametrize(
    ("observation_space", "shape", "dtype"),
    [
        (spaces.Box(0, 255, (3, 4, 4), np.uint8), (3, 4, 4), torch.uint8),
        (spaces.Box(-1.0, 1.0, (2,), np.float64), (2,), torch.float64),
        (spaces.Box(-1.0, 1.0, (2,), np.float32), (2,), torch.float32),
        (spaces.Box(-9, 9, (2,), np.int16), (2,), torch.int16),
        (spaces.Discrete(7), (), torch.int64),
        (spaces.MultiBinary(3), (3,), torch.int8),
        (spaces.MultiDiscrete([3, 4]), (2,), torch.int64),
        ({"shape": (3, 4)}, (3, 4), torch.float32),
        ({"shape": [3, 4], "dtype": "uint8"}, (3, 4), torch.uint8),
        ({"shape": (3,), "dtype": np.float64}, (3,), torch.float64),
        ({"shape": (3,), "dtype": torch.int32}, (3,), torch.int32),
        ({"shape": (3,), "dtype": "torch.uint8"}, (3,), torch.uint8),
        (LikeDictConfig(shape=(3, 4)), (3, 4), torch.float32),
        (LikeDictConfig(shape=(3, 4), dtype="uint8"), (3, 4), torch.uint8),
    ],
    ids=repr,
)
def test_observations_keep_the_shape_and_dtype_of_their_space(observation_space, shape, dtype):
    storage = make_storage(
        2, 3, spaces.Discrete(2), observation_space
    )  # a Space beside a mapping, in half of the cases
    assert storage.obs.shape == (3, 3, *shape)
    assert storage.obs.dtype is dtype


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(4),
        spaces.Graph(BOX, None),
        spaces.Sequence(BOX),
        spaces.Dict({"text": spaces.Text(4), "box": BOX}),
        spaces.Tuple([BOX, spaces.Text(4)]),
        42,
    ],
    ids=lambda space: type(space).__name__,
)
def test_an_observation_space_that_cannot_be_held_is_named(space):
    culprit = space if not isinstance(space, (spaces.Dict, spaces.Tuple)) else spaces.Text(4)
    with pytest.raises(NotImplementedError, match=type(culprit).__name__):
        make_storage(observation_space=space)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(4),
        spaces.Sequence(BOX),
        spaces.Dict({"a": BOX}),
        spaces.Tuple([BOX]),
        {"shape": (2,), "type": "Graph"},
    ],
    ids=lambda space: type(space).__name__,
)
def test_an_action_space_that_cannot_be_held_is_named(space):
    name = "Graph" if isinstance(space, dict) else type(space).__name__
    with pytest.raises(NotImplementedError, match=name):
        make_storage(action_space=space)


def test_a_dict_space_whose_keys_are_no_names_is_refused():
    for keys in ((0, 1), (1, 2)):
        with pytest.raises((ValueError, NotImplementedError)):
            make_storage(observation_space=spaces.Dict(dict.fromkeys(keys, BOX)))


def test_a_dict_of_mappings_is_a_dict_of_observations():
    space = LikeDictConfig(image=LikeDictConfig(shape=(2,), dtype="uint8"), speed=LikeDictConfig(shape=(3,)))
    storage = make_storage(2, 3, observation_space=space)
    assert {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves(storage.obs)} == {
        "/image": ((3, 3, 2), torch.uint8),
        "/speed": ((3, 3, 3), torch.float32),
    }


def test_an_observation_space_without_any_leaf_is_refused():
    with pytest.raises((ValueError, NotImplementedError)):
        make_storage(observation_space=spaces.Dict({}))


# ------------------------------------------------------------------------------------------------- what add writes


def test_a_rollout_lies_where_the_document_says():
    storage = make_storage(3, 2)
    ends = [((0,), ()), ((), (0, 1)), ((1,), (0,))]
    for step, (terminated, truncated) in enumerate(ends):
        storage.add(**make_step(step, 2, terminated, truncated))
        assert len(storage) == 2 * (step + 1)
    ids = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    assert storage.obs.tolist() == [
        [[10, 11], [20, 21]],
        [[30, 31], [40, 41]],
        [[50, 51], [60, 61]],
        [[70, 71], [80, 81]],
    ]
    assert torch.equal(storage.actions, ids[:3])
    assert torch.equal(storage.rewards, ids[:3] + 0.25)
    assert torch.equal(storage.log_probs, -ids[:3])
    assert torch.equal(storage.values, ids[:3] + 0.5)
    assert torch.equal(storage.adv_preds, ids[:3] + 0.75)
    assert storage.terminateds.tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]
    assert storage.truncateds.tolist() == [[0, 0], [0, 0], [1, 1], [1, 0]]


def test_positional_arguments_mean_the_same_as_keywords():
    by_name, by_place = make_storage(), make_storage()
    for step in range(3):
        arguments = make_step(step, 2, (1,), (0,), final_values=torch.tensor([3.0, 4.0]))
        by_name.add(**arguments)
        by_place.add(*arguments.values())
    for name in ("obs", *BLOCKS):
        torch.testing.assert_close(getattr(by_name, name), getattr(by_place, name), rtol=0, atol=0, equal_nan=True)


def test_the_next_observation_stands_in_the_row_after_until_the_next_step_brings_its_own():
    storage = make_storage(3, 2)
    storage.add(**make_step(0, next_obs=torch.full((2, 2), -7.0)))
    assert storage.obs[1].tolist() == [[-7, -7], [-7, -7]]
    storage.add(**make_step(1))
    assert storage.obs[:3].tolist() == [[[10, 11], [20, 21]], [[30, 31], [40, 41]], [[50, 51], [60, 61]]]


@pytest.mark.parametrize("space", [spaces.Box(-1e9, 1e9, (3,)), spaces.MultiDiscrete([9] * 3), spaces.MultiBinary(3)])
def test_actions_of_several_numbers_are_kept_and_served(space):
    storage = make_storage(2, 2, space)
    given = [
        torch.tensor([[1, 0, 0], [0, 1, 0]]) + (0 if isinstance(space, spaces.MultiBinary) else 3 * t) for t in (0, 1)
    ]
    for step, actions in enumerate(given):
        storage.add(**make_step(step, actions=actions))
    assert torch.equal(storage.actions, torch.stack(given).float())
    (batch,) = storage.sample(1)
    assert batch.actions.shape == (4, 3)
    served = {int(v - 0.5): a.tolist() for v, a in zip(batch.values, batch.actions, strict=True)}
    expected = torch.stack(given).flatten(0, 1).float().tolist()
    assert served == dict(zip((1, 2, 3, 4), expected, strict=True))


@pytest.mark.parametrize(
    "actions", [torch.tensor([4, 7]), torch.tensor([[4], [7]]), np.array([4, 7]), [4, 7], [4.0, 7.0]]
)
def test_discrete_actions_come_in_any_form(actions):
    storage = make_storage()
    storage.add(**make_step(0, actions=actions))
    assert storage.actions[0].tolist() == [4, 7]
    assert storage.actions.shape == (3, 2)


@pytest.mark.parametrize("name", ["rewards", "log_probs", "values", "adv_preds"])
@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([4.0, 7.0]),
        torch.tensor([[4.0], [7.0]]),
        torch.tensor([4.0, 7.0], dtype=torch.float64),
        torch.tensor([4, 7]),
        torch.tensor([4.0, 0, 7.0, 0])[::2],
        torch.tensor([4.0, 7.0], requires_grad=True),
        np.array([4.0, 7.0]),
        np.array([[4.0], [7.0]], dtype=np.float32),
        [4.0, 7.0],
        [[4], [7]],
        (4.0, 7.0),
        [torch.tensor(4.0), torch.tensor(7.0)],
    ],
    ids=repr,
)
def test_a_scalar_comes_as_n_or_n_by_1_in_any_form(name, given):
    storage = make_storage()
    storage.add(**make_step(0, **{name: given}))
    assert getattr(storage, name)[0].tolist() == [4, 7]
    assert not getattr(storage, name).requires_grad


@pytest.mark.parametrize("name", ["terminateds", "truncateds"])
@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([True, False]),
        torch.tensor([[True], [False]]),
        torch.tensor([1, 0], dtype=torch.uint8),
        torch.tensor([1, 0]),
        torch.tensor([1.0, 0.0]),
        torch.tensor([2.0, 0.0], dtype=torch.float64),
        np.array([True, False]),
        np.array([1, 0]),
        [True, False],
        [1, 0],
    ],
    ids=repr,
)
def test_a_flag_of_any_dtype_is_stored_as_0_or_1(name, given):
    storage = make_storage()
    storage.add(**make_step(0, **{name: given}))
    assert getattr(storage, name).tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.numpy(), lambda x: x.tolist(), lambda x: x.double()])
def test_observations_come_in_any_form(form):
    storage = make_storage()
    storage.add(**make_step(0, obs=form(obs_of(ids_of(0, 2))), next_obs=form(obs_of(ids_of(1, 2)))))
    assert storage.obs[:2].tolist() == [[[10, 11], [20, 21]], [[30, 31], [40, 41]]]


def test_data_are_copied_not_referenced():
    storage = make_storage(2, 2)
    given = make_step(0, final_values=torch.tensor([1.0, 2.0]))
    storage.add(**given)
    held = {name: getattr(storage, name).clone() for name in ("obs", *BLOCKS)}
    for tensor in given.values():
        tensor.fill_(99)
    for name, tensor in held.items():
        torch.testing.assert_close(getattr(storage, name), tensor, rtol=0, atol=0, equal_nan=True)


def test_a_rollout_written_in_inference_mode_can_be_learnt_from():
    with torch.inference_mode():
        storage = make_storage(2, 2)
        fill(storage)
        storage.compute_returns_and_advantages(torch.zeros(2, 1))
    storage.rewards += 1
    weight = torch.ones(2, requires_grad=True)
    (batch,) = storage.sample(1)
    (batch.obs * weight).sum().backward()
    assert weight.grad.tolist() == [10 + 20 + 30 + 40, 11 + 21 + 31 + 41]
