"""Episodes appended to the lanes of a ring, each to the one with the fewest rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlstore.engine.guard import Guard
from rlstore.engine.rows.appender import WRITTEN_WITH_BREAK, Appender, Follower
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.step_fields import StepFields
from rlstore.replay.kept_episodes import KeptEpisodes
from rlstore.replay.loading.steps import Steps

_TOGETHER_BYTES = 1 << 18  # short episodes are written together, until there are so many bytes of them


class Lanes:
    """Appends whole episodes, many steps in one call of a kernel.

    An episode that a lane has begun is cut off before, and what was appended is afterwards: neither continues the
    other. The guard is free between two calls of the kernel.

    Args:
        ring: The ring.
        fields: What a step consists of.
        guard: That of the storage.
        appender: That of the storage: it knows what rows depend on, and counts steps.
        sampler: What draws from the ring.
        kept: Where finished episodes are written to disk; None if they are not.
        permit: Raises if nothing may be added.
        counted: Called with the number of rows that were written.

    Attributes:
        takes_alone: Whether it takes episodes one by one.
        copies: Whether values are copied to a device before they are written.
        broken: Steps that the observations of the next did not continue.
    """

    def __init__(
        self,
        ring: EpisodeRing,
        fields: StepFields,
        guard: Guard,
        appender: Appender,
        sampler: Follower,
        kept: KeptEpisodes | None,
        permit: Callable[[], None],
        counted: Callable[[int], None],
    ) -> None:
        self._ring, self._fields, self._guard, self._appender = ring, fields, guard, appender
        self._sampler, self._kept, self._permit, self._counted = sampler, kept, permit, counted
        self._rows: list[int] = ring.held().tolist()
        self._parts: dict[int, Appender] = {}
        self._waiting: dict[int, list[Steps]] = {}
        self._bytes = dict.fromkeys(range(ring.lanes), 0)  # of what waits
        self._written = 0
        # Where each goes to the lane with the fewest rows, or to the disk before it can be overwritten.
        self.takes_alone = kept is not None or ring.lanes > 1
        self.copies = ring.device.type != "cpu"
        self.broken = 0

    def append(self, steps: Steps) -> None:
        """Append whole episodes, which fit; they may wait for others until :meth:`flush`."""
        lane = self._rows.index(min(self._rows))
        self._rows[lane] += steps.count
        waiting, nbytes = self._waiting.setdefault(lane, []), steps.nbytes
        if waiting and (steps.lacks_finals != waiting[0].lacks_finals or nbytes > _TOGETHER_BYTES):
            self._flush(lane)
        waiting.append(steps)
        self._bytes[lane] += nbytes
        # Nothing may follow the end of an episode that no flag tells of.
        if self._kept is not None or not steps.is_over or self._bytes[lane] > _TOGETHER_BYTES:
            self._flush(lane)

    def flush(self) -> None:
        """Write what waits."""
        for lane in self._waiting:
            self._flush(lane)

    def _flush(self, lane: int) -> None:
        waiting = self._waiting[lane]
        if waiting:
            steps = Steps.merged(waiting)
            waiting.clear()
            self._bytes[lane] = 0
            with self._guard:
                self._appender.require_open()
                self._permit()
                self._write(self._part(lane), steps)

    def _write(self, part: Appender, steps: Steps) -> None:
        ring = part.ring
        ring.require_room(len(steps))
        if self._ring.is_shared:
            self._ring.settle_holds()  # a part of shared memory does not ask before it overwrites a row
        if part.settle is not None:
            part.settle()
        before, ended = int(ring.written), int(ring.after_end)
        ring.cut_off()
        self._follow()
        ring.make_room()  # else the kernel would look at all values before it asks for it
        ring.require_episodes(steps.episodes)
        tensors = partial(steps.tensors, ring.device)
        outcome = part.write_steps(steps.values(), len(steps), tensors, resumed=True)
        if outcome == WRITTEN_WITH_BREAK:
            self.broken += steps.count_breaks()
        ring.cut_off()
        if ended >= 0 and int(ring.written) - before < ring.kept:
            ring.after_end.fill_(ended)  # a reset step that is still to come follows the episode that ended before
        self._follow()
        self._count(steps.count)

    def _count(self, rows: int) -> None:
        """So many rows were written."""
        lanes, before, self._written = self._ring.lanes, self._written, self._written + rows
        self._appender.added += self._written // lanes - before // lanes
        self._counted(rows)

    def _part(self, lane: int) -> Appender:
        part = self._parts.get(lane)
        if part is None:
            part = self._parts[lane] = Appender(self._ring.part(range(lane, lane + 1)), self._fields, self._guard)
            part.settle = self._appender.settle
        return part

    def _follow(self) -> None:
        """Take in what was written."""
        self._ring.catch_up()
        self._sampler.follow()
        if self._kept is not None:
            self._kept.follow()
