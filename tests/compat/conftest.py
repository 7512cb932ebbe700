"""Settings that must be in place before the foreign libraries are imported, and what it takes to import rllte."""

import os
import sys
import types
from importlib.util import find_spec

import pytest

# GitPython refuses to be imported where no git executable is found, unless told that this is fine.
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

NEEDED = {
    "test_cleanrl_steps.py": ["stable_baselines3"],
    "test_rllte_drqv2.py": ["rllte"],
    "test_rsl_rl.py": ["rsl_rl"],
    "test_sb3_replay.py": ["stable_baselines3"],
    "test_sb3_resume.py": ["stable_baselines3"],
    "test_sb3_rollout.py": ["stable_baselines3"],
    "test_sb3_training.py": ["stable_baselines3"],
    "test_switched.py": ["rllte", "rsl_rl"],
}
collect_ignore = [file for file, libraries in NEEDED.items() if None in map(find_spec, libraries)]


def pytest_report_header() -> list[str]:
    """`make test` has all of them; a machine with a GPU has few."""
    return [f"libraries are missing for: {', '.join(collect_ignore)}"] if collect_ignore else []


@pytest.fixture(scope="session")
def rllte():
    """The modules of rllte. One of its many augmentations, which DrQ-v2 does not use, would need torchvision."""
    transforms = types.ModuleType("torchvision.transforms")
    transforms.ColorJitter = object
    stand_ins = {"torchvision": types.ModuleType("torchvision"), "torchvision.transforms": transforms}
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        import rllte.agent.drqv2
        import rllte.common.prototype
        import rllte.xploit.storage
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return rllte
