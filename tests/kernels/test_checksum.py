"""crc32: the same as that of zlib, in both versions, at every length and alignment."""

import random
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstore.kernels import _native, crc32

VERSIONS = pytest.mark.parametrize("version", [crc32, _native.crc32_by_tables], ids=["folding", "tables"])


@VERSIONS
def test_the_checksum_of_every_length_at_every_alignment_is_that_of_zlib(version):
    content = memoryview(random.Random(1).randbytes(320))
    for begin in range(16):
        for length in range(301):
            part = content[begin : begin + length]
            assert version(part) == zlib.crc32(part)


@VERSIONS
@pytest.mark.parametrize("size", [64 << 10, (1 << 20) + 1, (3 << 20) + 77])
def test_the_checksum_of_many_bytes_is_that_of_zlib(version, size):
    content = random.Random(size).randbytes(size)
    assert version(content, 12345) == zlib.crc32(content, 12345)


@VERSIONS
@given(
    parts=st.lists(st.binary(max_size=200) | st.integers(0, 900).map(bytes), max_size=5),
    value=st.integers(0, 0xFFFFFFFF),
)
def test_a_checksum_goes_on_where_another_ended(version, parts, value):
    found = value
    for part in parts:
        found = version(part, found)
    assert found == zlib.crc32(b"".join(parts), value)


def test_checksums_are_of_whatever_is_contiguous():
    array = np.arange(5000, dtype=np.float32).reshape(50, 100)
    for buffer in (b"", bytearray(b"123456789"), array, array.data, array[3:7]):
        assert crc32(buffer) == zlib.crc32(buffer)
    assert crc32(b"123456789") == 0xCBF43926  # as CRC-32 is defined
    with pytest.raises(BufferError):
        crc32(memoryview(bytes(300))[::2])
    with pytest.raises(TypeError):
        crc32("text")


def test_threads_have_checksums_of_their_own():
    contents = [random.Random(seed).randbytes((1 << 20) + seed) for seed in range(4)]
    found = [0] * len(contents)

    def checksum(i):
        for _ in range(5):
            found[i] = crc32(contents[i])

    threads = [threading.Thread(target=checksum, args=(i,)) for i in range(len(contents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [zlib.crc32(content) for content in contents]
