"""Every test that asks for ``case`` runs once for each rollout class, and for ``replay`` once for each replay class."""

from pathlib import Path

import pytest
from replay_cases import REPLAY_CASES
from storages import CASES
from where import ASKED_FOR, TensorsOfTests

from rlstore.rollout.targets import Targets


@pytest.fixture(autouse=True)
def tensors_on_the_device():
    if ASKED_FOR is None:
        yield
        return
    with TensorsOfTests(Path(__file__).parent):
        yield


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(params=REPLAY_CASES, ids=lambda case: case.name)
def replay(request):
    return request.param


@pytest.fixture(autouse=True)
def targets_need_not_be_computed(monkeypatch):
    """Most of these tests look at other fields: what nobody has written stays zero, and can be served."""
    monkeypatch.setattr(Targets, "blank", lambda self, ring: None)
