"""Episodes and rows of complete rollouts in slots, while actors and learners go on."""

from __future__ import annotations

import random

import pytest
import torch
from gymnasium import spaces

from rlstore import DistributedStorage, RowNotHeldError, StorageClosedError

STEPS, SLOTS = 4, 5
SPACE = spaces.Tuple([spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(10**6)])


def make(**options):
    given = {"num_steps": STEPS, "num_storages": SLOTS, "timeout": 30.0, "extra_fields": {"costs": ((), torch.float64)}}
    return DistributedStorage(SPACE, spaces.Discrete(10**6), **{**given, **options})


def write(storage, number, ends, actor=None):
    """Rollout ``number``, whose row t has the id ``10 * number + t``; ends[t] is the end that row t tells of."""
    handle = storage.actor() if actor is None else actor
    with handle.rollout() as rollout:
        for t in range(STEPS + 1):
            i = 10 * number + t
            flags = {"terminated": ends[t] == 1, "truncated": ends[t] == 2}
            seen = (torch.tensor([float(i)]), torch.tensor(i))
            rollout.write(t, obs=seen, reward=i / 4, **flags, action=i, baseline=i / 8, costs=-i)
        return rollout.slot


def expected(numbers, ends_of, slots):
    """The pieces of rollouts: slot, ids of their rows, flags, whether they begin an episode, what follows the last."""
    found = []
    for number in numbers:
        ends, first = ends_of[number], 0
        for t in range(STEPS):
            if ends[t + 1] or t == STEPS - 1:
                ids = [10 * number + step for step in range(first, t + 1)]
                flags = (ends[t + 1] == 1, ends[t + 1] == 2)
                is_whole = first > 0 or ends[0] > 0
                found.append((slots[number], ids, flags, is_whole, None if ends[t + 1] else ids[-1] + 1))
                first = t + 1
    return found


def seen_in(storage):
    found = []
    for e in storage.episodes():
        ids = e.observations[1].tolist()
        assert e.observations[0].flatten().tolist() == ids == e.actions.tolist()
        assert e.rewards.tolist() == [(i + 1) / 4 for i in ids]  # which came with the next row
        assert e.total_return == sum((i + 1) / 4 for i in ids)
        assert e["values"].tolist() == [i / 8 for i in ids]
        assert e["costs"].tolist() == [-i for i in ids]
        assert e["truncated"].tolist() == [*[False] * (len(ids) - 1), e.truncated]
        assert e.rows.tolist() == [i % 10 * SLOTS + e.env for i in ids]
        assert e.is_over == (e.terminated or e.truncated)
        final = e.final_observations
        found.append((e.env, ids, (e.terminated, e.truncated), e.is_whole, None if final is None else int(final[1])))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_episodes_are_those_of_the_complete_rollouts_oldest_first(seed):
    rng, storage = random.Random(seed), make()
    actor, learner = storage.actor(), storage.learner(batch_size=2, prefetch=0)
    waiting, ends_of, slots = [], {}, {}
    for number in range(12):
        ends_of[number] = [rng.choice([0, 0, 1, 2]) for _ in range(STEPS + 1)]
        slots[number] = write(storage, number, ends_of[number], actor)
        waiting.append(number)
        assert seen_in(storage) == expected(waiting, ends_of, slots)
        rows = storage.held_rows()
        assert rows.tolist() == [t * SLOTS + slots[n] for n in waiting for t in range(STEPS)]
        assert storage[rows]["actions"].tolist() == [10 * n + t for n in waiting for t in range(STEPS)]
        assert storage.report().full == len(waiting)  # none of them was taken to be read
        if len(waiting) > rng.randrange(2, SLOTS):
            next(learner)
            del waiting[:2]
    storage.close()


def test_a_rollout_is_not_taken_for_that_which_was_in_its_slot_before():
    storage = make(num_storages=1)
    actor, learner = storage.actor(), storage.learner(batch_size=1, prefetch=0)
    write(storage, 0, [0] * 5, actor)
    (episode,) = storage.episodes()
    rows, data = storage.held_rows(), storage.as_dataset()
    assert episode.actions.tolist() == [0, 1, 2, 3]
    next(learner)
    told = r"row [03] is not held: slot 0 of 1 has no complete rollout with it, or another one by now.*Nothing was read"
    for is_written_again in (False, True):
        if is_written_again:
            write(storage, 2, [0] * 5, actor)
        for read in (lambda: episode.actions, lambda: episode.final_observations, lambda: data[0]):
            with pytest.raises(RowNotHeldError, match=told):
                read()
    assert storage[rows]["actions"].tolist() == [20, 21, 22, 23]
    for row in (4, -1):
        with pytest.raises(RowNotHeldError, match=f"row {row} is not held.*Rollouts have 4 steps"):
            storage[row]
    storage.close()


def test_what_is_overwritten_while_it_is_read_is_refused(monkeypatch):
    """Deterministic: after the look at the slot and before the copy it is freed, and written again."""
    storage = make(num_storages=1)
    actor, learner = storage.actor(), storage.learner(batch_size=1, prefetch=0)
    write(storage, 0, [0] * 5, actor)
    (episode,) = storage.episodes()
    steps = episode._steps
    require, calls = steps._require_held, []

    def write_after(rows):
        require(rows)
        if not calls:
            next(learner)
            write(storage, 1, [0] * 5, actor)
        calls.append(1)

    monkeypatch.setattr(steps, "_require_held", write_after)
    with pytest.raises(RowNotHeldError, match="or another one by now"):
        episode.actions  # noqa: B018
    assert len(calls) == 1
    storage.close()


def test_rollouts_that_the_ten_methods_serve_are_listed_until_they_are_learned_from():
    storage = make(extra_fields=None)
    for step in range(STEPS):
        ids = torch.arange(2) + 10 * step
        nest = (ids.float().unsqueeze(1), ids)
        flags = {"terminated": ids == 10, "truncated": torch.zeros(2, dtype=torch.bool)}
        storage.insert_transition(
            {"observations": nest, "next_observations": nest, "actions": ids, "rewards": ids, **flags}
        )
        assert len(storage.episodes()) == (3 if step == STEPS - 1 else 0)
    batch = next(iter(storage.generate_batches(1, 2)))
    rows = batch["rows"]
    assert torch.equal(storage[rows]["actions"], batch["actions"])
    assert len(storage.episodes()) == 3
    storage.after_gradients()
    assert len(storage.episodes()) == len(storage.held_rows()) == 0
    storage.close()
    for look in (storage.episodes, storage.held_rows, lambda: storage[0]):
        with pytest.raises(StorageClosedError):
            look()
