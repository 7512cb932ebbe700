"""Writing into a served storage: steps are gathered, and sent in few calls of which several are under way at once."""

from __future__ import annotations

import uuid
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from rlstore.errors import PeerLostError, StorageClosedError, WaitTimeoutError
from rlstore.ray.calls import Deadline, GoneForGoodError, answer, is_done, program_goes_on
from rlstore.ray.connection import Connection
from rlstore.ray.ledger import Facts
from rlstore.ray.places import Place
from rlstore.ray.steps import StepBuffer
from rlstore.storage import Sample


class ServedWriter:
    """Writes the steps of some environments into one shard; made by ``served.writer()``, for one process.

    Steps are copied when they are added, and sent ``batch_steps`` at a time. At most ``max_in_flight`` such calls are
    open: then ``add`` waits for the oldest. If the shard is lost, what was on its way to it is lost, and counted (in
    :attr:`lost`, and in ``served.report()``); the writer waits for the shard to come back and goes on.

    Args:
        connection: The served storage.
        num_envs: The environments of each sample; None for all of a shard's.
        batch_steps: Steps sent in one call.
        max_in_flight: Calls that may be open.
    """

    def __init__(self, connection: Connection, num_envs: int | None, batch_steps: int, max_in_flight: int) -> None:
        self._served, self._name = connection, uuid.uuid4().hex
        self._batch_steps, self._most = batch_steps, max_in_flight
        place = connection.ask_ledger("place", self._name, num_envs, connection.deadline)
        self._place: Place = place
        self._shard, self._who = connection.shards[place.shard], connection.who(place.shard)
        envs = place.stop - place.first
        self._buffer = StepBuffer(batch_steps, envs or None)
        self._spares: list[StepBuffer] = []
        # One thread sends, in order, when the ledger permits it; whoever adds steps takes the answers.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="rlstore-writer")
        self._open: deque[tuple[StepBuffer, Future[tuple[Any, bool]]]] = deque()
        self._closed = False
        self._limited = True  # until the shard says that there is no rate limit
        self._last_heard: Facts | None = None  # of the shard
        self.added, self.lost = 0, 0

    @property
    def place(self) -> Place:
        """The shard, and which of its lanes."""
        return self._place

    def add(self, sample: Sample) -> None:
        """Add one step of all environments of this writer, in the words of the vocabulary (:mod:`rlstore.storage`).

        The first sample fixes the form of those that follow. What only the storage can refuse, a wrong shape in the
        first sample for instance, is raised by the ``add`` or ``flush`` that hears of it.
        """
        self._check_open()
        before = self._buffer.transitions
        self._buffer.add(sample)
        self.added += self._buffer.transitions - before
        if self._buffer.is_full:
            self._post()

    def flush(self) -> None:
        """Send what is gathered, and wait until the shard has all of it."""
        self._check_open()
        if self._buffer.steps:
            self._post()
        while self._open:
            self._take_answer()

    def close(self) -> None:
        """Send the rest, and give the place back. Calling it again does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._sender.shutdown(wait=False, cancel_futures=True)
            self._served.ledger.leave.remote(self._name)
            self._shard.forget.remote(self._name)

    def __enter__(self) -> ServedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosedError("this writer is closed; make a new one with served.writer()")

    # ---------------------------------------------------------------------------------------------- on the way

    def _post(self) -> None:
        """Hand what is gathered to the thread, and go on with an empty buffer."""
        while self._open and (len(self._open) >= self._most or self._is_answered()):
            self._take_answer()
        full = self._buffer
        self._open.append((full, self._sender.submit(self._send, full)))
        self._buffer = self._spares.pop() if self._spares else StepBuffer(self._batch_steps, full.num_envs)

    def _send(self, buffer: StepBuffer) -> tuple[Any, bool]:
        """Send steps, if there is a rate limit when the ledger permits it; in the thread. Gives the call, and if so."""
        served, limited = self._served, self._limited
        if limited:
            served.ask_ledger("permit_insert", self._name, buffer.transitions, served.deadline, wanted=program_goes_on)
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
            self._count_lost(buffer, 0)  # it had no permit
            raise
        try:
            stored, refused, facts, self._limited = answer(ref, self._who, self._served.deadline)
        except PeerLostError as error:
            self._limited = True  # the shard may come back under another limit
            self._bear_witness()
            self._count_lost(buffer, buffer.transitions if permitted else 0)
            self._wait_for_shard(error)
            return
        except BaseException:
            self._count_lost(buffer, buffer.transitions if permitted else 0)
            raise
        if self._last_heard is not None and facts.generation != self._last_heard.generation:
            self._bear_witness()
        self._last_heard = facts
        if refused is not None:
            self._count_lost(buffer, buffer.transitions - stored if permitted else 0, stored)
            raise refused
        self._spare(buffer)

    def _bear_witness(self) -> None:
        """Tell the ledger the last that the shard said, which went with it before it told."""
        if self._last_heard is not None:
            self._served.ledger.witness.remote(self._last_heard)

    def _count_lost(self, buffer: StepBuffer, permitted: int, stored: int = 0) -> None:
        lost = buffer.transitions - stored
        self.lost += lost
        self._served.ledger.lose.remote(lost, 0, permitted)
        self._spare(buffer)

    def _spare(self, buffer: StepBuffer) -> None:
        buffer.clear()
        self._spares.append(buffer)

    def _wait_for_shard(self, error: PeerLostError) -> None:
        """Go on when the shard is back. What else was on its way is lost too, or is answered."""
        warnings.warn(
            f"{error}. What was on its way to it is lost; this writer waits for it to be started again", stacklevel=5
        )
        deadline = Deadline(self._served.deadline)
        while True:
            try:
                answer(self._shard.ready.remote(), self._who, deadline.left)
                return
            except (PeerLostError, WaitTimeoutError) as again:
                if not deadline.left or isinstance(again, GoneForGoodError):
                    raise PeerLostError(
                        f"{self._who} was lost and did not come back within {deadline.seconds:g} s ({again})"
                    ) from error
                self._served.pause(deadline)
