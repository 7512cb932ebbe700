"""Rollout buffers for Stable-Baselines3 serve what its own serve of the same steps, and compute the same targets."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_steps import NUMBERS, forms, rows, stacked
from stable_baselines3.common import buffers as theirs
from where import DEVICE

from rlstore import InvalidInputError, NotReadyError, RolloutFullError
from rlstore.sb3 import DictRolloutBuffer, RolloutBuffer

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
OBSERVATIONS = {
    "Box": BOX,
    "float64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "image": spaces.Box(0, 255, (3, 4, 2), np.uint8),
    "Discrete": spaces.Discrete(NUMBERS),
    "Dict": spaces.Dict({"box": BOX, "number": spaces.Discrete(NUMBERS)}),
}
ACTIONS = {
    "Discrete": spaces.Discrete(5),
    "Box": spaces.Box(-1, 1, (2, 2), np.float32),
    "MultiDiscrete": spaces.MultiDiscrete([3, 64]),
    "MultiBinary": spaces.MultiBinary(4),
    "Discrete, one": spaces.Discrete(5),
}
STEPS, ENVS = 7, 3
ARRAYS = ("rewards", "values", "log_probs", "returns", "advantages", "episode_starts")


@pytest.fixture(autouse=True)
def seeded():
    np.random.seed(0)
    torch.manual_seed(0)


def pair(observations, actions, n_envs=ENVS):
    """A buffer of theirs and one of ours."""
    given, discounts = (STEPS, observations, actions, DEVICE), {"gae_lambda": 0.9, "gamma": 0.97, "n_envs": n_envs}
    if isinstance(observations, spaces.Dict):
        return theirs.DictRolloutBuffer(*given, **discounts), DictRolloutBuffer(*given, **discounts)
    return theirs.RolloutBuffer(*given, **discounts), RolloutBuffer(*given, **discounts)


def fill(both, n_envs=ENVS, first=0, steps=STEPS):
    """Add the same steps to both, with episodes that begin at random."""
    random = np.random.default_rng(first)
    starts = np.ones(n_envs, dtype=bool)
    for step in range(first, first + steps):
        numbers = [step * n_envs + env for env in range(n_envs)]
        values = torch.from_numpy(random.normal(size=(n_envs, 1)).astype(np.float32)).to(DEVICE)
        log_probs = torch.tensor(numbers, dtype=torch.float32, device=DEVICE)
        rewards = random.normal(size=n_envs).astype(np.float32)
        for buffer in both:
            observations = stacked(buffer.observation_space, numbers)
            actions = stacked(buffer.action_space, numbers)
            buffer.add(observations, actions, rewards, starts, values, log_probs)
        starts = random.random(n_envs) < 0.3
    last_values = torch.from_numpy(random.normal(size=(n_envs, 1)).astype(np.float32)).to(DEVICE)
    for buffer in both:
        buffer.compute_returns_and_advantage(last_values, dones=starts)


def assert_same(expected, served):
    """The same rows, whose targets may differ in the last digits."""
    assert expected.keys() == served.keys()
    for key, row in served.items():
        targets = [(row.pop(name), expected[key].pop(name)) for name in ("returns ", "advantages ")]
        assert row == expected[key]
        for ours, others in targets:
            assert ours == pytest.approx(others, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("observations", "actions"), list(zip(OBSERVATIONS, ACTIONS, strict=True)))
def test_every_step_and_its_targets_are_theirs(observations, actions):
    n_envs = 1 if actions == "Discrete, one" else ENVS
    their, our = pair(OBSERVATIONS[observations], ACTIONS[actions], n_envs)
    for first in (0, STEPS):  # the second rollout replaces the first
        fill((their, our), n_envs, first)
        np.testing.assert_equal(our.observations, their.observations)
        for name in ARRAYS:
            np.testing.assert_allclose(getattr(our, name), getattr(their, name), rtol=1e-5, atol=1e-6, err_msg=name)
        (expected,), (served,) = their.get(), our.get()
        assert type(served) is type(expected)
        assert forms(served) == forms(expected)
        assert_same(rows(expected), rows(served))
        their.reset()
        our.reset()


def test_mini_batches_hold_every_step_once_in_a_new_order_each_time():
    their, our = pair(BOX, ACTIONS["Discrete"])
    fill((their, our))
    sizes = [len(batch.actions) for batch in their.get(batch_size=6)]
    epochs = [list(our.get(batch_size=6)) for _ in range(2)]
    orders = [torch.cat([batch.old_log_prob for batch in batches]).tolist() for batches in epochs]
    assert [len(batch.actions) for batch in epochs[0]] == sizes == [6, 6, 6, 3]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(STEPS * ENVS))
    assert orders[0] != orders[1]
    for batch in epochs[0]:
        assert torch.equal(batch.observations[:, 0], batch.old_log_prob)
        assert torch.equal(batch.actions[:, 0], batch.old_log_prob % 5)


def test_the_position_is_theirs_and_a_full_rollout_takes_no_more():
    both = their, our = pair(BOX, ACTIONS["Discrete"])
    assert (our.pos, our.full, our.size()) == (their.pos, their.full, their.size()) == (0, False, 0)
    fill(both)
    assert (our.pos, our.full, our.size()) == (their.pos, their.full, their.size()) == (STEPS, True, STEPS)
    with pytest.raises(RolloutFullError, match="Nothing was written"):
        fill([our], steps=1)
    our.reset()
    assert (our.pos, our.full) == (0, False)


@pytest.mark.skipif(DEVICE != "cpu", reason="arrays are copies there")
def test_what_is_written_into_the_arrays_is_in_the_storage():
    _, our = pair(BOX, ACTIONS["Discrete"])
    fill([our])
    our.rewards[2, 1] = 5.0
    assert our.storage.rewards[2, 1] == 5


def test_arrays_that_are_assigned_are_served():
    _, our = pair(BOX, ACTIONS["Discrete"])
    fill([our])
    before = float(our.rewards[2, 1])
    our.rewards += 1.0
    our.advantages = np.arange(STEPS * ENVS).reshape(STEPS, ENVS)
    assert our.storage.rewards[2, 1] == before + 1
    (batch,) = our.get()
    assert torch.equal(batch.advantages, batch.old_log_prob)


def test_an_array_of_another_shape_is_not_repeated():
    _, our = pair(BOX, ACTIONS["Discrete"])
    fill([our])
    before = our.rewards.copy()
    with pytest.raises(InvalidInputError, match=r"log_probs is \(7, 3\) and cannot become \(3,\); it was not changed"):
        our.log_probs = np.zeros(ENVS)
    with pytest.raises(InvalidInputError, match=r"rewards is \(7, 3\) and cannot become \(\)"):
        our.rewards = 0.0
    np.testing.assert_array_equal(our.rewards, before)


def test_a_rollout_that_is_not_complete_is_not_served():
    _, our = pair(BOX, ACTIONS["Discrete"])
    fill([our], steps=STEPS - 1)
    with pytest.raises(NotReadyError, match="has 6 of 7 steps"):
        next(our.get())


def test_whole_numbers_may_come_as_floats():
    their, our = pair(OBSERVATIONS["image"], ACTIONS["Discrete"])
    for buffer in (their, our):
        image = np.full((ENVS, 3, 4, 2), 200.0)
        buffer.add(image, np.zeros(ENVS, int), np.zeros(ENVS), np.ones(ENVS), torch.zeros(ENVS), torch.zeros(ENVS))
    np.testing.assert_array_equal(our.observations, their.observations)
    assert our.observations.dtype == np.uint8


def test_arrays_are_never_flattened_and_say_so():
    _, our = pair(BOX, ACTIONS["Discrete"])
    fill([our])
    list(our.get())
    assert not our.generator_ready
    assert our.rewards.shape == (STEPS, ENVS)


@pytest.mark.parametrize(("option", "meant"), [("lam", "gae_lambda"), ("discount", "gamma"), ("num_envs", "n_envs")])
def test_options_that_it_does_not_have_are_refused(option, meant):
    with pytest.raises(TypeError, match=f"has no argument '{option}'. Did you mean '{meant}'?"):
        RolloutBuffer(STEPS, BOX, ACTIONS["Discrete"], **{option: 1})


def test_a_subclass_with_samples_of_its_own_is_refused():
    with pytest.raises(InvalidInputError, match=r"Own overrides _get_samples\(\).* override get\(\) instead"):
        type("Own", (RolloutBuffer,), {"_get_samples": lambda self, rows, env=None: None})


def test_our_buffers_are_theirs_to_isinstance():
    _, our = pair(OBSERVATIONS["Dict"], ACTIONS["Discrete"])
    assert isinstance(our, theirs.DictRolloutBuffer)
    assert isinstance(our, RolloutBuffer)
