"""What the host knows of a ring that is on the device, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlstore.kernels.cuda.rules import Report, is_done

_LEAST_FREE, _BREAKS, _INVALID, _REPEAT = 3, 4, 5, 7  # which of the words
_FIRST_LOOK, _LAST_LOOK = 8, 256  # writes between two looks at the words, if nothing calls for one earlier


class Watch:
    """How many episode indices are free, what is to be told of episodes, and how many values were invalid.

    A write takes at most one episode index of a lane, so those that were free at the last look, less the writes since,
    are a lower bound. A look is a copy into pinned memory; later writes ask whether it has finished. It is waited for
    only if the bound reaches 0 before.

    Args:
        words: Where the device keeps these counts, int64.
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words
        on_cuda = words.device.type == "cuda"
        with torch.inference_mode(False):
            self._seen = torch.zeros(len(words), dtype=torch.int64, pin_memory=on_cuda)
        self._event: Any = torch.cuda.Event() if on_cuda else None
        self._reported = 0  # breaks that has_broken() has reported
        self._repeat, self._has_told = -1, False  # a row, and whether repeat() has returned it
        self.report = Report()
        self.forget()

    def forget(self) -> None:
        """Start over: the counts were changed from outside."""
        self._free: int | None = None  # episode indices in every lane, at least
        self._least = 0  # free at the last look
        self._since = 0  # writes since then
        self._looking = False
        self._interval = _FIRST_LOOK

    def grow(self, count: int) -> None:
        """Every lane has so many free episode indices more."""
        if self._free is not None:
            self._free += count
            self._least += count

    def has_broken(self) -> bool:
        """True if a look has shown that episodes were broken off that were not reported yet."""
        if self._looking and is_done(self._event):
            self._take()
        reported, self._reported = self._reported, int(self._seen[_BREAKS])
        return self._reported > reported

    def repeat(self) -> int | None:
        """A row that repeats a final observation, once a look has shown that there is one; later None."""
        if self._has_told or self._repeat < 0:
            return None
        self._has_told = True
        return self._repeat

    def is_short(self, deep: int) -> bool:
        """True if the tables, of ``deep`` episodes a lane, have to grow before the next write."""
        while self._free is None or self._free < 1:
            if not self._looking:
                self._look()
            if self._event is not None:
                self._event.synchronize()
            self._take()
            if self._least == 0:
                return True
        return not self._looking and self._least <= max(deep // 4, 1)

    def count_write(self) -> None:
        """A write was launched."""
        self._since += 1
        is_near = False
        if self._free is not None:
            self._free -= 1
            is_near = self._free <= self._least // 2
        if not self._looking and (is_near or self._since >= self._interval):
            self._interval = min(2 * self._interval, _LAST_LOOK)
            self._look()

    def _look(self) -> None:
        self._seen.copy_(self._words, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._words.device))
        self._looking, self._since = True, 0

    def _take(self) -> None:
        self._looking = False
        self._least, self._repeat = int(self._seen[_LEAST_FREE]), int(self._seen[_REPEAT]) - 1
        self.report.find(*self._seen[_INVALID : _INVALID + 2].tolist())
        self._free = self._least - self._since
