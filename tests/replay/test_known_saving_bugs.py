"""What has gone wrong in saving replay elsewhere, and must not here. Each test is named for what broke."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nstep_steps import assert_tables, fill, make_step, make_storage, served
from replay_kinds import KINDS, assert_same, assert_same_draws, distance, make_prioritized, state

from rlstore import PrioritizedReplayStorage, ReplayStorage, SequenceReplayStorage, SnapshotError, Storage
from rlstore import storage as storage_module
from rlstore.engine.memory.backing import Backing

# ------------------------------------------------------------------------------------- 15, 16, 17, 18: saving


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("rows", [0, 3, 14], ids=["empty", "midway", "wrapped"])
def test_neither_data_nor_counters_nor_randomness_are_missing_after_a_resume(kind, rows, tmp_path):
    storage = kind.make()
    kind.fill(storage, rows)
    if rows:
        batch = storage.sample()
        if kind.name.startswith("prioritized"):
            storage.update(batch.rows, torch.linspace(0.5, 3.0, len(batch.rows)))
            storage.update(batch.rows[:1] % 2, [5.0])  # stale, if the storage has wrapped
    storage.save(tmp_path / "saved")
    resumed = Storage.load(tmp_path / "saved")
    assert type(resumed) is type(storage)
    if kind.name == "hindsight":  # a function is not saved
        resumed.compute_reward = distance
    assert_same(state(resumed), state(storage))
    if rows:
        assert_same_draws(resumed, storage)
    for either in (resumed, storage):
        kind.fill(either, 3, first=rows)
    assert_same(state(resumed), state(storage))
    assert_same_draws(resumed, storage)
    for either in (resumed, storage):
        either.close()


def test_beta_goes_on_where_it_was(tmp_path):
    storage = make_prioritized(beta=0.0, beta_steps=10, batch_size=4)
    fill(storage, 2)
    storage.update([0, 1], [1.0, 4.0])
    for _ in range(5):
        storage.sample()
    storage.save(tmp_path / "saved")
    resumed = PrioritizedReplayStorage.load(tmp_path / "saved")
    for _ in range(8):
        assert_same_draws(resumed, storage, batches=1)


def test_an_episode_goes_on_through_a_resume(tmp_path):
    storage = make_storage(1, 8, n_step=3, discount=0.5)
    fill(storage, 2)
    storage.save(tmp_path / "saved")
    resumed = type(storage).load(tmp_path / "saved")
    for either in (storage, resumed):
        fill(either, 2, first=2)
    assert_tables(served(resumed), served(storage))
    assert served(resumed)[1] == (1, 1.25 + 2.25 / 2 + 3.25 / 4, 0.125, 4)


def test_checkpoints_may_be_made_again_and_again_in_the_same_place(tmp_path):
    storage = make_storage(2, 6, seed=0)
    for round_ in range(4):
        fill(storage, 3, first=3 * round_)
        storage.save(tmp_path / "saved")
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
        resumed = type(storage).load(tmp_path / "saved")
        assert_same(state(resumed), state(storage))
        resumed.close()


def test_checkpoint_says_its_version_and_holds_no_pickle(tmp_path):
    storage = make_storage(2, 6)
    fill(storage, 3)
    storage.save(tmp_path / "saved")
    files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert {path.suffix for path in files if path.stat().st_size} == {".bin", ".json", ".safetensors"}
    (manifest,) = [path for path in files if path.suffix == ".json"]
    assert any("version" in key for key in json.loads(manifest.read_text()))


def test_saving_loses_no_batch_that_was_prepared(tmp_path):
    storage = make_storage(2, 6, batch_size=16, num_workers=3, seed=0)
    fill(storage, 5)
    storage.sample()
    storage.save(tmp_path / "saved")
    resumed = type(storage).load(tmp_path / "saved")
    assert_same_draws(resumed, storage, batches=8)
    storage.close()
    resumed.close()


def test_a_checkpoint_that_was_cut_off_is_refused_and_the_one_before_it_is_there(tmp_path):
    storage = make_storage(2, 6)
    fill(storage, 3)
    storage.save(tmp_path / "saved")
    (data,) = (tmp_path / "saved").rglob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(SnapshotError, match="saved"):
        type(storage).load(tmp_path / "saved")


@pytest.mark.parametrize("given", ["cuda", torch.device("cuda"), "cuda:1"], ids=repr)
def test_a_storage_is_saved_with_the_device_as_it_was_given(tmp_path, monkeypatch, given):
    """Made with "cuda" it is loaded to the current device, though its own has a number."""
    asked = []

    def stand_in(owner, device):
        asked.append(device)
        return torch.device("cpu")

    monkeypatch.setattr(storage_module, "check_device", stand_in)
    make_storage(2, 6, device=given).save(tmp_path / "saved")
    asked.clear()
    resumed = Storage.load(tmp_path / "saved")
    assert set(asked) == {str(given)}
    resumed.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["device"] == str(given)


def test_a_storage_whose_device_was_given_as_a_number_is_saved_with_its_name(tmp_path, monkeypatch):
    """As training over several GPUs gives it: the number of the process."""
    real = storage_module.check_device
    monkeypatch.setattr(storage_module, "check_device", lambda owner, device: real(owner, "cpu"))
    make_storage(2, 6, device=0).save(tmp_path / "saved")
    monkeypatch.undo()
    assert Storage.load(tmp_path / "saved").device == torch.device("cpu")


def test_a_saved_storage_is_no_larger_than_its_data_and_chooses_its_device(tmp_path):
    space = spaces.Box(0, 255, (16, 16, 3), np.uint8)
    storage = make_storage(1, 500, observation_space=space)
    for step in range(600):
        same = {name: torch.zeros(1, 16, 16, 3, dtype=torch.uint8) for name in ("observations", "next_observations")}
        storage.add(**make_step(step, 1, **same))
    storage.save(tmp_path / "saved")
    size = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert size < 1.1 * storage.nbytes + 20_000
    resumed = Storage.load(tmp_path / "saved", device="cpu")
    assert resumed.device == torch.device("cpu")
    assert resumed.nbytes <= 1.1 * storage.nbytes
    with pytest.raises(ValueError, match="device"):
        Storage.load(tmp_path / "saved", device="toaster")


def test_windows_without_a_priority_have_none_after_a_resume(tmp_path):
    """They got the largest there was, as windows do that were not followed when a process was killed."""
    box = spaces.Box(-1e9, 1e9, (1,), np.float32)
    storage = SequenceReplayStorage(
        box, spaces.Discrete(2), storage_size=8, num_envs=2, sequence_length=2, overlap=1, alpha=1.0, seed=0
    )
    for number in range(4):
        seen = np.array([[number], [number]], np.float32)
        storage.add(seen, [0, 0], [0.0, 0.0], [False] * 2, [False] * 2, {}, seen + 1)
    storage.update([0, 2, 4, 1, 3, 5], [0.0, 0.0, 0.0, 2.0, 1.0, 4.0])
    storage.save(tmp_path / "saved")
    resumed = Storage.load(tmp_path / "saved")
    assert resumed.priorities([0, 2, 4, 1, 3, 5]).tolist() == [0.0, 0.0, 0.0, 2.0, 1.0, 4.0]


def test_the_last_window_of_a_writer_that_left_keeps_its_priority(tmp_path):
    """That it was cut off was taken to be known later, with a row that there is not."""
    box = spaces.Box(-1e9, 1e9, (1,), np.float32)
    storage = SequenceReplayStorage(
        box, spaces.Discrete(2), storage_size=8, sequence_length=4, alpha=1.0, memory="shared", seed=0
    )
    with storage.writer() as writer:
        for number in range(6):
            seen = np.array([number], np.float32)
            writer.add(seen, 0, 0.0, False, False, {}, seen + 1)
    storage.update([0, 2], [4.0, 0.5])
    storage.save(tmp_path / "saved")
    assert Storage.load(tmp_path / "saved").priorities([0, 2]).tolist() == [4.0, 0.5]
    storage.close()


def test_a_row_before_all_that_are_held_may_say_anything_of_its_episode(tmp_path):
    """Older frames of a stack are saved with it, and of a mapped folder nobody has checked where they belong."""
    storage = ReplayStorage(spaces.Box(0, 255, (4, 1), np.uint8), spaces.Discrete(2), storage_size=8, frame_stack=4)
    for step in range(12):
        frames = np.arange(step, step + 5, dtype=np.uint8).reshape(5, 1)
        storage.add([frames[:4]], [0], [float(step)], [False], [False], {}, [frames[1:]])
    ring = storage._ring_of()
    ring.blocks["episode"][0, (12 - 8 - 1) % ring.rows] = 127
    storage.save(tmp_path / "saved")
    assert_same(state(Storage.load(tmp_path / "saved")), state(storage))


@pytest.mark.parametrize("extended", range(5))
def test_tables_of_which_only_some_were_extended_are_opened(extended, tmp_path, monkeypatch):
    """A process was killed while it made room for more episodes: the rows are whole, whatever files are longer."""
    options = {"memory": "mapped", "storage_size": 40, "frame_stack": 2}
    given = spaces.Box(-1, 99, (2,), np.float32), spaces.Discrete(3)
    storage = ReplayStorage(*given, path=tmp_path / "mapped", **options)
    ended = np.array([True])

    def add(step):  # a first stack that is neither zeros nor one frame twice, which has to be kept
        storage.add([[step, step + 0.5]], [0], [step], ended, ~ended, {}, [[step + 0.5, 1]])

    for step in range(16):
        add(step)
    done, extend = [], Backing.extend

    def extend_some(*args):
        if len(done) == extended:
            raise KeyboardInterrupt
        done.append(args[1])
        return extend(*args)

    monkeypatch.setattr(Backing, "extend", extend_some)
    if extended < 4:
        with pytest.raises(KeyboardInterrupt):
            add(16)
    else:
        add(16)
    monkeypatch.undo()
    shutil.copytree(tmp_path / "mapped", tmp_path / "left")
    again = ReplayStorage(*given, path=tmp_path / "left", **options)
    assert again[again.held_rows()]["observations"].tolist() == [[s, s + 0.5] for s in range(16 + (extended == 4))]
