"""gather_slots: the rollouts of some slots side by side, the native version against the portable version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_inputs import DTYPES, assert_guards_whole, covers, guarded, native, random_tensor

from rlstore.engine.batches.gather import gather_slots
from rlstore.kernels.portable import OPERATIONS as PORTABLE


def with_gap(block: torch.Tensor, gap: int) -> torch.Tensor:
    """The same block, each slot followed by a gap."""
    held = torch.zeros((len(block), block[0].numel() + gap), dtype=block.dtype)
    slots = held[:, : block[0].numel()].view(block.shape) if block.numel() else block
    slots.copy_(block)
    return slots


@covers("gather_slots")
@pytest.mark.parametrize("width", [0, 1, 2, 3, 5, 8, 17, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_slots_agrees(dtype, width):
    rng = np.random.default_rng(width)
    for slots, rows, chosen in [(1, 1, [0]), (4, 3, [3, 0]), (6, 81, [5, 2, 2, 0, 1]), (3, 2, [])]:
        source = with_gap(random_tensor(rng, (slots, rows, width), dtype), 7)
        other = random_tensor(rng, (slots + 1, 2), torch.float32)
        numbers = torch.tensor(chosen, dtype=torch.int64)
        (out, whole), (second, second_whole) = (
            guarded((rows, len(chosen), width), dtype),
            guarded((2, len(chosen)), torch.float32),
        )
        native("gather_slots")((source, other), numbers, (out, second))
        expected, expected_second = torch.empty_like(out), torch.empty_like(second)
        PORTABLE["gather_slots"]((source, other), numbers, (expected, expected_second))
        assert out.tolist() == expected.tolist()
        assert out.tolist() == [[source[slot, t].tolist() for slot in chosen] for t in range(rows)]
        assert torch.equal(second, expected_second)
        assert_guards_whole(whole)
        assert_guards_whole(second_whole)


@pytest.mark.parametrize("width", [1023, 1024, 4097, 28224])
def test_large_rows_go_past_the_cache_and_are_the_same(width):
    source = torch.from_numpy(np.random.default_rng(width).integers(0, 256, (5, 300, width), dtype=np.uint8))
    numbers = torch.tensor([4, 0, 3, 3])
    out, whole = guarded((300, 4, width), torch.uint8)
    native("gather_slots")((source,), numbers, (out,))
    assert torch.equal(out, source[numbers].transpose(0, 1))
    assert_guards_whole(whole)


def test_the_engine_makes_the_outputs():
    source = torch.arange(24).view(4, 3, 2)
    (joined,) = gather_slots((source,), [2, 1])
    assert joined.tolist() == [[[12, 13], [6, 7]], [[14, 15], [8, 9]], [[16, 17], [10, 11]]]
