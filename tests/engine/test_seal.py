"""The seal of a mapped folder: damage is seen, and what is whole is never refused, wherever a process was killed."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import PrioritizedReplayStorage, ReplayStorage, SnapshotError, Storage
from rlstore.engine.disk import mapped, seal

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fork.*:DeprecationWarning", "ignore:the observations of an environment:UserWarning"
)

BOX, MOVES, FRAMES = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(2), spaces.Box(0, 255, (2, 3), np.uint8)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """Segments of four rows, so that a few rows are many segments."""
    monkeypatch.setattr(seal, "_SEGMENT_BYTES", 96)
    yield
    gc.collect()  # storages that are left seal their folders with segments of this size


def make(path, kind=ReplayStorage, size=64):
    return kind(BOX, MOVES, storage_size=size, num_envs=2, memory="mapped", path=path, seed=0)


def play(storage, first, last):
    """Observations count the steps; lane 0 ends every fifth."""
    for step in range(first, last):
        now, following = np.full((2, 1), float(step)), np.full((2, 1), float(step + 1))
        storage.add(now, [0, 1], [float(step)] * 2, [step % 5 == 4, False], [False, False], {}, following)


def held(storage):
    data = storage.get_all_buffer_data()
    return data["rewards"].squeeze(-1)[:, 0].tolist() if data else []


def closed(path, steps=20, kind=ReplayStorage):
    storage = make(path, kind)
    play(storage, 0, steps)
    storage.close()
    return path


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def in_use(source, target):
    """The files as a kill at this moment would leave them."""
    return shutil.copytree(source, target)


# ---------------------------------------------------------------------------------------------------- closed


def test_the_seal_is_what_it_says(tmp_path):
    closed(tmp_path / "rows", 3)
    told = json.loads((tmp_path / "rows" / "seal.json").read_text())
    assert (told["format"], told["closed"], told["written"]) == ("rlstore seal", True, [3, 3])
    assert sorted(told["files"]) == sorted(path.name for path in (tmp_path / "rows").glob("*.bin"))
    # Rows are 24 bytes (an action, an observation, a reward, an episode): of 3 and the one that follows, one segment.
    records = told["files"]["records.bin"]
    assert (records["bytes"], records["extent"]) == (2 * 33 * 24, 4)
    content = (tmp_path / "rows" / "records.bin").read_bytes()
    assert records["crc32"] == [torch_free_crc(content[lane * 33 * 24 :][: 4 * 24]) for lane in (0, 1)]


def torch_free_crc(content):
    """CRC-32 by its definition, bit by bit."""
    register = 0xFFFFFFFF
    for byte in content:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0xEDB88320 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_every_damage_of_a_closed_folder_is_seen_and_named(tmp_path):
    whole = closed(tmp_path / "whole", kind=PrioritizedReplayStorage)
    draw = random.Random(0)
    for name in sorted(path.name for path in whole.glob("*.bin")):
        told = json.loads((whole / "seal.json").read_text())["files"][name]
        size = (whole / name).stat().st_size
        used = told["extent"] * 24 or size
        for place in [0, used - 1, *(draw.randrange(used) for _ in range(4))]:
            folder = shutil.copytree(whole, tmp_path / "damaged")
            flip(folder / name, place)
            with pytest.raises(SnapshotError, match=rf"{name} is damaged: the bytes from .* are not what was written"):
                make(folder, PrioritizedReplayStorage)
            with pytest.raises(SnapshotError, match="are not what was written"):  # nor the next time
                make(folder, PrioritizedReplayStorage)
            shutil.rmtree(folder)
        for length in (0, size // 2, size - 1, size + 1):
            folder = shutil.copytree(whole, tmp_path / "damaged")
            os.truncate(folder / name, length)
            with pytest.raises(SnapshotError, match=f"{name} is damaged: it has {length:,} bytes and should have"):
                make(folder, PrioritizedReplayStorage)
            shutil.rmtree(folder)


def test_a_folder_may_be_used_as_it_is_without_its_seal(tmp_path):
    folder = closed(tmp_path / "rows")
    flip(folder / "records.bin", 8)
    with pytest.raises(SnapshotError, match=r"remove seal\.json"):
        make(folder)
    (folder / "seal.json").unlink()
    assert len(make(folder)) == 40


def test_a_seal_of_other_segments_is_not_taken_for_damage(tmp_path, monkeypatch):
    folder = closed(tmp_path / "rows")
    monkeypatch.setattr(seal, "_SEGMENT_BYTES", 120)
    storage = make(folder)
    assert held(storage) == list(range(20))
    assert not (folder / "seal.json").exists()
    storage.close()
    assert held(make(folder)) == list(range(20))


def test_a_folder_that_was_only_collected_is_sealed_too(tmp_path):
    storage = make(tmp_path / "rows")
    play(storage, 0, 9)
    del storage
    gc.collect()
    assert json.loads((tmp_path / "rows" / "seal.json").read_text())["closed"] is True
    assert held(make(tmp_path / "rows")) == list(range(9))


def test_only_what_changed_is_read_again(tmp_path, monkeypatch):
    folder = closed(tmp_path / "rows")
    before = json.loads((folder / "seal.json").read_text())["files"]["records.bin"]["crc32"]
    storage = make(folder)
    play(storage, 20, 22)
    read = []
    real = seal._checksums
    monkeypatch.setattr(seal, "_checksums", lambda file, parts: read.extend(parts) or real(file, parts))
    storage.close()
    # Rows 20 to 23 may have changed: the sixth segment of each lane.
    assert [(part.lane, part.first, part.stop) for part in read if part.lane >= 0] == [(0, 20, 23), (1, 20, 23)]
    after = json.loads((folder / "seal.json").read_text())["files"]["records.bin"]["crc32"]
    assert (len(before), len(after)) == (12, 12)
    assert [a == b for a, b in zip(before, after, strict=True)] == [*[True] * 5, False] * 2
    assert held(make(folder)) == list(range(22))


# ---------------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("more", [0, 2, 12, 31, 33, 100])
def test_a_folder_left_in_use_is_never_refused_and_damage_of_older_rows_is_seen(more, tmp_path):
    """20 rows are sealed; the ring holds 32 of each lane in 33 places."""
    storage = make(closed(tmp_path / "rows"))
    play(storage, 20, 20 + more)
    left = in_use(tmp_path / "rows", tmp_path / "left")
    again = make(left)
    assert held(again) == list(range(max(0, more - 12), 20 + more))
    again.close()
    # A row in a segment of four of which none can have been written since: seen. Of any other: nobody can tell.
    rewritten = {time % 33 for time in range(20, 22 + more)}
    for place in range(20):
        damaged = in_use(tmp_path / "rows", tmp_path / "damaged")
        flip(damaged / "records.bin", place * 24 + 8)  # of the observation
        segment = range(place // 4 * 4, min(place // 4 * 4 + 4, 21))
        if rewritten.isdisjoint(segment):
            with pytest.raises(SnapshotError, match=r"records\.bin is damaged"):
                make(damaged)
        else:
            make(damaged).close()
        shutil.rmtree(damaged)


def test_what_ends_with_the_process_is_sealed_as_far_as_nobody_can_change_it(tmp_path):
    storage = make(tmp_path / "rows")
    play(storage, 0, 20)
    mapped._seal_all()  # as the end of the process does, while others may still write
    play(storage, 20, 23)
    left = in_use(tmp_path / "rows", tmp_path / "left")
    assert json.loads((left / "seal.json").read_text())["closed"] is False
    flip(in_use(left, tmp_path / "damaged") / "records.bin", 8)
    with pytest.raises(SnapshotError, match=r"records\.bin is damaged"):
        make(tmp_path / "damaged")
    assert held(make(left)) == list(range(23))


def test_a_snapshot_that_was_loaded_into_the_folder_breaks_the_seal(tmp_path):
    storage = make(closed(tmp_path / "rows", 30))
    other = make(tmp_path / "other")
    play(other, 100, 140)
    other.save(tmp_path / "saved")
    storage.close()
    loaded = Storage.load(tmp_path / "saved", folders={"path": tmp_path / "rows"})
    left = in_use(tmp_path / "rows", tmp_path / "left")
    assert not (left / "seal.json").exists()
    assert held(make(left)) == list(range(108, 140))
    loaded.close()
    assert held(make(tmp_path / "rows")) == list(range(108, 140))


@pytest.mark.parametrize("is_sealed", [True, False])
def test_an_opening_that_failed_is_no_damage(is_sealed, tmp_path, monkeypatch):
    """What was opened by then is left, and sealed, but not as if there were nothing else."""
    folder = closed(tmp_path / "rows", kind=PrioritizedReplayStorage)
    if not is_sealed:
        (folder / "seal.json").unlink()
    real = mapped.MappedFiles.map

    def fails(files, name, *arguments, **options):
        if name == "priorities":
            raise KeyboardInterrupt
        return real(files, name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(mapped.MappedFiles, "map", fails)
        with pytest.raises(KeyboardInterrupt):
            make(folder, PrioritizedReplayStorage)
    gc.collect()
    if is_sealed:  # what was known of the rows still is
        flip(in_use(folder, tmp_path / "damaged") / "records.bin", 8)
        with pytest.raises(SnapshotError, match=r"records\.bin is damaged"):
            make(tmp_path / "damaged", PrioritizedReplayStorage)
    assert held(make(folder, PrioritizedReplayStorage)) == list(range(20))


def add_until_killed(path, first, told):
    storage = make(path, PrioritizedReplayStorage)
    os.write(told, b"r")
    step = first
    while True:
        play(storage, step, step + 1)
        storage.update(storage.sample(4).rows, torch.rand(4))
        step += 1


def test_a_folder_is_whole_after_every_kill(tmp_path):
    closed(tmp_path / "rows", 3, PrioritizedReplayStorage)
    draw = random.Random(1)
    for _ in range(5):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                add_until_killed(tmp_path / "rows", 1000, writing)
            finally:
                os._exit(1)
        assert os.read(reading, 1) == b"r"
        for _ in range(draw.randrange(3000)):
            os.getpid()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        storage = make(tmp_path / "rows", PrioritizedReplayStorage)
        assert len(storage.sample(32).rows) == 32
        if draw.random() < 0.5:
            storage.close()
        else:
            del storage
            gc.collect()


# ---------------------------------------------------------------------------------------------------- what adds write


@pytest.mark.filterwarnings("ignore:a step of environment . begins with the observation in which its episode had ended")
@pytest.mark.parametrize("frame_stack", [1, 2])
@pytest.mark.parametrize("autoreset", [None, "NextStep", "SameStep"])
def test_an_add_writes_the_next_row_and_what_follows_it_and_no_other(frame_stack, autoreset):
    """What the seal relies on, with ends, broken episodes, masks and stacks that do not continue."""
    draw = np.random.default_rng(0)
    space = FRAMES if frame_stack == 2 else BOX
    storage = ReplayStorage(space, MOVES, storage_size=22, num_envs=2, frame_stack=frame_stack, autoreset=autoreset)
    ring, frames = storage._ring_of(), draw.integers(0, 200, (2, *space.shape)).astype(space.dtype)
    for _ in range(200):
        following = draw.integers(0, 200, (2, *space.shape)).astype(space.dtype)
        if frame_stack == 2:
            following[:, 0] = frames[:, 1]
        ended, mask = draw.random((2, 2)) < 0.15, draw.random(2) < 0.9
        before, written = {name: block.clone() for name, block in ring.blocks.items()}, ring.written.tolist()
        storage.add(frames, [0, 1], draw.random(2), ended[0], ended[1], {}, following, mask=mask)
        for lane, time in enumerate(written):
            others = [place for place in range(ring.rows) if place not in {time % ring.rows, (time + 1) % ring.rows}]
            for name, block in ring.blocks.items():
                assert torch.equal(block[lane, others], before[name][lane, others])
        frames = following if draw.random() < 0.9 else draw.integers(0, 200, (2, *space.shape)).astype(space.dtype)
