"""Autoreset modes that are not those of the environments, infos that were not given: what can be seen of it is told."""

from __future__ import annotations

import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlstore import InvalidInputError, ReplayStorage

ENVS = 2
BOX = spaces.Box(-1e6, 1e6, (1,), np.float32)


class Counter(gym.Env):
    """Shows one number more each step, begins at 100 more each episode, and is truncated after some steps."""

    observation_space, action_space = BOX, spaces.Discrete(3)

    def __init__(self, length: int) -> None:
        self.length, self.episode, self.time = length, 0, 0

    def reset(self, *, seed=None, options=None):
        self.episode, self.time = self.episode + 1, 0
        return self._shown(), {}

    def step(self, action):
        self.time += 1
        return self._shown(), float(self.time), False, self.time == self.length, {}

    def _shown(self):
        return np.array([100 * self.episode + self.time], np.float32)


def play(storage, mode, steps=20, shift=0.0, infos=True):
    """A loop of a program; environments 0 and 1 have episodes of 3 and 4 steps. Returns the texts of all warnings."""
    envs = gym.vector.SyncVectorEnv([lambda n=n: Counter(n) for n in (3, 4)], autoreset_mode=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observations, _ = envs.reset()
        for _ in range(steps):
            actions = np.ones(ENVS, np.int64)
            following, rewards, terminated, truncated, given = envs.step(actions)
            given = given if infos else {}
            storage.add(observations, actions, rewards + shift, terminated, truncated, given, following)
            observations = following
    assert all(one.category is UserWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def make(autoreset=None, **options):
    return ReplayStorage(
        BOX, spaces.Discrete(3), storage_size=200, num_envs=ENVS, batch_size=512, autoreset=autoreset, seed=0, **options
    )


# After 20 calls environment 0 has had 5 resets of its own step, environment 1 has had 4.
@pytest.mark.parametrize(
    ("mode", "autoreset", "shift", "held"),
    [
        ("SAME_STEP", "SameStep", 0.0, 40),
        ("SAME_STEP", None, 0.0, 40),
        ("SAME_STEP", "SameStep", -1.5, 40),
        ("NEXT_STEP", None, 0.0, 31),
        ("NEXT_STEP", "NextStep", 0.0, 31),
        ("NEXT_STEP", "NextStep", -1.5, 31),
    ],
)
def test_what_is_right_is_not_warned_of(mode, autoreset, shift, held):
    storage = make(autoreset)
    assert play(storage, AutoresetMode[mode], shift=shift) == []
    assert len(storage) == held


def test_infos_that_were_forgotten_with_same_step_autoreset():
    """Environment 0 ends first, after its third step, and its next episode begins with 200."""
    (told,) = play(make("SameStep"), AutoresetMode.SAME_STEP, infos=False)
    assert told.startswith(
        "a step of environment 0 begins with the observation in which its episode had ended, with a reward of 1.0; it "
        'was stored as the first step of the next episode. With autoreset="SameStep" that is not the final observation'
    )
    assert "give add() the infos of every step, which hold final_obs" in told


def test_next_step_environments_in_a_storage_for_same_step():
    storage = make("SameStep")
    (told,) = play(storage, AutoresetMode.NEXT_STEP)
    assert "a step of environment 0 begins" in told
    assert "with a reward of 0.0" in told
    assert 'make the storage with autoreset="NextStep"' in told
    assert len(storage) == 40


def test_final_observations_in_a_storage_for_next_step_are_refused_and_nothing_changes():
    storage = make("NextStep")
    with pytest.raises(InvalidInputError, match="infos holds 'final_obs', and this storage was made with") as refused:
        play(storage, AutoresetMode.SAME_STEP)
    assert str(refused.value).endswith('need autoreset="SameStep". Nothing was written.')
    assert len(storage) == 4  # the two steps before


@pytest.mark.parametrize("as_steps", [False, True])
def test_final_observations_are_refused_in_writers_too(as_steps):
    storage = make("NextStep")
    two, no = np.zeros((ENVS, 1), np.float32), np.zeros(ENVS, bool)
    sample = {"observations": two, "actions": no, "rewards": no, "terminated": no, "truncated": ~no}
    sample |= {"next_observations": two + 1, "final_observations": two + 1}
    with storage.writer() as writer:
        add = partial(writer.insert_transition, sample)
        if as_steps:
            add = partial(
                writer._insert_steps, {name: torch.as_tensor(value)[None] for name, value in sample.items()}, 1
            )
        with pytest.raises(InvalidInputError, match=r"'final_ob.*autoreset=\"NextStep\""):
            add()
    assert len(storage) == 0


def test_rewards_that_were_changed_hide_reset_steps():
    """The first reset step is seen, and the second has the same reward: -1.5 each, that of environment 1."""
    storage = make()
    (told,) = play(storage, AutoresetMode.NEXT_STEP, shift=-1.5)
    assert told.startswith(
        "a step of environment 1 begins with the observation in which its episode had ended, with a "
    )
    assert "with a reward of -1.5;" in told
    assert 'make the storage with autoreset=envs.metadata["autoreset_mode"]' in told
    assert len(storage) == 40


@pytest.mark.parametrize("memory", ["ram", "shared"])
def test_a_writer_names_the_environment_of_the_storage(memory):
    storage = make("SameStep", memory=memory)
    ended = np.array([True])
    with storage.writer(range(1, 2)) as writer:
        writer.add(np.array([[5.0]], np.float32), [0], [1.0], ~ended, ended, {}, np.array([[7.0]], np.float32))
        with pytest.warns(UserWarning, match="a step of environment 1 begins .* with a reward of 2.5;"):
            writer.add(np.array([[7.0]], np.float32), [0], [2.5], ~ended, ~ended, {}, np.array([[8.0]], np.float32))
    storage.close()


def lane_steps(storage, rewards):
    """Steps of one environment, each an episode of its own in a task that goes on; returns how many warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for time, reward in enumerate(rewards):
            ends = time % 3 == 2
            storage.add([float(time)], 0, reward, False, ends, {}, [float(time + 1)])
    return len(caught)


@pytest.mark.parametrize(
    ("rewards", "warned"),
    [
        ([1.0] * 12, False),  # as all others
        ([float(time) for time in range(12)], False),  # never the same
        ([1.0, 2.0, 3.0, -1.0, 2.0, 3.0, -1.0, 2.0, 3.0, -1.0], True),
        ([1.0, 2.0, 3.0, -1.0, 2.0, 3.0, -0.5, 2.0, 3.0, -1.0], False),
    ],
)
def test_a_task_that_goes_on_after_a_truncation_is_not_taken_for_one_with_resets(rewards, warned):
    storage = ReplayStorage(BOX, spaces.Discrete(3), storage_size=50)
    assert lane_steps(storage, rewards) == warned
    assert len(storage) == len(rewards)


def test_an_environment_that_is_reset_by_hand_may_end_where_it_begins():
    for autoreset, expected in (("Disabled", 0), ("SameStep", 1)):
        storage = ReplayStorage(BOX, spaces.Discrete(3), storage_size=50, autoreset=autoreset)
        assert lane_steps(storage, [1.0] * 12) == expected


def test_rewards_of_several_numbers_are_shown():
    storage = ReplayStorage(BOX, spaces.Discrete(3), storage_size=50, reward_shape=(2,), autoreset="SameStep")
    storage.add([0.0], 0, [[1.0, 2.0]], False, True, {}, [1.0])
    with pytest.warns(UserWarning, match=r"with a reward of \[0\.5 3\. \];"):
        storage.add([1.0], 0, [[0.5, 3.0]], False, False, {}, [2.0])
