"""A queue of rollouts across machines, for learners that follow their actors closely (IMPALA)."""

from __future__ import annotations

import time
import uuid
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from torch import Tensor

from rlstore.distributed.batch import RolloutBatch
from rlstore.engine.checks import check_device, check_positive
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError, NotReadyError, PeerLostError, WaitTimeoutError
from rlstore.ray.calls import Deadline, GoneForGoodError, answer, answers, check_seconds, on_this_node, program_goes_on
from rlstore.ray.output import Output
from rlstore.ray.queue_actor import Entry, QueueActor, Told
from rlstore.ray.reports import QueueReport
from rlstore.ray.wire import Packed, join, pack, stack

_OPTIONS: Mapping[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
_PAUSE_SECONDS = 0.2
# A learner that waits looks this often whether it was closed.
_SLICE_SECONDS = 0.2


def rollout_queue(capacity: int = 16, max_staleness: int | None = None, deadline: float = 60.0) -> RolloutQueue:
    """A queue on the Ray cluster that this process is connected to. It ends with this process.

    Args:
        capacity: Rollouts that may wait; then ``put`` does.
        max_staleness: A rollout whose policy is more than this many versions older than the newest one that was
            published is dropped, and counted. None keeps all.
        deadline: Seconds after which any wait ends with an error that says what was waited for.

    Returns:
        A handle that can be sent to any task or actor.
    """
    check_positive("rollout_queue()", capacity=capacity)
    check_seconds("rollout_queue()", deadline=deadline)
    if max_staleness is not None and (
        isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0
    ):
        raise InvalidInputError(f"max_staleness is {max_staleness!r}; rollout_queue() needs a number >= 0, or None")
    if not ray.is_initialized():
        raise NotReadyError("this process is not connected to a Ray cluster; call ray.init() first")
    queue_class: Any = ray.remote(QueueActor)
    actor = queue_class.options(**_OPTIONS, scheduling_strategy=on_this_node()).remote(capacity, max_staleness)
    queue = RolloutQueue(actor, f"rollout queue {uuid.uuid4().hex[:8]}", capacity, max_staleness, deadline)
    queue.report()  # it has been started
    return queue


class RolloutQueue:
    """Rollouts in the order in which they came; made by :func:`rollout_queue`, and picklable.

    A rollout stays on the node of whoever put it until a learner fetches it; it is lost if that node is.
    """

    def __init__(self, actor: Any, name: str, capacity: int, max_staleness: int | None, deadline: float) -> None:
        self._settings = (actor, name, capacity, max_staleness, deadline)
        self._actor, self._name, self._deadline = actor, name, deadline
        self.capacity, self.max_staleness = capacity, max_staleness
        self._client, self._put, self._told = uuid.uuid4().hex, 0, Told(0, 0)

    def __reduce__(self) -> tuple[type[RolloutQueue], tuple[Any, ...]]:
        return RolloutQueue, self._settings

    @property
    def published(self) -> int:
        """The newest version that this process has heard of; each ``put`` brings news."""
        return self._told.version

    def put(self, rollout: Mapping[str, Any], version: int, states: Sequence[Any] = ()) -> None:
        """Put a rollout in; waits while the queue is full.

        Args:
            rollout: Tensors ``[T + 1, ...]`` by name.
            version: That of the policy which made it.
            states: The recurrent states with which it began, ``[layers, 1, hidden]`` each.
        """
        packed = pack({"rollout": _check_rollout(rollout), "states": tuple(as_tensor(s, "states") for s in states)})

        def call() -> Any:
            # In a list the reference goes as it is; by itself it would be fetched for the queue.
            args = (self._client, self._put, self._told, [ray.put(packed)], int(version), self._deadline)
            return self._actor.put.remote(*args)

        told = self._ask(call)
        self._put += 1
        self._hear(told)

    def publish(self, version: int) -> None:
        """Tell that there is a newer policy."""
        self._hear(self._ask(lambda: self._actor.publish.remote(int(version), self._told)))

    def learner(self, batch_size: int, prefetch: int = 1, device: str | torch.device = "cpu") -> QueueLearner:
        """Batches of rollouts.

        Args:
            batch_size: Rollouts in a batch.
            prefetch: Batches under way.
            device: Where batches are served.
        """
        check_positive("learner()", batch_size=batch_size, prefetch=prefetch)
        return QueueLearner(self, batch_size, prefetch, check_device("learner()", device))

    def report(self) -> QueueReport:
        """What was put, served, dropped and lost."""
        report: QueueReport = self._ask(lambda: self._actor.report.remote(self._told))
        return report

    def shutdown(self) -> None:
        """End the queue. What is in it is gone."""
        ray.kill(self._actor)

    def _ask(self, call: Any) -> Any:
        """What the queue answers; while it is being started again it is asked again, until the deadline."""
        deadline = Deadline(self._deadline + 1)
        while True:
            try:
                return answer(call(), self._name, deadline.left)
            except PeerLostError as error:
                if not deadline.left or isinstance(error, GoneForGoodError):
                    raise
                time.sleep(min(_PAUSE_SECONDS, deadline.left))

    def _hear(self, told: Told) -> None:
        self._told = Told(max(told.version, self._told.version), max(told.stale, self._told.stale))

    def _is_stale(self, version: int) -> bool:
        return self.max_staleness is not None and self.published - version > self.max_staleness


def _check_rollout(rollout: Any) -> dict[str, Tensor]:
    if not isinstance(rollout, Mapping) or not rollout:
        raise InvalidInputError("a rollout is a mapping of tensors [T + 1, ...]; give one that is not empty")
    tensors = {str(key): as_tensor(value, str(key)) for key, value in rollout.items()}
    lengths = {key: tensor.shape[0] if tensor.dim() else None for key, tensor in tensors.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        raise InvalidInputError(f"the tensors of a rollout must have as many steps each; these have {lengths}")
    return tensors


class _Stacked(NamedTuple):
    """Rollouts side by side: their tensors by key and their states, perhaps on their way to the learner's device."""

    joined: Any
    versions: Tensor


class _Fetched(NamedTuple):
    """A rollout that is on this node."""

    packed: Packed
    entry: Entry

    @property
    def version(self) -> int:
        return self.entry.version


class QueueLearner:
    """Iterates over batches of rollouts without end, the oldest first; made by ``queue.learner()``, for one process.

    Args:
        queue: The queue.
        batch_size: Rollouts in a batch.
        prefetch: Batches under way.
        device: Where batches are served.
    """

    def __init__(self, queue: RolloutQueue, batch_size: int, prefetch: int, device: torch.device) -> None:
        self._queue, self._size, self._prefetch = queue, batch_size, prefetch
        self._output, self._client = Output(device), uuid.uuid4().hex
        # One thread, so that rollouts stay in their order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlstore-rollouts")
        self._ahead: deque[Future[tuple[list[_Fetched], _Stacked | None]]] = deque()
        self._messages: list[str] = []
        self._served = self._lost = 0
        self._closed = False

    def __iter__(self) -> QueueLearner:
        return self

    def __next__(self) -> RolloutBatch:
        """The next batch.

        Raises:
            WaitTimeoutError: (a TimeoutError) if too few rollouts came within the deadline.
            PeerLostError: (a ConnectionError) if the queue was gone for so long.
        """
        if self._closed:
            raise StopIteration
        while len(self._ahead) < self._prefetch:
            self._ahead.append(self._thread.submit(self._fetch, []))
        try:
            rollouts, batch = self._ahead.popleft().result()
            fresh = self._fresh(rollouts)
            while batch is not None and len(fresh) < len(rollouts):  # a newer policy was published since
                self._confirm(0, len(rollouts) - len(fresh), len(rollouts) - len(fresh))
                rollouts, batch = self._thread.submit(self._fetch, fresh).result()
                fresh = self._fresh(rollouts)
        except CancelledError:
            raise StopIteration from None
        finally:
            for message in self._take_messages():
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        if batch is None:
            self._give_back(rollouts)
            raise StopIteration
        self._served += self._size
        self._confirm(0, 0, self._size)
        if not self._closed:
            self._ahead.append(self._thread.submit(self._fetch, []))
        tensors, states = self._output.hand_out(batch.joined)
        return RolloutBatch(tensors, states, batch.versions)

    def _fresh(self, rollouts: list[_Fetched]) -> list[_Fetched]:
        return [rollout for rollout in rollouts if not self._queue._is_stale(rollout.version)]

    def close(self) -> None:
        """Give rollouts that were fetched ahead back to the queue. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        ahead = [future for future in self._ahead if not future.cancelled() and future.exception() is None]
        self._ahead.clear()
        self._give_back([rollout for future in ahead for rollout in future.result()[0]])

    def _give_back(self, rollouts: list[_Fetched]) -> None:
        if rollouts:
            entries = [rollout.entry for rollout in rollouts]
            self._queue._ask(lambda: self._queue._actor.give_back.remote(self._client, entries))

    def __enter__(self) -> QueueLearner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_messages(self) -> list[str]:
        messages, self._messages = self._messages, []
        return messages

    def _confirm(self, lost: int, stale: int, settled: int) -> None:
        self._lost += lost
        self._queue._actor.confirm.remote(self._client, self._served, self._lost, stale, settled)

    # ---------------------------------------------------------------------------------------------- in the thread

    def _fetch(self, rollouts: list[_Fetched]) -> tuple[list[_Fetched], _Stacked | None]:
        """A batch that begins with rollouts that are here already; without the batch if the learner is closed."""
        rollouts, deadline = list(rollouts), Deadline(self._queue._deadline)
        while len(rollouts) < self._size:
            try:
                rollouts += self._bring(self._take(self._size - len(rollouts), deadline))
            except BaseException:
                self._give_back(rollouts)
                raise
            if self._closed:
                return rollouts, None
        return rollouts, self._stack(rollouts)

    def _take(self, count: int, deadline: Deadline) -> list[Entry]:
        """Some entries of the queue, asked for in slices of time so that a closed learner ends; none if it is."""
        queue = self._queue
        while not self._closed and program_goes_on():
            seconds = min(deadline.left, _SLICE_SECONDS)
            try:
                entries, told = queue._ask(
                    lambda seconds=seconds: queue._actor.take.remote(self._client, queue._told, count, seconds)
                )
            except WaitTimeoutError as error:
                if deadline.left:
                    continue
                raise WaitTimeoutError(
                    f"{self._size} rollouts were waited for from {queue._name}, and not all came within "
                    f"{deadline.seconds:g} s. ({error})"
                ) from error
            queue._hear(told)
            return list(entries)
        self._closed = True
        return []

    def _bring(self, entries: list[Entry]) -> list[_Fetched]:
        """The rollouts of these entries; those that are gone are counted as lost."""
        patience = max(self._queue._deadline / 6, 0.5)
        names = [f"a rollout of version {entry.version}" for entry in entries]
        found = answers([entry.ref for entry in entries], names, patience)
        lost = [given for given in found if isinstance(given, Exception)]
        if lost:
            self._confirm(len(lost), 0, len(lost))
            self._messages.append(f"{len(lost)} rollouts were lost before they were served: {lost[0]}")
        return [
            _Fetched(given, entry)
            for given, entry in zip(found, entries, strict=True)
            if not isinstance(given, Exception)
        ]

    def _stack(self, rollouts: list[_Fetched]) -> _Stacked:
        first = rollouts[0].packed
        shapes = [[array.shape for array in rollout.packed.arrays] for rollout in rollouts]
        if any(rollout.packed.spec != first.spec for rollout in rollouts) or any(s != shapes[0] for s in shapes):
            raise InvalidInputError("the rollouts of a batch differ in their names, dtypes or shapes")
        fields = first.spec[1]["rollout"][1]
        dtypes = [getattr(torch, spec[1]) for spec in fields.values()]
        count = len(dtypes)
        tensors = stack([rollout.packed.arrays[:count] for rollout in rollouts], dtypes, self._output.allocate)
        states = join(
            [
                Packed(("dict", {"hidden_states": r.packed.spec[1]["states"]}), r.packed.arrays[count:])
                for r in rollouts
            ],
            self._output.allocate,
        )["hidden_states"]
        versions = torch.from_numpy(np.array([rollout.version for rollout in rollouts], dtype=np.int64))
        return _Stacked(self._output.send((dict(zip(fields, tensors, strict=True)), states)), versions)
