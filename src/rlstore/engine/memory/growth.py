"""Memory that is taken as rows come: what the next rows take, and whether it is free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlstore.engine.disk.mapped import NEED_LESS, size_text
from rlstore.engine.memory import capacity
from rlstore.errors import DoesNotFitError

ENDLESS = 2**62  # steps that may be written if nothing limits them
STEP = 256 << 20  # bytes that are taken before it is asked again what is free
RESERVE = 128 << 20  # bytes that are left to everything else: batches, tables that grow, copies for a save

REFUSED = "Nothing was written. Everything that is held can still be sampled and saved."

_GUESSES = 4  # of how many steps fit

Counts = npt.NDArray[np.int64]  # of each lane


class RowBlock(NamedTuple):
    """A block whose pages are taken when its rows are written: ``[lanes, rows]`` rows of ``row_bytes``."""

    address: int
    lanes: int
    rows: int
    row_bytes: int
    page: int

    def taken(self, since: Counts, count: Counts) -> int:
        """Bytes of the pages that hold the ``count`` rows of each lane from the time ``since`` on."""
        first, count = since % self.rows, np.minimum(count, self.rows)
        beyond = np.maximum(first + count - self.rows, 0)  # those of them that have wrapped
        begin = np.stack((np.zeros_like(first), first), 1)
        end = np.stack((beyond, first + count - beyond), 1)
        lane = self.address + np.arange(self.lanes)[:, None] * (self.rows * self.row_bytes)
        # In the order of addresses, so that a page that two of them share is counted with the first.
        is_any = (end > begin).ravel() & (self.row_bytes > 0)
        low = ((lane + begin * self.row_bytes) // self.page).ravel()[is_any]
        high = ((lane + end * self.row_bytes - 1) // self.page).ravel()[is_any]
        before = np.concatenate((low[:1] - 1, np.maximum.accumulate(high)[:-1]))
        return int(np.maximum(high - np.maximum(low, before + 1) + 1, 0).sum()) * self.page


class Growth:
    """The memory of a ring whose lanes hold ``count`` rows since the time ``since``, and of its next rows.

    Args:
        blocks: All that is taken row by row.
        tables: Those of episodes, with the entries of all lanes as one row: each row may be an episode of its own.
        since: The first row of each lane in this memory, int64 ``[lanes]``.
        count: The rows of each lane since then, with what follows the newest, int64 ``[lanes]``.
        rows: Rows that a lane has memory for.
    """

    def __init__(
        self, blocks: Sequence[RowBlock], tables: Sequence[RowBlock], since: Counts, count: Counts, rows: int
    ) -> None:
        self._blocks, self._tables, self._since, self._count, self._rows = blocks, tables, since, count, rows
        self._taken = self._bytes_of(count)

    @cached_property
    def _ram(self) -> tuple[int, str] | None:
        """What is free, and where that was found; it is looked at once, which takes a millisecond."""
        return capacity.free_ram()

    @property
    def taken(self) -> int:
        """Bytes of all rows, without tables."""
        return self._bytes_of_rows(self._count)

    def _bytes_of_rows(self, count: Counts) -> int:
        return sum(block.taken(self._since, count) for block in self._blocks)

    def _bytes_of(self, count: Counts) -> int:
        first, deepest = np.zeros(1, np.int64), count.max(keepdims=True)
        return self._bytes_of_rows(count) + sum(table.taken(first, deepest) for table in self._tables)

    def more(self, steps: int) -> int:
        """Bytes that are taken, at most, when so many steps are written."""
        return self._bytes_of(self._count + steps) - self._taken

    def room(self, share: float, owner: str, held: str) -> int:
        """How many steps may be written before this has to be asked again.

        Args:
            share: The part of the whole ring that this is: others may be taking memory for the rest.
            owner: The storage's class name, for the error.
            held: What it holds, likewise.

        Raises:
            DoesNotFitError: (a MemoryError) if there is no memory for the next step.
        """
        left = self._rows - int(self._count.min())
        remaining = self.more(left)
        ram = self._ram if remaining >= capacity.MUCH else None
        if ram is None:
            return ENDLESS
        free, where = ram
        most = min(STEP * share, free - RESERVE)
        if remaining <= most:
            return ENDLESS
        room = self._fitting(left, most)
        if room == 0 and self.more(1) <= free - RESERVE:
            room = 1  # many lanes begin a page each
        if room == 0:
            raise self._refusal(self.more(1), f"{owner} holds {held}", "the next step needs", free, where)
        return room

    def require(self, steps: int, owner: str, held: str) -> None:
        """Refuse so many steps, each of which may be an episode, if there is not enough memory for all of them."""
        more = self.more(steps) + min(steps, self._rows) * sum(table.row_bytes for table in self._tables)
        ram = self._ram if more >= capacity.MUCH else None
        if ram is not None and more > ram[0] - RESERVE:
            raise self._refusal(more, f"{owner} holds {held}", f"{steps:,} more steps may need", *ram)

    def _refusal(self, more: int, held: str, needs: str, free: int, where: str) -> DoesNotFitError:
        return DoesNotFitError(
            f"{held} in {size_text(self.taken)}; {needs} {size_text(more)}, and {size_text(free)} are free in RAM "
            f"({where}), of which {size_text(RESERVE)} are kept free for everything else. {REFUSED} "
            f"{NEED_LESS.format(larger='large enough')}"
        )

    def _fitting(self, left: int, most: float) -> int:
        """A number of steps below ``left`` that take no more than ``most`` bytes, and not many fewer than do."""
        of_step = sum(block.lanes * block.row_bytes for block in (*self._blocks, *self._tables))
        fits, low, high = 0, 1, left
        guess = int(most // of_step)
        for _ in range(_GUESSES):
            guess = min(max(guess, low), high - 1)
            if guess < low:
                break
            more = self.more(guess)
            if more <= most:
                fits, low, guess = guess, guess + 1, guess + int((most - more) // of_step)
            else:
                high, guess = guess, guess // 2
        return fits
