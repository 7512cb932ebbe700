"""DecoupledRolloutStorage: what is refused, and that a refused call changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoupled_ids import assert_same, fill, leaves, make_step, make_storage, snapshot
from gymnasium import spaces

from rlstore import DecoupledRolloutStorage

BOX = spaces.Box(-1e9, 1e9, (2,))
NAN = float("nan")

SCALARS = ("rewards", "log_probs", "values", "adv_preds", "final_values")
FLAGS = ("terminateds", "truncateds")
OBSERVATIONS = ("obs", "next_obs")

COLUMNS = (*SCALARS, *FLAGS, "actions")
BAD = [
    *((name, None) for name in (*SCALARS[:4], *FLAGS, *OBSERVATIONS, "actions")),
    *((name, object()) for name in (*COLUMNS, *OBSERVATIONS)),
    *((name, torch.zeros(shape)) for name in COLUMNS for shape in ((3,), (1,), (), (2, 2), (2, 1, 1), (1, 2))),
    *((name, torch.zeros(2, dtype=torch.complex64)) for name in COLUMNS),
    *((name, bad) for name in COLUMNS for bad in (["a", "b"], [0.0, [1.0]])),
    *((name, bad) for name in FLAGS for bad in (torch.tensor([NAN, 0.0]), np.array([0.0, NAN]))),
    *((name, torch.zeros(shape)) for name in OBSERVATIONS for shape in ((2, 3), (3, 2), (2,))),
    *((name, torch.zeros(2, 2, dtype=torch.complex64)) for name in OBSERVATIONS),
    *((name, {"a": torch.zeros(2, 2)}) for name in OBSERVATIONS),
    *((name, (torch.zeros(2, 2), torch.zeros(2, 2))) for name in OBSERVATIONS),
]


@pytest.mark.parametrize("rows", [0, 1, 3], ids=["empty", "midway", "full"])
def test_a_bad_argument_of_add_is_named_and_nothing_changes(rows):
    storage = make_storage(3, 2, seed=0)
    fill(storage, first=90, terminated=(0,), truncated=(1,))
    storage.compute_returns_and_advantages(torch.ones(2))
    storage.update()
    if rows == 0:
        storage.reset()
    elif rows < 3:
        storage.add(**make_step(0, 2, (1,), (0,), final_values=[3.0, 4.0]))
    before = snapshot(storage)
    for name, value in BAD:
        with pytest.raises(ValueError, match=name):
            storage.add(**make_step(7, **{name: value}))
        assert_same(before, snapshot(storage))


def test_the_storage_works_on_after_a_refusal():
    storage = make_storage(2, 2)
    storage.add(**make_step(0))
    with pytest.raises(ValueError, match="rewards"):
        storage.add(**make_step(1, rewards=torch.zeros(5)))
    storage.add(**make_step(1))
    storage.compute_returns_and_advantages(torch.zeros(2))
    assert storage.actions.tolist() == [[1, 2], [3, 4]]


NEST = spaces.Dict({"image": spaces.Box(0, 255, (2,), np.uint8), "inner": spaces.Dict({"speed": BOX})})


def nest(**changes):
    return {"image": torch.full((2, 2), 7, dtype=torch.uint8), "inner": {"speed": torch.ones(2, 2)}, **changes}


BAD_NESTS = [
    ({"image": nest()["image"]}, "speed"),
    ({"inner": nest()["inner"]}, "image"),
    (nest(depth=torch.zeros(2, 2)), "depth"),
    (nest(inner={"speed": torch.ones(2, 2), "gear": torch.ones(2)}), "gear"),
    (nest(inner=torch.ones(2, 2)), "inner"),
    (nest(image=torch.zeros(2, 2) + 0.5), "image"),
    (nest(image=torch.full((2, 2), 256)), "image"),
    (nest(image=torch.full((2, 2), -1)), "image"),
    (nest(image=None), "image"),
    (nest(inner={"speed": torch.ones(2, 3)}), "speed"),
    ({}, "image"),
    (torch.zeros(2, 2), "image"),
]


@pytest.mark.parametrize("argument", OBSERVATIONS)
def test_bad_leaves_of_an_observation_are_named_and_nothing_changes(argument):
    storage = make_storage(2, 2, observation_space=NEST)
    storage.add(**make_step(0, obs=nest(), next_obs=nest()))
    before = snapshot(storage)
    for bad, named in BAD_NESTS:
        with pytest.raises(ValueError, match=named):
            storage.add(**{**make_step(1, obs=nest(), next_obs=nest()), argument: bad})
        assert_same(before, snapshot(storage))
    assert all(leaf.shape[:2] == (3, 2) for _, leaf in leaves(storage.obs))


# ------------------------------------------------------------------------------------------------- too early, too many


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("earlier_rollout", [False, True])
def test_computing_and_sampling_in_the_middle_of_a_rollout_are_refused(rows, earlier_rollout):
    storage = make_storage(3, 2, seed=0)
    if earlier_rollout and rows:
        fill(storage, first=40)
        storage.compute_returns_and_advantages(torch.ones(2))
    for step in range(rows):
        storage.add(**make_step(step))
    before = snapshot(storage)
    with pytest.raises(ValueError, match=f"{rows} of 3" if rows else "no data"):
        storage.compute_returns_and_advantages(torch.zeros(2))
    with pytest.raises(ValueError, match=f"{rows} of 3" if rows else "no data"):
        next(iter(storage.sample(1)))
    assert_same(before, snapshot(storage))


def test_more_mini_batches_than_rows_or_no_number_at_all_is_refused():
    storage = make_storage(3, 2, seed=0)
    fill(storage)
    before = snapshot(storage)
    for count in (7, 100, 0, -1, 1.5, None, True, "2"):
        with pytest.raises(ValueError, match="mini-batches"):
            next(iter(storage.sample(count)))
    assert_same(before, snapshot(storage))


def test_bad_last_values_are_refused_and_nothing_changes():
    storage = make_storage(3, 2)
    fill(storage)
    storage.compute_returns_and_advantages(torch.ones(2))
    before = snapshot(storage)
    shapes = ((3,), (1,), (1, 2), (2, 2), ())
    for bad in (None, *(torch.zeros(shape) for shape in shapes), ["a", "b"], torch.zeros(2) * 1j):
        with pytest.raises(ValueError, match="last_values"):
            storage.compute_returns_and_advantages(bad)
    assert_same(before, snapshot(storage))


# ------------------------------------------------------------------------------------------------- construction

NO_SIZE, NO_FRACTION = (0, -1, 2.5, None, "3", True), (-0.1, 1.1, NAN, float("inf"), None, "0.9", True)
REFUSED = {
    "num_steps": NO_SIZE,
    "num_envs": NO_SIZE,
    "discount": NO_FRACTION,
    "gae_lambda": NO_FRACTION,
    "device": ("toaster", "cuda:99", "meta", 3.5, None),
    "seed": (-1, 1.5, "7", 2**64),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_out_of_range_is_refused_by_name(name):
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=name):
            make_storage(**{name: value})


@pytest.mark.parametrize(
    ("spaces_given", "message"),
    [
        ((None, spaces.Discrete(2)), "observation_space"),
        ((BOX, None), "action_space"),
        (({"type": "Box"}, spaces.Discrete(2)), "shape"),
        ((BOX, {"type": "Box"}), "shape"),
        (({"shape": ("a",)}, spaces.Discrete(2)), "shape"),
        (({"shape": (-1,)}, spaces.Discrete(2)), "shape"),
    ],
)
def test_spaces_that_say_too_little_are_refused(spaces_given, message):
    with pytest.raises(ValueError, match=message):
        DecoupledRolloutStorage(*spaces_given, num_steps=2, num_envs=2)
