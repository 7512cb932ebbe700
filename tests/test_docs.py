"""The code in the README runs as it stands, top to bottom, and prints what it says it prints."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import rlstore

ROOT = Path(__file__).parent.parent


def test_the_readme_runs_and_its_error_is_the_one_that_is_printed(capsys):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 10
    exec("\n".join(blocks), {"__name__": "readme"})
    printed = capsys.readouterr().out.split()
    shown = re.findall(r"^# (.*)$", blocks[-1], flags=re.MULTILINE)
    assert printed == " ".join(shown).split()


SHARING = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sharing.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("program", SHARING, ids=["shared replay", "DistributedStorage", "Ray"])
def test_the_programs_about_sharing_run(program, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_the_version_is_the_same_everywhere():
    assert rlstore.__version__ == version("rlstore")
    assert f'version = "{rlstore.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_architecture_page_shows_every_module_and_no_other():
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text[text.index("src/rlstore/") : text.index("Where to look first")]
    shown = set(re.findall(r"\b\w+\.py\b", tree))
    assert shown == {module.name for module in (ROOT / "src" / "rlstore").rglob("*.py")}


def test_every_file_that_the_documents_link_to_exists():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(documents) >= 5
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
