"""What must not change: the public surface, draws under a seed, and that what older versions saved can be loaded.

The data in tests/golden were made by tests/golden/make.py before the storages became compositions, and those of
tests/golden/segments when rows were first saved apart.
"""

import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rlstore import NStepReplayStorage, SnapshotError, Storage
from rlstore.__main__ import main

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

import make as golden_make  # noqa: E402
from programs import BOX, DISCRETE, PROGRAMS, fill, next_draws, numbers, same_goal  # noqa: E402

DRAWS = json.loads((GOLDEN / "draws_cpu.json").read_text())


def test_the_public_surface_is_the_frozen_one():
    frozen = json.loads((GOLDEN / "surface.json").read_text())
    found = json.loads(json.dumps(golden_make.surface()))
    if find_spec("stable_baselines3") is None:  # rlstore.sb3 inherits from its classes
        del frozen["rlstore.sb3"]
    assert found == frozen


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_seed_gives_the_same_draws_as_ever(name):
    make, run = PROGRAMS[name]
    storage = make("cpu")
    drawn = [numbers(batch) for batch in run(storage)]
    assert json.loads(json.dumps(drawn)) == DRAWS[name]["draws"]
    assert json.loads(json.dumps(next_draws(storage))) == DRAWS[name]["next"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_old_snapshot_loads_and_goes_on_with_the_same_draws(name, tmp_path):
    folder = shutil.copytree(golden_make.snapshot_folder(GOLDEN, name), tmp_path / "snapshot")
    storage = Storage.load(folder)
    assert json.loads(json.dumps(next_draws(storage))) == DRAWS[name]["next"]


@pytest.mark.parametrize("name", golden_make.SEGMENTS)
def test_a_snapshot_with_rows_in_segments_loads_and_goes_on_with_the_same_draws(name, tmp_path):
    folder = shutil.copytree(golden_make.snapshot_folder(GOLDEN / "segments", name), tmp_path / "snapshot")
    contents = json.loads((folder / "manifest.json").read_text())["contents"]
    assert contents == ("whole" if name in ("rollout", "decoupled", "distributed") else "segments")
    storage = Storage.load(folder)
    assert json.loads(json.dumps(next_draws(storage))) == DRAWS[name]["next"]


def assert_holds(storage, first, last):
    """Twenty steps of three environments, as fill() adds them."""
    step, lane = torch.arange(float(first), float(last)).view(-1, 1), torch.arange(3.0)
    held = storage.get_all_buffer_data()
    terminated, truncated = (step % 5 == 4) & (lane == 0), (step % 7 == 6) & (lane == 1)
    following = torch.where(terminated | truncated, 100 * step + lane + 0.5, 100 * (step + 1) + lane)
    assert held["masks"].all()
    for name, expected in {
        "observations": 100 * step + lane,
        "actions": (lane % 2).expand(20, 3),
        "rewards": (100 * step + lane) / 100,
        "terminated": terminated,
        "truncated": truncated,
        "next_observations": following,
    }.items():
        assert torch.equal(held[name].reshape(20, 3).to(expected.dtype), expected), name


def test_a_snapshot_that_was_saved_four_times_holds_what_it_held(tmp_path):
    folder = shutil.copytree(GOLDEN / "segments" / "saved_four_times", tmp_path / "snapshot")
    storage = Storage.load(folder)
    assert_holds(storage, 20, 40)
    # Rows 24 and 39 of environment 1 were given 25 and 40, others the largest that there was when they were written.
    rows = torch.tensor([24 * 3 + 1, 39 * 3 + 1, 24 * 3, 25 * 3, 39 * 3])
    expected = torch.tensor([25.0, 40.0, 12.0, 25.0, 25.0]) ** 0.6
    torch.testing.assert_close(storage.priorities(rows), expected)
    fill(storage, 40, 43)
    storage.save(folder)
    assert_holds(Storage.load(folder), 23, 43)
    assert (folder / "rows-000001.bin").exists()  # it went on where it was
    assert main(["verify", str(folder)]) == 0


def test_a_journal_holds_what_was_committed_and_goes_on(tmp_path):
    folder = shutil.copytree(GOLDEN / "segments" / "journal", tmp_path / "journal")
    storage = Storage.load(folder, journal=folder)
    assert_holds(storage, 13, 33)
    fill(storage, 33, 36)
    storage.close()
    assert_holds(Storage.load(folder), 16, 36)


def newer_manifest(folder, **more):
    told = json.loads((folder / "manifest.json").read_text())
    told.pop("crc32")
    (folder / "manifest.json").write_text(json.dumps({**told, **more}))


def newer_record(folder):
    content = bytearray((folder / "rows-000001.bin").read_bytes())
    content[:8] = b"rlstrow2"
    (folder / "rows-000001.bin").write_bytes(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: newer_manifest(folder, version=2), '"version" is 2, and this version reads 1'),
        (lambda folder: newer_manifest(folder, contents="deltas"), "\"contents\" is 'deltas', and this version reads"),
        (newer_record, "\"the mark of a record\" is 'rlstrow2', and this version reads 'rlstrow1'"),
    ],
    ids=["version", "contents", "record"],
)
def test_what_a_newer_version_wrote_is_refused_by_that_word(change, said, tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "segments" / "saved_four_times", tmp_path / "snapshot")
    change(folder)
    with pytest.raises(SnapshotError, match=f"was written by a newer rlstore: {re.escape(said)}.* Update rlstore"):
        Storage.load(folder)
    assert main(["verify", str(folder)]) == 1
    assert f"was written by a newer rlstore: {said}" in capsys.readouterr().out


@pytest.mark.parametrize("name", golden_make.MAPPED)
def test_an_old_mapped_folder_is_taken_up(name, tmp_path):
    folder = shutil.copytree(GOLDEN / "mapped" / name, tmp_path / "mapped")
    storage = golden_make.MAPPED[name](BOX, DISCRETE, **golden_make.mapped_arguments(folder))
    fresh = golden_make.MAPPED[name](BOX, DISCRETE, **golden_make.mapped_arguments(tmp_path / "fresh"))
    fill(fresh, 0, 30)
    assert numbers(storage.get_all_buffer_data()) == numbers(fresh.get_all_buffer_data())
    assert numbers(storage.sample()) == numbers(fresh.sample())
    storage.close()
    fresh.close()


def test_old_episodes_on_disk_are_taken_up(tmp_path):
    folder = shutil.copytree(GOLDEN / "episodes", tmp_path / "episodes")
    storage = NStepReplayStorage(BOX, DISCRETE, **golden_make.episode_arguments(folder))
    held = storage.get_all_buffer_data()
    ended = held["terminated"].logical_or(held["truncated"]).squeeze(-1) & held["masks"]
    assert ended[:, 0].sum() == 4  # 20 rows of five steps; lane 0 ended every fifth of 30 steps
    assert ended[:, 1].sum() == 3  # of four episodes of seven steps the oldest has no room
    assert not held["masks"][:, 2].any()  # no episode of lane 2 was over
    assert torch.equal(held["rewards"][:, 0][held["masks"][:, 0]].flatten(), torch.arange(10.0, 30.0))
    storage.close()


def test_the_programs_are_those_that_were_frozen():
    assert set(PROGRAMS) == set(DRAWS)
    assert same_goal(torch.ones(1), torch.ones(1), {}) == 1
