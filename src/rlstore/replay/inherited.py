"""Storages in a forked child, whose shared or mapped memory is that of the process they were forked from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NoReturn

from rlstore.engine.guard import as_block, new_guard
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError
from rlstore.replay.sharing import Sharing
from rlstore.replay.writer import ReplayWriter


class Inherited(Sharing):
    """Refuses every change, and lets what was in shared memory at the fork be sampled until it changes.

    Mapped memory is not sampled either: it has no spare rows, and a row could be overwritten while it is read.

    Args:
        owner: The storage's class name, for errors.
        ring: The rows.
    """

    is_own = False

    def __init__(self, owner: str, ring: EpisodeRing) -> None:
        self._owner, self._ring = owner, ring
        self.control = LaneControl(ring.lanes, guard=new_guard())  # without any writer, and without a limit
        self._parent, self._at_fork = os.getppid(), ring.counters[:2].clone()

    def require_own(self) -> NoReturn:
        """Refuse a change."""
        kind = self._ring.backing.kind
        where = "" if kind == "shared" else 'there, or make the storage with memory="shared" and add '
        raise InvalidInputError(
            f"this process was forked, and the {kind} memory of this {self._owner} belongs to process {self._parent}; "
            f"add {where}through a handle that its writer() made there. A copy made before the fork (copy.deepcopy) is "
            "the child's own. Nothing was changed."
        )

    def require_no_writers(self) -> None:
        """Refuse to add."""
        self.require_own()

    def writer(self, fields: StepFields, lanes: int | range | None, name: str | None) -> ReplayWriter:
        """Refused."""
        self.require_own()

    @as_block
    def paused(self) -> Iterator[None]:
        """Refused: the writers are the other process's."""
        yield self.require_own()

    def set_limit(self, limit: RateLimit | None, samples: int) -> None:
        """Refused."""
        self.require_own()

    def limit_state(self) -> list[Any]:
        """Refused, and so is a copy."""
        self.require_own()

    def admit(self, count: int) -> None:
        """A batch may be drawn from what has not changed."""
        self.catch_up()

    def catch_up(self) -> None:
        """Refuse to read what has changed since the fork."""
        if not self._ring.is_shared or not self._ring.counters[:2].equal(self._at_fork):
            raise InvalidInputError(
                f"this process was forked, and process {self._parent} may change the {self._ring.backing.kind} memory "
                f"of this {self._owner} while it is read here; sample there, or make a copy before the fork "
                "(copy.deepcopy). Nothing was drawn."
            )

    def sweep(self) -> None:
        """Nothing: the other process looks for dead writers."""

    @property
    def lost_writers(self) -> int:
        """The other process counts them."""
        return 0

    @property
    def may_prefetch(self) -> bool:
        """False: what has changed is found when a batch is drawn."""
        return False
