"""write_all: every byte where it belongs, whatever the system takes at a time."""

import os
import random

import pytest

from rlstore.engine.disk import files
from rlstore.engine.disk.files import write_all

MIB = 1 << 20


@pytest.fixture
def descriptor(tmp_path):
    opened = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    yield opened
    os.close(opened)


def content_of(descriptor):
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [5], [24, 300, 0, 2 * MIB + 7], [1] * 200, [MIB - 1, 1, 1], [3 * MIB, 3 * MIB, 4 * MIB]],
    ids=str,
)
def test_parts_are_written_one_after_another(descriptor, sizes):
    source = random.Random(1)
    parts = [source.randbytes(size) for size in sizes]
    os.pwrite(descriptor, b"before", 0)
    assert write_all(descriptor, parts, 6) == 6 + sum(sizes)
    assert content_of(descriptor) == b"before" + b"".join(parts)


def test_what_the_system_did_not_take_is_written_again(descriptor, monkeypatch):
    write, lengths = os.pwritev, iter([1, 700, 3, MIB, 999_999, 2])

    def take_a_part(file, parts, offset):
        return write(file, [b"".join(parts)[: next(lengths, MIB)]], offset)

    monkeypatch.setattr(os, "pwritev", take_a_part)
    parts = [random.Random(2).randbytes(size) for size in (1000, MIB + 5, 10)]
    assert write_all(descriptor, parts, 0) == MIB + 1015
    assert content_of(descriptor) == b"".join(parts)


def test_no_call_writes_more_than_a_mebibyte_and_the_disk_is_told_of_whole_stretches(descriptor, monkeypatch):
    write, written, told = os.pwritev, [], []

    def note(file, parts, offset):
        written.append(sum(map(len, parts)))
        return write(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", note)
    monkeypatch.setattr(files, "start_writeback", lambda *given: told.append(given[1:]))
    end = write_all(descriptor, [bytes(7 * MIB), bytes(MIB - 1)], 0)
    assert told == []
    end = write_all(descriptor, [bytes(9 * MIB + 1)], end)
    assert (end, told) == (17 * MIB, [(0, 16 * MIB)])
    assert max(written) == MIB
