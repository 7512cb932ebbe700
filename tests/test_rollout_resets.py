"""The reset steps of a rollout whose flags the host does not know, as those on a device: they are counted then."""

from __future__ import annotations

import torch

from rlstore.engine.rows.ring import Column, Ring
from rlstore.engine.rows.schema import Field
from rlstore.rollout.resets import BLOCK, ResetSteps


def ring_of(*steps):
    """A ring of three environments, in which these ends were written."""
    field = Field(BLOCK, (), torch.uint8, "a test", is_flag=True)
    ring = Ring([Column(field, BLOCK, lead=1)], 4, 3, torch.device("cpu"))
    for ended in steps:
        ring.write((torch.tensor(ended, dtype=torch.uint8),))
    return ring


def test_flags_that_are_not_known_are_counted_in_the_block():
    ring, resets = ring_of([1, 0, 0], [0, 1, 1], [0, 0, 0]), ResetSteps(3)
    for t in range(3):
        resets.follow(ring.blocks[BLOCK][t + 1], -1)
    assert resets.due_count == -1
    assert resets.count(ring) == 3
    assert resets.other_rows(ring).tolist() == [0, 1, 2, 4, 5, 6]


def test_what_is_not_known_does_not_spoil_the_next_rollout():
    ring, resets = ring_of([1, 0, 0], [0, 1, 1]), ResetSteps(3)
    for ended, count in (([1, 0, 0], -1), ([0, 1, 1], 2)):
        resets.follow(torch.tensor(ended, dtype=torch.uint8), count)
    assert resets.count(ring) == 1
    resets.carry(ring)
    ring.restart()
    assert (resets.count(ring), resets.due_count) == (0, 2)
    ring.write((torch.zeros(3, dtype=torch.uint8),))
    resets.follow(torch.zeros(3, dtype=torch.uint8), 0)
    assert resets.count(ring) == 2
    assert resets.other_rows(ring).tolist() == [0]


def test_without_reset_steps_there_is_nothing_to_leave_out():
    ring, resets = ring_of([0, 0, 0]), ResetSteps(3)
    resets.follow(torch.zeros(3, dtype=torch.uint8), 0)
    assert resets.other_rows(ring) is None
