"""ReplayWriter: the steps of some environments of a replay storage, added from anywhere on this machine."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import util
from typing import Any

from torch import Tensor

from rlstore.engine.guard import taken
from rlstore.engine.memory.backing import Backing
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.rows.appender import Appender
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.finals import final_of_next_step
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError, StorageClosedError, WaitTimeoutError
from rlstore.replay.vocabulary import check_sample, step_arguments, steps_at_once

_LOOK_SECONDS = 1.0  # between two looks at whether the process that made the storage lives


class ReplayWriter:
    """Appends the steps of some environments of a storage; created by :meth:`ReplayStorage.writer`.

    It belongs to one process at a time: the one that created it or, from its first ``add`` there, the one that it was
    passed to, forked or unpickled. It can be passed on again when that process has ended.

    Its environments are its own from the moment it is created until it is closed or garbage-collected, or its process
    ends. If it was passed to another process (pickled, or alive during a fork) and not used since, they stay reserved
    for that process after it was garbage-collected; another writer gets them then only if it requests them by number.
    """

    def __init__(
        self, kind: str, part: Appender, control: LaneControl, lanes: range, name: str | None, timeout: float
    ) -> None:
        self._kind, self._part, self._control = kind, part, control
        self.lanes, self.name, self._timeout = lanes, name, timeout
        self._process, self._closed, self._looked, self._given_by = 0, False, 0.0, 0
        self._begin()

    def _begin(self) -> None:
        """Become the writer of the lanes, in this process."""
        control, whole = self._control, self._part.ring.whole
        peer = control.peers.join("writer", self.name)
        try:
            control.claim(self.lanes, peer, whole.recover, given_by=self._given_by)
        except InvalidInputError:
            control.peers.leave(peer)
            raise
        if self._given_by:
            control.peers.leave(self._given_by)
        self._given_by, self._process, self._use = peer, os.getpid(), _Use()
        # Also run where a process of multiprocessing ends, which does not wait for the end of the interpreter.
        self._end = util.Finalize(self, _finish, args=(control, whole, peer, self._use), exitpriority=10)

    @property
    def num_envs(self) -> int:
        """The number of its environments."""
        return len(self.lanes)

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Mapping[str, Any] | None,
        next_observations: Any,
        *,
        mask: Any = None,
        priorities: Any = None,
        **extra: Any,
    ) -> None:
        """Add one step of its environments, ``[num_envs, ...]``; otherwise as the storage's own ``add``.

        It waits while the storage's rate limit, or a pause for saving, holds it back.

        Args:
            observations: What the agent saw, ``[num_envs, ...]``.
            actions: What it did, ``[num_envs, ...]``.
            rewards: What it got, ``[num_envs]``.
            terminateds: The episode really ended with this step, ``[num_envs]``.
            truncateds: The episode was cut off after this step, ``[num_envs]``.
            infos: May hold ``final_obs`` or ``final_observation``, read where an episode ended.
            next_observations: What the environment showed after the step.
            mask: False for environments that take no part in this step, bool ``[num_envs]``.
            priorities: The first priorities of these transitions, ``[num_envs]``; not with ``memory="shared"``.
            **extra: The storage's extra fields, and ``hidden_states`` where it holds them.

        Raises:
            WaitTimeoutError: (a TimeoutError) if it was held back longer than the storage's ``timeout``.
            PeerLostError: (a ConnectionError) if the process that made the storage is gone.
            StorageClosedError: If the storage was closed.
            DoesNotFitError: (a MemoryError) if the rows so far have taken all memory. Nothing was written.
        """
        given = (observations, actions, rewards, terminateds, truncateds, infos, next_observations)
        step = (*given, mask, extra, priorities)
        self._append(count_of(mask, len(self.lanes)), partial(self._part.append, *step))

    def insert_transition(self, sample: Mapping[str, Any]) -> None:
        """Append one step of its environments, with the keys of the vocabulary (see :mod:`rlstore.storage`).

        Args:
            sample: The step, ``[num_envs, ...]``; see the method of the same name of the storage.
        """
        step, named = step_arguments(sample, self._part.fields, self._kind)
        self.add(*step, **named)

    def _insert_steps(self, samples: Mapping[str, Any], steps: int, has_final: Tensor | None = None) -> int:
        """Append several steps as :meth:`insert_transition` would one by one; all are checked before any is written.

        Args:
            samples: The keys of a sample, each ``[steps, num_envs, ...]``.
            steps: The number of steps.
            has_final: The steps that have ``final_observations``, bool ``[steps]``; None for all.

        Returns:
            The transitions that were stored. Reset steps are none.
        """
        part, lanes = self._part, len(self.lanes)
        check_sample(samples, part.fields, self._kind)
        if samples.get("final_observations") is not None and part.ring.autoreset == "NextStep":
            raise final_of_next_step("a sample holds 'final_observations'")
        given, fit = steps_at_once(samples, part.fields, steps, part.ring, has_final)
        priorities = samples.get("priorities")
        if priorities is not None:
            priorities = as_tensor(priorities, "priorities")
            if priorities.shape[:2] != (steps, lanes):
                raise InvalidInputError(
                    f"priorities are {tuple(priorities.shape)}; give one for each of {steps} steps of {lanes} "
                    "environments. Nothing was written."
                )
        if priorities is None and not self._control.limiter.is_on:
            count = count_of(samples.get("masks"), steps * lanes)
            return self._append(count, partial(part.append_steps, given, steps, fit), steps)
        # Each waits for the limit, and has its own priorities.
        stored, values = 0, fit()
        rows = [tuple(None if value is None else value[i : i + 1] for value in values) for i in range(steps)]
        masks = [row[-len(part.fields.observations) - 2] for row in rows]
        firsts = [None] * steps if priorities is None else priorities
        if priorities is not None:
            for first, mask in zip(firsts, masks, strict=True):
                part.begin(first, mask)
        for row, mask, first in zip(rows, masks, firsts, strict=True):
            step = partial(part.append_steps, None, 1, partial(tuple, row), first, mask)
            stored += self._append(count_of(mask, lanes), step)
        return stored

    def _append(self, count: int, append: Callable[[], None], steps: int = 1) -> int:
        """Append ``count`` transitions of so many steps as soon as they may be; returns how many became rows."""
        self._begin_step(count)
        control, first, ring, stored = self._control, self.lanes.start, self._part.ring, 0
        try:
            with control.turn:
                control.enter(first, self._given_by, self._timeout, ring.written, steps)
                before = ring.total_written
                try:
                    append()
                finally:
                    stored = ring.total_written - before
                    control.leave(first)
        finally:
            if count != stored:  # inserts that were counted and did not happen: refused, or resets
                control.limiter.count_inserts(stored - count)
        return stored

    def _begin_step(self, count: int) -> None:
        """Wait until so many transitions may be added, and count them."""
        if self._closed:
            raise StorageClosedError("this writer is closed; nothing was written")
        if self._process != os.getpid():
            self._begin()
        self._use.is_used = True
        control, limiter = self._control, self._control.limiter
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            control.check_maker()
        if not limiter.insert(count, self._timeout, self._look):
            raise WaitTimeoutError(
                f"the rate limit let nothing more be added for {self._timeout} seconds: {limiter.inserted} are added "
                f"and {limiter.sampled} sampled, at {limiter.limit}. The {control.describe_maker()} lives and has to "
                "sample more first. Nothing was written."
            )

    def _look(self) -> None:
        self._control.check_maker()
        if self._control.is_closed:
            raise StorageClosedError("the storage was closed; nothing was written")

    def close(self) -> None:
        """Free the environments and close their open episodes. The writer cannot be used afterwards."""
        self._closed = True
        if self._process == os.getpid():
            self._use.is_used = True
            self._end()
        else:
            self._control.release(self._given_by)

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        envs = f"{len(self.lanes)} envs from {self.lanes.start}"
        return f"ReplayWriter({name}{envs} of a {self._kind}{': closed' if self._closed else ''})"

    def __enter__(self) -> ReplayWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        ring = self._part.ring
        if not ring.backing.segment or self._control.segment is None:
            raise InvalidInputError(
                f"a writer of a {self._kind} with memory={ring.backing.kind!r} works in its own process alone;"
                ' give the storage memory="shared"'
            )
        self._use.is_passed_on = True
        recipe = (ring.leaves, ring.columns, ring.steps, ring.whole.lanes, ring.autoreset)
        given = (self.lanes, self.name, self._timeout, self._given_by, self._closed)
        segments: tuple[SharedMemory, SharedMemory] = (ring.backing.segment, self._control.segment)
        return {"kind": self._kind, "fields": self._part.fields, "ring": recipe, "given": given, "segments": segments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._kind = state["kind"]
        self.lanes, self.name, self._timeout, self._given_by, self._closed = state["given"]
        leaves, columns, steps, lanes, autoreset = state["ring"]
        blocks, board = state["segments"]
        whole = EpisodeRing(leaves, columns, steps, lanes, Backing.attach(self._kind, blocks), autoreset)
        self._control = LaneControl(lanes, board)
        self._part = Appender(whole.part(self.lanes), state["fields"], self._control.turn)
        self._process, self._looked, self._use = 0, 0.0, _Use()


class _Use:
    """What became of a handle in its process.

    Attributes:
        is_used: True once it has added something, or was closed.
        is_passed_on: True if another process may have a copy of it.
    """

    def __init__(self) -> None:
        self.is_used, self.is_passed_on = False, False
        _USES.add(self)


_USES: weakref.WeakSet[_Use] = weakref.WeakSet()


def _pass_all_on() -> None:
    """After a fork: the child has copies of all handles."""
    for use in list(_USES):
        use.is_passed_on = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_pass_all_on)


def count_of(mask: Any, lanes: int) -> int:
    """The transitions of a step with a mask; a mask that does not fit is refused later, when the step is checked."""
    return lanes if mask is None else min(int(as_tensor(mask, "mask").count_nonzero()), lanes)


def _finish(control: LaneControl, ring: EpisodeRing, peer: int, use: _Use) -> None:
    """End a writer: cut its episodes off and free its lanes. One that was not used has begun no episodes."""
    if use.is_used:
        with taken(control.turn):  # it may be that of a storage which was closed
            control.give_back(peer, ring.recover)
        control.peers.leave(peer)
        return
    control.offer(peer)
    if control.segment is None or not use.is_passed_on:
        control.release(peer)
