"""Learner: how a learner gets batches of rollouts."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlstore.distributed.actor import check_version
from rlstore.distributed.batch import RolloutBatch
from rlstore.distributed.memory import RolloutGather, RolloutMemory
from rlstore.engine.batches.staging import Staging, received
from rlstore.engine.processes.handoff import Member
from rlstore.errors import PeerLostError, StorageClosedError, WaitTimeoutError


class _Made(NamedTuple):
    """Rollouts side by side: their tensors by key and their states, perhaps on their way to the device."""

    joined: Any
    versions: Tensor


class _Work:
    """What collects and gathers, in the calling thread or in one of its own. It knows nothing of the learner."""

    def __init__(
        self, memory: RolloutMemory, member: Member, batch_size: int, prefetch: int, device: torch.device
    ) -> None:
        self.member, self._batch_size, self._stopped = member, batch_size, False
        self._gather, self._structure = RolloutGather(memory, pin_memory=device.type == "cuda"), memory.fields.structure
        self._staging = None if device.type == "cpu" else Staging(device)
        self._ready: queue.Queue[_Made | BaseException] = queue.Queue()
        self._room = threading.Semaphore(prefetch)  # batches that may still be made ahead
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._run, name="rlstore learner", daemon=True)
            self._thread.start()

    def next(self, seconds: float) -> RolloutBatch:
        """The next batch, on the device, within so many seconds."""
        if self._thread is None:
            made: _Made | BaseException = self._make(seconds)
        else:
            try:
                made = self._ready.get(timeout=min(seconds, threading.TIMEOUT_MAX))
            except queue.Empty:
                raise self.member.overdue(self._batch_size, seconds) from None
        if isinstance(made, BaseException):
            raise made
        if self._thread is not None:
            self._room.release()
        tensors, states = received(made.joined)
        return RolloutBatch(tensors, states, made.versions, self._structure)

    def _make(self, seconds: float) -> _Made:
        slots = self.member.collect(self._batch_size, seconds, self._check)
        tensors, states, versions = self._gather(slots)
        self.member.release(slots)
        joined = (tensors, states)
        return _Made(joined if self._staging is None else self._staging.send(joined), versions)

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                self._check()
                self._ready.put(self._make(math.inf))  # the deadline is the consumer's
        except BaseException as error:
            self.member.leave()
            self._ready.put(error)  # the consumer is the one to hear of it

    def _check(self) -> None:
        if self._stopped:
            raise StorageClosedError("the learner was closed")

    def stop(self) -> None:
        """End the thread, and give back what it holds."""
        self._stopped = True
        self._room.release()
        if self._thread is None:
            self.member.leave()
        elif self._thread is not threading.current_thread():  # where it may be if a learner is let go of
            self._thread.join()


class Learner:
    """Batches of rollouts without end, in the order in which they were committed.

    ``DistributedStorage.learner`` makes it. The slots of a batch are copied and free again before it is handed out. A
    learner is for one thread. Several of them, in one process or in many, share the rollouts among them: each goes to
    one learner. (One whose learner was killed while it read is served to another.)
    """

    def __init__(
        self, memory: RolloutMemory, batch_size: int, device: torch.device, prefetch: int, timeout: float
    ) -> None:
        self._memory, self.batch_size, self.device = memory, batch_size, device
        self.prefetch, self.timeout = prefetch, timeout
        self._work: _Work | None = None
        self._pid, self._closed = 0, False
        self._end: Finalize | None = None

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self

    def __next__(self) -> RolloutBatch:
        """The next batch, as soon as its rollouts are there.

        Raises:
            StopIteration: If the learner or the storage was closed.
            PeerLostError: (a ConnectionError) after ``timeout`` seconds, if actors died since the last batch.
            WaitTimeoutError: (a TimeoutError) after ``timeout`` seconds, if nobody died. After either, one may go on.
        """
        handoff = self._memory.handoff
        if self._closed or handoff.closed:
            raise StopIteration
        try:
            batch = self._started().next(self.timeout)
        except StorageClosedError:
            self._stop()
            raise StopIteration from None
        except (PeerLostError, WaitTimeoutError):
            raise
        except Exception:
            self._stop()  # the thread is over; whoever asks again begins another
            raise
        return batch

    def _started(self) -> _Work:
        """The worker of this process."""
        if self._work is None or self._pid != os.getpid():
            member = Member(self._memory.handoff, "learner", None, self.timeout)
            self._work = _Work(self._memory, member, self.batch_size, self.prefetch, self.device)
            self._pid = os.getpid()
            self._end = Finalize(self, self._work.stop, exitpriority=20)  # before the member leaves by itself
        return self._work

    def _stop(self) -> None:
        if self._end is not None and self._pid == os.getpid():
            self._end()
        self._work, self._end = None, None

    def publish(self, version: int) -> None:
        """Tell the actors of the newest version of the policy; ``ActorHandle.published`` is it."""
        check_version("publish()", version)
        self._memory.handoff.published = version

    def close(self) -> None:
        """End the iteration. Batches that were prepared ahead are dropped."""
        self._closed = True
        self._stop()

    def __repr__(self) -> str:
        rollouts = f"batches of {self.batch_size} rollouts of {self._memory.steps} steps on {self.device}"
        return f"Learner({rollouts}: {'closed' if self._closed else f'up to {self.prefetch} made ahead'})"

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Learner, (self._memory, self.batch_size, self.device, self.prefetch, self.timeout)
