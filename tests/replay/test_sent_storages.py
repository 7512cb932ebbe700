"""Replay storages that multiprocessing sends: the receiver has a copy, and the sender goes on."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlstore import PrioritizedReplayStorage, ReplayStorage, SequenceReplayStorage


class OwnStorage(ReplayStorage):
    """A user's class."""


def add(storage, first, steps):
    for step in range(first, first + steps):
        now, then = np.full(2, step, np.float32), np.full(2, step + 1, np.float32)
        storage.add(now, 1, float(step), False, step % 5 == 4, {}, then)


@pytest.mark.parametrize("memory", ["ram", "shared"])
@pytest.mark.parametrize("kind", [ReplayStorage, OwnStorage, PrioritizedReplayStorage, SequenceReplayStorage])
def test_a_storage_that_was_sent_goes_on(kind, memory):
    more = {"sequence_length": 3} if kind is SequenceReplayStorage else {}
    space = Box(-999, 999, (2,)), Discrete(3)
    storage = kind(*space, storage_size=40, batch_size=8, memory=memory, seed=3, **more)
    add(storage, 0, 30)
    with pytest.warns(RuntimeWarning, match="gets a copy") if memory == "shared" else nullcontext():
        sent = ForkingPickler.dumps(storage)
    twin = pickle.loads(sent)
    for each in (storage, twin):
        add(each, 30, 30)
        assert len(each) == 40
        assert each.get_all_buffer_data()["rewards"].flatten().tolist() == list(range(20, 60))
    ours, theirs = storage.sample(), twin.sample()
    for value, other in zip(ours, theirs, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other)


def test_only_what_is_sent_and_shared_is_warned_of():
    space = Box(-999, 999, (2,)), Discrete(3)
    shared = ReplayStorage(*space, storage_size=40, num_envs=2, memory="shared")
    with pytest.warns(RuntimeWarning, match=r"this ReplayStorage with memory=\"shared\".*Send storage\.writer\(\)"):
        ForkingPickler.dumps({"storage": shared})
    pickle.loads(pickle.dumps(shared)).close()
    ForkingPickler.dumps(shared.writer(1))
    ForkingPickler.dumps(ReplayStorage(*space, storage_size=40))
    shared.close()
