"""Actors, writers and learners at work for a hundred thousand batches."""

from __future__ import annotations

import pytest
from soak import soak


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_soak_leaves_memory_flat_and_the_counts_right():
    soak(100_000)
