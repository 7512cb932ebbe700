"""Writing into some of the lanes of a storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlstore.off_policy import OffPolicyStorage
from rlstore.storage import Sample, Storage


def count_lanes(storage: Storage) -> int | None:
    """The environments of a storage; None if its first sample will tell."""
    lanes = getattr(storage, "num_envs", None)
    return lanes if isinstance(lanes, int) else None


def can_split(storage: Storage) -> bool:
    """True if several writers can have lanes of the storage each."""
    return isinstance(storage, OffPolicyStorage)


class LaneWriter:
    """Writes the lanes ``[first, stop)`` of a storage.

    Args:
        storage: The storage.
        first: The first lane.
        stop: The lane after the last.
        whole: True if these are all lanes.
    """

    def __init__(self, storage: Storage, first: int, stop: int, whole: bool) -> None:
        self._storage, self._first, self._stop, self._whole = storage, first, stop, whole

    def insert(self, sample: Sample) -> None:
        """Store one step of these lanes."""
        if self._whole:
            self._storage.insert_transition(sample)
            return
        lanes = count_lanes(self._storage) or 0
        mask = torch.zeros(lanes, dtype=torch.bool)
        given = sample.get("masks")
        mask[self._first : self._stop] = True if given is None else given
        wide = {name: self._widen(value, lanes, name) for name, value in sample.items() if name != "masks"}
        self._storage.insert_transition({**wide, "masks": mask})

    def _widen(self, value: Any, lanes: int, name: str) -> Any:
        if isinstance(value, Tensor):
            axis = 1 if name == "hidden_states" else 0
            wide = value.new_zeros([*value.shape[:axis], lanes, *value.shape[axis + 1 :]])
            wide.narrow(axis, self._first, self._stop - self._first).copy_(value)
            return wide
        if isinstance(value, dict):
            return {key: self._widen(part, lanes, name) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(self._widen(part, lanes, name) for part in value)
        return value
