"""The table of episodes against lists of steps, kept by hand, of rings that have and have not wrapped."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gymnasium import spaces

from rlstore import ReplayStorage
from rlstore.engine.rows.episode_table import episode_table

ENVS, STEPS = 3, 7
BOX, ACTIONS = spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(5)


class Lane:
    """All steps of an environment as (reward, episode number); and how each episode ended, if it did."""

    def __init__(self):
        self.steps, self.ends, self.number, self.begun = [], {}, 0, 0

    def episodes(self, capacity):
        """By number: the first time held, the rewards held, the end bits (None: open), whether the first is held."""
        oldest = max(len(self.steps) - capacity, self.begun)
        found = {}
        for time, (reward, number) in enumerate(self.steps[oldest:], oldest):
            found.setdefault(number, [time, []])[1].append(reward)
        first_of = {}
        for time, (_, number) in enumerate(self.steps):
            first_of.setdefault(number, time)
        return [(t, r, self.ends.get(n), first_of[n] >= oldest) for n, (t, r) in found.items()]


def play(storage, lanes, steps, rng, first):
    for step in range(first, first + steps):
        mask = np.array([rng.random() < 0.8 for _ in range(ENVS)])
        ends = [rng.choice([0, 0, 0, 0, 1, 2, 3]) for _ in range(ENVS)]
        rewards = np.array([step * ENVS + env + 0.5 for env in range(ENVS)], np.float32)
        # An observation that does not continue its episode breaks it off: none does here, but for the ends.
        observations = np.array([[len(lane.steps)] for lane in lanes], np.float32)
        flags = np.array(ends)
        storage.add(
            observations, np.zeros(ENVS, np.int64), rewards, flags & 1, flags & 2, {}, observations + 1, mask=mask
        )
        for env in np.flatnonzero(mask):
            lane = lanes[env]
            lane.steps.append((float(rewards[env]), lane.number))
            if ends[env]:
                lane.ends[lane.number] = ends[env]
                lane.number += 1


def found_in(table):
    entries = zip(
        *(
            t.tolist()
            for t in (
                table.lanes,
                table.firsts,
                table.lengths,
                table.totals,
                table.ends,
                table.is_over,
                table.is_whole,
            )
        ),
        strict=True,
    )
    return sorted(entry for entry in entries if entry[2])


@pytest.mark.parametrize("seed", range(4))
def test_every_episode_is_in_the_table_with_the_sum_of_its_rewards(seed):
    rng = random.Random(seed)
    storage = ReplayStorage(BOX, ACTIONS, storage_size=ENVS * STEPS, num_envs=ENVS, autoreset="Disabled")
    lanes = [Lane() for _ in range(ENVS)]
    for round_ in range(12):
        expected = [
            (env, first, len(rewards), sum(rewards), ends or 0, ends is not None, is_whole)
            for env, lane in enumerate(lanes)
            for first, rewards, ends, is_whole in lane.episodes(STEPS)
        ]
        assert found_in(episode_table(storage._rows)) == sorted(expected)
        play(storage, lanes, rng.randrange(1, 6), rng, first=100 * round_)
        if rng.random() < 0.15:
            storage.reset()
            for lane in lanes:
                lane.begun, lane.number = len(lane.steps), lane.number + 1
    assert max(len(lane.steps) for lane in lanes) > 2 * STEPS


def test_a_vector_of_rewards_is_added_component_by_component():
    storage = ReplayStorage(BOX, ACTIONS, storage_size=4, num_envs=1, reward_shape=(2,))
    for step in range(2):
        storage.add([[step]], [0], [[1.0, 10.0 + step]], [step == 1], [False], {}, [[step + 1]])
    table = episode_table(storage._rows)
    assert table.totals[table.lengths > 0].tolist() == [[2.0, 21.0]]
