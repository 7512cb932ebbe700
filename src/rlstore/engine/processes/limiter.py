"""How fast data are used: a limit on samples for each insert that holds both sides back, or until there are enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.checks import check_positive
from rlstore.engine.processes.slots import SLICE_SECONDS
from rlstore.engine.processes.waits import WORDS, Waits
from rlstore.errors import InvalidInputError
from rlstore.kernels import Limiter as SharedLimiter
from rlstore.kernels import add_to_word, await_event, event_count

_ON, _RATIO, _LEAST, _SLACK = range(4)
_INSERTED = 6  # the word of the event that something was inserted
_WAITS = 8  # the words of waits, behind those that C++ knows


@dataclass(frozen=True)
class RateLimit:
    """A limit on samples per insert, and on how far either side may get ahead.

    With ``d = inserted * samples_per_insert - sampled``, and ``d0 = min_size * samples_per_insert``:

    - an insert is allowed if ``d <= d0 + tolerance`` after it, or if at most ``min_size`` transitions are inserted;
    - a sample is allowed if ``d >= d0 - tolerance`` after it, and at least ``min_size`` transitions are inserted.

    ``RateLimit(min_size=1000)`` has no ratio: samples wait until so many transitions are inserted, and nothing waits
    after that.

    Attributes:
        samples_per_insert: How often each added transition is sampled, on average; None for no ratio.
        min_size: Transitions that must have been added before anything is sampled.
        tolerance: How far ``d`` may be from ``d0``, in sampled transitions. None is twice what one call can need: the
            larger of a batch, and of ``samples_per_insert`` times the environments. None without a ratio.
    """

    samples_per_insert: float | None = None
    min_size: int = 1
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.samples_per_insert is not None and not _is_above_0(self.samples_per_insert):
            raise InvalidInputError(
                f"samples_per_insert is {self.samples_per_insert!r}; RateLimit needs a number above 0, or None for no "
                "ratio"
            )
        check_positive("RateLimit", min_size=self.min_size)
        if self.tolerance is not None and not _is_above_0(self.tolerance):
            raise InvalidInputError(f"tolerance is {self.tolerance!r}; RateLimit needs a number above 0, or None")
        if self.samples_per_insert is None and self.tolerance is not None:
            raise InvalidInputError(
                f"tolerance is {self.tolerance!r}, but there is no samples_per_insert that it could be for; give both, "
                "or min_size alone"
            )

    def resolved(self, inserts: int, samples: int) -> RateLimit:
        """The limit with a tolerance that lets calls of these sizes go ahead.

        Args:
            inserts: The transitions of the largest insert.
            samples: The entries of the largest sample.

        Raises:
            InvalidInputError: If the tolerance is so small that both sides could wait for each other.
        """
        if self.samples_per_insert is None:
            return self
        need = max(inserts * self.samples_per_insert, float(samples))
        if self.tolerance is None:
            return RateLimit(self.samples_per_insert, self.min_size, 2 * need)
        if self.tolerance < need:
            raise InvalidInputError(
                f"tolerance is {self.tolerance:g}; with {inserts} inserts and {samples} samples in one call at "
                f"{self.samples_per_insert:g} samples an insert it must be at least {need:g}, or both sides could wait "
                "for each other"
            )
        return self

    def allows_insert(self, inserted: int, sampled: int, count: int) -> bool:
        """Whether ``count`` inserts may go ahead after so many inserts and samples.

        Args:
            inserted: Inserts that went ahead so far.
            sampled: Samples that went ahead so far.
            count: Inserts to come.
        """
        if inserted + count <= self.min_size:
            return True
        ahead = (inserted + count) * self._ratio - sampled
        return ahead <= self.min_size * self._ratio + self._slack

    def allows_sample(self, inserted: int, sampled: int, count: int) -> bool:
        """Whether ``count`` samples may go ahead after so many inserts and samples.

        Args:
            inserted: Inserts that went ahead so far.
            sampled: Samples that went ahead so far.
            count: Samples to come.
        """
        ahead = inserted * self._ratio - sampled - count
        return inserted >= self.min_size and ahead >= self.min_size * self._ratio - self._slack

    @property
    def _ratio(self) -> float:
        """The ratio; 0, with an endless slack, for none."""
        return self.samples_per_insert or 0.0

    @property
    def _slack(self) -> float:
        if self.samples_per_insert is None:
            return math.inf
        if self.tolerance is None:
            raise InvalidInputError("the tolerance is not known yet; ask resolved()")
        return self.tolerance


def _is_above_0(value: object) -> bool:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return is_number and math.isfinite(float(value)) and float(value) > 0  # type: ignore[arg-type]


class Limiter:
    """A :class:`RateLimit` at work, in memory that several processes may have; zero at first: no limit.

    Args:
        memory: int64, of the shape :meth:`shape`.

    Attributes:
        insert_waits: The inserts that did not go ahead at once.
        sample_waits: The samples that did not.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._counts, self._rule = memory[:2].numpy(), memory[2:6].view(torch.float64).numpy()
        self._shared = SharedLimiter(memory)
        self.insert_waits, self.sample_waits = Waits(memory, _WAITS), Waits(memory, _WAITS + WORDS)

    @staticmethod
    def shape() -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of the memory."""
        return (_WAITS + 2 * WORDS,), torch.int64

    @property
    def inserted(self) -> int:
        """Inserts that went ahead."""
        return int(self._counts[0])

    @property
    def sampled(self) -> int:
        """Samples that went ahead."""
        return int(self._counts[1])

    @property
    def limit(self) -> RateLimit | None:
        """The limit that holds now; None for none."""
        if not self._rule[_ON]:
            return None
        ratio, least, slack = (float(self._rule[word]) for word in (_RATIO, _LEAST, _SLACK))
        return RateLimit(ratio, int(least), slack) if ratio else RateLimit(min_size=int(least))

    def set(self, limit: RateLimit | None) -> None:
        """Change the limit, and wake all that wait."""
        if limit is None:
            self._rule[_ON] = 0
        else:
            self._rule[_RATIO], self._rule[_LEAST], self._rule[_SLACK] = (
                limit._ratio,
                limit.min_size,
                limit._slack,
            )
            self._rule[_ON] = 1
        self.wake_all()

    def set_counts(self, inserted: int, sampled: int) -> None:
        """Continue from counts that were saved; only while no other process counts."""
        self._counts[:] = inserted, sampled
        self.wake_all()

    def begin(self, limit: RateLimit) -> None:
        """Hold what goes ahead from now on to a limit: what went ahead before it was set counts as in balance."""
        self._rule[_ON] = 0
        self._counts[1] = max(0, round((self.inserted - limit.min_size) * limit._ratio))
        self.set(limit)

    @property
    def is_on(self) -> bool:
        """True if there is a limit."""
        return bool(self._rule[_ON])

    def count_inserts(self, count: int) -> None:
        """So many inserts were made without asking; below 0: inserts that were counted did not happen."""
        add_to_word(self._memory, 0, count)
        self.wake_all()

    def take_back_samples(self, count: int) -> None:
        """Samples that were counted did not happen."""
        add_to_word(self._memory, 1, -count)

    def await_insert(self, seconds: float) -> None:
        """Wait until something more is inserted, or for so many seconds."""
        await_event(self._memory, _INSERTED, event_count(self._memory, _INSERTED), seconds)

    def wake_all(self) -> None:
        """Let everyone who waits look again."""
        self._shared.wake_all()

    def insert(self, count: int, seconds: float, look: Callable[[], None] | None = None) -> bool:
        """Count ``count`` inserts as soon as they may go ahead; False after ``seconds``.

        ``look`` is called now and then while it waits, and may raise.
        """
        return self._wait(self._shared.acquire_insert, self.insert_waits, count, seconds, look)

    def sample(self, count: int, seconds: float, look: Callable[[], None] | None = None) -> bool:
        """Count ``count`` samples as soon as they may go ahead; False after ``seconds``."""
        return self._wait(self._shared.acquire_sample, self.sample_waits, count, seconds, look)

    @staticmethod
    def _wait(
        acquire: Callable[[int, float], bool],
        waits: Waits,
        count: int,
        seconds: float,
        look: Callable[[], None] | None,
    ) -> bool:
        if acquire(count, 0.0):
            return True
        end = time.monotonic() + seconds
        with waits.counted():
            while True:
                left = end - time.monotonic()
                if acquire(count, min(max(left, 0.0), SLICE_SECONDS)):
                    return True
                if look is not None:
                    look()
                if left <= 0:
                    return False

    def __getstate__(self) -> Tensor:
        return self._memory

    def __setstate__(self, memory: Tensor) -> None:
        Limiter.__init__(self, memory)
