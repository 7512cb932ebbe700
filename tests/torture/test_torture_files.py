"""Long proofs of what is on disk: twenty thousand damaged or hostile folders, and five thousand loads beside saves."""

from __future__ import annotations

import pytest
from mutant_trials import GOOD, Trials, summary
from racing_saves import race

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
MUTANTS, LOADS = 20_000, 5_000


def test_no_mutant_of_twenty_thousand_is_loaded_wrongly_crashes_or_hangs(tmp_path):
    trials = Trials(tmp_path).run(1_000_000, 1_000_000 + MUTANTS)
    print(summary(trials))
    assert len(trials) == MUTANTS
    assert all(trial.outcome in GOOD for trial in trials), summary(trials)


def test_five_thousand_loads_beside_saves(tmp_path):
    assert race(tmp_path, LOADS) > 100
