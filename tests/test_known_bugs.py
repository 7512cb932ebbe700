"""What has gone wrong in experience storage elsewhere, and must not here. One test for each, named for what broke."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import DecoupledRolloutStorage, RolloutStorage
from rlstore.engine import returns

# Most of these read other fields of batches whose returns and advantages nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages:RuntimeWarning")

ENVS = 2


def row_id(step: int, env: int) -> float:
    return 10.0 * step + env


def step_ids(step: int, envs: int = ENVS) -> torch.Tensor:
    return torch.tensor([row_id(step, env) for env in range(envs)])


def transition(step: int, envs: int = ENVS, **fields) -> RolloutStorage.Transition:
    """A step whose every field tells its (step, env); ``fields`` take the place of some."""
    made = RolloutStorage.Transition()
    ids = step_ids(step, envs)
    made.observations = TensorDict({"policy": torch.stack([ids, ids + 0.5], dim=-1)}, batch_size=[envs])
    made.actions = ids.unsqueeze(-1) + 0.125
    made.rewards, made.dones = ids + 0.25, torch.zeros(envs)
    made.values, made.actions_log_prob = ids.unsqueeze(-1) + 0.375, ids + 0.625
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def rollout(steps: int, envs: int = ENVS, **options) -> RolloutStorage:
    example = TensorDict({"policy": torch.zeros(envs, 2)}, batch_size=[envs])
    return RolloutStorage("rl", envs, steps, example, [1], **options)


def filled(steps: int, envs: int = ENVS, **options) -> RolloutStorage:
    storage = rollout(steps, envs, **options)
    for step in range(steps):
        storage.add_transition(transition(step, envs))
    return storage


def decoupled(steps: int, box: spaces.Box | None = None, **options) -> DecoupledRolloutStorage:
    space = box if box is not None else spaces.Box(-9, 9, (2,))
    return DecoupledRolloutStorage(space, spaces.Discrete(3), "cpu", steps, ENVS, **options)


def add(storage: DecoupledRolloutStorage, step: int, **fields) -> None:
    ids = step_ids(step)
    obs = torch.stack([ids, ids + 0.5], dim=-1)
    sample = {
        "obs": obs,
        "actions": torch.tensor([step % 3, (step + 1) % 3]),
        "rewards": ids + 0.25,
        "terminateds": torch.zeros(ENVS),
        "truncateds": torch.zeros(ENVS),
        "next_obs": obs + 10,
        "log_probs": ids + 0.625,
        "values": ids + 0.375,
        "adv_preds": ids + 0.875,
    }
    storage.add(**{**sample, **fields})


# One rollout of two steps and two environments, gamma = lam = 1/2. Env 0 times out with step 0 in an observation worth
# 10, env 1 really ends there.
#   env 0: A_0 = 1 + 10/2 - 2 = 4 (from V(s_0): 0; from V(s_1), the next episode's: 2), A_1 = 3 + 8/2 - 6 = 1
#   env 1: A_0 = 2 - 4 = -2, A_1 = 4 + 8/2 - 6 = 2
TIME_OUT = [
    {"rewards": [1.0, 2.0], "values": [2.0, 4.0], "terminated": [0, 1], "truncated": [1, 0]},
    {"rewards": [3.0, 4.0], "values": [6.0, 6.0], "terminated": [0, 0], "truncated": [0, 0]},
]
TIME_OUT_RETURNS = [[6.0, 2.0], [7.0, 8.0]]
TIME_OUT_ADVANTAGES = [[4.0, -2.0], [1.0, 2.0]]


def rollout_with_a_time_out(final_values) -> RolloutStorage:
    storage = rollout(2)
    for step, (given, final) in enumerate(zip(TIME_OUT, final_values, strict=True)):
        terminated, truncated = torch.tensor(given["terminated"]), torch.tensor(given["truncated"])
        storage.add_transition(
            transition(
                step,
                rewards=torch.tensor(given["rewards"]),
                values=torch.tensor(given["values"]).unsqueeze(-1),
                dones=terminated | truncated,
                truncated=truncated,
                final_values=None if final is None else torch.tensor(final),
            )
        )
    storage.compute_returns(torch.tensor([8.0, 8.0]), 0.5, 0.5, normalize_advantage=False)
    return storage


def decoupled_with_a_time_out(final_values) -> DecoupledRolloutStorage:
    storage = decoupled(2, discount=0.5, gae_lambda=0.5)
    for step, (given, final) in enumerate(zip(TIME_OUT, final_values, strict=True)):
        add(
            storage,
            step,
            rewards=torch.tensor(given["rewards"]),
            values=torch.tensor(given["values"]),
            terminateds=torch.tensor(given["terminated"]),
            truncateds=torch.tensor(given["truncated"]),
            final_values=None if final is None else torch.tensor(final),
        )
    storage.compute_returns_and_advantages(torch.tensor([8.0, 8.0]))
    return storage


# ------------------------------------------------------------------------------------- 1: n-step windows


def test_n_step_window_stops_at_the_episodes_end_and_at_the_newest_row():
    # One lane, 4 steps, the episode ends with step 1; gamma = 1/2, n = 3, V = 100 everywhere.
    column = {"dtype": torch.float64}
    got = returns.n_step_returns(
        torch.tensor([[1.0], [2.0], [4.0], [8.0]], **column),
        torch.full((4, 1), 100.0, **column),
        torch.tensor([16.0], **column),
        torch.tensor([[0], [1], [0], [0]]),
        gamma=0.5,
        n=3,
    )
    # 1 + 2/2; 2; 4 + 8/2 + 16/4 (two steps, so gamma^2 and not gamma^3); 8 + 16/2 (one step, gamma^1)
    assert got.flatten().tolist() == [2.0, 2.0, 12.0, 16.0]


# ------------------------------------------------------------------------------------- 2 and 3: time-outs


def test_time_out_bootstraps_from_the_final_observation():
    final = [[10.0, math.nan], [math.nan, math.nan]]
    storage = rollout_with_a_time_out(final)
    assert storage.advantages.squeeze(-1).tolist() == TIME_OUT_ADVANTAGES
    assert storage.returns.squeeze(-1).tolist() == TIME_OUT_RETURNS
    assert decoupled_with_a_time_out(final).returns.tolist() == TIME_OUT_RETURNS


def test_time_out_with_no_final_observation_has_no_advantage():
    """Neither V(s_t) nor the next episode's value may stand in for what nobody knows."""
    expected = [[2.0, 2.0], [7.0, 8.0]]  # env 0 at step 0: its own value
    for final in ([None, None], [[math.nan] * 2, [math.nan] * 2]):
        storage = rollout_with_a_time_out(final)
        assert storage.returns.squeeze(-1).tolist() == expected
        assert storage.advantages[0].flatten().tolist() == [0.0, -2.0]
        assert decoupled_with_a_time_out(final).returns.tolist() == expected


def test_final_observations_are_needed_for_ended_rows_only():
    """A simulator may give a value for every environment or only where an episode ended: the others are not read."""
    for others in (math.nan, 1e9, math.inf):
        final = [[10.0, others], [others, others]]
        assert rollout_with_a_time_out(final).returns.squeeze(-1).tolist() == TIME_OUT_RETURNS
        assert decoupled_with_a_time_out(final).returns.tolist() == TIME_OUT_RETURNS


def test_final_values_for_some_steps_only_are_taken():
    assert rollout_with_a_time_out([[10.0, math.nan], None]).returns.squeeze(-1).tolist() == TIME_OUT_RETURNS
    assert decoupled_with_a_time_out([[10.0, math.nan], None]).returns.tolist() == TIME_OUT_RETURNS


def test_truncation_does_not_let_the_next_episodes_advantage_through():
    """Doubling the rewards after the cut changes nothing before it."""
    for make in (rollout_with_a_time_out, decoupled_with_a_time_out):
        storage = make([[10.0, math.nan], [math.nan, math.nan]])
        before = storage.returns[0].clone()
        storage.rewards[1] *= 100
        if isinstance(storage, RolloutStorage):
            storage.compute_returns(torch.tensor([8.0, 8.0]), 0.5, 0.5)
        else:
            storage.compute_returns_and_advantages(torch.tensor([8.0, 8.0]))
        assert storage.returns[0].tolist() == before.tolist()
        assert storage.returns[1].tolist() != before.tolist()


# ------------------------------------------------------------------------------------- 12 and 13: memory


def test_next_observations_are_not_stored_twice():
    steps, box = 50, spaces.Box(0, 255, (8, 8, 3), np.uint8)
    storage = decoupled(steps, box)
    one_step = ENVS * 8 * 8 * 3
    assert storage.obs.nbytes == (steps + 1) * one_step
    small = 4 * ENVS * (10 * steps + 2)  # ten float32 scalars a step, and one row more for each of the two flags
    assert storage._ring.nbytes == storage.obs.nbytes + small


def test_bytes_do_not_become_floats():
    """Each leaf keeps its dtype in memory, and in the batches of a storage that does not say otherwise."""
    leaves = {
        "image": torch.tensor([[250, 251], [252, 253]], dtype=torch.uint8),
        "half": torch.tensor([[0.5], [1.5]], dtype=torch.float16),
        "count": torch.tensor([[2**40], [2**41 + 1]]),
        "double": torch.tensor([[0.1], [0.2]], dtype=torch.float64),
        "mark": torch.tensor([[True], [False]]),
    }
    example = TensorDict(leaves, batch_size=[ENVS])
    storage = RolloutStorage("rl", ENVS, 1, example, [1])
    storage.add_transition(transition(0, observations=example))
    (batch,) = storage.mini_batch_generator(1, 1)
    order = batch.actions.argsort(dim=0).flatten()
    for name, leaf in leaves.items():
        assert storage.observations[name].dtype == leaf.dtype
        assert batch.observations[name].dtype == leaf.dtype
        assert batch.observations[name][order].tolist() == leaf.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.float16, np.int32, np.uint16])
def test_observations_are_cast_on_reading_and_not_before(dtype):
    storage = decoupled(1, spaces.Box(0, 200, (2,), dtype))
    obs = np.array([[1, 2], [3, 4]], dtype=dtype)
    add(storage, 0, obs=obs, next_obs=obs + np.array(10, dtype=dtype))
    storage.compute_returns_and_advantages(torch.zeros(ENVS))
    assert storage.obs.element_size() == np.dtype(dtype).itemsize
    assert storage.obs.tolist() == [obs.tolist(), (obs + 10).tolist()]
    (batch,) = storage.sample(1)
    assert batch.obs.dtype == torch.float32
    assert sorted(batch.obs.tolist()) == [[1.0, 2.0], [3.0, 4.0]]


# ------------------------------------------------------------------------------------- 14: nothing before an end


def test_steps_are_served_before_any_episode_ends():
    storage = rollout(8)
    for step in range(3):
        storage.add_transition(transition(step))
    served = [
        row for batch in storage.mini_batch_generator(2, 1) for row in batch.observations["policy"][:, 0].tolist()
    ]
    assert sorted(served) == [row_id(step, env) for step in range(3) for env in range(ENVS)]


# ------------------------------------------------------------------------------------- 15, 16 and 18: saving

SAVES = {"pickle": lambda storage: pickle.loads(pickle.dumps(storage)), "copy": copy.deepcopy}


@pytest.mark.parametrize("save", SAVES)
def test_the_data_are_not_missing_after_a_resume(save):
    storage = rollout(4)
    for step in range(2):
        storage.add_transition(transition(step))
    resumed = SAVES[save](storage)
    for step in range(2, 4):
        resumed.add_transition(transition(step))
    assert resumed.observations["policy"][..., 0].tolist() == [step_ids(step).tolist() for step in range(4)]
    with pytest.raises(OverflowError):
        resumed.add_transition(transition(4))


@pytest.mark.parametrize("save", SAVES)
def test_counters_and_randomness_are_not_lost_in_a_resume(save):
    storage = filled(6, seed=3)
    list(storage.mini_batch_generator(3, 1))  # some randomness is already used up
    resumed = SAVES[save](storage)
    assert resumed.step == storage.step == 6
    orders = [
        [batch.actions.flatten().tolist() for batch in either.mini_batch_generator(3, 2, reshuffle=True)]
        for either in (storage, resumed)
    ]
    assert orders[0] == orders[1]


def test_a_saved_storage_is_no_larger_than_its_data():
    storage = decoupled(64, spaces.Box(0, 255, (16, 16, 3), np.uint8))
    assert len(pickle.dumps(storage)) < 1.1 * storage._ring.nbytes + 20_000


# ------------------------------------------------------------------------------------- 22: recurrent state


def recurrent_rollout(dones) -> RolloutStorage:
    """An LSTM actor of two layers and a GRU critic, whose states tell step, layer, environment and place."""
    storage = rollout(len(dones))
    for step, ends in enumerate(dones):
        state = torch.stack([torch.stack([step_ids(step), step_ids(step) + 0.5], -1) + layer / 8 for layer in range(2)])
        storage.add_transition(
            transition(step, dones=torch.tensor(ends), hidden_states=((state, -state), state[:1] + 100))
        )
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
    return storage


def test_recurrent_state_is_the_one_at_each_segments_start():
    # Env 0: steps 0-1, 2-3. Env 1: steps 0-3; its end with the last step begins no segment.
    storage = recurrent_rollout([[0, 0], [1, 0], [0, 0], [0, 1]])
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    starts = [row_id(0, 0), row_id(2, 0), row_id(0, 1)]
    (hidden, cell), critic = batch.hidden_states
    assert tuple(hidden.shape) == (2, 3, 2)  # [layers, trajectories, hidden]
    for layer in range(2):
        assert hidden[layer, :, 0].tolist() == [start + layer / 8 for start in starts]
        assert hidden[layer, :, 1].tolist() == [start + 0.5 + layer / 8 for start in starts]
    assert cell.tolist() == (-hidden).tolist()
    assert critic.tolist() == (hidden[:1] + 100).tolist()
    assert hidden.is_contiguous()


def test_recurrent_state_is_neither_reset_nor_stepped_within_a_segment():
    """Unpadded, the observations of a batch are each environment's steps in order, each once."""
    storage = recurrent_rollout([[0, 0], [1, 0], [0, 0], [0, 1]])
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    firsts = batch.observations["policy"][..., 0].t()[batch.masks.t()].tolist()
    assert firsts == [row_id(step, env) for env in range(ENVS) for step in range(4)]
    assert batch.masks.sum(0).tolist() == [2, 2, 4]


def test_a_state_that_is_not_given_does_not_become_another_steps():
    storage = rollout(2)
    state = step_ids(0).reshape(1, ENVS, 1) + 1
    storage.add_transition(transition(0, hidden_states=(state, None)))
    storage.add_transition(transition(1, dones=torch.ones(ENVS)))
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert batch.hidden_states[0].tolist() == state.tolist()
    assert batch.hidden_states[1] is None


def test_a_state_with_layers_and_environments_the_wrong_way_round_is_refused():
    storage = rollout(2, envs=3)
    good = torch.zeros(1, 3, 4)
    storage.add_transition(transition(0, envs=3, hidden_states=(good, None)))
    with pytest.raises(ValueError, match=r"hidden_states\[0\] is \(3, 1, 4\)"):
        storage.add_transition(transition(1, envs=3, hidden_states=(good.transpose(0, 1), None)))
    assert storage.step == 1


# ------------------------------------------------------------------------------------- 23: ragged data

CUT = {
    "observations": lambda: TensorDict({"policy": torch.zeros(1, 2)}, batch_size=[1]),
    "actions": lambda: torch.zeros(1, 1),
    "rewards": lambda: torch.zeros(3),
    "dones": lambda: torch.zeros(1),
    "values": lambda: torch.zeros(3, 1),
    "actions_log_prob": lambda: torch.zeros(ENVS, 2),
}


@pytest.mark.parametrize("name", CUT)
def test_a_step_of_the_wrong_length_is_refused_and_not_cut(name):
    storage = rollout(3)
    storage.add_transition(transition(0))
    before = storage.get_all_buffer_data()
    with pytest.raises(ValueError, match=f"{name}.*Nothing was written"):
        storage.add_transition(transition(1, **{name: CUT[name]()}))
    assert storage.step == 1
    for key, value in storage.get_all_buffer_data().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True, msg=key)


def test_columns_of_different_lengths_are_refused_and_not_cut():
    storage = filled(3)
    data = storage.get_all_buffer_data()
    ragged = {**data, "rewards": data["rewards"][:2]}
    with pytest.raises(ValueError, match=r"rewards.*Nothing was changed"):
        storage.insert_data_slice(ragged)
    assert storage.step == 3
    assert storage.rewards.flatten().tolist() == data["rewards"].flatten().tolist()


def test_a_rollout_that_was_not_filled_keeps_its_length():
    """What lies beyond the rows written since clear() is an old rollout's, and is not served."""
    storage = filled(6)
    storage.clear()
    for step in range(4):
        storage.add_transition(transition(100 + step))
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
    flat = [row for batch in storage.mini_batch_generator(1, 1) for row in batch.observations["policy"][:, 0].tolist()]
    assert sorted(flat) == [row_id(100 + step, env) for step in range(4) for env in range(ENVS)]
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert tuple(batch.masks.shape) == (4, ENVS)
    assert len(storage) == 8


# ------------------------------------------------------------------------------------- 25: fixed shapes


def test_every_batch_has_the_same_shape():
    """A last batch that is shorter makes a compiled learner compile again."""
    storage = filled(7, envs=3)
    shapes = {tuple(batch.actions.shape) for batch in storage.mini_batch_generator(4, 2)}
    assert shapes == {(5, 1)}
    daac = decoupled(7)
    for step in range(7):
        add(daac, step)
    daac.compute_returns_and_advantages(torch.zeros(ENVS))
    assert {tuple(batch.returns.shape) for batch in daac.sample(4)} == {(3, 1)}
