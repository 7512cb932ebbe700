"""FileWriter: every byte where it belongs, whatever the system takes at a time; no error is lost."""

import errno
import os
import random

import pytest

from rlstore.engine.disk import files
from rlstore.engine.disk.files import FileWriter

MIB = 1 << 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def opened(path, offset=0):
    return FileWriter(os.open(path, os.O_CREAT | os.O_RDWR), offset)


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [5], [24, 300, 0, 2 * MIB + 7], [1] * 200, [MIB - 1, 1, 1], [3 * MIB, 3 * MIB, 4 * MIB]],
    ids=str,
)
def test_parts_are_written_one_after_another(path, sizes):
    path.write_bytes(b"before")
    source, file = random.Random(1), opened(path, 6)
    given = [[source.randbytes(size) for size in sizes] for _ in range(3)]
    for parts in (*given, [b"end"]):
        file.write(parts)
    assert file.end == 6 + 3 * sum(sizes) + 3
    file.close(sync=True)
    assert path.read_bytes() == b"before" + b"".join(map(b"".join, given)) + b"end"


def test_what_the_system_did_not_take_is_written_again(path, monkeypatch):
    write, lengths = os.pwritev, iter([1, 700, 3, MIB, 999_999, 2])

    def take_a_part(file, parts, offset):
        return write(file, [b"".join(parts)[: next(lengths, MIB)]], offset)

    monkeypatch.setattr(os, "pwritev", take_a_part)
    parts = [random.Random(2).randbytes(size) for size in (1000, MIB + 5, 10)]
    file = opened(path)
    file.write(parts)
    file.close(sync=False)
    assert path.read_bytes() == b"".join(parts)


def test_no_call_writes_more_than_a_mebibyte_and_the_disk_is_told_of_whole_stretches(path, monkeypatch):
    write, written, told = os.pwritev, [], []

    def note(file, parts, offset):
        written.append(sum(map(len, parts)))
        return write(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", note)
    monkeypatch.setattr(files, "start_writeback", lambda *given: told.append(given[1:]))
    file = opened(path)
    for size in (7 * MIB, MIB - 1, 9 * MIB + 1, 5):
        file.write([bytes(size)])
    file.close(sync=False)
    assert (file.end, told) == (17 * MIB + 5, [(0, 16 * MIB)])
    assert max(written) == MIB


@pytest.mark.parametrize("size", [100, 2 * MIB], ids=["at once", "in the thread"])
def test_an_error_is_raised_and_the_file_is_closed(path, monkeypatch, size):
    synced, closed, close = [], [], os.close
    own = os.open(path, os.O_CREAT | os.O_RDWR)
    file = FileWriter(own, 0)

    def fail(*given):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwritev", fail)
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))

    def write():
        try:
            file.write([bytes(size)])
        finally:
            file.close(sync=size > 100)

    with pytest.raises(OSError, match="full"):
        write()
    assert synced == []
    assert closed.count(own) == 1  # storages that are collected meanwhile close theirs
