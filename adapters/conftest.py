"""Warnings of the other libraries, about their own next versions, are no errors here."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Later lines come first."""
    config.addinivalue_line("filterwarnings", "default")
