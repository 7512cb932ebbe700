"""What the tests of the kernels share: random tensors, guarded memory, and the marks of what is compared."""

from __future__ import annotations

import math

import numpy as np
import torch

from rlstore.kernels import kernel

COVERED: set[str] = set()

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
WIDTHS = [0, 1, 2, 3, 5, 7, 8, 12, 17, 48, 200]
LANES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65]


def covers(*operations: str):
    """Marks a test as the comparison of these operations; test_table.py reads the marks."""
    COVERED.update(operations)
    return lambda test: test


def native(operation: str):
    return kernel(operation, "cpu")


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor, poisoned, in the middle of a byte buffer whose both ends must stay as they are."""
    count = math.prod(shape) * dtype.itemsize
    whole = torch.full((64 + count + 64,), 0xA5, dtype=torch.uint8)
    return whole[64 : 64 + count].view(dtype).view(shape), whole


def assert_guards_whole(whole: torch.Tensor) -> None:
    assert bool((whole[:64] == 0xA5).all())
    assert bool((whole[-64:] == 0xA5).all())


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern for integers, ordinary numbers for floats, so that a swapped row cannot pass."""
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    if dtype.is_floating_point:
        return torch.from_numpy(rng.normal(size=shape) * 100).to(dtype)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
