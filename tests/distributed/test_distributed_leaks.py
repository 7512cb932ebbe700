"""Shared memory goes with those who use it: nothing in /dev/shm, nothing mapped, however the programs end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_actors import UNTIL, until
from shared_segments import processes_with

pytestmark = pytest.mark.timeout(120)
PROGRAMS = Path(__file__).with_name("leak_programs.py")


def in_dev_shm():
    """What lies in /dev/shm of rlstore's or torch's."""
    return {name for name in os.listdir("/dev/shm") if "rlstore" in name}


def started(name, method):
    command = [sys.executable, str(PROGRAMS), name, method]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(name, method):
    before = in_dev_shm()
    program = started(name, method)
    said, errors = program.communicate(timeout=UNTIL)
    assert program.returncode == 0, errors
    assert errors == ""  # no complaint of a resource tracker, no warning
    assert in_dev_shm() == before
    assert [one for one in os.listdir("/dev/shm") if str(program.pid) in one] == []
    return json.loads(said)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_is_left_after_close(method):
    found = run("native", method)
    assert found["served"] == [0, 1, 2, 3, 100, 101, 102, 103]
    assert (found["inodes"], found["left"]) == (1, 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_is_left_of_the_documented_way(method):
    found = run("documented", method)
    assert (found["inodes"], found["served"]) == (1, [0, 1, 2, 3])


def test_storages_that_are_forgotten_take_their_memory_with_them():
    found = run("dropped", "fork")
    assert (found["inodes"], found["left"]) == (5, 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_hundreds_of_storages_need_few_descriptors(method):
    found = run("few_descriptors", method)
    assert (found["inodes"], found["served"]) == (1, list(range(20)))
    assert found["descriptors"] < 8


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_when_the_maker_is_killed_its_actors_say_so_and_the_memory_goes(method):
    before = in_dev_shm()
    program = started("crash", method)
    found = json.loads(program.stdout.readline())
    assert processes_with(set(found["inodes"])) == {program.pid, *found["children"]}
    program.kill()
    said, _ = program.communicate(timeout=UNTIL)  # until the actors, who have the same output, are gone too
    heard = {pid: (name, message) for pid, name, message in map(json.loads, said.splitlines())}
    assert set(heard) == set(found["children"])
    for name, message in heard.values():
        assert name == "PeerLostError"
        assert str(program.pid) in message
    until(lambda: not processes_with(set(found["inodes"])), "the memory is still somewhere")
    assert in_dev_shm() == before
