"""Extra fields: further keys of every row, through every way in and out of a DistributedStorage."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from distributed_actors import Child
from distributed_ids import ListQueue
from gymnasium import spaces

from rlstore import DistributedStorage, InvalidInputError, Storage

STEPS, ENVS = 3, 2
EXTRA = {"costs": ((), "float32"), "task": spaces.Discrete(9), "goal": {"shape": (2,), "dtype": "int16"}}
OBSERVATIONS, ACTIONS = spaces.Box(-99, 99, (2,)), spaces.Discrete(4)


def make(**options):
    return DistributedStorage(
        OBSERVATIONS, ACTIONS, num_steps=STEPS, num_storages=4, batch_size=2, **{"extra_fields": EXTRA, **options}
    )


def extra_row(number):
    return {"costs": number + 0.5, "task": number % 9, "goal": [number, -number]}


def sample(step, envs=ENVS):
    """Environment e has the number ``step * ENVS + e``."""
    numbers = torch.arange(envs) + step * envs
    return {
        "observations": numbers.view(-1, 1).float().expand(-1, 2),
        "next_observations": (numbers + envs).view(-1, 1).float().expand(-1, 2),
        "actions": numbers % 4,
        "rewards": numbers.float(),
        "terminated": torch.zeros(envs, dtype=torch.bool),
        "truncated": torch.zeros(envs, dtype=torch.bool),
        "costs": (numbers + 0.5).unsqueeze(-1),  # [N, 1] and [N] are the same
        "task": numbers % 9,
        "goal": torch.stack([numbers, -numbers], -1),
    }


def collect(storage, first=0, steps=STEPS):
    for step in range(first, first + steps):
        storage.insert_transition(sample(step))


def check_transitions(data, first=0):
    """The extra fields of transitions ``[STEPS, ENVS, ...]`` are those of their samples."""
    numbers = torch.arange(STEPS * ENVS).view(STEPS, ENVS) + first * ENVS
    assert torch.equal(data["costs"], (numbers + 0.5).unsqueeze(-1))
    assert torch.equal(data["task"], (numbers % 9).unsqueeze(-1))
    assert torch.equal(data["goal"], torch.stack([numbers, -numbers], -1).short())
    assert (data["costs"].dtype, data["task"].dtype, data["goal"].dtype) == (torch.float32, torch.int64, torch.int16)


def write_a_rollout(pipe, actor):
    with actor.rollout(version=4) as rollout:
        for t in range(STEPS + 1):
            rollout.write(t, reward=t, **extra_row(10 + t))
        rollout["costs"][0] = -1.0


def test_they_are_keys_of_every_row_for_actors_and_learners():
    storage = make()
    assert list(storage.storages)[-4:] == ["action", "costs", "task", "goal"]
    assert [tuple(storage.storages[key][3].shape) for key in EXTRA] == [(4,), (4,), (4, 2)]
    child = Child(write_a_rollout, storage.actor())
    child.end()
    child.clean_up()
    with storage.actor().rollout() as rollout:
        for t in range(STEPS + 1):
            rollout.write(t, goal=torch.tensor([[[t, 7]]]))  # keys that are not given keep their value
    batch = next(storage.learner(prefetch=1))
    assert batch["costs"].tolist() == [[-1.0, 0.0], [11.5, 0.0], [12.5, 0.0], [13.5, 0.0]]
    assert batch["task"][:, 0].tolist() == [1, 2, 3, 4]
    assert batch["goal"].tolist() == [[[10 + t, -10 - t], [t, 7]] for t in range(STEPS + 1)]
    assert batch.to("cpu")["goal"].dtype == torch.int16


def test_add_takes_them_with_either_output_and_sample_returns_them():
    storage = make()
    storage.add(2, 1, {"costs": 2.5, "action": 3}, {"task": np.int64(4), "reward": 1.0})
    storage.add(2, 1, None, {"goal": [[[5, 6]]]})
    states = storage.init_actor_state_storages
    batch, _ = DistributedStorage.sample("cpu", 1, ListQueue(), ListQueue([2]), storage.storages, states)
    assert [batch[key][:, 0].tolist() for key in ("costs", "task", "action")] == [
        [0, 2.5, 0, 0],
        [0, 4, 0, 0],
        [0, 3, 0, 0],
    ]
    assert batch["goal"][1, 0].tolist() == [5, 6]


@pytest.mark.parametrize("with_spaces", [True, False], ids=["spaces", "first sample"])
def test_the_ten_methods_name_them(with_spaces):
    given = (OBSERVATIONS, ACTIONS) if with_spaces else ()
    storage = DistributedStorage.create_factory(STEPS, *given, num_storages=4, extra_fields=EXTRA)()
    collect(storage)
    (batch,) = storage.generate_batches(1, 2, shuffle=False)
    check_transitions(batch)
    storage.after_gradients()
    learner, actor = storage.learner(2, prefetch=0), storage.actor()
    for _ in range(4):  # all slots hold something else
        with actor.rollout() as rollout:
            rollout.write(STEPS, action=3, baseline=1.0, **extra_row(7))
    next(learner), next(learner)
    collect(storage, 10)
    check_transitions(storage.get_all_buffer_data(), 10)
    rows = next(learner)
    for key in ("action", "baseline", *EXTRA):
        assert not rows[key][-1].any(), key  # in the row that the actor did not act on


def test_all_data_go_into_another_storage_exactly():
    storage, other, unallocated = make(), make(), DistributedStorage.create_factory(STEPS, extra_fields=EXTRA)()
    for first in (20, 30):
        with storage.actor().rollout(version=first) as rollout:
            for t in range(STEPS + 1):
                rollout.write(t, **extra_row(first + t))
    data = storage.get_all_buffer_data()
    assert data["last_rows"]["costs"].tolist() == [23.5, 33.5]
    for one in (other, unallocated):
        one.insert_data_slice(data)
        same_rollouts(one, storage)
    with pytest.raises(InvalidInputError, match=r"needs \['task'\]"):
        other.insert_data_slice({name: value for name, value in data.items() if name != "task"})
    same_rollouts(other, storage)


def same_rollouts(one, other):
    found, expected = one.get_all_buffer_data(), other.get_all_buffer_data()
    for data in (found, expected):
        data.update({f"last {key}": value for key, value in data.pop("last_rows").items()})
    for name in (*EXTRA, *(f"last {key}" for key in EXTRA)):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("how", ["saved", "pickled", "copied"])
@pytest.mark.parametrize("with_spaces", [True, False], ids=["spaces", "first sample"])
def test_copies_have_them(how, with_spaces, tmp_path):
    storage = make() if with_spaces else DistributedStorage.create_factory(STEPS, num_storages=4, extra_fields=EXTRA)()
    collect(storage, steps=STEPS + 1)
    if how == "saved":
        storage.save(tmp_path / "snapshot")
        twin = Storage.load(tmp_path / "snapshot")
    else:
        twin = copy.deepcopy(storage) if how == "copied" else pickle.loads(pickle.dumps(storage))
    check_transitions(twin.get_all_buffer_data())
    collect(twin, STEPS + 1, STEPS - 1)
    check_transitions({name: value[:, ENVS:] for name, value in twin.get_all_buffer_data().items() if name in EXTRA}, 3)


def test_what_is_missing_unknown_or_does_not_fit_is_refused_and_nothing_changes():
    storage = make()
    collect(storage, steps=1)
    before = {key: storage.storages[key][0].clone() for key in storage.storages}
    for name, value, expected in [
        ("costs", None, r"needs \['costs'\]"),
        ("cost", torch.zeros(2), r"cannot hold \['cost'\]"),
        ("costs", torch.zeros(3), "costs is"),
        ("task", torch.full((2,), 0.5), "task is"),
        ("goal", torch.full((2, 2), 40_000), "do not fit into int16"),
    ]:
        with pytest.raises(InvalidInputError, match=expected):
            storage.insert_transition({**sample(1), name: value})
    with pytest.raises(InvalidInputError, match="fixed by the extra_fields given to DistributedStorage"):
        storage.add(0, 1, {"goal": [1, 2, 3]}, None)
    with pytest.raises(InvalidInputError, match=r"cannot hold \['cost'\]"):
        storage.actor().reserve().write(0, cost=1.0)
    assert all(torch.equal(storage.storages[key][0], before[key]) for key in before)
    assert len(storage) == ENVS


@pytest.mark.parametrize("name", ["obs", "reward", "action", "rewards", "rows", "versions", "timestep"])
def test_a_name_that_the_storage_uses_is_refused(name):
    with pytest.raises(InvalidInputError, match=f"'{name}', which DistributedStorage uses itself"):
        make(extra_fields={name: ((), "float32")})


def test_they_are_arguments_by_keyword_of_the_class_and_of_its_factories():
    for call in (DistributedStorage, DistributedStorage.create_factory):
        parameter = inspect.signature(call).parameters["extra_fields"]
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, None)
    kinds = {parameter.kind for parameter in inspect.signature(DistributedStorage.create_factory).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
