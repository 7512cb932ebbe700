"""Programs for Stable-Baselines3 that are shown beside those with our buffers: both run, and few lines differ."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "sb3.md"
TAB = re.compile(r'^=== "(?P<title>[^"]+)"\n(?P<body>(?:\n| {4}.*\n)+)', flags=re.MULTILINE)
CODE = re.compile(r"^ {4}```python\n(?P<code>.*?)^ {4}```", flags=re.MULTILINE | re.DOTALL)


def programs():
    """Pairs of programs, the plain one first."""
    tabs = [(tab["title"], CODE.search(tab["body"])["code"]) for tab in TAB.finditer(PAGE.read_text())]
    codes = [re.sub(r"^ {4}", "", code, flags=re.MULTILINE) for _, code in tabs]
    assert [title for title, _ in tabs] == ["Stable-Baselines3", "with rlstore"] * 3
    return list(zip(codes[::2], codes[1::2], strict=True))


PAIRS = programs()


@pytest.mark.parametrize(("plain", "switched"), PAIRS, ids=["DQN", "SAC", "PPO"])
def test_at_most_three_lines_differ(plain, switched):
    changed = [line for line in difflib.ndiff(plain.splitlines(), switched.splitlines()) if line[0] in "+-"]
    added, removed = ([line for line in changed if line[0] == sign] for sign in "+-")
    assert 1 <= len(added) <= 3
    assert len(removed) <= 1  # a line that was changed is among those that were added
    assert "rlstore" in "".join(added)
    assert "rlstore" not in plain


@pytest.mark.parametrize("program", [code for pair in PAIRS for code in pair], ids=lambda code: code.split()[3])
def test_the_programs_run(program, tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
