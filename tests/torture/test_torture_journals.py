"""Storages that journal and save in the background, killed hundreds of times; also with a disk that fails at times.

And any interleaving of calls, saves, commits and loads.

One kind alone: ``python tests/killed_journals.py KIND ROUNDS SEED [FAULT]``.
"""

from __future__ import annotations

import os

import pytest
from called_worlds import WORLDS
from killed_journals import FAULTS, kill
from saved_machine import explore

ROUNDS = {fault: 100 if fault else 300 for fault in FAULTS}
pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault or "no fault")
@pytest.mark.parametrize("name", WORLDS)
def test_what_was_committed_is_there_after_every_kill(name, fault, tmp_path):
    counts = kill(name, tmp_path, ROUNDS[fault], fault=fault)
    print(name, fault, counts)
    assert counts["rounds"] == ROUNDS[fault]


@pytest.mark.parametrize("name", WORLDS)
def test_any_interleaving_of_many_saves_and_loads(name, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here outlives the machine
    explore(name, 300)
