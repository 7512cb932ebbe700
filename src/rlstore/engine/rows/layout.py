"""How a row of replay is laid out in memory: frames of observations, and small fields together in one record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.rows.schema import Field

# Fields of up to this many bytes are together in one record: a row of them costs one cache miss instead of several.
RECORD_FIELD_BYTES = 1024


@dataclass(frozen=True)
class Leaf:
    """One leaf of the observations: what a caller gives and gets, and how many frames are stacked in it.

    Attributes:
        field: The whole stack.
        stack: Frames in it; 1 for no stack.
        axis: The axis of the frames in ``field.shape``.
    """

    field: Field
    stack: int = 1
    axis: int = 0

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of what is stored in a row."""
        shape = list(self.field.shape)
        if self.stack > 1:
            shape[self.axis] //= self.stack
        return tuple(shape)

    @property
    def outer(self) -> int:
        """Pieces into which the stack axis cuts a frame."""
        return math.prod(self.field.shape[: self.axis]) if self.stack > 1 else 1


class Layout:
    """Where each field is: the small ones in one record, each of the others in a block of its own."""

    def __init__(self, leaves: Sequence[Leaf], columns: Sequence[Field]) -> None:
        self._leaves = tuple(leaves)
        fields = [(leaf.field.name, leaf.frame_shape, leaf.field.dtype) for leaf in leaves]
        fields += [(column.name, column.shape, column.dtype) for column in columns]
        self.apart = [field for field in fields if bytes_of(*field[1:]) > RECORD_FIELD_BYTES]
        together = [field for field in fields if field not in self.apart]
        together.append(("episode", (), torch.int32))
        # The widest first, so that each is aligned.
        together.sort(key=lambda field: -field[2].itemsize)
        self._offsets: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        offset = 0
        for name, shape, dtype in together:
            self._offsets.append((name, shape, dtype, offset))
            offset += bytes_of(shape, dtype)
        widest = max(dtype.itemsize for _, _, dtype in together)
        self.record_bytes = -(-offset // widest) * widest

    def described(self) -> dict[str, list[Any]]:
        """Where each field of the record is, as JSON: by name its offset, its shape and its dtype."""
        return {name: [offset, list(shape), str(dtype)] for name, shape, dtype, offset in self._offsets}

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Each field of the record as a tensor ``[lanes, rows, *shape]`` on its memory."""
        return {name: self._view(records, *rest) for name, *rest in self._offsets}  # type: ignore[arg-type]

    def _view(self, records: Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        whole, item = records.view(dtype), dtype.itemsize
        lanes, rows = records.shape[:2]
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        strides = (whole.stride(0), whole.stride(1), *inner)
        return whole.as_strided((lanes, rows, *shape), strides, whole.storage_offset() + offset // item)

    def tables(self, slots: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """The tables of final observations and, where frames are stacked, of starts, for ``slots`` episodes."""
        finals = [(f"final {leaf.field.name}", (slots, *leaf.frame_shape), leaf.field.dtype) for leaf in self._leaves]
        return finals + [
            (f"start {leaf.field.name}", (slots, leaf.stack - 1, *leaf.frame_shape), leaf.field.dtype)
            for leaf in self._leaves
            if leaf.stack > 1
        ]

    def nbytes(self, lanes: int, rows: int, slots: int) -> int:
        """Bytes of all blocks, counters and tables in one segment. Most of the tables' are never touched."""
        fields = [((self.record_bytes,), torch.uint8), *((shape, dtype) for _, shape, dtype in self.apart)]
        own = [((5, lanes), torch.int64), ((slots, 4), torch.int64), ((slots,), torch.int32)]
        tables = [(shape, dtype) for _, shape, dtype in self.tables(slots)]
        return SharedMemory.bytes_of([*(((lanes, rows, *shape), dtype) for shape, dtype in fields), *own, *tables])


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of an entry."""
    return math.prod(shape) * dtype.itemsize
