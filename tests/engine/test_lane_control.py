"""Who writes which lanes, and how all of them are held back."""

from __future__ import annotations

import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch

from rlstore.engine.guard import new_guard
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.processes.limiter import RateLimit
from rlstore.errors import InvalidInputError, PeerLostError, StorageClosedError, WaitTimeoutError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
DEADLINE = 60.0


def nothing(lane=None):
    """What is to be done for a lane, or in between."""


def in_child(target, *args):
    """What a process gives that has ended since."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=lambda: theirs.send(target(*args)))
    process.start()
    assert ours.poll(DEADLINE)
    given = ours.recv()
    process.join(DEADLINE)
    return given


def test_claims_are_of_all_lanes_or_of_none_and_name_who_has_them():
    control = LaneControl(4)
    left, right = (control.peers.join("writer", name) for name in ("left", "right"))
    control.claim(range(2), left, nothing)
    with pytest.raises(InvalidInputError, match=r'lanes are taken: writer "left" \(process \d+\) has \[1\]'):
        control.claim(range(1, 4), right, nothing)
    control.claim(range(2, 4), right, nothing)  # nothing was left of the claim that was refused
    assert control.has_writers
    control.give_back(left, nothing)
    control.claim(range(2), right, nothing)
    control.give_back(right, nothing)
    assert not control.has_writers


def test_the_next_free_lanes_lie_in_a_row():
    control = LaneControl(6)
    first, second = control.peers.join("writer", "a"), control.peers.join("writer")
    assert control.free_lanes(None) == range(6)
    control.claim(control.free_lanes(2), first, nothing)
    control.claim(range(3, 4), second, nothing)
    assert [control.free_lanes(count) for count in (1, 2)] == [range(2, 3), range(4, 6)]
    assert control.free_lanes(range(2)) == range(2)  # whether they are free is seen when they are claimed
    with pytest.raises(
        InvalidInputError, match=r'no 3 free lanes next to each other: .*"a" .* has \[0, 1\]; writer .*\[3\]'
    ):
        control.free_lanes(3)


def enter(control, lane, seconds):
    """Begin a write as whoever has the lane, or nobody."""
    control.enter(lane, int(control._writers[lane]), seconds)


@pytest.mark.parametrize(
    "wanted",
    [0, -1, 4, True, 1.5, "2", range(0), range(4), range(-1, 2), range(2, 1), range(0, 3, 2), range(2, 0, -1)],
)
def test_lanes_that_there_are_not_are_refused(wanted):
    with pytest.raises(InvalidInputError, match=r"lanes is "):
        LaneControl(3).free_lanes(wanted)


def test_lanes_are_handed_over_by_who_has_them_and_by_nobody_else():
    control = LaneControl(2)
    giver, taker, stranger = (control.peers.join("writer", name) for name in ("giver", "taker", "stranger"))
    control.claim(range(2), giver, nothing)
    with pytest.raises(InvalidInputError, match="giver"):
        control.claim(range(2), stranger, nothing, given_by=taker)
    control.claim(range(2), taker, nothing, given_by=giver)
    control.enter(0, taker, DEADLINE)
    with pytest.raises(InvalidInputError, match=r'given away: writer "taker" .* Nothing was written'):
        control.enter(0, giver, DEADLINE)
    control.leave(0)  # which the refused one has not done for it
    with pytest.raises(InvalidInputError, match="taker"):
        control.claim(range(2), stranger, nothing, given_by=giver)
    control.give_back(giver, nothing)  # has none any more
    control.enter(1, taker, DEADLINE)


def test_lanes_of_a_dead_writer_are_put_in_order_and_are_free():
    control, recovered = LaneControl(3), []

    def die():
        peer = control.peers.join("writer", "dead")
        control.claim(range(1, 3), peer, nothing)
        enter(control, 1, DEADLINE)
        return peer

    peer = in_child(die)
    with control.pause(DEADLINE, lambda: control.peers.sweep(lambda dead: control.reclaim(dead, recovered.append))):
        assert recovered == [1, 2]  # it died in the middle of a write, which nobody waits for
    assert (control.peers.lost("writer"), control.has_writers) == ([peer], False)
    mine = control.peers.join("writer")
    control.claim(range(3), mine, recovered.append)
    assert recovered == [1, 2]


def test_a_claim_finds_the_dead_by_itself():
    control, recovered = LaneControl(2), []
    dead = in_child(lambda: (peer := control.peers.join("writer"), control.claim(range(2), peer, nothing))[0])
    control.claim(range(2), control.peers.join("writer"), recovered.append)
    assert recovered == [0, 1]
    assert control.peers.lost("writer") == [dead]


def test_whoever_pauses_and_whoever_writes_never_do_so_together():
    """Two threads write a number twice each time; whoever pauses must never see them differ."""
    control, values, stop, pauses = LaneControl(2), [0, 0, 0, 0], threading.Event(), 200

    def write(lane):
        while not stop.is_set():
            enter(control, lane, DEADLINE)
            values[2 * lane] += 1
            values[2 * lane + 1] += 1
            control.leave(lane)

    threads = [threading.Thread(target=write, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(pauses):
        with control.pause(DEADLINE, nothing):
            before = list(values)
            assert before[0] == before[1]
            assert before[2] == before[3]
            assert values == before
    stop.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert values[0] == values[1] > 0


def test_who_writes_waits_for_the_end_of_a_pause():
    control, entered = LaneControl(1), threading.Event()

    def write():
        enter(control, 0, DEADLINE)
        entered.set()
        control.leave(0)

    with control.pause(DEADLINE, nothing):
        thread = threading.Thread(target=write)
        thread.start()
        assert not entered.is_set()
    assert entered.wait(DEADLINE)
    thread.join(DEADLINE)


def test_lanes_are_written_up_to_their_limits():
    control, entered = LaneControl(3), threading.Event()
    written = torch.tensor([4, 7])  # of lanes 1 and 2

    def write():
        control.enter(1, 0, DEADLINE, written, 2)
        entered.set()
        control.leave(1)

    with control.pause(DEADLINE, nothing):
        control.limit(np.array([0, 5, 9]))
    control.enter(1, 0, DEADLINE, written, 1)
    control.leave(1)
    enter(control, 0, DEADLINE)  # has no rows that could be beyond a limit
    control.leave(0)
    with pytest.raises(WaitTimeoutError):
        control.enter(1, 0, 0.1, written, 2)
    thread = threading.Thread(target=write)
    thread.start()
    with control.pause(DEADLINE, nothing):
        assert not entered.is_set()
    control.limit(np.array([0, 6, 9]))
    assert entered.wait(DEADLINE)
    thread.join(DEADLINE)
    control.limit(None)
    control.enter(1, 0, DEADLINE, written, 100)


def test_a_pause_that_does_not_end_is_told():
    control = LaneControl(1)
    with (
        control.pause(DEADLINE, nothing),
        pytest.raises(WaitTimeoutError, match=r"paused for 0.3 seconds by its maker"),
    ):
        enter(control, 0, 0.3)
    enter(control, 0, 0.3)  # the refused one left nothing behind


def test_a_write_that_does_not_end_is_told_with_who_writes():
    control, swept = LaneControl(2), []
    peer = control.peers.join("writer", "slow")
    control.claim(range(1, 2), peer, nothing)
    enter(control, 1, DEADLINE)
    with (
        pytest.raises(WaitTimeoutError, match=r'did not pause within 0.3 seconds: writer "slow" \(process \d+\)'),
        control.pause(0.3, lambda: swept.append(1)),
    ):
        pytest.fail("it wrote")
    assert swept
    control.leave(1)
    enter(control, 1, 0.3)  # and there is no pause any more


def test_nobody_writes_after_the_end():
    control = LaneControl(1)
    control.close()
    assert control.is_closed
    with pytest.raises(StorageClosedError, match="nothing was written"):
        enter(control, 0, DEADLINE)


def test_the_end_is_told_to_who_waits_in_a_pause():
    control, told = LaneControl(1), []

    def write():
        try:
            enter(control, 0, DEADLINE)
        except StorageClosedError as error:
            told.append(error)

    with control.pause(DEADLINE, nothing):
        thread = threading.Thread(target=write)
        thread.start()
        control.close()
        thread.join(DEADLINE)
    assert len(told) == 1


def test_a_maker_that_is_gone_is_told():
    done = FORK.Event()
    ours, theirs = FORK.Pipe()

    def make_and_send():
        made = LaneControl(1)
        theirs.send_bytes(pickle.dumps(made.segment))
        done.wait(DEADLINE)

    maker = FORK.Process(target=make_and_send)
    maker.start()
    assert ours.poll(DEADLINE)
    other = LaneControl(1, pickle.loads(ours.recv_bytes()))
    other.check_maker()
    enter(other, 0, DEADLINE)
    other.leave(0)
    maker.kill()
    maker.join(DEADLINE)
    with pytest.raises(PeerLostError, match=rf"the maker \(process {maker.pid}\) of this storage is gone; nothing was"):
        other.check_maker()
    other.close()
    other.check_maker()  # it has ended in good order


def test_a_maker_that_died_in_a_pause_holds_nobody_back_for_long():
    ours, theirs = FORK.Pipe()
    done = FORK.Event()

    def pause():
        made = LaneControl(1)
        with made.pause(DEADLINE, nothing):
            theirs.send_bytes(pickle.dumps(made.segment))
            done.wait(DEADLINE)

    maker = FORK.Process(target=pause)
    maker.start()
    assert ours.poll(DEADLINE)
    control = LaneControl(1, pickle.loads(ours.recv_bytes()))
    maker.kill()
    maker.join(DEADLINE)
    with pytest.raises(PeerLostError, match="is gone; nothing was written"):
        enter(control, 0, DEADLINE)


def test_a_control_that_is_handed_on_has_the_same_lanes_peers_and_limit():
    control = LaneControl(3)
    other = LaneControl(3, pickle.loads(pickle.dumps(control.segment)))
    peer = control.peers.join("writer", "a")
    control.claim(range(1, 2), peer, nothing)
    control.limiter.set(RateLimit(2.0, 3, 4.0))
    assert other.limiter.limit == RateLimit(2.0, 3, 4.0)
    assert other.describe_maker() == control.describe_maker()
    assert other.free_lanes(1) == range(1)
    with pytest.raises(InvalidInputError, match='"a"'):
        other.claim(range(3), other.peers.join("writer", "b"), nothing)


def test_in_one_process_no_shared_memory_is_made():
    control = LaneControl(2, guard=new_guard())
    assert control.segment is None
    control.claim(range(2), control.peers.join("writer"), nothing)
    enter(control, 0, DEADLINE)
    control.leave(0)
    with control.pause(DEADLINE, nothing):
        pass


def test_a_lane_that_has_a_new_writer_is_not_taken_from_it():
    """Two processes find a writer dead; the slower one must not take lanes that the other has given to a new writer."""
    control = LaneControl(2, guard=new_guard())
    dead, new = control.peers.join("writer", "dead"), control.peers.join("writer", "new")
    control.claim(range(2), dead, lambda lane: None)

    def overtaken(lane):
        if lane == 0:  # meanwhile the other process does all of it
            control.reclaim(dead, lambda lane: None)
            control.claim(range(1, 2), new, lambda lane: None)

    control.reclaim(dead, overtaken)
    control.enter(1, new, 1.0)
    control.leave(1)
