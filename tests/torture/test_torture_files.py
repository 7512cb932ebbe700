"""Long proofs of what is on disk: all the hostile folders of which tests/contract has some, and loads beside saves."""

from __future__ import annotations

import os

import pytest
from folder_keywords import KeywordForger
from folder_mutants import mutants
from forged_states import StateForger
from mutant_trials import GOOD, Trials, summary
from racing_saves import race

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
MUTANTS, PAIRS, LOADS = 20_000, 15_000, 5_000


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("trials"))


def try_all(trials, numbers, make):
    found = trials.run(numbers, make, os.cpu_count() or 1)
    print(summary(found))
    assert len(found) == len(numbers)
    assert all(trial.outcome in GOOD for trial in found), summary(found)


def test_no_mutant_of_twenty_thousand_is_loaded_wrongly_crashes_or_hangs(trials):
    try_all(trials, range(1_000_000, 1_000_000 + MUTANTS), mutants(trials.saved))


def test_no_keyword_in_a_file_and_no_pair_of_them_leads_out_of_its_folder(trials):
    """Of the pairs there are some, drawn with a seed: all of them are some hundred millions."""
    forger = KeywordForger(trials.saved)
    try_all(trials, range(len(forger.singles) + PAIRS), forger)


def test_no_forged_table_or_number_is_used_wrongly(trials):
    forger = StateForger(trials.saved)
    try_all(trials, range(len(forger)), forger)


def test_five_thousand_loads_beside_saves(tmp_path):
    assert race(tmp_path, LOADS) > 100
