"""What must not change: the public surface, draws under a seed, and that what older versions saved can be loaded.

The data in tests/golden were made by tests/golden/make.py before the storages became compositions.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from rlstore import NStepReplayStorage, Storage

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

import make as golden_make  # noqa: E402
from programs import BOX, DISCRETE, PROGRAMS, fill, next_draws, numbers, same_goal  # noqa: E402

DRAWS = json.loads((GOLDEN / "draws_cpu.json").read_text())


def test_the_public_surface_is_the_frozen_one():
    frozen = json.loads((GOLDEN / "surface.json").read_text())
    found = json.loads(json.dumps(golden_make.surface()))
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
