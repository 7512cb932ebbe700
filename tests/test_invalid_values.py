"""Rewards that are not finite, actions outside of their space and integers that would be rounded are refused."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    HindsightReplayStorage,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
    Storage,
)

NAN, INF = float("nan"), float("inf")
ENVS = 3
BOX, DISCRETE = spaces.Box(-9, 9, (2,)), spaces.Discrete(4)
GOALS = spaces.Dict({"observation": BOX, "achieved_goal": BOX, "desired_goal": BOX})
REPLAYS = {
    "replay": ReplayStorage,
    "nstep": NStepReplayStorage,
    "prioritized": PrioritizedReplayStorage,
    "sequence": SequenceReplayStorage,
}


def flags(count=ENVS):
    return torch.zeros(count, dtype=torch.bool)


class Family:
    """How a storage is made, and one step added to it with the rewards and the actions given."""

    def __init__(self, make, add, actions="actions", rewards="rewards"):
        self.make, self.add, self.actions, self.rewards = make, add, actions, rewards


def make_replay(kind):
    def make(action_space=DISCRETE, **options):
        own = {"sequence_length": 2} if kind == "sequence" else {}
        arguments = {"storage_size": 30, "num_envs": ENVS, "seed": 0, **own, **options}
        return REPLAYS[kind](BOX, action_space, **arguments)

    return make


def no_reward(*_):
    return 0.0


def make_hindsight(action_space=DISCRETE, **options):
    return HindsightReplayStorage(
        GOALS, action_space, storage_size=30, num_envs=ENVS, compute_reward=no_reward, **options
    )


def add_replay(storage, rewards, actions):
    obs = torch.zeros(ENVS, 2)
    storage.add(obs, actions, rewards, flags(), flags(), {}, obs)


def add_goals(storage, rewards, actions):
    obs = {name: torch.zeros(ENVS, 2) for name in ("observation", "achieved_goal", "desired_goal")}
    storage.add(obs, actions, rewards, flags(), flags(), {}, obs)


def insert_replay(storage, rewards, actions):
    obs = torch.zeros(ENVS, 2)
    step = {"observations": obs, "actions": actions, "rewards": rewards, "next_observations": obs}
    storage.insert_transition({**step, "terminated": flags(), "truncated": flags()})


def insert_replay_slice(storage, rewards, actions):
    obs = torch.zeros(2, ENVS, 2)
    first = {"actions": torch.zeros(ENVS, dtype=torch.int64), "rewards": torch.zeros(ENVS)}
    columns = {"actions": torch.as_tensor(actions), "rewards": torch.as_tensor(rewards)}
    steps = {name: torch.stack([first[name].to(value.dtype), value]) for name, value in columns.items()}
    ends = {"terminated": torch.zeros(2, ENVS), "truncated": torch.zeros(2, ENVS)}
    storage.insert_data_slice({"observations": obs, "next_observations": obs, **steps, **ends})


def make_decoupled(action_space=DISCRETE, **options):
    return DecoupledRolloutStorage(BOX, action_space, num_steps=2, num_envs=ENVS, seed=0, **options)


def add_decoupled(storage, rewards, actions):
    obs, zeros = torch.zeros(ENVS, 2), torch.zeros(ENVS)
    storage.add(obs, actions, rewards, flags(), flags(), obs, zeros, zeros, zeros)


def insert_decoupled(storage, rewards, actions):
    obs, zeros = torch.zeros(ENVS, 2), torch.zeros(ENVS)
    step = {"observations": obs, "actions": actions, "rewards": rewards, "next_observations": obs}
    ends = {"terminated": flags(), "truncated": flags()}
    storage.insert_transition({**step, **ends, "log_probs": zeros, "values": zeros, "adv_preds": zeros})


def make_rollout(**options):
    obs = TensorDict({"policy": torch.zeros(ENVS, 2)}, batch_size=[ENVS])
    return RolloutStorage("rl", ENVS, 4, obs, [1], seed=0, **options)


def transition_of(rewards, actions=None):
    transition = RolloutStorage.Transition()
    transition.observations = TensorDict({"policy": torch.zeros(ENVS, 2)}, batch_size=[ENVS])
    transition.actions = torch.zeros(ENVS, 1) if actions is None else actions
    transition.rewards, transition.dones = rewards, flags()
    transition.values = transition.actions_log_prob = torch.zeros(ENVS)
    return transition


def add_rollout(storage, rewards, actions=None):
    storage.add_transition(transition_of(rewards))


def insert_rollout(storage, rewards, actions=None):
    zeros = torch.zeros(ENVS)
    step = {"observations": {"policy": torch.zeros(ENVS, 2)}, "actions": torch.zeros(ENVS, 1), "rewards": rewards}
    storage.insert_transition(
        {**step, "terminated": flags(), "truncated": flags(), "values": zeros, "log_probs": zeros}
    )


def make_distributed(action_space=DISCRETE, **options):
    return DistributedStorage(
        spaces.Box(-9, 9, (2,)), action_space, num_steps=2, num_storages=ENVS, batch_size=1, seed=0, **options
    )


def insert_distributed(storage, rewards, actions):
    obs = torch.zeros(ENVS, 2)
    step = {"observations": obs, "actions": actions, "rewards": rewards, "next_observations": obs}
    storage.insert_transition({**step, "terminated": flags(), "truncated": flags()})


FAMILIES = {
    **{f"{kind}, add": Family(make_replay(kind), add_replay) for kind in REPLAYS},
    "hindsight, add": Family(make_hindsight, add_goals),
    "replay, insert_transition": Family(make_replay("replay"), insert_replay),
    "replay, insert_data_slice": Family(make_replay("replay"), insert_replay_slice),
    "decoupled, add": Family(make_decoupled, add_decoupled),
    "decoupled, insert_transition": Family(make_decoupled, insert_decoupled),
    "rollout, add_transition": Family(make_rollout, add_rollout, actions=""),
    "rollout, insert_transition": Family(make_rollout, insert_rollout, actions=""),
    "distributed, insert_transition": Family(make_distributed, insert_distributed, "action", "reward"),
}
WITH_SPACES = {name: family for name, family in FAMILIES.items() if family.actions}
VALID = torch.tensor([0, 1, 3])


def state_of(storage):
    numbers, tensors = storage._state()
    return copy.deepcopy((numbers, {name: tensor.clone() for name, tensor in tensors.items()}, len(storage)))


def assert_unchanged(storage, before):
    numbers, tensors, count = state_of(storage)
    assert (numbers, count) == (before[0], before[2])
    assert tensors.keys() == before[1].keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, before[1][name], rtol=0, atol=0, equal_nan=True, msg=name)


def refuse(family, storage, rewards, actions, match):
    """The step is refused, before and after a step that is not, and nothing changes."""
    for _ in range(2):
        before = state_of(storage)
        with pytest.raises(InvalidInputError, match=match):
            family.add(storage, rewards, actions)
        assert_unchanged(storage, before)
        family.add(storage, torch.tensor([1.0, 2.0, 3.0]), VALID)


# ---------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_reward_that_is_not_finite_is_refused(name, bad):
    family = FAMILIES[name]
    match = (
        rf"{family.rewards} of environment 1( in step 1)? is {bad}; it has to be finite.*allow_nonfinite_rewards=True"
    )
    refuse(family, family.make(), torch.tensor([0.0, bad, 0.0]), VALID, match)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_option_allows_it(name):
    family = FAMILIES[name]
    storage = family.make(allow_nonfinite_rewards=True)
    family.add(storage, torch.tensor([INF, NAN, -INF]), VALID)
    again = pickle.loads(pickle.dumps(storage))
    family.add(again, torch.tensor([INF, NAN, -INF]), VALID)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("name", ["replay, add", "decoupled, add", "rollout, add_transition"])
def test_the_option_is_saved(name, allowed, tmp_path):
    family = FAMILIES[name]
    family.make(**({"allow_nonfinite_rewards": True} if allowed else {})).save(tmp_path / "snapshot")
    loaded = Storage.load(tmp_path / "snapshot")
    if allowed:
        family.add(loaded, torch.tensor([INF, NAN, -INF]), VALID)
    else:
        refuse(family, loaded, torch.tensor([INF, 0.0, 0.0]), VALID, "environment 0 is inf")


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (np.array([0.0, 1.0, 1e300]), r"environment 2 is 1e\+300, as float32 inf"),
        ([0.0, NAN, INF], "environment 1 is nan"),
        (torch.tensor([0.0, -INF, 0.0], dtype=torch.float16), "environment 1 is -inf"),
        (torch.tensor([[0.0, 9.0], [NAN, 9.0], [0.0, 9.0]])[:, 0], "environment 1 is nan"),  # strided
    ],
)
@pytest.mark.parametrize("name", ["replay, add", "decoupled, add", "rollout, add_transition"])
def test_what_would_be_stored_is_checked(name, rewards, words):
    family = FAMILIES[name]
    refuse(family, family.make(), rewards, VALID, words)


@pytest.mark.parametrize("rewards", [1e300, NAN, np.float64(INF), [NAN], torch.tensor(INF)])
def test_a_number_of_a_single_environment_is_checked(rewards):
    storage = ReplayStorage(BOX, DISCRETE, storage_size=4)
    obs = np.zeros(2, np.float32)
    with pytest.raises(InvalidInputError, match=r"rewards of environment 0 is .*finite"):
        storage.add(obs, 1, rewards, False, False, {}, obs)
    assert len(storage) == 0


@pytest.mark.parametrize("width", [2, 40])  # few and many entries are checked by different code
def test_every_component_of_a_reward_is_checked(width):
    storage = ReplayStorage(BOX, DISCRETE, storage_size=30, num_envs=ENVS, reward_shape=(width,))
    rewards = torch.zeros(ENVS, width)
    add_replay(storage, rewards, VALID)
    rewards[2, width - 1] = NAN
    with pytest.raises(InvalidInputError, match=rf"rewards\[{width - 1}\] of environment 2 is nan"):
        add_replay(storage, rewards, VALID)
    assert len(storage) == ENVS


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 33, 64, 100])
def test_one_of_any_number_of_environments_is_found(count):
    storage = ReplayStorage(BOX, DISCRETE, storage_size=2 * count, num_envs=count)
    obs, none = torch.zeros(count, 2), flags(count)
    for bad in range(count):
        rewards, actions = torch.zeros(count), torch.full((count,), 3)
        rewards[bad] = INF
        with pytest.raises(InvalidInputError, match=rf"rewards of environment {bad} is inf"):
            storage.add(obs, actions, rewards, none, none, {}, obs)
        actions[bad] = 4
        with pytest.raises(InvalidInputError, match=rf"actions of environment {bad} is 4"):
            storage.add(obs, actions, torch.zeros(count), none, none, {}, obs)
    assert len(storage) == 0


def test_a_lane_that_takes_no_part_is_not_read():
    storage = ReplayStorage(BOX, spaces.Discrete(4, start=5), storage_size=30, num_envs=ENVS)
    obs, mask = torch.zeros(ENVS, 2), torch.tensor([True, False, False])
    for form in (lambda x: x, lambda x: x.numpy(), lambda x: x.tolist()):
        rewards, actions = torch.tensor([1.0, NAN, INF]), torch.tensor([6, 0, -7])
        storage.add(obs, form(actions), form(rewards), flags(), flags(), {}, obs, mask=mask)
    assert len(storage) == 3
    with pytest.raises(InvalidInputError, match="rewards of environment 2 is inf"):
        storage.add(obs, torch.tensor([6, 6, 6]), rewards, flags(), flags(), {}, obs, mask=[True, False, True])
    # What is padded with zeros, where an environment holds fewer steps than another, goes in again.
    data = storage.get_all_buffer_data()
    storage.reset()
    storage.insert_data_slice(data)
    assert len(storage) == 3


def test_writers_check_too():
    storage = ReplayStorage(BOX, DISCRETE, storage_size=30, num_envs=ENVS, memory="shared")
    writer = storage.writer()

    def play(queue):
        obs = torch.zeros(ENVS, 2)
        for rewards, actions in ((torch.tensor([0.0, NAN, 0.0]), VALID), (torch.zeros(ENVS), VALID + 1)):
            try:
                writer.add(obs, actions, rewards, flags(), flags(), {}, obs)
            except InvalidInputError as error:
                queue.put(str(error))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=play, args=(queue,))
    process.start()
    found = [queue.get(timeout=60) for _ in range(2)]
    process.join()
    assert "rewards of environment 1 is nan" in found[0]
    assert "actions of environment 2 is 4; it has to be a whole number from 0 to 3" in found[1]
    assert len(storage) == 0


# ---------------------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize("bad", [4, 7, -1, 2**40])
@pytest.mark.parametrize("name", WITH_SPACES)
def test_an_action_outside_of_its_space_is_refused(name, bad):
    family = WITH_SPACES[name]
    match = (
        rf"{family.actions} of environment 2( in step 1)? is {bad}(, as .*)?; it has to be a whole number from 0 to 3"
    )
    refuse(family, family.make(), torch.zeros(ENVS), torch.tensor([0, 3, bad]), f"{match}, fixed by the action_space")


SPACES = [
    (spaces.Discrete(4, start=5), [5, 8, 6], [5, 8, 4], "environment 2 is 4; .*from 5 to 8"),
    (spaces.Discrete(4, start=-2), [-2, 1, 0], [-2, 1, 2], "environment 2 is 2; .*from -2 to 1"),
    (spaces.MultiDiscrete([2, 5]), [[0, 4], [1, 0], [1, 4]], [[0, 4], [2, 0], [1, 4]], r"\[0\] of environment 1 is 2"),
    (
        spaces.MultiDiscrete([2, 5], start=[3, 0]),
        [[3, 4], [4, 0], [3, 3]],
        [[3, 4], [4, 5], [3, 3]],
        r"\[1\] of environment 1 is 5; .*from 0 to 4",
    ),
    (spaces.MultiDiscrete([3, 3]), [[0, 2]] * 3, [[0, 2], [0, 2], [3, 0]], r"\[0\] of environment 2 is 3"),
    (spaces.MultiBinary(2), [[0, 1]] * 3, [[0, 1], [0, 1], [0, 2]], r"\[1\] of environment 2 is 2; .*from 0 to 1"),
    ({"shape": (3,), "type": "Discrete", "range": [1, 3]}, [1, 2, 3], [1, 2, 0], "environment 2 is 0; .*from 1 to 3"),
    ({"shape": (3,), "type": "Discrete", "dtype": "uint8"}, [0, 1, 2], [0, 1, 3], "environment 2 is 3"),
    ({"shape": (3,), "type": "Discrete", "dtype": "float64"}, [0.0, 1.0, 2.0], [0.0, 0.5, 2.0], "environment 1 is 0.5"),
    ({"shape": (2,), "type": "MultiDiscrete", "nvec": [2, 3]}, [[1, 2]] * 3, [[1, 2], [2, 1], [0, 0]], "1 is 2"),
]


@pytest.mark.parametrize(("space", "good", "bad", "words"), SPACES, ids=[str(space[0]) for space in SPACES])
@pytest.mark.parametrize("name", ["replay, add", "decoupled, add"])
@pytest.mark.parametrize("form", [torch.tensor, np.array, list])
def test_all_kinds_of_spaces(name, space, good, bad, words, form):
    family = WITH_SPACES[name]
    storage = family.make(space)
    family.add(storage, torch.zeros(ENVS), form(good))
    before = state_of(storage)
    with pytest.raises(InvalidInputError, match=f"actions.*{words}"):
        family.add(storage, torch.zeros(ENVS), form(bad))
    assert_unchanged(storage, before)


def test_actions_of_a_box_may_be_anywhere():
    storage = ReplayStorage(BOX, spaces.Box(-1, 1, (2,)), storage_size=30, num_envs=ENVS)
    add_replay(storage, torch.zeros(ENVS), torch.full((ENVS, 2), 70.0))
    assert storage.sample(1).actions.tolist() == [[70.0, 70.0]]


def test_without_a_space_actions_are_whatever_the_first_sample_has():
    storage = ReplayStorage.create_factory(30)()
    for actions in (VALID, VALID + 7):
        insert_replay(storage, torch.zeros(ENVS), actions)
    assert len(storage) == 6


# ---------------------------------------------------------------------------------------------------- distributed


def test_rows_of_rollouts_are_checked():
    storage = make_distributed()
    with storage.actor() as actor:
        rollout = actor.reserve()
        rollout.write(1, reward=1.5, action=3)
        for values, words in (
            ({"reward": NAN}, "reward of environment 0 is nan"),
            ({"reward": torch.tensor([[INF]])}, "reward of environment 0 is inf"),
            ({"action": 4}, "action of environment 0 is 4"),
            ({"action": torch.tensor(-1)}, "action of environment 0 is -1"),
        ):
            with pytest.raises(InvalidInputError, match=words):
                rollout.write(1, obs=torch.ones(2), **values)
        with pytest.raises(InvalidInputError, match="reward of environment 0 is nan"):
            storage.add(rollout.slot, 1, None, {"reward": NAN, "obs": torch.ones(2)})
        assert (float(rollout["reward"][1]), int(rollout["action"][1])) == (1.5, 3)
        assert not rollout["obs"].any()
        rollout.abandon()


def test_the_last_row_needs_no_action():
    storage = make_distributed(spaces.Discrete(4, start=5))
    for _ in range(2):
        insert_distributed(storage, torch.zeros(ENVS), VALID + 5)
    data = storage.get_all_buffer_data()
    assert data["last_rows"]["action"].tolist() == [0, 0, 0]
    storage.insert_data_slice(data)
    assert storage.get_all_buffer_data()["actions"].tolist() == [[5, 6, 8], [5, 6, 8]]


# ---------------------------------------------------------------------------------------------------- integers


@pytest.mark.parametrize(
    "rewards", [torch.tensor([0, 2**24 + 1, 1]), np.array([0, 2**24 + 1, 1], np.int32), [0, 2**24 + 1, 1]]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_integer_that_would_be_rounded_is_refused(name, rewards):
    family = FAMILIES[name]
    match = f"{family.rewards} is .*; this storage holds .* 16777217 is not a number of float32, and would be rounded"
    refuse(family, family.make(), rewards, VALID, match)


@pytest.mark.parametrize("name", ["replay, add", "rollout, add_transition", "decoupled, add"])
def test_an_integer_that_is_exact_is_converted(name):
    family = FAMILIES[name]
    storage = family.make()
    family.add(storage, torch.tensor([2**24, -(2**24), 2**62]), VALID)
    held = storage.get_all_buffer_data()["rewards"] if "rollout" in name or "replay" in name else storage.rewards[:1]
    assert held.flatten().tolist() == [2.0**24, -(2.0**24), 2.0**62]


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (torch.float64, [2**53, -(2**60)], 2**53 + 1),
        (torch.float32, [2**24 + 2, -(2**24)], -(2**24) - 1),
        (torch.float16, [2048, 2050, -65504 + 0], 2049),
        (torch.float16, [2048], 2**17),  # exact in 11 digits, and infinite
        (torch.bfloat16, [256, 258, -(2**40)], 257),
        (torch.float32, [2**63 - 2**39], 2**63 - 1),
    ],
)
def test_how_many_digits_each_dtype_has(dtype, good, bad):
    extra = {"number": ((), dtype)}
    storage = ReplayStorage(BOX, DISCRETE, storage_size=9, extra_fields=extra)
    obs = torch.zeros(1, 2)
    for value in good:
        storage.add(obs, [0], [0.0], [False], [False], {}, obs, number=torch.tensor([value]))
    with pytest.raises(InvalidInputError, match=f"number is .* {bad} is not a number of"):
        storage.add(obs, [0], [0.0], [False], [False], {}, obs, number=torch.tensor([bad]))
    assert len(storage) == len(good)


def test_what_was_stored_before_is_served(tmp_path):
    obs = np.zeros(2, np.float32)

    def make(**options):
        folder = {"save_snapshot": True, "snapshot_dir": tmp_path / "episodes", "num_workers": 0, "pin_memory": False}
        return NStepReplayStorage(BOX, DISCRETE, storage_size=8, n_step=1, **folder, **options)

    storage = make(allow_nonfinite_rewards=True)
    storage.add(obs, 3, INF, True, False, {}, obs)
    storage.close()
    again = make()
    assert again.sample(1).rewards.tolist() == [[INF]]
    assert again.sample(1).actions.tolist() == [3.0]
    with pytest.raises(InvalidInputError, match="rewards of environment 0 is inf"):
        again.add(obs, 3, INF, True, False, {}, obs)
    assert len(again) == 1
    again.close()
