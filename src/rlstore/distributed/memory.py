"""The memory of DistributedStorage: one segment that actors and learners have in common, and the views of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.distributed.fields import RolloutFields
from rlstore.engine.batches.gather import LARGE_BYTES, gather_slots
from rlstore.engine.memory.capacity import free_ram
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.memory.tensors import Recycler, allocate_empty, allocate_huge
from rlstore.engine.processes.handoff import Handoff, Member
from rlstore.errors import DoesNotFitError

_LINE = 64  # bytes; two slots never share a cache line, so two actors never write the same one


class RolloutMemory:
    """``count`` slots for rollouts of ``steps + 1`` rows, and their hand-off, in one segment.

    A key's block is ``[slot, time, ...]``: an actor writes its own part of the memory, from end to end.

    It can be pickled in any way, while a process that has it lives: what is unpickled is the same memory.

    Args:
        fields: What a row holds.
        steps: The steps of a rollout.
        count: The slots.
        segment: The memory, if it is there already.
    """

    def __init__(self, fields: RolloutFields, steps: int, count: int, segment: SharedMemory | None = None) -> None:
        self.fields, self.steps, self.count = fields, steps, count
        # A state is held without its axis of 1, so that states of several slots can be joined there.
        forms = [(f.name, (steps + 1, *f.shape), f.dtype) for f in fields.fields]
        forms += [(f"states[{i}]", shape, torch.float32) for i, shape in enumerate(fields.state_shapes)]
        forms.append(("version", (1,), torch.int64))
        nbytes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in forms]
        lines = [max(-(-size // _LINE), 1) * _LINE for size in nbytes]
        if segment is None:
            needed = SharedMemory.bytes_of([*Handoff.pieces(count), *(((count, line), torch.uint8) for line in lines)])
            _check_room(needed, steps, count)
            segment = SharedMemory.create(needed)
        self.segment = segment
        self.handoff = Handoff(segment, count)
        self.maker: Member | None = None  # in the process that made it
        with torch.inference_mode(False):
            pieces = [
                segment.carve((count, line), torch.uint8)[:, :size].view(dtype).view(count, *shape)
                for line, size, (_, shape, dtype) in zip(lines, nbytes, forms, strict=True)
            ]
        names = len(fields.fields)
        self.blocks = dict(zip((field.name for field in fields.fields), pieces[:names], strict=True))
        self.states = tuple(pieces[names:-1])
        self.versions = pieces[-1]

    def write(self, slot: int, row: int, values: Mapping[str, Tensor]) -> None:
        """Write values that fit into a row of a slot; axes of 1 before a value's shape are passed over."""
        with torch.no_grad():
            for name, value in values.items():
                self.blocks[name][slot, row, ...] = value

    def write_states(self, slot: int, states: Sequence[Tensor]) -> None:
        """Write the recurrent states with which a rollout begins, ``(layers, 1, hidden)`` each."""
        for block, state in zip(self.states, states, strict=True):
            block[slot].copy_(state[:, 0])

    def clear(self, slot: int) -> None:
        """Make everything in a slot zero."""
        for block in (*self.blocks.values(), *self.states, self.versions):
            block[slot].zero_()

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutMemory, (self.fields, self.steps, self.count, self.segment)


def _check_room(nbytes: int, steps: int, count: int) -> None:
    free = free_ram()
    if free is not None and nbytes > free[0]:
        raise DoesNotFitError(
            f"DistributedStorage needs {nbytes / 1e9:.2f} GB for {count} rollouts of {steps} steps, and "
            f"{free[0] / 1e9:.2f} GB are free ({free[1]}). Nothing was allocated. Give a smaller num_storages or "
            "num_steps."
        )


class RolloutGather:
    """Joins the rollouts of slots into batches, in memory that served before where it can. For one thread at a time.

    Args:
        memory: Where from.
        pin_memory: Whether the results lie in page-locked memory.
    """

    def __init__(self, memory: RolloutMemory, *, pin_memory: bool = False) -> None:
        self._memory, self._pin_memory = memory, pin_memory
        self._outputs, self._served = Recycler(allocate_huge), 0

    def __call__(self, slots: Sequence[int]) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Tensor]:
        """The rollouts by key, ``[T + 1, B, ...]``; their states ``[layers, B, hidden]``; their versions ``[B]``."""
        tensors = self._gather((*self._memory.blocks.values(), *self._memory.states, self._memory.versions), slots)
        count = len(self._memory.blocks)
        return self._named(tensors[:count]), tensors[count:-1], tensors[-1][0]

    def rollouts(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """The rollouts alone."""
        return self._named(self._gather(tuple(self._memory.blocks.values()), slots))

    def states(self, slots: Sequence[int]) -> tuple[Tensor, ...]:
        """The states alone."""
        return self._gather(self._memory.states, slots)

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._memory.blocks, tensors, strict=True))

    def _gather(self, blocks: tuple[Tensor, ...], slots: Sequence[int]) -> tuple[Tensor, ...]:
        self._served += 1
        if self._served % 256 == 0:
            self._outputs.begin()  # what has not served for so long is let go
        with torch.inference_mode(False):
            return gather_slots(blocks, torch.tensor(slots, dtype=torch.int64), self._empty)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._pin_memory:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        if math.prod(shape) * dtype.itemsize < LARGE_BYTES:
            return allocate_empty(shape, dtype, device)
        return self._outputs.empty(shape, dtype, device)


class SlotTensors(tuple[Tensor, ...]):
    """A key's tensors ``[T + 1, ...]``, one for each slot."""

    _origin: tuple[RolloutMemory, str]

    def __new__(cls, memory: RolloutMemory, key: str) -> SlotTensors:
        """The tensors of a key."""
        made = super().__new__(cls, _slot_views(memory.blocks[key]))
        made._origin = (memory, key)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return SlotTensors, self._origin


class RolloutStorages(Mapping[str, SlotTensors]):
    """Every key's tensors in shared memory, ``storages[key][slot][t, ...]``.

    It can be pickled in any way, while a process that has it lives: what is unpickled is the same memory. However many
    slots there are, that is one segment.
    """

    def __init__(self, memory: RolloutMemory) -> None:
        self.memory = memory
        self._keys = {key: SlotTensors(memory, key) for key in memory.blocks}
        self._gather, self._gather_on_device = RolloutGather(memory), RolloutGather(memory, pin_memory=True)
        self._lock = threading.Lock()  # gathering is for one thread at a time

    def __getitem__(self, key: str) -> SlotTensors:
        return self._keys[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def gather(self, device: torch.device, make: Callable[[RolloutGather], Any]) -> Any:
        """What ``make`` gathers, for a device."""
        with self._lock:
            return make(self._gather_on_device if device.type == "cuda" else self._gather)

    def __repr__(self) -> str:
        return f"RolloutStorages({', '.join(self)}: {self.memory.count} slots of {self.memory.steps + 1} rows)"

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutStorages, (self.memory,)


class InitialStates(list[tuple[Tensor, ...]]):
    """The recurrent states with which the rollout of each slot begins: one tuple a slot, of ``(layers, 1, hidden)``.

    It can be pickled as :class:`RolloutStorages` can.
    """

    def __init__(self, storages: RolloutStorages) -> None:
        self.storages = storages
        views = [_slot_views(block.unsqueeze(2)) for block in storages.memory.states]
        super().__init__(tuple(view[slot] for view in views) for slot in range(storages.memory.count))

    def __reduce__(self) -> tuple[Any, ...]:
        return InitialStates, (self.storages,)


def _slot_views(block: Tensor) -> list[Tensor]:
    with torch.inference_mode(False):
        # Tensors in their own right: one that is given a value with a history does not pass it on to the others.
        return [block.select(0, slot).detach() for slot in range(block.shape[0])]
