"""The hand-off between processes: slots that are free, being written, full, being read, and free again."""

from __future__ import annotations

import time
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.checks import check_positive
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.errors import InvalidInputError, WaitTimeoutError
from rlstore.kernels import SlotTable

_HEAD = 8  # words before those of the slots
_WRITTEN, _READ = 5, 6  # of them
# The longest sleep in one go: then signals are looked at, and whether those that are waited for still live.
SLICE_SECONDS = 0.2


class State(IntEnum):
    """What a slot is."""

    FREE = 0
    WRITING = 1
    FULL = 2
    READING = 3


class Slots:
    """``count`` slots in shared memory, zero at first: all free. First in, first out, for any number of processes.

    No lock is taken: each change is one exchange of the slot's word, which holds its state, who has it and its place in
    the order. A process that is killed at any moment leaves every slot in one of its four states.

    Args:
        memory: int64, of the shape :meth:`shape`.
    """

    def __init__(self, memory: Tensor) -> None:
        self._head, self._words = memory[:_HEAD].numpy(), memory[_HEAD:].numpy()
        self._table = SlotTable(memory)

    @staticmethod
    def shape(count: int) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of the memory of ``count`` slots."""
        return (_HEAD + count,), torch.int64

    def take(self, origin: State, state: State, owner: int, seconds: float) -> int | None:
        """The slot that has been in ``origin`` longest, now in ``state`` and the owner's.

        It waits for at most ``seconds``, and never longer than :data:`SLICE_SECONDS`: call it again, after a look at
        who lives. None if there was none. Other threads run meanwhile.
        """
        slot = self._table.take(origin, state, owner, min(seconds, SLICE_SECONDS))
        return None if slot < 0 else slot

    def give(self, slot: int, origin: State, state: State, owner: int) -> bool:
        """Put a slot that is the owner's in ``origin`` into ``state``, behind all others; False if it is not."""
        return self._table.give(slot, origin, state, owner)

    def reclaim(self, owner: int) -> tuple[int, int]:
        """Take what a dead owner had.

        Returns:
            How many slots it was writing, which are free now, and how many it was reading, which are full again and at
            their old place in the order.
        """
        return self._table.reclaim(owner)

    def owner(self, slot: int) -> int:
        """Who has a slot; 0 for nobody."""
        return int(self._words[slot]) >> 2 & 0xFFFF

    def state(self, slot: int) -> State:
        """The state of a slot."""
        return State(int(self._words[slot]) & 3)

    def counts(self) -> dict[State, int]:
        """How many slots are in each state, at one glance that others may change meanwhile."""
        states = (self._words & 3).tolist()
        return {state: states.count(state) for state in State}

    @property
    def written(self) -> int:
        """How often a slot was written and given on as full."""
        return int(self._head[_WRITTEN])

    @property
    def read(self) -> int:
        """How often a slot was read and given on as free."""
        return int(self._head[_READ])

    def set_counts(self, written: int, read: int) -> None:
        """Go on from other counts; only while nobody else counts."""
        self._head[_WRITTEN], self._head[_READ] = written, read

    def wake_all(self) -> None:
        """Let everyone who waits look again."""
        self._table.wake_all()


class SlotQueue:
    """A queue of slot numbers between processes, for any number of them: first in, first out.

    It can stand for the two queues of ``DistributedStorage.sample``. It holds each number at most once, and None as
    often as there are slots, and 64 times more. It can be pickled, in any way, while a process that has it lives.

    Args:
        num_slots: The numbers are 0 to ``num_slots - 1``.
    """

    def __init__(self, num_slots: int) -> None:
        check_positive("SlotQueue()", num_slots=num_slots)
        shape = Slots.shape(2 * num_slots + 64)
        self._open(num_slots, SharedMemory.create(SharedMemory.bytes_of([shape])))

    def _open(self, num_slots: int, segment: SharedMemory) -> None:
        self._count, self._segment = num_slots, segment
        self._slots = Slots(segment.carve(*Slots.shape(2 * num_slots + 64)))

    def put(self, index: int | None) -> None:
        """Put a slot's number, or None, behind all others.

        Raises:
            InvalidInputError: If it is no number of a slot, or in the queue already. Nothing was changed.
        """
        if index is None:
            if any(self._enter(place) for place in range(self._count, 2 * self._count + 64)):
                return
            raise InvalidInputError("the queue holds None as often as it can. Nothing was changed.")
        is_whole = isinstance(index, (int, np.integer)) and not isinstance(index, bool)
        if not is_whole or not 0 <= index < self._count:
            raise InvalidInputError(
                f"{index!r} is no slot of this queue, which has 0 to {self._count - 1}. Nothing was changed."
            )
        if not self._enter(int(index)):
            raise InvalidInputError(f"slot {index} is in the queue already. Nothing was changed.")

    def _enter(self, place: int) -> bool:
        return self._slots.give(place, State.FREE, State.FULL, 0)

    def get(self, timeout: float | None = None) -> int | None:
        """Take the first number, or None that was put, out of the queue.

        Args:
            timeout: Seconds to wait; None waits until there is one.

        Raises:
            WaitTimeoutError: (a TimeoutError) if nothing came in time.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_SECONDS if end is None else end - time.monotonic()
            place = self._slots.take(State.FULL, State.FREE, 0, max(left, 0.0))
            if place is not None:
                return place if place < self._count else None
            if left <= 0:
                raise WaitTimeoutError(f"nothing came into the queue of {self._count} slots within {timeout} seconds")

    def qsize(self) -> int:
        """What is in the queue now, numbers and Nones."""
        return self._slots.counts()[State.FULL]

    def empty(self) -> bool:
        """True if there is nothing in the queue now."""
        return self.qsize() == 0

    def __getstate__(self) -> tuple[int, SharedMemory]:
        return self._count, self._segment

    def __setstate__(self, state: tuple[int, SharedMemory]) -> None:
        self._open(*state)
