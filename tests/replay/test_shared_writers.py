"""Writers that are given away, that die at any moment, and that may not be."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
import re

import pytest
import torch
from combinations import each
from killed_writers import kill_writers
from replay_kinds import assert_same, assert_same_draws, leaves
from shared_kinds import PRIORITIZED, REPLAY, SEQUENCE, SHARED, part_of
from shared_steps import DEADLINE, FIVE, OBSERVATIONS, add_and_wait, join, kill, put, start, write_plan

from rlstore import InvalidInputError, PeerLostError, RateLimit, ReplayStorage, SlotQueue, StorageClosedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the observations of an environment are not:UserWarning"),
]
FORK = multiprocessing.get_context("fork")


def start_and_hold(writer, steps, then=()):
    """A process that has added some steps, and what lets it go on."""
    added, go_on = FORK.Event(), FORK.Event()
    process = start("fork", add_and_wait, writer, steps, added, go_on, then)
    assert added.wait(DEADLINE)
    return process, go_on


def assert_same_rows(storage, twin):
    assert_same(leaves(storage.get_all_buffer_data()), leaves(twin.get_all_buffer_data()))
    assert_same_draws(storage, twin)
    storage.close()
    twin.close()


def test_a_writer_tells_what_it_is():
    storage = REPLAY.make(lanes=3, memory="shared")
    named, nameless = storage.writer(range(1, 3), name="left"), storage.writer(1)
    for step in REPLAY.plan([0, 1], 4):
        named.add(**step)
    assert repr(named) == "ReplayWriter('left', 2 envs from 1 of a ReplayStorage)"
    assert repr(nameless) == "ReplayWriter(1 envs from 0 of a ReplayStorage)"
    there = pickle.loads(pickle.dumps(named))
    assert repr(there) == repr(named)
    assert there.num_envs == 2
    named.close()
    assert repr(named) == "ReplayWriter('left', 2 envs from 1 of a ReplayStorage: closed)"
    storage.close()


# ------------------------------------------------------------------------------------------------- death


@pytest.mark.parametrize(("kind", "done"), each(SHARED, [1, 5, 37]), ids=repr)
def test_what_a_killed_writer_had_finished_stays_and_its_episode_is_cut(kind, done):
    """The next writer begins an episode there: the same as if the first one had been broken off."""
    plan, others = kind.plan([0], 60, kinds=(0, 1), longest=9), kind.plan([1], 20)
    storage, twin = kind.make(lanes=1, memory="shared"), kind.make(lanes=1, memory="ram")
    process, _ = start_and_hold(storage.writer(name="left"), plan[:done])
    kill(process)
    with pytest.warns(RuntimeWarning, match=rf'the writer "left" \(process {process.pid}\) of this .* died'):
        assert storage.lost_writers == 1
    with storage.writer(range(1), name="right") as writer:
        for step in others:
            writer.add(**step)
    for step in [*plan[:done], *others]:
        twin.add(**step)
    assert storage.lost_writers == 1
    assert_same_rows(storage, twin)


def test_a_writer_that_died_and_its_episode_are_counted_in_the_same_stats():
    """Also if nobody has looked for dead writers since."""
    storage = REPLAY.make(lanes=1, memory="shared")
    process, _ = start_and_hold(storage.writer(), REPLAY.plan([0], 3, kinds=(0,), longest=9)[:1])
    assert storage.stats()["episodes_open"] == 1
    kill(process)
    storage._sharing._swept = math.inf
    with pytest.warns(RuntimeWarning, match="died"):
        numbers = storage.stats()
    assert (numbers["lost_writers"], numbers["episodes_open"], numbers["episodes_broken"]) == (1, 0, 1)
    assert storage.stats() == numbers
    storage.close()


@pytest.mark.parametrize(
    ("kind", "when"),
    [*each([REPLAY, SEQUENCE, SHARED[-2]], ["begin", "continue", "end", "break"]), (SEQUENCE, "break")],
    ids=repr,
)
def test_a_writer_killed_in_the_middle_of_a_row_leaves_nothing_of_it(kind, when):
    """Whatever the row had already changed before its number was told."""
    plan, others = kind.plan([0], 60, kinds=(0,), longest=6, seed=3), kind.plan([1], 20)
    ends = [number for number, step in enumerate(plan) if step["terminateds"][0]]
    longest = max(range(1, len(ends)), key=lambda i: ends[i] - ends[i - 1])
    done = ends[longest - 1] + (1 if when == "begin" else 3)  # rows before the one that is not finished
    storage, twin = kind.make(lanes=1, memory="shared"), kind.make(lanes=1, memory="ram")
    writer = storage.writer()
    for step in plan[:done]:
        writer.add(**step)
        twin.add(**step)
    half_write(writer._part.ring, when)
    writer._control.reclaim(writer._given_by, writer._part.ring.whole.recover)  # as whoever finds it dead does
    writer._control.peers.leave(writer._given_by)
    assert len(storage) == done
    with storage.writer() as following:
        for step in others:
            following.add(**step)
    for step in others:
        twin.add(**step)
    assert_same_rows(storage, twin)


def half_write(ring, when):
    """Change everything that a write of one more row changes, but the number of rows."""
    written, slot = int(ring.written[0]), int(ring.current[0])
    place, after = written % ring.rows, (written + 1) % ring.rows
    if when == "break":
        for leaf, table in zip(ring.leaves, ring.finals, strict=True):
            table[slot] = ring.blocks[leaf.field.name][0, place]
        ring.episodes[slot, 1] = written
    if when in ("begin", "break"):
        slot = int(ring.free_slots[int(ring.free_count[0]) - 1, 0])
        ring.free_count[0] -= 1
        ring.episodes[slot] = torch.tensor([written, -1, 0, 0])
        ring.current[0], ring.after_end[0] = slot, -1
        for leaf in ring.leaves:
            ring.blocks[leaf.field.name][0, place] = 99
    for column in ring.columns:
        ring.blocks[column.name][0, place] = 99
    ring.blocks["episode"][0, place] = slot
    for leaf, table in zip(ring.leaves, ring.finals, strict=True):
        target = table[slot] if when == "end" else ring.blocks[leaf.field.name][0, after]
        target.fill_(98)
    if when == "end":
        ring.episodes[slot, 2] = 1
        ring.episodes[slot, 1] = written + 1
        ring.current[0] = -1


def test_lanes_of_a_dead_writer_are_given_to_the_next_and_those_of_a_live_one_are_not():
    storage, plan = REPLAY.make(lanes=4, memory="shared"), REPLAY.plan(range(4), 20)
    parts = [[part_of(step, lanes) for step in plan] for lanes in (range(2), range(2, 4))]
    dead, _ = start_and_hold(storage.writer(2, name="dead"), parts[0][:4])
    alive, go_on = start_and_hold(storage.writer(2, name="alive"), parts[1][:4], parts[1][4:])
    kill(dead)
    with pytest.raises(InvalidInputError, match=r'"alive" \(process \d+\) has \[2, 3\]'):
        storage.writer(range(1, 4))
    writer = storage.writer(2, name="next")  # it looks who lives by itself
    assert writer.lanes == range(2)
    with pytest.warns(RuntimeWarning, match='"dead" .* died'):  # told of here, whoever found it
        assert storage.lost_writers == 1
    for step in parts[0]:
        writer.add(**step)
    go_on.set()
    join(alive)
    writer.close()
    assert len(storage) == 2 * 20 + 2 * 4 + 2 * 20
    assert storage.lost_writers == 1
    REPLAY.check(storage.sample())
    storage.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are read from /proc")
@pytest.mark.parametrize("kind", [REPLAY, PRIORITIZED, SEQUENCE], ids=repr)
def test_writers_killed_at_any_moment_cost_their_own_episodes_alone(kind):
    """The long form is in tests/torture."""
    kill_writers(kind, 6)


def test_a_death_is_told_by_sample_as_well(monkeypatch):
    monkeypatch.setattr("rlstore.replay.sharing._SWEEP_SECONDS", 0.0)
    storage = REPLAY.make(lanes=1, memory="shared")
    process, _ = start_and_hold(storage.writer(), REPLAY.plan([0], 9))
    storage.sample()
    kill(process)
    with pytest.warns(RuntimeWarning, match="its environments are free for another writer"):
        storage.sample()
    storage.sample()  # it is said once
    storage.close()


def test_a_maker_that_is_gone_is_told_to_the_writers(monkeypatch):
    monkeypatch.setattr("rlstore.replay.writer._LOOK_SECONDS", 0.0)
    ours, theirs = FORK.Pipe()
    done, step = FORK.Event(), REPLAY.plan([0], 9)

    def make():
        storage = REPLAY.make(lanes=1, memory="shared", timeout=1.0)
        theirs.send_bytes(pickle.dumps(storage.writer()))
        done.wait(DEADLINE)

    maker = FORK.Process(target=make)
    maker.start()
    assert ours.poll(DEADLINE)
    sent = ours.recv_bytes()
    writer = pickle.loads(sent)
    writer.add(**step[0])
    kill(maker)
    with pytest.raises(PeerLostError, match=rf"maker \(process {maker.pid}\) of this storage is gone; nothing was"):
        write_plan(writer, step[1:2] * 300, 1)
    with pytest.raises(PeerLostError, match=f"process {maker.pid}"):
        pickle.loads(sent)


# ------------------------------------------------------------------------------------------------- hands


def test_a_writer_goes_from_hand_to_hand_and_is_one_hands_at_a_time():
    storage, plan = REPLAY.make(lanes=1, steps=64, memory="shared"), REPLAY.plan([0], 40)
    writer = storage.writer(name="w")
    writer.add(**plan[0])
    first, go_on = start_and_hold(writer, plan[1:10], plan[10:20])
    with pytest.raises(InvalidInputError, match=rf'given away: writer "w" \(process {first.pid}\) has \[0\].*Nothing'):
        writer.add(**plan[1])
    second = start("fork", write_plan, writer, plan[20:], 1)
    second.join(DEADLINE)
    assert second.exitcode == 1  # the first one has it
    go_on.set()
    join(first)
    third, _ = start_and_hold(writer, plan[20:30])
    kill(third)
    with pytest.warns(RuntimeWarning, match="died"):
        assert storage.lost_writers == 1
    join(start("fork", write_plan, writer, plan[30:], 1))
    assert storage.lost_writers == 1
    assert sorted(storage.get_all_buffer_data()["actions"].flatten().tolist()) == sorted(
        int(step["actions"][0]) for step in plan
    )
    storage.close()


def test_a_lane_has_one_writer():
    storage = REPLAY.make(lanes=3, memory="shared")
    writer = storage.writer(range(1, 2), name="middle")
    for lanes in (None, range(3), range(1, 2), 2):
        with pytest.raises(InvalidInputError, match=rf'"middle" \(process {os.getpid()}\) has \[1\]'):
            storage.writer(lanes)
    left, right = storage.writer(1), storage.writer(1)
    assert (left.lanes, right.lanes, left.num_envs) == (range(1), range(2, 3), 1)
    writer.close()
    assert storage.writer(1).lanes == range(1, 2)


def test_a_writer_that_is_let_go_gives_its_lanes_back():
    storage, plan = REPLAY.make(memory="ram"), REPLAY.plan(range(2), 9)
    writer = storage.writer()
    writer.add(**plan[0])
    del writer
    with storage.writer() as writer:
        writer.add(**plan[0])
    writer.close()  # again
    with pytest.raises(StorageClosedError, match="this writer is closed; nothing was written"):
        writer.add(**plan[1])
    storage.add(**plan[2])
    assert (len(storage), storage.lost_writers) == (6, 0)


def test_writers_that_nothing_here_holds_reach_the_processes_that_they_were_given_to():
    """The usual loop: each is made, given to a process and let go before that process has added anything."""
    storage, plan = REPLAY.make(lanes=3, memory="shared"), REPLAY.plan([0], 20)
    added, go_on = [FORK.Event() for _ in range(3)], FORK.Event()
    processes = [start("fork", add_and_wait, storage.writer(1), plan, event, go_on) for event in added]
    assert all(event.wait(DEADLINE) for event in added)
    with pytest.raises(InvalidInputError, match=r"every lane is taken: .*process"):
        storage.writer(1)
    go_on.set()
    join(*processes)
    assert (len(storage), storage.lost_writers) == (60, 0)
    with storage.writer() as writer:
        assert writer.num_envs == 3
    storage.close()


@pytest.mark.parametrize(("kind", "memory"), each(SHARED, ["ram", "shared"]), ids=repr)
def test_nothing_but_its_writers_adds_while_there_are_any(kind, memory):
    plan = kind.plan(range(2), 9)
    storage, source = kind.make(memory=memory), kind.make(memory="ram")
    source.add(**plan[0])
    data = source.get_all_buffer_data()
    with storage.writer(1):
        for call in (lambda: storage.add(**plan[0]), lambda: storage.insert_data_slice(data)):
            with pytest.raises(InvalidInputError, match=r"added by its writers.*Nothing was written"):
                call()
        with pytest.raises(InvalidInputError, match="size cannot change while there are writers"):
            storage.update_storage_parameter("storage_size", 8)
        assert (len(storage), storage.storage_size) == (0, 64)
    storage.add(**plan[0])
    storage.insert_data_slice(data)
    assert len(storage) == 4
    for either in (storage, source):
        either.close()


@pytest.mark.parametrize("memory", ["ram", "device", "mapped"])
def test_a_writer_of_memory_that_is_not_shared_stays_in_its_process(memory, tmp_path):
    where = {"path": tmp_path / "rows"} if memory == "mapped" else {}
    storage = REPLAY.make(memory=memory, **where)
    with storage.writer() as writer:
        told = re.escape('works in its own process alone; give the storage memory="shared"')
        with pytest.raises(InvalidInputError, match=told):
            pickle.dumps(writer)
        writer.add(**REPLAY.plan(range(2), 9)[0])
    assert len(storage) == 2
    storage.close()


def test_a_closed_writer_stays_closed_when_it_is_pickled():
    storage = REPLAY.make(memory="shared")
    writer = storage.writer()
    writer.close()
    with pytest.raises(StorageClosedError, match="closed"):
        pickle.loads(pickle.dumps(writer)).add(**REPLAY.plan(range(2), 9)[0])
    assert len(storage) == 0


def test_kept_snapshots_do_not_go_with_writers(tmp_path):
    kind = SHARED[1]
    storage = kind.make(save_snapshot=True, snapshot_dir=tmp_path / "kept")
    with pytest.raises(InvalidInputError, match="save_snapshot"):
        storage.writer()
    storage.close()


def test_copies_have_no_writers_and_hold_what_was_there():
    storage, plan = REPLAY.make(memory="shared"), REPLAY.plan(range(2), 40)
    with storage.writer() as writer:
        for step in plan:
            writer.add(**step)
        for other in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
            assert_same(leaves(other.get_all_buffer_data()), leaves(storage.get_all_buffer_data()))
            other.add(**plan[0])
            with pytest.raises(InvalidInputError, match="own process alone"):
                pickle.dumps(other.writer())
            other.close()
    storage.close()


def test_a_copy_of_a_shared_storage_can_be_saved_and_taken_up(tmp_path):
    storage, plan = REPLAY.make(memory="shared"), REPLAY.plan(range(2), 200)
    for step in plan:
        storage.add(**step)
    copied = copy.deepcopy(storage)
    copied.save(tmp_path / "copy")
    loaded = type(storage).load(tmp_path / "copy")
    assert_same_rows(loaded, copied)


# ----------------------------------------------------------------------------------------------------------- handles


def test_handles_that_are_given_away_and_let_go_of_are_for_different_lanes():
    """As ``Process(target=act, args=(storage.writer(1),)).start()`` in a loop does: it drops its arguments."""
    storage = ReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, 2, 4, memory="shared")
    given = [pickle.dumps(storage.writer(1)) for _ in range(2)]
    first, second = (pickle.loads(handle) for handle in given)
    assert (first.lanes, second.lanes) == (range(1), range(1, 2))
    put(second, 5)
    put(first, 3)
    assert storage.sample().rewards.unique().tolist() in ([3.0], [5.0], [3.0, 5.0])
    first.close()
    assert storage.writer(1).lanes == range(1)  # closed: free at once
    put(second, 6)
    second.close()


def test_lanes_that_were_given_to_nobody_in_the_end_can_be_had_by_number():
    storage = ReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, 1, 4, memory="shared")
    given = pickle.dumps(storage.writer())
    with pytest.raises(InvalidInputError, match="added by its writers"):
        put(storage, 0)  # whoever has the pickle may write at any moment
    told = rf"writer \(process {os.getpid()}\) has given \[0\] to a process that has not used them.*by number"
    for lanes in (1, None):
        with pytest.raises(InvalidInputError, match=told):
            storage.writer(lanes)
    with storage.writer(range(1)) as writer:
        put(writer, 1)
        with pytest.raises(InvalidInputError, match="lanes are taken"):
            put(pickle.loads(given), 20)
    put(pickle.loads(given), 30)
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == [1.0, 30.0]


@pytest.mark.parametrize("passed_by", ["fork", "pickle"])
def test_lanes_are_reserved_from_the_moment_they_are_handed_out(passed_by):
    """Both lanes are handed out, nothing here holds the handles, and the processes that do have not begun yet."""
    storage = ReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, 2, 4, memory="shared")
    begin, processes = FORK.Event(), []
    for reward in (5, 7):
        writer = storage.writer(1, name=f"actor {reward}")
        given = pickle.dumps(writer) if passed_by == "pickle" else writer
        processes.append(start("fork", put_later, given, reward, begin))
        del writer, given
    with pytest.raises(InvalidInputError, match=r'"actor 5" .* has given \[0\] to .*"actor 7" .* has given \[1\] to'):
        storage.writer(1)
    with pytest.raises(InvalidInputError, match="added by its writers"):
        storage.add(*[[0, 0]] * 5, {}, [0, 0])
    begin.set()
    join(*processes)  # none of them was refused
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == [5.0, 7.0]
    assert [storage.writer(1).lanes for _ in range(2)] == [range(1), range(1)]  # and one that nobody has is free


def put_later(writer, reward, begin):
    assert begin.wait(DEADLINE)
    with pickle.loads(writer) if isinstance(writer, bytes) else writer as handle:
        put(handle, reward)


def test_a_copy_that_is_closed_unused_frees_its_lanes():
    storage = ReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, 2, 4, memory="shared")
    kept, given = storage.writer(1), pickle.dumps(storage.writer(1))
    pickle.loads(pickle.dumps(kept)).close()  # the handle that it is a copy of is still here
    pickle.loads(given).close()
    assert storage.writer(1).lanes == range(1, 2)
    put(kept, 3)
    assert len(storage) == 1


def test_data_are_not_inserted_beside_writers():
    storage = ReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, memory="shared")
    with storage.writer() as writer:
        put(writer, 0)
        data = storage.get_all_buffer_data()
        with pytest.raises(InvalidInputError, match="added by its writers"):
            storage.insert_data_slice(data)
        assert len(storage) == 1
    storage.insert_data_slice(data)
    assert len(storage) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda storage: storage.writer("all"), "lanes is a str; give a number from 1 to"),
        (lambda storage: storage.writer(0.5), "lanes is a float"),
        (lambda storage: storage.writer([0]), "lanes is a list"),
        (lambda storage: storage.writer(name=5), "name is 5"),
        (lambda storage: RateLimit("4"), "samples_per_insert is '4'"),
        (lambda storage: RateLimit(4, min_size=None), "min_size is None"),
        (lambda storage: RateLimit(4, tolerance="x"), "tolerance is 'x'"),
        (lambda storage: SlotQueue(2).put("a"), "'a' is no slot"),
    ],
)
def test_what_cannot_be_is_refused_in_words(make, words):
    with pytest.raises(InvalidInputError, match=words):
        make(ReplayStorage(OBSERVATIONS, FIVE, "cpu", 100, memory="shared"))
