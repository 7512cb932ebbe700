"""The native way in several processes: actors that are forked and spawned, learners that share the rollouts."""

from __future__ import annotations

import numpy as np
import pytest
from distributed_actors import (
    UNTIL,
    counting_learner,
    counts,
    fill,
    learner_of,
    play,
    playing_actor,
    slots,
    told_actor,
    until,
    waiting_actor,
)
from distributed_ids import DISCRETE, LSTM, ListQueue, World, rollouts_in, write
from gymnasium import spaces

from rlstore import SlotQueue

pytestmark = pytest.mark.timeout(120)


def test_actors_in_other_processes(start):
    storage, each = LSTM.make(5), 20
    children = [start(playing_actor, LSTM, storage.actor(f"number {place}"), 1000 * place, each) for place in range(2)]
    served = [[], []]
    batches = learner_of(storage, 2)
    for _ in range(each):
        batch = next(batches)
        rollouts = rollouts_in(LSTM, batch, batch.states)
        assert batch.versions.tolist() == rollouts
        for rollout in rollouts:
            served[rollout // 1000].append(rollout)
    assert served == [list(range(each)), list(range(1000, 1000 + each))]
    for child in children:
        child.hear()
        child.end()
    assert (slots(storage), counts(storage)) == ((5, 0, 0, 0), (2 * each, 2 * each, 0))
    assert storage.report().lost_actors == 0


def use_everything(pipe, actor, learner, storages, states, queue, published):
    """In a process that was spawned, with nothing but what was pickled to it."""
    assert actor.published == published
    for number in (1, 2):
        play(LSTM, actor, number, version=10 * number)
    batch = next(learner)
    assert rollouts_in(LSTM, batch, batch.states) == [1, 2]
    assert batch.versions.tolist() == [10, 20]
    write(LSTM, storages, states, 2, 77)
    queue.put(2)
    pipe.send(all(tensor.is_shared() for tensor in storages["obs"]))
    pipe.recv()
    fill(LSTM, actor.reserve(), 3, 2)
    pipe.send("stuck")
    pipe.poll(UNTIL)


def test_a_spawned_process_uses_handles_tensors_and_queues(start):
    storage, queue = LSTM.make(3), SlotQueue(3)
    storages, states = storage.storages, storage.init_actor_state_storages
    learner = storage.learner(batch_size=2, prefetch=0)
    learner.publish(41)
    child = start(use_everything, storage.actor("far"), learner, storages, states, queue, 41, method="spawn")
    assert child.hear() is True
    assert queue.get(timeout=UNTIL) == 2
    found = storage.sample("cpu", 1, ListQueue(), ListQueue([2]), storages, states)
    assert rollouts_in(LSTM, *found) == [77]
    child.say()
    assert child.hear() == "stuck"
    assert (slots(storage), counts(storage)) == ((2, 1, 0, 0), (2, 2, 0))
    assert (storage.report().actors, storage.report().learners) == (1, 1)
    child.kill()
    with pytest.warns(RuntimeWarning, match=rf"process {child.pid}") as warned:
        report = storage.report()
    assert len(warned) == 2
    assert (report.lost_actors, report.lost_learners, report.reclaimed, report.free) == (1, 1, 1, 3)


def test_actors_see_what_the_learner_published(start):
    storage = LSTM.make(3)
    learner = storage.learner(batch_size=1, prefetch=0)
    child = start(told_actor, LSTM, storage.actor())
    for number in (1, 2, 5):
        learner.publish(7 * number)
        child.say(number)
        assert child.hear() == 7 * number
        batch = next(learner)
        assert rollouts_in(LSTM, batch, batch.states) == [number]
        assert batch.versions.tolist() == [10 * number]
    child.say(None)
    child.end()
    assert (slots(storage), counts(storage)) == ((3, 0, 0, 0), (3, 3, 0))
    assert storage.report().lost_actors == 0


def test_a_forked_handle_is_another_actor(start):
    """The one that was made here is used here as well: two processes, each with slots of its own."""
    storage = DISCRETE.make(4)
    actor = storage.actor("both")
    mine = actor.reserve()
    child = start(told_actor, DISCRETE, actor)
    child.say(3)
    child.hear()
    fill(DISCRETE, mine, 1)
    mine.commit()
    assert rollouts_in(DISCRETE, next(learner_of(storage, 2))) == [3, 1]
    child.say(None)
    child.end()
    play(DISCRETE, actor, 6)
    assert rollouts_in(DISCRETE, next(learner_of(storage))) == [6]


def test_learners_in_other_processes_share_the_rollouts(start):
    storage = LSTM.make(4)
    children = [start(counting_learner, LSTM, storage, 2, 5) for _ in range(2)]
    actor = storage.actor()
    for number in range(20):
        play(LSTM, actor, number)
    served = [[rollout for _ in range(5) for rollout in child.hear()] for child in children]
    for child in children:
        child.end()
    assert sorted(served[0] + served[1]) == list(range(20))
    assert served == [sorted(one) for one in served]
    assert (slots(storage), counts(storage)) == ((4, 0, 0, 0), (20, 20, 0))


def test_a_slot_is_free_only_when_all_of_it_was_copied(start):
    """Actors wait for every slot, and write into it at once; copying takes far longer than waking them does."""
    world = World(spaces.Box(0, 255, (3, 128, 128), np.uint8), spaces.Discrete(2), 2, ((2, 5),))
    storage = world.make(2)
    for place in range(2):
        start(playing_actor, world, storage.actor(), 1000 * place, 20)
    batches = learner_of(storage, 2)
    for _ in range(20):
        batch = next(batches)
        rollouts_in(world, batch, batch.states)


def test_close_ends_the_waits_of_actors_everywhere(start):
    storage = DISCRETE.make(2)
    child = start(waiting_actor, DISCRETE, storage.actor())
    child.hear()
    until(lambda: storage.report().full == 2, "the actor did not fill the storage")
    storage.close()
    name, message = child.hear()
    assert name == "StorageClosedError", message
    child.end()
