"""Actors and learners with handles: what is committed is served, and whoever dies is missed."""

from __future__ import annotations

import gc
import os
import pickle
import re
import threading

import pytest
import torch
from handoff_helpers import (
    FORK,
    SECONDS,
    SPAWN,
    STEPS,
    act,
    actor_in_the_middle,
    assert_batch,
    fill,
    finish,
    kill,
    make,
    row_values,
    until,
)

from rlstore import (
    InvalidInputError,
    NotReadyError,
    PeerLostError,
    StorageClosedError,
    WaitTimeoutError,
)


@pytest.fixture
def storage():
    made = make()
    yield made
    made.close()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_rollouts_are_served_once_and_in_the_order_in_which_they_were_committed(storage, prefetch):
    process = FORK.Process(target=act, args=(storage.actor(), range(12)))
    process.start()
    with storage.learner(prefetch=prefetch) as learner:
        for first in range(0, 12, 2):
            assert_batch(next(learner), [first, first + 1])
    finish(process)
    report = storage.report()
    assert (report.committed, report.served, report.full, report.reading, report.free) == (12, 12, 0, 0, 4)
    assert (report.actors, report.learners, report.lost_actors, report.abandoned) == (0, 0, 0, 0)


def test_many_actors_and_learners_share_the_rollouts_among_them(storage):
    processes = [FORK.Process(target=act, args=(storage.actor(str(i)), range(i * 8, i * 8 + 8))) for i in range(3)]
    for process in processes:
        process.start()
    served, learners = [], [storage.learner(prefetch=0) for _ in range(2)]

    def learn(learner):
        for _ in range(6):
            batch = next(learner)
            served.extend(batch.versions.tolist())
            assert_batch(batch, batch.versions.tolist())

    threads = [threading.Thread(target=learn, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    finish(*processes)
    assert sorted(served) == list(range(24))
    assert storage.report().served == 24


def spawned_program(handle, learner, storages, states, answers) -> None:
    act(handle, [1, 2])
    batch = next(learner)
    assert_batch(batch, [1, 2])
    storages["reward"][3][0] = 7.5
    states[3][0][1, 0, 4] = 8.5
    answers.put((handle.published, batch.versions.tolist(), all(t.is_shared() for t in storages["obs"])))
    answers.get()


def test_handles_and_tensors_mean_the_same_memory_in_a_spawned_process(storage):
    answers, learner = SPAWN.SimpleQueue(), storage.learner(prefetch=0)
    learner.publish(41)
    parts = (storage.actor("left"), learner, storage.storages, storage.init_actor_state_storages)
    process = SPAWN.Process(target=spawned_program, args=(*parts, answers))
    process.start()
    assert answers.get() == (41, [1, 2], True)
    assert storage.storages["reward"][3][0] == 7.5
    assert storage.init_actor_state_storages[3][0][1, 0, 4] == 8.5
    assert (storage.report().actors, storage.report().learners) == (1, 1)
    answers.put(None)
    finish(process)
    assert (storage.report().actors, storage.report().learners, storage.report().lost_actors) == (0, 0, 0)


def test_a_pickled_handle_and_tensors_are_the_same_memory_in_this_process(storage):
    handle, storages, key, states = pickle.loads(
        pickle.dumps(
            (storage.actor("a"), storage.storages, storage.storages["reward"], storage.init_actor_state_storages)
        )
    )
    act(handle, [3])
    storages["reward"][2][1] = 5.5
    key[2][2] = 6.5
    states[2][0][...] = 7.5
    assert storage.storages["reward"][2][1:3].tolist() == [5.5, 6.5]
    assert bool((storage.init_actor_state_storages[2][0] == 7.5).all())
    act(storage.actor(), [4])
    assert_batch(next(storage.learner()), [3, 4])
    handle.close()


def test_however_many_slots_there_are_they_cost_two_descriptors_and_leave_no_file():
    gc.collect()
    before, names = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    storage = make(num_storages=300)
    again = pickle.loads(pickle.dumps((storage.storages, storage.init_actor_state_storages)))
    assert len(os.listdir("/proc/self/fd")) == before + 4  # here, and where it was unpickled
    new = set(os.listdir("/dev/shm")) - names  # of other programs, at most
    assert not any("rlstore" in name or str(os.getpid()) in name for name in new)
    storage.close()
    del storage, again  # there are no circles that would keep the memory for longer
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------------------------------------- the dead


def test_the_slot_of_a_killed_actor_is_free_again_and_it_is_named(storage):
    with actor_in_the_middle(storage.actor("left"), [0]) as (process, slot):
        assert storage.report().writing == 1
        kill(process)
        with pytest.warns(RuntimeWarning, match=f'actor "left" \\(process {process.pid}\\) died'):
            report = storage.report()
    assert (report.writing, report.free, report.full) == (0, 3, 1)
    assert (report.lost_actors, report.reclaimed, report.actors) == (1, 1, 0)
    handle = storage.actor("right")
    slots = {handle.reserve().slot for _ in range(3)}
    assert slot in slots
    handle.close()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_learner_is_told_at_its_deadline_who_died(storage, prefetch):
    learner = storage.learner(timeout=0.3, prefetch=prefetch)
    with actor_in_the_middle(storage.actor("left"), [0]) as (process, _):
        kill(process)
        with (
            pytest.warns(RuntimeWarning, match='actor "left"'),
            pytest.raises(PeerLostError, match=f'Dead: actor "left" \\(process {process.pid}\\)'),
        ):
            next(learner)
    # nothing is lost, and the one that died is not blamed again
    act(storage.actor(), [1])
    assert_batch(next(learner), [0, 1])
    with pytest.raises(WaitTimeoutError, match="no actor takes part"):
        next(learner)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_learner_is_told_at_its_deadline_who_lives_and_what_they_hold(storage, prefetch):
    learner = storage.learner(timeout=0.3, prefetch=prefetch)
    with actor_in_the_middle(storage.actor("slow")) as (process, slot):
        told = f'1 actors take part: actor "slow" \\(process {process.pid}\\) holding slot {slot}'
        with pytest.raises(WaitTimeoutError, match=told):
            next(learner)


def learn_then_hold(learner, holding) -> None:
    learner._started().member.collect(2, SECONDS)
    holding.send(None)
    holding.recv()


def test_what_a_killed_learner_was_reading_is_served_to_another_at_its_old_place(storage):
    act(storage.actor(), [0, 1, 2])
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=learn_then_hold, args=(storage.learner(prefetch=0), theirs), daemon=True)
    process.start()
    ours.recv()
    assert storage.report().reading == 2
    kill(process)
    with pytest.warns(RuntimeWarning, match="learner"):
        assert_batch(next(storage.learner(prefetch=0)), [0, 1])
    assert storage.report().lost_learners == 1


def test_a_learner_that_died_while_it_collected_does_not_keep_the_others_from_it(storage):
    ours, theirs = FORK.Pipe()

    def collect():
        member = storage.learner(prefetch=0)._started().member
        storage._slots.memory.handoff.turn.take(0, 1, member.number, 1.0)
        theirs.send(None)
        theirs.recv()

    process = FORK.Process(target=collect, daemon=True)
    process.start()
    ours.recv()
    kill(process)
    act(storage.actor(), [0, 1])
    with pytest.warns(RuntimeWarning, match="learner"):
        assert_batch(next(storage.learner(prefetch=0)), [0, 1])


def wait_for_a_slot(handle, answers) -> None:
    try:
        handle.reserve()
    except Exception as error:
        answers.put((type(error).__name__, str(error)))


def make_and_die(actors, answers) -> None:
    storage = make(num_storages=1)
    act(storage.actor(), [0])
    waiting = FORK.Process(target=wait_for_a_slot, args=(storage.actor(), answers))
    waiting.start()
    actors.put(waiting.pid)
    actors.get()
    os._exit(9)  # as a killed process: nobody is told


def test_an_actor_is_told_at_once_that_the_process_that_made_the_storage_is_gone():
    actors, answers = FORK.SimpleQueue(), FORK.SimpleQueue()
    process = FORK.Process(target=make_and_die, args=(actors, answers))
    process.start()
    actors.get()
    actors.put(None)
    process.join(SECONDS)
    kind, message = answers.get()
    assert kind == "PeerLostError"
    assert f"process {process.pid}" in message


def test_an_actor_that_ends_in_the_middle_of_a_rollout_is_not_lost(storage):
    def begin():
        storage.actor("short").reserve().write(0, **row_values(0, 0))

    process = FORK.Process(target=begin)
    process.start()
    finish(process)
    report = storage.report()
    assert (report.free, report.abandoned, report.lost_actors, report.actors) == (4, 1, 0, 0)


# ---------------------------------------------------------------------------------------------------- deadlines


def test_an_actor_is_told_at_its_deadline_why_no_slot_is_free(storage):
    handle = storage.actor("only")
    held = [handle.reserve() for _ in range(3)]
    act(storage.actor(), [0])
    with pytest.raises(WaitTimeoutError, match="1 are full, 3 being written, 0 being read") as told:
        handle.reserve(timeout=0.3)
    assert "no learner takes part" in str(told.value)
    assert re.search(r'actor "only" \(process \d+\) holding slots \d, \d, \d', str(told.value))
    free = held[0].slot
    held[0].abandon()
    assert handle.reserve(timeout=0).slot == free
    assert storage.report().abandoned == 1


def test_a_batch_that_did_not_come_leaves_its_rollouts_where_they_were(storage):
    act(storage.actor(), [5])
    learner = storage.learner(timeout=0.3, prefetch=0)
    with pytest.raises(WaitTimeoutError, match="a batch of 2 rollouts"):
        next(learner)
    assert storage.report().full == 1
    act(storage.actor(), [6])
    assert_batch(next(learner), [5, 6])


# ---------------------------------------------------------------------------------------------------- closing


def test_closing_ends_everybody(storage):
    handle, answers = storage.actor(), FORK.SimpleQueue()
    process = FORK.Process(target=wait_for_a_slot, args=(handle, answers))
    held = [handle.reserve() for _ in range(4)]
    process.start()
    learner, ended = storage.learner(), []
    thread = threading.Thread(target=lambda: ended.append(list(learner)))
    thread.start()
    until(lambda: storage.report().learners == 1 and storage.report().actors == 2)
    storage.close()
    thread.join(SECONDS)
    assert ended == [[]]
    assert answers.get()[0] == "StorageClosedError"
    finish(process)
    assert list(learner) == []
    with pytest.raises(StorageClosedError):
        handle.reserve()
    with pytest.raises(StorageClosedError):
        storage.insert_transition(None)
    assert len(held) == 4
    assert storage.report().closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rlstore")]


def test_a_closed_learner_ends_and_gives_back_what_it_held(storage):
    act(storage.actor(), [0, 1, 2])
    learner = storage.learner()
    assert_batch(next(learner), [0, 1])
    until(lambda: storage.report().reading == 1)  # its thread has taken the third one
    learner.close()
    assert list(learner) == []
    assert (storage.report().full, storage.report().learners) == (1, 0)
    act(storage.actor(), [3])
    assert_batch(next(storage.learner()), [2, 3])


def test_a_learner_that_is_let_go_of_ends_its_thread(storage):
    act(storage.actor(), [0, 1])
    learner = storage.learner()
    next(learner)
    del learner
    gc.collect()
    assert storage.report().learners == 0


# ---------------------------------------------------------------------------------------------------- rollouts


def test_an_exception_in_a_rollout_gives_it_up(storage):
    def fail():
        with storage.actor().rollout() as rollout:
            fill(rollout, 0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    report = storage.report()
    assert (report.full, report.free, report.abandoned) == (0, 4, 1)


def test_a_committed_rollout_is_no_longer_the_actors(storage):
    rollout = storage.actor().reserve()
    rollout.commit(version=4)
    for call in (lambda: rollout["obs"], lambda: rollout.write(0), lambda: rollout.commit()):
        with pytest.raises(NotReadyError, match="committed or abandoned"):
            call()
    rollout.abandon()
    assert storage.report().full == 1


def test_rows_can_be_written_through_the_tensors_too(storage):
    handle = storage.actor()
    for number in (1, 2):
        with handle.rollout(version=number) as rollout:
            for t in range(STEPS + 1):
                for key, value in row_values(number, t).items():
                    rollout[key][t] = torch.as_tensor(value)
            rollout.set_states(torch.full((2, 5), number / 8))
    assert_batch(next(storage.learner()), [1, 2])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"obs": torch.zeros(3, 2, dtype=torch.uint8)}, "obs is"),
        ({"obs": torch.zeros(2, 3)}, "float32 cannot be held as uint8"),
        ({"reward": [1.0, 2.0]}, "reward is"),
        ({"terminated": float("nan")}, "a flag is 0 or 1"),
        ({"action": 1.5}, "action is"),
        ({"policy_outputs": torch.zeros(2, 4)}, "policy_outputs is"),
        ({"value": 1.0}, r"cannot hold \['value'\]"),
    ],
)
def test_a_row_with_a_value_that_does_not_fit_is_not_written(storage, values, told):
    rollout = storage.actor().reserve()
    rollout.write(1, **row_values(3, 1))
    before = {key: rollout[key].clone() for key in storage.storages}
    with pytest.raises(InvalidInputError, match=told):
        rollout.write(1, **{**row_values(4, 1), **values})
    assert all(torch.equal(rollout[key], before[key]) for key in before)
    for timestep in (-1, STEPS + 1, True, 0.0):
        with pytest.raises(InvalidInputError, match="rows 0 to 3"):
            rollout.write(timestep, **row_values(4, 1))


def test_a_value_with_a_history_leaves_none_in_the_memory(storage):
    rollout = storage.actor().reserve()
    weights = torch.ones(4, requires_grad=True)
    rollout.write(0, policy_outputs=weights * 2, baseline=(weights * 3).sum())
    assert rollout["policy_outputs"][0].tolist() == [2.0] * 4
    assert rollout["baseline"][0] == 12
    assert not any(
        tensor.requires_grad for key in storage.storages for tensor in (rollout[key], storage.storages[key][0])
    )


def test_a_batch_stays_as_it_is_while_the_next_ones_are_made(storage):
    learner, handle, kept = storage.learner(prefetch=0), storage.actor(), []
    for first in range(0, 12, 2):
        act(handle, [first, first + 1])
        kept.append(next(learner))
    for first, batch in zip(range(0, 12, 2), kept, strict=True):
        assert_batch(batch, [first, first + 1])


def test_what_cannot_be_a_learner_is_refused(storage):
    for given, told in [
        ({"batch_size": 5}, "num_storages is 4"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"timeout": -1.0}, "timeout is -1"),
        ({"device": "meta"}, "device is"),
    ]:
        with pytest.raises(InvalidInputError, match=told):
            storage.learner(**given)
    with pytest.raises(InvalidInputError, match="version is 'new'"):
        storage.learner().publish("new")
    with pytest.raises(InvalidInputError, match=r"timeout is nan"):
        storage.actor().reserve(timeout=float("nan"))
