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

from rlstore import DistributedStorage, InvalidInputError, NotReadyError, StorageClosedError, WaitTimeoutError

pytestmark = pytest.mark.timeout(120)


# ------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("world", "prefetch"), list(zip([*WORLDS.values(), LSTM], [0, 1, 2] * 2, strict=True)), ids=[*WORLDS, "lstm"]
)
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


def test_the_repr_of_handles():
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


def test_the_end_of_an_iterator_in_a_with_block_is_raised_as_it_is():
    storage = DISCRETE.make(2)
    actor, steps = storage.actor(), iter([])
    with pytest.raises(StopIteration), actor.rollout():
        next(steps)
    assert slots(storage) == (2, 0, 0, 0)


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


def test_handles_still_work_when_the_storage_is_deleted():
    storage = DISCRETE.make(2)
    actor, learner = storage.actor(), storage.learner(batch_size=1, prefetch=0)
    play(DISCRETE, actor, 1)
    play(DISCRETE, actor, 2)
    del storage
    gc.collect()
    with pytest.raises(WaitTimeoutError):  # nobody died: there is only no free slot
        actor.reserve(timeout=0.05)
    assert rollouts_in(DISCRETE, next(learner)) == [1]
    play(DISCRETE, actor, 3)
    assert [rollouts_in(DISCRETE, next(learner)) for _ in range(2)] == [[2], [3]]


def test_handles_that_come_and_go_never_use_up_the_places():
    storage = DISCRETE.make(2)
    for _ in range(1050):
        actor = storage.actor()
        actor.reserve().abandon()
        actor.close()
    report = storage.report()
    assert (report.actors, report.lost_actors, report.abandoned) == (0, 0, 1050)
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
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
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
    for number in range(30):
        play(DISCRETE, actor, number)
    until(lambda: len(served) == 30 or errors, "not all rollouts were served")
    storage.close()
    for thread in threads:
        thread.join(UNTIL)
        assert not thread.is_alive()
    assert errors == []
    assert sorted(served) == list(range(30))


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("end", ["commit", "abandon", "close"])
def test_a_rollout_that_is_over_cannot_be_used_again(end):
    storage = LSTM.make(2)
    actor = storage.actor()
    rollout = actor.reserve()
    fill(LSTM, rollout, 4)
    actor.close() if end == "close" else getattr(rollout, end)()
    before, counted, held = copy_of(storage), counts(storage), slots(storage)
    for use in (
        lambda: rollout.write(0, **LSTM.row(5, 0)),
        lambda: rollout.set_states(LSTM.states([5])),
        lambda: rollout.commit(),
        lambda: rollout["obs"],
    ):
        with pytest.raises(NotReadyError, match=r"committed or abandoned, or its actor was closed"):
            use()
    rollout.abandon()  # for nothing
    assert (counts(storage), slots(storage)) == (counted, held)
    assert_as_copied(storage, before)


def test_bad_states_are_refused_and_nothing_is_written():
    storage = LSTM.make(2)
    rollout = storage.actor().reserve()
    fill(LSTM, rollout, 4)
    before = copy_of(storage)
    states = LSTM.states([1])
    sizes = (torch.zeros(2, 1, 5), torch.zeros(2, 1, 6))
    for bad in (states[:1], (*states, torch.zeros(2, 1, 5)), sizes, LSTM.states([1, 2]), None):
        with pytest.raises(ValueError, match="states"):
            rollout.set_states(bad)
        assert_as_copied(storage, before)


def test_what_cannot_be_a_learner_or_a_version_or_a_wait_is_refused():
    storage = DISCRETE.make(3)
    for given, expected in [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": 4}, "num_storages is 3"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"timeout": -1.0}, "timeout is -1"),
        ({"device": "moon"}, "device is 'moon'"),
        ({"device": "meta"}, "device is 'meta'"),
    ]:
        with pytest.raises(InvalidInputError, match=expected):
            storage.learner(**given)
    rollout = storage.actor().reserve()
    for refused, expected in [
        (lambda: storage.learner().publish("new"), "version is 'new'"),
        (lambda: rollout.commit(2**63), "version is 9223372036854775808"),
        (lambda: storage.actor().reserve(timeout=float("nan")), "timeout is nan"),
        (lambda: storage.actor(7), "name is 7"),
    ]:
        with pytest.raises(InvalidInputError, match=expected):
            refused()
    assert slots(storage) == (2, 1, 0, 0)


def test_a_value_with_a_history_leaves_none_in_the_memory():
    storage = DISCRETE.make(2)
    rollout = storage.actor().reserve()
    weights = torch.ones(6, requires_grad=True)
    rollout.write(0, policy_outputs=weights * 2, baseline=(weights * 3).sum())
    assert rollout["policy_outputs"][0].tolist() == [2.0] * 6
    assert rollout["baseline"][0] == 18
    assert not any(tensor.requires_grad for key in KEYS for tensor in (rollout[key], storage.storages[key][0]))


def test_a_storage_larger_than_the_machine_is_refused_before_it_is_touched():
    with open("/proc/meminfo") as lines:
        total = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    wide = spaces.Box(0, 255, (2**20,), np.uint8)
    with pytest.raises(MemoryError, match=r"\d.*\d"):
        DistributedStorage(wide, spaces.Discrete(4), num_steps=63, num_storages=2 * total // 2**26)


# ------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(("prefetch", "closed"), [(0, "storage"), (1, "learner"), (1, "storage")])
def test_close_ends_an_iteration_that_waits(prefetch, closed):
    before = set(threading.enumerate())  # storages of other tests may have threads yet
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
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rlstore")]


def test_a_closed_learner_puts_back_what_its_thread_holds():
    storage = DISCRETE.make(4)
    for number in range(3):
        play(DISCRETE, storage.actor(), number)
    learner = storage.learner(batch_size=2, prefetch=1)
    assert rollouts_in(DISCRETE, next(learner)) == [0, 1]
    until(lambda: slots(storage)[3] == 1, "the thread did not take the third rollout")
    learner.close()
    assert list(learner) == []
    assert (slots(storage), storage.report().learners) == ((3, 0, 1, 0), 0)
    play(DISCRETE, storage.actor(), 3)
    assert rollouts_in(DISCRETE, next(learner_of(storage, 2))) == [2, 3]


def test_a_learner_that_is_dropped_ends_its_thread():
    storage = DISCRETE.make(3)
    play(DISCRETE, storage.actor(), 1)
    learner = storage.learner(batch_size=1)
    next(learner)
    del learner
    gc.collect()
    assert storage.report().learners == 0


def test_a_closed_storage_raises_and_may_be_closed_again():
    storage = DISCRETE.make(2)
    actor = storage.actor()
    actor.reserve()
    learner = learner_of(storage)
    storage.close()
    storage.close()
    assert storage.report().closed
    for refused in (actor.reserve, storage.reset, storage.learner, lambda: storage.insert_transition(None)):
        with pytest.raises(StorageClosedError):
            refused()
    with pytest.raises(StopIteration):
        next(learner)


def test_another_storage_does_not_notice():
    one, other = DISCRETE.make(2), DISCRETE.make(2)
    learner = other.learner(batch_size=1, prefetch=0, timeout=0.05)
    play(DISCRETE, one.actor(), 1)
    one.close()
    with pytest.raises(WaitTimeoutError):
        next(iter(learner))
    play(DISCRETE, other.actor(), 2)
    assert rollouts_in(DISCRETE, next(learner_of(other))) == [2]
