"""The folder of a snapshot: what goes in comes out, whatever happens in between."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import zlib
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from written_snapshots import write_snapshot

from rlstore import DiskFullError, InvalidInputError, SnapshotError
from rlstore.engine.disk import tensor_file
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.snapshot import SnapshotReader, generator_state, restore_generator
from rlstore.engine.disk.tensor_file import chunks

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TENSORS = {
    "ids": torch.arange(24, dtype=torch.int64).reshape(2, 3, 4),
    "flags": torch.tensor([True, False, True]),
    'observations["image"]': torch.arange(60, dtype=torch.uint8).reshape(5, 3, 4),
}


def save(path, tensors=TENSORS, numbers=None):
    write_snapshot(path, "S", "cpu", {"size": 4}, numbers or {}, tensors)


def load(path):
    with SnapshotReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 16)


# ---------------------------------------------------------------------------------------------------- values


def test_what_goes_in_comes_out(tmp_path):
    settings = {"size": 4, "dtype": torch.uint8, "shape": (3, 4)}
    numbers = {"written": [1, 2], "priority": float("inf")}
    write_snapshot(tmp_path / "a" / "b", "rlstore.X", "cuda:1", settings, numbers, TENSORS)
    with SnapshotReader(str(tmp_path / "a" / "b")) as reader:
        assert (reader.class_name, reader.device) == ("rlstore.X", "cuda:1")
        assert (reader.settings, reader.numbers) == (settings, numbers)
        assert reader.shape("ids") == (2, 3, 4)
        assert reader.dtype("flags") == torch.bool
    assert_same(load(tmp_path / "a" / "b"), TENSORS)


DTYPES = [*tensor_file._CODES, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, tmp_path, small_chunks):
    bits = torch.arange(48 * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype == torch.bool else 100)
    tensor = bits.to(torch.uint8).view(dtype).reshape(4, 12)
    save(tmp_path, {"t": tensor})
    found = load(tmp_path)["t"]
    assert (found.dtype, found.shape) == (dtype, (4, 12))
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7.5),
        torch.tensor(1 + 2j),
        torch.zeros(0, 3),
        torch.zeros(3, 0),
        torch.arange(24).reshape(4, 6)[1:3, ::2],
        torch.arange(24).reshape(4, 6).T,
        torch.ones(1).expand(5, 4),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(6.0).requires_grad_(),
    ],
    ids=["scalar", "complex", "no rows", "no columns", "strided", "turned", "expanded", "conjugated", "with gradient"],
)
def test_tensors_of_any_form(tensor, tmp_path, small_chunks):
    save(tmp_path, {"t": tensor})
    assert_same(load(tmp_path), {"t": tensor.detach().resolve_conj()})


def test_a_snapshot_of_nothing(tmp_path):
    save(tmp_path, {})
    assert load(tmp_path) == {}


def test_a_strided_target_is_filled_and_its_neighbours_are_not(tmp_path, small_chunks):
    save(tmp_path)
    around = torch.full((4, 3, 9), -1)
    with SnapshotReader(tmp_path) as reader:
        reader.read_into("ids", around[::2, :, 1::2])
    expected = torch.full((4, 3, 9), -1)
    expected[::2, :, 1::2] = TENSORS["ids"]
    assert torch.equal(around, expected)


def test_what_is_read_in_inference_mode_can_be_written_outside(tmp_path):
    save(tmp_path)
    with torch.inference_mode(), SnapshotReader(tmp_path) as reader:
        tensor = reader.tensor("ids")
    assert not tensor.is_inference()


def test_the_files_are_what_the_format_says(tmp_path):
    """Read by other means than our own: the manifest as JSON, the tensors by the safetensors library."""
    save(tmp_path, numbers={"step": 3})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    file = tmp_path / "tensors-000001.safetensors"
    assert manifest == {
        "format": "rlstore snapshot",
        "version": 1,
        "contents": "whole",
        "id": manifest["id"],
        "class": "S",
        "device": "cpu",
        "settings": {"size": 4},
        "numbers": {"step": 3},
        "file": {"name": file.name, "bytes": file.stat().st_size},
        "crc32": manifest["crc32"],
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "crc32": zlib.crc32(tensor.numpy().tobytes()),
            }
            for name, tensor in TENSORS.items()
        },
    }
    assert sorted(contents(tmp_path)) == ["lock", "manifest.json", file.name]
    assert_same(dict(sorted(safetensors.torch.load_file(file).items())), dict(sorted(TENSORS.items())))


# ---------------------------------------------------------------------------------------------------- chunks


def by_hand(shape, itemsize):
    return [tuple((part.start, part.stop) for part in index) for index in chunks(shape, itemsize)]


def test_chunks_by_hand(small_chunks):
    assert by_hand((), 8) == [()]
    assert by_hand((4,), 4) == [((0, 4),)]
    assert by_hand((5,), 4) == [((0, 4),), ((4, 5),)]
    assert by_hand((3, 2), 4) == [((0, 2), (0, 2)), ((2, 3), (0, 2))]
    # A row of six is too large, and is cut into four and two.
    assert by_hand((2, 6), 4) == [((0, 1), (0, 4)), ((0, 1), (4, 6)), ((1, 2), (0, 4)), ((1, 2), (4, 6))]
    assert by_hand((3, 0), 4) == []
    assert by_hand((1,), 32) == [((0, 1),)]


def test_no_more_than_a_chunk_is_copied_at_a_time(tmp_path, monkeypatch, small_chunks):
    sizes = []

    def watched(tensor):
        sizes.append(tensor.nbytes)
        return original(tensor)

    original = tensor_file.bytes_of
    monkeypatch.setattr(tensor_file, "bytes_of", watched)
    tensors = {"t": torch.arange(40, dtype=torch.int32).reshape(10, 4)[:, 1:], "wide": torch.zeros(2, 30)}
    save(tmp_path, tensors)
    assert_same(load(tmp_path), tensors)
    assert max(sizes) <= 16
    assert sum(sizes) == 2 * (30 + 60) * 4  # once when written, once when read


# ---------------------------------------------------------------------------------------------------- again and again


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    save(tmp_path)
    other = {"ids": torch.ones(3)}
    save(tmp_path, other)
    assert_same(load(tmp_path), other)
    assert sorted(contents(tmp_path)) == ["lock", "manifest.json", "tensors-000002.safetensors"]


class Crash(BaseException):
    """What no code of ours catches."""


OLD, NEW = {"ids": torch.arange(7)}, {"ids": torch.arange(100, 109), "more": torch.ones(3)}


def fails_at(monkeypatch, point, error):
    """Have the n-th of the calls that change the disk raise an error, or call a function; counts the calls."""
    calls = itertools.count()

    def failing(original):
        def call(*args, **kwargs):
            if next(calls) == point:
                if callable(error):
                    error()
                raise error
            return original(*args, **kwargs)

        return call

    for name in ("replace", "fsync", "posix_fallocate", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr(Directory, "create", failing(Directory.create))
    monkeypatch.setattr(tensor_file, "open", failing(open), raising=False)
    monkeypatch.setattr(tensor_file, "bytes_of", failing(tensor_file.bytes_of))
    return calls


@pytest.mark.parametrize("error", [Crash(), OSError(errno.ENOSPC, "No space left on device")], ids=["stop", "full"])
@pytest.mark.parametrize("first", [False, True], ids=["over another", "first"])
def test_an_error_at_any_point_leaves_one_whole(error, first, tmp_path):
    for point in itertools.count():
        folder = tmp_path / str(point)
        if not first:
            save(folder, OLD)
        with pytest.MonkeyPatch.context() as patch:
            calls = fails_at(patch, point, error)
            with contextlib.suppress(Crash, DiskFullError):
                save(folder, NEW)
            failed = next(calls) > point
        if not failed:
            break
        found = None if not (folder / "manifest.json").exists() else load(folder)
        assert first if found is None else list(found) in (["ids"], ["ids", "more"])
        if found is not None:
            assert_same(found, NEW if "more" in found else OLD)
        save(folder, NEW)
        assert_same(load(folder), NEW)
        left = [name for name in contents(folder) if name.startswith("tensors")]
        assert len(left) == 1
    assert point > 8


def test_an_error_leaves_nothing_lying_about(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise Crash

    save(tmp_path, OLD)
    before = contents(tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(Crash):
        save(tmp_path, NEW)
    assert contents(tmp_path) == before


def save_and_die(folder, point):
    """In a child: save, and end the process before the n-th call that changes the disk. 0 if it came to the end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        fails_at(pytest.MonkeyPatch(), point, lambda: os._exit(99))
        save(folder, NEW)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("first", [False, True], ids=["over another", "first"])
def test_a_process_that_dies_at_any_point_leaves_one_whole(first, tmp_path):
    seen = set()
    for point in itertools.count():
        folder = tmp_path / str(point)
        if not first:
            save(folder, OLD)
        status = save_and_die(folder, point)
        assert status in (0, 99)
        found = None if not (folder / "manifest.json").exists() else load(folder)
        if found is None:
            assert first
        else:
            assert_same(found, NEW if "more" in found else OLD)
        seen.add(None if found is None else "more" in found)
        if status == 0:
            break
        save(folder, OLD)  # what was left is no hindrance, and is cleared away
        assert_same(load(folder), OLD)
        names = sorted(contents(folder))
        assert len(names) == 3
        assert names[:2] == ["lock", "manifest.json"]
    assert point > 8
    assert seen == {None if first else False, True}


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("tensor", "words"),
    [(torch.eye(3).to_sparse(), "sparse"), (torch.empty(3, dtype=torch.bits8), "bits8")],
)
def test_tensors_that_have_no_form_are_refused_before_anything_is_written(tensor, words, tmp_path):
    with pytest.raises(InvalidInputError, match=rf"^t is a .*{words}.*cannot be saved"):
        save(tmp_path / "folder", {"t": tensor})
    with pytest.raises(InvalidInputError, match=r"numbers\.a is a object, which cannot be saved"):
        save(tmp_path / "folder", {}, {"a": object()})
    assert list(tmp_path.iterdir()) == []


def test_no_snapshot(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SnapshotError, match="there is no snapshot in"):
            SnapshotReader(path)


def test_tensors_that_are_missing(tmp_path):
    save(tmp_path)
    (tmp_path / "tensors-000001.safetensors").unlink()
    with pytest.raises(SnapshotError, match=r"is not complete: tensors-000001.safetensors is missing"):
        SnapshotReader(tmp_path)


def test_tensors_that_were_cut_short(tmp_path):
    save(tmp_path)
    file = tmp_path / "tensors-000001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(SnapshotError, match=f"it has {len(whole) - 5} bytes and should have {len(whole)}"):
        SnapshotReader(tmp_path)


def test_a_byte_that_changed_is_seen(tmp_path):
    save(tmp_path)
    file = tmp_path / "tensors-000001.safetensors"
    whole = file.read_bytes()
    begin = whole.index(b"}}") + 2
    begin += -begin % 8
    for position in range(begin, len(whole), 5):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(SnapshotError, match=r"damaged: .* is not what was saved"):
            load(tmp_path)
    for position in range(0, begin, 5):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(SnapshotError, match="is damaged"):
            load(tmp_path)


@pytest.mark.parametrize(("old", "new"), [(b'"I64"', b'"U64"'), (b"[2,3,4]", b"[4,3,2]")])
def test_a_header_that_says_otherwise_than_the_manifest_is_seen(old, new, tmp_path):
    save(tmp_path)
    file = tmp_path / "tensors-000001.safetensors"
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(SnapshotError, match="ids is not of the form that was saved"):
        load(tmp_path)


def test_a_tensor_that_is_not_there(tmp_path):
    save(tmp_path)
    with SnapshotReader(tmp_path) as reader:
        for ask in (reader.tensor, reader.shape, reader.dtype):
            with pytest.raises(SnapshotError, match=r"has no tensor 'x'; it has \['ids', 'flags', "):
                ask("x")


@pytest.mark.parametrize("target", [torch.zeros(2, 3, 5), torch.zeros(2, 3, 4), torch.zeros(24, dtype=torch.int64)])
def test_a_target_of_another_form(target, tmp_path):
    save(tmp_path)
    words = r"ids was saved as \(2, 3, 4\) int64 in .* is to be read into"
    with SnapshotReader(tmp_path) as reader, pytest.raises(SnapshotError, match=words):
        reader.read_into("ids", target)
    assert not target.any()


# ---------------------------------------------------------------------------------------------------- a full disk


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, OLD)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        DiskFullError, match=r"the disk is full.*Save to a larger disk\. What was there before"
    ) as error:
        save(tmp_path, NEW)
    assert error.value.errno == errno.ENOSPC
    assert_same(load(tmp_path), OLD)
    assert len(contents(tmp_path)) == 3


# ---------------------------------------------------------------------------------------------------- generators


def test_a_generator_goes_on(tmp_path):
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    save(tmp_path, generator_state(generator))
    expected = torch.rand(4, generator=generator)
    other = torch.Generator()
    with SnapshotReader(tmp_path) as reader:
        restore_generator(other, reader)
    assert torch.equal(torch.rand(4, generator=other), expected)


def test_a_generator_of_another_kind_begins_from_a_seed_of_the_saved_state(tmp_path):
    seeds = []
    other = SimpleNamespace(device=torch.device("cuda"), manual_seed=seeds.append)
    for seed in (5, 5, 6):
        save(tmp_path, generator_state(torch.Generator().manual_seed(seed)))
        with SnapshotReader(tmp_path) as reader:
            restore_generator(other, reader)
    assert seeds[0] == seeds[1] != seeds[2]
