"""Shared memory goes with those who use it: nothing in /dev/shm, nothing mapped, however the programs end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_actors import UNTIL, until
from shared_segments import processes_with

pytestmark = pytest.mark.timeout(180)
PROGRAMS = Path(__file__).with_name("leak_programs.py")


def in_dev_shm(*pids):
    """What lies in /dev/shm of rlstore's, or of these processes."""
    numbers = {str(pid) for pid in pids}
    return {name for name in os.listdir("/dev/shm") if "rlstore" in name or numbers & set(re.findall(r"\d+", name))}


def started(name):
    command = [sys.executable, str(PROGRAMS), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_nothing_is_left_of_programs_that_end_in_good_order():
    """Closed or forgotten, by queues or by handles, forked or spawned; and hundreds of slots need few descriptors."""
    before = in_dev_shm()
    program = started("peace")
    said, errors = program.communicate(timeout=2 * UNTIL)
    assert program.returncode == 0, errors
    assert errors == ""  # no complaint of a resource tracker, no warning
    assert in_dev_shm(program.pid) == before
    found = {line.pop("name"): line for line in map(json.loads, said.splitlines())}
    played = {"served": list(range(100, 108)), "segments": 1, "left": 0}
    many = {"served": list(range(20)), "segments": 1, "left": 0}
    assert found == {
        "native fork": played,
        "documented fork": {"served": [0, 1, 2, 3], "segments": 1, "left": 0},
        "dropped ": {"served": [], "segments": 5, "left": 0},
        "few_descriptors spawn": many,
    }


def test_when_the_maker_is_killed_its_actors_say_so_and_the_memory_goes():
    before = in_dev_shm()
    program = started("crash")
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
    assert in_dev_shm(program.pid) == before
