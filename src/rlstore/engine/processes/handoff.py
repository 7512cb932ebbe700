"""The hand-off of rollouts from actors to learners: which peer has which slot, and what becomes of dead peers' slots.

A slot goes from free to writing (an actor's) to full to reading (a learner's) to free. What a dead actor was writing is
free again, and what a dead learner was reading is full again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.calls import warn_caller
from rlstore.engine.guard import close_guard, new_guard, raise_interruption
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes.peers import Peers
from rlstore.engine.processes.slots import Slots, State
from rlstore.engine.processes.waits import WORDS, Waits
from rlstore.errors import PeerLostError, StorageClosedError, StorageError, WaitTimeoutError
from rlstore.kernels import add_to_word

MAKER = 1  # the number of the peer that created the memory: the first that joins
# How often a learner that never waits sweeps for dead peers.
_SWEEP_SECONDS = 1.0

# Words in shared memory. Any process may set the first two (one store) or add to the others (atomically).
_CLOSED, _PUBLISHED, _ABANDONED, _RECLAIMED, _LOST, _ACTOR_WAITS = range(6)
_LEARNER_WAITS = _ACTOR_WAITS + WORDS
_WORDS = _LEARNER_WAITS + WORDS


class Handoff:
    """``count`` slots, and the peers that hand them to one another, in shared memory.

    Only one learner collects at a time: two that each held half a batch would wait for each other.

    Args:
        segment: Zeros, whose next pieces are those of :meth:`pieces`.
        count: The slots.

    Attributes:
        actor_waits: The slots that actors did not get at once.
        learner_waits: The batches that were not there when learners asked for them.
    """

    def __init__(self, segment: SharedMemory, count: int) -> None:
        peers, slots, turn, words = (segment.carve(*piece) for piece in self.pieces(count))
        self.peers, self.slots, self.count = Peers(peers), Slots(slots), count
        self.turn = Slots(turn)  # one slot: the right to collect
        self._words: Tensor = words
        self._numbers: Any = words.numpy()
        self.actor_waits, self.learner_waits = Waits(words, _ACTOR_WAITS), Waits(words, _LEARNER_WAITS)

    @staticmethod
    def pieces(count: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The pieces of a segment that the hand-off of ``count`` slots takes."""
        return [Peers.shape(), Slots.shape(count), Slots.shape(1), ((_WORDS,), torch.int64)]

    # ---------------------------------------------------------------------------------------------- shared words

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called, in any process."""
        return bool(self._numbers[_CLOSED])

    def close(self) -> None:
        """End the hand-off for every peer; those that wait raise within a fraction of a second."""
        self._numbers[_CLOSED] = 1
        self.slots.wake_all()
        self.turn.wake_all()

    def check_open(self) -> None:
        """Raise StorageClosedError if the storage was closed."""
        if self.closed:
            raise StorageClosedError("the storage was closed, here or in another process")

    @property
    def published(self) -> int:
        """The newest policy version that a learner published."""
        return int(self._numbers[_PUBLISHED])

    @published.setter
    def published(self, version: int) -> None:
        self._numbers[_PUBLISHED] = version

    def counts(self) -> dict[str, int]:
        """How many rollouts were completed, read and released, discarded by actors, and reclaimed from dead actors."""
        return {
            "committed": self.slots.written,
            "served": self.slots.read,
            "abandoned": int(self._numbers[_ABANDONED]),
            "reclaimed": int(self._numbers[_RECLAIMED]),
        }

    @property
    def lost(self) -> int:
        """Peers that were found dead."""
        return int(self._numbers[_LOST])

    def set_counts(self, served: int, abandoned: int, reclaimed: int) -> None:
        """Restore saved counts, given the rollouts that are held now; only while no other process counts."""
        counts = self.slots.counts()
        self.slots.set_counts(served + counts[State.FULL] + counts[State.READING], served)
        self._numbers[_ABANDONED : _RECLAIMED + 1] = abandoned, reclaimed

    def add(self, word: int, count: int) -> None:
        """Add to a word atomically."""
        if count:
            add_to_word(self._words, word, count)

    # ---------------------------------------------------------------------------------------------- dead peers

    def sweep(self) -> None:
        """Find dead peers, reclaim what they held, and warn of each: once, in the process that finds it."""
        found = self.peers.sweep(self._reclaim)
        self.add(_LOST, len(found))
        for peer in found:
            warn_caller(
                f"{self.peers.describe(peer)} died. The slots that it was writing are free again, and those that it "
                "was reading are full again."
            )

    def _reclaim(self, peer: int) -> None:
        written, _ = self.slots.reclaim(peer)
        self.turn.reclaim(peer)
        self.add(_RECLAIMED, written)

    def describe(self, role: str) -> str:
        """The peers of a role and the slots that each holds, for messages."""
        held: dict[int, list[int]] = {}
        for slot in range(self.count):
            held.setdefault(self.slots.owner(slot), []).append(slot)
        parts = [
            f"{self.peers.describe(peer)} holding {_slot_names(held.get(peer, []))}" for peer in self.peers.here(role)
        ]
        return f"{len(parts)} {role}s take part: {', '.join(parts)}" if parts else f"no {role} takes part"


def _slot_names(slots: list[int]) -> str:
    if not slots:
        return "no slot"
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


class Member:
    """One handle's part in a hand-off. It joins when it is first used, and again in a process that was forked.

    It leaves when it is closed or garbage-collected, or when its process exits; if the process is killed, other peers
    find it dead.

    Args:
        handoff: The hand-off.
        role: "maker", "actor" or "learner".
        name: Its name in messages.
        timeout: Seconds that it waits by default.
    """

    def __init__(self, handoff: Handoff, role: str, name: str | None, timeout: float) -> None:
        self.handoff, self.role, self.name, self.timeout = handoff, role, name, timeout
        self._number, self._pid, self._guard = 0, 0, new_guard()
        self._end: Finalize | None = None
        # The lost peers that do not explain a wait, since it got slots after they died; and how many had been lost.
        self._excluded, self._lost = set[int](), 0
        self._swept = 0.0  # when it last swept

    @property
    def number(self) -> int:
        """This peer's number, in this process."""
        if self._pid != os.getpid():
            with self._guard:
                self._join()
        return self._number

    def _join(self) -> None:
        if self._pid != os.getpid():  # no other thread has done it
            self._number = self.handoff.peers.join(self.role, self.name)
            self._end = Finalize(self, _leave, (self.handoff, self._number), exitpriority=10)
            self._pid = os.getpid()

    def leave(self) -> None:
        """Remove this peer, which is closed. What it was writing is free, and what it was reading is full again."""
        if self._end is not None and self._pid == os.getpid():
            self._end()
        self._number, self._pid, self._end = 0, 0, None
        close_guard(self._guard, self.role)

    # ---------------------------------------------------------------------------------------------- actors

    def reserve(self, seconds: float | None = None) -> int:
        """Wait for a free slot and take it for writing; the caller is :class:`uninterrupted`, or would lose it.

        Raises:
            PeerLostError: If the process that created the storage is dead, or (at the deadline) learners died.
            WaitTimeoutError: At the deadline, if no learner died.
            StorageClosedError: If the storage was closed.
        """
        slot = self.try_reserve()
        if slot is None:
            with self.handoff.actor_waits.counted():
                slot = self._await_free(time.monotonic() + (self.timeout if seconds is None else seconds))
        self._exclude_lost("learner")
        return slot

    def _await_free(self, end: float) -> int:
        slots, states = self.handoff.slots, (State.FREE, State.WRITING)
        return self._take(slots, *states, 1, end, self._check_maker, self._none_free)[0]

    def try_reserve(self) -> int | None:
        """Take a free slot for writing, if there is one now."""
        self.handoff.check_open()
        return self.handoff.slots.take(State.FREE, State.WRITING, self.number, 0.0)

    def commit(self, slot: int) -> None:
        """Mark a slot as written: it is full."""
        if not self.handoff.slots.give(slot, State.WRITING, State.FULL, self.number):
            raise StorageError(f"slot {slot} is not being written by this handle, and cannot be committed")

    def is_writing(self, slot: int) -> bool:
        """True if this member owns a slot, in this process."""
        return self._pid == os.getpid() and self.handoff.slots.owner(slot) == self._number

    def abandon(self, slot: int, count: int = 1) -> None:
        """Free a slot that was being written, and count it as ``count`` abandoned rollouts."""
        if self.is_writing(slot) and self.handoff.slots.give(slot, State.WRITING, State.FREE, self._number):
            self.handoff.add(_ABANDONED, count)

    def _check_maker(self) -> None:
        peers = self.handoff.peers
        if self.role == "actor" and not peers.is_alive(MAKER):
            raise PeerLostError(
                f"the {peers.describe(MAKER)}, which created the storage, is dead: rollouts are not read"
            )

    def _none_free(self) -> StorageError:
        handoff, counts = self.handoff, self.handoff.slots.counts()
        return self._overdue(
            f"no slot became free: of {handoff.count}, {counts[State.FULL]} are full, {counts[State.WRITING]} being "
            f"written, {counts[State.READING]} being read",
            "learner",
            "actor",
        )

    # ---------------------------------------------------------------------------------------------- learners

    def collect(self, count: int, seconds: float | None, check: Callable[[], None] | None = None) -> list[int]:
        """Wait for ``count`` full slots and take them for reading, oldest first.

        Args:
            count: How many.
            seconds: How long to wait; infinity for no deadline, None for the default.
            check: Called at intervals while it waits; it may raise.

        Raises:
            PeerLostError: At the deadline, if actors died since it last collected; it names them.
            WaitTimeoutError: At the deadline, if no actor died.
            StorageClosedError: If the storage was closed. After any error no slot is held.
        """
        handoff, number, seconds = self.handoff, self.number, self.timeout if seconds is None else seconds
        now = time.monotonic()
        end, overdue = now + seconds, partial(self.batch_overdue, count, seconds)
        if now - self._swept > _SWEEP_SECONDS:
            self._sweep()
        try:
            self._take(handoff.turn, State.FREE, State.WRITING, 1, end, check, overdue)
            taken = self._take(handoff.slots, State.FULL, State.READING, count, end, check, overdue)
            handoff.turn.give(0, State.WRITING, State.FREE, number)
        except BaseException:
            self.put_back()
            raise
        self._exclude_lost("actor")
        return taken

    def batch_overdue(self, count: int, seconds: float) -> StorageError:
        """The error for a batch of ``count`` rollouts that was not complete within so many seconds."""
        self.handoff.sweep()
        full = self.handoff.slots.counts()[State.FULL]
        return self._overdue(
            f"a batch of {count} rollouts did not come within {seconds:g} seconds; {full} are complete and not taken",
            "actor",
        )

    def try_collect(self, most: int) -> list[int]:
        """Take up to ``most`` slots that are full now for reading, oldest first."""
        self.handoff.check_open()
        return self.handoff.slots.take_all(State.FULL, State.READING, self.number, most, 0.0)

    def release(self, slots: Sequence[int]) -> None:
        """Mark slots as read: they are free."""
        self.handoff.slots.give_all(slots, State.READING, State.FREE, self.number)

    def put_back(self) -> None:
        """Return all slots: those it was reading are full again, in their old order, those it was writing are free."""
        self.handoff.slots.reclaim(self.number)
        self.handoff.turn.reclaim(self.number)

    # ---------------------------------------------------------------------------------------------- waiting

    def _take(
        self,
        slots: Slots,
        origin: State,
        state: State,
        count: int,
        end: float,
        check: Callable[[], None] | None,
        overdue: Callable[[], StorageError],
    ) -> list[int]:
        """Take ``count`` slots, waiting for them until ``end``. If it raises, it may hold some of them."""
        taken: list[int] = []
        number, is_last = self.number, False
        while True:
            self.handoff.check_open()
            raise_interruption()
            left = max(end - time.monotonic(), 0.0)
            found = slots.take_all(origin, state, number, count - len(taken), left)
            taken += found
            if len(taken) == count:
                return taken
            if found:
                continue
            if is_last:
                raise overdue()
            self.handoff.check_open()
            if check is not None:
                check()
            self._sweep()
            is_last = left == 0.0  # once more, for a slot that the sweep reclaimed

    def _sweep(self) -> None:
        self._swept = time.monotonic()
        self.handoff.sweep()

    def _exclude_lost(self, role: str) -> None:
        """Slots came: the peers of a role that were lost before do not explain the next wait."""
        lost = self.handoff.lost
        if lost != self._lost:
            self._excluded.update(self.handoff.peers.lost(role))
            self._lost = lost

    def _overdue(self, what: str, awaited: str, others: str | None = None) -> StorageError:
        """The error at a deadline: which peers died, or else which are alive and what they hold."""
        peers = self.handoff.peers
        dead = [peers.describe(peer) for peer in peers.lost(awaited) if peer not in self._excluded]
        here = "; ".join(self.handoff.describe(role) for role in (awaited, others) if role)
        if dead:
            return PeerLostError(f"{what}. Dead: {', '.join(dead)}. Now {here}.")
        return WaitTimeoutError(f"{what}. Now {here}.")


def _leave(handoff: Handoff, number: int) -> None:
    if number == MAKER:
        handoff.close()  # also if its process exits with an error: actors need not wait until they find it dead
    written, _ = handoff.slots.reclaim(number)
    handoff.add(_ABANDONED, written)
    handoff.turn.reclaim(number)
    handoff.peers.leave(number)
