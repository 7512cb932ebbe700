"""Long proofs of shared replay: many samples at a ratio, and many deaths under load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "replay"))

from killed_writers import kill_writers
from rate_sides import hold_ratio
from shared_kinds import PRIORITIZED, REPLAY, SEQUENCE

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def test_the_ratio_holds_over_a_hundred_thousand_samples():
    hold_ratio(lanes=4, steps=2_000, runs=10, entries=10_000)


@pytest.mark.parametrize("kind", [REPLAY, PRIORITIZED, SEQUENCE], ids=repr)
def test_writers_killed_at_random_under_load_cost_their_own_episodes_alone(kind):
    kill_writers(kind, 200)
