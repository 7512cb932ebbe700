"""A system that starts no more threads: an error of rlstore, or slower, and nothing half-made."""

from __future__ import annotations

import threading

import pytest
import torch
from gymnasium import spaces

from rlstore import DoesNotFitError, ReplayStorage

SPACES = (spaces.Box(-9, 9, (2,)), spaces.Discrete(3))


@pytest.fixture
def no_threads(monkeypatch):
    """Call it, and no thread starts any more."""

    def fail(thread):
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", fail)


def filled(**more):
    storage = ReplayStorage(*SPACES, storage_size=20, num_envs=1, batch_size=4, seed=3, **more)
    for step in range(10):
        now = [step / 2, 0.0]
        storage.add(now, step % 3, float(step), step % 5 == 4, False, {}, [step / 2 + 0.5, 0.0])
    return storage


def test_a_journal_without_a_thread_leaves_its_folder_alone(no_threads, tmp_path, monkeypatch):
    no_threads()
    for _ in range(2):
        with pytest.raises(DoesNotFitError, match="a journal needs a thread, and the system starts no more"):
            filled(journal=tmp_path / "journal")
        assert not (tmp_path / "journal").exists()
    monkeypatch.undo()
    filled(journal=tmp_path / "journal").close()
    assert len(ReplayStorage.load(tmp_path / "journal")) == 10


def test_a_journal_that_cannot_begin_ends_its_thread(tmp_path):
    filled().save(tmp_path / "journal")
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="already holds what a storage has saved"):
        filled(journal=tmp_path / "journal")
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_a_save_in_the_background_without_a_thread(no_threads, tmp_path, monkeypatch):
    storage = filled()
    storage.save(tmp_path / "saved")
    storage.add([5.0, 0.0], 0, 10.0, False, False, {}, [5.5, 0.0])
    no_threads()
    with pytest.raises(DoesNotFitError, match=r"save\(\) needs a thread, and the system starts no more"):
        storage.save(tmp_path / "saved", background=True)
    storage.add([5.5, 0.0], 1, 11.0, False, False, {}, [6.0, 0.0])  # nobody waits for that save
    assert len(ReplayStorage.load(tmp_path / "saved")) == 10
    monkeypatch.undo()
    storage.save(tmp_path / "saved", background=True).wait(60)
    assert len(ReplayStorage.load(tmp_path / "saved")) == 12


def test_batches_are_gathered_without_a_thread_and_are_the_same(no_threads, monkeypatch):
    one, other = filled(num_workers=2), filled(num_workers=2)
    expected = [one.sample().rewards for _ in range(6)]
    no_threads()
    found = [other.sample().rewards for _ in range(3)]
    other_state = len(other)
    monkeypatch.undo()
    found += [other.sample().rewards for _ in range(3)]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert other_state == 10
    for storage in (one, other):  # nothing is left that an add would wait for
        storage.add([5.0, 0.0], 0, 10.0, False, False, {}, [5.5, 0.0])
        storage.close()
