"""Calls that users get wrong: what they are told, that nothing hangs, and that a refused call changes nothing."""

from __future__ import annotations

from queue import Queue

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    DoesNotFitError,
    InvalidInputError,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
    SequenceReplayStorage,
    Storage,
    UnsupportedSpaceError,
)
from rlstore.engine import returns
from rlstore.engine.memory import capacity
from rlstore.engine.rows import ring
from rlstore.errors import InvalidCallError

N = 4
BOX, MOVES, FORCES = spaces.Box(-1, 1, (3,)), spaces.Discrete(4), spaces.Box(-1, 1, (2,))
KINDS = [ReplayStorage, NStepReplayStorage, PrioritizedReplayStorage, SequenceReplayStorage]


def replay(kind=ReplayStorage, observation_space=BOX, action_space=MOVES, **arguments):
    if kind is SequenceReplayStorage:
        arguments.setdefault("sequence_length", 2)
    return kind(observation_space, action_space, **{"storage_size": 80, "num_envs": N, "seed": 0, **arguments})


def obs(envs=N):
    return np.zeros((envs, 3), np.float32)


def step(envs=N):
    flags = np.zeros(envs, bool)
    return [obs(envs), np.zeros(envs, np.int64), np.zeros(envs, np.float32), flags, flags, {}, obs(envs)]


def rollout(**arguments):
    given = {"num_envs": N, "num_transitions_per_env": 5, "obs": TensorDict({"policy": obs()}, [N]), **arguments}
    return RolloutStorage("rl", actions_shape=(2,), **given)


def transition(**fields):
    made = RolloutStorage.Transition()
    made.observations, made.actions = TensorDict({"policy": obs()}, [N]), torch.zeros(N, 2)
    made.rewards = made.dones = made.actions_log_prob = torch.zeros(N)
    made.values = torch.zeros(N, 1)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def decoupled(**arguments):
    return DecoupledRolloutStorage(
        **{"observation_space": BOX, "action_space": FORCES, "num_steps": 5, "num_envs": N, **arguments}
    )


def decoupled_step(first, following):
    flags, numbers = np.zeros(N, bool), torch.zeros(N)
    return [first, np.zeros((N, 2), np.float32), numbers, flags, flags, following, numbers, numbers, numbers]


# ---------------------------------------------------------------------------------------------------- too much


@pytest.fixture
def little_memory(monkeypatch):
    """Eight gigabytes, whatever the machine has."""
    monkeypatch.setattr(capacity, "free_ram", lambda: (8 << 30, "as the test says"))
    monkeypatch.setattr(capacity, "free_device", lambda device: 8 << 30)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [{"num_workers": 10**9}, {"batch_size": 2**31}, {"num_workers": 2**64}])
def test_batches_that_do_not_fit_are_refused_at_construction(kind, arguments):
    with pytest.raises(DoesNotFitError, match=r"bytes\) for .*batch.*Nothing was allocated.*batch_size.*num_workers"):
        replay(kind, **{"batch_size": 256, **arguments})


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_fit_is_refused(kind):
    storage, twin = replay(kind, num_workers=0, batch_size=8), replay(kind, num_workers=0, batch_size=8)
    for one in (storage, twin):
        for _ in range(4):
            one.add(*step())
    for size in (2**31, 2**62):
        with pytest.raises(DoesNotFitError, match=f"a batch of {size:,}"):
            storage.sample(size)
        with pytest.raises(DoesNotFitError, match=f"a batch of {size:,}"):
            next(iter(storage.generate_batches(1, size)))
        with pytest.raises(DoesNotFitError, match=f"batch.* of {size:,}"):
            storage.update_storage_parameter("batch_size", size)
    with pytest.raises(InvalidInputError, match=r"below 2\*\*63"):
        storage.sample(2**63)
    assert storage.batch_size == 8
    # No number was drawn for what was refused.
    assert torch.equal(storage._random, twin._random)


def test_a_rollout_that_does_not_fit_is_refused(monkeypatch):
    for make in (
        lambda: rollout(num_transitions_per_env=2**40),
        lambda: decoupled(num_steps=2**40),
        lambda: decoupled(num_envs=2**40),
        lambda: rollout(extra_fields={"costs": ((2**40,), torch.float32)}),
        lambda: DistributedStorage(BOX, MOVES, num_steps=2**40),
        lambda: DistributedStorage(BOX, MOVES, num_storages=2**40),
        lambda: DistributedStorage(BOX, MOVES, state_shapes=[(1, 2**40)]),
    ):
        with pytest.raises(DoesNotFitError, match=r"bytes\).*free in RAM.*Nothing was allocated"):
            make()
    # 5 steps of 4 environments: observations 3, actions 2, rewards, values, log-probabilities, returns and advantages
    # of 4 bytes each, and a flag of one.
    needed = 5 * 4 * ((3 + 2 + 5) * 4 + 1)
    monkeypatch.setattr(ring, "MUCH", 1)
    monkeypatch.setattr(capacity, "free_ram", lambda: (needed - 1, "a limit"))
    with pytest.raises(DoesNotFitError, match=rf"a rollout needs 0.00 GB \({needed} bytes\) for 5 steps of 4 env"):
        rollout()
    monkeypatch.setattr(capacity, "free_ram", lambda: (needed, "a limit"))
    storage = rollout()
    with pytest.raises(DoesNotFitError, match=r"for 5 steps of 4 environments, saved_hidden_state_a\[0\] the most"):
        storage.add_transition(transition(hidden_states=(torch.zeros(1, N, 99), None)))
    with pytest.raises(DoesNotFitError, match="for 6 steps"):
        storage.update_storage_parameter("num_transitions_per_env", 6)
    assert (storage.step, storage.num_transitions_per_env) == (0, 5)
    storage.add_transition(transition())
    assert storage.step == 1


def test_sizes_beyond_64_bits():
    storage = rollout()
    for _ in range(5):
        storage.add_transition(transition())
    with pytest.raises(InvalidInputError, match=r"num_epochs is \d+; .* below 2\*\*63"):
        next(iter(storage.mini_batch_generator(2, 2**70)))


# ---------------------------------------------------------------------------------------------------- observations


def test_the_tuple_of_reset_is_recognised():
    words = r"is the tuple \(observations, infos\) that env.reset\(\) returns; give its first part, obs = env.reset\(\)"
    for infos in ({}, {"speed": np.zeros(N)}, {"names": ["a"] * N}):
        for place in (0, 6):
            storage, given = replay(), step()
            given[place] = (obs(), infos)
            with pytest.raises(InvalidInputError, match=rf"{words}\[0\]. Nothing was written"):
                storage.add(*given)
            assert len(storage) == 0
        for arguments in (((obs(), infos), obs()), (obs(), (obs(), infos))):
            with pytest.raises(InvalidInputError, match=words):
                decoupled().add(*decoupled_step(*arguments))
        with pytest.raises(InvalidInputError, match=words):
            rollout().add_transition(transition(observations=(TensorDict({"policy": obs()}, [N]), infos)))
    with pytest.raises(InvalidInputError, match=words):
        rollout(obs=(TensorDict({"policy": obs()}, [N]), {}))
    names = ("observations", "actions", "rewards", "terminated", "truncated", "infos", "next_observations")
    sample = {**dict(zip(names, step(), strict=True)), "observations": (obs(), {})}
    del sample["infos"]
    with pytest.raises(InvalidInputError, match=words):
        ReplayStorage.create_factory(80)().insert_transition(sample)


def test_a_tuple_of_observations_and_a_dict_is_still_an_observation():
    space = spaces.Tuple((BOX, spaces.Dict({"speed": spaces.Box(-1, 1, (1,))})))
    storage, given = replay(observation_space=space), step()
    given[0] = given[6] = (obs(), {"speed": np.ones((N, 1), np.float32)})
    storage.add(*given)
    assert len(storage) == N


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_environments_is_blamed_on_num_envs(kind):
    storage = replay(kind)
    with pytest.raises(InvalidInputError, match=r"observations is \(2, 3\) .*fixed by num_envs=4\..* num_envs=2"):
        storage.add(*step(2))
    single = step()
    single[0] = obs()[0]
    with pytest.raises(InvalidInputError, match=r"observations is \(3,\) .*fixed by num_envs=4\. There is no axis for"):
        storage.add(*single)
    rewards = step()
    rewards[2] = np.zeros((6, 1))
    with pytest.raises(InvalidInputError, match=r"rewards is \(6, 1\) .*fixed by num_envs=4\..*give .* num_envs=6"):
        storage.add(*rewards)
    assert len(storage) == 0


def test_a_storage_of_one_environment_that_is_given_four():
    storage = replay(num_envs=1)
    with pytest.raises(InvalidInputError, match=r"fixed by num_envs=1\..*give the storage num_envs=4"):
        storage.add(*step())


def test_rollouts_name_num_envs_too():
    with pytest.raises(InvalidInputError, match=r"fixed by num_envs=4.*num_envs=2"):
        decoupled().add(*decoupled_step(obs(2), obs()))
    with pytest.raises(InvalidInputError, match=r"fixed by num_envs=4.*num_envs=2"):
        rollout().add_transition(transition(observations=TensorDict({"policy": obs(2)}, [2])))


def test_the_space_of_a_vector_environment_is_recognised():
    whole = spaces.Box(-1, 1, (N, 3))
    words = "That is the space of all 4 environments together. Nothing was written. Give the storage single_"
    with pytest.raises(InvalidInputError, match=f"{words}observation_space of the vector environment"):
        replay(observation_space=whole).add(*step())
    with pytest.raises(InvalidInputError, match=f"{words}action_space"):
        replay(action_space=spaces.MultiDiscrete([4] * N)).add(*step())
    with pytest.raises(InvalidInputError, match=f"{words}observation_space"):
        decoupled(observation_space=whole).add(*decoupled_step(obs(), obs()))


@pytest.mark.parametrize("envs", [2, N])
def test_the_observation_of_one_environment_is_not_taken_for_all_of_them(envs):
    storage = replay(observation_space=spaces.Box(-1, 1, (N,)), num_envs=envs)
    given = step(envs)
    given[0] = given[-1] = np.zeros(N, np.float32)
    with pytest.raises(InvalidInputError, match=rf"fixed by num_envs={envs}\. There is no axis for the environments"):
        storage.add(*given)


def test_spaces_given_to_the_constructor_of_a_rollout():
    with pytest.raises(TypeError, match=r"'actions_shape'.*call RolloutStorage\.from_spaces\(\)\.$"):
        RolloutStorage(BOX, MOVES, N, 5)
    with pytest.raises(TypeError, match=r"no argument 'observation_space'.*call RolloutStorage\.from_spaces\(\)\.$"):
        RolloutStorage(observation_space=BOX, action_space=MOVES, num_envs=N, num_steps=5)
    with pytest.raises(InvalidInputError, match=r"training_type is Box.*call RolloutStorage\.from_spaces\(\)\.$"):
        RolloutStorage(BOX, MOVES, N, 5, "cpu")


def test_an_environment_in_the_place_of_its_space():
    class Vector:
        observation_space, single_observation_space = spaces.Box(-1, 1, (N, 3)), BOX

    class Single:
        observation_space = BOX

    with pytest.raises(UnsupportedSpaceError, match=r"a Vector is an environment.*single_observation_space and single"):
        replay(observation_space=Vector())
    with pytest.raises(UnsupportedSpaceError, match=r"a Single is an environment.* observation_space and action_space"):
        replay(observation_space=Single())


# ---------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_another_library(kind):
    words = (
        "add.. takes observations, actions, rewards, terminateds, truncateds, infos, next_observations, in this order"
    )
    storage = replay(kind)
    actions, rewards, done = np.zeros(N, np.int64), np.zeros(N, np.float32), np.zeros(N, bool)
    for given in (
        (obs(), obs(), actions, rewards, done, done, {}),
        (obs(), obs(), actions, rewards, done, [{}] * N, {}),
        (obs(), obs(), actions, rewards, done, torch.zeros(N), obs()),
        (obs(), obs(), rewards, done, done, {}, obs()),
    ):
        with pytest.raises(InvalidInputError, match=words):
            storage.add(*given)
    with pytest.raises(
        TypeError,
        match=r"^(SequenceReplayStorage\.)?add\(\) missing 1 required positional argument: 'next_observations'",
    ):
        storage.add(obs(), obs(), actions, rewards, done, [{}] * N)
    assert len(storage) == 0


def test_a_list_of_infos_is_told_how_to_become_a_dict():
    storage, given = replay(), step()
    given[5] = [{"terminal_observation": obs()[0]}, {}, {}, {}]
    with pytest.raises(
        InvalidInputError, match=r'infos is a list; .*"final_obs": \[info.get\("terminal_observation"\)'
    ):
        storage.add(*given)
    given[5] = {"final_obs": [info.get("terminal_observation") for info in given[5]]}
    storage.add(*given)
    assert len(storage) == N


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8])
def test_flags_of_any_dtype(dtype):
    storage, given = replay(), step()
    given[3] = np.array([0, 1, 0, 1], dtype)
    storage.add(*given)
    assert storage.get_all_buffer_data()["terminated"].flatten().tolist() == [False, True, False, True]


# ---------------------------------------------------------------------------------------------------- the rest


def test_arguments_of_the_wrong_kind(tmp_path):
    storage = replay(PrioritizedReplayStorage)
    for call in (
        lambda: storage.save(None),
        lambda: Storage.load(3),
        lambda: Storage.load(b"folder"),
        lambda: replay(memory="mapped", path=3),
        lambda: replay(NStepReplayStorage, snapshot_dir=None),
        lambda: storage.update(1, 2, 3),
        lambda: DistributedStorage(BOX, MOVES, num_storages=1).add(0, 0),
    ):
        with pytest.raises(InvalidCallError):
            call()
    with pytest.raises(InvalidInputError, match="info is a int; give a dict"):
        storage.after_gradients(None, None, 3)
    with pytest.raises(InvalidInputError, match=r"training_type is \[\]"):
        RolloutStorage([], N, 5, TensorDict({"policy": obs()}, [N]), (2,))
    with pytest.raises(InvalidInputError, match="hidden_states must be a pair"):
        rollout().add_transition(transition(hidden_states=3))
    queueless = DistributedStorage(BOX, MOVES, num_storages=1)
    with pytest.raises(InvalidInputError, match=r"full_queue is None; .* get and put"):
        DistributedStorage.sample("cpu", 1, Queue(), None, queueless.storages, ())


@pytest.mark.parametrize("wrong", [None, "0.9", [0.9], torch.zeros(2), float("nan")])
def test_discounts_that_are_no_numbers(wrong):
    rows, last, ended = torch.zeros(3, N), torch.zeros(N), torch.zeros(3, N, dtype=torch.bool)
    for call in (
        lambda: returns.gae(rows, rows, last, ended, gamma=wrong, lam=0.9),
        lambda: returns.lambda_returns(rows, rows, last, ended, gamma=0.9, lam=wrong),
        lambda: returns.discounted_returns(rows, last, ended, gamma=wrong),
        lambda: returns.n_step_returns(rows, rows, last, ended, gamma=wrong, n=2),
        lambda: returns.n_step_returns(rows, rows, last, ended, gamma=0.9, n=wrong),
        lambda: returns.vtrace(rows, rows, last, ended, log_rhos=rows, gamma=0.9, clip_rho=wrong),
    ):
        with pytest.raises(InvalidInputError, match=r"^(gamma|lam|n|clip_rho) is .*needs a (whole )?number"):
            call()
