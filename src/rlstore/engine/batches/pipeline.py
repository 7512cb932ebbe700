"""From drawn rows to the tensors of a batch: draw, gather, prefetch or stage to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlstore.engine.batches.prefetch import Prefetch
from rlstore.engine.batches.staging import Casts, Staged, Staging, converted, launched
from rlstore.engine.checks import check_count
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.guard import Guard
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.errors import NotReadyError
from rlstore.kernels import kernel, protocol
from rlstore.kernels.protocol import Part as Part  # exported: requests are made of it


@dataclass(frozen=True)
class Request:
    """One tensor of a batch.

    Attributes:
        part: What it holds.
        index: Which leaf of the observations, or which column.
        shape: The shape of one row of it.
        dtype: Its dtype: the stored one, or float32.
    """

    part: Part
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Drawn(NamedTuple):
    """What a batch is made of: the rows to gather, and what goes with them."""

    rows: Tensor
    weights: Tensor | None = None
    others: Tensor | None = None  # rows to gather something else from: where sequences begin, or goals come from
    probabilities: Tensor | None = None  # of each row or window, if asked for
    counts: Tensor | None = None  # its draws so far, if asked for


class Gather:
    """Gathers transitions or windows from a ring of episodes, the n-step fold included, in one call.

    Args:
        ring: Where from.
        requests: The tensors of a batch.
        n_step: Steps of an n-step target, at most.
        gamma: The discount factor.
        pin_memory: Whether the results are in page-locked memory.
    """

    def __init__(
        self, ring: EpisodeRing, requests: Sequence[Request], n_step: int, gamma: float, *, pin_memory: bool = False
    ) -> None:
        self._ring, self._requests, self._fold = ring, tuple(requests), (n_step, gamma)
        self._pin_memory = pin_memory
        self._kernel: protocol.ReplayGather | None = None
        self._bound_to: protocol.EpisodeRing | None = None

    @property
    def kernel(self) -> protocol.ReplayGather:
        """The kernel, bound to the ring when it is first needed, and again to a ring that was copied."""
        ring = self._ring
        if self._kernel is None or self._bound_to is not ring._kernel:
            dtypes = [*(leaf.field.dtype for leaf in ring.leaves)], [column.dtype for column in ring.columns]
            requests = tuple(_native_request(request, *dtypes) for request in self._requests)
            self._kernel = kernel("ReplayGather", ring.device.type)(ring.kernel, requests, *self._fold)
            self._bound_to = ring.kernel
        return self._kernel

    def __call__(self, rows: Tensor) -> tuple[Tensor, ...]:
        """:meth:`attempt`, where no other process writes."""
        tensors = self.attempt(rows)
        if tensors is None:
            raise RuntimeError("rows were overwritten while they were read")
        return tensors

    def attempt(self, rows: Tensor) -> tuple[Tensor, ...] | None:
        """One tensor ``[*rows.shape, ...]`` for each request; None if another process overwrote rows meanwhile.

        Args:
            rows: Row ids ``time * lanes + lane`` of rows that are held, int64 where the ring is; -1 gives zeros.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.attempt(rows)
        return self.kernel.gather(rows, self._pinned(rows) if self._pin_memory else None)

    def _pinned(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Outputs in page-locked memory."""
        return tuple(
            torch.empty((*rows.shape, *request.shape), dtype=request.dtype, pin_memory=True)
            for request in self._requests
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None, "_bound_to": None}


def _native_request(
    request: Request, leaf_dtypes: Sequence[torch.dtype], column_dtypes: Sequence[torch.dtype]
) -> tuple[int, int, bool, tuple[int, ...]]:
    stored = {
        Part.OBSERVATION: leaf_dtypes,
        Part.NEXT_OBSERVATION: leaf_dtypes,
        Part.COLUMN: column_dtypes,
    }.get(request.part)
    as_float = stored is not None and request.dtype != stored[request.index]
    return int(request.part), request.index, as_float, request.shape


# ---------------------------------------------------------------------------------------------------- the pipeline


class Draws(Protocol):
    """What the pipeline asks of a sampler."""

    @property
    def can_fuse(self) -> bool:
        """Whether kernels can draw and gather in one call."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether what is drawn has weights."""
        ...

    @property
    def counts_draws(self) -> bool:
        """Whether what is drawn has probabilities and counts."""
        ...

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The axes of the rows of a batch, behind the first."""
        ...

    def draw(self, count: int, random: Tensor) -> Drawn:
        """The rows of a batch of ``count``."""
        ...

    def take_back(self, drawn: Drawn) -> None:
        """A batch that was drawn was not served."""
        ...

    def draw_and_gather(self, gather: Gather, count: int, random: Tensor) -> tuple[Drawn, tuple[Tensor, ...]] | None:
        """The same rows and their tensors in one call; None, having drawn nothing, where the kernel cannot."""
        ...


class Gate(Protocol):
    """What the pipeline asks of a ring that others write to, or whose samples are limited."""

    @property
    def may_prefetch(self) -> bool:
        """False if rows may change while a thread gathers them."""
        ...

    def admit(self, count: int) -> None:
        """Wait until a batch of ``count`` may be drawn, and take in what was written."""
        ...

    def would_admit(self, count: int) -> bool:
        """Whether :meth:`admit` would not wait."""
        ...

    def take_back(self, count: int) -> None:
        """A batch that was admitted was not drawn."""
        ...

    def catch_up(self) -> None:
        """Take in what was written."""
        ...


Build = Callable[[Drawn, tuple[Tensor, ...]], Any]


class _Reader:
    """Gathers what was drawn and brings it to the device. It does not know the storage: a thread may hold it.

    Args:
        gather: Gathers ``Drawn.rows``.
        gather_others: Gathers ``Drawn.others``, or None.
        casts: What each tensor is converted to.
        staging: Brings tensors from the host to a device, or None.
        launches: Whether the results are used later, on whichever stream.
    """

    def __init__(
        self, gather: Gather, gather_others: Gather | None, casts: Casts, staging: Staging | None, launches: bool
    ) -> None:
        self.gather, self._gather_others, self._casts = gather, gather_others, casts
        self._staging, self._launches = staging, launches

    def __call__(self, drawn: Drawn) -> tuple[Tensor, ...] | Staged | None:
        """A batch's tensors, on the device or on their way to it; None if rows were overwritten meanwhile."""
        tensors = self.gather.attempt(drawn.rows)
        if tensors is not None and self._gather_others is not None and drawn.others is not None:
            others = self._gather_others.attempt(drawn.others)
            tensors = None if others is None else (*tensors, *others)
        if tensors is None:
            return None
        if self._staging is not None:
            return self._staging.send(tensors, self._casts)
        if self._casts:
            tensors = converted(tensors, self._casts)
        return launched(tensors) if self._launches else tensors


class Pipeline:
    """Draws, gathers and delivers batches of one storage.

    Args:
        ring: The rows.
        sampler: What draws.
        random: The generator that it draws from, where the ring is.
        requests: The tensors gathered from the rows that are drawn.
        others: The tensors gathered from ``Drawn.others``.
        fold: n_step and the discount factor.
        casts: The dtype that each tensor is converted to after it was gathered.
        device: The device of the batches.
        pin_memory: Copy batches to a CUDA device through pinned (page-locked) memory.
        depth: Batches to prefetch; 0 for none.
        batch_size: The size of batches that are prefetched.
        max_age: A prefetched batch drawn this many added steps ago, or more, is thrown away.
        guard: That of the storage.

    Attributes:
        redrawn: Batches that were drawn again, because another process overwrote rows of them meanwhile.
    """

    def __init__(
        self,
        ring: EpisodeRing,
        sampler: Draws,
        random: Tensor,
        requests: Sequence[Request],
        others: Sequence[Request],
        fold: tuple[int, float],
        casts: Casts,
        device: torch.device,
        *,
        pin_memory: bool,
        depth: int,
        batch_size: int,
        max_age: int,
        guard: Guard,
    ) -> None:
        self._sampler, self._random, self._batch_size = sampler, random, batch_size
        self.redrawn = 0
        self._requests, self._others, self._casts = tuple(requests), tuple(others), casts
        on_host = ring.device.type == "cpu"
        moves = on_host and device.type != "cpu"
        pin = pin_memory and moves and device.type == "cuda"
        staging = Staging(device) if moves else None

        def reader(*, ahead: bool) -> _Reader:
            gather = Gather(ring, requests, *fold, pin_memory=pin)
            gather_others = Gather(ring, others, 1, fold[1], pin_memory=pin) if others else None
            return _Reader(gather, gather_others, casts, staging, launches=ahead and not on_host)

        self._reader = reader(ahead=False)
        # Drawing and gathering in one call, where batches need nothing else and no other process writes meanwhile.
        can_fuse = device == ring.device and not casts and not others and not ring.is_shared
        self._fuses = can_fuse and sampler.can_fuse
        self.prefetch: Prefetch[Drawn] | None = None
        if depth:
            # The thread has a gather of its own: two threads must not share outputs. A device needs no thread: the work
            # is launched, on the stream that writes the rows.
            self.prefetch = Prefetch(depth, max_age, reader(ahead=True), guard, in_background=on_host)

    def take(self, count: int, added: int, gate: Gate | None) -> tuple[Drawn, tuple[Tensor, ...]]:
        """The next batch of ``count``: what was drawn, and its tensors. None of them is an inference tensor.

        Args:
            count: Its size.
            added: Steps added so far, by which prefetched batches age.
            gate: Where others write or a limit holds; else None.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.take(count, added, gate)
        if self.prefetch is not None and self._is_ahead(count, gate):
            draw, would_admit = partial(self._draw, count, gate), partial(_would_admit, count, gate)
            return self._delivered(*self.prefetch.take(added, draw, would_admit), gate)
        if self._fuses and gate is None:
            made = self._sampler.draw_and_gather(self._reader.gather, count, self._random)
            if made is not None:
                return made
        return self.read(count, gate)

    def read(self, count: int, gate: Gate | None) -> tuple[Drawn, tuple[Tensor, ...]]:
        """A batch of ``count`` that is drawn and gathered now, with its rows."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.read(count, gate)
        drawn = self._draw(count, gate)
        return self._delivered(drawn, self._reader(drawn), gate)

    def read_these(self, draw: Callable[[], Drawn], count: int, gate: Gate | None) -> tuple[Drawn, tuple[Tensor, ...]]:
        """A batch of ``count`` that ``draw`` selects, and that is gathered now.

        Raises:
            NotReadyError: (a RuntimeError) if some of its rows were overwritten meanwhile, by other processes.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.read_these(draw, count, gate)
        if gate is not None:
            gate.admit(count)
        try:
            drawn = draw()
            read = self._reader(drawn)
            if read is None:
                raise NotReadyError("rows were overwritten while a generator was still serving them")
        except BaseException:
            if gate is not None:
                gate.take_back(count)
            raise
        return drawn, _received(read)

    def serve(self, count: int, added: int, gate: Gate | None, build: Build, *, ahead: bool) -> Any:
        """What ``build`` makes of the next batch. If it raises, no batch was taken: the next call has the same one.

        Args:
            count: As for :meth:`take`.
            added: As for :meth:`take`.
            gate: As for :meth:`take`.
            build: Makes the batch of what was drawn and its tensors.
            ahead: Take a prefetched batch, if there are any; else :meth:`read` one.
        """
        prefetch = self.prefetch if ahead and self._is_ahead(count, gate) else None
        # A device would be waited for; on the CPU numbers are read faster than a tensor is made.
        before = self._random.clone() if self._random.is_cuda else self._random.tolist()
        drawn, tensors = self.take(count, added, gate) if ahead else self.read(count, gate)
        try:
            return build(drawn, tensors)
        except BaseException:
            if prefetch is not None:
                prefetch.take_back(drawn, tensors)
            else:
                self._random.copy_(torch.as_tensor(before))
                self._sampler.take_back(drawn)
                if gate is not None:
                    gate.take_back(count)
            raise

    def _is_ahead(self, count: int, gate: Gate | None) -> bool:
        """Whether a batch of ``count`` is prefetched."""
        return self.prefetch is not None and count == self._batch_size and (gate is None or gate.may_prefetch)

    def _draw(self, count: int, gate: Gate | None) -> Drawn:
        if gate is None:
            return self._sampler.draw(count, self._random)
        gate.admit(count)
        try:
            return self._sampler.draw(count, self._random)
        except BaseException:
            gate.take_back(count)
            raise

    def _delivered(
        self, drawn: Drawn, read: tuple[Tensor, ...] | Staged | None, gate: Gate | None
    ) -> tuple[Drawn, tuple[Tensor, ...]]:
        """A batch that was read, drawn again if other processes overwrote some of its rows meanwhile."""
        while read is None:
            if gate is not None:
                gate.catch_up()
            drawn = self._sampler.draw(len(drawn.rows), self._random)
            read = self._reader(drawn)
            self.redrawn += 1
        return drawn, read.receive() if isinstance(read, Staged) else read

    @property
    def dropped(self) -> int:
        """Batches that were drawn and not served, because they became stale or their rows were overwritten."""
        return self.redrawn + (0 if self.prefetch is None else self.prefetch.dropped)

    # ---------------------------------------------------------------------------------------------- prefetched batches

    def clear(self) -> None:
        """Throw away prefetched batches."""
        if self.prefetch is not None:
            self.prefetch.clear()

    def close(self) -> None:
        """Throw away prefetched batches and end the thread."""
        if self.prefetch is not None:
            self.prefetch.close()

    def state(self) -> tuple[list[dict[str, int]], dict[str, Tensor]]:
        """Prefetched batches, as plain values and tensors by name."""
        jobs = [] if self.prefetch is None else self.prefetch.prepared()
        # A batch whose rows were overwritten meanwhile is None, and would be drawn again.
        read = [(drawn, added, _received(batch)) for drawn, added, batch in jobs if batch is not None]
        tensors = {}
        for index, (drawn, _, batch) in enumerate(read):
            parts = {name: value for name, value in drawn._asdict().items() if value is not None}
            parts.update({str(k): tensor for k, tensor in enumerate(batch)})
            tensors.update({f"prepared {index} {name}": value for name, value in parts.items()})
        return [{"added": added, "tensors": len(batch)} for _, added, batch in read], tensors

    def set_state(self, jobs: Sequence[dict[str, int]], reader: SnapshotReader, device: torch.device) -> None:
        """Put back what :meth:`state` returned; ``reader`` is that of a snapshot."""
        for index, job in enumerate(jobs):
            added = check_count("a prepared batch", "added", job["added"])
            fields = {
                name: reader.tensor(f"prepared {index} {name}", self._random.device)
                for name in Drawn._fields
                if f"prepared {index} {name}" in reader.names
            }
            self._check_drawn(fields, f"prepared {index}", reader)
            drawn = Drawn(**fields)
            if (drawn.weights is None) == self._sampler.has_weights or (self._others and drawn.others is None):
                raise reader.unusable(f"prepared {index}", f"of what was drawn it has {list(fields)}")
            informs = self._sampler.counts_draws
            if any((tensor is None) == informs for tensor in (drawn.probabilities, drawn.counts)):
                raise reader.unusable(f"prepared {index}", f"of what was drawn it has {list(fields)}")
            forms = self._forms(drawn)
            names = [f"prepared {index} {k}" for k in range(len(forms))]
            batch = tuple(reader.tensor(name, device) for name in names)
            for name, tensor, form in zip(names, batch, forms, strict=True):
                if (tuple(tensor.shape), tensor.dtype) != form:
                    raise reader.unusable(name, f"it is {tuple(tensor.shape)} {tensor.dtype}, and {form} is needed")
            if self.prefetch is not None:
                self.prefetch.put(drawn, added, batch)

    def _check_drawn(self, fields: Mapping[str, Tensor], where: str, reader: SnapshotReader) -> None:
        """Refuse what was drawn for a batch that a snapshot has, if it is not of the form that is drawn."""
        size = self._batch_size
        forms = {
            "rows": ((size, *self._sampler.row_axes), torch.int64),
            "weights": ((size, 1), torch.float32),
            "probabilities": ((size,), torch.float32),
        }
        for name, tensor in fields.items():
            form = forms.get(name, ((size,), torch.int64))
            if (tuple(tensor.shape), tensor.dtype) != form:
                found = (tuple(tensor.shape), tensor.dtype)
                raise reader.unusable(f"{where} {name}", f"it is {found}, and {form} is needed")

    def _forms(self, drawn: Drawn) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor of a batch of these rows."""
        asked = [(drawn.rows, request) for request in self._requests]
        asked += [(drawn.rows if drawn.others is None else drawn.others, request) for request in self._others]
        casts = self._casts or (None,) * len(asked)
        return [
            ((*rows.shape, *request.shape), cast or request.dtype)
            for (rows, request), cast in zip(asked, casts, strict=True)
        ]


def _would_admit(count: int, gate: Gate | None) -> bool:
    return gate is None or gate.would_admit(count)


def _received(batch: tuple[Tensor, ...] | Staged) -> tuple[Tensor, ...]:
    return batch.receive() if isinstance(batch, Staged) else batch
