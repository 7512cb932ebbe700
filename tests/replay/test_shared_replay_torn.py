"""A batch never holds a row that was overwritten while it was read, whatever others write meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch
from combinations import each
from shared_kinds import REPLAY, SHARED
from shared_steps import ACTIONS, DEADLINE, Wide, make_plan, writing

from rlstore import ReplayStorage
from rlstore.engine.rows import episode_ring

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the observations of an environment are not:UserWarning"),
]


@pytest.mark.parametrize("kind", SHARED, ids=repr)
def test_every_batch_is_whole_while_others_write(kind, monkeypatch):
    """Two lanes of 24 rows that two processes write as fast as they can, and that a batch hardly keeps up with.

    The guard of a few rows makes a batch be overwritten half read again and again; then it is drawn anew.
    """
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 4)
    storage = kind.make(steps=24, memory="shared", batch_size=128)
    with writing(storage, [kind.plan([lane], 300, seed=lane) for lane in range(2)]):
        for _ in range(30):
            batch = storage.sample()
            kind.check(batch)
            if hasattr(batch, "weights"):
                assert ((batch.weights > 0) & (batch.weights <= 1)).all()
            if kind.name.startswith("prioritized"):
                storage.update(batch.rows, torch.rand(len(batch.rows)) + 0.1)
        assert len(storage) == 48


def test_rows_that_were_overwritten_while_they_were_read_are_never_served(monkeypatch):
    """Few rows, short episodes, large batches: without the look at what was overwritten, a batch in ten is torn."""
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 2)
    storage, tried = REPLAY.make(steps=16, memory="shared", batch_size=512), []
    prepare = storage._pipeline._reader
    monkeypatch.setattr(storage._pipeline, "_reader", lambda drawn: tried.append(1) or prepare(drawn))
    served = 0
    with writing(storage, [REPLAY.plan([lane], 600, seed=lane, longest=2) for lane in range(2)]):
        while served < 200 or (len(tried) == served and served < 20_000):
            REPLAY.check(storage.sample())
            served += 1
    assert len(tried) > served  # some were overwritten, and drawn anew


def test_observation_behind_the_newest_row_is_not_taken_from_an_episode_that_began_there(monkeypatch):
    """While a large row is copied its episode is broken off, and what followed it moves to the final observations."""
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 16)
    world, reading, batches = Wide(), threading.Event(), []
    plan = make_plan(world, [0], 40, longest=1, kinds=(2,))
    storage = ReplayStorage(world.space, ACTIONS, storage_size=1, batch_size=64, memory="shared", autoreset="SameStep")
    prepare, writer = storage._pipeline._reader, storage.writer()
    monkeypatch.setattr(storage._pipeline, "_reader", lambda drawn: reading.set() or prepare(drawn))
    writer.add(**plan[0])
    for step in plan[1:]:
        reading.clear()
        reader = threading.Thread(target=lambda: batches.append(storage.sample()))
        reader.start()
        assert reading.wait(DEADLINE)
        writer.add(**step)  # while the other thread copies
        reader.join(DEADLINE)
    assert len(batches) == 39
    for batch in batches:
        before, after = world.undress(batch.observations), world.undress(batch.next_observations)
        assert (before[:, 1] == after[:, 1]).all()
        assert (after[:, 2] == 1).all()
    storage.close()


@pytest.mark.parametrize(("kind", "more"), each([*SHARED, *SHARED[:5]], [1, 3, 4, 5, 6, 11, 40]), ids=repr)
def test_rows_overwritten_between_draw_and_copy_are_drawn_anew(kind, more, monkeypatch):
    """Deterministic: after a batch was drawn and before it is read, so many rows of each lane are written."""
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 4)
    storage, plan = kind.make(steps=10, memory="shared", num_workers=0), kind.plan(range(2), 200, longest=4)
    writer, steps = storage.writer(), iter(plan)
    for _ in range(25):
        writer.add(**next(steps))
    prepare, drawn_rows = storage._pipeline._reader, []

    def write_and_prepare(drawn):
        drawn_rows.append(drawn.rows)
        if len(drawn_rows) == 1:
            for _ in range(more):
                writer.add(**next(steps))
        return prepare(drawn)

    monkeypatch.setattr(storage._pipeline, "_reader", write_and_prepare)
    kind.check(storage.sample(400))
    oldest = int(drawn_rows[0][drawn_rows[0] >= 0].min()) // 2
    # Ten rows are held, and four more are left alone; the next write may be under way at any time.
    assert len(drawn_rows) == (2 if 25 + more - oldest >= 14 else 1)
    storage.close()


@pytest.mark.parametrize("kind", SHARED, ids=repr)
def test_windows_that_were_looked_up_in_overwritten_rows_are_forgotten(kind, monkeypatch):
    """Deterministic: between the notice of new rows and the look at their episodes, they are all written over."""
    monkeypatch.setattr(episode_ring, "_LEAST_GUARD", 4)
    storage, plan = kind.make(steps=10, memory="shared", num_workers=0), kind.plan(range(2), 400, longest=6)
    writer, steps = storage.writer(), iter(plan)
    for _ in range(25):
        writer.add(**next(steps))
    storage.sample()
    follow, rounds = storage._sampler.follow, []

    def write_and_follow():
        if len(rounds) % 3 == 0:
            for _ in range(15 + len(rounds)):
                writer.add(**next(steps))
        rounds.append(1)
        follow()

    monkeypatch.setattr(storage._sampler, "follow", write_and_follow)
    for _ in range(8):
        for _ in range(7):
            writer.add(**next(steps))
        kind.check(storage.sample(300))
    assert len(rounds) > 8
    storage.close()
