"""Files of strangers: what a reader must not wait for, or read besides the file; names that are unusual."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import h5py
import minari
import numpy as np
import pytest
from experience import D4RL, assert_same, episodes, fill, make

from rlstore import InvalidInputError
from rlstore.data import read_hdf5, read_minari, read_npz, read_parquet, write_minari, write_npz, write_parquet

READERS = {"npz": read_npz, "hdf5": read_hdf5, "parquet": read_parquet}
ENDED = {"observations": np.ones((3, 2)), "actions": np.ones((2, 1)), "rewards": np.ones(2), "terminated": True}


def placed(thing: str, path: Path) -> None:
    """Put something in the place of a file."""
    path.unlink(missing_ok=True)
    if thing == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(path.parent)  # its address may have no more than 107 bytes
            try:
                server.bind(path.name)
            finally:
                os.chdir(here)
    else:
        {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda to: os.symlink("/dev/zero", to)}[thing](path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("thing", ["FIFO", "socket", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_plain_file_is_refused_and_nothing_waits(reader, thing, tmp_path):
    placed(thing, tmp_path / "a")
    with pytest.raises(InvalidInputError, match=r"/a is a folder, a FIFO, a socket or a device.* Nothing was read"):
        READERS[reader](tmp_path / "a")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["meta/rlstore.json", "meta/info.json", "data/chunk-000/file-000.parquet"])
@pytest.mark.parametrize("thing", ["FIFO", "device"])
def test_of_a_folder_every_file_is_looked_at_before_it_is_opened(name, thing, tmp_path):
    write_parquet([ENDED], tmp_path / "a")
    placed(thing, tmp_path / "a" / name)
    with pytest.raises(InvalidInputError, match=f"{Path(name).name} is a folder, a FIFO, a socket or a device"):
        read_parquet(tmp_path / "a")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("thing", ["FIFO", "device"])
def test_a_dataset_of_minari_is_looked_at_before_it_is_opened(thing, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    storage = make("prioritized")
    fill(storage, "prioritized")
    write_minari(storage, "mine-v0")
    (data,) = tmp_path.rglob("main_data.hdf5")
    placed(thing, data)
    with pytest.raises(InvalidInputError, match=r"main_data\.hdf5 is a folder, a FIFO, a socket or a device"):
        read_minari("mine-v0")


@pytest.mark.parametrize("name", ["meta/rlstore.json", "meta/info.json"])
def test_a_description_that_is_too_large_is_not_taken_into_memory(name, tmp_path):
    write_parquet([ENDED], tmp_path / "a")
    os.truncate(tmp_path / "a" / name, 1 << 40)
    with pytest.raises(InvalidInputError, match=f"{Path(name).name} is damaged: it has more than"):
        read_parquet(tmp_path / "a")


def test_shapes_that_are_none_are_no_vectors_of_one(tmp_path):
    write_parquet([ENDED], tmp_path / "a")
    (tmp_path / "a/meta/rlstore.json").unlink()
    info = tmp_path / "a/meta/info.json"
    info.write_text(info.read_text().replace('"shape": [', '"shape": 3, "other": ['))
    assert read_parquet(tmp_path / "a").num_steps == 2


# ------------------------------------------------------------------------------------------------ numbers elsewhere


@pytest.mark.parametrize("where", ["external", "virtual"])
def test_an_array_whose_numbers_are_in_another_file_is_refused_by_name(where, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(range(24)))
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["observations"] = np.arange(24.0).reshape(12, 2)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, array in D4RL.items():
            if name != "observations":
                file[name] = array
        if where == "external":
            storage = [(str(tmp_path / "secret"), 0, 24)]
            file.create_dataset("observations", (12, 2), "u1", external=storage)
        else:
            layout = h5py.VirtualLayout((12, 2), "f8")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf5"), "observations", (12, 2))
            file.create_virtual_dataset("observations", layout)
        file["mine"] = D4RL["observations"]
    with pytest.raises(InvalidInputError, match=r"observations of .*a\.hdf5 has its numbers in another file"):
        read_hdf5(tmp_path / "a.hdf5")
    found = read_hdf5(tmp_path / "a.hdf5", {"observations": "mine"})  # an array that is not read is left alone
    assert_same(next(iter(found))["observations"], D4RL["observations"][:4])


@pytest.mark.parametrize("where", ["external", "virtual", "a link"])
def test_a_dataset_of_minari_with_numbers_in_another_file_is_refused(where, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    storage = make("prioritized")
    fill(storage, "prioritized")
    write_minari(storage, "mine-v0")
    (data,) = tmp_path.rglob("main_data.hdf5")
    (tmp_path / "secret").write_bytes(bytes(range(200)))
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["rewards"] = np.arange(9.0)
    with h5py.File(data, "a") as file:
        group = file["episode_3"]
        steps = len(group["rewards"])
        del group["rewards"]
        if where == "external":
            group.create_dataset("rewards", (steps,), "u1", external=[(str(tmp_path / "secret"), 0, steps)])
        elif where == "virtual":
            layout = h5py.VirtualLayout((steps,), "f8")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf5"), "rewards", (9,))[:steps]
            group.create_virtual_dataset("rewards", layout)
        else:
            group["rewards"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "rewards")
    with pytest.raises(InvalidInputError, match=r"episode_3.* Nothing was read"):
        list(read_minari("mine-v0"))


# ------------------------------------------------------------------------------------------------ names

LONG = "n" * 255
NAMES = {"not UTF-8": os.fsdecode(b"x\xff\xfe"), "255 bytes": LONG, "a new line": "a\x1b[31m\n"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of_folder", [False, True])
def test_names_that_are_unusual_are_names(name, of_folder, tmp_path):
    """Of the file, and of the folder that it is in."""
    storage = make("prioritized")
    fill(storage, "prioritized")
    folder = tmp_path / NAMES[name] if of_folder else tmp_path
    folder.mkdir(exist_ok=True)
    file = folder / ("a" if of_folder else NAMES[name])
    for write, read in ((write_npz, read_npz), (write_parquet, read_parquet)):
        for _ in range(2):  # the second replaces the first
            write(storage, file)
            assert_same(list(read(file)), episodes("prioritized"))
        assert os.listdir(folder) == [file.name]
        file.unlink() if file.is_file() else shutil.rmtree(file)
    with h5py.File(file, "w") as content:
        for column, array in D4RL.items():
            content[column] = array
    assert read_hdf5(file).num_steps == 12


@pytest.mark.parametrize("name", NAMES)
def test_minari_takes_an_unusual_name_or_refuses_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    chosen = f"{NAMES[name][:250]}-v0"
    storage = make("prioritized")
    fill(storage, "prioritized")
    if name == "255 bytes":
        write_minari(storage, chosen)
        assert read_minari(chosen).num_steps == 32
        return
    with pytest.raises(InvalidInputError, match="Nothing was written"):
        write_minari(storage, chosen)
    assert chosen not in minari.list_local_datasets()


@pytest.mark.parametrize(
    "call",
    [
        read_npz,
        read_parquet,
        read_hdf5,
        lambda path: write_npz([ENDED], path),
        lambda path: write_parquet([ENDED], path),
    ],
)
def test_a_path_with_a_zero_byte_is_refused(call):
    with pytest.raises(InvalidInputError, match="zero byte"):
        call("a\0b")
