"""DistributedStorage through the ten methods: rows, batches, copies, parameters."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import (
    DistributedStorage,
    InvalidInputError,
    NotReadyError,
    Storage,
    StorageClosedError,
    UnknownParameterError,
)

ENVS, STEPS = 2, 3


def make(**given):
    arguments = {"num_steps": STEPS, "num_storages": 4, "batch_size": 2, "state_shapes": ((2, 5),), "timeout": 30.0}
    return DistributedStorage(spaces.Box(0, 255, (2, 3), np.uint8), spaces.Discrete(4), **{**arguments, **given})


def fill(rollout, number: int) -> None:
    """Write a rollout in which every number is one that no other rollout has."""
    for t in range(STEPS + 1):
        mark = number * (STEPS + 1) + t
        rollout.write(
            t,
            obs=np.full((2, 3), mark % 256),
            reward=mark + 0.25,
            terminated=mark % 2 == 1,
            truncated=mark % 3 == 1,
            episode_return=mark + 0.5,
            episode_step=mark,
            last_action=mark + 1000,
            policy_outputs=torch.arange(4) + mark / 4,
            baseline=-mark,
            action=mark % 4,
        )
    rollout.set_states((torch.full((2, 1, 5), number / 8),))


def act(handle, numbers) -> None:
    """Commit rollouts of these numbers, with the number as version too."""
    for number in numbers:
        with handle.rollout(version=number) as rollout:
            fill(rollout, number)


def sample(step: int, envs: int = ENVS, ends=()) -> dict:
    """The step of environment e holds the number ``1 + 2 * (step * ENVS + e)``; what follows it the one of the next."""
    ids = 1 + 2 * (step * envs + torch.arange(envs))
    return {
        "observations": ids.view(-1, 1, 1).expand(-1, 2, 3).to(torch.uint8),
        "next_observations": (ids + 2 * envs).view(-1, 1, 1).expand(-1, 2, 3).to(torch.uint8),
        "actions": ids % 4,
        "rewards": ids / 4,
        "terminated": torch.tensor([(step, env) in ends for env in range(envs)]),
        "truncated": torch.zeros(envs, dtype=torch.bool),
        "values": (ids / 8).unsqueeze(-1),
        "distribution_params": (ids.view(-1, 1) + torch.arange(4) / 8,),
        "hidden_states": (ids.view(1, -1, 1).expand(2, -1, 5) / 16,),
    }


def collect(storage, first: int = 0, steps: int = STEPS, **given) -> None:
    for step in range(first, first + steps):
        storage.insert_transition(sample(step, **given))


def same(one, other) -> None:
    """Two nests hold the same."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])


def slot_rows(storage, slot: int) -> dict:
    return {key: tensors[slot].tolist() for key, tensors in storage.storages.items()}


def test_a_transition_goes_to_its_row_and_to_the_one_behind_it():
    storage = make()
    collect(storage, ends=[(1, 0)])
    assert len(storage) == ENVS * STEPS
    rows = slot_rows(storage, 0)
    ids = [1, 5, 9]  # of environment 0
    assert [row[0][0] for row in rows["obs"]] == [*ids, 13]
    assert rows["reward"] == [0.0, 0.25, 1.25, 2.25]
    assert rows["terminated"] == [False, False, True, False]
    assert rows["episode_return"] == [0.0, 0.25, 1.5, 2.25]
    assert rows["episode_step"] == [0, 1, 2, 1]
    assert rows["last_action"] == [0, 1, 1, 1]
    assert rows["action"] == [1, 1, 1, 0]
    assert rows["baseline"] == [0.125, 0.625, 1.125, 0.0]
    assert [row[1] for row in rows["policy_outputs"]] == [1.125, 5.125, 9.125, 0.0]
    assert storage.init_actor_state_storages[0][0].flatten().tolist() == [1 / 16] * 10
    # the next rollout begins where this one ended
    collect(storage, STEPS, 1)
    rows = slot_rows(storage, 2)
    assert [rows[key][0] for key in ("reward", "episode_return", "episode_step", "last_action")] == [2.25, 2.25, 1, 1]
    assert rows["episode_return"][1] == 2.25 + 13 / 4
    assert len(storage) == ENVS * (STEPS + 1)


def test_batches_are_complete_rollouts_in_the_vocabulary():
    storage = make(seed=3)
    collect(storage)
    (batch,) = storage.generate_batches(1, 2, shuffle=False)
    steps = [sample(step) for step in range(STEPS)]
    for name in ("observations", "next_observations", "actions", "values"):
        assert torch.equal(batch[name], torch.stack([step[name] for step in steps])), name
    for name in ("rewards", "terminated", "truncated"):
        assert torch.equal(batch[name], torch.stack([step[name] for step in steps]).unsqueeze(-1)), name
    assert torch.equal(batch["distribution_params"][0], torch.stack([s["distribution_params"][0] for s in steps]))
    assert torch.equal(batch["hidden_states"][0], steps[0]["hidden_states"][0])
    assert batch["rows"].tolist() == [[4 * t, 4 * t + 1] for t in range(STEPS)]
    batch["observations"].zero_()
    assert bool((batch["next_observations"] != 0).all())


def test_every_rollout_comes_once_an_epoch_until_it_was_learnt_from():
    storage = make(num_storages=6, seed=1)
    collect(storage, steps=2 * STEPS)
    orders = []
    for _ in range(2):  # the same rollouts again, as nobody has learnt from them
        served = [batch["observations"][0, :, 0, 0].tolist() for batch in storage.generate_batches(2, 2, 3)]
        assert [sorted(served[e] + served[e + 1]) for e in (0, 2, 4)] == [[1, 3, 13, 15]] * 3
        orders.append(served)
    assert orders[0] != orders[1]
    assert storage.after_gradients(None, None, {"loss": 1}) == {"loss": 1, "storage_size": 0}
    assert (storage.report().served, storage.report().free) == (4, 6)
    with pytest.raises(NotReadyError, match="holds no complete rollout"):
        next(storage.generate_batches(1, 1))


def test_what_is_not_served_waits_for_the_next_update():
    storage = make(num_storages=6, seed=1)
    collect(storage, steps=3 * STEPS)
    (batch,) = storage.generate_batches(1, 4, shuffle=False)
    assert batch["observations"][0, :, 0, 0].tolist() == [1, 3, 13, 15]
    assert storage.after_gradients(batch, {"a": 1}) == {"a": 1, "storage_size": 2 * STEPS}
    (batch,) = storage.generate_batches(1, None, shuffle=False)
    assert batch["observations"][0, :, 0, 0].tolist() == [25, 27]


def test_learning_in_the_middle_of_a_generator_does_not_take_its_rollouts_away():
    storage = make(seed=1)
    collect(storage)
    seen = []
    for batch in storage.generate_batches(2, 1, 2):
        storage.after_gradients(batch, {})
        act(storage.actor(), [50])  # free slots are not those that are being served
        next(storage.learner(1, prefetch=0))
        seen.append(int(batch["observations"][0, 0, 0, 0]))
    assert sorted(seen[:2]) == sorted(seen[2:]) == [1, 3]
    assert storage.report().free == 4


def test_it_waits_for_actors_that_take_part():
    storage = make()
    storage.update_storage_parameter("timeout", 0.05)
    collect(storage)
    with pytest.raises(InvalidInputError, match="3 mini-batches of 1 rollouts were asked for, and there are 2"):
        next(storage.generate_batches(3, 1))
    handle = storage.actor()
    held = handle.reserve()
    with pytest.raises(TimeoutError, match="a batch of 1 rollouts"):
        next(storage.generate_batches(3, 1))
    assert (storage.report().full, len(storage)) == (2, 2 * STEPS)
    fill(held, 7)
    held.commit()
    assert len(list(storage.generate_batches(3, 1))) == 3


BAD_SAMPLES = [
    ({"rewards": torch.zeros(3)}, r"has to begin with \(3,\)"),
    ({"log_probs": torch.zeros(2)}, r"cannot hold \['log_probs'\]"),
    ({"actions": None}, r"needs \['actions'\]"),
    ({"observations": torch.zeros(2, 2, 3)}, "cannot be held as uint8"),
    ({"distribution_params": (torch.zeros(2, 3),)}, "policy_outputs is"),
    ({"hidden_states": None}, "holds 0 states; this storage holds 1"),
    ({"hidden_states": (torch.zeros(2, 3, 5),)}, r"hidden_states\[0\]"),
    (sample(1, envs=3), "3 environments, and this rollout was begun with 2"),
    (sample(1, envs=5), "5 environments, and this rollout was begun with 2"),
]


def test_a_refused_sample_changes_nothing():
    storage = make()
    collect(storage, steps=1)
    before = [slot_rows(storage, slot) for slot in range(4)]
    for change, expected in BAD_SAMPLES:
        with pytest.raises(InvalidInputError, match=expected):
            storage.insert_transition({**sample(1), **change})
        assert [slot_rows(storage, slot) for slot in range(4)] == before
        assert len(storage) == ENVS
    with pytest.raises(InvalidInputError, match="each needs a slot, and num_storages is 4"):
        make().insert_transition(sample(0, envs=5))


def test_a_factory_that_knows_no_spaces_learns_from_the_first_sample(tmp_path):
    storage = DistributedStorage.create_factory(STEPS, num_storages=4, state_shapes=((2, 5),), seed=1)(
        "cpu", None, None
    )
    assert (len(storage), storage.max_size, storage.get_all_buffer_data()) == (0, STEPS, {})
    with pytest.raises(NotReadyError, match="waits for its first sample"):
        storage.actor()
    with pytest.raises(InvalidInputError):
        storage.init_tensors({**sample(0), "rewards": torch.zeros(3)})
    assert storage._slots is None
    collect(storage)
    assert storage.storages["policy_outputs"][0].shape == (STEPS + 1, 4)
    storage.save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    same(storage.get_all_buffer_data(), loaded.get_all_buffer_data())
    empty = DistributedStorage.create_factory(STEPS, num_storages=4, state_shapes=((2, 5),))()
    empty.insert_data_slice(storage.get_all_buffer_data())
    same(storage.get_all_buffer_data(), empty.get_all_buffer_data())


def test_reset_makes_it_empty():
    storage = make()
    collect(storage, steps=STEPS + 1)
    next(storage.generate_batches(1, 1))
    storage.reset()
    report = storage.report()
    assert (len(storage), report.free, report.committed, report.served) == (0, 4, 0, 0)
    assert storage.get_all_buffer_data() == {}
    collect(storage, steps=2 * STEPS)
    assert storage.get_all_buffer_data()["first_rows"]["reward"].tolist() == [0.0, 0.0, 9 / 4, 11 / 4]


def test_all_data_can_be_put_back_exactly():
    storage, other = make(), make()
    act(storage.actor(), [3, 4])
    collect(storage)
    data = storage.get_all_buffer_data()
    assert data["observations"].shape == (STEPS, 4, 2, 3)
    assert data["versions"].tolist() == [3, 4, 0, 0]
    assert storage.report().full == 4
    collect(other, 30, STEPS + 1)
    other.insert_data_slice(data)
    same(other.get_all_buffer_data(data_to_cpu=True), data)
    batches = [next(one.learner(4)) for one in (storage, other)]
    same(dict(batches[0]), dict(batches[1]))
    same(batches[0].states, batches[1].states)
    other.insert_data_slice({})
    assert len(other) == 0


def test_a_slice_in_the_plain_vocabulary_is_enough():
    storage, other = make(), make()
    collect(storage, ends=[(1, 1)])
    steps = [sample(step, ends=[(1, 1)]) for step in range(STEPS)]
    names = ("observations", "next_observations", "actions", "rewards", "terminated", "truncated", "values")
    data = {name: torch.stack([step[name] for step in steps]) for name in names}
    data["distribution_params"] = (torch.stack([step["distribution_params"][0] for step in steps]),)
    data["hidden_states"] = steps[0]["hidden_states"]
    other.insert_data_slice(data)
    assert [slot_rows(other, slot) for slot in range(2)] == [slot_rows(storage, slot) for slot in range(2)]
    for wrong, expected in [
        ({"rewards": data["rewards"][:2]}, "of 2 steps"),
        ({"actions": data["actions"][:, :1]}, "has to begin with"),
        ({"next_observations": None}, "last_observations"),
        ({"first_rows": {"obs": 1}}, "cannot hold"),
    ]:
        with pytest.raises(InvalidInputError, match=expected):
            other.insert_data_slice({**data, **wrong})
    assert [slot_rows(other, slot) for slot in range(2)] == [slot_rows(storage, slot) for slot in range(2)]


def test_parameters_change_or_are_refused():
    storage = make()
    storage.update_storage_parameter("batch_size", 3)
    storage.update_storage_parameter("timeout", 1.5)
    assert (storage.batch_size, storage.timeout) == (3, 1.5)
    collect(storage, steps=1)
    with pytest.raises(NotReadyError, match="while the storage is empty"):
        storage.update_storage_parameter("num_steps", 5)
    storage.reset()
    handle = storage.actor("here")
    held = handle.reserve()
    with pytest.raises(NotReadyError, match='actor "here"'):
        storage.update_storage_parameter("num_storages", 7)
    held.abandon()
    handle.close()
    storage.update_storage_parameter("num_storages", 7)
    storage.update_storage_parameter("num_steps", 5)
    assert len(storage.storages["obs"]) == 7
    assert storage.storages["obs"][0].shape == (6, 2, 3)
    with pytest.raises(StorageClosedError):
        handle.reserve()
    with pytest.raises(UnknownParameterError, match=r"'gamma'; it has \['batch_size'"):
        storage.update_storage_parameter("gamma", 0.9)
    with pytest.raises(InvalidInputError):
        storage.update_storage_parameter("num_steps", 0)


# ---------------------------------------------------------------------------------------------------- copies


def busy():
    """A storage in the middle of everything."""
    storage = make(num_storages=8, seed=5)
    act(storage.actor(), [3, 4])
    collect(storage, steps=STEPS)
    next(storage.generate_batches(1, 2))
    collect(storage, STEPS, 2, ends=[(STEPS, 1)])
    storage.learner().publish(12)
    return storage


@pytest.mark.parametrize("how", ["saved", "pickled", "copied"])
def test_a_copy_resumes_exactly_in_memory_of_its_own(how, tmp_path):
    storage, twin = busy(), busy()
    writing = storage.actor().reserve()  # somebody else's: not part of the copy
    if how == "saved":
        storage.save(tmp_path / "snapshot")
        copied = Storage.load(tmp_path / "snapshot")
    else:
        copied = pickle.loads(pickle.dumps(storage)) if how == "pickled" else copy.deepcopy(storage)
    writing.abandon()
    assert (len(copied), copied.report().committed, copied.report().published) == (len(storage), 4, 12)
    for one in (storage, copied, twin):
        collect(one, STEPS + 2, 1)
    same(copied.get_all_buffer_data(), twin.get_all_buffer_data())
    same(storage.get_all_buffer_data(), twin.get_all_buffer_data())
    served = [list(one.generate_batches(2, 2, 2)) for one in (storage, copied)]
    for batches in zip(*served, strict=True):
        same(*({key: value for key, value in batch.items() if key != "rows"} for batch in batches))
    copied.reset()
    assert len(storage) == 6 * STEPS
    assert copied.report().free == 8


def test_saving_changes_nothing(tmp_path):
    storage, twin = busy(), busy()
    storage.save(tmp_path / "snapshot")
    assert storage.report() == twin.report()
    same(storage.get_all_buffer_data(), twin.get_all_buffer_data())


def test_nested_observations_and_other_actions_pass_through():
    space = spaces.Dict({"image": spaces.Box(0, 255, (2,), np.uint8), "pair": spaces.Tuple((spaces.Discrete(3),) * 2)})
    storage = DistributedStorage(space, spaces.MultiDiscrete([2, 3]), num_steps=1, num_storages=2, batch_size=1)
    assert list(storage.storages)[:3] == ['obs["image"]', 'obs["pair"][0]', 'obs["pair"][1]']
    assert storage.storages["policy_outputs"][0].shape == (2, 5)
    with storage.actor().rollout() as rollout:
        for t in range(2):
            rollout.write(t, obs={"image": [t, 7], "pair": (t, 2)}, action=[t, 2])
    batch = next(storage.learner())
    assert batch.observations["image"].tolist() == [[[0, 7]], [[1, 7]]]
    assert batch.observations["pair"][0].tolist() == [[0], [1]]
    assert batch["action"].tolist() == [[[0, 2]], [[1, 2]]]
    with pytest.raises(InvalidInputError, match=r'missing \[\'obs\["pair"\]\[1\]'):
        storage.actor().reserve().write(0, obs={"image": [1, 2], "pair": (1,)})


def test_what_is_served_in_inference_mode_can_be_used_outside():
    storage = make(seed=1)
    with torch.inference_mode():
        collect(storage)
        data, batch = storage.get_all_buffer_data(), next(storage.generate_batches(1, 2))
        act(storage.actor(), [1, 2])
        rollouts = next(storage.learner(prefetch=0))
    served = [*data.values(), *batch.values(), *rollouts.values(), *rollouts.states]
    tensors = [part for part in served if isinstance(part, torch.Tensor)]
    assert len(tensors) > 20
    assert not any(tensor.is_inference() for tensor in tensors)
    weights = torch.ones((), requires_grad=True)
    (batch["values"] * weights).sum().backward()
    collect(storage, 9, 1)
