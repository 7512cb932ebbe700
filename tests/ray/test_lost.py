"""What happens when a node, a shard or the ledger is lost: the others serve on, and what is gone is counted."""

from __future__ import annotations

import re
import warnings

import pytest
import ray
import torch
from ray_play import check_batch, held_ids, ids_of, prioritized, step_of, until

from rlstore import PeerLostError
from rlstore.ray import serve

SAVED, SINCE = 20, 6  # steps before and after the snapshot


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_lost_node_takes_what_was_stored_since_the_snapshot_and_nothing_else(cluster, tmp_path):
    node = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    cluster.wait_for_nodes()
    served, doomed = serve_with_one_shard_on(node, tmp_path)
    writers = [served.writer(num_envs=4, batch_steps=4) for _ in range(2)]
    writers.sort(key=lambda writer: writer.place.shard)
    add_steps(writers, range(SAVED))
    served.save()
    add_steps(writers, range(SAVED, SAVED + SINCE))
    learner = served.learner(16, prefetch=2)
    before = next(learner)
    assert set(before["rows"][:, 0].tolist()) == {0, 1}

    until(lambda: known_to_ledger(served, doomed) == (SAVED + SINCE) * 4, "that the ledger knows of the inserts")
    cluster.remove_node(node, allow_graceful=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        until(lambda: serves_on(served, learner, doomed), "the loss of the shard")
    gone = f"shard {doomed} of .* is gone.*The other shards serve on"
    assert all(re.search(gone, str(warning.message)) for warning in said)
    assert len(said) == learner._health.absences
    until(lambda: served.report().restarts == 1, "the restart of the shard")
    report = served.report()
    assert (report.lost_in_shards, report.shards[doomed].lost) == (SINCE * 4, SINCE * 4), report
    assert report.shards[doomed].restored == SAVED * 4
    assert report.held == (2 * SAVED + SINCE) * 4
    assert f"shard {doomed} was restarted 1 times: {SINCE * 4} transitions lost, {SAVED * 4} restored" in str(report)

    until(lambda: doomed in next(learner)["rows"][:, 0].tolist(), "a batch from the restarted shard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether its first call or a later one meets the loss
        add_steps(writers, range(100, 103))
    ids = [held_ids(data) for data in served.each("get_all_buffer_data")]
    assert ids[1 - doomed] == number_ids(1 - doomed, range(SAVED + SINCE)) | number_ids(1 - doomed, range(100, 103))
    came = number_ids(doomed, range(SAVED)) | number_ids(doomed, range(100, 103))
    assert number_ids(doomed, range(SAVED)) <= ids[doomed] <= came
    assert len(came - ids[doomed]) == writers[doomed].lost == served.report().lost_in_flight

    stale = served.report().stale_updates
    learner.update(before["rows"], torch.ones(16))  # those of the life that is over come too late
    learner.flush()
    late = int((before["rows"][:, 0] == doomed).sum())
    assert served.report().stale_updates - stale == late > 0
    learner.close()
    check_ledger_comes_back(served)
    for writer in writers:
        writer.close()
    served.shutdown()
    check_a_new_one_goes_on(tmp_path, ids)


def known_to_ledger(served, shard):
    return ray.get(served._connection.ledger.report.remote())["shards"][shard].state.inserted


def serve_with_one_shard_on(node, folder):
    """Ray spreads actors as well as it can: until one of two shards is on the node."""
    for _ in range(10):
        served = serve(prioritized(num_envs=4), shards=2, deadline=60.0, snapshot_dir=folder)
        there = [shard.shard for shard in served.report().shards if node.node_id[:8] in shard.where]
        if len(there) == 1:
            return served, there[0]
        served.shutdown()
    raise AssertionError("both shards were put on one node ten times")


def number_ids(writer, steps):
    return {1_000_000 * writer + 100 * step + env + 1 for step in steps for env in range(4)}


def add_steps(writers, steps):
    for number, writer in enumerate(writers):
        for step in steps:
            writer.add(step_of(number, step, 4))
        writer.flush()


def serves_on(served, learner, doomed):
    """A batch comes. True if it met the loss and is without the lost shard, or if that was back before it was asked."""
    batch = next(learner)
    check_batch(batch)
    missed = learner._health.absences > 0 and doomed not in batch["rows"][:, 0].tolist()
    return missed or served.report().restarts > 0


def check_ledger_comes_back(served):
    """The ledger is lost too: places and counts are taken up from the shards."""
    before = served.report()
    ray.kill(served._connection.ledger, no_restart=False)
    until(lambda: served.report().ledger_restarts == 1, "the restart of the ledger")
    after = served.report()
    for name in ("inserted", "held", "sampled", "lost_in_shards", "lost_in_flight", "restarts", "writers"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.limiter_inserted == before.limiter_inserted


def check_a_new_one_goes_on(folder, ids):
    """A storage that is served from the same folder has what the last snapshots held."""
    again = serve(prioritized(num_envs=4), shards=2, deadline=60.0, snapshot_dir=folder)
    held = [held_ids(data) for data in again.each("get_all_buffer_data")]
    assert held == [ids_of(number, SAVED, 4) for number in range(2)]
    report = again.report()
    assert (report.held, report.restarts, report.lost_in_shards) == (2 * SAVED * 4, 0, 0), report
    assert report.limiter_inserted == 2 * SAVED * 4
    again.shutdown()


def test_a_storage_that_is_shut_down_is_said_to_be_gone(cluster):
    served = serve(prioritized(num_envs=2), shards=1, deadline=60.0)
    learner, writer = served.learner(4), served.writer()
    served.shutdown()
    with pytest.raises(PeerLostError, match=r"the ledger of rlstore-.* is gone for good"):
        next(learner)
    writer.add(step_of(0, 0, 2))
    with pytest.raises(PeerLostError, match="the ledger"):
        writer.flush()
    assert writer.lost == 2
