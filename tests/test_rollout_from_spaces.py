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


# ---------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("final_value", "final_values"),
        ("hidden_state", "hidden_states"),
        ("info", "infos"),
        ("log_prob", "log_probs"),
        ("reward", "rewards"),
        ("obs", "observations"),
        ("cost", "costs"),
    ],
)
def test_an_argument_that_add_does_not_take_is_refused_with_those_that_it_takes(name, meant):
    storage = make(extra_fields={"costs": ((), torch.float32)})
    words = (
        rf"cannot hold \['{name}'\]; it takes \['observations', .*'infos', 'final_values', .*'hidden_states', 'costs'\]"
    )
    with pytest.raises(InvalidInputError, match=rf"{words}\. Did you mean '{meant}'\? Nothing was written\.$"):
        storage.add(**step_of(0), costs=[0, 0], **{name: [0, 0]})
    assert storage.step == 0


@pytest.mark.parametrize("name", ["next_observations", "next_obs"])
def test_next_observations_are_refused_as_what_rollouts_need_not(name):
    storage = make()
    with pytest.raises(
        InvalidInputError, match=f"add.. takes no '{name}': rollouts need none; leave it out. Nothing was"
    ):
        storage.add(**step_of(0), **{name: np.zeros((2, 2), np.float32)})
    assert storage.step == 0


def test_an_extra_field_that_is_missing_is_named():
    storage = make(extra_fields={"costs": ((), torch.float32)})
    with pytest.raises(InvalidInputError, match=r"a step for RolloutStorage needs \['costs'\]"):
        storage.add(**step_of(0))
    with pytest.raises(InvalidInputError, match=r"costs is missing \(None\)"):
        storage.add(**step_of(0), costs=None)


def test_errors_have_the_names_of_the_arguments():
    storage, state = make(), torch.zeros(1, 2, 3)
    with pytest.raises(InvalidInputError, match=r"^log_probs is \(3,\) float64; this storage holds \(2,\)"):
        storage.add(**step_of(0, log_probs=np.zeros(3)))
    with pytest.raises(
        InvalidInputError, match=r"^hidden_states\[1\]\[0\] is \(1, 3\); it must be \[layers, envs, hidden\]"
    ):
        storage.add(**step_of(0), hidden_states=(state, (state[:, 0], state)))
    storage.add(**step_of(0), hidden_states=(state, (state, state)))
    with pytest.raises(InvalidInputError, match=r"^hidden_states\[0\] is \(1, 2, 4\) .* holds \(1, 2, 3\)"):
        storage.add(**step_of(1), hidden_states=(torch.zeros(1, 2, 4), (state, state)))
    with pytest.raises(InvalidInputError, match=r"^hidden_states\[1\] has 1 tensors; this storage holds 2 of them"):
        storage.add(**step_of(1), hidden_states=(state, state))
    assert storage.step == 1
    assert storage.actions_log_prob.shape == (4, 2)  # the attribute keeps the name that rsl_rl gives it


# ---------------------------------------------------------------------------------------------------- hidden states


def state_of(t):
    """The state of environment e before step t is t + e / 2."""
    return torch.tensor([t, t + 0.5]).view(1, 2, 1)


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize(
    ("given", "later", "side"),
    [
        (("s", None), (None, None), 0),
        (("s", "s"), ("s", None), 1),
        (("s", "s"), (None, None), 0),
        (("s", "s"), (None, "s"), 0),
    ],
)
def test_hidden_states_that_earlier_steps_had_are_missed(clears, given, later, side):
    storage = make()
    given, later = (tuple(s and state_of(7.0) for s in states) for states in (given, later))
    storage.add(**step_of(0, truncated=[0, 0]), hidden_states=given)
    if clears:
        storage.clear()
    before = storage.get_all_buffer_data()
    words = (
        rf"^hidden_states were given in earlier steps; missing now. hidden_states\[{side}\] is None.*Nothing was writ"
    )
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=words):
            storage.add(**step_of(1), hidden_states=later)
    assert storage.step == (0 if clears else 1)
    assert storage.get_all_buffer_data().keys() == before.keys()
    storage.add(**step_of(1), hidden_states=given)
    storage.reset()  # which forgets them
    storage.add(**step_of(0))
    assert storage.saved_hidden_state_a is None


def test_a_transition_without_hidden_states_leaves_those_that_were_saved_in_its_row():
    storage = make()
    storage.add(**step_of(0, truncated=[0, 0]), hidden_states=(state_of(7.0), None))
    storage.clear()
    transition = RolloutStorage.Transition()
    for name, value in step_of(0).items():
        setattr(transition, {"log_probs": "actions_log_prob"}.get(name, name), value)
    transition.dones, transition.truncated = np.zeros(2), None
    storage.add_transition(transition)
    assert storage.saved_hidden_state_a[0][0].flatten().tolist() == [7.0, 7.5]


# ---------------------------------------------------------------------------------------------------- used rollouts


@pytest.mark.parametrize("steps", [2, 4])
def test_the_first_step_after_the_update_begins_a_new_rollout(steps):
    storage = make()
    for t in range(steps):
        storage.add(**step_of(t))
    storage.compute_returns(torch.zeros(2), 0.5, 0.5)
    storage.after_gradients()
    before = storage.get_all_buffer_data()
    with pytest.raises(InvalidInputError, match="log_probs"):
        storage.add(**step_of(0, rewards=[0, 0], truncated=[0, 0], log_probs=np.zeros(3)))
    after = storage.get_all_buffer_data()
    assert len(storage) == 2 * steps  # what was refused has begun nothing
    assert all(torch.equal(after[name], value) for name, value in before.items())
    due = storage.dones[steps - 1].bool()
    values = np.array([5, 6])
    storage.add(**step_of(0, rewards=np.array([1, 1]) * ~due.numpy(), truncated=[0, 0], values=values))
    assert storage.step == 1
    assert storage.values[0].tolist() == [5, 6]
    assert storage.reset_steps.tolist() == [due.tolist()]
    assert storage.returns.isnan().all()
    storage.add(**step_of(1, truncated=[0, 0]))
    assert storage.step == 2


def test_distribution_parameters_may_come_with_the_first_step_after_the_update():
    storage, mean = filled(), torch.tensor([[1.0], [2.0]])
    with pytest.raises(RolloutFullError):
        storage.add(**step_of(0), distribution_params=(mean,))
    storage.after_gradients()
    with pytest.raises(InvalidInputError, match=r"distribution_params\[0\] is \(3, 1\)"):
        storage.add(**step_of(0, rewards=[0, 0], truncated=[0, 0]), distribution_params=(torch.zeros(3, 1),))
    assert storage.step == 4
    storage.add(**step_of(0, rewards=[0, 0], truncated=[0, 0]), distribution_params=(mean,))
    assert storage.distribution_params[0][0].tolist() == mean.tolist()
    assert storage.step == 1


# ---------------------------------------------------------------------------------------------------- resets by hand


def test_environments_that_were_reset_by_hand_are_explained_and_made_up_for():
    storage = filled()  # both environments ended in the last step
    storage.clear()
    words = (
        r"If you have called envs\.reset\(\) since, call storage\.reset\(\) too, after the update and in place of clear"
    )
    with pytest.raises(InvalidInputError, match=rf"^environment 0 ended .*It has the reward 1\.0.* {words}"):
        storage.add(**step_of(0, truncated=[0, 0]))
    storage.reset()
    storage.add(**step_of(0))
    assert storage.reset_steps.tolist() == [[False, False]]


# ---------------------------------------------------------------------------------------------------- recurrent batches


def recurrent_of(envs, made_by_spaces=True):
    """Two steps of some environments, whose values are their numbers."""
    numbers, flags = torch.arange(float(envs)), torch.zeros(envs)
    if made_by_spaces:
        storage = RolloutStorage.from_spaces(spaces.Box(-9, 9, (1,)), spaces.Discrete(7), envs, 2)
    else:
        storage = RolloutStorage("rl", envs, 2, TensorDict({"o": numbers.view(-1, 1)}, [envs]), [1])
    seen = numbers.view(-1, 1) if made_by_spaces else {"o": numbers.view(-1, 1)}
    for _ in range(2):
        actions = flags.long() if made_by_spaces else flags.view(-1, 1)
        step = {"observations": seen, "actions": actions, "rewards": flags, "values": numbers, "log_probs": flags}
        storage.add(**step, terminated=flags, truncated=flags)
    storage.compute_returns(flags, 0.5, 0.5)
    return storage


def envs_of(batches):
    return [batch.values[0].flatten().tolist() for batch in batches]


@pytest.mark.parametrize(
    ("envs", "count", "words"),
    [
        (
            6,
            4,
            r"6 environments .* 4 mini-batches: environments 4 to 5 are in none of them.* 3 or 6 mini-batches would",
        ),
        (7, 2, r"7 environments .* 2 mini-batches: environment 6 is in none of them.* 1 or 7 mini-batches would"),
    ],
)
def test_environments_that_recurrent_batches_leave_out_are_warned_of_once(envs, count, words):
    storage, size = recurrent_of(envs), envs // count
    with pytest.warns(RuntimeWarning, match=words) as caught:
        batches = list(storage.recurrent_mini_batch_generator(count, 2))
    assert [warning.filename for warning in caught] == [__file__]
    assert envs_of(batches) == [list(range(i * size, (i + 1) * size)) for i in range(count)] * 2
    assert len(list(storage.generate_batches(count, None, 2, recurrent=True))) == 2 * count  # and not again


def test_no_environment_is_left_out_by_a_divisor_and_the_interface_of_rsl_rl_keeps_quiet():
    storage = recurrent_of(6)
    for count in (1, 2, 3, 6):
        served = envs_of(storage.recurrent_mini_batch_generator(count, 1))
        assert [env for envs in served for env in envs] == list(range(6))
    assert envs_of(recurrent_of(6, made_by_spaces=False).recurrent_mini_batch_generator(4, 1)) == [[0], [1], [2], [3]]
