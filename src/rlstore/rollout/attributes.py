"""The blocks of an on-policy storage as its attributes, to be read, written into, or replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlstore.errors import InvalidInputError

if TYPE_CHECKING:
    from rlstore.rollout.core import OnPolicyStorage


class BlockAttribute:
    """A block of the ring as an attribute: read it, write into it, or put another tensor in its place."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, storage: OnPolicyStorage | None, owner: type) -> Any:
        if storage is None:
            return self
        if storage._ring is None or self._name not in storage._ring.blocks:
            raise AttributeError(f"this {owner.__name__} has no {self._name!r}")
        return storage._ring.blocks[self._name]

    def __set__(self, storage: OnPolicyStorage, value: Tensor) -> None:
        if storage._ring is None or self._name not in storage._ring.blocks:
            raise AttributeError(f"this {type(storage).__name__} has no {self._name!r}")
        storage._ring.bind(self._name, value)


class BlockGroup:
    """Several blocks as one attribute, a tuple or a list of tensors; None while there are none.

    Args:
        container: ``tuple`` or ``list``.
        mode: The training_type that has it; None for all.
    """

    def __init__(self, container: type[tuple[Any, ...]] | type[list[Any]], mode: str | None = None) -> None:
        self._container, self._mode = container, mode

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, storage: OnPolicyStorage | None, owner: type) -> Any:
        if storage is None:
            return self
        if self._mode is not None and getattr(storage, "training_type", None) != self._mode:
            raise AttributeError(f"this {owner.__name__} has no {self._name!r}")
        blocks = self._blocks(storage)
        if not blocks:
            return None
        if self._container is tuple:
            return tuple(blocks.values())
        # A list may be written into, so the one that is handed out is looked at again before it matters.
        return storage._handed_lists.setdefault(self._name, list(blocks.values()))

    def __set__(self, storage: OnPolicyStorage, value: Sequence[Tensor]) -> None:
        blocks = self._blocks(storage)
        if not isinstance(value, (tuple, list)) or len(value) != len(blocks):
            given = f"{len(value)} tensors" if isinstance(value, (tuple, list)) else type(value).__name__
            raise InvalidInputError(
                f"{self._name} is {len(blocks)} tensors and cannot become {given}; it was not changed"
            )
        storage._handed_lists.pop(self._name, None)
        storage._ready_ring().bind_all(list(blocks), value)

    def _blocks(self, storage: OnPolicyStorage) -> dict[str, Tensor]:
        blocks = {} if storage._ring is None else storage._ring.blocks
        return {name: block for name, block in blocks.items() if name.startswith(f"{self._name}[")}


class ObservationAttribute:
    """The observations as one attribute: a tensor, or a TensorDict or tuple whose leaves are the blocks."""

    def __get__(self, storage: OnPolicyStorage | None, owner: type) -> Any:
        if storage is None:
            return self
        if storage._ring is None:
            raise AttributeError(f"this {owner.__name__} has no observations before its first sample")
        return storage._view_observations()

    def __set__(self, storage: OnPolicyStorage, value: Any) -> None:
        storage._bind_observations(value)
