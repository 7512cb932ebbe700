"""Episodes and rows of shared memory, read while other processes write: as they were added, or refused."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from forked_work import in_child
from shared_kinds import SHARED
from shared_steps import (
    BROKEN,
    DEADLINE,
    TERMINATED_WITHOUT_FINAL,
    TRUNCATED,
    check_numbers,
    start,
    write_plan,
    writing,
)

from rlstore import InvalidInputError, RowNotHeldError
from rlstore.engine.rows import episode_ring
from rlstore.replay import held_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the observations of an environment are not:UserWarning"),
]


def check_episode(kind, episode):
    """What was listed and what is read now are one episode, without a gap."""
    before, final = kind.world.undress(episode.observations), kind.world.undress(episode.final_observations)
    final = final.reshape(1, 6)
    check_numbers(before)
    check_numbers(final)
    time, length, end = before[:, 2], before[0, 3], before[0, 4]
    assert np.array_equal(time, time[0] + np.arange(episode.length))
    assert (before[:, [0, 1, 3, 4]] == before[0, [0, 1, 3, 4]]).all()
    assert before[0, 0] == episode.env
    assert np.array_equal(final[0, :5], [*before[0, :2], time[-1] + 1, length, end])
    assert episode.total_return == time.sum()
    assert episode.is_whole == (time[0] == 0)
    assert not episode.is_over or time[-1] + 1 == length
    assert episode.terminated == (episode.is_over and end not in (TRUNCATED, BROKEN))
    assert episode.truncated == (episode.is_over and end == TRUNCATED)
    assert TERMINATED_WITHOUT_FINAL != TRUNCATED
    if kind.hidden:
        assert np.array_equal(episode["hidden_states"].numpy(), np.stack([before[:, 1:3]] * 2, 1))


@pytest.mark.parametrize("kind", SHARED, ids=repr)
def test_episodes_are_whole_while_others_write(kind, monkeypatch):
    """Two processes write as fast as they can: an episode may be gone when it is read, but is never another one."""
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 4)
    storage, looks, read = kind.make(steps=24, memory="shared"), 0, 0
    with writing(storage, [kind.plan([lane], 100, seed=lane) for lane in range(2)]):
        while looks < 20 or not read:
            listed = storage.episodes()
            assert int(listed.lengths.sum()) == 48
            for episode in reversed(listed):
                looks += 1
                try:
                    check_episode(kind, episode)
                except RowNotHeldError:
                    break
                read += 1


def test_a_listing_ends_although_writers_overwrite_all_that_it_looks_at(monkeypatch):
    """They have to wait for it at last. What is listed is then what is there."""
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 4)
    kind = SHARED[0]
    storage = kind.make(lanes=1, steps=10, memory="shared")
    plan = kind.plan([0], 30)
    writer, tables, make = storage.writer(), [], held_steps.episode_table
    write_plan_once = iter(plan * 4)

    def write_and_look(ring):
        table = make(ring)
        tables.append(table)
        for _ in range(20 if len(tables) < 4 else 0):
            writer.add(**next(write_plan_once))
        return table

    monkeypatch.setattr(held_steps, "episode_table", write_and_look)
    for step in plan[:12]:
        writer.add(**step)
    listed = storage.episodes()
    assert len(tables) == 4
    assert listed.rows.tolist() == list(range(62, 72))
    for episode in listed:
        check_episode(kind, episode)
    storage.close()


@pytest.mark.parametrize(("more", "is_read"), [(3, True), (14, False), (40, False)])
def test_rows_that_are_overwritten_while_they_are_read_are_read_again_or_refused(more, is_read, monkeypatch):
    """Deterministic: between the look at what is held and the copy so many rows are written."""
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 4)
    kind = SHARED[0]
    storage, plan = kind.make(lanes=1, steps=10, memory="shared"), kind.plan([0], 60, longest=4)
    writer, steps = storage.writer(), iter(plan * 2)
    for _ in range(25):
        writer.add(**next(steps))
    rows, require, calls = storage.held_rows(), held_steps.RingSteps._require_held, []

    def require_and_write(self, given):
        require(self, given)
        calls.append(1)
        for _ in range(more if len(calls) == 1 else 0):
            writer.add(**next(steps))

    monkeypatch.setattr(held_steps.RingSteps, "_require_held", require_and_write)
    if is_read:
        assert storage[rows]["rewards"].flatten().tolist() == [step["rewards"][0] for step in plan[15:25]]
    else:
        with pytest.raises(RowNotHeldError, match="row 15 is not held any more"):
            storage[rows]
    storage.close()


def test_the_newest_row_is_read_again_if_its_episode_was_broken_off_meanwhile(monkeypatch):
    kind = next(kind for kind in SHARED if kind.name == "replay")
    storage = kind.make(lanes=1, steps=10, memory="shared")
    plan = kind.plan([0], 12, longest=1, kinds=(BROKEN,))
    writer, require = storage.writer(), held_steps.RingSteps._require_held
    writer.add(**plan[0])
    episode, later = storage.episodes()[0], iter(plan[1:])

    def require_and_write(self, given):
        require(self, given)
        for step in later:
            writer.add(**step)
            break

    monkeypatch.setattr(held_steps.RingSteps, "_require_held", require_and_write)
    check_episode(kind, episode)
    assert not episode.is_over  # when it was listed
    assert storage.episodes()[0].is_over
    storage.close()


def test_steps_that_a_writer_added_are_read_at_once_and_stay_when_it_dies():
    kind = SHARED[0]
    storage, plan = kind.make(lanes=1, memory="shared"), kind.plan([0], 20)
    process = start("fork", write_plan, storage.writer(), plan, 1)
    process.join(DEADLINE)
    assert storage.held_rows().tolist() == list(range(20))
    for episode in storage.episodes():
        check_episode(kind, episode)
    storage.close()


def test_a_forked_child_reads_shared_memory_until_the_parent_changes_it():
    kind = SHARED[0]
    storage, plan = kind.make(lanes=1, memory="shared"), kind.plan([0], 20)
    for step in plan[:10]:
        storage.add(**step)
    episode = storage.episodes()[0]
    ours, theirs = os.pipe(), os.pipe()

    def child():
        for one in (episode, *storage.episodes()):
            check_episode(kind, one)
        return storage[storage.held_rows()]["rewards"].flatten().tolist()

    assert in_child(child) == [float(step["rewards"][0]) for step in plan[:10]]

    def child_later():
        os.write(ours[1], b".")
        os.read(theirs[0], 1)
        for look in (storage.episodes, storage.held_rows, lambda: episode.rewards):
            with pytest.raises(InvalidInputError, match="may change the shared memory"):
                look()

    thread = threading.Thread(target=lambda: (os.read(ours[0], 1), storage.add(**plan[10]), os.write(theirs[1], b".")))
    thread.start()
    in_child(child_later)
    thread.join(DEADLINE)
    storage.close()
