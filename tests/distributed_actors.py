"""What runs in the other processes of the tests of shared storages, and how those processes are held in check."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distributed_ids import World, rollouts_in, write

from rlstore import DistributedStorage

UNTIL = 60.0  # seconds that anything may take; nothing comes near it unless it hangs


class Child:
    """A process with a pipe to it. Its program is ``target(pipe, *args)``."""

    def __init__(self, target: Any, *args: Any, method: str = "fork") -> None:
        context = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(target, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> Any:
        """What the program says next."""
        assert self._pipe.poll(UNTIL), f"nothing was heard from process {self.pid}"
        return self._pipe.recv()

    def said(self) -> bool:
        """Whether there is something to hear. At the end of the process there is: an EOFError."""
        return self._pipe.poll(0)

    def say(self, message: Any = None) -> None:
        self._pipe.send(message)

    def kill(self, *, reap: bool = False, wait: bool = True) -> None:
        """SIGKILL. What is not reaped stays a zombie, as it does with a parent that has other things to do."""
        os.kill(self.pid, signal.SIGKILL)
        if reap:
            self.end(killed=True)
        elif wait:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # until it is a zombie

    def end(self, killed: bool = False) -> None:
        """Wait for the end; it must be a good one if it was not a violent one."""
        self.process.join(UNTIL)
        assert self.process.exitcode == (-signal.SIGKILL if killed else 0)

    def clean_up(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(UNTIL)
        self._pipe.close()


def _begin(target: Any, pipe: Any, *args: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # that a peer is lost is told in whatever process finds it
    target(pipe, *args)


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that another process or thread does and that nothing here can wait for."""
    deadline = time.monotonic() + UNTIL
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def learner_of(storage: DistributedStorage, batch_size: int = 1, **options: Any) -> Iterator[Any]:
    """A learner without a thread of its own."""
    return iter(storage.learner(batch_size=batch_size, prefetch=0, **options))


def slots(storage: DistributedStorage) -> tuple[int, int, int, int]:
    """How many slots are (free, writing, full, reading)."""
    report = storage.report()
    return report.free, report.writing, report.full, report.reading


def counts(storage: DistributedStorage) -> tuple[int, int, int]:
    """How many rollouts were (committed, served, abandoned)."""
    report = storage.report()
    return report.committed, report.served, report.abandoned


# ------------------------------------------------------------------------------------------------- the documented way


def queue_actor(
    pipe: Any, world: World, storages: Any, states: Any, free: Any, full: Any, first: int, most: int | None = None
) -> None:
    """An actor as torchbeast has it: plays into the slots of the free queue until it gets None. Says how many."""
    rollout = first
    while most is None or rollout < first + most:
        index = free.get()
        if index is None:
            break
        write(world, storages, states, index, rollout)
        full.put(index)
        rollout += 1
    pipe.send(rollout - first)


# ------------------------------------------------------------------------------------------------- the native way


def fill(world: World, rollout: Any, number: int, rows: int | None = None) -> None:
    """Write the first rows, or all, into a reserved rollout: by one way if its number is odd, by the other if even."""
    if world.state_shapes:
        rollout.set_states(world.states([number]))
    for step in range(world.steps + 1 if rows is None else rows):
        row = world.row(number, step)
        if number % 2:
            rollout.write(step, **row)
        else:
            for key, value in row.items():
                rollout[key][step] = value[0, 0]


def play(world: World, actor: Any, number: int, version: int = 0) -> None:
    """One whole rollout."""
    rollout = actor.reserve()
    fill(world, rollout, number)
    rollout.commit(version=version)


def playing_actor(pipe: Any, world: World, actor: Any, first: int, count: int) -> None:
    """Plays ``count`` rollouts, and says the version that it saw at last."""
    for number in range(first, first + count):
        play(world, actor, number, version=number)
    pipe.send(actor.published)


def stuck_actor(pipe: Any, world: World, actor: Any, whole: int, begun: int, rows: int) -> None:
    """Plays ``whole`` rollouts, begins ``begun`` others, says so and does nothing more."""
    for number in range(whole):
        play(world, actor, 900 + number)
    for number in range(begun):
        fill(world, actor.reserve(), 990 + number, rows)
    pipe.send("stuck")
    pipe.poll(UNTIL)


def waiting_actor(pipe: Any, world: World, actor: Any, first: int = 0) -> None:
    """Plays until it cannot go on, and says why."""
    pipe.send("begins")
    with contextlib.suppress(BrokenPipeError):
        try:
            while True:
                play(world, actor, first)
                first += 1
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))


def told_actor(pipe: Any, world: World, actor: Any) -> None:
    """Plays a rollout for every number that it is told, and says what it saw published; None ends it."""
    while pipe.poll(UNTIL) and (number := pipe.recv()) is not None:
        play(world, actor, number, version=10 * number)
        pipe.send(actor.published)


def serving_learner(pipe: Any, world: World, storage: Any, batch_size: int, prefetch: int) -> None:
    """Learns for ever, saying which rollouts it was served."""
    for batch in storage.learner(batch_size=batch_size, prefetch=prefetch):
        pipe.send(rollouts_in(world, batch, batch.states))


def counting_learner(pipe: Any, world: World, storage: Any, batch_size: int, count: int) -> None:
    """Takes ``count`` batches and says which rollouts were in them."""
    learner = storage.learner(batch_size=batch_size, prefetch=0)
    batches = iter(learner)
    for _ in range(count):
        batch = next(batches)
        pipe.send(rollouts_in(world, batch, batch.states))
    learner.close()
