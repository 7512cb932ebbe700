"""Hundreds of deaths of actors and of learners, at random moments, under load."""

from __future__ import annotations

import pytest
from distributed_torture import kill_actors, kill_learners

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]


def test_actors_killed_without_end():
    kill_actors(200, seed=0)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_learners_killed_without_end(prefetch):
    kill_learners(200, 7 + prefetch, prefetch)
