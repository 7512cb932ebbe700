"""Long proofs of shared replay: many samples at a ratio, and many deaths under load."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "replay"))

from rate_sides import RATIO, add_at_changing_speed, sample_at_changing_speed
from shared_kinds import PRIORITIZED, REPLAY, SEQUENCE
from shared_steps import DEADLINE, join, kill, start, write_plan

from rlstore import RateLimit

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
FORK = multiprocessing.get_context("fork")
ROUNDS = 200


def test_the_ratio_holds_over_a_hundred_thousand_samples():
    storage = REPLAY.make(
        lanes=4, steps=2000, memory="shared", batch_size=32, rate_limit=RateLimit(RATIO, min_size=1000)
    )
    plans = [REPLAY.plan([lane], 500, seed=lane) for lane in range(4)]
    processes = [start("fork", add_at_changing_speed, storage.writer(1), plan) for plan in plans]
    limiter = storage._sharing.control.limiter
    for _ in range(10):
        sample_at_changing_speed(storage, 10_000, REPLAY.check)
        inserted, sampled = limiter.inserted, limiter.sampled
        assert abs((inserted - 1000) * RATIO - sampled) <= 64 + 4 * RATIO
    assert limiter.sampled / (limiter.inserted - 1000) == pytest.approx(RATIO, rel=0.05)
    storage.close()
    join(*processes)


def holders(inodes):
    """The processes that have one of these files open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:rlstore" in os.readlink(link) and os.stat(link).st_ino in inodes:
                found.add(int(link.parts[2]))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def begin(writer, plan):
    """A process that goes on writing, and has written the plan once."""
    once = FORK.Event()
    process = start("fork", write_plan, writer, plan, None, once)
    assert once.wait(DEADLINE)
    return process


@pytest.mark.parametrize("kind", [REPLAY, PRIORITIZED, SEQUENCE], ids=repr)
def test_writers_killed_at_random_under_load_cost_their_own_episodes_alone(kind):
    """No hang, no torn row, each death counted once, every lane free at the end, and nothing left behind."""
    random_, lanes = random.Random(0), 4
    storage = kind.make(lanes=lanes, steps=200, memory="shared", batch_size=256)
    writers = [storage.writer(1) for _ in range(lanes)]
    segments = (storage._ring_of().backing.segment, storage._controlled().segment)
    inodes = {os.fstat(segment._descriptor).st_ino for segment in segments}
    plans = [kind.plan([lane], 100, seed=lane) for lane in range(lanes)]
    processes = [begin(writer, plan) for writer, plan in zip(writers, plans, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a writer died, and that episodes are broken off
        for number in range(ROUNDS):
            for _ in range(random_.randrange(1, 6)):
                batch = storage.sample()
                kind.check(batch, cut=True)
                if kind is PRIORITIZED:
                    storage.update(batch.rows, torch.rand(len(batch.rows)))
            lane = random_.randrange(lanes)
            kill(processes[lane])
            if number % 2:  # else the next writer of the lane finds it
                assert storage.lost_writers == number + 1
            processes[lane] = begin(writers[lane], plans[lane])
        for process in processes:
            kill(process)
        assert storage.lost_writers == ROUNDS + lanes
        with storage.writer() as writer:  # every lane is free
            assert writer.num_envs == lanes
            for step in kind.plan(range(lanes), 20):
                writer.add(**step)
        kind.check(storage.sample(), cut=True)
    assert holders(inodes) == {os.getpid()}
    storage.close()
    del storage, writers, writer, segments
    gc.collect()
    assert holders(inodes) == set()
    assert [name for name in os.listdir("/dev/shm") if "rlstore" in name or str(os.getpid()) in name] == []
