"""A process that saves again and again, beside loads."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import torch
from gymnasium import spaces

from rlstore import ReplayStorage, Storage


def _save_for_ever(folder: Path) -> None:
    """Save a storage whose rewards are all the number of the save."""
    storage = make(0)
    number = 0
    while True:
        storage.reset()
        number += 1
        add(storage, number)
        storage.save(folder)


def make(seed: int) -> ReplayStorage:
    """A small storage."""
    return ReplayStorage(spaces.Box(-1, 1, (1,)), spaces.Discrete(2), storage_size=8, num_envs=2, seed=seed)


def add(storage: ReplayStorage, number: int) -> None:
    """Three steps whose rewards are all this number."""
    for _ in range(3):
        storage.add(torch.zeros(2, 1), [0, 1], [float(number)] * 2, [True] * 2, [False] * 2, {}, torch.zeros(2, 1))


def race(root: Path, loads: int) -> int:
    """Load while another process saves; every load must give one of its saves, and none an older one than before.

    Returns:
        How many different saves were seen.
    """
    storage = make(1)
    add(storage, 0)
    storage.save(root / "saved")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _save_for_ever(root / "saved")
        os._exit(1)
    try:
        seen = [0]
        for _ in range(loads):
            rewards = Storage.load(root / "saved").get_all_buffer_data()["rewards"]
            assert rewards.shape[0] == 3
            (number,) = set(rewards.flatten().tolist())
            assert number >= seen[-1]
            seen.append(int(number))
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it saves still
        return len(set(seen))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
