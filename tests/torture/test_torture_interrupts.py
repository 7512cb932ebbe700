"""Three hundred interruptions of each call, as by Ctrl-C, of every class and memory."""

from __future__ import annotations

import pytest
from interrupted_calls import PLAYED, TRACES_OPCODES, interrupt

pytestmark = [
    pytest.mark.torture,
    pytest.mark.filterwarnings("ignore"),  # of what the plan does on purpose
    pytest.mark.timeout(1200),
]


@pytest.mark.parametrize("name", PLAYED)
def test_a_call_that_is_interrupted_was_made_whole_or_not_at_all(name, tmp_path):
    played = interrupt(name, tmp_path, 300)
    assert not played.problems
    assert not TRACES_OPCODES or min(played.hits.values()) >= 150
