"""The two sides of a rate limit, each faster or slower from time to time."""

from __future__ import annotations

import itertools
import warnings

import torch

from rlstore import StorageClosedError

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
