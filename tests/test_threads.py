"""Threads that use one storage at once, without a lock of their own: no crash, no wrong row, nobody is kept out."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from gymnasium import spaces
from thread_worlds import KINDS, REPLAY_KINDS, SCENARIOS, ReplayWorld, run

from rlstore import (
    DistributedStorage,
    InvalidInputError,
    NotReadyError,
    RateLimit,
    ReplayStorage,
    StorageClosedError,
    WaitTimeoutError,
)
from rlstore.engine.guard import _after_fork, _before_fork, new_guard

pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages of .* are NaN")
TURNS = 5  # of each thread
# Every scenario with some kinds, every kind with some scenarios; tests/torture has all, and more turns.
PAIRS = [(kind, name) for i, kind in enumerate(KINDS) for j, name in enumerate(SCENARIOS) if (i + j) % 3 == 0]
OTHER_MEMORY = [(kind, name) for i, kind in enumerate(REPLAY_KINDS) for j, name in enumerate(SCENARIOS) if j % 6 == i]


def in_threads(*functions):
    """Run functions at once, and raise the first error."""
    errors = []

    def call(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("kind", "scenario"), PAIRS)
def test_no_row_is_wrong(kind, scenario, tmp_path):
    run(kind, scenario, tmp_path, TURNS)


@pytest.mark.parametrize("memory", ["shared", "mapped"])
@pytest.mark.parametrize(("kind", "scenario"), OTHER_MEMORY)
def test_no_row_is_wrong_in_other_memory(kind, scenario, memory, tmp_path):
    run(kind, scenario, tmp_path, TURNS, memory)


def test_every_step_of_every_thread_is_counted(tmp_path):
    world = ReplayWorld("prioritized", tmp_path, memory="ram")

    def add(lane):
        return lambda: [world.adding(lane)() for _ in range(150)]

    in_threads(*map(add, range(4)))
    assert world.storage._appender.added == 600
    assert len(world.storage) == 600
    assert world.storage.priority_total == 600  # each has the first priority, 1
    data = world.storage.get_all_buffer_data()
    assert data["actions"].tolist() == [[lane * (1 << 21) + t for lane in range(4)] for t in range(150)]


def test_a_batch_that_one_thread_holds_is_not_written_by_another(tmp_path):
    """Memory of outputs is used again only when nobody holds it, whichever thread that is."""
    world = ReplayWorld("replay", tmp_path, memory="ram")
    for _ in range(20):
        for lane in range(4):
            world.adding(lane)()
    held = []

    def hold():
        for _ in range(8):
            batch = world.storage.sample()
            held.append((batch, copy.deepcopy(batch)))

    in_threads(hold, hold, hold)
    for batch, as_drawn in held:
        assert all(torch.equal(now, then) for now, then in zip(batch, as_drawn, strict=True))
    addresses = [batch.observations.data_ptr() for batch, _ in held]
    assert len(set(addresses)) == len(addresses) == 24


def test_a_thread_that_takes_the_guard_again_and_again_keeps_nobody_out():
    guard, done, turns = new_guard(), threading.Event(), []

    def greedy():
        while not done.is_set():
            with guard:
                sum(range(2000))

    def patient():
        for _ in range(50):
            with guard:
                turns.append("patient")
        done.set()

    in_threads(greedy, patient)  # it would not end
    assert turns.count("patient") == 50


def test_a_guard_is_reentrant_and_of_one_thread():
    guard = new_guard()
    with guard, guard:
        assert guard.is_taken
        with pytest.raises(RuntimeError, match="thread that holds it"):
            in_threads(lambda: guard.__exit__(None, None, None))
        depth = guard.leave()
        assert (depth, guard.is_taken) == (2, False)
        guard.enter(depth)
    assert not guard.is_taken
    with pytest.raises(RuntimeError, match="thread that holds it"):
        guard.leave()


@contextmanager
def taken_until(end, guard, interrupt):
    """Another thread has the guard until ``end`` is set; a signal, handled by ``interrupt``, comes soon."""
    taken = threading.Event()

    def hold():
        with guard:
            taken.set()
            end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        end.set()
        holder.join()


def test_a_wait_for_the_guard_can_be_interrupted():
    guard = new_guard()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    with taken_until(threading.Event(), guard, interrupt), pytest.raises(KeyboardInterrupt), guard:
        pass
    with guard:  # nothing is left of the wait that was given up
        pass
    assert not guard.is_taken


def test_a_copy_has_a_guard_of_its_own(tmp_path):
    storage = ReplayWorld("replay", tmp_path, memory="ram").storage
    for twin in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert twin._guard is not storage._guard
        assert twin._appender._guard is twin._guard
        with storage._guard:
            in_threads(lambda twin=twin: len(twin.sample().rewards) if len(twin) else twin.reset())


def test_a_thread_that_adds_while_another_closes_gets_an_error(tmp_path):
    world = ReplayWorld("replay", tmp_path, memory="mapped")
    add, added = world.adding(0), threading.Event()

    def add_on():
        while True:
            add()
            added.set()

    def until_closed():
        with pytest.raises(NotReadyError, match="closed"):
            add_on()

    def close():
        added.wait()
        world.storage.close()

    in_threads(until_closed, close)
    reopened = ReplayWorld("replay", tmp_path, memory="mapped")
    assert len(reopened.storage) == min(world.times[0], 200)
    reopened._check_data(reopened.storage.get_all_buffer_data())


def test_a_value_whose_conversion_adds_to_the_same_storage_does_not_mix_the_two():
    storage = ReplayStorage(spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(9), storage_size=8)

    class Rewards:
        """Reading it adds another step first."""

        def __array__(self, dtype=None, copy=None):
            storage.add(np.zeros(2, np.float32), 1, 1.0, True, False, {}, np.ones(2, np.float32))
            return np.array([2.0], np.float32)

    storage.add(np.full(2, 3, np.float32), 2, Rewards(), True, False, {}, np.full(2, 4, np.float32))
    data = storage.get_all_buffer_data()
    assert data["actions"].flatten().tolist() == [1, 2]
    assert data["rewards"].flatten().tolist() == [1.0, 2.0]


def test_a_storage_that_waits_for_its_rate_limit_is_not_added_to_once_it_has_writers(monkeypatch):
    storage = ReplayStorage(
        spaces.Box(-9, 9, (2,), np.float32),
        spaces.Discrete(9),
        storage_size=8,
        batch_size=1,
        rate_limit=RateLimit(1.0, min_size=1, tolerance=4.0),
    )
    step, writers = (np.zeros(2, np.float32), 1, 1.0, True, False, {}, np.ones(2, np.float32)), []
    storage.add(*step)
    limiter = storage._sharing.control.limiter
    insert = limiter.insert

    def wait(count, seconds):
        in_threads(lambda: writers.append(storage.writer()))  # another thread is not kept out by the wait
        return insert(count, seconds)

    monkeypatch.setattr(limiter, "insert", wait)
    with pytest.raises(InvalidInputError, match="added by its writers"):
        storage.add(*step)
    assert limiter.inserted == len(storage) == 1


def test_a_fork_does_not_wait_for_a_learner_that_waits():
    storage = DistributedStorage(
        spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(4), num_steps=2, num_storages=4, batch_size=2
    )
    learner = storage.learner(prefetch=1, timeout=0.05)
    with pytest.raises(WaitTimeoutError):
        next(learner)
    child = os.fork()
    if not child:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    learner.close()
    storage.close()


def test_an_insert_that_waits_for_a_slot_holds_nobody_up(monkeypatch):
    """Another thread closes the storage meanwhile."""
    storage = DistributedStorage.create_factory(1, num_storages=1, batch_size=1)("cpu")
    ones = torch.ones(1)
    sample = {
        "observations": torch.ones(1, 3),
        "next_observations": torch.ones(1, 3),
        "actions": ones.long(),
        "rewards": ones,
        "terminated": ones,
        "truncated": ones,
    }
    storage.insert_transition(sample)
    learner = storage.learner(prefetch=0)
    assert len(next(learner).versions) == 1
    storage.insert_transition(sample)  # the only slot
    inserter = storage._slots._inserter
    reserve = inserter.reserve

    def wait():
        in_threads(storage.close)
        return reserve()

    monkeypatch.setattr(inserter, "reserve", wait)
    with pytest.raises(StorageClosedError):
        storage.insert_transition(sample)


def test_a_signal_during_a_fork_leaves_no_guard_taken():
    guard, end = new_guard(), threading.Event()

    def interrupt(number, frame):
        end.set()
        raise KeyboardInterrupt

    with taken_until(end, guard, interrupt), pytest.raises(KeyboardInterrupt):
        _before_fork()  # Python forks nevertheless
    assert guard.is_taken
    _after_fork()
    assert not guard.is_taken
    in_threads(lambda: (_before_fork(), _after_fork()))  # nor is another thread kept from forking


def test_threads_share_one_learner_and_one_actor():
    storage = DistributedStorage(
        spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(4), num_steps=2, num_storages=8, batch_size=2
    )
    actor, learner, seen = storage.actor(), storage.learner(prefetch=0), []

    def act(first):
        for number in range(first, first + 20):
            with actor.rollout(number) as rollout:
                for t in range(3):
                    rollout.write(t, obs=np.full(3, number, np.float32), reward=float(number))

    def learn():
        for _ in range(10):
            batch = next(learner)
            assert bool((batch["obs"] == batch["reward"].unsqueeze(-1)).all())
            assert batch["reward"][0].tolist() == batch.versions.tolist()
            seen.extend(batch.versions.tolist())

    in_threads(lambda: act(0), lambda: act(100), learn, learn)
    assert sorted(seen) == [*range(20), *range(100, 120)]
    storage.close()
