"""What every storage does with a journal: what was committed is loaded, and goes on as if nothing had happened."""

from __future__ import annotations

import copy

import pytest
import test_distributed_trainer as distributed
import torch
from replay_cases import ENVS, STEPS, check_batch
from replay_cases import collect as collect_replay
from rollout_model import collect, make, same_data
from storages import Actor
from test_saved import same_batches, same_storage

from rlstore import HindsightReplayStorage, Journal, Storage

NEVER = 1e6  # seconds


@pytest.fixture
def journal(tmp_path):
    """One that commits when it is told to, and survives all but a power failure."""
    return Journal(tmp_path / "journal", NEVER, fsync=False)


def load(journal, storage, goes_on=False):
    loaded = Storage.load(journal.path, journal=journal if goes_on else None)
    if isinstance(storage, HindsightReplayStorage):
        loaded.compute_reward = storage.compute_reward
    return loaded


def test_a_rollout_is_loaded_as_it_was_committed(case, journal):
    storage, model = make(case, journal=journal)
    model.check_data(load(journal, storage).get_all_buffer_data())  # there is a commit from the beginning
    for first in (0, 10):
        for steps in (3, 1):
            collect(case, storage, model, first=first, steps=steps)
            storage.journal.commit()
            committed = copy.deepcopy(storage)
            first += steps
        storage.before_gradients(Actor(), None)
        if case.computes_targets:
            model.compute()
        loaded = load(journal, storage)  # without the targets, which came after the commit
        same_storage(loaded, committed)
        storage.journal.commit()
        loaded = load(journal, storage)
        model.check_data(loaded.get_all_buffer_data())
        same_storage(loaded, storage)
        same_batches(loaded, storage)
        storage.after_gradients(None, None, {})
        model.spent = True
    storage.journal.close()


def play(replay, storage, first, steps):
    """Steps; and batches, by which priorities change."""
    for step in range(first, first + steps):
        collect_replay(replay, storage, first=step, steps=1)
        batch = next(storage.generate_batches(1, 4))
        storage.after_gradients({"rows": batch["rows"]}, {"priorities": 0.5 + batch["rows"] % 7})


def same_replay(one, other, replay, newest):
    """The same rows, weights and priorities in the same batches, all as they were inserted."""
    same_data(one.get_all_buffer_data(), other.get_all_buffer_data())
    assert one.draw_total == other.draw_total
    held = range(max(0, newest - STEPS), newest)
    for first, second in zip(one.generate_batches(3, 5), other.generate_batches(3, 5), strict=True):
        check_batch(replay, first, 5, held)
        same_data(*({name: value for name, value in batch.items() if value is not None} for batch in (first, second)))


def test_a_replay_storage_is_loaded_as_it_was_committed(replay, journal):
    """Also when the ring has wrapped several times, and the commit of an hour ago is the last one."""
    storage, twin = replay.make(journal=journal), replay.make()
    assert len(load(journal, storage)) == 0
    newest = 0
    for steps in (1, 4, 17):
        for one in (storage, twin):
            play(replay, one, newest, steps)
        newest += steps
        storage.journal.commit()
        before = copy.deepcopy(twin)
        play(replay, storage, newest, 2)  # which is not committed
        loaded = load(journal, storage)
        same_replay(loaded, before, replay, newest)
        for one in (loaded, before):  # it goes on like one that was never saved
            play(replay, one, newest, 3)
        same_replay(loaded, before, replay, newest + 3)
        play(replay, twin, newest, 2)
        newest += 2
    storage.close()
    same_replay(load(journal, storage), twin, replay, newest)


def test_a_journal_goes_on_in_its_folder(replay, journal):
    twin = replay.make()
    storage = replay.make(journal=journal)
    for first in (0, 4, 8):
        for one in (storage, twin):
            play(replay, one, first, 4)
        storage.close()
        storage = load(journal, storage, goes_on=True)
    assert len(storage) == STEPS * ENVS
    same_replay(storage, twin, replay, 12)
    storage.close()


def test_a_distributed_storage_is_loaded_as_it_was_committed(journal):
    storage = distributed.make(journal=journal)
    assert load(journal, storage).get_all_buffer_data() == {}
    distributed.collect(storage, steps=distributed.STEPS + 1)
    storage.journal.commit()
    loaded = load(journal, storage)
    assert distributed.check_columns(loaded.get_all_buffer_data()) == distributed.rollouts()
    distributed.collect(storage, loaded, first=distributed.STEPS + 1, steps=distributed.STEPS - 1)
    same_data(storage.get_all_buffer_data(), loaded.get_all_buffer_data())
    for one, other in zip(storage.generate_batches(3, 2), loaded.generate_batches(3, 2), strict=True):
        same_data(one, other)
    storage.close()
    with_end = load(journal, storage, goes_on=True)
    everything = [*distributed.rollouts(), *distributed.rollouts(distributed.STEPS)]
    assert distributed.check_columns(with_end.get_all_buffer_data()) == everything
    with_end.close()


def test_an_idle_replay_storage_writes_nothing(replay, journal):
    storage = replay.make(journal=journal)
    collect_replay(replay, storage)
    storage.journal.commit()
    before = seen(journal.path)
    len(storage), storage.get_all_buffer_data(), storage.draw_total
    storage.journal.commit()
    assert seen(journal.path) == before
    next(storage.generate_batches(1, 4))  # the generator has moved
    storage.journal.commit()
    assert seen(journal.path) != before
    storage.close()


def seen(folder):
    return {path.name: (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_what_the_user_wrote_into_a_rollout_is_a_change(case, journal):
    storage, _ = make(case, journal=journal)
    collect(case, storage)
    storage.journal.commit()
    before = seen(journal.path)
    storage.journal.commit()
    assert seen(journal.path) == before
    storage.rewards[1, 2] = 77.0
    storage.journal.commit()
    assert load(journal, storage).rewards[1, 2] == 77.0
    storage.insert_data_slice(storage.get_all_buffer_data())  # by which all tensors become other ones
    storage.rewards[1, 2] = torch.tensor(78.0)
    storage.journal.commit()
    assert load(journal, storage).rewards[1, 2] == 78.0
    storage.journal.close()
