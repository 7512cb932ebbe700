"""The ledger of a served storage: one small actor that gives out places, holds the rate limit and counts.

No data pass through it. It runs in one asyncio loop, so nothing here is ever interrupted between two awaits.

It runs on the node of whoever serves the storage. If it is lost, Ray starts it again, and it takes up what it knew
from the shards: each keeps the newest copy of the rare facts (places, losses, the limit), and its own counts. Permits
that were given and not yet used are forgotten, and so are the counts of a shard that is lost at the same time. If all
are lost together, a served storage with snapshots goes on from those, and one without begins anew.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from rlstore.engine.disk.files import write_whole
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import InvalidInputError, PeerLostError, WaitTimeoutError
from rlstore.ray.calls import was_restarted
from rlstore.ray.places import Place, Places

NAMESPACE = "rlstore"


@dataclass
class Facts:
    """What a shard tells of itself.

    ``lanes`` is None as long as the storage waits for its first sample; ``splits`` tells whether several writers can
    share its lanes. ``inserted`` counts on from the snapshot that the shard began with; what is ``free`` came without
    a permit, while there was no rate limit.
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
    free_inserted: int = 0
    free_sampled: int = 0
    said: str = ""


@dataclass
class ShardCounts:
    """What the ledger knows of a shard."""

    facts: Facts
    births: int = 0
    inserted: int = 0  # in all lives
    sampled: int = 0
    lost: int = 0
    before: Facts | None = None  # the last that is known of the life before this one
    begun_with: int = 0  # of all that was inserted, what this life began with

    def lost_with(self, life: Facts) -> int:
        """What went with the life before this one: stored since the snapshot, and not overwritten."""
        return min(max(life.inserted - self.begun_with, 0), life.held)


@dataclass
class _Kept:
    """What the shards keep for the ledger."""

    limit: RateLimit | None
    shards: list[ShardCounts]
    places: dict[str, Place]
    lost_in_flight: int = 0
    lost_updates: int = 0
    # Of the limiter's counts, what is not in the shards' own.
    inserted_beside: int = 0
    sampled_beside: int = 0
    restarts: int = 0
    version: int = 0


@dataclass
class _Line:
    """Callers that wait for a permit, first come, first served."""

    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    largest: int = 1
    granted: int = 0


class Ledger:
    """The actor.

    Args:
        name: Of the served storage.
        shards: How many there are.
        limit: The rate limit, or None.
        snapshot_dir: Where the limiter's counts are kept, or None.
        patience: Seconds after which a writer that says nothing loses its place to one that asks for it.
    """

    def __init__(
        self, name: str, shards: int, limit: RateLimit | None, snapshot_dir: str | None, patience: float
    ) -> None:
        self._name, self._limit, self._file = name, limit, None
        self._shards = [ShardCounts(Facts(shard)) for shard in range(shards)]
        self._places = Places(shards, patience)
        self._inserts, self._samples = _Line(), _Line()
        self._lost_in_flight, self._lost_updates, self._version, self._restarts = 0, 0, 0, 0
        self._news, self._changed = 0, asyncio.Event()
        self._handles: dict[int, Any] = {}
        if snapshot_dir is not None:
            self._file = Path(snapshot_dir) / "limiter.json"
            self._read_counts()
        if was_restarted():
            self._recover()

    # ---------------------------------------------------------------------------------------------- shards

    async def tell(self, facts: Facts, writers: Sequence[str] = ()) -> None:
        """A shard tells of itself, when it begins a life and soon after inserts, and of the writers that made them."""
        for writer in writers:
            self._places.touch(writer)
        if self._hear(facts):
            self._share()
        self._news += 1
        self._wake()

    async def witness(self, facts: Facts) -> None:
        """A writer has met the loss of a shard: the last that the shard told it, which may be news here.

        Only the shard itself can tell that a life began, and with what.
        """
        if facts.generation <= self._shards[facts.shard].facts.generation:
            self._hear(facts)
            self._wake()

    def _hear(self, facts: Facts) -> bool:
        """Take in what is told of a shard; True if it has begun a new life."""
        counts = self._shards[facts.shard]
        known = counts.facts
        if facts.generation < known.generation:
            self._hear_of_the_past(counts, facts)
            return False
        if facts.generation == known.generation and facts.inserted < known.inserted:
            return False  # older than what is known
        counts.facts = facts
        if facts.generation == known.generation:
            counts.inserted += facts.inserted - known.inserted
            counts.sampled += facts.sampled - known.sampled
            self._inserts.granted += facts.free_inserted - known.free_inserted
            self._samples.granted += facts.free_sampled - known.free_sampled
            self._serve_lines()
            return False
        counts.births += 1
        if counts.births == 1:
            counts.inserted = facts.inserted  # those of a snapshot are there too
        else:
            counts.before, counts.begun_with = known, facts.inserted
            counts.lost += counts.lost_with(known)
        counts.sampled += facts.sampled
        self._inserts.granted += facts.free_inserted
        self._samples.granted += facts.free_sampled
        self._places.describe(facts.shard, facts.lanes, facts.splits)
        # A snapshot may hold data that no file with the limiter's counts tells of.
        self._inserts.granted = max(self._inserts.granted, sum(other.facts.inserted for other in self._shards))
        self._serve_lines()
        return True

    def _hear_of_the_past(self, counts: ShardCounts, facts: Facts) -> None:
        before = counts.before
        if before is None or facts.generation != before.generation or facts.inserted <= before.inserted:
            return
        counts.inserted += facts.inserted - before.inserted
        counts.sampled += max(facts.sampled - before.sampled, 0)
        counts.lost += counts.lost_with(facts) - counts.lost_with(before)
        self._inserts.granted += facts.free_inserted - before.free_inserted
        counts.before = facts

    async def wait_for_news(self, seen: int, seconds: float) -> int:
        """A number that grows when a shard has something new to tell, as soon as it is above ``seen``."""
        end = time.monotonic() + seconds
        while self._news <= seen and time.monotonic() < end:
            await self._change(end)
        return self._news

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, end: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), max(end - time.monotonic(), 0.0))
        except asyncio.TimeoutError:
            return

    # ---------------------------------------------------------------------------------------------- writers

    async def place(self, writer: str, num_envs: int | None, seconds: float) -> Place:
        """Lanes of a shard for a writer, as soon as every shard was heard of."""
        end = time.monotonic() + seconds
        while any(counts.births == 0 for counts in self._shards) and time.monotonic() < end:
            await self._change(end)
        place = self._places.give(writer, num_envs)
        self._share()
        return place

    async def leave(self, writer: str) -> None:
        """A writer gives its place back."""
        self._places.leave(writer)
        self._share()

    async def lose(self, transitions: int, priorities: int, permitted: int) -> None:
        """Something that was on its way did not arrive; of the transitions, some had a permit, which is given back."""
        self._lost_in_flight += transitions
        self._lost_updates += priorities
        self._inserts.granted -= permitted
        self._serve_lines()
        self._share()

    # ---------------------------------------------------------------------------------------------- permits

    async def permit_insert(self, writer: str, count: int, seconds: float) -> None:
        """Let a writer insert so many transitions, as soon as the rate limit allows."""
        if not self._places.touch(writer):
            raise PeerLostError(
                "this writer's place was given to another one, because nothing had been heard of it for longer than "
                "the deadline; make a new writer"
            )
        await self._line_up(self._inserts, count, seconds)

    async def permit_sample(self, size: int, most: int, seconds: float) -> tuple[int, int]:
        """Let a learner draw batches of a size, as soon as the rate limit allows one and anything is there.

        Returns:
            How many batches, at most ``most``: one, and those that may follow at once; and the news.
        """
        await self._line_up(self._samples, size, seconds)
        granted = 1
        while granted < most and not self._samples.waiting and self._allows(self._samples, size):
            self._samples.granted += size
            granted += 1
        self._serve_lines()
        return granted, self._news

    async def return_sample(self, count: int) -> None:
        """A learner gives back a permit that it could not use."""
        self._samples.granted -= count
        self._serve_lines()

    async def set_rate_limit(self, limit: RateLimit | None) -> None:
        """Change the limit; whoever waits looks again. When this returns the shards know of it.

        Whether its tolerance is enough is looked at anew with each call that comes: those who made large ones may be
        gone.
        """
        largest = [max((count for count, _ in line.waiting), default=1) for line in (self._inserts, self._samples)]
        if limit is not None:
            _resolved(limit, *largest)
        self._inserts.largest, self._samples.largest = largest
        self._limit = limit
        self._serve_lines()
        known = asyncio.gather(*self._share(), return_exceptions=True)
        try:
            await asyncio.wait_for(known, _SHARE_SECONDS)
        except asyncio.TimeoutError:
            return  # one that does not answer is told again when it begins another life

    async def _line_up(self, line: _Line, count: int, seconds: float) -> None:
        other = self._samples if line is self._inserts else self._inserts
        if count > line.largest and self._limit is not None:
            sizes = (count, other.largest) if line is self._inserts else (other.largest, count)
            _resolved(self._limit, *sizes)  # an error if both sides could wait for each other
        line.largest = max(line.largest, count)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append((count, future))
        self._serve_lines()
        try:
            await asyncio.wait_for(future, seconds)
        except asyncio.TimeoutError:
            self._serve_lines()  # those behind it may go ahead
            raise WaitTimeoutError(self._why_waiting(line, count, seconds)) from None

    def _serve_lines(self) -> None:
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
        if self._limit is None:
            return line is self._inserts or inserted > 0
        limit = _resolved(self._limit, self._inserts.largest, self._samples.largest)
        allows = limit.allows_insert if line is self._inserts else limit.allows_sample
        return allows(inserted, sampled, count)

    def _why_waiting(self, line: _Line, count: int, seconds: float) -> str:
        what = "insert" if line is self._inserts else "sample"
        return (
            f"the rate limit of {self._name} let no {what} of {count} go ahead within {seconds:g} s: "
            f"{self._inserts.granted} were inserted and {self._samples.granted} sampled under {self._limit}. "
            f"{len(self._places)} writers have a place"
        )

    # ---------------------------------------------------------------------------------------------- the whole

    async def report(self) -> dict[str, Any]:
        """What the ledger knows."""
        return {
            "shards": self._shards,
            "writers": len(self._places),
            "lost_in_flight": self._lost_in_flight,
            "lost_updates": self._lost_updates,
            "rate_limit": self._limit,
            "limiter_inserted": self._inserts.granted,
            "limiter_sampled": self._samples.granted,
            "ledger_restarts": self._restarts,
        }

    async def save(self) -> None:
        """Keep the limiter's counts on the disk."""
        if self._file is not None:
            counts = {"inserted": self._inserts.granted, "sampled": self._samples.granted}
            write_whole(self._file, json.dumps(counts).encode())

    def _read_counts(self) -> None:
        if self._file is None or not self._file.exists():
            return
        try:
            counts = json.loads(self._file.read_bytes())
            self._inserts.granted, self._samples.granted = int(counts["inserted"]), int(counts["sampled"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"{self._file} does not hold a limiter's counts: {error}") from error

    def _share(self) -> list[Any]:
        """Have the shards keep what must not be lost with this process; gives the calls."""
        self._version += 1
        kept = _Kept(
            self._limit,
            self._shards,
            self._places.given,
            self._lost_in_flight,
            self._lost_updates,
            self._inserts.granted - sum(counts.inserted for counts in self._shards),
            self._samples.granted - sum(counts.sampled for counts in self._shards),
            self._restarts,
            self._version,
        )
        handles = [self._handle(shard) for shard in range(len(self._shards))]
        limited = self._limit is not None
        return [handle.keep.remote(self._version, kept, limited) for handle in handles if handle is not None]

    def _handle(self, shard: int) -> Any:
        """The actor of a shard, which stays the same when it is started again; None before its first life."""
        if shard not in self._handles and self._shards[shard].births:
            try:
                self._handles[shard] = ray.get_actor(shard_name(self._name, shard), NAMESPACE)
            except ValueError:
                return None
        return self._handles.get(shard)

    def _recover(self) -> None:
        """Take up what the ledger before this one knew."""
        refs: list[Any] = []
        for shard in range(len(self._shards)):
            try:
                refs.append(ray.get_actor(shard_name(self._name, shard), NAMESPACE).recall.remote())
            except ValueError:
                continue
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_RECOVER_SECONDS) if refs else ([], [])
        told: list[tuple[_Kept | None, Facts]] = []
        for ref in ready:
            try:
                told.append(ray.get(ref, timeout=_RECOVER_SECONDS))
            except ray.exceptions.RayError:
                continue
        newest = max((kept for kept, _ in told if kept is not None), key=lambda kept: kept.version, default=None)
        if newest is not None:
            self._take(newest)
        self._restarts += 1
        for _, facts in told:
            self._hear(facts)
        if newest is not None:
            self._inserts.granted = newest.inserted_beside + sum(counts.inserted for counts in self._shards)
            self._samples.granted = newest.sampled_beside + sum(counts.sampled for counts in self._shards)

    def _take(self, kept: _Kept) -> None:
        self._limit, self._shards, self._version = kept.limit, kept.shards, kept.version
        self._lost_in_flight, self._lost_updates = kept.lost_in_flight, kept.lost_updates
        self._restarts = kept.restarts
        for counts in self._shards:
            self._places.describe(counts.facts.shard, counts.facts.lanes, counts.facts.splits)
        self._places.take(kept.places)


def _resolved(limit: RateLimit, inserts: int, samples: int) -> RateLimit:
    """The limit for calls of these sizes.

    A writer's call holds many steps, so the least tolerance with which one of both sides can always go on is taken
    where none is given, and not twice as much.
    """
    if limit.tolerance is None:
        limit = replace(limit, tolerance=max(inserts * limit.samples_per_insert, float(samples)))
    return limit.resolved(inserts, samples)


_RECOVER_SECONDS = _SHARE_SECONDS = 5.0


def shard_name(name: str, shard: int) -> str:
    """What a shard's actor is called in the cluster."""
    return f"{name}-shard-{shard}"


def ledger_name(name: str) -> str:
    """What the ledger's actor is called in the cluster."""
    return f"{name}-ledger"
