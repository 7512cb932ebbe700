"""Writers of a shared storage, killed at any moment while others write and a learner samples."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import warnings

import torch
from shared_kinds import PRIORITIZED
from shared_segments import inodes_of, processes_with
from shared_steps import DEADLINE, kill, start, write_plan

FORK = multiprocessing.get_context("fork")
LANES = 4


def kill_writers(kind, rounds):
    """No hang, no torn row, each death counted once, every lane free at the end, and nothing left behind."""
    others = inodes_of("self")
    storage = kind.make(lanes=LANES, steps=200, memory="shared", batch_size=256)
    inodes = inodes_of("self") - others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a writer died, and that episodes are broken off
        _kill_one_after_another(kind, storage, rounds)
        with storage.writer() as writer:  # every lane is free
            assert writer.num_envs == LANES
            for step in kind.plan(range(LANES), 20):
                writer.add(**step)
        kind.check(storage.sample(), cut=True)
    assert processes_with(inodes) == {os.getpid()}
    storage.close()
    del storage, writer
    gc.collect()
    assert processes_with(inodes) == set()
    assert [name for name in os.listdir("/dev/shm") if "rlstore" in name] == []


def _kill_one_after_another(kind, storage, rounds):
    random_ = random.Random(0)
    writers = [storage.writer(1) for _ in range(LANES)]
    plans = [kind.plan([lane], 100, seed=lane) for lane in range(LANES)]
    processes = [_begin(writer, plan) for writer, plan in zip(writers, plans, strict=True)]
    for number in range(rounds):
        for _ in range(random_.randrange(1, 6)):
            batch = storage.sample()
            kind.check(batch, cut=True)
            if kind is PRIORITIZED:
                storage.update(batch.rows, torch.rand(len(batch.rows)))
        lane = random_.randrange(LANES)
        kill(processes[lane])
        if number % 2:  # else the next writer of the lane finds it
            assert storage.lost_writers == number + 1
        processes[lane] = _begin(writers[lane], plans[lane])
    for process in processes:
        kill(process)
    assert storage.lost_writers == rounds + LANES


def _begin(writer, plan):
    """A process that goes on writing, and has written the plan once."""
    once = FORK.Event()
    process = start("fork", write_plan, writer, plan, None, once)
    assert once.wait(DEADLINE)
    return process
