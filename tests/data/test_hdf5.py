"""HDF5 files of d4rl."""

from __future__ import annotations

import sys

import h5py
import numpy as np
import pytest
from experience import D4RL, IDS, assert_same
from gymnasium import spaces

from rlstore import InvalidInputError, ReplayStorage
from rlstore.data import read_hdf5

INFOS = {"infos/qpos": np.stack([IDS, IDS], -1) * 1.5, "metadata/algorithm": np.array(b"SAC")}


def save(path, **changes):
    with h5py.File(path, "w") as file:
        for name, array in {**D4RL, **INFOS, **changes}.items():
            if array is not None:
                file[name] = array
    return path


def test_a_file_of_d4rl(tmp_path):
    source = read_hdf5(save(tmp_path / "a.hdf5"), {"qpos": "infos/qpos"})
    for found in (list(source), list(source)):
        assert [episode["rewards"].tolist() for episode in found] == [
            [0, 0.25, 0.5, 0.75],
            [1, 1.25, 1.5, 1.75],
            [2, 2.25, 2.5, 2.75],
        ]
        assert [episode["terminated"].tolist() for episode in found] == [[False] * 3 + [True], [False] * 4, [False] * 4]
        assert [episode["truncated"].tolist() for episode in found] == [[False] * 4, [False] * 3 + [True], [False] * 4]
        assert_same(found[1]["observations"], D4RL["observations"][4:8])
        assert_same(found[1]["qpos"], INFOS["infos/qpos"][4:8])
    assert (source.num_steps, source.num_episodes) == (12, 3)
    assert source.action_space == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with pytest.warns(UserWarning, match="2 of the steps given were left out"):
        storage = ReplayStorage.from_episodes(read_hdf5(tmp_path / "a.hdf5"), batch_size=2)
    assert [episode.length for episode in storage.episodes()] == [4, 3, 3]


def test_next_observations_are_the_final_ones(tmp_path):
    save(tmp_path / "a.hdf5", next_observations=D4RL["observations"] + [1, 10])
    found = list(read_hdf5(tmp_path / "a.hdf5"))
    assert [episode["final_observations"].tolist() for episode in found] == [[4, 40], [8, 80], [12, 120]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.ones(11)}, r"differ in length: \{.*'rewards': 11"),
        ({"rewards": np.array([b"1"] * 12)}, r"rewards of .* is \|S1; an array of numbers"),
        ({"actions": None}, "known to be its actions"),
    ],
)
def test_files_that_are_refused(changes, message, tmp_path):
    save(tmp_path / "a.hdf5", **changes)
    with pytest.raises(InvalidInputError, match=message):
        read_hdf5(tmp_path / "a.hdf5")


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    content = save(tmp_path / "a.hdf5").read_bytes()
    for length in {*range(0, len(content), 331), len(content) - 1}:
        (tmp_path / "a.hdf5").write_bytes(content[:length])
        with pytest.raises(InvalidInputError, match=r"a\.hdf5 is damaged or not complete, or no HDF5 file"):
            list(read_hdf5(tmp_path / "a.hdf5"))
    with pytest.raises(FileNotFoundError):
        read_hdf5(tmp_path / "b.hdf5")


def test_without_h5py_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"read_hdf5\(\) needs h5py, .*pip install 'rlstore\[data\]'"):
        read_hdf5(tmp_path / "a.hdf5")
