"""Replay that several write at once, in this process or in others, and that a rate limit may hold back."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rlstore.engine.checks import check_name
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import InvalidInputError, PeerLostError, WaitTimeoutError
from rlstore.replay.base import ReplayBase
from rlstore.replay.prepare import Drawn
from rlstore.replay.writer import ReplayWriter, count_of, writing_part

_SWEEP_SECONDS = 0.5  # between two looks at whether the writers live
_FIRST_SECONDS = 0.01  # between two looks for the first row, which is counted and not yet there


class SharedReplay(ReplayBase):
    """Replay whose lanes can be handed to writers; see :meth:`writer`."""

    _swept = 0.0
    _had_writers = False  # since this storage itself last added

    # ---------------------------------------------------------------------------------------------- writers

    def writer(self, lanes: int | range | None = None, name: str | None = None) -> ReplayWriter:
        """A handle that adds the steps of some environments, while this storage samples.

        With ``memory="shared"`` it can be given to other processes, forked or spawned or any others of this machine
        and user: it is pickled. What a writer adds can be drawn as soon as it is there whole. Nobody waits for a lock,
        and a batch never holds a row that was overwritten while it was read. If a writer dies, what it had finished
        stays, the episode that it was in is cut off there, and its environments are free for another writer.

        While there are writers, ``add`` of the storage itself is refused. In other memory than "shared" writers are for
        threads of this process: they wait while a batch is read, and no batch is prepared ahead.

        Args:
            lanes: The environments that it alone adds: a range, the next free ones of a number, or (None) all.
            name: What errors and warnings call it.
        """
        ring, control = self._ring_of(), self._controlled()
        check_name("writer()", name)
        if getattr(self, "save_snapshot", False):
            raise InvalidInputError("save_snapshot keeps the episodes of one writer; it does not go with writer()")
        part = control.free_lanes(lanes)
        if self._ahead is not None and not ring.is_shared:
            self._ahead.clear()
        self._had_writers = True
        writing = writing_part(type(self), self._fields, ring.part(part))
        return ReplayWriter(type(self), writing, control, part, name, self.timeout)

    @property
    def lost_writers(self) -> int:
        """Writers that died, and whose environments were taken back."""
        if self._control is None:
            return 0
        self._sweep()
        return self._control.peers.lost_count("writer")

    def _controlled(self) -> LaneControl:
        if self._control is None:
            self._control = LaneControl(self._ring_of().lanes, shared=self._ring_of().is_shared)
        return self._control

    def _allocate(self, num_envs: int) -> None:
        if self._control is not None and self._control.has_writers:
            raise InvalidInputError("the size cannot change while there are writers; close them. Nothing was changed.")
        self._control = None
        super()._allocate(num_envs)
        limit = self._options.get("rate_limit")
        if limit is not None:
            self.set_rate_limit(limit)

    def _sweep(self) -> None:
        """Find writers that died, and take their lanes back."""
        control, ring = self._controlled(), self._ring_of()
        self._swept = time.monotonic()
        control.peers.sweep(lambda dead: control.reclaim(dead, ring.recover))
        # Those that another process found and put in order are told of here as well.
        new = [peer for peer in control.peers.lost("writer") if peer not in control.mourned]
        control.mourned.update(new)
        for peer in new:
            warnings.warn(
                f"the {control.peers.describe(peer)} of this {type(self).__name__} died. What it had finished is kept, "
                "its episodes are cut off there, and its environments are free for another writer.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _catch_up(self) -> None:
        """Take in what writers have added."""
        control, ring = self._control, self._replay
        if control is None or ring is None or self._closed:
            return
        if time.monotonic() - self._swept > _SWEEP_SECONDS:
            self._sweep()
        ring.catch_up()
        self._follow()
        while ring.is_shared and (lanes := ring.overrun()) is not None:
            # Episodes were looked up in rows that were overwritten at that moment.
            self._forget(lanes)
            ring.catch_up()
            self._follow()
        self._added = max(self._added, int(ring.written.sum()) // ring.lanes)

    def _forget(self, lanes: Tensor) -> None:
        """What is known of the rows of some lanes may be wrong."""

    # ---------------------------------------------------------------------------------------------- the limit

    def set_rate_limit(self, limit: RateLimit | None) -> None:
        """Change the limit on samples for each insert, while others run; None lets everything go ahead.

        It holds from now on: what was added and sampled before counts as in balance.
        """
        if limit is not None and not isinstance(limit, RateLimit):
            raise InvalidInputError(f"rate_limit is {limit!r}; give a rlstore.RateLimit, or None. Nothing was changed.")
        if limit is None:
            self._controlled().limiter.set(None)
            return
        at_once = self.batch_size * (1 + self.num_workers)  # the first call draws the batches ahead too
        self._controlled().limiter.begin(limit.resolved(self._ring_of().lanes, at_once))

    @property
    def rate_limit(self) -> RateLimit | None:
        """The limit on samples for each insert that holds now."""
        return None if self._control is None else self._control.limiter.limit

    def _put(self, values: tuple[Any, ...]) -> None:
        control = self._control
        if control is None:
            super()._put(values)
            return
        self._require_no_writers()
        lanes, leaves = self._ring_of().lanes, len(self._fields.leaves)
        count = count_of(values[2 * leaves + len(self._fields.columns) + 2], lanes)
        if not control.limiter.insert(count, self.timeout):
            raise self._late("added", "sampled")
        before = int(self._ring_of().written.sum())
        try:
            super()._put(values)
        finally:
            left_out = count - (
                int(self._ring_of().written.sum()) - before
            )  # all if it was refused; reset steps if not
            if left_out:
                control.limiter.count_inserts(-left_out)

    def _count_slice(self, rows: int) -> None:
        """Rows came that nobody had to wait for; nor has anybody to wait because of them."""
        if self._control is None:
            return
        limiter, limit = self._control.limiter, self._control.limiter.limit
        limiter.count_inserts(rows)
        if limit is not None:
            limiter.begin(limit)

    def _require_no_writers(self) -> None:
        control = self._control
        if control is not None and control.has_writers:
            self._sweep()
            if control.has_writers:
                raise InvalidInputError(
                    "the environments of this storage are added by its writers; add through one of them, or close "
                    "them. Nothing was written."
                )
        if self._had_writers:
            self._had_writers = False
            self._ring_of().catch_up()

    @property
    def _is_apart(self) -> bool:
        """True if writers overwrite what this process reads, with no rows to spare: both must not go on at once."""
        return self._control is not None and not self._ring_of().is_shared and self._control.has_writers

    @property
    def _prepares_ahead(self) -> bool:
        return super()._prepares_ahead and not self._is_apart

    def _take(self, size: int) -> tuple[Drawn, tuple[Tensor, ...]]:
        if not self._is_apart:
            return super()._take(size)
        self._admit(size)  # it may wait for the writers
        with self._paused():
            drawn = self._draw_admitted(size)
            return self._finished(drawn, self._prepare(drawn))

    def _draw_checked(self, size: int) -> Drawn:
        if self._control is None:
            return super()._draw_checked(size)
        self._admit(size)
        return self._draw_admitted(size)

    def _admit(self, size: int) -> None:
        """Wait until a batch of ``size`` may be drawn, and take in what was added."""
        self._catch_up()
        limit = self._controlled().limiter.limit
        if limit is not None:
            self._wait_to_sample(size, limit)

    def _draw_admitted(self, size: int) -> Drawn:
        limiter = self._controlled().limiter
        was_counted = limiter.is_on
        try:
            return super()._draw_checked(size)
        except BaseException:
            if was_counted:
                limiter.take_back_samples(size)
            raise

    def _may_draw_ahead(self, size: int) -> bool:
        limit = None if self._control is None else self._control.limiter.limit
        if self._control is None or limit is None:
            return True
        limiter = self._control.limiter
        return limit.allows_sample(limiter.inserted, limiter.sampled, size)

    def _wait_to_sample(self, size: int, limit: RateLimit) -> None:
        control = self._controlled()
        if size > (limit.tolerance or math.inf):
            raise InvalidInputError(
                f"a batch of {size} is more than the rate limit's tolerance of {limit.tolerance}; both sides could "
                "wait for each other. Nothing was drawn."
            )
        lost, end = control.peers.lost_count("writer"), time.monotonic() + self.timeout
        while control.limiter.sample(size, max(end - time.monotonic(), 0.0), self._sweep):
            self._catch_up()
            if self._ring_of().size or not control.has_writers or time.monotonic() > end:
                return
            # Inserts are counted before they are written: the very first may not be there yet.
            control.limiter.take_back_samples(size)
            control.limiter.await_insert(_FIRST_SECONDS)
        died = control.peers.lost("writer")
        if control.peers.lost_count("writer") > lost or (died and not control.peers.here("writer")):
            names = ", ".join(control.peers.describe(peer) for peer in died[-3:])
            raise PeerLostError(f"nothing was added for {self.timeout} seconds, and these writers died: {names}")
        raise self._late("sampled", "added")

    def _late(self, done: str, awaited: str) -> WaitTimeoutError:
        limiter, peers = self._controlled().limiter, self._controlled().peers
        here = ", ".join(peers.describe(peer) for peer in peers.here("writer")) or "none"
        return WaitTimeoutError(
            f"the rate limit let nothing more be {done} for {self.timeout} seconds: {limiter.inserted} are added and "
            f"{limiter.sampled} sampled, at {limiter.limit}. More has to be {awaited} first. Writers that live: {here}."
        )

    # ---------------------------------------------------------------------------------------------- the whole

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Hold all writers back, and take in what they have added."""
        if self._control is None or self._closed:
            yield
            return
        with self._control.pause(self.timeout, self._sweep):
            self._catch_up()
            yield

    def __len__(self) -> int:
        """Transitions held now, over all environments."""
        self._catch_up()
        return super().__len__()

    def reset(self) -> None:
        """Make the storage empty."""
        with self._paused():
            super().reset()
            if self._control is not None:
                self._control.limiter.set_counts(0, 0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save everything that is needed to go on exactly; writers wait meanwhile. See :meth:`Storage.save`."""
        with self._paused():
            super().save(path)

    def close(self) -> None:
        """End the thread that prepares batches, let go of a mapped folder, and let no writer add any more.

        The storage cannot be used any more.
        """
        if self._control is not None:
            self._control.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no writers, and goes on counting for itself.
        return {**self.__dict__, "_control": None, "limit state": self._limit_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        limited = state.pop("limit state")
        self.__dict__.update(state)
        if not self._closed:
            self._set_limit_state(limited)

    def _limit_state(self) -> list[Any] | None:
        """The limit that holds and its counts, as plain values."""
        if self._control is None:
            return None
        limiter, limit = self._control.limiter, self._control.limiter.limit
        rule = None if limit is None else [limit.samples_per_insert, limit.min_size, limit.tolerance]
        return [limiter.inserted, limiter.sampled, rule]

    def _set_limit_state(self, state: list[Any] | None) -> None:
        if state is None:
            return
        inserted, sampled, rule = state
        self._controlled().limiter.set_counts(inserted, sampled)
        self._controlled().limiter.set(None if rule is None else RateLimit(*rule))
