"""Mapped storages, killed 300 times at random and at every instant of each operation."""

from __future__ import annotations

import pytest
from killed_storages import KINDS, PLANS, judge_every_instant, kill_again_and_again

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("name", KINDS)
def test_killed_at_random(name, tmp_path):
    kill_again_and_again(name, tmp_path, 300)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", KINDS)
def test_killed_at_every_instant(name, plan, tmp_path):
    assert judge_every_instant(name, tmp_path, *PLANS[plan]) > 0
