"""The ring of episodes in Triton against the reference, in every byte of its memory."""

from __future__ import annotations

import pytest
import torch
from device_rings import LAYOUTS, DeviceTwins, Layout, Leaf


def summary(twins: DeviceTwins) -> tuple[list[int], list[int]]:
    written, begun = twins.truth.counters[:2]
    oldest = torch.maximum(begun, written - twins.layout.steps)
    ends = (written - oldest).cumsum(0)
    alike = bool((written == written[0]).all() and (oldest == oldest[0]).all())
    return ends.tolist(), [int(ends[-1]), int(alike), int(oldest[0]), int(twins.truth.counters[4].min())]


@pytest.mark.parametrize("name", LAYOUTS)
def test_writes_agree_in_every_byte(name, device):
    twins = DeviceTwins(LAYOUTS[name], device)
    for write in range(24):
        twins.write()
        twins.assert_same()
        ends, words = summary(twins)
        assert twins.mine.ring.ends.tolist() == ends
        assert twins.mine.ring.words.tolist()[:4] == words
        if write == 14:
            twins.clear()
    assert (int(twins.mine.ring.words[4]) > 0) == (twins.broken > 0)


def test_lanes_of_several_programs_agree(device):
    twins = DeviceTwins(Layout(37, 3, (Leaf(torch.float32, 1, 1, 3),), torch.int64, (), 0, 0, seed=6), device)
    twins.write(8)
    twins.assert_same()
    ends, words = summary(twins)
    assert twins.mine.ring.ends.tolist() == ends
    assert twins.mine.ring.words.tolist()[:4] == words
