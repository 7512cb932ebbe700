"""add_episodes() and from_episodes(): the rows are those that add() writes step by step, in every byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from data_episodes import (
    ACTIONS,
    CASES,
    EXTRA,
    FLAT,
    Case,
    add_step_by_step,
    assert_same,
    contents,
    episode_of,
    flat,
    number_of,
)

import rlstore

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LENGTHS = (
    5,
    7,
    1,
    6,
    8,
    2,
    9,
)  # no environment ends with one that no flag ends: of those windows hear with the next row


def fullest_first(lengths: tuple[int, ...], lanes: int) -> list[int]:
    """To which environment each episode goes: the one with the fewest rows, the first of several."""
    rows, chosen = [0] * lanes, []
    for length in lengths:
        env = rows.index(min(rows))
        rows[env] += length
        chosen.append(env)
    return chosen


@EVERY
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("size", [180, 36], ids=["fits", "evicts"])
def test_rows_are_those_of_add(case: Case, lanes: int, size: int) -> None:
    loaded, twin = (case.make(num_envs=lanes, storage_size=size, autoreset="Disabled") for _ in range(2))
    episodes = [episode_of(case.form, index, length) for index, length in enumerate(LENGTHS)]
    assert loaded.add_episodes(episodes) == sum(LENGTHS)
    twin._appender.warned = True
    for index, (length, env) in enumerate(zip(LENGTHS, fullest_first(LENGTHS, lanes), strict=True)):
        add_step_by_step(twin, case.form, index, length, env)
        twin._rows.part(range(env, env + 1)).cut_off()  # what no flag ends
    twin._sampler.follow()
    assert_same(contents(loaded), contents(twin))
    for storage in (loaded, twin):
        storage.seed(11)
    for one, other in zip(flat(loaded.sample()), flat(twin.sample()), strict=True):
        assert torch.equal(one, other)


@EVERY
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_storage_is_copied_by_its_episodes(case: Case, lanes: int) -> None:
    """Into one environment, oldest first, which is how a storage of several lists them."""
    source = case.make(num_envs=lanes, storage_size=36, extra_fields=EXTRA)
    source.add_episodes([episode_of(case.form, i, n, extra=True) for i, n in enumerate(LENGTHS)])
    copy = case.make(num_envs=1, storage_size=36, extra_fields=EXTRA)
    assert copy.add_episodes(source.episodes()) == len(source)
    for one, other in zip(source.episodes(), copy.episodes(), strict=True):
        assert (one.length, one.terminated, one.truncated) == (other.length, other.terminated, other.truncated)
        assert other.is_over
        for name in (*one.names, "final_observations"):
            parts = [getattr(e, name) if name == "final_observations" else e[name] for e in (one, other)]
            for mine, its in zip(*map(flat, parts), strict=True):
                assert torch.equal(mine, its), name


def test_recurrent_states_are_stored_with_each_step() -> None:
    storage = rlstore.SequenceReplayStorage(FLAT.space, ACTIONS, sequence_length=3, hidden_shape=((2, 3), (1, 4)))
    states = (torch.arange(30.0).reshape(5, 2, 3), torch.arange(20.0).reshape(5, 1, 4) + 100)
    storage.add_episodes([{**episode_of(FLAT, 0, 5), "hidden_states": states}])
    found = storage.episodes()[0]["hidden_states"]
    assert torch.equal(found[0], states[0])
    assert torch.equal(found[1], states[1])
    with pytest.raises(ValueError, match="hidden_states holds 1 states; this storage holds 2"):
        storage.add_episodes([{**episode_of(FLAT, 1, 5), "hidden_states": states[0]}])


def test_the_final_observation_may_be_given_in_three_ways() -> None:
    whole = episode_of(FLAT, 0, 4)
    before, after = whole["observations"][:-1], whole["observations"][1:]
    ways = [
        whole,
        {**whole, "observations": before, "next_observations": after},
        {**whole, "observations": before, "final_observations": whole["observations"][-1]},
        {**whole, "observations": torch.as_tensor(before), "final_observations": after[-1].tolist()},
        {**whole, "next_observations": after},
    ]
    held = []
    for way in ways:
        storage = rlstore.ReplayStorage(FLAT.space, ACTIONS, storage_size=50)
        storage.add_episodes([way])
        held.append(contents(storage))
    for other in held[1:]:
        assert_same(held[0], other)
    assert held[0]["final observations 0"].tolist() == [[104.0, 104.5]] * 4


def test_flags_may_be_a_bool_each() -> None:
    storage = rlstore.ReplayStorage(FLAT.space, ACTIONS, storage_size=50)
    plain = {name: value for name, value in episode_of(FLAT, 0, 3).items() if name[-5:] != "tions" or name[0] in "oa"}
    for flags in ({"terminated": True}, {"timeouts": np.True_}, {"terminals": False}):
        storage.add_episodes([{**plain, **flags}])
    ends = [(e.terminated, e.truncated, e.is_over) for e in storage.episodes()]
    assert ends == [(True, False, True), (False, True, True), (False, False, True)]


def step(storage: Any, number: int, following: int, *, terminated: bool = False) -> None:
    observe = FLAT.observe
    storage.add(observe(number, 0), 0, 0.0, terminated, False, {}, observe(following, 0))


def test_the_open_episode_is_cut_off_and_the_next_step_begins_another() -> None:
    storage = rlstore.ReplayStorage(FLAT.space, ACTIONS, storage_size=50, n_step=3)
    step(storage, 1, number_of(0, 0))  # what is added would continue it,
    storage.add_episodes([{**episode_of(FLAT, 0, 2), "terminations": False, "truncations": False}])
    step(storage, number_of(0, 2), 5)  # and this would continue what was added
    found = [(e.length, e.final_observations[0].item(), e.is_over) for e in storage.episodes()]
    assert found == [(1, 100.0, True), (2, 102.0, True), (1, 5.0, False)]


def test_environments_that_were_given_nothing_go_on() -> None:
    storage = rlstore.ReplayStorage(FLAT.space, ACTIONS, storage_size=50, num_envs=2)
    both = np.stack([FLAT.observe(1, 0)] * 2)
    storage.add(both, [0, 0], [0.0, 0.0], [False, False], [False, False], {}, both + 1)
    storage.add_episodes([episode_of(FLAT, 0, 2)])
    storage.add(both + 1, [0, 0], [0.0, 0.0], [False, False], [False, False], {}, both + 2)
    found = sorted((e.env, e.length, e.is_over) for e in storage.episodes())
    assert found == [(0, 1, False), (0, 1, True), (0, 2, True), (1, 2, False)]


def test_a_generator_is_stored_as_far_as_it_is_right() -> None:
    storage = rlstore.ReplayStorage(FLAT.space, ACTIONS, storage_size=50)

    def episodes() -> Any:
        yield episode_of(FLAT, 0, 3)
        yield episode_of(FLAT, 1, 2)
        yield {**episode_of(FLAT, 2, 2), "rewards": [1.0, np.nan]}

    told = r"episode 2: rewards.*step 1 is nan.*The 2 episodes before it were stored, 5 transitions\."
    with pytest.raises(ValueError, match=told):
        storage.add_episodes(episodes())
    assert len(storage) == 5
    assert storage.add_episodes(iter([])) == 0


def test_spaces_and_size_are_taken_from_episodes() -> None:
    storage = rlstore.ReplayStorage.from_episodes([episode_of(FLAT, i, n) for i, n in enumerate((4, 6, 3))])
    assert (len(storage), storage.storage_size) == (13, 13)
    assert storage.action_space.n == number_of(2, 2) + 1
    assert (storage.observation_space.shape, storage.observation_space.dtype) == ((2,), np.float32)
    three = rlstore.ReplayStorage.from_episodes([episode_of(FLAT, i, n) for i, n in enumerate((4, 6, 3))], num_envs=2)
    assert [e.env for e in three.episodes()] == [0, 1, 0]
    assert (len(three), three.storage_size) == (13, 14)
    again = rlstore.PrioritizedReplayStorage.from_episodes(storage.episodes(), batch_size=4)
    assert (len(again), again.sample().rewards.shape) == (13, (4, 1))


def test_a_generator_needs_spaces_and_a_size() -> None:
    one = episode_of(FLAT, 0, 3)
    given = {"observation_space": FLAT.space, "action_space": ACTIONS, "storage_size": 10}
    for missing in given:
        with pytest.raises(ValueError, match="read only once: give observation_space, action_space and storage_size"):
            rlstore.ReplayStorage.from_episodes(iter([one]), **{**given, missing: None})
    assert len(rlstore.ReplayStorage.from_episodes(iter([one]), **given)) == 3
