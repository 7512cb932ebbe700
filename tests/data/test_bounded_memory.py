"""Files that are larger than the memory that writing and reading them takes."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np
from gymnasium import spaces
from rlstore.data import *

folder = Path(sys.argv[1])
noise = np.random.default_rng(0).normal(size=(1001, 500)).astype(np.float32)

def episodes(count):
    for number in range(count):
        steps = {"actions": np.arange(1000) % 4, "rewards": np.full(1000, number, np.float32)}
        yield {"observations": noise + number, "truncated": True, **steps}

def minari(given, name):
    box = spaces.Box(-np.inf, np.inf, (500,), np.float32)
    write_minari(given, f"{name}-v0", observation_space=box, action_space=spaces.Discrete(4))
    return read_minari(f"{name}-v0")

def parquet(given, name):
    write_parquet(given, folder / name)
    return read_parquet(folder / name)

def npz(given, name):
    write_npz(given, folder / name)
    return read_npz(folder / name)

def peak(through, count):
    read = through(episodes(count), f"{through.__name__}{count}")
    assert sum(episode["rewards"].sum() for episode in read) == 1000 * sum(range(count))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

# In the order of what they need, because the peak of a process never falls.
for through in (npz, minari, parquet):
    print(through.__name__, -peak(through, 8) + peak(through, 32))
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """64 MB need as much as 16, for every format."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {**os.environ, "MINARI_DATASETS_PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = {name: int(nbytes) for name, nbytes in map(str.split, done.stdout.splitlines())}
    assert grown.keys() == {"npz", "minari", "parquet"}
    assert max(grown.values()) < 24 << 20, grown
