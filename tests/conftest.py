"""What all tests share: one torch thread, and how hypothesis searches."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What two processes may run at once: whole files; and one Ray cluster at a time, which others would find.

    The tests with Ray take longest, and those of whole programs after them: they begin first, so that both processes
    end at about the same time.
    """
    on_ray = {item: bool(re.search(r"(?<![a-z])ray(?![a-z])", item.nodeid.lower())) for item in items}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if on_ray[item] else item.path.as_posix()))
    items.sort(key=lambda item: (not on_ray[item], item.path.parent != Path(__file__).parent))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: a collection of garbage that looks at it takes a second each time."""
    gc.collect()
    gc.freeze()
