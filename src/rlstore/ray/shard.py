"""A shard: an actor that holds a storage.

Inserts run in one thread, draws in two others, and saves in one more. Each insert and each draw holds ``_lock``: the
steps of a call are inserted at once where the storage can, else one by one, and a batch is sent while the next one is
drawn.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import ray
import torch
from torch import Tensor

from rlstore.engine.disk.folder import FolderInUseError
from rlstore.engine.disk.journal import RunningJournal
from rlstore.engine.disk.snapshot import Content, Rows, SnapshotWriter
from rlstore.engine.measures import Measures
from rlstore.errors import InvalidInputError, PeerLostError, SnapshotError, WaitTimeoutError
from rlstore.ray.calls import Deadline, ask, this_node, was_restarted
from rlstore.ray.counts import ShardState
from rlstore.ray.ledger import NAMESPACE, ledger_name
from rlstore.ray.places import Place
from rlstore.ray.saves import Saves, Saving
from rlstore.ray.steps import Chunk, Steps
from rlstore.ray.wire import Array, Packed, pack
from rlstore.storage import BatchDict, Sample, Storage

# The delay of a heartbeat after an insert: one heartbeat covers many inserts. If the process dies in the meantime, the
# writers forward the state that they know.
_HEARTBEAT_SECONDS = 0.1

_ANNOUNCE_SECONDS = 120.0

# For the folders of a process that is being ended.
_RELEASE_SECONDS = 10.0


def packed_factory(factory: Callable[..., Storage]) -> bytes:
    """A factory as a shard takes it.

    Compressed, so that Ray stores it with the actor: a large one, with the bounds of images, would be in the object
    store and could be lost before the shard is restarted.
    """
    pickler: Any = ray.cloudpickle
    return zlib.compress(pickler.dumps(factory))


class Draw(NamedTuple):
    """The part of a batch that one shard has drawn.

    Attributes:
        parts: The batches of the storage, concatenated along ``axis``.
        axis: The axis of the batch: 1 where the storage serves ``[time, batch, ...]``.
        rows: The row ids, ``[n]`` or ``[time, n]``; none if the storage has no row ids.
        generation: The generation of the shard.
        priorities: p_i of the rows; None where draws are uniform.
        total: The sum of p over the shard.
        beta: The exponent of the importance weights.
        limited: Whether the next draw needs a permit.
    """

    parts: list[Packed]
    axis: int
    rows: Array
    generation: int
    priorities: Array | None
    total: float
    beta: float
    limited: bool


class Stored(NamedTuple):
    """The answer to an insert.

    Attributes:
        stored: Transitions that were stored.
        refused: The error, if a step was refused.
        state: The state of the shard.
        limited: Whether the next insert needs a permit.
    """

    stored: int
    refused: Exception | None
    state: ShardState
    limited: bool


class Shard:
    """The actor.

    Args:
        index: The number of the shard.
        factory: Creates the storage; as :func:`packed_factory` returns it.
        name: The name of the served storage, by which the ledger is found.
        seed: The seed of everything that the storage draws.
        saving: Where and when it is saved.
    """

    def __init__(self, index: int, factory: bytes, name: str, seed: int, saving: Saving) -> None:
        self._ledger: Any = ray.get_actor(ledger_name(name), NAMESPACE)
        self._snapshot_every = saving.snapshot_every
        self._saves = Saves(index, saving)
        self._lock = threading.RLock()
        self._writers: dict[str, _LaneWriter] = {}
        self._removed: set[str] = set()
        self._late, self._saved, self._saved_at = 0, 0, 0
        self._journal: RunningJournal | None = None
        self._save_turn = threading.Lock()  # taken before the other, never by a thread that has it
        self._backup: tuple[int, Any] = (0, None)
        self._inserts_limited = self._draws_limited = True  # until the ledger sends that there is no rate limit
        self._pending: set[str] | None = None  # the writers since the last heartbeat; None if nothing has changed
        self._state = ShardState(index, f"node {this_node()}, process {os.getpid()}", generation=time.time_ns())
        self._storage: Storage | None = None
        self._failure: Exception | None = None
        try:
            self._start_when_free(ray.cloudpickle.loads(zlib.decompress(factory)), seed)
        except Exception as error:  # raised by every call: Ray would not report why an actor failed to start
            self._failure = error
            return
        self._heartbeat(())
        if was_restarted():  # and the ledger may have died at the same time
            threading.Thread(target=self._announce, name="rlstore announcement", daemon=True).start()

    def _start_when_free(self, factory: Callable[..., Storage], seed: int) -> None:
        """Start as soon as the process before has released its folders: it may have been told to end just now."""
        deadline = Deadline(_RELEASE_SECONDS)
        while True:
            try:
                return self._start(factory, seed)
            except FolderInUseError:
                if self._storage is not None:
                    self._storage._give_up()
                if not deadline.left:
                    raise
                deadline.pause()

    def _start(self, factory: Callable[..., Storage], seed: int) -> None:
        restored = self._saves.restore(factory, is_restart=was_restarted())
        self._storage, self._state.inserted, self._state.note = restored.storage, restored.inserted, restored.said
        self._saves.record(self._storage, self._state.inserted)
        self._saved_at = self._state.inserted
        self._state.restored = self._held(self._storage) if restored.inserted else 0
        if not restored.seeded and "_generator" in vars(self._storage):  # not a class with its own source of randomness
            more = [self._state.generation] if was_restarted() else []  # do not repeat the same draws
            entropy = np.random.SeedSequence([seed, self._state.shard, *more])
            self._storage.seed(int(entropy.generate_state(1)[0]))
        if getattr(self._storage, "rate_limit", None) is not None:
            raise InvalidInputError("the factory's storage has a rate_limit of its own; give it to serve() instead")
        if getattr(self._storage, "journal", None) is not None:
            raise InvalidInputError("the factory's storage has a journal of its own; give it to serve() instead")
        self._journal = self._saves.begin_journal(self)
        self._state.saved = self._journal is not None or restored.seeded

    def ready(self) -> ShardState:
        """The state of the shard; raises the error with which the shard failed to start."""
        storage = self._open()
        error = None if self._journal is None else self._journal.error
        said = [self._state.note, f"the journal could not be written ({error})" if error is not None else ""]
        with self._lock:
            return replace(
                self._state,
                lanes=_count_lanes(storage),
                splits=_can_split(storage),
                held=self._held(storage),
                note="; ".join(filter(None, said)),
            )

    def _open(self) -> Storage:
        if self._failure is not None:
            raise self._failure
        assert self._storage is not None
        return self._storage

    def _held(self, storage: Storage) -> int:
        """Transitions held; for a class without a length of its own, everything that was inserted."""
        return len(storage) or (self._state.inserted if type(storage).__len__ is Storage.__len__ else 0)

    def _heartbeat(self, writers: Iterable[str]) -> None:
        self._ledger.heartbeat.remote(self.ready(), list(writers))

    def _announce(self) -> None:
        """Tell the ledger of the new generation as soon as it answers."""
        with suppress(PeerLostError, WaitTimeoutError):
            ask(lambda: self._ledger.heartbeat.remote(self.ready()), "the ledger", _ANNOUNCE_SECONDS)

    def _heartbeat_soon(self, writer: str) -> None:
        with self._lock:
            if self._pending is None:
                self._pending = set()
                timer = threading.Timer(_HEARTBEAT_SECONDS, self._send_pending)
                timer.daemon = True
                timer.start()
            self._pending.add(writer)

    def _send_pending(self) -> None:
        with self._lock:
            writers, self._pending = self._pending or set(), None
        self._heartbeat(writers)

    # ---------------------------------------------------------------------------------------------- writing

    def insert(self, writer: str, place: Place, steps: Steps, permitted: bool) -> Stored:
        """Store steps ``[steps, envs, ...]`` in the lanes of a writer, with or without a permit of the ledger.

        If a step is refused, those before it are stored; it and those after it are not.
        """
        storage, before, refused = self._open(), self._state.inserted, None
        try:
            chunk = Chunk.of(steps)
            with self._lock:
                self._assign_lanes(storage, writer, place)
                lanes = self._writers[writer]
                at_once = not self._saves.records_steps and lanes.insert_all(chunk)
                if at_once:
                    self._count_inserted(chunk.transitions, permitted)
            for sample, count in () if at_once else chunk.each():
                with self._lock:
                    lanes.insert(sample)
                    self._count_inserted(count, permitted)
                    self._saves.record(storage, self._state.inserted)
        except Exception as error:
            refused = error
        stored = self._state.inserted - before
        self._heartbeat_soon(writer)
        every, since = self._snapshot_every, self._state.inserted - self._saved_at
        if every is not None and since >= every and not self._save_turn.locked():
            self._saved_at = self._state.inserted
            threading.Thread(target=self._try_to_write_snapshot, name="rlstore snapshot", daemon=True).start()
        return Stored(stored, refused, self.ready(), self._inserts_limited)

    def _count_inserted(self, count: int, permitted: bool) -> None:
        self._state.inserted += count
        self._state.inserted_freely += 0 if permitted else count

    def _assign_lanes(self, storage: Storage, writer: str, place: Place) -> None:
        if writer in self._writers:
            return
        if writer in self._removed:
            raise PeerLostError("this writer was closed, or its place was given to another one; make a new writer")
        others = [name for name, lanes in self._writers.items() if lanes.place.overlaps(place)]
        if any(self._writers[other].place.ticket > place.ticket for other in others):
            raise PeerLostError(
                "this writer's place was reclaimed and given to another one, because no heartbeat of it came for "
                "longer than the deadline; make a new writer"
            )
        for other in others:
            self.remove_writer(other)  # the ledger has reclaimed its lanes
        self._writers[writer] = _LaneWriter(storage, place)

    def remove_writer(self, writer: str) -> None:
        """Release the lanes of a writer that is closed or dead."""
        lanes = self._writers.pop(writer, None)
        if lanes is not None:
            with self._lock:
                lanes.close()
            self._removed.add(writer)

    # ---------------------------------------------------------------------------------------------- reading

    @ray.method(concurrency_group="draw")
    def total(self) -> float:
        """What draws are proportional to."""
        storage = self._open()
        with self._lock:
            return float(storage.draw_total if len(storage) else self._held(storage))

    @ray.method(concurrency_group="draw")
    def draw(self, counts: list[int], permitted: bool) -> list[Draw]:
        """The parts of several batches, each with the given number of rows, as the storage draws them."""
        storage = self._open()
        return [self._draw(storage, count, permitted) for count in counts]

    def _draw(self, storage: Storage, count: int, permitted: bool) -> Draw:
        with self._lock:
            batches = _batches(storage, count)
            ids = [batch.pop("rows", torch.full((0,), -1)) for batch in batches]
            axis = ids[0].dim() - 1
            rows = torch.cat(ids, axis)
            priorities, total, beta = None, 0.0, 0.0
            if _has_priorities(storage) and storage.alpha > 0:
                priorities = storage.priorities(rows).numpy()
                total, beta = storage.priority_total, storage.current_beta
            self._state.sampled += count
            self._state.sampled_freely += 0 if permitted else count
        parts = [pack(batch) for batch in batches]
        generation = self._state.generation
        return Draw(parts, axis, rows.cpu().numpy(), generation, priorities, total, beta, self._draws_limited)

    @ray.method(concurrency_group="draw")
    def update(self, rows: Array, generations: Array, priorities: Array) -> None:
        """Set priorities; those for another generation or for overwritten rows are dropped and counted."""
        storage = self._open()
        current = generations == self._state.generation
        with self._lock:
            self._late += int((~current).sum())
            if current.any():
                update: Any = storage.update  # type: ignore[attr-defined]
                update(torch.from_numpy(rows[current]), torch.from_numpy(priorities[current]))

    # ---------------------------------------------------------------------------------------------- the storage

    def each(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the storage."""
        storage = self._open()
        with self._lock:
            result = getattr(storage, method)(*args, **kwargs)
        self._heartbeat(())
        return list(result) if isinstance(result, Iterator) else result

    @ray.method(concurrency_group="save")
    def save(self) -> ShardState:
        """Write a snapshot and commit the journal; returns the state, which may be newer."""
        self._open()
        if self._saves.snapshot is None and self._journal is None:
            raise SnapshotError("this storage is served without a snapshot_dir or a journal; give one to serve()")
        if self._saves.snapshot is not None:
            self._write_snapshot()
        if self._journal is not None:
            self._journal.commit()
        return self.ready()

    def _write_snapshot(self) -> None:
        with self._save_turn:
            with self._lock:
                self._saved_at = self._state.inserted
                saving = self._saves.save(self._open(), self._state.inserted)
            saving.wait()  # inserts go on meanwhile
            self._saves.forget_before()
            self._saved += 1
            self._state.saved = True
        self._ledger.save.remote([self.ready()])

    def _try_to_write_snapshot(self) -> None:
        try:
            self._write_snapshot()
        except Exception as error:  # there is no caller
            self._state.note = f"a snapshot could not be written ({error})"

    # What the journal commits: the storage, and the inserts up to then.

    @contextmanager
    def _still(self) -> Iterator[None]:
        with self._lock, self._open()._still():
            yield

    def _content(self, *, copy: bool) -> Content:
        return self._open()._content(copy=copy, note={"inserted": self._state.inserted})

    def _rows_for(self, writer: SnapshotWriter) -> Rows | None:
        return self._open()._rows_for(writer)

    def _count_inserts(self) -> int:
        return self._state.inserted

    @ray.method(concurrency_group="draw")
    def describe(self) -> tuple[ShardState, int, int]:
        """The state, the stale priority updates, and the snapshots written."""
        storage = self._open()
        stale = storage.stale_updates if _has_priorities(storage) else 0
        return self.ready(), self._late + stale, self._saved

    @ray.method(concurrency_group="draw")
    def measure(self) -> Measures:
        """What ``stats()`` of the storage is made of; of a class that has none, what the journal tells."""
        measures: Measures = {}
        with self._lock:
            with suppress(NotImplementedError):
                measures = self._open()._measured()
            return measures if self._journal is None else {**measures, **self._journal.measure(self._state.inserted)}

    @ray.method(concurrency_group="draw")
    def store_backup(self, version: int, backup: Any, inserts_limited: bool, draws_limited: bool) -> None:
        """Store the newest state of the ledger, in case that it dies; and what there is a rate limit for."""
        if version > self._backup[0]:
            self._backup = (version, backup)
            self._inserts_limited, self._draws_limited = inserts_limited, draws_limited

    @ray.method(concurrency_group="draw")
    def get_backup(self) -> tuple[Any, ShardState]:
        """The newest state of the ledger, and that of the shard."""
        return self._backup[1], self.ready()


# ---------------------------------------------------------------------------------------------------- storages
# What is asked of a storage beyond the methods of Storage is asked of its class: an instance of a user's own class may
# have any attribute, as a logger called writer.


class _Prioritized(Protocol):
    """What a storage with priorities offers; with an ``alpha`` of 0 its draws are uniform."""

    alpha: float

    @property
    def stale_updates(self) -> int: ...

    @property
    def priority_total(self) -> float: ...

    @property
    def current_beta(self) -> float: ...

    def priorities(self, rows: Tensor) -> Tensor: ...


def _has_priorities(storage: object) -> TypeGuard[_Prioritized]:
    names = ("priorities", "priority_total", "current_beta", "stale_updates")
    return all(hasattr(type(storage), name) for name in names)


def _count_lanes(storage: Storage) -> int | None:
    """The environments of a storage; None if its first sample decides."""
    lanes = getattr(storage, "num_envs", None)
    return lanes if isinstance(lanes, int) else None


def _can_split(storage: Storage) -> bool:
    """True if several writers can share the lanes of the storage."""
    return callable(getattr(type(storage), "writer", None)) and not getattr(storage, "save_snapshot", False)


def _batches(storage: Storage, count: int) -> list[BatchDict]:
    """``count`` rows in as few batches as the storage can serve: a rollout serves no row twice in one."""
    try:
        return [_batch(storage, count)]
    except InvalidInputError:
        held = len(storage)
        if not 0 < held < count:
            raise
    return [_batch(storage, min(held, count - start)) for start in range(0, count, held)]


def _batch(storage: Storage, size: int) -> BatchDict:
    return next(iter(storage.generate_batches(1, size, 1)))


class _LaneWriter:
    """Appends to the lanes of a place.

    Args:
        storage: The storage.
        place: The lanes. The whole storage if it cannot split its lanes or does not know them yet.
    """

    def __init__(self, storage: Storage, place: Place) -> None:
        self.place = place
        self._storage, self._writer = storage, None
        lanes = _count_lanes(storage)
        if _can_split(storage) and lanes is not None:
            writer: Any = storage.writer  # type: ignore[attr-defined]
            self._writer = writer(range(lanes) if place.whole else range(place.first, place.stop))

    def insert_all(self, chunk: Chunk) -> bool:
        """Store several steps of these lanes at once; False, with nothing stored, if that cannot be."""
        if self._writer is None or chunk.present.keys() - {"final_observations"}:
            return False
        has_final = chunk.present.get("final_observations")
        try:
            self._writer._insert_steps(
                chunk.whole(), chunk.steps, None if has_final is None else torch.from_numpy(has_final.copy())
            )
        except InvalidInputError:  # of some step; those before it are stored
            return False
        return True

    def insert(self, sample: Sample) -> None:
        """Store one step of these lanes."""
        (self._writer or self._storage).insert_transition(sample)

    def close(self) -> None:
        """Release the lanes; their unfinished episodes are cut off."""
        if self._writer is not None:
            self._writer.close()
