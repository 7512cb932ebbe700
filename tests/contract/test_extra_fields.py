"""A user's own fields, a scalar and a vector of whole numbers, in every storage: given, held, served, saved, refused.

Both are functions of the id that is in the observation of their step, so each value is traced to its step.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gymnasium import spaces
from replay_cases import ENDS, ENVS, REPLAY_CASES, ids_in
from rollout_model import same_data
from storages import box_sample, discrete_sample, distillation_sample, rl_sample
from where import DEVICE

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    InvalidInputError,
    NStepReplayStorage,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
    Storage,
)

EXTRA = {"costs": ((), torch.float32), "task_id": ((2,), torch.int64)}
STEPS = 4
BOX, DISCRETE = spaces.Box(-1e9, 1e9, (2,)), spaces.Discrete(1_000_000)
fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
on_the_host = pytest.mark.skipif(DEVICE != "cpu", reason="memory that processes share is that of the host")


def extra_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The extra fields of steps with these ids, as they are given: ``[...]`` and ``[..., 2]``."""
    return {"costs": ids / 8 + 0.5, "task_id": torch.stack([3 * ids, -ids], -1).long()}


def check_served(get: Callable[[str], torch.Tensor], observations: Any) -> None:
    """Extra fields are those of the steps whose observations they stand beside: ``[..., 1]`` and ``[..., 2]``."""
    ids = ids_in(observations)
    expected = extra_of(ids)
    assert ids.numel() > 0
    assert get("costs").dtype is torch.float32
    assert get("task_id").dtype is torch.int64
    assert torch.equal(get("costs"), expected["costs"].unsqueeze(-1))
    assert torch.equal(get("task_id"), expected["task_id"])


def check_batch(batch: Any) -> None:
    """A batch with attributes."""
    check_served(lambda name: getattr(batch, name), batch.observations)


def check_dict(batch: dict[str, Any]) -> None:
    check_served(batch.__getitem__, batch["observations"])


@dataclass(frozen=True)
class Kind:
    """A storage as a trainer drives it: how it is made, and the sample of a step without its extra fields."""

    name: str
    make: Callable[..., Any]
    sample: Callable[[int], dict[str, Any]]

    def full_sample(self, step: int) -> dict[str, Any]:
        sample = self.sample(step)
        return {**sample, **extra_of(ids_in(sample["observations"]))}


def rollout_kind(name: str, factory: Callable[..., Any], make_sample: Callable[..., dict[str, Any]]) -> Kind:
    def sample(step: int) -> dict[str, Any]:
        ids = torch.arange(1, ENVS + 1) + float(step * ENVS)
        terminated, truncated = ([env in ended for env in range(ENVS)] for ended in ENDS[step % len(ENDS)])
        return {**make_sample(ids), "terminated": torch.tensor(terminated), "truncated": torch.tensor(truncated)}

    return Kind(name, lambda extra_fields=EXTRA: factory(extra_fields=extra_fields, seed=3)(DEVICE, None, None), sample)


def distributed_sample(ids: torch.Tensor) -> dict[str, Any]:
    sample = discrete_sample(ids)
    return {name: sample[name] for name in ("observations", "actions", "rewards", "next_observations", "values")}


KINDS = [
    rollout_kind("rl", lambda **options: RolloutStorage.create_factory(STEPS, "rl", **options), rl_sample),
    rollout_kind(
        "distillation",
        lambda **options: RolloutStorage.create_factory(STEPS, "distillation", **options),
        distillation_sample,
    ),
    rollout_kind(
        "decoupled", lambda **options: DecoupledRolloutStorage.create_factory(STEPS, **options), discrete_sample
    ),
    rollout_kind(
        "decoupled nest", lambda **options: DecoupledRolloutStorage.create_factory(STEPS, **options), box_sample
    ),
    rollout_kind(
        "distributed",
        lambda **options: DistributedStorage.create_factory(STEPS, num_storages=2 * ENVS, batch_size=2, **options),
        distributed_sample,
    ),
    *(
        Kind(
            case.name,
            lambda extra_fields=EXTRA, case=case: case.make(STEPS * ENVS, extra_fields=extra_fields),
            lambda step, case=case: case.sample(step, *ENDS[step % len(ENDS)]),
        )
        for case in REPLAY_CASES
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request):
    return request.param


def collect(kind: Kind, *storages: Any, first: int = 0, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        for storage in storages:
            storage.insert_transition(kind.full_sample(step))


# ------------------------------------------------------------------------------------------------- the ten methods


@pytest.mark.parametrize("prepared", [True, False], ids=["init_tensors", "first sample"])
def test_what_is_inserted_is_served_by_name(kind, prepared):
    storage = kind.make()
    if prepared:
        storage.init_tensors(kind.full_sample(500))
    for first in (0, STEPS):
        collect(kind, storage, first=first)
        for batch in storage.generate_batches(2, 1, 2):
            check_dict(batch)
        check_dict(storage.get_all_buffer_data())
        storage.after_gradients(None, None, {})


def test_everything_held_goes_into_another_storage(kind):
    storage, other = kind.make(), kind.make()
    collect(kind, storage)
    data = storage.get_all_buffer_data()
    other.insert_data_slice(data)
    same_data(data, other.get_all_buffer_data())
    for name in EXTRA:
        data[name].zero_()  # what was given out and taken in are copies
    check_dict(storage.get_all_buffer_data())
    check_dict(other.get_all_buffer_data())


def saved_and_loaded(storage: Any, folder: Any) -> Any:
    storage.save(folder / "snapshot")
    loaded = Storage.load(folder / "snapshot")
    if hasattr(storage, "compute_reward"):  # code is not saved
        loaded.compute_reward = storage.compute_reward
    return loaded


TWINS = {
    "deepcopy": lambda storage, _: copy.deepcopy(storage),
    "pickle": lambda storage, _: pickle.loads(pickle.dumps(storage)),
    "save and load": saved_and_loaded,
}


@pytest.mark.parametrize("twin_of", TWINS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_holds_them_and_takes_more(kind, twin_of, steps, tmp_path):
    storage = kind.make()
    collect(kind, storage, steps=steps)
    twin = TWINS[twin_of](storage, tmp_path)
    collect(kind, storage, twin, first=steps, steps=STEPS - steps)
    same_data(storage.get_all_buffer_data(), twin.get_all_buffer_data())
    for one, other in zip(storage.generate_batches(2, 1), twin.generate_batches(2, 1), strict=True):
        check_dict(other)
        same_data(*({name: value for name, value in batch.items() if value is not None} for batch in (one, other)))


BAD = {
    "no costs": {"costs": None},
    "no task_id": {"task_id": None},
    "costs of too many environments": {"costs": torch.zeros(ENVS + 1)},
    "costs of one environment": {"costs": torch.zeros(1)},
    "two costs for each": {"costs": torch.zeros(ENVS, 2)},
    "text for costs": {"costs": ["a"] * ENVS},
    "complex costs": {"costs": torch.zeros(ENVS, dtype=torch.complex64)},
    "a task_id too wide": {"task_id": torch.zeros(ENVS, 3, dtype=torch.int64)},
    "a task_id too flat": {"task_id": torch.zeros(ENVS, dtype=torch.int64)},
    "half a task_id": {"task_id": torch.full((ENVS, 2), 0.5)},
}


@pytest.mark.parametrize("steps", [0, 2])
def test_a_bad_extra_field_is_named_and_nothing_changes(kind, steps):
    storage, twin = kind.make(), kind.make()
    for one in (storage, twin):
        one.init_tensors(kind.full_sample(500))
    collect(kind, storage, twin, steps=steps)
    for changes in BAD.values():
        with pytest.raises(InvalidInputError, match=next(iter(changes))):
            storage.insert_transition({**kind.full_sample(steps), **changes})
        assert len(storage) == len(twin)
    without = {name: value for name, value in kind.full_sample(steps).items() if name != "task_id"}
    for name, sample in (("task_id", without), ("cost", {**kind.full_sample(steps), "cost": torch.zeros(ENVS)})):
        with pytest.raises(InvalidInputError, match=name):
            storage.insert_transition(sample)
    collect(kind, storage, twin, first=steps, steps=STEPS - steps)
    same_data(twin.get_all_buffer_data(), storage.get_all_buffer_data())


def test_a_slice_without_them_or_of_another_shape_is_refused(kind):
    storage = kind.make()
    collect(kind, storage)
    before = storage.get_all_buffer_data()
    steps, envs = before["costs"].shape[:2]
    wrong = {"costs": torch.zeros(steps, envs + 1, 1), "task_id": torch.zeros(steps, envs, 3, dtype=torch.int64)}
    for name in EXTRA:
        missing = {other: value for other, value in before.items() if other != name}
        for bad in (missing, {**before, name: wrong[name]}):
            with pytest.raises((InvalidInputError, TypeError), match=name):
                storage.insert_data_slice(bad)
    same_data(before, storage.get_all_buffer_data())


def test_a_storage_without_them_refuses_them(kind):
    storage = kind.make(extra_fields=None)
    with pytest.raises(InvalidInputError, match=r"costs|task_id"):
        storage.insert_transition(kind.full_sample(0))
    storage.insert_transition(kind.sample(0))
    assert "costs" not in storage.get_all_buffer_data()


def test_fields_that_cannot_be_are_refused(kind):
    for bad in ("costs", [("costs", ((), torch.float32))], {"rewards": ((), torch.float32)}, {"two words": BOX}):
        with pytest.raises(InvalidInputError, match="extra_fields"):
            kind.make(extra_fields=bad)


# ----------------------------------------------------------------------------------------------- the classes' own verbs


def transition_of(step: int) -> RolloutStorage.Transition:
    ids = torch.arange(1, ENVS + 1) + float(step * ENVS)
    sample, transition = rl_sample(ids), RolloutStorage.Transition()
    transition.observations = {"policy": sample["observations"]["policy"]}
    transition.dones = torch.tensor([step % 2 == env for env in range(ENVS)])
    transition.actions_log_prob = sample["log_probs"]
    for name in ("actions", "rewards", "values", "distribution_params"):
        setattr(transition, name, sample[name])
    for name, value in extra_of(ids).items():
        setattr(transition, name, value)
    return transition


def rollout() -> RolloutStorage:
    example = {"policy": torch.zeros(ENVS, 2)}
    storage = RolloutStorage("rl", ENVS, STEPS, example, [2], DEVICE, seed=3, extra_fields=EXTRA)
    for step in range(STEPS):
        storage.add_transition(transition_of(step))
    return storage


def test_attributes_of_a_transition_become_attributes_of_batches():
    storage = rollout()
    for batch in storage.mini_batch_generator(2, 2):
        check_batch(batch)
    for batch in storage.mini_batch_generator(2, 2, reuse=True):
        check_batch(batch)


def test_recurrent_batches_have_them_by_step_and_environment():
    storage = rollout()
    ids = torch.arange(1, STEPS * ENVS + 1).view(STEPS, ENVS).float()
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    check_served(lambda name: getattr(batch, name), torch.stack([ids, -ids], -1))


def test_a_transition_without_them_is_refused_and_nothing_is_written():
    storage = rollout()
    storage.clear()
    for name in EXTRA:
        transition = transition_of(9)
        setattr(transition, name, None)
        with pytest.raises(InvalidInputError, match=name):
            storage.add_transition(transition)
    assert storage.step == 0
    storage.add_transition(transition_of(0))
    check_dict(storage.get_all_buffer_data())


def test_decoupled_batches_have_them_behind_the_documented_fields():
    storage = DecoupledRolloutStorage(BOX, DISCRETE, DEVICE, STEPS, ENVS, seed=3, extra_fields=EXTRA)
    for step in range(STEPS):
        ids = torch.arange(1, ENVS + 1) + float(step * ENVS)
        obs, flags = torch.stack([ids, -ids], -1), torch.zeros(ENVS)
        storage.add(obs, ids, ids, flags, flags, obs, ids, ids, ids, **extra_of(ids))
    for batch in storage.sample(2):
        assert batch._fields[-2:] == ("costs", "task_id")
        check_served(lambda name, batch=batch: getattr(batch, name), batch[0])
    with pytest.raises(InvalidInputError, match="task_id"):
        storage.add(obs, ids, ids, flags, flags, obs, ids, ids, ids, costs=ids)
    with pytest.raises(InvalidInputError, match="cost"):
        storage.add(obs, ids, ids, flags, flags, obs, ids, ids, ids, **extra_of(ids), cost=ids)


def put(target: Any, step: int, envs: int = ENVS, **changes: Any) -> None:
    """One step of each environment with add(); environment 0 ends now and then, environment 1 sits out of step 3."""
    ids = torch.arange(1, envs + 1) + float(step * envs)
    obs, flags = torch.stack([ids, -ids], -1), torch.zeros(envs)
    ended = torch.tensor([step % 5 == 4 and env == 0 for env in range(envs)])
    following = torch.where(ended.unsqueeze(-1), -obs, obs + envs * torch.tensor([1.0, -1.0]))
    given = {**extra_of(ids), **changes}
    target.add(obs, ids.long(), ids, ended, flags, {}, following, **given)


REPLAYS = {
    "1 step": (ReplayStorage, {}),
    "3 steps": (ReplayStorage, {"n_step": 3}),
    "prefetched": (NStepReplayStorage, {"n_step": 3, "num_workers": 2}),
    "sequences": (SequenceReplayStorage, {"sequence_length": 3, "burn_in": 1}),
    "sequences with states": (SequenceReplayStorage, {"sequence_length": 2, "hidden_shape": (1, 2)}),
}


def replay(name: str, **options: Any) -> Any:
    storage_class, own = REPLAYS[name]
    given = {"storage_size": 8 * ENVS, "num_envs": ENVS, "batch_size": 64, "seed": 3, "extra_fields": EXTRA}
    return storage_class(BOX, DISCRETE, DEVICE, **{**given, "autoreset": "Disabled", **own, **options})


@pytest.mark.parametrize("name", REPLAYS)
def test_replay_serves_them_behind_the_documented_fields_of_the_first_step(name):
    """A sequence has them in every step, and zeros where it is padded."""
    storage = replay(name)
    hidden = {"hidden_states": torch.zeros(1, ENVS, 2)} if name == "sequences with states" else {}
    for step in range(20):
        put(storage, step, **hidden)
        if step < 6:
            continue
        batch = storage.sample()
        assert batch._fields[-2:] == ("costs", "task_id")
        held = ids_in(batch.observations) != 0
        assert bool(held.any())
        check_served(lambda field, b=batch, h=held: getattr(b, field)[h], batch.observations[held])
        assert not batch.costs[~held].any()
        assert not batch.task_id[~held].any()
    storage.close()


@pytest.mark.parametrize("name", REPLAYS)
def test_replay_refuses_a_step_without_them_and_nothing_changes(name):
    storage, twin = replay(name), replay(name)
    hidden = {"hidden_states": torch.zeros(1, ENVS, 2)} if name == "sequences with states" else {}
    for step in range(6):
        for one in (storage, twin):
            put(one, step, **hidden)
    for changes in ({"costs": None}, {"task_id": torch.zeros(ENVS, 3)}, {"cost": torch.zeros(ENVS)}):
        with pytest.raises(InvalidInputError, match=next(iter(changes))):
            put(storage, 6, **hidden, **changes)
    same_data(twin.get_all_buffer_data(), storage.get_all_buffer_data())
    storage.close()
    twin.close()


@on_the_host
@pytest.mark.parametrize("name", ["1 step", "prefetched"])
def test_a_mapped_folder_holds_them(name, tmp_path):
    storage = replay(name, memory="mapped", path=tmp_path / "rows")
    for step in range(6):
        put(storage, step)
    expected = storage.get_all_buffer_data()
    storage.close()
    again = replay(name, memory="mapped", path=tmp_path / "rows")
    same_data(expected, again.get_all_buffer_data())
    check_batch(again.sample())
    again.close()
    with pytest.raises(ValueError, match=r"costs|task_id|rows"):
        replay(name, memory="mapped", path=tmp_path / "rows", extra_fields=None)


def write_steps(writer: Any, steps: int) -> None:
    for step in range(steps):
        put(writer, step, len(writer.lanes))
    writer.close()


@on_the_host
@fork
def test_a_writer_in_another_process_gives_them():
    storage = replay("3 steps", memory="shared")
    process = multiprocessing.get_context("fork").Process(target=write_steps, args=(storage.writer(), 6))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert len(storage) == 6 * ENVS
    check_batch(storage.sample())
    check_dict(storage.get_all_buffer_data())
    storage.close()


def act(storage: DistributedStorage, actor: Any) -> None:
    with actor.rollout() as rollout:
        for t in range(STEPS + 1):
            ids = torch.tensor(float(t + 1))
            rollout.write(t, obs=torch.stack([ids, -ids]), reward=ids, **extra_of(ids))


@on_the_host
@fork
def test_actors_give_them_and_learners_get_them():
    storage = DistributedStorage(
        {"shape": (2,), "dtype": "float32"}, DISCRETE, "cpu", STEPS, 4, 1, extra_fields=EXTRA, timeout=60.0
    )
    process = multiprocessing.get_context("fork").Process(target=act, args=(storage, storage.actor()))
    process.start()
    batch = next(storage.learner(batch_size=1, prefetch=0))
    process.join(60)
    assert process.exitcode == 0
    ids = torch.arange(1.0, STEPS + 2).unsqueeze(1)
    assert torch.equal(ids_in(batch["obs"]), ids)
    expected = extra_of(ids)
    assert torch.equal(batch["costs"].flatten(), expected["costs"].flatten())
    assert torch.equal(batch["task_id"], expected["task_id"])
