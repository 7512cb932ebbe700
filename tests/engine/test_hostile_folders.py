"""Folders that are damaged or hostile: each thing that once went wrong. What they hold is data, and never trusted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tracemalloc
import zlib

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from written_snapshots import write_snapshot

from rlstore import (
    DiskFullError,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
    SnapshotError,
    Storage,
    StorageError,
)
from rlstore.engine.disk import manifest
from rlstore.engine.disk.episode_files import EpisodeFiles
from rlstore.engine.disk.snapshot import SnapshotReader

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

BOX, MOVES = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(2)
TENSORS = {"ids": torch.arange(6), "flags": torch.tensor([True, False, True])}


def write(folder, number=0, settings=None):
    tensors = {name: tensor + number if name == "ids" else tensor for name, tensor in TENSORS.items()}
    write_snapshot(folder, "S", "cpu", settings or {"size": 4}, {"number": number}, tensors)


def read(folder):
    with SnapshotReader(folder) as reader:
        return reader.numbers["number"], {name: reader.tensor(name) for name in reader.names}


def play(storage, first, last):
    """One environment whose observation is the number of the step; episodes of five steps."""
    for step in range(first, last):
        storage.add([[float(step)]], [0], [float(step)], [step % 5 == 4], [False], {}, [[float(step + 1)]])


def rewrite(folder, change):
    """Change the manifest of a folder; its checksum is made to fit."""
    path = folder / "manifest.json"
    told = json.loads(path.read_text())
    told.pop("crc32")
    change(told)
    told["crc32"] = zlib.crc32(json.dumps(told, indent=1).encode())
    path.write_text(json.dumps(told, indent=1))


def contents(folder):
    found = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return found, {path: path.stat().st_mtime_ns for path in found}


# ---------------------------------------------------------------------------------------------------- other folders


def test_a_name_in_a_manifest_does_not_lead_out_of_its_folder(tmp_path):
    write(tmp_path / "other", 7)
    write(tmp_path / "hostile")
    for name in ("../other/tensors-000001.safetensors", str(tmp_path / "other" / "tensors-000001.safetensors"), "lock"):
        rewrite(tmp_path / "hostile", lambda told, name=name: told["file"].update(name=name))
        with pytest.raises(SnapshotError, match=r'manifest\.json is damaged: a "name" of a file in it is'):
            read(tmp_path / "hostile")


def test_a_snapshot_does_not_choose_the_folder_of_mapped_memory(tmp_path):
    victim = ReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "victim")
    play(victim, 0, 8)
    victim.close()
    before = contents(tmp_path / "victim")
    storage = ReplayStorage(BOX, MOVES, storage_size=20)
    play(storage, 100, 103)
    storage.save(tmp_path / "hostile")

    def change(told):
        told["settings"]["options"].update(memory="mapped", path=str(tmp_path / "victim"))

    rewrite(tmp_path / "hostile", change)
    with pytest.raises(
        SnapshotError, match=r"also uses the folder '.*victim' \(its path\).*load\(path, folders=\{'path'"
    ):
        Storage.load(tmp_path / "hostile")
    assert contents(tmp_path / "victim") == before
    loaded = Storage.load(tmp_path / "hostile", folders={"path": tmp_path / "mine"})
    assert loaded.get_all_buffer_data()["rewards"].flatten().tolist() == [100, 101, 102]
    assert (tmp_path / "mine" / "records.bin").exists()
    assert contents(tmp_path / "victim") == before


def test_a_snapshot_does_not_choose_the_folder_of_episodes(tmp_path):
    def kept(path, size):
        arguments = {"save_snapshot": True, "snapshot_dir": path, "num_workers": 0}
        return NStepReplayStorage(BOX, MOVES, storage_size=size, **arguments)

    victim = kept(tmp_path / "victim", 50)
    play(victim, 0, 50)
    victim.close()
    before = contents(tmp_path / "victim")
    storage = NStepReplayStorage(BOX, MOVES, storage_size=5, num_workers=0)
    play(storage, 100, 103)
    storage.save(tmp_path / "hostile")
    rewrite(
        tmp_path / "hostile",
        lambda told: told["settings"].update(save_snapshot=True, snapshot_dir=str(tmp_path / "victim")),
    )
    with pytest.raises(SnapshotError, match=r"also uses the folder '.*victim' \(its snapshot_dir\)"):
        Storage.load(tmp_path / "hostile")
    assert contents(tmp_path / "victim") == before
    Storage.load(tmp_path / "hostile", folders={"snapshot_dir": tmp_path / "mine"}).close()
    assert contents(tmp_path / "victim") == before


def test_a_folder_that_the_storage_does_not_use_is_refused(tmp_path):
    ReplayStorage(BOX, MOVES, storage_size=20).save(tmp_path / "saved")
    with pytest.raises(SnapshotError, match=r"folders has \['path'\]; the storage in .* uses none"):
        Storage.load(tmp_path / "saved", folders={"path": tmp_path / "rows"})
    assert not (tmp_path / "rows").exists()


# ---------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("name", ["manifest.json.new", "tensors-000002.safetensors"])
def test_a_link_where_a_save_writes_is_not_followed(name, tmp_path):
    write(tmp_path / "saved")
    (tmp_path / "notes.txt").write_text("dear to me")
    (tmp_path / "saved" / name).symlink_to(tmp_path / "notes.txt")
    with contextlib.suppress(StorageError):
        write(tmp_path / "saved", 1)
    assert (tmp_path / "notes.txt").read_text() == "dear to me"
    assert read(tmp_path / "saved")[0] == 1


def test_a_folder_where_a_save_writes_is_left_alone(tmp_path):
    write(tmp_path / "saved")
    (tmp_path / "saved" / "tensors-000007.safetensors").mkdir()
    write(tmp_path / "saved", 1)
    assert read(tmp_path / "saved")[0] == 1
    assert (tmp_path / "saved" / "tensors-000007.safetensors").is_dir()


def test_a_link_where_an_episode_is_written_is_not_followed(tmp_path):
    (tmp_path / "notes.txt").write_text("dear to me")
    files = EpisodeFiles("S", tmp_path / "episodes", {})
    (tmp_path / "episodes" / "episode-000000000001.safetensors.new").symlink_to(tmp_path / "notes.txt")
    files.write({"ids": torch.arange(3)}, 3, 0)
    assert (tmp_path / "notes.txt").read_text() == "dear to me"


@pytest.mark.parametrize("name", ["manifest.json", "tensors-000001.safetensors"])
@pytest.mark.parametrize("thing", ["link", "FIFO", "folder", "zeros"])
def test_what_is_not_a_plain_file_is_refused_and_nothing_waits(name, thing, tmp_path):
    write(tmp_path / "saved")
    whole = shutil.copytree(tmp_path / "saved", tmp_path / "copy") / name
    file = tmp_path / "saved" / name
    file.unlink()
    make = {
        "link": lambda: file.symlink_to(whole),
        "FIFO": lambda: os.mkfifo(file),
        "folder": file.mkdir,
        "zeros": lambda: file.symlink_to("/dev/zero"),
    }
    make[thing]()
    with pytest.raises(SnapshotError, match=f"{name} is not a plain file"):
        read(tmp_path / "saved")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(InvalidInputError, match="lock is not a plain file"):
        write(tmp_path / "saved")
    assert not (tmp_path / "new").exists()


def test_a_mapped_file_that_is_a_link_is_not_followed(tmp_path):
    storage = ReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "rows")
    play(storage, 0, 8)
    storage.close()
    shutil.copyfile(tmp_path / "rows" / "records.bin", tmp_path / "mine.bin")
    before = (tmp_path / "mine.bin").read_bytes()
    (tmp_path / "rows" / "records.bin").unlink()
    (tmp_path / "rows" / "records.bin").symlink_to(tmp_path / "mine.bin")
    (tmp_path / "rows" / "seal.json").unlink(missing_ok=True)
    with pytest.raises(SnapshotError, match=r"records\.bin is not a plain file"):
        play(ReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "rows"), 8, 12)
    assert (tmp_path / "mine.bin").read_bytes() == before


# ---------------------------------------------------------------------------------------------------- sizes


def box(shape):
    return {"$space": "Box", "shape": shape, "dtype": "float32", "low": 0, "high": 1}


@pytest.mark.parametrize("shape", [[10**5, 10**5], [10**12], [2**31, 2**31, 2**31]], ids=str)
def test_a_space_larger_than_the_data_is_not_allocated(shape, tmp_path):
    write(tmp_path / "saved")
    rewrite(tmp_path / "saved", lambda told: told["settings"].update(space=box(shape)))
    with pytest.raises(SnapshotError, match="bytes of a space of shape"):
        read(tmp_path / "saved")


def test_many_spaces_are_counted_together(tmp_path):
    write(tmp_path / "saved")
    many = [box([4096, 4096 * 8]) for _ in range(2)]
    rewrite(tmp_path / "saved", lambda told: told["settings"].update(spaces=many))
    with pytest.raises(SnapshotError, match="bytes of a space of shape"):
        read(tmp_path / "saved")


@pytest.mark.parametrize("name", ["manifest.json", "tensors-000001.safetensors"])
def test_a_file_that_says_it_is_a_terabyte_is_refused(name, tmp_path):
    write(tmp_path / "saved")
    os.truncate(tmp_path / "saved" / name, 1 << 40)
    with pytest.raises(SnapshotError, match=r"1,099,511,627,776 bytes"):
        read(tmp_path / "saved")


@pytest.mark.parametrize("depth", [500, 5000])  # which Python reads before 3.12, and since
def test_settings_that_are_nested_deeply_are_refused(depth, tmp_path):
    storage = ReplayStorage(BOX, MOVES, storage_size=20)
    storage.save(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    told = json.loads(path.read_text())
    told.pop("crc32")
    told["settings"]["deep"] = "deep"
    text = json.dumps(told, indent=1).replace('"deep": "deep"', f'"deep": {"[" * depth}{"]" * depth}')
    crc = zlib.crc32(text.encode())
    path.write_text(text[:-2] + f',\n "crc32": {crc}\n}}')
    with pytest.raises(SnapshotError, match=r"manifest\.json (is damaged|.* has no argument 'deep')"):
        Storage.load(tmp_path / "saved")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        '{"a": ' + "9" * 100_000 + "}",
        '{"format": "rlstore snapshot", "format": "rlstore snapshot"}',
        '{"a": NaN}',
    ],
    ids=["deep list", "deep objects", "long number", "twice", "NaN"],
)
def test_json_that_is_none_of_ours_is_refused(text, tmp_path):
    write(tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").write_text(text)
    with pytest.raises(SnapshotError, match=r"manifest\.json is damaged: it is not JSON"):
        read(tmp_path / "saved")


def test_json_with_more_parts_than_any_of_ours_is_not_taken_into_memory(tmp_path):
    """An empty list has 3 bytes in the file and 64 in memory."""
    write(tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").write_text('{"a": [' + "[]," * 10**6 + "0]}")
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError, match=r"manifest\.json is damaged: it has 1,000,00. parts"):
            read(tmp_path / "saved")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("field", ["format", "settings", "contents"])
def test_an_error_is_short_whatever_was_found(field, tmp_path):
    write(tmp_path / "saved")
    manifest_file = tmp_path / "saved" / "manifest.json"
    content = json.loads(manifest_file.read_text())
    del content["crc32"]
    content[field] = ["x" * 100_000] * 9
    manifest_file.write_text(json.dumps(content))
    with pytest.raises(SnapshotError, match=field) as error:
        read(tmp_path / "saved")
    assert len(str(error.value)) < 1000


# ---------------------------------------------------------------------------------------------------- headers


def entry(dtype="I64", shape=(6,), offsets=(0, 48)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


FLAGS = entry("BOOL", (3,), (48, 51))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"ids": entry(), "flags": entry("BOOL", (3,), (40, 43))}, r'"flags\.data_offsets" begins at 40'),
        ({"ids": entry(offsets=(8, 56)), "flags": FLAGS}, r'"\w+\.data_offsets" begins at'),
        ({"ids": entry(offsets=(0, 49)), "flags": FLAGS}, r'"ids\.data_offsets" is \[0, 49\], and its data have 48'),
        ({"ids": entry(offsets=(-1, 47)), "flags": FLAGS}, r'"ids\.data_offsets" is not a list of whole numbers'),
        ({"ids": entry(shape=(2**62, 4)), "flags": FLAGS}, r'"ids\.data_offsets" is \[0, 48\], and its data have'),
        ({"ids": entry("I65"), "flags": FLAGS}, r"\"ids\.dtype\" is 'I65', which is unknown"),
        ({"ids": entry(shape=(2, 3)), "flags": FLAGS}, "ids is not of the form that was saved"),
        ({"ids": entry("F64"), "flags": FLAGS}, "ids is not of the form that was saved"),
        ({"ids": entry(), "more": FLAGS}, "is in the file or in manifest.json, and not in both"),
        ({"ids": 3, "flags": FLAGS}, '"ids" does not have dtype, shape, data_offsets alone'),
        ({"__metadata__": {"a": 1}, "ids": entry(), "flags": FLAGS}, "not strings by name"),
        ([1], "not an object"),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(header, words, tmp_path):
    write(tmp_path / "saved")
    file = tmp_path / "saved" / "tensors-000001.safetensors"
    content = file.read_bytes()
    data = content[8 + struct.unpack("<Q", content[:8])[0] :]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    rewrite(tmp_path / "saved", lambda told: told["file"].update(bytes=file.stat().st_size))
    with pytest.raises(SnapshotError, match=words):
        read(tmp_path / "saved")


@pytest.mark.parametrize("length", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_the_length_of_a_header_is_held_against_the_file(length, tmp_path):
    write(tmp_path / "saved")
    file = tmp_path / "saved" / "tensors-000001.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(SnapshotError, match=r"tensors-000001\.safetensors is damaged"):
        read(tmp_path / "saved")


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", ["added", "samples"])
def test_counts_from_which_nobody_can_count_on_are_refused(name, tmp_path):
    storage = ReplayStorage(BOX, MOVES, storage_size=20, memory="shared")
    play(storage, 0, 3)
    storage.save(tmp_path / "saved")
    storage.close()
    rewrite(tmp_path / "saved", lambda told: told["numbers"].update({name: 10**30}))
    with pytest.raises(SnapshotError, match=f"{name} is 1000.* at most 2"):
        Storage.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda told: told["settings"].update(num_envs=0), "num_envs is 0"),
        (lambda told: told["settings"].update(num_envs="3"), "num_envs"),
        (lambda told: told["settings"].update(gamma=7), "gamma is 7"),
        (lambda told: told["settings"].pop("obs"), "obs"),
        (lambda told: told["settings"].update(another=1), "another"),
        (lambda told: told["settings"].update(num_transitions_per_env=10**9), "8,000,000,000 bytes of observations"),
        (lambda told: told["settings"]["obs"].update(shapes=[[10**12]]), "there are .* bytes of all"),
        (lambda told: told["settings"]["obs"].update(dtypes=[]), "manifest.json"),
        (lambda told: told["numbers"].clear(), "manifest.json"),
        (lambda told: told.update(settings={"a": {"$float": "1"}}), '"settings" cannot be read'),
        (lambda told: told.update(settings={"a": {"$dtype": "nn"}}), '"settings" cannot be read'),
        (lambda told: told.update(device="nowhere"), "was saved on 'nowhere'"),
    ],
)
def test_settings_that_a_storage_refuses_are_an_error_of_the_snapshot(change, words, tmp_path):
    storage = RolloutStorage("rl", 2, 3, TensorDict({"a": torch.zeros(2, 1)}, [2]), [1])
    storage.save(tmp_path / "saved")
    rewrite(tmp_path / "saved", change)
    with pytest.raises(SnapshotError, match=words):
        Storage.load(tmp_path / "saved")


def test_a_setting_that_is_missing_does_not_become_its_default(tmp_path):
    storage = ReplayStorage(BOX, MOVES, storage_size=20)
    play(storage, 0, 30)
    storage.save(tmp_path / "saved")
    rewrite(tmp_path / "saved", lambda told: told["settings"].pop("storage_size"))
    with pytest.raises(SnapshotError, match=r"manifest\.json cannot be loaded.*lack \['storage_size'\]"):
        Storage.load(tmp_path / "saved")


# ---------------------------------------------------------------------------------------------------- mapped files


def test_a_mapped_file_that_was_cut_is_not_filled_up_with_zeros(tmp_path):
    """Nor without a seal, as after a kill."""

    def make():
        return ReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "rows")

    storage = make()
    play(storage, 0, 30)
    storage.close()
    for name in ("records.bin", "counters.bin", "episodes.bin", "final%20observations.bin"):
        file = tmp_path / "rows" / name
        whole = file.read_bytes()
        for length in (0, len(whole) // 2, len(whole) - 1):
            (tmp_path / "rows" / "seal.json").unlink(missing_ok=True)
            file.write_bytes(whole[:length])
            with pytest.raises(SnapshotError, match=f"{name} is damaged"):
                make()
            assert file.read_bytes() == whole[:length]
        file.write_bytes(whole)
    file = tmp_path / "rows" / "records.bin"
    (tmp_path / "rows" / "seal.json").unlink(missing_ok=True)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(SnapshotError, match=r"records\.bin is damaged: it has .* bytes and should have"):
        make()


def test_sums_of_priorities_are_never_taken_from_a_file(tmp_path):
    def make():
        return PrioritizedReplayStorage(
            BOX, MOVES, storage_size=20, batch_size=64, memory="mapped", path=tmp_path / "rows", seed=0
        )

    storage = make()
    play(storage, 0, 15)
    storage.close()
    (tmp_path / "rows" / "seal.json").unlink(missing_ok=True)
    for name in ("priority%20sums.bin", "priority%20maxima.bin"):
        file = tmp_path / "rows" / name
        file.write_bytes(b"\x41" * file.stat().st_size)
    storage = make()
    assert storage.priority_total == 15
    assert set(storage.sample().rows.tolist()) <= set(range(15))


@pytest.mark.parametrize("made", [1, 2, 3, 4, 5])
def test_a_folder_whose_making_was_interrupted_is_completed(made, tmp_path, monkeypatch):
    def make():
        return ReplayStorage(BOX, MOVES, storage_size=20, memory="mapped", path=tmp_path / "rows")

    calls, real = [], os.posix_fallocate

    def fails(descriptor, offset, length):
        calls.append(length)
        if len(calls) == made:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails)
        with pytest.raises(DiskFullError) as kept:
            make()
    storage = make()
    play(storage, 0, 3)
    assert len(storage) == 3
    assert kept.value.errno == 28  # who keeps the error does not keep the folder


# ---------------------------------------------------------------------------------------------------- episodes


def kept(path):
    arguments = {"save_snapshot": True, "snapshot_dir": path, "num_workers": 0}
    return NStepReplayStorage(BOX, MOVES, storage_size=20, **arguments)


@pytest.fixture
def episodes(tmp_path):
    storage = kept(tmp_path / "episodes")
    play(storage, 0, 15)
    storage.close()
    return tmp_path / "episodes"


def test_every_byte_of_an_episode_counts(episodes):
    file = episodes / "episode-000000000002.safetensors"
    whole = file.read_bytes()
    accepted = 0
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            storage = kept(episodes)
        except SnapshotError as error:
            assert "episode-000000000002.safetensors" in str(error)  # noqa: PT017 - most of them raise
        else:  # the name of the checksum, or white space
            accepted += 1
            assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == list(range(15))
            storage.close()
    assert accepted < 4


def test_episodes_in_another_order_or_of_another_form_are_refused(episodes):
    first, second = (episodes / f"episode-00000000000{number}.safetensors" for number in (1, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(SnapshotError, match=r"episode-000000000001\.safetensors is damaged: it is episode 2"):
        kept(episodes)
    first.write_bytes(content)
    second.unlink()
    second.mkdir()
    with pytest.raises(SnapshotError, match=r"episode-000000000002\.safetensors is not a plain file.*Remove the file"):
        kept(episodes)
    second.rmdir()
    (episodes / "episode-1.safetensors").write_bytes(content)  # no name of ours
    storage = kept(episodes)
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == [*range(5), *range(10, 15)]


def test_no_episode_is_removed_when_another_is_damaged(episodes):
    before = sorted(path.name for path in episodes.iterdir())
    file = episodes / "episode-000000000003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match="episode-000000000003"):
        NStepReplayStorage(BOX, MOVES, storage_size=5, save_snapshot=True, snapshot_dir=episodes, num_workers=0)
    assert sorted(path.name for path in episodes.iterdir()) == before


# ---------------------------------------------------------------------------------------------------- load beside save


@pytest.mark.parametrize("saves", [1, 2, 5])
def test_a_save_between_the_manifest_and_its_tensors_is_noticed(saves, tmp_path, monkeypatch):
    write(tmp_path / "saved", 0)
    real, numbers = manifest.read_manifest, iter(range(1, saves + 1))

    def replaced(*arguments):
        found = real(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "read_manifest", real)
            number = next(numbers, None)
            if number is not None:
                write(tmp_path / "saved", number)
        return found

    monkeypatch.setattr(manifest, "read_manifest", replaced)
    number, tensors = read(tmp_path / "saved")
    assert number == saves
    assert torch.equal(tensors["ids"], torch.arange(6) + saves)


def test_a_save_while_tensors_are_read_changes_nothing(tmp_path):
    write(tmp_path / "saved", 0)
    with SnapshotReader(tmp_path / "saved") as reader:
        write(tmp_path / "saved", 1)
        assert reader.tensor("ids").tolist() == [0, 1, 2, 3, 4, 5]
    assert read(tmp_path / "saved")[0] == 1
