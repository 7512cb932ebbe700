"""A shard by itself, with every kind of storage in it. No cluster is needed."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress

import numpy as np
import pytest
import ray
import torch
from gymnasium.spaces import Box, Dict, Discrete
from ray_play import ACTIONS, OBSERVATIONS, check_batch, held_ids, id_of, ids_of, prioritized, step_of, uniform, until

from rlstore import (
    DecoupledRolloutStorage,
    HindsightReplayStorage,
    InvalidInputError,
    NotReadyError,
    NStepReplayStorage,
    PeerLostError,
    RateLimit,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
    SnapshotError,
    Storage,
)
from rlstore.engine.disk.snapshot import SnapshotWriter
from rlstore.ray import shard as module
from rlstore.ray.calls import Deadline
from rlstore.ray.places import Place
from rlstore.ray.saves import Saves, Saving
from rlstore.ray.shard import Shard, packed_factory
from rlstore.ray.steps import StepBuffer
from rlstore.ray.wire import join


class FakeMethod:
    def __init__(self, calls):
        self._calls = calls

    def remote(self, *args):
        self._calls.append(args)


class FakeLedger:
    """Remembers what it was told."""

    def __init__(self):
        self.told, self.saved = [], []
        self.heartbeat, self.save = FakeMethod(self.told), FakeMethod(self.saved)

    @property
    def newest(self):
        return self.told[-1][0]


@pytest.fixture
def make(monkeypatch):
    ledger = FakeLedger()
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: ledger)
    monkeypatch.setattr(module, "this_node", lambda: "here")
    monkeypatch.setattr(module, "was_restarted", lambda: False)
    monkeypatch.setattr(module, "ask", lambda call, who, seconds: call())

    def build(factory, index=0, seed=0, folder=None, every=None, shards=1, journal=None):
        folders = [None if path is None else str(path) for path in (folder, journal)]
        saving = Saving(shards, folders[0], every, folders[1], 3600.0)
        shard = Shard(index, packed_factory(factory), "test", seed, saving)
        return shard, ledger

    return build


def steps(samples, num_envs):
    buffer = StepBuffer(len(samples), num_envs)
    for sample in samples:
        buffer.add(sample)
    return buffer.packed()


def insert(shard, writer, place, samples):
    stored, refused, *_ = shard.insert(writer, place, steps(samples, place.stop - place.first), True)
    assert refused is None
    return stored


def drawn(shard, count):
    (draw,) = shard.draw([count], True)
    return draw, join(draw.parts, lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))


WHOLE = Place(0, 0, 4, True)


def n_step(size=400, num_envs=4, **arguments):
    return NStepReplayStorage.create_factory(
        size // num_envs, OBSERVATIONS, ACTIONS, num_envs, num_workers=0, **arguments
    )


def rollout_steps(count):
    """Steps with the fields of a RolloutStorage."""
    more = {"values": torch.zeros(4, 1), "log_probs": torch.zeros(4), "distribution_params": (torch.zeros(4, 1),)}
    samples = [{**step_of(0, step, 4), **more} for step in range(count)]
    for sample in samples:
        sample["actions"] = sample["actions"].float().unsqueeze(1)
    return samples


def test_writers_of_one_shard_write_their_own_lanes(make):
    shard, ledger = make(uniform(num_envs=4))
    for step in range(10):
        insert(shard, "a", Place(0, 0, 2, False), [step_of(0, step, 2)])
        insert(shard, "b", Place(0, 2, 3, False), [step_of(1, step, 1)])
    data = shard.each("get_all_buffer_data", (), {})
    assert held_ids(data) == ids_of(0, 10, 2) | ids_of(1, 10, 1)
    assert (ledger.newest.inserted, ledger.newest.held, ledger.newest.lanes, ledger.newest.splits) == (30, 30, 4, True)
    _, batch = drawn(shard, 64)
    check_batch(batch)


def test_a_step_that_is_refused_stops_its_call_and_is_told(make):
    shard, ledger = make(uniform(num_envs=4))
    good, bad = step_of(0, 0, 4), step_of(0, 1, 4)
    bad["terminated"] = torch.full((4,), float("nan"))
    good["terminated"] = torch.zeros(4)
    stored, refused, *_ = shard.insert("a", WHOLE, steps([good, bad, step_of(0, 2, 4)], 4), True)
    assert stored == 4
    assert isinstance(refused, InvalidInputError)
    assert held_ids(shard.each("get_all_buffer_data", (), {})) == ids_of(0, 1, 4)
    assert ledger.newest.inserted == 4


def test_lanes_that_were_given_away_are_not_written_by_the_writer_before(make):
    shard, _ = make(uniform(num_envs=4))
    insert(shard, "old", Place(0, 0, 2, False), [step_of(0, 0, 2)])
    insert(shard, "new", Place(0, 1, 3, False), [step_of(1, 0, 2)])
    _, refused, *_ = shard.insert("old", Place(0, 0, 2, False), steps([step_of(0, 1, 2)], 2), True)
    assert isinstance(refused, PeerLostError)
    shard.remove_writer("new")
    insert(shard, "third", Place(0, 0, 4, True), [step_of(2, 0, 4)])
    assert held_ids(shard.each("get_all_buffer_data", (), {})) == ids_of(0, 1, 2) | ids_of(1, 1, 2) | ids_of(2, 1, 4)


def test_of_two_places_that_overlap_the_one_given_later_holds(make):
    """A shard that was started again does not know who had been there before it."""
    shard, _ = make(uniform(num_envs=4))
    late, early = Place(0, 0, 2, False, ticket=8), Place(0, 1, 3, False, ticket=7)
    insert(shard, "late", late, [step_of(0, 0, 2)])
    stored, refused, *_ = shard.insert("early", early, steps([step_of(1, 0, 2)], 2), True)
    assert stored == 0
    assert isinstance(refused, PeerLostError)
    insert(shard, "late", late, [step_of(0, 1, 2)])
    insert(shard, "latest", early._replace(ticket=9), [step_of(2, 0, 2)])
    assert held_ids(shard.each("get_all_buffer_data", (), {})) == ids_of(0, 2, 2) | ids_of(2, 1, 2)


def test_without_a_rate_limit_nobody_needs_a_permit_and_all_is_counted(make):
    shard, _ = make(uniform(num_envs=4))
    stored = shard.insert("a", WHOLE, steps([step_of(0, 0, 4)], 4), True)
    assert (stored.stored, stored.state.inserted, stored.state.held, stored.limited) == (4, 4, 4, True)
    shard.store_backup(1, None, False, False)
    assert not shard.insert("a", WHOLE, steps([step_of(0, 1, 4)], 4), True).limited
    assert not shard.insert("b", WHOLE._replace(ticket=1), steps([step_of(1, 0, 4)], 4), False).limited
    assert [draw.limited for draw in shard.draw([3, 2], False)] == [False, False]
    shard.store_backup(0, None, True, True)  # older than what is known
    assert shard.draw([7], True)[0].limited is False
    shard.store_backup(2, None, True, True)
    assert shard.draw([1], True)[0].limited is True
    told = shard.ready()
    assert (told.inserted, told.inserted_freely, told.sampled, told.sampled_freely) == (12, 4, 13, 5)


def test_the_ledger_is_told_of_inserts_soon_and_of_their_writers(make):
    shard, ledger = make(uniform(num_envs=4))
    begun = len(ledger.told)
    insert(shard, "a", Place(0, 0, 2, False), [step_of(0, 0, 2)])
    insert(shard, "b", Place(0, 2, 4, False), [step_of(1, 0, 2)])
    until(lambda: sum(len(writers) for _, writers in ledger.told[begun:]) == 2, "the news")
    assert {name for _, writers in ledger.told[begun:] for name in writers} == {"a", "b"}
    assert ledger.newest.inserted == 4


def test_an_empty_shard_has_nothing_to_draw(make):
    shard, _ = make(prioritized())
    assert shard.total() == 0.0
    with pytest.raises(NotReadyError):
        shard.draw([3], True)


def test_priorities_decide_what_is_drawn_and_go_with_it(make):
    shard, _ = make(prioritized(num_envs=4, alpha=1.0, beta=0.7))
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(5)])
    rows = np.arange(20)
    generation = np.full(20, shard.ready().generation)
    shard.update(rows, generation, rows.astype(float))
    assert shard.total() == 190.0
    draw, batch = drawn(shard, 512)
    check_batch(batch)
    assert draw.total == 190.0
    assert draw.beta == 0.7
    assert np.array_equal(draw.priorities, draw.rows.astype(np.float32))
    assert (draw.rows > 0).all()


def test_priorities_for_another_life_or_an_overwritten_row_are_dropped_and_counted(make):
    """Known elsewhere: a priority written to a slot that was overwritten since."""
    shard, _ = make(prioritized(size=8, num_envs=4))
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(3)])  # rows 0 to 3 are overwritten
    mine = shard.ready().generation
    shard.update(np.array([1, 5, 6]), np.array([mine, mine, mine - 1]), np.array([50.0, 7.0, 60.0]))
    assert shard.total() == 7.0 + 7 * 1.0
    assert shard.describe()[1] == 2


def test_shards_of_one_seed_draw_apart(make):
    draws = []
    for index in (0, 1, 1):
        shard, _ = make(uniform(seed=5), index=index, seed=9)
        insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(50)])
        draws.append(shard.draw([64], True)[0].rows.tolist())
    assert draws[0] != draws[1] == draws[2]


def test_a_limit_or_a_journal_inside_a_shard_is_refused(make, tmp_path):
    for option, value in (("rate_limit", RateLimit(1.0)), ("journal", tmp_path)):
        shard, _ = make(uniform(**{option: value}))
        with pytest.raises(InvalidInputError, match=rf"has a {option} of its own; give it to serve\(\)"):
            shard.ready()


# ---------------------------------------------------------------------------------------------------- snapshots


def test_a_new_life_begins_with_the_newest_snapshot(make, tmp_path):
    shard, ledger = make(prioritized(), folder=tmp_path, every=40)
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(5)])
    assert ledger.saved == []
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(5, 12)])
    until(lambda: ledger.saved, "a snapshot in the background")
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(12, 15)])
    again, ledger = make(prioritized(), folder=tmp_path, every=40)
    facts = ledger.newest
    assert (facts.inserted, facts.held, facts.restored) == (48, 48, 48)
    assert facts.generation > shard.ready().generation
    assert held_ids(again.each("get_all_buffer_data", (), {})) == ids_of(0, 12, 4)
    assert len(ledger.saved) == 1


def test_what_is_inserted_while_a_snapshot_is_written_is_neither_held_back_nor_in_it(make, tmp_path, monkeypatch):
    shard, _ = make(uniform(), folder=tmp_path)
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(5)])
    write, rows = SnapshotWriter.write, [step_of(0, step, 4) for step in range(5, 9)]

    def write_late(writer, content):
        insert(shard, "a", WHOLE, rows)
        write(writer, content)

    monkeypatch.setattr(SnapshotWriter, "write", write_late)
    assert shard.save().inserted == 36
    again, _ = make(uniform(), folder=tmp_path)
    assert held_ids(again.each("get_all_buffer_data", (), {})) == ids_of(0, 5, 4)
    assert again.ready().inserted == 20
    monkeypatch.undo()


def test_another_snapshot_only_adds_what_has_come_since(make, tmp_path):
    shard, _ = make(uniform(size=40_000), folder=tmp_path)
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(300)])
    shard.save()
    (rows,) = (tmp_path / "shard-0" / "snapshot").glob("rows-*")
    before = rows.stat().st_size
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(300, 303)])
    shard.save()
    again, _ = make(uniform(size=40_000), folder=tmp_path)
    assert again.ready().inserted == 1212
    again.save()  # it goes on with what it was loaded from
    assert before < rows.stat().st_size < before * 1.1
    assert list((tmp_path / "shard-0" / "snapshot").glob("rows-*")) == [rows]


@pytest.mark.filterwarnings("ignore:the save to:RuntimeWarning")
def test_a_background_snapshot_that_fails_is_told_and_loses_nothing(make, tmp_path, monkeypatch):
    shard, _ = make(uniform(), folder=tmp_path, every=4)

    def fail(writer, content):
        raise OSError("no disk")

    monkeypatch.setattr(SnapshotWriter, "write", fail)
    assert insert(shard, "a", WHOLE, [step_of(0, 0, 4)]) == 4
    until(lambda: "a snapshot could not be written (no disk)" in shard.ready().note, "the news")
    monkeypatch.undo()
    insert(shard, "a", WHOLE, [step_of(0, 1, 4)])
    until(lambda: shard.describe()[2] == 1, "the next snapshot")


def test_the_snapshot_of_an_earlier_version_is_restored_and_then_replaced(make, tmp_path):
    """Each was a folder of its own, and a file named the newest."""
    storage, folder = uniform()("cpu", None, None), tmp_path / "shard-0"
    storage.insert_transition(step_of(0, 0, 4))
    storage.save(folder / "snapshot-3")
    (folder / "snapshot-4").mkdir()
    (folder / "snapshot-4" / "tensors-000001.safetensors").write_text("left by a crash")
    (folder / "snapshot-2").mkdir()
    (folder / "snapshot-2" / "notes.txt").write_text("of somebody else")
    (folder / "newest.json").write_text('{"folder": "snapshot-3", "count": 3, "numbers": {"inserted": 24}}')
    shard, _ = make(uniform(), folder=tmp_path)
    assert (shard.ready().inserted, shard.ready().restored) == (24, 4)
    insert(shard, "a", WHOLE, [step_of(1, 0, 4)])
    shard.save()
    assert sorted(entry.name for entry in folder.iterdir()) == ["snapshot", "snapshot-2"]
    assert [entry.name for entry in (folder / "snapshot-2").iterdir()] == ["notes.txt"]
    again, _ = make(uniform(), folder=tmp_path)
    assert held_ids(again.each("get_all_buffer_data", (), {})) == ids_of(0, 1, 4) | ids_of(1, 1, 4)
    assert again.ready().inserted == 28


@pytest.mark.parametrize(
    ("file", "content"),
    [("newest.json", "{"), ("snapshot/manifest.json", "{"), ("snapshot/tensors-000001.safetensors", "")],
)
def test_a_damaged_snapshot_fails_a_start_and_is_set_aside_and_told_by_a_restart(
    make, tmp_path, monkeypatch, file, content
):
    shard, _ = make(uniform(), folder=tmp_path)
    insert(shard, "a", WHOLE, [step_of(0, 0, 4)])
    shard.save()
    if file == "newest.json":
        shutil.rmtree(tmp_path / "shard-0" / "snapshot")
    (tmp_path / "shard-0" / file).write_text(content)
    broken, _ = make(uniform(), folder=tmp_path)
    with pytest.raises(SnapshotError):
        broken.ready()
    monkeypatch.setattr(module, "was_restarted", lambda: True)
    restarted, _ = make(uniform(), folder=tmp_path)
    assert restarted.ready().held == 0
    assert "could not be read, and is now damaged-" in restarted.ready().note
    insert(restarted, "a", WHOLE, [step_of(0, 0, 4)])
    restarted.save()
    assert make(uniform(), folder=tmp_path)[0].ready().restored == 4


def test_save_without_a_folder_is_refused(make):
    shard, _ = make(uniform())
    with pytest.raises(SnapshotError, match="snapshot_dir"):
        shard.save()


# ---------------------------------------------------------------------------------------------------- journals


def image(folder, copy):
    """A folder as a process that is killed now leaves it; the copy is not locked by that process."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    return copy


@pytest.mark.parametrize("kind", [uniform, prioritized, "rollout"])
def test_a_new_life_begins_with_the_last_commit_of_the_journal(make, tmp_path, kind):
    factory = RolloutStorage.create_factory(20) if kind == "rollout" else kind(size=400, num_envs=4)
    samples = rollout_steps(8) if kind == "rollout" else [step_of(0, step, 4) for step in range(8)]
    shard, _ = make(factory, journal=tmp_path / "a")
    insert(shard, "a", WHOLE, samples[:5])
    shard.save()
    data = shard.each("get_all_buffer_data", (), {})
    insert(shard, "a", WHOLE, samples[5:])
    for life in ("b", "c"):  # the second begins with what the first has made of it
        folder = image(tmp_path / "a", tmp_path / life)
        again, _ = make(factory, journal=folder)
        state = again.ready()
        assert (state.inserted, state.held, state.restored) == (20, 20, 20)
        found = again.each("get_all_buffer_data", (), {})
        assert torch.equal(found["rewards"], data["rewards"])
    insert(again, "a", WHOLE, samples[5:])
    again.save()
    assert make(factory, journal=image(folder, tmp_path / "d"))[0].ready().inserted == 32
    assert shard.ready().note == again.ready().note == ""


def test_of_a_journal_and_a_snapshot_the_newer_is_taken(make, tmp_path):
    saved, journal = tmp_path / "saved", tmp_path / "journal"
    shard, _ = make(uniform(), folder=saved, journal=journal)
    insert(shard, "a", WHOLE, [step_of(0, 0, 4)])
    shard._journal.commit()
    insert(shard, "a", WHOLE, [step_of(0, 1, 4)])
    shard._write_snapshot()
    old = image(journal, tmp_path / "old")
    insert(shard, "a", WHOLE, [step_of(0, 2, 4)])
    shard._journal.commit()
    again, _ = make(uniform(), folder=saved, journal=old)
    assert again.ready().inserted == 8
    assert (
        make(uniform(), folder=saved, journal=image(old, tmp_path / "older"))[0].ready().inserted == 8
    )  # a new journal
    assert make(uniform(), folder=saved, journal=image(journal, tmp_path / "new"))[0].ready().inserted == 12


def test_a_journal_that_is_damaged_is_set_aside_for_a_snapshot(make, tmp_path, monkeypatch):
    saved, journal = tmp_path / "saved", tmp_path / "journal"
    shard, _ = make(uniform(), folder=saved, journal=journal)
    insert(shard, "a", WHOLE, [step_of(0, 0, 4)])
    shard.save()
    insert(shard, "a", WHOLE, [step_of(0, 1, 4)])
    shard._journal.commit()
    copy = image(journal, tmp_path / "copy")
    (rows,) = (copy / "shard-0" / "journal").glob("rows-*")
    rows.write_bytes(rows.read_bytes()[:-40] + bytes(40))
    with pytest.raises(SnapshotError, match=r"rows-000001\.bin"):
        make(uniform(), folder=saved, journal=copy)[0].ready()
    monkeypatch.setattr(module, "was_restarted", lambda: True)
    again, _ = make(uniform(), folder=saved, journal=copy)
    assert again.ready().inserted == 4
    assert "rows-000001.bin" in again.ready().note
    assert make(uniform(), journal=image(copy, tmp_path / "later"))[0].ready().inserted == 4


@pytest.mark.parametrize("kept", ["journal", "mapped"])
def test_a_shard_waits_until_the_process_before_has_released_its_folders(make, tmp_path, monkeypatch, kept):
    factory = uniform(memory="mapped", path=tmp_path / "rows") if kept == "mapped" else uniform()
    options = {"journal": tmp_path / "journal"} if kept == "journal" else {}
    shard, _ = make(factory, shards=2, **options)
    insert(shard, "a", WHOLE, [step_of(0, 0, 4)])

    def end(deadline):
        if kept == "journal":
            shard._journal.close()
        shard._storage.close()

    monkeypatch.setattr(Deadline, "pause", end)
    again, _ = make(factory, shards=2, **options)
    assert again.ready().restored == 4
    monkeypatch.setattr(module, "_RELEASE_SECONDS", 0.0)
    third, _ = make(factory, shards=2, **options)
    with pytest.raises(InvalidInputError, match="is in use by another storage"):
        third.ready()
    assert again.ready().held == 4


def test_a_journal_that_cannot_be_written_is_told(make, tmp_path, monkeypatch):
    shard, _ = make(uniform(), journal=tmp_path)
    insert(shard, "a", WHOLE, [step_of(0, 0, 4)])

    def fail(*args, **options):
        raise OSError("no disk")

    monkeypatch.setattr(SnapshotWriter, "write", fail)
    with pytest.raises(OSError, match="no disk"):
        shard.save()
    assert "the journal could not be written (no disk)" in shard.ready().note
    monkeypatch.undo()
    shard.save()
    assert shard.ready().note == ""


# ---------------------------------------------------------------------------------------------------- folders


def killed(body):
    """Run a function in a child that is killed at its end, or in it."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            body()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("full", [False, True])
def test_each_shard_keeps_its_rows_in_a_folder_of_its_own_and_a_killed_one_goes_on_there(
    make, tmp_path, monkeypatch, full
):
    """Killed after the row was written and before it was counted: the counters of the rows tell."""
    factory = uniform(size=16 if full else 400, memory="mapped", path=tmp_path)
    inserted = Saves.record

    def die(saves, storage, count):
        if count == 28:
            os.kill(os.getpid(), signal.SIGKILL)
        inserted(saves, storage, count)

    def write():
        shards = [make(factory, index=index, shards=2)[0] for index in range(2)]
        insert(shards[1], "b", WHOLE, [step_of(1, step, 4) for step in range(3)])
        monkeypatch.setattr(Saves, "record", die)
        insert(shards[0], "a", WHOLE, [step_of(0, step, 4) for step in range(10)])

    killed(write)
    again = [make(factory, index=index, shards=2)[0] for index in range(2)]
    states = [shard.ready() for shard in again]
    assert [(state.inserted, state.held, state.restored) for state in states] == (
        [(28, 16, 16), (12, 12, 12)] if full else [(28, 28, 28), (12, 12, 12)]
    )
    ids = {int(id_of(0, step, env)) for step in range(3 if full else 0, 7) for env in range(4)}
    assert held_ids(again[0].each("get_all_buffer_data", (), {})) == ids
    assert held_ids(again[1].each("get_all_buffer_data", (), {})) == ids_of(1, 3, 4)
    insert(again[1], "c", WHOLE, [step_of(1, step, 4) for step in range(3, 5)])
    assert again[1].ready().inserted == 20


@pytest.mark.parametrize(
    "count", ["a link", "a dangling link", b"x" * 16, bytes([255] * 16), b"123", bytes(17)], ids=str
)
def test_a_count_beside_mapped_rows_that_is_none_is_refused_and_set_aside_by_a_restart(
    make, tmp_path, monkeypatch, count
):
    factory, mine = uniform(memory="mapped", path=tmp_path / "rows"), tmp_path / "mine"
    killed(lambda: insert(make(factory)[0], "a", WHOLE, [step_of(0, step, 4) for step in range(3)]))
    if count != "a dangling link":
        mine.write_bytes(b"sixteen bytes, my")
    before = mine.read_bytes() if mine.exists() else None
    inserted = tmp_path / "rows" / "inserted"
    inserted.unlink()
    inserted.symlink_to(mine) if isinstance(count, str) else inserted.write_bytes(count)
    shard, _ = make(factory)
    with pytest.raises(SnapshotError, match=f"{inserted}"):
        shard.ready()
    monkeypatch.setattr(module, "was_restarted", lambda: True)
    again, _ = make(factory)
    insert(again, "b", WHOLE, [step_of(0, 3, 4)])
    assert (again.ready().inserted, again.ready().held) == (16, 16)
    assert f"{inserted} could not be read" in again.ready().note
    assert (mine.read_bytes() if mine.exists() else None) == before
    assert inserted.stat().st_size == 16
    assert not inserted.is_symlink()


def test_what_somebody_has_put_into_the_folder_of_a_journal_is_left_there(make, tmp_path):
    saved, journal = tmp_path / "saved", tmp_path / "journal"
    shard, _ = make(uniform(), journal=journal)
    insert(shard, "a", WHOLE, [step_of(0, 0, 4)])
    shard._journal.close()
    shard, _ = make(uniform(), folder=saved)
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(2)])
    shard.save()  # it is newer, and so the journal begins anew
    folder = journal / "shard-0" / "journal"
    (folder / "thesis.txt").write_text("mine")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    shard, _ = make(uniform(), folder=saved, journal=journal)
    with pytest.raises(InvalidInputError, match=r"other files: \['thesis.txt'\]"):
        shard.ready()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (folder / "thesis.txt").unlink()
    shard, _ = make(uniform(), folder=saved, journal=journal)
    shard._journal.close()
    assert ReplayStorage.load(folder).held_rows().numel() == 8


def test_of_kept_episodes_those_that_had_not_ended_are_lost_and_counted(make, tmp_path):
    factory = n_step(save_snapshot=True, snapshot_dir=tmp_path)

    def write():
        for index, count in enumerate((5, 7)):
            shard, _ = make(factory, index=index, shards=2)
            steps = [step_of(index, step, 4, ends=step == 3) for step in range(count)]
            insert(shard, "a", WHOLE, steps)

    killed(write)
    for index in range(2):
        state = make(factory, index=index, shards=2)[0].ready()
        assert (state.inserted, state.held, state.restored) == (16, 16, 16)  # an episode of four steps in each lane


def test_a_folder_of_another_number_of_shards_is_refused(make, tmp_path):
    factory = uniform(memory="mapped", path=tmp_path)
    for index in range(3):
        make(factory, index=index, shards=3)[0].ready()
    shard, _ = make(factory, index=0, shards=2)
    with pytest.raises(InvalidInputError, match="holds a storage served in 3 shards, and shards is 2"):
        shard.ready()
    one = uniform(memory="mapped", path=tmp_path / "one")
    insert(make(one)[0], "a", WHOLE, [step_of(0, 0, 4)])
    assert (tmp_path / "one" / "manifest.json").exists()  # a single shard needs no folder of its own
    shard, _ = make(one, shards=2)
    with pytest.raises(InvalidInputError, match="was not served in shards, and shards is 2"):
        shard.ready()


def test_mapped_rows_that_take_their_form_from_a_sample_are_counted_from_the_start(make, tmp_path):
    factory = ReplayStorage.create_factory(100, memory="mapped", path=tmp_path)
    killed(lambda: insert(make(factory, shards=2)[0], "a", WHOLE, [step_of(0, step, 4) for step in range(3)]))
    shard, _ = make(factory, shards=2)
    assert (shard.ready().inserted, shard.ready().held) == (12, 0)
    insert(shard, "b", WHOLE, [step_of(0, 3, 4)])
    assert (shard.ready().inserted, shard.ready().held) == (16, 16)


def test_of_mapped_rows_and_a_snapshot_the_newer_ones_are_taken(make, tmp_path):
    factory, saved = uniform(memory="mapped", path=tmp_path / "rows"), tmp_path / "saved"

    def write():
        shard, _ = make(factory, folder=saved, shards=2)
        insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(3)])
        shard.save()
        insert(shard, "a", WHOLE, [step_of(0, 3, 4)])

    killed(write)
    shard, _ = make(factory, folder=saved, shards=2)
    assert (shard.ready().inserted, shard.ready().held) == (16, 16)
    shard._storage.close()
    shutil.rmtree(tmp_path / "rows")  # as on another node
    shard, _ = make(factory, folder=saved, shards=2)
    assert held_ids(shard.each("get_all_buffer_data", (), {})) == ids_of(0, 3, 4)
    assert shard.ready().inserted == 12


# ---------------------------------------------------------------------------------------------------- every storage


def test_sequences_are_drawn_in_proportion_to_windows_and_carry_their_states(make):
    factory = SequenceReplayStorage.create_factory(
        400, OBSERVATIONS, ACTIONS, 4, sequence_length=5, hidden_shape=(1, 3), alpha=0.0
    )
    shard, _ = make(factory)
    samples = [{**step_of(0, step, 4), "hidden_states": torch.full((1, 4, 3), float(step))} for step in range(12)]
    insert(shard, "a", WHOLE, samples)
    assert shard.total() == 8.0  # two windows of five in each lane
    draw, batch = drawn(shard, 6)
    assert draw.priorities is None
    assert batch["actions"].shape == (6, 5)
    assert torch.equal(batch["rewards"].squeeze(-1), batch["actions"].float())
    assert batch["hidden_states"].shape == (1, 6, 3)
    assert batch["hidden_states"][0, :, 0].tolist() == (draw.rows // 4).tolist()


def test_hindsight_keeps_its_reward_after_a_restart(make, tmp_path):
    space = Dict({key: Box(-1e9, 1e9, (1,), np.float32) for key in ("observation", "achieved_goal", "desired_goal")})

    def sample(step):
        ids = torch.arange(4).float().unsqueeze(1) + 10 * step
        nest = {"observation": ids, "achieved_goal": ids, "desired_goal": ids + 5}
        following = {key: value + 10 for key, value in nest.items()}
        return {**step_of(0, step, 4), "observations": nest, "next_observations": following}

    factory = HindsightReplayStorage.create_factory(
        400, space, ACTIONS, 4, compute_reward=lambda achieved, desired, info: (achieved == desired).float() + 3
    )
    shard, _ = make(factory, folder=tmp_path)
    insert(shard, "a", WHOLE, [sample(step) for step in range(10)])
    shard.save()
    again, _ = make(factory, folder=tmp_path)
    _, batch = drawn(again, 200)
    relabelled = batch["observations"]["desired_goal"] != batch["observations"]["observation"] + 5
    assert relabelled.any()
    assert set(batch["rewards"][relabelled].tolist()) <= {3.0, 4.0}


def test_n_step_targets_stop_at_the_lanes_newest_row(make):
    shard, _ = make(NStepReplayStorage.create_factory(400, OBSERVATIONS, ACTIONS, 4, n_step=3, discount=0.5))
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(6)])
    draw, batch = drawn(shard, 100)
    steps_taken = np.minimum(3, 6 - draw.rows // 4)
    assert np.allclose(batch["discounts"].flatten().numpy(), 0.5**steps_taken)


class Actor:
    def get_values(self, observations):
        return observations[:, :1] * 0


@pytest.mark.parametrize("kind", ["rollout", "decoupled"])
def test_rollouts_are_served_after_before_gradients(make, kind):
    if kind == "rollout":
        factory = RolloutStorage.create_factory(6)
        more = {"values": torch.zeros(4, 1), "log_probs": torch.zeros(4), "distribution_params": (torch.zeros(4, 1),)}
    else:
        factory = DecoupledRolloutStorage.create_factory(6)
        more = {"values": torch.zeros(4), "log_probs": torch.zeros(4), "adv_preds": torch.zeros(4)}
    shard, ledger = make(factory)
    names = ["observations", "actions", "rewards", "terminated", "truncated"]
    names += ["next_observations"]
    samples = [{**{name: step_of(0, step, 4)[name] for name in names}, **more} for step in range(6)]
    for sample in samples:
        sample["actions"] = sample["actions"].float().unsqueeze(1)
    insert(shard, "a", WHOLE, samples)
    assert ledger.newest.splits is False
    assert shard.total() == 24.0
    shard.each("before_gradients", (Actor(),), {})
    _, batch = drawn(shard, 40)  # more than there are: no row twice in 24, and 16 of them again
    ids, counts = batch["rewards"].flatten().unique(return_counts=True)
    assert set(ids.int().tolist()) == ids_of(0, 6, 4)
    assert sorted(counts.tolist()) == [1] * 8 + [2] * 16
    assert batch["returns"].shape == (40, 1)


class Foreign(Storage):
    """Written against the base class alone."""

    def __init__(self):
        self.steps = []

    @classmethod
    def create_factory(cls, size):
        return lambda device, actor, algorithm: cls()

    def init_tensors(self, sample): ...
    def get_all_buffer_data(self, data_to_cpu=False): ...
    def insert_data_slice(self, new_data): ...
    def before_gradients(self, actor, algo): ...
    def after_gradients(self, actor, algo, info): ...
    def reset(self): ...
    def update_storage_parameter(self, parameter_name, new_parameter_value): ...

    def insert_transition(self, sample):
        self.steps.append(sample)

    def generate_batches(self, num_mini_batch, mini_batch_size, num_epochs=1):
        ids = torch.cat([step["actions"] for step in self.steps])
        yield {"actions": ids[torch.randint(len(ids), (mini_batch_size,))]}


def test_a_storage_written_against_the_base_alone_is_served(make):
    shard, _ = make(Foreign.create_factory(10))
    insert(shard, "a", WHOLE, [step_of(0, step, 4) for step in range(3)])
    assert shard.total() == 12.0
    draw, batch = drawn(shard, 5)
    assert set(batch["actions"].tolist()) <= ids_of(0, 3, 4)
    assert len(draw.rows) == 0


def test_a_storage_that_learns_its_lanes_tells_them(make):
    shard, ledger = make(ReplayStorage.create_factory(100))
    assert ledger.newest.lanes is None
    insert(shard, "a", Place(0, 0, 4, True), [step_of(0, 0, 4)])
    until(lambda: ledger.newest.lanes == 4, "the news")


def test_discrete_spaces_and_factories_travel_small():
    images = Box(0, 255, (84, 84, 4), np.uint8)
    assert len(packed_factory(uniform())) < 5000
    assert len(packed_factory(ReplayStorage.create_factory(100, images, Discrete(4), 2))) < 5000
