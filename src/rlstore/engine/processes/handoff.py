"""Rollouts on their way from actors to learners: who fills which slot, who empties it, and what becomes of the dead."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes.peers import Peers
from rlstore.engine.processes.slots import Slots, State
from rlstore.errors import PeerLostError, StorageClosedError, StorageError, WaitTimeoutError
from rlstore.kernels import add_to_word

MAKER = 1  # the number of the peer that made the memory: the first that joins
# How often those who need not wait look for the dead.
_LOOK_SECONDS = 1.0

# Words that all processes add to or (the first two) set.
_CLOSED, _PUBLISHED, _ABANDONED, _RECLAIMED = range(4)
_WORDS = 8


class Handoff:
    """``count`` slots, and the peers that hand them to one another, in shared memory.

    A slot goes from free to writing (an actor's) to full to reading (a learner's) to free. Only one learner collects at
    a time: two that each held half a batch would wait for each other.

    Args:
        segment: Where the next pieces are this hand-off's, as :meth:`pieces` names them; zero at first.
        count: The slots.
    """

    def __init__(self, segment: SharedMemory, count: int) -> None:
        peers, slots, turn, words = (segment.carve(*piece) for piece in self.pieces(count))
        self.peers, self.slots, self.count = Peers(peers), Slots(slots), count
        self.turn = Slots(turn)  # its one slot is the right to collect
        self._words: Tensor = words
        self._numbers: Any = words.numpy()

    @staticmethod
    def pieces(count: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The pieces of a segment that the hand-off of ``count`` slots takes."""
        return [Peers.shape(), Slots.shape(count), Slots.shape(1), ((_WORDS,), torch.int64)]

    # ---------------------------------------------------------------------------------------------- what all see

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called, in whatever process."""
        return bool(self._numbers[_CLOSED])

    def close(self) -> None:
        """Nobody is to go on: who waits is told within a fraction of a second."""
        self._numbers[_CLOSED] = 1
        self.slots.wake_all()
        self.turn.wake_all()

    def check_open(self) -> None:
        """Raise StorageClosedError if the storage was closed."""
        if self.closed:
            raise StorageClosedError("the storage was closed, here or in another process")

    @property
    def published(self) -> int:
        """The newest version that a learner published."""
        return int(self._numbers[_PUBLISHED])

    @published.setter
    def published(self, version: int) -> None:
        self._numbers[_PUBLISHED] = version

    @property
    def served(self) -> int:
        """Rollouts that were read and released."""
        return self.slots.read

    @property
    def committed(self) -> int:
        """Rollouts that were completed."""
        return self.slots.written

    @property
    def abandoned(self) -> int:
        """Rollouts that an actor gave up itself."""
        return int(self._numbers[_ABANDONED])

    @property
    def reclaimed(self) -> int:
        """Rollouts that were being written by actors that died."""
        return int(self._numbers[_RECLAIMED])

    def set_counts(self, served: int, abandoned: int, reclaimed: int) -> None:
        """Go on from counts that were saved, with the rollouts that are here; only while nobody else counts."""
        counts = self.slots.counts()
        self.slots.set_counts(served + counts[State.FULL] + counts[State.READING], served)
        self._numbers[_ABANDONED : _RECLAIMED + 1] = abandoned, reclaimed

    def add(self, word: int, count: int) -> None:
        """Add to a count, for all processes at once."""
        if count:
            add_to_word(self._words, word, count)

    # ---------------------------------------------------------------------------------------------- the dead

    def sweep(self) -> None:
        """Find the peers that died, take what they held, and warn of each: once, in the process that finds it."""
        for peer in self.peers.sweep(self._reclaim):
            warnings.warn(
                f"{self.peers.describe(peer)} died without a word. The slots that it was writing are free again, and "
                "those that it was reading are full again.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _reclaim(self, peer: int) -> None:
        written, _ = self.slots.reclaim(peer)
        self.turn.reclaim(peer)
        self.add(_RECLAIMED, written)

    def holding(self, role: str) -> str:
        """Who of a role takes part, and the slots that each holds, in words."""
        held: dict[int, list[int]] = {}
        for slot in range(self.count):
            owner = self.slots.owner(slot)
            if owner:
                held.setdefault(owner, []).append(slot)
        parts = [
            f"{self.peers.describe(peer)} holding {_slot_names(held.get(peer, []))}" for peer in self.peers.here(role)
        ]
        return f"{len(parts)} {role}s take part: {', '.join(parts)}" if parts else f"no {role} takes part"


def _slot_names(slots: list[int]) -> str:
    if not slots:
        return "no slot"
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


class Member:
    """One handle's part in a hand-off. It joins when it is first used, and anew in a process that was forked off.

    It leaves when it is closed or let go of, or its process ends in good order; else it is found dead.

    Args:
        handoff: What it takes part in.
        role: "maker", "actor" or "learner".
        name: How errors call it.
        timeout: Seconds that it waits unless it is told otherwise.
    """

    def __init__(self, handoff: Handoff, role: str, name: str | None, timeout: float) -> None:
        self.handoff, self.role, self.name, self.timeout = handoff, role, name, timeout
        self._number, self._pid = 0, 0
        self._end: Finalize | None = None
        self._mourned: set[int] = set()  # the dead that no longer explain why it waits
        self._looked = 0.0  # when it last looked for the dead

    @property
    def number(self) -> int:
        """This peer's number, in this process."""
        if self._pid != os.getpid():
            self._number = self.handoff.peers.join(self.role, self.name)
            self._pid = os.getpid()
            self._end = Finalize(self, _leave, (self.handoff, self._number), exitpriority=10)
        return self._number

    def leave(self) -> None:
        """End this peer in good order. What it was writing is free, and what it was reading is full again."""
        if self._end is not None and self._pid == os.getpid():
            self._end()
        self._number, self._pid, self._end = 0, 0, None

    # ---------------------------------------------------------------------------------------------- actors

    def reserve(self, seconds: float | None = None) -> int:
        """A free slot, now this member's to write.

        Raises:
            PeerLostError: If the process that made the storage is gone, or (at the deadline) learners are.
            WaitTimeoutError: At the deadline, if nobody is gone.
            StorageClosedError: If the storage was closed.
        """
        seconds = self.timeout if seconds is None else seconds
        end = time.monotonic() + seconds
        slot = self._take(self.handoff.slots, State.FREE, State.WRITING, end, self._check_maker, self._none_free)
        self._mourned.update(self.handoff.peers.lost("learner"))
        return slot

    def try_reserve(self) -> int | None:
        """A free slot, now this member's to write, or None if there is none now."""
        self.handoff.check_open()
        return self.handoff.slots.take(State.FREE, State.WRITING, self.number, 0.0)

    def commit(self, slot: int) -> None:
        """The slot is written: it is full."""
        if not self.handoff.slots.give(slot, State.WRITING, State.FULL, self.number):
            raise StorageError(f"slot {slot} is not being written by this handle, and cannot be committed")

    def is_writing(self, slot: int) -> bool:
        """True if a slot is this member's to write, in this process."""
        return self._pid == os.getpid() and self.handoff.slots.owner(slot) == self._number

    def abandon(self, slot: int, count: int = 1) -> None:
        """The slot was not written after all: it is free again."""
        if self.handoff.slots.give(slot, State.WRITING, State.FREE, self.number):
            self.handoff.add(_ABANDONED, count)

    def _check_maker(self) -> None:
        peers = self.handoff.peers
        if self.role == "actor" and not peers.is_alive(MAKER):
            raise PeerLostError(f"the {peers.describe(MAKER)}, which made the storage, is gone: nobody reads any more")

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
        """The ``count`` slots that have been full longest, now this member's to read.

        Args:
            count: How many.
            seconds: How long it waits; infinity for no deadline.
            check: Called now and then while it waits; it may raise.

        Raises:
            PeerLostError: At the deadline, if actors died since it last collected; it names them.
            WaitTimeoutError: At the deadline, if nobody died.
            StorageClosedError: If the storage was closed. Whatever is raised, nothing was taken.
        """
        handoff, seconds = self.handoff, self.timeout if seconds is None else seconds
        end = time.monotonic() + seconds
        taken: list[int] = []
        none_full = partial(self.overdue, count, seconds)
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()
        try:
            self._take(handoff.turn, State.FREE, State.WRITING, end, check, none_full)
            while len(taken) < count:
                taken.append(self._take(handoff.slots, State.FULL, State.READING, end, check, none_full))
            handoff.turn.give(0, State.WRITING, State.FREE, self.number)
        except BaseException:
            self.put_back()
            raise
        self._mourned.update(handoff.peers.lost("actor"))
        return taken

    def overdue(self, count: int, seconds: float) -> StorageError:
        """The error of a batch of ``count`` rollouts that did not come within so many seconds."""
        self.handoff.sweep()
        full = self.handoff.slots.counts()[State.FULL]
        return self._overdue(
            f"a batch of {count} rollouts did not come within {seconds:g} seconds; {full} are complete and not taken",
            "actor",
        )

    def try_collect(self, most: int) -> list[int]:
        """Up to ``most`` slots that are full now, the oldest first, now this member's to read."""
        self.handoff.check_open()
        taken: list[int] = []
        while len(taken) < most:
            slot = self.handoff.slots.take(State.FULL, State.READING, self.number, 0.0)
            if slot is None:
                break
            taken.append(slot)
        return taken

    def release(self, slots: list[int]) -> None:
        """The slots are read: they are free."""
        for slot in slots:
            self.handoff.slots.give(slot, State.READING, State.FREE, self.number)

    def put_back(self) -> None:
        """What this member was reading is full again, at its old place (and what it was writing is free)."""
        self.handoff.slots.reclaim(self.number)
        self.handoff.turn.reclaim(self.number)

    # ---------------------------------------------------------------------------------------------- waiting

    def _take(
        self,
        slots: Slots,
        origin: State,
        state: State,
        end: float,
        check: Callable[[], None] | None,
        overdue: Callable[[], StorageError],
    ) -> int:
        while True:
            self.handoff.check_open()
            left = max(end - time.monotonic(), 0.0)
            slot = slots.take(origin, state, self.number, left)
            if slot is None:
                self.handoff.check_open()
                if check is not None:
                    check()
                self._look()
                if left > 0.0:
                    continue
                slot = slots.take(origin, state, self.number, 0.0)  # it may have been a dead one's
            if slot is None:
                raise overdue()
            return slot

    def _look(self) -> None:
        self._looked = time.monotonic()
        self.handoff.sweep()

    def _overdue(self, what: str, awaited: str, others: str | None = None) -> StorageError:
        """The error of a deadline: who died, or else who lives and what they hold."""
        peers = self.handoff.peers
        dead = [peers.describe(peer) for peer in peers.lost(awaited) if peer not in self._mourned]
        here = "; ".join(self.handoff.holding(role) for role in (awaited, others) if role)
        if dead:
            return PeerLostError(f"{what}. Gone are: {', '.join(dead)}. Now {here}.")
        return WaitTimeoutError(f"{what}. Now {here}.")


def _leave(handoff: Handoff, number: int) -> None:
    if number == MAKER:
        handoff.close()  # also where its process ends with an error: actors need not find out that nobody reads
    written, _ = handoff.slots.reclaim(number)
    handoff.add(_ABANDONED, written)
    handoff.turn.reclaim(number)
    handoff.peers.leave(number)
