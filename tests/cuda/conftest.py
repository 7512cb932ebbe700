"""The kernels for CUDA: on a GPU where there is one, else on the CPU in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
