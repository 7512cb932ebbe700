"""Snapshots whose tables and numbers were forged, checksums and all: what once crashed, or was used as it was."""

from __future__ import annotations

import pytest
import torch
from forged_states import SavedState
from saved_folders import MADE

from rlstore import SnapshotError, Storage


def forged(name, folder, change):
    """A snapshot of a storage, of which a function has changed the tensors."""
    make, run = MADE[name]
    storage = make("cpu")
    for _ in run(storage):
        pass
    state = SavedState(storage)
    state.write(folder, state.numbers, change(state.tensors))
    return folder


def of_open_episodes(column, value, lacks=""):
    """The open episode of each environment, with another entry in the table of episodes."""

    def change(tensors):
        episodes = tensors["episodes"].clone()
        episodes[tensors["counters"][2], column] = value
        left = {name: tensor for name, tensor in tensors.items() if (lacks or "-") not in name}
        return {**left, "episodes": episodes}

    return change


@pytest.mark.parametrize("value", [2**40, -(2**40), 2**62, -1])
def test_an_open_episode_that_begins_elsewhere(value, tmp_path):
    """The next step is compared with frames before its beginning."""
    with pytest.raises(SnapshotError, match="episodes"):
        Storage.load(forged("frames, starts", tmp_path / "saved", of_open_episodes(0, value)))


@pytest.mark.parametrize(("name", "lacks"), [("frames", ""), ("frames, starts", " start ")])
def test_frames_of_a_table_that_is_not_there(name, lacks, tmp_path):
    with pytest.raises(SnapshotError, match="episodes"):
        Storage.load(forged(name, tmp_path / "saved", of_open_episodes(3, 0, lacks)))


def test_an_episode_index_of_another_environment(tmp_path):
    def change(tensors):
        name = "record 0 episode"
        of_lane = tensors[name].view(3, -1).clone()
        of_lane[0] = of_lane[1]
        return {**tensors, name: of_lane.flatten()}

    with pytest.raises(SnapshotError, match="episode"):
        Storage.load(forged("replay", tmp_path / "saved", change))


def test_a_record_of_more_rows_than_can_be_counted(tmp_path):
    """In 64 bits the sum over all environments is 0: so many rows the record has."""

    def change(tensors):
        many = torch.tensor([2**63 - 1, 2**63 - 1, 2])
        empty = {name: tensor[:0] for name, tensor in tensors.items() if name.startswith("record 0 ")}
        bounds = {"record 0 first": torch.zeros_like(many), "record 0 stop": many}
        counters = torch.cat([many.unsqueeze(0), tensors["counters"][1:]])
        return {**tensors, **empty, **bounds, "counters": counters}

    with pytest.raises(SnapshotError, match="record"):
        Storage.load(forged("replay", tmp_path / "saved", change))


def test_priorities_of_what_is_not_there_are_dropped(tmp_path):
    def change(tensors):
        return {**tensors, "priorities": tensors["priorities"].clone().fill_(2.0)}

    storage = Storage.load(forged("sequences, by priority", tmp_path / "saved", change))
    priorities = storage.get_all_buffer_data().get("priorities")
    assert storage.draw_total > 0
    assert priorities is None or (priorities <= 2).all()
    storage.sample(64)
