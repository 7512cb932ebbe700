"""How often something was waited for, and how long: counted where several processes see it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from rlstore.engine.guard import as_block
from rlstore.engine.measures import Measures
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

    def measure(self, side: str) -> Measures:
        """The waits that are over, and their seconds.

        Args:
            side: What waited: "insert" or "sample".
        """
        count, nanoseconds = self._memory[self._first : self._first + WORDS].tolist()
        return {f"{side}_waits": count, f"{side}_wait_seconds": nanoseconds * 1e-9}

    @as_block
    def counted(self) -> Iterator[None]:
        """Count what the block waits, also if it raises."""
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            add_to_word(self._memory, self._first, 1)
            add_to_word(self._memory, self._first + 1, time.monotonic_ns() - begin)
