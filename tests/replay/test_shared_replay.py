"""What writers add, in this process and in others, is what the storage's own add would have added."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from combinations import each
from replay_kinds import assert_same, assert_same_draws, leaves
from shared_kinds import PRIORITIZED, REPLAY, SEQUENCE, SHARED, full, part_of, vocabulary
from shared_steps import FIVE, OBSERVATIONS, join, put, start, write_all, write_plan, writing

from rlstore import (
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
    Storage,
    StorageClosedError,
)
from rlstore.engine.batches.pipeline import Drawn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the observations of an environment are not:UserWarning"),
]


def twin_of(kind, plan, **options):
    """A storage in RAM that was given a plan through its own add."""
    twin = kind.make(lanes=len(plan[0]["rewards"]), memory="ram", **options)
    for step in plan:
        twin.add(**step)
    return twin


def assert_same_content(storage, twin):
    assert len(storage) == len(twin)
    assert_same(leaves(storage.get_all_buffer_data()), leaves(twin.get_all_buffer_data()))
    assert_same_draws(storage, twin)
    storage.close()
    twin.close()


# ------------------------------------------------------------------------------------------------- the same rows


@pytest.mark.parametrize(("kind", "memory"), each(SHARED, ["shared", "ram", "device", "mapped"]), ids=repr)
def test_parts_written_here_are_what_add_would_have_written(kind, memory, tmp_path):
    """Three writers, lanes that wrap, and so many episodes that the tables of RAM and files grow in several parts."""
    plan = kind.plan(range(5), 70, longest=3)
    where = {"path": tmp_path / "rows"} if memory == "mapped" else {}
    storage = kind.make(lanes=5, steps=40, memory=memory, **where)
    writers = [storage.writer(lanes) for lanes in (2, range(4, 5), 2)]
    assert [writer.lanes for writer in writers] == [range(2), range(4, 5), range(2, 4)]
    for number, step in enumerate(plan):
        for writer in writers if number % 2 else reversed(writers):
            part = part_of(step, writer.lanes)
            if number % 3:
                writer.add(**part)
            else:
                writer.insert_transition(vocabulary(part))
        if number % 20 == 7:
            kind.check(storage.sample())
    storage.seed(0)
    assert_same_content(storage, twin_of(kind, plan, steps=40))


@pytest.mark.parametrize("kind", SHARED, ids=repr)
def test_parts_written_by_forked_processes_are_what_add_would_have_written(kind):
    plan = kind.plan(range(3), 70)
    storage = kind.make(lanes=3, steps=40, memory="shared")
    jobs = [(storage.writer(lanes), [part_of(step, lanes) for step in plan]) for lanes in (range(1), range(1, 3))]
    join(*[start("fork", write_plan, writer, part, 1) for writer, part in jobs])
    assert storage.lost_writers == 0
    assert_same_content(storage, twin_of(kind, plan, steps=40))


def test_parts_written_by_a_spawned_process_are_what_add_would_have_written():
    """One process for all classes: it has nothing but what was pickled."""
    plans = [kind.plan(range(2), 50) for kind in SHARED]
    storages = [kind.make(steps=40, memory="shared") for kind in SHARED]
    join(start("spawn", write_all, [(s.writer(), plan) for s, plan in zip(storages, plans, strict=True)]))
    for kind, storage, plan in zip(SHARED, storages, plans, strict=True):
        assert storage.lost_writers == 0
        assert_same_content(storage, twin_of(kind, plan, steps=40))


def test_lanes_of_different_lengths_and_masks():
    plan, mask = REPLAY.plan(range(3), 30), torch.tensor([True, False, True])
    storage, twin = REPLAY.make(lanes=3, memory="shared"), REPLAY.make(lanes=3, memory="ram")
    with storage.writer() as writer:
        for either in (writer, twin):
            for step in plan[:7]:
                either.add(**step)
            for step in plan[7:15]:
                either.add(**step, mask=mask)
    assert_same_content(storage, twin)


def test_len_and_sample_follow_what_is_added_elsewhere():
    """What another process has added is there at once, whole; nothing has to be told."""
    plan = REPLAY.plan([0], 20)
    storage = REPLAY.make(lanes=1, memory="shared")
    with storage.writer() as writer:
        other = pickle.loads(pickle.dumps(writer))
        for number, step in enumerate(plan, start=1):
            other.add(**step)
            assert (len(storage), storage.step, storage.full) == (number, number, False)
            assert int(step["actions"][0]) in storage.sample(2000).actions
        other.close()
    assert set(storage.sample(2000).actions.tolist()) == {int(step["actions"][0]) for step in plan}
    storage.close()


# ------------------------------------------------------------------------------------------------- while they write


@pytest.mark.parametrize("kind", [REPLAY, PRIORITIZED, SEQUENCE], ids=repr)
def test_what_is_saved_while_others_write_is_whole(kind, tmp_path):
    storage = kind.make(steps=24, memory="shared")
    with writing(storage, [kind.plan([lane], 300, seed=lane) for lane in range(2)]):
        for number in range(4):
            kind.check(storage.sample())
            storage.save(tmp_path / str(number))
            data = storage.get_all_buffer_data()
            assert data["masks"].all()
            loaded = Storage.load(tmp_path / str(number))
            assert len(loaded) == 48
            for _ in range(5):
                kind.check(loaded.sample())
            loaded.close()


@pytest.mark.parametrize("kind", SHARED, ids=repr)
def test_a_storage_that_is_emptied_while_others_write_holds_what_came_after(kind):
    storage = kind.make(steps=24, memory="shared")
    with writing(storage, [kind.plan([lane], 300, seed=lane) for lane in range(2)]):
        for _ in range(8):
            storage.sample()
            storage.reset()
            before = storage._sharing.control.limiter.inserted
            storage.set_rate_limit(full(before + 30))
            kind.check(storage.sample(), cut=True)
            assert 0 < len(storage) <= 48


def test_whole_data_are_of_one_moment():
    storage = REPLAY.make(steps=24, memory="shared")
    with writing(storage, [REPLAY.plan([0, 1], 300)]):
        storage.sample()
        for _ in range(20):
            data = storage.get_all_buffer_data()
            numbers, after = data["observations"].numpy(), data["next_observations"].numpy()
            assert numbers.shape == (24, 2, 6)
            going_on = numbers[:-1, :, 2] + 1 < numbers[:-1, :, 3]
            assert (numbers[1:][going_on] == after[:-1][going_on]).all()
            assert (after[..., 2] == numbers[..., 2] + 1).all()


# ------------------------------------------------------------------------------------------------- in one process


@pytest.mark.parametrize("memory", ["ram", "shared", "mapped"])
def test_batches_prepared_ahead_are_not_overwritten_by_a_writer(memory, tmp_path):
    """A thread gathers what was drawn, while the writer beside it writes the same rows."""
    kind = next(kind for kind in SHARED if kind.name == "n-step prepared ahead")
    where = {"path": tmp_path / "rows"} if memory == "mapped" else {}
    storage = kind.make(steps=12, memory=memory, batch_size=2048, **where)
    plan = kind.plan(range(2), 200)
    with storage.writer() as writer:
        for step in plan[:20]:
            writer.add(**step)
        for number in range(100):
            kind.check(storage.sample())
            for step in plan[20 + number % 170 :][:3]:
                writer.add(**step)
    storage.close()


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_closed_storage_lets_no_writer_add(memory):
    storage = REPLAY.make(memory=memory)
    writer = storage.writer()
    step = REPLAY.plan(range(2), 3)[0]
    writer.add(**step)
    storage.close()
    with pytest.raises(StorageClosedError, match=r"(?i)closed.*nothing was (written|changed)"):
        writer.add(**step)
    with pytest.raises(Exception, match="is closed"):
        storage.writer()


@pytest.mark.parametrize("kind", SHARED, ids=repr)
def test_what_does_not_fit_is_refused_and_nothing_is_written_or_counted(kind):
    plan = kind.plan(range(2), 12)
    storage = kind.make(memory="shared")
    twin = twin_of(kind, plan)
    with storage.writer() as writer:
        for step in plan[:6]:
            writer.add(**step)
        counted = storage._sharing.control.limiter.inserted
        for name, value in (
            ("rewards", [1.0, 2.0, 3.0]),
            ("actions", [0.5, 1]),
            ("terminateds", [True]),
            ("mask", [True, True, True]),
            ("infos", 3),
        ):
            with pytest.raises(InvalidInputError, match="Nothing was written"):
                writer.add(**{**plan[6], name: value})
        with pytest.raises(InvalidInputError, match="Nothing was written"):
            writer.insert_transition({**vocabulary(plan[6]), "rewards": None})
        assert storage._sharing.control.limiter.inserted == counted == 12
        for step in plan[6:]:
            writer.add(**step)
    assert_same_content(storage, twin)


# ------------------------------------------------------------------------------------------- writers of this process


@pytest.mark.parametrize(("memory", "behind"), each(["ram", "shared"], [13, 20, 33, 59]))
def test_only_windows_have_priorities_when_a_writer_ran_ahead(memory, behind):
    storage = SequenceReplayStorage(
        OBSERVATIONS, FIVE, "cpu", 20, 1, 8, sequence_length=4, alpha=1.0, memory=memory, autoreset="Disabled"
    )
    writer = storage.writer()
    for time in range(4 * behind):
        put(writer, time)
        if time % behind == behind - 1:
            batch = storage.sample()
            assert bool((batch.rows % 4 == 0).all())
            storage.update(batch.rows, torch.ones(8))  # refused if no window begins at one of them
    writer.close()


@pytest.mark.parametrize(
    ("kind", "memory"),
    each([ReplayStorage, PrioritizedReplayStorage, SequenceReplayStorage], ["ram", "shared"]),
)
def test_a_storage_made_in_inference_mode_can_be_emptied_outside(kind, memory):
    more = {"sequence_length": 2, "alpha": 0.5} if kind is SequenceReplayStorage else {}
    with torch.inference_mode():
        storage = kind(OBSERVATIONS, FIVE, "cpu", 20, 1, 4, memory=memory, **more)
        put(storage, 0)
    storage.reset()
    for time in range(60):
        put(storage, time)
    assert bool((storage.sample().observations >= 40).all())


def test_a_writer_of_this_process_does_not_write_what_is_being_prepared():
    storage = NStepReplayStorage(OBSERVATIONS, FIVE, "cpu", 16, 1, 64, num_workers=2, n_step=1)
    for time in range(16):
        put(storage, time)
    storage.sample()  # others are prepared behind it
    writer = storage.writer()
    for time in range(16, 200):
        put(writer, time)
        if time % 10 == 0:
            batch = storage.sample()
            assert torch.equal(batch.observations[:, :1], batch.rewards)
            assert bool((batch.rewards > time - 16).all())
    writer.close()
    storage.close()


def test_a_writer_in_a_thread_waits_while_a_batch_is_read():
    storage = ReplayStorage(OBSERVATIONS, FIVE, "cpu", 16, 1, 256, memory="ram")
    writer, done = storage.writer(), threading.Event()
    for time in range(16):
        put(writer, time)

    def act():
        for time in range(16, 1500):
            put(writer, time)
        done.set()

    thread = threading.Thread(target=act)
    thread.start()
    while not done.is_set():
        batch = storage.sample()  # was: IndexError, a row is not held
        assert torch.equal(batch.observations, batch.rewards.expand(256, 3))
    thread.join()


def test_saved_while_a_batch_ahead_was_overwritten(tmp_path):
    storage = NStepReplayStorage(OBSERVATIONS, FIVE, "cpu", 16, 1, 8, num_workers=2, memory="shared")
    for time in range(16):
        put(storage, time)
    storage.sample()
    storage._pipeline.prefetch.put(
        Drawn(torch.zeros(8, dtype=torch.int64)), 0, None
    )  # as a gather that a writer overtook
    storage.save(tmp_path / "saved")
    resumed = Storage.load(tmp_path / "saved")
    assert len(resumed) == 16
    resumed.sample()
    resumed.close()
    storage.close()
