"""ReplayWriter: the steps of some environments of a replay storage, added from anywhere on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from torch import Tensor

from rlstore.engine.memory.backing import Backing
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError, StorageClosedError, WaitTimeoutError
from rlstore.replay.fields import ReplayFields

_LOOK_SECONDS = 1.0  # between two looks at whether the storage's maker lives


class ReplayWriter:
    """Adds the steps of some environments of a storage; made by :meth:`ReplayStorage.writer`.

    It belongs to one process at a time: the one that made it, or the one that it is given to, forked or unpickled, from
    its first ``add`` there on. It can be given away again when that process has ended.

    One that was used gives its environments back when it is closed, or when nothing holds it any more. Those of one
    that was made and never used are kept for the process that it was given to; another writer gets them only if no
    others are free, or if it names them.
    """

    def __init__(
        self, kind: type[Any], part: Any, control: LaneControl, lanes: range, name: str | None, timeout: float
    ) -> None:
        self._kind, self._part, self._control = kind, part, control
        self.lanes, self.name, self._timeout = lanes, name, timeout
        self._process, self._closed, self._looked, self._given_by = 0, False, 0.0, 0
        self._begin(used=False)

    def _begin(self, *, used: bool) -> None:
        """Become the writer of the lanes, in this process."""
        control, ring = self._control, self._part._replay
        peer = control.peers.join("writer", self.name)
        try:
            control.claim(self.lanes, peer, ring.whole.recover, given_by=self._given_by)
        except InvalidInputError:
            control.peers.leave(peer)
            raise
        if self._given_by:
            control.peers.leave(self._given_by)
        self._given_by, self._process, self._used = peer, os.getpid(), [used]
        # Also run where a process of multiprocessing ends, which leaves out what waits for the end of the interpreter.
        self._end = util.Finalize(self, _finish, args=(control, ring.whole, peer, self._used), exitpriority=10)

    @property
    def num_envs(self) -> int:
        """Environments whose steps it adds."""
        return len(self.lanes)

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
        *,
        mask: Any = None,
        **more: Any,
    ) -> None:
        """Add one step of its environments, ``[num_envs, ...]``; as the storage's own ``add`` otherwise.

        It waits while the storage's rate limit, or a pause for saving, holds it back.

        Raises:
            WaitTimeoutError: (a TimeoutError) if it was held back longer than the storage's ``timeout``.
            PeerLostError: (a ConnectionError) if the process that made the storage is gone.
            StorageClosedError: If the storage was closed.
        """
        count = count_of(mask, len(self.lanes))
        values = (observations, actions, rewards, terminateds, truncateds, infos, next_observations)
        self._write(count, lambda part: part.add(*values, mask=mask, **more))

    def insert_transition(self, sample: Any) -> None:
        """Add one step of its environments, in the words of the vocabulary (see :mod:`rlstore.storage`)."""
        mask = sample.get("masks") if hasattr(sample, "get") else None
        self._write(count_of(mask, len(self.lanes)), lambda part: part.insert_transition(sample))

    def _write(self, count: int, put: Callable[[Any], None]) -> None:
        if self._closed:
            raise StorageClosedError("this writer is closed; nothing was written")
        if self._process != os.getpid():
            self._begin(used=True)
        self._used[0] = True
        control, first = self._control, self.lanes.start
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            control.check_maker()
        if not control.limiter.insert(count, self._timeout, self._look):
            limiter = control.limiter
            raise WaitTimeoutError(
                f"the rate limit let nothing more be added for {self._timeout} seconds: {limiter.inserted} are added "
                f"and {limiter.sampled} sampled, at {limiter.limit}. The {control.describe_maker()} lives and has to "
                "sample more first. Nothing was written."
            )
        written: Tensor = self._part._replay.written
        before = int(written.sum())
        try:
            with control.turn:
                control.enter(first, self._given_by, self._timeout)
                try:
                    put(self._part)
                finally:
                    control.leave(first)
        finally:
            left_out = count - (int(written.sum()) - before)  # all if it was refused; reset steps if not
            if left_out:
                control.limiter.count_inserts(-left_out)

    def _look(self) -> None:
        self._control.check_maker()
        if self._control.is_closed:
            raise StorageClosedError("the storage was closed; nothing was written")

    def close(self) -> None:
        """Give the environments back; an episode that goes on is cut off. It cannot add any more."""
        self._closed = True
        if self._process == os.getpid():
            self._used[0] = True
            self._end()

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        envs = f"{len(self.lanes)} envs from {self.lanes.start}"
        return f"ReplayWriter({name}{envs} of a {self._kind.__name__}{': closed' if self._closed else ''})"

    def __enter__(self) -> ReplayWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        ring = self._part._replay
        if not ring.backing.segment or self._control.segment is None:
            raise InvalidInputError(
                f"a writer of a {self._kind.__name__} with memory={ring.backing.kind!r} works in its own process alone;"
                ' give the storage memory="shared"'
            )
        recipe = (ring.leaves, ring.columns, ring.steps, ring.whole.lanes, ring.autoreset)
        given = (self.lanes, self.name, self._timeout, self._given_by, self._closed)
        segments: tuple[SharedMemory, SharedMemory] = (ring.backing.segment, self._control.segment)
        return {"kind": self._kind, "fields": self._part._fields, "ring": recipe, "given": given, "segments": segments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._kind = state["kind"]
        self.lanes, self.name, self._timeout, self._given_by, self._closed = state["given"]
        leaves, columns, steps, lanes, autoreset = state["ring"]
        blocks, board = state["segments"]
        ring = EpisodeRing(leaves, columns, steps, lanes, Backing.attach(self._kind.__name__, blocks), autoreset)
        self._part = writing_part(self._kind, state["fields"], ring.part(self.lanes))
        self._control = LaneControl(lanes, board)
        self._process, self._looked = 0, 0.0


def count_of(mask: Any, lanes: int) -> int:
    """The transitions of a step with a mask; one that is none is refused by whoever reads it."""
    return lanes if mask is None else min(int(as_tensor(mask, "mask").count_nonzero()), lanes)


def writing_part(kind: type[Any], fields: ReplayFields, ring: EpisodeRing) -> Any:
    """A storage of a class that can do nothing but add to some lanes."""
    part = object.__new__(kind)
    part.__dict__.update(_fields=fields, _replay=ring, device=ring.device, _added=0, _warned=False, _follow=_nothing)
    return part


def _nothing() -> None:
    """What a part that only writes has to follow."""


def _finish(control: LaneControl, ring: EpisodeRing, peer: int, used: list[bool]) -> None:
    """End a writer in good order: cut its episodes off, give its lanes back."""
    if not used[0]:
        control.let_go(peer)
        return
    control.give_back(peer, ring.recover)
    control.peers.leave(peer)
