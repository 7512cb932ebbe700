"""DistributedStorage: rollouts that actors in other processes write and learners read, as IMPALA does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.distributed.actor import ActorHandle, check_row
from rlstore.distributed.learner import Learner
from rlstore.distributed.memory import InitialStates, RolloutStorages
from rlstore.distributed.saved import SavedDistributed
from rlstore.engine.checks import check_count, check_device, check_name, check_positive, check_seconds
from rlstore.engine.processes.slots import State
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.errors import InvalidInputError


@dataclass(frozen=True)
class HandoffReport:
    """What became of the rollouts of a DistributedStorage, at one glance.

    Attributes:
        committed: Rollouts that were completed: ``served + full + reading``.
        served: Those that were read and whose slot was free again.
        abandoned: Rollouts that actors gave up.
        reclaimed: Rollouts that were being written by actors that died.
        actors: Actors that take part now.
        learners: Learners that do.
        lost_actors: Actors that died without a word.
        lost_learners: Learners that did.
        free: Slots that wait for an actor.
        writing: Slots that an actor has.
        full: Slots that wait for a learner.
        reading: Slots that a learner has.
        published: The newest version that a learner published.
        closed: Whether the storage was closed.
    """

    committed: int
    served: int
    abandoned: int
    reclaimed: int
    actors: int
    learners: int
    lost_actors: int
    lost_learners: int
    free: int
    writing: int
    full: int
    reading: int
    published: int
    closed: bool


class DistributedStorage(SavedDistributed):
    """``num_storages`` slots in shared memory, each for a rollout of ``num_steps`` steps of one environment.

    There are three ways to use it:

    - the documented one: actors write into ``storages`` and pass slot numbers through two queues, and learners call
      :meth:`sample`. The queues are the caller's, so an actor that is killed keeps its slot, and a learner may wait for
      it without end;
    - with :meth:`actor` and :meth:`learner`, which know who lives: what a dead actor was writing is free again, and a
      learner that waits is told who died;
    - through the ten methods of :class:`~rlstore.storage.Storage`, from one process.

    ``storages[key][slot]`` is ``[num_steps + 1, ...]``. Row t holds ``obs[t]`` and what came with it from the
    environment: ``reward``, ``terminated``, ``truncated`` (of the step that led to it), ``episode_return``,
    ``episode_step``, ``last_action``; and what the actor made of it: ``policy_outputs`` (a number for each choice; for
    Box a mean and a deviation for each number), ``baseline`` (its value) and ``action``. Observations of a Dict or
    Tuple space have a key for each leaf: ``obs["camera"]``.

    ``init_actor_state_storages[slot]`` are the recurrent states with which a rollout begins, ``(layers, 1, hidden)``.

    Both, and the handles, can be sent to other processes in any way that pickles, or be inherited by a fork, and mean
    the same memory there. A copy of the storage itself has memory of its own.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (uint8 if it names none).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served; the rollouts lie in the CPU's memory.
        num_steps: Steps of a rollout.
        num_storages: Slots.
        batch_size: Rollouts in a learner's batch.
        state_shapes: ``(layers, hidden)`` of each recurrent state: two of them for an LSTM.
        timeout: Seconds that actors and learners wait before they raise an error that says whom they wait for.
        seed: The seed of the storage's own generator; None draws one from torch's.
    """

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        device: str | torch.device = "cpu",
        num_steps: int = 100,
        num_storages: int = 80,
        batch_size: int = 32,
        *,
        state_shapes: Sequence[tuple[int, int]] = (),
        timeout: float = 60.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_steps, device, num_storages, batch_size, state_shapes, timeout, seed)
        self.observation_space, self.action_space = observation_space, action_space
        # Both None: a storage from create_factory(), which learns them from its first sample.
        if observation_space is not None or action_space is not None:
            if observation_space is None or action_space is None:
                raise InvalidInputError("observation_space and action_space go together; one of them is None")
            self._allocate_for_spaces(observation_space, action_space)

    # ---------------------------------------------------------------------------------------------- as documented

    @property
    def storages(self) -> RolloutStorages:
        """Every key's shared tensors, ``storages[key][slot]`` ``[num_steps + 1, ...]``."""
        return self._ready_views()[0]

    @property
    def init_actor_state_storages(self) -> InitialStates:
        """For each slot a tuple of shared tensors ``(layers, 1, hidden)``; empty tuples without ``state_shapes``."""
        return self._ready_views()[1]

    def add(self, *args: Any) -> None:
        """Write one row of a slot: ``add(index, timestep, actor_output, env_output)``.

        The slot must be the caller's, as an index from ``free_queue`` is.

        Args:
            *args: ``index``, the slot. ``timestep``, the row, from 0 to ``num_steps``. ``actor_output``, a mapping
                with ``policy_outputs``, ``baseline``, ``action``, or None. ``env_output``, a mapping with ``obs``,
                ``reward``, ``terminated``, ``truncated``, ``episode_return``, ``episode_step``, ``last_action``, or
                None. Each value is of its key's shape, or has axes of 1 before it. What they do not hold stays as it
                was.
        """
        if len(args) != 4:
            raise TypeError(f"add() takes index, timestep, actor_output and env_output; {len(args)} values were given")
        index, timestep, actor_output, env_output = args
        memory = self._ready_memory()
        row, slot = check_row(timestep, memory.steps), _check_slots([index], memory.count)[0]
        parts = [part for part in (env_output, actor_output) if part is not None]
        if not all(isinstance(part, Mapping) for part in parts):
            raise InvalidInputError("actor_output and env_output are mappings by key, or None. Nothing was written.")
        memory.write(slot, row, memory.fields.fit_row({key: part[key] for part in parts for key in part}))

    @staticmethod
    def sample(
        device: str | torch.device,
        batch_size: int,
        free_queue: Any,
        full_queue: Any,
        storages: Mapping[str, Any],
        init_actor_state_storages: Sequence[Any],
        lock: Any = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """A batch of rollouts whose slot numbers come out of ``full_queue``, and go into ``free_queue``.

        The numbers are taken under the lock, in the order of the queue. They are given back when everything is copied:
        those, and no others. If anything goes wrong they are put into ``full_queue`` again.

        Args:
            device: Where the batch is to be.
            batch_size: Rollouts in it.
            free_queue: Anything with ``put``.
            full_queue: Anything with ``get``; its ``get`` is waited for without end.
            storages: By key a sequence of tensors ``[T + 1, ...]``, one for each slot: those of a storage, or others.
            init_actor_state_storages: For each slot its recurrent states, ``(layers, 1, hidden)`` each.
            lock: What learners that share the queues have in common; None takes one for each ``storages`` mapping.

        Returns:
            By key a tensor ``[T + 1, batch_size, ...]``; and the states, ``[layers, batch_size, hidden]`` each.
        """
        check_positive("sample()", batch_size=batch_size)
        place = check_device("sample()", device)
        taken: list[Any] = []
        try:
            with _locks.of(storages) if lock is None else lock:
                for _ in range(batch_size):
                    taken.append(full_queue.get())
            batch, states = _join(place, storages, init_actor_state_storages, taken)
        except BaseException:
            for index in taken:
                full_queue.put(index)
            raise
        for index in taken:
            free_queue.put(index)
        if place.type != "cpu":
            batch = {key: tensor.to(place, non_blocking=True) for key, tensor in batch.items()}
            states = tuple(state.to(place, non_blocking=True) for state in states)
        return batch, states

    def update(self, *args: Any) -> None:
        """Nothing is to be updated here: rollouts are served as soon as they are complete."""

    # ---------------------------------------------------------------------------------------------- handles

    def actor(self, name: str | None = None) -> ActorHandle:
        """A handle through which an actor, in any process of this machine, hands over rollouts.

        Args:
            name: How errors and warnings call it; the process's number is always told.
        """
        check_name("actor()", name)
        return ActorHandle(self._ready_memory(), name, self.timeout)

    def learner(
        self,
        batch_size: int | None = None,
        device: str | torch.device | None = None,
        prefetch: int = 1,
        timeout: float | None = None,
    ) -> Learner:
        """An iterator over batches of rollouts, for this process or one that it is sent to.

        Args:
            batch_size: Rollouts in a batch; None takes the storage's.
            device: Where batches are served; None takes the storage's.
            prefetch: Batches that a thread makes ahead; 0 for no thread.
            timeout: Seconds that it waits for a batch; None takes the storage's.
        """
        memory, size = self._ready_memory(), self.batch_size if batch_size is None else batch_size
        check_positive("learner()", batch_size=size)
        if size > memory.count:
            raise InvalidInputError(f"batch_size is {size}, and num_storages is {memory.count}: it would never be full")
        check_count("learner()", "prefetch", prefetch)
        seconds = self.timeout if timeout is None else timeout
        check_seconds("learner()", timeout=seconds)
        place = self._torch_device if device is None else check_device("learner()", device)
        learner = Learner(memory, int(size), place, prefetch, float(seconds))
        self._learners.add(learner)
        return learner

    def report(self) -> HandoffReport:
        """What became of the rollouts, who takes part, and what the slots are now."""
        handoff = self._ready_memory().handoff
        handoff.sweep()
        counts, peers = handoff.slots.counts(), handoff.peers
        return HandoffReport(
            committed=handoff.committed,
            served=handoff.served,
            abandoned=handoff.abandoned,
            reclaimed=handoff.reclaimed,
            actors=len(peers.here("actor")),
            learners=len(peers.here("learner")),
            lost_actors=peers.lost_count("actor"),
            lost_learners=peers.lost_count("learner"),
            **{state.name.lower(): counts[state] for state in State},
            published=handoff.published,
            closed=handoff.closed,
        )

    def close(self) -> None:
        """End everybody's part: actors that wait get StorageClosedError, the iteration of learners ends."""
        self._close()

    @classmethod
    def create_factory(  # type: ignore[override]
        cls,
        size: int,
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        **arguments: Any,
    ) -> Callable[..., DistributedStorage]:
        """A function ``f(device, actor, algorithm)`` that makes storages of rollouts of ``size`` steps.

        Without spaces they learn all shapes from their first sample. Other arguments are those of the class, by
        keyword.
        """

        def create(device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None) -> DistributedStorage:
            storage = cls(observation_space, action_space, device, size, **arguments)
            storage._give(actor, algorithm)
            return storage

        return create


# ---------------------------------------------------------------------------------------------------- sample()


class _Locks:
    """One lock for each mapping, for as long as somebody uses it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._used: dict[int, tuple[threading.Lock, int]] = {}

    @contextmanager
    def of(self, storages: object) -> Iterator[None]:
        """The lock of a mapping, held."""
        key = id(storages)  # the caller holds the mapping, so nothing else has its id meanwhile
        with self._guard:
            lock, users = self._used.get(key, (threading.Lock(), 0))
            self._used[key] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._used.pop(key)
                if users > 1:
                    self._used[key] = lock, users - 1


_locks = _Locks()


def _join(
    device: torch.device, storages: Mapping[str, Any], states: Sequence[Any], taken: list[Any]
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """The rollouts and the states of the slots, on the CPU."""
    if isinstance(storages, RolloutStorages):
        slots = _check_slots(taken, storages.memory.count)
        batch = storages.gather(device, lambda gather: gather.rollouts(slots))
    else:
        batch = {key: torch.stack([storages[key][index] for index in taken], dim=1) for key in storages}
    if isinstance(states, InitialStates):
        slots = _check_slots(taken, len(states))
        return batch, states.storages.gather(device, lambda gather: gather.states(slots)) if states[0] else ()
    if not states:
        return batch, ()
    return batch, tuple(torch.cat(parts, dim=1) for parts in zip(*(states[i] for i in taken), strict=True))


def _check_slots(indices: list[Any], count: int) -> list[int]:
    for index in indices:
        try:
            known = 0 <= index.__index__() < count
        except AttributeError:
            known = False
        if not known:
            raise InvalidInputError(f"{index!r} is no slot; there are 0 to {count - 1}. Nothing was changed.")
    return [int(index) for index in indices]
