"""Programs whose shared memory must not outlive them. Each says in lines of JSON what it found.

``python leak_programs.py peace`` goes through everything and ends in good order; ``crash`` waits to be killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from distributed_actors import Child, playing_actor, queue_actor
from distributed_ids import DISCRETE, LSTM, rollouts_in
from shared_segments import inodes_of


def say(content):
    # One write, so that what two processes say does not mix.
    os.write(1, (json.dumps(content) + "\n").encode())


def native(method):
    """An actor and a learner, then close."""
    storage = LSTM.make(4)
    child = Child(playing_actor, LSTM, storage.actor(), 100, 8, method=method)
    learner, served = storage.learner(batch_size=2, prefetch=1), []
    for _ in range(4):
        batch = next(learner)
        served += rollouts_in(LSTM, batch, batch.states)
    child.hear()
    child.end()
    child.clean_up()
    learner.close()
    storage.close()
    return {"served": served, "segments": len(inodes_of("self"))}


def documented(method):
    """An actor with queues, and no close."""
    return with_queues(LSTM.make(3), range(3), 4, method)


def with_queues(storage, indices, rollouts, method):
    context = multiprocessing.get_context(method)
    free, full = context.SimpleQueue(), context.SimpleQueue()
    states, served = storage.init_actor_state_storages, []
    child = Child(queue_actor, LSTM, storage.storages, states, free, full, 0, rollouts, method=method)
    for index in indices:
        free.put(index)
    for _ in range(rollouts // 2):
        served += rollouts_in(LSTM, *storage.sample("cpu", 2, free, full, storage.storages, states))
    child.hear()
    child.end()
    child.clean_up()
    return {"served": served, "segments": len(inodes_of("self"))}


def dropped(method):
    """Storages that are used and forgotten."""
    storages = [DISCRETE.make(3) for _ in range(5)]
    for place, storage in enumerate(storages):
        storage.storages["reward"][0].fill_(place)
        storage.actor().reserve().abandon()
    return {"served": [], "segments": len(inodes_of("self"))}


def few_descriptors(method):
    """Hundreds of slots in a process that may open few files, and in its child."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, allowed[1]))
    found = with_queues(LSTM.make(400), range(380, 400), 20, method)
    resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    return found


def peace():
    for program, method in [
        (native, "fork"),
        (documented, "fork"),
        (dropped, ""),
        (few_descriptors, "spawn"),
    ]:
        found = program(method)
        gc.collect()
        say({"name": f"{program.__name__} {method}", **found, "left": len(inodes_of("self"))})


def crash():
    """Says which memory it has, and waits to be killed; its actors say what they hear of that."""
    storage = LSTM.make(2)
    children = [Child(orphan, storage.actor()) for _ in range(2)]
    for child in children:
        child.hear()
    say({"inodes": list(inodes_of("self")), "children": [child.pid for child in children]})
    sys.stdin.read()


def orphan(pipe, actor):
    with contextlib.suppress(OSError):
        pipe.send("begins")
    try:
        playing_actor(pipe, LSTM, actor, 0, 10)
    except Exception as error:
        say([os.getpid(), type(error).__name__, str(error)])


if __name__ == "__main__":
    {"peace": peace, "crash": crash}[sys.argv[1]]()
