"""Steps of one environment, one after another, as a kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.schema import Field, as_tensor
from rlstore.engine.rows.step_fields import StepFields

Array = Any  # a tensor or an array of numpy's, [steps, ...]
Flags = np.ndarray[Any, np.dtype[np.uint8]]  # [steps], 0 or 1


@dataclass
class Steps:
    """Whole episodes of one environment; each value is ``[steps, ...]``.

    Attributes:
        observations: The leaves of the observations.
        following: Those of the observations after each step.
        columns: All other fields, as :class:`StepFields` has them.
        terminated: Where an episode terminated.
        truncated: Where it was truncated.
        taken: 0 for steps that are left out; None if none is.
        lacks_finals: Whether the final observations of terminated episodes are not known: those of their last steps
            stand for them.
    """

    observations: list[Array]
    following: list[Array]
    columns: list[Array]
    terminated: Flags
    truncated: Flags
    taken: Flags | None = None
    lacks_finals: bool = False

    def __len__(self) -> int:
        return len(self.terminated)

    @property
    def count(self) -> int:
        """The transitions that are not left out."""
        return len(self) if self.taken is None else int(np.count_nonzero(self.taken))

    def values(self) -> tuple[Any, ...]:
        """The values as a kernel that writes one lane may be able to read them."""
        return self._ordered([value[:, None] for value in (*self.observations, *self.following, *self.columns)])

    def fit(self, fields: StepFields, device: torch.device) -> tuple[Tensor | None, ...]:
        """The values as any kernel takes them.

        Raises:
            InvalidInputError: If one does not fit.
        """
        given = (*self.observations, *self.following, *self.columns)
        named = (*fields.observations, *map(following_of, fields.observations), *fields.columns)
        pairs = zip(named, given, strict=True)
        values = self._ordered([fitted(field, value, len(self), device).unsqueeze(1) for field, value in pairs])
        return tuple(None if value is None else torch.as_tensor(value, device=device) for value in values)

    def _ordered(self, values: list[Any]) -> tuple[Any, ...]:
        """The values and the flags ``[steps, 1]`` in the order in which a kernel takes them."""
        leaves, ended = len(self.observations), self.terminated[:, None]
        taken = None if self.taken is None else self.taken[:, None]
        # With final observations, no step that follows is taken for a reset.
        finals = [*values[:leaves], ended] if self.lacks_finals else [*values[leaves : 2 * leaves], None]
        return (*values, ended, self.truncated[:, None], taken, *finals)


def fitted(field: Field, value: Array, steps: int, device: torch.device) -> Tensor:
    """A value of so many steps as the field holds it.

    Raises:
        InvalidInputError: If it does not fit.
    """
    return field.fit(value, steps, device, steps)


def following_of(field: Field) -> Field:
    """The field of the observations after each step."""
    return replace(field, name="next_observations" + field.name.removeprefix("observations"))


def as_array(value: Any, name: str) -> Array:
    """The value as an array of numbers, without a copy if it is one.

    Raises:
        InvalidInputError: If it cannot be one.
    """
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return value if is_array else as_tensor(value, name)


def joined(first: Array, second: Array) -> Array:
    """One array after another."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.concatenate((first, second))
    one, other = torch.as_tensor(first), torch.as_tensor(second)
    return torch.cat((one, other.to(one.device)))
