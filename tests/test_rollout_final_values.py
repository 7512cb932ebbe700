"""RolloutStorage.from_spaces: final values from a critic, fields of all kinds, copies on disk, and what is refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import InvalidInputError, RolloutStorage, Storage

BOX, DISCRETE = spaces.Box(-100.0, 100.0, (2,), np.float32), spaces.Discrete(7)
NESTED = spaces.Dict({"pole": BOX, "count": spaces.Discrete(1000)})
FLAGS = {"terminated": [False] * 3, "truncated": [False] * 3}


def make(space=BOX, mode="SameStep", num_steps=3, **options):
    return RolloutStorage.from_spaces(space, DISCRETE, 3, num_steps, autoreset=mode, seed=0, **options)


def step(**changed):
    given = {
        "observations": np.arange(6, dtype=np.float32).reshape(3, 2),
        "actions": [0, 1, 2],
        "rewards": [1.0, 2.0, 3.0],
        **FLAGS,
        "values": [0.5, 0.25, 0.125],
        "log_probs": [-1.0, -2.0, -3.0],
    }
    return {**given, **changed}


def listed(*entries):
    """An object array with one entry for each environment, as Gymnasium gives it."""
    array = np.empty(len(entries), dtype=object)
    array[:] = entries
    return array


def advantages(storage):
    storage.compute_returns(torch.tensor([16.0, 16.0, 16.0]), 0.5, 0.5, normalize_advantage=False)
    return storage.advantages[: storage.step].tolist()


class Critic:
    """Ten times the first number of an observation; remembers what it was asked."""

    def __init__(self, column=False):
        self.column, self.asked = column, []

    def __call__(self, observations):
        self.asked.append(observations)
        assert not torch.is_grad_enabled()
        values = 10 * (observations["pole"] if isinstance(observations, TensorDict) else observations)[:, 0]
        return values.unsqueeze(1) if self.column else values


# ---------------------------------------------------------------------------------------------------- critics


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
def test_a_critic_is_asked_about_final_observations_of_truncated_episodes(column, key):
    critic = Critic(column)
    storage = make(critic=critic)
    finals = listed(np.array([7, 7], np.float32), np.array([8, 8], np.float32), np.array([9, 9], np.float32))
    storage.add(**step(terminated=[True, False, True], truncated=[False, True, True], infos={key: finals}))
    assert [asked.tolist() for asked in critic.asked] == [[[8, 8]]]
    assert advantages(storage) == [[1 - 0.5, 2 + 80 / 2 - 0.25, 3 - 0.125]]
    storage.add(**step(infos={}))
    assert len(critic.asked) == 1


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_final_observations_may_be_one_array_of_all_environments(mode):
    storage = make(mode=mode, critic=Critic())
    finals = np.array([[7, 7], [8, 8], [9, 9]], np.float32)
    storage.add(**step(truncated=[True, False, True], infos={"final_obs": finals}))
    assert advantages(storage) == [[1 + 35 - 0.5, 2 + 8 - 0.25, 3 + 45 - 0.125]]


def test_a_critic_gets_nested_observations_as_batches_have_them():
    critic = Critic()
    storage = make(NESTED, critic=critic)
    observations = {"pole": np.ones((3, 2), np.float32), "count": np.arange(3)}
    final = {"pole": np.array([8, 8], np.float32), "count": np.int64(4)}
    storage.add(
        **step(
            observations=observations, truncated=[False, True, False], infos={"final_obs": listed(None, final, None)}
        )
    )
    assert critic.asked[0].batch_size == (1,)
    assert critic.asked[0]["count"].tolist() == [4]
    assert advantages(storage)[0][1] == 2 + 40 - 0.25


def test_final_values_that_are_given_are_taken_and_unknown_ones_are_neutral():
    critic = Critic()
    storage = make(critic=critic)
    storage.add(**step(truncated=[True, True, False], final_values=[4.0, float("nan"), 4.0]))
    assert critic.asked == []
    assert advantages(storage) == [[1 + 2 - 0.5, 0, 3 + 8 - 0.125]]


def test_without_a_critic_the_advantage_of_a_truncated_step_is_0():
    storage = make()
    storage.add(**step(truncated=[True, False, False], infos={"final_obs": np.ones((3, 2))}))
    assert advantages(storage) == [[0, 2 + 8 - 0.25, 3 + 8 - 0.125]]


def test_insert_transition_asks_the_critic_too():
    storage = make(critic=Critic())
    sample = step(truncated=[False, True, False], final_observations=listed(None, np.array([8, 8], np.float32), None))
    storage.insert_transition(sample)
    assert advantages(storage)[0][1] == 2 + 40 - 0.25
    with pytest.raises(InvalidInputError, match=r"cannot hold.*final_observations"):
        make(mode="NextStep").insert_transition(sample)


def test_a_critic_is_shared_by_copies_and_not_saved(tmp_path):
    critic = Critic()
    storage = make(critic=critic)
    storage.add(**step())
    storage.save(tmp_path / "saved")
    assert copy.deepcopy(storage).critic is critic
    loaded = Storage.load(tmp_path / "saved")
    assert loaded.critic is pickle.loads(pickle.dumps(storage)).critic is None
    loaded.critic = critic
    loaded.add(**step(truncated=[True, False, False], infos={"final_obs": np.full((3, 2), 8.0)}))
    assert advantages(loaded)[1][0] == 1 + 40 - 0.5


# ---------------------------------------------------------------------------------------------------- fields


def test_dict_observations_are_served_as_a_tensordict_and_tuples_as_a_tuple():
    storage = make(NESTED)
    storage.add(**step(observations={"pole": np.full((3, 2), 5, np.float32), "count": [10, 20, 30]}))
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    (batch,) = storage.mini_batch_generator(1, 1)
    assert isinstance(batch.observations, TensorDict)
    assert batch.observations.batch_size == (3,)
    assert sorted(batch.observations["count"].tolist()) == [10, 20, 30]
    storage = make(spaces.Tuple([BOX, spaces.Discrete(1000)]))
    storage.add(**step(observations=(np.full((3, 2), 5, np.float32), [10, 20, 30])))
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    (batch,) = storage.mini_batch_generator(1, 1)
    assert isinstance(batch.observations, tuple)
    assert sorted(batch.observations[1].tolist()) == [10, 20, 30]


@pytest.mark.parametrize(
    ("space", "actions", "dtype"),
    [
        (spaces.Discrete(3, start=5), [5, 6, 7], torch.int64),
        (spaces.Box(-1, 1, (2,), np.float32), [[0.5, 0], [1, 0], [-1, 0.25]], torch.float32),
        (spaces.Box(-1, 1, (), np.float64), [0.1, 0.2, 0.3], torch.float64),
        (spaces.MultiDiscrete([2, 9]), [[0, 8], [1, 3], [0, 0]], torch.int64),
        (spaces.MultiBinary(2), [[0, 1], [1, 1], [0, 0]], torch.int8),
    ],
)
def test_actions_are_those_of_their_space(space, actions, dtype, tmp_path):
    storage = RolloutStorage.from_spaces(BOX, space, 3, 2, seed=0)
    storage.add(**step(actions=np.array(actions, dtype=space.dtype)))
    storage.save(tmp_path / "saved")
    for one in (storage, Storage.load(tmp_path / "saved")):
        one.compute_returns(torch.zeros(3), 0.9, 0.9)
        (batch,) = one.mini_batch_generator(1, 1)
        assert batch.actions.dtype == dtype
        assert sorted(batch.actions.tolist()) == sorted(actions)
        if dtype == torch.int64:
            with pytest.raises(InvalidInputError, match="whole number from"):
                one.add(**step(actions=np.array(actions) + 4))


def test_extra_fields_are_keywords_of_add_and_attributes_of_batches(tmp_path):
    storage = make(mode="NextStep", extra_fields={"costs": ((), torch.float32), "task": ((2,), torch.int64)})
    tasks = np.arange(6).reshape(3, 2)
    storage.add(**step(costs=[1.0, 2.0, 3.0], task=tasks, terminated=[False, True, False]))
    storage.add(**step(costs=[4.0, 5.0, 6.0], task=tasks + 6, rewards=[1.0, 0.0, 1.0]))
    storage.save(tmp_path / "saved")
    for one in (storage, Storage.load(tmp_path / "saved")):
        one.compute_returns(torch.zeros(3), 0.9, 0.9)
        (batch,) = one.mini_batch_generator(1, 1)
        assert sorted(zip(batch.costs.tolist(), batch.task[:, 0].tolist(), strict=True)) == [
            (1, 0), (2, 2), (3, 4), (4, 6), (6, 10)
        ]  # fmt: skip
    with pytest.raises(InvalidInputError, match=r"needs.*'task'"):
        storage.add(**step(costs=[1.0, 2.0, 3.0]))
    with pytest.raises(InvalidInputError, match="which RolloutStorage uses itself"):
        make(mode="NextStep", extra_fields={"reset_steps": ((), torch.float32)})


def test_distribution_params_and_the_ten_methods():
    storage = make(mode="NextStep")
    params = (np.array([[0.5, 1], [2, 3], [4, 5]], np.float32),)
    storage.add(**step(distribution_params=params, terminated=[True, False, False]))
    storage.add(**step(distribution_params=params, rewards=[0.0, 1.0, 1.0]))
    data = storage.get_all_buffer_data()
    assert data["reset_steps"].squeeze(-1).tolist() == [[False] * 3, [True, False, False]]
    assert {data[name].shape for name in ("rewards", "values", "terminated", "returns")} == {(2, 3, 1)}
    assert data["actions"].shape == (2, 3)
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    (batch,) = storage.generate_batches(1)
    assert sorted(batch["rows"].tolist()) == [0, 1, 2, 4, 5]
    assert (batch["actions"].shape, batch["advantages"].shape) == ((5,), (5, 1))
    assert batch["distribution_params"][0].shape == (5, 2)


def test_a_resized_storage_still_knows_where_episodes_ended():
    storage = make(mode="NextStep")
    storage.add(**step(truncated=[False, False, True]))
    storage.clear()
    storage.update_storage_parameter("num_transitions_per_env", 5)
    storage.add(**step(rewards=[1.0, 1.0, 0.0]))
    assert storage.reset_steps.tolist() == [[False, False, True]]
    assert storage.get_all_buffer_data()["reset_steps"].flatten().tolist() == [False, False, True]


def test_what_follows_a_save_in_the_middle_is_the_same(tmp_path):
    storage = make(mode="NextStep", journal=tmp_path / "journal")
    storage.add(**step(terminated=[True, False, False]))
    storage.journal.commit()
    loaded = Storage.load(tmp_path / "journal")
    for one in (storage, loaded):
        with pytest.raises(InvalidInputError, match="environment 0 ended its episode in the step before"):
            one.add(**step())
        one.add(**step(rewards=[0.0, 1.0, 1.0]))
        one.compute_returns(torch.zeros(3), 0.9, 0.9)
    batches = [list(one.mini_batch_generator(2, 1)) for one in (storage, loaded)]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.observations, other.observations)
        assert torch.equal(one.advantages, other.advantages)
    storage.journal.close()


def test_old_names_of_the_documented_class_still_do():
    """add() on a storage of the documented constructor: scalars keep their axis."""
    storage = RolloutStorage("rl", 3, 2, TensorDict({"policy": torch.zeros(3, 2)}, [3]), [1], seed=0)
    storage.add(**step(observations={"policy": np.ones((3, 2), np.float32)}, truncated=[True, False, False]))
    assert storage.actions.tolist()[0] == [[0], [1], [2]]
    assert storage.dones.tolist()[0] == [[1], [0], [0]]
    assert [a[0] for a in advantages(storage)[0]] == [0, 2 + 8 - 0.25, 3 + 8 - 0.125]
    assert not storage.reset_steps.any()
    distilled = RolloutStorage("distillation", 3, 2, TensorDict({"policy": torch.zeros(3, 2)}, [3]), [1])
    with pytest.raises(InvalidInputError, match="only for training_type 'rl'"):
        distilled.add(**step(observations={"policy": np.ones((3, 2), np.float32)}))


# ---------------------------------------------------------------------------------------------------- refusals


def all_of(storage):
    """Everything that a refused call must leave alone."""
    return {name: block.clone() for name, block in storage._ring.blocks.items()}, storage.step, dict(storage._late)


ENDED = {"terminated": [True, False, False]}
WRONG = {
    "a reward": (step(), "has the reward 1.0, and that of a reset step is 0.*SameStep.*Disabled"),
    "an end": (step(rewards=[0.0, 1.0, 1.0], truncated=[True, True, False]), "ends an episode.*SameStep"),
    "a final observation": (step(rewards=[0.0, 1.0, 1.0], infos={"final_obs": np.ones((3, 2))}), "SameStep"),
    "final values": (step(rewards=[0.0, 1.0, 1.0], final_values=[1.0, 1.0, 1.0]), "final_values were given"),
    "infos of another form": (step(rewards=[0.0, 1.0, 1.0], infos=[{}]), "infos is a list"),
    "rewards of another form": (step(rewards=[0.0, 1.0]), r"rewards is \(2,\)"),
    "observations": (step(rewards=[0.0, 1.0, 1.0], observations=None), "observations is missing"),
    "an action": (step(rewards=[0.0, 1.0, 1.0], actions=[0, 1, 7]), "whole number from 0 to 6"),
    "an unknown field": (step(rewards=[0.0, 1.0, 1.0], dones=[0, 0, 0]), "no extra field 'dones'"),
    "values": (step(rewards=[0.0, 1.0, 1.0], values=None), "values is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_step_changes_nothing(name):
    storage = make(mode="NextStep")
    storage.add(**step(**ENDED))
    wrong, message = WRONG[name]
    before, size, late = all_of(storage)
    with pytest.raises(InvalidInputError, match=f"(?s){message}.*Nothing was written"):
        storage.add(**wrong)
    after, now, held = all_of(storage)
    assert (size, late, before.keys()) == (now, held, after.keys())
    assert all(torch.equal(block.nan_to_num(), after[name].nan_to_num()) for name, block in before.items())
    storage.add(**step(rewards=[0.0, 1.0, 1.0]))  # and what is right goes on
    assert storage.reset_steps.tolist() == [[False] * 3, [True, False, False]]


def test_the_same_is_refused_of_transitions_and_samples():
    storage, given, transition = make(mode="NextStep"), step(), RolloutStorage.Transition()
    storage.add(**step(**ENDED))
    transition.__dict__.update(given, dones=[0, 0, 0], actions_log_prob=given["log_probs"])
    with pytest.raises(InvalidInputError, match="environment 0 ended its episode"):
        storage.insert_transition(given)
    with pytest.raises(InvalidInputError, match="environment 0 ended its episode"):
        storage.add_transition(transition)
    assert storage.step == 1


def test_a_sample_that_is_refused_keeps_the_rollout_before():
    storage = make(mode="NextStep", num_steps=1)
    storage.insert_transition(step(**ENDED))
    storage.after_gradients()
    with pytest.raises(InvalidInputError, match="environment 0 ended its episode"):
        storage.insert_transition(step())
    assert storage.step == 1
    storage.insert_transition(step(rewards=[0.0, 1.0, 1.0]))
    assert storage.reset_steps.tolist() == [[True, False, False]]


@pytest.mark.parametrize("infos", [None, {}, {"final_obs": listed(np.zeros(2, np.float32), None, None)}])
def test_a_critic_without_a_final_observation_is_refused(infos):
    storage = make(critic=Critic())
    with pytest.raises(InvalidInputError, match=r"environment 2 was truncated.*final_obs.*Nothing was written"):
        storage.add(**step(truncated=[False, False, True], infos=infos))
    assert storage.step == 0


@pytest.mark.parametrize("answer", [torch.zeros(2), torch.zeros(1, 2), None, "much"])
def test_a_critic_that_returns_something_else_is_refused(answer):
    storage = make(critic=lambda observations: answer)
    with pytest.raises(InvalidInputError, match="what the critic returned"):
        storage.add(**step(truncated=[False, False, True], infos={"final_obs": np.ones((3, 2))}))
    assert storage.step == 0


def test_arguments_that_cannot_be_are_refused():
    for wrong, message in [
        ({"critic": Critic(), "mode": "NextStep"}, "nothing to ask it"),
        ({"critic": 3}, "critic is a int"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"space": spaces.Text(3)}, "space of type Text"),
    ]:
        with pytest.raises((InvalidInputError, NotImplementedError), match=message):
            make(**wrong)
    with pytest.raises(TypeError, match=r"no argument 'n_steps'\. Did you mean 'num_steps'"):
        RolloutStorage.from_spaces(BOX, DISCRETE, 3, n_steps=3)
