"""The ledger by itself: places, permits, counts. No cluster is needed."""

from __future__ import annotations

import asyncio
import json
import os
import random
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlstore import InvalidInputError, NotReadyError, PeerLostError, RateLimit, SnapshotError, WaitTimeoutError
from rlstore.ray import ledger as module
from rlstore.ray.counts import ShardState, check_shards
from rlstore.ray.ledger import Ledger
from rlstore.ray.places import Place, Places
from rlstore.ray.saves import Saving


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(module, "was_restarted", lambda: False)
    monkeypatch.setattr(Ledger, "_handle", lambda self, shard: None)

    def build(shards=2, limit=None, folder=None, patience=60.0, **saving):
        return Ledger("test", limit, Saving(shards, folder, **saving), patience)

    return build


def facts(shard, generation=1, **more):
    return ShardState(shard, "somewhere", generation, **{"lanes": 4, "splits": True, **more})


# ---------------------------------------------------------------------------------------------------- places


def places(shards=2, lanes=4, splits=True, patience=60.0):
    made = Places(shards, patience)
    for shard in range(shards):
        made.describe(shard, lanes, splits)
    return made


def lanes(place):
    return place.shard, place.first, place.stop


def test_writers_are_spread_over_shards_and_never_share_a_lane():
    table = places(shards=2, lanes=5)
    given = [table.give(f"w{i}", 2) for i in range(4)]
    assert sorted(lanes(place) for place in given) == [(0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4)]
    assert [place.ticket for place in given] == [1, 2, 3, 4]
    assert given[0].shard != given[1].shard
    with pytest.raises(NotReadyError, match="no shard has room for a writer of 2 environments"):
        table.give("w4", 2)
    assert lanes(table.give("w5", 1)) == (0, 4, 5)
    table.leave("w0")
    assert lanes(table.give("w6", 2)) == lanes(given[0])


def test_a_writer_of_all_lanes_has_a_shard_to_itself():
    table = places(shards=2, lanes=3)
    assert {table.give("a", None), table.give("b", 3)} == {Place(0, 0, 3, True, 1), Place(1, 0, 3, True, 2)}
    with pytest.raises(NotReadyError):
        table.give("c", 1)


def test_a_storage_that_cannot_split_takes_one_writer_of_all_its_lanes():
    table = places(shards=1, lanes=4, splits=False)
    with pytest.raises(InvalidInputError, match="cannot share"):
        table.give("a", 2)
    assert table.give("a", 4) == Place(0, 0, 4, True, 1)


def test_the_first_writer_fixes_the_lanes_of_a_storage_that_learns_them():
    table = places(shards=1, lanes=None)
    assert table.give("a", 3) == Place(0, 0, 3, True, 1)
    table.leave("a")
    assert table.give("b", 2) == Place(0, 0, 2, False, 2)


def test_a_silent_writer_loses_its_place_only_to_one_that_needs_it():
    table = places(shards=1, lanes=2, patience=0.0)
    table.give("a", 2)
    assert table.heartbeat("a")
    assert table.give("b", 2) == Place(0, 0, 2, True, 2)
    assert not table.heartbeat("a")


# ---------------------------------------------------------------------------------------------------- counts


def test_what_a_life_had_stored_since_the_snapshot_is_lost_with_it(make):
    async def run():
        ledger = make(shards=2)
        await ledger.heartbeat(facts(0))
        await ledger.heartbeat(facts(1))
        await ledger.heartbeat(facts(0, inserted=100, held=100, sampled=7))
        await ledger.heartbeat(facts(0, generation=2, inserted=60, held=60, restored=60))  # from a snapshot
        await ledger.heartbeat(facts(0, generation=1, inserted=120, held=100))  # late news of the life before
        await ledger.heartbeat(facts(0, generation=2, inserted=90, held=90, restored=60, sampled=3))
        await ledger.heartbeat(facts(0, generation=3))  # without one
        return (await ledger.report())["shards"]

    first, second = asyncio.run(run())
    assert (first.starts, first.inserted, first.sampled, first.lost) == (3, 150, 10, 60 + 90)
    assert (second.starts, second.inserted, second.lost) == (1, 0, 0)


def test_what_a_folder_holds_beyond_the_last_heartbeat_is_inserted_and_not_lost(make):
    async def run():
        ledger = make(shards=1)
        await ledger.heartbeat(facts(0))
        await ledger.heartbeat(facts(0, inserted=100, held=100, inserted_freely=100))
        await ledger.heartbeat(facts(0, generation=2, inserted=112, held=112, restored=112))
        counts = []
        for known in (108, 112, 116):  # what writers know of the life before
            await ledger.last_state(facts(0, inserted=known, held=known, inserted_freely=known))
            (shard,) = (await ledger.report())["shards"]
            counts.append((shard.inserted, shard.lost, (await ledger.report())["limiter_inserted"]))
        return counts

    assert asyncio.run(run()) == [(112, 0, 112), (112, 0, 112), (116, 4, 116)]


def test_no_more_is_lost_than_was_held(make):
    async def run():
        ledger = make(shards=1)
        await ledger.heartbeat(facts(0))
        await ledger.heartbeat(facts(0, inserted=1000, held=50))
        await ledger.heartbeat(facts(0, generation=2))
        return (await ledger.report())["shards"][0].lost

    assert asyncio.run(run()) == 50


def test_places_wait_for_the_shards(make):
    async def run():
        ledger = make(shards=2)
        asked = asyncio.ensure_future(ledger.place("w", 2, 10.0))
        await ledger.heartbeat(facts(0))
        await asyncio.sleep(0.02)
        assert not asked.done()
        await ledger.heartbeat(facts(1))
        return await asked

    assert lanes(asyncio.run(run())) in ((0, 0, 2), (1, 0, 2))


def test_news_comes_with_what_a_shard_tells(make):
    async def run():
        ledger = make(shards=1)
        assert await ledger.wait_for_heartbeat(0, 0.01) == 0
        asked = asyncio.ensure_future(ledger.wait_for_heartbeat(0, 10.0))
        await asyncio.sleep(0)
        await ledger.heartbeat(facts(0))
        return await asked

    assert asyncio.run(run()) == 1


# ---------------------------------------------------------------------------------------------------- permits


def placed(ledger, *writers):
    for writer in writers:
        ledger._places.given[writer] = Place(0, 0, 1, False)
        ledger._places._heartbeats[writer] = 0.0


def test_without_a_limit_a_learner_waits_for_the_first_insert(make):
    async def run():
        ledger = make()
        placed(ledger, "w")
        asked = asyncio.ensure_future(ledger.permit_sample(8, 1, 10.0))
        await asyncio.sleep(0.02)
        assert not asked.done()
        await ledger.permit_insert("w", 1, 10.0)
        await asked

    asyncio.run(run())


def test_what_went_without_a_permit_counts_for_the_limit_too(make):
    async def run():
        ledger = make(shards=2)
        await ledger.heartbeat(facts(0))
        await ledger.heartbeat(facts(1))
        await ledger.heartbeat(facts(0, inserted=10, held=10, sampled=6, inserted_freely=7, sampled_freely=6))
        await ledger.heartbeat(facts(0, inserted=12, held=12, sampled=9, inserted_freely=9, sampled_freely=9))
        await ledger.heartbeat(facts(1, generation=2, inserted=4, held=4, inserted_freely=3))  # another life
        report = await ledger.report()
        return report["limiter_inserted"], report["limiter_sampled"]

    assert asyncio.run(run()) == (16, 9)  # at least the 16 inserts of which the shards tell: 9 and 3 are among them


def test_what_a_lost_shard_had_not_told_its_writers_tell(make):
    async def run(late):
        ledger = make(shards=1)
        await ledger.heartbeat(facts(0))
        await ledger.heartbeat(facts(0, inserted=80, held=80, inserted_freely=80))
        told = facts(0, inserted=104, held=104, sampled=5, inserted_freely=104)
        if not late:
            await ledger.last_state(told)
        await ledger.heartbeat(facts(0, generation=2, inserted=60, held=60, restored=60))
        await ledger.last_state(told)
        await ledger.last_state(facts(0, inserted=96, held=96, inserted_freely=96))  # another writer knows less
        await ledger.heartbeat(facts(0, generation=2, inserted=64, held=64, restored=60))
        await ledger.last_state(facts(0, generation=3, inserted=90, held=90))  # of a life that has not told of itself
        report = await ledger.report()
        (counts,) = report["shards"]
        return counts.lost, counts.inserted, counts.sampled, report["limiter_inserted"], counts.state.inserted

    assert asyncio.run(run(late=False)) == (44, 108, 5, 104, 64)
    assert asyncio.run(run(late=True)) == (44, 108, 5, 104, 64)


def test_a_writer_of_which_a_shard_tells_keeps_its_place(make):
    async def run():
        ledger = make(shards=1, patience=0.2)
        await ledger.heartbeat(facts(0))
        await ledger.place("kept", 4, 1.0)
        heard = ledger._places._heartbeats["kept"]
        await ledger.heartbeat(facts(0, inserted=4), ["kept", "unknown"])
        return heard, ledger._places._heartbeats

    before, heard = asyncio.run(run())
    assert heard.keys() == {"kept"}
    assert heard["kept"] > before


def test_a_permit_that_does_not_come_says_why_and_lets_the_others_by(make):
    async def run():
        ledger = make(limit=RateLimit(1.0, min_size=10, tolerance=10))
        placed(ledger, "w")
        large = asyncio.ensure_future(ledger.permit_insert("w", 10, 1.0))
        await large
        late = asyncio.ensure_future(ledger.permit_sample(10, 1, 0.01))
        await late
        with pytest.raises(
            WaitTimeoutError, match=r"let no sample of 10 go ahead within 0.01 s: 10 were inserted and 10"
        ):
            await ledger.permit_sample(10, 1, 0.01)
        await ledger.permit_insert("w", 10, 1.0)
        await ledger.permit_sample(10, 1, 1.0)

    asyncio.run(run())


def test_with_a_minimum_size_alone_only_samples_wait(make, monkeypatch):
    told = []
    handle = SimpleNamespace(store_backup=SimpleNamespace(remote=lambda version, state, *limited: told.append(limited)))
    monkeypatch.setattr(Ledger, "_handle", lambda self, shard: handle)

    async def run():
        ledger = make(shards=1, limit=RateLimit(min_size=10))
        await ledger.heartbeat(ShardState(0, generation=1, lanes=4, splits=True))
        await ledger.heartbeat(ShardState(0, generation=1, inserted=9, inserted_freely=9))
        with pytest.raises(WaitTimeoutError, match="9 were inserted"):
            await ledger.permit_sample(64, 1, 0.01)
        waiting = asyncio.ensure_future(ledger.permit_sample(64, 100, 10.0))
        await ledger.heartbeat(ShardState(0, generation=1, inserted=10, inserted_freely=10))
        assert (await waiting)[0] == 100

    asyncio.run(run())
    assert set(told) == {(False, True)}  # inserts need no permits, draws do


def test_a_permit_that_times_out_lets_smaller_ones_behind_it_go_ahead(make):
    async def run():
        ledger = make(limit=RateLimit(1.0, min_size=1, tolerance=10))
        placed(ledger, "w")
        await ledger.permit_insert("w", 8, 1.0)
        large = asyncio.ensure_future(ledger.permit_insert("w", 8, 0.1))  # 16 is more than 1 + 10
        await asyncio.sleep(0.02)
        small = asyncio.ensure_future(ledger.permit_insert("w", 3, 10.0))
        await asyncio.sleep(0.02)
        assert not small.done()
        with pytest.raises(WaitTimeoutError):
            await large
        await asyncio.wait_for(small, 1.0)

    asyncio.run(run())


def test_a_learner_gets_as_many_batches_at_once_as_the_limit_allows(make):
    async def run():
        ledger = make(limit=RateLimit(1.0, min_size=1, tolerance=10))
        placed(ledger, "w")
        await ledger.permit_insert("w", 10, 1.0)
        assert (await ledger.permit_sample(6, 8, 1.0))[0] == 3  # 10 - 18 is no less than 1 - 10, and 10 - 24 is
        with pytest.raises(WaitTimeoutError):
            await ledger.permit_sample(6, 8, 0.01)
        await ledger.return_sample(12)
        assert (await ledger.permit_sample(6, 1, 1.0))[0] == 1
        assert (await ledger.permit_sample(6, 8, 1.0))[0] == 1

    asyncio.run(run())


def test_a_tolerance_with_which_both_sides_could_wait_is_refused(make):
    async def run():
        ledger = make(limit=RateLimit(4.0, tolerance=32))
        placed(ledger, "w")
        with pytest.raises(InvalidInputError, match="tolerance"):
            await ledger.permit_insert("w", 100, 1.0)
        await ledger.permit_insert("w", 8, 1.0)
        waiting = asyncio.ensure_future(ledger.permit_insert("w", 8, 10.0))
        await asyncio.sleep(0)
        with pytest.raises(InvalidInputError, match="tolerance"):
            await ledger.set_rate_limit(RateLimit(100.0, tolerance=32))
        await ledger.set_rate_limit(RateLimit(1.0, tolerance=32))
        await waiting
        await ledger.set_rate_limit(RateLimit(100.0, tolerance=100))  # whoever inserts 8 may be gone
        with pytest.raises(InvalidInputError, match="tolerance"):
            await ledger.permit_insert("w", 8, 1.0)

    asyncio.run(run())


def test_a_writer_without_a_place_gets_no_permit(make):
    with pytest.raises(PeerLostError, match="make a new writer"):
        asyncio.run(make().permit_insert("unknown", 1, 1.0))


def test_a_permit_of_what_was_lost_is_given_back(make):
    async def run():
        ledger = make(limit=RateLimit(1.0, min_size=1, tolerance=4))
        placed(ledger, "w")
        await ledger.permit_insert("w", 4, 1.0)
        waiting = asyncio.ensure_future(ledger.permit_insert("w", 4, 10.0))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await ledger.count_lost(4, 3, 4)
        await waiting
        return await ledger.report()

    report = asyncio.run(run())
    assert (report["lost_in_flight"], report["lost_updates"], report["limiter_inserted"]) == (4, 3, 4)


@pytest.mark.parametrize(("ratio", "wanted"), [(0.25, 20_000), (1.0, 100_000), (8.0, 100_000)])
def test_the_ratio_holds_while_speeds_change(make, ratio, wanted):
    """Known elsewhere: a replay ratio of 8 that was set, and 1.43 that was got."""
    rng = random.Random(int(ratio * 100))

    async def produce(ledger, name, over):
        while not over.is_set():
            await ledger.permit_insert(name, rng.choice([1, 4, 16]), 60.0)
            for _ in range(rng.choice([0, 0, 1, 20])):
                await asyncio.sleep(0)

    async def consume(ledger, sizes):
        while sizes and (await ledger.report())["limiter_sampled"] < wanted:
            await ledger.permit_sample(rng.choice(sizes), 1, 60.0)
            for _ in range(rng.choice([0, 0, 1, 30])):
                await asyncio.sleep(0)

    async def run():
        ledger = make(limit=RateLimit(ratio, min_size=100))
        names = ["a", "b", "c"]
        placed(ledger, *names)
        over = asyncio.Event()
        producers = [asyncio.ensure_future(produce(ledger, name, over)) for name in names]
        await asyncio.gather(consume(ledger, [32, 64]), consume(ledger, [64]))
        report = await ledger.report()
        over.set()
        await ledger.set_rate_limit(None)
        await asyncio.gather(*producers)
        return report

    report = asyncio.run(run())
    inserted, sampled = report["limiter_inserted"] - 100, report["limiter_sampled"]
    assert sampled >= wanted
    assert abs(sampled / inserted - ratio) <= 0.05 * ratio


def test_a_limit_can_change_while_others_wait(make):
    async def run():
        ledger = make(limit=RateLimit(1.0, min_size=4, tolerance=4))
        placed(ledger, "w")
        await ledger.permit_insert("w", 4, 1.0)
        await ledger.permit_sample(4, 1, 1.0)
        waiting = asyncio.ensure_future(ledger.permit_sample(4, 1, 10.0))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await ledger.set_rate_limit(RateLimit(1.0, min_size=4, tolerance=8))
        await waiting
        await ledger.set_rate_limit(None)
        await asyncio.gather(*[ledger.permit_sample(100, 1, 1.0) for _ in range(5)])

    asyncio.run(run())


def test_the_limiter_goes_on_from_where_it_was(make, tmp_path):
    """Known elsewhere: counts that are not saved let a burst through after a restart."""

    async def first():
        ledger = make(limit=RateLimit(1.0, min_size=1, tolerance=10), folder=str(tmp_path))
        placed(ledger, "w")
        await ledger.permit_insert("w", 10, 1.0)
        await ledger.permit_sample(7, 1, 1.0)
        await ledger.save()

    async def second():
        ledger = make(limit=RateLimit(1.0, min_size=1, tolerance=10), folder=str(tmp_path))
        placed(ledger, "w")
        report = await ledger.report()
        with pytest.raises(WaitTimeoutError):
            await ledger.permit_insert("w", 9, 0.01)  # 19 - 7 is more than 1 + 10
        await ledger.permit_insert("w", 8, 0.01)
        return report["limiter_inserted"], report["limiter_sampled"]

    asyncio.run(first())
    assert asyncio.run(second()) == (10, 7)


# ---------------------------------------------------------------------------------------------------- served.json


def totals(report):
    return [
        (shard.starts, shard.inserted, shard.sampled, shard.lost, shard.state.inserted) for shard in report["shards"]
    ]


def test_another_run_continues_all_counts(make, tmp_path):
    async def first():
        ledger = make(shards=2, limit=RateLimit(4.0), folder=str(tmp_path))
        for shard in range(2):
            await ledger.heartbeat(facts(shard))
        await ledger.heartbeat(facts(0, inserted=100, held=100, sampled=7, inserted_freely=100, sampled_freely=7))
        await ledger.heartbeat(facts(0, generation=2, inserted=60, held=60))  # 40 are lost
        await ledger.count_lost(5, 3, 0)
        # Of the shard that has saved 90 the ledger has heard that there were 80, and of the other nothing.
        await ledger.heartbeat(facts(0, generation=2, inserted=80, held=80, inserted_freely=20))
        await ledger.save([facts(0, generation=2, inserted=90, held=90, inserted_freely=30), facts(1, inserted=8)])
        await ledger.heartbeat(facts(0, generation=2, inserted=95, held=95, inserted_freely=35))
        return totals(await ledger.report())

    async def second():
        ledger = make(shards=2, folder=str(tmp_path))
        before = await ledger.report()
        counted = totals(before)
        # The clock was set back, and the other shard has saved once more.
        await ledger.heartbeat(facts(0, generation=1, inserted=90, held=90, restored=90))
        await ledger.heartbeat(facts(1, generation=1, inserted=12, held=12, restored=12))
        return counted, before, await ledger.report()

    assert asyncio.run(first()) == [(2, 135, 7, 40, 95), (1, 8, 0, 0, 8)]
    counted, before, after = asyncio.run(second())
    assert counted == [(0, 130, 7, 40, 90), (0, 8, 0, 0, 8)]
    assert totals(after) == [(1, 130, 7, 40, 90), (1, 12, 0, 0, 12)]
    for report in before, after:
        assert (report["lost_in_flight"], report["lost_updates"], report["rate_limit"]) == (5, 3, None)
    assert (before["limiter_inserted"], before["limiter_sampled"]) == (130, 7)
    assert after["limiter_inserted"] == 142


def test_with_a_journal_heartbeats_are_enough(make, tmp_path):
    """Not each is written, but one in every interval; of two files the newer counts."""

    async def first(interval):
        ledger = make(shards=1, folder=str(tmp_path / "saved"), journal=str(tmp_path / "journal"), interval=interval)
        await ledger.heartbeat(facts(0, inserted=10, held=10))
        await ledger.save()
        await ledger.heartbeat(facts(0, inserted=20, held=20))
        await ledger.heartbeat(facts(0, inserted=30, held=30))

    async def second(**folders):
        return totals(await make(shards=1, **folders).report())

    saved, journal = str(tmp_path / "saved"), str(tmp_path / "journal")
    for interval, inserted in ((1e-9, 30), (3600.0, 10)):
        for folder in (saved, journal):
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / "served.json").unlink(missing_ok=True)
        asyncio.run(first(interval))
        assert asyncio.run(second(folder=saved)) == [(0, 10, 0, 0, 10)]
        assert asyncio.run(second(journal=journal)) == [(0, inserted, 0, 0, inserted)]
        assert asyncio.run(second(folder=saved, journal=journal)) == [(0, inserted, 0, 0, inserted)]


def test_a_shard_that_saved_less_than_was_counted_has_lost_the_rest(make, tmp_path):
    async def first():
        ledger = make(shards=1, folder=str(tmp_path))
        await ledger.save([facts(0, inserted=50, held=20)])

    async def second(inserted):
        ledger = make(shards=1, folder=str(tmp_path))
        await ledger.heartbeat(facts(0, inserted=inserted, held=20))
        return totals(await ledger.report())

    asyncio.run(first())
    assert asyncio.run(second(45)) == [(1, 50, 0, 5, 45)]
    assert asyncio.run(second(10)) == [(1, 50, 0, 20, 10)]  # 20 of those 40 had been overwritten


def test_the_counts_of_the_limiter_that_earlier_versions_saved_are_read(make, tmp_path):
    (tmp_path / "limiter.json").write_text('{"inserted": 40, "sampled": 30}')
    report = asyncio.run(make(folder=str(tmp_path)).report())
    assert (report["limiter_inserted"], report["limiter_sampled"]) == (40, 30)


def test_a_restarted_ledger_takes_the_newest_of_the_backups_and_the_file(make, tmp_path, monkeypatch):
    async def save(inserted, version):
        (tmp_path / "served.json").unlink(missing_ok=True)
        ledger = make(shards=1, folder=str(tmp_path), limit=RateLimit(2.0))
        placed(ledger, "w")
        ledger._state.version = version
        await ledger.save([facts(0, generation=7, inserted=inserted, held=inserted)])
        return ledger._state

    class Handle:
        get_backup = SimpleNamespace(remote=lambda: (deepcopy(backup), facts(0, generation=8, inserted=70, held=70)))

    backup = asyncio.run(save(100, 5))
    monkeypatch.setattr(module, "was_restarted", lambda: True)
    monkeypatch.setattr(module.ray, "get_actor", lambda name, namespace: Handle)
    monkeypatch.setattr(module.ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(module.ray, "get", lambda ref, timeout: ref)
    restarted = {}
    for inserted, version in ((90, 4), (120, 5), (130, 6)):
        monkeypatch.setattr(module, "was_restarted", lambda: False)
        asyncio.run(save(inserted, version))
        monkeypatch.setattr(module, "was_restarted", lambda: True)
        ledger = make(shards=1, folder=str(tmp_path))
        report = asyncio.run(ledger.report())
        assert report["rate_limit"] == RateLimit(2.0)
        assert report["writers"] == 1
        restarted[version] = totals(report)
    assert restarted == {4: [(2, 100, 0, 30, 70)], 5: [(2, 120, 0, 50, 70)], 6: [(2, 130, 0, 60, 70)]}
    (tmp_path / "served.json").write_text("{}")
    assert totals(asyncio.run(make(shards=1, folder=str(tmp_path)).report())) == [(2, 100, 0, 30, 70)]


def test_a_file_that_holds_anything_else_is_refused(make, tmp_path):
    check = partial(check_shards, [str(tmp_path), str(tmp_path / "journal")], 2)
    (tmp_path / "journal").mkdir()
    for saved in (False, True):
        check()
        asyncio.run(make(shards=2, folder=str(tmp_path)).save([facts(1, inserted=9, saved=saved)]))
    good = json.loads((tmp_path / "served.json").read_text())
    with pytest.raises(SnapshotError, match="counts 9 inserts of shard 1, and the folder of that is missing"):
        check()
    (tmp_path / "journal" / "shard-1").mkdir()  # the other one may come later
    check()
    for number in (1, 3):
        with pytest.raises(
            InvalidInputError, match=f"served in 2 shards, and shards is {number}; give the same number"
        ):
            check_shards([str(tmp_path)], number)
    first, shard = good["shards"]

    def with_state(counts, **changes):
        return {**counts, "state": {**counts["state"], **changes}}

    for wrong in (
        {**good, "shards": [{**shard, "inserted": "9"}, shard]},
        {**good, "shards": [shard, shard]},
        {**good, "shards": [None]},
        {**good, "limit": [1]},
        {**good, "limit": {"samples_per_insert": -1}},
        {**good, "places": {"w": [1, 2, 3, 4, 5, 6]}},
        {**good, "version": 1.5},
        {**good, "something": 1},
        {**good, "limit": 0},
        {**good, "version": 2**63},
        {**good, "restarts": -1},
        {**good, "inserted_offset": -(2**63)},
        {**good, "shards": [{**first, "inserted": -1}, shard]},
        {**good, "shards": [{**first, "previous": {}}, shard]},
        *({**good, "shards": [with_state(first, lanes=lanes), shard]} for lanes in (0, -4, "4", 2.0, True, [4])),
        *({**good, "shards": [first, with_state(shard, shard=number)]} for number in (0, True, "1")),
        {**good, "shards": [with_state(first, held=-1), shard]},
        *({**good, "places": {"w": place}} for place in ([2, 0, 4, True, 1], [-1, 0, 4, True, 1], [0, 4, 2, False, 1])),
        *({**good, "places": {"w": place}} for place in ([0, 0, "4", True, 1], [0, 0, 4, 1, 1], [0, 0, 4, True, -1])),
        {**good, "places": {"w": [0, 0, 2**63, True, 1]}},
        {"version": 3},
    ):
        (tmp_path / "served.json").write_text(json.dumps(wrong))
        with pytest.raises(SnapshotError, match="does not hold the counts of a storage"):
            check()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["served.json", "limiter.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "a terabyte", "a FIFO", '{"a": ' + "[]," * 10**6 + "0}"])
def test_counts_of_any_size_and_depth_are_refused(make, name, content, tmp_path):
    file = tmp_path / name
    if content == "a FIFO":
        os.mkfifo(file)
    else:
        file.write_text(content)
    if content == "a terabyte":
        os.truncate(file, 1 << 40)
    with pytest.raises(SnapshotError, match=name):
        make(folder=str(tmp_path))


@pytest.mark.parametrize("counts", [{"inserted": -1, "sampled": 0}, {"inserted": 2**63, "sampled": 0}, {"inserted": 1}])
def test_counts_of_a_limiter_that_cannot_be_are_refused(make, counts, tmp_path):
    (tmp_path / "limiter.json").write_text(json.dumps(counts))
    with pytest.raises(SnapshotError, match="does not hold a limiter's counts"):
        make(folder=str(tmp_path))
