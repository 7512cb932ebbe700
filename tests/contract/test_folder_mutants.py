"""Damaged, hostile and forged folders of every storage: each is refused by name, or right. And loads beside saves.

tests/torture has the same programs with all of them.
"""

from __future__ import annotations

import random

import pytest
from folder_keywords import KeywordForger
from folder_mutants import mutants
from forged_states import StateForger
from mutant_trials import GOOD, Trials, summary
from racing_saves import race

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    made = Trials(tmp_path_factory.mktemp("trials"))
    assert {saved.kind for saved in made.saved} == {"snapshot", "mapped", "episodes"}
    return made


def all_good(found, refused, used):
    """At least so many were refused, and so many could be used."""
    outcomes = [trial.outcome for trial in found]
    assert set(outcomes) <= set(GOOD), summary(found)
    assert outcomes.count("refused") > refused
    assert outcomes.count("same") + outcomes.count("other values") > used


def test_no_mutant_is_loaded_wrongly_crashes_hangs_or_touches_other_folders(trials):
    all_good(trials.run(range(200), mutants(trials.saved)), 100, 5)


def test_no_keyword_that_a_file_has_leads_out_of_its_folder_or_takes_memory(trials):
    forger = KeywordForger(trials.saved)
    all_good(trials.run(forger.some(100, random.Random(0)), forger), 100, 5)


def test_no_forged_table_or_number_is_used_wrongly(trials):
    forger, random_ = StateForger(trials.saved), random.Random(0)
    all_good(trials.run(random_.sample(forger.one_of_each(random_), 200), forger), 50, 5)


def test_a_load_finds_a_snapshot_while_another_process_saves(tmp_path):
    assert race(tmp_path, loads=100) > 1
