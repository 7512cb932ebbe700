"""The memory of DistributedStorage: one shared segment for all actors and learners, the views of it, and the gather."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlstore.distributed.fields import RolloutFields
from rlstore.engine.batches.gather import gather_slots
from rlstore.engine.guard import guarded, new_guard
from rlstore.engine.memory.capacity import require_memory
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.memory.tensors import Recycler
from rlstore.engine.processes.handoff import Handoff, Member

_LINE = 64  # bytes; two slots never share a cache line, so two actors never write the same one
_VERSION = "version"
_CPU = torch.device("cpu")


class RolloutMemory:
    """``count`` slots for rollouts of ``steps + 1`` rows, and their hand-off, in one segment.

    A key's block is ``[slot, time, ...]``, so an actor writes one contiguous part of each.

    It can be pickled while a process that has it is alive; the unpickled object refers to the same memory.

    Attributes:
        columns: Everything that a slot holds, ``[slot, ...]``: the blocks, the states ``states[i]``, the version.
        blocks: By key a tensor ``[slot, steps + 1, ...]``.
        states: The recurrent states, ``[slot, layers, hidden]`` each.
        versions: The policy versions, ``[slot, 1]``.

    Args:
        fields: What a row holds.
        steps: The steps of a rollout.
        count: The slots.
        segment: The memory, if it exists already.
    """

    def __init__(self, fields: RolloutFields, steps: int, count: int, segment: SharedMemory | None = None) -> None:
        self.fields, self.steps, self.count = fields, steps, count
        forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: ((steps + 1, *field.shape), field.dtype) for key, field in fields.columns.items()
        }
        # A state is held without its batch axis, along which those of several slots are concatenated.
        states = {f"states[{i}]": (shape, torch.float32) for i, shape in enumerate(fields.state_shapes)}
        forms = {**forms, **states, _VERSION: ((1,), torch.int64)}
        nbytes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in forms.items()}
        lines = {name: max(-(-size // _LINE), 1) * _LINE for name, size in nbytes.items()}
        if segment is None:
            pieces = [((count, line), torch.uint8) for line in lines.values()]
            needed = SharedMemory.bytes_of([*Handoff.pieces(count), *pieces])
            what = f"{count:,} rollouts of {steps:,} steps"
            require_memory("DistributedStorage", needed, what, _CPU, "Give a smaller num_storages or num_steps.")
            segment = SharedMemory.create(needed)
        self.segment = segment
        self.handoff = Handoff(segment, count)
        self.maker: Member | None = None  # in the process that created it
        self.columns: dict[str, Tensor] = {}
        with torch.inference_mode(False):
            for name, (shape, dtype) in forms.items():
                padded = segment.carve((count, lines[name]), torch.uint8)
                self.columns[name] = padded[:, : nbytes[name]].view(dtype).view(count, *shape)
        self.blocks = {key: self.columns[key] for key in fields.columns}
        self.states = tuple(self.columns[name] for name in states)
        self.versions = self.columns[_VERSION]

    def write(self, slot: int, row: int, values: Mapping[str, Tensor]) -> None:
        """Write values that fit to a row of a slot; axes of 1 before a value's shape are ignored."""
        with torch.no_grad():
            for name, value in values.items():
                self.blocks[name][slot, row, ...] = value

    def write_states(self, slots: Sequence[int], states: Sequence[Tensor]) -> None:
        """Write the recurrent states at the start of some rollouts, ``[slots, layers, hidden]`` each."""
        index = torch.tensor(slots, dtype=torch.int64)
        for block, state in zip(self.states, states, strict=True):
            block[index] = state

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutMemory, (self.fields, self.steps, self.count, self.segment)


class Gathered(NamedTuple):
    """Copies of the rollouts of some slots.

    Attributes:
        tensors: By key ``[T + 1, B, ...]``.
        states: The recurrent states, ``[layers, B, hidden]`` each.
        versions: int64 ``[B]``.
    """

    tensors: dict[str, Tensor]
    states: tuple[Tensor, ...]
    versions: Tensor


class RolloutGather:
    """Copies the rollouts of slots into batches; large outputs reuse memory that is no longer referenced.

    Args:
        memory: The slots.
        pin_memory: Whether the outputs are page-locked.
    """

    def __init__(self, memory: RolloutMemory, *, pin_memory: bool = False) -> None:
        self._memory, self._pin_memory = memory, pin_memory
        self._outputs, self._calls, self._guard = Recycler(), 0, new_guard()

    @guarded
    def __call__(self, slots: Sequence[int]) -> Gathered:
        """The rollouts of some slots, with states and versions."""
        self._calls += 1
        if self._calls % 256 == 0:
            self._outputs.begin()  # frees what was not reused since
        memory = self._memory
        tensors = gather_slots(tuple(memory.columns.values()), slots, self._outputs.empty_group, self._pin_memory)
        count = len(memory.blocks)
        return Gathered(dict(zip(memory.blocks, tensors[:count], strict=True)), tensors[count:-1], tensors[-1][0])


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

    It can be pickled while a process that has it is alive; the unpickled object refers to the same memory. However many
    slots there are, the memory is one segment.
    """

    def __init__(self, memory: RolloutMemory) -> None:
        self.memory = memory
        self._keys = {key: SlotTensors(memory, key) for key in memory.blocks}
        self._gathers = {pin: RolloutGather(memory, pin_memory=pin) for pin in (False, True)}

    def __getitem__(self, key: str) -> SlotTensors:
        return self._keys[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def gather(self, slots: Sequence[int], device: torch.device) -> Gathered:
        """Copies of the rollouts of some slots, page-locked if they are to go to a CUDA device."""
        return self._gathers[device.type == "cuda"](slots)

    def __repr__(self) -> str:
        return f"RolloutStorages({', '.join(self)}: {self.memory.count} slots of {self.memory.steps + 1} rows)"

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutStorages, (self.memory,)


class InitialStates(list[tuple[Tensor, ...]]):
    """The recurrent states at the start of each slot's rollout: one tuple a slot, of tensors ``(layers, 1, hidden)``.

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
        # Detached: writing a value with a gradient history to one slot does not reach the others.
        return [block.select(0, slot).detach() for slot in range(block.shape[0])]
