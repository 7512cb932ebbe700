"""Every test that asks for ``case`` runs once for each rollout class, and for ``replay`` once for each replay class."""

import pytest
from replay_cases import REPLAY_CASES
from storages import CASES
from where import ASKED_FOR, SEES_VALUES, TensorsOfTests


@pytest.fixture(autouse=True)
def tensors_on_the_device():
    if ASKED_FOR is None:
        yield
        return
    with TensorsOfTests():
        yield


def pytest_collection_modifyitems(items):
    if SEES_VALUES:
        return
    skip = pytest.mark.skip(reason="flags are not looked at on CUDA")
    for item in items:
        if "contract" in str(item.path) and "a flag that is nan" in item.name:
            item.add_marker(skip)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(params=REPLAY_CASES, ids=lambda case: case.name)
def replay(request):
    return request.param
