"""Storage, the base class: ten names to implement, and nothing that a class written for the original must change."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from abc import ABC
from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import DecoupledRolloutStorage, NotReadyError, ReplayStorage, RolloutStorage, Storage

TEN = {
    "create_factory": ["size"],
    "init_tensors": ["self", "sample"],
    "get_all_buffer_data": ["self", "data_to_cpu"],
    "insert_data_slice": ["self", "new_data"],
    "insert_transition": ["self", "sample"],
    "before_gradients": ["self", "actor", "algo"],
    "after_gradients": ["self", "actor", "algo", "info"],
    "generate_batches": ["self", "num_mini_batch", "mini_batch_size", "num_epochs"],
    "reset": ["self"],
    "update_storage_parameter": ["self", "parameter_name", "new_parameter_value"],
}


class Critic:
    gamma = 0.5

    def get_values(self, observations):
        return observations.sum(-1)


class OnPolicyBuffer(Storage):
    """A storage as a user of the original base wrote it: an __init__ of its own, plain dicts, signatures of its own."""

    on_policy_data_fields = ("obs", "rew", "done", "val", "ret")

    def __init__(self, size, device, actor, algorithm, num_envs=1):
        self.max_size = size
        self.device = device
        self.actor = actor
        self.algo = algorithm
        self.num_envs = num_envs
        self.data = None
        self.step = 0

    @classmethod
    def create_factory(cls, size, num_envs=1):
        def create_buffer_instance(device, actor, algorithm):
            return cls(size, device, actor, algorithm, num_envs)

        return create_buffer_instance

    def init_tensors(self, sample):
        self.data = {name: torch.zeros(self.max_size, *value.shape) for name, value in sample.items()}
        self.data["ret"] = torch.zeros(self.max_size, self.num_envs)

    def get_all_buffer_data(self, data_to_cpu=False):
        return {name: value.clone() for name, value in self.data.items()}

    def insert_data_slice(self, new_data):
        self.data = new_data

    def insert_transition(self, sample):
        if self.data is None:
            self.init_tensors(sample)
        for name, value in sample.items():
            self.data[name][self.step].copy_(value)
        self.step = (self.step + 1) % self.max_size

    def before_gradients(self):
        ahead = self.actor.get_values(self.data["obs"][-1])
        for t in reversed(range(self.max_size)):
            ahead = self.data["rew"][t] + self.algo.gamma * ahead * (1 - self.data["done"][t])
            self.data["ret"][t] = ahead

    def after_gradients(self, batch, info):
        info["rows"] = len(batch["obs"])
        return info

    def generate_batches(self, num_mini_batch, mini_batch_size, num_epochs=1, recurrent_ac=False, shuffle=True):
        rows = self.max_size * self.num_envs
        for _ in range(num_epochs):
            for first in range(0, rows, mini_batch_size):
                yield {name: value.flatten(0, 1)[first : first + mini_batch_size] for name, value in self.data.items()}

    def reset(self):
        self.data = None
        self.step = 0

    def update_storage_parameter(self, parameter_name, new_parameter_value):
        if hasattr(self, parameter_name):
            setattr(self, parameter_name, new_parameter_value)


class LockedBuffer(OnPolicyBuffer):
    """One that says itself how it is pickled, because it holds what cannot be."""

    def __init__(self, size, device, actor, algorithm, num_envs=1):
        super().__init__(size, device, actor, algorithm, num_envs)
        self.lock = threading.Lock()

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["lock"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.lock = threading.Lock()


class TupleStateBuffer(OnPolicyBuffer):
    """One whose pickled state is no dict."""

    def __getstate__(self):
        return (self.max_size, self.device, self.num_envs, self.data, self.step)

    def __setstate__(self, state):
        self.max_size, self.device, self.num_envs, self.data, self.step = state
        self.actor = self.algo = Critic()


class SizedBuffer(OnPolicyBuffer):
    """One with a length of its own."""

    def __len__(self):
        return self.step


class BareBuffer(OnPolicyBuffer):
    """One that keeps nothing under the names that the documents mention."""

    def __init__(self, capacity):
        self.capacity = capacity


def sample_of(step, num_envs=2):
    ids = torch.arange(1.0, num_envs + 1) + num_envs * step
    return {"obs": torch.stack([ids, ids], -1), "rew": ids, "done": torch.zeros(num_envs), "val": -ids}


def filled(cls=OnPolicyBuffer, steps=2):
    storage = cls.create_factory(2, num_envs=2)("cpu", Critic(), Critic())
    for step in range(steps):
        storage.insert_transition(sample_of(step))
    return storage


# ------------------------------------------------------------------------------------------------- the base itself


def test_storage_is_abstract_with_exactly_the_ten_names():
    assert issubclass(Storage, ABC)
    assert Storage.__abstractmethods__ == set(TEN)
    with pytest.raises(TypeError, match="abstract"):
        Storage(1, "cpu", None, None)


@pytest.mark.parametrize("name", TEN)
def test_every_method_begins_with_the_documented_arguments(name):
    parameters = inspect.signature(getattr(Storage, name)).parameters
    assert list(parameters)[: len(TEN[name])] == TEN[name]
    assert any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    for argument, default in (("data_to_cpu", False), ("num_epochs", 1)):
        if argument in parameters:
            assert parameters[argument].default == default


def test_create_factory_is_an_abstract_class_method():
    static = inspect.getattr_static(Storage, "create_factory")
    assert isinstance(static, classmethod)
    assert static.__isabstractmethod__


def test_the_constructor_has_the_documented_arguments():
    assert list(inspect.signature(Storage.__init__).parameters)[:6] == [
        "self",
        "size",
        "device",
        "actor",
        "algorithm",
        "args",
    ]


@pytest.mark.parametrize("missing", TEN)
def test_a_subclass_that_lacks_a_method_cannot_be_made(missing):
    methods = {name: vars(OnPolicyBuffer)[name] for name in TEN if name != missing}
    incomplete = type("Incomplete", (Storage,), {"__init__": OnPolicyBuffer.__init__, **methods})
    with pytest.raises(TypeError, match=missing):
        incomplete(1, "cpu", None, None)


@pytest.mark.parametrize("cls", [RolloutStorage, DecoupledRolloutStorage])
def test_the_storages_implement_all_ten(cls):
    assert issubclass(cls, Storage)
    assert not cls.__abstractmethods__
    for name, documented in TEN.items():
        parameters = list(inspect.signature(getattr(cls, name)).parameters)
        assert parameters[: len(documented)] == documented, name


# ------------------------------------------------------------------------------------------------- a foreign class


@pytest.mark.parametrize("cls", [OnPolicyBuffer, LockedBuffer, TupleStateBuffer, SizedBuffer])
def test_a_class_written_against_the_original_base_runs(cls):
    storage = filled(cls)
    assert isinstance(storage, Storage)
    assert storage.max_size == 2
    storage.before_gradients()
    # Rewards 1, 2 then 3, 4; what follows is worth 3 + 3 and 4 + 4; discount 1/2.
    assert storage.data["ret"].tolist() == [[4, 6], [6, 8]]
    batches = list(storage.generate_batches(2, 2, 2, False, shuffle=False))
    assert [batch["rew"].tolist() for batch in batches] == [[1, 2], [3, 4]] * 2
    assert storage.after_gradients(batches[0], {"loss": 1}) == {"loss": 1, "rows": 2}
    storage.update_storage_parameter("num_envs", 7)
    assert storage.num_envs == 7
    data = storage.get_all_buffer_data()
    storage.reset()
    assert storage.data is None
    storage.insert_data_slice(data)
    assert storage.data is data


@pytest.mark.parametrize("cls", [OnPolicyBuffer, LockedBuffer, TupleStateBuffer, SizedBuffer])
@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_class_written_against_the_original_base_is_copied_whole(cls, twin_of, steps):
    storage = filled(cls, steps)
    twin = twin_of(storage)
    assert type(twin) is cls
    assert vars(twin).keys() == vars(storage).keys()
    assert (twin.max_size, twin.step, twin.num_envs, twin.algo.gamma) == (2, steps % 2, 2, 0.5)
    if steps:
        for name, value in storage.data.items():
            assert torch.equal(twin.data[name], value)
            assert twin.data[name] is not value
    twin.insert_transition(sample_of(9))
    assert twin.data["rew"][steps % 2].tolist() == [19, 20]
    assert storage.data is None or 19 not in storage.data["rew"]


@pytest.mark.parametrize("cls", [OnPolicyBuffer, LockedBuffer, TupleStateBuffer, SizedBuffer])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_class_written_against_the_original_base_is_truthy_and_can_be_shown(cls, steps):
    storage = filled(cls, steps)
    assert bool(storage) is True
    assert cls.__name__ in repr(storage)
    assert cls.__name__ in str(storage)
    assert f"{storage!r}" == repr(storage)


def test_no_attribute_at_all_is_asked_of_a_subclass():
    storage = BareBuffer(7)
    assert bool(storage) is True
    assert "BareBuffer" in repr(storage)
    for twin in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert vars(twin) == {"capacity": 7}


def public_names():
    return [*(name for name in dir(Storage) if not name.startswith("_")), "max_size", "device", "seed"]


class NamesakeBuffer(OnPolicyBuffer):
    """One whose attributes are called like everything public of our base, and like much that is not."""

    private = ("_ring", "_journal", "_samples", "_guard", "_outputs", "_given_algorithm")

    def __init__(self, calls_ours):
        self.value = {"of": [1]}
        if calls_ours:
            Storage.__init__(self, 3, "cpu", Critic(), Critic())
        for name in public_names():
            setattr(self, name, self.value)
        if not calls_ours:
            for name in self.private:
                setattr(self, name, self.value)


@pytest.mark.parametrize("calls_ours", [False, True])
def test_a_subclass_may_use_every_public_name_of_the_base_for_its_own(calls_ours):
    storage = NamesakeBuffer(calls_ours)
    for twin in (storage, copy.deepcopy(storage), copy.copy(storage), pickle.loads(pickle.dumps(storage))):
        assert {name: getattr(twin, name) for name in public_names()} == {name: {"of": [1]} for name in public_names()}
        assert twin
        assert len(twin) == 0
        assert "NamesakeBuffer" in repr(twin)
    storage.journal.setdefault("more", []).append(2)
    storage.draw_total = 7
    assert (storage.journal["more"], storage.draw_total) == ([2], 7)
    del storage.draw_total
    assert storage.draw_total == 0.0  # that of the base again


def test_what_the_base_shows_is_not_assigned_in_our_own_storages():
    storage = RolloutStorage.create_factory(2)()
    for name in ("journal", "draw_total"):
        with pytest.raises(AttributeError, match=f"'{name}'"):
            setattr(storage, name, [])
    assert (storage.journal, storage.draw_total) == (None, 0.0)


def test_nothing_is_said_of_data_that_the_base_does_not_know():
    assert "first sample" not in repr(filled())


def test_a_class_that_does_not_show_its_steps_says_so():
    storage = OnPolicyBuffer(4, "cpu", None, None)
    looks = (storage.episodes, storage.held_rows, storage.as_dataset, lambda: storage[0])
    for look in looks:
        with pytest.raises(NotImplementedError, match=r"OnPolicyBuffer cannot show .*Implement _held_steps\(\)"):
            look()


def test_a_length_of_its_own_is_kept():
    assert len(filled(SizedBuffer, 1)) == 1


def test_a_shallow_copy_shares_the_data():
    storage = filled()
    twin = copy.copy(storage)
    assert twin.data is storage.data


def test_an_instance_is_equal_to_itself_alone_and_can_be_a_key():
    storage, other = filled(), filled()
    assert storage == storage
    assert storage != other
    assert {storage: 1}[storage] == 1


def test_a_graph_is_told_of_a_generator_on_cuda_alone():
    storage, told = RolloutStorage("rl", 2, 3, TensorDict({"p": torch.zeros(2, 1)}, batch_size=[2]), [1]), []
    graph = SimpleNamespace(register_generator_state=told.append)
    storage.register_graph(graph)
    assert told == []
    storage._generator = SimpleNamespace(device=torch.device("cuda", 0))
    storage.register_graph(graph)
    assert told == [storage._generator]
    ReplayStorage(spaces.Box(0, 1, (1,)), spaces.Discrete(2), storage_size=4).register_graph(graph)
    assert len(told) == 1


def test_a_graph_of_replay_waits_for_the_first_sample():
    storage, told = ReplayStorage.create_factory(4)(), []
    storage._generator = SimpleNamespace(device=torch.device("cuda", 0))
    graph = SimpleNamespace(register_generator_state=told.append)
    with pytest.raises(NotReadyError, match="waits for its first sample: call init_tensors"):
        storage.register_graph(graph)
    assert told == []
    names = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations")
    storage.init_tensors({name: torch.zeros(2, 1) for name in names})
    storage.register_graph(graph)
    assert told == [storage._generator]
