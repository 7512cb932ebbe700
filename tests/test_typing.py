"""What a user's editor and type checker say about a program that uses every public class: nothing."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rlstore

pytest.importorskip("pyright")

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "typing" / "user_program.py"


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """Of pyright in strict mode, by program: the one that is right, and one in which a type is wrong."""
    folder = tmp_path_factory.mktemp("programs")
    text = PROGRAM.read_text()
    wrong = text.replace("assert_type(uniform.sample(), rlstore.ReplayBatch)", "uniform.sample().weights")
    assert wrong != text
    (folder / "right.py").write_text(text)
    (folder / "wrong.py").write_text(wrong)
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.10", "extraPaths": [str(ROOT / "src")]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 2
    return {
        name: [c["message"] for c in found["generalDiagnostics"] if Path(c["file"]).stem == name]
        for name in ("right", "wrong")
    }


def test_a_program_that_uses_every_class_is_right_in_strict_mode(complaints):
    assert complaints["right"] == []


def test_a_wrong_name_is_found(complaints):
    assert any("weights" in message for message in complaints["wrong"])


def test_the_program_uses_every_public_class():
    text = PROGRAM.read_text()
    errors = {name for name in rlstore.__all__ if name.endswith("Error")}
    assert {name for name in rlstore.__all__ if name not in text} <= errors


def test_the_program_runs():
    runpy.run_path(str(PROGRAM))
