"""The programs of rllte in tests/switched, where nothing of it has to be replaced: see requirements-rllte.txt."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("rllte")
TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "switched"), str(TESTS / "compat")]  # the programs, and their environment
torch.set_num_threads(1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_program_learns(when, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # their logger leaves files
    reached = import_module(f"rllte_{when}").main()
    assert sum(reached[:20]) <= 4
    assert sum(reached[-40:]) >= 20
