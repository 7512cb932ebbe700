"""What DistributedStorage keeps for itself: the memory, and the slots that its own process writes and serves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlstore.distributed.fields import RolloutFields, check_state_shapes
from rlstore.distributed.learner import Learner
from rlstore.distributed.memory import InitialStates, RolloutGather, RolloutMemory, RolloutStorages
from rlstore.engine.checks import check_positive, check_seconds
from rlstore.engine.processes.handoff import Member
from rlstore.engine.processes.slots import State
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.errors import InvalidInputError, NotReadyError, RolloutFullError
from rlstore.storage import Storage


class DistributedBase(Storage):
    """Slots in shared memory, of which this process may write and serve some itself."""

    _memory: RolloutMemory | None = None
    _views: tuple[RolloutStorages, InitialStates] | None = None

    def __init__(
        self,
        num_steps: int,
        device: str | torch.device,
        num_storages: int,
        batch_size: int,
        state_shapes: Sequence[tuple[int, int]],
        timeout: float,
        seed: int | None,
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, num_steps=num_steps, num_storages=num_storages, batch_size=batch_size)
        check_seconds(owner, timeout=timeout)
        super().__init__(num_steps, device, seed=seed)
        self.num_storages, self.batch_size, self.timeout = int(num_storages), int(batch_size), float(timeout)
        self.state_shapes = check_state_shapes(owner, state_shapes)
        self.observation_space: SpaceLike | None = None
        self.action_space: SpaceLike | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing is held."""
        self._learners: weakref.WeakSet[Learner] = weakref.WeakSet()
        self._lanes: list[int] = []  # the slots that insert_transition() writes, one for each environment
        self._step = 0  # the transitions in each of them
        self._carried: dict[str, Tensor] = {}  # the end of the rollouts before: the beginning of the next
        self._held: list[int] = []  # the slots that generate_batches() serves, oldest first
        self._spent = False  # they were learnt from
        self._serving = 0  # generators at work
        self._looked: list[int] | None = None  # all slots with rollouts, while somebody looks at them

    # ---------------------------------------------------------------------------------------------- memory

    @property
    def num_steps(self) -> int:
        """Steps of a rollout."""
        return self.max_size

    def _allocate_for_spaces(self, observation_space: SpaceLike, action_space: SpaceLike) -> None:
        owner = type(self).__name__
        self._allocate(RolloutFields.of_spaces(owner, observation_space, action_space, self.state_shapes))

    def _allocate(self, fields: RolloutFields) -> None:
        memory = RolloutMemory(fields, self.max_size, self.num_storages)
        # What inserts, what serves, and what looks hold slots apart from one another.
        self._inserter, self._server, self._looker = (
            Member(memory.handoff, "maker", None, self.timeout) for _ in range(3)
        )
        _ = self._inserter.number  # the first to join is the one that made the memory
        memory.maker = self._inserter  # handles of this process keep it, though the storage be let go of
        self._memory, self._views = memory, None
        self._gather = RolloutGather(memory)

    def _ready_memory(self) -> RolloutMemory:
        if self._memory is None:
            raise NotReadyError(
                f"this {type(self).__name__} waits for its first sample: call init_tensors() or insert one"
            )
        return self._memory

    def _open_memory(self) -> RolloutMemory:
        memory = self._ready_memory()
        memory.handoff.check_open()
        return memory

    def _ready_views(self) -> tuple[RolloutStorages, InitialStates]:
        memory = self._ready_memory()
        if self._views is None:
            storages = RolloutStorages(memory)
            self._views = storages, InitialStates(storages)
        return self._views

    def _close(self) -> None:
        if self._memory is None:
            return
        self._memory.handoff.close()
        for learner in list(self._learners):
            learner.close()
        for member in (self._inserter, self._server, self._looker):
            member.leave()
        self._begin_anew()

    def __len__(self) -> int:
        """Transitions held now: those of complete rollouts, and those that were inserted since."""
        if self._memory is None:
            return 0
        full = self._memory.handoff.slots.counts()[State.FULL]
        return (full + len(self._looked or self._held)) * self.max_size + len(self._lanes) * self._step

    def __repr__(self) -> str:
        if "_looked" not in self.__dict__:
            return object.__repr__(self)
        name = f"{type(self).__name__}({self.num_storages} slots of {self.max_size} steps on {self.device}"
        if self._memory is None:
            return f"{name}: waits for its first sample)"
        return f"{name}: {len(self)} transitions held, {self._memory.segment.nbytes / 1e6:.1f} MB)"

    # ---------------------------------------------------------------------------------------------- own slots

    def _reserve_lanes(self, count: int) -> None:
        if count > self.num_storages:
            raise InvalidInputError(
                f"the sample has {count} environments, each needs a slot, and num_storages is {self.num_storages}. "
                "Nothing was written."
            )
        handoff, lanes = self._open_memory().handoff, list[int]()
        try:
            while len(lanes) < count:
                slot = self._inserter.try_reserve()
                if slot is None and not handoff.peers.here("learner"):
                    raise RolloutFullError(
                        f"{count} free slots are needed, and {len(lanes)} of {self.num_storages} are free: the others "
                        "hold rollouts that nobody has learnt from. Call after_gradients() after the update, or raise "
                        "num_storages. Nothing was written."
                    )
                lanes.append(self._inserter.reserve() if slot is None else slot)
        except BaseException:
            for slot in lanes:
                self._inserter.abandon(slot, 0)
            raise
        self._lanes = lanes

    def _hold(self, count: int, size: int | None) -> int:
        """Take the rollouts for ``count`` mini-batches, and give the size of each."""
        handoff, held = self._open_memory().handoff, len(self._held)
        wanted = self.num_storages if size is None else count * size
        least = count if size is None else wanted
        found = held + handoff.slots.counts()[State.FULL]
        if found < least and (least > self.num_storages or not handoff.peers.here("actor")):
            if found == 0:
                raise NotReadyError(f"this {type(self).__name__} holds no complete rollout yet; add transitions first")
            raise InvalidInputError(
                f"{count} mini-batches of {size or 1} rollouts were asked for, and there are {found} complete ones"
            )
        more = self._server.try_collect(wanted - held)
        if held + len(more) < least:
            try:
                more += self._server.collect(least - held - len(more), None)
            except BaseException:
                self._held = []  # all of them are back in their places
                raise
        self._held = [*self._held, *more]
        return len(self._held) // count if size is None else size

    def _release(self) -> None:
        if self._held:
            self._server.release(self._held)
        self._held, self._spent = [], False

    def _empty(self) -> None:
        handoff = self._open_memory().handoff
        for slot in self._lanes:
            self._inserter.abandon(slot, 0)
        served, dropped = handoff.served, [*self._held, *self._server.try_collect(handoff.count)]
        self._server.release(dropped)
        handoff.set_counts(served, handoff.abandoned, handoff.reclaimed)
        self._lanes, self._step, self._carried, self._held, self._spent = [], 0, {}, [], False

    @contextmanager
    def _all_slots(self) -> Iterator[list[int]]:
        """The slots with complete rollouts, oldest first; nobody else gets them meanwhile."""
        if self._looked is not None:
            yield self._looked
            return
        self._looked = [*self._held, *self._looker.try_collect(self.num_storages)]
        try:
            yield self._looked
        finally:
            self._looked = None
            self._looker.put_back()
