"""What has gone wrong with priorities elsewhere, and must not here. Each test is named for what broke."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from nstep_steps import fill, make_step
from replay_kinds import KINDS, make_prioritized

# ------------------------------------------------------------------------------------- 7: priorities


def served_priorities(storage):
    """With beta 1 the weight of a row is the smallest priority drawn, over its own."""
    batch = storage.sample()
    weights = dict(zip(batch.rows.tolist(), batch.weights.flatten().tolist(), strict=True))
    return {row: 1 / weight for row, weight in weights.items()}


def test_priorities_are_raised_to_alpha_once():
    for alpha, ratio in ((0.5, 2.0), (1.0, 4.0), (0.0, 1.0)):
        storage = make_prioritized(alpha=alpha)
        fill(storage, 2)
        storage.update([0, 1], [1.0, 4.0])
        assert served_priorities(storage) == pytest.approx({0: 1, 1: ratio})


def test_beta_rises_to_one_over_its_batches_and_stays_there():
    storage = make_prioritized(beta=0.4, beta_steps=4)
    fill(storage, 3)
    found = []
    for _ in range(6):
        found.append(storage.current_beta)
        storage.sample()
    assert found == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0, 1.0])
    assert make_prioritized(beta=0.4).current_beta == 0.4


def test_a_priority_is_not_initialised_twice():
    """A new row has the largest priority that is held, as it stands: not raised to alpha once more, not 1."""
    storage = make_prioritized(alpha=0.5)
    fill(storage, 1)
    storage.update([0], [16.0])
    fill(storage, 1, first=1)
    assert served_priorities(storage) == pytest.approx({0: 1, 1: 1})
    storage.update([1], [1.0])
    fill(storage, 1, first=2)
    assert served_priorities(storage) == pytest.approx({0: 4, 1: 1, 2: 4})


def test_the_largest_priority_is_not_one_that_is_gone():
    storage = make_prioritized(steps=3)
    fill(storage, 3)
    storage.update([0, 1, 2], [100.0, 2.0, 1.0])
    fill(storage, 1, first=3)  # row 0 and its 100 give way to row 3, while 100 is still the largest or just gone
    storage.update([3], [1.0])
    fill(storage, 1, first=4)  # over row 1
    storage.update([4], [3.0])
    fill(storage, 1, first=5)  # over row 2; held: 1 and 3
    assert served_priorities(storage) == pytest.approx({3: 1, 4: 3, 5: 3})


@pytest.mark.parametrize("num_envs", [1, 3])
def test_draws_follow_the_priorities_of_a_plain_list_after_many_updates(num_envs):
    """One draw in each equal part of the total: a row is drawn as often as its share says, but for its two edges."""
    steps, generator = 37, torch.Generator().manual_seed(0)
    storage = make_prioritized(num_envs, steps, batch_size=5000)
    plain = {}
    for step in range(100):
        storage.add(**make_step(step, num_envs))
        new = step * num_envs + torch.arange(num_envs)
        for row in new.tolist():
            plain.pop(row - steps * num_envs, None)
        held = torch.tensor([*plain, *new.tolist()])
        rows = torch.cat([new, held[torch.randint(len(held), (8,), generator=generator)]]).unique()
        values = torch.rand(len(rows), generator=generator) * 10
        storage.update(rows, values)
        plain.update(zip(rows.tolist(), values.tolist(), strict=True))
    batch = storage.sample()
    total, counts = sum(plain.values()), Counter(batch.rows.tolist())
    assert counts.keys() <= plain.keys()
    for row, priority in plain.items():
        assert abs(counts[row] - 5000 * priority / total) <= 2, row
    smallest = min(plain[row] for row in counts)
    for row, weight in zip(batch.rows.tolist(), batch.weights.flatten().tolist(), strict=True):
        assert weight == pytest.approx(smallest / plain[row], rel=1e-3)


def test_the_sum_of_priorities_does_not_drift():
    """A million updates between 1e-6 and 1e6, then all equal: the draws are those of equal priorities."""
    storage = make_prioritized(steps=64, batch_size=640)
    fill(storage, 64)
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(64).repeat(250)
    for _ in range(63):
        storage.update(rows, 10 ** (torch.rand(len(rows), generator=generator) * 12 - 6))
    storage.update(torch.arange(64), torch.full((64,), 0.1))
    counts = Counter(storage.sample().rows.tolist())
    assert set(counts.values()) == {10}
    assert set(storage.sample().weights.flatten().tolist()) == {1.0}


def test_of_a_row_that_is_given_twice_the_last_priority_stands():
    storage = make_prioritized()
    fill(storage, 2)
    storage.update([0, 1, 0, 0], [9.0, 1.0, 5.0, 2.0])
    assert served_priorities(storage) == pytest.approx({0: 2, 1: 1})


# ------------------------------------------------------------------------------------- 8 and 9: eviction


def test_eviction_does_not_crash_prioritized_replay():
    """Every batch's priorities come back while the rows are being written over, for sequences too."""
    for kind in KINDS:
        if not kind.name.startswith("prioritized"):
            continue
        storage = kind.make(num_envs=2, steps=5)
        for step in range(60):
            storage.add(**kind.step(step, terminated=(0,) if step % 7 == 6 else ()))
            if step < 3:
                continue
            batch = storage.sample()
            assert (batch.rows // 2 > step - 5).all()
            storage.update(batch.rows, 0.01 + torch.rand(len(batch.rows)) * (step % 3))


def test_priority_of_a_row_that_was_written_over_is_dropped_and_counted():
    storage = make_prioritized(steps=3)
    fill(storage, 3)
    rows = storage.sample().rows.unique()
    assert rows.tolist() == [0, 1, 2]
    assert storage.stale_updates == 0
    fill(storage, 2, first=3)  # over rows 0 and 1
    storage.update(rows, torch.tensor([100.0, 100.0, 4.0]))
    assert storage.stale_updates == 2
    # Rows 3 and 4 keep what they had: nothing was written onto the steps that took their places.
    assert served_priorities(storage) == pytest.approx({2: 4, 3: 1, 4: 1})
    storage.update([0, 0, 3], [7.0, 7.0, 2.0])
    assert storage.stale_updates == 4
    assert served_priorities(storage) == pytest.approx({2: 4, 3: 2, 4: 1})


def test_rows_from_before_a_reset_are_stale():
    storage = make_prioritized(steps=4)
    fill(storage, 3)
    old = storage.sample().rows.unique()
    storage.reset()
    fill(storage, 2, first=10)
    new = storage.sample().rows.unique()
    assert not set(old.tolist()) & set(new.tolist())
    storage.update(old, torch.full((3,), 50.0))
    assert storage.stale_updates == 3
    assert set(served_priorities(storage).values()) == {1.0}
