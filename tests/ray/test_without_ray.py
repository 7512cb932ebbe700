"""rlstore without Ray."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import rlstore

PACKAGE = Path(rlstore.__file__).parent


def test_only_rlstore_ray_imports_ray():
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "ray" not in path.parents:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not any(name.startswith(("ray", "rlstore.ray")) for name in names), path


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    spec = importlib.util.spec_from_file_location("rlstore_ray_again", PACKAGE / "ray" / "__init__.py")
    with pytest.raises(ImportError, match=r"pip install rlstore\[ray\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
