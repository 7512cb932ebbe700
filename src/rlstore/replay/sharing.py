"""Rows that several write at once, in this process or in others, and a rate limit that holds both sides back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

from rlstore.engine.calls import warn_caller
from rlstore.engine.checks import check_count, check_name
from rlstore.engine.guard import Guard, as_block, released
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.appender import Appender
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError, PeerLostError, WaitTimeoutError
from rlstore.replay.samplers import Sampler
from rlstore.replay.writer import ReplayWriter, count_of

_SWEEP_SECONDS = 0.5  # between two looks at whether the writers live
_FIRST_SECONDS = 0.01  # between two looks for the first row, which is counted before it is written


class Sharing:
    """The writers of a storage, its rate limit, and pauses.

    Args:
        owner: The storage's class name, for errors.
        ring: The rows.
        sampler: What has to follow what is written.
        timeout: Seconds after which a wait is given up.
        guard: That of the storage. All methods are called with it; waits release it.

    Attributes:
        control: Which lanes have writers.
        is_own: False if the memory is that of another process.
    """

    is_own = True

    def __init__(self, owner: str, ring: EpisodeRing, sampler: Sampler, timeout: float, guard: Guard) -> None:
        self.control = LaneControl(ring.lanes, guard=None if ring.is_shared else guard)
        self._guard = guard
        self._owner, self._ring, self._sampler, self._timeout = owner, ring, sampler, timeout
        self._swept = 0.0
        self._had_writers = False  # since the storage itself last added

    # ---------------------------------------------------------------------------------------------- writers

    def writer(self, fields: StepFields, lanes: int | range | None, name: str | None) -> ReplayWriter:
        """A writer of some lanes."""
        check_name("writer()", name)
        control, ring = self.control, self._ring
        control.peers.sweep(lambda dead: control.reclaim(dead, ring.recover))  # their lanes are free
        free = control.free_lanes(lanes)
        self._had_writers = True
        part = Appender(ring.part(free), fields, control.turn, whole=None if ring.is_shared else self._sampler)
        return ReplayWriter(self._owner, part, control, free, name, self._timeout)

    @property
    def lost_writers(self) -> int:
        """Writers that died, as far as :meth:`sweep` has found them."""
        return self.control.peers.lost_count("writer")

    def sweep(self) -> None:
        """Find dead writers, and reclaim their lanes."""
        control, ring = self.control, self._ring
        with self._guard:
            self._swept = time.monotonic()
            control.peers.sweep(lambda dead: control.reclaim(dead, ring.recover))
            # Those that another process found and reclaimed are reported here as well.
            new = [peer for peer in control.peers.lost("writer") if peer not in control.reported]
            control.reported.update(new)
        for peer in new:
            warn_caller(
                f"the {control.peers.describe(peer)} of this {self._owner} died. What it had finished is kept, "
                "its episodes are cut off there, and its environments are free for another writer."
            )

    def catch_up(self) -> None:
        """Take in what writers have added."""
        ring = self._ring
        if time.monotonic() - self._swept > _SWEEP_SECONDS:
            self.sweep()
        ring.catch_up()
        self._sampler.follow()
        while ring.is_shared and (lanes := ring.overrun()) is not None:
            # Episodes were looked up in rows that were overwritten at that moment.
            self._sampler.forget(lanes)
            ring.catch_up()
            self._sampler.follow()

    def limit(self) -> bool:
        """Keep writers of other processes from rows that are still to be saved; True if there may be such writers.

        They cannot copy such a row before they overwrite it, as the storage itself does.
        """
        holds, ring = self._ring.holds, self._ring
        if ring.is_shared:
            self.control.limit(np.minimum.reduce([hold.reach() for hold in holds]) if holds else None)
        return ring.is_shared and self.control.has_writers

    def require_own(self) -> None:
        """Refuse what only the process can do that the memory belongs to."""

    def require_no_writers(self) -> None:
        """Refuse what only a storage without writers can do."""
        if self.control.has_writers:
            self.sweep()
            if self.control.has_writers:
                raise InvalidInputError(
                    "the environments of this storage are added by its writers; add through one of them, or close "
                    "them. Nothing was written."
                )
        if self._had_writers:
            self._had_writers = False
            self._ring.catch_up()

    # ---------------------------------------------------------------------------------------------- adding

    def append(self, appender: Appender, step: tuple[Any, ...], mask: Any) -> None:
        """Append a step of the storage itself as soon as the rate limit lets it."""
        self.require_no_writers()
        count, limiter = count_of(mask, self._ring.lanes), self.control.limiter
        with released(self._guard):  # others have to sample meanwhile
            may_insert = limiter.insert(count, self._timeout)
        if not may_insert:
            raise self._late("added", "sampled")
        before = self._ring.total_written
        try:
            self.require_no_writers()  # another thread may have made one meanwhile
            appender.append(*step)
        finally:
            count -= self._ring.total_written - before
            if count:  # inserts that were counted and did not happen: the step was refused, or some were resets
                limiter.count_inserts(-count)

    def count_slice(self, rows: int) -> None:
        """Rows were added without a wait; they make neither side wait for the other."""
        limiter, limit = self.control.limiter, self.control.limiter.limit
        limiter.count_inserts(rows)
        if limit is not None:
            limiter.begin(limit)

    # ---------------------------------------------------------------------------------------------- sampling

    @property
    def may_prefetch(self) -> bool:
        """False if threads of this process write rows, in memory where nothing may be read meanwhile."""
        return self._ring.is_shared or not self.control.has_writers

    def admit(self, count: int) -> None:
        """Wait until a batch of ``count`` may be drawn, and take in what was added."""
        self.catch_up()
        limit = self.control.limiter.limit
        if limit is not None:
            self._wait_to_sample(count, limit)

    def would_admit(self, count: int) -> bool:
        """Whether :meth:`admit` would not wait."""
        limiter, limit = self.control.limiter, self.control.limiter.limit
        return limit is None or limit.allows_sample(limiter.inserted, limiter.sampled, count)

    def take_back(self, count: int) -> None:
        """A batch that was admitted was not drawn."""
        if self.control.limiter.is_on:
            self.control.limiter.take_back_samples(count)

    def _wait_to_sample(self, count: int, limit: RateLimit) -> None:
        control = self.control
        if count > (limit.tolerance or math.inf):
            raise InvalidInputError(
                f"a batch of {count} is more than the rate limit's tolerance of {limit.tolerance}; both sides could "
                "wait for each other. Nothing was drawn."
            )
        lost, end = control.peers.lost_count("writer"), time.monotonic() + self._timeout
        while self._admits(count, max(end - time.monotonic(), 0.0)):
            self.catch_up()
            if self._ring.size or not control.has_writers or time.monotonic() > end:
                return
            # Inserts are counted before they are written: the very first may not be there yet.
            control.limiter.take_back_samples(count)
            with released(self._guard):
                control.limiter.await_insert(_FIRST_SECONDS)
        died = control.peers.lost("writer")
        if control.peers.lost_count("writer") > lost or (died and not control.peers.here("writer")):
            names = ", ".join(control.peers.describe(peer) for peer in died[-3:])
            raise PeerLostError(f"nothing was added for {self._timeout} seconds, and these writers died: {names}")
        raise self._late("sampled", "added")

    def _admits(self, count: int, seconds: float) -> bool:
        """Wait until the limit lets ``count`` be sampled, and count them; False after so many seconds."""
        with released(self._guard):  # others have to add meanwhile
            return self.control.limiter.sample(count, seconds, self.sweep)

    def _late(self, done: str, awaited: str) -> WaitTimeoutError:
        limiter, peers = self.control.limiter, self.control.peers
        here = ", ".join(peers.describe(peer) for peer in peers.here("writer")) or "none"
        return WaitTimeoutError(
            f"the rate limit let nothing more be {done} for {self._timeout} seconds: {limiter.inserted} are added and "
            f"{limiter.sampled} sampled, at {limiter.limit}. More has to be {awaited} first. Writers that live: {here}."
        )

    @as_block
    def paused(self) -> Iterator[None]:
        """Hold the writers of other processes back, and take in what was added."""
        with self.control.pause(self._timeout, self.sweep) if self._ring.is_shared else nullcontext():
            self.catch_up()
            yield

    # ---------------------------------------------------------------------------------------------- the limit

    def set_limit(self, limit: RateLimit | None, samples: int) -> None:
        """Change the limit from now on; ``samples`` is the most that one call draws."""
        if limit is None:
            self.control.limiter.set(None)
        else:
            self.control.limiter.begin(limit.resolved(self._ring.lanes, samples))

    def limit_state(self) -> list[Any]:
        """The limit and its counts, as plain values."""
        limiter, limit = self.control.limiter, self.control.limiter.limit
        rule = None if limit is None else [limit.samples_per_insert, limit.min_size, limit.tolerance]
        return [limiter.inserted, limiter.sampled, rule]

    def set_limit_state(self, state: list[Any]) -> None:
        """Put back what :meth:`limit_state` returned."""
        inserted, sampled, rule = state
        for name, count in (("inserted", inserted), ("sampled", sampled)):
            check_count(self._owner, name, count)
        self.control.limiter.set_counts(inserted, sampled)
        self.control.limiter.set(None if rule is None else RateLimit(*rule))
