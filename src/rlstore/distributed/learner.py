"""Learner: how a learner receives batches of rollouts."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlstore.distributed.actor import check_version
from rlstore.distributed.batch import RolloutBatch
from rlstore.distributed.memory import RolloutGather, RolloutMemory
from rlstore.engine.batches.staging import Staging, received
from rlstore.engine.guard import Guard, close_guard, guarded, new_guard, raise_interruption, taken, uninterrupted
from rlstore.engine.processes.handoff import Member
from rlstore.engine.processes.slots import SLICE_SECONDS, State
from rlstore.errors import PeerLostError, StorageClosedError, WaitTimeoutError


class _Collected(NamedTuple):
    """A batch that was gathered: its tensors by key and its states, perhaps being copied to the device."""

    nest: Any
    versions: Tensor


class _Collector:
    """Collects and gathers batches, in the calling thread or ahead in a thread of its own.

    It holds no reference to the learner, so that a learner that is dropped ends it.
    """

    def __init__(
        self, memory: RolloutMemory, member: Member, batch_size: int, prefetch: int, device: torch.device
    ) -> None:
        self.member, self._batch_size, self._stopped = member, batch_size, False
        self._guard = Guard()  # not one that a fork waits for: it is held during waits, and no child uses this object
        self._gather, self._structure = RolloutGather(memory, pin_memory=device.type == "cuda"), memory.fields.structure
        self._staging = None if device.type == "cpu" else Staging(device)
        # Queues in C: those in Python could be left locked by an interruption.
        self._ready: queue.SimpleQueue[_Collected | BaseException] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each batch that may still be prefetched
        for _ in range(prefetch):
            self._room.put(None)
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._run, name="rlstore learner", daemon=True)
            self._thread.start()

    def next(self, seconds: float) -> RolloutBatch:
        """The next batch, on the device, within so many seconds."""
        with nullcontext() if self._is_ready else self.member.handoff.learner_waits.counted():
            collected = self._collect(seconds) if self._thread is None else self._prefetched(seconds)
        tensors, states = collected.nest if self._staging is None else received(collected.nest)
        return RolloutBatch(tensors, states, collected.versions, self._structure)

    @property
    def _is_ready(self) -> bool:
        """Whether there is a batch now."""
        if self._thread is not None:
            return not self._ready.empty()
        return self.member.handoff.slots.counts()[State.FULL] >= self._batch_size

    def _prefetched(self, seconds: float) -> _Collected:
        end = time.monotonic() + seconds
        with uninterrupted():  # from the batch to the room for the next one
            while True:
                left = max(end - time.monotonic(), 0.0)
                try:
                    found = self._ready.get(timeout=min(left, SLICE_SECONDS))
                    break
                except queue.Empty:
                    raise_interruption()
                    if left == 0.0:
                        raise self.member.batch_overdue(self._batch_size, seconds) from None
            if isinstance(found, BaseException):
                raise found
            self._room.put(None)
        return found

    @guarded
    def _collect(self, seconds: float) -> _Collected:
        with uninterrupted():
            slots = self.member.collect(self._batch_size, seconds, self._check)
            tensors, states, versions = self._gather(slots)
            self.member.release(slots)
        nest = (tensors, states)
        return _Collected(nest if self._staging is None else self._staging.send(nest), versions)

    def _run(self) -> None:
        try:
            while True:
                self._room.get()
                self._check()
                self._ready.put(self._collect(math.inf))  # next() has a deadline, this thread has none
        except BaseException as error:
            self.member.leave()
            self._ready.put(error)  # raised by next()

    def _check(self) -> None:
        if self._stopped:
            raise StorageClosedError("the learner was closed")

    def stop(self) -> None:
        """End the thread, and return the slots that it holds."""
        self._stopped = True
        self._room.put(None)
        if self._thread is None:
            self.member.leave()
        elif self._thread is not threading.current_thread():  # garbage may be collected in it
            self._thread.join()


class Learner:
    """An endless iterator over batches of rollouts, in the order in which they were committed.

    ``DistributedStorage.learner`` creates it. The slots of a batch are copied and free again before the batch is
    returned. Several learners, in one process or in many, share the rollouts: each rollout goes to one of them, and to
    one of the threads that iterate over it. (A rollout whose learner was killed while reading it goes to another.)

    Attributes:
        batch_size: Rollouts in a batch.
        device: The device of the batches.
        prefetch: Batches that a thread collects ahead; 0 for no thread.
        timeout: Seconds to wait for a batch.
    """

    def __init__(
        self, memory: RolloutMemory, batch_size: int, device: torch.device, prefetch: int, timeout: float
    ) -> None:
        self._memory, self.batch_size, self.device = memory, batch_size, device
        self.prefetch, self.timeout = prefetch, timeout
        self._collector: _Collector | None = None
        self._pid, self._closed, self._guard = 0, False, new_guard()
        self._end: Finalize | None = None

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self

    def __next__(self) -> RolloutBatch:
        """Wait for the next batch.

        Raises:
            StopIteration: If the learner or the storage was closed.
            PeerLostError: (a ConnectionError) after ``timeout`` seconds, if actors died since the last batch.
            WaitTimeoutError: (a TimeoutError) after ``timeout`` seconds, if none died. After either error the next call
                waits again.
        """
        if self._closed or self._memory.handoff.closed:
            raise StopIteration
        try:
            return self._started().next(self.timeout)
        except StorageClosedError:
            self._stop()
            raise StopIteration from None
        except (PeerLostError, WaitTimeoutError):
            raise
        except Exception:
            self._stop()  # the thread has ended; the next call starts another
            raise

    @guarded
    def _started(self) -> _Collector:
        """The collector of this process."""
        if self._collector is None or self._pid != os.getpid():
            with uninterrupted():  # whoever has begun the thread has to end it
                member = Member(self._memory.handoff, "learner", None, self.timeout)
                self._collector = _Collector(self._memory, member, self.batch_size, self.prefetch, self.device)
                self._pid = os.getpid()
                self._end = Finalize(self, self._collector.stop, exitpriority=20)  # before the member's own finalizer
        return self._collector

    def _stop(self) -> None:
        with taken(self._guard):
            if self._end is not None and self._pid == os.getpid():
                self._end()
            self._collector, self._end = None, None

    def publish(self, version: int) -> None:
        """Publish the newest version of the policy; actors read it as ``ActorHandle.published``."""
        check_version("publish()", version)
        with self._guard:
            self._memory.handoff.published = version

    def close(self) -> None:
        """End the iteration. Prefetched batches are dropped, and nothing can be published any more."""
        self._closed = True
        self._stop()
        close_guard(self._guard, "learner")

    def __repr__(self) -> str:
        rollouts = f"batches of {self.batch_size} rollouts of {self._memory.steps} steps on {self.device}"
        return f"Learner({rollouts}: {'closed' if self._closed else f'up to {self.prefetch} prefetched'})"

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Learner, (self._memory, self.batch_size, self.device, self.prefetch, self.timeout)
