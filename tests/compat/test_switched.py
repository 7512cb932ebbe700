"""Programs of other libraries and what becomes of them with rlstore: at most three lines change, and they run.

The pairs are in tests/switched. `make adapters` trains those that take longer, and those that need TorchRL.
"""

import difflib
import random
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

SWITCHED = Path(__file__).parent.parent / "switched"
PAIRS = {  # the lines of the diff: those that are new, and those that they replace
    "cleanrl_ppo": (3, 8),  # a call in place of the loop over time
    "cleanrl_dqn": (1, 1),
    "rsl_rl": (2, 0),
    "rllte": (2, 0),
    "fast_td3": (1, 1),
    "torchrl": (2, 2),
}


@pytest.fixture
def main(monkeypatch, tmp_path):
    """What trains, of a program by name; it may leave files behind."""
    monkeypatch.syspath_prepend(str(SWITCHED))
    monkeypatch.chdir(tmp_path)
    return lambda name: import_module(name).main


def changes(name):
    """The lines that the switched program has and the other has not, and the other way around."""
    before, after = ((SWITCHED / f"{name}_{when}.py").read_text().splitlines() for when in ("before", "after"))
    marked = list(difflib.ndiff(before, after))
    return [[line for line in marked if line.startswith(sign)] for sign in "+-"]


def test_every_program_is_one_of_a_pair():
    found = {path.stem for path in SWITCHED.glob("*.py")} - {"fast_td3_utils", "cleanrl_ppo_whole"}
    assert found == {f"{name}_{when}" for name in PAIRS for when in ("before", "after")}


@pytest.mark.parametrize(("name", "counts"), PAIRS.items())
def test_at_most_three_lines_are_written(name, counts):
    written, removed = changes(name)
    assert (len(written), len(removed)) == counts
    assert len(written) <= 3
    assert any("rlstore" in line for line in written)


def test_cleanrl_ppo_is_the_same_run(main):
    before, after = (main(f"cleanrl_ppo_{when}")(num_iterations=2) for when in ("before", "after"))
    assert len(before) > 50
    assert after == before


def test_cleanrl_ppo_with_a_storage_runs(main):
    assert len(main("cleanrl_ppo_whole")(num_iterations=2)) > 50


@pytest.mark.parametrize("when", ["before", "after"])
def test_cleanrl_dqn_runs(main, when):
    lengths = main(f"cleanrl_dqn_{when}")(total_timesteps=1300)
    assert 1000 < sum(lengths) <= 1300


def test_rsl_rl_is_the_same_run(main, capsys):
    before, after = (main(f"rsl_rl_{when}")(num_iterations=4) for when in ("before", "after"))
    assert len(before) > 100
    assert after == pytest.approx(before, rel=1e-3, abs=1e-3)


@pytest.fixture
def seeded_workers(rllte, monkeypatch):
    """Its workers give ``random.seed`` a number of numpy's, which Python 3.11 and later refuse: here a plain one."""
    module = sys.modules["rllte.xploit.storage.nstep_replay_storage"]
    monkeypatch.setattr(module, "worker_init_fn", lambda worker: (np.random.seed(worker), random.seed(worker)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'pin_memory' argument is set")
@pytest.mark.filterwarnings("ignore:.*use of fork")  # by the workers of its own storage
@pytest.mark.parametrize("when", ["before", "after"])
def test_rllte_runs(main, when, seeded_workers):
    assert len(main(f"rllte_{when}")(num_train_steps=360)) >= 30


@pytest.mark.parametrize("when", ["before", "after"])
def test_fast_td3_runs(main, when):
    rewards = main(f"fast_td3_{when}")(total_timesteps=30)
    assert len(rewards) == 30
    assert -0.5 < min(rewards) < max(rewards) < 1.0
