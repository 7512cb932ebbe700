"""Batches gathered ahead of time, by a thread that works while the learner learns."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlstore.engine.guard import Guard

Drawn = TypeVar("Drawn")


@dataclass
class _Job(Generic[Drawn]):
    drawn: Drawn
    added: int  # steps that had been added when it was drawn
    prepared: Future[Any]
    batch: list[Any]  # what was prepared, once it is: a forked process must not ask the future, which may be locked


class Prefetch(Generic[Drawn]):
    """Keeps ``count`` batches ready.

    What goes into a batch is drawn in the calling thread; only the copying happens in the background. So the batches
    depend on the order of calls alone, not on how the threads are scheduled.

    Args:
        count: Batches prepared ahead.
        max_age: A batch drawn this many added steps ago, or more, is thrown away.
        prepare: From what was drawn to a batch. It runs in the background; an exception in it reaches the caller of
            :meth:`take`. It must not refer to the owner of this object.
        guard: That of the storage; :meth:`take` and the like are called with it. It is not free while a batch is being
            prepared.
        in_background: False if it returns at once anyhow, and so runs in the calling thread.

    Attributes:
        dropped: Batches that were thrown away because of their age.
    """

    def __init__(
        self,
        count: int,
        max_age: int,
        prepare: Callable[[Drawn], Any],
        guard: Guard,
        *,
        in_background: bool = True,
    ) -> None:
        self._count, self._max_age, self._prepare, self._guard = count, max_age, prepare, guard
        self._in_background, self.dropped = in_background, 0
        self._jobs: deque[_Job[Drawn]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0
        self._taken_at = 0  # steps that had been added when the batch was drawn that was taken last

    def take(
        self, added: int, draw: Callable[[], Drawn], may_draw: Callable[[], bool] = lambda: True
    ) -> tuple[Drawn, Any]:
        """The next batch, and what it was drawn as; others are set going to keep ``count`` ahead.

        ``may_draw`` is asked before each of those others: False leaves it for later.
        """
        self._follow_fork()
        while self._jobs and added - self._jobs[0].added >= self._max_age:
            _finish(self._jobs.popleft())
            self.dropped += 1
        while not self._jobs or (len(self._jobs) <= self._count and may_draw()):
            self._submit(draw(), added)
        job = self._jobs.popleft()
        self._taken_at = job.added
        return job.drawn, job.prepared.result()

    def take_back(self, drawn: Drawn, batch: Any) -> None:
        """The batch that was taken last is the next one again."""
        self.put(drawn, self._taken_at, batch)
        self._jobs.rotate()

    def settle(self) -> None:
        """Wait until nothing is being gathered, because the rows are about to change."""
        self._follow_fork()
        for job in self._jobs:
            if not job.prepared.done():
                _finish(job)

    def clear(self) -> None:
        """Throw away what is prepared."""
        self.settle()
        self._jobs.clear()

    def close(self) -> None:
        """Throw away what is prepared and end the thread; :meth:`take` would begin another."""
        self.clear()
        if self._executor is not None and self._process == os.getpid():
            self._executor.shutdown()
        self._executor = None

    def prepared(self) -> list[tuple[Drawn, int, Any]]:
        """All that is prepared: what was drawn, after how many added steps, and the batch."""
        self._follow_fork()
        return [(job.drawn, job.added, job.prepared.result()) for job in self._jobs]

    def put(self, drawn: Drawn, added: int, batch: Any) -> None:
        """Add a batch that was prepared before."""
        done: Future[Any] = Future()
        done.set_result(batch)
        self._jobs.append(_Job(drawn, added, done, [batch]))

    def _submit(self, drawn: Drawn, added: int) -> None:
        if not self._in_background:
            self.put(drawn, added, self._prepare(drawn))
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="rlstore")
            self._process = os.getpid()
            weakref.finalize(self, self._executor.shutdown, wait=False)
        self._guard.begin_read()
        batch: list[Any] = []
        try:
            prepared = self._executor.submit(_prepare, self._prepare, drawn, batch, self._guard)
        except BaseException as error:
            self._guard.end_read()
            if not isinstance(error, RuntimeError):
                raise
            # The system starts no more threads, or the interpreter is ending. What is drawn is served all the same.
            self._executor = None  # which would gather it once more
            self.put(drawn, added, self._prepare(drawn))
            return
        self._jobs.append(_Job(drawn, added, prepared, batch))

    def _follow_fork(self) -> None:
        """In a forked process, where the thread is not, do the work that it had left.

        What it had done is not done again: the rows may be overwritten since.
        """
        if self._executor is None or self._process == os.getpid():
            return
        jobs, self._executor = list(self._jobs), None
        self._jobs.clear()
        self._guard.forget_reads()
        for job in jobs:
            if job.batch:
                self.put(job.drawn, job.added, job.batch[0])
            else:
                self._submit(job.drawn, job.added)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_jobs": self.prepared(), "_executor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        jobs = state.pop("_jobs")
        self.__dict__.update(state, _jobs=deque())
        for job in jobs:
            self.put(*job)


def _prepare(prepare: Callable[[Drawn], Any], drawn: Drawn, batch: list[Any], guard: Guard) -> Any:
    try:
        batch.append(prepare(drawn))
        return batch[0]
    finally:
        guard.end_read()


def _finish(job: _Job[Any]) -> None:
    """Wait for a job whose result, or exception, is not needed any more."""
    job.prepared.exception()
