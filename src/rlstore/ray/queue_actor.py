"""The actor of a rollout queue. It holds references: rollouts go from their maker's node to the learner's."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlstore.errors import WaitTimeoutError
from rlstore.ray.calls import was_restarted
from rlstore.ray.reports import QueueReport


class Entry(NamedTuple):
    """A rollout in the queue."""

    ref: Any
    version: int


class Told(NamedTuple):
    """What every answer tells: the newest version, and how many rollouts were dropped as stale so far.

    Whoever calls repeats it, so that a queue that was started again knows it.
    """

    version: int
    stale: int


@dataclass
class _Learner:
    served: int = 0
    lost: int = 0
    outstanding: int = 0  # handed out, and neither


class QueueActor:
    """The actor. If it is lost Ray starts it again; the rollouts that were in it are lost, and the counts are taken up.

    Callers say with each call how many rollouts they have put or got so far, and what they were last told.

    Args:
        capacity: Rollouts that it has room for.
        max_staleness: How many versions a rollout may be behind the newest; None for any number.
    """

    def __init__(self, capacity: int, max_staleness: int | None) -> None:
        self._capacity, self._max_staleness = capacity, max_staleness
        self._entries: deque[Entry] = deque()
        self._told = Told(0, 0)
        self._put: dict[str, int] = {}
        self._learners: dict[str, _Learner] = {}
        self._changed = asyncio.Event()
        self._putters, self._takers = 0, 0
        self._restarts = int(was_restarted())

    async def put(self, maker: str, put: int, told: Told, refs: list[Any], version: int, seconds: float) -> Told:
        """Take a rollout in when there is room; one that is stale already is dropped."""
        self._hear(told)
        self._put[maker] = put
        end = time.monotonic() + seconds
        while not self._is_stale(version) and len(self._entries) >= self._capacity:
            if not await self._change(end):
                raise WaitTimeoutError(
                    f"the rollout queue has been full for {seconds:g} s: {len(self._entries)} of {self._capacity} wait "
                    f"for a learner; {len(self._learners)} learners were ever heard of"
                )
        self._put[maker] = put + 1
        if self._is_stale(version):
            self._drop(1)
        else:
            self._entries.append(Entry(refs[0], version))
        self._wake()
        return self._told

    async def take(self, learner: str, told: Told, count: int, seconds: float) -> tuple[list[Entry], Told]:
        """The oldest rollouts, at most ``count``, as soon as there is one."""
        self._hear(told)
        known = self._learners.setdefault(learner, _Learner())
        end = time.monotonic() + seconds
        while not self._entries:
            if not await self._change(end):
                raise WaitTimeoutError(
                    f"no rollout came within {seconds:g} s; {len(self._put)} processes have put rollouts so far"
                )
        taken = [self._entries.popleft() for _ in range(min(count, len(self._entries)))]
        known.outstanding += len(taken)
        self._wake()
        return taken, self._told

    async def confirm(self, learner: str, served: int, lost: int, stale: int, settled: int) -> None:
        """A learner has got so many rollouts in all, and so many of those it was given were gone.

        Of those it was given since it last confirmed, ``settled`` are accounted for, ``stale`` of them as dropped.
        """
        known = self._learners.setdefault(learner, _Learner())
        known.served, known.lost = max(served, known.served), max(lost, known.lost)
        known.outstanding = max(known.outstanding - settled, 0)
        self._drop(stale)

    async def give_back(self, learner: str, entries: list[Entry]) -> None:
        """A learner that is closed gives back what it had fetched ahead; it comes first again."""
        known = self._learners.setdefault(learner, _Learner())
        known.outstanding = max(known.outstanding - len(entries), 0)
        fresh = [entry for entry in entries if not self._is_stale(entry.version)]
        self._drop(len(entries) - len(fresh))
        self._entries.extendleft(reversed(fresh))
        self._wake()

    async def publish(self, version: int, told: Told) -> Told:
        """There is a newer policy: rollouts that are stale now make room."""
        self._hear(told._replace(version=max(version, told.version)))
        return self._told

    async def report(self, told: Told) -> QueueReport:
        """What the queue knows."""
        self._hear(told)
        put = sum(self._put.values())
        served = sum(learner.served for learner in self._learners.values())
        waiting = len(self._entries) + sum(learner.outstanding for learner in self._learners.values())
        return QueueReport(
            put=put,
            served=served,
            stale=self._told.stale,
            lost=max(put - served - self._told.stale - waiting, 0),
            waiting=waiting,
            capacity=self._capacity,
            version=self._told.version,
            restarts=self._restarts,
        )

    def _hear(self, told: Told) -> None:
        newer = told.version > self._told.version
        self._told = Told(max(told.version, self._told.version), max(told.stale, self._told.stale))
        if newer:
            fresh = deque(entry for entry in self._entries if not self._is_stale(entry.version))
            self._drop(len(self._entries) - len(fresh))
            self._entries = fresh
            self._wake()

    def _drop(self, count: int) -> None:
        self._told = self._told._replace(stale=self._told.stale + count)

    def _is_stale(self, version: int) -> bool:
        return self._max_staleness is not None and self._told.version - version > self._max_staleness

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, end: float) -> bool:
        """Wait until something has changed; False if the time is over."""
        try:
            await asyncio.wait_for(self._changed.wait(), max(end - time.monotonic(), 0.0))
        except asyncio.TimeoutError:
            return False
        return True
