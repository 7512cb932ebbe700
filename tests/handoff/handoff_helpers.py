"""What the tests of the hand-off share: a small storage, rollouts that can be told apart, and processes to kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import torch
from gymnasium import spaces

from rlstore import DistributedStorage

STEPS = 3
FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
SECONDS = 30.0  # what does not come by then never will


def make(**given):
    arguments = {"num_steps": STEPS, "num_storages": 4, "batch_size": 2, "state_shapes": ((2, 5),), "timeout": SECONDS}
    return DistributedStorage(spaces.Box(0, 255, (2, 3), np.uint8), spaces.Discrete(4), **{**arguments, **given})


def row_values(number: int, t: int) -> dict:
    """What row t of rollout ``number`` holds: in every key something that no other row of any rollout has."""
    mark = number * (STEPS + 1) + t
    return {
        "obs": torch.full((2, 3), mark % 256, dtype=torch.uint8),
        "reward": mark + 0.25,
        "terminated": mark % 2 == 1,
        "truncated": mark % 3 == 1,
        "episode_return": mark + 0.5,
        "episode_step": mark,
        "last_action": mark + 1000,
        "policy_outputs": torch.arange(4) + mark / 4,
        "baseline": -mark,
        "action": mark + 2000,
    }


def fill(rollout, number: int) -> None:
    for t in range(STEPS + 1):
        rollout.write(t, **row_values(number, t))
    rollout.set_states((torch.full((2, 1, 5), number / 8),))


def act(handle, numbers) -> None:
    """An actor: commits rollouts of these numbers, the number as version too."""
    for number in numbers:
        with handle.rollout(version=number) as rollout:
            fill(rollout, number)


def assert_is_rollout(batch, column: int, number: int) -> None:
    for t in range(STEPS + 1):
        for key, expected in row_values(number, t).items():
            got = batch[key][t, column]
            assert torch.equal(got, torch.as_tensor(expected).to(got.dtype).expand_as(got)), (key, t)


def assert_batch(batch, numbers) -> None:
    """The batch holds exactly these rollouts, in this order."""
    assert batch.versions.tolist() == list(numbers)
    for column, number in enumerate(numbers):
        assert_is_rollout(batch, column, number)
        assert torch.equal(batch.states[0][:, column], torch.full((2, 5), number / 8))


def _act_then_hold(handle, numbers, holding) -> None:
    act(handle, numbers)
    rollout = handle.reserve()
    rollout.write(0, **row_values(9, 0))
    holding.send(rollout.slot)
    holding.recv()


@contextmanager
def actor_in_the_middle(handle, numbers=()):
    """An actor process that has committed these rollouts and is writing another; its process and that slot."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_act_then_hold, args=(handle, numbers, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours.recv()
    finally:
        kill(process)


def kill(process) -> None:
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)


def until(condition) -> None:
    """Look again and again until something is so, which it will be soon."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def finish(*processes) -> None:
    """Wait for processes that end by themselves, in good order."""
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode == 0
