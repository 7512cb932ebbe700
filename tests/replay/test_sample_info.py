"""``sample_info=True``: the probability of each item of a batch, and how often it was drawn so far."""

from collections import Counter

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rlstore import (
    HindsightReplayStorage,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
    Storage,
)

LINE = Box(-np.inf, np.inf, (1,), np.float32)


def add(storage, first, count, envs=1, *, ends=True):
    """Steps whose observations are their numbers, in lane 1 counted from 1000; the last one ends its episode."""
    lanes = torch.arange(envs).unsqueeze(1) * 1000.0
    for number in range(first, first + count):
        at, after = lanes + number, lanes + number + 1
        done = torch.full((envs,), ends and number == first + count - 1)
        storage.add(at, torch.zeros(envs).long(), torch.zeros(envs), done, torch.zeros(envs).bool(), {}, after)


def make(kind, size=8, **options):
    return kind(LINE, Discrete(2), storage_size=size, seed=3, sample_info=True, **options)


def check_counts(batch, seen: Counter, numbers=None):
    """Each item shows its draws so far, this batch included, by a count of the observations that were served."""
    numbers = batch.observations.flatten().tolist() if numbers is None else numbers
    seen.update(numbers)
    assert batch.draw_counts.dtype == torch.int64
    assert batch.draw_counts.tolist() == [seen[number] for number in numbers]


@pytest.mark.parametrize("kind", [ReplayStorage, NStepReplayStorage, PrioritizedReplayStorage])
@pytest.mark.parametrize("workers", [0, 2])
def test_counts_are_those_of_the_rows_that_were_served(kind, workers):
    storage, seen = make(kind, batch_size=5, num_workers=workers), Counter()
    add(storage, 0, 6)
    for _ in range(4):
        batch = storage.sample()
        check_counts(batch, seen)
        torch.testing.assert_close(batch.probabilities, torch.full((5,), 1 / 6), rtol=1e-6, atol=0)
    storage.close()


def test_a_row_that_took_the_place_of_another_was_never_drawn():
    storage, seen = make(ReplayStorage, 8, num_envs=2, batch_size=32), Counter()
    add(storage, 0, 4, 2)
    check_counts(storage.sample(), seen)
    add(storage, 10, 3, 2)  # three of the four rows of each lane are gone; the row of step 3 is left
    for _ in range(2):
        batch = storage.sample()
        assert set(batch.observations.flatten().tolist()) == {3, 10, 11, 12, 1003, 1010, 1011, 1012}
        check_counts(batch, seen)
    storage.reset()
    add(storage, 3, 1, 2)
    check_counts(storage.sample(), Counter())  # the same number, but another row


def test_probabilities_are_in_proportion_to_priorities():
    storage = make(PrioritizedReplayStorage, batch_size=64, alpha=0.5)
    add(storage, 0, 3)
    storage.update(torch.arange(3), torch.tensor([1.0, 4.0, 25.0]))  # to the power of a half: 1, 2, 5
    batch = storage.sample()
    expected = torch.tensor([1 / 8, 2 / 8, 5 / 8])[batch.rows]
    torch.testing.assert_close(batch.probabilities, expected, rtol=1e-6, atol=0)
    check_counts(batch, Counter())


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_windows_have_them_by_the_step_at_which_they_begin(alpha):
    storage = make(SequenceReplayStorage, 16, batch_size=32, sequence_length=2, overlap=1, alpha=alpha)
    add(storage, 0, 4)  # windows begin at 0, 1 and 2
    if alpha:
        storage.update(torch.tensor([0, 1, 2]), torch.tensor([2.0, 1.0, 1.0]))
    seen = Counter()
    for _ in range(2):
        batch = storage.sample()
        chances = torch.tensor([0.5, 0.25, 0.25] if alpha else [1 / 3] * 3)[batch.rows]
        torch.testing.assert_close(batch.probabilities, chances, rtol=1e-6, atol=0)
        check_counts(batch, seen, batch.rows.tolist())


def test_goals_do_not_count():
    goals = Dict({"observation": LINE, "achieved_goal": LINE, "desired_goal": LINE})
    storage = HindsightReplayStorage(
        goals,
        Discrete(2),
        compute_reward=lambda achieved, desired, _: torch.zeros(len(achieved)),
        storage_size=8,
        sample_info=True,
    )
    for number in range(4):
        at, after = ({key: torch.tensor([[float(number + more)]]) for key in goals} for more in (0, 1))
        storage.add(at, torch.zeros(1).long(), 0.0, number == 3, False, {}, after)
    seen = Counter()
    for _ in range(2):
        batch = storage.sample(6)
        check_counts(batch, seen, batch.observations["observation"].flatten().tolist())
        assert batch.probabilities.tolist() == [0.25] * 6


@pytest.mark.parametrize("workers", [0, 1])
def test_counts_go_on_in_a_storage_that_was_saved(tmp_path, workers):
    storage, seen = make(PrioritizedReplayStorage, batch_size=6, num_workers=workers), Counter()
    add(storage, 0, 5)
    check_counts(storage.sample(), seen)
    storage.save(tmp_path / "saved")
    storage.close()
    loaded = Storage.load(tmp_path / "saved")
    check_counts(loaded.sample(), seen)
    loaded.close()


def test_batches_hold_them_by_name_behind_extra_fields_and_only_if_asked_for():
    fields = {"costs": ((), torch.float32)}
    storage = ReplayStorage(LINE, Discrete(2), storage_size=4, extra_fields=fields, sample_info=True)
    one = torch.zeros(1, 1)
    storage.add(one, torch.zeros(1).long(), 0.0, False, False, {}, one + 1, costs=torch.tensor([7.0]))
    batch = storage.sample(2)
    assert batch._fields[-3:] == ("costs", "probabilities", "draw_counts")
    assert batch.costs.flatten().tolist() == [7.0, 7.0]
    assert batch.draw_counts.tolist() == [2, 2]  # twice in this batch
    assert next(storage.generate_batches(1, 1))["draw_counts"].tolist() == [3]
    named = {"probabilities": ((), torch.float32)}
    with pytest.raises(InvalidInputError, match="probabilities"):
        ReplayStorage(LINE, Discrete(2), storage_size=4, extra_fields=named, sample_info=True)
    plain = ReplayStorage(LINE, Discrete(2), storage_size=4, extra_fields=named)
    plain.add(one, torch.zeros(1).long(), 0.0, False, False, {}, one + 1, probabilities=torch.tensor([0.5]))
    assert plain.sample(1)._fields[-1] == "probabilities"
