"""DistributedStorage: rollouts that actors in other processes write and learners read, as in IMPALA."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlstore.distributed.actor import ActorHandle, check_row
from rlstore.distributed.fields import RolloutFields, check_state_shapes
from rlstore.distributed.held_steps import SlotSteps
from rlstore.distributed.learner import Learner
from rlstore.distributed.measures import measured_handoff, measured_rollouts
from rlstore.distributed.memory import InitialStates, RolloutMemory, RolloutStorages
from rlstore.distributed.queues import check_queues, check_slots, sample_from_queues
from rlstore.distributed.rows import TAKEN_NAMES, Step, check_sample_names, check_slice_names, rows_of
from rlstore.distributed.trainer_slots import TrainerSlots
from rlstore.engine.calls import explained
from rlstore.engine.checks import check_count, check_device, check_name, check_positive, check_seconds
from rlstore.engine.disk.journal import Journal
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.guard import as_block, close_guard, guarded, guarded_steps, uninterrupted
from rlstore.engine.measures import Measures, held, used
from rlstore.engine.processes.slots import State
from rlstore.engine.rows.schema import Field
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike, describe_extra_fields
from rlstore.engine.rows.spaces import extra_fields as parse_extra_fields
from rlstore.episodes import HeldSteps, NoSteps
from rlstore.errors import InvalidCallError, InvalidInputError, NotReadyError
from rlstore.parameters import Check, argument, require_empty, seconds, whole_number, with_arguments
from rlstore.storage import BatchDict, Sample, Storage, saved_arguments
from rlstore.trainer import learning_info

_AnyStorage = TypeVar("_AnyStorage", bound="DistributedStorage")
_PARAMETERS: dict[str, Check] = {
    "batch_size": whole_number,
    "timeout": seconds,
    "num_steps": whole_number,
    "num_storages": whole_number,
}
_SLOT_BYTES = 160  # at most, of memory that is written for a slot before it is used
_SETTINGS = ("observation_space", "action_space", "num_steps", "num_storages", "batch_size", "state_shapes", "timeout")


@dataclass(frozen=True)
class HandoffReport:
    """The state of a DistributedStorage's hand-off.

    Attributes:
        committed: Rollouts that were completed: ``served + full + reading``.
        served: Rollouts that were read and whose slot was freed.
        abandoned: Rollouts that actors discarded.
        reclaimed: Rollouts that were being written by actors that died.
        actors: Actors that take part now.
        learners: Learners that take part now.
        lost_actors: Actors that died without closing their handle.
        lost_learners: Learners that did.
        free: Slots that wait for an actor.
        writing: Slots that an actor is writing.
        full: Slots that wait for a learner.
        reading: Slots that a learner is reading.
        published: The newest policy version that a learner published.
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


@with_arguments(
    *("device", "max_size", "observation_space", "action_space", "num_storages", "batch_size", "timeout"),
    "state_shapes",
)
class DistributedStorage(Storage):
    """``num_storages`` slots in shared memory, each for a rollout of ``num_steps`` steps of one environment.

    There are three ways to use it:

    - the documented one: actors write to ``storages`` and pass slot numbers through two queues, and learners call
      :meth:`sample`. The queues are the caller's, so an actor that is killed keeps its slot, and a learner may wait for
      it without a limit;
    - with :meth:`actor` and :meth:`learner`, which detect dead processes: what a dead actor was writing is reclaimed,
      and a learner that waits raises an error that names it;
    - through the ten methods of :class:`~rlstore.storage.Storage`, from one process.

    ``storages[key][slot]`` is ``[num_steps + 1, ...]``. Row t holds ``obs[t]`` and what the environment returned with
    it: ``reward``, ``terminated``, ``truncated`` (of the step that led to it), ``episode_return``, ``episode_step``,
    ``last_action``; what the actor computed from it: ``policy_outputs`` (a number for each choice; for Box a mean and a
    deviation for each number), ``baseline`` (its value) and ``action``; and the extra fields. Observations of a Dict or
    Tuple space have a key for each leaf: ``obs["camera"]``.

    ``init_actor_state_storages[slot]`` are the recurrent states at the start of a rollout, ``(layers, 1, hidden)``.

    Both, and the handles, can be pickled to other processes of this machine or inherited by a fork, and refer to the
    same memory there. A copy of the storage itself has memory of its own.

    A snapshot holds the complete rollouts, and those that ``insert_transition`` has begun. It does not hold what actors
    are writing and learners are reading at the moment, nor the handles.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (default uint8).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served; the rollouts are in CPU memory.
        num_steps: Steps of a rollout.
        num_storages: Slots.
        batch_size: Rollouts in a learner's batch.
        state_shapes: ``(layers, hidden)`` of each recurrent state: two of them for an LSTM.
        timeout: Seconds that actors and learners wait before they raise an error that names the peers they wait for.
        seed: The seed of the storage's own generator; None draws one from torch's.
        extra_fields: Further keys of every row, by name a space or a pair ``(shape, dtype)``. Through the ten methods
            the extra field of transition t is that of row t, and row ``num_steps`` is zero.
        allow_nonfinite_rewards: Store rewards that are NaN or infinite; otherwise the methods that write a row refuse
            them. What is written directly into ``storages`` or a rollout's tensors is not checked.
        journal: A folder to which a thread commits the storage every two seconds, or a :class:`~rlstore.Journal` with
            other options. ``Storage.load(folder)`` gives back the last commit. Each commit writes all complete
            rollouts, if anything has changed. None for no journal.
    """

    observation_space: SpaceLike | None
    action_space: SpaceLike | None
    num_storages: int
    batch_size: int
    timeout: float
    state_shapes: tuple[tuple[int, int], ...]
    num_steps: int = argument("num_steps", attrgetter("_max_size"), "Steps of a rollout.")

    @explained
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
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, num_steps=num_steps, num_storages=num_storages, batch_size=batch_size)
        check_seconds(owner, timeout=timeout)
        super().__init__(num_steps, device, seed=seed)
        self._num_storages, self._batch_size, self._timeout = int(num_storages), int(batch_size), float(timeout)
        self._state_shapes = check_state_shapes(owner, state_shapes)
        self._observation_space, self._action_space = observation_space, action_space
        self._extra: tuple[Field, ...] = parse_extra_fields(extra_fields, owner, TAKEN_NAMES)
        self._allows_nonfinite = bool(allow_nonfinite_rewards)
        self._detach()
        # Both None: a storage from create_factory(), which takes shapes from its first sample.
        if observation_space is not None or action_space is not None:
            if observation_space is None or action_space is None:
                raise InvalidInputError("observation_space and action_space go together; one of them is None")
            self._allocate(RolloutFields.of_spaces(owner, observation_space, action_space, *self._row_options()))
        self._begin_journal(journal)

    def _row_options(self) -> tuple[tuple[tuple[int, int], ...], tuple[Field, ...], bool]:
        """What the fields of a row depend on besides spaces or samples."""
        return self.state_shapes, self._extra, self._allows_nonfinite

    # ---------------------------------------------------------------------------------------------- memory

    def _detach(self) -> None:
        self._slots: TrainerSlots | None = None
        self._views: tuple[RolloutStorages, InitialStates] | None = None
        self._learners: weakref.WeakSet[Learner] = weakref.WeakSet()

    def _allocate(self, fields: RolloutFields) -> None:
        self._slots = TrainerSlots(RolloutMemory(fields, self.max_size, self.num_storages), self.timeout, self._guard)
        self._views = None

    def _ready_slots(self) -> TrainerSlots:
        if self._slots is None:
            raise NotReadyError(
                f"this {type(self).__name__} waits for its first sample: call init_tensors() or insert one"
            )
        return self._slots

    def _open_slots(self) -> TrainerSlots:
        slots = self._ready_slots()
        slots.memory.handoff.check_open()
        return slots

    def _ready_views(self) -> tuple[RolloutStorages, InitialStates]:
        memory = self._ready_slots().memory
        if self._views is None:
            storages = RolloutStorages(memory)
            self._views = storages, InitialStates(storages)
        return self._views

    def __len__(self) -> int:
        """Transitions held now: those of complete rollouts, and those that were inserted since."""
        return 0 if self._slots is None else len(self._slots)

    def __repr__(self) -> str:
        if "_learners" not in self.__dict__:
            return object.__repr__(self)
        name = f"{type(self).__name__}({self.num_storages} slots of {self.max_size} steps on {self.device}"
        if self._slots is None:
            return f"{name}: waits for its first sample)"
        return f"{name}: {len(self)} transitions held, {self._slots.memory.segment.nbytes / 1e6:.1f} MB)"

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
                None. Extra fields are in either. Each value is of its key's shape, or has axes of 1 before it. Keys
                that are not given keep their value.
        """
        if len(args) != 4:
            raise InvalidCallError(
                f"add() takes index, timestep, actor_output and env_output; {len(args)} values were given"
            )
        index, timestep, actor_output, env_output = args
        memory = self._open_slots().memory
        row, slot = check_row(timestep, memory.steps), check_slots([index], memory.count)[0]
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
        storages: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        init_actor_state_storages: Sequence[Any],
        lock: Any = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """A batch of rollouts whose slot numbers are taken from ``full_queue``, and then put into ``free_queue``.

        The numbers are taken under the lock, in the order of the queue. Exactly those are given back, when everything
        is copied. If anything raises they are put into ``full_queue`` again.

        Args:
            device: The device of the batch.
            batch_size: Rollouts in it.
            free_queue: Any object with ``put``.
            full_queue: Any object with ``get`` and ``put``; its ``get`` may block without a limit.
            storages: By key a sequence of tensors ``[T + 1, ...]``, one for each slot: those of a storage, or others.
                Or a list of shared storages, one for each slot: mappings of keys to tensors ``[T + 1, ...]``.
            init_actor_state_storages: For each slot its recurrent states, ``(layers, 1, hidden)`` each; or a list of
                tensors, the state of each slot.
            lock: Shared by all learners that use the queues; None takes one for each ``storages`` object.

        Returns:
            By key a tensor ``[T + 1, batch_size, ...]``; and the states, ``[layers, batch_size, hidden]`` each.
        """
        check_positive("sample()", batch_size=batch_size)
        check_queues(free_queue, full_queue)
        place = check_device("sample()", device)
        return sample_from_queues(place, batch_size, free_queue, full_queue, storages, init_actor_state_storages, lock)

    def update(self, *args: Any) -> None:
        """Does nothing: rollouts are served as soon as they are complete.

        Args:
            *args: Ignored.
        """

    # ---------------------------------------------------------------------------------------------- handles

    def actor(self, name: str | None = None) -> ActorHandle:
        """A handle through which an actor, in any process of this machine, writes rollouts.

        Args:
            name: Its name in errors and warnings, beside its process id.
        """
        check_name("actor()", name)
        return ActorHandle(self._open_slots().memory, name, self.timeout)

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
            prefetch: Batches that a thread collects ahead; 0 for no thread.
            timeout: Seconds to wait for a batch; None takes the storage's.
        """
        memory, size = self._open_slots().memory, self.batch_size if batch_size is None else batch_size
        check_positive("learner()", batch_size=size)
        if size > memory.count:
            raise InvalidInputError(f"batch_size is {size}, and num_storages is {memory.count}: it would never be full")
        check_count("learner()", "prefetch", prefetch)
        wait = self.timeout if timeout is None else timeout
        check_seconds("learner()", timeout=wait)
        place = self._torch_device if device is None else check_device("learner()", device)
        learner = Learner(memory, int(size), place, prefetch, float(wait))
        self._learners.add(learner)
        return learner

    def report(self) -> HandoffReport:
        """The counts of rollouts, peers and slots, also after :meth:`close`.

        Dead peers are found, and what they held is reclaimed.
        """
        handoff = self._ready_slots().memory.handoff
        handoff.sweep()
        peers, counts = handoff.peers, handoff.slots.counts()
        return HandoffReport(
            **handoff.counts(),
            actors=len(peers.here("actor")),
            learners=len(peers.here("learner")),
            lost_actors=peers.lost_count("actor"),
            lost_learners=peers.lost_count("learner"),
            **{state.name.lower(): counts[state] for state in State},
            published=handoff.published,
            closed=handoff.closed,
        )

    def close(self) -> None:
        """Commit to the journal, and end the hand-off for all peers.

        Actors that wait raise StorageClosedError, and learners stop iterating. But for ``close``, ``report``, ``len``
        and ``repr``, the methods of the storage raise StorageClosedError from now on.
        """
        if self._guard.is_closed:
            return
        try:
            if self.journal is not None:
                self.journal.close()
        finally:
            self._end_handoff()

    @guarded
    def _end_handoff(self) -> None:
        if self._slots is not None:
            self._slots.memory.handoff.close()
            for learner in list(self._learners):
                learner.close()
            self._learners.clear()
            self._slots.leave()
        close_guard(self._guard, type(self).__name__)

    @classmethod
    @explained
    def create_factory(  # type: ignore[override]
        cls: type[_AnyStorage],
        size: int,
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        *,
        num_storages: int = 80,
        batch_size: int = 32,
        state_shapes: Sequence[tuple[int, int]] = (),
        timeout: float = 60.0,
        seed: int | None = None,
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> Callable[..., _AnyStorage]:
        """A function ``f(device, actor, algorithm)`` that creates storages of rollouts of ``size`` steps.

        Args:
            size: Steps of a rollout, the capacity of each slot along the time axis; ``num_storages`` is that of slots.
            observation_space: See the class; without spaces all shapes are taken from the first sample.
            action_space: See the class.
            num_storages: See the class, and so for the others.
            batch_size: Rollouts in a learner's batch.
            state_shapes: ``(layers, hidden)`` of each recurrent state.
            timeout: Seconds to wait.
            seed: The seed of each storage's generator.
            extra_fields: Further keys of every row.
            allow_nonfinite_rewards: Store rewards that are NaN or infinite.
            journal: The folder of a journal; it is that of one storage.
        """

        def create(device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None) -> _AnyStorage:
            storage = cls(
                observation_space,
                action_space,
                device,
                size,
                num_storages,
                batch_size,
                state_shapes=state_shapes,
                timeout=timeout,
                seed=seed,
                extra_fields=extra_fields,
                allow_nonfinite_rewards=allow_nonfinite_rewards,
                journal=journal,
            )
            storage._give(actor, algorithm)
            return storage

        return create

    # ---------------------------------------------------------------------------------------------- numbers

    def _measure(self) -> Measures:
        if self._slots is None:
            return {**held(0, self.num_storages * self.max_size, 0), **used(0, 0)}
        slots, memory = self._slots, self._slots.memory
        memory.handoff.sweep()
        return {
            **held(len(slots), memory.count * memory.steps, memory.segment.nbytes),
            **used(slots.inserts, slots.samples),
            **measured_rollouts(memory, SlotSteps(memory, self._torch_device)),
            **measured_handoff(memory.handoff),
        }

    def _count_inserts(self) -> int:
        return 0 if self._slots is None else self._slots.inserts

    # ---------------------------------------------------------------------------------------------- a look inside

    @guarded
    def _held_steps(self) -> HeldSteps:
        if self._slots is None:
            return NoSteps(type(self).__name__)
        return SlotSteps(self._slots.memory, self._torch_device)

    # ---------------------------------------------------------------------------------------------- the ten methods

    @guarded
    def init_tensors(self, sample: Sample) -> None:
        """Allocate the slots for samples like this one. If they are allocated already, the sample must fit them."""
        if self._slots is not None:
            Step.of_sample(self._slots.memory.fields, sample)
            return
        check_sample_names(sample, [field.name for field in self._extra])
        fields = RolloutFields.of_sample(sample, *self._row_options())
        Step.of_sample(fields, sample)  # before anything is allocated for it
        self._allocate(fields)

    @guarded
    def insert_transition(self, sample: Sample) -> None:
        """Store one step of N environments, in the vocabulary of :mod:`rlstore.storage`.

        It needs ``observations``, ``actions``, ``rewards``, ``terminated``, ``truncated``, ``next_observations``, the
        extra fields and, with ``state_shapes``, ``hidden_states``: a tuple of ``[layers, N, hidden]``. It may have
        ``values`` and ``distribution_params`` (concatenated they are ``policy_outputs``).

        Each environment has a slot of its own. Transition t goes to row t (the observation, what the actor computed
        from it, the extra fields) and to row t + 1 (the rest). After ``num_steps`` of them the rollouts are complete,
        and learners can have them. The last row has an observation that the actor did not act on: ``action``,
        ``policy_outputs``, ``baseline`` and the extra fields are zero there.

        Args:
            sample: The step.

        Raises:
            RolloutFullError: (an OverflowError) if there are not N free slots, and no learner to wait for. Nothing was
                written.
        """
        if self._slots is None:
            self.init_tensors(sample)
        slots = self._open_slots()
        slots.insert(Step.of_sample(slots.memory.fields, sample))

    def before_gradients(self, actor: Any = None, algo: Any = None) -> None:
        """Computes nothing: off-policy targets depend on the learner's own policy.

        Args:
            actor: Not used.
            algo: Whose attributes ``update_storage_parameter`` changes.
        """
        self._see(algo)

    @guarded
    def after_gradients(
        self, actor: Any = None, algo: Any = None, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Free the slots of the rollouts that were served, once their generator has ended.

        It may also be called as ``after_gradients(batch, info)``.

        Args:
            actor: Not used; with two arguments, the batch that was trained on.
            algo: Not used; with two arguments, ``info``.
            info: What a trainer reports; None for an empty dict.

        Returns:
            ``info`` with ``storage_size``, the transitions held.
        """
        _, info = learning_info(actor, algo, info)
        if self._slots is not None:
            self._slots.learned()
        info["storage_size"] = len(self)
        return info

    @guarded_steps
    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1, shuffle: bool = True
    ) -> Iterator[BatchDict]:
        """Batches of whole rollouts, in the vocabulary: tensors ``[num_steps, mini_batch_size, ...]``.

        The rollouts are those that were complete first, and stay the same until ``after_gradients``. If there are too
        few it waits for the actors that take part, if there are any.

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rollouts in each; None divides all of them. No rollout is served twice in an epoch.
            num_epochs: Epochs, each with an order of its own.
            shuffle: False serves the rollouts in the order in which they were completed.

        Yields:
            Dicts; ``rows`` are ``t * num_storages + slot``, int64 ``[num_steps, mini_batch_size]``.
        """
        check_positive("generate_batches()", num_mini_batch=num_mini_batch, num_epochs=num_epochs)
        if mini_batch_size is not None:
            check_positive("generate_batches()", mini_batch_size=mini_batch_size)
        slots, device = self._open_slots(), self._torch_device
        yield from slots.batches(num_mini_batch, mini_batch_size, num_epochs, shuffle, self._generator, device)

    @guarded
    def get_all_buffer_data(self, data_to_cpu: bool = False) -> BatchDict:
        """Copies of all complete rollouts, ``[num_steps, rollouts, ...]``, in the vocabulary.

        ``last_observations`` follow the last step. Beyond the vocabulary there are ``last_actions``,
        ``episode_returns`` and ``episode_steps`` of each step, ``versions`` ``[rollouts]``, ``first_rows`` (row 0
        without its observation) and ``last_rows`` (what the actor computed from the last observation, and the extra
        fields there).

        Args:
            data_to_cpu: Return the copies on the CPU, wherever the storage is.
        """
        if self._slots is None:
            return {}
        return self._open_slots().everything(torch.device("cpu") if data_to_cpu else self._torch_device)

    @guarded
    def insert_data_slice(self, new_data: Sample) -> None:
        """Replace everything held with ``new_data``, of the form that ``get_all_buffer_data`` returns.

        It needs ``observations``, ``actions``, ``rewards``, ``terminated``, ``truncated``, the extra fields, and
        ``last_observations`` or ``next_observations``; the rest is optional.
        """
        check_slice_names(new_data, [field.name for field in self._extra])
        if self._slots is None:
            if not new_data:
                return
            fields = RolloutFields.of_sample(new_data, *self._row_options(), lead=2)
            rows = rows_of(fields, self.max_size, new_data)  # before anything is allocated for it
            self._allocate(fields)
        else:
            rows = rows_of(self._open_slots().memory.fields, self.max_size, new_data)
        self._open_slots().replace(rows)

    @guarded
    def reset(self) -> None:
        """Make the storage empty and its counts zero. What actors are writing at the moment stays theirs."""
        if self._slots is not None:
            with uninterrupted():
                self._slots.clear()
                self._slots.memory.handoff.set_counts(0, 0, 0)
                self._slots.set_samples(0)

    @guarded
    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change ``batch_size``, ``timeout``, ``num_steps`` or ``num_storages``, or an attribute of the algorithm.

        The algorithm is the one given to the factory's function, and the one that ``before_gradients`` was last called
        with; a name that both have is changed on both. If one of them refuses the value, nothing is changed.
        ``num_steps`` and ``num_storages`` need new memory: they can change only while the storage is empty and has no
        other peers. The timeout of handles that exist already does not change.

        Args:
            parameter_name: Its name.
            new_parameter_value: Its new value.
        """
        self._change(parameter_name, new_parameter_value)

    def _checks(self) -> Mapping[str, Check]:
        return _PARAMETERS

    def _apply(self, name: str, value: Any) -> None:
        if name in ("num_steps", "num_storages"):
            self._resize(name, value)
            return
        setattr(self, f"_{name}", value)
        if name == "timeout" and self._slots is not None:
            self._slots.set_timeout(value)

    def _resize(self, name: str, value: int) -> None:
        require_empty(len(self), name)
        old, before = self._slots, (self.max_size, self.num_storages)
        if old is not None:
            peers = self._open_slots().memory.handoff.peers
            others = [peers.describe(peer) for role in ("actor", "learner") for peer in peers.here(role)]
            if others:
                raise NotReadyError(
                    f"{name} can change only while no actor or learner takes part; there are {', '.join(others)}. "
                    "Nothing was changed."
                )
        setattr(self, "_max_size" if name == "num_steps" else f"_{name}", value)
        if old is None:
            return
        try:
            self._allocate(old.memory.fields)
        except Exception:
            self._max_size, self._num_storages = before
            raise
        old.memory.handoff.close()  # handles of the old memory raise

    # ---------------------------------------------------------------------------------------------- saving, copying

    @as_block
    def _still(self) -> Iterator[None]:
        # Rollouts that actors are writing at the moment are not saved.
        with self._guard, nullcontext() if self._slots is None else self._slots.reading_all():
            yield

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in _SETTINGS}
        settings["state_shapes"] = [list(shape) for shape in self.state_shapes]
        settings["extra_fields"] = describe_extra_fields(self._extra)
        if self._allows_nonfinite:  # else as in snapshots of earlier versions
            settings["allow_nonfinite_rewards"] = True
        from_sample = self._slots is not None and self.observation_space is None
        settings["learnt"] = self._ready_slots().memory.fields.settings() if from_sample else None
        return settings

    @classmethod
    def _from_settings(cls: type[_AnyStorage], settings: Mapping[str, Any], device: str | torch.device) -> _AnyStorage:
        given = saved_arguments(cls, settings, (*_SETTINGS, "learnt"), ("extra_fields", "allow_nonfinite_rewards"))
        learnt = given.pop("learnt")
        storage = cls(**given, device=device, seed=0)
        if learnt is not None:
            storage._allocate(RolloutFields.of_settings(learnt, *storage._row_options()))
        return storage

    @classmethod
    def _check_sizes(cls, settings: Mapping[str, Any], reader: SnapshotReader) -> None:
        # Rollouts take memory when they are written; the list of slots does so at once.
        check_positive(cls.__name__, num_storages=settings["num_storages"])
        reader.room.charge(settings["num_storages"] * _SLOT_BYTES, f"{settings['num_storages']:,} slots")

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return ({}, {}) if self._slots is None else self._slots.state()

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        def read(name: str) -> Tensor | None:
            return reader.tensor(name) if name in reader.names else None

        if self._slots is not None:
            self._slots.set_state(numbers, reader.read_rows, read)

    @guarded
    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_slots", "_views", "_learners")}
        copied = None if self._slots is None else (self._slots.memory.fields, self._slots.copied())
        return {**kept, "copied": copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = state.pop("copied")
        self._detach()
        self.__dict__.update(state)
        if copied is not None:
            fields, slots = copied
            self._allocate(fields)
            self._ready_slots().set_copied(*slots)
