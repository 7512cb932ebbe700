"""Tensors in one file, in the safetensors format.

The first 8 bytes are the length of a header, little-endian; the header is JSON, by name the dtype, the shape and where
the data begin and end behind the header. Here the data lie one after another and fill the file, complex numbers are
pairs of real ones, and every tensor has a checksum, which whoever wrote the file keeps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.disk.files import FileWriter, reserve
from rlstore.engine.disk.json_text import dump_json, parse_json
from rlstore.errors import InvalidInputError, SnapshotError
from rlstore.kernels import crc32

CHUNK_BYTES = 4 << 20  # what the cache of a processor holds
_PIECE_BYTES = 1 << 20  # of what is read only to verify it
_METADATA = "__metadata__"
_MOST_HEADER = 100_000_000  # bytes, as other readers of the format have it

# What the safetensors format calls each dtype.
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


# ---------------------------------------------------------------------------------------------------- writing


def storable(name: str, tensor: Tensor) -> Tensor:
    """The tensor as a file can hold it.

    Raises:
        InvalidInputError: If its dtype or layout is none that can be saved.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.dtype not in _CODES or plain.layout != torch.strided:
        raise InvalidInputError(f"{name} is a {plain.layout} tensor of {plain.dtype}, which cannot be saved")
    return plain


def checksum_of(tensor: Tensor) -> int:
    """The checksum of a tensor that is :func:`storable`."""
    checksum = 0
    for index in chunks(tensor.shape, tensor.element_size()):
        checksum = crc32(bytes_of(tensor[index].cpu()), checksum)
    return checksum


def write_tensors(
    descriptor: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, sync: bool = True
) -> dict[str, int]:
    """Write a file, which is closed then, chunk by chunk.

    Args:
        descriptor: Of a new, empty file.
        tensors: By name, :func:`storable`; views are fine.
        metadata: Strings by name, for the header.
        sync: Whether to wait until the content is on the disk.

    Returns:
        The checksum of each tensor.
    """
    # The largest elements first: so each tensor begins at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    checksums = {}
    file = FileWriter(descriptor)
    try:
        reserve(descriptor, 0, 8 + len(text) + end)
        file.write([len(text).to_bytes(8, "little"), text])
        for name, tensor in ordered.items():
            checksum = 0
            for index in chunks(tensor.shape, tensor.element_size()):
                content = bytes_of(tensor[index].cpu())
                file.write([content])
                checksum = crc32(content, checksum)
            checksums[name] = checksum
    finally:
        file.close(sync=sync)
    return checksums


def chunks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a tensor of this shape into parts of at most 4 MiB, in the order of contiguous memory."""
    nbytes = math.prod(shape) * itemsize
    if nbytes == 0:
        return
    if nbytes <= CHUNK_BYTES or not shape:
        yield tuple(slice(0, size) for size in shape)
        return
    rows = CHUNK_BYTES // (nbytes // shape[0])
    for begin in range(0, shape[0], max(rows, 1)):
        part = slice(begin, min(begin + max(rows, 1), shape[0]))
        # A row that is itself too large is cut in turn.
        rest = [tuple(slice(0, size) for size in shape[1:])] if rows else chunks(shape[1:], itemsize)
        for inner in rest:
            yield (part, *inner)


def dtype_code(dtype: torch.dtype) -> str:
    """What the format calls a dtype of a tensor that is :func:`storable`."""
    return _CODES[dtype]


def dtype_of_code(code: str) -> torch.dtype | None:
    """The dtype that the format calls so; None if it is unknown."""
    return _DTYPES.get(code)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; of a contiguous one, its own memory."""
    # A tensor of one element counts as contiguous whatever its strides, and a view as bytes wants a stride of 1.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


# ---------------------------------------------------------------------------------------------------- reading


class TensorFile:
    """A file of tensors, open for reading. What its header says is held against the bytes that are there.

    Args:
        descriptor: The open file, which this object closes.
        path: Where it is, for errors.

    Attributes:
        metadata: The strings in its header.
        shapes: By name the shape of each tensor.
        dtypes: By name its dtype; of complex numbers that of their parts.

    Raises:
        SnapshotError: If the header is damaged.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self.path = descriptor, path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._begins: dict[str, int] = {}
        try:
            self.nbytes = os.fstat(descriptor).st_size
            header, begin = self._header()
            self.metadata = self._checked_metadata(header.pop(_METADATA, {}))
            for name, entry in header.items():
                self._add(name, entry)
            self._check_layout(begin)
        except BaseException:
            self.close()
            raise

    def _header(self) -> tuple[dict[str, Any], int]:
        """The header, and where the data begin."""
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if self.nbytes < 8 or length > min(self.nbytes - 8, _MOST_HEADER):
            raise self.damaged(f"its header has {length:,} bytes, and the file {self.nbytes:,}")
        text = os.pread(self._descriptor, length, 8)
        return parse_json(text, f"the header of {self.path}"), 8 + length

    def _checked_metadata(self, found: Any) -> dict[str, str]:
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise self.damaged(f'"{_METADATA}" is {found!r}, not strings by name')
        return found

    def _add(self, name: str, entry: Any) -> None:
        """Take an entry of the header, whose data are one after another once all entries are taken."""
        parts = ("dtype", "shape", "data_offsets")
        if not isinstance(entry, dict) or sorted(entry) != sorted(parts):
            raise self.damaged(f'"{name}" does not have {", ".join(parts)} alone')
        code, shape, offsets = (entry[part] for part in parts)
        if not isinstance(code, str) or code not in _DTYPES:
            raise self.damaged(f'"{name}.dtype" is {code!r}, which is unknown')
        for part in parts[1:]:
            if not isinstance(entry[part], list) or not all(type(n) is int and n >= 0 for n in entry[part]):
                raise self.damaged(f'"{name}.{part}" is not a list of whole numbers')
        nbytes = math.prod(shape) * _DTYPES[code].itemsize
        if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
            raise self.damaged(f'"{name}.data_offsets" is {offsets!r}, and its data have {nbytes:,} bytes')
        self.shapes[name], self.dtypes[name], self._begins[name] = tuple(shape), _DTYPES[code], offsets[0]

    def _check_layout(self, begin: int) -> None:
        """The data fill the file from ``begin``, without gaps and without overlaps."""
        end = 0
        for name in sorted(self._begins, key=lambda name: (self._begins[name], self._nbytes(name))):
            if self._begins[name] != end:
                raise self.damaged(f'"{name}.data_offsets" begins at {self._begins[name]:,}, not at {end:,}')
            end += self._nbytes(name)
            self._begins[name] += begin
        if begin + end != self.nbytes:
            raise self.damaged(f"it has {self.nbytes:,} bytes and should have {begin + end:,}, by its header")

    def _nbytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize

    def read_into(self, name: str, target: Tensor, checksum: int | None) -> None:
        """Fill a tensor of the same shape and dtype, which may be a view, on any device.

        Args:
            name: The name, which must be in :attr:`shapes`.
            target: The tensor.
            checksum: What the checksum must be; None if it is not known.

        Raises:
            SnapshotError: If ``target`` is of another form, or what was read is not what was written.
        """
        plain = torch.view_as_real(target) if target.is_complex() else target
        if (self.dtypes[name], self.shapes[name]) != (plain.dtype, tuple(plain.shape)):
            raise self.damaged(f"{name} is not of the form that was saved")
        found, offset, buffer = 0, self._begins[name], torch.empty(0, dtype=plain.dtype)
        for index in chunks(plain.shape, plain.element_size()):
            part = target_part = plain[index]
            if part.device.type != "cpu" or not part.is_contiguous():
                if buffer.numel() < part.numel():
                    buffer = torch.empty(part.numel(), dtype=plain.dtype)
                part = buffer[: part.numel()].view(part.shape)
            content = bytes_of(part)
            if os.preadv(self._descriptor, [content], offset) != len(content):
                raise self.damaged(f"{name} is cut short")
            found, offset = crc32(content, found), offset + len(content)
            if part is not target_part:
                target_part.copy_(part)
        if checksum is not None and found != checksum:
            raise self.damaged(f"{name} is not what was saved (its checksum differs)")

    def verify(self, name: str, checksum: int) -> None:
        """Read a tensor and forget it.

        Raises:
            SnapshotError: If it is not what was written.
        """
        found, offset, end = 0, self._begins[name], self._begins[name] + self._nbytes(name)
        buffer = memoryview(bytearray(min(end - offset, _PIECE_BYTES)))
        while offset < end:
            count = os.preadv(self._descriptor, [buffer[: end - offset]], offset)
            if count == 0:
                raise self.damaged(f"{name} is cut short")
            found, offset = crc32(buffer[:count], found), offset + count
        if found != checksum:
            raise self.damaged(f"{name} is not what was saved (its checksum differs)")

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def damaged(self, how: str) -> SnapshotError:
        """The error of a damaged file."""
        return SnapshotError(f"{self.path} is damaged: {how}.")

    def close(self) -> None:
        """Close the file. Calling it again has no effect."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
