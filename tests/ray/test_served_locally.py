"""Counts that are ahead of the heartbeats, and what is known of a dead shard or ledger; in one process."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from ray_local import serve_locally
from ray_play import ACTIONS, OBSERVATIONS, held_ids, id_of, prioritized, step_of, uniform

from rlstore import PeerLostError, RateLimit, ReplayStorage, Storage, WaitTimeoutError
from rlstore.ray import ledger as ledger_module
from rlstore.ray import shard as shard_module
from rlstore.ray import writer as writer_module
from rlstore.ray.counts import ShardState
from rlstore.ray.ledger import Ledger
from rlstore.ray.saves import Saving


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    """Shards send no heartbeat after inserts."""
    monkeypatch.setattr(shard_module, "_HEARTBEAT_SECONDS", 1000.0)


@pytest.fixture
def served(monkeypatch):
    """Two shards."""
    return serve_locally(monkeypatch, uniform(num_envs=4), 2)


def add_steps(writer, steps):
    for step in steps:
        writer.add(step_of(0, step, 4))
        writer.flush()


def counted(served):
    """What the ledger alone knows."""
    report = served._connection.ask_ledger("report")
    return sum(counts.inserted for counts in report["shards"]), report["limiter_inserted"]


def test_a_report_is_ahead_of_the_heartbeats(served):
    writer = served.writer(batch_steps=1)
    add_steps(writer, range(3))
    report = served.report()
    assert counted(served) == (0, 4)  # the first call had a permit: whether there is a limit was not known yet
    assert (report.inserted, report.held, report.limiter_inserted, report.restarts) == (12, 12, 12, 0)
    assert (report.shards[writer.place.shard].inserted, report.writers) == (12, 1)
    assert (writer.added, writer.lost) == (12, 0)


def test_the_writer_of_a_dead_shard_forwards_its_last_state(served, monkeypatch):
    writer = served.writer(batch_steps=1)
    add_steps(writer, range(3))

    def answer(ref, who, seconds):
        raise PeerLostError(f"{who} is gone")

    monkeypatch.setattr(writer_module, "answer", answer)
    monkeypatch.setattr(writer_module, "ask", lambda call, who, seconds: None)  # the shard is back
    with pytest.warns(UserWarning, match="shard . of local .* is gone. The steps in flight to it are lost"):
        add_steps(writer, range(3, 4))
    assert counted(served) == (12, 12)
    assert (writer.lost, served.report().lost_in_flight) == (4, 4)


def test_a_restarted_ledger_resumes_from_the_shards(served, monkeypatch):
    writer = served.writer(batch_steps=1)
    add_steps(writer, range(2))
    served.each("__len__")  # with a heartbeat
    served._connection.ask_ledger("count_lost", 5, 7, 2)
    add_steps(writer, range(2, 3))
    with served.writer(num_envs=2) as half:
        half.add(step_of(1, 0, 2))
    before = served.report()
    monkeypatch.setattr(ledger_module, "was_restarted", lambda: True)
    monkeypatch.setattr(ledger_module.ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(ledger_module.ray, "get", lambda ref, timeout: ref)
    restarted = Ledger("local", None, Saving(2), 60.0)
    report = asyncio.run(restarted.report())
    shards = report["shards"]
    assert [counts.inserted for counts in shards] == [shard.inserted for shard in before.shards]
    assert [counts.starts for counts in shards] == [1, 1]
    assert (report["lost_in_flight"], report["lost_updates"], report["ledger_restarts"]) == (5, 7, 1)
    assert (report["writers"], report["limiter_inserted"]) == (1, before.limiter_inserted)
    asyncio.run(restarted.permit_insert(writer._name, 4, 1.0))  # it still has its place
    others = [asyncio.run(restarted.place(name, 2, 1.0)) for name in ("one", "other")]
    assert {other.shard for other in others} == {1 - writer.place.shard}
    assert min(other.ticket for other in others) > writer.place.ticket


def ids_held(served):
    return [held_ids(data) for data in served.each("get_all_buffer_data")]


def two_writers(served):
    return sorted((served.writer(batch_steps=1) for _ in range(2)), key=lambda writer: writer.place.shard)


def test_a_saved_storage_is_restored_as_a_whole(monkeypatch, tmp_path):
    """With what was counted, also of what had been lost; batches are those that would have come."""
    served = serve_locally(monkeypatch, prioritized(num_envs=4), 2, snapshot_dir=str(tmp_path))
    one, other = two_writers(served)
    add_steps(one, range(5))
    add_steps(other, range(8))
    learner = served.learner(16, prefetch=1, seed=0)
    next(learner)
    learner.close()
    learner._threads.shutdown()  # a batch that is being prefetched is drawn before the save, too
    served._connection.ask_ledger("count_lost", 5, 7, 0)
    served.save()
    report, ids = served.report(), ids_held(served)
    draws = [shard._target.draw([8], True)[0].rows.tolist() for shard in served._connection.shards]
    add_steps(one, range(5, 6))  # not saved, and nobody is told

    again = serve_locally(monkeypatch, prioritized(num_envs=4), 2, snapshot_dir=str(tmp_path))
    assert ids_held(again) == ids
    assert [shard._target.draw([8], True)[0].rows.tolist() for shard in again._connection.shards] == draws
    restored = again.report()
    for name in ("inserted", "held", "lost_in_flight", "lost_updates", "lost_in_shards", "limiter_inserted"):
        assert getattr(restored, name) == getattr(report, name), name
    assert (restored.inserted, restored.held, restored.restarts) == (52, 52, 0)
    assert restored.limiter_sampled == report.limiter_sampled == 16
    assert [shard.restored for shard in restored.shards] == [20, 32]
    add_steps(again.writer(batch_steps=1), range(8, 9))
    assert again.report().inserted == 56


def test_a_save_that_did_not_reach_all_shards_is_a_mix_that_adds_up(monkeypatch, tmp_path):
    options = {"snapshot_dir": str(tmp_path)}
    served = serve_locally(monkeypatch, uniform(num_envs=4), 2, **options)
    writers = two_writers(served)
    for writer in writers:
        add_steps(writer, range(3))
    served.save()
    for writer in writers:
        add_steps(writer, range(3, 5))
    shard = served._connection.shards[0]._target
    shard._saves.save(shard._storage, shard._state.inserted).wait()  # and then all were killed

    report = serve_locally(monkeypatch, uniform(num_envs=4), 2, **options).report()
    assert [(one.inserted, one.held, one.lost) for one in report.shards] == [(20, 20, 0), (12, 12, 0)]

    served.each("__len__")  # with a heartbeat: the ledger knows of the 8 that the other shard has not saved
    served._connection.ask_ledger("save")
    again = serve_locally(monkeypatch, uniform(num_envs=4), 2, **options)
    report = again.report()
    assert [(one.inserted, one.held, one.lost) for one in report.shards] == [(20, 20, 0), (20, 12, 8)]
    assert report.inserted == report.held + report.lost_in_shards == report.limiter_inserted == 40
    assert "shard 1 was restarted 0 times: 8 transitions lost, 12 restored" in str(report)


def restart(monkeypatch, actor, make):
    """Another process of an actor; the handle stays the same."""
    for module in (ledger_module, shard_module):
        monkeypatch.setattr(module, "was_restarted", lambda: True)
    actor._target = make()


@pytest.mark.parametrize("told", [False, True])
def test_a_ledger_and_a_shard_lost_together_lose_what_came_since_the_commit_and_count_it(monkeypatch, tmp_path, told):
    """The backup of the ledger in the other shard is old, and the shard had sent no heartbeat."""
    folder, copy = tmp_path / "journal", tmp_path / "copy"
    served = serve_locally(monkeypatch, uniform(num_envs=4), 2, journal=str(folder), interval=3600.0)
    keeper, shards = served._connection.ledger, served._connection.shards
    writers = two_writers(served)
    for writer in writers:
        add_steps(writer, range(3))
    served.save()
    for writer in writers:
        add_steps(writer, range(3, 5))
    shards[0]._target._journal.commit()  # of which the ledger does not know
    for writer in writers:
        add_steps(writer, range(5, 7))
    shutil.copytree(folder, copy)  # as they are when both are killed
    saving = Saving(2, journal=str(copy), interval=3600.0)
    monkeypatch.setattr(ledger_module.ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(ledger_module.ray, "get", lambda ref, timeout: ref)
    shards[0].get_backup = SimpleNamespace(remote=lambda: (None, ShardState(0)))  # it is dead
    restart(monkeypatch, keeper, lambda: Ledger("local", None, saving, 60.0))
    packed = shard_module.packed_factory(uniform(num_envs=4))
    restart(monkeypatch, shards[0], lambda: shard_module.Shard(0, packed, "local", 0, saving))
    if told:
        writers[0].close()  # it had not called since
    report = served.report()
    first, second = ((one.inserted, one.held, one.lost) for one in report.shards)
    assert first == ((28, 20, 8) if told else (20, 20, 0))  # who was told of the 8 is gone with them
    assert second == (28, 28, 0)
    assert report.inserted == report.held + report.lost_in_shards
    assert (report.ledger_restarts, report.restarts, report.writers) == (1, 1, 1 if told else 2)
    if not told:
        add_steps(writers[0], range(7, 8))  # and the answer is of another generation
        first = served.report().shards[0]
        assert (first.inserted, first.held, first.lost) == (32, 24, 8)


class AtOnce:
    """Sends in the thread that asks for it, and remembers how many steps."""

    def __init__(self):
        self.sizes = []

    def submit(self, send, buffer):
        self.sizes.append(buffer.steps)
        future = Future()
        future.set_result(send(buffer))
        return future


def test_more_steps_go_into_a_call_while_the_shard_is_busy(monkeypatch):
    served = serve_locally(monkeypatch, uniform(num_envs=4), 1)
    writer = served.writer(batch_steps=2, max_in_flight=2)
    writer._sender = sender = AtOnce()

    def add(steps):
        for _ in range(steps):
            writer.add(step_of(0, writer.added // 4, 4))
        return sender.sizes

    assert add(10) == [2] * 5  # all calls are answered
    writer.flush()
    monkeypatch.setattr(writer_module, "is_done", lambda ref: False)
    assert add(2) == [2] * 6  # no call is open
    assert add(15) == [2] * 6  # one is, and the next has up to 16 steps
    assert add(1) == [2] * 6 + [16]
    add(1)
    writer.flush()
    assert sender.sizes == [2] * 6 + [16, 1]
    assert (writer.added, writer.lost, served.report().inserted) == (29 * 4, 0, 29 * 4)
    assert ids_held(served) == [{id_of(0, step, env) for step in range(29) for env in range(4)}]


def test_stacks_of_frames_arrive_as_they_were_added(monkeypatch):
    random = np.random.default_rng(0)
    space = Box(0, 255, (4, 18, 18), np.uint8)
    factory = ReplayStorage.create_factory(400, space, Discrete(500), 2, frame_stack=4, autoreset="Disabled")
    served = serve_locally(monkeypatch, factory, 1)
    given = []
    with served.writer(batch_steps=8) as writer:
        for _ in range(3):
            frames = random.integers(0, 256, (14, 2, 18, 18), dtype=np.uint8)
            stacks = [frames[t : t + 4].swapaxes(0, 1) for t in range(11)]
            for t in range(10):
                step = {"observations": stacks[t], "next_observations": stacks[t + 1], "actions": [len(given)] * 2}
                ends = {"rewards": [1.0, 2.0], "terminated": [t == 9] * 2, "truncated": [False, False]}
                given.append({**step, **ends})
                writer.add(given[-1])
    (data,) = served.each("get_all_buffer_data")
    assert data["actions"][:, 0].tolist() == list(range(30))
    for name in ("observations", "next_observations"):
        assert torch.equal(data[name], torch.from_numpy(np.stack([step[name] for step in given])))


def test_an_actor_gives_first_priorities(monkeypatch):
    served = serve_locally(monkeypatch, prioritized(num_envs=4), 1)
    with served.writer(batch_steps=4) as writer:
        for step in range(6):
            first = {} if step == 5 else {"priorities": [step + 1.0] * 4}  # none: the largest so far
            writer.add({**step_of(0, step, 4), **first})
    (shard,) = (actor._target for actor in served._connection.shards)
    storage = shard._storage
    assert storage.priorities(torch.arange(24)).tolist() == pytest.approx(np.repeat([1, 2, 3, 4, 5, 5], 4).tolist())


def measured(served):
    """What stats() has to be of two shards that answer, from the numbers of each."""
    parts = served.each("stats")
    complete = [part["episodes_complete"] for part in parts]
    held = [part["transitions"] for part in parts]

    def mean(name, counts):
        return sum(part[name] * count for part, count in zip(parts, counts, strict=True) if count) / sum(counts)

    summed = [
        *("transitions", "capacity", "bytes", "inserts", "samples", "nonfinite_rewards", "nonfinite_observations"),
        *("episodes", "episodes_open", "episodes_terminated", "episodes_truncated", "episodes_broken"),
        *("episodes_complete", "draws_never", "dropped_batches", "lost_writers", "stale_updates"),
    ]
    inserts, samples = (sum(part[name] for part in parts) for name in ("inserts", "samples"))
    return {
        **{name: sum(part[name] for part in parts) for name in summed},
        "fill": sum(held) / sum(part["capacity"] for part in parts),
        "samples_per_insert": samples / inserts,
        **{f"{name}_mean": mean(f"{name}_mean", complete) for name in ("return", "length")},
        **{f"{name}_mean": mean(f"{name}_mean", held) for name in ("row_age", "draws", "priority")},
        **{
            f"{name}_{end}": choose(part[f"{name}_{end}"] for part in parts)
            for name in ("return", "length", "priority")
            for end, choose in (("min", min), ("max", max))
        },
        "row_age_max": max(part["row_age_max"] for part in parts),
        "draws_max": max(part["draws_max"] for part in parts),
    }


def test_numbers_of_shards_are_joined_to_those_of_one_storage(monkeypatch):
    served = serve_locally(monkeypatch, prioritized(num_envs=4, sample_info=True), 2)
    one, other = two_writers(served)
    for step in range(8):
        one.add(step_of(0, step, 4, ends=step in (3, 4)))
    for step in range(5):
        other.add(step_of(1, step, 4, ends=step == 4))
    one.flush()
    other.flush()
    with served.learner(16, prefetch=1, seed=0) as learner:
        rows = next(learner)["rows"]
        learner.update(rows, torch.arange(1.0, 17.0))
        rows[:3, 2] -= 1  # a life before this one
        learner.update(rows[:3], torch.ones(3))
        learner.flush()
    report = served.report()
    expected = {
        **measured(served),
        "stale_updates": 3,
        "shards": 2,
        "shards_down": 0,
        "writers": 2,
        "restarts": 0,
        "lost_in_shards": 0,
        "lost_in_flight": 0,
        "lost_updates": 0,
    }
    found = served.stats()
    assert found == pytest.approx(expected)
    # Both have four environments: episodes of 4 and of 1 steps here, of 5 there.
    assert (found["inserts"], found["samples"], found["length_mean"]) == (52, report.sampled, 40 / 12)
    assert report.sampled >= 16


def test_of_a_dead_shard_what_is_known_is_told(monkeypatch):
    served = serve_locally(monkeypatch, uniform(num_envs=4), 2)
    writers = two_writers(served)
    for writer in writers:
        add_steps(writer, range(3))
    served.each("__len__")  # with a heartbeat
    dead = served._connection.shards[1]._target
    dead.describe = dead.measure = lambda: PeerLostError("gone")
    found = served.stats()
    assert found["capacity"] == 4000
    assert [found[name] for name in ("transitions", "inserts", "shards", "shards_down")] == [12, 24, 2, 1]


def test_waits_for_permits_are_told_while_there_is_a_limit(monkeypatch):
    served = serve_locally(monkeypatch, uniform(num_envs=4), 1)
    ledger = served._connection.ledger._target
    ticks = count()
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 4))
    assert "sample_waits" not in served.stats()
    ledger._state.limit = RateLimit(min_size=8)
    with pytest.raises(WaitTimeoutError):
        asyncio.run(ledger.permit_sample(4, 1, 0.0))
    add_steps(served.writer(batch_steps=1), range(2))
    found = served.stats()
    names = ("sample_waits", "sample_wait_seconds", "insert_waits", "insert_wait_seconds")
    assert [found[name] for name in names] == [1, 0.25, 0, 0.0]


class OwnStorage(ReplayStorage):
    """As a user's own class, it cannot tell any numbers."""

    _measure = Storage._measure


def test_a_class_that_has_no_numbers_is_counted(monkeypatch, tmp_path):
    factory = OwnStorage.create_factory(4000, OBSERVATIONS, ACTIONS, 4)
    served = serve_locally(monkeypatch, factory, 1, journal=str(tmp_path), interval=3600.0)
    add_steps(served.writer(batch_steps=1), range(2))
    found = served.stats()
    assert found.pop("journal_lag_seconds") > 0
    assert found == {
        "transitions": 8, "inserts": 8, "samples": 0, "samples_per_insert": 0.0, "stale_updates": 0,
        "journal_lag_inserts": 8, "shards": 1, "shards_down": 0, "writers": 1, "restarts": 0,
        "lost_in_shards": 0, "lost_in_flight": 0, "lost_updates": 0,
    }  # fmt: skip
