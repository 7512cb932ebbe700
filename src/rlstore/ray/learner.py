"""Learning from a served storage: batches are drawn across the shards and prefetched."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import ray
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rlstore.engine.checks import check_seed
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError, PeerLostError, StorageClosedError, WaitTimeoutError
from rlstore.ray.calls import Connection, Deadline, answer, answers, is_done, is_running
from rlstore.ray.shard import Draw
from rlstore.ray.wire import Array, Output, join
from rlstore.storage import BatchDict

# Batches of at least this size are requested one by one.
_LARGE_BYTES = 1 << 20

# Calls with priorities that may be open; then update() waits for the oldest.
_OPEN_UPDATES = 8

# Between two calls to a shard that does not answer.
_PROBE_SECONDS = 0.5

_UNCHANGED = "No priority was changed."


class _Part(NamedTuple):
    """The part of a batch that one shard has drawn, and the probability of a row to be from that shard."""

    shard: int
    chance: float
    draw: Draw


class ServedLearner:
    """An endless iterator over batches; created by ``served.learner()``, for one process.

    Batches are drawn as if all shards were one storage: each shard reports what its draws are proportional to
    (transitions, windows, or the sum of priorities), the batch is split multinomially in these proportions, and each
    shard draws its part. So the probability of row i of shard s is ``P(i) = (total_s / sum of totals) * (p_i /
    total_s)``, which is ``p_i`` over the sum of all p. ``weights``, if a batch has them, are ``(P(i) * N) ** -beta``
    over the largest in the batch, with P(i) at the time of the draw. ``rows`` are int64 ``[n, 3]``: shard, row id,
    generation. The rows of one shard are contiguous in a batch.

    ``prefetch`` batches are always in flight or ready.
    """

    def __init__(
        self, connection: Connection, batch_size: int, prefetch: int, device: torch.device, seed: int | None
    ) -> None:
        """Arguments are those of ``served.learner()``."""
        self._served, self._size = connection, batch_size
        self._health, self._output = Health(connection), Output(device)
        self._random = np.random.default_rng(check_seed("learner()", seed))
        self._random_lock = threading.Lock()
        self._prefetch, self._group = prefetch, 1
        self._limited = True  # until the shards answer that there is no rate limit
        self._threads = ThreadPoolExecutor(prefetch, thread_name_prefix="rlstore-learner")
        self._in_flight: deque[Future[list[Any]]] = deque()
        self._ready: deque[Any] = deque()  # batches, possibly still being copied to the device
        self._updates: deque[tuple[Any, int, int]] = deque()
        self._closed = False

    # ---------------------------------------------------------------------------------------------- batches

    def __iter__(self) -> ServedLearner:
        return self

    def __next__(self) -> BatchDict:
        """The next batch.

        Raises:
            WaitTimeoutError: (a TimeoutError) if none came within the deadline, because nothing was inserted or the
                rate limit does not allow it.
            PeerLostError: (a ConnectionError) if no shard answered within the deadline.
        """
        if self._closed:
            raise StopIteration
        self._request()
        if not self._ready:
            try:
                self._ready.extend(self._in_flight.popleft().result())
            except (StorageClosedError, CancelledError):
                raise StopIteration from None
            finally:
                for message in self._health.take_messages():
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
            self._request()
        batch: BatchDict = self._output.receive(self._ready.popleft())
        return batch

    def _request(self) -> None:
        while len(self._in_flight) * self._group < self._prefetch:
            self._in_flight.append(self._threads.submit(self._fetch))

    def _wanted(self) -> bool:
        return not self._closed and is_running()

    def _fetch(self) -> list[Any]:
        """One or more batches, in a thread."""
        served, size = self._served, self._size
        count, seen, limited = self._group, -1, self._limited
        if limited:
            count, seen = served.ask_ledger("permit_sample", size, count, served.deadline, wanted=self._wanted)
        deadline = Deadline(served.deadline)
        try:
            while True:
                batches = self._draw(count, limited)
                if batches is not None:
                    return batches
                if not self._wanted():
                    raise StorageClosedError("this learner is closed")
                if not deadline.left:
                    self._give_up(deadline)
                if self._health.answering():
                    seen = served.ask_ledger("wait_for_heartbeat", seen, min(deadline.left, 0.5))
                else:
                    self._health.wait(deadline)
        except BaseException:
            if limited:
                self._return_permits(count)
            raise

    def _give_up(self, deadline: Deadline) -> NoReturn:
        name, silent = self._served.name, self._health.silent()
        if not self._health.answering():
            raise PeerLostError(f"no shard of {name} answered within {deadline.seconds:g} s: {silent}")
        raise WaitTimeoutError(
            f"no shard of {name} had anything to draw from within {deadline.seconds:g} s; left out were: {silent}"
        )

    def _draw(self, count: int, permitted: bool) -> list[Any] | None:
        """Batches drawn across the shards that answer; None if the draw has to be repeated."""
        shards = self._health.answering()
        if len(self._served.shards) == 1:
            chances, sizes = [1.0] * len(shards), np.full((count, len(shards)), self._size)
        else:
            totals = self._totals(shards)
            if not totals:
                return None
            shards, total = list(totals), sum(totals.values())
            chances = [part / total for part in totals.values()]
            with self._random_lock:
                sizes = self._random.multinomial(self._size, chances, size=count)
        asked = [(column, shard) for column, shard in enumerate(shards) if sizes[:, column].any()]
        refs = [
            self._served.shards[shard].draw.remote(sizes[sizes[:, column] > 0, column].tolist(), permitted)
            for column, shard in asked
        ]
        drawn = self._collect([shard for _, shard in asked], refs)
        if not asked or any(draws is None for draws in drawn):
            return None
        batches: list[list[_Part]] = [[] for _ in range(count)]
        for (column, shard), draws in zip(asked, drawn, strict=True):
            for batch, draw in zip(np.flatnonzero(sizes[:, column]).tolist(), draws, strict=True):
                batches[batch].append(_Part(shard, chances[column], draw))
        self._limited = any(part.draw.limited for batch in batches for part in batch)
        # Small batches are requested half of ``prefetch`` at a time, which needs fewer calls.
        nbytes = sum(array.nbytes for part in batches[0] for packed in part.draw.parts for array in packed.arrays)
        self._group = max(self._prefetch // 2, 1) if nbytes < _LARGE_BYTES else 1
        return [self._output.send(self._assemble(parts)) for parts in batches]

    def _totals(self, shards: list[int]) -> dict[int, float]:
        """What the draws of each shard are proportional to; without shards that are empty or do not answer."""
        answered = self._collect(shards, [self._served.shards[shard].total.remote() for shard in shards])
        return {shard: total for shard, total in zip(shards, answered, strict=True) if total}

    def _collect(self, shards: list[int], refs: list[Any]) -> list[Any]:
        """The answer of each shard; None if it is empty or did not answer, and then it is left out for a while."""
        answered = answers(refs, [self._served.who(shard) for shard in shards], self._served.patience)
        for shard, result in zip(shards, answered, strict=True):
            if isinstance(result, (PeerLostError, WaitTimeoutError)):
                self._health.leave_out(shard, result)
        return [None if isinstance(result, Exception) else result for result in answered]

    def _assemble(self, parts: list[_Part]) -> BatchDict:
        draws, axis = [part.draw for part in parts], parts[0].draw.axis
        batch: BatchDict = join([packed for draw in draws for packed in draw.parts], self._output.allocate, axis)
        if all(draw.rows.size for draw in draws):
            ids = [
                np.stack(np.broadcast_arrays(part.shard, part.draw.rows, part.draw.generation), -1) for part in parts
            ]
            batch["rows"] = self._output.pinned(torch.from_numpy(np.concatenate(ids, axis).reshape(-1, 3)))
        if all(draw.priorities is not None for draw in draws):
            batch["weights"] = self._output.pinned(_weights(parts))
        return batch

    # ---------------------------------------------------------------------------------------------- priorities

    def update(self, rows: Tensor | ArrayLike, priorities: Tensor | ArrayLike) -> None:
        """Set priorities. The call does not wait for the shards; updates of stale rows are dropped and counted.

        Args:
            rows: The ``rows`` of a batch, int64 ``[n, 3]``.
            priorities: Finite and not negative, ``[n]`` or ``[n, 1]``.

        Raises:
            InvalidInputError: (a ValueError) if one of them is refused; no priority is changed.
        """
        if self._closed:
            raise StorageClosedError("this learner is closed")
        ids, values = self._check_update(rows, priorities)
        for shard in np.unique(ids[:, 0]).tolist():
            mine = ids[:, 0] == shard
            part = ids[mine]
            while len(self._updates) >= _OPEN_UPDATES or (self._updates and is_done(self._updates[0][0])):
                self._finish_update()
            call = self._served.shards[shard].update.remote(part[:, 1], part[:, 2], values[mine])
            self._updates.append((call, shard, len(part)))

    def _check_update(self, rows: Any, priorities: Any) -> tuple[Array, Array]:
        ids, values = as_tensor(rows, "rows").cpu(), as_tensor(priorities, "priorities").cpu()
        if ids.dim() != 2 or ids.shape[1] != 3 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise InvalidInputError(
                f"rows are {tuple(ids.shape)} {ids.dtype}; give those of a batch, int64 [n, 3]. {_UNCHANGED}"
            )
        if tuple(values.shape) not in ((len(ids),), (len(ids), 1)) or values.dtype.is_complex:
            raise InvalidInputError(
                f"priorities are {tuple(values.shape)} {values.dtype} for {len(ids)} rows; give a real number for "
                f"each. {_UNCHANGED}"
            )
        values = values.flatten().to(torch.float64)
        bad = (~(values.isfinite() & (values >= 0) & values.to(torch.float32).isfinite())).nonzero()
        if len(bad):
            index = int(bad[0])
            raise InvalidInputError(
                f"priority {index} of {len(ids)} is {values[index].item()}; priorities must be finite (as float32) and "
                f">= 0. {_UNCHANGED}"
            )
        shards, count = ids[:, 0], len(self._served.shards)
        if len(ids) and not 0 <= int(shards.min()) <= int(shards.max()) < count:
            raise InvalidInputError(
                f"rows name shards from {int(shards.min())} to {int(shards.max())}; there are {count}. {_UNCHANGED}"
            )
        return ids.to(torch.int64).numpy(), values.numpy()

    def flush(self) -> None:
        """Wait until the shards have set all priorities."""
        while self._updates:
            self._finish_update()

    def _finish_update(self) -> None:
        ref, shard, count = self._updates.popleft()
        try:
            answer(ref, self._served.who(shard), self._served.deadline)
        except (PeerLostError, WaitTimeoutError):
            self._served.ledger.count_lost.remote(0, count, 0)

    # ---------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Flush priorities, and discard the prefetched batches. Calling it again does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._return_permits(len(self._ready))
            for future in self._in_flight:
                future.add_done_callback(self._discard)
            self._in_flight.clear()
            self._ready.clear()

    def _discard(self, done: Future[list[Any]]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._return_permits(len(done.result()))

    def _return_permits(self, batches: int) -> None:
        """Batches that were drawn and not served do not count for the rate limit."""
        if batches:
            self._served.ledger.return_sample.remote(batches * self._size)

    def __enter__(self) -> ServedLearner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weights(parts: list[_Part]) -> Tensor:
    """``(P(i) * N) ** -beta`` over the largest of them, float32 ``[n, 1]``; N is the same for all and cancels."""
    chance = np.concatenate(
        [
            np.log(part.chance / part.draw.total) + np.log(np.asarray(part.draw.priorities, dtype=np.float64))
            for part in parts
        ]
    )
    beta = max(part.draw.beta for part in parts)
    weights: Any = np.exp(-beta * (chance - chance.min()))
    return torch.from_numpy(weights.astype(np.float32)).unsqueeze(1)


class Health:
    """Which shards answer, for the threads of one learner. A silent shard is left out and called again regularly.

    Args:
        connection: The served storage.
    """

    def __init__(self, connection: Connection) -> None:
        self._served = connection
        self._lock = threading.Lock()
        self._probes: dict[int, tuple[Any, float]] = {}  # for each silent shard a call, and when it was made
        self._messages: list[str] = []
        self.absences = 0

    def answering(self) -> list[int]:
        """The shards that never failed, and those that are back."""
        with self._lock:
            for shard, (ref, since) in list(self._probes.items()):
                if is_done(ref):
                    self._check(shard, ref, since)
            return [shard for shard in range(len(self._served.shards)) if shard not in self._probes]

    def _check(self, shard: int, ref: Any, since: float) -> None:
        try:
            answer(ref, self._served.who(shard), 1.0)
        except (PeerLostError, WaitTimeoutError):
            if time.monotonic() - since >= _PROBE_SECONDS:
                self._probe(shard)
        else:
            del self._probes[shard]

    def _probe(self, shard: int) -> None:
        self._probes[shard] = self._served.shards[shard].total.remote(), time.monotonic()

    def leave_out(self, shard: int, error: Exception) -> None:
        """Leave out a shard that did not answer."""
        with self._lock:
            if shard not in self._probes:
                self.absences += 1
                self._messages.append(f"{error}. The other shards continue; this one is called again regularly")
                self._probe(shard)

    def wait(self, deadline: Deadline) -> None:
        """Wait until a silent shard may be back, or for a short time."""
        with self._lock:
            refs = [ref for ref, _ in self._probes.values() if not is_done(ref)]
        if refs:
            ray.wait(refs, num_returns=1, timeout=min(_PROBE_SECONDS, deadline.left))
        else:
            deadline.pause()

    def silent(self) -> str:
        """The shards that are left out, for errors."""
        with self._lock:
            return ", ".join(self._served.who(shard) for shard in self._probes) or "none"

    def take_messages(self) -> list[str]:
        """The warnings about shards that failed since the last call."""
        with self._lock:
            messages, self._messages = self._messages, []
        return messages
