"""Storages that are taken up again: from a snapshot, a mapped folder, kept episodes, a copy, or in a forked child."""

from __future__ import annotations

import copy
import os

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
    UnknownParameterError,
)

BOX, MOVES = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(9)


def play(storage, steps, length, begin=0):
    """One environment whose observation is the number of the step; episodes of ``length`` steps, truncated."""
    for step in range(begin, begin + steps):
        ended = step % length == length - 1
        infos = {"final_obs": np.array([[step + 0.5]], np.float32)} if ended else {}
        storage.add([[float(step)]], [step % 9], [float(step)], [False], [ended], infos, [[float(step + 1)]])


def held(storage):
    data = storage.get_all_buffer_data()
    return data["observations"].flatten().tolist() if data else []


def test_a_mapped_folder_is_not_taken_up_with_priorities_of_another_kind(tmp_path):
    def sequence(length):
        return SequenceReplayStorage(
            BOX, MOVES, storage_size=20, sequence_length=length, alpha=1.0, memory="mapped", path=tmp_path / "seq"
        )

    first = sequence(2)
    play(first, 10, 5)
    first.close()
    with pytest.raises(ValueError, match="priorities"):
        sequence(5)
    again = sequence(2)
    assert held(again) == [float(step) for step in range(10)]
    plain = ReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "plain")
    play(plain, 10, 5)
    plain.close()
    with pytest.raises(ValueError, match="priorities"):
        PrioritizedReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "plain")


def test_kept_episodes_outlive_the_load_of_a_snapshot(tmp_path):
    def kept():
        return NStepReplayStorage(
            BOX, MOVES, storage_size=20, num_workers=0, save_snapshot=True, snapshot_dir=tmp_path / "episodes"
        )

    storage = kept()
    play(storage, 100, 5)
    storage.save(tmp_path / "saved")
    storage.close()
    loaded = Storage.load(tmp_path / "saved", folders={"snapshot_dir": tmp_path / "episodes"})
    play(loaded, 5, 5, begin=100)
    loaded.close()
    assert held(kept()) == [float(step) for step in range(85, 105)]


def test_a_snapshot_of_few_episodes_is_loaded_into_a_folder_that_has_room_for_more(tmp_path):
    storage = ReplayStorage(BOX, MOVES, storage_size=60, memory="mapped", path=tmp_path / "rows")
    play(storage, 5, 1)
    storage.save(tmp_path / "saved")
    play(storage, 50, 1, begin=5)
    storage.close()
    loaded = Storage.load(tmp_path / "saved", folders={"path": tmp_path / "rows"})
    assert held(loaded) == [0.0, 1.0, 2.0, 3.0, 4.0]
    play(loaded, 58, 1, begin=5)
    assert held(loaded) == [float(step) for step in range(3, 63)]


def test_a_snapshot_without_starts_is_loaded_into_a_folder_that_has_some(tmp_path):
    space = spaces.Box(0, 255, (2, 1, 1), np.uint8)
    storage = ReplayStorage(
        space, MOVES, storage_size=8, frame_stack=2, stack_axis=0, memory="mapped", path=tmp_path / "rows", seed=0
    )

    def add(older, newest, ended):
        given = np.array([older, newest], np.uint8).reshape(1, 2, 1, 1)
        following = np.array([newest, newest + 1], np.uint8).reshape(1, 2, 1, 1)
        storage.add(given, [0], [1.0], [ended], [False], {}, following)

    add(5, 5, True)
    storage.save(tmp_path / "saved")
    add(3, 9, True)  # neither a repeat nor zeros before it: kept in a table of its own
    storage.close()
    storage = Storage.load(tmp_path / "saved", folders={"path": tmp_path / "rows"})
    assert storage.sample(4).observations.flatten().tolist() == [5, 5] * 4
    add(7, 20, True)
    assert {tuple(stack) for stack in storage.sample(64).observations.flatten(1).tolist()} == {(5, 5), (7, 20)}


def test_a_forked_child_may_add_before_it_samples():
    storage = ReplayStorage(BOX, MOVES, storage_size=10, batch_size=4, num_workers=3, seed=0)
    play(storage, 10, 5)
    storage.sample()
    child = os.fork()
    if child == 0:
        try:
            play(storage, 15, 5, begin=10)
            served = [storage.sample().observations.flatten().tolist() for _ in range(6)]
            os._exit(0 if all(0 <= number < 25 for batch in served for number in batch) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_hindsight_has_no_n_step():
    goals = spaces.Dict({"observation": BOX, "achieved_goal": BOX, "desired_goal": BOX})
    storage = HindsightReplayStorage(goals, MOVES, storage_size=9, compute_reward=lambda a, d, i: a[:, 0])
    with pytest.raises(UnknownParameterError, match="n_step"):
        storage.update_storage_parameter("n_step", 3)


def test_no_step_is_dropped_after_kept_episodes_were_found(tmp_path):
    def kept():
        return NStepReplayStorage(
            BOX, MOVES, storage_size=9, num_workers=0, save_snapshot=True, snapshot_dir=tmp_path, autoreset="NextStep"
        )

    storage = kept()
    storage.add([[0.0]], [0], [1.0], [True], [False], {}, [[1.0]])
    storage.close()
    storage = kept()
    storage.add([[7.0]], [0], [1.0], [False], [False], {}, [[8.0]])
    assert held(storage) == [0.0, 7.0]


def test_the_copy_of_a_mapped_storage_does_not_write_into_its_folder(tmp_path):
    storage = ReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "rows")
    play(storage, 10, 5)
    twin = copy.deepcopy(storage)
    twin.save(tmp_path / "saved")
    play(storage, 10, 5, begin=10)
    loaded = Storage.load(tmp_path / "saved")
    play(loaded, 3, 5, begin=10)
    assert held(storage) == [float(step) for step in range(20)]
    assert held(loaded) == [float(step) for step in range(13)]


def test_a_refused_first_sample_leaves_nothing_in_a_mapped_folder(tmp_path):
    storage = ReplayStorage.create_factory(10, memory="mapped", path=tmp_path / "rows")("cpu", None, None)
    sample = {
        "observations": torch.zeros(2, 3),
        "actions": torch.zeros(2, dtype=torch.int64),
        "rewards": torch.zeros(2),
        "terminated": torch.zeros(2),
        "truncated": torch.zeros(2),
        "next_observations": torch.zeros(2, 4),
    }
    with pytest.raises(ValueError, match="observations"):
        storage.insert_transition(sample)
    assert not (tmp_path / "rows").exists()
    storage.insert_transition({**sample, "observations": torch.ones(2, 4)})
    assert len(storage) == 2


def test_a_priority_too_small_for_a_float_is_still_above_zero():
    storage = PrioritizedReplayStorage(BOX, MOVES, storage_size=4, alpha=1.0, seed=0)
    play(storage, 2, 5)
    storage.update([0, 1], torch.tensor([1e-60, 0.0], dtype=torch.float64))
    assert storage.sample(4).rows.tolist() == [0, 0, 0, 0]


def test_windows_across_episodes_count_from_the_last_reset():
    storage = SequenceReplayStorage(BOX, MOVES, storage_size=20, sequence_length=2, across_episodes=True, seed=0)
    play(storage, 3, 5)
    storage.reset()
    play(storage, 5, 5, begin=10)
    # Rows 3 to 7 hold the steps 10 to 14: windows of two begin at rows 3 and 5.
    assert set(storage.sample(64).rows.tolist()) == {3, 5}


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_windows_of_many_episodes_are_all_there_after_loading(tmp_path, alpha):
    """More episodes than a new storage has room for: the windows were looked up in the small, old table."""
    storage = SequenceReplayStorage(
        spaces.Box(-10, 10, (1,)),
        spaces.Discrete(2),
        storage_size=600,
        batch_size=4,
        sequence_length=2,
        alpha=alpha,
        seed=0,
    )
    for step in range(500):
        storage.add([float(step)], 0, 1.0, True, False, {}, [step + 0.5])
    storage.save(tmp_path / "saved")
    loaded = SequenceReplayStorage.load(tmp_path / "saved")
    seen = {int(row) for _ in range(40) for row in loaded.sample(200).rows}
    assert seen == set(range(500))
    batch = loaded.sample(50)
    assert batch.observations[:, 0, 0].tolist() == batch.rows.tolist()
    assert batch.masks.tolist() == [[True, False]] * 50
