"""What a user's editor and type checker say about programs that use every public class: nothing."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rlstore

pytest.importorskip("pyright")

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "tests" / "typing").glob("*.py"))
PROGRAM = ROOT / "tests" / "typing" / "user_program.py"


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """Of pyright in strict mode, by program: those that are right, and one in which a type is wrong."""
    folder = tmp_path_factory.mktemp("programs")
    text = PROGRAM.read_text()
    wrong = text.replace("assert_type(hindsight.sample(), rlstore.ReplayBatch)", "hindsight.sample().weights")
    assert wrong != text
    for program in PROGRAMS:
        (folder / program.name).write_text(program.read_text())
    (folder / "wrong.py").write_text(wrong)
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.10", "extraPaths": [str(ROOT / "src")]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(PROGRAMS) + 1
    return [(Path(c["file"]).stem, c["message"]) for c in found["generalDiagnostics"]]


def test_programs_that_use_every_class_are_right_in_strict_mode(complaints):
    assert [message for name, message in complaints if name != "wrong"] == []


def test_a_wrong_name_is_found(complaints):
    assert any(name == "wrong" and "weights" in message for name, message in complaints)


def test_a_program_of_fifty_lines_uses_every_storage():
    storages = {name for name in rlstore.__all__ if name.endswith("Storage")}
    assert len(storages) == 9
    assert {name for name in storages if name not in PROGRAM.read_text()} == set()
    assert len(PROGRAM.read_text().splitlines()) <= 50


def test_the_programs_use_every_public_name():
    text = "".join(program.read_text() for program in PROGRAMS)
    errors = {name for name in rlstore.__all__ if name.endswith("Error")}
    assert {name for name in rlstore.__all__ if name not in text} <= errors


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_programs_run(program):
    runpy.run_path(str(program))
