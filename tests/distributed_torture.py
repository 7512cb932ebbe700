"""Rounds of killing: actors or learners die at random moments under load, and others take their place."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import threading
import warnings
from typing import Any

from distributed_actors import Child, fill, serving_learner, until
from distributed_ids import LSTM, World, rollouts_in
from shared_segments import inodes_of, processes_with

SLOTS, BATCH, ACTORS = 6, 2, 2
MOST = 3_000_000  # rollouts that can be told apart


def busy_actor(pipe: Any, world: World, actor: Any, first: int, stop: Any) -> None:
    """Plays until told to stop; now and then it gives a rollout up. Says that it is there, then how much it played."""
    number = first
    while not stop.value:
        rollout = actor.reserve()
        if number == first:
            pipe.send("joined")
        if number % 7 == 3:
            fill(world, rollout, MOST - 1, 2)
            rollout.abandon()
            rollout = actor.reserve()
        fill(world, rollout, number)
        rollout.commit(version=number)
        number += 1
    pipe.send(number - first)


class Round:
    """A storage under load. ``served`` has the rollouts of every actor process, by its number."""

    def __init__(self, starts: int, seed: int) -> None:
        self.world, self.random = LSTM, random.Random(seed)
        others = inodes_of("self")
        self.storage = LSTM.make(SLOTS, batch_size=BATCH, timeout=60.0)
        self.inodes = inodes_of("self") - others
        self.each = MOST // starts
        self.stop = multiprocessing.RawValue(ctypes.c_bool, False)
        self.played: dict[int, int | None] = {}
        self.served: dict[int, list[int]] = {}
        self.actors: list[tuple[int, Child]] = []

    def start_actor(self) -> None:
        number = len(self.played)
        self.played[number], self.served[number] = None, []
        handle = self.storage.actor(f"actor {number}")
        arguments = (self.world, handle, number * self.each, self.stop)
        self.actors.append((number, Child(busy_actor, *arguments)))

    def take(self, rollouts: list[int]) -> None:
        for rollout in rollouts:
            self.served[rollout // self.each].append(rollout % self.each)

    def wait_a_little(self) -> None:
        """The moment of a death is a random one."""
        threading.Event().wait(self.random.random() * 0.004)

    def finish(self) -> None:
        """The actors stop; what they played is served; no slot, process or memory is left over."""
        self.stop.value = True
        last = iter(self.storage.learner(batch_size=1, prefetch=0))
        alive = dict(self.actors)

        def all_done() -> bool:
            while self.storage.report().full:
                batch = next(last)
                self.take(rollouts_in(self.world, batch, batch.states))
            for number, child in list(alive.items()):
                if child.said() and (heard := child.hear()) != "joined":
                    self.played[number] = heard
                    del alive[number]
                    child.end()
            return not alive and not self.storage.report().full

        until(all_done, "the actors do not come to an end")
        until(lambda: self.storage.report().free == SLOTS, f"slots are lost: {self.storage.report()}")
        report = self.storage.report()
        assert (report.free, report.writing, report.full, report.reading) == (SLOTS, 0, 0, 0)
        assert report.committed == report.served

    def clean_up(self) -> None:
        """Nothing of it is left in any process."""
        self.storage.close()
        for _, child in self.actors:
            child.clean_up()
        assert processes_with(self.inodes) <= {os.getpid()}


@contextlib.contextmanager
def quiet_round(starts: int, seed: int) -> Any:
    made = Round(starts, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # whoever waits finds the dead
        try:
            yield made
        finally:
            made.clean_up()


def check_slots(storage: Any) -> None:
    report = storage.report()
    assert report.free + report.writing + report.full + report.reading == SLOTS, report


def kill_actors(rounds: int, seed: int) -> None:
    """Kill a random actor in every round and start another in its place.

    Every rollout that was committed is served, once, whole and in its actor's order; every death is counted.
    """
    with quiet_round(rounds + ACTORS, seed) as made:
        for _ in range(ACTORS):
            made.start_actor()
        batches = iter(made.storage.learner(batch_size=BATCH, prefetch=0))
        for _ in range(rounds):
            for _ in range(made.random.randrange(5)):
                batch = next(batches)
                made.take(rollouts_in(made.world, batch, batch.states))
            _, victim = made.actors.pop(made.random.randrange(ACTORS))
            while not victim.said():  # it can only be missed when it was there
                batch = next(batches)
                made.take(rollouts_in(made.world, batch, batch.states))
            assert victim.hear() == "joined"
            made.wait_a_little()
            victim.kill(reap=made.random.random() < 0.5, wait=False)
            check_slots(made.storage)
            made.start_actor()
            victim.clean_up()
        made.finish()
        for number, served in made.served.items():
            assert served == list(range(len(served))), f"actor {number}"
            assert made.played[number] in (None, len(served)), f"actor {number}"
        until(lambda: made.storage.report().lost_actors == rounds, f"deaths not counted: {made.storage.report()}")
        report = made.storage.report()
        assert report.lost_learners == 0
        assert report.served == report.committed == sum(len(served) for served in made.served.values())


def kill_learners(rounds: int, seed: int, prefetch: int) -> None:
    """Kill the learner process in every round and start another.

    No rollout is served twice. One that the dead learner had been served may not have been heard of; all others are
    served.
    """
    with quiet_round(ACTORS, seed) as made:
        for _ in range(ACTORS):
            made.start_actor()
        for _ in range(rounds):
            learner = Child(serving_learner, made.world, made.storage, BATCH, prefetch)
            for _ in range(1 + made.random.randrange(5)):
                made.take(learner.hear())
            made.wait_a_little()
            learner.kill(reap=made.random.random() < 0.5, wait=False)
            with contextlib.suppress(EOFError):
                while True:
                    made.take(learner.hear())
            check_slots(made.storage)
            learner.clean_up()
        made.finish()
        for number, served in made.served.items():
            assert len(set(served)) == len(served), f"actor {number}"
            assert set(served) <= set(range(made.played[number] or 0)), f"actor {number}"
        heard = sum(len(served) for served in made.served.values())
        unheard = sum(count or 0 for count in made.played.values()) - heard
        assert 0 <= unheard <= rounds * BATCH * (2 + prefetch)
        until(lambda: made.storage.report().lost_learners == rounds, f"not counted: {made.storage.report()}")
        report = made.storage.report()
        assert report.lost_actors == 0
        assert (report.served, report.committed) == (heard + unheard, heard + unheard)
