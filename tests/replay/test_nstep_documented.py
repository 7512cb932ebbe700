"""NStepReplayStorage as its document and the contract have it: arguments, attributes, the shape of what it serves."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from gymnasium import spaces
from like_configs import LikeDictConfig
from nstep_steps import BOX, make_step, make_storage, table

from rlstore import NStepReplayStorage, Storage

# ------------------------------------------------------------------------------------------------- construction


def test_the_constructor_has_the_documented_arguments_in_the_documented_order():
    parameters = list(inspect.signature(NStepReplayStorage).parameters.values())
    documented = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert documented == [
        ("observation_space", inspect.Parameter.empty),
        ("action_space", inspect.Parameter.empty),
        ("device", "cpu"),
        ("storage_size", 1_000_000),
        ("num_envs", 1),
        ("batch_size", 256),
        ("num_workers", 4),
        ("pin_memory", True),
        ("n_step", 3),
        ("discount", 0.99),
        ("fetch_every", 1000),
        ("save_snapshot", False),
    ]
    others = [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in others)
    assert {p.name: p.default for p in others}["snapshot_dir"] == "storage"


def test_the_methods_have_the_documented_arguments_in_the_documented_order():
    parameters = list(inspect.signature(NStepReplayStorage.add).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        *("observations", "actions", "rewards", "terminateds", "truncateds", "infos", "next_observations"),
    ]
    assert inspect.signature(NStepReplayStorage.update).parameters["args"].kind is inspect.Parameter.VAR_POSITIONAL


def test_it_is_a_storage():
    assert issubclass(NStepReplayStorage, Storage)


def test_all_positional_arguments_are_taken():
    space, actions = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(3)
    storage = NStepReplayStorage(space, actions, "cpu", 64, 2, 5, 0, False, 2, 0.5, 10, False, seed=0)
    assert (storage.storage_size, storage.num_envs, storage.batch_size) == (64, 2, 5)
    assert (storage.num_workers, storage.pin_memory) == (0, False)
    for step in range(3):
        storage.add(
            torch.full((2, 4), float(step)),
            torch.zeros(2, dtype=torch.int64),
            torch.ones(2),
            torch.zeros(2),
            torch.zeros(2),
            {},
            torch.full((2, 4), step + 1.0),
        )
    batch = storage.sample()
    assert batch.observations.shape == (5, 4)
    assert set(batch.discounts.flatten().tolist()) <= {0.25, 0.5}  # n_step 2, discount 1/2
    assert set(batch.rewards.flatten().tolist()) <= {1.5, 1.0}


def test_keywords_mean_the_same_as_places():
    by_name = NStepReplayStorage(
        observation_space=BOX,
        action_space=spaces.Discrete(3),
        device="cpu",
        storage_size=64,
        num_envs=2,
        batch_size=5,
        num_workers=0,
        pin_memory=False,
        n_step=2,
        discount=0.5,
        fetch_every=10,
        save_snapshot=False,
        seed=3,
    )
    by_place = NStepReplayStorage(BOX, spaces.Discrete(3), "cpu", 64, 2, 5, 0, False, 2, 0.5, 10, False, seed=3)
    for storage in (by_name, by_place):
        for step in range(4):
            storage.add(**make_step(step, actions=torch.tensor([1, 2])))
    for mine, other in zip(by_name.sample(), by_place.sample(), strict=True):
        assert torch.equal(mine, other)


def test_the_defaults_are_those_of_the_document():
    storage = NStepReplayStorage(BOX, spaces.Discrete(4))
    assert (storage.storage_size, storage.num_envs, storage.batch_size) == (1_000_000, 1, 256)
    assert (storage.num_workers, storage.pin_memory) == (4, True)
    assert storage.device == torch.device("cpu")
    for step in range(5):
        storage.add(**make_step(step, 1, actions=[0]))
    batch = storage.sample()
    assert batch.observations.shape == (256, 2)
    discounts = {number: line[2] for number, line in table(batch).items()}
    expected = {1: 0.99**3, 2: 0.99**3, 3: 0.99**3, 4: 0.99**2, 5: 0.99}
    assert discounts == pytest.approx(expected)
    storage.close()


@pytest.mark.parametrize(
    ("space", "shape", "dim", "policy_dim", "kind"),
    [
        (spaces.Discrete(5), (), 1, 5, "Discrete"),
        (spaces.Box(-1.0, 1.0, (3,)), (3,), 3, 3, "Box"),
        (spaces.MultiDiscrete([3, 4]), (2,), 2, 7, "MultiDiscrete"),
        (spaces.MultiBinary(6), (6,), 6, 6, "MultiBinary"),
        ({"shape": (5,), "type": "Discrete", "range": [0, 4]}, (), 1, 5, "Discrete"),
        ({"shape": [1], "type": "Discrete", "n": 5}, (), 1, 5, "Discrete"),
        ({"shape": (3,), "type": "Box", "range": [-1.0, 1.0]}, (3,), 3, 3, "Box"),
        (LikeDictConfig(shape=(5,), type="Discrete", range=[0, 4]), (), 1, 5, "Discrete"),
        (LikeDictConfig(shape=(3,), type="Box", range=[-1.0, 1.0]), (3,), 3, 3, "Box"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_attributes_tell_the_actions(space, shape, dim, policy_dim, kind):
    storage = make_storage(action_space=space)
    assert storage.action_space is space
    assert tuple(storage.action_shape) == shape
    assert (storage.action_dim, storage.policy_action_dim, storage.action_type) == (dim, policy_dim, kind)


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (spaces.Box(0, 255, (3, 8, 8), np.uint8), (3, 8, 8)),
        (spaces.Box(-1.0, 1.0, (7,)), (7,)),
        ({"shape": [9, 8, 8]}, (9, 8, 8)),
        (LikeDictConfig(shape=(3, 4), dtype="uint8"), (3, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_attributes_tell_the_observations(space, shape):
    storage = make_storage(observation_space=space)
    assert storage.observation_space is space
    assert tuple(storage.obs_shape) == shape


def test_the_shapes_of_a_dict_space_are_told_by_name():
    space = spaces.Dict({"image": spaces.Box(0, 255, (3, 8, 8), np.uint8), "speed": BOX})
    shapes = make_storage(observation_space=space).obs_shape
    assert {name: tuple(shape) for name, shape in shapes.items()} == {"image": (3, 8, 8), "speed": (2,)}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_device_is_a_torch_device(device):
    storage = make_storage(device=device)
    assert isinstance(storage.device, torch.device)
    assert storage.device == torch.device("cpu")


def test_step_is_the_write_cursor_and_full_tells_when_it_has_gone_round():
    storage = make_storage(num_envs=2, steps=3)
    seen = [(storage.step, storage.full, len(storage))]
    for step in range(7):
        storage.add(**make_step(step))
        seen.append((storage.step, storage.full, len(storage)))
    assert seen == [
        *((0, False, 0), (1, False, 2), (2, False, 4), (0, True, 6)),
        *((1, True, 6), (2, True, 6), (0, True, 6), (1, True, 6)),
    ]


@pytest.mark.parametrize(
    "space",
    [spaces.Text(4), spaces.Graph(BOX, None), spaces.Sequence(BOX), spaces.Dict({"text": spaces.Text(4)}), 42],
    ids=lambda space: type(space).__name__,
)
def test_an_observation_space_that_cannot_be_held_is_named(space):
    name = "Text" if isinstance(space, spaces.Dict) else type(space).__name__
    with pytest.raises(NotImplementedError, match=name):
        make_storage(observation_space=space)


@pytest.mark.parametrize("space", [spaces.Text(4), spaces.Dict({"a": BOX}), spaces.Tuple([BOX])], ids=repr)
def test_an_action_space_that_cannot_be_held_is_named(space):
    with pytest.raises(NotImplementedError, match=type(space).__name__):
        make_storage(action_space=space)


# ------------------------------------------------------------------------------------------------- a DataLoader


@pytest.mark.parametrize("prepared", [0, 2])
@pytest.mark.parametrize("space", [BOX, spaces.Dict({"a": BOX, "b": spaces.Box(0, 255, (2, 2), np.uint8)})])
def test_replay_iter_is_a_dataset_for_a_data_loader(space, prepared):
    def filled():
        storage = make_storage(observation_space=space, batch_size=5, num_workers=prepared, seed=4)
        for step in range(6):
            given = make_step(step)
            if space is not BOX:
                for name, number in (("observations", step), ("next_observations", step + 1)):
                    given[name] = {"a": given[name], "b": torch.full((2, 2, 2), number)}
            storage.add(**given)
        return storage

    storage, other = filled(), filled()
    # What DataLoader does with a batch by itself does not know TensorDicts.
    given = {} if space is BOX else {"collate_fn": lambda batch: batch}
    loader = torch.utils.data.DataLoader(storage.replay_iter(), batch_size=None, **given)
    for batch, _ in zip(loader, range(4), strict=False):
        wanted = other.sample()
        assert type(batch) is type(wanted)
        for name, value in wanted._asdict().items():
            found = getattr(batch, name)
            keys = value.keys() if space is not BOX and name.endswith("observations") else ()
            assert all(torch.equal(found[key], value[key]) for key in keys)
            assert keys or torch.equal(found, value)
    assert next(storage.replay_iter).rewards.shape == (5, 1)


def test_a_worker_of_a_data_loader_would_have_a_copy_and_is_refused():
    storage = make_storage(batch_size=5)
    storage.add(**make_step(0))
    loader = torch.utils.data.DataLoader(
        storage.replay_iter(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60
    )
    with pytest.raises(ValueError, match="num_workers=0"):
        next(iter(loader))
