"""The native way in one process: actor and learner handles, versions, the report, refusals, closing."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import signal
import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from distributed_actors import UNTIL, counts, fill, learner_of, play, slots, until
from distributed_ids import DISCRETE, KEYS, LSTM, WORLDS, assert_as_copied, copy_of, rollouts_in
from gymnasium import spaces

from rlstore import DistributedStorage, StorageClosedError, StorageError, WaitTimeoutError

pytestmark = pytest.mark.timeout(120)


# ------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("world", [*WORLDS.values(), LSTM], ids=[*WORLDS, "lstm"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_rollouts_are_served_in_the_order_of_their_commits(world, prefetch):
    storage = world.make(6)
    actor = storage.actor()
    learner = storage.learner(batch_size=2, prefetch=prefetch)
    batches = iter(learner)
    for first in range(0, 12, 4):
        for number in range(first, first + 4):
            play(world, actor, number, version=100 + number)
        for number in (first, first + 2):
            batch = next(batches)
            assert isinstance(batch, Mapping)
            assert rollouts_in(world, batch, batch.states) == [number, number + 1]
            assert batch.versions.dtype == torch.int64
            assert batch.versions.tolist() == [100 + number, 101 + number]
    learner.close()


def test_handles_tell_what_they_are():
    storage = DISCRETE.make(3)
    named, nameless, learner = storage.actor("left"), storage.actor(), storage.learner(2, prefetch=1)
    rollout, other = named.reserve(), named.reserve()
    assert repr(named) == "ActorHandle('left', 3 slots of 4 steps: version 0 published)"
    assert repr(pickle.loads(pickle.dumps(named))) == repr(named)
    learner.publish(7)
    assert repr(nameless) == "ActorHandle(3 slots of 4 steps: version 7 published)"
    assert repr(rollout) == f"Rollout(4 steps: slot {rollout.slot})"
    rollout.abandon()
    named.close()
    assert repr(rollout) == repr(other) == "Rollout(4 steps: no longer writable)"
    assert repr(learner) == "Learner(batches of 2 rollouts of 4 steps on cpu: up to 1 prefetched)"
    learner.close()
    assert repr(learner) == "Learner(batches of 2 rollouts of 4 steps on cpu: closed)"


def test_what_counts_is_the_order_of_commits_not_that_of_reservations():
    storage = DISCRETE.make(3)
    actor = storage.actor()
    first, second, third = (actor.reserve() for _ in range(3))
    assert slots(storage) == (0, 3, 0, 0)
    for rollout, number in ((second, 2), (third, 3), (first, 1)):
        fill(DISCRETE, rollout, number)
        rollout.commit()
    batch = next(learner_of(storage, 3))
    assert rollouts_in(DISCRETE, batch) == [2, 3, 1]
    assert batch.versions.tolist() == [0, 0, 0]
    assert batch.states == ()


def test_a_reserved_rollout_is_the_memory_of_its_slot():
    storage = LSTM.make(2)
    rollout = storage.actor().reserve()
    for key in KEYS:
        assert rollout[key].shape == storage.storages[key][0].shape
        assert rollout[key].is_shared()
    rollout["reward"][2] = 5.0
    assert sum(storage.storages["reward"][index][2].item() for index in range(2)) == 5.0


def test_the_batch_size_is_the_storage_s_unless_another_is_given():
    storage = DISCRETE.make(5, batch_size=3)
    actor = storage.actor()
    for number in range(4):
        play(DISCRETE, actor, number)
    learner = storage.learner(prefetch=0)
    assert rollouts_in(DISCRETE, next(iter(learner))) == [0, 1, 2]
    assert rollouts_in(DISCRETE, next(learner_of(storage, 1))) == [3]


def test_the_counters_add_up_at_every_moment():
    storage = DISCRETE.make(3)
    actor, batches = storage.actor(), learner_of(storage, 2)
    assert (slots(storage), counts(storage)) == ((3, 0, 0, 0), (0, 0, 0))
    one, two = actor.reserve(), actor.reserve()
    assert (slots(storage), counts(storage)) == ((1, 2, 0, 0), (0, 0, 0))
    fill(DISCRETE, one, 1)
    one.commit()
    assert (slots(storage), counts(storage)) == ((1, 1, 1, 0), (1, 0, 0))
    two.abandon()
    assert (slots(storage), counts(storage)) == ((2, 0, 1, 0), (1, 0, 1))
    play(DISCRETE, actor, 2)
    assert (slots(storage), counts(storage)) == ((1, 0, 2, 0), (2, 0, 1))
    assert rollouts_in(DISCRETE, next(batches)) == [1, 2]
    assert (slots(storage), counts(storage)) == ((3, 0, 0, 0), (2, 2, 1))
    report = storage.report()
    assert (report.lost_actors, report.lost_learners) == (0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.committed = 9


def test_a_with_block_commits_and_abandons_on_an_exception():
    storage = DISCRETE.make(3)
    actor = storage.actor()
    with actor.rollout() as rollout:
        fill(DISCRETE, rollout, 1)
    with pytest.raises(KeyError, match="mine"):
        fail_midway(actor)
    assert (slots(storage), counts(storage)) == ((2, 0, 1, 0), (1, 0, 1))
    with actor.rollout() as rollout:
        fill(DISCRETE, rollout, 3)
    assert rollouts_in(DISCRETE, next(learner_of(storage, 2))) == [1, 3]


def fail_midway(actor):
    with actor.rollout() as rollout:
        fill(DISCRETE, rollout, 2, 3)
        raise KeyError("mine")


@pytest.mark.parametrize("end", ["commit", "abandon"])
@pytest.mark.parametrize("then", ["commit", "write", "set_states"])
def test_a_rollout_that_is_over_cannot_be_used_again(end, then):
    storage = LSTM.make(2)
    rollout = storage.actor().reserve()
    fill(LSTM, rollout, 4)
    getattr(rollout, end)()
    before, counted, held = copy_of(storage), counts(storage), slots(storage)
    arguments = {"write": ((0,), LSTM.row(5, 0)), "set_states": ((LSTM.states([5]),), {})}
    args, kwargs = arguments.get(then, ((), {}))
    with pytest.raises(StorageError):
        getattr(rollout, then)(*args, **kwargs)
    assert (counts(storage), slots(storage)) == (counted, held)
    assert_as_copied(storage, before)


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_rollout_that_is_over_can_be_given_up_for_nothing(end):
    storage = LSTM.make(2)
    actor = storage.actor()
    rollout = actor.reserve()
    getattr(rollout, end)()
    other = actor.reserve()
    counted, held = counts(storage), slots(storage)
    rollout.abandon()
    assert (counts(storage), slots(storage)) == (counted, held)
    other.abandon()
    with pytest.raises(StorageError):
        rollout["obs"]


def test_batches_that_are_kept_are_never_written_over():
    storage = LSTM.make(4)
    actor = storage.actor()
    learner = storage.learner(batch_size=2, prefetch=1)
    batches, kept = iter(learner), []
    for number in range(0, 60, 2):
        play(LSTM, actor, number)
        play(LSTM, actor, number + 1)
        batch = next(batches)
        if number % 6:
            kept.append((number, batch))
        else:
            batch["obs"].fill_(1)
        del batch
    for number, batch in kept:
        assert rollouts_in(LSTM, batch, batch.states) == [number, number + 1]
    learner.close()


def test_handles_go_on_when_the_storage_itself_is_let_go():
    storage = DISCRETE.make(2)
    actor, learner = storage.actor(), storage.learner(batch_size=1, prefetch=0)
    play(DISCRETE, actor, 1)
    play(DISCRETE, actor, 2)
    del storage
    gc.collect()
    with pytest.raises(WaitTimeoutError):  # nobody died: there is only no free slot
        actor.reserve(timeout=0.3)
    assert rollouts_in(DISCRETE, next(learner)) == [1]
    play(DISCRETE, actor, 3)
    assert [rollouts_in(DISCRETE, next(learner)) for _ in range(2)] == [[2], [3]]


def test_a_handle_that_was_pickled_is_the_same_storage():
    storage = DISCRETE.make(3)
    play(DISCRETE, pickle.loads(pickle.dumps(storage.actor("left"))), 8)
    assert rollouts_in(DISCRETE, next(learner_of(storage))) == [8]


def test_handles_that_come_and_go_never_use_up_the_places():
    storage = DISCRETE.make(2)
    for _ in range(1200):
        actor = storage.actor()
        actor.reserve().abandon()
        actor.close()
    report = storage.report()
    assert (report.actors, report.lost_actors, report.abandoned) == (0, 0, 1200)
    assert slots(storage) == (2, 0, 0, 0)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_signal_ends_a_wait_and_nothing_is_lost(prefetch):
    storage = DISCRETE.make(3)
    learner = storage.learner(batch_size=2, prefetch=prefetch)
    actor = storage.actor()
    play(DISCRETE, actor, 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(learner)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, handler)
    play(DISCRETE, actor, 2)
    assert rollouts_in(DISCRETE, next(learner)) == [1, 2]
    learner.close()
    assert slots(storage) == (3, 0, 0, 0)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_two_learners_never_serve_the_same_rollout(prefetch):
    storage = DISCRETE.make(4)
    served, errors = [], []

    def learn(learner):
        try:
            for batch in learner:
                served.extend(rollouts_in(DISCRETE, batch))
        except Exception as error:
            errors.append(error)

    learners = [storage.learner(batch_size=1, prefetch=prefetch) for _ in range(2)]
    threads = [threading.Thread(target=learn, args=(learner,), daemon=True) for learner in learners]
    for thread in threads:
        thread.start()
    actor = storage.actor()
    for number in range(60):
        play(DISCRETE, actor, number)
    until(lambda: len(served) == 60 or errors, "not all rollouts were served")
    storage.close()
    for thread in threads:
        thread.join(UNTIL)
        assert not thread.is_alive()
    assert errors == []
    assert sorted(served) == list(range(60))


# ------------------------------------------------------------------------------------------------- refusals


BAD_WRITES = {
    "a row too many": ((5, {"reward": 1.0}), r"5|row|step"),
    "a row before the first": ((-6, {"reward": 1.0}), r"-6|row|step"),
    "half a row": ((0.5, {"reward": 1.0}), r"0\.5|row|step"),
    "an unknown key": ((0, {"colour": 1.0}), "colour"),
    "another shape": ((0, {"obs": torch.zeros(4, 2, 4)}), "obs"),
    "300 into uint8": ((0, {"reward": 1.0, "obs": np.full((4, 2, 3), 300)}), "obs"),
    "half an action": ((0, {"reward": 1.0, "action": 1.5}), "action"),
    "a word": ((0, {"episode_step": 3, "reward": "much"}), "reward"),
}


@pytest.mark.parametrize("bad", BAD_WRITES)
def test_a_bad_write_is_refused_and_nothing_is_written(bad):
    (step, values), name = BAD_WRITES[bad]
    storage = DISCRETE.make(2)
    rollout = storage.actor().reserve()
    fill(DISCRETE, rollout, 4)
    before = copy_of(storage)
    with pytest.raises((ValueError, IndexError, TypeError), match=name):
        rollout.write(step, **values)
    assert_as_copied(storage, before)
    rollout.commit()
    assert rollouts_in(DISCRETE, next(learner_of(storage))) == [4]


BAD_STATES = {
    "one state of two": lambda: LSTM.states([1])[:1],
    "three states": lambda: (*LSTM.states([1]), torch.zeros(2, 1, 5)),
    "another size": lambda: (torch.zeros(2, 1, 5), torch.zeros(2, 1, 6)),
    "another batch": lambda: LSTM.states([1, 2]),
    "None": lambda: None,
}


@pytest.mark.parametrize("bad", BAD_STATES)
def test_bad_states_are_refused_and_nothing_is_written(bad):
    storage = LSTM.make(2)
    rollout = storage.actor().reserve()
    fill(LSTM, rollout, 4)
    before = copy_of(storage)
    with pytest.raises((ValueError, TypeError)):
        rollout.set_states(BAD_STATES[bad]())
    assert_as_copied(storage, before)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": 4},
        {"prefetch": -1},
        {"timeout": -1.0},
        {"device": "moon"},
    ],
    ids=repr,
)
def test_a_learner_that_could_never_be_served_is_refused(options):
    storage = DISCRETE.make(3)
    with pytest.raises(ValueError, match=next(iter(options))):
        storage.learner(**options)


@pytest.mark.parametrize("num_storages", [10**9, 10**15])
def test_a_storage_that_cannot_fit_is_refused_with_the_numbers(num_storages):
    screen = spaces.Box(0, 255, (3, 210, 160), np.uint8)
    with pytest.raises(MemoryError, match=r"\d.*\d") as caught:
        DistributedStorage(screen, spaces.Discrete(4), num_storages=num_storages)
    assert isinstance(caught.value, StorageError)
    DISCRETE.make(2)  # nothing was taken


def test_a_storage_larger_than_the_machine_is_refused_before_it_is_touched():
    with open("/proc/meminfo") as lines:
        total = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    wide = spaces.Box(0, 255, (2**20,), np.uint8)
    with pytest.raises(MemoryError, match=r"\d.*\d"):
        DistributedStorage(wide, spaces.Discrete(4), num_steps=63, num_storages=2 * total // 2**26)


# ------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("closed", ["learner", "storage"])
def test_close_ends_an_iteration_that_waits(prefetch, closed):
    storage = DISCRETE.make(3)
    learner = storage.learner(batch_size=1, prefetch=prefetch)
    served = []
    thread = threading.Thread(
        target=lambda: served.extend(rollouts_in(DISCRETE, batch) for batch in learner), daemon=True
    )
    thread.start()
    play(DISCRETE, storage.actor(), 5)
    until(lambda: served, "the rollout was not served")
    {"learner": learner, "storage": storage}[closed].close()
    thread.join(UNTIL)
    assert not thread.is_alive()
    assert served == [[5]]
    with pytest.raises(StopIteration):
        next(iter(learner))


def test_a_closed_storage_says_so_and_may_be_closed_again():
    storage = DISCRETE.make(2)
    actor = storage.actor()
    actor.reserve()
    storage.close()
    storage.close()
    with pytest.raises(StorageClosedError):
        actor.reserve()
    with pytest.raises(StopIteration):
        next(learner_of(storage))


def test_another_storage_does_not_notice():
    one, other = DISCRETE.make(2), DISCRETE.make(2)
    learner = other.learner(batch_size=1, prefetch=0, timeout=0.2)
    play(DISCRETE, one.actor(), 1)
    one.close()
    with pytest.raises(WaitTimeoutError):
        next(iter(learner))
    play(DISCRETE, other.actor(), 2)
    assert rollouts_in(DISCRETE, next(learner_of(other))) == [2]
