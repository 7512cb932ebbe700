"""The kernels for CUDA: on a GPU where there is one, else on the CPU in Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from rlstore.kernels.cuda import memory, replay_gather

if not torch.cuda.is_available():
    known, call = set[str](), InterpretedFunction.__call__

    def call_in_a_launch(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        """A function that a kernel calls. Before each call Triton looks through its whole language for what to replace.

        That takes a sixth of the time. The launch has done it for what our modules see, and nothing undoes what the
        first call of a function of Triton's own has done.
        """
        module = function.fn.__module__
        if module not in known:
            known.add(module)
            return call(function, *args, **kwargs)
        return function.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call_in_a_launch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def few_programs_and_small_tiles(device, monkeypatch):
    """Triton's interpreter is slow: where it runs, few elements of a frame take several tiles."""
    if device.type == "cpu":
        monkeypatch.setattr(memory, "_WIDEST_TILE", 32)
        monkeypatch.setattr(replay_gather, "_FEW_PROGRAMS", 1)  # a batch of 9 rows takes two, not nine


# What torch says of itself, and of what the tests ask it for.
TORCH_SAYS = (
    "ignore:.*torch.jit.*deprecated:DeprecationWarning",
    "ignore:Synchronization debug mode:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:The CUDA Graph is empty:UserWarning",
    "ignore:Warning. Profiler clears events:UserWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for said in TORCH_SAYS:
                item.add_marker(pytest.mark.filterwarnings(said))
