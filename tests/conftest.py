"""What all tests share: one torch thread, and how hypothesis searches."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# The worked examples in tests/cases are imported as `cases`, from wherever pytest is started.
sys.path.insert(0, str(Path(__file__).parent))

pytest.register_assert_rewrite("distributed_actors", "distributed_ids", "distributed_torture")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for CUDA run on the CPU; said before anything imports Triton
# A person's run looks for new failures each time. That of CI is always the same, so that it speaks of the change alone.
settings.register_profile(
    "rlstore", deadline=None, max_examples=60, print_blob=True, derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("rlstore")


def unit(nodeid: str) -> str:
    """What one process runs: a file, or all tests with Ray, whose clusters would find each other."""
    return "ray" if re.search(r"(?<![a-z])ray(?![a-z])", nodeid.lower()) else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests with Ray take longest; after them the long proofs, where they run, and those of whole programs.

    They begin first, so that both processes end at about the same time.
    """
    here = Path(__file__).parent
    items.sort(
        key=lambda item: (unit(item.nodeid) != "ray", item.path.parent != here / "torture", item.path.parent != here)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup`` distributes units: xdist's own groups nothing with pytest 9.2."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return Units(config, log)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: a collection of garbage that looks at it takes a second each time."""
    gc.collect()
    gc.freeze()
