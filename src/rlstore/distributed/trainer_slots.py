"""The slots that the ten methods of a DistributedStorage fill and serve, in the process that created it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlstore.distributed.fields import STEP_KEYS
from rlstore.distributed.memory import RolloutGather, RolloutMemory
from rlstore.distributed.rows import Rows, Step, batch_of, carried_rows, slice_of
from rlstore.engine.batches.select import epoch_rows
from rlstore.engine.checks import check_count, check_counted
from rlstore.engine.guard import Guard, as_block, released, uninterrupted
from rlstore.engine.processes.handoff import Member
from rlstore.engine.processes.slots import State
from rlstore.errors import InvalidInputError, NotReadyError, RolloutFullError
from rlstore.storage import BatchDict


class TrainerSlots:
    """An actor and a learner in one: it takes part in the hand-off as the process that created the memory.

    Args:
        memory: The slots.
        timeout: Seconds to wait for slots, if there are other actors or learners to wait for.
        guard: That of the storage, with which all methods are called; waits release it.
    """

    def __init__(self, memory: RolloutMemory, timeout: float, guard: Guard) -> None:
        self.memory, self._guard = memory, guard
        # Inserting, serving and copying are peers of their own, so that each can return its slots alone.
        self._inserter, self._server, self._copier = (Member(memory.handoff, "maker", None, timeout) for _ in range(3))
        _ = self._inserter.number  # the first that joins is the maker
        memory.maker = self._inserter  # the handles of this process keep it, even without the storage
        self._gather = RolloutGather(memory)
        self._served = self._freed = 0  # transitions in the batches here, rollouts that were served and freed here
        self.forget()
        _IN_USE.add(self)

    def forget(self) -> None:
        """Begin anew, without any slot."""
        self._lanes: list[int] = []  # the slots that are being inserted, one for each environment
        self._step = 0  # the transitions in each of them
        self._carried: dict[str, Tensor] = {}  # the STEP_KEYS of the last row that was inserted
        self._held: list[int] = []  # the slots that are served, oldest first
        self._spent = False  # they were learned from
        self._serving = 0  # running generators
        self._copied: list[int] | None = None  # all complete slots, while they are copied

    def __len__(self) -> int:
        full = self.memory.handoff.slots.counts()[State.FULL]
        return (full + len(self._copied or self._held)) * self.memory.steps + len(self._lanes) * self._step

    def set_timeout(self, timeout: float) -> None:
        """Change the seconds to wait."""
        for member in (self._inserter, self._server, self._copier):
            member.timeout = timeout

    def leave(self) -> None:
        """Stop taking part in the hand-off, which is closed then."""
        for member in (self._inserter, self._server, self._copier):
            member.leave()
        self.forget()

    # ---------------------------------------------------------------------------------------------- writing

    def insert(self, step: Step) -> None:
        """Write one transition of each environment; after ``steps`` of them the rollouts are complete."""
        with uninterrupted():
            memory = self.memory
            if self._spent:
                self._release()
            if not self._lanes:
                lanes = self._reserve(step.lanes)
                if self._lanes:  # another thread has begun the rollouts meanwhile
                    for slot in lanes:
                        self._inserter.abandon(slot, 0)
                else:
                    self._lanes = lanes
            if step.lanes != len(self._lanes):
                raise InvalidInputError(
                    f"the sample has {step.lanes} environments, and this rollout was begun with {len(self._lanes)}. "
                    "Nothing was written."
                )
            with torch.inference_mode(False):
                self._carried = step.write(memory, self._lanes, self._step, self._carried)
            self._step += 1
            if self._step == memory.steps:
                for slot in self._lanes:
                    memory.versions[slot] = memory.handoff.published
                    self._inserter.commit(slot)
                self._lanes, self._step = [], 0

    def _reserve(self, count: int) -> list[int]:
        memory = self.memory
        if count > memory.count:
            raise InvalidInputError(
                f"the sample has {count} environments, each needs a slot, and num_storages is {memory.count}. "
                "Nothing was written."
            )
        lanes: list[int] = []
        try:
            while len(lanes) < count:
                slot = self._inserter.try_reserve()
                if slot is None and not memory.handoff.peers.here("learner"):
                    raise RolloutFullError(
                        f"{count} free slots are needed, and {len(lanes)} of {memory.count} are free: the others hold "
                        "rollouts that were not learned from. Call after_gradients() after the update, or raise "
                        "num_storages. Nothing was written."
                    )
                lanes.append(self._await_slot() if slot is None else slot)
        except BaseException:
            for slot in lanes:
                self._inserter.abandon(slot, 0)
            raise
        return lanes

    def _await_slot(self) -> int:
        with released(self._guard):
            return self._inserter.reserve()

    def replace(self, rows: Rows) -> None:
        """Replace everything that is held with other rollouts."""
        counts = self.memory.handoff.slots.counts()
        room = counts[State.FREE] + counts[State.FULL] + len(self._held) + len(self._lanes)
        if len(rows) > room:
            raise InvalidInputError(
                f"new_data holds {len(rows)} rollouts; there is room for {room}. Nothing was changed."
            )
        with uninterrupted():
            self.clear()
            if not rows:
                return
            slots = [self._inserter.reserve() for _ in range(len(rows))]
            rows.write(self.memory, slots)
            for slot in slots:
                self._inserter.commit(slot)

    def clear(self) -> None:
        """Drop everything that is held; what other actors write is theirs."""
        handoff = self.memory.handoff
        handoff.check_open()
        with uninterrupted():
            for slot in self._lanes:
                self._inserter.abandon(slot, 0)
            counts = handoff.counts()
            self._server.release([*self._held, *self._server.try_collect(handoff.count)])
            handoff.set_counts(counts["served"], counts["abandoned"], counts["reclaimed"])
            self._lanes, self._step, self._carried, self._held, self._spent = [], 0, {}, [], False

    # ---------------------------------------------------------------------------------------------- serving

    def batches(
        self,
        num_mini_batch: int,
        mini_batch_size: int | None,
        num_epochs: int,
        shuffle: bool,
        generator: torch.Generator,
        device: torch.device,
    ) -> Iterator[BatchDict]:
        """Batches of whole rollouts; see ``DistributedStorage.generate_batches``."""
        if self._spent and not self._serving:
            self._release()
        before, state, has_served = (len(self._held), self._served), generator.get_state(), False
        self._serving += 1
        try:
            size = self._hold(num_mini_batch, mini_batch_size)
            held = self._held
            for _ in range(num_epochs):
                order = epoch_rows(len(held), num_mini_batch * size, generator, shuffle=shuffle).tolist()
                for first in range(0, len(order), size):
                    if self._held[: len(held)] != held:
                        raise NotReadyError("the rollouts were dropped while a generator was still serving them")
                    slots = [held[place] for place in order[first : first + size]]
                    with torch.inference_mode(False):
                        batch = batch_of(self.memory, self._gather(slots), slots, device)
                    self._served += len(slots) * self.memory.steps
                    has_served = True
                    yield batch
        except KeyboardInterrupt:
            if not has_served:  # as if it had not been called: the rollouts that it took are full again
                with uninterrupted():
                    generator.set_state(state)
                    self._server.put_back()
                    self._held, self._served = self._server.try_collect(before[0]), before[1]
            raise
        finally:
            self._serving -= 1
            if self._spent and not self._serving:
                self._release()

    def _hold(self, count: int, size: int | None) -> int:
        """Take the rollouts for ``count`` mini-batches.

        Returns:
            The size of each.
        """
        handoff, held = self.memory.handoff, len(self._held)
        wanted = handoff.count if size is None else count * size
        least = count if size is None else wanted
        found = held + handoff.slots.counts()[State.FULL]
        if found < least and (least > handoff.count or not handoff.peers.here("actor")):
            if found == 0:
                raise NotReadyError("this DistributedStorage holds no complete rollout yet; add transitions first")
            raise InvalidInputError(
                f"{count} mini-batches of {size or 1} rollouts were asked for, and there are {found} complete ones"
            )
        with uninterrupted():
            more = self._server.try_collect(wanted - held)
            if held + len(more) < least:
                try:
                    with released(self._guard), handoff.learner_waits.counted():
                        more += self._server.collect(least - held - len(more), None)
                except BaseException:
                    self._held = []  # all of them were put back
                    raise
            self._held = [*self._held, *more]
        return len(self._held) // count if size is None else size

    def learned(self) -> None:
        """The rollouts that were served were learned from: free their slots, once no generator serves them."""
        self._spent = True
        if not self._serving:
            self._release()

    def _release(self) -> None:
        with uninterrupted():
            self._server.release(self._held)
            self._freed += len(self._held)
            self._held, self._spent = [], False

    @property
    def samples(self) -> int:
        """Transitions in all batches that were served, here and to the learners."""
        return self._served + (self.memory.handoff.slots.read - self._freed) * self.memory.steps

    def set_samples(self, count: int) -> None:
        """Go on counting from here."""
        self._served, self._freed = count, self.memory.handoff.slots.read

    @property
    def inserts(self) -> int:
        """Transitions of all rollouts that were completed, and of those that are being inserted here."""
        return self.memory.handoff.slots.written * self.memory.steps + len(self._lanes) * self._step

    # ---------------------------------------------------------------------------------------------- copying

    def everything(self, device: torch.device) -> BatchDict:
        """All complete rollouts, as :func:`rlstore.distributed.rows.slice_of` returns them; empty if there are none."""
        with self.reading_all() as slots, torch.inference_mode(False):
            return slice_of(self.memory, self._gather(slots), device) if slots else {}

    @as_block
    def reading_all(self) -> Iterator[list[int]]:
        """The slots with complete rollouts, oldest first; no learner gets them meanwhile."""
        if self._copied is not None:
            yield self._copied
            return
        try:
            self._copied = [*self._held, *self._copier.try_collect(self.memory.count)]
            yield self._copied
        finally:
            self._copied = None
            self._copier.put_back()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What :meth:`set_state` restores: numbers, and views of the slots by name."""
        with self.reading_all() as slots:
            numbers = self._numbers(slots)
        saved = numbers["order"][: len(slots) + len(self._lanes)]
        tensors = {name: part for index, slot in enumerate(saved) for name, part in self._parts(slot, index)}
        return numbers, {**tensors, **{f"carried {key}": value for key, value in self._carried.items()}}

    def _numbers(self, slots: list[int]) -> dict[str, Any]:
        handoff = self.memory.handoff
        counts, used = handoff.counts(), [*slots, *self._lanes]
        return {
            # All slots: those of rollouts, and then the others as they will be taken; what actors write is not saved.
            "order": list(dict.fromkeys([*used, *handoff.slots.order()])),
            "rollouts": len(slots),
            "held": len(self._held),
            "spent": self._spent,
            "lanes": len(self._lanes),
            "step": self._step,
            "published": handoff.published,
            "counts": [counts["served"], counts["abandoned"], counts["reclaimed"]],
            "samples": self.samples,
        }

    def set_state(
        self,
        numbers: Mapping[str, Any],
        read_into: Callable[[str, Tensor], object],
        read: Callable[[str], Tensor | None],
    ) -> None:
        """Restore a state while the slots are empty and no other peer takes part.

        Args:
            numbers: See :meth:`state`.
            read_into: Copies the tensor of a name into another.
            read: Returns the tensor of a name, or None.
        """
        names = ("rollouts", "held", "lanes", "step", "published")
        rollouts, held, lanes, step, _ = (check_counted("a snapshot", name, numbers[name]) for name in names)
        memory = self.memory
        if rollouts + lanes > memory.count or held > rollouts or step >= memory.steps:
            raise InvalidInputError(
                f"{held} of {rollouts} rollouts held and {lanes} begun, of {step} steps each, are not those of "
                f"{memory.count} slots of {memory.steps} steps"
            )
        order = numbers.get("order", list(range(memory.count)))  # snapshots of earlier versions have none
        if sorted(order) != list(range(memory.count)):
            raise InvalidInputError(f"{str(order)[:80]} is not an order of {memory.count} slots")
        for index, slot in enumerate(order[: rollouts + lanes]):
            for name, part in self._parts(slot, index):
                read_into(name, part)
        served = check_counted("a snapshot", "served", numbers["counts"][0])
        samples = check_count("a snapshot", "samples", numbers.get("samples", served * memory.steps))
        carried = carried_rows(memory.fields, {key: read(f"carried {key}") for key in STEP_KEYS})
        self._resume({**numbers, "spent": bool(numbers["spent"]), "order": order, "samples": samples}, carried)

    def _resume(self, numbers: Mapping[str, Any], carried: dict[str, Tensor]) -> None:
        """Go on with what the slots hold, which are all free: complete rollouts, and those that were begun."""
        handoff, order, rollouts = self.memory.handoff, numbers["order"], numbers["rollouts"]
        used = rollouts + numbers["lanes"]
        held, lanes = numbers["held"], numbers["lanes"]
        parts = [
            (State.READING, self._server.number, held),
            (State.FULL, 0, rollouts - held),
            (State.WRITING, self._inserter.number, lanes),
        ]
        handoff.slots.arrange(order, parts)
        self._held, self._spent = order[:held], numbers["spent"]
        self._lanes, self._step, self._carried = order[rollouts:used], numbers["step"], carried
        handoff.published = numbers["published"]
        handoff.set_counts(*numbers["counts"])
        self.set_samples(numbers["samples"])

    def copied(self) -> tuple[Any, ...]:
        """What :meth:`set_copied` restores: all that the slots hold, also what was written without a hand-off."""
        with self.reading_all() as slots:
            columns = {name: block.clone() for name, block in self.memory.columns.items()}
            return self._numbers(slots), dict(self._carried), columns

    def set_copied(self, numbers: Mapping[str, Any], carried: dict[str, Tensor], columns: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`copied` returned while no other peer takes part."""
        for name, block in self.memory.columns.items():
            block.copy_(columns[name])
        self._resume(numbers, carried)

    def _parts(self, slot: int, index: int) -> list[tuple[str, Tensor]]:
        """Everything that a slot holds, by the names under which rollout ``index`` is saved."""
        return [(f"rollout {index} {name}", block[slot]) for name, block in self.memory.columns.items()]


_IN_USE: weakref.WeakSet[TrainerSlots] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked child: the slots are the parent's."""
    for slots in list(_IN_USE):
        slots.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
