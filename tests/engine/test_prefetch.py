"""Batches prepared ahead: what is drawn when, by whom it is prepared, and what becomes of exceptions."""

from __future__ import annotations

import itertools
import pickle
import threading

import pytest

from rlstore.engine.batches.prefetch import Prefetch
from rlstore.engine.guard import new_guard


class OwnError(Exception):
    """The one that the preparation of a batch ends with."""


@pytest.fixture
def make():
    made = []

    def make_ahead(count, max_age, prepare):
        made.append(Prefetch(count, max_age, prepare, new_guard()))
        return made[-1]

    yield make_ahead
    for ahead in made:
        ahead.close()


def numbers():
    """A draw that gives 0, 1, 2, ..."""
    return itertools.count().__next__


def double(number):
    return 2 * number


def test_batches_come_in_the_order_in_which_they_were_drawn(make):
    ahead, draw = make(3, 1000, double), numbers()
    assert [ahead.take(0, draw) for _ in range(6)] == [(i, 2 * i) for i in range(6)]
    assert draw() == 9  # six were taken, and three are ready


def test_a_batch_is_prepared_in_another_thread_before_it_is_asked_for(make):
    """The second batch waits for nobody: the caller sees it prepared, and only then asks for it."""
    second = threading.Event()
    threads = {}

    def prepare(number):
        threads[number] = threading.current_thread()
        if number == 1:
            second.set()
        return number

    ahead, draw = make(1, 1000, prepare), numbers()
    ahead.take(0, draw)
    assert second.wait(timeout=120)
    assert threads[1] is not threading.current_thread()
    assert ahead.take(0, draw) == (1, 1)


def test_the_caller_goes_on_while_a_batch_is_being_prepared(make):
    """take() comes back though the next batch cannot be finished before the caller lets it."""
    allowed = threading.Event()

    def prepare(number):
        if number:
            assert allowed.wait(timeout=120)
        return number

    ahead, draw = make(2, 1000, prepare), numbers()
    assert ahead.take(0, draw) == (0, 0)
    allowed.set()
    assert ahead.take(0, draw) == (1, 1)


def test_settling_waits_for_what_is_being_prepared(make):
    started, allowed, finished = threading.Event(), threading.Event(), []

    def prepare(number):
        if number:
            started.set()
            assert allowed.wait(timeout=120)
        finished.append(number)
        return number

    ahead = make(2, 1000, prepare)
    ahead.take(0, numbers())
    assert started.wait(timeout=120)
    assert finished == [0]
    threading.Timer(0.01, allowed.set).start()
    ahead.settle()
    assert finished == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 3])
def test_an_exception_reaches_the_caller_with_the_batch_it_belongs_to(make, count):
    def prepare(number):
        if number in (1, 2):
            raise OwnError(f"batch {number}")
        return number

    ahead, draw = make(count, 1000, prepare), numbers()
    assert ahead.take(0, draw) == (0, 0)
    for number in (1, 2):
        with pytest.raises(OwnError, match=f"batch {number}"):
            ahead.take(0, draw)
    assert ahead.take(0, draw) == (3, 3)


def test_an_exception_of_a_batch_that_is_thrown_away_is_nobodys(make):
    def prepare(number):
        if number == 1:
            raise OwnError
        return number

    ahead, draw = make(1, 5, prepare), numbers()
    ahead.take(0, draw)
    ahead.settle()
    assert ahead.take(5, draw) == (2, 2)
    ahead.clear()
    assert ahead.take(5, draw) == (4, 4)


@pytest.mark.parametrize(("age", "taken"), [(0, 1), (4, 1), (5, 3), (6, 3)])
def test_a_batch_drawn_max_age_or_more_steps_ago_is_thrown_away(make, age, taken):
    ahead, draw = make(2, 5, double), numbers()
    ahead.take(10, draw)  # 0; 1 and 2 are drawn with it
    assert ahead.take(10 + age, draw) == (taken, 2 * taken)


def test_an_exception_of_the_draw_reaches_the_caller_and_what_is_prepared_stays(make):
    ahead, draw = make(1, 1000, double), numbers()
    ahead.take(0, draw)

    def cannot():
        raise OwnError

    with pytest.raises(OwnError):
        ahead.take(0, cannot)
    assert ahead.take(0, draw) == (1, 2)


def test_a_copy_has_what_was_prepared_and_a_thread_of_its_own(make):
    ahead, draw = make(2, 5, double), numbers()
    ahead.take(3, draw)
    copied = pickle.loads(pickle.dumps(ahead))
    assert copied.prepared() == ahead.prepared() == [(1, 3, 2), (2, 3, 4)]
    later = itertools.count(100).__next__
    assert [copied.take(4, later)[0] for _ in range(3)] == [1, 2, 100]
    assert ahead.take(8, draw)[0] == 3  # those are too old by then
    copied.close()


def test_it_can_be_used_again_after_it_was_closed(make):
    ahead, draw = make(2, 1000, double), numbers()
    ahead.take(0, draw)
    ahead.close()
    ahead.close()
    assert ahead.take(0, draw) == (3, 6)
