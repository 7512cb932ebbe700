"""What has gone wrong elsewhere where several share a replay storage. Each test is named for what broke."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from gymnasium import spaces
from shared_kinds import PRIORITIZED, REPLAY, SEQUENCE, SHARED
from shared_steps import DEADLINE, add_and_wait, join, kill, start, write_plan, writing

from rlstore import DoesNotFitError, PeerLostError, RateLimit, ReplayStorage, Storage, WaitTimeoutError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the observations of an environment are not:UserWarning"),
]
FORK = multiprocessing.get_context("fork")

# ------------------------------------------------------------------------------------- 9: priorities of old rows


@pytest.mark.parametrize("overwritten", [5, 32, 100])
def test_a_priority_is_not_written_to_a_row_that_another_process_has_overwritten(overwritten):
    """Rows have numbers that are never used twice: those of before are dropped and counted."""
    storage = PRIORITIZED.make(lanes=1, memory="shared", batch_size=400, alpha=1.0)
    plan = PRIORITIZED.plan([0], 132)
    writer = storage.writer()
    join(start("fork", add_and_wait, writer, plan[:32], FORK.Event(), _set()))
    rows = storage.sample().rows.unique()
    assert len(rows) == 32
    join(start("fork", add_and_wait, writer, plan[32 : 32 + overwritten], FORK.Event(), _set()))
    storage.update(rows, torch.full((32,), 7.0))
    gone = min(overwritten, 32)
    assert storage.stale_updates == gone
    held = torch.arange(overwritten, overwritten + 32)
    assert storage.priorities(held).tolist() == [7.0] * (32 - gone) + [1.0] * gone
    assert storage.priority_total == 7.0 * (32 - gone) + gone
    storage.close()


def _set():
    event = FORK.Event()
    event.set()
    return event


def test_priorities_that_come_while_others_write_never_reach_a_newer_row():
    storage = PRIORITIZED.make(steps=24, memory="shared", batch_size=64, alpha=1.0)
    with writing(storage, [PRIORITIZED.plan([lane], 300, seed=lane) for lane in range(2)]):
        for _ in range(60):
            batch = storage.sample()
            PRIORITIZED.check(batch)
            storage.update(batch.rows, torch.full((64,), 3.0))
            assert storage.priority_total <= 3.0 * 48 + 1e-6
        assert storage.stale_updates > 0


# ------------------------------------------------------------------------------------- 10: at the same time


@pytest.mark.parametrize("kind", [REPLAY, SEQUENCE, SHARED[-2]], ids=repr)
def test_concurrent_adding_and_sampling_corrupt_nothing(kind):
    """Two processes and a thread of this one add, while this one samples."""
    storage = kind.make(lanes=3, steps=30, memory="shared", batch_size=128)
    plans = [kind.plan([lane], 300, seed=lane) for lane in range(3)]
    with writing(storage, plans[:2]) as processes:
        thread = threading.Thread(target=write_plan, args=(storage.writer(1), plans[2]))
        thread.start()
        for _ in range(40):
            kind.check(storage.sample())
        assert all(process.is_alive() for process in processes)
    thread.join(DEADLINE)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------- 16: counters and the limiter


def test_a_resumed_run_neither_bursts_nor_waits_for_data_that_it_has(tmp_path):
    """A run in which another process adds is saved, and goes on with the counts that it had."""
    limit = RateLimit(4.0, min_size=40, tolerance=200.0)
    storage = REPLAY.make(lanes=1, steps=100, memory="shared", rate_limit=limit, timeout=0.1)
    plan, added = REPLAY.plan([0], 60), FORK.Event()
    process = start("fork", add_and_wait, storage.writer(), plan, added, FORK.Event())
    assert added.wait(DEADLINE)
    storage.sample(120)
    storage.save(tmp_path / "saved")
    kill(process)
    resumed = Storage.load(tmp_path / "saved")
    limiter = resumed._sharing.control.limiter
    assert (len(resumed), limiter.inserted, limiter.sampled, resumed.rate_limit) == (60, 60, 120, limit)
    resumed.sample(160)  # 4 * (60 - 40) + 200 - 120
    with pytest.raises(WaitTimeoutError, match="60 are added and 280 sampled"):
        resumed.sample(1)
    with resumed.writer() as writer:
        writer.add(**plan[0])
    resumed.sample(4)
    resumed.close()
    with pytest.warns(RuntimeWarning, match="died"):
        assert storage.lost_writers == 1
    storage.close()


# ------------------------------------------------------------------------------------- 19: the ratio


def test_the_ratio_that_was_set_is_the_ratio_that_is_got():
    """8 samples for each insert, with an actor that could add a hundred times as much."""
    storage = REPLAY.make(lanes=1, steps=400, memory="shared", batch_size=64, rate_limit=RateLimit(8.0, min_size=64))
    process = start("fork", write_plan, storage.writer(), REPLAY.plan([0], 300))
    limiter = None
    for number in range(80):
        storage.sample()
        limiter = storage._sharing.control.limiter
        assert limiter.sampled == 64 * (number + 1)
        assert (
            limiter.inserted - 64
        ) * 8.0 - limiter.sampled <= 128.0 + 8.0 * 1  # one more may have been counted since
    assert limiter.sampled / (limiter.inserted - 64) == pytest.approx(8.0, rel=0.05)
    storage.close()
    join(process)


# ------------------------------------------------------------------------------------- 20: the dead


def test_a_learner_does_not_wait_for_actors_that_are_dead():
    storage = REPLAY.make(lanes=2, memory="shared", rate_limit=RateLimit(1.0, min_size=64), timeout=0.5)
    added = [FORK.Event() for _ in range(2)]
    plan = REPLAY.plan([0], 9)
    processes = [
        start("fork", add_and_wait, storage.writer(1, name=name), plan, event, FORK.Event())
        for name, event in zip(("left", "right"), added, strict=True)
    ]
    assert all(event.wait(DEADLINE) for event in added)
    for process in processes:
        kill(process)
    with pytest.warns(RuntimeWarning, match="died"), pytest.raises(PeerLostError, match=r'"left".*"right"'):
        storage.sample()
    storage.close()


def test_an_actor_does_not_wait_for_a_learner_that_is_dead():
    ours, theirs = FORK.Pipe()

    def make():
        limit = RateLimit(64.0, tolerance=64.0)
        storage = REPLAY.make(lanes=1, memory="shared", rate_limit=limit, timeout=600.0)
        theirs.send_bytes(pickle.dumps(storage.writer()))
        FORK.Event().wait(DEADLINE)

    learner = FORK.Process(target=make)
    learner.start()
    assert ours.poll(DEADLINE)
    writer, plan = pickle.loads(ours.recv_bytes()), REPLAY.plan([0], 9)
    writer.add(**plan[0])
    writer.add(**plan[1])
    kill(learner)
    with pytest.raises(PeerLostError, match=rf"maker \(process {learner.pid}\) of this storage is gone"):
        writer.add(**plan[2])  # the limit would hold it back for ten minutes


# ------------------------------------------------------------------------------------- 21: shared memory


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_do_not_grow_with_leaves_rows_or_environments():
    wide = spaces.Dict({f"leaf {i}": spaces.Box(-1, 1, (3,), np.float32) for i in range(40)})
    held, used = descriptors(), []
    for space, lanes, steps in ((REPLAY.world.space, 1, 8), (wide, 16, 5000)):
        storage = ReplayStorage(space, spaces.Discrete(2), storage_size=lanes * steps, num_envs=lanes, memory="shared")
        writers = [storage.writer(1) for _ in range(lanes)]
        used.append(descriptors() - held)
        for writer in writers:
            writer.close()
        storage.close()
        del storage, writers, writer
        assert descriptors() == held
    assert used[0] == used[1] <= 6


def test_nothing_is_left_in_shared_memory_after_a_crash():
    ours, theirs = FORK.Pipe()

    def make():
        storage = REPLAY.make(memory="shared")
        storage.add(**REPLAY.plan(range(2), 9)[0])
        theirs.send(1)
        FORK.Event().wait(DEADLINE)

    process = FORK.Process(target=make)
    process.start()
    assert ours.poll(DEADLINE)
    kill(process)
    assert [name for name in os.listdir("/dev/shm") if "rlstore" in name or str(process.pid) in name] == []


def test_a_storage_that_does_not_fit_is_refused_before_anything_is_taken():
    """Not a bus error when the memory is touched."""
    held = descriptors()
    with pytest.raises(DoesNotFitError, match="Nothing was allocated"):
        REPLAY.make(lanes=1, steps=10**12, memory="shared")
    assert descriptors() == held
