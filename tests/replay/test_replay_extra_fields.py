"""A user's extra fields in replay: added by name, served by name, saved with the rows."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
    Storage,
)
from rlstore.errors import InvalidInputError

ENVS, STEPS = 2, 12
BOX, DISCRETE = spaces.Box(-1e6, 1e6, (3,)), spaces.Discrete(5)
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))
EXTRA = {"costs": ((), torch.float32), "task_id": spaces.Discrete(1000), "skills": ((2,), "float64")}


def reached(achieved, desired, info):
    return (achieved == desired).all(-1).float()


def make(kind, **options):
    given = {"storage_size": 40, "num_envs": ENVS, "batch_size": 16, "seed": 0, "extra_fields": EXTRA, **options}
    if kind is SequenceReplayStorage:
        given.setdefault("sequence_length", 3)
    if kind is HindsightReplayStorage:
        given.setdefault("compute_reward", reached)
    return kind(GOALS if kind is HindsightReplayStorage else BOX, DISCRETE, **given)


def step(time, lanes=range(ENVS), goals=False):
    """One step whose every number tells its time and its environment."""
    ids = torch.tensor([time * 10.0 + lane for lane in lanes])
    seen, following = ids.unsqueeze(1).expand(-1, 3), (ids + 10).unsqueeze(1).expand(-1, 3)
    if goals:
        seen, following = (dict.fromkeys(GOALS.spaces, part) for part in (seen, following))
    ends = torch.tensor([time % 5 == 4] * len(ids))
    extra = {"costs": ids + 0.5, "task_id": ids.long() + 1, "skills": torch.stack([ids, -ids], 1).double()}
    return (seen, ids.long() % 5, ids, ends, torch.zeros_like(ends), {}, following), extra


def fill(storage, steps=STEPS, first=0):
    for time in range(first, first + steps):
        given, extra = step(time, goals=isinstance(storage, HindsightReplayStorage))
        storage.add(*given, **extra)
    return storage


def check(batch):
    """Every extra value is that of the (first) step of the row that it stands beside."""
    seen = batch.observations if isinstance(batch.observations, torch.Tensor) else batch.observations["observation"]
    ids = seen[..., :1]
    held = batch.masks.unsqueeze(-1) if hasattr(batch, "masks") else torch.ones_like(ids, dtype=torch.bool)
    assert batch.costs.shape == batch.task_id.shape == ids.shape
    assert (batch.costs.dtype, batch.task_id.dtype, batch.skills.dtype) == (torch.float32, torch.int64, torch.float64)
    assert torch.equal(batch.costs[held], (ids + 0.5)[held])
    assert torch.equal(batch.task_id[held], (ids.long() + 1)[held])
    assert torch.equal(batch.skills, torch.where(held, torch.cat([ids, -ids], -1), 0).double())
    assert type(batch)._fields[-3:] == ("costs", "task_id", "skills")


ALL = [ReplayStorage, NStepReplayStorage, PrioritizedReplayStorage, SequenceReplayStorage, HindsightReplayStorage]
kinds = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)


@kinds
def test_extra_fields_are_served_by_name_beside_their_rows(kind):
    storage = fill(make(kind))
    batch = storage.sample()
    check(batch)
    assert isinstance(batch, type(batch).__mro__[2])
    (named,) = storage.generate_batches(1, 4)
    assert named["costs"].shape[0] == named["skills"].shape[0] == 4


@kinds
def test_extra_fields_are_kept_by_snapshots_and_copies(kind, tmp_path):
    storage = fill(make(kind))
    storage.save(tmp_path / "saved")
    resumed = Storage.load(tmp_path / "saved")
    if kind is HindsightReplayStorage:
        resumed.compute_reward = reached
    for other in (resumed, copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        check(other.sample())
        check(fill(other, 3, STEPS).sample())
        other.close()
    whole = storage.get_all_buffer_data()
    fresh = make(kind)
    fresh.insert_data_slice(whole)
    again = fresh.get_all_buffer_data()
    for name in EXTRA:
        assert torch.equal(again[name], whole[name])
    assert whole["costs"].shape == (STEPS, ENVS, 1)
    check(fresh.sample())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayStorage, SequenceReplayStorage])
def test_writers_of_shared_memory_add_extra_fields(kind, workers):
    storage = make(kind, memory="shared", num_workers=workers)
    with storage.writer(1) as left, storage.writer(1) as right:
        there = pickle.loads(pickle.dumps(right))
        for time in range(STEPS):
            for lane, writer in enumerate((left, there)):
                given, extra = step(time, [lane])
                writer.add(*given, **extra)
        check(storage.sample())
        names = ("observations", "actions", "rewards", "terminated", "truncated", "infos", "next_observations")
        given, extra = step(STEPS, [0])
        sample = dict(zip(names, given, strict=True))
        del sample["infos"]
        left.insert_transition({**sample, **extra})
        with pytest.raises(InvalidInputError, match="costs"):
            left.insert_transition(sample)
        there.close()
    check(storage.sample())
    storage.close()


def test_prefetched_batches_hold_extra_fields():
    storage = fill(make(ReplayStorage, num_workers=2))
    for _ in range(4):
        check(storage.sample())
    storage.close()


def test_extra_fields_of_mapped_folders_and_of_episodes_on_disk(tmp_path):
    storage = fill(make(ReplayStorage, memory="mapped", path=tmp_path / "mapped"))
    storage.close()
    again = make(ReplayStorage, memory="mapped", path=tmp_path / "mapped")
    assert len(again) == STEPS * ENVS
    check(again.sample())
    again.close()
    with pytest.raises(InvalidInputError, match="costs"):
        make(ReplayStorage, memory="mapped", path=tmp_path / "mapped", extra_fields=None)
    options = {"save_snapshot": True, "snapshot_dir": tmp_path / "episodes"}
    fill(make(NStepReplayStorage, **options)).close()
    found = make(NStepReplayStorage, **options)
    assert len(found) == 2 * 5 * ENVS
    check(found.sample())
    found.close()


@kinds
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"costs": None}, r"needs \['costs'\]"),
        ({"colour": torch.zeros(ENVS)}, r"got \['colour'\].*\['costs', 'task_id', 'skills'\]"),
        ({"skills": torch.zeros(ENVS, 3)}, r"skills is \(2, 3\) float32; this storage holds \(2, 2\) float64"),
        ({"task_id": torch.zeros(ENVS)}, "task_id is .*float32 cannot be held as int64"),
        ({"costs": torch.zeros(ENVS, dtype=torch.complex64)}, "costs is"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(kind, change, words):
    storage = fill(make(kind))
    given, extra = step(STEPS, goals=kind is HindsightReplayStorage)
    with pytest.raises(InvalidInputError, match=rf"(?s){words}.*Nothing was written"):
        storage.add(*given, **{**extra, **change})
    assert len(storage) == STEPS * ENVS
    check(fill(storage, 1, STEPS).sample())


def test_a_factory_takes_extra_fields_and_numpy_and_columns_are_taken():
    storage = ReplayStorage.create_factory(40, extra_fields=EXTRA)("cpu")
    names = ("observations", "actions", "rewards", "terminated", "truncated", "infos", "next_observations")
    for time in range(3):
        given, extra = step(time)
        sample = dict(zip(names, given, strict=True))
        del sample["infos"]
        extra["costs"] = extra["costs"].numpy().astype(np.float64).reshape(ENVS, 1)
        storage.insert_transition({**sample, **extra, "skills": extra["skills"].tolist()})
    check(storage.sample(8))
    with pytest.raises(InvalidInputError, match="uses itself"):
        make(ReplayStorage, extra_fields={"rows": ((), torch.float32)})


def test_a_storage_without_extra_fields_takes_none():
    storage = make(ReplayStorage, extra_fields=None)
    given, extra = step(0)
    with pytest.raises(InvalidInputError, match="extra_fields of this storage are none"):
        storage.add(*given, **extra)
    assert len(storage) == 0
    storage.add(*given)
    assert storage.sample(2)._fields[-1] == "next_observations"
