"""Slots that processes hand to one another: free, being written, full, being read, and free again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.checks import check_positive, check_seconds
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.errors import InvalidInputError, WaitTimeoutError
from rlstore.kernels import SlotTable

_HEAD = 8  # words before those of the slots
_TICKET, _WRITTEN, _READ = 0, 5, 6  # three of them
# The longest wait in one call. Between two calls signals are handled, and the peers that are waited for are checked.
SLICE_SECONDS = 0.2


class State(IntEnum):
    """The state of a slot."""

    FREE = 0
    WRITING = 1
    FULL = 2
    READING = 3


class Slots:
    """``count`` slots in shared memory, all free while it is zero. First in, first out, for any number of processes.

    No lock is taken: each change is one atomic exchange of the slot's word, which holds its state, its owner and its
    position in the order. A process that is killed at any moment leaves every slot in one of the four states.

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
        """Take the slot that has been in ``origin`` longest: it is the owner's, in ``state``.

        It waits for at most ``seconds``, and at most :data:`SLICE_SECONDS`; other threads run meanwhile.

        Returns:
            The slot, or None if there was none in time. Callers that wait longer check their peers and call it again.
        """
        slot = self._table.take(origin, state, owner, min(seconds, SLICE_SECONDS))
        return None if slot < 0 else slot

    def take_all(self, origin: State, state: State, owner: int, most: int, seconds: float) -> list[int]:
        """Take up to ``most`` slots, oldest first. It waits for the first one only, as :meth:`take` does."""
        taken: list[int] = []
        wait = min(seconds, SLICE_SECONDS)
        while len(taken) < most:
            slot = self._table.take(origin, state, owner, 0.0 if taken else wait)
            if slot < 0:
                break
            taken.append(slot)
        return taken

    def arrange(self, order: Sequence[int], parts: Sequence[tuple[State, int, int]]) -> None:
        """Set all slots at once, in time in proportion to them; only while no other process uses them.

        Args:
            order: All slots, the oldest first.
            parts: The state, the owner and the number of the first of them, of the next, and so on; the rest are free.
        """
        words = np.arange(1, len(order) + 1, dtype=np.uint64) << np.uint64(18)
        first = 0
        for state, owner, count in parts:
            words[first : first + count] |= np.uint64(owner << 2 | state)
            first += count
        self._words[np.array(order, dtype=np.int64)] = words.view(np.int64)
        self._head[_TICKET] = len(order)

    def give(self, slot: int, origin: State, state: State, owner: int) -> bool:
        """Put a slot that is the owner's in ``origin`` into ``state``, last in the order; False if it is not."""
        return self._table.give(slot, origin, state, owner)

    def give_all(self, slots: Sequence[int], origin: State, state: State, owner: int) -> None:
        """As :meth:`give`, for each of some slots."""
        for slot in slots:
            self._table.give(slot, origin, state, owner)

    def reclaim(self, owner: int) -> tuple[int, int]:
        """Take the slots of a dead owner.

        Returns:
            How many slots it was writing, which are free now, and how many it was reading, which are full again and at
            their old position in the order.
        """
        return self._table.reclaim(owner)

    def owner(self, slot: int) -> int:
        """The owner of a slot; 0 if it has none."""
        return int(self._words[slot]) >> 2 & 0xFFFF

    def state(self, slot: int) -> State:
        """The state of a slot."""
        return State(int(self._words[slot]) & 3)

    def order(self) -> list[int]:
        """All slots, that which will be taken first before the others; other processes may change it meanwhile."""
        order: list[int] = np.argsort(self._words.view(np.uint64) >> 18, kind="stable").tolist()
        return order

    def contents(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """For each slot that is full or being read a number that is larger for what was written later, else -1.

        As long as a slot has the same number, nobody writes to it.
        """
        words = self._words.view(np.uint64).copy()
        return np.where((words & 3) >= State.FULL, (words >> 18).astype(np.int64), -1)

    def counts(self) -> dict[State, int]:
        """How many slots are in each state; other processes may change them meanwhile."""
        states = (self._words & 3).tolist()
        return {state: states.count(state) for state in State}

    @property
    def written(self) -> int:
        """How many times a slot went from being written to full."""
        return int(self._head[_WRITTEN])

    @property
    def read(self) -> int:
        """How many times a slot went from being read to free."""
        return int(self._head[_READ])

    def set_counts(self, written: int, read: int) -> None:
        """Overwrite both counts; only while no other process counts."""
        self._head[_WRITTEN], self._head[_READ] = written, read

    def wake_all(self) -> None:
        """Wake every waiting process, to look again."""
        self._table.wake_all()


class SlotQueue:
    """A queue of slot numbers between processes, for any number of them: first in, first out.

    It can be used for both queues of ``DistributedStorage.sample``. It holds each number at most once, and None up to
    ``num_slots + 64`` times. It can be pickled while a process that has it is alive.

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
        """Append a slot's number, or None.

        Args:
            index: The number, or None.

        Raises:
            InvalidInputError: If it is not the number of a slot, or already in the queue. Nothing was changed.
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
        """Remove and return the first number (or None that was put).

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Raises:
            WaitTimeoutError: (a TimeoutError) if the queue stayed empty.
        """
        if timeout is not None:
            check_seconds("get()", timeout=timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_SECONDS if end is None else end - time.monotonic()
            place = self._slots.take(State.FULL, State.FREE, 0, max(left, 0.0))
            if place is not None:
                return place if place < self._count else None
            if left <= 0:
                raise WaitTimeoutError(f"nothing came into the queue of {self._count} slots within {timeout} seconds")

    def qsize(self) -> int:
        """The length of the queue, numbers and Nones."""
        return self._slots.counts()[State.FULL]

    def empty(self) -> bool:
        """True if the queue is empty."""
        return self.qsize() == 0

    def __getstate__(self) -> tuple[int, SharedMemory]:
        return self._count, self._segment

    def __setstate__(self, state: tuple[int, SharedMemory]) -> None:
        self._open(*state)
