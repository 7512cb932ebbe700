"""The model of replay storages on cases worked out by hand: what the other tests of this folder take for the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_envs import MOVES, STARTS, Envs
from replay_model import Priorities, ReplayModel
from replay_world import ACTIONS, PLAIN_KINDS, STACK_KINDS, Given, Goal, Stack, final_info, mapped, stacked


def step(observation, following, reward=1.0, terminated=False, truncated=False, final=None):
    """A step of vector observations; its action is its observation's number."""
    token = None if final is None else (final,)
    return Given((observation,), observation, (reward,), (following,), terminated, truncated, token)


def served(model):
    """By observation: the reward, the discount and what follows."""
    return {one.observation[0]: (one.reward[0], one.discount, one.following[0]) for one in model.transitions()}


def filled(given, capacity=10, **options):
    model = ReplayModel(1, capacity, **{"discount": 0.5, **options})
    for one in given:
        model.add([one])
    return model


# ------------------------------------------------------------------------------------------------- n steps

# An episode of three steps that is terminated, one of two that is truncated, and one that runs: rewards 1, 2, 4, ...
THREE_EPISODES = [
    step(1, 2, 1.0),
    step(2, 3, 2.0),
    step(3, 10, 4.0, terminated=True, final=4),
    step(10, 11, 8.0),
    step(11, 20, 16.0, truncated=True, final=12),
    step(20, 21, 32.0),
    step(21, 22, 64.0),
]


def test_one_step_targets():
    assert served(filled(THREE_EPISODES)) == {
        1: (1.0, 0.5, 2),
        2: (2.0, 0.5, 3),
        3: (4.0, 0.0, 4),
        10: (8.0, 0.5, 11),
        11: (16.0, 0.5, 12),
        20: (32.0, 0.5, 21),
        21: (64.0, 0.5, 22),
    }


def test_two_step_targets_stop_at_ends_and_at_the_newest_step():
    assert served(filled(THREE_EPISODES, n_step=2)) == {
        1: (2.0, 0.25, 3),
        2: (4.0, 0.0, 4),
        3: (4.0, 0.0, 4),
        10: (16.0, 0.25, 12),
        11: (16.0, 0.5, 12),
        20: (64.0, 0.25, 22),
        21: (64.0, 0.5, 22),
    }


def test_four_step_targets_are_no_longer_than_their_episodes():
    assert served(filled(THREE_EPISODES, n_step=4)) == {
        1: (3.0, 0.0, 4),
        2: (4.0, 0.0, 4),
        3: (4.0, 0.0, 4),
        10: (16.0, 0.25, 12),
        11: (16.0, 0.5, 12),
        20: (64.0, 0.25, 22),
        21: (64.0, 0.5, 22),
    }


def test_termination_wins_where_both_flags_are_set():
    assert served(filled([step(1, 2, terminated=True, truncated=True)])) == {1: (1.0, 0.0, 2)}


def test_the_oldest_steps_go_and_rows_count_on():
    model = filled(THREE_EPISODES, capacity=3)
    assert served(model).keys() == {11, 20, 21}
    assert model.rows() == {4, 5, 6}
    assert model.is_full()
    model.reset()
    assert served(model) == {}
    model.add([step(30, 31)])
    assert model.rows() == {7}
    assert [model.was_written(row) for row in (-1, 0, 7, 8)] == [False, True, True, False]


def test_reward_vectors_are_summed_entry_by_entry():
    model = ReplayModel(1, 4, n_step=2, discount=0.5)
    model.add([Given((1,), 1, (1.0, 10.0), (2,))])
    model.add([Given((2,), 2, (2.0, 20.0), (3,))])
    assert [one.reward for one in model.transitions()] == [(2.0, 20.0), (2.0, 20.0)]


def test_lanes_move_alone():
    model = ReplayModel(2, 2)
    model.add([step(1, 2), step(101, 102)])
    model.add([None, step(102, 103)])
    model.add([None, step(103, 104)])
    assert served(model).keys() == {1, 102, 103}
    assert model.rows() == {0, 3, 5}
    assert not model.is_full()
    model.add([step(2, 3), None])
    assert model.is_full()


# ------------------------------------------------------------------------------------------------- ends and starts


def test_a_break_cuts_the_episode_and_each_side_keeps_its_own():
    model = ReplayModel(1, 10, n_step=3, discount=0.5)
    assert model.add([step(1, 2)]) == ([0], False)
    assert model.add([step(2, 3)]) == ([1], False)
    assert model.add([step(50, 51)]) == ([2], True)
    assert model.add([step(51, 52)]) == ([3], False)
    assert served(model) == {1: (1.5, 0.25, 3), 2: (1.0, 0.5, 3), 50: (1.5, 0.25, 52), 51: (1.0, 0.5, 52)}
    assert not any(one.terminated or one.truncated for one in model.held())


RESET = [step(1, 2, terminated=True), step(2, 10, 0.0), step(10, 11)]


@pytest.mark.parametrize(
    ("autoreset", "stored"),
    [(None, {1, 10}), ("NextStep", {1, 10}), ("SameStep", {1, 2, 10}), ("Disabled", {1, 2, 10})],
)
def test_the_step_in_which_an_environment_resets_is_no_transition(autoreset, stored):
    assert served(filled(RESET, autoreset=autoreset)).keys() == stored


@pytest.mark.parametrize(
    "other",
    [step(2, 10, 0.5), step(2, 10, 0.0, terminated=True), step(2, 10, 0.0, truncated=True), step(9, 10, 0.0)],
    ids=["rewarded", "terminated", "truncated", "elsewhere"],
)
def test_a_step_that_is_not_quite_a_reset_step_is_a_transition(other):
    assert len(served(filled([RESET[0], other]))) == 2
    assert len(served(filled([RESET[0], other], autoreset="NextStep"))) == 1


def test_after_a_final_observation_from_the_infos_no_reset_step_is_expected():
    assert served(filled([step(1, 5, terminated=True, final=2), step(2, 10, 0.0)])).keys() == {1, 2}


def test_a_reset_step_is_dropped_after_steps_that_were_sat_out():
    model = ReplayModel(2, 5)
    model.add([step(1, 2, truncated=True), step(101, 102)])
    model.add([None, step(102, 103)])
    model.add([step(2, 10, 0.0), step(103, 104)])
    assert served(model).keys() == {1, 101, 102, 103}


def test_a_slice_is_stored_whole():
    model, other = ReplayModel(1, 10), filled(RESET, autoreset="SameStep")
    assert model.append(other.by_lane()) == [0, 1, 2]
    assert served(model).keys() == {1, 2, 10}


# ------------------------------------------------------------------------------------------------- windows


def starts(steps, over, length, stride):
    return ReplayModel._starts(steps, over, length, stride)


def test_where_windows_start():
    assert starts(10, False, 4, 2) == [0, 2, 4, 6]
    assert starts(10, False, 4, 4) == [0, 4]
    assert starts(10, True, 4, 4) == [0, 4, 6]
    assert starts(8, True, 4, 4) == [0, 4]
    assert starts(3, False, 4, 4) == []
    assert starts(3, True, 4, 4) == [0]
    assert starts(4, False, 4, 3) == [0]
    assert starts(5, True, 4, 1) == [0, 1]


def numbers(windows):
    return [([one.observation[0] for one in window.steps], list(window.firsts)) for window in windows]


def test_windows_keep_to_their_episodes():
    model = filled(THREE_EPISODES)
    assert numbers(model.windows(2, 2)) == [
        ([1, 2], [True, False]),
        ([2, 3], [False, False]),
        ([10, 11], [True, False]),
        ([20, 21], [True, False]),
    ]
    assert numbers(model.windows(3, 3)) == [([1, 2, 3], [True, False, False]), ([10, 11], [True, False])]


def test_windows_whose_first_step_is_gone_are_gone():
    model = filled(THREE_EPISODES, capacity=6)
    assert numbers(model.windows(2, 2)) == [
        ([2, 3], [False, False]),
        ([10, 11], [True, False]),
        ([20, 21], [True, False]),
    ]
    assert [window.row for window in model.windows(2, 2)] == [1, 3, 5]


def test_windows_across_episodes_say_where_one_begins():
    assert numbers(filled(THREE_EPISODES).windows(3, 2, across_episodes=True)) == [
        ([1, 2, 3], [True, False, False]),
        ([3, 10, 11], [False, True, False]),
        ([11, 20, 21], [False, True, False]),
    ]


# ------------------------------------------------------------------------------------------------- goals


def goal_step(number, ends=False):
    return Given((number, number + 50, 99), number, (0.0,), (number + 1, number + 51, 99), ends)


def test_whose_goals_a_step_may_be_given():
    model = ReplayModel(1, 4)
    for one in (goal_step(1), goal_step(2), goal_step(3, ends=True), goal_step(11), goal_step(12)):
        model.add([one])
    assert model.goals("future") == {1: [53, 54], 2: [54], 3: [62, 63], 4: [63]}
    assert model.goals("final") == {1: [54], 2: [54], 3: [63], 4: [63]}
    assert model.goals("episode") == {1: [53, 54], 2: [53, 54], 3: [62, 63], 4: [62, 63]}


# ------------------------------------------------------------------------------------------------- priorities


def test_priorities_and_weights():
    held = Priorities(0.5, 1.0, None)
    assert held.largest() == 1.0
    held.held = {0: 1.0, 1: 1.0, 2: 1.0}
    held.update([0, 1, 7], [4.0, 0.0, 3.0])
    assert held.held == {0: 2.0, 1: 0.0, 2: 1.0}
    assert held.stale == 1
    assert held.largest() == 2.0
    assert held.largest({1, 2}) == 1.0
    # P = 2/3 and 1/3; (P * 3) ** -1 is 1/2 and 1, and the largest is 1.
    assert held.weights([0, 2], 1.0) == [0.5, 1.0]
    assert held.weights([0, 0], 1.0) == [1.0, 1.0]
    held.keep({1})
    assert held.largest() == 1.0


def test_beta_rises_with_the_batches_drawn():
    held = Priorities(0.5, 0.2, 4)
    assert [held.next_beta() for _ in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    held = Priorities(0.5, 0.2, None)
    assert [held.next_beta() for _ in range(3)] == [0.2] * 3


# ------------------------------------------------------------------------------------------------- observations


@pytest.mark.parametrize("kind", [*PLAIN_KINDS, *STACK_KINDS, Goal()], ids=lambda kind: kind.name)
def test_observations_tell_what_they_are(kind):
    ids = iter(range(1, 100_000, 317))
    tokens = [kind.start(ids, padding) for padding in ("any", "repeat", "zeros")]
    tokens += [kind.follow(tokens[-1], ids), kind.resemble(tokens[-1], ids), tuple(0 for _ in tokens[0])]
    assert len(set(tokens)) == len(tokens) or kind.frames == 1
    batch = mapped(stacked([kind.render(token) for token in tokens]), lambda array: torch.from_numpy(np.array(array)))
    assert kind.read(batch) == tokens
    for token in tokens:
        assert kind.space.contains(kind.render(token))


def test_an_observation_of_two_steps_is_told_apart():
    kind = Stack((1, 1, 8), 2, 0)
    wrong = torch.from_numpy(np.stack([kind.render((3, 4))]))
    wrong[0, 1, 0, 5] += 1
    with pytest.raises(AssertionError, match="no observation"):
        kind.read(wrong)


def test_stacks_begin_as_told_and_move_by_a_frame():
    kind, ids = Stack((2,), 3, 0), iter(range(1, 100))
    assert kind.start(ids, "repeat") == (1, 1, 1)
    assert kind.start(ids, "zeros") == (0, 0, 2)
    assert kind.start(ids, "any") == (4, 5, 3)
    assert kind.follow((4, 5, 3), ids) == (5, 3, 6)
    assert kind.render((4, 5, 3)).tolist() == [4.0, -4.0, 5.0, -5.0, 3.0, -3.0]


@pytest.mark.parametrize("form", ["objects", "list", "array", "tensor", "parts", "nothing"])
def test_final_observations_are_given_for_those_that_ended(form):
    kind = PLAIN_KINDS[3]
    ended = Given((1,), 1, (0.0,), (9,), True, final=(2,))
    info = final_info(kind, [ended, Given((5,), 5, (0.0,), (6,)), None], form, "final_obs", iter(range(100, 200)))
    given = info["final_obs"]
    one = given["policy"][0] if isinstance(given, dict) else given[0]["policy"]
    assert one.tolist() == [2.0, -2.0]


# ------------------------------------------------------------------------------------------------- environments


@pytest.mark.parametrize("autoreset", [None, "NextStep", "SameStep"])
def test_environments_do_all_that_they_can(autoreset):
    """In a long walk every kind of end, start and break comes about, and every look-alike is stored."""
    rng = np.random.default_rng(0)
    envs, model = Envs(PLAIN_KINDS[0], ACTIONS[0], 2, autoreset), ReplayModel(2, 5, autoreset=autoreset)
    dropped = breaks = 0
    for _ in range(400):
        moves = tuple(MOVES[place] for place in rng.integers(0, len(MOVES), 3))
        start, final = STARTS[rng.integers(0, len(STARTS))], tuple(bool(flag) for flag in rng.integers(0, 2, 3))
        given = envs.step(moves, start, final)
        rows, broken = model.add(given)
        dropped += sum(one is not None for one in given) - len(rows)
        breaks += broken
        arguments, mask = envs.arguments(given)
        assert len(arguments) == 7
        assert (mask is None) == all(one is not None for one in given)
    assert breaks > 20
    assert (dropped > 10) == (autoreset != "SameStep")
    lengths = {len(episode.steps) for lane in model.lanes for episode in lane.episodes}
    assert {1, 2, 3, 4, 5} <= lengths
