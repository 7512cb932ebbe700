"""The values of one step of replay, each by its place: what field it is of, and how it is made to fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.rows.layout import Leaf
from rlstore.engine.rows.schema import Field, as_tensor


class StepFields:
    """The fields of what a ring of ``lanes`` lanes takes as one step, in that order.

    Args:
        leaves: The leaves of the observations.
        columns: The other fields of a row.
        lanes: Environments side by side.
    """

    def __init__(self, leaves: Sequence[Leaf], columns: Sequence[Field], lanes: int) -> None:
        observed, origin = [leaf.field for leaf in leaves], f"num_envs={lanes}"
        flags = [Field(n, (), torch.uint8, origin, is_flag=True) for n in ("terminateds", "truncateds", "mask")]
        following = [_renamed(field, "next_observations") for field in observed]
        finals = [_renamed(field, "final observations") for field in observed]
        given = Field("which final observations are given", (), torch.uint8, origin, is_flag=True)
        self._fields = [*observed, *following, *columns, *flags, *finals, given]
        self._mask, self._lanes = 2 * len(observed) + len(columns) + 2, lanes

    def field(self, index: int) -> Field:
        """The field of the value at a place."""
        return self._fields[index]

    def fit(self, index: int, values: tuple[Any, ...], device: torch.device) -> Tensor:
        """The value at a place as the ring takes it, on ``device``.

        Raises:
            InvalidInputError: If it cannot be.
        """
        field, value, lanes = self._fields[index], values[index], self._lanes
        if lanes == 1 and value is not None:
            value = as_tensor(value, field.name)
            if tuple(value.shape) == field.shape or (value.dim() == 0 and field.shape == (1,)):
                value = value.reshape(1, *field.shape)
        if field.is_flag and field.name != "mask" and values[self._mask] is not None:
            # Nothing is read of a lane that sat out, not even that its flags are no flags.
            given, taken = as_tensor(value, field.name), self.fit(self._mask, values, device)
            if given.numel() == lanes:
                value = torch.where(taken.to(given.device).reshape(given.shape) != 0, given, torch.zeros_like(given))
        fitted = field.fit(value, lanes, device)
        # A single element counts as contiguous whatever its strides; the kernel wants them plain.
        return fitted.clone(memory_format=torch.contiguous_format) if fitted.numel() == 1 else fitted


def _renamed(field: Field, name: str) -> Field:
    """The field as errors call it when it is given under another name."""
    rest = field.name.removeprefix("observations")
    return Field(name + rest, field.shape, field.dtype, field.origin)
