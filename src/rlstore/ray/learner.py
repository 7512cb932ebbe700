"""Learning from a served storage: batches are drawn across the shards ahead of their use."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.checks import check_seed
from rlstore.engine.schema import as_tensor
from rlstore.errors import InvalidInputError, PeerLostError, StorageClosedError, WaitTimeoutError
from rlstore.ray.calls import Deadline, answer, answers, is_done, program_goes_on
from rlstore.ray.connection import Connection
from rlstore.ray.health import Health
from rlstore.ray.output import Output
from rlstore.ray.shard import Draw, Totals
from rlstore.ray.wire import join
from rlstore.storage import BatchDict

# Calls with priorities that may be open; then update() waits for the oldest.
_OPEN_UPDATES = 8


class ServedLearner:
    """Iterates over batches without end; made by ``served.learner()``, for one process.

    A batch is drawn as if all shards were one storage: each shard tells what its draws are in proportion to
    (transitions, windows, or the sum of priorities), the batch is split multinomially in these proportions, and each
    shard draws its share. So row i of shard s has the chance ``P(i) = (total_s / sum of totals) * (p_i / total_s)``,
    which is ``p_i`` over the sum of all p. Where batches have ``weights`` they are ``(P(i) * N) ** -beta`` over the
    largest in the batch, with P(i) as it was when the row was drawn. ``rows`` are int64 ``[n, 3]``: shard, row,
    generation.

    ``prefetch`` batches are always under way. The rows of one shard stand together in a batch.

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
        self._served, self._size, self._prefetch = connection, batch_size, prefetch
        self._health, self._output = Health(connection), Output(device)
        self._random = np.random.default_rng(check_seed("learner()", seed))
        self._random_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(prefetch, thread_name_prefix="rlstore-learner")
        self._ahead: deque[Future[BatchDict]] = deque()
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
        while len(self._ahead) <= self._prefetch - 1:
            self._ahead.append(self._threads.submit(self._fetch))
        try:
            batch = self._ahead.popleft().result()
        except (StorageClosedError, CancelledError):
            raise StopIteration from None
        finally:
            for message in self._health.take_messages():
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        if not self._closed:
            self._ahead.append(self._threads.submit(self._fetch))
        handed: BatchDict = self._output.hand_out(batch)
        return handed

    def _wanted(self) -> bool:
        return not self._closed and program_goes_on()

    def _fetch(self) -> BatchDict:
        """One batch, in a thread of its own."""
        served, size = self._served, self._size
        news = served.ask_ledger("permit_sample", size, served.deadline, wanted=self._wanted)
        deadline = Deadline(served.deadline)
        try:
            while True:
                drawn = self._draw(size)
                if drawn is not None:
                    return self._assemble(*drawn)
                if not self._wanted():
                    raise StorageClosedError("this learner is closed")
                if not deadline.left:
                    self._give_up(deadline)
                if self._health.answering():
                    news = served.ask_ledger("wait_for_news", news, min(deadline.left, 0.5))
                else:
                    self._health.wait(deadline)
        except BaseException:
            served.ledger.return_sample.remote(size)
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

    def _draw(self, size: int) -> tuple[list[Draw], list[int], list[float]] | None:
        """The parts of a batch, their shards and the chance of each shard; None if it has to be tried again."""
        shards = self._health.answering()
        if len(self._served.shards) == 1:
            counts, chances = [size] * len(shards), [1.0] * len(shards)
        else:
            asked = self._ask(shards, "totals")
            shards = [shard for shard, told in asked if told.total > 0]
            totals = [told.total for _, told in asked if told.total > 0]
            if not shards:
                return None
            chances = [total / sum(totals) for total in totals]
            with self._random_lock:
                counts = self._random.multinomial(size, chances).tolist()
        wanted = [(shard, count, chance) for shard, count, chance in zip(shards, counts, chances, strict=True) if count]
        refs = [self._served.shards[shard].draw.remote(count) for shard, count, _ in wanted]
        given = self._collect([shard for shard, _, _ in wanted], refs)
        parts: list[Draw] = [drawn for drawn in given if drawn is not None]
        if not wanted or len(parts) < len(wanted):
            return None
        return parts, [shard for shard, _, _ in wanted], [chance for _, _, chance in wanted]

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

    def _assemble(self, parts: list[Draw], shards: list[int], chances: list[float]) -> BatchDict:
        batch: BatchDict = join([packed for part in parts for packed in part.parts], self._output.allocate)
        if all(len(part.rows) for part in parts):
            columns = [
                np.stack([np.full(len(part.rows), shard), part.rows, np.full(len(part.rows), part.generation)], 1)
                for shard, part in zip(shards, parts, strict=True)
            ]
            batch["rows"] = self._output.own(torch.from_numpy(np.concatenate(columns).astype(np.int64)))
        if all(part.priorities is not None for part in parts):
            batch["weights"] = self._output.own(_weights(parts, chances))
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
            for future in self._ahead:
                future.add_done_callback(self._return_permit)
            self._ahead.clear()

    def _return_permit(self, future: Future[BatchDict]) -> None:
        """A batch that was drawn ahead and is not served does not count for the rate limit."""
        if not future.cancelled() and future.exception() is None:
            self._served.ledger.return_sample.remote(self._size)

    def __enter__(self) -> ServedLearner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weights(parts: list[Draw], chances: list[float]) -> Tensor:
    """``(P(i) * N) ** -beta`` over the largest of them, float32 ``[n, 1]``, with P(i) as the rows were drawn.

    N is the same for all and cancels.
    """
    logs = [
        np.log(chance / part.total) + np.log(np.asarray(part.priorities, dtype=np.float64))
        for part, chance in zip(parts, chances, strict=True)
    ]
    chance = np.concatenate(logs)
    beta = max(part.beta for part in parts)
    weights: Any = np.exp(-beta * (chance - chance.min()))
    return torch.from_numpy(weights.astype(np.float32)).unsqueeze(1)


_UNCHANGED = "No priority was changed."
