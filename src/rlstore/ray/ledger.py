"""The ledger of a served storage: one small actor that assigns places to writers, enforces the rate limit and counts.

No experience passes through it. It runs in one asyncio loop, so nothing here is interrupted between two awaits.

It runs on the node that serves the storage. If it dies, Ray restarts it and it resumes from the shards: each stores a
backup of the ledger's state, and its own counts. Permits that were granted and not used are forgotten, as are the
counts of a shard that dies at the same time. If all die together, a served storage resumes from its snapshots, and one
without snapshots starts empty.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from rlstore.engine.disk.directory import Directory
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import InvalidInputError, PeerLostError, WaitTimeoutError
from rlstore.ray.calls import Changed, Deadline, was_restarted
from rlstore.ray.places import Place, Places

NAMESPACE = "rlstore"
_BACKUP_SECONDS = 5.0


def shard_name(name: str, shard: int) -> str:
    """The name of a shard's actor in the cluster."""
    return f"{name}-shard-{shard}"


def ledger_name(name: str) -> str:
    """The name of the ledger's actor in the cluster."""
    return f"{name}-ledger"


@dataclass
class ShardState:
    """What a shard reports with each heartbeat.

    Attributes:
        shard: Its number.
        where: Its node and process.
        generation: The start time of its process.
        lanes: Its environments; None until its first sample decides.
        splits: Whether several writers can share its lanes.
        inserted: Transitions ever inserted, counted on from the snapshot that it was restored from.
        held: Transitions held.
        sampled: Rows sampled in this generation.
        restored: Transitions restored from a snapshot.
        inserted_freely: Inserts of this generation without a permit, while there was no rate limit.
        sampled_freely: The same of samples.
        note: What went wrong when it was restored, or nothing.
    """

    shard: int
    where: str = "no node yet"
    generation: int = 0
    lanes: int | None = None
    splits: bool = False
    inserted: int = 0
    held: int = 0
    sampled: int = 0
    restored: int = 0
    inserted_freely: int = 0
    sampled_freely: int = 0
    note: str = ""


@dataclass
class ShardCounts:
    """The counts of a shard over all its generations."""

    state: ShardState
    starts: int = 0
    inserted: int = 0
    sampled: int = 0
    lost: int = 0
    previous: ShardState | None = None  # the last known state of the previous generation
    restored_at: int = 0  # the inserts up to what the current generation was restored from

    def counted(self, state: ShardState) -> int:
        """The inserts of the previous generation: a folder may hold more than the ledger was told of."""
        return max(state.inserted, self.restored_at)

    def lost_with(self, state: ShardState) -> int:
        """Transitions lost with the previous generation: inserted since what was restored, and not overwritten."""
        return min(max(state.inserted - self.restored_at, 0), state.held)


@dataclass
class _Backup:
    """The state of the ledger that the shards store."""

    limit: RateLimit | None
    shards: list[ShardCounts]
    lost_in_flight: int = 0
    lost_updates: int = 0
    restarts: int = 0
    version: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    # The limiter's counts minus those of the shards.
    inserted_offset: int = 0
    sampled_offset: int = 0


@dataclass
class _Line:
    """Callers that wait for a permit, first come, first served."""

    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    largest: int = 1
    granted: int = 0


class Ledger:
    """The actor.

    Args:
        name: The name of the served storage.
        shards: The number of shards.
        limit: The rate limit, or None.
        snapshot_dir: Where the limiter's counts are saved, or None.
        patience: Seconds without a heartbeat after which the place of a writer may be reclaimed.
    """

    def __init__(
        self, name: str, shards: int, limit: RateLimit | None, snapshot_dir: str | None, patience: float
    ) -> None:
        self._name = name
        self._state = _Backup(limit, [ShardCounts(ShardState(shard)) for shard in range(shards)])
        self._places = Places(shards, patience)
        self._inserts, self._samples = _Line(), _Line()
        self._heartbeats, self._changed = 0, Changed()
        self._handles: dict[int, Any] = {}
        self._file = None if snapshot_dir is None else Path(snapshot_dir) / "limiter.json"
        self._load()
        if was_restarted():
            self._recover()

    # ---------------------------------------------------------------------------------------------- shards

    async def heartbeat(self, state: ShardState, writers: Sequence[str] = ()) -> None:
        """The state of a shard, sent when it starts and shortly after inserts; and the writers that inserted."""
        for writer in writers:
            self._places.heartbeat(writer)
        if self._record(state):
            self._back_up()
        self._heartbeats += 1
        self._changed.notify()

    async def last_state(self, state: ShardState) -> None:
        """The last state of a dead shard that a writer knows, which may be newer than its last heartbeat.

        That a generation begins, and what it was restored from, is known from its own heartbeat only.
        """
        if state.generation <= self._state.shards[state.shard].state.generation:
            self._record(state)
            self._changed.notify()

    def _record(self, state: ShardState) -> bool:
        """Count what is new in a shard's state; True if it begins a new generation."""
        counts = self._state.shards[state.shard]
        known = counts.state
        if state.generation < known.generation:
            self._record_previous(counts, state)
            return False
        if state.generation == known.generation:
            if state.inserted >= known.inserted:  # not older than what is known
                counts.state = state
                counts.inserted += state.inserted - known.inserted
                counts.sampled += state.sampled - known.sampled
                self._inserts.granted += state.inserted_freely - known.inserted_freely
                self._samples.granted += state.sampled_freely - known.sampled_freely
                self._grant()
            return False
        counts.state = state
        counts.starts += 1
        if counts.starts == 1:
            counts.inserted = state.inserted  # with those of its snapshot
        else:
            counts.previous, counts.restored_at = known, state.inserted
            counts.inserted += counts.counted(known) - known.inserted
            counts.lost += counts.lost_with(known)
        counts.sampled += state.sampled
        self._inserts.granted += state.inserted_freely
        self._samples.granted += state.sampled_freely
        self._places.describe(state.shard, state.lanes, state.splits)
        # A snapshot may be newer than the saved counts of the limiter.
        inserted = sum(other.state.inserted for other in self._state.shards)
        self._inserts.granted = max(self._inserts.granted, inserted)
        self._grant()
        return True

    def _record_previous(self, counts: ShardCounts, state: ShardState) -> None:
        previous = counts.previous
        if previous is None or state.generation != previous.generation or state.inserted <= previous.inserted:
            return
        counts.inserted += counts.counted(state) - counts.counted(previous)
        counts.sampled += max(state.sampled - previous.sampled, 0)
        counts.lost += counts.lost_with(state) - counts.lost_with(previous)
        self._inserts.granted += state.inserted_freely - previous.inserted_freely
        counts.previous = state

    async def wait_for_heartbeat(self, seen: int, seconds: float) -> int:
        """The number of heartbeats, as soon as it is above ``seen``."""
        deadline = Deadline(seconds)
        while self._heartbeats <= seen and deadline.left:
            await self._changed.wait(deadline)
        return self._heartbeats

    # ---------------------------------------------------------------------------------------------- writers

    async def place(self, writer: str, num_envs: int | None, seconds: float) -> Place:
        """Lanes of a shard for a writer, as soon as every shard has started."""
        deadline = Deadline(seconds)
        while any(counts.starts == 0 for counts in self._state.shards) and deadline.left:
            await self._changed.wait(deadline)
        place = self._places.give(writer, num_envs)
        self._back_up()
        return place

    async def leave(self, writer: str) -> None:
        """Release the place of a writer."""
        self._places.leave(writer)
        self._back_up()

    async def count_lost(self, transitions: int, priorities: int, permitted: int) -> None:
        """Count what was lost in flight; the permits of ``permitted`` of the transitions are returned."""
        self._state.lost_in_flight += transitions
        self._state.lost_updates += priorities
        self._inserts.granted -= permitted
        self._grant()
        self._back_up()

    # ---------------------------------------------------------------------------------------------- permits

    async def permit_insert(self, writer: str, count: int, seconds: float) -> None:
        """Wait until the rate limit allows a writer to insert ``count`` transitions."""
        if not self._places.heartbeat(writer):
            raise PeerLostError(
                "this writer's place was reclaimed and given to another one, because no heartbeat of it came for "
                "longer than the deadline; make a new writer"
            )
        await self._wait_in(self._inserts, count, seconds)

    async def permit_sample(self, size: int, most: int, seconds: float) -> tuple[int, int]:
        """Wait until the rate limit allows a learner to draw a batch of ``size``, and something was inserted.

        Returns:
            The number of batches that are allowed, 1 to ``most``; and the number of heartbeats.
        """
        await self._wait_in(self._samples, size, seconds)
        granted = 1
        while granted < most and not self._samples.waiting and self._allows(self._samples, size):
            self._samples.granted += size
            granted += 1
        self._grant()
        return granted, self._heartbeats

    async def return_sample(self, count: int) -> None:
        """Take back a permit that a learner did not use."""
        self._samples.granted -= count
        self._grant()

    async def set_rate_limit(self, limit: RateLimit | None) -> None:
        """Change the limit. When this returns the shards know it.

        The tolerance is checked against those who wait now, and again with each call that follows: those who made the
        largest calls before may be gone.
        """
        largest = [max((count for count, _ in line.waiting), default=1) for line in (self._inserts, self._samples)]
        if limit is not None:
            _resolved(limit, *largest)
        self._inserts.largest, self._samples.largest = largest
        self._state.limit = limit
        self._grant()
        stored = asyncio.gather(*self._back_up(), return_exceptions=True)
        try:
            await asyncio.wait_for(stored, _BACKUP_SECONDS)
        except asyncio.TimeoutError:
            return  # a shard that does not answer gets it when it is restarted

    async def _wait_in(self, line: _Line, count: int, seconds: float) -> None:
        if count > line.largest and self._state.limit is not None:
            inserts = (count, self._samples.largest) if line is self._inserts else (self._inserts.largest, count)
            _resolved(self._state.limit, *inserts)  # an error if both sides could wait for each other
        line.largest = max(line.largest, count)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append((count, future))
        self._grant()
        try:
            await asyncio.wait_for(future, seconds)
        except asyncio.TimeoutError:
            self._grant()  # those behind it may be allowed
            what = "insert" if line is self._inserts else "sample"
            raise WaitTimeoutError(
                f"the rate limit of {self._name} let no {what} of {count} go ahead within {seconds:g} s: "
                f"{self._inserts.granted} were inserted and {self._samples.granted} sampled under {self._state.limit}. "
                f"{len(self._places)} writers have a place"
            ) from None

    def _grant(self) -> None:
        """Grant the permits that the limit allows now."""
        moved = True
        while moved:
            moved = False
            for line in (self._inserts, self._samples):
                while line.waiting and (line.waiting[0][1].done() or self._allows(line, line.waiting[0][0])):
                    count, future = line.waiting.popleft()
                    if not future.done():
                        line.granted += count
                        future.set_result(None)
                        moved = True

    def _allows(self, line: _Line, count: int) -> bool:
        inserted, sampled = self._inserts.granted, self._samples.granted
        if self._state.limit is None:
            return line is self._inserts or inserted > 0
        limit = _resolved(self._state.limit, self._inserts.largest, self._samples.largest)
        allows = limit.allows_insert if line is self._inserts else limit.allows_sample
        return allows(inserted, sampled, count)

    # ---------------------------------------------------------------------------------------------- state

    async def report(self) -> dict[str, Any]:
        """The counts of the ledger; the arguments of ``ServedReport``, with ShardCounts for the shards."""
        return {
            "shards": self._state.shards,
            "writers": len(self._places),
            "lost_in_flight": self._state.lost_in_flight,
            "lost_updates": self._state.lost_updates,
            "rate_limit": self._state.limit,
            "limiter_inserted": self._inserts.granted,
            "limiter_sampled": self._samples.granted,
            "ledger_restarts": self._state.restarts,
        }

    async def save(self) -> None:
        """Save the counts of the limiter."""
        if self._file is not None:
            counts = {"inserted": self._inserts.granted, "sampled": self._samples.granted}
            with Directory(self._file.parent) as folder:
                folder.write_whole(self._file.name, json.dumps(counts).encode())

    def _load(self) -> None:
        if self._file is None or not self._file.exists():
            return
        try:
            counts = json.loads(self._file.read_bytes())
            self._inserts.granted, self._samples.granted = int(counts["inserted"]), int(counts["sampled"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"{self._file} does not hold a limiter's counts: {error}") from error

    def _back_up(self) -> list[Any]:
        """Send the shards a backup of the state; returns the calls."""
        state = self._state
        state.version += 1
        state.places = self._places.given
        state.inserted_offset = self._inserts.granted - sum(counts.inserted for counts in state.shards)
        state.sampled_offset = self._samples.granted - sum(counts.sampled for counts in state.shards)
        handles = [self._handle(shard) for shard in range(len(state.shards))]
        limited = state.limit is not None
        return [handle.store_backup.remote(state.version, state, limited) for handle in handles if handle is not None]

    def _handle(self, shard: int) -> Any:
        """The actor of a shard, which remains the same when it is restarted; None before it has started."""
        if shard not in self._handles and self._state.shards[shard].starts:
            try:
                self._handles[shard] = ray.get_actor(shard_name(self._name, shard), NAMESPACE)
            except ValueError:
                return None
        return self._handles.get(shard)

    def _recover(self) -> None:
        """Resume from the newest backup and the states of the shards that answer."""
        refs: list[Any] = []
        for shard in range(len(self._state.shards)):
            try:
                refs.append(ray.get_actor(shard_name(self._name, shard), NAMESPACE).get_backup.remote())
            except ValueError:
                continue
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_BACKUP_SECONDS) if refs else ([], [])
        answered: list[tuple[_Backup | None, ShardState]] = []
        for ref in ready:
            try:
                answered.append(ray.get(ref, timeout=_BACKUP_SECONDS))
            except ray.exceptions.RayError:
                continue
        backups = [backup for backup, _ in answered if backup is not None]
        if backups:
            self._state = max(backups, key=lambda backup: backup.version)
            for counts in self._state.shards:
                self._places.describe(counts.state.shard, counts.state.lanes, counts.state.splits)
            self._places.restore(self._state.places)
        self._state.restarts += 1
        for _, state in answered:
            self._record(state)
        if backups:
            inserted, sampled = self._state.inserted_offset, self._state.sampled_offset
            self._inserts.granted = inserted + sum(counts.inserted for counts in self._state.shards)
            self._samples.granted = sampled + sum(counts.sampled for counts in self._state.shards)


def _resolved(limit: RateLimit, inserts: int, samples: int) -> RateLimit:
    """The limit for calls of these sizes.

    A call of a writer has many steps; so a tolerance that is not given is the least with which one side can always
    proceed, not twice as much.
    """
    if limit.tolerance is None:
        limit = replace(limit, tolerance=max(inserts * limit.samples_per_insert, float(samples)))
    return limit.resolved(inserts, samples)
