"""What ``rlstore demo`` runs: the examples, which are installed with the package."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

_EXTRAS = ("rich", "matplotlib")
_OTHERS = {"common.py", "learn.py"}  # what the examples share, and what runs all of them


def examples() -> dict[str, Path]:
    """The program of each algorithm, by name."""
    # In an editable install they are not inside the package; the import system knows where they are.
    spec = find_spec("rlstore.examples.common")
    folder = Path(str(spec.origin if spec else None)).parent
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.name not in _OTHERS}


def titles() -> dict[str, str]:
    """What each example is, from the first line of its docstring, by the name of its algorithm."""
    found = {name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in examples().items()}
    return {name: re.split(r"[:.]?\n|: ", text or "")[0] for name, text in found.items()}


def missing() -> list[str]:
    """The packages that the examples need and that are not installed."""
    return [name for name in _EXTRAS if find_spec(name) is None]


def run(name: str, options: Sequence[str]) -> NoReturn:
    """Run an example in place of this process, as ``python examples/NAME.py`` does."""
    # The examples start processes of their own, which import the program that is run: it has to be the example itself.
    os.execv(sys.executable, [sys.executable, str(examples()[name]), *options])
