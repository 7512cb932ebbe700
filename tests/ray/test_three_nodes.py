"""A three-node cluster on one machine: many transitions, a lost node, a rate limit, deaths; in short and in long."""

from __future__ import annotations

import time
import warnings
from functools import partial

import numpy as np
import pytest
import ray
import torch
from ray_play import chi_square, held_ids, prioritized, until

from rlstore import Journal, RateLimit
from rlstore.ray import serve

WRITERS, ENVS, STEPS = 4, 16, 15_625  # a million in all
BATCH = 1000


def short_and_long(names, short, long):
    """Two sizes of a test: that of every run, and that of `make torture`."""
    return pytest.mark.parametrize(
        names, [short, pytest.param(*long, marks=[pytest.mark.torture, pytest.mark.timeout(1200)])]
    )


def sample(writer, step, steps=STEPS):
    """As of ray_play, with ids that are dense, so that a million of them are told apart in float32."""
    ids = torch.arange(ENVS) + ENVS * (step + steps * writer)
    return {
        "observations": torch.stack([ids, -ids], 1).float(),
        "actions": ids,
        "rewards": ids.float(),
        "terminated": torch.zeros(ENVS, dtype=torch.bool),
        "truncated": torch.zeros(ENVS, dtype=torch.bool),
        "next_observations": torch.stack([ids + ENVS, -ids - ENVS], 1).float(),
    }


@ray.remote(num_cpus=0.1, max_concurrency=2)
class Writer:
    """Writes steps until it has written enough or is told to stop."""

    def __init__(self, served, number):
        warnings.simplefilter("ignore")
        self.writer, self.number, self.goes_on, self.step = served.writer(num_envs=ENVS), number, True, 0

    def write(self, steps, pauses=()):
        while self.step < steps and self.goes_on:
            self.writer.add(sample(self.number, self.step % STEPS, min(steps, STEPS)))
            self.step += 1
            if pauses:
                time.sleep(pauses[self.step // 50 % len(pauses)])
        self.writer.flush()
        return self.writer.added, self.writer.lost

    def stop(self):
        self.goes_on = False

    def close(self):
        self.writer.close()


@pytest.fixture(scope="module")
def three_nodes(cluster):
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=200_000_000) for _ in range(2)]
    cluster.wait_for_nodes()
    return cluster, nodes


@short_and_long(("steps", "batches"), (300, 120), (STEPS, 400))
def test_all_transitions_are_there_once_and_are_drawn_by_priority(three_nodes, steps, batches):
    factory = prioritized(size=41 * steps, num_envs=2 * ENVS, beta=1.0)
    served, _ = serve_until(lambda shards: len({s.where.split(",")[0] for s in shards}) == 3, factory, deadline=300.0)
    writers = [Writer.remote(served, number) for number in range(WRITERS)]
    written = ray.get([writer.write.remote(steps) for writer in writers], timeout=900)
    assert written == [(steps * ENVS, 0)] * WRITERS
    held = [held_ids(data) for data in served.each("get_all_buffer_data")]
    assert set().union(*held) == set(range(WRITERS * ENVS * steps))
    assert sum(map(len, held)) == served.report().held == served.report().inserted == WRITERS * ENVS * steps

    rows, priorities = [], []
    with served.learner(1) as learner:
        for shard in served.report().shards:
            mine = torch.from_numpy(held_rows(served, shard.shard))
            value = (1.0 + mine % 13) * (1 + 2 * shard.shard)
            for part in torch.arange(len(mine)).split(50_000):
                ids = torch.full((len(part),), shard.shard), mine[part], torch.full((len(part),), shard.generation)
                learner.update(torch.stack(ids, 1), value[part])
            rows.append(mine.numpy())
            priorities.append(value.numpy())
        learner.flush()
    total = sum(float(value.sum()) for value in priorities)
    # Cells: the shard, the row's remainder (and so its priority), and where in the shard it lies.
    cells = {}
    for shard in range(3):
        keys = cell_of(shard, rows[shard], steps)
        for key in np.unique(keys):
            cells[int(key)] = float(priorities[shard][keys == key].sum()) / total * batches * BATCH
    counts = dict.fromkeys(cells, 0)
    with served.learner(BATCH, prefetch=3, seed=5) as learner:
        for _ in range(batches):
            batch = next(learner)
            drawn = batch["rows"].numpy()
            assert torch.equal(batch["rewards"].flatten(), batch["actions"].float())
            for shard in range(3):
                keys, many = np.unique(cell_of(shard, drawn[drawn[:, 0] == shard, 1], steps), return_counts=True)
                for key, count in zip(keys.tolist(), many.tolist(), strict=True):
                    counts[key] += count
            p = (1.0 + drawn[:, 1] % 13) * (1 + 2 * drawn[:, 0])
            assert np.allclose(batch["weights"].flatten().numpy(), p.min() / p, rtol=1e-4)
    statistic, bound = chi_square([counts[key] for key in cells], list(cells.values()))
    assert statistic < bound
    served.shutdown()


def held_rows(served, shard):
    masks = served.each("get_all_buffer_data")[shard]["masks"]
    return np.flatnonzero(masks.flatten().numpy())


def cell_of(shard, rows, steps):
    return shard * 10_000 + (rows * 16 // (41 * steps)) * 13 + rows % 13


def serve_until(well_spread, factory, **options):
    """Ray spreads actors as well as it can: until three shards lie as they should, and what was found of them."""
    for _ in range(10):
        served = serve(factory, 3, **options)
        found = well_spread(served.report().shards)
        if found:
            return served, found
        served.shutdown()
    raise AssertionError("the shards did not lie as they should in ten times")


def one_shard_alone(nodes, shards):
    """A node with one shard, and that shard; None if there is none."""
    there = [(node, [s.shard for s in shards if node.node_id[:8] in s.where]) for node in nodes]
    return next(((node, mine[0]) for node, mine in there if len(mine) == 1), None)


@short_and_long(("batches", "saved"), (60, 2_000), (600, 20_000))
def test_a_node_lost_in_mid_run_stops_nobody_for_longer_than_the_deadline(three_nodes, tmp_path, batches, saved):
    cluster, nodes = three_nodes
    deadline = 60.0
    options = {"deadline": deadline, "snapshot_dir": tmp_path, "snapshot_every": saved}
    factory = prioritized(size=100_000, num_envs=2 * ENVS)
    served, (node, doomed) = serve_until(lambda shards: one_shard_alone(nodes, shards), factory, **options)
    nodes.remove(node)
    head = ray.get_runtime_context().get_node_id()
    on_head = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(head, soft=False)
    writers = [Writer.options(scheduling_strategy=on_head).remote(served, number) for number in range(WRITERS)]
    running = [writer.write.remote(10**9, pauses=(0.0, 0.002)) for writer in writers]
    learner = served.learner(256, prefetch=2)
    until(lambda: served.report().shards[doomed].snapshots, "a snapshot of the shard", 120)
    longest, learned, removed = 0.0, 0, 0.0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while served.report().restarts == 0 or learned < batches:
            if learned == batches // 3:
                cluster.remove_node(node, allow_graceful=False)
                removed = time.monotonic()
            start = time.monotonic()
            batch = next(learner)
            longest = max(longest, time.monotonic() - start)
            learner.update(batch["rows"], batch["rewards"] * 0 + 1)
            learned += 1
            assert not removed or time.monotonic() - removed < 3 * deadline
    assert longest < deadline
    assert any(f"shard {doomed} of" in str(warning.message) for warning in told)
    until(lambda: doomed in next(learner)["rows"][:, 0].tolist(), "a batch from the restarted shard")
    for writer in writers:
        writer.stop.remote()
    sent = ray.get(running, timeout=120)
    learner.close()
    report = served.report()
    added, lost = (sum(part) for part in zip(*sent, strict=True))
    assert report.lost_in_flight == lost
    assert report.restarts == 1
    assert report.shards[doomed].restored >= saved
    assert report.lost_in_shards == report.shards[doomed].lost  # none, if it was saved just before
    # What was sent was stored or lost; a call that died with the shard may have been both.
    assert added <= report.inserted + lost <= added + lost
    assert f"shard {doomed} was restarted 1 times: {report.lost_in_shards} transitions lost" in str(report)
    served.shutdown()


@short_and_long(("ratio", "samples"), (1.0, 10_000), (8.0, 100_000))
def test_the_ratio_holds_over_many_samples_with_changing_speeds(three_nodes, ratio, samples):
    limit = RateLimit(ratio, min_size=1000)
    served = serve(prioritized(size=100_000, num_envs=2 * ENVS), shards=2, rate_limit=limit, deadline=120.0)
    writers = [Writer.remote(served, number) for number in range(2)]
    running = [writer.write.remote(10**9, pauses=(0.0, 0.01, 0.001)) for writer in writers]
    rng, drawn = np.random.default_rng(0), 0
    with served.learner(256, prefetch=2) as learner:
        while drawn < samples:
            next(learner)
            drawn += 256
            if rng.random() < 0.1:
                time.sleep(rng.choice([0.005, 0.05]))
        report = served.report()
    served.set_rate_limit(None)
    for writer in writers:
        writer.stop.remote()
    ray.get(running, timeout=120)
    # Permits are given for whole batches ahead: a number that does not grow with the samples.
    assert abs(report.limiter_sampled - (report.limiter_inserted - 1000) * ratio) <= 1_000 + 500 * ratio
    served.shutdown()


def was_restarted(served, times):
    report = served.report()
    return report.ledger_restarts == report.restarts == times


@short_and_long("rounds", 1, (12,))
def test_the_ledger_and_a_shard_killed_together_again_and_again(three_nodes, tmp_path, rounds):
    """What was committed is there, and what was inserted is held or was lost; judged after each round."""
    rng = np.random.default_rng(0)
    factory = prioritized(size=2_000_000, num_envs=2 * ENVS)
    served = serve(factory, shards=2, deadline=120.0, journal=Journal(tmp_path, interval=0.2))
    writers = sorted((served.writer(num_envs=ENVS, batch_steps=4) for _ in range(2)), key=lambda one: one.place.shard)
    step = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a shard is gone
        for times in range(1, rounds + 1):
            saved = [set(), set()]
            for number in range(int(rng.integers(20, 400))):
                for index, writer in enumerate(writers):
                    writer.add(sample(index, step))
                step += 1
                if number == 10:
                    for writer in writers:
                        writer.flush()
                    served.save()
                    saved = [held_ids(data) for data in served.each("get_all_buffer_data")]
            doomed = int(rng.integers(2))
            for actor in rng.permutation([served._connection.ledger, served._connection.shards[doomed]]):
                ray.kill(actor, no_restart=False)
            until(partial(was_restarted, served, times), "the restart of both", 120)
            for index, writer in enumerate(writers):
                writer.add(sample(index, step))  # who now learns that its shard is another one
                writer.flush()
            step += 1
            report = served.report()
            held = [held_ids(data) for data in served.each("get_all_buffer_data")]
            assert [len(ids) for ids in held] == [shard.held for shard in report.shards]
            assert all(before <= ids for before, ids in zip(saved, held, strict=True))
            assert report.inserted == report.held + report.lost_in_shards
            added, lost = (sum(getattr(writer, name) for writer in writers) for name in ("added", "lost"))
            assert report.lost_in_flight == lost
            # A call that died with the shard may have been stored, and is told to be lost as well.
            assert added <= report.inserted + lost <= added + lost
    served.save()
    report, held = served.report(), [held_ids(data) for data in served.each("get_all_buffer_data")]
    served.shutdown()
    again = serve(factory, shards=2, deadline=120.0, journal=tmp_path)  # while the processes are being ended
    assert [held_ids(data) for data in again.each("get_all_buffer_data")] == held
    restored = again.report()
    for name in ("inserted", "held", "lost_in_shards", "lost_in_flight"):
        assert getattr(restored, name) == getattr(report, name), name
    assert (
        restored.limiter_inserted >= restored.inserted
    )  # a restarted ledger forgets permits, and not what they led to
    again.shutdown()
