"""Episodes of rollouts with reset steps, recurrent states and extra fields."""

import random

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import RolloutStorage, RowNotHeldError

ENVS, STEPS = 3, 8
BOX = spaces.Box(-1e9, 1e9, (1,), np.float32)


def make(**options):
    return RolloutStorage.from_spaces(BOX, spaces.Discrete(1000), ENVS, STEPS, **options)


def add(storage, step, ends=(0,) * ENVS, resets=(False,) * ENVS, **more):
    """The step of environment e has the id ``step * ENVS + e``, and the reward 0 if it is a reset step."""
    ids = step * ENVS + np.arange(ENVS)
    storage.add(
        observations=ids[:, None].astype(np.float32),
        actions=ids,
        rewards=np.where(resets, 0.0, ids / 4),
        terminated=[end == 1 for end in ends],
        truncated=[end == 2 for end in ends],
        values=ids / 8,
        log_probs=-ids.astype(np.float32),
        **more,
    )


@pytest.mark.parametrize("seed", range(4))
def test_reset_steps_are_part_of_no_episode_and_their_observations_end_those_before(seed):
    rng, storage, number = random.Random(seed), make(), 0
    due = [False] * ENVS
    for _ in range(5):
        first, pieces = number, [[] for _ in range(ENVS)]
        for _ in range(rng.randrange(4, STEPS + 1)):
            resets, ends = list(due), [0 if reset else rng.choice([0, 0, 1, 2]) for reset in due]
            add(storage, number, ends, resets)
            for env in range(ENVS):
                if resets[env]:
                    continue
                if not pieces[env] or pieces[env][-1][-1][1]:
                    pieces[env].append([])
                pieces[env][-1].append((number, ends[env]))
            due, number = [end != 0 for end in ends], number + 1
        expected = []
        for env, found in enumerate(pieces):
            for steps in found:
                (last, end), ids = steps[-1], [step * ENVS + env for step, _ in steps]
                # The final observation is that of the step behind, where it is in this rollout.
                final = (last + 1) * ENVS + env if last + 1 < number else None
                is_whole = steps[0][0] > first
                expected.append((ids, env, sum(i / 4 for i in ids), (end == 1, end == 2), end != 0, is_whole, final))
        listed = storage.episodes()
        found = [
            (
                e.observations.flatten().int().tolist(),
                e.env,
                e.total_return,
                (e.terminated, e.truncated),
                e.is_over,
                e.is_whole,
                None if e.final_observations is None else int(e.final_observations),
            )
            for e in listed
        ]
        assert found == sorted(expected)
        rows = storage.held_rows()
        assert rows.tolist() == [i - first * ENVS for i in sorted(i for ids, *_ in expected for i in ids)]
        assert not storage[rows]["reset_steps"].any()
        assert len(storage.as_dataset()) == len(rows)
        assert storage[range(len(storage))]["reset_steps"].sum() == len(storage) - len(rows)
        storage.clear()


def test_recurrent_states_and_extra_fields_are_read():
    storage = make(autoreset="SameStep", extra_fields={"costs": ((), torch.float32), "goal": ((2,), torch.float64)})
    for step in range(3):
        ids = step * ENVS + torch.arange(ENVS, dtype=torch.float32)
        actor = ids.view(1, -1, 1) + torch.tensor([[[0.0]], [[0.5]]])  # [layers, envs, 1]
        params = (ids.unsqueeze(1), -ids)
        more = {"costs": ids / 2, "goal": torch.stack([ids, -ids], 1), "distribution_params": params}
        add(storage, step, ends=(0, 1, 0) if step == 1 else (0,) * ENVS, hidden_states=(actor, (actor, -actor)), **more)
    episode = storage.episodes()[1]
    assert episode.rows.tolist() == [1, 4]
    assert episode["costs"].tolist() == [0.5, 2.0]
    assert episode["goal"].tolist() == [[1.0, -1.0], [4.0, -4.0]]
    assert [part.flatten().tolist() for part in episode["distribution_params"]] == [[1.0, 4.0], [-1.0, -4.0]]
    actor, critic = episode["hidden_states"]
    assert actor.tolist() == [[[1.0], [1.5]], [[4.0], [4.5]]]  # [length, layers, hidden]
    assert torch.equal(critic[0], actor)
    assert torch.equal(critic[1], -actor)
    found = storage[4]
    assert found["costs"].tolist() == [2.0]
    assert found["hidden_states"][0].tolist() == [[4.0], [4.5]]
    found["observations"].zero_()  # it is a copy
    found["hidden_states"][0].zero_()
    assert episode.observations.tolist() == [[1.0], [4.0]]
    assert episode["hidden_states"][0][1].tolist() == [[4.0], [4.5]]


def test_what_was_assigned_is_read():
    storage = make(autoreset="SameStep")
    for step in range(2):
        add(storage, step)
    storage.rewards = torch.full((STEPS, ENVS), 2.5)
    assert storage.episodes().returns.tolist() == [5.0] * ENVS


def test_an_episode_of_a_rollout_that_was_cleared_or_resized_is_never_another_one():
    storage = make(autoreset="SameStep")
    add(storage, 0)
    episode = storage.episodes()[0]
    storage.reset()
    storage.update_storage_parameter("num_transitions_per_env", 4)
    add(storage, 5)
    with pytest.raises(RowNotHeldError, match="another one was begun"):
        episode.actions  # noqa: B018
    episode = storage.episodes()[0]
    storage.insert_data_slice(storage.get_all_buffer_data())
    with pytest.raises(RowNotHeldError, match="another one was begun"):
        episode.actions  # noqa: B018
