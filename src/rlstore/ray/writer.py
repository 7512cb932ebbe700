"""Writing to a served storage: steps are sent in few calls, several open at once."""

from __future__ import annotations

import uuid
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from rlstore.errors import PeerLostError, StorageClosedError, WaitTimeoutError
from rlstore.ray.calls import Connection, answer, ask, is_done, is_running
from rlstore.ray.counts import ShardState
from rlstore.ray.places import Place
from rlstore.ray.steps import StepBuffer
from rlstore.storage import Sample

# How many times as many steps as asked for may be sent in one call.
_GROWTH = 8


class ServedWriter:
    """Appends the steps of some environments to one shard; created by ``served.writer()``, for one process.

    Steps are copied by ``add`` and sent ``batch_steps`` at a time; while an earlier call is not answered (the shard has
    more to do than it can) up to eight times as many go into the next, which costs less for each. At most
    ``max_in_flight`` calls are open; then ``add`` waits for the oldest. If the shard dies, the steps in flight are lost
    and counted (:attr:`lost`, ``served.report()``), and the writer continues when the shard is back.

    Attributes:
        added: Transitions added to this writer.
        lost: Transitions that did not arrive.
    """

    def __init__(self, connection: Connection, num_envs: int | None, batch_steps: int, max_in_flight: int) -> None:
        """Arguments are those of ``served.writer()``."""
        self._served, self._name = connection, uuid.uuid4().hex
        self._batch_steps, self._max_in_flight = batch_steps, max_in_flight
        self._place: Place = connection.ask_ledger("place", self._name, num_envs, connection.deadline)
        self._shard, self._who = connection.shards[self._place.shard], connection.who(self._place.shard)
        self._buffer = StepBuffer(batch_steps, self._place.stop - self._place.first or None, _GROWTH)
        self._spares: list[StepBuffer] = []
        # One thread sends in order, each call when the ledger permits it; the caller of add() takes the answers.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="rlstore-writer")
        self._open: deque[tuple[StepBuffer, Future[tuple[Any, bool]]]] = deque()
        self._closed = False
        self._limited = True  # until the shard answers that there is no rate limit
        self._last_state: ShardState | None = None  # of the shard, from its newest answer
        self.added, self.lost = 0, 0

    @property
    def place(self) -> Place:
        """The shard and the lanes of this writer."""
        return self._place

    def add(self, sample: Sample) -> None:
        """Append one step of all environments of this writer.

        Args:
            sample: The step, with the names of the vocabulary (:mod:`rlstore.storage`) and of the extra fields of the
                served storage. The first sample fixes the form of those that follow.

        Raises:
            InvalidInputError: (a ValueError) if the sample is refused. What only the storage can check, as a wrong
                shape in the first sample, is raised by a later ``add`` or ``flush``.
            WaitTimeoutError: (a TimeoutError) if an earlier call was not answered within the deadline.
            PeerLostError: (a ConnectionError) if the shard died and was not back within the deadline.
        """
        self._check_open()
        if self._buffer.is_full:  # an error was raised before it was sent
            self._post()
        before = self._buffer.transitions
        self._buffer.add(sample)
        self.added += self._buffer.transitions - before
        if self._buffer.is_full or (self._buffer.steps % self._batch_steps == 0 and self._is_shard_idle()):
            self._post()

    def flush(self) -> None:
        """Send the buffered steps, and wait until the shard has stored everything."""
        self._check_open()
        if self._buffer.steps:
            self._post()
        while self._open:
            self._take_answer()

    def close(self) -> None:
        """Flush, and release the place. Calling it again does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._sender.shutdown(wait=False, cancel_futures=True)
            if self._last_state is not None:  # of a shard that may have died since
                self._served.ledger.last_state.remote(self._last_state)
            self._served.ledger.leave.remote(self._name)
            self._shard.remove_writer.remote(self._name)

    def __enter__(self) -> ServedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosedError("this writer is closed; make a new one with served.writer()")

    def _is_shard_idle(self) -> bool:
        """Whether the shard has answered all calls, or larger ones could be more than a rate limit tolerates."""
        while self._open and not self._limited and self._is_answered():
            self._take_answer()
        return self._limited or not self._open

    def _post(self) -> None:
        """Pass the buffer to the sending thread, and continue with an empty one."""
        while self._open and (len(self._open) >= self._max_in_flight or self._is_answered()):
            self._take_answer()
        full = self._buffer
        self._open.append((full, self._sender.submit(self._send, full)))
        self._buffer = self._spares.pop() if self._spares else StepBuffer(self._batch_steps, full.num_envs, _GROWTH)

    def _send(self, buffer: StepBuffer) -> tuple[Any, bool]:
        """Send a buffer; with a rate limit only after a permit of the ledger. The call, and whether it had a permit."""
        served, limited = self._served, self._limited
        if limited:
            served.ask_ledger("permit_insert", self._name, buffer.transitions, served.deadline, wanted=is_running)
        return self._shard.insert.remote(self._name, self._place, buffer.packed(), limited), limited

    def _is_answered(self) -> bool:
        future = self._open[0][1]
        return future.done() and (future.exception() is not None or is_done(future.result()[0]))

    def _take_answer(self) -> None:
        """Wait for the answer to the oldest call."""
        buffer, future = self._open.popleft()
        try:
            ref, permitted = future.result()
        except BaseException:
            self._count_lost(buffer, permitted=False)
            raise
        try:
            stored, refused, state, self._limited = answer(ref, self._who, self._served.deadline)
        except PeerLostError as error:
            self._limited = True  # the rate limit may have changed when the shard is back
            self._forward_last_state()
            self._count_lost(buffer, permitted=permitted)
            self._wait_for_shard(error)
            return
        except BaseException:
            self._count_lost(buffer, permitted=permitted)
            raise
        if self._last_state is not None and state.generation != self._last_state.generation:
            self._forward_last_state()
        self._last_state = state
        if refused is not None:
            self._count_lost(buffer, permitted=permitted, stored=stored)
            raise refused
        self._recycle(buffer)

    def _forward_last_state(self) -> None:
        """Send the ledger the last answer of a dead shard, which may have died before its own heartbeat."""
        if self._last_state is not None:
            self._tell_ledger("last_state", self._last_state)

    def _count_lost(self, buffer: StepBuffer, *, permitted: bool, stored: int = 0) -> None:
        lost = buffer.transitions - stored
        self.lost += lost
        self._tell_ledger("count_lost", lost, 0, lost if permitted else 0)
        self._recycle(buffer)

    def _tell_ledger(self, method: str, *args: Any) -> None:
        """Call a method of the ledger, which may have died together with the shard: wait until it is restarted."""
        with suppress(PeerLostError, WaitTimeoutError):  # it was shut down
            self._served.ask_ledger(method, *args)

    def _recycle(self, buffer: StepBuffer) -> None:
        buffer.clear()
        self._spares.append(buffer)

    def _wait_for_shard(self, error: PeerLostError) -> None:
        """Wait until the shard is restarted. The other calls in flight are lost too, or will be answered."""
        warnings.warn(
            f"{error}. The steps in flight to it are lost; this writer waits until it is restarted", stacklevel=5
        )
        seconds = self._served.deadline
        try:
            ask(self._shard.ready.remote, self._who, seconds)
        except (PeerLostError, WaitTimeoutError) as again:
            raise PeerLostError(f"{self._who} was lost and did not come back within {seconds:g} s ({again})") from error
