"""The two sides of a rate limit, each faster or slower from time to time; and whether the ratio holds."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from shared_kinds import REPLAY
from shared_steps import join, start

from rlstore import RateLimit, StorageClosedError

RATIO = 4.0


def work(amount):
    """Something that takes time without a sleep."""
    return sum(range(amount))


def add_at_changing_speed(writer, plan):
    """Until the storage is closed; a hundred fast steps, a hundred slow ones, a hundred in between."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        for number in itertools.count():
            writer.add(**plan[number % len(plan)])
            work((0, 4000, 400)[number // 100 % 3])
    except StorageClosedError:
        return


def sample_at_changing_speed(storage, entries, check):
    """Take so many entries of batches, in runs of slow and fast batches of different sizes."""
    taken = 0
    for number in itertools.count():
        size = (32, 8, 16)[number % 3]
        check(storage.sample(size))
        taken += size
        work((6000, 0, 500)[number // 40 % 3])
        if taken >= entries:
            return


def hold_ratio(lanes, steps, runs, entries):
    """Writers beside ``runs`` runs of so many samples: the ratio holds after each, and in all within 5 %."""
    first = lanes * steps // 8
    limit = RateLimit(RATIO, min_size=first)
    storage = REPLAY.make(lanes=lanes, steps=steps, memory="shared", batch_size=32, rate_limit=limit)
    plans = [REPLAY.plan([lane], 500, seed=lane) for lane in range(lanes)]
    processes = [start("fork", add_at_changing_speed, storage.writer(1), plan) for plan in plans]
    limiter = storage._sharing.control.limiter
    for _ in range(runs):
        sample_at_changing_speed(storage, entries, REPLAY.check)
        inserted, sampled = limiter.inserted, limiter.sampled
        assert abs((inserted - first) * RATIO - sampled) <= 64 + lanes * RATIO
    assert limiter.sampled / (limiter.inserted - first) == pytest.approx(RATIO, rel=0.05)
    storage.close()
    join(*processes)
