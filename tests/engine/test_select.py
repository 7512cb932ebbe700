"""Which rows an epoch takes: none twice, those left over at random, the same under the same seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstore.engine.batches.select import epoch_rows


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 300), st.data(), st.integers(0, 2**62))
def test_no_row_comes_twice(held, data, seed):
    wanted = data.draw(st.integers(0, held))
    rows = epoch_rows(held, wanted, seeded(seed))
    assert rows.dtype == torch.int64
    assert tuple(rows.shape) == (wanted,)
    assert len(set(rows.tolist())) == wanted
    assert all(0 <= row < held for row in rows.tolist())


def test_all_rows_are_a_permutation():
    assert sorted(epoch_rows(50, 50, seeded()).tolist()) == list(range(50))


def test_any_row_may_be_among_those_left_out():
    """10 rows, 9 wanted: over 400 draws each row is left out about 40 times, and none fewer than 15."""
    generator = seeded(1)
    left_out = [0] * 10
    for _ in range(400):
        (missing,) = set(range(10)) - set(epoch_rows(10, 9, generator).tolist())
        left_out[missing] += 1
    assert sum(left_out) == 400
    assert min(left_out) >= 15


def test_every_row_may_come_first():
    generator = seeded(2)
    firsts = [int(epoch_rows(8, 8, generator)[0]) for _ in range(400)]
    assert min(firsts.count(row) for row in range(8)) >= 20


def test_a_seed_gives_the_same_rows_again_and_another_seed_others():
    again = [epoch_rows(100, 90, seeded(5)).tolist() for _ in range(2)]
    assert again[0] == again[1]
    assert epoch_rows(100, 90, seeded(6)).tolist() != again[0]


def test_one_generator_gives_other_rows_each_time():
    generator = seeded(5)
    assert epoch_rows(100, 90, generator).tolist() != epoch_rows(100, 90, generator).tolist()


def test_only_the_given_generator_is_used():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    epoch_rows(100, 90, seeded())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wanted", [0, 3, 10])
def test_in_order_the_last_are_left_out_and_nothing_is_drawn(wanted):
    generator = seeded()
    before = generator.get_state()
    assert epoch_rows(10, wanted, generator, shuffle=False).tolist() == list(range(wanted))
    assert torch.equal(generator.get_state(), before)
