"""NStepReplayStorage: which transitions are served, how often, and what n steps of each are worth."""

from __future__ import annotations

import string
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from cases.nstep import CASES
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from nstep_steps import Lane, assert_tables, fill, ids_of, make_step, make_storage, obs_of, served, table

from rlstore import NStepReplayStorage

CODE = {letter: float(number) for number, letter in enumerate(string.ascii_letters, start=1)}
LETTER = {code: letter for letter, code in CODE.items()}


def play(case, storage, envs=1):
    """Add the lane of a case, the same in every environment."""
    for step, reward in enumerate(case.rewards):
        how, final = case.ends.get(step, (None, None))
        here, after = (torch.full((envs, 1), CODE[string.ascii_lowercase[step + i]]) for i in (0, 1))
        storage.add(
            here,
            torch.full((envs,), step),
            torch.full((envs,), float(reward)),
            torch.full((envs,), how in ("terminated", "both")),
            torch.full((envs,), how in ("truncated", "both")),
            {} if final is None else {"final_obs": np.full((envs, 1), CODE[final], np.float32)},
            after,
        )


def lines(batch):
    """(step, what it was served as) for every transition of a batch, as a set."""
    return {
        (int(action), reward.item(), discount.item(), LETTER[after.item()])
        for action, reward, discount, after in zip(*batch[1:], strict=True)
    }


def storage_for(case, **options):
    arguments = {"storage_size": 16, "num_workers": 0, "pin_memory": False, "batch_size": 512, **options}
    space = spaces.Box(0, 100, (1,))
    return NStepReplayStorage(space, spaces.Discrete(99), n_step=case.n_step, discount=case.gamma, **arguments)


# ------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_targets_are_those_worked_out_by_hand(case):
    storage = storage_for(case)
    play(case, storage)
    assert lines(storage.sample()) == {(step, *line) for step, line in enumerate(case.served)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_environment_is_served_the_same_way(case):
    storage = storage_for(case, num_envs=3, storage_size=48)
    play(case, storage, envs=3)
    assert len(storage) == 3 * len(case.rewards)
    assert lines(storage.sample()) == {(step, *line) for step, line in enumerate(case.served)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_targets_are_the_same_when_the_lane_has_wrapped(case):
    """Room for exactly this lane, which is played after others that it writes over; each place is the first once."""
    for shift in range(len(case.rewards)):
        steps = max(len(case.rewards), case.n_step)
        storage = storage_for(case, storage_size=steps)
        for _ in range(shift + steps):
            storage.add([[52.0]], [50], [1e6], [True], [False], {}, [[52.0]])
        play(case, storage)
        got = {line for line in lines(storage.sample()) if line[0] != 50}
        assert got == {(step, *line) for step, line in enumerate(case.served)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_model_of_these_tests_agrees_with_the_hand(case):
    lane = Lane(len(case.rewards), case.n_step, case.gamma)
    for step, reward in enumerate(case.rewards):
        how, final = case.ends.get(step, (None, None))
        lane.add(step, reward, final or string.ascii_lowercase[step + 1], how)
    assert lane.table() == {step: (float(step), *line) for step, line in enumerate(case.served)}


# ------------------------------------------------------------------------------------------------- which are served


def test_data_are_visible_at_once():
    """No episode has to end first, and not n steps have to be there."""
    storage = make_storage(num_envs=3, steps=10, n_step=5)
    for step in range(10):
        storage.add(**make_step(step, 3))
        assert served(storage).keys() == set(range(1, 3 * (step + 1) + 1))


def test_a_window_grows_with_its_lane():
    storage = make_storage(1, n_step=3, discount=0.5)
    grown = []
    for step in range(4):
        storage.add(**make_step(step, 1, rewards=[2.0**step]))
        grown.append(served(storage)[1])
    assert grown == [(1, 1, 0.5, 2), (1, 2, 0.25, 3), (1, 3, 0.125, 4), (1, 3, 0.125, 4)]


def test_the_size_counts_transitions_over_all_environments():
    storage = make_storage(num_envs=3, storage_size=10)
    fill(storage, 7)
    # 10 // 3 steps of each environment: the newest three.
    assert len(storage) == 9
    assert storage.storage_size == 10
    assert served(storage).keys() == set(range(13, 22))


def test_each_environment_holds_its_newest_steps_exactly():
    storage = make_storage(num_envs=2, steps=4)
    for step in range(13):
        storage.add(**make_step(step))
        newest = range(max(0, step - 3), step + 1)
        assert served(storage).keys() == {int(i) for kept in newest for i in ids_of(kept).tolist()}


def test_an_episode_longer_than_the_storage_keeps_its_newest_steps():
    storage = make_storage(1, steps=5, n_step=2, discount=0.5)
    lane = Lane(5, 2, 0.5)
    for step in range(23):
        storage.add(**make_step(step, 1))
        lane.add(step + 1, step + 1.25, step + 2)
    assert served(storage).keys() == {19, 20, 21, 22, 23}
    assert_tables(served(storage), lane.table())


def test_transitions_are_drawn_uniformly_and_not_their_episodes():
    """One environment lives in episodes of 1 step, the other in one of 40."""
    storage = make_storage(num_envs=2, steps=40, batch_size=8000, seed=1)
    for step in range(40):
        storage.add(**make_step(step, 2, terminated=(0,)))
    counts = Counter()
    for _ in range(10):
        counts.update((storage.sample().observations[:, 0] / 10).long().tolist())
    assert counts.keys() == set(range(1, 81))
    # 80,000 draws: each of 80 is expected 1000 times, and sqrt(80000 * 1/80 * 79/80) = 31.4 is one standard deviation.
    assert all(abs(count - 1000) < 6 * 31.4 for count in counts.values())
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert 30 < chi_square < 160  # 79 degrees of freedom: one in a million is beyond


def test_draws_are_independent_of_each_other():
    """With replacement: 256 of 16 transitions are no permutation, and no batch repeats another."""
    storage = make_storage(num_envs=2, steps=8, batch_size=256, seed=2)
    fill(storage, 8)
    drawn = [tuple((storage.sample().observations[:, 0] / 10).long().tolist()) for _ in range(20)]
    assert len(set(drawn)) == 20
    assert len({tuple(sorted(batch)) for batch in drawn}) > 1


# ------------------------------------------------------------------------------------------------- any lane

STEP = st.sampled_from([None, None, None, "terminated", "truncated", "both"])


@given(
    ends=st.lists(st.tuples(STEP, STEP), min_size=1, max_size=30),
    steps=st.integers(1, 9),
    n_step=st.integers(1, 9),
    gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_any_lane_is_served_as_a_plain_list_would_be(ends, steps, n_step, gamma):
    n_step = min(n_step, steps)
    storage = make_storage(2, steps, n_step=n_step, discount=gamma, batch_size=1500)
    lanes = [Lane(steps, n_step, gamma) for _ in range(2)]
    for step, flags in enumerate(ends):
        terminated = [env for env in (0, 1) if flags[env] in ("terminated", "both")]
        truncated = [env for env in (0, 1) if flags[env] in ("truncated", "both")]
        storage.add(**make_step(step, 2, terminated, truncated))
        for env, lane in enumerate(lanes):
            number = int(ids_of(step)[env])
            lane.add(number, number + 0.25, number + 2 if flags[env] is None else -number, flags[env])
    assert_tables(served(storage), {**lanes[0].table(), **lanes[1].table()})


def test_environments_that_sat_out_are_left_alone():
    """Each environment moves by itself: its steps are numbered by its own count."""
    storage = make_storage(3, 6, n_step=2, discount=0.5)
    lanes, taken = [Lane(6, 2, 0.5) for _ in range(3)], [0, 0, 0]
    turns = [(0, 1, 2), (0,), (0, 2), (1,), (), (0, 1, 2), (2,), (2,), (0, 1), (2,), (2, 1), (2,)]
    for turn in turns:
        ids = torch.tensor([100.0 * (env + 1) + taken[env] for env in range(3)])
        ids[[env for env in range(3) if env not in turn]] = float("nan")
        ends = [env in turn and taken[env] == 2 for env in range(3)]
        storage.add(
            obs_of(ids),
            ids.nan_to_num(0).long(),
            ids + 0.25,
            torch.tensor(ends),
            torch.zeros(3),
            {"final_obs": obs_of(-ids)} if any(ends) else {},
            obs_of(ids + 1),
            mask=torch.tensor([env in turn for env in range(3)]),
        )
        for env in turn:
            number = int(ids[env])
            after, end = (-number, "terminated") if ends[env] else (number + 1, None)
            lanes[env].add(number, number + 0.25, after, end)
            taken[env] += 1
        held = [min(6, count) for count in taken]
        assert len(storage) == sum(held)
        assert_tables(served(storage), {n: line for lane in lanes for n, line in lane.table().items()})
    assert taken == [5, 5, 8]


# ------------------------------------------------------------------------------------------------- breaks


def test_a_lane_that_jumps_is_cut_there_and_a_warning_given_once():
    """The caller reset an environment without a flag: the step before it keeps its own next observation."""
    storage = make_storage(1, n_step=3, discount=0.5)
    storage.add(**make_step(0, 1))
    storage.add(**make_step(1, 1))  # comes to id 3
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (5, 6, 9, 10):  # but goes on from id 6, and later jumps once more
            storage.add(**make_step(step, 1))
    assert [warning.category for warning in warned] == [UserWarning]
    assert_tables(
        served(storage),
        {
            1: (1, 1.25 + 2.25 / 2, 0.25, 3),
            2: (2, 2.25, 0.5, 3),
            6: (6, 6.25 + 7.25 / 2, 0.25, 8),
            7: (7, 7.25, 0.5, 8),
            10: (10, 10.25 + 11.25 / 2, 0.25, 12),
            11: (11, 11.25, 0.5, 12),
        },
    )
    assert not storage.get_all_buffer_data()["truncated"].any()


def test_a_new_episode_after_an_end_is_no_jump(recwarn):
    storage = make_storage(1, n_step=3)
    storage.add(**make_step(0, 1, terminated=(0,)))
    storage.add(**make_step(20, 1, truncated=(0,)))
    storage.add(**make_step(40, 1))
    assert not recwarn.list
    assert {number: line[3] for number, line in served(storage).items()} == {1: -1, 21: -21, 41: 42}


# ------------------------------------------------------------------------------------------------- other rewards


def test_reward_vectors_are_folded_entry_by_entry():
    storage = make_storage(1, n_step=2, discount=0.5, reward_shape=(2,), batch_size=64)
    for step in range(3):
        storage.add(**make_step(step, 1, rewards=[[2.0**step, -1.0]]))
    batch = storage.sample()
    assert batch.rewards.shape == (64, 2)
    assert batch.discounts.shape == (64, 1)
    got = {int(o[0]) // 10: r.tolist() for o, r in zip(batch.observations, batch.rewards, strict=True)}
    assert got == {1: [2, -1.5], 2: [4, -1.5], 3: [4, -1]}


def test_rewards_are_summed_in_the_precision_of_float32():
    """A reward of 1e6 does not swallow the small ones before it by being summed in half precision."""
    storage = make_storage(1, n_step=3, discount=1.0)
    for step, reward in enumerate([0.5, 0.25, 1e6]):
        storage.add(**make_step(step, 1, rewards=[reward]))
    assert served(storage)[1][1] == 1_000_000.75


def test_a_batch_of_another_size_may_be_asked_for():
    storage = make_storage(batch_size=5)
    fill(storage, 4)
    assert storage.sample(17).observations.shape == (17, 2)
    assert storage.sample(batch_size=3).rewards.shape == (3, 1)
    assert storage.sample().rewards.shape == (5, 1)
    assert table(storage.sample(200)).keys() == set(range(1, 9))
