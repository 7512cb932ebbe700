"""Rollouts across processes: their order, their versions, and those that are lost."""

from __future__ import annotations

import importlib
from dataclasses import asdict

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


@pytest.fixture(scope="module")
def queue(cluster):
    made = rollout_queue(capacity=6, deadline=60.0)
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


def test_makers_in_other_processes_hear_of_new_versions(queue):
    @ray.remote(num_cpus=0.1)
    def make(handle, numbers):
        for number in numbers:
            handle.put(rollout(number), version=number, states=states(number))
        return handle.published

    queue.publish(7)
    made = make.remote(queue, [20, 21])
    with queue.learner(2, prefetch=1) as learner:
        check(next(learner), [20, 21])
    assert ray.get(made, timeout=60) == 7
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


def test_stale_rollouts_are_dropped_wherever_they_are(cluster):
    queue = rollout_queue(capacity=4, max_staleness=1, deadline=60.0)
    queue.put(rollout(0), version=0, states=states(0))
    queue.put(rollout(1), version=1, states=states(1))
    queue.publish(2)  # the first is stale in the queue
    queue.put(rollout(2), version=0, states=states(2))  # stale when it comes
    queue.put(rollout(3), version=2, states=states(3))
    queue.put(rollout(4), version=2, states=states(4))
    with queue.learner(2, prefetch=1) as learner:
        check(next(learner), [1, 3])
        queue.put(rollout(5), version=3, states=states(5))
        learner._in_flight[0].result(timeout=60)  # the learner has fetched 4 and 5 ahead
        queue.publish(4)  # 4 is stale now, in the batch that is ready
        queue.put(rollout(6), version=4, states=states(6))
        batch = next(learner)
        check(batch, [5, 6])
        assert batch.versions.tolist() == [3, 4]
    report = counts(queue)
    assert asdict(report) == {
        **asdict(report),
        "put": 7,
        "served": 4,
        "stale": 3,
        "lost": 0,
        "waiting": 0,
        "version": 4,
    }
    queue.shutdown()


def test_a_queue_that_is_lost_comes_back_and_knows_what_went_with_it(cluster):
    queue = rollout_queue(capacity=4, max_staleness=5, deadline=60.0)
    learner = queue.learner(1, prefetch=1)
    queue.put(rollout(0), version=3, states=states(0))
    check(next(learner), [0])
    learner.close()
    queue.publish(3)
    queue.put(rollout(1), version=3, states=states(1))
    ray.kill(queue._actor, no_restart=False)
    until(lambda: queue.report().restarts == 1, "the queue's restart")
    queue.put(rollout(2), version=3, states=states(2))
    with queue.learner(1, prefetch=1) as learner:
        check(next(learner), [2])
    report = queue.report()
    assert (report.restarts, report.put, report.version) == (1, 3, 3)
    assert report.lost + report.served == 3
    assert report.served >= 1
    queue.shutdown()


def test_wrong_arguments_are_refused(queue):
    for wrong in ({"capacity": 0}, {"max_staleness": -1}, {"deadline": float("nan")}):
        with pytest.raises(InvalidInputError):
            rollout_queue(**wrong)
    with pytest.raises(InvalidInputError, match="as many steps each"):
        queue.put({"obs": torch.zeros(3, 2), "reward": torch.zeros(4)}, version=0)
    with pytest.raises(InvalidInputError, match="mapping"):
        queue.put({}, version=0)
