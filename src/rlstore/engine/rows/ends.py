"""The two flags with which environments report in a step that episodes ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlstore.engine.memory.tensors import allocate
from rlstore.engine.rows.schema import Field
from rlstore.kernels import join_flags


def read_flags(name: str, value: Any, lanes: int) -> Tensor:
    """The flags of a step, checked, uint8 ``[envs]``, on the device that they were given on.

    Raises:
        InvalidInputError: If they do not fit.
    """
    device = value.device if isinstance(value, Tensor) else torch.device("cpu")
    return Field(name, (), torch.uint8, f"num_envs={lanes}", is_flag=True).fit(value, lanes, device)


class JoinedFlags:
    """Joins the two flags of a step, in memory of its own, which the next call writes over.

    Args:
        lanes: The number of environments.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._ended, self._cut_off = allocate((2, lanes), torch.uint8, torch.device("cpu"))

    def join(self, terminated: Any, truncated: Any) -> tuple[Tensor, Tensor, int]:
        """Which episodes ended, and which of them were only truncated: where both flags are set, termination wins.

        Args:
            terminated: ``[envs]``.
            truncated: ``[envs]``.

        Returns:
            Two tensors uint8 ``[envs]``, in the host's memory if both flags are; and how many episodes ended, -1 if
            that is known on a device alone.

        Raises:
            InvalidInputError: If the flags do not fit.
        """
        count = join_flags(terminated, truncated, self._ended, self._cut_off)
        if count < 0:
            over = read_flags("terminated", terminated, self._lanes)
            cut = read_flags("truncated", truncated, self._lanes)
            if over.is_cuda or cut.is_cuda:
                over, cut = on_one_device(over, cut)
                return over | cut, cut & (over ^ 1), -1
            count = join_flags(over, cut, self._ended, self._cut_off)
        return self._ended, self._cut_off, count


def on_one_device(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the device that one of them is on, if they are not on the same."""
    return one if other.device.type == "cpu" else one.to(other.device), other.to(one.device) if one.is_cuda else other
