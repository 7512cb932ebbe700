"""Episodes and rows of replay, read one by one, against what was added."""

from __future__ import annotations

import pytest
import torch
from replay_cases import ENVS, REPLAY_CASES, STEPS, check_row, collect, ids_in

from rlstore import RowNotHeldError

CASES = pytest.mark.parametrize("case", REPLAY_CASES, ids=lambda case: case.name)


@CASES
def test_rows_are_read_as_they_were_added(case):
    storage = case.make()
    collect(case, storage, steps=STEPS + 3)
    rows = storage.held_rows()
    assert rows.tolist() == list(range(3 * ENVS, (STEPS + 3) * ENVS))
    steps = storage[rows]
    steps = {**steps, "masks": torch.ones(len(rows), dtype=torch.bool), "discounts": 0.5 - steps["terminated"] / 2}
    for place, row in enumerate(rows.tolist()):
        check_row(case, steps, place, row)


@CASES
def test_episodes_are_listed_and_read(case):
    storage = case.make()
    collect(case, storage, steps=5)
    found = [
        (
            e.env,
            ids_in(e.observations).tolist(),
            ids_in(e.final_observations).item(),
            e.terminated,
            e.truncated,
            e.is_over,
        )
        for e in storage.episodes()
    ]
    # Environment 0 terminates in steps 1 and 3; environment 1 is truncated in steps 2 and 3; see ENDS.
    assert found == [
        (0, [1.0, 3.0], 1003.0, True, False, True),
        (1, [2.0, 4.0, 6.0], 1006.0, False, True, True),
        (0, [5.0, 7.0], 1007.0, True, True, True),
        (1, [8.0], 1008.0, False, True, True),
        (0, [9.0], 11.0, False, False, False),
        (1, [10.0], 12.0, False, False, False),
    ]


@CASES
def test_what_was_overwritten_is_refused(case):
    storage = case.make()
    collect(case, storage)
    episode = storage.episodes()[0]
    collect(case, storage, first=STEPS, steps=1)
    with pytest.raises(RowNotHeldError, match=r"row 0 is not held any more.*steps 1 to 6 of it are held.*Nothing"):
        episode.observations  # noqa: B018
    with pytest.raises(IndexError, match="row 0 is not held"):
        storage[0]
