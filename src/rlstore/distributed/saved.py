"""How DistributedStorage is saved, restored and copied."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlstore.distributed.fields import RolloutFields
from rlstore.distributed.memory import RolloutMemory
from rlstore.distributed.rows import CARRIED
from rlstore.distributed.trainer import DistributedTrainer
from rlstore.engine.disk.snapshot import SnapshotReader

_AnyStorage = TypeVar("_AnyStorage", bound="SavedDistributed")
_SETTINGS = ("observation_space", "action_space", "num_steps", "num_storages", "batch_size", "state_shapes", "timeout")
# What belongs to this process, or to the memory that a copy does not share.
_OWN = ("_memory", "_views", "_gather", "_inserter", "_server", "_looker", "_learners", "_looked", "_serving")


class SavedDistributed(DistributedTrainer):
    """A DistributedStorage that can be saved: its complete rollouts, and those that ``insert_transition`` has begun.

    What actors are writing, and what learners are reading, is theirs: it is not saved. Handles are not, either.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save everything that is needed to go on exactly; see :meth:`rlstore.Storage.save`.

        Rollouts that actors are writing at the moment are not part of it.
        """
        if self._memory is None:
            super().save(path)
            return
        with self._all_slots():  # nobody else gets them before they are on the disk
            super().save(path)

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in _SETTINGS}
        settings["state_shapes"] = [list(shape) for shape in self.state_shapes]
        learnt = self._memory is not None and self.observation_space is None  # from the first sample
        settings["learnt"] = self._memory.fields.described() if self._memory is not None and learnt else None
        return settings

    @classmethod
    def _from_settings(cls: type[_AnyStorage], settings: Mapping[str, Any], device: str | torch.device) -> _AnyStorage:
        given = {name: value for name, value in settings.items() if name != "learnt"}
        make: Any = cls
        storage: _AnyStorage = make(**given, device=device, seed=0)
        if settings["learnt"] is not None:
            storage._allocate(RolloutFields.of_described(settings["learnt"], storage.state_shapes))
        return storage

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._memory is None:
            return {}, {}
        memory, handoff = self._memory, self._memory.handoff
        with self._all_slots() as slots:
            numbers = {
                "rollouts": len(slots),
                "held": len(self._held),
                "spent": self._spent,
                "lanes": len(self._lanes),
                "step": self._step,
                "published": handoff.published,
                "counts": [handoff.served, handoff.abandoned, handoff.reclaimed],
            }
            tensors = {
                name: part
                for index, slot in enumerate([*slots, *self._lanes])
                for name, part in _parts(memory, slot, index)
            }
        return numbers, {**tensors, **{f"carried {key}": value for key, value in self._carried.items()}}

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        def read(name: str) -> Tensor | None:
            return reader.tensor(name) if name in reader.names else None

        self._fill(numbers, reader.read_into, read)

    def _fill(
        self,
        numbers: Mapping[str, Any],
        read_into: Callable[[str, Tensor], object],
        read: Callable[[str], Tensor | None],
    ) -> None:
        """Put everything into a storage that is empty and nobody's else."""
        if self._memory is None:
            return
        rollouts, handoff = numbers["rollouts"], self._memory.handoff
        taken = [self._inserter.reserve(0.0) for _ in range(rollouts + numbers["lanes"])]
        for index, slot in enumerate(taken):
            for name, part in _parts(self._memory, slot, index):
                read_into(name, part)
            if index < rollouts:
                self._inserter.commit(slot)
        self._held, self._spent = self._server.try_collect(numbers["held"]), numbers["spent"]
        self._lanes, self._step = taken[rollouts:], numbers["step"]
        carried = {key: read(f"carried {key}") for key in CARRIED}
        self._carried = {key: value for key, value in carried.items() if value is not None}
        handoff.published = numbers["published"]
        handoff.set_counts(*numbers["counts"])

    # ---------------------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        numbers, tensors = self._state()
        kept = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        fields = None if self._memory is None else self._memory.fields
        return {**kept, "saved": (fields, numbers, {name: tensor.clone() for name, tensor in tensors.items()})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields, numbers, tensors = state.pop("saved")
        self._begin_anew()
        self.__dict__.update(state)
        if fields is not None:
            self._allocate(fields)
            self._fill(numbers, lambda name, target: target.copy_(tensors[name]), tensors.get)


def _parts(memory: RolloutMemory, slot: int, index: int) -> list[tuple[str, Tensor]]:
    """Everything that a slot holds, by the names under which rollout ``index`` is saved."""
    blocks = {**memory.blocks, **{f"states[{i}]": block for i, block in enumerate(memory.states)}}
    blocks["version"] = memory.versions
    return [(f"rollout {index} {name}", block[slot]) for name, block in blocks.items()]
