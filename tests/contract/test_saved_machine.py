"""Any interleaving of calls, saves, commits and loads, for every kind of storage. The long form is in tests/torture."""

from __future__ import annotations

import os

import pytest
from called_worlds import WORLDS
from saved_machine import explore


@pytest.mark.parametrize("name", WORLDS)
def test_any_interleaving_of_saves_and_loads(name, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here outlives the machine
    explore(name, 3)
