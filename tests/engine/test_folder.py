"""Folders of rlstore: one manifest for snapshots, mapped storages and episodes; one lock; what is refused."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import re
import signal
import sys
import zlib

import pytest
import torch
import torch.multiprocessing
from written_snapshots import write_snapshot

from rlstore import DiskFullError, InvalidInputError, SnapshotError
from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.episode_files import EpisodeFiles
from rlstore.engine.disk.folder import Folder
from rlstore.engine.disk.mapped import MappedFiles
from rlstore.engine.disk.snapshot import SnapshotReader

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SCHEMA = {"fields": {"obs": {"shape": [3], "dtype": "float32"}}, "steps": 10}
IF_FULL = "Give a path on a larger disk."
KINDS = ("snapshot", "mapped storage", "episodes")


def open_folder(path, kind="mapped storage"):
    return Folder("ReplayStorage", path, kind, {"schema": dict}, lambda name: not name.startswith("tensors-"), IF_FULL)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rewrite(path, **changes):
    """Change fields of a manifest; None removes one. Its checksum is made to fit."""
    held = {**json.loads(path.read_text()), **changes}
    held = {name: value for name, value in held.items() if value is not None and name != "crc32"}
    held["crc32"] = zlib.crc32(json.dumps(held, indent=1).encode())
    path.write_text(json.dumps(held, indent=1))


# ---------------------------------------------------------------------------------------------------- the manifest


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_says_kind_version_and_checksum(kind, tmp_path):
    manifest.write_manifest(Directory(tmp_path), kind, {"schema": {"a": (1, 2.5)}})
    (file,) = tmp_path.iterdir()
    assert file.name == "manifest.json"
    rest = {"format": f"rlstore {kind}", "version": 1, "schema": {"a": [1, 2.5]}}
    assert json.loads(file.read_text()) == {**rest, "crc32": zlib.crc32(json.dumps(rest, indent=1).encode())}
    assert manifest.read_manifest(Directory(tmp_path), kind, {"schema": dict}) == rest


def test_a_manifest_without_a_checksum_is_read(tmp_path):
    """Those of older versions have none."""
    (tmp_path / "manifest.json").write_text('{"format": "rlstore episodes", "version": 1, "schema": {}}')
    assert manifest.read_manifest(Directory(tmp_path), "episodes", {"schema": dict})["schema"] == {}


def write_all_kinds(root):
    """A folder of each kind, written as storages do."""
    write_snapshot(root / "snapshot", "S", "cpu", {"size": 4}, {"written": 3}, {"ids": torch.arange(3)})
    mapped = MappedFiles("S", root / "mapped storage")
    mapped.open({"size": 4})
    mapped.map("ids", (3,), torch.int64)
    mapped.close()
    episodes = EpisodeFiles("S", root / "episodes", {"ids": [[], "int64"]})
    episodes.write({"ids": torch.arange(3)}, 3, 0)
    episodes.close()


READ = {
    "snapshot": SnapshotReader,
    "mapped storage": lambda path: MappedFiles("S", path).open({"size": 4}),
    "episodes": lambda path: EpisodeFiles("S", path, {"ids": [[], "int64"]}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, '"format" is \'other\', not "rlstore '),
        ({"format": None}, '"format" is None, not "rlstore '),
        ({"version": None}, 'is damaged: "version" is missing'),
        ({"version": "1"}, "is damaged: \"version\" is '1', not an integer"),
        ({"version": 2, "schema": 7, "tensors": 7}, 'newer rlstore: "version" is 2, and this version reads 1. Update'),
    ],
    ids=str,
)
def test_every_kind_refuses_a_manifest_that_it_cannot_read_by_file_and_field(kind, changes, words, tmp_path):
    write_all_kinds(tmp_path)
    path = tmp_path / kind / "manifest.json"
    rewrite(path, **changes)
    before = contents(tmp_path)
    with pytest.raises(SnapshotError) as refused:
        READ[kind](tmp_path / kind)
    assert str(path) in str(refused.value)
    assert words in str(refused.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": "rlstore sna'], ids=str)
def test_every_kind_refuses_what_is_no_manifest(kind, content, tmp_path):
    write_all_kinds(tmp_path)
    path = tmp_path / kind / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=r"manifest.json is (damaged|not the manifest)"):
        READ[kind](tmp_path / kind)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("kind", "other"), list(itertools.permutations(KINDS, 2)))
def test_no_kind_takes_the_folder_of_another(kind, other, tmp_path):
    write_all_kinds(tmp_path)
    before = contents(tmp_path / other)
    words = f"is not the manifest of a {kind}: \"format\" is 'rlstore {other}'"
    with pytest.raises(SnapshotError, match=words):
        READ[kind](tmp_path / other)
    if kind == "snapshot":
        with pytest.raises(InvalidInputError, match=rf"{words}.*save\(\) cannot write to this folder"):
            write_snapshot(tmp_path / other, "S", "cpu", {}, {}, {})
    assert contents(tmp_path / other) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_of_a_manifest_that_changed_is_seen(kind, tmp_path):
    """Whatever it makes of the manifest, no other values are read: they are the same, or it is refused."""
    write_all_kinds(tmp_path)
    path, fields = tmp_path / kind / "manifest.json", {}
    whole = path.read_bytes()
    expected = manifest.read_manifest(Directory(path.parent), kind, fields)
    refused = 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            found = manifest.read_manifest(Directory(path.parent), kind, fields)
        except SnapshotError as error:
            refused += "checksum" in str(error)
        else:  # white space, or the name of the checksum
            found.pop(next((name for name in found if name not in expected), ""), None)
            assert found == expected
    assert refused > 10


@pytest.mark.parametrize("field", ["contents", "class", "device", "settings", "numbers", "file", "tensors"])
def test_a_field_of_a_snapshot_that_is_missing_or_of_another_type_is_named(field, tmp_path):
    write_all_kinds(tmp_path)
    path = tmp_path / "snapshot" / "manifest.json"
    rewrite(path, **{field: 7})
    with pytest.raises(SnapshotError, match=f'manifest.json is damaged: "{field}" is 7, not a'):
        SnapshotReader(path.parent)
    rewrite(path, **{field: None})
    with pytest.raises(SnapshotError, match=f'manifest.json is damaged: "{field}" is missing'):
        SnapshotReader(path.parent)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file": {"name": "tensors-000001.safetensors"}}, '"file.bytes" is missing'),
        ({"file": {"name": 1, "bytes": 2}}, '"file.name" is 1, not a string'),
        ({"tensors": {"ids": []}}, r'"tensors.ids" is \[\], not an object'),
        ({"tensors": {"ids": {"dtype": "int64", "shape": [3]}}}, '"tensors.ids.crc32" is missing'),
        ({"tensors": {"ids": {"dtype": "int64", "shape": 3, "crc32": 1}}}, '"tensors.ids.shape" is 3, not a list'),
        (
            {"contents": "changes"},
            "newer rlstore: \"contents\" is 'changes', and this version reads 'whole or segments'",
        ),
        (
            {"settings": {"space": {"$space": "Sphere"}}},
            r'"settings" cannot be read \(ValueError.*Sphere',
        ),
        ({"numbers": {"form": {"$dtype": "int65"}}}, r'"numbers" cannot be read \(ValueError'),
    ],
    ids=str,
)
def test_a_part_of_a_snapshots_manifest_that_is_wrong_is_named(changes, words, tmp_path):
    write_all_kinds(tmp_path)
    path = tmp_path / "snapshot" / "manifest.json"
    rewrite(path, **changes)
    with pytest.raises(SnapshotError, match=f"manifest.json .*{words}"):
        SnapshotReader(path.parent)


def test_a_damaged_episode_is_named(tmp_path):
    write_all_kinds(tmp_path)
    path = tmp_path / "episodes" / "episode-000000000001.safetensors"
    whole = path.read_bytes()
    for content in (whole[:20], whole.replace(b'"steps"', b'"stops"'), whole.replace(b'"lane":"0"', b'"lane":"x"')):
        path.write_bytes(content)
        files = READ["episodes"](path.parent)
        with pytest.raises(SnapshotError, match=f"{path} is damaged: .*Remove the file to continue"):
            files.entries()
        files.close()


# ---------------------------------------------------------------------------------------------------- what is refused


def test_a_new_folder_has_no_manifest_and_is_created(tmp_path):
    assert open_folder(tmp_path / "deep" / "er").manifest is None
    assert (tmp_path / "deep" / "er").is_dir()


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("dear to me")
    (tmp_path / "tensors-1").touch()
    with pytest.raises(InvalidInputError, match=r"has no manifest.json and holds other files: \['thesis.txt'\]"):
        open_folder(tmp_path)
    assert sorted(contents(tmp_path)) == ["tensors-1", "thesis.txt"]


def test_episodes_may_be_kept_beside_other_files_but_not_beside_foreign_episodes(tmp_path):
    (tmp_path / "run.log").touch()
    files = EpisodeFiles("S", tmp_path, {})
    files.close()
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "episode-000000000001.safetensors").touch()
    with pytest.raises(InvalidInputError, match=r"holds other files: \['episode-000000000001.safetensors'\]"):
        EpisodeFiles("S", tmp_path, {})


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match=r"file is a file; ReplayStorage needs a folder. Nothing was changed"):
        open_folder(tmp_path / "file")


def test_what_an_unfinished_open_leaves_is_no_hindrance(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "manifest.json.new").write_text("{")
    folder = open_folder(tmp_path)
    assert folder.match(SCHEMA) is False
    folder.release()
    assert open_folder(tmp_path).match(SCHEMA) is True


def test_another_schema_is_refused_and_what_differs_is_named(tmp_path):
    folder = open_folder(tmp_path)
    folder.match(SCHEMA)
    folder.release()
    before = contents(tmp_path)
    with pytest.raises(InvalidInputError, match="holds mapped storage of another form than ReplayStorage") as refused:
        open_folder(tmp_path).match({"fields": {"obs": {"shape": (4,), "dtype": "float32"}}, "size": 10})
    message = str(refused.value)
    assert "fields.obs.shape is [3] there and [4] here" in message
    assert "steps is 10 there and null here" in message
    assert "size is null there and 10 here" in message
    assert "dtype" not in message
    assert contents(tmp_path) == before
    assert open_folder(tmp_path).match(SCHEMA)  # the refusal released the folder


def test_a_tuple_in_a_schema_is_a_list(tmp_path):
    folder = open_folder(tmp_path)
    folder.match({"shape": (3, 4)})
    folder.release()
    assert open_folder(tmp_path).match({"shape": (3, 4)})


def test_a_full_disk_releases_the_folder(monkeypatch, tmp_path):
    def full(*args, **options):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    folder = open_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(DiskFullError, match=f"the disk is full.*{IF_FULL}"):
            folder.match(SCHEMA)
    assert list(contents(tmp_path)) == ["lock"]
    assert open_folder(tmp_path).match(SCHEMA) is False


# ---------------------------------------------------------------------------------------------------- the lock


def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        if path == "lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *args, **kwargs)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=re.escape(str(tmp_path / "lock"))):
        open_folder(tmp_path)


def test_no_interrupt_leaves_a_folder_locked(tmp_path):
    """Ctrl-C before each line that opening a folder runs, in rlstore and in what it calls."""

    def interrupt(frame, event, arg):
        nonlocal left
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    for lines in itertools.count():
        left, before = lines, sys.gettrace()
        sys.settrace(interrupt)
        try:
            folder = open_folder(tmp_path)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        open_folder(tmp_path).release()
    folder.release()
    assert lines > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_in_use_is_refused_by_every_kind(kind, tmp_path):
    write_all_kinds(tmp_path)
    folder = Folder("another", tmp_path / kind, kind, {}, lambda name: True, IF_FULL)
    before = contents(tmp_path)
    write = {**READ, "snapshot": lambda path: write_snapshot(path, "S", "cpu", {}, {}, {})}[kind]
    with pytest.raises(InvalidInputError, match="is in use by another storage"):
        write(tmp_path / kind)
    assert contents(tmp_path) == before
    folder.release()
    folder.release()
    write(tmp_path / kind)


def test_a_collected_folder_is_released(tmp_path):
    folder = open_folder(tmp_path)
    with pytest.raises(InvalidInputError, match="in use"):
        open_folder(tmp_path)
    del folder
    gc.collect()
    open_folder(tmp_path)


def _hold_and_fork(path, until, answers):
    folder = open_folder(path)
    if os.fork() == 0:
        os.write(answers, b"c")
        os.read(until, 1)  # until the test is over
        os._exit(0)
    signal.pause()
    folder.release()


def test_a_killed_process_releases_its_folder_and_a_child_of_it_does_not_keep_it(tmp_path):
    until, end = os.pipe()
    answers, answer = os.pipe()
    context = torch.multiprocessing.get_context("fork")
    process = context.Process(target=_hold_and_fork, args=(tmp_path, until, answer))
    process.start()
    try:
        assert os.read(answers, 1) == b"c"
        with pytest.raises(InvalidInputError, match="in use"):
            open_folder(tmp_path)  # nor does the child release the folder of a parent that lives
        process.kill()
        process.join()
        open_folder(tmp_path).release()
    finally:
        process.kill()
        os.write(end, b"e")
        for descriptor in (until, end, answers, answer):
            os.close(descriptor)


def test_a_released_folder_is_free_whatever_was_forked_from_its_process(tmp_path):
    folder = open_folder(tmp_path)
    until, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    os.close(until)
    folder.release()
    open_folder(tmp_path).release()
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_saving_and_loading_leave_no_descriptor_open(tmp_path):
    def descriptors():
        found = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return [path for path in found if path.startswith(str(tmp_path))]

    for _ in range(2):
        write_snapshot(tmp_path / "s", "rlstore.X", "cpu", {}, {}, {"a": torch.arange(3)})
        with SnapshotReader(tmp_path / "s") as reader:
            assert reader.tensor("a").tolist() == [0, 1, 2]
    gc.collect()
    assert descriptors() == []
