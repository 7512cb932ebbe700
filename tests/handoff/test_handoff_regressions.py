"""Bugs of the hand-off that were found by reading, each with the shortest program that shows it."""

from __future__ import annotations

import gc

import pytest
from handoff_helpers import SECONDS, SPAWN, make, make_and_fail

from rlstore import NotReadyError, StorageClosedError, WaitTimeoutError


def test_a_rollout_of_a_closed_actor_cannot_be_written():
    storage = make()
    actor = storage.actor()
    rollout = actor.reserve()
    actor.close()
    with pytest.raises(NotReadyError, match="its actor was closed"):
        rollout.write(0, reward=7.0)
    assert float(storage.storages["reward"][0][0]) == 0.0
    storage.close()


def test_actors_are_told_when_the_process_of_the_storage_ends_with_an_error():
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=make_and_fail, args=(theirs,))
    process.start()
    actor = ours.recv()
    for _ in range(4):
        actor.reserve()
    ours.send("enough")
    with pytest.raises(StorageClosedError):  # was: PeerLostError
        actor.reserve()
    process.join(SECONDS)
    assert process.exitcode == 1


def test_handles_keep_a_storage_that_is_let_go_of():
    storage = make(num_storages=1, timeout=0.4)
    actor = storage.actor()
    del storage
    gc.collect()
    actor.reserve().commit()
    with pytest.raises(WaitTimeoutError):  # was: PeerLostError, the maker is gone
        actor.reserve()
