"""Wrong calls of native functions raise, change nothing, and never touch memory that is not theirs."""

from __future__ import annotations

import json
import subprocess
import sys

import misuse
import misuse_program
import pytest

from rlstore.kernels import _native
from rlstore.kernels.portable import OPERATIONS


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Every call, made in other processes, so that a crash costs one test and not the run."""
    done = subprocess.run(
        [sys.executable, misuse_program.__file__], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", misuse.MISUSES)
def test_a_wrong_call_raises_and_changes_nothing(outcomes, name):
    assert misuse.MISUSES[name][0] in outcomes[name].split(",")


@pytest.mark.parametrize("name", misuse.EDGES)
def test_kernels_stay_within_their_memory(outcomes, name):
    """Sources and targets end where the process's memory ends: one byte too many is a crash."""
    assert outcomes[name] == "returned"


def test_every_operation_is_misused():
    assert {name.split(":")[0] for name in misuse.MISUSES} == {name for name in OPERATIONS if hasattr(_native, name)}
