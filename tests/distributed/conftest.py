"""Processes of a test end with it, whatever happens."""

from __future__ import annotations

import pytest
from distributed_actors import Child


@pytest.fixture
def start():
    """Starts a process: ``start(target, *args, method="fork")``."""
    children: list[Child] = []

    def begin(target, *args, method="fork"):
        children.append(Child(target, *args, method=method))
        return children[-1]

    yield begin
    for child in children:
        child.clean_up()
