"""Every scenario of threads on every kind of storage, for many turns: no crash, no wrong row, nobody is kept out."""

from __future__ import annotations

import os

import pytest
from thread_worlds import KINDS, SCENARIOS, run

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:the returns and advantages of .* are NaN"),
]
TURNS = 100  # of each thread


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_wrong(kind, scenario, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.sched_yield())  # nothing here outlives the machine
    run(kind, scenario, tmp_path, TURNS)
