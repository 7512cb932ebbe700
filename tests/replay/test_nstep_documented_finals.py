"""NStepReplayStorage: the observation an episode ended in, in every form, and gymnasium's ways of starting the next."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from combinations import each, pairs
from counting_env import CountingEnv, drive, make_vector
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from nstep_steps import Lane, assert_tables, fill, ids_of, make_step, make_storage, obs_of, served, table

from rlstore import InvalidInputError, NStepReplayStorage

NAN = float("nan")


def objects(*entries):
    array = np.full(len(entries), None, dtype=object)
    for i, entry in enumerate(entries):
        array[i] = entry
    return array


# Environment 1 of 2 ends; what it ended in is (-70, -69), the observation of id -7.
FINALS = {
    "array": np.array([[0, 0], [-70, -69]], np.float32),
    "array of doubles": np.array([[0.5, 0], [-70, -69]]),
    "array with nan for those that go on": np.array([[NAN, NAN], [-70, -69]], np.float32),
    "tensor": torch.tensor([[0, 0], [-70, -69]]),
    "list of lists": [[0.0, 0.0], [-70.0, -69.0]],
    "list of arrays": [np.zeros(2), np.array([-70.0, -69.0])],
    "list with None": [None, np.array([-70.0, -69.0])],
    "list of tensors with None": [None, torch.tensor([-70.0, -69.0])],
    "tuple with None": (None, [-70.0, -69.0]),
    "object array with None": objects(None, np.array([-70.0, -69.0], np.float32)),
    "object array of lists": objects(None, [-70.0, -69.0]),
    "object array of tensors": objects(None, torch.tensor([-70.0, -69.0])),
    "object array without None": objects(np.zeros(2), np.array([-70.0, -69.0])),
}


@pytest.mark.parametrize(
    ("form", "key", "how"),
    [
        *each([*FINALS], ["final_obs", "final_observation"], ["terminated", "truncated", "truncated"]),
        ("object array with None", "final_obs", "terminated"),
        ("array", "final_observation", "truncated"),
    ],
)
def test_the_final_observation_comes_in_any_form(form, key, how):
    storage = make_storage(n_step=2, discount=0.5)
    storage.add(**make_step(0))
    storage.add(**make_step(1, **{how: (1,)}, infos={key: FINALS[form]}))
    storage.add(**make_step(2))
    end = 0.0 if how == "terminated" else 1.0
    assert_tables(
        served(storage),
        {
            1: (1, 1.25 + 3.25 / 2, 0.25, 5),
            3: (3, 3.25 + 5.25 / 2, 0.25, 7),
            5: (5, 5.25, 0.5, 7),
            2: (2, 2.25 + 4.25 / 2, 0.25 * end, -7),
            4: (4, 4.25, 0.5 * end, -7),
            6: (6, 6.25, 0.5, 8),
        },
    )


@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
def test_other_things_in_the_infos_do_no_harm(key):
    storage = make_storage(n_step=1)
    infos = {
        key: FINALS["object array with None"],
        f"_{key}": np.array([False, True]),
        "final_info": {"episode": {"r": np.array([0.0, 3.0])}},
        "episode": {"l": np.array([0, 5])},
        "text": "anything",
        "none": None,
    }
    storage.add(**make_step(0, truncated=(1,), infos=infos))
    assert {number: line[3] for number, line in served(storage).items()} == {1: 3, 2: -7}


@pytest.mark.parametrize("infos", [None, {}, {"final_obs": None}, {"final_observation": None}], ids=repr)
def test_without_a_final_observation_the_next_observation_is_the_last(infos):
    storage = make_storage(n_step=2, discount=0.5)
    storage.add(**make_step(0))
    storage.add(**make_step(1, truncated=(0,), infos=infos))
    storage.add(**make_step(2, observations=obs_of(torch.tensor([50.0, 6.0])), actions=[50, 6]))
    got = served(storage)
    assert {number: line[3] for number, line in got.items()} == {1: 5, 3: 5, 50: 7, 2: 6, 4: 8, 6: 8}
    assert got[1][2] == 0.25
    assert got[3][2] == 0.5


def test_a_final_observation_where_nothing_ended_is_not_read():
    """Vector environments leave last step's entries in their buffers."""
    plain, littered = make_storage(), make_storage()
    for step in range(3):
        plain.add(**make_step(step))
        littered.add(**make_step(step, infos={"final_obs": FINALS["array"]}))
    assert_tables(served(littered), served(plain))


def test_a_caller_may_have_put_the_final_observation_in_place_already():
    """As rllte's agents do: real next observations, with the infos beside them."""
    storage = make_storage(n_step=2, discount=0.5)
    storage.add(**make_step(0))
    real = torch.tensor([[50.0, 51.0], [-70.0, -69.0]])
    storage.add(**make_step(1, truncated=(1,), infos={"final_observation": FINALS["array"]}, next_observations=real))
    storage.add(**make_step(2))
    storage.add(**make_step(3))
    after = {number: line[3] for number, line in served(storage).items()}
    assert after == {1: 5, 3: 7, 5: 9, 7: 9, 2: -7, 4: -7, 6: 10, 8: 10}


def test_final_observations_of_bytes_stay_bytes():
    space = spaces.Box(0, 255, (2,), np.uint8)
    storage = make_storage(1, observation_space=space, n_step=1, dtype=None, batch_size=64)
    first = make_step(0, 1, truncated=(0,), observations=[[1, 2]], next_observations=[[3, 4]])
    storage.add(**{**first, "infos": {"final_obs": np.array([[250, 251]], np.uint8)}})
    storage.add(**make_step(1, 1, observations=[[3, 4]], next_observations=[[5, 6]]))
    batch = storage.sample()
    assert batch.next_observations.dtype == torch.uint8
    pairs = {(o[0], *n) for o, n in zip(batch.observations.tolist(), batch.next_observations.tolist(), strict=True)}
    assert pairs == {(1, 250, 251), (3, 5, 6)}


def test_many_final_observations_are_told_apart_for_as_long_as_their_steps_are_held():
    """Every step of every environment ends an episode; the storage goes round four times."""
    storage = make_storage(num_envs=3, steps=5, n_step=3, discount=0.5)
    for step in range(20):
        how = {"terminated" if step % 2 else "truncated": (0, 1, 2)}
        storage.add(**make_step(step, 3, **how))
        held = [int(i) for kept in range(max(0, step - 4), step + 1) for i in ids_of(kept, 3).tolist()]
        got = served(storage)
        assert {number: line[3] for number, line in got.items()} == {number: -number for number in held}
        assert all(line[2] == (0.5 if (number - 1) // 3 % 2 == 0 else 0.0) for number, line in got.items())


def nested(ids):
    return {"a": obs_of(ids), "b": {"c": -ids.unsqueeze(-1)}}


def one_of(nest, env):
    return {key: one_of(part, env) if isinstance(part, dict) else part[env].numpy() for key, part in nest.items()}


NEST = spaces.Dict(
    {"a": spaces.Box(-1e9, 1e9, (2,)), "b": spaces.Dict({"c": spaces.Box(-1e9, 1e9, (1,))})},
)


@pytest.mark.parametrize(
    "form",
    [
        lambda nest: nest,
        lambda nest: {"a": nest["a"].numpy(), "b": {"c": nest["b"]["c"].tolist()}},
        lambda nest: {"a": objects(None, nest["a"][1].numpy()), "b": {"c": objects(None, nest["b"]["c"][1].numpy())}},
        lambda nest: objects(None, one_of(nest, 1)),
        lambda nest: [None, one_of(nest, 1)],
        lambda nest: objects(one_of(nest, 0), one_of(nest, 1)),
    ],
    ids=["dict of tensors", "mixed", "dict of object arrays", "object array of dicts", "list of dicts", "no None"],
)
@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
def test_the_final_observation_of_a_dict_space_comes_in_any_form(form, key):
    storage = make_storage(observation_space=NEST, n_step=1, batch_size=64)
    for step in range(3):
        ids = ids_of(step)
        ends = {"truncated": (1,), "infos": {key: form(nested(torch.tensor([0.0, -7.0])))}} if step == 1 else {}
        storage.add(**make_step(step, **ends, observations=nested(ids), next_observations=nested(ids + 2)))
    batch = storage.sample()
    expected = {1: 3, 2: 4, 3: 5, 4: -7, 5: 7, 6: 8}
    after = torch.tensor([float(expected[int(action)]) for action in batch.actions])
    assert {int(action) for action in batch.actions} == expected.keys()
    assert torch.equal(batch.next_observations["a"], obs_of(after))
    assert torch.equal(batch.next_observations["b", "c"], -after.unsqueeze(-1))


def paired(ids):
    return obs_of(ids), -ids.unsqueeze(-1)


@pytest.mark.parametrize(
    "form",
    [
        lambda pair: pair,
        lambda pair: tuple(part.numpy() for part in pair),
        lambda pair: tuple(objects(None, part[1].numpy()) for part in pair),
        lambda pair: objects(None, tuple(part[1].numpy() for part in pair)),
    ],
    ids=["tuple of tensors", "tuple of arrays", "tuple of object arrays", "object array of tuples"],
)
def test_the_final_observation_of_a_tuple_space_comes_in_any_form(form):
    space = spaces.Tuple([spaces.Box(-1e9, 1e9, (2,)), spaces.Box(-1e9, 1e9, (1,))])
    storage = make_storage(observation_space=space, n_step=1, batch_size=64)
    for step in range(3):
        ids = ids_of(step)
        ends = (
            {"terminated": (1,), "infos": {"final_obs": form(paired(torch.tensor([0.0, -7.0])))}} if step == 1 else {}
        )
        storage.add(**make_step(step, **ends, observations=paired(ids), next_observations=paired(ids + 2)))
    batch = storage.sample()
    expected = {1: 3, 2: 4, 3: 5, 4: -7, 5: 7, 6: 8}
    after = torch.tensor([float(expected[int(action)]) for action in batch.actions])
    assert torch.equal(batch.next_observations[0], obs_of(after))
    assert torch.equal(batch.next_observations[1], -after.unsqueeze(-1))


# ------------------------------------------------------------------------------------------------- gymnasium


def storage_for(vector, steps=40, **options):
    return NStepReplayStorage(
        vector.single_observation_space,
        vector.single_action_space,
        num_envs=vector.num_envs,
        storage_size=steps * vector.num_envs,
        batch_size=6000,
        num_workers=0,
        pin_memory=False,
        n_step=3,
        discount=0.5,
        **options,
    )


def expected_table(played, steps, n_step=3, gamma=0.5):
    """What each real step must be served as, by its number; actions and rewards are the environment's own."""
    found = {}
    for lane_of in played:
        lane = Lane(steps, n_step, gamma)
        for number, _, reward, end, after in lane_of:
            lane.add(number, reward, after, end)
        actions = {number: action for number, action, *_ in lane_of}
        found |= {number: (float(actions[number]), *line[1:]) for number, line in lane.table().items()}
    return found


def numbers_of(batch):
    """Like ``table``, for observations [number, -number]."""
    assert torch.equal(batch.observations[:, 0], -batch.observations[:, 1])
    assert torch.equal(batch.next_observations[:, 0], -batch.next_observations[:, 1])
    columns = (batch.observations[:, 0], batch.actions, batch.rewards[:, 0], batch.discounts[:, 0])
    rows = zip(*(c.tolist() for c in columns), batch.next_observations[:, 0].tolist(), strict=True)
    return {int(number): (action, reward, discount, int(after)) for number, action, reward, discount, after in rows}


MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


@pytest.mark.parametrize(("mode", "told", "steps"), pairs(MODES, [False, True], [40, 7]))
def test_what_a_gymnasium_vector_did_is_what_is_served(mode, told, steps, recwarn):
    vector = make_vector(mode)
    storage = storage_for(vector, steps, **({"autoreset": mode} if told else {}))
    played = drive(vector, storage, 40)
    assert not recwarn.list
    assert sum(len(lane) for lane in played) > 40
    assert len(storage) == sum(min(steps, len(lane)) for lane in played)
    assert_tables(numbers_of(storage.sample()), expected_table(played, steps))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_the_autoreset_mode_may_be_given_by_name(mode):
    by_name, by_member = (make_vector(mode) for _ in range(2))
    storages = storage_for(by_name, autoreset=mode.value), storage_for(by_member, autoreset=mode)
    drive(by_name, storages[0], 25)
    drive(by_member, storages[1], 25)
    assert numbers_of(storages[0].sample()) == numbers_of(storages[1].sample())


def test_the_environment_of_these_tests_resets_in_the_mode_it_was_asked_for():
    """Next-step: fewer real steps than calls, by one for each end but the last. Same-step: as many."""
    counts = {}
    for mode in MODES:
        vector = make_vector(mode)
        played = drive(vector, storage_for(vector), 40)
        counts[mode] = [len(lane) for lane in played]
    assert counts[AutoresetMode.SAME_STEP] == counts[AutoresetMode.DISABLED] == [40, 40, 40]
    assert all(count < 40 for count in counts[AutoresetMode.NEXT_STEP])
    assert isinstance(vector.envs[0], CountingEnv)


def test_a_reset_step_is_not_stored_as_a_transition():
    storage = make_storage(1, n_step=3, discount=0.5)
    storage.add(**make_step(0, 1))
    storage.add(**make_step(1, 1, truncated=(0,), infos={}))  # ends in id 3
    # The reset: from where it ended to the new episode's start, for no reward.
    storage.add(**make_step(2, 1, rewards=[0.0], next_observations=obs_of(torch.tensor([50.0]))))
    assert len(storage) == 2
    storage.add(**make_step(49, 1))
    assert len(storage) == 3
    assert_tables(
        served(storage),
        {1: (1, 1.25 + 2.25 / 2, 0.25, 3), 2: (2, 2.25, 0.5, 3), 50: (50, 50.25, 0.5, 51)},
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": [0.125]},
        {"rewards": [0.0], "terminated": (0,)},
        {"rewards": [0.0], "truncated": (0,)},
        {"rewards": [0.0], "observations": obs_of(torch.tensor([33.0]))},
    ],
    ids=["a reward", "it terminates", "it is truncated", "another observation"],
)
def test_a_step_after_an_end_that_is_no_reset_step_is_stored(changes):
    storage = make_storage(1, n_step=1)
    storage.add(**make_step(0, 1, truncated=(0,), infos={}))
    storage.add(**make_step(1, 1, **changes))
    assert len(storage) == 2


def test_the_step_after_an_end_with_a_final_observation_is_a_step():
    """Same-step autoreset: an episode that starts where another ended, for no reward, is no reset step."""
    storage = make_storage(1, n_step=1)
    same = obs_of(torch.tensor([5.0]))
    storage.add(**make_step(0, 1, truncated=(0,), infos={"final_obs": same}, next_observations=same))
    storage.add(**make_step(1, 1, rewards=[0.0], observations=same))
    assert len(storage) == 2


@pytest.mark.parametrize(
    ("mode", "held"), [("NextStep", 2), ("SameStep", 3), ("Disabled", 3), (AutoresetMode.NEXT_STEP, 2)]
)
def test_a_mode_that_is_told_is_believed(mode, held):
    """Whatever the step after an end looks like; with "SameStep", what cannot be right is warned of."""
    for after in ({}, {"rewards": [0.0]}):
        storage = make_storage(1, autoreset=mode)
        storage.add(**make_step(0, 1, truncated=(0,), infos={}))
        with pytest.warns(UserWarning, match="in which its episode had ended") if mode == "SameStep" else nullcontext():
            storage.add(**make_step(1, 1, **after))
        storage.add(**make_step(2, 1))
        assert len(storage) == held


def test_in_next_step_mode_a_final_observation_is_refused():
    storage = make_storage(1, autoreset="NextStep")
    with pytest.raises(InvalidInputError, match=r"infos holds 'final_obs', .* need autoreset=\"SameStep\""):
        storage.add(**make_step(0, 1, truncated=(0,)))
    assert len(storage) == 0


def test_reset_steps_are_told_for_each_environment_by_itself():
    storage = make_storage(2, n_step=1)
    storage.add(**make_step(0, 2, truncated=(1,), infos={}))  # env 1 ends in id 4
    # Env 0 goes on with a reward of 0, env 1 resets to id 90.
    after = obs_of(torch.tensor([5.0, 90.0]))
    storage.add(**make_step(1, 2, rewards=[0.0, 0.0], next_observations=after))
    assert len(storage) == 3
    storage.add(**make_step(2, 2, observations=obs_of(torch.tensor([5.0, 90.0])), actions=[5, 90]))
    assert {number: line[3] for number, line in served(storage).items()} == {1: 3, 3: 5, 5: 7, 2: 4, 90: 8}


def test_the_reset_step_is_forgotten_with_a_reset_of_the_storage():
    storage = make_storage(1, n_step=1)
    storage.add(**make_step(0, 1, truncated=(0,), infos={}))
    storage.reset()
    storage.add(**make_step(1, 1, rewards=[0.0]))
    assert len(storage) == 1


def test_the_final_observation_stays_when_the_reset_step_was_dropped_and_the_storage_wraps():
    storage = make_storage(1, steps=3, n_step=3, discount=0.5)
    for round_ in range(6):
        storage.add(**make_step(10 * round_, 1))
        storage.add(**make_step(10 * round_ + 1, 1, terminated=(0,), infos={}))
        start = obs_of(torch.tensor([10.0 * round_ + 11]))
        storage.add(**make_step(10 * round_ + 2, 1, rewards=[0.0], next_observations=start))
        got = {number: line[3] for number, line in table(storage.sample()).items()}
        last, older = 10 * round_ + 1, 10 * round_ - 8
        expected = {last: last + 2, last + 1: last + 2}
        assert got == ({older: older + 1, **expected} if round_ else expected)


def test_a_fill_of_ends_alone_is_served(recwarn):
    storage = make_storage(2, 4)
    fill(storage, 9, terminated=(0,), truncated=(1,))
    assert not recwarn.list
    assert all(line[3] == -number for number, line in served(storage).items())
