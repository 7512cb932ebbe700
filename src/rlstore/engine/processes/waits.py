"""How often something was waited for, and how long: counted where several processes see it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from rlstore.kernels import add_to_word

WORDS = 2  # for each kind of wait: how many, and their nanoseconds


class Waits:
    """The waits of one kind, of all processes that have the memory; none at first.

    Args:
        memory: int64, zero at first.
        first: The first of its :data:`WORDS` words.
    """

    def __init__(self, memory: Tensor, first: int) -> None:
        self._memory, self._first = memory, first

    @property
    def count(self) -> int:
        """Waits that are over."""
        return int(self._memory[self._first])

    @property
    def seconds(self) -> float:
        """How long they took together."""
        return int(self._memory[self._first + 1]) * 1e-9

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what the block waits, also if it raises."""
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            add_to_word(self._memory, self._first, 1)
            add_to_word(self._memory, self._first + 1, time.monotonic_ns() - begin)
