"""Bugs of replay with writers that were found by reading, each with the shortest program that shows it."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlstore import (
    InvalidInputError,
    NotReadyError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    RateLimit,
    ReplayStorage,
    SequenceReplayStorage,
    SlotQueue,
    Storage,
    StorageClosedError,
    WaitTimeoutError,
)
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.batches.pipeline import Drawn

OBSERVATIONS = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)
ACTIONS = gym.spaces.Discrete(5)
LIMIT = RateLimit(2, min_size=10)


def put(target: Any, time: int, envs: int = 1, ended: bool = False) -> None:
    """Add one step of each environment; observations and rewards are its number, ``1e6 * env + time``."""
    ids = torch.arange(envs) * 1e6 + time
    seen = ids.unsqueeze(1).expand(envs, 3).contiguous()
    flags = torch.zeros(envs, dtype=torch.bool)
    target.add(seen, torch.zeros(envs, dtype=torch.int64), ids, flags | ended, flags, {}, seen + 1)


@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.parametrize("behind", [13, 20, 33, 59])
def test_only_windows_have_priorities_when_a_writer_ran_ahead(memory: str, behind: int) -> None:
    storage = SequenceReplayStorage(
        OBSERVATIONS, ACTIONS, "cpu", 20, 1, 8, sequence_length=4, alpha=1.0, memory=memory, autoreset="Disabled"
    )
    writer = storage.writer()
    for time in range(4 * behind):
        put(writer, time)
        if time % behind == behind - 1:
            batch = storage.sample()
            assert bool((batch.rows % 4 == 0).all())
            storage.update(batch.rows, torch.ones(8))  # refused if no window begins at one of them
    writer.close()


def test_a_lane_that_has_a_new_writer_is_not_taken_from_it() -> None:
    """Two processes find a writer dead; the slower one must not take lanes that the other has given to a new writer."""
    control = LaneControl(2, shared=False)
    dead, new = control.peers.join("writer", "dead"), control.peers.join("writer", "new")
    control.claim(range(2), dead, lambda lane: None)

    def overtaken(lane: int) -> None:
        if lane == 0:  # meanwhile the other process does all of it
            control.reclaim(dead, lambda lane: None)
            control.claim(range(1, 2), new, lambda lane: None)

    control.reclaim(dead, overtaken)
    control.enter(1, new, 1.0)
    control.leave(1)


@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayStorage, SequenceReplayStorage])
def test_a_storage_made_in_inference_mode_can_be_emptied_outside(kind: Any, memory: str) -> None:
    more = {"sequence_length": 2, "alpha": 0.5} if kind is SequenceReplayStorage else {}
    with torch.inference_mode():
        storage = kind(OBSERVATIONS, ACTIONS, "cpu", 20, 1, 4, memory=memory, **more)
        put(storage, 0)
    storage.reset()
    for time in range(60):
        put(storage, time)
    assert bool((storage.sample().observations >= 40).all())


def test_a_writer_of_this_process_does_not_write_what_is_being_prepared() -> None:
    storage = NStepReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 16, 1, 64, num_workers=2, n_step=1)
    for time in range(16):
        put(storage, time)
    storage.sample()  # others are prepared behind it
    writer = storage.writer()
    for time in range(16, 200):
        put(writer, time)
        if time % 10 == 0:
            batch = storage.sample()
            assert torch.equal(batch.observations[:, :1], batch.rewards)
            assert bool((batch.rewards > time - 16).all())
    writer.close()
    storage.close()


def test_a_writer_in_a_thread_waits_while_a_batch_is_read() -> None:
    storage = ReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 16, 1, 256, memory="ram")
    writer, done = storage.writer(), threading.Event()
    for time in range(16):
        put(writer, time)

    def act() -> None:
        for time in range(16, 3000):
            put(writer, time)
        done.set()

    thread = threading.Thread(target=act)
    thread.start()
    while not done.is_set():
        batch = storage.sample()  # was: IndexError, a row is not held
        assert torch.equal(batch.observations, batch.rewards.expand(256, 3))
    thread.join()


# ---------------------------------------------------------------------------------------------------- the rate limit


def limited(memory: str = "ram", limit: RateLimit | None = LIMIT, **more: Any) -> ReplayStorage:
    storage = ReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 100, 1, 4, memory=memory, timeout=0.2, **more)
    storage.set_rate_limit(limit)
    return storage


def counts(storage: ReplayStorage) -> tuple[int, int]:
    assert storage._sharing is not None
    return storage._sharing.control.limiter.inserted, storage._sharing.control.limiter.sampled


def test_a_sample_that_fails_is_not_counted() -> None:
    storage = SequenceReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 100, 1, 4, sequence_length=8, rate_limit=RateLimit(4))
    put(storage, 0)
    with pytest.raises(NotReadyError):
        storage.sample()
    assert storage._sharing is not None
    assert storage._sharing.control.limiter.sampled == 0


def test_reset_steps_are_not_counted() -> None:
    storage = limited(autoreset="NextStep")
    put(storage, 0)
    put(storage, 1, ended=True)
    put(storage, 2)  # the reset step
    assert counts(storage) == (len(storage), 0) == (2, 0)
    writer = storage.writer()
    put(writer, 3, ended=True)
    put(writer, 4)
    assert counts(storage) == (len(storage), 0) == (3, 0)


def test_a_refused_insert_is_not_counted() -> None:
    storage = limited()
    for make in (lambda: storage, storage.writer):
        with pytest.raises(InvalidInputError, match="observations is"):
            make().add(torch.zeros(1, 7), 0, 0.0, False, False, {}, torch.zeros(1, 3))
    assert counts(storage) == (0, 0)


def test_a_copy_goes_on_with_the_limit_and_its_counts() -> None:
    storage = limited()
    for time in range(12):
        put(storage, time)
    storage.sample()
    copied = copy.deepcopy(storage)
    assert copied.rate_limit == storage.rate_limit
    assert counts(copied) == (12, 4)
    copied.sample()
    assert (counts(copied), counts(storage)) == ((12, 8), (12, 4))
    storage.set_rate_limit(None)
    assert copy.deepcopy(storage).rate_limit is None


def test_an_emptied_storage_waits_for_min_size_again() -> None:
    storage = limited()
    for time in range(12):
        put(storage, time)
    storage.sample()
    storage.reset()
    put(storage, 0)
    assert counts(storage) == (1, 0)
    with pytest.raises(WaitTimeoutError):
        storage.sample()


def test_a_limit_that_is_set_late_holds_from_then_on() -> None:
    storage = limited(limit=None)
    for time in range(90):
        put(storage, time)
    storage.set_rate_limit(RateLimit(2, min_size=10))
    put(storage, 90)  # was: nothing could be added before 160 were sampled
    storage.sample()


def test_inserted_data_count_and_hold_nobody_back() -> None:
    source, storage = limited(limit=None), limited()
    for time in range(50):
        put(source, time)
    storage.insert_data_slice(source.get_all_buffer_data())
    storage.sample()
    put(storage, 50)


def test_batches_prepared_ahead_fit_into_the_tolerance() -> None:
    storage = NStepReplayStorage(
        OBSERVATIONS, ACTIONS, "cpu", 100, 1, 8, num_workers=4, rate_limit=RateLimit(1, min_size=10), timeout=0.2
    )
    for time in range(10):
        put(storage, time)
    storage.sample()
    storage.close()


def test_the_first_row_is_waited_for_after_it_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = limited("shared", RateLimit(4, min_size=1))
    writer, limiter = storage.writer(), storage._sharing.control.limiter
    limiter.count_inserts(1)  # what add() does first, in another process

    def awaited(seconds: float) -> None:
        limiter.count_inserts(-1)
        put(writer, 7)

    monkeypatch.setattr(limiter, "await_insert", awaited)
    assert storage.sample().rewards.tolist() == [[7.0]] * 4
    assert counts(storage) == (1, 4)


def test_data_are_not_inserted_beside_writers() -> None:
    storage = limited("shared", None)
    with storage.writer() as writer:
        put(writer, 0)
        data = storage.get_all_buffer_data()
        with pytest.raises(InvalidInputError, match="added by its writers"):
            storage.insert_data_slice(data)
        assert len(storage) == 1
    storage.insert_data_slice(data)
    assert len(storage) == 2


# ---------------------------------------------------------------------------------------------------- the rest


def test_a_closed_writer_stays_closed_elsewhere() -> None:
    writer = limited("shared", None).writer()
    writer.close()
    with pytest.raises(StorageClosedError):
        put(pickle.loads(pickle.dumps(writer)), 0)


def test_saved_while_a_batch_ahead_was_overwritten(tmp_path: Path) -> None:
    storage = NStepReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 16, 1, 8, num_workers=2, memory="shared")
    for time in range(16):
        put(storage, time)
    storage.sample()
    assert storage._pipeline.prefetch is not None
    storage._pipeline.prefetch.put(Drawn(torch.zeros(8, dtype=torch.int64)), 0, None)  # as a gather that a writer overtook
    storage.save(tmp_path / "saved")
    resumed = Storage.load(tmp_path / "saved")
    assert len(resumed) == 16
    resumed.sample()
    resumed.close()
    storage.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda storage: storage.writer("all"), "lanes are 'all'"),
        (lambda storage: storage.writer(0.5), "lanes are 0.5"),
        (lambda storage: storage.writer([0]), r"lanes are \[0\]"),
        (lambda storage: storage.writer(name=5), "name is 5"),
        (lambda storage: RateLimit("4"), "samples_per_insert is '4'"),  # type: ignore[arg-type]
        (lambda storage: RateLimit(4, min_size=None), "min_size is None"),  # type: ignore[arg-type]
        (lambda storage: RateLimit(4, tolerance="x"), "tolerance is 'x'"),  # type: ignore[arg-type]
        (lambda storage: SlotQueue(2).put("a"), "'a' is no slot"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        make(limited("shared", None))


def test_handles_that_are_given_away_and_let_go_of_are_for_different_lanes() -> None:
    """As ``Process(target=act, args=(storage.writer(1),)).start()`` in a loop does: it drops its arguments."""
    storage = ReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 100, 2, 4, memory="shared")
    given = [pickle.dumps(storage.writer(1)) for _ in range(2)]
    first, second = (pickle.loads(handle) for handle in given)
    assert (first.lanes, second.lanes) == (range(1), range(1, 2))
    put(second, 5)
    put(first, 3)
    assert storage.sample().rewards.unique().tolist() in ([3.0], [5.0], [3.0, 5.0])
    first.close()
    assert storage.writer(1).lanes == range(1)  # closed: free at once
    put(second, 6)
    second.close()


def test_lanes_that_were_given_to_nobody_in_the_end_can_be_had_again() -> None:
    storage = ReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 100, 1, 4, memory="shared")
    given = pickle.dumps(storage.writer())
    put(storage, 0)  # nobody writes yet
    with storage.writer() as writer:
        put(writer, 1)
        with pytest.raises(InvalidInputError, match="lanes are taken"):
            put(pickle.loads(given), 20)
    put(pickle.loads(given), 30)
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == [0.0, 1.0, 30.0]
