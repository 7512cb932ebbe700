"""What served storages and queues tell of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from rlstore.engine.processes.limiter import RateLimit


@dataclass(frozen=True)
class ShardReport:
    """One shard.

    Attributes:
        shard: Its number.
        where: Its node and process when it was last heard of.
        answers: Whether it answered when it was asked for this report.
        generation: Its life: the third number of the rows that it gives.
        restarts: How often it was started again.
        inserted: Transitions that it ever stored, in all its lives.
        held: Transitions that it holds now, as last heard.
        sampled: Rows that it ever gave.
        restored: Transitions that it had from a snapshot when its present life began.
        lost: Transitions that went with its former lives: stored since the snapshot that it was restored from, and not
            overwritten.
        stale_updates: Priorities that came for rows which are not there any more, and were dropped.
        snapshots: Snapshots written in its present life.
        said: What went wrong when it was restored, or nothing.
    """

    shard: int
    where: str
    answers: bool
    generation: int
    restarts: int
    inserted: int
    held: int
    sampled: int
    restored: int
    lost: int
    stale_updates: int
    snapshots: int
    said: str


@dataclass(frozen=True)
class ServedReport:
    """A served storage: ``inserted = held + overwritten + lost_in_shards``.

    Attributes:
        shards: Each shard.
        writers: Writers that have a place now.
        lost_in_flight: Transitions that were on their way to a shard which did not take them.
        lost_updates: Priorities that were on their way to a shard which was gone.
        rate_limit: The limit that holds now; None for none.
        limiter_inserted: Inserts that the limiter let go ahead.
        limiter_sampled: Samples that it let go ahead.
        ledger_restarts: How often the ledger was started again.
    """

    shards: tuple[ShardReport, ...]
    writers: int
    lost_in_flight: int
    lost_updates: int
    rate_limit: RateLimit | None
    limiter_inserted: int
    limiter_sampled: int
    ledger_restarts: int

    @property
    def inserted(self) -> int:
        """Transitions ever stored."""
        return sum(shard.inserted for shard in self.shards)

    @property
    def held(self) -> int:
        """Transitions held now."""
        return sum(shard.held for shard in self.shards if shard.answers)

    @property
    def sampled(self) -> int:
        """Rows ever given."""
        return sum(shard.sampled for shard in self.shards)

    @property
    def lost_in_shards(self) -> int:
        """Transitions that went with shards."""
        return sum(shard.lost for shard in self.shards)

    @property
    def restarts(self) -> int:
        """How often shards were started again."""
        return sum(shard.restarts for shard in self.shards)

    @property
    def stale_updates(self) -> int:
        """Priorities that came for rows which are not there any more, and were dropped."""
        return sum(shard.stale_updates for shard in self.shards)

    def __str__(self) -> str:
        silent = [shard for shard in self.shards if not shard.answers]
        lines = [
            f"{len(self.shards)} shards, {self.writers} writers: {self.inserted} transitions inserted, {self.held} "
            f"held, {self.sampled} sampled",
            f"lost: {self.lost_in_shards} with shards ({self.restarts} restarts), {self.lost_in_flight} on the way, "
            f"{self.lost_updates} priorities on the way; {self.stale_updates} priorities too late",
        ]
        lines += [f"shard {shard.shard} does not answer; it was last on {shard.where}" for shard in silent]
        lines += [
            f"shard {shard.shard} was restarted {shard.restarts} times: {shard.lost} transitions lost, "
            f"{shard.restored} restored{', ' + shard.said if shard.said else ''}; now on {shard.where}"
            for shard in self.shards
            if shard.restarts
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class QueueReport:
    """A queue of rollouts: ``put = served + stale + lost + waiting``.

    Attributes:
        put: Rollouts that came.
        served: Rollouts that learners got.
        stale: Rollouts dropped because they were older than ``max_staleness`` versions.
        lost: Rollouts that were gone before a learner had them: with the process that made them, or with the queue's
            own actor.
        waiting: Rollouts in the queue, or on their way to a learner.
        capacity: Rollouts that the queue has room for.
        version: The newest version that was published.
        restarts: How often the queue's actor was started again.
    """

    put: int
    served: int
    stale: int
    lost: int
    waiting: int
    capacity: int
    version: int
    restarts: int

    def __str__(self) -> str:
        return (
            f"{self.put} rollouts put, {self.served} served, {self.waiting} of {self.capacity} waiting; {self.stale} "
            f"dropped as stale, {self.lost} lost ({self.restarts} restarts of the queue); version {self.version}"
        )
