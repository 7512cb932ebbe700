"""RolloutStorage.from_spaces and add(): two environments of four steps, all numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from rlstore import InvalidInputError, RolloutFullError, RolloutStorage

BOX = spaces.Box(-100.0, 100.0, (2,), np.float32)
# One row a step, one number an environment. With next-step autoreset, step 1 of environment 1 and step 2 of environment
# 0 are reset steps: their values, 4 and 9, are those of final observations.
REWARDS = [[1, 1], [1, 0], [0, 2], [1, 1]]
TERMINATED = [[0, 0], [1, 0], [0, 0], [0, 1]]
TRUNCATED = [[0, 1], [0, 0], [0, 0], [1, 0]]
VALUES = [[0.5, 0.25], [0.5, 4], [9, 1], [0.5, 0.5]]
RESETS = [[False, False], [False, True], [True, False], [False, False]]
# gamma = lambda = 0.5, last values 8.
#   environment 0: t=3 truncated at the end: 1 + 8/2 - 1/2; t=1 terminated: 1 - 1/2; t=0: 1 + 1/4 - 1/2 + A1/4
#   environment 1: t=3 terminated: 1 - 1/2; t=2: 2 + 1/4 - 1 + A3/4; t=0 truncated: 1 + 4/2 - 1/4
ADVANTAGES = [[0.875, 2.75], [0.5, 0], [0, 1.375], [4.5, 0.5]]
RETURNS = [[1.375, 3], [1, 4], [9, 2.375], [5, 1]]


def make(num_steps=4, **options):
    return RolloutStorage.from_spaces(BOX, spaces.Discrete(7), 2, num_steps, **{"seed": 3, **options})


def step_of(t, **changed):
    """The arguments of step t; the observation of environment e is (t, e)."""
    step = {
        "observations": np.array([[t, 0], [t, 1]], np.float32),
        "actions": np.array([t, t + 3]),
        "rewards": np.array(REWARDS[t], np.float64),
        "terminated": np.array(TERMINATED[t], bool),
        "truncated": np.array(TRUNCATED[t], bool),
        "values": torch.tensor(VALUES[t]),
        "log_probs": torch.tensor([-float(t), -float(t) - 0.5]),
    }
    return {**step, **changed}


def filled(**options):
    storage = make(**options)
    for t in range(4):
        storage.add(**step_of(t))
    return storage


def served(batches):
    """The (step, environment) of every row of flat batches."""
    return [tuple(map(int, row)) for batch in batches for row in batch.observations]


def test_blocks_have_the_shapes_and_dtypes_of_the_spaces():
    storage = filled()
    assert storage.observations.shape == (4, 2, 2)
    assert storage.actions.dtype == torch.int64
    assert storage.actions.tolist() == [[0, 3], [1, 4], [2, 5], [3, 6]]
    assert storage.rewards.tolist() == REWARDS
    assert storage.dones.tolist() == [[0, 1], [1, 0], [0, 0], [1, 1]]
    assert storage.actions_log_prob.tolist() == [[0, -0.5], [-1, -1.5], [-2, -2.5], [-3, -3.5]]
    assert storage.reset_steps.tolist() == RESETS
    assert storage.step == storage.num_transitions_per_env == 4


def test_advantages_and_returns_by_hand():
    storage = filled()
    storage.compute_returns(torch.tensor([8.0, 8.0]), 0.5, 0.5, normalize_advantage=False)
    assert storage.advantages.tolist() == ADVANTAGES
    assert storage.returns.tolist() == RETURNS


def test_advantages_are_normalized_over_the_steps_that_are_no_reset_steps():
    storage = filled()
    storage.compute_returns(torch.tensor([[8.0], [8.0]]), 0.5, 0.5)
    raw = torch.tensor([0.875, 2.75, 0.5, 1.375, 4.5, 0.5], dtype=torch.float64)
    expected = ((raw - raw.mean()) / (raw.std() + 1e-8)).float()
    kept = ~storage.reset_steps
    torch.testing.assert_close(storage.advantages[kept], expected)
    assert storage.advantages[storage.reset_steps].tolist() == [0, 0]
    assert storage.returns.tolist() == RETURNS


def test_equal_advantages_are_normalized_to_zero():
    storage = make()
    for t in range(4):
        storage.add(**step_of(t, rewards=np.array(REWARDS[t]) * 0.0, values=torch.tensor([0.1, 0.1])))
    storage.compute_returns(torch.zeros(2), 0.0, 0.5)
    assert storage.advantages.tolist() == [[0, 0]] * 4


def test_mini_batches_hold_every_other_row_once_and_no_reset_step():
    storage = filled()
    storage.compute_returns(torch.tensor([8.0, 8.0]), 0.5, 0.5, normalize_advantage=False)
    batches = list(storage.mini_batch_generator(3, 2))
    assert [batch.observations.shape for batch in batches] == [(2, 2)] * 6
    rows = served(batches[:3])
    assert sorted(rows) == [(0, 0), (0, 1), (1, 0), (2, 1), (3, 0), (3, 1)]
    assert served(batches[3:]) == rows
    for batch in batches:
        for place, (t, env) in enumerate(served([batch])):
            assert batch.actions[place].item() == t + 3 * env
            assert batch.values[place].item() == VALUES[t][env]
            assert batch.advantages[place].item() == ADVANTAGES[t][env]
            assert batch.returns[place].item() == RETURNS[t][env]
            assert batch.old_actions_log_prob[place].item() == -t - env / 2
        assert batch.actions.dtype == torch.int64
        assert {getattr(batch, name).shape for name in ("actions", "values", "returns", "advantages")} == {(2,)}


def test_an_end_in_the_last_step_makes_the_first_of_the_next_rollout_a_reset_step():
    storage = filled()
    storage.clear()
    storage.add(**step_of(0, rewards=np.zeros(2), truncated=np.zeros(2, bool)))
    storage.add(**step_of(0))
    assert storage.reset_steps.tolist() == [[True, True], [False, False]]
    storage.compute_returns(torch.tensor([8.0, 8.0]), 0.5, 0.5, normalize_advantage=False)
    # Truncated in environment 1, at the end of a rollout that is not full: 1 + 8/2 - 1/4.
    assert storage.advantages[:2].tolist() == [[0, 0], [1 + 4 - 0.5, 4.75]]
    assert storage._count_rows() == 2


def test_reset_forgets_it():
    storage = filled()
    storage.reset()
    storage.add(**step_of(0))
    assert storage.reset_steps.tolist() == [[False, False]]


def test_batches_of_a_rollout_without_ends_are_those_of_the_documented_class():
    ours, other = make(), RolloutStorage("rl", 2, 4, TensorDict({"o": torch.zeros(2, 2)}, [2]), [1], seed=3)
    for t in range(4):
        step = step_of(t, terminated=[0, 0], truncated=[0, 0])
        ours.add(**step)
        other.add(**{**step, "observations": {"o": step["observations"]}})
    for storage in (ours, other):
        storage.compute_returns(torch.tensor([8.0, 8.0]), 0.9, 0.8)
    for batch, same in zip(ours.mini_batch_generator(2, 3), other.mini_batch_generator(2, 3), strict=True):
        assert torch.equal(batch.observations, same.observations["o"])
        assert torch.equal(batch.actions, same.actions.squeeze(-1).long())
        for name in ("values", "advantages", "returns", "old_actions_log_prob"):
            assert torch.equal(getattr(batch, name), getattr(same, name).squeeze(-1))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_mode_may_be_gymnasiums_own(mode):
    storage = make(autoreset=mode)
    step = step_of(0, terminated=[True, False])
    storage.add(**step)
    assert storage.reset_steps.tolist() == [[False, False]]
    is_next_step = mode is AutoresetMode.NEXT_STEP
    storage.add(**step_of(1, rewards=[0, 0], terminated=[0, 0]))
    assert storage.reset_steps.tolist()[1] == [is_next_step, is_next_step]


def test_a_full_rollout_refuses_a_step():
    storage = filled()
    with pytest.raises(RolloutFullError, match=r"4 of 4 steps since clear.*raise num_steps"):
        storage.add(**step_of(0))


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(InvalidInputError, match=r"autoreset is 'next'.*NextStep"):
        make(autoreset="next")


def test_dones_are_refused_with_what_to_pass():
    storage = make()
    with pytest.raises(InvalidInputError, match="no extra field 'dones': pass terminated= and truncated="):
        storage.add(**step_of(0), dones=[0, 0])
    assert storage.step == 0


def test_too_many_mini_batches_are_refused_with_the_largest_number():
    storage = filled(autoreset="Disabled")
    storage.compute_returns(torch.zeros(2), 0.5, 0.5)
    with pytest.raises(
        InvalidInputError, match=r"9 mini-batches were asked for; there are 8 rows, enough for at most 8$"
    ):
        next(storage.mini_batch_generator(9))
    with pytest.raises(
        InvalidInputError, match=r"3 mini-batches of 3 rows were asked for; there are 8 rows, enough for at most 2$"
    ):
        next(storage.generate_batches(3, 3))
