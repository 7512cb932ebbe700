"""Every test that asks for ``case`` runs once for each storage class."""

import pytest
from storages import CASES


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param
