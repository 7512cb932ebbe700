"""Faults of replay that were there once, each with the numbers that showed it."""

from __future__ import annotations

import pytest
from gymnasium import spaces

from rlstore import ReplayStorage, SequenceReplayStorage

NUMBER = spaces.Box(-10, 10, (1,))


def test_plain_numbers_of_one_environment_are_each_their_own():
    """An observation was read as half a double, and the action took the reward's place."""
    storage = ReplayStorage(NUMBER, NUMBER, storage_size=4, batch_size=2)
    storage.add(0.25, 0.5, 2.0, False, False, {}, 0.75)
    storage.add(0.75, -0.5, 3.0, True, False, {}, 1.25)
    data = storage.get_all_buffer_data()
    assert data["observations"].flatten().tolist() == [0.25, 0.75]
    assert data["actions"].flatten().tolist() == [0.5, -0.5]
    assert data["rewards"].flatten().tolist() == [2.0, 3.0]
    assert data["next_observations"].flatten().tolist() == [0.75, 1.25]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_windows_of_many_episodes_are_all_there_after_loading(tmp_path, alpha):
    """More episodes than a new storage has room for: the windows were looked up in the small, old table."""
    storage = SequenceReplayStorage(
        NUMBER, spaces.Discrete(2), storage_size=600, batch_size=4, sequence_length=2, alpha=alpha, seed=0
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
