"""Gathering on CUDA against the portable version: every dtype, every width, and mini-batches in memory of their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlstore.kernels.cuda import gather
from rlstore.kernels.portable import OPERATIONS as PORTABLE

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.uint32,
]
GUARD = 64


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    if dtype.is_floating_point:
        return torch.from_numpy(rng.normal(size=shape) * 100).to(dtype)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape) if raw.size else torch.empty(shape, dtype=dtype)


def guarded(count: int, dtype: torch.dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat memory, poisoned, with a guard at both ends."""
    nbytes = count * dtype.itemsize
    whole = torch.full((GUARD + nbytes + GUARD,), 0xA5, dtype=torch.uint8, device=device)
    return whole[GUARD : GUARD + nbytes].view(dtype), whole


def assert_whole(whole: torch.Tensor) -> None:
    assert bool((whole[:GUARD] == 0xA5).all())
    assert bool((whole[-GUARD:] == 0xA5).all())


# Every dtype as it is; on a GPU every one converted, too.
KINDS = [(dtype, False) for dtype in DTYPES]
KINDS += [
    (dtype, True) for dtype in (DTYPES if torch.cuda.is_available() else [torch.bool, torch.uint8, torch.bfloat16])
]


@pytest.mark.parametrize(("dtype", "convert"), KINDS, ids=str)
def test_every_dtype_and_width(dtype, convert, device):
    rng = np.random.default_rng(0)
    shapes = [(), (0,), (1,), (3,), (2, 8), (33,), *([(1500,)] if torch.cuda.is_available() else []), (2100,)]
    sources = [random_tensor(rng, (5, 7, *shape), dtype) for shape in shapes]
    rows = torch.from_numpy(rng.integers(0, 35, 19))
    rows[:2] = torch.tensor([0, 34])
    held = torch.float32 if convert else dtype
    outs = [guarded(19 * source.shape[2:].numel(), held, device) for source in sources]
    targets = tuple(out.view(19, *source.shape[2:]) for (out, _), source in zip(outs, sources, strict=True))
    gather.gather(tuple(source.to(device) for source in sources), rows.to(device), targets)
    for source, target, (_, whole) in zip(sources, targets, outs, strict=True):
        expected = torch.stack([source[row // 7, row % 7] for row in rows.tolist()]).to(held)
        assert target.cpu().tolist() == expected.tolist()
        assert_whole(whole)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_programs_cover_all_rows_of_a_field(itemsize):
    for width in (*range(1, 300), 1000, 1023, 1024, 1025, 2047, 2048, 2049, 28224):
        rows, parts, columns = gather.programs_of(width, itemsize)
        assert rows & (rows - 1) == columns & (columns - 1) == 0
        assert rows == 1 or parts == 1
        assert width <= parts * columns < width + max(width, columns)
        assert rows * columns * itemsize <= max(gather._PROGRAM_BYTES, columns * itemsize)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_rows_and_few(count, device):
    source = torch.arange(12.0, device=device).view(2, 2, 3)
    out = torch.full((count, 3), -1.0, device=device)
    gather.gather((source,), torch.tensor([3, 0], device=device)[:count], (out,))
    assert out.tolist() == [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]][:count]


def test_nothing_is_gathered_of_nothing(device):
    gather.gather((), torch.arange(3, device=device), ())


@pytest.mark.parametrize(("batches", "size"), [(1, 5), (3, 1), (4, 11), (2, 16)])
def test_mini_batches_lie_in_memory_of_their_own(batches, size, device):
    """Three fields in float32, of which one is converted, and two in uint8, of which one is wide."""
    rng = np.random.default_rng(size)
    kinds = [((3,), torch.float32), ((2, 2), torch.uint8), ((1,), torch.float16), ((), torch.float32)]
    kinds.append(((2051,), torch.uint8))
    places, dtypes = (0, 1, 0, 0, 1), (torch.float32, torch.uint8)
    sources = tuple(random_tensor(rng, (6, 9, *shape), dtype) for shape, dtype in kinds)
    rows = torch.from_numpy(rng.permutation(54)[: batches * size])
    counts = [
        sum(-(-size * sources[f].shape[2:].numel() // 16) * 16 for f in range(5) if places[f] == p) for p in (0, 1)
    ]
    mine = [
        [guarded(count, dtype, device) for _ in range(batches)] for count, dtype in zip(counts, dtypes, strict=True)
    ]
    truth = [
        [guarded(count, dtype, "cpu") for _ in range(batches)] for count, dtype in zip(counts, dtypes, strict=True)
    ]
    gather.gather_batches(
        tuple(source.to(device) for source in sources),
        rows.to(device),
        places,
        [[piece for piece, _ in of_batches] for of_batches in mine],
    )
    PORTABLE["gather_batches"](sources, rows, places, [[piece for piece, _ in of_batches] for of_batches in truth])
    for ours, theirs in zip(mine, truth, strict=True):
        for (_, whole), (_, expected) in zip(ours, theirs, strict=True):
            assert whole.tolist() == expected.tolist()
    # And by hand, for one field of one mini-batch.
    last = mine[0][-1][0][: size * 3].view(size, 3)
    expected = [sources[0][row // 9, row % 9].tolist() for row in rows[-size:].tolist()]
    assert last.tolist() == expected
