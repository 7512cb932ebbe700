"""What the reference of replay lies on: fields as raw numbers, and the words of the table of episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# How an episode ended, as bits; and what stood before its first frame.
TERMINATED, TRUNCATED = 1, 2
KEPT, REPEATED, ZEROS = 0, -1, -2
# Columns of the table of episodes.
STOP, END = 1, 2

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers of the same size, which every device can compare, index and fill."""
    return tensor.detach().view(_RAW[tensor.dtype.itemsize])


class Block:
    """One field: rows ``[lanes, rows, elements]``, as raw numbers."""

    def __init__(self, block: Tensor, shape: Sequence[int], stack: int = 1, outer: int = 1) -> None:
        if block.dim() < 2 or stack < 1 or outer < 1:
            raise ValueError("a block is [lanes, rows, ...], of at least one frame in at least one piece")
        self.dtype, self.shape = block.dtype, tuple(shape)
        self.stack, self.outer = stack, outer
        self.size = math.prod(block.shape[2:])  # elements of one frame
        if math.prod(self.shape) != self.size * stack or self.size % outer:
            raise ValueError("the shape of a field is that of its block's rows")
        self.rows = raw(block).view(*block.shape[:2], self.size)
        self.finals: Tensor | None = None  # [slots, elements]
        self.starts: Tensor | None = None  # [slots, stack - 1, elements]

    def set_tables(self, finals: Tensor, starts: Tensor | None, slots: int) -> None:
        """Take what is kept for each of ``slots`` episodes."""
        self.finals = raw(finals).view(slots, self.size)
        self.starts = None if starts is None else raw(starts).view(slots, self.stack - 1, self.size)

    def frames(self, given: Tensor, count: int) -> Tensor:
        """Stacks ``[count, *shape]`` as frames ``[count, stack, elements]``, the newest last."""
        pieces = raw(given).reshape(count, self.outer, self.stack, self.size // self.outer)
        return pieces.transpose(1, 2).reshape(count, self.stack, self.size)

    def stacks(self, frames: Tensor) -> Tensor:
        """Frames ``[n, stack, elements]`` as stacks ``[n, *shape]`` of the field's own dtype."""
        count = len(frames)
        pieces = frames.reshape(count, self.stack, self.outer, self.size // self.outer)
        return pieces.transpose(1, 2).reshape(count, *self.shape).view(self.dtype)


def require(table: Tensor | None) -> Tensor:
    """A table of final observations, which there has to be."""
    if table is None:
        raise ValueError("the ring has no tables yet")
    return table
