"""How a program ends whose learner fails while writers are at work in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing
import os
import gymnasium as gym
import torch
from rlstore import ReplayStorage, StorageClosedError

def act(writer):
    seen, flag, time = torch.zeros(1, 2), torch.zeros(1, dtype=torch.bool), 0
    try:
        while True:
            writer.add(seen, torch.zeros(1, dtype=torch.int64), torch.ones(1), flag, flag, {}, seen)
    except StorageClosedError:
        os.write(1, b"told ")  # in one piece: two processes write

if __name__ == "__main__":
    space = gym.spaces.Box(-1, 1, (2,))
    storage = ReplayStorage(space, gym.spaces.Discrete(2), "cpu", 100, 2, 4, memory="shared", timeout=1000.0)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=act, args=(storage.writer(1),)) for _ in range(2)]
    for process in processes:
        process.start()
    while len(storage) < 10:
        processes[0].join(0.01)
    raise ValueError("in the training code")
"""


def test_writers_are_told_when_the_learner_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.rstrip().endswith("ValueError: in the training code")
    assert run.stdout.split() == ["told", "told"]
