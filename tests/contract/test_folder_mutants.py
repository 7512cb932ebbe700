"""Damaged and hostile folders of every storage: each is refused by name, or right. And loads beside saves."""

from __future__ import annotations

import pytest
from mutant_trials import GOOD, Trials, summary
from racing_saves import race

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_no_mutant_is_loaded_wrongly_crashes_hangs_or_touches_other_folders(tmp_path):
    """tests/torture has twenty thousand."""
    made = Trials(tmp_path)
    assert {saved.kind for saved in made.saved} == {"snapshot", "mapped", "episodes"}
    trials = made.run(0, 200)
    assert all(trial.outcome in GOOD for trial in trials), summary(trials)
    outcomes = [trial.outcome for trial in trials]
    assert outcomes.count("refused") > 100
    assert outcomes.count("same") > 5


def test_a_load_finds_a_snapshot_while_another_process_saves(tmp_path):
    assert race(tmp_path, loads=100) > 1
