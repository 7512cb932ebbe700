"""Records of rows in files: what is written, what is read back, and what is refused."""

from __future__ import annotations

import json
import os
import struct
import zlib

import pytest
import torch

from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.segments import SegmentFile, records_of
from rlstore.errors import SnapshotError

FIRST = {"ids": torch.arange(6, dtype=torch.int64), "bytes": torch.arange(12, dtype=torch.uint8).view(4, 3)}
SECOND = {"ids": torch.arange(9, 12, dtype=torch.int64), "none": torch.empty((0, 5), dtype=torch.float32)}


def write(folder, *records, committed=None):
    """The bytes of the file."""
    with Directory(folder) as directory:
        file = SegmentFile(directory, "rows-000001.bin", committed)
        for record in records:
            file.append(record)
        file.close(sync=True)
    return file.nbytes


def read(folder, committed):
    descriptor = os.open(folder / "rows-000001.bin", os.O_RDONLY)
    try:
        return [
            {name: record.tensor(name, record.shapes[name], record.dtypes[name]) for name in record.shapes}
            for record in records_of(descriptor, folder / "rows-000001.bin", committed)
        ]
    finally:
        os.close(descriptor)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


def test_the_file_is_what_the_format_says(tmp_path):
    """Read by other means than our own."""
    write(tmp_path, FIRST)
    content = (tmp_path / "rows-000001.bin").read_bytes()
    mark, header_bytes, checksum, data_bytes = struct.unpack("<8sIIQ", content[:24])
    assert (mark, data_bytes) == (b"rlstrow1", 6 * 8 + 12)
    header = content[24 : 24 + header_bytes]
    assert checksum == zlib.crc32(header)
    data = {name: tensor.numpy().tobytes() for name, tensor in FIRST.items()}
    assert json.loads(header) == {
        "ids": {"dtype": "I64", "shape": [6], "crc32": zlib.crc32(data["ids"])},
        "bytes": {"dtype": "U8", "shape": [4, 3], "crc32": zlib.crc32(data["bytes"])},
    }
    assert content[24 + header_bytes :] == data["ids"] + data["bytes"]


def test_what_was_appended_is_read_in_order(tmp_path):
    one = write(tmp_path, FIRST)
    two = write(tmp_path, SECOND, committed=one)
    assert_same(read(tmp_path, two), [FIRST, SECOND])
    assert_same(read(tmp_path, one), [FIRST])


def test_what_a_save_left_that_did_not_finish_is_written_over(tmp_path):
    one = write(tmp_path, FIRST)
    write(tmp_path, SECOND, SECOND, committed=one)
    two = write(tmp_path, SECOND, committed=one)
    assert_same(read(tmp_path, two), [FIRST, SECOND])
    assert (tmp_path / "rows-000001.bin").stat().st_size == two


def test_no_byte_can_change(tmp_path):
    size = write(tmp_path, FIRST, SECOND)
    path = tmp_path / "rows-000001.bin"
    whole = path.read_bytes()
    for place in range(size):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(SnapshotError, match=r"record at byte|mark of a record"):
            read(tmp_path, size)


def test_no_byte_can_be_missing(tmp_path):
    first = write(tmp_path, FIRST)
    size = write(tmp_path, SECOND, committed=first)
    for committed in range(1, size):
        if committed != first:
            with pytest.raises(SnapshotError, match="record at byte"):
                read(tmp_path, committed)


def test_a_tensor_of_another_form_is_refused(tmp_path):
    size = write(tmp_path, FIRST)
    descriptor = os.open(tmp_path / "rows-000001.bin", os.O_RDONLY)
    (record,) = records_of(descriptor, tmp_path / "rows-000001.bin", size)
    for name, shape, dtype in (
        ("ids", (5,), torch.int64),
        ("ids", (6,), torch.int32),
        ("other", (6,), torch.int64),
    ):
        with pytest.raises(SnapshotError, match=f"{name} is missing or not"):
            record.tensor(name, shape, dtype)
    os.close(descriptor)


def test_a_tensor_can_be_read_where_it_belongs(tmp_path):
    size = write(tmp_path, FIRST)
    descriptor = os.open(tmp_path / "rows-000001.bin", os.O_RDONLY)
    (record,) = records_of(descriptor, tmp_path / "rows-000001.bin", size)
    block = torch.zeros((6, 3), dtype=torch.uint8)
    record.tensor("bytes", (4, 3), torch.uint8, block[1:5].view(-1))
    assert block.tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [0, 0, 0]]
    os.close(descriptor)
