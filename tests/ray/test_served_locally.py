"""Counts that are ahead of the heartbeats, and what is known of a dead shard or ledger; in one process."""

from __future__ import annotations

import asyncio

import pytest
from ray_local import serve_locally
from ray_play import step_of, uniform

from rlstore import PeerLostError
from rlstore.ray import ledger as ledger_module
from rlstore.ray import shard as shard_module
from rlstore.ray import writer as writer_module
from rlstore.ray.ledger import Ledger
from rlstore.ray.saves import Saving


@pytest.fixture
def served(monkeypatch):
    """Two shards that send no heartbeat after inserts."""
    monkeypatch.setattr(shard_module, "_HEARTBEAT_SECONDS", 1000.0)
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
    other = asyncio.run(restarted.place("other", 4, 1.0))
    assert other.shard != writer.place.shard
    assert other.ticket > writer.place.ticket
