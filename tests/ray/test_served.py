"""A served storage on a small cluster: what is drawn and how often, and what is left when a process dies."""

from __future__ import annotations

import pickle
import re
import warnings
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from ray_play import check_batch, chi_square, held_ids, id_of, ids_of, prioritized, step_of, until

from rlstore import (
    InvalidInputError,
    Journal,
    NotReadyError,
    PeerLostError,
    RateLimit,
    StorageClosedError,
    WaitTimeoutError,
)
from rlstore.ray import ServedStorage, serve, serving

STEPS = 60  # of each of three writers with two environments
BATCHES = 150


@pytest.fixture(scope="module")
def filled(cluster, elsewhere, tmp_path_factory):
    """Two shards with the steps of three writers: one in another process, one in two calls, one step by step."""
    folder = tmp_path_factory.mktemp("saved")
    saved = {"snapshot_dir": folder, "journal": Journal(folder, interval=3600.0)}  # committed by save() only
    served = serve(prioritized(num_envs=4, beta=0.5), shards=2, deadline=60.0, seed=3, **saved)
    remote = elsewhere(write, served, 0)
    with served.writer(num_envs=2, batch_steps=30) as one, served.writer(num_envs=2, batch_steps=1) as other:
        for step in range(STEPS):
            one.add(step_of(1, step, 2))
            other.add(step_of(2, step, 2))
    assert ray.get(remote, timeout=60) == (2 * STEPS, 0)
    yield served
    served.shutdown()


def write(served, number):
    with served.writer(num_envs=2, batch_steps=7, max_in_flight=2) as writer:
        for step in range(STEPS):
            writer.add(step_of(number, step, 2))
    return writer.added, writer.lost


def test_everything_that_was_written_is_there_once(filled):
    held = [held_ids(data) for data in filled.each("get_all_buffer_data")]
    assert held[0] | held[1] == ids_of(0, STEPS, 2) | ids_of(1, STEPS, 2) | ids_of(2, STEPS, 2)
    assert not held[0] & held[1]
    report = filled.report()
    assert (report.inserted, report.held, report.writers, report.limiter_inserted) == (360, 360, 0, 360)
    assert (report.lost_in_flight, report.lost_in_shards, report.restarts) == (0, 0, 0)
    assert "360 transitions inserted, 360 held" in str(report)


def test_the_numbers_are_those_of_both_shards_together(filled):
    found, parts = filled.stats(), filled.each("stats")
    counted = ("capacity", "bytes", "episodes", "episodes_open", "nonfinite_rewards", "dropped_batches")
    assert {name: found[name] for name in counted} == {name: sum(part[name] for part in parts) for name in counted}
    assert found["priority_max"] == max(part["priority_max"] for part in parts)
    held = [part["transitions"] for part in parts]
    for name in ("priority_mean", "row_age_mean"):
        whole = sum(part[name] * count for part, count in zip(parts, held, strict=True)) / sum(held)
        assert found[name] == pytest.approx(whole)
    assert (found["transitions"], found["inserts"], found["shards"], found["shards_down"]) == (360, 360, 2, 0)
    assert (found["lost_in_flight"], found["writers"], found["fill"]) == (0, 0, 360 / found["capacity"])
    assert found["journal_lag_inserts"] == 360
    assert found["journal_lag_seconds"] > 0


def test_batches_are_whole_rows_in_tensors_of_their_own(filled):
    with filled.learner(32, prefetch=3) as learner:
        batches = [next(learner) for _ in range(6)]
    data = filled.each("get_all_buffer_data")
    for batch in batches:
        check_batch(batch)
        assert batch["rows"].shape == (32, 3)
        for shard, row, _ in batch["rows"].tolist():
            assert 0 <= row < data[shard]["actions"].numel()
        expected = [data[shard]["actions"].flatten()[row] for shard, row, _ in batch["rows"].tolist()]
        assert batch["actions"].tolist() == [int(value) for value in expected]
        for value in batch.values():
            value.zero_()  # each is writable
    with pytest.raises(StopIteration):
        next(learner)
    with pytest.raises(StorageClosedError):
        learner.update(batches[0]["rows"], torch.ones(32))


def test_rows_are_drawn_by_their_part_of_all_priorities(filled):
    """Over both shards, as if they were one storage; and the weights are those of one storage."""
    data = filled.each("get_all_buffer_data")
    generations = [shard.generation for shard in filled.report().shards]
    rows, priorities = [], []
    for shard in range(2):
        for row, held in enumerate(data[shard]["masks"].flatten().tolist()):
            if held:
                rows.append((shard, row, generations[shard]))
                # Shard 1 has far more than its share of the total, so that a split by size would be seen.
                priorities.append((1.0 + row % 7) * (1 if shard == 0 else 5))
    with filled.learner(250, prefetch=2, seed=1) as learner:
        learner.update(torch.tensor(rows), torch.tensor(priorities))
        learner.flush()
    chance = dict(zip(rows, np.array(priorities) / sum(priorities), strict=True))
    counts = dict.fromkeys(rows, 0)
    with filled.learner(250, prefetch=6, seed=2) as learner:
        for _ in range(BATCHES):
            batch = next(learner)
            drawn = [tuple(row) for row in batch["rows"].tolist()]
            for row in drawn:
                counts[row] += 1
            weights = np.array([(chance[row] * len(rows)) ** -0.5 for row in drawn])
            assert np.allclose(batch["weights"].flatten().numpy(), weights / weights.max(), rtol=1e-4)
    statistic, bound = chi_square([counts[row] for row in rows], [chance[row] * BATCHES * 250 for row in rows])
    assert statistic < bound
    shares = np.array([sum(counts[row] for row in rows if row[0] == shard) for shard in range(2)])
    expected = np.array([sum(chance[row] for row in rows if row[0] == shard) for shard in range(2)]) * shares.sum()
    statistic, bound = chi_square(shares, expected)
    assert statistic < bound


def test_priorities_that_come_too_late_are_dropped_and_counted(filled):
    with filled.learner(16) as learner:
        rows = next(learner)["rows"]
        before = filled.report().stale_updates
        rows[:5, 2] -= 1  # a life before this one
        learner.update(rows, np.ones((16, 1)))
        learner.flush()
    assert filled.report().stale_updates - before == 5


@pytest.mark.parametrize(
    ("rows", "priorities", "says"),
    [
        (torch.zeros(4, dtype=torch.int64), torch.ones(4), r"int64 \[n, 3\]"),
        (torch.zeros(4, 3), torch.ones(4), "float32"),
        (torch.zeros(4, 3, dtype=torch.int64), torch.ones(5), "for 4 rows"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1.0, float("nan")]), "priority 1 of 2 is nan"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([-1.0, 0.0]), "priority 0 of 2 is -1"),
        (torch.full((2, 3), 2), torch.ones(2), "there are 2"),
    ],
)
def test_wrong_priorities_are_refused_before_they_are_sent(filled, rows, priorities, says):
    with filled.learner(4) as learner, pytest.raises(InvalidInputError, match=says):
        learner.update(rows, priorities)


def train(served):
    with served.learner(8, prefetch=1) as learner:
        batch = next(learner)
        learner.update(batch["rows"], torch.ones(8))
    return batch


def test_the_handle_works_in_other_processes(filled, elsewhere):
    check_batch(ray.get(elsewhere(train, pickle.loads(pickle.dumps(filled))), timeout=60))


def test_what_a_storage_refuses_is_raised_by_its_writer_and_counted(filled):
    before = filled.report()
    writer = filled.writer(num_envs=1, batch_steps=2)
    sample = step_of(3, 0, 1)
    writer.add({**sample, "next_observations": torch.zeros(1, 5)})
    with pytest.raises(InvalidInputError, match="next_observations"):
        writer.flush()
    assert (writer.added, writer.lost) == (1, 1)
    writer.close()
    with pytest.raises(StorageClosedError):
        writer.add(sample)
    after = filled.report()
    assert (after.lost_in_flight - before.lost_in_flight, after.inserted - before.inserted) == (1, 0)
    assert after.limiter_inserted == before.limiter_inserted


def test_a_writer_that_does_not_fit_is_refused(filled):
    with pytest.raises(InvalidInputError, match="no shard has room for a writer of 9 environments"):
        filled.writer(num_envs=9)


def test_the_rate_limit_holds_and_every_wait_ends_at_the_deadline(cluster):
    """Over real processes; the ledger's own tests go over many more samples."""
    served = serve(prioritized(num_envs=2), shards=1, deadline=1.0, rate_limit=RateLimit(4.0, min_size=4, tolerance=64))
    with served.learner(4) as learner, pytest.raises(WaitTimeoutError, match=r"let no sample of 4 go ahead within 1 s"):
        next(learner)
    patient = ServedStorage(replace(served._connection, deadline=60.0))
    with patient.learner(16, prefetch=2) as learner, patient.writer(batch_steps=2) as writer:
        for step in range(60):
            writer.add(step_of(0, step, 2))
            for _ in range({3: 1, 5: 2, 7: 1}.get(step % 8, 0)):  # now slower than the limit, now faster
                check_batch(next(learner))
        writer.flush()
    with served.learner(16) as learner, pytest.raises(WaitTimeoutError, match="let no sample of 16 go ahead"):
        deque(learner, maxlen=0)
    report = served.report()
    assert report.limiter_inserted == report.inserted == 120
    assert abs(report.limiter_sampled - 4 * (120 - 4)) <= 64
    writer = served.writer(batch_steps=1)
    with pytest.raises(WaitTimeoutError, match="let no insert of 2 go ahead"):
        deque((writer.add(step_of(0, step, 2)) for step in range(60, 120)), maxlen=0)
    served.set_rate_limit(None)
    writer.flush()
    with served.learner(100) as learner:
        next(learner)
    check_shut_down(served, writer)


def check_shut_down(served, writer):
    served.shutdown()
    until(lambda: is_gone(served), "the end of the ledger")
    with served.learner(4) as learner, pytest.raises(PeerLostError, match=r"the ledger of rlstore-.* is gone for good"):
        next(learner)
    lost = writer.lost
    writer.add(step_of(0, 200, 2))
    with (
        pytest.warns(UserWarning, match="The steps in flight to it are lost"),
        pytest.raises(PeerLostError, match=r"shard 0 of rlstore-.* was lost and did not come back within 1 s"),
    ):
        writer.flush()
    assert writer.lost - lost == 2


def is_gone(served):
    try:
        served.set_rate_limit(None)
    except PeerLostError as error:
        return "is gone for good" in str(error)
    return False


def test_wrong_arguments_are_refused_before_anything_is_started(cluster):
    for wrong in ({"shards": 0}, {"deadline": 0.0}, {"snapshot_every": 5}, {"factory": 3}):
        with pytest.raises(InvalidInputError):
            serve(**{"factory": prioritized(), **wrong})


class FakeActors:
    """Stands for ``ray``: every call to an actor fails."""

    def __init__(self, monkeypatch):
        self.started, self.killed = 0, []
        monkeypatch.setattr(serving, "answer", self.answer)
        monkeypatch.setattr(serving, "check_connected", lambda: None)
        monkeypatch.setattr(serving, "start_on_this_node", lambda *args, **options: self.options())
        monkeypatch.setattr(ray, "remote", lambda *args, **options: self if args else (lambda kind: self))
        monkeypatch.setattr(ray, "kill", self.killed.append)

    def options(self, **options):
        self.started += 1
        return self

    def remote(self, *args):
        return self

    @property
    def ready(self):
        return self

    def answer(self, ref, who, seconds):
        raise InvalidInputError(f"{who} was refused")


def test_a_shard_that_fails_to_start_ends_all_actors(monkeypatch):
    actors = FakeActors(monkeypatch)
    with pytest.raises(InvalidInputError, match=r"shard 0 of rlstore-.*was refused"):
        serve(prioritized(), shards=2)
    assert len(actors.killed) == actors.started == 3


def test_without_a_cluster_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(NotReadyError, match=r"ray.init\(\)"):
        serve(prioritized())


# ---------------------------------------------------------------------------------------------------- loss

SINCE = 6  # steps after the snapshot


@pytest.mark.filterwarnings("ignore:shard . of:UserWarning", "default::RuntimeWarning")
def test_a_dead_shard_loses_what_was_stored_since_its_snapshot_and_nothing_else(filled):
    writers = sorted((filled.writer(num_envs=4, batch_steps=4) for _ in range(2)), key=lambda one: one.place.shard)
    learner = filled.learner(16, prefetch=2)
    filled.save()
    saved = [held_ids(data) for data in filled.each("get_all_buffer_data")]
    add_steps(writers, range(SINCE))
    before, old = filled.report(), next(learner)
    until(lambda: known_to_ledger(filled, 1) == before.shards[1].inserted, "a heartbeat after the last insert")
    ray.kill(filled._connection.shards[1], no_restart=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A thread may find the shard dead while the batch is served: the next call warns of that.
        until(
            lambda: continues(filled, learner) and len(caught) == learner._health.absences,
            "a batch without the dead shard, and a warning for each absence",
        )
    message = "shard 1 of .* is gone.*The other shards continue"
    assert all(re.search(message, str(warning.message)) for warning in caught)
    until(lambda: filled.report().restarts == 1, "the restart of the shard")
    report = filled.report()
    assert report.shards[1].lost == report.lost_in_shards == SINCE * 4
    assert report.shards[1].restored == report.shards[1].held == len(saved[1])
    assert report.held == before.held - SINCE * 4
    assert report.inserted == before.inserted
    assert f"shard 1 was restarted 1 times: {SINCE * 4} transitions lost, {len(saved[1])} restored" in str(report)

    until(lambda: 1 in next(learner)["rows"][:, 0].tolist(), "a batch from the restarted shard")
    add_steps(writers, range(100, 103))  # the first call may find the shard dead
    added = [number_ids(number, range(SINCE)) for number in (6, 7)]
    more = [number_ids(number, range(100, 103)) for number in (6, 7)]
    held = [held_ids(data) for data in filled.each("get_all_buffer_data")]
    assert held[0] == saved[0] | added[0] | more[0]
    assert saved[1] <= held[1] <= saved[1] | more[1]
    assert len(saved[1] | more[1]) - len(held[1]) == writers[1].lost
    assert filled.report().lost_in_flight - before.lost_in_flight == writers[1].lost

    stale = filled.report().stale_updates
    learner.update(old["rows"], torch.ones(16))  # rows of the generation that is gone
    learner.close()
    late = int((old["rows"][:, 0] == 1).sum())
    assert filled.report().stale_updates - stale == late > 0
    check_restart_of_the_ledger_and_a_shard(filled, writers)
    for writer in writers:
        writer.close()


def known_to_ledger(served, shard):
    return ray.get(served._connection.ledger.report.remote())["shards"][shard].state.inserted


def number_ids(writer, steps):
    return {int(id_of(writer, step, env)) for step in steps for env in range(4)}


def add_steps(writers, steps):
    for number, writer in enumerate(writers):
        for step in steps:
            writer.add(step_of(6 + number, step, 4))
        writer.flush()


def continues(served, learner):
    """A batch comes. True if it was drawn without the dead shard, or that was restarted before it was asked."""
    batch = next(learner)
    check_batch(batch)
    missed = learner._health.absences > 0 and 1 not in batch["rows"][:, 0].tolist()
    return missed or served.report().restarts > 0


def check_restart_of_the_ledger_and_a_shard(served, writers):
    """The ledger resumes with the places and counts that the shards have stored; the writer tells what was lost."""
    served.save()
    add_steps(writers, range(200, 203))
    before = served.report()
    ray.kill(served._connection.ledger, no_restart=False)
    ray.kill(served._connection.shards[0], no_restart=False)
    until(lambda: served.report().ledger_restarts == 1, "the restart of the ledger")
    until(lambda: served.report().shards[0].restarts == 1, "the restart of the shard")
    add_steps(writers, [300])
    after = served.report()
    for name in ("sampled", "writers"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.inserted == after.held + after.lost_in_shards
    assert after.lost_in_shards == before.lost_in_shards + 12
    assert after.inserted + after.lost_in_flight == before.inserted + before.lost_in_flight + 8
    assert after.shards[1].inserted == before.shards[1].inserted + 4
