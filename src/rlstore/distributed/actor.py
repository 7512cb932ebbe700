"""ActorHandle and Rollout: how an actor process writes rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rlstore.distributed.memory import RolloutMemory
from rlstore.engine.checks import check_seconds
from rlstore.engine.guard import as_block, uninterrupted
from rlstore.engine.processes.handoff import Member
from rlstore.errors import InvalidInputError, NotReadyError


class Rollout:
    """A slot that an actor writes: ``T + 1`` rows of each key.

    Row t holds the observation ``obs[t]``; what the environment returned with it, of the step that led to it
    (``reward``, ``terminated``, ``truncated``, ``episode_return``, ``episode_step``, ``last_action``); what the actor
    computed from it (``policy_outputs``, ``baseline``, ``action``); and the extra fields. By the usual convention row 0
    is row T of the actor's previous rollout.
    """

    def __init__(self, memory: RolloutMemory, member: Member, slot: int | None) -> None:
        self._memory, self._member = memory, member
        self._slot = slot  # None until one is reserved, and when it is not this actor's any more

    @property
    def slot(self) -> int:
        """The slot's number."""
        if self._slot is None or not self._member.is_writing(self._slot):
            raise NotReadyError(
                "this rollout was committed or abandoned, or its actor was closed: it is no longer this actor's. "
                "Nothing was written. Reserve another."
            )
        return self._slot

    def __repr__(self) -> str:
        is_own = self._slot is not None and self._member.is_writing(self._slot)
        return f"Rollout({self._memory.steps} steps: {f'slot {self._slot}' if is_own else 'no longer writable'})"

    def __getitem__(self, key: str) -> Tensor:
        """A key's rows, ``[T + 1, ...]``: the shared memory itself. Do not use it after :meth:`commit`."""
        try:
            return self._memory.blocks[key][self.slot]
        except KeyError:
            raise InvalidInputError(f"a rollout has no {key!r}; it has {list(self._memory.blocks)}") from None

    def write(self, timestep: int, **values: Any) -> None:
        """Write row ``timestep``, all of it or (if a value does not fit) nothing.

        Args:
            timestep: From 0 to T.
            **values: By key, extra fields included: tensors, arrays or numbers of the key's shape, or with axes of 1
                before it. Observations of a Dict or Tuple space are given nested, as ``obs``. Keys that are not given
                keep their value.
        """
        row = check_row(timestep, self._memory.steps)
        self._memory.write(self.slot, row, self._memory.fields.fit_row(values))

    def set_states(self, states: Tensor | Sequence[Tensor]) -> None:
        """Write the recurrent states at the start of this rollout, ``(layers, 1, hidden)`` each."""
        self._memory.write_states([self.slot], self._memory.fields.fit_states(states, "states", 1))

    def commit(self, version: int = 0) -> None:
        """Hand the rollout over to the learners.

        Args:
            version: The version of the policy that played it; learners get it with the batch.
        """
        check_version("commit()", version)
        with uninterrupted():
            self._memory.versions[self.slot, 0] = version
            self._member.commit(self.slot)
            self._slot = None

    def abandon(self) -> None:
        """Discard the rollout: no learner gets it, and its slot is free."""
        with uninterrupted():
            if self._slot is not None:
                self._member.abandon(self._slot)
                self._slot = None


class ActorHandle:
    """An actor's access to a :class:`DistributedStorage`; created by ``DistributedStorage.actor``.

    It can be pickled and inherited by a fork; in each process it is an actor of its own. If that process is killed, the
    slot that it was writing is reclaimed, and a learner that waits raises an error that names the dead actor.
    """

    def __init__(self, memory: RolloutMemory, name: str | None, timeout: float) -> None:
        self._memory, self.name, self.timeout = memory, name, timeout
        self._member = Member(memory.handoff, "actor", name, timeout)

    @property
    def published(self) -> int:
        """The newest policy version that a learner published."""
        return self._memory.handoff.published

    def reserve(self, timeout: float | None = None) -> Rollout:
        """Wait for a free slot and reserve it for writing.

        Args:
            timeout: Seconds to wait at most, 0 for no wait; None takes the storage's.

        Raises:
            PeerLostError: (a ConnectionError) if the process that created the storage is dead, or at the deadline if
                learners died.
            WaitTimeoutError: (a TimeoutError) at the deadline, if no learner died.
            StorageClosedError: (a RuntimeError) if the storage was closed.
        """
        if timeout is not None:
            check_seconds("reserve()", timeout=timeout)
        rollout = Rollout(self._memory, self._member, None)
        try:
            with uninterrupted():
                rollout._slot = self._member.reserve(timeout)
        except BaseException:
            rollout.abandon()  # if it was interrupted when there was one
            raise
        return rollout

    @as_block
    def rollout(self, version: int = 0, timeout: float | None = None) -> Iterator[Rollout]:
        """Reserve a slot that is committed at the end of the ``with`` block, and abandoned if the block raises.

        Args:
            version: See :meth:`Rollout.commit`.
            timeout: See :meth:`reserve`.
        """
        check_version("rollout()", version)
        rollout = self.reserve(timeout)
        try:
            yield rollout
        except BaseException:
            rollout.abandon()
            raise
        if rollout._slot is not None:
            rollout.commit(version)

    def close(self) -> None:
        """Stop taking part; a slot that is being written is free again. The handle cannot be used afterwards."""
        self._member.leave()

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        slots = f"{self._memory.count} slots of {self._memory.steps} steps"
        return f"ActorHandle({name}{slots}: version {self.published} published)"

    def __enter__(self) -> ActorHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self._memory, self.name, self.timeout)


def check_row(timestep: int, steps: int) -> int:
    """The row of a timestep."""
    is_whole = isinstance(timestep, (int, np.integer)) and not isinstance(timestep, bool)
    if not is_whole or not 0 <= timestep <= steps:
        raise InvalidInputError(f"timestep is {timestep!r}; a rollout has rows 0 to {steps}. Nothing was written.")
    return int(timestep)


def check_version(owner: str, version: int) -> None:
    """Refuse a version that is not an int64."""
    if isinstance(version, bool) or not isinstance(version, (int, np.integer)) or not -(2**63) <= version < 2**63:
        raise InvalidInputError(f"version is {version!r}; {owner} needs a whole number")
