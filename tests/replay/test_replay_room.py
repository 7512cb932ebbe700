"""What needs rows that would be overwritten is asked before each of them is, and by no more steps than it allowed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from rlstore import ReplayStorage
from rlstore.engine.disk.snapshot import SnapshotWriter

SPACE = Box(-1e6, 1e6, (2,), np.float32)
SIZE, ENVS = 8, 2


class Hold:
    """Allows so many steps each time it is asked, and then refuses; it notes what was written when it was asked."""

    def __init__(self, storage: ReplayStorage, *allowed: int) -> None:
        self.storage, self.allowed, self.asked_at, self.copied_at = storage, list(allowed), [], []

    def room(self) -> int:
        self.asked_at.append(int(self.storage._rows.counters[0].max()))
        if not self.allowed:
            raise OverflowError("no more")
        return self.allowed.pop(0)

    def copy_all(self) -> None:
        self.copied_at.append(int(self.storage._rows.counters[0].max()))


def made(memory: str) -> ReplayStorage:
    return ReplayStorage(SPACE, SPACE, storage_size=SIZE, num_envs=ENVS, batch_size=4, memory=memory)


def add(storage, step: int, envs: int = ENVS, **given) -> None:
    """Observations of a step are its number, whatever the kind of the values."""
    values = np.full((envs, 2), step, np.float32 if step % 2 else np.float64)  # the latter have to be converted
    no = np.zeros(envs, bool)
    storage.add(values, values, np.full(envs, step, np.float32), no, no, {}, values + 1, **given)


def hold(storage: ReplayStorage, held: Hold) -> None:
    storage._rows.holds.append(held)
    storage._rows.ask_again()


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_hold_is_asked_when_what_it_allowed_is_written(memory):
    storage = made(memory)
    add(storage, 0)  # as many as there are steps may be written until there is a hold
    held = Hold(storage, 3, 1, 2)
    hold(storage, held)
    for step in range(1, 7):
        add(storage, step)
    assert held.asked_at == [1, 4, 5]
    with pytest.raises(OverflowError):
        add(storage, 7)
    assert storage._rows.counters[0].tolist() == [7, 7]
    assert sorted(set(storage.get_all_buffer_data()["rewards"].flatten().tolist())) == [3, 4, 5, 6]
    storage._rows.holds.clear()
    storage._rows.ask_again()
    add(storage, 7)
    assert held.asked_at == [1, 4, 5, 7]
    assert storage.get_all_buffer_data()["rewards"][:, 0, 0].tolist() == [4, 5, 6, 7]


def test_the_least_that_any_hold_allows_may_be_written_and_always_a_step():
    storage = made("ram")
    more, less = Hold(storage, 5, 5, 5), Hold(storage, 2, 0, 1)
    hold(storage, more)
    hold(storage, less)
    for step in range(4):
        add(storage, step)
    assert more.asked_at == less.asked_at == [0, 2, 3]


def test_a_step_without_a_row_counts_as_one():
    storage = made("ram")
    held = Hold(storage, 2, 1)
    hold(storage, held)
    for step in range(3):
        add(storage, step, mask=np.array([False, False]))
    assert held.asked_at == [0, 0]
    with pytest.raises(OverflowError):
        add(storage, 3)


def test_refused_values_use_no_room():
    storage = made("ram")
    held = Hold(storage, 1)
    hold(storage, held)
    for _ in range(3):
        with pytest.raises(ValueError, match="observations"):
            storage.add(np.zeros((ENVS, 3)), *[np.zeros((ENVS, 2))] * 5, {})
    add(storage, 0)
    assert held.asked_at == [0]


def test_writers_of_shared_memory_ask_no_hold_so_that_it_copies_before_there_is_one():
    storage = made("shared")
    held = Hold(storage)
    hold(storage, held)
    with storage.writer(1) as writer:
        for step in range(10):
            add(writer, step, 1)
    assert (held.asked_at, held.copied_at) == ([], [0])
    assert storage._rows.counters[0].tolist() == [10, 0]


def test_a_hold_copies_before_a_reset_frees_the_entries_of_episodes():
    storage = made("ram")
    add(storage, 0)
    held = Hold(storage)
    hold(storage, held)
    storage.reset()
    assert held.copied_at == [1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))])
def test_a_copy_has_no_holds(copied):
    storage = made("ram")
    add(storage, 0)
    hold(storage, Hold(storage))
    other = copied(storage)
    add(other, 1)
    assert other._rows.holds == []
    assert other.get_all_buffer_data()["rewards"][:, 0, 0].tolist() == [0, 1]
    assert torch.equal(storage.get_all_buffer_data()["rewards"], torch.zeros(1, ENVS, 1))


def test_writers_of_this_process_ask_holds_as_well():
    storage = made("ram")
    writers = [storage.writer(range(env, env + 1)) for env in range(ENVS)]
    for writer in writers:
        add(writer, 0, envs=1)
    held = Hold(storage, 2, 1, 2)
    hold(storage, held)
    for writer in writers:
        add(writer, 1, envs=1)  # each asks for itself
        add(writer, 2, envs=1)
    assert (held.asked_at, held.copied_at) == ([1, 3, 3], [])
    add(writers[1], 3, envs=1)
    with pytest.raises(OverflowError):
        add(writers[0], 3, envs=1)
    assert storage._rows.counters[0].tolist() == [3, 4]


def test_what_writers_overwrite_during_a_save_is_in_it(tmp_path, monkeypatch):
    storage = made("ram")
    with storage.writer() as writer:
        for step in range(6):
            add(writer, step)
        write = SnapshotWriter.write

        def write_late(*args):
            for step in range(6, 10):
                add(writer, step)
            write(*args)

        monkeypatch.setattr(SnapshotWriter, "write", write_late)
        storage.save(tmp_path / "saved", background=True).wait()
    assert storage.get_all_buffer_data()["rewards"][:, 0, 0].tolist() == [6, 7, 8, 9]
    loaded = ReplayStorage.load(tmp_path / "saved")
    assert loaded.get_all_buffer_data()["rewards"][:, 0, 0].tolist() == [2, 3, 4, 5]
