"""Actors and learners that die: nobody waits for them for ever, nothing half-written is served, no slot is lost."""

from __future__ import annotations

import os
import re
import time
import warnings

import pytest
from distributed_actors import (
    UNTIL,
    fill,
    learner_of,
    play,
    serving_learner,
    slots,
    stuck_actor,
    until,
    waiting_actor,
)
from distributed_ids import DISCRETE, LSTM, rollouts_in
from distributed_torture import kill_actors, kill_learners

from rlstore import PeerLostError, StorageClosedError, WaitTimeoutError

pytestmark = pytest.mark.timeout(120)
SHORT = 0.05  # seconds of a deadline that is meant to pass


@pytest.fixture
def stuck(start):
    """An actor called "left" that played ``whole`` rollouts, began others and stopped."""

    def begin(storage, *, whole=0, begun=1, rows=3, world=DISCRETE):
        child = start(stuck_actor, world, storage.actor("left"), whole, begun, rows)
        assert child.hear() == "stuck"
        return child

    return begin


# ------------------------------------------------------------------------------------------------- lost actors


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_the_slot_of_a_killed_actor_is_reclaimed_counted_and_named(stuck, reaped):
    storage = LSTM.make(1)
    child = stuck(storage, world=LSTM)
    assert slots(storage) == (0, 1, 0, 0)
    child.kill(reap=reaped)
    with pytest.warns(RuntimeWarning, match=rf'^actor "left" \(process {child.pid}\) died') as told:
        play(LSTM, storage.actor("right"), 8)
    assert len(told) == 1
    batch = next(learner_of(storage))
    assert rollouts_in(LSTM, batch, batch.states) == [8]
    assert slots(storage) == (1, 0, 0, 0)
    report = storage.report()
    assert (report.lost_actors, report.lost_learners, report.reclaimed, report.abandoned) == (1, 0, 1, 0)
    assert (report.committed, report.served) == (1, 1)


@pytest.mark.parametrize("rows", [0, LSTM.steps + 1])
def test_a_rollout_is_served_only_if_it_was_committed(stuck, rows):
    """Also not one that was written to its last row."""
    storage = LSTM.make(4)
    child = stuck(storage, whole=2, begun=2, rows=rows, world=LSTM)
    child.kill()
    batches = learner_of(storage, timeout=SHORT)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for expected in (900, 901):
            batch = next(batches)
            assert rollouts_in(LSTM, batch, batch.states) == [expected]
        with pytest.raises((PeerLostError, WaitTimeoutError)):
            next(batches)
    assert [str(child.pid) in str(one.message) for one in told] == [True]
    assert slots(storage) == (4, 0, 0, 0)
    assert storage.report().lost_actors == 1


def test_the_learner_is_still_served_by_the_actors_that_are_alive(stuck, start):
    storage = DISCRETE.make(4)
    dead = stuck(storage, begun=2)
    start(waiting_actor, DISCRETE, storage.actor("right"))
    dead.kill()
    served, batches = [], learner_of(storage, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # whoever waits first finds the dead
        for _ in range(40):
            served += rollouts_in(DISCRETE, next(batches))
        report = storage.report()
    assert served == list(range(80))
    assert report.lost_actors == 1
    assert report.free + report.writing + report.full + report.reading == 4


def test_there_is_one_warning_of_a_lost_actor(stuck):
    storage = DISCRETE.make(2)
    child = stuck(storage)
    child.kill()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with pytest.raises((PeerLostError, WaitTimeoutError)):
                next(learner_of(storage, timeout=SHORT))
    assert [str(child.pid) in str(one.message) for one in told if one.category is RuntimeWarning] == [True]
    assert storage.report().lost_actors == 1


def test_a_warning_that_is_made_an_error_loses_nothing(stuck):
    storage = DISCRETE.make(2)
    stuck(storage, begun=2).kill()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="left"):
            play(DISCRETE, storage.actor("right"), 1)
    play(DISCRETE, storage.actor("right"), 2)
    assert rollouts_in(DISCRETE, next(learner_of(storage))) == [2]
    report = storage.report()
    assert report.free + report.writing + report.full + report.reading == 2
    assert report.lost_actors == 1


def leaving_actor(pipe, world, actor, number):
    """Plays a rollout, begins another and ends."""
    play(world, actor, number)
    fill(world, actor.reserve(), 7, 2)


def test_actors_that_end_by_themselves_are_not_lost(start):
    storage = DISCRETE.make(3)
    for first in range(2):
        start(leaving_actor, DISCRETE, storage.actor(), first).end()
    assert rollouts_in(DISCRETE, next(learner_of(storage, 2))) == [0, 1]
    report = storage.report()
    assert (report.lost_actors, report.abandoned, report.reclaimed, report.actors) == (0, 2, 0, 0)
    assert slots(storage) == (3, 0, 0, 0)


# ------------------------------------------------------------------------------------------------- lost learners


@pytest.fixture
def holding(start):
    """A learner that has taken rollouts 0 and 1 and waits for a third."""

    def begin(storage, world=DISCRETE):
        actor = storage.actor()
        for number in range(2):
            play(world, actor, number)
        child = start(serving_learner, world, storage, 3, 0)
        until(lambda: slots(storage)[3] == 2, "the learner did not take the rollouts")
        return child

    return begin


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_the_slots_of_a_killed_learner_are_served_again_in_order(holding, reaped):
    storage = LSTM.make(4)
    child = holding(storage, LSTM)
    child.kill(reap=reaped)
    with pytest.warns(RuntimeWarning, match=str(child.pid)), pytest.raises(WaitTimeoutError):
        next(learner_of(storage, 3, timeout=SHORT))
    report = storage.report()
    assert (report.lost_learners, report.lost_actors) == (1, 0)
    assert slots(storage) == (2, 0, 2, 0)
    actor = storage.actor()
    for number in (2, 3):
        play(LSTM, actor, number)
    batch = next(learner_of(storage, 4))
    assert rollouts_in(LSTM, batch, batch.states) == [0, 1, 2, 3]
    assert slots(storage) == (4, 0, 0, 0)
    assert (storage.report().committed, storage.report().served) == (4, 4)


def test_a_deadline_returns_the_slots_that_a_learner_took():
    """It took two rollouts of three and the third did not come: the two are there for the next wait, in order."""
    storage = DISCRETE.make(4)
    actor = storage.actor()
    for number in range(2):
        play(DISCRETE, actor, number)
    batches = learner_of(storage, 3, timeout=SHORT)
    with pytest.raises(WaitTimeoutError):
        next(batches)
    play(DISCRETE, actor, 2)
    assert rollouts_in(DISCRETE, next(learner_of(storage, 3))) == [0, 1, 2]
    assert slots(storage) == (4, 0, 0, 0)


def test_an_actor_that_waits_for_a_learner_gets_the_name_of_the_dead_one(holding):
    storage = DISCRETE.make(3)
    child = holding(storage)
    actor = storage.actor()
    last = actor.reserve()
    child.kill()
    with pytest.warns(RuntimeWarning, match=str(child.pid)), pytest.raises(PeerLostError, match=str(child.pid)):
        actor.reserve(timeout=SHORT)
    assert slots(storage) == (0, 1, 2, 0)
    last.abandon()


def test_a_learner_that_died_before_the_last_slot_came_is_not_named(holding):
    """An actor got slots since it died: that the next does not come has other reasons."""
    storage = DISCRETE.make(3)
    holding(storage).kill()
    with pytest.warns(RuntimeWarning):
        storage.report()
    actor, batches = storage.actor(), learner_of(storage)
    for number in range(2, 6):
        play(DISCRETE, actor, number)
        assert rollouts_in(DISCRETE, next(batches)) == [number - 2]
    play(DISCRETE, actor, 6)
    with pytest.raises(WaitTimeoutError, match="learner"):
        actor.reserve(timeout=SHORT)


# ------------------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("prefetch", [0, 1])
def test_at_the_deadline_a_learner_names_dead_actors_and_can_wait_again(stuck, prefetch):
    storage = DISCRETE.make(3)
    learner = storage.learner(batch_size=2, prefetch=prefetch, timeout=SHORT)
    child = stuck(storage, whole=1)
    child.kill()
    with (
        pytest.warns(RuntimeWarning, match=str(child.pid)),
        pytest.raises(PeerLostError, match=rf'Dead: actor "left" \(process {child.pid}\)\. Now no actor') as caught,
    ):
        next(learner)
    assert isinstance(caught.value, ConnectionError)
    assert "a batch of 2 rollouts did not come within 0.05 seconds" in str(caught.value)
    # nothing is lost, and the one that died is not blamed again
    play(DISCRETE, storage.actor(), 1)
    learner.timeout = UNTIL
    assert rollouts_in(DISCRETE, next(learner)) == [900, 1]
    learner.timeout = SHORT
    with pytest.raises(WaitTimeoutError, match="no actor takes part") as caught:
        next(learner)
    assert isinstance(caught.value, TimeoutError)
    learner.close()
    assert slots(storage) == (3, 0, 0, 0)


def test_at_the_deadline_live_actors_are_named_with_the_slots_they_hold(stuck):
    storage = DISCRETE.make(4, timeout=SHORT)
    child = stuck(storage, begun=2)
    began = time.monotonic()
    held = rf'1 actors take part: actor "left" \(process {child.pid}\) holding slots 0, 1'
    with pytest.raises(WaitTimeoutError, match=held):
        next(learner_of(storage))
    assert time.monotonic() - began >= SHORT * 0.9
    assert slots(storage) == (2, 2, 0, 0)


def test_at_the_deadline_an_actor_without_a_slot_names_the_states_of_all():
    storage = DISCRETE.make(4, timeout=SHORT)
    actor = storage.actor("only")
    held = [actor.reserve() for _ in range(3)]
    play(DISCRETE, storage.actor(), 1)
    for options in ({}, {"timeout": 0.01}, {"timeout": 0}):
        with pytest.raises(WaitTimeoutError, match="1 are full, 3 being written, 0 being read") as caught:
            actor.reserve(**options)
    assert "no learner takes part" in str(caught.value)
    assert re.search(r'actor "only" \(process \d+\) holding slots \d, \d, \d', str(caught.value))
    free = held[0].slot
    held[0].abandon()
    assert actor.reserve(timeout=0).slot == free


# ------------------------------------------------------------------------------------------------- the storage's own


def make_and_end(pipe, killed):
    """Makes a storage, gives an actor's handle away, waits, and ends."""
    storage = DISCRETE.make(1)
    pipe.send(storage.actor())
    pipe.recv()
    if killed:
        os._exit(9)  # no finalizer runs
    raise SystemExit(1)


@pytest.mark.parametrize(("killed", "error"), [(True, PeerLostError), (False, StorageClosedError)])
def test_an_actor_notices_the_end_of_the_process_that_created_the_storage(start, killed, error):
    child = start(make_and_end, killed)
    actor = child.hear()
    actor.reserve()
    child.say()
    with pytest.raises(error) as caught:
        actor.reserve(timeout=UNTIL)
    assert (f"process {child.pid}" in str(caught.value)) == killed
    child.process.join(UNTIL)
    assert child.process.exitcode == (9 if killed else 1)


# ------------------------------------------------------------------------------------------------- torture, shortly


def test_actors_killed_at_random_moments():
    kill_actors(rounds=8, seed=1)


def test_learners_killed_at_random_moments():
    kill_learners(rounds=4, seed=2, prefetch=1)
