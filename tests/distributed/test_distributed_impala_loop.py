"""The loop of IMPALA in torchbeast's manner: actor processes, free and full queues, learner threads, None to end.

Set RLSTORE_TEST_ROLLOUTS to play longer.
"""

from __future__ import annotations

import collections
import os
import threading

import pytest
import torch
from distributed_actors import UNTIL, Child, queue_actor
from distributed_ids import BOX, DISCRETE, LSTM, rollouts_in
from torch import multiprocessing

from rlstore import DistributedStorage, SlotQueue

ROLLOUTS = int(os.environ.get("RLSTORE_TEST_ROLLOUTS", "90"))
BATCH, SLOTS, ACTORS, LEARNERS = 3, 8, 3, 2
OF_ONE_ACTOR = 100_000  # more rollouts than one actor plays


class Loop:
    """Everything that the processes and threads of one run share."""

    def __init__(self, world, kind, method="fork", given_lock=True, ours=True):
        self.world = world
        self.storage = world.make(SLOTS)
        self.storages = self.storage.storages if ours else foreign(self.storage.storages)
        self.states = self.storage.init_actor_state_storages
        context = multiprocessing.get_context(method)
        makers = {"SimpleQueue": context.SimpleQueue, "Queue": context.Queue, "SlotQueue": lambda: SlotQueue(SLOTS)}
        self.free, self.full = (makers[name]() for name in (kind if isinstance(kind, tuple) else (kind, kind)))
        self.lock = {"lock": threading.Lock()} if given_lock else {}
        self.children = []
        self.served = [[] for _ in range(LEARNERS)]
        self.errors = []

    def start_actors(self, method, count=ACTORS):
        for actor in range(count):
            arguments = (self.world, self.storages, self.states, self.free, self.full, actor * OF_ONE_ACTOR)
            self.children.append(Child(queue_actor, *arguments, method=method))
        for index in range(SLOTS):
            self.free.put(index)

    def sample(self, batch_size):
        batch, states = DistributedStorage.sample(
            device=torch.device("cpu"),
            batch_size=batch_size,
            free_queue=self.free,
            full_queue=self.full,
            storages=self.storages,
            init_actor_state_storages=self.states,
            **self.lock,
        )
        return rollouts_in(self.world, batch, states)

    def learn(self, learner, batches):
        try:
            for _ in range(batches):
                self.served[learner].append(self.sample(BATCH))
        except BaseException as error:
            self.errors.append(error)

    def run_learners(self, batches, learners=LEARNERS):
        threads = [
            threading.Thread(target=self.learn, args=(learner, batches), daemon=True) for learner in range(learners)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(UNTIL)
            assert not thread.is_alive(), "a learner hangs"
        assert self.errors == []

    def finish(self):
        """None to every actor; what they still played is served; returns how much each of them played."""
        for _ in self.children:
            self.free.put(None)
        played = [child.hear() for child in self.children]
        for child in self.children:
            child.end()
        count = sum(len(batch) for served in self.served for batch in served)
        self.served.append([self.sample(1) for _ in range(sum(played) - count)])
        return played


@pytest.fixture
def loop_of():
    made = []

    def make(*args, **options):
        made.append(Loop(*args, **options))
        return made[-1]

    yield make
    for loop in made:
        for child in loop.children:
            child.clean_up()
        for one in (loop.free, loop.full):
            if hasattr(one, "join_thread"):
                one.close()
                one.join_thread()


def foreign(storages):
    """The same slots in a plain dict of plain lists of tensors that torch shares."""
    return {key: [slot.clone().share_memory_() for slot in slots] for key, slots in storages.items()}


def check(loop, played):
    """Every rollout that was played was served once, and in the order in which its actor played them."""
    served = [rollout for batches in loop.served for batch in batches for rollout in batch]
    expected = [actor * OF_ONE_ACTOR + number for actor, count in enumerate(played) for number in range(count)]
    counts = collections.Counter(served)
    assert [rollout for rollout, count in counts.items() if count > 1] == []
    assert sorted(served) == expected
    for batches in loop.served:  # one learner sees every actor's rollouts in their order
        for actor in range(len(played)):
            seen = [rollout for batch in batches for rollout in batch if rollout // OF_ONE_ACTOR == actor]
            assert seen == sorted(seen)
    assert sorted(loop.free.get() for _ in range(SLOTS)) == list(range(SLOTS))


@pytest.mark.parametrize(
    ("world", "kind", "given_lock", "ours"),
    [
        (LSTM, "SimpleQueue", True, True),
        (LSTM, "SlotQueue", False, True),
        (BOX, "Queue", False, False),
        (LSTM, ("SlotQueue", "SimpleQueue"), False, False),
    ],
    ids=["a lock", "no lock", "no lock, a dict", "two kinds of queues"],
)
def test_two_learners_share_the_rollouts(loop_of, world, kind, given_lock, ours):
    loop = loop_of(world, kind, given_lock=given_lock, ours=ours)
    loop.start_actors("fork")
    loop.run_learners(ROLLOUTS // BATCH // LEARNERS)
    check(loop, loop.finish())


def test_one_learner_serves_everything_in_the_order_of_the_full_queue(loop_of):
    loop = loop_of(DISCRETE, "SimpleQueue")
    loop.start_actors("fork", count=1)
    loop.run_learners(ROLLOUTS // BATCH, learners=1)
    played = loop.finish()
    check(loop, played)
    assert [rollout for batches in loop.served for batch in batches for rollout in batch] == list(range(*played))
