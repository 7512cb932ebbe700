"""Batches gathered ahead of time, by a thread that works while the learner learns."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rlstore.engine.guard import Guard, uninterrupted

Drawn = TypeVar("Drawn")


class _Job(Generic[Drawn]):
    """A batch that is prepared, or will be. What the threads share is made in C: no interruption leaves it locked.

    Args:
        drawn: What goes into it.
        added: The steps that had been added when it was drawn.
        reading: Keeps the rows as they are until it is prepared.

    Attributes:
        drawn: What goes into it.
        added: The steps that had been added when it was drawn.
        batch: What was prepared, once it is, alone in a list.
    """

    def __init__(self, drawn: Drawn, added: int, reading: object = None) -> None:
        self.drawn, self.added, self._reading = drawn, added, reading
        self.batch: list[Any] = []
        self._error: BaseException | None = None
        self._is_sent = False
        self._begun, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()

    def run(self, prepare: Callable[[Drawn], Any]) -> None:
        """Prepare it, unless another thread does; an exception reaches whoever asks for the result."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self.batch.append(prepare(self.drawn))
        except BaseException as error:
            self._error = error
        finally:
            self._reading = None
            self._running.release()

    def send(self, work: SimpleQueue[_Job[Drawn] | None] | None) -> None:
        """Let the thread prepare it, if that was not done: twice does no harm."""
        if work is not None and not self._is_sent:
            work.put(self)
            self._is_sent = True

    def wait(self, work: SimpleQueue[_Job[Drawn] | None] | None) -> None:
        """Wait until it is done; an interruption may have kept it from the thread until now."""
        self.send(work)
        with self._running:
            pass

    def forget(self) -> None:
        """In a forked process: nobody prepares it."""
        self._reading = None

    def result(self) -> Any:
        """What was prepared, once it is done."""
        if self._error is not None:
            raise self._error
        return self.batch[0]


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
        self._work: SimpleQueue[_Job[Drawn] | None] | None = None  # what the thread is to prepare; None ends it
        self._end: weakref.finalize[Any, Any] | None = None
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
            self._jobs[0].wait(self._work)
            self._jobs.popleft()
            self.dropped += 1
        while not self._jobs or (len(self._jobs) <= self._count and may_draw()):
            self._submit(draw(), added)
        self._jobs[0].wait(self._work)  # if that is interrupted, it is still the next one
        job = self._jobs.popleft()
        self._taken_at = job.added
        return job.drawn, job.result()

    def take_back(self, drawn: Drawn, batch: Any) -> None:
        """The batch that was taken last is the next one again."""
        self.put(drawn, self._taken_at, batch)
        self._jobs.rotate()

    def settle(self) -> None:
        """Wait until nothing is being gathered, because the rows are about to change."""
        self._follow_fork()
        for job in self._jobs:
            job.wait(self._work)

    def clear(self) -> None:
        """Throw away what is prepared."""
        self.settle()
        self._jobs.clear()

    def close(self) -> None:
        """Throw away what is prepared and end the thread; :meth:`take` would begin another."""
        self.clear()
        if self._end is not None and self._process == os.getpid():
            self._end()
        self._work = self._end = None

    def prepared(self) -> list[tuple[Drawn, int, Any]]:
        """All that is prepared: what was drawn, after how many added steps, and the batch."""
        self.settle()
        return [(job.drawn, job.added, job.result()) for job in self._jobs]

    def put(self, drawn: Drawn, added: int, batch: Any) -> None:
        """Add a batch that was prepared before."""
        job = _Job(drawn, added)
        job.run(lambda _: batch)
        self._jobs.append(job)

    def _submit(self, drawn: Drawn, added: int) -> None:
        if not self._in_background:
            self.put(drawn, added, self._prepare(drawn))
            return
        if self._work is None:
            try:
                with uninterrupted():
                    self._work = self._begin()
            except RuntimeError:
                # The system starts no more threads, or the interpreter is ending. What is drawn is served all the same.
                self.put(drawn, added, self._prepare(drawn))
                return
        job = _Job(drawn, added, self._guard.begin_read())
        self._jobs.append(job)
        job.send(self._work)

    def _begin(self) -> SimpleQueue[_Job[Drawn] | None]:
        """Start the thread, which does not refer to this object: when it is collected, the thread ends."""
        work: SimpleQueue[_Job[Drawn] | None] = SimpleQueue()
        thread = threading.Thread(target=_run, args=(work, self._prepare), name="rlstore", daemon=True)
        thread.start()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _finish, work, thread, self._process)
        return work

    def _follow_fork(self) -> None:
        """In a forked process, where the thread is not, do the work that it had left.

        What it had done is not done again: the rows may be overwritten since.
        """
        if self._work is None or self._process == os.getpid():
            return
        jobs, self._work, self._end = list(self._jobs), None, None
        self._jobs.clear()
        for job in jobs:
            job.forget()
            if job.batch:
                self.put(job.drawn, job.added, job.batch[0])
            else:
                self._submit(job.drawn, job.added)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_jobs": self.prepared(), "_work": None, "_end": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        jobs = state.pop("_jobs")
        self.__dict__.update(state, _jobs=deque())
        for job in jobs:
            self.put(*job)


def _run(work: SimpleQueue[_Job[Any] | None], prepare: Callable[[Any], Any]) -> None:
    while (job := work.get()) is not None:
        job.run(prepare)
        del job


def _finish(work: SimpleQueue[_Job[Any] | None], thread: threading.Thread, process: int) -> None:
    """End the thread; at the end of the interpreter, before the modules that it uses are gone."""
    work.put(None)
    if thread is not threading.current_thread() and process == os.getpid():
        thread.join()
