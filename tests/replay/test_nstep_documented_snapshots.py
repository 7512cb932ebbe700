"""NStepReplayStorage: finished episodes kept on disk (save_snapshot), and that nothing is written otherwise."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nstep_steps import assert_tables, fill, ids_of, make_step, make_storage, obs_of, served

from rlstore import StorageError


def files_under(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def bytes_under(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def kept(folder, num_envs=2, steps=8, *spaces_, **options):
    return make_storage(num_envs, steps, *spaces_, save_snapshot=True, snapshot_dir=folder, **options)


def lanes_of(storage):
    """The ids that each environment holds, oldest first."""
    data = storage.get_all_buffer_data()
    masks = data["masks"].reshape(data["observations"].shape[:2]).bool()
    ids = (data["observations"][..., 0] / 10).long()
    return [ids[:, env][masks[:, env]].tolist() for env in range(storage.num_envs)]


# ------------------------------------------------------------------------------------------------- where


def test_without_it_nothing_is_written_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = make_storage(num_workers=2)
    fill(storage, 20, terminated=(0,), truncated=(1,))
    storage.sample()
    storage.reset()
    storage.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_storage_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = make_storage(save_snapshot=True)
    fill(storage, 2, terminated=(0, 1))
    storage.close()
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]
    assert files_under(tmp_path / "storage")
    again = make_storage(save_snapshot=True)
    assert lanes_of(again) == [[1, 3], [2, 4]]
    again.close()


@pytest.mark.parametrize("form", [str, Path])
def test_the_folder_is_the_one_given(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    storage = kept(form(tmp_path / "deep" / "inside"))
    fill(storage, 1, terminated=(0, 1))
    storage.close()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    again = kept(form(tmp_path / "deep" / "inside"))
    assert lanes_of(again) == [[1], [2]]
    again.close()


def test_a_folder_given_relatively_stays_where_it_was(tmp_path, monkeypatch):
    """A training loop that changes the working directory goes on writing to the same folder."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    storage = kept("episodes")
    fill(storage, 1, terminated=(0, 1))
    os.chdir(tmp_path / "other")
    fill(storage, 1, first=1, terminated=(0, 1))
    storage.close()
    assert list((tmp_path / "other").iterdir()) == []
    os.chdir(tmp_path)
    again = kept("episodes")
    assert lanes_of(again) == [[1, 3], [2, 4]]
    again.close()


# ------------------------------------------------------------------------------------------------- what


def test_a_restarted_run_finds_the_finished_episodes_in_their_order(tmp_path):
    first = kept(tmp_path, 2, 12, n_step=3, discount=0.5)
    ends = {2: (0,), 3: (1,), 4: (0,), 7: (0, 1), 8: (1,)}
    for step in range(11):
        how = "terminated" if step % 2 else "truncated"
        first.add(**make_step(step, 2, **{how: ends.get(step, ())}))
    expected = served(first)
    first.close()
    again = kept(tmp_path, 2, 12, n_step=3, discount=0.5)
    # Environment 0 went on from step 8, environment 1 from step 9: episodes that were not finished are not there.
    assert lanes_of(again) == [[1, 3, 5, 7, 9, 11, 13, 15], [2, 4, 6, 8, 10, 12, 14, 16, 18]]
    assert len(again) == 17
    unfinished = {17, 19, 21, 20, 22}
    assert_tables(served(again), {number: line for number, line in expected.items() if number not in unfinished})
    again.close()


def test_all_of_a_transition_comes_back(tmp_path):
    space = spaces.Dict({"image": spaces.Box(0, 255, (2, 3), np.uint8), "speed": spaces.Box(-1e9, 1e9, (1,))})
    actions = spaces.Box(-1e9, 1e9, (2,))

    def nest(ids):
        image = torch.stack([ids + i for i in range(6)], -1).reshape(-1, 2, 3).byte()
        return {"image": image, "speed": ids.unsqueeze(-1) / 3}

    first = kept(tmp_path, 2, 8, actions, space)
    for step in range(4):
        ids = ids_of(step)
        ended = (0, 1) if step == 3 else ()
        infos = {"final_obs": nest(ids + 100)} if ended else {}
        observations = {"observations": nest(ids), "next_observations": nest(ids + 2)}
        first.add(**make_step(step, 2, truncated=ended, actions=obs_of(ids) / 7, infos=infos, **observations))
    before = first.get_all_buffer_data()
    first.close()
    again = kept(tmp_path, 2, 8, actions, space)
    after = again.get_all_buffer_data()
    assert before.keys() == after.keys()
    for name in ("actions", "rewards", "terminated", "truncated"):
        assert torch.equal(after[name], before[name]), name
    for name in ("observations", "next_observations"):
        for leaf in ("image", "speed"):
            assert after[name][leaf].dtype == before[name][leaf].dtype
            assert torch.equal(after[name][leaf], before[name][leaf]), (name, leaf)
    again.close()


def test_the_run_goes_on_where_it_was_and_the_next_restart_finds_both(tmp_path):
    for run in range(4):
        storage = kept(tmp_path, 2, 6)
        for step in (2 * run, 2 * run + 1):
            storage.add(**make_step(step, 2, terminated=(0, 1) if step % 2 else ()))
        held = range(max(0, 2 * run + 2 - 6), 2 * run + 2)
        assert lanes_of(storage) == [[2 * step + env for step in held] for env in (1, 2)]
        storage.close()


def test_what_a_restarted_run_has_no_room_for_is_the_oldest(tmp_path):
    large = kept(tmp_path, 1, 20)
    for step in range(20):
        large.add(**make_step(step, 1, terminated=(0,) if step % 4 == 3 else ()))
    large.close()
    small = kept(tmp_path, 1, 8)
    assert lanes_of(small) == [list(range(13, 21))]
    small.close()


@pytest.mark.parametrize("steps", range(18, 40))
def test_nothing_that_was_finished_and_held_is_missing_after_a_restart(tmp_path, steps):
    """Three environments with episodes of 1, 4 and 10 steps, in a storage that has wrapped."""
    first = kept(tmp_path, 3, 10)
    finished = [0, 0, 0]
    for step in range(steps):
        ended = tuple(env for env, length in enumerate((1, 4, 10)) if (step + 4) % length == 0)
        first.add(**make_step(step, 3, terminated=ended))
        for env in ended:
            finished[env] = 3 * step + env + 1
    held = [[number for number in lane if number <= finished[env]] for env, lane in enumerate(lanes_of(first))]
    first.close()
    again = kept(tmp_path, 3, 10)
    found = lanes_of(again)
    assert [lane[-len(held[env]) :] if held[env] else [] for env, lane in enumerate(found)] == held
    # What came before it may be there too, for there is room where an episode had not ended.
    assert all(np.diff(lane).tolist() == [3] * (len(lane) - 1) for lane in found)
    again.close()


def test_an_episode_that_spans_a_restart_is_not_joined_with_the_next(tmp_path, recwarn):
    first = kept(tmp_path, 1, 8, n_step=3, discount=0.5)
    first.add(**make_step(0, 1, truncated=(0,)))
    first.add(**make_step(1, 1))
    first.close()
    again = kept(tmp_path, 1, 8, n_step=3, discount=0.5)
    again.add(**make_step(30, 1))
    assert not recwarn.list
    assert_tables(served(again), {1: (1, 1.25, 0.5, -1), 31: (31, 31.25, 0.5, 32)})
    again.close()


def test_the_folder_does_not_grow_without_end(tmp_path):
    """What the storage has forgotten is of no use on disk."""
    storage = kept(tmp_path, 1, 32, observation_space=spaces.Box(0, 255, (256,), np.uint8), n_step=1)
    sizes = []
    for round_ in range(12):
        for step in range(32):
            observation = torch.full((1, 256), step)
            ended = (0,) if step % 8 == 7 else ()
            infos = {"final_obs": observation.numpy()} if ended else {}
            same = {"observations": observation, "next_observations": (observation + 1) % 32, "infos": infos}
            storage.add(**make_step(32 * round_ + step, 1, terminated=ended, **same))
        sizes.append(bytes_under(tmp_path))
    storage.close()
    assert sizes[-1] <= 2 * sizes[1]


# ------------------------------------------------------------------------------------------------- when

SCRIPT = """
import os, signal, sys
import numpy as np
from gymnasium import spaces
from rlstore import NStepReplayStorage

storage = NStepReplayStorage(spaces.Box(-1e9, 1e9, (2,)), spaces.Discrete(1_000_000), storage_size=16, num_envs=2,
    num_workers=0, save_snapshot=True, snapshot_dir=sys.argv[1])
for step in range(5):
    ids = np.array([1.0, 2.0], np.float32) + 2 * step
    obs = np.stack([10 * ids, 10 * ids + 1], -1)
    ended = [step == 1, step == 4]
    infos = {"final_obs": np.stack([-10 * ids, -10 * ids + 1], -1)} if any(ended) else {}
    storage.add(obs, ids.astype(int), ids + 0.25, ended, [False, False], infos, obs + 20)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_an_episode_is_on_disk_when_add_returns_from_its_last_step(tmp_path):
    """The process is killed right after: nothing was flushed, closed or tidied up."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), "killed"], capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    storage = kept(tmp_path, 2, 8)
    assert lanes_of(storage) == [[1, 3], [2, 4, 6, 8, 10]]
    ended_in = {number: line[3] for number, line in served(storage).items() if line[2] == 0}
    assert ended_in == {1: -3, 3: -3, 6: -10, 8: -10, 10: -10}
    storage.close()


def test_an_episode_is_written_with_its_last_step_and_not_before(tmp_path):
    storage = kept(tmp_path, 1, 8)
    sizes = [bytes_under(tmp_path)]
    for step in range(6):
        storage.add(**make_step(step, 1, terminated=(0,) if step in (2, 5) else ()))
        sizes.append(bytes_under(tmp_path))
    storage.close()
    grew = [after > before for before, after in itertools.pairwise(sizes)]
    assert grew == [False, False, True, False, False, True]


# ------------------------------------------------------------------------------------------------- whose


def refusal(folder):
    with pytest.raises((OSError, RuntimeError, ValueError)) as refused:
        kept(folder)
    assert isinstance(refused.value, StorageError)
    assert Path(folder).name in str(refused.value)
    return refused.value


def test_a_second_live_storage_on_the_same_folder_is_refused(tmp_path):
    folder = tmp_path / "episodes"
    first = kept(folder)
    fill(first, 2, terminated=(0, 1))
    before = {name: (folder / name).read_bytes() for name in files_under(folder)}
    refusal(folder)
    refusal(folder)
    assert {name: (folder / name).read_bytes() for name in files_under(folder)} == before
    fill(first, 1, first=2, terminated=(0, 1))
    first.close()
    second = kept(folder)
    assert lanes_of(second) == [[1, 3, 5], [2, 4, 6]]
    second.close()


def test_the_same_folder_by_another_name_is_refused_as_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = kept("episodes")
    refusal(tmp_path / "episodes")
    (tmp_path / "link").symlink_to(tmp_path / "episodes")
    refusal(tmp_path / "link")
    first.close()


def test_a_folder_is_free_again_when_its_storage_was_forgotten(tmp_path):
    first = kept(tmp_path)
    fill(first, 1, terminated=(0, 1))
    del first
    gc.collect()
    second = kept(tmp_path)
    assert lanes_of(second) == [[1], [2]]
    second.close()


def test_a_live_storage_of_another_process_is_respected_and_a_dead_one_is_not(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "alive"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "ready\n"
            refusal(tmp_path)
        finally:
            other.kill()
    storage = kept(tmp_path)
    assert lanes_of(storage) == [[1, 3], [2, 4, 6, 8, 10]]
    storage.close()


def test_episodes_of_another_schema_are_refused(tmp_path):
    first = kept(tmp_path)
    fill(first, 1, terminated=(0, 1))
    first.close()
    before = files_under(tmp_path)
    with pytest.raises(ValueError, match="observations"):
        kept(tmp_path, observation_space=spaces.Box(-1, 1, (3,)))
    assert files_under(tmp_path) == before
    again = kept(tmp_path)
    assert lanes_of(again) == [[1], [2]]
    again.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((OSError, ValueError), match="file"):
        kept(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"
