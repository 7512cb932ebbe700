"""Every thread scenario on every storage for a minute, each in a process of its own: no crash, no wrong row."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from thread_worlds import KINDS, SCENARIOS

PROGRAM = Path(__file__).parent.parent / "thread_worlds.py"
SECONDS = float(os.environ.get("THREAD_SECONDS", "60"))


def play(kind, scenario):
    command = [sys.executable, "-X", "faulthandler", str(PROGRAM), kind, scenario, str(SECONDS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 240)
    return "" if ended.returncode == 0 else f"{kind}, {scenario}: exit {ended.returncode}\n{ended.stderr[-2000:]}"


@pytest.mark.torture
@pytest.mark.timeout(36000)
def test_no_scenario_crashes_or_gives_a_wrong_row():
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(play, *zip(*[(kind, name) for kind in KINDS for name in SCENARIOS], strict=True)))
    assert not [problem for problem in found if problem]
