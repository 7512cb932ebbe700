"""Data added to storages of every kind of memory, and to such that do something else meanwhile."""

from __future__ import annotations

import multiprocessing
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_episodes import ACTIONS, CASES, EXTRA, FLAT, Case, assert_same, contents, episode_of, flat, number_of
from gymnasium import spaces

import rlstore
from rlstore import DoesNotFitError, NStepReplayStorage, PrioritizedReplayStorage, RateLimit, ReplayStorage, Storage
from rlstore.engine.memory import capacity

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EPISODES = [episode_of(FLAT, index, length) for index, length in enumerate((5, 7, 3, 6))]


def numbers(storage: Any) -> list[int]:
    """The ids of all steps, by environment, oldest first."""
    rows = storage.held_rows()
    return storage[rows[torch.argsort(rows % storage.num_envs, stable=True)]]["actions"].tolist()


def observed(number: int, envs: int = 1) -> np.ndarray[Any, Any]:
    return np.stack([FLAT.observe(number, 0)] * envs)


# ---------------------------------------------------------------------------------------------------- memory


@EVERY
@pytest.mark.parametrize("memory", ["ram", "shared", "mapped"])
def test_every_memory_holds_the_same(case: Case, memory: str, tmp_path: Path) -> None:
    episodes = [episode_of(case.form, index, length) for index, length in enumerate((5, 7, 3, 6, 8))]
    options = {"path": tmp_path / "mapped"} if memory == "mapped" else {}
    storage = case.make(storage_size=40, num_envs=2, memory=memory, **options)
    assert storage.add_episodes(episodes) == 29
    twin = case.make(storage_size=40, num_envs=2)
    twin.add_episodes(episodes)
    if memory == "shared":  # which has room for all episodes from the beginning
        assert_same({**contents(storage), "free": torch.empty(0)}, {**contents(twin), "free": torch.empty(0)})
    else:
        assert_same(contents(storage), contents(twin))
    storage.save(tmp_path / "saved")
    storage.close()
    folders = {"path": tmp_path / "loaded"} if memory == "mapped" else {}
    loaded: Any = Storage.load(tmp_path / "saved", folders=folders)
    if memory == "mapped":
        again = case.make(storage_size=40, num_envs=2, memory=memory, **options)
        assert_same(contents(again), contents(twin))
    for one, other in zip(loaded.episodes(), twin.episodes(), strict=True):
        for mine, its in zip(flat(one.observations), flat(other.observations), strict=True):
            assert torch.equal(mine, its)
        assert (one.terminated, one.truncated, one.is_over) == (other.terminated, other.truncated, other.is_over)


def test_storages_with_writers_refuse(tmp_path: Path) -> None:
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=40, num_envs=2, memory="shared")
    with storage.writer(1):
        with pytest.raises(ValueError, match="added by its writers"):
            storage.add_episodes(EPISODES)
        assert len(storage) == 0
    assert storage.add_episodes(EPISODES) == 21
    with storage.writer() as writer:  # and the other way round
        flags = np.zeros(2, bool)
        writer.add(observed(900, 2), [1, 1], [0.0, 0.0], flags, flags, {}, observed(901, 2))
    assert len(storage) == 23
    storage.close()
    with pytest.raises(RuntimeError, match="closed"):
        storage.add_episodes(EPISODES)


def add_in_child(storage: Any, told: Any) -> None:
    try:
        storage.add_episodes(EPISODES)
    except ValueError as error:
        told.send(str(error))


@pytest.mark.parametrize("memory", ["shared", "mapped"])
def test_a_forked_child_leaves_the_memory_of_its_parent_alone(memory: str, tmp_path: Path) -> None:
    options = {"path": tmp_path / "mapped"} if memory == "mapped" else {}
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=40, memory=memory, **options)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=add_in_child, args=(storage, there))
    child.start()
    assert here.poll(60)
    assert "belongs to process" in here.recv()
    child.join()
    assert len(storage) == 0


def resident() -> float:
    """MB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process as Linux tells it")
def test_memory_does_not_grow_with_the_data() -> None:
    """300 MB of episodes into a storage of 20 MB."""
    size, length = 25_000, 50
    box = spaces.Box(-np.inf, np.inf, (size,), np.float32)
    storage, seen = ReplayStorage(box, ACTIONS, storage_size=200), []

    def episodes(count: int) -> Any:
        for index in range(count):
            observations = np.full((length + 1, size), index, np.float32)
            yield {"observations": observations, "actions": [0] * length, "rewards": [0.0] * length, "terminated": True}
            seen.append(resident())

    storage.add_episodes(episodes(4))  # all of its memory
    assert storage.add_episodes(episodes(60)) == 60 * length
    assert max(seen[4:]) - seen[3] < 25  # some episodes of 5 MB
    assert [e.observations[0, 0].item() for e in storage.episodes()] == [56, 57, 58, 59]


def test_what_does_not_fit_into_memory_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    box = spaces.Box(-np.inf, np.inf, (1000,), np.float32)
    storage = ReplayStorage(box, ACTIONS, storage_size=100_000)
    given = {"actions": [0] * 10_000, "rewards": [0.0] * 10_000, "truncated": True}
    given["observations"] = np.zeros((10_001, 1000), np.float32)
    monkeypatch.setattr(capacity, "free_ram", lambda: (150 << 20, "as the test says"))
    with pytest.raises(DoesNotFitError, match="10,000 more steps may need"):
        storage.add_episodes([{**given, "observations": given["observations"]}])
    assert len(storage) == 0


# ---------------------------------------------------------------------------------------------------- the ring


def test_an_episode_that_is_longer_than_the_storage_keeps_its_end() -> None:
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=10, n_step=3)
    storage.add_episodes([episode_of(FLAT, 0, 4), episode_of(FLAT, 1, 25)])
    assert numbers(storage) == [number_of(1, step) for step in range(15, 25)]
    (episode,) = storage.episodes()
    assert (episode.is_whole, episode.truncated, episode.final_observations[0]) == (False, True, number_of(1, 25))


@pytest.mark.parametrize("autoreset", [None, "NextStep"])
@pytest.mark.parametrize("count", [1, 6], ids=["held", "overwritten"])
def test_a_reset_step_that_was_to_come_is_still_none(autoreset: str | None, count: int) -> None:
    """The episode of an environment has ended, and the step that resets it comes after the data."""
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=20, autoreset=autoreset)
    ended, no = np.array([True]), np.array([False])
    storage.add(observed(1), [1], [1.0], ended, no, {}, observed(2))
    storage.add_episodes(EPISODES[:count])
    storage.add(observed(2), [5], [0.0], no, no, {}, observed(3))
    if count > 1:
        assert numbers(storage)[-1] == 5  # nobody knows of the end any more
        return
    assert numbers(storage) == [1, *(number_of(0, step) for step in range(5))]
    storage.add(observed(3), [6], [0.0], no, no, {}, observed(4))
    assert numbers(storage)[-1] == 6


@pytest.mark.parametrize("autoreset", [None, "NextStep", "SameStep"])
def test_no_reset_step_follows_the_data(autoreset: str | None) -> None:
    """A step that looks like a reset: the final observation of the data, no reward and no end."""
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=20, autoreset=autoreset)
    storage.add_episodes([EPISODES[0]])
    no = np.array([False])
    storage.add(observed(number_of(0, 5)), [7], [0.0], no, no, {}, observed(4))
    assert numbers(storage)[-1] == 7


def test_new_rows_have_the_largest_priority_and_those_overwritten_have_none() -> None:
    storage = PrioritizedReplayStorage(FLAT.space, ACTIONS, storage_size=12, alpha=1.0)
    storage.add_episodes([EPISODES[0]])
    storage.update(torch.arange(5), torch.tensor([1.0, 2.0, 7.0, 1.0, 1.0]))
    storage.add_episodes([EPISODES[1], EPISODES[2]])
    assert storage.priorities(storage.held_rows()).tolist() == [1.0, 1.0] + [7.0] * 10
    assert storage.priority_total == 72
    storage.update([0, 14], [5.0, 5.0])
    assert storage.stale_updates == 1


# ---------------------------------------------------------------------------------------------------- meanwhile


def test_a_rate_limit_counts_what_is_added_and_makes_nobody_wait() -> None:
    storage = ReplayStorage(
        FLAT.space, ACTIONS, storage_size=50, batch_size=4, timeout=0.5, rate_limit=RateLimit(1.0, 8, 16.0)
    )
    assert storage.add_episodes(EPISODES) == 21
    limiter = storage._sharing.control.limiter
    assert limiter.inserted == 21
    for _ in range(4):
        storage.sample()
    no = np.array([False])
    for number in range(900, 908):
        storage.add(observed(number), [1], [0.0], no, no, {}, observed(number + 1))


def test_batches_that_were_prefetched_are_right_all_the_time() -> None:
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=16, batch_size=8, num_workers=2, fetch_every=2)
    for index in range(60):
        storage.add_episodes([episode_of(FLAT, index % 90, 6)])
        batch = storage.sample()
        assert torch.equal(batch.observations[:, 0].long(), batch.actions)
        assert torch.equal(batch.next_observations[:, 0].long(), batch.actions + 1)
        assert torch.equal(batch.rewards[:, 0], batch.actions / 4)
    assert (batch.actions // 100).min() >= 57  # of the last three episodes, or prefetched just before
    storage.close()


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_save_in_the_background_holds_what_was_there(memory: str, tmp_path: Path) -> None:
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=21, memory=memory)
    storage.add_episodes(EPISODES)
    before = numbers(storage)
    with storage._guard:  # the rows are copied when it is free
        save = storage.save(tmp_path / "saved", background=True)
        storage.add_episodes([episode_of(FLAT, index, 21) for index in range(10, 20)])
    save.wait()
    assert numbers(Storage.load(tmp_path / "saved")) == before
    assert numbers(storage) == [number_of(19, step) for step in range(21)]


def test_a_journal_commits_what_was_added(tmp_path: Path) -> None:
    storage = ReplayStorage.from_episodes(EPISODES, FLAT.space, ACTIONS, 40, journal=tmp_path / "journal")
    storage.add_episodes([episode_of(FLAT, 9, 4)])
    held = numbers(storage)
    storage.close()
    assert numbers(Storage.load(tmp_path / "journal")) == held


@pytest.mark.parametrize("envs", [1, 2])
def test_finished_episodes_are_kept_on_disk(envs: int, tmp_path: Path) -> None:
    """Those that were added, and those that were cut off by them."""

    def make() -> NStepReplayStorage:
        options = {"num_workers": 0, "save_snapshot": True, "snapshot_dir": tmp_path / "episodes"}
        return NStepReplayStorage(FLAT.space, ACTIONS, storage_size=20 * envs, num_envs=envs, **options)

    storage = make()
    no = np.zeros(envs, bool)
    storage.add(observed(1, envs), [9] * envs, [0.0] * envs, no, no, {}, observed(2, envs))
    storage.add_episodes([*EPISODES, *EPISODES])
    before = [(e.env, e.actions.tolist(), e.final_observations[0].item()) for e in storage.episodes()]
    assert all(e.is_over for e in storage.episodes())
    storage.close()
    again = make()
    after = [(e.env, e.actions.tolist(), e.final_observations[0].item()) for e in again.episodes()]
    assert sorted(after) == sorted(before)
    again.close()


def test_other_threads_go_on_meanwhile() -> None:
    """Steps of another thread never land in the middle of an episode."""
    storage = ReplayStorage(FLAT.space, ACTIONS, storage_size=5_000, batch_size=16, extra_fields=EXTRA)
    added = threading.Event()

    def add() -> None:
        no, count = np.array([False]), 0
        while not added.is_set() and count < 2_000:
            number = 1_000_000 + count
            storage.add(observed(number), [1], [0.0], no, no, {}, observed(number + 1), costs=[1.0])
            count += 1

    thread = threading.Thread(target=add)
    thread.start()
    for index in range(40):
        storage.add_episodes([episode_of(FLAT, index, 30, extra=True)])
        storage.sample()
    added.set()
    thread.join()
    loaded = [e for e in storage.episodes() if e.observations[0, 0] < 1_000_000]
    assert [e.actions.tolist() for e in loaded] == [[number_of(i, step) for step in range(30)] for i in range(40)]


def test_a_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    ReplayStorage.from_episodes(EPISODES, FLAT.space, ACTIONS, progress=True).add_episodes(iter(EPISODES), True)
    shown = capsys.readouterr().out
    assert "Checking" in shown
    assert "Storing" in shown
    assert "100%" in shown
    ReplayStorage.from_episodes(EPISODES, FLAT.space, ACTIONS)
    assert capsys.readouterr().out == ""


def test_a_progress_bar_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    storage = rlstore.ReplayStorage(FLAT.space, ACTIONS, storage_size=40)
    with pytest.raises(ImportError, match=r"progress=True needs rich.*pip install 'rlstore\[data\]'.*Nothing was"):
        storage.add_episodes(EPISODES, progress=True)
    assert len(storage) == 0
