"""Episodes appended to the lanes of a ring, each to the one with the fewest rows."""

from __future__ import annotations

from functools import partial

from rlstore.engine.guard import Guard
from rlstore.engine.rows.appender import Appender, Follower
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.step_fields import StepFields
from rlstore.replay.kept_episodes import KeptEpisodes
from rlstore.replay.loading.steps import Steps


class Lanes:
    """Appends whole episodes, whose steps a kernel writes all at once.

    An episode that a lane has begun is cut off before, and what was appended is afterwards: neither continues the
    other.

    Args:
        ring: The ring.
        fields: What a step consists of.
        guard: That of the storage.
        appender: That of the storage: it knows what rows depend on, and counts steps.
        sampler: What draws from the ring.
        kept: Where finished episodes are written to disk; None if they are not.
    """

    def __init__(
        self,
        ring: EpisodeRing,
        fields: StepFields,
        guard: Guard,
        appender: Appender,
        sampler: Follower,
        kept: KeptEpisodes | None,
    ) -> None:
        self._ring, self._fields, self._guard, self._appender = ring, fields, guard, appender
        self._sampler, self._kept = sampler, kept
        self._rows: list[int] = ring.held().tolist()
        self._parts: dict[int, Appender] = {}
        self._written = 0
        row_bytes = max(ring.records.shape[2] + sum(ring.blocks[name][0, 0].nbytes for name in ring.apart), 1)
        # One at a time where each goes to the lane with the fewest rows, or to the disk before it can be overwritten.
        self.most = 1 if kept is not None or ring.lanes > 1 else max(_PIECE_BYTES // row_bytes, 1)

    def append(self, steps: Steps) -> None:
        """Append whole episodes, for a caller that has the guard; all values fit, or nothing is written."""
        lane = min(range(len(self._rows)), key=self._rows.__getitem__)
        ring, part = self._ring, self._part(lane)
        part.ring.require_room(len(steps))
        if ring.is_shared:
            ring.settle_holds()  # a part of shared memory does not ask before it overwrites a row
        if part.settle is not None:
            part.settle()
        part.ring.cut_off()
        self._follow()
        fit = partial(steps.fit, self._fields, ring.device)
        part.write_steps(steps.values(), len(steps), fit, resumed=True)
        part.ring.cut_off()
        self._follow()
        self._rows[lane] += steps.count
        before, self._written = self._written, self._written + steps.count
        self._appender.added += self._written // ring.lanes - before // ring.lanes

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


_PIECE_BYTES = (
    4 << 20
)  # of rows that are written at a time: values of another dtype are converted in memory of their own
