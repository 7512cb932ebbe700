"""A queue of rollouts across machines, for learners that follow their actors closely (IMPALA).

The queue is an actor that holds references: a rollout is transferred from the node of its producer to the learner's.
"""

from __future__ import annotations

import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import ray
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rlstore.distributed.batch import RolloutBatch
from rlstore.engine.checks import check_count, check_device, check_positive
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError, WaitTimeoutError
from rlstore.ray.calls import (
    Changed,
    Deadline,
    answers,
    ask,
    check_connected,
    check_seconds,
    is_running,
    start_on_this_node,
    was_restarted,
)
from rlstore.ray.wire import Output, Packed, join, pack

# How often a waiting learner checks whether it was closed.
_SLICE_SECONDS = 0.2


@dataclass(frozen=True)
class QueueReport:
    """The counts of a rollout queue: ``put = served + stale + lost + waiting``.

    Attributes:
        put: Rollouts that were put.
        served: Rollouts that learners served.
        stale: Rollouts dropped because they were older than ``max_staleness`` versions.
        lost: Rollouts lost before a learner had fetched them: with the process that produced them, or with the actor of
            the queue.
        waiting: Rollouts in the queue, or prefetched by a learner.
        capacity: Rollouts that the queue can hold.
        version: The newest version that was published.
        restarts: How often the actor of the queue was restarted.
    """

    put: int
    served: int
    stale: int
    lost: int
    waiting: int
    capacity: int
    version: int
    restarts: int

    def __str__(self) -> str:
        return (
            f"{self.put} rollouts put, {self.served} served, {self.waiting} of {self.capacity} waiting; {self.stale} "
            f"dropped as stale, {self.lost} lost ({self.restarts} restarts of the queue); version {self.version}"
        )


# ---------------------------------------------------------------------------------------------------- the actor


class Entry(NamedTuple):
    """A rollout in the queue."""

    ref: Any
    version: int


class QueueState(NamedTuple):
    """The newest version, and the rollouts dropped as stale; part of every answer.

    Callers send it back, so that a restarted queue knows it.
    """

    version: int
    stale: int

    def merged(self, other: QueueState) -> QueueState:
        """The newer values of both."""
        return QueueState(max(self.version, other.version), max(self.stale, other.stale))


@dataclass
class _Taken:
    """The rollouts that one learner took."""

    served: int = 0
    outstanding: int = 0  # not served, dropped or lost yet


class QueueActor:
    """The actor. If it dies Ray restarts it: the rollouts in it are lost, the counts are recovered from the callers.

    Callers send with each call how many rollouts they have put or served so far, and the last state they received.

    Args:
        capacity: Rollouts that it can hold.
        max_staleness: How many versions a rollout may be behind the newest; None for any number.
    """

    def __init__(self, capacity: int, max_staleness: int | None) -> None:
        self._capacity, self._max_staleness = capacity, max_staleness
        self._entries: deque[Entry] = deque()
        self._state = QueueState(0, 0)
        self._put: dict[str, int] = {}
        self._learners: dict[str, _Taken] = {}
        self._changed = Changed()
        self._restarts = int(was_restarted())

    async def put(
        self, producer: str, put: int, state: QueueState, refs: list[Any], version: int, seconds: float
    ) -> QueueState:
        """Append a rollout as soon as there is room; one that is already stale is dropped."""
        self._merge(state)
        self._put[producer] = put
        deadline = Deadline(seconds)
        while not self._is_stale(version) and len(self._entries) >= self._capacity:
            if not await self._changed.wait(deadline):
                raise WaitTimeoutError(
                    f"the rollout queue has been full for {seconds:g} s: {len(self._entries)} of {self._capacity} wait "
                    f"for a learner; {len(self._learners)} learners have taken rollouts so far"
                )
        self._put[producer] = put + 1
        if self._is_stale(version):
            self._drop(1)
        else:
            self._entries.append(Entry(refs[0], version))
        self._changed.notify()
        return self._state

    async def take(self, learner: str, state: QueueState, count: int, seconds: float) -> tuple[list[Entry], QueueState]:
        """The oldest rollouts, at most ``count``, as soon as there is one."""
        self._merge(state)
        taken = self._learners.setdefault(learner, _Taken())
        deadline = Deadline(seconds)
        while not self._entries:
            if not await self._changed.wait(deadline):
                raise WaitTimeoutError(
                    f"no rollout came within {seconds:g} s; {len(self._put)} processes have put rollouts so far"
                )
        entries = [self._entries.popleft() for _ in range(min(count, len(self._entries)))]
        taken.outstanding += len(entries)
        self._changed.notify()
        return entries, self._state

    async def confirm(self, learner: str, served: int, stale: int, settled: int) -> None:
        """Set the rollouts that a learner has served in total.

        ``settled`` more of those it took are served, dropped (``stale`` of them) or lost.
        """
        taken = self._learners.setdefault(learner, _Taken())
        taken.served = max(served, taken.served)
        taken.outstanding = max(taken.outstanding - settled, 0)
        self._drop(stale)

    async def give_back(self, learner: str, entries: list[Entry]) -> None:
        """Put the prefetched rollouts of a closed learner back to the front."""
        taken = self._learners.setdefault(learner, _Taken())
        taken.outstanding = max(taken.outstanding - len(entries), 0)
        fresh = [entry for entry in entries if not self._is_stale(entry.version)]
        self._drop(len(entries) - len(fresh))
        self._entries.extendleft(reversed(fresh))
        self._changed.notify()

    async def publish(self, version: int, state: QueueState) -> QueueState:
        """Set the newest version; rollouts that become stale are dropped."""
        self._merge(state._replace(version=max(version, state.version)))
        return self._state

    async def report(self, state: QueueState) -> QueueReport:
        """The counts of the queue."""
        self._merge(state)
        put = sum(self._put.values())
        served = sum(taken.served for taken in self._learners.values())
        waiting = len(self._entries) + sum(taken.outstanding for taken in self._learners.values())
        return QueueReport(
            put=put,
            served=served,
            stale=self._state.stale,
            lost=max(put - served - self._state.stale - waiting, 0),
            waiting=waiting,
            capacity=self._capacity,
            version=self._state.version,
            restarts=self._restarts,
        )

    def _merge(self, state: QueueState) -> None:
        newer = state.version > self._state.version
        self._state = self._state.merged(state)
        if newer:
            fresh = deque(entry for entry in self._entries if not self._is_stale(entry.version))
            self._drop(len(self._entries) - len(fresh))
            self._entries = fresh
            self._changed.notify()

    def _drop(self, count: int) -> None:
        self._state = self._state._replace(stale=self._state.stale + count)

    def _is_stale(self, version: int) -> bool:
        return self._max_staleness is not None and self._state.version - version > self._max_staleness


# ---------------------------------------------------------------------------------------------------- the handle


def rollout_queue(capacity: int = 16, max_staleness: int | None = None, deadline: float = 60.0) -> RolloutQueue:
    """Create a queue on the Ray cluster that this process is connected to. It ends with this process.

    Args:
        capacity: Rollouts that may wait; then ``put`` waits.
        max_staleness: A rollout whose policy is more than this many versions older than the newest published one is
            dropped and counted. None keeps all.
        deadline: Seconds after which any wait ends with an error that names what was waited for.

    Returns:
        A handle that can be sent to any task or actor.
    """
    check_positive("rollout_queue()", capacity=capacity)
    check_seconds("rollout_queue()", deadline=deadline)
    if max_staleness is not None:
        check_count("rollout_queue()", "max_staleness", max_staleness)
    check_connected()
    actor = start_on_this_node(QueueActor, capacity, max_staleness)
    queue = RolloutQueue(actor, f"rollout queue {uuid.uuid4().hex[:8]}", capacity, max_staleness, deadline)
    queue.report()  # wait until it is started
    return queue


class RolloutQueue:
    """A first-in, first-out queue of rollouts; created by :func:`rollout_queue`, and picklable.

    A rollout stays on the node of its producer until a learner fetches it; it is lost if that node is.

    Args:
        actor: The actor of the queue.
        name: The name of the queue in errors.
        capacity: Rollouts that may wait.
        max_staleness: How many versions a rollout may be behind the newest; None for any number.
        deadline: Seconds after which any wait ends with an error.
    """

    def __init__(self, actor: Any, name: str, capacity: int, max_staleness: int | None, deadline: float) -> None:
        self._settings = (actor, name, capacity, max_staleness, deadline)
        self._actor, self._name, self._deadline = actor, name, deadline
        self.capacity, self.max_staleness = capacity, max_staleness
        self._client, self._put, self._state = uuid.uuid4().hex, 0, QueueState(0, 0)

    def __reduce__(self) -> tuple[type[RolloutQueue], tuple[Any, ...]]:
        return RolloutQueue, self._settings

    @property
    def published(self) -> int:
        """The newest version known to this process; each ``put`` refreshes it."""
        return self._state.version

    def put(
        self, rollout: Mapping[str, Tensor | ArrayLike], version: int, states: Sequence[Tensor | ArrayLike] = ()
    ) -> None:
        """Append a rollout; waits while the queue is full.

        Args:
            rollout: Tensors ``[T + 1, ...]`` by name.
            version: The version of the policy that produced it.
            states: The recurrent states with which it begins, ``[layers, 1, hidden]`` each.

        Raises:
            InvalidInputError: (a ValueError) if the tensors differ in their number of steps.
            WaitTimeoutError: (a TimeoutError) if the queue was full until the deadline.
        """
        packed = pack((_check_rollout(rollout), tuple(as_tensor(state, "states") for state in states)))

        def call() -> Any:
            # In a list the reference itself is sent; as an argument the rollout would be fetched for the queue.
            args = (self._client, self._put, self._state, [ray.put(packed)], int(version), self._deadline)
            return self._actor.put.remote(*args)

        self._merge(self._ask(call))
        self._put += 1

    def publish(self, version: int) -> None:
        """Announce a newer version of the policy."""
        self._merge(self._ask(lambda: self._actor.publish.remote(int(version), self._state)))

    def learner(self, batch_size: int, prefetch: int = 1, device: str | torch.device = "cpu") -> QueueLearner:
        """An iterator over batches of rollouts.

        Args:
            batch_size: Rollouts in a batch.
            prefetch: Batches in flight.
            device: The device of the batches.
        """
        check_positive("learner()", batch_size=batch_size, prefetch=prefetch)
        return QueueLearner(self, batch_size, prefetch, check_device("learner()", device))

    def report(self) -> QueueReport:
        """The rollouts that were put, served, dropped and lost."""
        report: QueueReport = self._ask(lambda: self._actor.report.remote(self._state))
        return report

    def shutdown(self) -> None:
        """End the queue. The rollouts in it are lost."""
        ray.kill(self._actor)

    def _ask(self, call: Callable[[], Any]) -> Any:
        return ask(call, self._name, self._deadline + 1)

    def _merge(self, state: QueueState) -> None:
        self._state = self._state.merged(state)

    def _is_stale(self, version: int) -> bool:
        return self.max_staleness is not None and self.published - version > self.max_staleness


def _check_rollout(rollout: Any) -> dict[str, Tensor]:
    """The tensors of a rollout as those of a batch with one rollout, ``[T + 1, 1, ...]``."""
    if not isinstance(rollout, Mapping) or not rollout:
        raise InvalidInputError("a rollout is a mapping of tensors [T + 1, ...]; give one that is not empty")
    tensors = {str(key): as_tensor(value, str(key)) for key, value in rollout.items()}
    lengths = {key: tensor.shape[0] if tensor.dim() else None for key, tensor in tensors.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        raise InvalidInputError(f"the tensors of a rollout must have as many steps each; these have {lengths}")
    return {key: tensor.unsqueeze(1) for key, tensor in tensors.items()}


# ---------------------------------------------------------------------------------------------------- the learner


class _Fetched(NamedTuple):
    """A rollout that is on this node."""

    packed: Packed
    entry: Entry


class _Batch(NamedTuple):
    """Rollouts side by side: tensors by key and states, possibly still being copied to the device; and versions."""

    sent: Any
    versions: Tensor


class QueueLearner:
    """An endless iterator over batches of rollouts, the oldest first; created by ``queue.learner()``, for one process.

    Args:
        queue: The queue.
        batch_size: Rollouts in a batch.
        prefetch: Batches in flight.
        device: The device of the batches.
    """

    def __init__(self, queue: RolloutQueue, batch_size: int, prefetch: int, device: torch.device) -> None:
        self._queue, self._size, self._prefetch = queue, batch_size, prefetch
        self._output, self._client = Output(device), uuid.uuid4().hex
        # One thread, which keeps the order of the rollouts.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlstore-rollouts")
        self._in_flight: deque[Future[tuple[list[_Fetched], _Batch | None]]] = deque()
        self._messages: list[str] = []
        self._served = 0
        self._closed = False

    def __iter__(self) -> QueueLearner:
        return self

    def __next__(self) -> RolloutBatch:
        """The next batch.

        Raises:
            WaitTimeoutError: (a TimeoutError) if too few rollouts came within the deadline.
            PeerLostError: (a ConnectionError) if the queue did not answer until then.
        """
        if self._closed:
            raise StopIteration
        self._request()
        try:
            rollouts, batch = self._in_flight.popleft().result()
            fresh = self._fresh(rollouts)
            while batch is not None and len(fresh) < len(rollouts):  # a newer version was published since
                self._confirm(stale=len(rollouts) - len(fresh), settled=len(rollouts) - len(fresh))
                rollouts, batch = self._thread.submit(self._fetch, fresh).result()
                fresh = self._fresh(rollouts)
        except CancelledError:
            raise StopIteration from None
        finally:
            messages, self._messages = self._messages, []
            for message in messages:
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        if batch is None:
            self._give_back(rollouts)
            raise StopIteration
        self._served += self._size
        self._confirm(settled=self._size)
        if not self._closed:
            self._request()
        tensors, states = self._output.receive(batch.sent)
        return RolloutBatch(tensors, states, batch.versions)

    def _request(self) -> None:
        while len(self._in_flight) < self._prefetch:
            self._in_flight.append(self._thread.submit(self._fetch, []))

    def _fresh(self, rollouts: list[_Fetched]) -> list[_Fetched]:
        return [rollout for rollout in rollouts if not self._queue._is_stale(rollout.entry.version)]

    def close(self) -> None:
        """Return the prefetched rollouts to the queue. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        fetched = [future for future in self._in_flight if not future.cancelled() and future.exception() is None]
        self._in_flight.clear()
        self._give_back([rollout for future in fetched for rollout in future.result()[0]])

    def __enter__(self) -> QueueLearner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_back(self, rollouts: list[_Fetched]) -> None:
        if rollouts:
            entries = [rollout.entry for rollout in rollouts]
            self._queue._ask(lambda: self._queue._actor.give_back.remote(self._client, entries))

    def _confirm(self, *, settled: int, stale: int = 0) -> None:
        self._queue._actor.confirm.remote(self._client, self._served, stale, settled)

    # ---------------------------------------------------------------------------------------------- in the thread

    def _fetch(self, rollouts: list[_Fetched]) -> tuple[list[_Fetched], _Batch | None]:
        """A batch that begins with the given rollouts; no batch if the learner is closed."""
        rollouts, deadline = list(rollouts), Deadline(self._queue._deadline)
        try:
            while len(rollouts) < self._size:
                rollouts += self._get(self._take(self._size - len(rollouts), deadline))
                if self._closed:
                    return rollouts, None
        except BaseException:
            self._give_back(rollouts)
            raise
        return rollouts, self._join(rollouts)

    def _take(self, count: int, deadline: Deadline) -> list[Entry]:
        """Entries of the queue; none if the learner is closed while it waits."""
        queue = self._queue
        while not self._closed and is_running():
            seconds = min(deadline.left, _SLICE_SECONDS)
            try:
                entries, state = queue._ask(
                    partial(queue._actor.take.remote, self._client, queue._state, count, seconds)
                )
            except WaitTimeoutError as error:
                if deadline.left:
                    continue
                raise WaitTimeoutError(
                    f"{self._size} rollouts were waited for from {queue._name}, and not all came within "
                    f"{deadline.seconds:g} s. ({error})"
                ) from error
            queue._merge(state)
            return list(entries)
        self._closed = True
        return []

    def _get(self, entries: list[Entry]) -> list[_Fetched]:
        """Fetch the rollouts of these entries; those that do not exist any more are counted as lost."""
        names = [f"a rollout of version {entry.version}" for entry in entries]
        found = answers([entry.ref for entry in entries], names, max(self._queue._deadline / 6, 0.5))
        lost = [result for result in found if isinstance(result, Exception)]
        if lost:
            self._confirm(settled=len(lost))
            self._messages.append(f"{len(lost)} rollouts were lost before they were served: {lost[0]}")
        pairs = zip(found, entries, strict=True)
        return [_Fetched(result, entry) for result, entry in pairs if not isinstance(result, Exception)]

    def _join(self, rollouts: list[_Fetched]) -> _Batch:
        parts = [rollout.packed for rollout in rollouts]
        kinds = [(part.form, part.dtypes, [array.shape for array in part.arrays]) for part in parts]
        if any(kind != kinds[0] for kind in kinds):
            raise InvalidInputError("the rollouts of a batch differ in their names, dtypes or shapes")
        sent = self._output.send(join(parts, self._output.allocate, axis=1))
        return _Batch(sent, torch.tensor([rollout.entry.version for rollout in rollouts]))
