"""Hundreds of deaths of actors and of learners, at random moments, under load. RLSTORE_TORTURE_ROUNDS sets how many."""

from __future__ import annotations

import os

import pytest
from distributed_torture import kill_actors, kill_learners

ROUNDS = int(os.environ.get("RLSTORE_TORTURE_ROUNDS", "200"))
pytestmark = [pytest.mark.torture, pytest.mark.timeout(120 + 10 * ROUNDS)]


@pytest.mark.parametrize("seed", [0, 1])
def test_actors_killed_without_end(seed):
    kill_actors(ROUNDS, seed)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_learners_killed_without_end(prefetch):
    kill_learners(ROUNDS, 7 + prefetch, prefetch)
