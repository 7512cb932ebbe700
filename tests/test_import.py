"""What an import brings in: nothing until a name is used, and tensordict only for observations with names."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import rlstore


def modules_after(program: str) -> set[str]:
    """Which of torch and tensordict a new process has imported at the end of a program."""
    shown = "import sys; print(*{'torch', 'tensordict'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{program}\n{shown}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_alone_imports_nothing():
    assert modules_after("import rlstore; rlstore.__version__; import rlstore.__main__") == set()


def test_a_storage_without_names_in_its_observations_does_without_tensordict():
    program = """
import torch
from gymnasium.spaces import Box, Discrete
from rlstore import ReplayStorage

storage = ReplayStorage(Box(-1, 1, (3,)), Discrete(2), num_envs=2, batch_size=4)
storage.add(torch.zeros(2, 3), [0, 1], [0.5, 1.5], [False, False], [False, False], {}, torch.zeros(2, 3))
assert set(storage.sample().rewards.flatten().tolist()) <= {0.5, 1.5}
"""
    served = "import rlstore.ray" if find_spec("ray") else ""  # as every process of a served storage does
    assert modules_after(served + program) == {"torch"}


def test_every_name_and_module_is_there_after_an_import_of_the_package():
    program = """
import rlstore
assert rlstore.engine.returns.gae
assert set(rlstore.__all__) <= set(dir(rlstore))
assert not {"TYPE_CHECKING", "importlib", "sys"} & set(dir(rlstore))
from rlstore import *
assert ReplayStorage is rlstore.ReplayStorage is rlstore.replay.storage.ReplayStorage
"""
    assert "torch" in modules_after(program)


def test_an_unknown_name_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match=r"^module 'rlstore' has no attribute 'ReplyStorage'"):
        _ = rlstore.ReplyStorage
    with pytest.raises(ImportError, match="cannot import name 'ReplyStorage' from 'rlstore'"):
        exec("from rlstore import ReplyStorage")
