"""The ledger of a served storage: one small actor that assigns places to writers, enforces the rate limit and counts.

No experience passes through it. It runs in one asyncio loop, so nothing here is interrupted between two awaits.

It runs on the node that serves the storage. If it dies, Ray restarts it and it resumes from the shards: each stores a
backup of the ledger's state, and its own counts. Permits that were granted and not used are forgotten. Of a shard that
dies at the same time its writers tell the last counts; if there are none, what it has saved does. If all die together,
a served storage resumes from what was saved, and one that was not saved starts empty.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from rlstore.engine.measures import Measures
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import PeerLostError, SnapshotError, WaitTimeoutError
from rlstore.ray.calls import Changed, Deadline, was_restarted
from rlstore.ray.counts import Counts, ShardCounts, ShardState, checked_count, newest, read_small
from rlstore.ray.places import Place, Places
from rlstore.ray.saves import Saving

NAMESPACE = "rlstore"
_BACKUP_SECONDS = 5.0


def shard_name(name: str, shard: int) -> str:
    """The name of a shard's actor in the cluster."""
    return f"{name}-shard-{shard}"


def ledger_name(name: str) -> str:
    """The name of the ledger's actor in the cluster."""
    return f"{name}-ledger"


@dataclass
class _Line:
    """Callers that wait for a permit, first come, first served."""

    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    largest: int = 1
    granted: int = 0
    waits: int = 0  # callers that did not get their permit at once
    wait_seconds: float = 0.0


class Ledger:
    """The actor.

    Args:
        name: The name of the served storage.
        limit: The rate limit, or None.
        saving: The number of shards, and where they and the counts are saved.
        patience: Seconds without a heartbeat after which the place of a writer may be reclaimed.
    """

    def __init__(self, name: str, limit: RateLimit | None, saving: Saving, patience: float) -> None:
        self._name, self._saving = name, saving
        self._state = Counts(limit, [ShardCounts(ShardState(shard)) for shard in range(saving.shards)])
        self._places = Places(saving.shards, patience)
        self._inserts, self._samples = _Line(), _Line()
        self._heartbeats, self._changed = 0, Changed()
        self._handles: dict[int, Any] = {}
        self._journaled = 0.0  # when
        if was_restarted():
            self._recover()
        else:
            self._load()

    # ---------------------------------------------------------------------------------------------- shards

    async def heartbeat(self, state: ShardState, writers: Sequence[str] = ()) -> None:
        """The state of a shard, sent when it starts and shortly after inserts; and the writers that inserted."""
        for writer in writers:
            self._places.heartbeat(writer)
        if self._record(state):
            self._back_up()
        self._heartbeats += 1
        self._changed.notify()
        now, journal = time.monotonic(), self._saving.journal
        if journal is not None and now - self._journaled >= self._saving.interval:
            self._journaled = now
            self._current().write(journal)

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
        counts.state, counts.previous, counts.restored_at = state, known, state.inserted
        counts.starts += 1
        counts.inserted += counts.counted(known) - known.inserted
        counts.lost += counts.lost_with(known)
        counts.sampled += state.sampled
        self._inserts.granted += state.inserted_freely
        self._samples.granted += state.sampled_freely
        self._places.describe(state.shard, state.lanes, state.splits)
        # What was restored may be newer than the saved counts of the limiter.
        inserted = sum(other.inserted for other in self._state.shards)
        self._inserts.granted = max(self._inserts.granted, inserted)
        self._grant()
        return True

    def _record_previous(self, counts: ShardCounts, state: ShardState) -> None:
        previous = counts.previous
        if previous is None or state.generation != previous.generation or state.inserted <= previous.inserted:
            return
        new = counts.counted(state) - counts.counted(previous)
        counts.inserted += new
        counts.sampled += max(state.sampled - previous.sampled, 0)
        counts.lost += counts.lost_with(state) - counts.lost_with(previous)
        self._inserts.granted += min(state.inserted_freely - previous.inserted_freely, new)
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
        if future.done():
            return
        began = time.monotonic()
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
        finally:
            line.waits += 1
            line.wait_seconds += time.monotonic() - began

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

    async def measure(self) -> Measures:
        """With a rate limit, how often and how long either side has waited for it."""
        if self._state.limit is None:
            return {}
        sides: dict[str, _Line] = {"insert": self._inserts, "sample": self._samples}
        counts: Measures = {f"{side}_waits": line.waits for side, line in sides.items()}
        return {**counts, **{f"{side}_wait_seconds": line.wait_seconds for side, line in sides.items()}}

    async def save(self, states: Sequence[ShardState] = ()) -> None:
        """Save the counts, with these states of shards that have saved."""
        for state in states:
            self._record(state)
        for root in self._saving.roots:
            self._current().write(root)

    def _load(self) -> None:
        """Continue with the counts of an earlier run."""
        found = [counts for counts in map(Counts.read, self._saving.roots) if counts is not None]
        if found:
            self._resume(newest(found).for_new_run(self._state.limit))
        elif self._saving.snapshot_dir is not None:
            self._load_limiter(Path(self._saving.snapshot_dir))

    def _load_limiter(self, folder: Path) -> None:
        """Load the counts of the limiter, which are all that earlier versions have saved."""
        counts = read_small(folder, "limiter.json")
        if counts is None:
            return
        try:
            inserted, sampled = (checked_count(name, counts[name]) for name in ("inserted", "sampled"))
        except (ValueError, KeyError) as error:
            raise SnapshotError(f"{folder / 'limiter.json'} does not hold a limiter's counts: {error}") from error
        self._inserts.granted, self._samples.granted = inserted, sampled

    def _resume(self, counts: Counts) -> None:
        self._state = counts
        self._inserts.granted = counts.inserted_offset + sum(shard.inserted for shard in counts.shards)
        self._samples.granted = counts.sampled_offset + sum(shard.sampled for shard in counts.shards)

    def _current(self) -> Counts:
        state = self._state
        state.places = self._places.given
        state.inserted_offset = self._inserts.granted - sum(counts.inserted for counts in state.shards)
        state.sampled_offset = self._samples.granted - sum(counts.sampled for counts in state.shards)
        return state

    def _back_up(self) -> list[Any]:
        """Send the shards a backup of the state; returns the calls."""
        self._state.version += 1
        state = self._current()
        handles = [self._handle(shard) for shard in range(len(state.shards))]
        limit = state.limit
        # With a minimum size alone only samples wait.
        limited = limit is not None and limit.samples_per_insert is not None, limit is not None
        return [handle.store_backup.remote(state.version, state, *limited) for handle in handles if handle is not None]

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
        answered: list[tuple[Counts | None, ShardState]] = []
        for ref in ready:
            try:
                answered.append(ray.get(ref, timeout=_BACKUP_SECONDS))
            except ray.exceptions.RayError:
                continue
        backups = [backup for backup, _ in answered if backup is not None]
        for root in self._saving.roots:
            with suppress(SnapshotError, OSError):
                saved = Counts.read(root)
                is_ours = saved is not None and len(saved.shards) == self._saving.shards
                backups += [saved] if saved is not None and is_ours else []
        if backups:
            self._resume(newest(backups))
            for counts in self._state.shards:
                self._places.describe(counts.state.shard, counts.state.lanes, counts.state.splits)
            self._places.restore(self._state.places)
        self._state.restarts += 1
        offsets = self._state.inserted_offset, self._state.sampled_offset
        for _, state in answered:
            self._record(state)
        if backups:
            self._state.inserted_offset, self._state.sampled_offset = offsets
            self._resume(self._state)


def _resolved(limit: RateLimit, inserts: int, samples: int) -> RateLimit:
    """The limit for calls of these sizes.

    A call of a writer has many steps; so a tolerance that is not given is the least with which one side can always
    proceed, not twice as much.
    """
    if limit.samples_per_insert is not None and limit.tolerance is None:
        limit = replace(limit, tolerance=max(inserts * limit.samples_per_insert, float(samples)))
    return limit.resolved(inserts, samples)
