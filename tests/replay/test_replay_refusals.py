"""Replay storages: what is refused, what the error says, and that a refused call changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nstep_steps import obs_of
from replay_kinds import (
    FLAT,
    KINDS,
    assert_same,
    assert_tells,
    assert_untouched,
    objects,
    state,
    twins,
)

from rlstore import NotReadyError, StorageError

NAN, INF = float("nan"), float("inf")

SCALARS = ("actions", "rewards", "terminateds", "truncateds")
FLAGS = ("terminateds", "truncateds")
OBSERVATIONS = ("observations", "next_observations")

BAD = [
    *((name, None, "missing") for name in (*SCALARS, *OBSERVATIONS)),
    *((name, torch.zeros(3), "too many envs") for name in SCALARS),
    *((name, torch.zeros(1), "one env for all") for name in SCALARS),
    *((name, 0.0, "one number for all") for name in SCALARS),
    *((name, torch.zeros(2, 2), "two dimensions") for name in SCALARS),
    *((name, torch.zeros(1, 2), "transposed") for name in SCALARS),
    *((name, torch.zeros(2, dtype=torch.complex64), "complex") for name in SCALARS),
    *((name, ["a", "b"], "text") for name in SCALARS),
    *((name, [0.0, [1.0]], "ragged") for name in SCALARS),
    *((name, object(), "an object") for name in (*SCALARS, *OBSERVATIONS)),
    *((name, torch.tensor([NAN, 0.0]), "nan") for name in FLAGS),
    *((name, np.array([0.0, NAN]), "nan in numpy") for name in FLAGS),
]
BAD_BOXES = [
    *((name, torch.zeros(2, 3), "too long") for name in OBSERVATIONS),
    *((name, torch.zeros(3, 2), "too many envs") for name in OBSERVATIONS),
    *((name, torch.zeros(2), "too flat") for name in OBSERVATIONS),
    *((name, torch.zeros(2, 2, dtype=torch.complex64), "complex") for name in OBSERVATIONS),
    *((name, {"a": torch.zeros(2, 2)}, "a dict") for name in OBSERVATIONS),
    *((name, (torch.zeros(2, 2), torch.zeros(2, 2)), "a tuple of two observations") for name in OBSERVATIONS),
    *((name, [["a", "b"], ["c", "d"]], "text") for name in OBSERVATIONS),
]


def ids(cases):
    return [f"{name}: {why}" for name, _, why in cases]


@pytest.fixture(params=KINDS, ids=repr)
def kind(request):
    return request.param


# ------------------------------------------------------------------------------------------------- add


@pytest.mark.parametrize(("name", "value", "why"), BAD, ids=ids(BAD))
@pytest.mark.parametrize("rows", [0, 4, 9], ids=["empty", "midway", "wrapped"])
def test_a_bad_argument_of_add_is_named_and_nothing_changes(kind, rows, name, value, why):
    storage, twin = twins(kind, rows)
    with pytest.raises(ValueError, match=rf"(?s){name}.*Nothing was (written|changed)"):
        storage.add(**kind.step(rows, **{name: value}))
    assert_untouched(kind, storage, twin, rows)


@pytest.mark.parametrize(("name", "value", "why"), BAD_BOXES, ids=ids(BAD_BOXES))
@pytest.mark.parametrize("kind", FLAT, ids=repr)
def test_a_bad_observation_is_named_and_nothing_changes(kind, name, value, why):
    storage, twin = twins(kind, 4)
    with pytest.raises(ValueError, match=rf"(?s){name}.*Nothing was (written|changed)"):
        storage.add(**kind.step(4, **{name: value}))
    assert_untouched(kind, storage, twin, 4)


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"achieved_goal": None}, "achieved_goal"),
        ({"achieved_goal": torch.zeros(2, 3)}, "achieved_goal"),
        ({"desired_goal": torch.zeros(3, 2)}, "desired_goal"),
        ({"observation": ["a", "b"]}, "observation"),
        ({"speed": torch.zeros(2, 2)}, "speed"),
        ("without desired_goal", "desired_goal"),
        ("a tensor", "observation"),
    ],
    ids=str,
)
def test_bad_keys_and_leaves_of_goals_are_named_and_nothing_changes(name, changed, named):
    (kind,) = [kind for kind in KINDS if kind.name == "hindsight"]
    storage, twin = twins(kind, 4)
    good = kind.observations(torch.tensor([9.0, 10.0]))
    if isinstance(changed, dict):
        bad = {**good, **changed}
    else:
        bad = obs_of(torch.ones(2)) if changed == "a tensor" else {k: v for k, v in good.items() if k != "desired_goal"}
    with pytest.raises(ValueError, match=rf"(?s){named}.*Nothing was (written|changed)"):
        storage.add(**kind.step(4, **{name: bad}))
    assert_untouched(kind, storage, twin, 4)


BAD_FINALS = [
    (torch.zeros(2, 3), "too long"),
    (torch.zeros(3, 2), "too many envs"),
    (objects(np.zeros(2), np.zeros(3)), "one of the wrong length"),
    (objects(np.zeros(2)), "too few entries"),
    (["a", "b"], "text"),
    (7.0, "a number"),
    ({"a": torch.zeros(2, 2)}, "a dict"),
]


@pytest.mark.parametrize(("final", "why"), BAD_FINALS, ids=[why for _, why in BAD_FINALS])
@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
@pytest.mark.parametrize("kind", FLAT, ids=repr)
def test_a_bad_final_observation_is_named_and_nothing_changes(kind, key, final, why):
    storage, twin = twins(kind, 4)
    with pytest.raises(ValueError, match=rf"(?s){key}.*Nothing was (written|changed)"):
        storage.add(**kind.step(4, terminated=(0, 1), infos={key: final}))
    assert_untouched(kind, storage, twin, 4)


@pytest.mark.parametrize("infos", [7, "infos", [1, 2], object()], ids=["number", "text", "list", "object"])
def test_infos_that_are_none_are_refused(kind, infos):
    storage, twin = twins(kind, 4)
    with pytest.raises(ValueError, match=r"(?s)infos.*Nothing was (written|changed)"):
        storage.add(**kind.step(4, infos=infos))
    assert_untouched(kind, storage, twin, 4)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(3, dtype=torch.bool), torch.ones(1), True, torch.ones(2, 2), [True, NAN], "all", [[True], [True, 1]]],
    ids=["too many", "too few", "one for all", "two dimensions", "nan", "text", "ragged"],
)
def test_a_bad_mask_is_refused(kind, mask):
    storage, twin = twins(kind, 4)
    with pytest.raises(ValueError, match=r"(?s)mask.*Nothing was (written|changed)"):
        storage.add(**kind.step(4, mask=mask))
    assert_untouched(kind, storage, twin, 4)


def test_what_an_environment_that_sat_out_is_given_is_not_refused(kind):
    """A mask that leaves all of them out adds nothing, whatever the numbers are."""
    storage, twin = twins(kind, 4)
    rubbish = kind.observations(torch.full((2,), NAN))
    flags = {name: torch.full((2,), NAN) for name in FLAGS}
    given = {"observations": rubbish, "next_observations": rubbish, "rewards": [NAN, INF], **flags}
    storage.add(**kind.step(4, mask=[False, False], **given))
    assert_untouched(kind, storage, twin, 4)


def test_an_unknown_argument_of_add_is_refused(kind):
    storage, twin = twins(kind, 4)
    with pytest.raises(TypeError, match="reward"):
        storage.add(**kind.step(4), reward=torch.zeros(2))
    with pytest.raises(TypeError, match="next_observations"):
        storage.add(*list(kind.step(4).values())[:6])
    assert_untouched(kind, storage, twin, 4)


def test_an_error_tells_what_was_given_what_was_expected_and_from_where(kind):
    storage, twin = twins(kind, 4)
    with pytest.raises(ValueError, match="rewards") as refused:
        storage.add(**kind.step(4, rewards=torch.zeros(7)))
    assert_tells(refused, "rewards", "(7,)", "float32", "(2,", "Nothing was written")
    with pytest.raises(ValueError, match="actions") as refused:
        storage.add(**kind.step(4, actions=torch.zeros(2, 5)))
    assert_tells(refused, "actions", "(2, 5)", "action_space", "Nothing was written")
    if kind in FLAT:
        with pytest.raises(ValueError, match="observations") as refused:
            storage.add(**kind.step(4, observations=torch.zeros(2, 9)))
        assert_tells(refused, "observations", "(2, 9)", "(2, 2)", "observation_space", "Nothing was written")
    assert_untouched(kind, storage, twin, 4)


@pytest.mark.parametrize("kind", FLAT, ids=repr)
def test_values_that_do_not_fit_their_dtype_are_refused(kind):
    from gymnasium import spaces

    space = spaces.Box(0, 255, (2,), np.uint8)
    for bad in (256, -1, 0.5):
        storage = kind.make(observation_space=space)
        ones = torch.ones(2, 2, dtype=torch.uint8)
        storage.add(**kind.step(0, observations=ones, next_observations=ones))
        before = state(storage)
        for name in OBSERVATIONS:
            given = {**dict.fromkeys(OBSERVATIONS, ones), name: torch.full((2, 2), bad)}
            with pytest.raises(ValueError, match=rf"(?s){name}.*uint8.*Nothing was written"):
                storage.add(**kind.step(1, **given))
        assert_same(state(storage), before)
        storage.close()


@pytest.mark.parametrize("kind", FLAT, ids=repr)
@pytest.mark.parametrize(
    ("reward_shape", "rewards"),
    [((3,), torch.zeros(2)), ((3,), torch.zeros(2, 1)), ((3,), torch.zeros(2, 2)), ((), torch.zeros(2, 3))],
    ids=["a scalar", "a column", "too short", "a vector"],
)
def test_rewards_of_another_shape_are_refused(kind, reward_shape, rewards):
    storage = kind.make(reward_shape=reward_shape)
    good = torch.ones(2, *reward_shape)
    storage.add(**kind.step(0, rewards=good))
    before = state(storage)
    with pytest.raises(ValueError, match="rewards") as refused:
        storage.add(**kind.step(1, rewards=rewards))
    assert_tells(refused, "rewards", str(tuple(rewards.shape)), "Nothing was written")
    assert_same(state(storage), before)
    storage.add(**kind.step(1, rewards=good))
    assert len(storage) == 4
    storage.close()


# ------------------------------------------------------------------------------------------------- too early


def test_a_batch_of_an_empty_storage_is_refused_and_works_later(kind):
    storage, twin = twins(kind, 0)
    asks = [
        storage.sample,
        lambda: storage.sample(4),
        lambda: next(iter(storage.generate_batches(1, 4))),
    ]
    if hasattr(storage, "replay_iter"):
        asks.append(lambda: next(storage.replay_iter))
    for ask in asks:
        with pytest.raises(NotReadyError, match=r"(?i)empty|no data|nothing|no transitions"):
            ask()
    assert_untouched(kind, storage, twin, 0)


def test_sequences_have_to_be_long_enough_or_over():
    """One window of 3 steps needs 3 steps, or an episode that ended before."""
    (kind,) = [kind for kind in KINDS if kind.name == "sequence"]
    storage = kind.make(num_envs=1)
    for step in range(2):
        storage.add(**kind.step(step, 1))
        with pytest.raises(NotReadyError):
            storage.sample()
    storage.add(**kind.step(2, 1))
    assert storage.sample().rewards.shape == (24, 3, 1)


@pytest.mark.parametrize("size", [0, -1, 1.5, "4", True, [3]])
def test_a_batch_size_that_is_none_is_refused(kind, size):
    storage, twin = twins(kind, 4)
    with pytest.raises(ValueError, match=r"batch_size|mini_batch_size"):
        storage.sample(size)
    assert_untouched(kind, storage, twin, 4)


# ------------------------------------------------------------------------------------------------- hindsight

(HINDSIGHT,) = [kind for kind in KINDS if kind.name == "hindsight"]


class OwnError(Exception):
    """The caller's."""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_compute_reward_reaches_the_caller_and_the_storage_works_on(num_workers):
    broken = True

    def compute_reward(achieved, desired, info):
        if broken:
            raise OwnError("no reward today")
        return torch.zeros(len(achieved))

    storage = HINDSIGHT.make(compute_reward=compute_reward, num_workers=num_workers)
    HINDSIGHT.fill(storage, 5)
    before = state(storage)
    for _ in range(2):
        with pytest.raises(OwnError, match="no reward today"):
            storage.sample()
    assert_same(state(storage), before)
    broken = False
    # What was prepared while it was broken may still say so; what is drawn from now on does not.
    for _ in range(num_workers):
        try:
            storage.sample()
        except OwnError:
            continue
    assert storage.sample().rewards.shape == (24, 1)
    storage.close()


@pytest.mark.parametrize(
    "result",
    [
        torch.zeros(23),
        torch.zeros(25),
        torch.zeros(24, 2),
        0.0,
        None,
        ["a"] * 24,
        torch.zeros(24) * 1j,
    ],
    ids=["too few", "too many", "two columns", "a number", "none", "text", "complex"],
)
def test_a_compute_reward_that_does_not_give_a_number_for_each_row_is_named(result):
    storage = HINDSIGHT.make(compute_reward=lambda achieved, desired, info: result)
    HINDSIGHT.fill(storage, 5)
    before = state(storage)
    with pytest.raises(ValueError, match="compute_reward") as refused:
        storage.sample()
    if isinstance(result, torch.Tensor):
        assert_tells(refused, str(tuple(result.shape)), "24")
    assert isinstance(refused.value, StorageError)
    assert_same(state(storage), before)


# ------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", ["gammma", "", "observation_space", "_generator", "nstep", None])
def test_an_unknown_parameter_is_refused_and_the_known_are_named(kind, name):
    storage, twin = twins(kind, 4)
    with pytest.raises((AttributeError, ValueError), match="batch_size") as refused:
        storage.update_storage_parameter(name, 1)
    assert isinstance(refused.value, StorageError)
    assert_untouched(kind, storage, twin, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("batch_size", value) for value in (0, -1, 1.5, None, "8")),
        *(("discount", value) for value in (-0.1, 1.1, NAN, None)),
        *(("n_step", value) for value in (0, -1, 7, 2.5)),
        *(("beta", value) for value in (-0.1, 1.1, NAN)),
        *(("storage_size", value) for value in (100, 0)),
    ],
)
def test_a_bad_value_of_a_parameter_is_refused_and_nothing_changes(kind, name, value):
    """Six steps an environment: an n_step of 7 is too long, and a storage that holds data keeps its size."""
    storage, twin = twins(kind, 4)
    with pytest.raises((AttributeError, ValueError), match=name):
        storage.update_storage_parameter(name, value)
    assert_untouched(kind, storage, twin, 4)


def test_a_parameter_takes_effect_at_once(kind):
    storage = kind.make()
    kind.fill(storage, 4)
    storage.update_storage_parameter("batch_size", 7)
    assert storage.batch_size == 7
    assert len(storage.sample().rewards) == 7
    storage.close()


# ------------------------------------------------------------------------------------------------- closed


def test_a_closed_storage_says_so(kind):
    storage = kind.make()
    kind.fill(storage, 4)
    storage.sample()
    storage.close()
    storage.close()
    for use in (
        lambda: storage.add(**kind.step(4)),
        storage.sample,
        lambda: next(iter(storage.generate_batches(1, 4))),
    ):
        with pytest.raises((RuntimeError, ValueError), match="closed") as refused:
            use()
        assert isinstance(refused.value, StorageError)
