"""RolloutBatch: a batch of rollouts, as a learner receives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlstore.engine.rows.schema import Structure

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class RolloutBatch(Mapping[str, Tensor]):
    """``B`` rollouts of ``T`` steps: a mapping of each key, extra fields included, to a tensor ``[T + 1, B, ...]``.

    Attributes:
        states: The recurrent states at the start of the rollouts, ``[layers, B, hidden]`` each.
        versions: The policy version that each rollout was committed with, int64 ``[B]`` on the CPU.

    Args:
        tensors: By key a tensor ``[T + 1, B, ...]``.
        states: See above.
        versions: See above.
        structure: How the observations are nested; None for a single tensor ``obs``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        states: tuple[Tensor, ...],
        versions: Tensor,
        structure: Structure | None = None,
    ) -> None:
        self._tensors, self._structure = dict(tensors), structure
        self.states, self.versions = states, versions

    @property
    def observations(self) -> Tensor | TensorDictBase | tuple[Any, ...]:
        """``obs``; for a Dict or Tuple space a TensorDict or a tuple, whose leaves have keys of their own."""
        if self._structure is None or self._structure.is_leaf:
            return self._tensors["obs"]
        leaves = [self._tensors[name] for name in self._structure.names]
        nested: TensorDictBase | tuple[Any, ...] = self._structure.build(leaves, leaves[0].shape[:2])
        return nested

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> RolloutBatch:
        """The batch on a device; the versions stay on the CPU.

        Args:
            device: The device.
            non_blocking: Let copies from pinned memory go on in the background, as ``Tensor.to`` does.
        """
        moved = {key: tensor.to(device, non_blocking=non_blocking) for key, tensor in self._tensors.items()}
        states = tuple(state.to(device, non_blocking=non_blocking) for state in self.states)
        return RolloutBatch(moved, states, self.versions, self._structure)

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in self._tensors.items())
        return f"RolloutBatch({shapes}; versions {self.versions.tolist()})"
