"""Rows on disk: records that are appended to files, the segments of a snapshot.

rows-000001.bin    records, one after another; a new file is begun when one has 64 MiB

A record is a frame of 24 bytes (a mark, the bytes of the header, its checksum, the bytes of the data), a header in JSON
(by name the dtype, the shape and the checksum of each tensor) and the tensors one after another. How much of a file
counts is said by the manifest of the snapshot: what lies behind was left by a save that did not finish.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.files import FileWriter
from rlstore.engine.disk.json_text import dump_json, parse_json
from rlstore.engine.disk.manifest import check_fields, newer_version
from rlstore.engine.disk.tensor_file import bytes_of, dtype_code, dtype_of_code
from rlstore.errors import SnapshotError
from rlstore.kernels import crc32

SEGMENT_BYTES = 64 << 20
SEGMENT_NAME = re.compile(r"rows-([0-9]{6,})\.bin")
_MARK = b"rlstrow1"
_FRAME = struct.Struct("<8sIIQ")
_MOST_HEADER = 1 << 20  # bytes
_PIECE_BYTES = 1 << 19
_TENSOR_FIELDS = {"dtype": str, "shape": list, "crc32": int}


class SegmentFile:
    """A segment, open for appending.

    Args:
        directory: The folder.
        name: The name of the file.
        committed: The bytes of it that count; None for a new file.
    """

    def __init__(self, directory: Directory, name: str, committed: int | None = None) -> None:
        self.name = name
        descriptor = directory.create(name) if committed is None else directory.open(name, os.O_RDWR)
        self._file = FileWriter(descriptor, committed or 0)
        if committed is not None:
            try:
                os.ftruncate(descriptor, committed)  # what a save left that did not finish
            except BaseException:
                os.close(descriptor)
                raise

    @property
    def nbytes(self) -> int:
        """The bytes of the file, with those that are still being written."""
        return self._file.end

    def append(self, tensors: Mapping[str, Tensor]) -> None:
        """Append a record of tensors on the CPU."""
        parts = [bytes_of(tensor) for tensor in tensors.values()]
        header = dump_json(
            {
                name: {"dtype": dtype_code(tensor.dtype), "shape": list(tensor.shape), "crc32": crc32(part)}
                for (name, tensor), part in zip(tensors.items(), parts, strict=True)
            }
        )
        frame = _FRAME.pack(_MARK, len(header), crc32(header), sum(map(len, parts)))
        self._file.write([frame, header, *parts])

    def close(self, *, sync: bool) -> None:
        """Close the file when everything is written, if ``sync`` when it is on the disk."""
        self._file.close(sync=sync)


class Record:
    """One record of a segment.

    Attributes:
        shapes: By name the shape of each tensor.
        dtypes: By name its dtype.
        nbytes: The bytes of the record.
    """

    def __init__(self, descriptor: int, path: Path, offset: int, committed: int) -> None:
        self._descriptor, self._where = descriptor, f"the record at byte {offset:,} of {path}"
        frame = os.pread(descriptor, _FRAME.size, offset)
        if offset + _FRAME.size > committed or len(frame) < _FRAME.size:
            raise self.damaged("it is cut short")
        mark, header_bytes, checksum, data_bytes = _FRAME.unpack(frame)
        self.nbytes = _FRAME.size + header_bytes + data_bytes
        if mark[:-1] == _MARK[:-1] and mark[-1:].isdigit() and mark > _MARK:
            raise newer_version(path, "the mark of a record", mark.decode(), _MARK.decode())
        if mark != _MARK:
            raise self.damaged(f"it begins with {mark!r}, not with {_MARK!r}")
        if header_bytes > _MOST_HEADER or offset + self.nbytes > committed:
            raise self.damaged(f"it would have {self.nbytes:,} bytes, and the file has {committed:,}")
        header = os.pread(descriptor, header_bytes, offset + _FRAME.size)
        if crc32(header) != checksum:
            raise self.damaged("its header is not what was saved (its checksum differs)")
        self._entries = parse_json(header, f"the header of {self._where}")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._begins: dict[str, int] = {}
        self._find(path, offset + _FRAME.size + header_bytes, data_bytes)

    def _find(self, path: Path, begin: int, data_bytes: int) -> None:
        """Find where each tensor begins."""
        check_fields(path, self._entries, dict.fromkeys(self._entries, _TENSOR_FIELDS))
        end = begin + data_bytes
        for name, entry in self._entries.items():
            dtype, shape = dtype_of_code(entry["dtype"]), entry["shape"]
            if dtype is None or not all(type(size) is int and size >= 0 for size in shape):
                raise self.damaged(f"{name} is {entry['dtype']!r} {shape}, which is unknown")
            self.shapes[name], self.dtypes[name], self._begins[name] = tuple(shape), dtype, begin
            begin += math.prod(shape) * dtype.itemsize
        if begin != end:
            raise self.damaged(f"its tensors end at byte {begin:,}, and the record at byte {end:,}")

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, memory: Tensor | None = None) -> Tensor:
        """A tensor, in new memory or in some that is large enough.

        Args:
            name: The name.
            shape: The shape that it must have.
            dtype: The dtype that it must have.
            memory: uint8, flat; the result is a view of it.

        Raises:
            SnapshotError: If it is missing or of another form, or not what was saved.
        """
        if name not in self._entries or (self.dtypes[name], self.shapes[name]) != (dtype, shape):
            raise self.damaged(f"{name} is missing or not {shape} {dtype}")
        nbytes = math.prod(shape) * dtype.itemsize
        flat = torch.empty(nbytes, dtype=torch.uint8) if memory is None else memory[:nbytes]
        content, begin, found = bytes_of(flat), self._begins[name], 0
        for offset in range(0, nbytes, _PIECE_BYTES):  # which are in the cache when their checksum is computed
            part = content[offset : offset + _PIECE_BYTES]
            if os.preadv(self._descriptor, [part], begin + offset) != len(part):
                raise self.damaged(f"{name} is cut short")
            found = crc32(part, found)
        if found != self._entries[name]["crc32"]:
            raise self.damaged(f"{name} is not what was saved (its checksum differs)")
        return flat.view(dtype).view(shape)

    def verify(self) -> None:
        """Read everything and forget it.

        Raises:
            SnapshotError: If it is not what was saved.
        """
        for name in self._entries:
            self.tensor(name, self.shapes[name], self.dtypes[name])

    def damaged(self, how: str) -> SnapshotError:
        """The error of a damaged record."""
        return SnapshotError(f"{self._where} is damaged: {how}.")


def records_of(descriptor: int, path: Path, committed: int) -> Iterator[Record]:
    """The records of a segment, of which so many bytes count."""
    offset = 0
    while offset < committed:
        record = Record(descriptor, path, offset, committed)
        yield record
        offset += record.nbytes
