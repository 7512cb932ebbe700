"""Learning from a served storage: batches are drawn across the shards ahead of their use."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.checks import check_seed
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError, PeerLostError, StorageClosedError, WaitTimeoutError
from rlstore.ray.calls import Deadline, answer, answers, is_done, program_goes_on
from rlstore.ray.connection import Connection
from rlstore.ray.health import Health
from rlstore.ray.output import Output
from rlstore.ray.shard import Draw, Totals
from rlstore.ray.wire import join
from rlstore.storage import BatchDict

# A batch of this size is worth a call of its own.
_LARGE_BYTES = 1 << 20

# Calls with priorities that may be open; then update() waits for the oldest.
_OPEN_UPDATES = 8


class _Part(NamedTuple):
    """A shard's part of a batch, and the chance with which a row is that shard's."""

    shard: int
    chance: float
    draw: Draw


class ServedLearner:
    """Iterates over batches without end; made by ``served.learner()``, for one process.

    A batch is drawn as if all shards were one storage: each shard tells what its draws are in proportion to
    (transitions, windows, or the sum of priorities), the batch is split multinomially in these proportions, and each
    shard draws its share. So row i of shard s has the chance ``P(i) = (total_s / sum of totals) * (p_i / total_s)``,
    which is ``p_i`` over the sum of all p. Where batches have ``weights`` they are ``(P(i) * N) ** -beta`` over the
    largest in the batch, with P(i) as it was when the row was drawn. ``rows`` are int64 ``[n, 3]``: shard, row,
    generation.

    ``prefetch`` batches are always under way, or drawn and not taken yet. The rows of one shard stand together in a
    batch.

    Args:
        connection: The served storage.
        batch_size: Rows (or sequences) in a batch.
        prefetch: Batches under way.
        device: Where batches are served.
        seed: Of the splits; None draws one from torch's own generator.
    """

    def __init__(
        self, connection: Connection, batch_size: int, prefetch: int, device: torch.device, seed: int | None
    ) -> None:
        self._served, self._size = connection, batch_size
        self._health, self._output = Health(connection), Output(device)
        self._random = np.random.default_rng(check_seed("learner()", seed))
        self._random_lock = threading.Lock()
        self._prefetch, self._group = prefetch, 1
        self._limited = True  # until the shards say that there is no rate limit
        self._threads = ThreadPoolExecutor(prefetch, thread_name_prefix="rlstore-learner")
        self._ahead: deque[Future[list[Any]]] = deque()
        self._ready: deque[Any] = deque()  # batches, perhaps on their way to the device
        self._updates: deque[tuple[Any, int, int]] = deque()
        self._closed = False

    # ---------------------------------------------------------------------------------------------- batches

    def __iter__(self) -> ServedLearner:
        return self

    def __next__(self) -> BatchDict:
        """The next batch.

        Raises:
            WaitTimeoutError: (a TimeoutError) if none came within the deadline, because there are no data or the rate
                limit holds the learner back.
            PeerLostError: (a ConnectionError) if no shard answered within the deadline.
        """
        if self._closed:
            raise StopIteration
        self._ask_ahead()
        if not self._ready:
            try:
                self._ready.extend(self._ahead.popleft().result())
            except (StorageClosedError, CancelledError):
                raise StopIteration from None
            finally:
                for message in self._health.take_messages():
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
            self._ask_ahead()
        batch: BatchDict = self._output.hand_out(self._ready.popleft())
        return batch

    def _ask_ahead(self) -> None:
        while len(self._ahead) * self._group < self._prefetch:
            self._ahead.append(self._threads.submit(self._fetch))

    def _wanted(self) -> bool:
        return not self._closed and program_goes_on()

    def _fetch(self) -> list[Any]:
        """Some batches, in a thread."""
        served, size = self._served, self._size
        many, news, limited = self._group, -1, self._limited
        if limited:
            many, news = served.ask_ledger("permit_sample", size, many, served.deadline, wanted=self._wanted)
        deadline = Deadline(served.deadline)
        try:
            while True:
                batches = self._draw(many, limited)
                if batches is not None:
                    return batches
                if not self._wanted():
                    raise StorageClosedError("this learner is closed")
                if not deadline.left:
                    self._give_up(deadline)
                if self._health.answering():
                    news = served.ask_ledger("wait_for_news", news, min(deadline.left, 0.5))
                else:
                    self._health.wait(deadline)
        except BaseException:
            if limited:
                served.ledger.return_sample.remote(many * size)
            raise

    def _give_up(self, deadline: Deadline) -> None:
        if not self._health.answering():
            raise PeerLostError(
                f"no shard of {self._served.name} answered within {deadline.seconds:g} s: {self._health.left_out()}"
            )
        raise WaitTimeoutError(
            f"no shard of {self._served.name} had anything to draw from within {deadline.seconds:g} s; left out were: "
            f"{self._health.left_out()}"
        )

    def _draw(self, many: int, permitted: bool) -> list[Any] | None:
        """Batches to hand out, drawn across the shards that answer; None if it has to be tried again."""
        shards = self._health.answering()
        if len(self._served.shards) == 1:
            chances, counts = [1.0] * len(shards), np.full((many, len(shards)), self._size)
        else:
            asked = [(shard, told.total) for shard, told in self._ask(shards, "totals") if told.total > 0]
            shards, totals = [shard for shard, _ in asked], [total for _, total in asked]
            if not shards:
                return None
            chances = [total / sum(totals) for total in totals]
            with self._random_lock:
                counts = self._random.multinomial(self._size, chances, size=many)
        wanted = [(place, shard) for place, shard in enumerate(shards) if counts[:, place].any()]
        refs = [self._served.shards[s].draw.remote(counts[counts[:, i] > 0, i].tolist(), permitted) for i, s in wanted]
        given = self._collect([shard for _, shard in wanted], refs)
        if not wanted or any(drawn is None for drawn in given):
            return None
        parts: list[list[_Part]] = [[] for _ in range(many)]
        for (place, shard), drawn in zip(wanted, given, strict=True):
            for batch, part in zip(np.flatnonzero(counts[:, place]).tolist(), drawn, strict=True):
                parts[batch].append(_Part(shard, chances[place], part))
        self._limited = any(part.draw.limited for batch in parts for part in batch)
        # Half of the batches under way are asked for at once, if they are small: so they need few calls.
        nbytes = sum(array.nbytes for part in parts[0] for packed in part.draw.parts for array in packed.arrays)
        self._group = max(self._prefetch // 2, 1) if nbytes < _LARGE_BYTES else 1
        return [self._output.send(self._assemble(batch)) for batch in parts]

    def _ask(self, shards: list[int], method: str) -> list[tuple[int, Totals]]:
        refs = [getattr(self._served.shards[shard], method).remote() for shard in shards]
        return [pair for pair in zip(shards, self._collect(shards, refs), strict=True) if pair[1] is not None]

    def _collect(self, shards: list[int], refs: list[Any]) -> list[Any]:
        """What each shard answered; None where it has nothing yet, or did not answer, which leaves it out for now."""
        given = answers(refs, [self._served.who(shard) for shard in shards], self._served.patience)
        for shard, told in zip(shards, given, strict=True):
            if isinstance(told, (PeerLostError, WaitTimeoutError)):
                self._health.leave_out(shard, told)
        return [None if isinstance(told, Exception) else told for told in given]

    def _assemble(self, parts: list[_Part]) -> BatchDict:
        batch: BatchDict = join([packed for part in parts for packed in part.draw.parts], self._output.allocate)
        if all(len(part.draw.rows) for part in parts):
            rows = np.concatenate([part.draw.rows for part in parts])
            shards, generations = (
                np.concatenate([np.full(len(part.draw.rows), value) for part, value in zip(parts, column, strict=True)])
                for column in ([part.shard for part in parts], [part.draw.generation for part in parts])
            )
            batch["rows"] = self._output.own(torch.from_numpy(np.stack([shards, rows, generations], 1)))
        if all(part.draw.priorities is not None for part in parts):
            batch["weights"] = self._output.own(_weights(parts))
        return batch

    # ---------------------------------------------------------------------------------------------- priorities

    def update(self, rows: Any, priorities: Any) -> None:
        """Set priorities. They are sent and not waited for; those for rows that are gone are dropped and counted.

        Args:
            rows: As a batch gave them, int64 ``[n, 3]``.
            priorities: Finite and not negative, ``[n]`` or ``[n, 1]``.
        """
        if self._closed:
            raise StorageClosedError("this learner is closed")
        ids, values = self._check_update(rows, priorities)
        for shard in np.unique(ids[:, 0]).tolist():
            mine = ids[:, 0] == shard
            part = ids[mine]
            while len(self._updates) >= _OPEN_UPDATES or (self._updates and is_done(self._updates[0][0])):
                self._finish_update()
            handle = self._served.shards[shard]
            self._updates.append((handle.update.remote(part[:, 1], part[:, 2], values[mine]), shard, len(part)))

    def _check_update(self, rows: Any, priorities: Any) -> tuple[Any, Any]:
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
        if len(ids) and not 0 <= int(ids[:, 0].min()) <= int(ids[:, 0].max()) < len(self._served.shards):
            raise InvalidInputError(
                f"rows name shards from {int(ids[:, 0].min())} to {int(ids[:, 0].max())}; there are "
                f"{len(self._served.shards)}. {_UNCHANGED}"
            )
        return ids.to(torch.int64).numpy(), values.numpy()

    def flush(self) -> None:
        """Wait until the shards have all priorities."""
        while self._updates:
            self._finish_update()

    def _finish_update(self) -> None:
        ref, shard, count = self._updates.popleft()
        try:
            answer(ref, self._served.who(shard), self._served.deadline)
        except (PeerLostError, WaitTimeoutError):
            self._served.ledger.lose.remote(0, count, 0)

    # ---------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Wait for priorities that are under way, and let go of batches that are. Calling it again does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._return_permits(len(self._ready))
            for future in self._ahead:
                future.add_done_callback(
                    lambda done: (
                        None if done.cancelled() or done.exception() else self._return_permits(len(done.result()))
                    )
                )
            self._ahead.clear()
            self._ready.clear()

    def _return_permits(self, batches: int) -> None:
        """Batches that were drawn ahead and are not served do not count for the rate limit."""
        if batches:
            self._served.ledger.return_sample.remote(batches * self._size)

    def __enter__(self) -> ServedLearner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weights(parts: list[_Part]) -> Tensor:
    """``(P(i) * N) ** -beta`` over the largest of them, float32 ``[n, 1]``, with P(i) as the rows were drawn.

    N is the same for all and cancels.
    """
    logs = [
        np.log(part.chance / part.draw.total) + np.log(np.asarray(part.draw.priorities, dtype=np.float64))
        for part in parts
    ]
    chance = np.concatenate(logs)
    beta = max(part.draw.beta for part in parts)
    weights: Any = np.exp(-beta * (chance - chance.min()))
    return torch.from_numpy(weights.astype(np.float32)).unsqueeze(1)


_UNCHANGED = "No priority was changed."
