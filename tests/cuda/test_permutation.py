"""Permutations from keys: every row once, another order for another key, every order as likely."""

from __future__ import annotations

import pytest
import torch

from rlstore.kernels.cuda.gather import permutation
from rlstore.kernels.portable import OPERATIONS as PORTABLE

KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]


def permuted(operation, keys: list[int], held: int, wanted: int, device) -> list[list[int]]:
    rows = torch.full((len(keys), wanted), -7, device=device)
    operation(torch.tensor(keys, device=device), held, rows)
    return rows.tolist()


ON_GPU = torch.cuda.is_available()  # where there is none, Triton's interpreter is slow


@pytest.mark.parametrize(
    "held", [1, 2, 3, 5, 17, 64, 65, 128, 129, 1000, 2500, 4097] if ON_GPU else [1, 3, 17, 65, 200]
)
def test_a_permutation_has_every_row_once_and_is_that_of_the_portable_version(held, device):
    keys = KEYS if ON_GPU or held == 17 else KEYS[-1:]
    found = permuted(permutation, keys, held, held, device)
    assert found == permuted(PORTABLE["permutation"], keys, held, held, "cpu")
    for rows in found:
        assert sorted(rows) == list(range(held))


@pytest.mark.parametrize("held", [5, 600, 70_000])
def test_fewer_rows_are_the_first_of_all(held, device):
    (everything,) = permuted(PORTABLE["permutation"], [99], held, held, "cpu")
    for wanted in (0, 1, 5, min(held, 520 if ON_GPU else 70)):
        assert permuted(permutation, [99], held, wanted, device) == [everything[:wanted]]


def test_keys_that_differ_in_one_bit_give_other_orders(device):
    keys = [77, 77 ^ 1, 77 ^ (1 << 31), 77 ^ (1 << 32), 77 - 2**63]
    found = permuted(permutation, keys, 100, 100, device)
    assert len({tuple(rows) for rows in found}) == 5


# What chi-square passes with a chance of one in ten thousand, by degrees of freedom.
LIMITS = {6: 27.9, 16: 44.9, 99: 160.1}


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("held", [7, 17, 100])
def test_every_row_is_as_likely_at_every_place(held):
    """By the portable version: it is the same permutation, and the interpreter is slow."""
    draws = 8_000
    keys = torch.randint(-(2**63), 2**63 - 1, (draws,), generator=torch.Generator().manual_seed(held))
    rows = torch.empty((draws, held), dtype=torch.int64)
    PORTABLE["permutation"](keys, held, rows)
    for place in (0, held // 2, held - 1):
        assert chi_square(torch.bincount(rows[:, place], minlength=held)) < LIMITS[held - 1]
    # And the row at one place says nothing of the distance to the row at the next.
    away = (rows[:, 1] - rows[:, 0]) % held
    assert chi_square(torch.bincount(away, minlength=held)[1:]) < LIMITS[held - 1]


def test_three_rows_come_in_all_six_orders_alike():
    keys = torch.randint(-(2**63), 2**63 - 1, (6000,), generator=torch.Generator().manual_seed(0))
    rows = torch.empty((6000, 3), dtype=torch.int64)
    PORTABLE["permutation"](keys, 3, rows)
    counts = torch.unique(rows, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert chi_square(counts) < LIMITS[6]
