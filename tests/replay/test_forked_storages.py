"""Storages in a forked child: memory of the parent is left alone, a copy in RAM can be used."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
import threading

import pytest
import torch
from forked_work import in_child
from gymnasium import spaces

from rlstore import (
    DistributedStorage,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
BOX, MOVES = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(9)
KINDS = {
    "replay": lambda **given: ReplayStorage(BOX, MOVES, storage_size=16, batch_size=64, seed=0, **given),
    "prioritized": lambda **given: PrioritizedReplayStorage(BOX, MOVES, storage_size=16, batch_size=64, **given),
    "sequence": lambda **given: SequenceReplayStorage(
        BOX, MOVES, storage_size=16, batch_size=64, sequence_length=2, **given
    ),
}


def play(storage, steps, begin=0):
    """Steps of one long episode; the observation is the number of the step, and so is the reward."""
    for step in range(begin, begin + steps):
        storage.add([[float(step)]], [0], [float(step)], [False], [False], {}, [[step + 1.0]])


def rewards_of(storage):
    return storage.get_all_buffer_data()["rewards"].flatten().tolist()


def refused(*calls):
    """The errors that the calls raise, in words."""
    told = []
    for call in calls:
        with pytest.raises(InvalidInputError) as error:
            call()
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("memory", ["shared", "mapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_does_not_change_the_memory_of_its_parent(kind, memory, tmp_path):
    where = {"path": tmp_path / "rows"} if memory == "mapped" else {}
    storage = KINDS[kind](memory=memory, **where)
    play(storage, 20)
    data = storage.get_all_buffer_data()

    def child():
        before = len(storage)
        told = refused(
            lambda: play(storage, 1, 100),
            lambda: storage.insert_transition({name: value[0] for name, value in data.items() if name != "masks"}),
            lambda: storage.insert_data_slice(data),
            lambda: storage.update(torch.tensor([10]), torch.tensor([3.0])),
            lambda: storage.after_gradients({"rows": torch.tensor([10])}, {"priorities": torch.tensor([3.0])}),
            storage.reset,
            storage.writer,
            lambda: storage.set_rate_limit(None),
            lambda: storage.update_storage_parameter("batch_size", 3),
            lambda: storage.save(tmp_path / "saved"),
            storage.get_all_buffer_data,
            lambda: copy.deepcopy(storage),
            lambda: pickle.dumps(storage),
        )
        assert repr(storage)
        assert (storage.lost_writers, storage.rate_limit) == (0, None)
        storage.seed(3)
        storage.close()
        return before, told

    held, told = in_child(child)
    assert held == 16
    assert all(
        f"process {os.getpid()}" in text and "writer()" in text and "Nothing was changed" in text for text in told
    )
    assert rewards_of(storage) == list(range(4, 20))
    play(storage, 1, 20)  # the child closed nothing of it
    assert rewards_of(storage) == list(range(5, 21))
    assert set(storage.sample().rewards.flatten().tolist()) <= set(range(5, 21))
    storage.close()


def test_a_handle_adds_in_the_child():
    storage = KINDS["replay"](memory="shared")
    writer = storage.writer()
    in_child(lambda: (play(writer, 3), writer.close())[1])
    assert rewards_of(storage) == [0.0, 1.0, 2.0]
    storage.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_in_shared_memory_at_the_fork_is_sampled_until_the_parent_changes_it(kind):
    storage = KINDS[kind](memory="shared", num_workers=2)
    play(storage, 20)
    storage.sample()
    changed = threading.Event()
    ours, theirs = os.pipe(), os.pipe()

    def child():
        sampled = {number for _ in range(4) for number in storage.sample().rewards.flatten().tolist()}
        os.write(ours[1], b".")
        os.read(theirs[0], 1)
        assert len(storage) == 16
        return sampled, refused(storage.sample, lambda: next(storage.generate_batches(1)))

    def change():
        os.read(ours[0], 1)
        play(storage, 100, 20)  # everything is overwritten
        os.write(theirs[1], b".")
        changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    sampled, told = in_child(child)
    thread.join()
    assert sampled <= set(range(4, 20))
    assert len(sampled) > 4
    assert all("may change the shared memory" in text and "Nothing was drawn" in text for text in told)
    assert changed.is_set()
    storage.close()
    for end in (*ours, *theirs):
        os.close(end)


def test_mapped_memory_is_not_sampled_in_the_child(tmp_path):
    storage = KINDS["replay"](memory="mapped", path=tmp_path / "rows")
    play(storage, 20)
    (told,) = in_child(lambda: refused(storage.sample))
    assert f"process {os.getpid()} may change the mapped memory" in told
    storage.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_storage_in_ram_is_the_childs_own(kind, num_workers):
    """With batches that the parent's thread has prepared, or is preparing."""
    storage = KINDS[kind](num_workers=num_workers)
    play(storage, 20)
    storage.sample()

    def child():
        play(storage, 3, 20)
        sampled = [storage.sample().rewards.flatten().tolist() for _ in range(5)]
        copied = copy.deepcopy(storage)
        storage.reset()
        return rewards_of(copied), set(sampled[-1]), len(storage)

    held, sampled, left = in_child(child)
    assert held == list(range(7, 23))
    assert sampled <= set(range(7, 23))
    assert left == 0
    assert rewards_of(storage) == list(range(4, 20))
    storage.close()


def test_batches_that_were_prepared_before_the_fork_are_served_although_their_rows_are_overwritten():
    storage = KINDS["replay"](num_workers=2)
    play(storage, 20)
    storage.sample()
    play(storage, 16, 20)

    def sample():
        return [storage.sample().rewards.flatten().tolist() for _ in range(4)]

    told = in_child(sample)
    assert told == sample()
    assert set(told[0]) <= set(range(4, 20))  # as they were when it was drawn
    assert set(told[3]) <= set(range(20, 36))
    storage.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["replay", "prioritized"])
def test_a_fork_beside_threads_that_add_and_sample_leaves_the_child_a_whole_storage(kind, num_workers):
    """Wherever the threads are at that moment: no row of the child is half written, and no lock of it is held."""
    storage, stop = KINDS[kind](num_workers=num_workers), threading.Event()

    def add(step):
        storage.add([[float(step)]], [0], [float(step)], [True], [False], {}, [[step + 0.5]])

    def check(batch):
        assert batch.observations.flatten().tolist() == batch.rewards.flatten().tolist()
        assert (batch.next_observations - batch.observations).flatten().tolist() == [0.5] * 64

    def keep(work):
        steps = itertools.count(1)
        while not stop.is_set():
            work(next(steps))

    def child():
        signal.alarm(60)  # a child that hangs is an error
        for step in range(-40, -20):
            add(step)
            check(storage.sample())
        check(copy.deepcopy(storage).sample())
        return rewards_of(storage)

    add(0)
    threads = [
        threading.Thread(target=keep, args=(work,))
        for work in (add, lambda step: check(storage.sample()), lambda step: len(storage))
    ]
    for thread in threads:
        thread.start()
    try:
        told = [in_child(child) for _ in range(4)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert told == [list(range(-36, -20))] * 4
    check(storage.sample())
    storage.close()


def test_episodes_on_disk_are_the_parents(tmp_path):
    storage = NStepReplayStorage(BOX, MOVES, storage_size=16, num_workers=0, save_snapshot=True, snapshot_dir=tmp_path)

    def end(step):
        storage.add([[float(step)]], [0], [float(step)], [True], [False], {}, [[step + 1.0]])

    end(1)
    files = sorted(os.listdir(tmp_path))
    assert in_child(lambda: (end(2), len(storage))[1]) == 2
    assert sorted(os.listdir(tmp_path)) == files
    end(3)
    storage.close()
    again = NStepReplayStorage(BOX, MOVES, storage_size=16, num_workers=0, save_snapshot=True, snapshot_dir=tmp_path)
    assert rewards_of(again) == [1.0, 3.0]
    again.close()


def test_rollouts_that_the_parent_has_begun_are_not_continued_by_the_child():
    storage = DistributedStorage(BOX, MOVES, num_steps=3, num_storages=4, batch_size=1)

    def insert(step):
        flags = {"terminated": torch.tensor([False]), "truncated": torch.tensor([False])}
        seen = {"observations": torch.tensor([[step]]), "next_observations": torch.tensor([[step + 1.0]])}
        storage.insert_transition({**seen, "actions": torch.tensor([0]), "rewards": torch.tensor([step]), **flags})

    insert(0.0)
    in_child(lambda: [insert(10.0 + step) for step in range(3)])
    insert(1.0)
    insert(2.0)
    observed = storage.get_all_buffer_data()["observations"].flatten().tolist()
    assert sorted(observed) == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    storage.close()
