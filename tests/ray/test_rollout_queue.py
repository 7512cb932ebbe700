"""Rollouts across processes: their order, their versions, and those that are lost."""

from __future__ import annotations

import importlib

import pytest
import ray
import torch
from ray_play import until

from rlstore import InvalidInputError, PeerLostError, WaitTimeoutError
from rlstore.ray import RolloutQueue, rollout_queue

module = importlib.import_module("rlstore.ray.rollout_queue")  # the function has the same name

T = 4


def rollout(number):
    """Values that tell the rollout, the step and the place."""
    steps = torch.arange(T + 1)
    return {
        "obs": (number * 1000 + steps * 10).unsqueeze(1) + torch.arange(3),
        "reward": (number + steps / 10).float(),
        "action": torch.full((T + 1,), number),
    }


def states(number):
    return (torch.full((2, 1, 3), float(number)), torch.full((1, 1, 2), -float(number)))


def check(batch, numbers):
    assert batch["action"][0].tolist() == numbers
    assert torch.equal(batch["obs"], torch.stack([rollout(n)["obs"] for n in numbers], 1))
    assert torch.equal(batch["reward"], torch.stack([rollout(n)["reward"] for n in numbers], 1))
    for index in range(2):
        assert torch.equal(batch.states[index], torch.cat([states(n)[index] for n in numbers], 1))


STALE = 100  # versions; the first tests publish far fewer


@pytest.fixture(scope="module")
def queue(cluster):
    made = rollout_queue(capacity=6, max_staleness=STALE, deadline=60.0)
    yield made
    made.shutdown()


def counts(queue):
    report = queue.report()
    assert report.put == report.served + report.stale + report.lost + report.waiting
    return report


def hurried(queue, seconds=0.5):
    actor, name, capacity, max_staleness, _ = queue._settings
    return RolloutQueue(actor, name, capacity, max_staleness, seconds)


def test_rollouts_come_out_in_order_and_with_their_versions(queue):
    with queue.learner(3, prefetch=2) as learner:
        for number in range(6):
            queue.put(rollout(number), version=number // 2, states=states(number))
        first, second = next(learner), next(learner)
        check(first, [0, 1, 2])
        check(second, [3, 4, 5])
        assert first.versions.tolist() == [0, 0, 1]
        assert second.versions.tolist() == [1, 2, 2]
        assert first.versions.dtype == torch.int64
        first["obs"].zero_()  # writable, and nobody else's
        check(second, [3, 4, 5])
    with pytest.raises(StopIteration):
        next(learner)


def test_a_full_queue_holds_its_makers_back_until_the_deadline(queue):
    before = counts(queue)
    for number in range(6):
        queue.put(rollout(number), version=0, states=states(number))
    with pytest.raises(WaitTimeoutError, match=r"full for 0.5 s: 6 of 6 wait for a learner"):
        hurried(queue).put(rollout(6), version=0, states=states(6))
    with queue.learner(6, prefetch=1) as learner:
        check(next(learner), list(range(6)))
    after = counts(queue)
    assert (after.put - before.put, after.served - before.served, after.waiting) == (6, 6, 0)


def test_what_a_learner_fetched_ahead_is_given_back_when_it_is_closed(queue):
    """Known elsewhere: prefetched data that are lost."""
    for number in range(5):
        queue.put(rollout(number), version=0, states=states(number))
    with queue.learner(2, prefetch=2) as learner:
        check(next(learner), [0, 1])
    assert counts(queue).waiting == 3
    with queue.learner(3, prefetch=1) as learner:
        check(next(learner), [2, 3, 4])


def test_a_learner_that_gets_nothing_says_so_at_the_deadline(queue):
    with hurried(queue).learner(2) as learner, pytest.raises(WaitTimeoutError, match="2 rollouts were waited for"):
        next(learner)


def produce(queue, numbers):
    for number in numbers:
        queue.put(rollout(number), version=number, states=states(number))
    return queue.published


def test_producers_in_other_processes_hear_of_new_versions(queue, elsewhere):
    queue.publish(7)
    published = elsewhere(produce, queue, [20, 21])
    with queue.learner(2, prefetch=1) as learner:
        check(next(learner), [20, 21])
    assert ray.get(published, timeout=60) == 7
    assert counts(queue).waiting == 0


def test_rollouts_that_are_gone_are_counted_and_others_taken_instead(queue, monkeypatch):
    """As when the node that made them is: fetching them gives an error."""
    real = module.answers

    def answers(refs, names, seconds):
        given = zip(names, real(refs, names, seconds), strict=True)
        return [PeerLostError(f"{name} is gone") if "version 31" in name else told for name, told in given]

    monkeypatch.setattr(module, "answers", answers)
    before = counts(queue)
    for number in (30, 31, 31, 32):
        queue.put(rollout(number), version=number, states=states(number))
    with queue.learner(2, prefetch=1) as learner, pytest.warns(RuntimeWarning, match="a rollout of version 31 is gone"):
        check(next(learner), [30, 32])
    after = counts(queue)
    assert (after.put - before.put, after.served - before.served, after.lost - before.lost) == (4, 2, 2)
    assert after.waiting == 0


def test_stale_rollouts_are_dropped_wherever_they_are(queue):
    before, base = counts(queue), 1000

    def put(number, version):
        queue.put(rollout(number), version=version, states=states(number))

    queue.publish(base + STALE - 1)
    put(0, base - 1)
    put(1, base)
    queue.publish(base + STALE)  # the first is stale in the queue
    put(2, base - 1)  # stale when it comes
    put(3, base + 1)
    put(4, base + 1)
    with queue.learner(2, prefetch=1) as learner:
        check(next(learner), [1, 3])
        put(5, base + 2)
        learner._in_flight[0].result(timeout=60)  # the learner has prefetched 4 and 5
        queue.publish(base + STALE + 2)  # 4 is stale now, in the batch that is ready
        put(6, base + 3)
        batch = next(learner)
        check(batch, [5, 6])
        assert batch.versions.tolist() == [base + 2, base + 3]
    after = counts(queue)
    assert (after.put - before.put, after.served - before.served, after.stale - before.stale) == (7, 4, 3)
    assert (after.lost - before.lost, after.waiting, after.version) == (0, 0, base + STALE + 2)


def test_a_queue_that_dies_comes_back_and_counts_what_was_lost_with_it(queue):
    before = counts(queue)
    version = before.version
    queue.put(rollout(1), version=version, states=states(1))
    ray.kill(queue._actor, no_restart=False)
    until(lambda: queue.report().restarts == 1, "the restart of the queue")
    queue.put(rollout(2), version=version, states=states(2))
    with queue.learner(1, prefetch=1) as learner:
        check(next(learner), [2])
    report = queue.report()
    mine = queue._put  # the counts of those who call again
    assert (report.restarts, report.put, report.version) == (1, mine, version)
    assert (report.served, report.waiting) == (1, 0)
    assert report.lost == mine - report.stale - 1


def test_wrong_arguments_are_refused(queue):
    for wrong in ({"capacity": 0}, {"max_staleness": -1}, {"deadline": float("nan")}):
        with pytest.raises(InvalidInputError):
            rollout_queue(**wrong)
    with pytest.raises(InvalidInputError, match="as many steps each"):
        queue.put({"obs": torch.zeros(3, 2), "reward": torch.zeros(4)}, version=0)
    with pytest.raises(InvalidInputError, match="mapping"):
        queue.put({}, version=0)
