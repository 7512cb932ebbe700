"""Steps of one environment, one after another, as a kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.schema import Field, as_tensor

Array = Any  # a tensor or an array of numpy's, [steps, ...]
Flags = np.ndarray[Any, np.dtype[np.uint8]]  # [steps], 0 or 1


@dataclass
class Steps:
    """Whole episodes of one environment; each value is ``[steps, ...]``, contiguous and of the dtype of its field.

    Attributes:
        observations: The leaves of the observations.
        following: Those of the observations after each step.
        columns: All other fields, as :class:`~rlstore.engine.rows.step_fields.StepFields` has them.
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
    taken: Flags | None
    lacks_finals: bool

    def __len__(self) -> int:
        return len(self.terminated)

    @property
    def count(self) -> int:
        """The transitions that are not left out."""
        return len(self) if self.taken is None else int(np.count_nonzero(self.taken))

    @property
    def nbytes(self) -> int:
        """The bytes of the rows that they become."""
        return sum(value.nbytes for value in (*self.observations, *self.columns))

    @property
    def is_over(self) -> bool:
        """Whether the last step is flagged as the end of an episode."""
        return bool(self.terminated[-1] or self.truncated[-1])

    @property
    def episodes(self) -> int:
        """The episodes that there are at most, unless observations do not continue one."""
        return int(np.count_nonzero(self.terminated | self.truncated)) + 1

    def count_breaks(self) -> int:
        """The steps whose next observation is not the observation of the step after, although no end is flagged."""
        breaks = torch.zeros(len(self) - 1, dtype=torch.bool)
        for before, after in zip(self.observations, self.following, strict=True):
            now, then = (_bytes_of(leaf) for leaf in (before, after))
            breaks |= (then[:-1] != now[1:]).any(1)
        return int((breaks & ~torch.from_numpy(self.terminated | self.truncated)[:-1].bool()).count_nonzero())

    @staticmethod
    def merged(parts: Sequence[Steps]) -> Steps:
        """Several of a kind as one."""
        if len(parts) == 1:
            return parts[0]
        first, taken = parts[0], None
        if any(part.taken is not None for part in parts):
            ones = [np.ones(len(part), np.uint8) if part.taken is None else part.taken for part in parts]
            taken = np.concatenate(ones)
        return Steps(
            [joined(leaves) for leaves in zip(*(part.observations for part in parts), strict=True)],
            [joined(leaves) for leaves in zip(*(part.following for part in parts), strict=True)],
            [joined(columns) for columns in zip(*(part.columns for part in parts), strict=True)],
            np.concatenate([part.terminated for part in parts]),
            np.concatenate([part.truncated for part in parts]),
            taken,
            first.lacks_finals,
        )

    def _values(self) -> tuple[Array | None, ...]:
        """The values ``[steps, ...]`` in the order in which a kernel takes them."""
        # With a final observation, no step that follows is taken for a reset.
        finals = (*self.observations, self.terminated) if self.lacks_finals else (*self.following, None)
        flags = (self.terminated, self.truncated, self.taken)
        return (*self.observations, *self.following, *self.columns, *flags, *finals)

    def values(self) -> tuple[Any, ...]:
        """The values ``[steps, 1, ...]`` for a kernel that writes one lane."""
        return tuple(None if value is None else value[:, None] for value in self._values())

    def tensors(self, device: torch.device) -> tuple[Tensor | None, ...]:
        """The same as tensors on a device."""
        # The axis of the lane comes last: numpy gives it a stride of 0, which kernels do not take.
        tensors = (None if value is None else as_tensor(value, "steps").to(device) for value in self._values())
        return tuple(None if tensor is None else tensor.unsqueeze(1) for tensor in tensors)


def _bytes_of(leaf: Array) -> Tensor:
    """A leaf as bytes ``[steps, bytes]``, as kernels compare it."""
    # A copy, because a single element counts as contiguous whatever its strides, and those are not viewed as bytes.
    rows = as_tensor(leaf, "steps").reshape(len(leaf), -1).clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8)


def as_array(value: Any, name: str) -> Array:
    """The value as an array of numbers in the host's memory, without a copy if it is one.

    Raises:
        InvalidInputError: If it cannot be one.
    """
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return value if is_array else as_tensor(value, name).cpu()


def is_held_as_it_is(field: Field, value: Array) -> bool:
    """Whether the memory of a value ``[steps, ...]`` is that of the rows that the field would hold."""
    if value.shape[1:] != field.shape:
        return False
    if isinstance(value, np.ndarray):
        return value.dtype == numpy_dtype(field.dtype) and value.flags.c_contiguous
    return bool(value.dtype == field.dtype and value.is_contiguous())


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """The same dtype of numpy's; None if it has none."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def as_numpy(value: Array) -> np.ndarray[Any, Any]:
    """A value in an array of numpy's: bfloat16, which it does not have, as float32."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    tensor = value.detach().cpu()
    numbers: np.ndarray[Any, Any] = (tensor.float() if numpy_dtype(tensor.dtype) is None else tensor).numpy()
    return numbers


def held(field: Field, value: Array) -> Array:
    """A value ``[steps, ...]`` as the field holds it; of another dtype it is converted.

    Raises:
        InvalidInputError: If it does not fit.
    """
    if is_held_as_it_is(field, value):
        return value
    steps = len(value)
    return field.fit(value, steps, torch.device("cpu"), steps, check_rule=False)


def joined(parts: Sequence[Array]) -> Array:
    """One array after another."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return torch.cat([as_tensor(part, "steps") for part in parts])
