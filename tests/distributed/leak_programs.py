"""Programs whose shared memory must not outlive them. Each says in JSON what it found.

``python leak_programs.py NAME METHOD``, where METHOD is how processes are started: fork or spawn.
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


def say(**content):
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def native(method):
    """Actors and a learner, then close: no trace of the memory is left in this process."""
    storage = LSTM.make(4)
    inodes = inodes_of("self")
    children = [Child(playing_actor, LSTM, storage.actor(), 100 * place, 4, method=method) for place in range(2)]
    learner = storage.learner(batch_size=2, prefetch=1)
    batches, served = iter(learner), []
    for _ in range(4):
        batch = next(batches)
        served += rollouts_in(LSTM, batch, batch.states)
    for child in children:
        child.hear()
        child.end()
        child.clean_up()
    learner.close()
    storage.close()
    del storage, learner, batches, batch, children, child
    gc.collect()
    say(inodes=len(inodes), served=sorted(served), left=len(inodes_of("self")))


def documented(method):
    """Actors with queues; the program ends without closing anything."""
    storage = LSTM.make(3)
    context = multiprocessing.get_context(method)
    free, full = context.SimpleQueue(), context.SimpleQueue()
    states = storage.init_actor_state_storages
    child = Child(queue_actor, LSTM, storage.storages, states, free, full, 0, 4, method=method)
    for index in range(3):
        free.put(index)
    served = []
    for _ in range(2):
        served += rollouts_in(LSTM, *storage.sample("cpu", 2, free, full, storage.storages, states))
    child.hear()
    child.end()
    say(inodes=len(inodes_of("self")), served=served, left=0)


def dropped(method):
    """A storage that is forgotten without close takes its memory with it."""
    storages = [DISCRETE.make(3) for _ in range(5)]
    for place, storage in enumerate(storages):
        storage.storages["reward"][0].fill_(place)
    actor = storages[0].actor()
    actor.reserve().abandon()
    inodes = len(inodes_of("self"))
    del storages, storage, actor
    gc.collect()
    say(inodes=inodes, served=[], left=len(inodes_of("self")))


def few_descriptors(method):
    """Hundreds of storages in a process that may open few files, and in its child."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
    storage = LSTM.make(400)
    context = multiprocessing.get_context(method)
    free, full = context.SimpleQueue(), context.SimpleQueue()
    states = storage.init_actor_state_storages
    before = len(os.listdir("/proc/self/fd"))
    child = Child(queue_actor, LSTM, storage.storages, states, free, full, 0, 20, method=method)
    served = []
    for index in range(380, 400):
        free.put(index)
    for _ in range(10):
        served += rollouts_in(LSTM, *storage.sample("cpu", 2, free, full, storage.storages, states))
    child.hear()
    child.end()
    more = len(os.listdir("/proc/self/fd")) - before
    say(inodes=len(inodes_of("self")), served=served, left=0, descriptors=more)


def crash(method):
    """Says which memory it has, and waits to be killed; its actors say what they hear of that."""
    storage = LSTM.make(2)
    actors = [storage.actor("one"), storage.actor("two")]
    children = [Child(orphan, actor, method=method) for actor in actors]
    for child in children:
        child.hear()
    say(inodes=list(inodes_of("self")), children=[child.pid for child in children])
    sys.stdin.read()


def orphan(pipe, actor):
    with contextlib.suppress(OSError):
        pipe.send("begins")
    try:
        playing_actor(pipe, LSTM, actor, 0, 10)
    except Exception as error:
        # One write, so that what two orphans say does not mix.
        os.write(1, (json.dumps([os.getpid(), type(error).__name__, str(error)]) + "\n").encode())


if __name__ == "__main__":
    {one.__name__: one for one in (native, documented, dropped, few_descriptors, crash)}[sys.argv[1]](sys.argv[2])
