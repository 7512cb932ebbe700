"""Writing to a served storage: steps are stacked ``[steps, envs, ...]`` and sent in few calls, several open at once."""

from __future__ import annotations

import uuid
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlstore.engine.rows.finals import fit_final
from rlstore.engine.rows.schema import as_tensor, can_hold, dtype_name, fields_of_example
from rlstore.errors import InvalidInputError, PeerLostError, StorageClosedError, WaitTimeoutError
from rlstore.ray.calls import Connection, answer, ask, is_done, is_running
from rlstore.ray.counts import ShardState
from rlstore.ray.places import Place
from rlstore.ray.wire import Array, Packed, build, own_tensors
from rlstore.storage import Sample

# ---------------------------------------------------------------------------------------------------- steps


class Steps(NamedTuple):
    """Steps as Ray transfers them.

    Attributes:
        fields: The entries of the samples by name, ``[steps, ...]``.
        present: For each entry, the steps whose sample has it, bool ``[steps]``.
        steps: The number of steps.
        num_envs: The environments of each.
    """

    fields: dict[str, Packed]
    present: dict[str, Array]
    steps: int
    num_envs: int


def each_step(steps: Steps) -> Iterator[tuple[Sample, int]]:
    """The samples, and the number of transitions in each."""
    columns = {name: _unstack(packed, steps.steps) for name, packed in steps.fields.items()}
    for step in range(steps.steps):
        sample = {name: column[step] for name, column in columns.items() if steps.present[name][step]}
        masks = sample.get("masks")
        yield sample, steps.num_envs if masks is None else int((masks != 0).sum())


def _unstack(packed: Packed, steps: int) -> Sequence[Any]:
    """The value of an entry at each step."""
    columns = [tensor.unbind(0) for tensor in own_tensors(packed)]
    if packed.form == ("tensor",):
        return columns[0]
    rows = zip(*columns, strict=True) if columns else [()] * steps
    return [build(packed.form, iter(row)) for row in rows]


def _describe(nest: Any, name: str, leaves: list[tuple[str, Any]]) -> Any:
    """The form of an entry of a sample for :func:`build`, and its leaves by name; TensorDicts become dicts."""
    if isinstance(nest, (Mapping, TensorDictBase)):
        keys = nest.keys()
        return ("dict", {key: _describe(nest[key], f'{name}["{key}"]', leaves) for key in keys})
    if isinstance(nest, tuple):
        return ("tuple", [_describe(part, f"{name}[{index}]", leaves) for index, part in enumerate(nest)])
    if nest is None:
        return ("value", None)
    leaves.append((name, nest))
    return ("tensor",)


class _Entry:
    """One entry of the samples, stacked ``[steps, ...]``. The first sample that has it fixes its form."""

    def __init__(self, name: str, value: Any, steps: int) -> None:
        self._name = name
        leaves: list[tuple[str, Any]] = []
        self._form = _describe(value, name, leaves)
        self._parts = [part for part, _ in leaves]
        tensors = [as_tensor(leaf, part) for part, leaf in leaves]
        self._stacks = [torch.empty((steps, *tensor.shape), dtype=tensor.dtype) for tensor in tensors]
        unbound = [stack.unbind(0) for stack in self._stacks]
        self.rows = [[rows[step] for rows in unbound] for step in range(steps)]  # the tensors of each step
        self.present = np.zeros(steps, dtype=bool)

    def fit(self, value: Any) -> list[Tensor]:
        """The tensors of a value, or an error; nothing is written."""
        if isinstance(value, Tensor) and self._form == ("tensor",) and not value.requires_grad:
            row = self.rows[0][0]
            if value.dtype == row.dtype and value.shape == row.shape:
                return [value]  # the usual case, on every add
        leaves: list[tuple[str, Any]] = []
        if _describe(value, self._name, leaves) != self._form:
            raise InvalidInputError(
                f"{self._name} consists of {[part for part, _ in leaves]}; this writer sends {self._parts}, fixed by "
                "its first sample. Nothing was added."
            )
        fitted = []
        for stack, (part, leaf) in zip(self._stacks, leaves, strict=True):
            given = as_tensor(leaf, part)
            if given.shape != stack.shape[1:] or not can_hold(given, stack.dtype):
                raise InvalidInputError(
                    f"{part} is {tuple(given.shape)} {dtype_name(given.dtype)}; this writer sends "
                    f"{tuple(stack.shape[1:])} {dtype_name(stack.dtype)}, fixed by its first sample. Nothing was added."
                )
            fitted.append(given)
        return fitted

    def packed(self, steps: int) -> Packed:
        """The first steps."""
        return Packed.of(self._form, [stack[:steps] for stack in self._stacks])


class StepBuffer:
    """Memory for some steps of a writer.

    Args:
        capacity: The number of steps.
        num_envs: The environments of each; None takes the number from the first sample.
    """

    def __init__(self, capacity: int, num_envs: int | None) -> None:
        self.steps, self.num_envs, self.transitions = 0, num_envs, 0
        self._capacity = capacity
        self._entries: dict[str, _Entry] = {}

    @property
    def is_full(self) -> bool:
        """True if it holds as many steps as it can."""
        return self.steps == self._capacity

    def add(self, sample: Sample) -> None:
        """Copy a sample; if it is refused nothing changes."""
        if not isinstance(sample, Mapping):
            raise InvalidInputError(f"a sample is a {type(sample).__name__}; give a dict. Nothing was added.")
        given = {name: value for name, value in sample.items() if value is not None}
        if "observations" not in given:
            raise InvalidInputError("a sample needs 'observations'. Nothing was added.")
        num_envs = self._check_envs(given["observations"])
        if "final_observations" in given:
            given["final_observations"] = _without_gaps(given, num_envs)
        new = {name: _Entry(name, value, self._capacity) for name, value in given.items() if name not in self._entries}
        entries = {**self._entries, **new}
        fitted = {name: entries[name].fit(value) for name, value in given.items()}
        for name, tensors in fitted.items():
            for row, tensor in zip(entries[name].rows[self.steps], tensors, strict=True):
                row.copy_(tensor)
            entries[name].present[self.steps] = True
        masks = fitted.get("masks")
        self.transitions += num_envs if masks is None else int((masks[0] != 0).sum())
        self._entries, self.num_envs = entries, num_envs
        self.steps += 1

    def _check_envs(self, observations: Any) -> int:
        leaves: list[tuple[str, Any]] = []
        _describe(observations, "observations", leaves)
        shape = as_tensor(leaves[0][1], leaves[0][0]).shape if leaves else ()
        if not shape or (self.num_envs is not None and shape[0] != self.num_envs):
            raise InvalidInputError(
                f"observations are {tuple(shape)}; they have to begin with "
                f"{self.num_envs or 'the number of'} environments of this writer. Nothing was added."
            )
        return int(shape[0])

    def packed(self) -> Steps:
        """The steps for Ray."""
        fields = {name: entry.packed(self.steps) for name, entry in self._entries.items()}
        present = {name: entry.present[: self.steps] for name, entry in self._entries.items()}
        return Steps(fields, present, self.steps, self.num_envs or 0)

    def clear(self) -> None:
        """Discard the steps; the form of the samples stays fixed."""
        for entry in self._entries.values():
            entry.present[:] = False
        self.steps = self.transitions = 0


def _without_gaps(given: Sample, num_envs: int) -> Any:
    """Final observations ``[envs, ...]``: the next observation where none is given, which then is the final one."""
    following = given.get("next_observations", given["observations"])
    structure, fields = fields_of_example(following, "final_observations", 1, "next_observations")
    *finals, has = fit_final("final_observations", given["final_observations"], structure, fields, num_envs)
    shown = [
        as_tensor(leaf, name).cpu() for leaf, name in zip(structure.leaves(following), structure.names, strict=True)
    ]
    filled = [
        torch.where(has.view(-1, *[1] * (leaf.dim() - 1)), final, leaf)
        for final, leaf in zip(finals, shown, strict=True)
    ]
    return structure.build(filled, (num_envs,))


# ---------------------------------------------------------------------------------------------------- the writer


class ServedWriter:
    """Appends the steps of some environments to one shard; created by ``served.writer()``, for one process.

    Steps are copied by ``add`` and sent ``batch_steps`` at a time. At most ``max_in_flight`` calls are open; then
    ``add`` waits for the oldest. If the shard dies, the steps in flight are lost and counted (:attr:`lost`,
    ``served.report()``), and the writer continues when the shard is back.

    Attributes:
        added: Transitions added to this writer.
        lost: Transitions that did not arrive.

    Args:
        connection: The served storage.
        num_envs: The environments of each sample; None for all of a shard.
        batch_steps: Steps sent in one call.
        max_in_flight: Calls that may be open.
    """

    def __init__(self, connection: Connection, num_envs: int | None, batch_steps: int, max_in_flight: int) -> None:
        self._served, self._name = connection, uuid.uuid4().hex
        self._batch_steps, self._max_in_flight = batch_steps, max_in_flight
        self._place: Place = connection.ask_ledger("place", self._name, num_envs, connection.deadline)
        self._shard, self._who = connection.shards[self._place.shard], connection.who(self._place.shard)
        self._buffer = StepBuffer(batch_steps, self._place.stop - self._place.first or None)
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
        before = self._buffer.transitions
        self._buffer.add(sample)
        self.added += self._buffer.transitions - before
        if self._buffer.is_full:
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

    def _post(self) -> None:
        """Pass the buffer to the sending thread, and continue with an empty one."""
        while self._open and (len(self._open) >= self._max_in_flight or self._is_answered()):
            self._take_answer()
        full = self._buffer
        self._open.append((full, self._sender.submit(self._send, full)))
        self._buffer = self._spares.pop() if self._spares else StepBuffer(self._batch_steps, full.num_envs)

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
