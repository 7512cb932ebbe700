"""A shard: an actor with a storage in it.

Inserts come in one thread and draws in others, one step or one draw at a time (``_lock``): a draw waits for a step,
never for a whole call of steps, and a batch is sent while the next one is drawn.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import ray
import torch
from torch import Tensor

from rlstore.errors import InvalidInputError, PeerLostError, SnapshotError
from rlstore.ray.calls import this_node, was_restarted
from rlstore.ray.lanes import LaneWriter, can_split, count_lanes
from rlstore.ray.ledger import NAMESPACE, Facts, ledger_name
from rlstore.ray.places import Place
from rlstore.ray.shard_folder import ShardFolder
from rlstore.ray.steps import Steps, each_step
from rlstore.ray.wire import Array, Packed, pack
from rlstore.storage import BatchDict, Storage

# How soon after an insert the ledger knows of it: many inserts are told of in one call. If this process is lost in the
# meantime, the writers tell what they know.
_TELL_SECONDS = 0.02


def packed_factory(factory: Callable[..., Storage]) -> bytes:
    """A factory as a shard takes it.

    Small, so that Ray keeps it with the actor: a large one, as the bounds of images make it, would lie in the object
    store and could be missing when the shard is started again.
    """
    pickler: Any = ray.cloudpickle
    return zlib.compress(pickler.dumps(factory))


class Totals(NamedTuple):
    """What draws from a shard are in proportion to, and how many transitions it holds."""

    total: float
    held: int


class Draw(NamedTuple):
    """A shard's part of a batch.

    ``priorities`` are p_i of the rows, or None where draws are uniform; ``total`` is their sum over the shard, and
    ``beta`` the exponent of the weights, both as they were at the draw. ``limited``: the next draw needs a permit.
    """

    parts: list[Packed]
    rows: Array
    generation: int
    priorities: Array | None
    total: float
    beta: float
    limited: bool


class Stored(NamedTuple):
    """The answer to an insert: how many transitions are stored, the error if a step was refused, and the shard's facts.

    ``limited``: the next insert needs a permit.
    """

    stored: int
    refused: Exception | None
    facts: Facts
    limited: bool


class Shard:
    """The actor.

    Args:
        index: Which shard it is.
        factory: What makes the storage, as :func:`packed_factory` gives it.
        name: Of the served storage, by which the ledger is found.
        seed: Of everything that the storage draws.
        snapshot_dir: Where snapshots go, or None.
        snapshot_every: Transitions between snapshots, or None.
    """

    def __init__(
        self,
        index: int,
        factory: bytes,
        name: str,
        seed: int,
        snapshot_dir: str | None,
        snapshot_every: int | None,
    ) -> None:
        self._ledger: Any = ray.get_actor(ledger_name(name), NAMESPACE)
        self._every = snapshot_every
        self._folder = None if snapshot_dir is None else ShardFolder(snapshot_dir, index)
        self._lock = threading.RLock()
        self._writers: dict[str, LaneWriter] = {}
        self._gone: set[str] = set()
        self._late, self._snapshots, self._saved_at = 0, 0, 0
        self._kept: tuple[int, Any] = (0, None)
        self._limited = True  # until the ledger says that it is not
        self._to_tell: set[str] | None = None  # the writers since the ledger was told; None if there is no news
        self._facts = Facts(index, f"node {this_node()}, process {os.getpid()}", generation=time.time_ns())
        self._storage: Storage | None = None
        self._failure: Exception | None = None
        try:
            self._begin(ray.cloudpickle.loads(zlib.decompress(factory)), seed)
        except Exception as error:  # told to whoever calls: an actor that fails to start could only say that it did
            self._failure = error
            return
        self._tell(())

    def _begin(self, factory: Callable[..., Storage], seed: int) -> None:
        try:
            found = None if self._folder is None else self._folder.load(factory)
        except SnapshotError as error:
            if not was_restarted():
                raise
            found, self._facts.said = None, f"the snapshot could not be read ({error})"
        if found is not None:
            self._storage, numbers = found
            self._facts.inserted = self._saved_at = numbers["inserted"]
            self._facts.restored = self._held(self._storage)
        else:
            self._storage = factory("cpu", None, None)
            if "_generator" in vars(self._storage):  # else a class with randomness of its own
                again = [self._facts.generation] if was_restarted() else []  # not the same draws once more
                entropy = np.random.SeedSequence([seed, self._facts.shard, *again])
                self._storage.seed(int(entropy.generate_state(1)[0]))

        if getattr(self._storage, "rate_limit", None) is not None:
            raise InvalidInputError("the factory's storage has a rate_limit of its own; give it to serve() instead")

    def ready(self) -> Facts:
        """The shard works; else an error that says why not."""
        self._open()
        return self._news()

    def _open(self) -> Storage:
        if self._failure is not None:
            raise self._failure
        assert self._storage is not None
        return self._storage

    def _held(self, storage: Storage) -> int:
        """Transitions held; a class that does not tell its length is taken to hold all it was given."""
        return len(storage) or (self._facts.inserted if type(storage).__len__ is Storage.__len__ else 0)

    def _news(self) -> Facts:
        storage = self._open()
        with self._lock:
            return replace(self._facts, lanes=count_lanes(storage), splits=can_split(storage), held=self._held(storage))

    def _tell(self, writers: Iterable[str]) -> None:
        self._ledger.tell.remote(self._news(), list(writers))

    def _tell_soon(self, writer: str) -> None:
        with self._lock:
            if self._to_tell is None:
                self._to_tell = set()
                timer = threading.Timer(_TELL_SECONDS, self._tell_now)
                timer.daemon = True
                timer.start()
            self._to_tell.add(writer)

    def _tell_now(self) -> None:
        with self._lock:
            writers, self._to_tell = self._to_tell or set(), None
        self._tell(writers)

    # ---------------------------------------------------------------------------------------------- writing

    def insert(self, writer: str, place: Place, steps: Steps, permitted: bool) -> Stored:
        """Store steps ``[steps, envs, ...]`` of a writer's lanes, with or without the ledger's permit.

        If a step is refused, those before it are stored, and it and those behind it are not.
        """
        storage, stored, refused = self._open(), 0, None
        try:
            with self._lock:
                self._open_lanes(storage, writer, place)
            for sample, count in each_step(steps):
                with self._lock:
                    self._writers[writer].insert(sample)
                    self._facts.inserted += count
                    self._facts.free_inserted += 0 if permitted else count
                stored += count
        except Exception as error:
            refused = error
        self._tell_soon(writer)
        if self._every is not None and self._facts.inserted - self._saved_at >= self._every:
            self.save()
        with self._lock:
            return Stored(stored, refused, replace(self._facts, held=self._held(storage)), self._limited)

    def _open_lanes(self, storage: Storage, writer: str, place: Place) -> None:
        if writer in self._writers:
            return
        if writer in self._gone:
            raise PeerLostError("this writer was closed, or its place was given to another one; make a new writer")
        others = [name for name, lanes in self._writers.items() if lanes.overlaps(place)]
        if any(self._writers[other].ticket > place.ticket for other in others):
            raise PeerLostError(
                "this writer's place was given to another one, because nothing had been heard of it for longer than "
                "the deadline; make a new writer"
            )
        for other in others:
            self.forget(other)  # the ledger has given its lanes away
        self._writers[writer] = LaneWriter(storage, place)

    def forget(self, writer: str) -> None:
        """A writer is closed."""
        lanes = self._writers.pop(writer, None)
        if lanes is not None:
            with self._lock:
                lanes.close()
            self._gone.add(writer)

    # ---------------------------------------------------------------------------------------------- reading

    @ray.method(concurrency_group="draw")
    def totals(self) -> Totals:
        """What draws are in proportion to."""
        storage = self._open()
        with self._lock:
            held = self._held(storage)
            return Totals(float(storage.draw_total) if len(storage) else float(held), held)

    @ray.method(concurrency_group="draw")
    def draw(self, counts: list[int], permitted: bool) -> list[Draw]:
        """Parts of several batches, of so many rows each, drawn as the storage draws them."""
        storage = self._open()
        return [self._draw(storage, count, permitted) for count in counts]

    def _draw(self, storage: Storage, count: int, permitted: bool) -> Draw:
        with self._lock:
            batches = _batches(storage, count)
            rows = torch.cat([batch.pop("rows", torch.full((0,), -1)).flatten() for batch in batches])
            priorities, total, beta = None, 0.0, 0.0
            if _has_priorities(storage) and storage.alpha > 0:
                priorities = storage.priorities(rows).numpy()
                total, beta = storage.priority_total, storage.current_beta
            self._facts.sampled += count
            self._facts.free_sampled += 0 if permitted else count
        parts = [pack(batch) for batch in batches]
        return Draw(parts, rows.cpu().numpy(), self._facts.generation, priorities, total, beta, self._limited)

    @ray.method(concurrency_group="draw")
    def update(self, rows: Array, generations: Array, priorities: Array) -> None:
        """Set priorities; those for another life of this shard are dropped and counted, as are overwritten rows."""
        storage = self._open()
        mine = generations == self._facts.generation
        with self._lock:
            self._late += int((~mine).sum())
            if mine.any():
                update: Any = storage.update  # type: ignore[attr-defined]
                update(torch.from_numpy(rows[mine]), torch.from_numpy(priorities[mine]))

    # ---------------------------------------------------------------------------------------------- the whole

    def each(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the storage."""
        storage = self._open()
        with self._lock:
            result = getattr(storage, method)(*args, **kwargs)
        self._tell(())
        return list(result) if isinstance(result, Iterator) else result

    def save(self) -> int:
        """Write a snapshot; gives the transitions ever inserted that it knows of."""
        storage = self._open()
        if self._folder is None:
            raise SnapshotError("this storage is served without a snapshot_dir; give one to serve()")
        with self._lock:
            inserted = self._facts.inserted
            self._folder.save(storage, {"inserted": inserted})
            self._saved_at = inserted
            self._snapshots += 1
        self._ledger.save.remote()
        return inserted

    @ray.method(concurrency_group="draw")
    def describe(self) -> tuple[Facts, int, int]:
        """The facts, priorities that came too late, and snapshots written."""
        storage = self._open()
        late = storage.stale_updates if _has_priorities(storage) else 0
        return self._news(), self._late + late, self._snapshots

    @ray.method(concurrency_group="draw")
    def keep(self, version: int, kept: Any, limited: bool) -> None:
        """Keep what the ledger knows, in case that it is lost; and whether there is a rate limit."""
        if version > self._kept[0]:
            self._kept, self._limited = (version, kept), limited

    @ray.method(concurrency_group="draw")
    def recall(self) -> tuple[Any, Facts]:
        """What the ledger knew, and the facts."""
        return self._kept[1], self._news()


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
    """True if the storage's class offers priorities; its properties are not evaluated, which may cost a wait."""
    names = ("priorities", "priority_total", "current_beta", "stale_updates")
    return all(hasattr(type(storage), name) for name in names)


def _batches(storage: Storage, count: int) -> list[BatchDict]:
    """``count`` rows in as few batches as the storage can give: a rollout serves no row twice in one."""
    try:
        return [_batch(storage, count)]
    except InvalidInputError:
        held = len(storage)
        if not 0 < held < count:
            raise
    return [_batch(storage, min(held, count - start)) for start in range(0, count, held)]


def _batch(storage: Storage, size: int) -> BatchDict:
    return next(iter(storage.generate_batches(1, size, 1)))
