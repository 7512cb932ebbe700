"""``rlstore demo``: what it lists, what it runs, and what it says where the examples cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlstore import demo
from rlstore.__main__ import main

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_without_an_algorithm_every_example_is_listed_in_one_line(capsys):
    assert main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"common", "learn"}
    assert {line.split()[0] for line in lines} == files
    assert "ppo            PPO on CartPole, with RolloutStorage" in lines
    assert "apex_dqn       Ape-X on CartPole" in lines


def test_an_example_runs_with_its_options(tmp_path):
    command = [sys.executable, "-m", "rlstore", "demo", "ppo", "--steps", "1500", "--seed", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "environment steps" in done.stdout
    assert json.loads((tmp_path / "ppo.json").read_text())["env_steps"] == 2048  # two rollouts of 16 x 64


def test_the_program_replaces_the_process(monkeypatch):
    """It has to be the main program: the actors that an example spawns import it."""
    started = []
    monkeypatch.setattr(demo.os, "execv", lambda *command: started.append(command))
    demo.run("impala", ["--steps", "10", "--ray"])
    script = str(demo.examples()["impala"])
    assert started == [(sys.executable, [sys.executable, script, "--steps", "10", "--ray"])]
    assert Path(script).name == "impala.py"


def test_the_files_that_are_found_are_the_examples():
    for name, path in demo.examples().items():
        assert path.read_bytes() == (EXAMPLES / f"{name}.py").read_bytes()


@pytest.mark.parametrize(("gone", "named"), [({"rich"}, "rich"), ({"rich", "matplotlib"}, "rich and matplotlib")])
def test_missing_extras_are_named_with_the_command_that_installs_them(gone, named, monkeypatch, capsys):
    found = demo.find_spec
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in gone else found(name))
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "dqn"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"rlstore: the examples need {named}: pip install 'rlstore[examples]'\n"


def test_an_unknown_algorithm_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "poo"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "'poo'" in error
    assert "ppo" in error.partition("'poo'")[2]
