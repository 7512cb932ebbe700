"""What the processes of the tests of slots do; in a module of its own, which a spawned process can import."""

from __future__ import annotations

import multiprocessing

from rlstore.engine.processes.slots import State

DEADLINE = 60.0


def produce(queue, entries):
    for entry in entries:
        queue.put(entry)


def consume(queue, pipe):
    taken = []
    while (entry := queue.get(DEADLINE)) is not None:
        taken.append(entry)
    pipe.send(taken)


def echo(there, back):
    """Six entries, sent back as they came."""
    for _ in range(6):
        back.put(there.get(DEADLINE))


def hold(slots, origin, state, owner, held):
    """Take a slot and keep it until the end."""
    assert slots.take(origin, state, owner, 0.0) == 0
    held.set()
    multiprocessing.get_context("fork").Event().wait(DEADLINE)


def cycle(slots, marks, owner, handed_on):
    """Write and read slots without end; marks: who has each of them."""
    while True:
        for origin, state, after in (
            (State.FREE, State.WRITING, State.FULL),
            (State.FULL, State.READING, State.FREE),
        ):
            slot = slots.take(origin, state, owner, DEADLINE)
            if slot is None:
                continue
            marks[slot] = owner
            assert (slots.owner(slot), slots.state(slot), int(marks[slot])) == (owner, state, owner)
            assert slots.give(slot, state, after, owner)
            handed_on.release()
