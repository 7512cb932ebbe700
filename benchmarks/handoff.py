"""Rollouts passed from two actor processes to a learner, as in IMPALA: 80 steps of 4 x 84 x 84 frames, 8 per batch.

The learner takes batches back to back and does nothing with them. In one workload the actors hand over slots that are
already written, so that only the hand-off and the gathering of batches are timed. In the other they write each rollout
first, with a copy; on a machine with few cores that costs the learner time too.

Actors are separate processes, so the wall clock is used. They block when every slot is full, and so do not disturb the
contender whose turn it is.
"""

from __future__ import annotations

import mmap
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from benchmarks.harness import Contender, Phase, Target, Workload
from benchmarks.replay_contenders import keep_freed_memory
from rlstore import DistributedStorage, SlotQueue, StorageClosedError

STEPS, BATCH, ACTORS = 80, 8, 2
# Three batches: one is read while others are written.
SLOTS = 3 * BATCH
BATCHES = 10
ACTIONS = 6
FRAMES = (4, 84, 84)
# Longer than it takes to fill all slots.
REST = 0.2
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "obs": (FRAMES, torch.uint8),
    "reward": ((), torch.float32),
    "terminated": ((), torch.bool),
    "truncated": ((), torch.bool),
    "episode_return": ((), torch.float32),
    "episode_step": ((), torch.int32),
    "last_action": ((), torch.int64),
    "policy_outputs": ((ACTIONS,), torch.float32),
    "baseline": ((), torch.float32),
    "action": ((), torch.int64),
}
# Rollouts written by actors are numbered from here on; those initially in the slots have the numbers of the slots.
FIRST_WRITTEN = 100

Rollouts = Mapping[str, Tensor]


def rollout(number: int) -> dict[str, Tensor]:
    """A rollout ``[STEPS + 1, ...]`` that contains its number, from which all of its values follow."""
    random = torch.Generator().manual_seed(number)
    values = {
        key: torch.randint(0, 2 if dtype == torch.bool else 256, (STEPS + 1, *shape), generator=random).to(dtype)
        for key, (shape, dtype) in SHAPES.items()
    }
    values["episode_step"].fill_(number)
    return values


def copy_into(slot: Mapping[str, Tensor], values: Rollouts) -> None:
    for key, value in values.items():
        slot[key].copy_(value)


class Handoff(Contender):
    """Hand-off slots, two actors that fill them, and a learner that takes batches of them."""

    def __init__(self, name: str, writes: bool) -> None:
        super().__init__(name)
        self._writes = writes
        self._actors: list[BaseProcess] = []
        self._batch: Rollouts = {}

    def start(self, work: Callable[..., None], *args: Any) -> None:
        """Fork the actors; each is given a rollout to write, or None."""
        for actor in range(ACTORS):
            values = rollout(FIRST_WRITTEN + actor) if self._writes else None
            process = torch.multiprocessing.get_context("fork").Process(target=work, args=(values, *args), daemon=True)
            process.start()
            self._actors.append(process)

    @abstractmethod
    def take(self) -> Rollouts:
        """The next batch."""

    @abstractmethod
    def stop(self) -> None:
        """Make the actors return."""

    def phases(self) -> Mapping[str, Callable[[], None]]:
        return {"batch": self._take_all}

    def _take_all(self) -> None:
        for _ in range(BATCHES):
            self._batch = self.take()

    def evidence(self) -> Mapping[str, Tensor]:
        return self._batch

    def rest(self) -> None:
        time.sleep(REST)

    def close(self) -> None:
        self.stop()
        for actor in self._actors:
            actor.join()


# ---------------------------------------------------------------------------------------------------- rlstore


def storage() -> DistributedStorage:
    frames = Box(0, 255, FRAMES, np.uint8)
    made = DistributedStorage(frames, Discrete(ACTIONS), "cpu", STEPS, SLOTS, BATCH)
    for slot in range(SLOTS):
        copy_into({key: made.storages[key][slot] for key in made.storages}, rollout(slot))
    return made


class Native(Handoff):
    """Our actor and learner handles."""

    role = "ours"

    def __init__(self, name: str, writes: bool, prefetch: int) -> None:
        super().__init__(name, writes)
        self._storage = storage()
        self.start(_act_natively, self._storage.actor())
        self._learner = self._storage.learner(prefetch=prefetch)

    def take(self) -> Rollouts:
        return next(self._learner)

    def stop(self) -> None:
        self._learner.close()
        self._storage.close()


def _act_natively(values: Rollouts | None, actor: Any) -> None:
    torch.set_num_threads(1)
    try:
        while True:
            reserved = actor.reserve(timeout=3600)
            if values is not None:
                copy_into({key: reserved[key] for key in values}, values)
            reserved.commit()
    except StorageClosedError:
        return


def _act_with_queues(values: Rollouts | None, free: Any, full: Any, slots: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    while (slot := free.get()) is not None:
        if values is not None:
            copy_into({key: slots[key][slot] for key in values}, values)
        full.put(slot)


class Queues(Handoff):
    """Slot numbers in two queues."""

    def __init__(self, name: str, writes: bool, make_queue: Callable[[], Any], slots: Mapping[str, Any]) -> None:
        super().__init__(name, writes)
        self.free, self.full, self.slots = make_queue(), make_queue(), slots
        self.start(_act_with_queues, self.free, self.full, slots)
        for slot in range(SLOTS):
            self.free.put(slot)

    def stop(self) -> None:
        for _ in range(ACTORS):
            self.free.put(None)


class Documented(Queues):
    """Our storage, driven through the documented interface with queues."""

    role = "ours"

    def __init__(self, name: str, writes: bool, make_queue: Callable[[], Any]) -> None:
        self._storage = storage()
        super().__init__(name, writes, make_queue, self._storage.storages)

    def take(self) -> Rollouts:
        states = self._storage.init_actor_state_storages
        return DistributedStorage.sample("cpu", BATCH, self.free, self.full, self.slots, states)[0]


# ---------------------------------------------------------------------------------------------------- others


class Plain(Queues):
    """The pattern of many programs: a shared tensor for each key of each slot, and ``torch.stack``."""

    def __init__(self, name: str, writes: bool) -> None:
        slots: dict[str, list[Tensor]] = {
            key: [torch.zeros((STEPS + 1, *shape), dtype=dtype).share_memory_() for _ in range(SLOTS)]
            for key, (shape, dtype) in SHAPES.items()
        }
        for slot in range(SLOTS):
            copy_into({key: slots[key][slot] for key in slots}, rollout(slot))
        super().__init__(name, writes, simple_queue, slots)

    def take(self) -> Rollouts:
        taken = [self.full.get() for _ in range(BATCH)]
        batch = {key: torch.stack([tensors[slot] for slot in taken], dim=1) for key, tensors in self.slots.items()}
        for slot in taken:
            self.free.put(slot)
        return batch


def simple_queue() -> Any:
    return torch.multiprocessing.get_context("fork").SimpleQueue()


class Copy(Contender):
    """A flat copy of the bytes of a batch: into preallocated memory, or each time into new memory from the system."""

    role = "floor"

    def __init__(self, name: str, new_memory: bool) -> None:
        super().__init__(name)
        self._source = torch.cat([v.flatten().view(torch.uint8) for n in range(BATCH) for v in rollout(n).values()])
        self._target = torch.zeros_like(self._source)
        self._new_memory = new_memory

    def phases(self) -> Mapping[str, Callable[[], None]]:
        return {"batch": self._copy_all}

    def _copy_all(self) -> None:
        for _ in range(BATCHES):
            if self._new_memory:
                self._target = torch.frombuffer(mmap.mmap(-1, len(self._source)), dtype=torch.uint8)
            self._target.copy_(self._source)

    def rest(self) -> None:
        time.sleep(REST)  # as the others do: a busy machine schedules a process first that has slept


def check(writes: bool, evidence: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise if a batch does not consist of the rollouts whose numbers it contains."""
    for name, batch in evidence.items():
        if not batch:
            continue
        numbers = batch["episode_step"][0].tolist()
        if len(numbers) != BATCH or (not writes and len(set(numbers)) != BATCH):
            raise RuntimeError(f"{name} served the rollouts {numbers}, not {BATCH} different ones")
        if writes and min(numbers) < FIRST_WRITTEN:
            raise RuntimeError(f"{name} served a rollout that was never written, of {numbers}")
        rollouts = [rollout(number) for number in numbers]
        for key in SHAPES:
            if not torch.equal(batch[key], torch.stack([values[key] for values in rollouts], dim=1)):
                raise RuntimeError(f"{name} served a {key} that differs from that of the rollouts {numbers}")


def workload(writes: bool = False) -> Workload:
    keep_freed_memory()
    title = "written and handed over" if writes else "handed over"
    return Workload(
        name="handoff_written" if writes else "handoff",
        title=f"Rollouts of 80 steps, 4 x 84 x 84 in uint8, {title} by 2 actors",
        phases=(Phase("batch", "batch of 8", BATCHES),),
        contenders={
            "rlstore": partial(Native, "rlstore", writes, prefetch=1),
            "rlstore, prefetch 0": partial(Native, "rlstore, prefetch 0", writes, prefetch=0),
            "rlstore, sample()": partial(Documented, "rlstore, sample()", writes, simple_queue),
            "rlstore, SlotQueue": partial(Documented, "rlstore, SlotQueue", writes, partial(SlotQueue, SLOTS)),
            "SimpleQueue": partial(Plain, "SimpleQueue", writes),
            "memcpy": partial(Copy, "memcpy", new_memory=False),
            "memcpy, new memory": partial(Copy, "memcpy, new memory", new_memory=True),
        },
        check=partial(check, writes),
        rounds=5 if writes else 8,
        targets=() if writes else (Target("batch", ("SimpleQueue",), 0.3, row="IMPALA hand-off"),),
        clock="wall",
    )
