"""The rate limit: neither side ever passes its bound, and neither waits without need."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstore import RateLimit
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes.limiter import Limiter
from rlstore.errors import InvalidInputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
DEADLINE = 60.0


def make_limiter(limit=None, *, shared=False):
    shape = Limiter.shape()
    segment = SharedMemory.create(SharedMemory.bytes_of([shape])) if shared else None
    limiter = Limiter(torch.zeros(shape[0], dtype=shape[1]) if segment is None else segment.carve(*shape))
    if limit is not None:
        limiter.set(limit)
    return limiter


def ahead(limit, inserted, sampled):
    """How far the inserts are ahead of the samples, from where they are to be."""
    return (inserted - limit.min_size) * limit.samples_per_insert - sampled


# ------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"samples_per_insert": 0}, "samples_per_insert is 0; RateLimit needs a number above 0"),
        ({"samples_per_insert": -1.0}, "samples_per_insert"),
        ({"samples_per_insert": float("nan")}, "samples_per_insert is nan"),
        ({"samples_per_insert": float("inf")}, "samples_per_insert is inf"),
        ({"samples_per_insert": "8"}, "samples_per_insert is '8'"),
        ({"samples_per_insert": True}, "samples_per_insert is True"),
        ({"samples_per_insert": 1.0, "min_size": 0}, "min_size is 0; RateLimit needs a whole number of at least 1"),
        ({"samples_per_insert": 1.0, "min_size": 1.5}, "min_size is 1.5"),
        ({"samples_per_insert": 1.0, "min_size": None}, "min_size is None"),
        ({"samples_per_insert": 1.0, "min_size": float("nan")}, "min_size is nan"),
        ({"samples_per_insert": 1.0, "min_size": True}, "min_size is True"),
        ({"samples_per_insert": 1.0, "tolerance": 0.0}, "tolerance is 0.0"),
        ({"samples_per_insert": 1.0, "tolerance": float("inf")}, "tolerance is inf"),
        ({"samples_per_insert": 1.0, "tolerance": "1"}, "tolerance is '1'"),
    ],
)
def test_what_is_no_limit_is_refused(arguments, told):
    with pytest.raises(InvalidInputError, match=told):
        RateLimit(**arguments)


def test_a_minimum_size_alone_lets_samples_wait_and_nothing_else():
    limit = RateLimit(min_size=10)
    assert limit.resolved(inserts=99, samples=99) == limit
    limiter = make_limiter(limit)
    assert limiter.limit == limit
    assert limiter.insert(9, 0.0)
    assert not limiter.sample(1, 0.0)
    assert limiter.insert(1, 0.0)
    assert limiter.sample(1_000_000, 0.0)
    assert limiter.insert(1_000_000, 0.0)
    assert (limiter.inserted, limiter.sampled) == (1_000_010, 1_000_000)
    with pytest.raises(InvalidInputError, match="no samples_per_insert that it could be for"):
        RateLimit(min_size=10, tolerance=5.0)


def test_a_tolerance_that_is_not_given_is_twice_what_a_call_needs():
    assert RateLimit(8.0).resolved(inserts=4, samples=24) == RateLimit(8.0, 1, 64.0)
    assert RateLimit(2.0).resolved(inserts=4, samples=24) == RateLimit(2.0, 1, 48.0)
    assert RateLimit(2.0, 5, 24.0).resolved(inserts=12, samples=24) == RateLimit(2.0, 5, 24.0)
    with pytest.raises(InvalidInputError, match="not known yet"):
        RateLimit(2.0).allows_sample(10, 0, 1)


@pytest.mark.parametrize(("inserts", "samples"), [(13, 24), (12, 25)])
def test_a_tolerance_that_could_make_both_sides_wait_is_refused(inserts, samples):
    with pytest.raises(InvalidInputError, match=r"tolerance is 24.* or both sides could wait for each other"):
        RateLimit(2.0, 5, 24.0).resolved(inserts=inserts, samples=samples)


ratios = st.one_of(st.floats(0.01, 100.0), st.integers(1, 64).map(float))


@given(ratios, st.integers(1, 50), st.integers(1, 8), st.integers(1, 64), st.data())
def test_one_side_can_always_go_ahead(ratio, min_size, inserts, samples, data):
    """With the smallest tolerance that is taken: whatever happened before, somebody may go on."""
    limit = RateLimit(ratio, min_size, max(inserts * ratio, float(samples)) * (1 + 1e-9)).resolved(inserts, samples)
    inserted = sampled = 0
    for first in data.draw(st.lists(st.booleans(), max_size=40)):
        may = limit.allows_insert(inserted, sampled, inserts), limit.allows_sample(inserted, sampled, samples)
        assert any(may)
        if may[0] and (first or not may[1]):
            inserted += inserts
        else:
            sampled += samples
        assert sampled == 0 or ahead(limit, inserted, sampled) >= -limit.tolerance * (1 + 1e-9)
        assert inserted <= min_size or ahead(limit, inserted, sampled) <= limit.tolerance * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------- at work


@given(
    ratios,
    st.integers(1, 20),
    st.floats(0.5, 200.0),
    st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_what_goes_ahead_is_what_the_rule_says(ratio, min_size, tolerance, calls):
    limit = RateLimit(ratio, min_size, tolerance)
    limiter, counts = make_limiter(limit), [0, 0]
    assert limiter.limit == limit
    for is_sample, count in calls:
        allowed = (limit.allows_sample if is_sample else limit.allows_insert)(*counts, count)
        assert (limiter.sample if is_sample else limiter.insert)(count, 0.0) is allowed
        counts[is_sample] += count * allowed
        assert [limiter.inserted, limiter.sampled] == counts


def test_without_a_limit_everything_goes_ahead_and_is_counted():
    limiter = make_limiter()
    assert limiter.limit is None
    assert limiter.sample(1000, 0.0)
    assert limiter.insert(3, 0.0)
    assert (limiter.inserted, limiter.sampled) == (3, 1000)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
def test_a_wait_ends_and_has_counted_nothing(seconds):
    limiter, looks = make_limiter(RateLimit(1.0, 10, 5.0)), []
    assert not limiter.sample(1, seconds, lambda: looks.append(1))
    assert (limiter.inserted, limiter.sampled) == (0, 0)
    assert looks


def test_a_look_may_end_a_wait():
    def stop():
        raise ConnectionError("gone")

    limiter = make_limiter(RateLimit(1.0, 10, 5.0))
    with pytest.raises(ConnectionError, match="gone"):
        limiter.sample(1, DEADLINE, stop)
    assert limiter.sampled == 0


@pytest.mark.parametrize("count", [-1, 1 << 53])
def test_a_count_that_cannot_be_is_refused(count):
    limiter = make_limiter()
    with pytest.raises(ValueError, match="a count that cannot be"):
        limiter.insert(count, 0.0)
    assert limiter.inserted == 0


def test_inserts_that_did_not_happen_are_taken_back():
    limiter = make_limiter(RateLimit(1.0, 4, 4.0))
    assert limiter.insert(8, 0.0)
    assert not limiter.insert(3, 0.0)
    limiter.count_inserts(-3)
    assert limiter.inserted == 5
    assert limiter.insert(3, 0.0)


def test_counts_that_were_saved_are_gone_on_from():
    limiter = make_limiter(RateLimit(2.0, 4, 4.0))
    limiter.set_counts(100, 192)
    assert (limiter.inserted, limiter.sampled) == (100, 192)
    assert limiter.sample(4, 0.0)
    assert not limiter.sample(1, 0.0)
    assert limiter.insert(4, 0.0)
    assert not limiter.insert(1, 0.0)


@pytest.mark.parametrize("change", ["limit", "no limit", "counts"])
def test_who_waits_goes_on_when_the_limit_is_changed(change):
    limiter, waiting, went = make_limiter(RateLimit(1.0, 10, 5.0)), threading.Event(), []
    thread = threading.Thread(target=lambda: went.append(limiter.sample(4, DEADLINE, waiting.set)))
    thread.start()
    assert waiting.wait(DEADLINE)
    if change == "counts":
        limiter.set_counts(10, 0)
    else:
        limiter.set(None if change == "no limit" else RateLimit(1.0, 1, 50.0))
        if change == "limit":
            assert limiter.insert(1, 0.0)
    thread.join(DEADLINE)
    assert went == [True]
    assert limiter.sampled == 4


def take_part(limiter, side, counts, total, gate):
    """Count ``total`` on one side, in calls of these sizes."""
    done, turn = 0, 0
    gate.wait(DEADLINE)
    while done < total:
        count = min(counts[turn % len(counts)], total - done)
        assert (limiter.insert if side == "insert" else limiter.sample)(count, DEADLINE)
        done, turn = done + count, turn + 1


@pytest.mark.parametrize("make", [threading.Thread, FORK.Process], ids=["threads", "processes"])
def test_two_on_each_side_never_pass_the_bounds_and_all_come_to_their_end(make):
    """At any moment: an observer sees the counts between the bounds, however it reads them."""
    limit = RateLimit(4.0, 10, 40.0)
    limiter = make_limiter(limit, shared=True)
    inserts, samples, barrier = 600, 4 * 600 - 40, FORK.Barrier(4) if make is FORK.Process else threading.Barrier(4)
    workers = [
        make(target=take_part, args=(limiter, side, counts, total // 2, barrier))
        for side, counts, total in (("insert", (1, 3, 10), inserts), ("sample", (8, 1, 32), samples))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    while limiter.inserted < inserts or limiter.sampled < samples:
        # Inserts only grow: read before the samples, they are at most what they are then; and the other way round.
        inserted, sampled = limiter.inserted, limiter.sampled
        assert inserted <= 10 or ahead(limit, inserted, sampled) <= 40
        sampled, inserted = limiter.sampled, limiter.inserted
        assert sampled == 0 or ahead(limit, inserted, sampled) >= -40
        for worker in workers:
            worker.join(0.001)
        assert make is threading.Thread or not any(worker.exitcode for worker in workers)
    for worker in workers:
        worker.join(DEADLINE)
    assert (limiter.inserted, limiter.sampled) == (inserts, samples)


def test_a_forked_process_counts_in_the_same_memory():
    limiter = make_limiter(shared=True)
    process = FORK.Process(target=limiter.insert, args=(7, 0.0))
    process.start()
    process.join(DEADLINE)
    assert limiter.inserted == 7
