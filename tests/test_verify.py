"""``rlstore verify``: what it says of whole and damaged folders, and that it changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import struct
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from rlstore import Journal, PrioritizedReplayStorage, ReplayStorage, SnapshotError, Storage, verify
from rlstore.__main__ import main

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

from programs import ARGUMENTS, BOX, DISCRETE, fill  # noqa: E402

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
OLD = sorted(path.parent for path in GOLDEN.rglob("manifest.json"))


def said(folder, capsys):
    """The exit status, and the lines printed."""
    status = main(["verify", str(folder)])
    return status, capsys.readouterr().out.splitlines()


def tree(folder):
    """Everything that a write would change: names, sizes, contents and times."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        stat = path.lstat()
        found[path] = (stat.st_mode, stat.st_mtime_ns, stat.st_ctime_ns, path.read_bytes() if path.is_file() else b"")
    return found


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def mapped(folder):
    """Three environments with twenty rows each, which have wrapped, in a folder that was closed."""
    storage = PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS, memory="mapped", path=folder)
    fill(storage, 0, 30)
    storage.close()
    return folder


# ---------------------------------------------------------------------------------------------------- whole folders


@pytest.mark.parametrize("folder", OLD, ids=lambda folder: str(folder.relative_to(GOLDEN)))
def test_what_older_versions_wrote_is_whole_and_is_left_as_it_is(folder, capsys):
    before = tree(folder)
    status, lines = said(folder, capsys)
    assert status == 0
    assert lines[-1].startswith("whole: ")
    assert all(line.startswith("whole  ") for line in lines[1:-1])
    assert tree(folder) == before


def test_a_folder_that_its_process_left_open_is_whole_if_its_tables_are(tmp_path, capsys):
    storage = PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS, memory="mapped", path=mapped(tmp_path / "live"))
    fill(storage, 30, 35)
    left = shutil.copytree(tmp_path / "live", tmp_path / "left")  # as if it were killed now
    storage.close()
    status, lines = said(left, capsys)
    assert status == 0
    assert "whole    seal.json: open: the folder is in use, or its process was killed" in "\n".join(lines)
    assert lines[-1] == "whole: 60 transitions of 3 environments can be loaded"


@contextlib.contextmanager
def writing(make):
    """Another process makes a storage and adds to it for ever; yields whether it still does."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            storage = make()
            for step in range(33, 10**9):
                fill(storage, step, step + 1)
        os._exit(1)
    try:
        yield lambda: os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_mapped_folder_may_be_verified_while_its_storage_writes(tmp_path, capsys):
    folder, found = mapped(tmp_path / "live"), set()
    with writing(lambda: PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS, memory="mapped", path=folder)) as goes_on:
        while len(found) < 20:
            assert said(folder, capsys)[0] == 0
            found.add((folder / "counters.bin").read_bytes())
            assert goes_on()


def test_a_journal_may_be_verified_while_it_is_written(tmp_path, capsys):
    folder, found = shutil.copytree(GOLDEN / "segments" / "journal", tmp_path / "journal"), set()
    with writing(lambda: Storage.load(folder, journal=Journal(folder, 1e-6, fsync=False))) as goes_on:
        while len(found) < 20:
            status, lines = said(folder, capsys)
            assert status == 0, lines
            found.add(lines[2])  # the file of tensors, another one with each commit
            assert goes_on()


def peak(work):
    """The bytes by which the memory of a process grows while it works."""
    reading, writing_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
            before = resident("VmRSS")
            work()
            os.write(writing_end, str(resident("VmHWM") - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reading, 100))


def resident(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def test_the_rows_of_a_large_folder_are_not_held_in_memory(tmp_path):
    pixels = np.zeros((1, 256, 512), np.uint8)
    storage = ReplayStorage(gym.spaces.Box(0, 255, pixels.shape[1:], np.uint8), DISCRETE, storage_size=1600)
    for step in range(1400):
        storage.add(pixels, [0], [0.0], [step % 100 == 99], [False], {}, pixels)
    storage.save(tmp_path / "saved")
    held = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    assert held > 160 << 20
    verifying, loading = (peak(lambda look=look: look(tmp_path / "saved")) for look in (verify.verify, Storage.load))
    # What remains does not depend on the rows: pages of 2 MiB of which a few bytes are used, one record, and pages of
    # libraries that are used for the first time, of which a torch for CUDA has many.
    assert verifying < 0.8 * held < loading


def test_a_folder_that_changed_while_it_was_looked_at_is_looked_at_again(tmp_path, capsys, monkeypatch):
    folder, looks = mapped(tmp_path / "mapped"), []

    def changed_in_between(directory, schema, report):
        looks.append(None)
        if len(looks) < 3:
            report.damaged("tables", "half written")
            flip(folder / "counters.bin", 0)
        else:
            look(directory, schema, report)

    look = verify._look
    monkeypatch.setattr(verify, "_look", changed_in_between)
    status, lines = said(folder, capsys)
    assert (status, len(looks)) == (0, 3)
    assert lines[-1] == "whole: 60 transitions of 3 environments can be loaded"


# ---------------------------------------------------------------------------------------------------- damaged folders


def test_rows_of_a_mapped_folder_that_were_damaged_are_told_and_the_others_counted(tmp_path, capsys):
    folder = mapped(tmp_path / "mapped")
    size = (folder / "records.bin").stat().st_size
    flip(folder / "records.bin", size // 3 + 5)  # in the rows of the second environment, which have one checksum
    before = tree(folder)
    status, lines = said(folder, capsys)
    assert status == 1
    (line,) = (line for line in lines if line.startswith("damaged  "))
    assert line.startswith(f"damaged  records.bin: the bytes from {size // 3:,} to {2 * size // 3:,} are not what was")
    assert lines[-1] == "damaged: 40 of 60 transitions can be read; remove seal.json to load all as they are"
    assert tree(folder) == before


def saved_three_times(folder, storage):
    """Rows 0 to 4, 5 to 9 and 10 to 14 of three environments in one segment; where the record of the second is."""
    for first in (0, 5, 10):
        fill(storage, first, first + 5)
        storage.save(folder)
    content, begins = (folder / "rows-000001.bin").read_bytes(), [0]
    while begins[-1] < len(content):
        _, header, _, data = struct.unpack_from("<8sIIQ", content, begins[-1])
        begins.append(begins[-1] + 24 + header + data)
    assert len(begins) == 6  # between two of rows there is one of the episode that ended with the older ones
    return begins[2:4]


@pytest.mark.parametrize(("part", "left"), [("data", 30), ("header", 15)])
def test_rows_of_a_damaged_record_are_told_and_the_others_counted(part, left, tmp_path, capsys):
    storage = PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS)
    begin, end = saved_three_times(tmp_path / "saved", storage)
    assert said(tmp_path / "saved", capsys)[1][-1] == "whole: 45 transitions can be loaded"
    flip(tmp_path / "saved" / "rows-000001.bin", begin + 30 if part == "header" else end - 1)
    before = tree(tmp_path / "saved")
    status, lines = said(tmp_path / "saved", capsys)
    assert status == 1
    (line,) = (line for line in lines if line.startswith("damaged  "))
    assert line.startswith(f"damaged  rows-000001.bin: the record at byte {begin:,} is damaged: ")
    # Behind a header that cannot be read nobody knows where the next record begins.
    assert line.endswith(" It has rows 5 to 9 of all environments." if part == "data" else "(its checksum differs).")
    assert lines[-1].startswith(f"damaged: {left} of 45 transitions, and ")
    assert tree(tmp_path / "saved") == before
    with pytest.raises(SnapshotError):
        Storage.load(tmp_path / "saved")


def test_tables_of_rows_are_checked_without_the_class(tmp_path, capsys):
    storage = PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS)
    fill(storage, 0, 5)
    storage._ring_of().episodes[0, 0] = 3  # the episode of rows 0 to 4 of the first environment begins with row 3
    storage.save(tmp_path / "saved")
    rename_class(tmp_path / "saved")
    status, lines = said(tmp_path / "saved", capsys)
    assert status == 1
    assert "episodes: the episode of row 0 of environment 0 is not where the row is." in "\n".join(lines)


def test_tables_that_cannot_be_are_told_although_every_checksum_is_right(tmp_path, capsys):
    storage = PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS)
    fill(storage, 0, 5)
    storage._sampler.tree._leaves[3] = float("nan")
    storage.save(tmp_path / "saved")
    status, lines = said(tmp_path / "saved", capsys)
    assert status == 1
    assert lines[2] == "damaged  tensors-000001.safetensors: priorities: one is not a finite number of at least 0."
    assert lines[-1] == "damaged: nothing can be loaded"


def rename_class(folder):
    """As if a class had saved it that nobody has imported."""
    told = (folder / "manifest.json").read_text().replace("rlstore.PrioritizedReplayStorage", "thesis.Mine")
    (folder / "manifest.json").write_text(told.rpartition(',\n "crc32"')[0] + "\n}")


def test_the_class_of_a_user_need_not_be_imported(tmp_path, capsys):
    storage = PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS)
    _, end = saved_three_times(tmp_path / "saved", storage)
    rename_class(tmp_path / "saved")
    status, lines = said(tmp_path / "saved", capsys)
    assert status == 0
    assert "whole    tables: only those of the rows were checked: no class thesis.Mine is imported" in lines
    assert lines[-1].startswith("whole: 45 of 45 transitions, and ")
    flip(tmp_path / "saved" / "rows-000001.bin", end - 1)
    assert said(tmp_path / "saved", capsys)[1][-1].startswith("damaged: 30 of 45 transitions, and ")


@pytest.mark.parametrize("row", [0, 1], ids=["the rows written", "the first row"])
def test_tables_of_a_mapped_folder_that_cannot_be_are_told(row, tmp_path, capsys):
    folder = mapped(tmp_path / "mapped")
    (folder / "seal.json").unlink()
    content = bytearray((folder / "counters.bin").read_bytes())
    place = 8 * (3 * row + 1)  # of the second of three environments
    content[place : place + 8] = (-1).to_bytes(8, "little", signed=True)
    (folder / "counters.bin").write_bytes(content)
    status, lines = said(folder, capsys)
    assert status == 1
    assert "damaged  counters.bin: the rows written by environment 1 cannot be so many or so few." in "\n".join(lines)
    assert lines[-1] == "damaged: nothing can be loaded"


def test_a_folder_in_the_place_of_a_file_that_a_storage_writes_is_told(tmp_path, capsys):
    folder = mapped(tmp_path / "mapped")
    (folder / "seal.json.new").mkdir()
    with pytest.raises(SnapshotError, match=r"seal\.json\.new"):
        PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS, memory="mapped", path=folder)
    status, lines = said(folder, capsys)
    assert status == 1
    assert any(line.startswith("damaged  ") and "seal.json.new" in line for line in lines)


def test_an_episode_that_was_damaged_is_told_and_the_others_counted(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "episodes", tmp_path / "episodes")
    os.truncate(folder / "episode-000000000005.safetensors", 400)  # one of five steps
    status, lines = said(folder, capsys)
    assert status == 1
    assert lines[3].startswith("damaged  episode-000000000005.safetensors: it has 400 bytes and should have 462")
    assert lines[-1] == "damaged: 6 of 7 episodes can be read, 36 transitions"


@pytest.mark.parametrize("kind", ["snapshots/replay", "mapped/replay", "episodes"])
def test_without_its_manifest_nothing_of_a_folder_can_be_loaded(kind, tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "folder")
    (folder / "manifest.json").write_text('{"format": "rlstore')
    status, lines = said(folder, capsys)
    assert status == 1
    assert lines[1].startswith("damaged  manifest.json: it is not JSON")
    assert lines[-1] == "damaged: nothing can be loaded"
    (folder / "manifest.json").unlink()
    assert said(folder, capsys)[0] == 1


def test_a_folder_of_a_newer_version_is_told_so(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "snapshots" / "replay", tmp_path / "snapshot")
    told = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**told, "version": 2}))
    status, lines = said(folder, capsys)
    assert status == 1
    assert 'was written by a newer rlstore: "version" is 2, and this version reads 1. Update rlstore.' in lines[1]


def test_what_a_file_says_does_not_disturb_the_terminal(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "snapshots" / "replay", tmp_path / "snapshot")
    (folder / "manifest.json").write_text('{"format": "rlstore snapshot", "version": "\\u001b[2J\\n\\ud800"}')
    status, lines = said(folder, capsys)
    assert status == 1
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


# ---------------------------------------------------------------------------------------------------- other folders


def test_what_is_no_folder_of_rlstore_has_status_2(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("dear to me")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "nothing"):
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(path)])
        assert ended.value.code == 2
    assert "is not a folder that rlstore has written" in capsys.readouterr().err
    for wrong in ([], ["verify"], ["repair", str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2


def test_it_is_a_command_of_the_module(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "rlstore.__main__")  # as in a new interpreter
    monkeypatch.setattr(sys, "argv", ["rlstore", "verify", str(GOLDEN / "episodes")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("rlstore", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith("whole: 7 of 7 episodes can be read, 41 transitions\n")


def test_the_folders_of_the_shards_of_a_served_storage_are_verified_together(tmp_path, capsys):
    for shard in range(2):
        shutil.copytree(GOLDEN / "snapshots" / "replay", tmp_path / "served" / f"shard-{shard}" / "snapshot")
    (tmp_path / "served" / "served.json").write_text("{}")
    status, lines = said(tmp_path / "served", capsys)
    assert status == 0
    assert lines[0] == f"{tmp_path / 'served'}: 2 folders"
    assert sum(line == "whole: 60 transitions can be loaded" for line in lines) == 2
    assert lines[-1] == "whole: 2 of 2 folders are whole"
    os.truncate(tmp_path / "served" / "shard-1" / "snapshot" / "tensors-000001.safetensors", 100)
    (tmp_path / "served" / "served.json").write_text("{")
    status, lines = said(tmp_path / "served", capsys)
    assert status == 1
    assert any(line.startswith("damaged  tensors-000001.safetensors: its header has ") for line in lines)
    assert any(line.startswith("damaged  served.json: ") for line in lines)
    assert lines[-1] == "damaged: 1 of 2 folders are whole"


def test_a_check_that_fails_is_not_taken_for_damage_and_needs_no_examples(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr("rlstore.demo.examples", fail)
    assert main(["doctor"]) in (0, 1)
    monkeypatch.setattr("rlstore.verify.verify", fail)
    assert main(["verify", str(tmp_path)]) == 3
    assert "RuntimeError: a mistake" in capsys.readouterr().err
