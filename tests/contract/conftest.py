"""Every test that asks for ``case`` runs once for each rollout class, and for ``replay`` once for each replay class."""

from dataclasses import replace

import pytest
import torch
from replay_cases import REPLAY_CASES
from storages import CASES

# With a GPU once more on it: there all tensors that a test makes are on it too.
if torch.cuda.is_available():
    ON_CUDA = [replace(case, name=f"{case.name}-cuda", device="cuda") for case in CASES]
else:
    ON_CUDA = []


@pytest.fixture(params=[*CASES, *ON_CUDA], ids=lambda case: case.name)
def case(request):
    with torch.device(request.param.device):
        yield request.param


@pytest.fixture(params=REPLAY_CASES, ids=lambda case: case.name)
def replay(request):
    return request.param
