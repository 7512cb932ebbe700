"""Storages that journal and save in the background, killed at any moment. The long form is in tests/torture."""

from __future__ import annotations

import pytest
from called_worlds import WORLDS
from killed_journals import FAULTS, kill

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.parametrize("name", WORLDS)
def test_what_was_committed_is_there_after_a_kill(name, tmp_path):
    assert kill(name, tmp_path, 3, calls=60)["rounds"] == 3


@pytest.mark.parametrize(("name", "fault"), [("prioritized", FAULTS[1]), ("uniform", FAULTS[2])])
def test_the_last_good_commit_is_there_after_a_disk_has_failed(name, fault, tmp_path):
    assert kill(name, tmp_path, 5, fault=fault, calls=60)["rounds"] == 5
