"""A block whose memory moves under the same tensor, as when a process shares it, is still the one that is written."""

import pytest
import torch
import torch.multiprocessing
from rollout_ids import assert_equal, build, fill, snapshot


def move_to_shared_memory(storage):
    storage.rewards.share_memory_()
    storage.observations.share_memory_()


def send_through_a_queue(storage):
    torch.multiprocessing.get_context("spawn").SimpleQueue().put(storage.rewards)


def swap_the_data(storage):
    storage.rewards.data = storage.rewards.data.clone()


@pytest.mark.parametrize("move", [move_to_shared_memory, send_through_a_queue, swap_the_data])
def test_the_next_steps_are_written_where_the_block_is_now(move):
    storage = fill(build())
    move(storage)
    storage.clear()
    fill(storage, offset=500)
    assert_equal(snapshot(storage), snapshot(fill(build(), offset=500)))
