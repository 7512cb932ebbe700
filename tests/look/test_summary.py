"""What is seen of storages and folders, against what was written."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from look_storages import ENVS, PLAN, STEPS, episodes_planned, filled, step_id

import rlstore
from rlstore.look import summary as summaries
from rlstore.look.subject import of_storage
from rlstore.look.summary import BOTH, BROKEN_OFF, GOING_ON, TERMINATED, TRUNCATED, summarize

ENDS = {"terminated": TERMINATED, "truncated": TRUNCATED, "both": BOTH, None: BROKEN_OFF, "open": GOING_ON}


def test_episodes_are_those_that_were_added():
    planned = episodes_planned()
    seen = summarize(of_storage(filled())).episodes
    assert seen.count == len(planned)
    assert seen.env.tolist() == [episode["env"] for episode in planned]
    assert seen.length.tolist() == [len(episode["steps"]) for episode in planned]
    assert seen.end.tolist() == [ENDS[episode["end"]] for episode in planned]
    returns = [sum(step_id(e["env"], step) / 100 for step in e["steps"]) for e in planned]
    assert seen.total.tolist() == pytest.approx(returns, rel=1e-6)
    assert (seen.totals.least, seen.totals.most) == pytest.approx((min(returns), max(returns)), rel=1e-6)


def test_fields_are_told_with_their_entries():
    fields = {field.name: field for field in summarize(of_storage(filled())).fields}
    ids = [step_id(env, step) for env in range(ENVS) for step in range(STEPS)]
    state = fields['observations["</script><b>state"]']
    assert [(e.name, e.least, e.most) for e in state.entries] == [
        ("0", min(ids), max(ids)),
        ("1", -max(ids), 0.0),
        ("2", 0.0, max(ids) / 2),
    ]
    assert state.entries[0].mean == pytest.approx(sum(ids) / len(ids))
    camera = fields['observations["camera"]']
    assert (camera.is_image, camera.shape, camera.dtype, camera.entries) == (True, (2, 9, 8), "uint8", [])
    assert (fields["costs"].numbers.least, fields["costs"].numbers.count) == (-max(ids), len(ids))
    assert fields["actions"].numbers.histogram == [6, 6, 6, 6]
    assert set(fields) == {state.name, camera.name, "actions", "rewards", "costs"}


def test_nan_infinities_and_outliers_are_counted_where_they_are():
    storage = rlstore.ReplayStorage(
        gym.spaces.Box(-np.inf, np.inf, (3,)),
        gym.spaces.Discrete(2),
        storage_size=200,
        extra_fields={"costs": ((), torch.float32)},
    )
    observations = np.stack([[i % 10, i % 7, i % 5] for i in range(101)]).astype(np.float32)
    observations[[4, 9], 1] = math.nan
    observations[20, 2], observations[30, 0] = math.inf, 1e6
    for i in range(100):
        cost = math.nan if i < 3 else 1.0
        storage.add(observations[i], 0, 1.0, False, False, {}, observations[i + 1], costs=cost)
    fields = {field.name: field for field in summarize(of_storage(storage)).fields}
    found = [(e.nans, e.infs, e.outliers) for e in fields["observations"].entries]
    assert found == [(0, 0, 1), (2, 0, 0), (0, 1, 0)]
    whole = fields["observations"].numbers
    assert (whole.nans, whole.infs, whole.outliers) == (2, 1, 1)
    assert fields["costs"].numbers.nans == 3


def test_how_full_it_is():
    seen = summarize(of_storage(filled()))
    assert (seen.held, seen.subject.capacity, seen.subject.envs, seen.held_by) == (24, 40, 2, (12, 12))
    assert (seen.looked, seen.notes) == (24, [])


def test_priorities_by_row_and_by_age():
    storage = filled(rlstore.PrioritizedReplayStorage, alpha=1.0)
    rows = storage.held_rows()
    storage.update(rows, rows // ENVS)  # the step of each: the oldest has 0
    seen = summarize(of_storage(storage)).priorities
    assert seen is not None
    assert (seen.what, seen.zeros, seen.numbers.least, seen.numbers.most) == ("transitions", 2, 0.0, 11.0)
    # 24 buckets of half a step up to the oldest age, 11: those with a step in them, newest first.
    assert [(age.low, age.median, age.high) for age in seen.ages] == [(p, p, p) for p in range(11, -1, -1)]
    assert seen.ages[0].start == 0
    assert seen.ages[-1].stop == 11


def test_the_windows_of_a_sequence_storage_have_the_priorities():
    storage = filled(rlstore.SequenceReplayStorage, sequence_length=3, burn_in=1, alpha=1.0)
    subject = of_storage(storage)
    windows = subject.windows
    assert windows is not None
    assert (windows.length, windows.burn_in, windows.is_weighted) == (4, 1, True)
    # Of env 0: the first episode has 3 steps, the second 5 (0..3, and one more that ends with it), the third 4.
    starts = {0: [0, 3, 4, 8], 1: [0, 2, 6, 8]}
    assert windows.starts.tolist() == sorted(step * ENVS + env for env, steps in starts.items() for step in steps)
    storage.update(windows.starts, torch.arange(8) + 1.0)
    seen = summarize(of_storage(storage)).priorities
    assert seen is not None
    assert (seen.what, seen.numbers.count, seen.numbers.least, seen.numbers.most) == ("windows", 8, 1.0, 8.0)
    uniform = filled(rlstore.SequenceReplayStorage, sequence_length=3)
    assert summarize(of_storage(uniform)).priorities is None


def test_what_is_sampled_is_said(monkeypatch):
    monkeypatch.setattr(summaries, "MOST_ROWS", 6)
    monkeypatch.setattr(summaries, "MOST_EPISODES", 3)
    monkeypatch.setattr(summaries, "MOST_VALUES", 5)
    seen = summarize(of_storage(filled()))
    assert (seen.held, seen.looked, seen.episodes.count) == (24, 6, 6)
    assert seen.episodes.index.tolist() == [0, 2, 5]
    costs = next(field for field in seen.fields if field.name == "costs")
    # Rows 0, 4 or 5, 9, 14, 18 and 23 of 24 would be six of them; there is room for five values.
    assert costs.looked == 5
    assert (costs.numbers.least, costs.numbers.most) == (-111.0, 0.0)
    assert seen.notes[0] == "Of 24 transitions 6 were looked at, evenly spaced."
    assert seen.notes[-1] == "Of 6 episodes 3 are listed, evenly spaced."


def test_evenly_is_even():
    rows = torch.arange(100) * 7
    assert summaries.evenly(rows, 100) is rows
    assert summaries.evenly(rows, 4).tolist() == [0, 231, 462, 693]


def test_a_storage_that_is_empty_or_waits_has_nothing_to_tell():
    empty = rlstore.ReplayStorage(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), storage_size=10)
    seen = summarize(of_storage(empty))
    assert (seen.held, seen.fields, seen.episodes.count, seen.priorities) == (0, [], 0, None)
    waiting = rlstore.PrioritizedReplayStorage.create_factory(10)()
    assert summarize(of_storage(waiting)).held == 0


def test_rows_that_are_overwritten_meanwhile_are_left_out():
    storage = filled(storage_size=2 * STEPS)
    steps = storage._held_steps()
    before = steps.rows()
    once = []

    def read(rows):
        if not once:
            once.append(True)
            filled_more(storage)
        return steps.read(rows, ("costs",))["costs"].flatten().tolist()

    assert len(summaries.still_held(steps, before, read)) == len(before) - ENVS


def filled_more(storage):
    state = storage[int(storage.held_rows()[-1])]["next_observations"]
    both = {name: torch.stack([state[name]] * ENVS) for name in state.keys()}  # noqa: SIM118
    storage.add(both, [0, 0], [0.0, 0.0], [False] * 2, [False] * 2, {}, both, costs=[5.0, 5.0])


def test_the_plan_has_every_kind_of_end():
    assert {end for plan in PLAN for _, end in plan} == set(ENDS)
