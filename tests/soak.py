"""Actors, writers and learners at work together: memory stays flat, nothing gets stuck, the counts add up."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from rlstore import DistributedStorage, PrioritizedReplayStorage, RateLimit, StorageClosedError

STEPS, SLOTS, BATCH = 20, 8, 4
FRAMES = gym.spaces.Box(0, 255, (4, 42, 42), np.uint8)
VECTORS = gym.spaces.Box(-np.inf, np.inf, (17,), np.float32)
ACTIONS = gym.spaces.Discrete(4)
MOST_GROWTH = 8 << 20  # bytes that a process may grow by after the first fifth of the batches
FORK = multiprocessing.get_context("fork")


def resident(pid: int) -> int:
    """Bytes of a process that are its own or shared, as the kernel counts them; without pages of shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def roll(actor, number, counts):
    torch.set_num_threads(1)
    try:
        while True:
            with actor.rollout(version=number) as rollout:
                for t in range(STEPS + 1):
                    rollout["obs"][t] = number
                    rollout["reward"][t] = t
            counts[number] += 1
    except StorageClosedError:
        actor.close()


def add(writer, number, counts):
    torch.set_num_threads(1)
    step, seen = 0, np.full(17, number, np.float32)
    try:
        while True:
            ended = step % 50 == 49
            writer.add(seen, step % 4, float(step), ended, False, {}, seen)
            counts[number] += 1
            step += 1
    except StorageClosedError:
        writer.close()


def soak(batches):
    """Learn from so many batches of rollouts and of replay, which two actors and two writers make."""
    rollouts = DistributedStorage(FRAMES, ACTIONS, num_steps=STEPS, num_storages=SLOTS, batch_size=BATCH)
    limit = RateLimit(samples_per_insert=8, min_size=1_000, tolerance=4_096)
    replay = PrioritizedReplayStorage(
        VECTORS, ACTIONS, storage_size=20_000, num_envs=2, memory="shared", rate_limit=limit, autoreset="Disabled"
    )
    made, added = FORK.Array("q", 2), FORK.Array("q", 2)
    processes = [FORK.Process(target=roll, args=(rollouts.actor(), i, made)) for i in range(2)]
    writers = [replay.writer(1) for _ in range(2)]
    processes += [FORK.Process(target=add, args=(writers[i], i, added)) for i in range(2)]
    for process in processes:
        process.start()
    everyone = (os.getpid(), *(process.pid for process in processes))
    learner, samples = rollouts.learner(), 0
    settled: list[int] = []
    for number in range(batches):
        batch = next(learner)
        assert torch.equal(batch["reward"], torch.arange(STEPS + 1.0)[:, None].expand(-1, BATCH))
        assert torch.equal(batch["obs"][-1, :, 0, 0, 0].long(), batch.versions)
        drawn = replay.sample()
        replay.update(drawn.rows, torch.rand(len(drawn.rows)))
        samples += len(drawn.rows)
        if number == batches // 5:
            settled = [resident(pid) for pid in everyone]
    grown = [resident(pid) - before for pid, before in zip(everyone, settled, strict=True)]
    learner.close()
    lost_writers = replay.lost_writers
    rollouts.close()
    replay.close()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    report = rollouts.report()
    assert max(grown) < MOST_GROWTH, grown
    # What actors say that they committed is what was served and what is left.
    assert sum(made) == report.committed == report.served + report.full + report.reading
    assert report.served >= batches * BATCH
    assert report.free + report.writing + report.full + report.reading == SLOTS
    assert (report.lost_actors, report.reclaimed, lost_writers) == (0, 0, 0)
    limiter = replay._sharing.control.limiter
    assert limiter.sampled == samples
    assert abs(limiter.inserted - sum(added)) <= 2
    assert abs((limiter.inserted - 1_000) * 8 - samples) <= 4_096 + 8
