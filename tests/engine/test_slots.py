"""The hand-off: no slot is lost, none is had by two, and the order is kept."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import threading
from itertools import chain

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slot_workers import DEADLINE, consume, cycle, echo, hold, produce

from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes.slots import SlotQueue, Slots, State
from rlstore.errors import InvalidInputError, WaitTimeoutError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
FREE, WRITING, FULL, READING = State


def make_slots(count, *, shared=False):
    shape = Slots.shape(count)
    memory = (
        SharedMemory.create(SharedMemory.bytes_of([shape])).carve(*shape)
        if shared
        else torch.zeros(*shape[:1], dtype=shape[1])
    )
    return Slots(memory)


# ------------------------------------------------------------------------------------------------- against a model


class SlotMachine(RuleBasedStateMachine):
    """Three owners hand five slots to one another; the model has (state, owner, place in the order) of each."""

    COUNT, owners = 5, st.integers(1, 3)

    def __init__(self):
        super().__init__()
        self.slots = make_slots(self.COUNT)
        self.model = [(FREE, 0, 0)] * self.COUNT
        self.order = 0

    def take(self, origin, state, owner):
        there = [slot for slot in range(self.COUNT) if self.model[slot][0] is origin]
        first = min(there, key=lambda slot: (self.model[slot][2], slot)) if there else None
        assert self.slots.take(origin, state, owner, 0.0) == first
        if first is not None:
            self.model[first] = state, owner, self.model[first][2]

    def give(self, slot, origin, state, owner):
        allowed = self.model[slot][:2] == (origin, owner)
        assert self.slots.give(slot, origin, state, owner) is allowed
        if allowed:
            self.order += 1
            self.model[slot] = state, 0, self.order

    @rule(owner=owners)
    def write(self, owner):
        self.take(FREE, WRITING, owner)

    @rule(owner=owners)
    def read(self, owner):
        self.take(FULL, READING, owner)

    @rule(
        slot=st.integers(0, COUNT - 1),
        move=st.sampled_from([(WRITING, FULL), (WRITING, FREE), (READING, FREE)]),
        owner=owners,
    )
    def hand_over(self, slot, move, owner):
        self.give(slot, *move, owner)

    @precondition(lambda self: any(owner for _, owner, _ in self.model))
    @rule(data=st.data(), abandon=st.booleans())
    def hand_over_what_is_held(self, data, abandon):
        slot = data.draw(st.sampled_from([slot for slot, (_, owner, _) in enumerate(self.model) if owner]))
        origin, owner, _ = self.model[slot]
        self.give(slot, origin, FULL if origin is WRITING and not abandon else FREE, owner)

    @rule(owner=owners)
    def die(self, owner):
        had = [slot for slot, (_, holder, _) in enumerate(self.model) if holder == owner]
        written = [slot for slot in had if self.model[slot][0] is WRITING]
        assert self.slots.reclaim(owner) == (len(written), len(had) - len(written))
        for slot in had:
            self.model[slot] = FREE if slot in written else FULL, 0, self.model[slot][2]

    @invariant()
    def same(self):
        assert [(self.slots.state(slot), self.slots.owner(slot)) for slot in range(self.COUNT)] == [
            entry[:2] for entry in self.model
        ]
        assert self.slots.counts() == {state: sum(entry[0] is state for entry in self.model) for state in State}


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=80, stateful_step_count=40)


# ------------------------------------------------------------------------------------------------- slots


def test_wrong_numbers_are_refused():
    slots = make_slots(3)
    with pytest.raises(IndexError, match="no such slot"):
        slots.give(3, FREE, FULL, 0)
    with pytest.raises(ValueError, match="below 65536"):
        slots.take(FREE, WRITING, 65536, 0.0)
    with pytest.raises(ValueError, match="owner 0 is nobody"):
        slots.reclaim(0)
    with pytest.raises(ValueError, match="four states"):
        slots.take(FREE, 4, 1, 0.0)
    assert slots.counts()[FREE] == 3


def test_a_wait_for_nothing_ends():
    slots = make_slots(1)
    assert slots.take(FULL, READING, 1, 0.0) is None
    assert slots.take(FULL, READING, 1, 0.05) is None
    assert slots.take(FULL, READING, 1, 60.0) is None  # a slice of it: the caller looks who lives, and asks again


def test_a_slot_wakes_one_that_waits_and_wake_all_wakes_all():
    slots, found, looked = make_slots(1), [], []

    def wait():
        slot = None
        while slot is None:
            looked.append(1)
            slot = slots.take(FULL, READING, 2, DEADLINE)
        found.append(slot)

    thread = threading.Thread(target=wait)
    thread.start()
    slots.wake_all()
    assert slots.give(slots.take(FREE, WRITING, 1, 0.0), WRITING, FULL, 1)
    thread.join(DEADLINE)
    assert found == [0]
    assert (slots.state(0), slots.owner(0)) == (READING, 2)


@pytest.mark.parametrize(("origin", "after"), [(FREE, (1, 0)), (FULL, (0, 1))])
def test_what_a_killed_process_held_comes_back_at_its_old_place(origin, after):
    slots, held = make_slots(4, shared=True), FORK.Event()
    if origin is FULL:
        for slot in range(4):
            slots.take(FREE, WRITING, 1, 0.0)
            slots.give(slot, WRITING, FULL, 1)
    process = FORK.Process(target=hold, args=(slots, origin, WRITING if origin is FREE else READING, 9, held))
    process.start()
    assert held.wait(DEADLINE)
    process.kill()
    process.join(DEADLINE)
    assert slots.owner(0) == 9
    assert slots.reclaim(9) == after
    assert slots.counts()[origin] == 4
    assert [slots.take(origin, WRITING if origin is FREE else READING, 1, 0.0) for _ in range(4)] == [0, 1, 2, 3]


def test_processes_killed_at_any_moment_leave_every_slot_in_a_state_and_none_to_two():
    """Each writes its own number into what it holds, and fails if somebody else does meanwhile."""
    slots = make_slots(4, shared=True)
    marks, random_ = SharedMemory.create(64).carve((4,), torch.int64), random.Random(0)
    handed_on = FORK.Semaphore(0)
    workers = {}
    for number in range(1, 13):
        process = FORK.Process(target=cycle, args=(slots, marks, number, handed_on))
        process.start()
        workers[number] = process
        if len(workers) == 3:
            assert all(handed_on.acquire(timeout=DEADLINE) for _ in range(50))
            assert all(worker.is_alive() for worker in workers.values())
            gone = random_.choice(list(workers))
            workers[gone].kill()
            workers.pop(gone).join(DEADLINE)
            slots.reclaim(gone)
    for number, worker in workers.items():
        worker.kill()
        worker.join(DEADLINE)
        slots.reclaim(number)
    counts = slots.counts()
    assert counts[FREE] + counts[FULL] == 4


# ------------------------------------------------------------------------------------------------- the queue


def test_the_queue_is_first_in_first_out_with_nones_between():
    queue = SlotQueue(4)
    for entry in (2, None, 0, None, 3):
        queue.put(entry)
    assert (queue.qsize(), queue.empty()) == (5, False)
    assert [queue.get() for _ in range(5)] == [2, None, 0, None, 3]
    assert (queue.qsize(), queue.empty()) == (0, True)
    queue.put(2)
    assert queue.get(timeout=0) == 2


@pytest.mark.parametrize("entry", [-1, 4, 1.5, True, "1", (0,)])
def test_what_is_no_slot_is_refused(entry):
    queue = SlotQueue(4)
    with pytest.raises(InvalidInputError, match="no slot of this queue, which has 0 to 3"):
        queue.put(entry)
    assert queue.empty()


def test_a_slot_is_in_the_queue_once_and_none_as_often_as_there_is_room():
    queue = SlotQueue(2)
    queue.put(1)
    with pytest.raises(InvalidInputError, match="slot 1 is in the queue already"):
        queue.put(1)
    for _ in range(2 + 64):
        queue.put(None)
    with pytest.raises(InvalidInputError, match="holds None as often as it can"):
        queue.put(None)
    assert queue.qsize() == 67
    assert queue.get() == 1
    assert [queue.get() for _ in range(66)] == [None] * 66


@pytest.mark.parametrize("count", [0, -1, True, 1.5, None])
def test_a_queue_has_slots(count):
    with pytest.raises(InvalidInputError, match="num_slots"):
        SlotQueue(count)


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_queue_that_stays_empty_raises(timeout):
    with pytest.raises(
        WaitTimeoutError, match=rf"nothing came into the queue of 2 slots within {timeout} seconds"
    ) as late:
        SlotQueue(2).get(timeout=timeout)
    assert isinstance(late.value, TimeoutError)


@pytest.mark.parametrize("make", [threading.Thread, FORK.Process], ids=["threads", "processes"])
def test_each_producers_order_is_kept_and_nothing_is_lost_or_comes_twice(make):
    producers, consumers, each = 3, 2, 150
    queue, ours = SlotQueue(producers * each), [FORK.Pipe() for _ in range(consumers)]
    work = [make(target=produce, args=(queue, range(p * each, (p + 1) * each))) for p in range(producers)]
    readers = [make(target=consume, args=(queue, theirs)) for _, theirs in ours]
    for worker in (*readers, *work):
        worker.start()
    for worker in work:
        worker.join(DEADLINE)
    for _ in readers:
        queue.put(None)
    got = [pipe.recv() for pipe, _ in ours if pipe.poll(DEADLINE)]
    for reader in readers:
        reader.join(DEADLINE)
    assert sorted(chain(*got)) == list(range(producers * each))
    for taken in got:
        for p in range(producers):
            own = [entry for entry in taken if entry // each == p]
            assert own == sorted(own)


def test_a_queue_goes_to_another_process():
    there, back = SlotQueue(8), SlotQueue(8)
    process = FORK.Process(target=echo, args=(there, back))
    process.start()
    sent = [5, None, 3, 0, None, 7]
    for entry in sent:
        there.put(entry)
    assert [back.get(DEADLINE) for _ in sent] == sent
    process.join(DEADLINE)
    assert process.exitcode == 0


def test_a_pickled_queue_is_the_same_queue():
    queue = SlotQueue(3)
    other = pickle.loads(pickle.dumps(queue))
    queue.put(1)
    other.put(0)
    assert [other.get(), queue.get()] == [1, 0]
