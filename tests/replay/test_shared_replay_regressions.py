"""Bugs of replay with writers that were found by reading, each with the shortest program that shows it."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlstore import NStepReplayStorage, PrioritizedReplayStorage, ReplayStorage, SequenceReplayStorage
from rlstore.engine.lane_control import LaneControl

OBSERVATIONS = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)
ACTIONS = gym.spaces.Discrete(5)


def put(target: Any, time: int, envs: int = 1, ended: bool = False) -> None:
    """Add one step of each environment; observations and rewards are its number, ``1e6 * env + time``."""
    ids = torch.arange(envs) * 1e6 + time
    seen = ids.unsqueeze(1).expand(envs, 3).contiguous()
    flags = torch.zeros(envs, dtype=torch.bool)
    target.add(seen, torch.zeros(envs, dtype=torch.int64), ids, flags | ended, flags, {}, seen + 1)


@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.parametrize("behind", [13, 20, 33, 59])
def test_only_windows_have_priorities_when_a_writer_ran_ahead(memory: str, behind: int) -> None:
    storage = SequenceReplayStorage(
        OBSERVATIONS, ACTIONS, "cpu", 20, 1, 8, sequence_length=4, alpha=1.0, memory=memory, autoreset="Disabled"
    )
    writer = storage.writer()
    for time in range(4 * behind):
        put(writer, time)
        if time % behind == behind - 1:
            batch = storage.sample()
            assert bool((batch.rows % 4 == 0).all())
            storage.update(batch.rows, torch.ones(8))  # refused if no window begins at one of them
    writer.close()


def test_a_lane_that_has_a_new_writer_is_not_taken_from_it() -> None:
    """Two processes find a writer dead; the slower one must not take lanes that the other has given to a new writer."""
    control = LaneControl(2, shared=False)
    dead, new = control.peers.join("writer", "dead"), control.peers.join("writer", "new")
    control.claim(range(2), dead, lambda lane: None)

    def overtaken(lane: int) -> None:
        if lane == 0:  # meanwhile the other process does all of it
            control.reclaim(dead, lambda lane: None)
            control.claim(range(1, 2), new, lambda lane: None)

    control.reclaim(dead, overtaken)
    control.enter(1, new, 1.0)
    control.leave(1)


@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayStorage, SequenceReplayStorage])
def test_a_storage_made_in_inference_mode_can_be_emptied_outside(kind: Any, memory: str) -> None:
    more = {"sequence_length": 2, "alpha": 0.5} if kind is SequenceReplayStorage else {}
    with torch.inference_mode():
        storage = kind(OBSERVATIONS, ACTIONS, "cpu", 20, 1, 4, memory=memory, **more)
        put(storage, 0)
    storage.reset()
    for time in range(60):
        put(storage, time)
    assert bool((storage.sample().observations >= 40).all())


def test_a_writer_of_this_process_does_not_write_what_is_being_prepared() -> None:
    storage = NStepReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 16, 1, 64, num_workers=2, n_step=1)
    for time in range(16):
        put(storage, time)
    storage.sample()  # others are prepared behind it
    writer = storage.writer()
    for time in range(16, 200):
        put(writer, time)
        if time % 10 == 0:
            batch = storage.sample()
            assert torch.equal(batch.observations[:, :1], batch.rewards)
            assert bool((batch.rewards > time - 16).all())
    writer.close()
    storage.close()


def test_a_writer_in_a_thread_waits_while_a_batch_is_read() -> None:
    storage = ReplayStorage(OBSERVATIONS, ACTIONS, "cpu", 16, 1, 256, memory="ram")
    writer, done = storage.writer(), threading.Event()
    for time in range(16):
        put(writer, time)

    def act() -> None:
        for time in range(16, 3000):
            put(writer, time)
        done.set()

    thread = threading.Thread(target=act)
    thread.start()
    while not done.is_set():
        batch = storage.sample()  # was: IndexError, a row is not held
        assert torch.equal(batch.observations, batch.rewards.expand(256, 3))
    thread.join()
