"""Who writes which lanes of a ring, in this process and in others; a rate limit for all of them; and a pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlstore.engine.guard import as_block, new_guard
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes.limiter import Limiter
from rlstore.engine.processes.peers import Peers
from rlstore.engine.processes.slots import SLICE_SECONDS
from rlstore.errors import InvalidInputError, PeerLostError, StorageClosedError, WaitTimeoutError
from rlstore.kernels import Guard, await_event, event_count, exchange_word, make_event

_HELD, _CLOSED, _MAKER, _CHANGED = range(4)  # words of the board; the last is an event: any of this has changed
_BOARD = 8
_PAUSED, _LIMITED = 1, 2  # bits of the first: nobody may write; nobody may write beyond the limits of its lanes
_NOBODY = 0
# The word of a lane: its writer, that this one is freeing it, and that it is reserved for a copy of this one's handle.
_PEER, _FINISHING, _OFFERED = 0xFFFF, 1 << 16, 1 << 17


class LaneControl:
    """A word for each lane with its writer, and one that says that it writes just now; in shared memory if asked.

    A writer sets its busy word, checks for a pause, and writes; a pause is set first, and then waits until no word is
    busy. Both are exchanges of one word, so one of the two always sees the other. Limits, up to which lanes may be
    written, are set in a pause, and raised afterwards.

    Args:
        lanes: Lanes of the ring.
        segment: The memory, in a process that is handed the control; None makes it.
        guard: That of a storage which other processes cannot write to; None if they can.

    Attributes:
        turn: Threads of one process write one after another. Without other processes nothing is read meanwhile: tables
            may grow, and the rows of a lane are not all its own.
    """

    def __init__(self, lanes: int, segment: SharedMemory | None = None, guard: Guard | None = None) -> None:
        pieces = [Peers.shape(), Limiter.shape(), ((3 * lanes + _BOARD,), torch.int64)]
        self.lanes, self.segment = lanes, segment
        self.reported: set[int] = set()  # the dead writers that this process has warned of
        self.turn = new_guard() if guard is None else guard
        if guard is None and segment is None:
            self.segment = SharedMemory.create(SharedMemory.bytes_of(pieces))
        carve = self.segment.carve if self.segment is not None else _zeros
        self.peers, self.limiter = Peers(carve(*pieces[0])), Limiter(carve(*pieces[1]))
        self._words = carve(*pieces[2])  # the board, writers [lanes], busy [lanes], limits [lanes]
        self._board: Any = self._words[:_BOARD].numpy()
        self._writers: Any = self._words[_BOARD : _BOARD + lanes].numpy()
        self._busy: Any = self._words[_BOARD + lanes : _BOARD + 2 * lanes].numpy()
        self._limits: Any = self._words[_BOARD + 2 * lanes :].numpy()
        if segment is None:
            self._board[_MAKER] = self.peers.join("maker")
            # Before multiprocessing waits for its children at the end: they would go on writing, with no reader.
            Finalize(self, _close, args=(self._words, self.limiter), exitpriority=15)

    # ---------------------------------------------------------------------------------------------- claims

    def free_lanes(self, wanted: int | range | None) -> range:
        """The lanes that a new writer is to have: a range, the first free ones of a number, or (None) all.

        Those of a range are not reserved for the copy of a handle any more.

        Raises:
            InvalidInputError: If there are none, with who has them.
        """
        if isinstance(wanted, range):
            if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= self.lanes:
                raise InvalidInputError(f"lanes is {wanted}; give a part of range(0, {self.lanes}), in steps of 1")
            self._take_reserved(wanted)
            return wanted
        if wanted is None:
            return range(self.lanes)
        is_whole = isinstance(wanted, (int, np.integer)) and not isinstance(wanted, bool)
        if not is_whole or not 1 <= wanted <= self.lanes:
            given = wanted if is_whole else f"a {type(wanted).__name__}"
            raise InvalidInputError(f"lanes is {given}; give a number from 1 to {self.lanes}, a range, or None for all")
        free = 0
        for lane in range(self.lanes):
            free = free + 1 if self._writers[lane] == _NOBODY else 0
            if free == wanted:
                return range(lane + 1 - wanted, lane + 1)
        taken = self._taken(range(self.lanes))
        problem = "every lane is taken" if wanted == 1 else f"there are no {wanted} free lanes next to each other"
        raise InvalidInputError(f"{problem}: {taken}. Close a writer first. Nothing was changed.")

    def claim(self, lanes: range, peer: int, recover: Callable[[int], None], given_by: int = _NOBODY) -> None:
        """Make a peer the writer of some lanes, of all of them or of none.

        Args:
            lanes: The lanes.
            peer: Who is to write them.
            recover: Repairs a lane whose writer is dead.
            given_by: A peer that hands them over.
        """
        self.peers.sweep(lambda dead: self.reclaim(dead, recover, peer))
        before = [int(word) for word in self._writers[lanes.start : lanes.stop]]
        for lane, word in zip(lanes, before, strict=True):
            if word & ~_OFFERED not in (_NOBODY, given_by) or not exchange_word(self._words, _BOARD + lane, word, peer):
                taken = self._taken(lanes, but=peer)
                for claimed, its_word in zip(range(lanes.start, lane), before, strict=False):
                    exchange_word(self._words, _BOARD + claimed, peer, its_word)
                raise InvalidInputError(f"lanes are taken: {taken}. A lane has one writer; close that one first.")

    def offer(self, peer: int) -> None:
        """Reserve the lanes of a peer whose handle is gone, and was never used, for copies of it in other processes."""
        self._exchange_all(peer, peer | _OFFERED)

    def release(self, peer: int) -> None:
        """Free the lanes of a peer that are reserved for copies of its handle."""
        if self._exchange_all(peer | _OFFERED, _NOBODY):
            self.peers.leave(peer)

    def _take_reserved(self, lanes: range) -> None:
        words = {int(word) for word in self._writers[lanes.start : lanes.stop]} - {_NOBODY}
        if not all(word & _OFFERED for word in words):
            return  # they cannot be had, and nothing is to change
        for lane in lanes:
            word = int(self._writers[lane])
            if word & _OFFERED:
                exchange_word(self._words, _BOARD + lane, word, _NOBODY)
        for giver in {word & _PEER for word in words}:
            if not (self._writers & _PEER == giver).any():
                self.peers.leave(giver)

    def _exchange_all(self, word: int, wanted: int) -> bool:
        lanes = np.flatnonzero(self._writers == word).tolist()
        return sum(exchange_word(self._words, _BOARD + lane, word, wanted) for lane in lanes) > 0

    def _taken(self, lanes: range, but: int = _NOBODY) -> str:
        """Who has which of some lanes, in words."""
        words = {lane: int(self._writers[lane]) & (_PEER | _OFFERED) for lane in lanes}
        parts = []
        for word in sorted(set(words.values()) - {_NOBODY, but}):
            own = [lane for lane in lanes if words[lane] == word]
            has = f"has given {own} to a process that has not used them yet" if word & _OFFERED else f"has {own}"
            parts.append(f"{self.peers.describe(word & _PEER)} {has}")
        if any(word & _OFFERED for word in words.values()):
            parts.append("if that process will not come, ask for them by number: writer(range(first, last + 1))")
        return "; ".join(parts)

    def give_back(self, peer: int, recover: Callable[[int], None]) -> None:
        """Repair the lanes of a peer of this process, and free them."""
        self.reclaim(peer, recover, peer | _FINISHING)

    def reclaim(self, dead: int, recover: Callable[[int], None], by: int | None = None) -> None:
        """Repair the lanes of a dead peer, and free them.

        Meanwhile they are those of ``by``, a peer of this process (None: the maker): no other process repairs them,
        and if this process dies too, another one will.
        """
        holder = int(self._board[_MAKER]) if by is None else by
        for lane in np.flatnonzero(self._writers & _PEER == dead).tolist():
            word = int(self._writers[lane])  # by now another may have repaired it, and a new writer have it
            if word & _PEER == dead and exchange_word(self._words, _BOARD + lane, word, holder):
                recover(lane)
                self._busy[lane] = 0
                exchange_word(self._words, _BOARD + lane, holder, _NOBODY)

    @property
    def has_writers(self) -> bool:
        """True if any lane has a writer."""
        return bool(self._writers.any())

    # ---------------------------------------------------------------------------------------------- writing

    def enter(self, lane: int, peer: int, seconds: float, written: torch.Tensor | None = None, steps: int = 1) -> None:
        """Begin a peer's write into its lanes, from ``lane`` on; it waits while it is held back.

        Args:
            lane: The first of its lanes.
            peer: The peer.
            seconds: How long it may wait.
            written: The rows of each of its lanes so far, int64 ``[lanes]``; None for a write that has no limit.
            steps: How many it is going to write to each.

        Raises:
            InvalidInputError: If the lanes were handed to another process.
            StorageClosedError: If the storage was closed.
            PeerLostError: If the process that made it died.
            WaitTimeoutError: If it was held back longer than ``seconds``.
        """
        place, end = _BOARD + self.lanes + lane, None
        while True:
            seen = event_count(self._words, _CHANGED)
            is_busy = exchange_word(self._words, place, 0, 1)  # else it is another's word, and left alone
            held = self._board[_HELD]
            may_write = not held or (held == _LIMITED and self._is_within(lane, written, steps))
            if is_busy and may_write and not self._board[_CLOSED] and self._writers[lane] == peer:
                return
            if is_busy:
                self.leave(lane)
            if self._writers[lane] != peer:
                taken = self._taken(range(lane, lane + 1)) or "its lanes are free again"
                raise InvalidInputError(f"this writer was given away: {taken}. Nothing was written.")
            if self._board[_CLOSED]:
                raise StorageClosedError("the storage was closed; nothing was written")
            end = time.monotonic() + seconds if end is None else end
            self.check_maker()
            if time.monotonic() > end:
                raise WaitTimeoutError(
                    f"the storage was paused for {seconds} seconds by its maker; nothing was written"
                )
            await_event(self._words, _CHANGED, seen, SLICE_SECONDS)

    def _is_within(self, lane: int, written: torch.Tensor | None, steps: int) -> bool:
        """Whether the limits let so many steps more be written to the lanes from ``lane`` on."""
        if written is None:
            return True
        return bool((written.numpy() + steps <= self._limits[lane : lane + len(written)]).all())

    def leave(self, lane: int) -> None:
        """End a write."""
        exchange_word(self._words, _BOARD + self.lanes + lane, 1, 0)
        if self._board[_HELD] & _PAUSED:
            make_event(self._words, _CHANGED)

    def check_maker(self) -> None:
        """Raise if the process that made the storage died: what is written would never be read."""
        if not self.peers.is_here(int(self._board[_MAKER])) and not self._board[_CLOSED]:
            raise PeerLostError(f"the {self.describe_maker()} of this storage is gone; nothing was written")

    def describe_maker(self) -> str:
        """The process that made the storage, in words."""
        return self.peers.describe(int(self._board[_MAKER]))

    # ---------------------------------------------------------------------------------------------- the maker

    @as_block
    def pause(self, seconds: float, sweep: Callable[[], object]) -> Iterator[None]:
        """Hold all writers back while the block runs; ``sweep`` finds those that died in the middle of a write."""
        end = time.monotonic() + seconds
        try:
            self._hold(_PAUSED, True)
            while True:
                seen = event_count(self._words, _CHANGED)
                if not self._busy.any():
                    break
                sweep()
                if time.monotonic() > end:
                    raise WaitTimeoutError(f"writers did not pause within {seconds} seconds: {self._taken_busy()}")
                await_event(self._words, _CHANGED, seen, SLICE_SECONDS)
            yield
        finally:
            self._hold(_PAUSED, False)

    def limit(self, stops: npt.NDArray[np.int64] | None) -> None:
        """Let each lane be written up to these rows from now on; None for no limit. The first are set in a pause."""
        if stops is None:
            self._hold(_LIMITED, False)
            return
        make_event(self._words, _CHANGED)  # what was read before is read before the limits are raised
        self._limits[:] = stops
        self._hold(_LIMITED, True)

    def _hold(self, bit: int, is_set: bool) -> None:
        while True:
            held = int(self._board[_HELD])
            if exchange_word(self._words, _HELD, held, held | bit if is_set else held & ~bit):
                break
        make_event(self._words, _CHANGED)

    def _taken_busy(self) -> str:
        lanes = np.flatnonzero(self._busy).tolist()
        return ", ".join(sorted({self.peers.describe(int(self._writers[lane]) & _PEER) for lane in lanes}))

    def close(self) -> None:
        """No writer may write any more; those that wait are woken."""
        _close(self._words, self.limiter)

    @property
    def is_closed(self) -> bool:
        """True once the storage was closed."""
        return bool(self._board[_CLOSED])


def _close(words: torch.Tensor, limiter: Limiter) -> None:
    exchange_word(words, _CLOSED, 0, 1)
    make_event(words, _CHANGED)
    limiter.wake_all()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype)
