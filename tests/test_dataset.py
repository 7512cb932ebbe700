"""Datasets of held steps, alone and through DataLoader."""

import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils.data import DataLoader, random_split

from rlstore import DistributedStorage, InvalidInputError, ReplayStorage, RolloutStorage, RowNotHeldError

ENVS = 2
SPACE = spaces.Dict({"a": spaces.Box(-1e9, 1e9, (2,)), "b": spaces.Discrete(10**6)})


def observation(ids):
    return {"a": np.stack([ids, -ids], 1).astype(np.float32), "b": ids}


def filled(steps=50, size=40, **options):
    """Step t of environment e has the id ``t * ENVS + e``, which is its row id too."""
    storage = ReplayStorage(SPACE, spaces.Discrete(10**6), storage_size=size * ENVS, num_envs=ENVS, **options)
    fill(storage, range(steps))
    return storage


def fill(storage, steps):
    for t in steps:
        ids = t * ENVS + np.arange(ENVS)
        ends = [t % 7 == 6, False]
        storage.add(observation(ids), ids, ids / 4, ends, [False, t % 5 == 4], {}, observation(ids + ENVS))


def ids_in(batch):
    ids = batch["actions"].tolist()
    assert batch["observations"]["a"].tolist() == [[i, -i] for i in ids]
    assert batch["observations"]["b"].tolist() == ids
    if "rewards" in batch:
        assert batch["rewards"].tolist() == [[i / 4] for i in ids]
    return ids


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loader_serves_each_step_once_in_batches_of_one_gather(memory, workers, monkeypatch):
    storage = filled(memory=memory)
    data = storage.as_dataset()
    assert len(data) == len(storage) == 80
    sizes, read = [], type(data)._read
    monkeypatch.setattr(type(data), "_read", lambda self, rows: sizes.append(len(rows)) or read(self, rows))
    # multiprocessing_context names what does not depend on the version of Python.
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=32, shuffle=True, collate_fn=dict, **more)
    batches = [ids_in(batch) for batch in loader]
    assert [len(batch) for batch in batches] == [32, 32, 16]
    assert workers or sizes == [32, 32, 16]
    served = [i for batch in batches for i in batch]
    assert served != sorted(served)
    assert sorted(served) == list(range(20, 100))
    storage.close()


def test_entries_are_steps_without_a_leading_axis():
    storage = filled()
    data = storage.as_dataset()
    entry = data[3]
    assert (entry["actions"].item(), entry["rewards"].tolist()) == (23, [23 / 4])
    assert entry["observations"]["a"].tolist() == [23.0, -23.0]
    assert data.rows.tolist() == list(range(20, 100))
    assert data[-1]["actions"] == 99
    with pytest.raises(IndexError):
        data[80]
    parts = random_split(data, [60, 20], torch.Generator().manual_seed(0))
    served = [i for part in parts for batch in DataLoader(part, batch_size=7, collate_fn=dict) for i in ids_in(batch)]
    assert sorted(served) == list(range(20, 100))


def test_rows_and_fields_can_be_chosen():
    storage = filled()
    episodes = storage.episodes()
    good = episodes[episodes.terminated & episodes.is_whole]
    data = storage.as_dataset(good.rows, ["observations", "actions"])
    (batch,) = DataLoader(data, batch_size=100, collate_fn=dict)
    assert list(batch) == ["observations", "actions"]
    # Environment 0 terminates in steps 6, 13, ...; step 10 is the oldest that is held.
    assert ids_in(batch) == [t * ENVS for t in range(14, 49)]
    with pytest.raises(InvalidInputError, match=r"rows are \(1, 2\); ReplayStorage.as_dataset\(\) needs a list"):
        storage.as_dataset([[20, 21]])


def test_steps_that_were_overwritten_since_are_refused():
    storage = filled()
    data = storage.as_dataset()
    fill(storage, [50])
    assert data[2]["actions"] == 22
    with pytest.raises(RowNotHeldError, match="row 20 is not held any more"):
        next(iter(DataLoader(data, batch_size=8, collate_fn=dict)))


def test_a_loader_that_would_collate_is_told_what_to_give():
    with pytest.raises(InvalidInputError, match="give the DataLoader collate_fn=dict"):
        next(iter(DataLoader(filled().as_dataset(), batch_size=8)))


def test_a_dataset_is_not_sent_to_other_processes():
    with pytest.raises(InvalidInputError, match=r"cannot be sent to another process.*num_workers=0.*fork"):
        pickle.dumps(filled().as_dataset())


def test_workers_do_not_read_what_is_on_a_device(monkeypatch):
    data = filled().as_dataset()
    monkeypatch.setattr(data._steps, "device", torch.device("cuda:0"))
    monkeypatch.setattr("rlstore.dataset.get_worker_info", object)
    with pytest.raises(InvalidInputError, match=r"the data are on cuda:0, and workers.*give num_workers=0"):
        data[0]


def test_rollouts_and_hand_off_slots_are_datasets_too():
    rollout = RolloutStorage.from_spaces(SPACE, spaces.Discrete(10**6), ENVS, 10, autoreset="SameStep")
    slots = DistributedStorage(SPACE, spaces.Discrete(10**6), num_steps=4, num_storages=ENVS)
    for t in range(4):
        ids = t * ENVS + np.arange(ENVS)
        step = {"observations": observation(ids), "actions": ids, "rewards": ids / 4}
        flags = {"terminated": [False] * ENVS, "truncated": [False] * ENVS}
        rollout.add(**step, **flags, values=ids, log_probs=ids)
        slots.insert_transition({**step, **flags, "next_observations": observation(ids + ENVS)})
    for storage in (rollout, slots):
        (batch,) = DataLoader(storage.as_dataset(), batch_size=100, collate_fn=dict)
        assert sorted(ids_in(batch)) == list(range(8))
    slots.close()


def test_an_empty_storage_is_an_empty_dataset():
    storage = ReplayStorage.create_factory(10)()
    assert len(storage.as_dataset()) == len(storage.episodes()) == len(storage.held_rows()) == 0
    with pytest.raises(RowNotHeldError, match="holds no rows: it waits for its first sample"):
        storage[0]
    assert len(filled(steps=0).as_dataset()) == 0


@pytest.mark.parametrize("names", [{"actions": range(3)}, "actions", {"actions"}, (n for n in ["actions"]), 3])
def test_names_that_are_no_list_are_refused(names):
    """Of a dict the ranges would be ignored, and a generator is empty when it is read again."""
    with pytest.raises(InvalidInputError, match=r"names is .*; give a list of names"):
        filled().as_dataset(names=names)
