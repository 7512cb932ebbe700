"""Mapped storages that are opened again after their process was killed. The long form is in tests/torture."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from gymnasium import spaces
from killed_storages import ADD, KINDS, UPDATE, judge_every_instant, kill_again_and_again

from rlstore import PrioritizedReplayStorage, ReplayStorage, SequenceReplayStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the observations of an environment"),
]
BOX = spaces.Box(-1e9, 1e9, (1,), np.float32)


@pytest.mark.parametrize("name", KINDS)
def test_what_a_killed_process_leaves_is_whole(name, tmp_path):
    kill_again_and_again(name, tmp_path, 2)


def test_every_instant_of_an_add_to_a_full_storage(tmp_path):
    # Two rows, four priorities and what belongs to them.
    assert judge_every_instant("prioritized", tmp_path, [ADD] * 28 + [UPDATE], [ADD]) > 15


def left_behind(make, body):
    """The storage that is found after another process did something with it, and was gone."""
    child = os.fork()
    if child == 0:
        try:
            body(make())
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    return make()


def step(number, ended=False):
    return [[float(number)]], [0], [float(number)], [ended], [False], {}, [[number + 1.0]]


def write_alone(storage, number, ended=False):
    """What an add does before anything follows the row."""
    flags = torch.tensor([ended]), torch.tensor([False])
    row = torch.tensor([[float(number)]]), torch.tensor([[number + 1.0]]), torch.tensor([0]), torch.tensor([1.0])
    assert storage._ring_of().writing_kernel().write((*row, *flags, None, None, None)) == -1


def test_a_row_whose_priority_was_not_written_gets_that_of_a_new_row(tmp_path):
    def make():
        return PrioritizedReplayStorage(
            BOX, spaces.Discrete(2), storage_size=8, alpha=1.0, memory="mapped", path=tmp_path
        )

    def body(storage):
        for number in range(3):
            storage.add(*step(number))
        storage.update(torch.tensor([0, 1, 2]), torch.tensor([0.5, 4.0, 0.0]))
        write_alone(storage, 3)

    storage = left_behind(make, body)
    assert storage.priorities([0, 1, 2, 3]).tolist() == [0.5, 4.0, 0.0, 4.0]  # that of row 2 was set to 0
    assert storage.draw_total == 8.5
    storage.close()


def test_a_row_does_not_inherit_the_priority_of_the_one_that_it_overwrote(tmp_path):
    def make():
        return PrioritizedReplayStorage(
            BOX, spaces.Discrete(2), storage_size=4, alpha=1.0, memory="mapped", path=tmp_path
        )

    def body(storage):
        for number in range(4):
            storage.add(*step(number))
        storage.update(torch.arange(4), torch.tensor([0.25, 1.0, 2.0, 3.0]))
        write_alone(storage, 4)

    storage = left_behind(make, body)
    assert storage.priorities([1, 2, 3, 4]).tolist() == [1.0, 2.0, 3.0, 3.0]
    storage.close()


@pytest.mark.parametrize("across", [False, True])
def test_a_window_whose_priority_was_not_written_gets_that_of_a_new_one(across, tmp_path):
    def make():
        return SequenceReplayStorage(
            BOX, spaces.Discrete(2), storage_size=4, sequence_length=2, overlap=1, across_episodes=across, alpha=1.0,
            memory="mapped", path=tmp_path,
        )  # fmt: skip

    def body(storage):
        for number in range(4):
            storage.add(*step(number))
        storage.update(torch.tensor([0, 1, 2]), torch.tensor([8.0, 2.0, 0.0]))
        write_alone(storage, 4)  # drops the window at 0, which had the largest priority, and adds the one at 3

    storage = left_behind(make, body)
    assert storage.priorities([1, 2, 3]).tolist() == [2.0, 0.0, 2.0]
    assert storage.draw_total == 4.0
    for _ in range(5):
        rows = storage.sample(16).rows
        assert set(rows.tolist()) == {1, 3}
    storage.update(rows, torch.ones(16))
    assert storage.stale_updates == 0
    storage.close()


def test_a_row_that_was_being_overwritten_is_not_held(tmp_path):
    """The next observation of a new row is written where the oldest row is, before the new row counts."""

    def make():
        return ReplayStorage(BOX, spaces.Discrete(2), storage_size=4, memory="mapped", path=tmp_path)

    def body(storage):
        for number in range(6):
            storage.add(*step(number))
        ring = storage._ring_of()
        ring.current[0] = -2  # as in the middle of a write
        ring.blocks["observations"][0, 7 % 5] = 99.0

    storage = left_behind(make, body)
    assert storage.get_all_buffer_data()["observations"].flatten().tolist() == [3.0, 4.0, 5.0]
    for number in range(6, 12):
        storage.add(*step(number))
    assert storage.get_all_buffer_data()["observations"].flatten().tolist() == [8.0, 9.0, 10.0, 11.0]
    storage.close()
