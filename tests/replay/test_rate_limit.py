"""The rate limit of a storage: samples for each insert, held by both sides, saved, changed, and never a deadlock."""

from __future__ import annotations

import copy
import multiprocessing

import pytest
import torch
from combinations import each
from rate_sides import hold_ratio
from shared_kinds import REPLAY, SHARED
from shared_steps import DEADLINE, FIVE, OBSERVATIONS, add_and_wait, join, kill, put, start

from rlstore import (
    InvalidInputError,
    NotReadyError,
    NStepReplayStorage,
    PeerLostError,
    RateLimit,
    ReplayStorage,
    SequenceReplayStorage,
    Storage,
    WaitTimeoutError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the observations of an environment are not:UserWarning"),
]
FORK = multiprocessing.get_context("fork")


def counts(storage):
    limiter = storage._sharing.control.limiter
    return limiter.inserted, limiter.sampled


def test_the_ratio_holds_with_producers_and_consumers_of_changing_speed():
    """The long form is in tests/torture."""
    hold_ratio(lanes=2, steps=400, runs=2, entries=5_000)


def test_with_a_minimum_size_alone_a_sample_waits_for_that_many_rows_and_nothing_else_waits(tmp_path):
    storage = REPLAY.make(batch_size=16, rate_limit=RateLimit(min_size=20), timeout=0.05)
    steps = iter(REPLAY.plan(range(2), 100))
    for _ in range(9):
        storage.add(**next(steps))
    with pytest.raises(WaitTimeoutError, match="18 are added and 0 sampled"):
        storage.sample()
    storage.add(**next(steps))
    for _ in range(50):
        REPLAY.check(storage.sample())
    for step in steps:
        storage.add(**step)
    assert counts(storage) == (200, 50 * 16)
    storage.save(tmp_path / "saved")
    assert ReplayStorage.load(tmp_path / "saved").rate_limit == RateLimit(min_size=20)


@pytest.mark.parametrize("kind", SHARED, ids=repr)
def test_one_thread_that_adds_and_samples_in_turn_never_waits_for_itself(kind):
    """Also with batches prepared ahead, which are not waited for."""
    storage = kind.make(batch_size=16, rate_limit=RateLimit(8.0, min_size=20), timeout=0.5)
    for number, step in enumerate(kind.plan(range(2), 100)):
        storage.add(**step)
        if number >= 10:
            kind.check(storage.sample())
    inserted, sampled = counts(storage)
    assert inserted == 200
    assert 90 * 16 <= sampled <= 92 * 16
    storage.close()


def test_counts_are_those_of_transitions_and_of_entries_of_batches():
    storage = REPLAY.make(rate_limit=RateLimit(1.0, tolerance=1e6))
    step = REPLAY.plan(range(2), 9)[0]
    storage.add(**step)
    storage.add(**step, mask=[True, False])
    assert counts(storage) == (3, 0)
    storage.sample()
    storage.sample(5)
    list(storage.generate_batches(2, 7))
    assert counts(storage) == (3, 64 + 5 + 14)
    for wrong in ({"rewards": [1.0]}, {"mask": [True] * 1000}):
        with pytest.raises(InvalidInputError, match="Nothing was written"):
            storage.add(**{**step, **wrong})
    assert counts(storage)[0] == 3
    storage.close()


# ------------------------------------------------------------------------------------------------- waits


def test_nothing_is_sampled_before_so_many_are_in_and_who_lives_is_named():
    storage = REPLAY.make(rate_limit=RateLimit(1.0, min_size=10), timeout=0.3)
    with storage.writer(1, name="slow") as writer:
        writer.add(**REPLAY.plan([0], 9)[0])
        with pytest.raises(WaitTimeoutError, match=r'for 0.3 seconds: 1 are added and 0 sampled.*"slow"') as late:
            storage.sample()
    assert isinstance(late.value, TimeoutError)
    assert counts(storage) == (1, 0)
    storage.close()


@pytest.mark.parametrize("by", ["writer", "storage"])
def test_inserts_wait_for_samples_and_tell_it(by):
    storage, plan = REPLAY.make(rate_limit=RateLimit(32.0, tolerance=64.0), timeout=0.3), REPLAY.plan(range(2), 9)
    adds = storage.writer() if by == "writer" else storage
    adds.add(**plan[0])
    told = r"let nothing more be added for 0.3 seconds: 2 are added and 0 sampled"
    with pytest.raises(WaitTimeoutError, match=told):
        adds.add(**plan[1])
    assert (len(storage), counts(storage)) == (2, (2, 0))
    storage.sample()
    adds.add(**plan[1])
    assert (len(storage), counts(storage)) == (4, (4, 64))
    storage.close()


def test_a_wait_for_a_writer_that_died_names_it():
    storage = REPLAY.make(lanes=1, memory="shared", rate_limit=RateLimit(1.0, min_size=50), timeout=1.0)
    added = FORK.Event()
    process = start("fork", add_and_wait, storage.writer(name="left"), REPLAY.plan([0], 9), added, FORK.Event())
    assert added.wait(DEADLINE)
    kill(process)
    told = rf'nothing was added for 1.0 seconds, and these writers died: writer "left" \(process {process.pid}\)'
    with pytest.warns(RuntimeWarning, match="died"), pytest.raises(PeerLostError, match=told) as lost:
        storage.sample()
    assert isinstance(lost.value, ConnectionError)
    with pytest.raises(PeerLostError, match=told):  # and again, as long as nobody else writes
        storage.sample()
    storage.close()


def start_waiting(storage):
    """A process that has added three steps of thirty, which is all that the limit allows."""
    plan, added, go_on = REPLAY.plan([0], 30), FORK.Event(), FORK.Event()
    go_on.set()
    process = start("fork", add_and_wait, storage.writer(), plan[:3], added, go_on, plan[3:])
    assert added.wait(DEADLINE)
    return process


@pytest.mark.parametrize("change", [None, RateLimit(0.5)], ids=["no limit", "another limit"])
def test_who_waits_goes_on_when_the_limit_is_changed(change):
    storage = REPLAY.make(lanes=1, memory="shared", rate_limit=RateLimit(32.0, tolerance=64.0))
    process = start_waiting(storage)
    storage.set_rate_limit(change)
    join(process)
    assert counts(storage)[0] == len(storage) == 30
    storage.close()


def test_a_writer_that_waits_is_told_of_the_end():
    storage = REPLAY.make(lanes=1, memory="shared", rate_limit=RateLimit(32.0, tolerance=64.0))
    process = start_waiting(storage)
    storage.close()
    join(process)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("limit", [RateLimit(1.0, tolerance=63.0), RateLimit(33.0, tolerance=65.0)])
def test_a_limit_by_which_both_sides_could_wait_is_refused(limit):
    with pytest.raises(InvalidInputError, match="both sides could wait for each other"):
        REPLAY.make(rate_limit=limit)
    storage = REPLAY.make(rate_limit=RateLimit(2.0))
    with pytest.raises(InvalidInputError, match="both sides could wait for each other"):
        storage.set_rate_limit(limit)
    assert storage.rate_limit == RateLimit(2.0, 1, 128.0)


def test_a_batch_that_is_larger_than_the_tolerance_is_refused():
    storage = REPLAY.make(rate_limit=RateLimit(2.0))
    storage.add(**REPLAY.plan(range(2), 9)[0])
    with pytest.raises(InvalidInputError, match=r"a batch of 129 .* tolerance of 128.0.*Nothing was drawn"):
        storage.sample(129)
    assert counts(storage) == (2, 0)


@pytest.mark.parametrize("limit", [8.0, "8", (8.0, 1, None)])
def test_what_is_no_limit_is_refused(limit):
    with pytest.raises(InvalidInputError, match=r"give a rlstore\.RateLimit"):
        REPLAY.make(rate_limit=limit)
    storage = REPLAY.make()
    for change in (storage.set_rate_limit, lambda value: storage.update_storage_parameter("rate_limit", value)):
        with pytest.raises(InvalidInputError, match=r"give a rlstore\.RateLimit"):
            change(limit)
    assert storage.rate_limit is None


def test_the_limit_is_a_parameter_like_others():
    storage = REPLAY.make()
    assert storage.rate_limit is None
    storage.update_storage_parameter("rate_limit", RateLimit(2.0, 3))
    assert storage.rate_limit == RateLimit(2.0, 3, 128.0)
    storage.update_storage_parameter("rate_limit", None)
    assert storage.rate_limit is None


# ------------------------------------------------------------------------------------------------- saved


def batches_until_a_wait(storage):
    for count in range(100):
        try:
            storage.sample()
        except WaitTimeoutError:
            return count
    return 100


@pytest.mark.parametrize(("kind", "how"), each(SHARED, ["saved", "copied"]), ids=repr)
def test_limit_and_counts_go_on_where_they_were(kind, how, tmp_path):
    """Neither a burst of samples nor a wait for transitions that are there already."""
    storage = kind.make(batch_size=16, rate_limit=RateLimit(8.0, min_size=20), timeout=0.05, num_workers=0)
    plan = kind.plan(range(2), 40)
    for step in plan[:20]:
        storage.add(**step)
        if storage._sharing.control.limiter.inserted >= 20:
            storage.sample()
    storage.set_rate_limit(RateLimit(4.0, 20, 100.0))
    before = counts(storage)
    if how == "saved":
        storage.save(tmp_path / "saved")
        other = Storage.load(tmp_path / "saved")
        if hasattr(storage, "compute_reward"):
            other.compute_reward = storage.compute_reward
    else:
        other = copy.deepcopy(storage)
    assert other.rate_limit == RateLimit(4.0, 20, 100.0)
    assert counts(other) == before
    assert batches_until_a_wait(storage) == batches_until_a_wait(other) < 100
    for either in (storage, other):
        either.close()


# --------------------------------------------------------------------------------------------------- what is counted

LIMIT = RateLimit(2, min_size=10)


def limited(memory="ram", limit=LIMIT, **more):
    storage = ReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, 1, 4, memory=memory, timeout=0.2, **more)
    storage.set_rate_limit(limit)
    return storage


def test_a_sample_that_fails_is_not_counted():
    storage = SequenceReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, 1, 4, sequence_length=8, rate_limit=RateLimit(4))
    put(storage, 0)
    with pytest.raises(NotReadyError):
        storage.sample()
    assert storage._sharing.control.limiter.sampled == 0


def test_reset_steps_are_not_counted():
    storage = limited(autoreset="NextStep")
    put(storage, 0)
    put(storage, 1, ended=True)
    put(storage, 2)  # the reset step
    assert counts(storage) == (len(storage), 0) == (2, 0)
    writer = storage.writer()
    put(writer, 3, ended=True)
    put(writer, 4)
    assert counts(storage) == (len(storage), 0) == (3, 0)


def test_a_refused_insert_is_not_counted():
    storage = limited()
    for make in (lambda: storage, storage.writer):
        with pytest.raises(InvalidInputError, match="observations is"):
            make().add(torch.zeros(1, 7), 0, 0.0, False, False, {}, torch.zeros(1, 3))
    assert counts(storage) == (0, 0)


def test_a_copy_goes_on_with_the_limit_and_its_counts():
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


def test_an_emptied_storage_waits_for_min_size_again():
    storage = limited()
    for time in range(12):
        put(storage, time)
    storage.sample()
    storage.reset()
    put(storage, 0)
    assert counts(storage) == (1, 0)
    with pytest.raises(WaitTimeoutError):
        storage.sample()


def test_a_limit_that_is_set_late_holds_from_then_on():
    storage = limited(limit=None)
    for time in range(90):
        put(storage, time)
    storage.set_rate_limit(RateLimit(2, min_size=10))
    put(storage, 90)  # was: nothing could be added before 160 were sampled
    storage.sample()


def test_inserted_data_count_and_hold_nobody_back():
    source, storage = limited(limit=None), limited()
    for time in range(50):
        put(source, time)
    storage.insert_data_slice(source.get_all_buffer_data())
    storage.sample()
    put(storage, 50)


def test_batches_prepared_ahead_fit_into_the_tolerance():
    storage = NStepReplayStorage(
        OBSERVATIONS, FIVE, "cpu", 100, 1, 8, num_workers=4, rate_limit=RateLimit(1, min_size=10), timeout=0.2
    )
    for time in range(10):
        put(storage, time)
    storage.sample()
    storage.close()


def test_the_first_row_is_waited_for_after_it_was_counted(monkeypatch):
    storage = limited("shared", RateLimit(4, min_size=1))
    writer, limiter = storage.writer(), storage._sharing.control.limiter
    limiter.count_inserts(1)  # what add() does first, in another process

    def awaited(seconds):
        limiter.count_inserts(-1)
        put(writer, 7)

    monkeypatch.setattr(limiter, "await_insert", awaited)
    assert storage.sample().rewards.tolist() == [[7.0]] * 4
    assert counts(storage) == (1, 4)
