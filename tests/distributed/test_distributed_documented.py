"""DistributedStorage as its document and the contract have it: arguments, keys, shapes, dtypes, shared memory."""

from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from distributed_ids import DISCRETE, IMAGES, KEYS, LSTM, VECTORS, WORLDS, ListQueue, assert_as_copied, copy_of, write
from gymnasium import spaces
from like_configs import LikeDictConfig

from rlstore import DistributedStorage, Storage

T, SLOTS = 4, 3
UNTIL = 60.0  # seconds that a child process may take


def small(observation_space=VECTORS, action_space=None, **options):
    given = {"num_steps": T, "num_storages": SLOTS, "batch_size": 2, **options}
    return DistributedStorage(observation_space, action_space or spaces.Discrete(6), **given)


# ------------------------------------------------------------------------------------------------- signatures


def test_the_constructor_has_the_documented_arguments_in_the_documented_order():
    parameters = list(inspect.signature(DistributedStorage).parameters.values())
    documented = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert documented == [
        ("observation_space", inspect.Parameter.empty),
        ("action_space", inspect.Parameter.empty),
        ("device", "cpu"),
        ("num_steps", 100),
        ("num_storages", 80),
        ("batch_size", 32),
    ]
    others = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert len(others) == len(parameters) - len(documented)
    assert (others["state_shapes"], others["timeout"], others["seed"]) == ((), 60.0, None)


def test_the_methods_have_the_documented_arguments():
    for method in (DistributedStorage.add, DistributedStorage.update):
        assert inspect.signature(method).parameters["args"].kind is inspect.Parameter.VAR_POSITIONAL
    assert isinstance(inspect.getattr_static(DistributedStorage, "sample"), staticmethod)
    names = ["device", "batch_size", "free_queue", "full_queue", "storages", "init_actor_state_storages", "lock"]
    assert list(inspect.signature(DistributedStorage.sample).parameters) == names


def test_it_is_a_storage_with_all_ten_methods():
    assert issubclass(DistributedStorage, Storage)
    assert not DistributedStorage.__abstractmethods__


def test_the_attributes_are_what_was_given():
    storage = DistributedStorage(VECTORS, spaces.Discrete(3), "cpu", 7, 5, 2)
    assert (storage.num_steps, storage.num_storages, storage.batch_size) == (7, 5, 2)
    assert str(storage.device) == "cpu"
    assert storage.storages["reward"][4].shape == (8,)


def test_the_defaults_are_those_of_the_document():
    storage = DistributedStorage(VECTORS, spaces.Discrete(3))
    assert (storage.num_steps, storage.num_storages, storage.batch_size) == (100, 80, 32)
    assert len(storage.storages["obs"]) == 80
    assert storage.storages["obs"][79].shape == (101, 3)


def test_update_takes_anything_and_changes_nothing():
    storage = DISCRETE.make()
    write(DISCRETE, storage.storages, None, 1, 9)
    before = copy_of(storage)
    assert storage.update() is None
    assert storage.update(1, {"a": 2}, None) is None
    assert_as_copied(storage, before)


# ------------------------------------------------------------------------------------------------- shapes and dtypes


def test_every_key_has_its_shape_and_dtype():
    storage = small(IMAGES)
    expected = {
        "obs": ((T + 1, 4, 2, 3), torch.uint8),
        "reward": ((T + 1,), torch.float32),
        "terminated": ((T + 1,), torch.bool),
        "truncated": ((T + 1,), torch.bool),
        "episode_return": ((T + 1,), torch.float32),
        "episode_step": ((T + 1,), torch.int32),
        "last_action": ((T + 1,), torch.int64),
        "policy_outputs": ((T + 1, 6), torch.float32),
        "baseline": ((T + 1,), torch.float32),
        "action": ((T + 1,), torch.int64),
    }
    assert set(storage.storages) == set(expected) == set(KEYS)
    for key, (shape, dtype) in expected.items():
        for index in range(SLOTS):
            tensor = storage.storages[key][index]
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), key


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "policy"),
    [
        (spaces.Discrete(5), (), torch.int64, 5),
        (spaces.Box(-1.0, 1.0, (3,)), (3,), torch.float32, 6),
        (spaces.Box(-1.0, 1.0, (1,)), (1,), torch.float32, 2),
        (spaces.MultiDiscrete([3, 4]), (2,), torch.int64, 7),
        (spaces.MultiBinary(6), (6,), torch.int64, 6),
        ({"shape": (5,), "type": "Discrete", "range": [0, 4]}, (), torch.int64, 5),
        ({"shape": [1], "type": "Discrete", "n": 5}, (), torch.int64, 5),
        ({"shape": (3,), "type": "Box", "range": [-1.0, 1.0]}, (3,), torch.float32, 6),
        (LikeDictConfig(shape=(5,), type="Discrete", range=[0, 4]), (), torch.int64, 5),
        (LikeDictConfig(shape=(3,), type="Box", range=[-1.0, 1.0]), (3,), torch.float32, 6),
    ],
    ids=lambda value: type(value).__name__,
)
def test_actions_and_policy_outputs_follow_the_action_space(space, shape, dtype, policy):
    storage = small(action_space=space)
    for key in ("action", "last_action"):
        tensor = storage.storages[key][0]
        assert (tuple(tensor.shape), tensor.dtype) == ((T + 1, *shape), dtype), key
    assert storage.storages["policy_outputs"][0].shape == (T + 1, policy)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(0, 255, (3, 8, 8), np.uint8), (3, 8, 8), torch.uint8),
        (spaces.Box(-1.0, 1.0, (7,)), (7,), torch.float32),
        (spaces.Box(-1.0, 1.0, (7,), np.float64), (7,), torch.float64),
        (spaces.Box(-9, 9, (), np.int16), (), torch.int16),
        (spaces.Discrete(9), (), torch.int64),
        (spaces.MultiBinary(4), (4,), torch.int8),
        ({"shape": [9, 8, 8]}, (9, 8, 8), torch.uint8),
        ({"shape": (3,), "dtype": "float32"}, (3,), torch.float32),
        (LikeDictConfig(shape=(9, 8, 8)), (9, 8, 8), torch.uint8),
        (LikeDictConfig(shape=(3, 4), dtype="float32"), (3, 4), torch.float32),
    ],
    ids=lambda value: type(value).__name__,
)
def test_observations_take_the_dtype_of_their_space_and_uint8_without_one(space, shape, dtype):
    tensor = small(space).storages["obs"][1]
    assert (tuple(tensor.shape), tensor.dtype) == ((T + 1, *shape), dtype)


def test_a_space_beside_a_mapping_is_fine():
    storage = small({"shape": (3, 4)}, spaces.Discrete(2))
    assert storage.storages["obs"][0].shape == (T + 1, 3, 4)
    storage = small(VECTORS, {"shape": (2,), "type": "Discrete", "range": [0, 1]})
    assert storage.storages["policy_outputs"][0].shape == (T + 1, 2)


REFUSED = [
    *[({name: value}, ValueError, name) for name in ("num_steps", "num_storages", "batch_size") for value in (0, 2.5)],
    *[({"num_steps": value}, ValueError, "num_steps") for value in (-1, None, True, "3")],
    *[({"timeout": value}, ValueError, "timeout") for value in (-1.0, float("nan"), "soon")],
    *[
        ({"state_shapes": value}, ValueError, "state_shapes")
        for value in (((2, 0),), ((2,),), ((2, 3, 4),), ((2.5, 3),), (2, 5))
    ],
    ({"device": "moon"}, ValueError, "device"),
    ({"observation_space": None}, ValueError, "go together"),
    ({"observation_space": spaces.Text(4)}, NotImplementedError, "Text"),
    ({"observation_space": spaces.Sequence(VECTORS)}, NotImplementedError, "Sequence"),
    ({"action_space": spaces.Text(4)}, NotImplementedError, "Text"),
    ({"action_space": spaces.Dict({"a": VECTORS})}, NotImplementedError, "Dict"),
    ({"action_space": spaces.Tuple([VECTORS])}, NotImplementedError, "Tuple"),
    ({"num_storages": 10**15}, MemoryError, "Give a smaller num_storages"),
]


@pytest.mark.parametrize(("given", "error", "name"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_made_is_refused_by_name(given, error, name):
    with pytest.raises(error, match=name):
        small(**given)


# ------------------------------------------------------------------------------------------------- the memory


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_actors_write_with_two_axes_in_front_and_slots_are_apart(world):
    storage = world.make(5)
    for index in (3, 0, 4, 1, 2):
        write(world, storage.storages, None, index, 100 + index)
    for index in range(5):
        for key, expected in world.rows(world.numbers([100 + index])).items():
            assert torch.equal(storage.storages[key][index], expected.squeeze(1)), key


def test_every_tensor_is_shared_cpu_memory_and_begins_a_cache_line_of_its_own():
    storage = LSTM.make(5)
    tensors = [storage.storages[key][index] for key in KEYS for index in range(5)]
    states = [state for states in storage.init_actor_state_storages for state in states]
    for tensor in (*tensors, *states):
        assert tensor.is_shared()
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def test_storages_are_a_mapping_of_sequences():
    storages = small().storages
    assert len(storages) == len(KEYS)
    assert list(storages) == list(storages.keys())
    assert "obs" in storages
    assert "observations" not in storages
    with pytest.raises(KeyError):
        storages["observations"]
    for key, slots in storages.items():
        assert len(slots) == SLOTS
        assert [slot.data_ptr() for slot in slots] == [storages[key][index].data_ptr() for index in range(SLOTS)]
        with pytest.raises(IndexError):
            slots[SLOTS]


def test_the_same_slot_is_the_same_memory_each_time_it_is_asked_for():
    storage = DISCRETE.make()
    held = storage.storages["obs"][1]
    storage.storages["obs"][1][2, ...] = 7
    assert held[2].unique().tolist() == [7]
    assert storage.storages["obs"][0].unique().tolist() != [7]


def test_states_are_a_tuple_a_slot():
    storage = LSTM.make(5)
    states = storage.init_actor_state_storages
    assert isinstance(states, list)
    assert len(states) == 5
    for index, state in enumerate(states):
        assert isinstance(state, tuple)
        assert [(tuple(part.shape), part.dtype) for part in state] == [((2, 1, 5), torch.float32)] * 2
        state[0].fill_(index + 1)
        state[1].fill_(-index - 1)
    assert [[part.unique().tolist() for part in state] for state in states] == [[[i], [-i]] for i in range(1, 6)]


def test_states_of_different_sizes_and_of_a_gru():
    assert [tuple(part.shape) for part in small(state_shapes=((1, 4), (3, 7))).init_actor_state_storages[2]] == [
        (1, 1, 4),
        (3, 1, 7),
    ]
    assert [tuple(part.shape) for part in small(state_shapes=[[2, 6]]).init_actor_state_storages[0]] == [(2, 1, 6)]


def test_without_states_there_is_an_empty_tuple_a_slot():
    assert list(small().init_actor_state_storages) == [()] * SLOTS


def test_what_is_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        storage = LSTM.make()
    write(LSTM, storage.storages, storage.init_actor_state_storages, 1, 5)
    assert not storage.storages["obs"][1].is_inference()
    assert not storage.init_actor_state_storages[1][0].is_inference()


def write_everything(world, storages, states, first):
    for index in range(len(storages["obs"])):
        write(world, storages, states, index, first + index)


def test_what_another_process_writes_is_seen():
    storage, twin = LSTM.make(4), LSTM.make(4)
    states = storage.init_actor_state_storages
    write(LSTM, storage.storages, states, 0, 1)
    arguments = (LSTM, storage.storages, states, 50)
    child = multiprocessing.get_context("fork").Process(target=write_everything, args=arguments)
    child.start()
    child.join(UNTIL)
    assert child.exitcode == 0
    write_everything(LSTM, twin.storages, twin.init_actor_state_storages, 50)
    assert_as_copied(storage, copy_of(twin))


def test_what_was_pickled_is_the_same_memory():
    storage = LSTM.make()
    parts = (storage.storages, storage.init_actor_state_storages, storage.storages["reward"])
    storages, states, rewards = pickle.loads(pickle.dumps(parts))
    assert set(storages) == set(KEYS)
    write(LSTM, storages, states, 2, 77)
    rewards[1][3] = 6.5
    assert torch.equal(storage.storages["episode_step"][2], LSTM.numbers([77]).squeeze(1).int())
    assert torch.equal(storage.init_actor_state_storages[2][1], LSTM.states([77])[1])
    assert storage.storages["reward"][1].tolist() == [0, 0, 0, 6.5, 0]
    assert storages["reward"][0].is_shared()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_the_storage_holds_what_was_written_into_its_tensors_and_its_slots_in_their_places(how):
    storage = LSTM.make(5)
    with storage.actor() as actor:
        first, second = actor.reserve(), actor.reserve()
        second.commit()
        first.commit()  # so the order of the rollouts is not that of the slots
    for slot, number in enumerate((10, 11, 12, 13, 14)):
        write(LSTM, storage.storages, storage.init_actor_state_storages, slot, number)
    copied = copy.deepcopy(storage) if how == "deepcopy" else pickle.loads(pickle.dumps(storage))
    for slot, number in enumerate((10, 11, 12, 13, 14)):
        rows = LSTM.numbers([number]).squeeze(1)
        assert torch.equal(copied.storages["episode_step"][slot], rows.int())
        assert all(torch.equal(copied.storages[key][slot], storage.storages[key][slot]) for key in KEYS)
        for index, state in enumerate(LSTM.states([number])):
            assert torch.equal(copied.init_actor_state_storages[slot][index], state)
    counted = (copied.report().committed, copied.report().full, copied.report().free)
    assert counted == (storage.report().committed, storage.report().full, storage.report().free) == (2, 2, 3)
    with copied.learner(2, prefetch=0) as learner:
        assert next(learner)["episode_step"].T.tolist() == LSTM.numbers([11, 10]).T.tolist()  # in the order of commits
    copied.storages["reward"][4].fill_(-1)
    assert (storage.storages["reward"][4] >= 0).all()
    storage.close()
    copied.close()


def test_however_many_slots_there_are_they_cost_two_descriptors_and_leave_no_file():
    gc.collect()
    before, names = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    storage = LSTM.make(300)
    again = pickle.loads(pickle.dumps((storage.storages, storage.init_actor_state_storages)))
    assert len(os.listdir("/proc/self/fd")) == before + 4  # here, and where it was unpickled
    new = set(os.listdir("/dev/shm")) - names  # of other programs, at most
    assert not any("rlstore" in name or str(os.getpid()) in name for name in new)
    storage.close()
    del storage, again  # no reference cycle keeps the memory
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------------------- nests


NEST = spaces.Dict({"camera": spaces.Box(0, 255, (2, 2), np.uint8), "inner": spaces.Dict({"speed": VECTORS})})
CAMERA, SPEED = 'obs["camera"]', 'obs["inner"]["speed"]'


def nest_of(number):
    return {
        "camera": torch.full((2, 2), number, dtype=torch.uint8),
        "inner": {"speed": torch.full((3,), -1.5 - number)},
    }


def test_every_leaf_of_dict_observations_has_a_key():
    storage = small(NEST)
    assert set(storage.storages) == {CAMERA, SPEED, *KEYS[1:]}
    for index in range(SLOTS):
        slot = storage.storages[CAMERA][index]
        assert (slot.shape, slot.dtype, slot.is_shared()) == ((T + 1, 2, 2), torch.uint8, True)
        for step in range(T + 1):
            slot[step, ...] = torch.full((1, 1, 2, 2), 10 * index + step, dtype=torch.uint8)
        storage.storages[SPEED][index][:] = -1.5 - index
    states = storage.init_actor_state_storages
    batch, _ = storage.sample("cpu", 2, ListQueue(), ListQueue([2, 0]), storage.storages, states)
    assert batch[CAMERA].shape == (T + 1, 2, 2, 2)
    assert batch[CAMERA].dtype == torch.uint8
    assert batch[CAMERA][:, :, 1, 1].tolist() == [[20 + step, step] for step in range(T + 1)]
    assert batch[SPEED].shape == (T + 1, 2, 3)
    assert batch[SPEED][T, :, 2].tolist() == [-3.5, -1.5]


def test_dict_observations_are_added_and_served_nested():
    storage = small(NEST)
    actor = storage.actor()
    for number in (7, 8):
        with actor.rollout() as rollout:
            for step in range(T + 1):
                rollout.write(step, obs=nest_of(number + 10 * step))
    batch = next(storage.learner(prefetch=0))
    assert batch.observations["camera"][:, :, 0, 0].tolist() == [[7 + 10 * t, 8 + 10 * t] for t in range(T + 1)]
    assert batch.observations["inner"]["speed"][2, :, 1].tolist() == [-28.5, -29.5]
    storage.add(1, 3, None, {"obs": nest_of(99)})
    assert storage.storages[CAMERA][1][3].unique().tolist() == [99]
    assert storage.storages[SPEED][1][3].unique().tolist() == [-100.5]


def test_every_part_of_tuple_observations_has_a_key():
    storage = small(spaces.Tuple([VECTORS, spaces.Box(0, 255, (2,), np.uint8)]))
    for index in range(SLOTS):
        storage.storages["obs[0]"][index][:] = index + 0.5
        storage.storages["obs[1]"][index][:] = index + 10
    states = storage.init_actor_state_storages
    batch, _ = storage.sample("cpu", 2, ListQueue(), ListQueue([1, 2]), storage.storages, states)
    assert (batch["obs[0]"].shape, batch["obs[1]"].shape) == ((T + 1, 2, 3), (T + 1, 2, 2))
    assert batch["obs[0]"][T, :, 0].tolist() == [1.5, 2.5]
    assert batch["obs[1]"][0, :, 1].tolist() == [11, 12]
    assert batch["obs[1]"].dtype == torch.uint8
