"""Calls that are interrupted, as by Ctrl-C, were made whole or not at all. The long form is in tests/torture."""

from __future__ import annotations

import pytest
from interrupted_calls import PLAYED, TRACES_OPCODES, interrupt

pytestmark = pytest.mark.filterwarnings("ignore")  # of what the plan does on purpose


@pytest.mark.parametrize("name", PLAYED)
def test_a_call_that_is_interrupted_was_made_whole_or_not_at_all(name, tmp_path):
    played = interrupt(name, tmp_path, 3, seed=1)
    assert not played.problems
    assert not TRACES_OPCODES or min(played.hits.values()) >= 2
