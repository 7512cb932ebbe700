"""Prioritized replay: which priorities and rows are refused, and that a refused update changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nstep_steps import fill
from replay_kinds import (
    PRIORITIZED,
    assert_same,
    assert_same_draws,
    assert_tells,
    assert_untouched,
    make_prioritized,
    state,
    twins,
)

from rlstore import NotReadyError

NAN, INF = float("nan"), float("inf")

# ------------------------------------------------------------------------------------------------- priorities

BAD_PRIORITIES = [
    ([1.0, NAN, 1.0], "nan"),
    ([1.0, -0.5, 1.0], "-0.5"),
    ([1.0, INF, 1.0], "inf"),
    ([1.0, -INF, 1.0], "inf"),
]


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
@pytest.mark.parametrize(("priorities", "shown"), BAD_PRIORITIES, ids=[shown for _, shown in BAD_PRIORITIES])
@pytest.mark.parametrize("form", [torch.tensor, np.array, list, lambda p: torch.tensor(p).unsqueeze(-1)])
def test_a_bad_priority_is_named_with_its_row_and_nothing_changes(kind, priorities, shown, form):
    storage, twin = twins(kind, 9)
    rows = storage.sample().rows.unique()[:3]
    assert torch.equal(twin.sample().rows.unique()[:3], rows)
    with pytest.raises(ValueError, match=f"row {int(rows[1])}") as refused:
        storage.update(rows, form(priorities))
    assert_tells(refused, "priorit", "of 3", shown, "finite", "No priority was changed")
    assert_untouched(kind, storage, twin, 9)


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
@pytest.mark.parametrize(
    "priorities",
    [
        torch.ones(2),
        torch.ones(4),
        torch.ones(3, 2),
        torch.ones(1, 3),
        torch.ones(()),
        1.0,
        None,
        ["a", "b", "c"],
        torch.ones(3) * 1j,
    ],
    ids=["too few", "too many", "two columns", "transposed", "one", "a number", "none", "text", "complex"],
)
def test_priorities_of_the_wrong_length_are_refused_and_nothing_changes(kind, priorities):
    storage, twin = twins(kind, 9)
    rows = storage.sample().rows.unique()[:3]
    twin.sample()
    with pytest.raises(ValueError, match=r"(?s)priorities.*(No priority was changed|Nothing was written)"):
        storage.update(rows, priorities)
    assert_untouched(kind, storage, twin, 9)


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
@pytest.mark.parametrize("bad", [-1, -(2**62), 10**9, 2**62, 18, 19])
def test_a_row_that_was_never_written_is_named_and_nothing_changes(kind, bad):
    """After 9 steps of 2 environments the next row is 18."""
    storage, twin = twins(kind, 9)
    row = int(storage.sample().rows[0])
    twin.sample()
    with pytest.raises(ValueError, match=str(bad)) as refused:
        storage.update(torch.tensor([row, bad]), torch.tensor([3.0, 3.0]))
    assert_tells(refused, "row", "No priority was changed")
    assert_untouched(kind, storage, twin, 9)


@pytest.mark.parametrize("num_envs", [1, 3, 7, 999])
def test_a_row_beyond_all_counting_is_refused(num_envs):
    """Where a row becomes a time and an environment, no rounding may make another row of it."""
    storage = make_prioritized(num_envs, 4)
    fill(storage, 3)
    before = storage.sample(50 * num_envs).weights
    generator = torch.Generator().manual_seed(0)
    far = torch.randint(2**52, 2**63 - 1, (200,), generator=generator).tolist()
    for row in (2**53 + 1, 2**62, 2**63 - 1, *far):
        with pytest.raises(ValueError, match=str(row)):
            storage.update([row], [5.0])
    assert storage.stale_updates == 0
    assert torch.equal(storage.sample(50 * num_envs).weights, before)


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
@pytest.mark.parametrize(
    "rows",
    [torch.tensor([0.5, 1.0]), torch.tensor([[8], [9]]).expand(2, 2), None, ["a", "b"], torch.tensor([NAN, 1.0])],
    ids=["halves", "two columns", "none", "text", "nan"],
)
def test_rows_that_are_none_are_refused_and_nothing_changes(kind, rows):
    storage, twin = twins(kind, 9)
    with pytest.raises(ValueError, match=r"(?s)rows.*(No priority was changed|Nothing was written)"):
        storage.update(rows, torch.ones(2))
    assert_untouched(kind, storage, twin, 9)


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
def test_update_without_priorities_is_refused(kind):
    storage, twin = twins(kind, 9)
    with pytest.raises((TypeError, ValueError), match="priorities"):
        storage.update(torch.tensor([8]))
    assert_untouched(kind, storage, twin, 9)


@pytest.mark.parametrize("kind", PRIORITIZED, ids=repr)
def test_when_all_priorities_are_0_there_is_nothing_to_draw(kind):
    storage, twin = twins(kind, 6)
    for either in (storage, twin):
        rows = torch.cat([either.sample().rows for _ in range(20)]).unique()
        either.update(rows, torch.zeros(len(rows)))
    with pytest.raises(NotReadyError, match="priorit"):
        storage.sample()
    assert_same(state(storage), state(twin))
    for either in (storage, twin):
        either.update(rows[:1], [2.0])
    assert set(storage.sample().rows.tolist()) == {int(rows[0])}
    twin.sample()
    assert_same_draws(storage, twin)
