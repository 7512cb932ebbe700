"""Who takes part, and who is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading
from itertools import chain

import pytest
import torch

from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.engine.processes import peers as peers_module
from rlstore.engine.processes.peers import Peers
from rlstore.errors import StorageError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
DEADLINE = 60.0


def make_peers():
    shape = Peers.shape()
    return Peers(SharedMemory.create(SharedMemory.bytes_of([shape])).carve(*shape))


def join_and_die(peers, role, name=None):
    """A peer whose process has ended without a word; its number and its process."""
    ours, theirs = FORK.Pipe()

    def join():
        theirs.send(peers.join(role, name))

    process = FORK.Process(target=join)
    process.start()
    assert ours.poll(DEADLINE)
    number = ours.recv()
    process.join(DEADLINE)
    return number, process.pid


def test_peers_have_numbers_of_their_own_and_descriptions():
    peers = make_peers()
    numbers = [peers.join("maker"), peers.join("actor", "left"), peers.join("writer", "x"), peers.join("writer", "x")]
    assert numbers == [1, 2, 3, 4]
    assert [peers.describe(number) for number in numbers[:2]] == [
        f"maker (process {os.getpid()})",
        f'actor "left" (process {os.getpid()})',
    ]
    assert (peers.here("maker"), peers.here("actor"), peers.here("learner"), peers.here("writer")) == (
        [1],
        [2],
        [],
        [3, 4],
    )
    assert all(peers.is_here(number) for number in numbers)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", ""),
        ("a" * 40, "a" * 32),
        ("ключ", "ключ"),
        ("ü" * 16 + "x", "ü" * 16),
        ("a" + "ü" * 16, "a" + "ü" * 15 + "�"),
    ],
)
def test_names_are_cut_to_what_a_line_holds(name, expected):
    peers = make_peers()
    quoted = f'"{expected}" ' if expected else ""
    assert peers.describe(peers.join("actor", name)) == f"actor {quoted}(process {os.getpid()})"


def test_who_left_is_neither_here_nor_lost():
    peers = make_peers()
    number = peers.join("actor")
    peers.leave(number)
    peers.leave(number)
    assert not peers.is_here(number)
    assert peers.sweep(pytest.fail) == []
    assert (peers.here("actor"), peers.lost("actor"), peers.lost_count("actor")) == ([], [], 0)


def test_a_dead_peer_is_found_once_and_what_it_held_is_taken_from_it():
    peers = make_peers()
    alive = peers.join("writer", "alive")
    number, process = join_and_die(peers, "writer", "left")
    assert peers.here("writer") == [alive, number]  # nobody has looked
    assert peers.is_here(alive)
    assert not peers.is_here(number)
    taken = []
    assert peers.sweep(taken.append) == [number]
    assert taken == [number]
    assert peers.sweep(pytest.fail) == []
    assert (peers.here("writer"), peers.lost("writer"), peers.lost_count("writer")) == ([alive], [number], 1)
    assert peers.lost_count("actor") == 0
    assert peers.describe(number) == f'writer "left" (process {process})'


def test_a_sweep_that_fails_is_done_again():
    """What was held must not stay with a peer that is counted as lost."""
    peers = make_peers()
    number, _ = join_and_die(peers, "actor")

    def fail(peer):
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        peers.sweep(fail)
    assert peers.lost_count("actor") == 0
    assert peers.sweep(lambda peer: None) == [number]


def test_a_process_with_the_number_of_a_dead_one_is_not_taken_for_it():
    peers = make_peers()
    number = peers.join("actor")
    peers._table[number, 1] -= 1  # as if this process had begun earlier, and another had its number now
    assert not peers.is_here(number)
    assert peers.sweep(lambda peer: None) == [number]


def test_each_dead_peer_is_counted_once_whoever_finds_it():
    peers = make_peers()
    dead = [join_and_die(peers, "actor")[0] for _ in range(6)]
    ours, theirs = FORK.Pipe()
    gate = FORK.Barrier(3)

    def look():
        gate.wait(DEADLINE)
        theirs.send(peers.sweep(lambda peer: None))

    processes = [FORK.Process(target=look) for _ in range(3)]
    for process in processes:
        process.start()
    found = [ours.recv() if ours.poll(DEADLINE) else None for _ in processes]
    for process in processes:
        process.join(DEADLINE)
    assert sorted(chain(*found)) == dead
    assert peers.lost_count("actor") == 6


def test_no_number_is_given_twice_at_the_same_time():
    peers = make_peers()
    ours, theirs = FORK.Pipe()
    gate = FORK.Barrier(4)

    def take_part():
        gate.wait(DEADLINE)
        theirs.send([peers.join("actor") for _ in range(50)])

    processes = [FORK.Process(target=take_part) for _ in range(4)]
    for process in processes:
        process.start()
    joined = [ours.recv() for _ in processes if ours.poll(DEADLINE)]
    for process in processes:
        process.join(DEADLINE)
    assert sorted(chain(*joined)) == list(range(1, 201))


def test_threads_take_part_apart():
    peers, joined = make_peers(), []
    threads = [threading.Thread(target=lambda: joined.append(peers.join("learner"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(joined) == list(range(1, 9))


def test_lines_serve_again_only_when_the_table_is_full_and_the_lost_stay_counted(monkeypatch):
    monkeypatch.setattr(peers_module, "MOST", 6)
    peers = make_peers()
    peers.leave(peers.join("maker"))  # whose line stays its own
    dead, _ = join_and_die(peers, "actor")
    peers.sweep(lambda peer: None)
    left = peers.join("learner")
    peers.leave(left)
    assert (dead, left) == (2, 3)
    assert [peers.join("writer"), peers.join("writer")] == [4, 5]
    assert peers.join("actor", "new") == left  # those that left serve again before those that are lost
    assert peers.lost("actor") == [dead]
    assert peers.join("actor", "newer") == dead
    assert (peers.lost("actor"), peers.lost_count("actor"), peers.here("actor")) == ([], 1, [2, 3])
    assert peers.describe(dead) == f'actor "newer" (process {os.getpid()})'
    with pytest.raises(StorageError, match="5 processes take part already"):
        peers.join("actor")


def test_the_table_is_seen_by_all_who_have_the_memory():
    shape = Peers.shape()
    memory = torch.zeros(*shape[:1], dtype=shape[1])
    first, second = Peers(memory), Peers(memory)
    number = first.join("actor", "a")
    assert second.is_here(number)
    assert second.join("actor", "b") == number + 1
    assert first.describe(number + 1).startswith('actor "b"')
