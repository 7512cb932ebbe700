"""The documented hand-off, through queues of the caller's: ``DistributedStorage.sample``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlstore.distributed.memory import InitialStates, RolloutStorages
from rlstore.errors import InvalidInputError

Sampled = tuple[dict[str, Tensor], tuple[Tensor, ...]]


def sample_from_queues(
    device: torch.device,
    batch_size: int,
    free_queue: Any,
    full_queue: Any,
    storages: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Sequence[Any],
    lock: Any,
) -> Sampled:
    """A batch of the rollouts whose slots come from ``full_queue``; the arguments are checked."""
    taken: list[Any] = []
    try:
        with _locks.of(storages) if lock is None else lock:
            for _ in range(batch_size):
                taken.append(full_queue.get())
        batch, joined_states = _copy(device, storages, states, taken)
    except BaseException:
        for index in taken:
            full_queue.put(index)
        raise
    for index in taken:
        free_queue.put(index)
    if device.type != "cpu":
        batch = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
        joined_states = tuple(state.to(device, non_blocking=True) for state in joined_states)
    return batch, joined_states


def check_queues(free_queue: Any, full_queue: Any) -> None:
    """Refuse what is no queue."""
    for name, queue, methods in (("free_queue", free_queue, ("put",)), ("full_queue", full_queue, ("get", "put"))):
        if not all(hasattr(queue, method) for method in methods):
            raise InvalidInputError(f"{name} is {queue!r}; sample() needs a queue, with {' and '.join(methods)}")


def check_slots(indices: Sequence[Any], count: int) -> list[int]:
    """The slots of some indices."""
    for index in indices:
        try:
            known = 0 <= index.__index__() < count
        except AttributeError:
            known = False
        if not known:
            raise InvalidInputError(f"{index!r} is no slot; there are 0 to {count - 1}. Nothing was changed.")
    return [int(index) for index in indices]


def _copy(
    device: torch.device,
    storages: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Sequence[Any],
    taken: list[Any],
) -> Sampled:
    """The rollouts of some slots, and their states."""
    by_key: Any = storages
    if isinstance(storages, RolloutStorages):
        gathered = storages.gather(check_slots(taken, storages.memory.count), device)
        if isinstance(states, InitialStates) and states.storages.memory is storages.memory:
            return gathered.tensors, gathered.states
        batch = gathered.tensors
    elif isinstance(storages, (list, tuple)):
        slots = [storages[index] for index in check_slots(taken, len(storages))]
        _check_keys(slots, taken)
        batch = {key: torch.stack([slot[key] for slot in slots], dim=1) for key in slots[0]}
    else:
        batch = {key: torch.stack([by_key[key][index] for index in taken], dim=1) for key in by_key}
    if not states:
        return batch, ()
    held = [states[index] for index in taken]
    # A state of its own, as of a GRU, has layers and not states first.
    slots = [(state,) if isinstance(state, Tensor) and state.dim() == 3 else state for state in held]
    return batch, tuple(torch.cat(parts, dim=1) for parts in zip(*slots, strict=True))


def _check_keys(slots: Sequence[Any], taken: Sequence[Any]) -> None:
    """Refuse slots that are not mappings of the same keys."""
    for index, slot in zip(taken, slots, strict=True):
        if not isinstance(slot, Mapping):
            raise InvalidInputError(
                f"storages[{index}] is a {type(slot).__name__}; each of a list of storages has to be a mapping of keys "
                "to tensors [T + 1, ...]. Nothing was changed."
            )
        if slot.keys() != slots[0].keys():
            raise InvalidInputError(
                f"storages[{index}] has the keys {sorted(slot)} and storages[{taken[0]}] {sorted(slots[0])}; all slots "
                "need the same. Nothing was changed."
            )


class _Locks:
    """One lock for each mapping or list, while it is used."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._used: dict[int, tuple[threading.Lock, int]] = {}

    @contextmanager
    def of(self, storages: object) -> Iterator[None]:
        """Hold the lock of a mapping."""
        key = id(storages)  # the caller references the mapping, so no other object has its id meanwhile
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
