"""What the host knows of a ring that is on the device, learnt without a wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LEAST_FREE, _BREAKS = 3, 4  # which of the words
_FIRST_LOOK, _LAST_LOOK = 8, 256  # writes between two looks at the words, if nothing calls for one earlier


class Watch:
    """How many slots are free, and whether episodes were broken off.

    A write takes at most one slot of a lane, so the free slots that there were at the last look, less the writes since,
    are a bound from below. A look is a copy into page-locked memory, whose end is asked for at later writes. Only if
    the bound reaches 0 before it has ended is it waited for.

    Args:
        words: Where the device keeps these counts, int64.
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words
        on_cuda = words.device.type == "cuda"
        with torch.inference_mode(False):
            self._seen = torch.zeros(len(words), dtype=torch.int64, pin_memory=on_cuda)
        self._event: Any = torch.cuda.Event() if on_cuda else None
        self._told = 0  # breaks that were told of
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        self._free: int | None = None  # slots in every lane, at least
        self._least = 0  # slots that were free at the last look
        self._since = 0  # writes since then
        self._looking = False
        self._interval = _FIRST_LOOK

    def grow(self, slots: int) -> None:
        """Every lane has so many free slots more."""
        if self._free is not None:
            self._free += slots
            self._least += slots

    def has_broken(self) -> bool:
        """True if a look has shown that episodes were broken off, of which was not told yet."""
        if self._looking and (self._event is None or self._event.query()):
            self._take()
        told, self._told = self._told, int(self._seen[_BREAKS])
        return self._told > told

    def is_short(self, deep: int) -> bool:
        """True if slots have to be made before the next write, where there are ``deep`` a lane."""
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
        self._least = int(self._seen[_LEAST_FREE])
        self._free = self._least - self._since
