"""Columns of Arrow and arrays of numpy: numbers, lists of numbers and lists of lists, of one size in every row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlstore.data.columns import EPISODE, Layout
from rlstore.data.source import Array, Form, required
from rlstore.data.table import CHUNK_BYTES, Rows
from rlstore.errors import InvalidInputError

# In one piece of a column: the places in lists are int32.
_MOST_NUMBERS = (1 << 31) - 1
# Some columns in batches of so many rows: record batches or tables.
ReadBatches = Callable[[Sequence[str], int], Iterator[Any]]


def as_column(array: Array) -> Any:
    """An array ``[rows, ...]`` as a column: of single numbers, also ``[rows, 1]``, as LeRobot has them, or of lists."""
    pa = required("pyarrow", "Parquet")
    count, shape = len(array), array.shape[1:]
    most = max(_MOST_NUMBERS // max(int(np.prod(shape)), 1), 1)
    if count > most:
        return pa.chunked_array([as_column(array[first : first + most]) for first in range(0, count, most)])
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    if shape in ((), (1,)):
        return column
    if len(shape) == 1 and shape[0]:
        return pa.FixedSizeListArray.from_arrays(column, shape[0])
    for depth in range(len(shape), 0, -1):
        rows = count * int(np.prod(shape[: depth - 1]))
        offsets = np.arange(rows + 1, dtype=np.int32) * shape[depth - 1]
        column = pa.ListArray.from_arrays(pa.array(offsets), column)
    return column


def as_array(column: Any, name: str) -> Array:
    """A column as an array ``[rows, ...]``.

    Raises:
        InvalidInputError: If it holds something else than numbers, lacks a value, or its lists differ in length.
    """
    pa = required("pyarrow", "Parquet")
    count, shape = len(column), [len(column)]
    while True:
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.storage
        if column.null_count:
            raise InvalidInputError(f"{name} has no value in {column.null_count} of {count} rows")
        if pa.types.is_fixed_size_list(column.type):
            shape.append(column.type.list_size)
        elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            sizes = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
            if len(sizes) > 1:
                raise InvalidInputError(f"{name} holds lists of {sizes[0]} to {sizes[-1]} entries; all need the same")
            shape.append(int(sizes[0]) if len(sizes) else 0)
        else:
            break
        column = column.flatten()
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)


def why_not(kind: Any) -> str:
    """Why columns of a type cannot be read, as "is an image"; empty if they can."""
    types = required("pyarrow.types", "Parquet")
    while True:
        if hasattr(kind, "storage_type"):
            kind = kind.storage_type
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            break
        kind = kind.value_type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return ""
    if types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}:
        return "holds encoded images, which are not decoded here"
    return f"holds {kind}; numbers are needed"


class ArrowTable:
    """Batches of Arrow as :class:`~rlstore.data.table.Table`.

    Args:
        origin: What errors call it.
        schema: Its schema.
        num_rows: How many rows it has.
        batches: Reads some columns.
        refused: By name why columns cannot be read; those whose type cannot are found by their types.
        shapes: By column the shape of a row, where the column does not tell: ``(1,)`` for single numbers.
    """

    def __init__(
        self,
        origin: str,
        schema: Any,
        num_rows: int,
        batches: ReadBatches,
        refused: Mapping[str, str] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.origin, self.num_rows = origin, num_rows
        self._batches, self._shapes = batches, shapes or {}
        self._refused = {field.name: why for field in schema if (why := why_not(field.type))} | dict(refused or {})
        self.columns: Sequence[str] = [*schema.names, *(name for name in self._refused if name not in schema.names)]

    def require(self, layout: Layout) -> None:
        """Refuse a layout with columns that cannot be read, by their names."""
        for path, column in layout.items():
            if column not in self.columns:
                raise InvalidInputError(f"{self.origin} is damaged: {column} is missing. Nothing was read.")
            if why := self._refused.get(column, "") if path != EPISODE else "":
                rest = [name for name in self.columns if name not in self._refused]
                raise InvalidInputError(
                    f"{column} of {self.origin} {why}. Name the columns to read instead, as columns={{{path[0]!r}: "
                    f"...}}; without it there are {rest}. Nothing was read."
                )

    def read(self, columns: Collection[str]) -> Iterator[Rows]:
        """Some columns of all rows, in chunks of about 4 MiB."""
        names = sorted(columns)
        known: dict[str, Form] = {}
        first = next(self._batches(names, 1), None)
        size = max(1, CHUNK_BYTES // max(1, first.nbytes)) if first is not None else 1
        for batch in self._batches(names, size):
            rows = {name: self._array(batch.column(name), name) for name in names}
            form = {name: (array.shape[1:], array.dtype) for name, array in rows.items()}
            known = known or form
            for name in names:
                if form[name] != known[name]:
                    raise InvalidInputError(
                        f"{name} of {self.origin} is {form[name]} in some rows and {known[name]} in others"
                    )
            yield rows

    def _array(self, column: Any, name: str) -> Array:
        if hasattr(column, "combine_chunks"):
            column = column.combine_chunks()
        array = as_array(column, f"{name} of {self.origin}")
        shape = (len(array), *self._shapes.get(name, array.shape[1:]))
        if array.size != np.prod(shape):
            raise InvalidInputError(f"{name} of {self.origin} is {array.shape[1:]} and was written as {shape[1:]}")
        return array.reshape(shape)
