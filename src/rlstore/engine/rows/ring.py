"""The memory: one block ``[time, lane, ...]`` for each field, and one counter, because all lanes move together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.checks import check_count
from rlstore.engine.memory.capacity import MUCH, require_memory
from rlstore.engine.memory.tensors import allocate
from rlstore.engine.rows.schema import Field, check_memory, check_real, dtype_name, is_in_memory
from rlstore.errors import InvalidInputError
from rlstore.kernels import kernel, kind_of
from rlstore.kernels.rules import invalid_counts

_NEED_LESS = "Take fewer steps or environments, or give smaller observations: pixels as uint8, floats as float16."


@dataclass(frozen=True)
class Column:
    """Where a value of a row goes: row t of the value is row ``t + lead`` of the block.

    A lead of 1 puts what follows a step (its end flags, the next observation) beside the step after it. An optional
    value may be None, which leaves the row of its block as it was.
    """

    field: Field
    block: str
    lead: int = 0
    optional: bool = False


class Ring:
    """Blocks of ``steps`` rows for ``lanes`` lanes, written row by row.

    Args:
        columns: What a row consists of, in the order in which :meth:`write` takes the values.
        steps: Rows before the oldest is overwritten.
        lanes: Environments, or slots, side by side.
        device: The device of the blocks.
        computed: Blocks that are not part of a row: what is computed later.
    """

    def __init__(
        self, columns: Sequence[Column], steps: int, lanes: int, device: torch.device, computed: Sequence[Field] = ()
    ) -> None:
        self.steps, self.lanes, self.device = steps, lanes, device
        self.columns: list[Column] = []
        self._computed = tuple(computed)
        self.blocks: dict[str, Tensor] = {}
        # What others keep that they made of the blocks: another one once a block is another tensor, or of another kind.
        self.derived: dict[Any, Any] = {}
        self._kind: bytes | None = None  # of the blocks when they were last checked
        self.written = 0  # every row ever written; it never wraps
        self.size = 0  # rows held in each lane
        self.begin = 0  # the count at which the present rollout began, at row 0
        self._writer: Any = None
        self._invalid: Tensor | None = None  # counted by writers before this one
        self.extend(columns, computed=self._computed)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks.values())

    def extend(
        self,
        columns: Sequence[Column],
        fills: Mapping[str, float] | None = None,
        computed: Sequence[Field] = (),
    ) -> None:
        """Add columns, with new blocks for those that name one not there yet, and blocks that no column fills.

        Raises:
            DoesNotFitError: (a MemoryError) if there is not enough memory for all of them. Nothing was allocated.
        """
        if self.device.type == "cuda":
            check_real((column.field for column in columns), "a rollout on CUDA")
        extra = max((column.lead for column in [*self.columns, *columns]), default=0)
        new: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for column in columns:
            if column.block not in self.blocks:
                # A block that is written ahead has a row more, for what follows the last step.
                rows = self.steps + (extra if any(c.lead for c in columns if c.block == column.block) else 0)
                new.setdefault(column.block, ((rows, *column.field.row_shape(self.lanes)), column.field.dtype))
        new.update({field.name: ((self.steps, *field.row_shape(self.lanes)), field.dtype) for field in computed})
        self._require_memory({name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in new.items()})
        for name, (shape, dtype) in new.items():
            self.blocks[name] = allocate(shape, dtype, self.device, (fills or {}).get(name, 0.0))
        self.columns.extend(columns)
        self._change_writer()
        self.derived = {}

    def _require_memory(self, nbytes: Mapping[str, int]) -> None:
        if sum(nbytes.values()) >= MUCH:
            most = max(nbytes, key=lambda name: nbytes[name])
            what = f"{self.steps:,} steps of {self.lanes:,} environments, {most} the most of it"
            require_memory("a rollout", sum(nbytes.values()), what, self.device, _NEED_LESS)

    def resized(self, steps: int) -> Ring:
        """An empty ring of the same columns with another number of rows."""
        return Ring(self.columns, steps, self.lanes, self.device, self._computed)

    def drop(self, blocks: Sequence[str]) -> None:
        """Remove blocks and the columns that fill them."""
        self.columns = [column for column in self.columns if column.block not in blocks]
        for block in blocks:
            self.blocks.pop(block, None)
        self._change_writer()
        self.derived = {}

    def _change_writer(self) -> None:
        """The next row is written by another writer, because blocks have changed."""
        self._invalid, self._writer = self.invalid, None

    @property
    def invalid(self) -> Tensor | None:
        """The rewards and the actions that were stored although invalid, int64 ``[2]``; None where they are refused."""
        counted = [counts for counts in (self._invalid, invalid_counts(self._writer)) if counts is not None]
        if not counted and self.device.type == "cuda":  # nothing was written yet
            return torch.zeros(2, dtype=torch.int64, device=self.device)
        return torch.stack(counted).sum(0) if counted else None

    def bind(self, block: str, tensor: Tensor) -> None:
        """Put a caller's tensor in the place of a block: what it holds is what is served from now on."""
        self.bind_all([block], [tensor])

    def bind_all(self, blocks: Sequence[str], tensors: Sequence[Tensor]) -> bool:
        """:meth:`bind` for several blocks: all of them, or none. True if any is another tensor than before."""
        if all(tensor is self.blocks[block] for block, tensor in zip(blocks, tensors, strict=True)):
            return False
        for block, tensor in zip(blocks, tensors, strict=True):
            shape = tuple(self.blocks[block].shape)
            if not isinstance(tensor, Tensor):
                raise self._cannot_become(block, type(tensor).__name__)
            check_memory(tensor, block)
            if tuple(tensor.shape) != shape:
                raise self._cannot_become(block, str(tuple(tensor.shape)))
            if tensor.is_complex() and not self.blocks[block].is_complex():
                raise self._cannot_become(block, dtype_name(tensor.dtype))
        for block, tensor in zip(blocks, tensors, strict=True):
            held = self.blocks[block]
            if tensor is not held:
                self.blocks[block], self.derived = self._adopt(block, tensor, held), {}
                if any(column.block == block for column in self.columns):
                    self._change_writer()
        return True

    def _cannot_become(self, block: str, given: str) -> InvalidInputError:
        held = self.blocks[block]
        own = f"a tensor {tuple(held.shape)} of {dtype_name(held.dtype)}"
        return InvalidInputError(f"{block} cannot become {given}; it is {own}. It was not changed.")

    def _adopt(self, block: str, tensor: Tensor, held: Tensor) -> Tensor:
        """The tensor as a block: of the same dtype and device, contiguous, in memory that no other block has."""
        plain = tensor.detach() if tensor.requires_grad else tensor
        if held.dtype == torch.uint8 and any(c.block == block and c.field.is_flag for c in self.columns):
            plain = plain if plain.dtype == torch.uint8 else plain != 0
        plain = plain.to(held.device, held.dtype).resolve_conj().resolve_neg().contiguous()
        others = (other for name, other in self.blocks.items() if name != block)
        shared = any(plain.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)
        if shared or plain.is_inference():
            # An inference tensor could not be written into later, and two blocks in one memory would mix.
            with torch.inference_mode(False):
                return plain.clone()
        return plain

    def write(self, values: tuple[Any, ...]) -> None:
        """Write one row for all lanes at the cursor; every value fits, or nothing is written.

        Args:
            values: One for each column, in order; None only for optional ones.

        Raises:
            InvalidInputError: If a value does not fit its column.
        """
        row = (self.written - self.begin) % self.steps
        try:
            if self._writer is None:
                self._writer = self._make_writer()
            misfit, fitted = self._writer.write(row, values), -1
            while misfit >= 0:
                # Not ready to be copied byte for byte: convert it if that can be, refuse it if not.
                column = self.columns[misfit]
                if misfit == fitted:
                    raise RuntimeError(f"{column.field.name} was checked and still does not fit its block")
                fitting = column.field.fit(values[misfit], self.lanes, self.device)
                values, fitted = (*values[:misfit], fitting, *values[misfit + 1 :]), misfit
                misfit = self._writer.write(row, values)
        except ValueError:
            self.check_blocks()
            raise
        self.written += 1
        if self.size < self.steps:
            self.size += 1

    def fit(self, values: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """The values as tensors that :meth:`write` can copy, or an error that names the first that cannot be."""
        return tuple(
            None if value is None and column.optional else column.field.fit(value, self.lanes, self.device)
            for column, value in zip(self.columns, values, strict=True)
        )

    def restart(self) -> None:
        """Start again at row 0. What is in the blocks stays until it is overwritten."""
        self.begin, self.size = self.written, 0

    def zero(self) -> None:
        """Start again at row 0, every block zero."""
        self.check_blocks()
        self.restart()
        for block in self.blocks.values():
            block.zero_()

    def check_blocks(self) -> None:
        """Refuse to go on with a block whose memory a caller has freed; attributes of a storage are its blocks."""
        kind = kind_of(tuple(self.blocks.values()))
        if kind is not None and kind == self._kind:
            return
        self.derived, self._kind = {}, kind
        for name, block in self.blocks.items():
            if not is_in_memory(block):
                raise InvalidInputError(
                    f"{name} has no memory any more: it was freed, for example by {name}.untyped_storage().resize_(0). "
                    f"Assign a tensor {tuple(block.shape)} to it. Nothing was changed."
                )

    def counters(self) -> dict[str, Any]:
        """How much was written, for :meth:`set_counters` of a ring of the same columns."""
        return {"written": [self.written] * self.lanes, "begin": self.begin}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Continue from the counters of another ring."""
        written, begin = list(counters["written"]), check_count("a rollout", "begin", counters["begin"])
        if written != [written[0]] * self.lanes or check_count("a rollout", "written", written[0]) < begin:
            raise InvalidInputError(f"written is {written} for {self.lanes} environments, and begin is {begin}")
        self.written, self.begin = written[0], begin
        self.size = min(self.written - self.begin, self.steps)

    def _make_writer(self) -> Any:
        targets = [
            (self.blocks[column.block], column.lead, column.field.is_flag, column.optional) for column in self.columns
        ]
        rules = {i: c.field.rule for i, c in enumerate(self.columns) if c.field.rule is not None}
        return kernel("RowWriter", self.device.type)(targets, rules)

    def __getstate__(self) -> dict[str, Any]:
        # The writer holds raw pointers into this object's own blocks.
        self.check_blocks()
        return {**self.__dict__, "_writer": None, "derived": {}}
