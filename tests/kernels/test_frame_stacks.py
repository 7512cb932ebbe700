"""Frame stacks of every layout, native against portable: long enough for registers, blocks and non-temporal stores."""

from __future__ import annotations

import pytest
import torch
from replay_rings import Layout, Leaf, Twins, as_bytes

from rlstore.kernels import kernel
from rlstore.kernels.portable import OPERATIONS as PORTABLE
from rlstore.kernels.protocol import Part

# Frames one after another; channels last with one value to a pixel, and with three; pieces too long to be interleaved.
SHAPES = ((1, 2100), (2101, 1), (701, 3), (3, 700))
DTYPES = (torch.uint8, torch.int16, torch.float32)


@pytest.mark.parametrize("stack", [1, 2, 3, 4, 5])
def test_long_stacks_agree(stack):
    """Episodes that begin with repeated, zero and other frames, and that break."""
    leaves = tuple(Leaf(dtype, stack, *shape) for dtype in DTYPES for shape in SHAPES)
    twins = Twins(Layout(2, 8, leaves, torch.int64, (), 0, 0, seed=stack, trouble=(0.2, 0.15, 0.1, 0.4)))
    outcomes = {outcome for _ in range(24) for outcome in twins.write()}
    assert outcomes - {-7} == ({-1, -2, -4} if stack == 1 else {-1, -2, -3, -4})
    twins.assert_same()
    parts = [(part, k) for part in (Part.OBSERVATION, Part.NEXT_OBSERVATION) for k in range(len(leaves))]
    requests = tuple((int(part), k, as_float, leaves[k].shape) for part, k in parts for as_float in (False, True))
    rows = twins.native.held().repeat(5)[:70]
    mine = kernel("ReplayGather", "cpu")(twins.native.ring, requests, 2, 0.9)
    truth = PORTABLE["ReplayGather"](twins.portable.ring, requests, 2, 0.9).gather(rows, None)
    for count in (70, 3):  # with non-temporal stores, and without
        for result, expected in zip(mine.gather(rows[:count], None), truth, strict=True):
            assert torch.equal(as_bytes(result), as_bytes(expected[:count]))
