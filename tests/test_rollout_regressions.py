"""What once went wrong in rollouts, each named for what broke."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import DecoupledRolloutStorage, RolloutStorage

ENVS, STEPS = 4, 4


def sample(t: int, following: float = 0.0) -> dict:
    ids = torch.arange(ENVS) + 10.0 * t
    return {
        "observations": ids[:, None].clone(),
        "actions": ids[:, None].clone(),
        "rewards": ids,
        "terminated": torch.zeros(ENVS),
        "truncated": torch.zeros(ENVS),
        "next_observations": torch.full((ENVS, 1), following),
        "values": torch.zeros(ENVS),
        "log_probs": torch.zeros(ENVS),
    }


def filled(following: float = 0.0) -> RolloutStorage:
    storage = RolloutStorage.create_factory(STEPS)()
    for t in range(STEPS):
        storage.insert_transition(sample(t, following))
    return storage


def transition(storage: RolloutStorage) -> RolloutStorage.Transition:
    made = RolloutStorage.Transition()
    made.observations, made.actions = torch.zeros(ENVS, 1), torch.zeros(ENVS, 1)
    made.rewards, made.dones = torch.zeros(ENVS), torch.zeros(ENVS)
    made.values, made.actions_log_prob = torch.zeros(ENVS, 1), torch.zeros(ENVS)
    return made


def test_nested_lists_in_a_data_slice_are_not_transposed():
    storage = filled()
    data = storage.get_all_buffer_data()
    data["rewards"] = data["rewards"].squeeze(-1).tolist()
    storage.insert_data_slice(data)
    assert storage.rewards.squeeze(-1).tolist() == [[10.0 * t + env for env in range(ENVS)] for t in range(STEPS)]


def test_one_tensor_for_two_attributes_does_not_mix_their_values():
    storage = filled()
    storage.advantages = storage.returns
    storage.compute_returns(torch.zeros(ENVS), 0.0, 0.0)
    assert torch.equal(storage.returns, storage.rewards)
    assert abs(float(storage.advantages.mean())) < 1e-5


def test_last_observations_of_another_rollout_are_not_bootstrapped_from():
    class Critic:
        def get_values(self, observations):
            return observations

    storage = filled(following=100.0)
    storage.clear()
    for _ in range(STEPS):
        storage.add_transition(transition(storage))
    with pytest.raises(ValueError, match="next_observations"):
        storage.before_gradients(Critic(), None)


def test_a_wrong_tensor_put_into_the_observations_is_refused_once_and_not_for_ever():
    obs = TensorDict({"policy": torch.zeros(ENVS, 1)}, batch_size=[ENVS])
    storage = RolloutStorage("rl", ENVS, STEPS, obs, [1])
    step = transition(storage)
    step.observations = obs
    storage.observations["policy"] = torch.zeros(STEPS, ENVS, 5)
    with pytest.raises(ValueError, match="policy"):
        storage.add_transition(step)
    storage.add_transition(step)
    assert storage.step == 1
    assert storage.observations["policy"].shape == (STEPS, ENVS, 1)


def test_rows_are_not_half_written_after_a_rebinding_in_inference_mode():
    storage = filled()
    with torch.inference_mode():
        storage.rewards = storage.rewards * 2
    storage.rewards[0] = 1.0  # raises for an inference tensor
    assert storage.rewards[1].flatten().tolist() == [20.0, 22.0, 24.0, 26.0]


def test_a_number_of_environments_that_was_given_is_not_ignored():
    storage = DecoupledRolloutStorage.create_factory(STEPS, num_envs=16)()
    with pytest.raises(ValueError, match="16"):
        storage.insert_transition({**sample(0), "adv_preds": torch.zeros(ENVS)})


def test_attributes_that_hold_several_tensors_say_why_they_cannot_become_none():
    storage = filled()
    step = transition(storage)
    step.distribution_params = (torch.zeros(ENVS, 1),)
    step.hidden_states = (torch.zeros(1, ENVS, 2), None)
    storage.clear()
    storage.add_transition(step)
    for name in ("distribution_params", "saved_hidden_state_a"):
        with pytest.raises(ValueError, match=name):
            setattr(storage, name, None)
    storage.saved_hidden_state_a.append(torch.zeros(1))
    with pytest.raises(ValueError, match="saved_hidden_state_a"):
        storage.add_transition(step)
    storage.add_transition(step)
    assert storage.step == 2


@pytest.mark.parametrize("bad", [None, {"observations": 1}, 5])
def test_what_is_no_transition_is_refused(bad):
    storage = filled()
    storage.clear()
    with pytest.raises(ValueError, match="Transition"):
        storage.add_transition(bad)
    assert storage.step == 0


def test_observations_without_any_part_are_refused():
    with pytest.raises(ValueError, match="observations"):
        RolloutStorage("rl", ENVS, STEPS, TensorDict({}, batch_size=[ENVS]), [1])


def test_flags_before_of_the_wrong_shape_are_refused():
    storage = DecoupledRolloutStorage(spaces.Box(0, 1, (1,)), spaces.Discrete(2), num_steps=1, num_envs=2)
    pair = np.zeros(2, dtype=np.float32)
    storage.add(pair[:, None], pair, pair, pair, pair, pair[:, None], pair, pair, pair)
    data = storage.get_all_buffer_data()
    data["flags_before"] = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="flags_before"):
        storage.insert_data_slice(data)
    assert len(storage) == 2
