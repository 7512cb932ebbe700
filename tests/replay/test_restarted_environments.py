"""Environments that are restarted after a load begin new episodes, which is no break; a real one afterwards is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from gymnasium import spaces

from rlstore import NStepReplayStorage, ReplayStorage, Storage, kernels
from rlstore.kernels import cuda
from rlstore.kernels.cuda import watch

BOX, MOVES = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(9)
STACKS = spaces.Box(-1e9, 1e9, (3,))
MEMORIES = ["device", "shared", "mapped"]
VERSIONS = {"native": None, "portable": {}, "Triton": cuda.OPERATIONS}


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    """The kernels of the CPU, one version after another; those of CUDA look at once at what they have to tell."""
    monkeypatch.setattr(watch, "_FIRST_LOOK", 1)
    monkeypatch.setattr(watch, "_LAST_LOOK", 1)
    if VERSIONS[request.param] is not None:
        monkeypatch.setitem(kernels._VERSIONS, "cpu", VERSIONS[request.param])
    return request.param


def make(tmp_path, memory="device", **arguments):
    path = tmp_path / "rows" if memory == "mapped" else None
    return ReplayStorage(BOX, MOVES, storage_size=40, num_envs=2, memory=memory, path=path, seed=0, **arguments)


def step(storage, observations, following, mask=None):
    """One step of both environments, and how many warnings it gave."""
    first, second = (torch.tensor(values, dtype=torch.float32).unsqueeze(1) for values in (observations, following))
    none = torch.zeros(len(first), dtype=torch.bool)
    options = {} if mask is None else {"mask": torch.tensor(mask)}
    rewards, actions = torch.ones(len(first)), torch.zeros(len(first), dtype=torch.int64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage.add(first, actions, rewards, none, none, {}, second, **options)
    assert all("are not the next_observations" in str(warning.message) for warning in caught)
    return len(caught)


def episodes(storage):
    """The observations of each environment, an episode at a time, from the table of episodes."""
    ring = storage._ring_of()
    found = []
    for lane in range(ring.lanes):
        slots = ring.blocks["episode"][lane, : int(ring.written[lane])].tolist()
        rows = ring.blocks["observations"][lane, : len(slots), 0].tolist()
        runs: list[list[float]] = []
        for place, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            if place and slot == slots[place - 1]:
                runs[-1].append(row)
            else:
                runs.append([row])
        found.append(runs)
    return found


def begin(storage):
    assert step(storage, [0, 100], [1, 101]) == 0
    assert step(storage, [1, 101], [2, 102]) == 0


def reloaded(storage, tmp_path):
    storage.save(tmp_path / "saved")
    storage.close()
    mapped = (tmp_path / "rows").exists()
    return Storage.load(tmp_path / "saved", folders={"path": tmp_path / "rows"} if mapped else None)


@pytest.mark.parametrize("memory", MEMORIES)
def test_restarted_environments_use_no_warning_up(memory, tmp_path):
    storage = make(tmp_path, memory)
    begin(storage)
    storage = reloaded(storage, tmp_path)
    assert step(storage, [50, 150], [51, 151]) == 0
    assert episodes(storage) == [[[0, 1], [50]], [[100, 101], [150]]]
    assert step(storage, [51, 7], [52, 8]) == 1
    assert step(storage, [9, 9], [9, 9]) == 0  # once


def test_every_version_of_the_kernels_tells_them_apart(version, tmp_path):
    storage = make(tmp_path)
    begin(storage)
    storage = reloaded(storage, tmp_path)
    # One of them is restarted; the other waits, and is restarted while the first breaks off its episode.
    assert step(storage, [50, 0], [51, 0], mask=[True, False]) == 0
    assert step(storage, [99, 150], [100, 151], mask=[False, True]) == 0
    assert step(storage, [7, 0], [8, 0], mask=[True, False]) == 1


def test_a_break_beside_a_restart_is_told(version, tmp_path):
    storage = make(tmp_path)
    begin(storage)
    storage = reloaded(storage, tmp_path)
    assert step(storage, [50, 0], [51, 0], mask=[True, False]) == 0
    assert step(storage, [7, 150], [8, 151]) == 1


def test_environments_that_were_restored_go_on(version, tmp_path):
    storage = make(tmp_path)
    begin(storage)
    storage = reloaded(storage, tmp_path)
    assert step(storage, [2, 102], [3, 103]) == 0
    assert episodes(storage) == [[[0, 1, 2]], [[100, 101, 102]]]
    assert step(storage, [60, 103], [61, 104]) == 1
    assert episodes(storage) == [[[0, 1, 2], [60]], [[100, 101, 102, 103]]]


def test_a_refused_first_step_leaves_the_restart_to_the_next(tmp_path):
    storage = make(tmp_path)
    begin(storage)
    storage = reloaded(storage, tmp_path)
    with pytest.raises(ValueError, match="Nothing was written"):
        step(storage, [50, 150, 3], [51, 151, 4])
    assert step(storage, [50, 150], [51, 151]) == 0


def test_a_storage_that_had_warned_warns_again_once_it_was_loaded(tmp_path):
    storage = make(tmp_path)
    begin(storage)
    assert step(storage, [7, 102], [8, 103]) == 1
    storage = reloaded(storage, tmp_path)
    assert step(storage, [50, 150], [51, 151]) == 0
    assert step(storage, [7, 151], [8, 152]) == 1


def test_a_mapped_folder_that_is_opened_again(tmp_path):
    storage = make(tmp_path, "mapped")
    begin(storage)
    for _ in range(2):  # the second time without a step in between
        storage.close()
        storage = make(tmp_path, "mapped")
    assert step(storage, [50, 102], [51, 103]) == 0
    assert episodes(storage) == [[[0, 1], [50]], [[100, 101, 102]]]
    assert step(storage, [51, 7], [52, 8]) == 1


def test_saved_before_any_step_it_is_still_resumed(tmp_path):
    storage = make(tmp_path)
    begin(storage)
    storage = reloaded(reloaded(storage, tmp_path), tmp_path)
    assert step(storage, [50, 150], [51, 151]) == 0


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_writers_of_a_loaded_storage(memory, tmp_path):
    storage = make(tmp_path, memory)
    begin(storage)
    storage = reloaded(storage, tmp_path)
    with storage.writer(1) as one, storage.writer(1) as other:
        assert step(one, [50], [51]) == 0
        assert step(other, [102], [103]) == 0
        assert step(one, [7], [8]) == 1
        assert step(other, [7], [8]) == 1  # each of them warns once
        len(storage)
        assert episodes(storage) == [[[0, 1], [50], [7]], [[100, 101, 102], [7]]]
    storage.close()


def test_frame_stacks_are_compared_whole(version, tmp_path):
    storage = ReplayStorage(STACKS, MOVES, storage_size=20, frame_stack=3, seed=0)

    def add(*frames):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stacks = [torch.tensor(frames[first : first + 3], dtype=torch.float32).unsqueeze(0) for first in (0, 1)]
            none = torch.zeros(1, dtype=torch.bool)
            storage.add(stacks[0], torch.zeros(1, dtype=torch.int64), torch.ones(1), none, none, {}, stacks[1])
        return len(caught)

    assert add(1, 1, 1, 2) == 0
    storage = reloaded(storage, tmp_path)
    assert add(2, 2, 2, 3) == 0  # the newest frame is the one that was to follow, and the others are not
    assert storage._ring_of().blocks["episode"][0, :2].tolist() == [0, 1]
    assert add(7, 7, 7, 8) == 1


def test_kept_episodes(tmp_path):
    def kept():
        return NStepReplayStorage(
            BOX, MOVES, storage_size=40, num_envs=2, num_workers=0, save_snapshot=True, snapshot_dir=tmp_path
        )

    storage = kept()
    begin(storage)
    assert step(storage, [7, 7], [8, 8]) == 1  # the episodes before are over without a flag, and so on disk
    storage.close()
    storage = kept()
    assert episodes(storage) == [[[0, 1]], [[100, 101]]]
    assert step(storage, [50, 150], [51, 151]) == 0
    assert step(storage, [51, 7], [52, 8]) == 1


def test_data_that_were_inserted_as_a_whole(version, tmp_path):
    source = make(tmp_path)
    begin(source)
    data = source.get_all_buffer_data()
    storage = make(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage.insert_data_slice(data)
        storage.insert_data_slice(data)  # begins again at 0
    assert step(storage, [50, 150], [51, 151]) == 0
    assert step(storage, [51, 7], [52, 8]) == 1
