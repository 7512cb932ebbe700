"""Without the GIL, on a free-threaded Python, the package refuses to be imported."""

from __future__ import annotations

import importlib
import sys

import pytest

import rlstore


def test_the_import_is_refused_without_the_gil(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(ImportError, match=r"does not support free-threaded Python.*PYTHON_GIL=1"):
        importlib.reload(rlstore)


def test_a_free_threaded_build_with_the_gil_is_as_good_as_another(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert importlib.reload(rlstore) is rlstore


def test_a_python_that_knows_no_other_state(monkeypatch):
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    assert importlib.reload(rlstore) is rlstore
