"""Odd values in every field of every class: refused by the name of the field, or what NumPy makes of them.

Exact numbers of other libraries, text and missing values are refused, and so are numbers that a field cannot hold.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from replay_cases import REPLAY_CASES
from rollout_model import same_data
from storages import CASES
from test_distributed_trainer import ENVS as DISTRIBUTED_ENVS
from test_distributed_trainer import make as make_distributed
from test_distributed_trainer import sample_of as distributed_sample
from where import SEES_VALUES

from rlstore import (
    DecoupledRolloutStorage,
    InvalidInputError,
    PrioritizedReplayStorage,
    ReplayStorage,
    RolloutStorage,
)

NAN, INF = math.nan, math.inf
FLAGS = ("terminated", "truncated")
FLOATS = ("values", "log_probs", "adv_preds")  # any number
REFUSED = None
# What fields are called in errors, also in rollouts of actors.
CALLED = {"rewards": "rewards?", "actions": "actions?", "values": "(values|baseline)", "log_probs": "log_prob"}

# What is given for each environment; what it is as a flag, as a reward, as another float32, as an action of a Discrete
# space. REFUSED: not at all.
ODD: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "Fraction": (Fraction(1, 2), REFUSED, REFUSED, REFUSED, REFUSED),
    "Decimal": (Decimal(1), REFUSED, REFUSED, REFUSED, REFUSED),
    "text": ("True", REFUSED, REFUSED, REFUSED, REFUSED),
    "None": (None, REFUSED, REFUSED, REFUSED, REFUSED),
    "complex": (1j, REFUSED, REFUSED, REFUSED, REFUSED),
    "2**64": (2**64, REFUSED, REFUSED, REFUSED, REFUSED),
    "a function": (len, REFUSED, REFUSED, REFUSED, REFUSED),
    "uint64 2**63": (np.uint64(2**63), 1.0, 2.0**63, 2.0**63, REFUSED),
    "1e300": (1e300, 1.0, REFUSED, INF, REFUSED),
    "-1": (-1, 1.0, -1.0, -1.0, REFUSED),
    "half": (0.5, 1.0, 0.5, 0.5, REFUSED),
    "nan": (NAN, REFUSED, REFUSED, NAN, REFUSED),
    "inf": (INF, 1.0, REFUSED, INF, REFUSED),
    "True": (True, 1.0, 1.0, 1.0, 1.0),
}


def cases():
    """(name, how it is made, a sample of it, environments)."""
    for case in CASES:
        yield case.name, lambda c=case: c.create_factory(4, seed=3)("cpu", None, None), case.sample, 3
    for replay in REPLAY_CASES:
        yield replay.name, replay.make, replay.sample, 2
    yield "distributed", lambda: make_distributed(size=2), distributed_sample, DISTRIBUTED_ENVS


STORAGES = {name: rest for name, *rest in cases()}


def expectation(name: str, odd: str, is_discrete: bool) -> Any:
    _, flag, reward, number, action = ODD[odd]
    if name in FLAGS:
        return flag
    if name == "rewards":
        return reward
    return number if name in FLOATS or not is_discrete else action


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", STORAGES)
def test_an_odd_value_is_refused_by_name_or_what_numpy_makes_of_it(kind, odd):
    make, sample, envs = STORAGES[kind]
    fields = [name for name in (*FLAGS, "rewards", *FLOATS, "actions") if name in sample(0)]
    assert len(fields) >= 4
    for name in fields:
        storage, twin, given, plain = make(), make(), sample(1), sample(1)
        shape = (envs,) if name in (*FLAGS, "rewards", *FLOATS) else tuple(given[name].shape)
        # A DecoupledRolloutStorage without spaces holds all actions as float32.
        is_float = name in FLOATS or given[name].dtype.is_floating_point or kind.startswith("decoupled")
        is_discrete = name == "actions" and not is_float
        expected = expectation(name, odd, is_discrete)
        if expected is REFUSED and isinstance(ODD[odd][0], float) and not SEES_VALUES:
            continue  # the device counts it
        if is_discrete and odd == "-1":
            expected = -1  # of actors without spaces: any whole number
        values: Any = ODD[odd][0]
        for length in reversed(shape):
            values = [values] * length
        given[name] = np.array(values) if isinstance(ODD[odd][0], np.generic) else values
        storage.insert_transition(sample(0))
        if expected is REFUSED:
            with pytest.raises(InvalidInputError, match=rf"{CALLED.get(name, name)}.*Nothing was written"):
                storage.insert_transition(given)
            storage.insert_transition(sample(1))
        else:
            storage.insert_transition(given)
            dtype = torch.bool if name in FLAGS else torch.int64 if is_discrete else torch.float32
            plain[name] = torch.full(shape, expected).to(dtype)
        for sample_of_twin in (sample(0), plain):
            twin.insert_transition(sample_of_twin)
        same_data(storage.get_all_buffer_data(), twin.get_all_buffer_data())


BOX, DISCRETE = spaces.Box(-9, 9, (2,)), spaces.Discrete(3)
HUGE = 2**40
FORMS = {
    "array": lambda shape: np.broadcast_to(np.float32(1), shape),
    "tensor": lambda shape: torch.ones(1).view([1] * len(shape)).expand(shape),
    "array of halves": lambda shape: np.broadcast_to(np.float16(1), shape),
    "integers": lambda shape: torch.ones(1, dtype=torch.int16).view([1] * len(shape)).expand(shape),
}


def replay_step(envs: int) -> dict[str, Any]:
    zeros = np.zeros(envs, np.float32)
    step = dict.fromkeys(("rewards", "terminateds", "truncateds"), zeros)
    observations = dict.fromkeys(("observations", "next_observations"), np.zeros((envs, 2), np.float32))
    return {**observations, "actions": np.zeros(envs, np.int64), **step, "infos": {}, "cost": zeros}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_more_rows_than_any_memory_holds_are_refused_by_name_with_their_sizes(envs, form, wide):
    huge = FORMS[form]((HUGE, 2) if wide else (HUGE,))
    storage = ReplayStorage(BOX, DISCRETE, storage_size=30, num_envs=envs, extra_fields={"cost": ((), torch.float32)})
    decoupled = DecoupledRolloutStorage(BOX, DISCRETE, num_steps=2, num_envs=envs)
    for name in (*replay_step(envs), "mask"):
        if name == "infos":
            continue
        with pytest.raises(InvalidInputError, match=rf"{name}.*{HUGE}.*Nothing was written"):
            storage.add(**{**replay_step(envs), name: huge})
    zeros = np.zeros(envs, np.float32)
    for place in range(9):
        step: list[Any] = [zeros] * 9
        step[0] = step[5] = np.zeros((envs, 2), np.float32)
        step[1], step[place] = np.zeros(envs, np.int64), huge
        if place == 1:
            step[1] = huge
        with pytest.raises(InvalidInputError, match=rf"{HUGE}.*Nothing was written"):
            decoupled.add(*step)
    assert len(storage) == len(decoupled) == 0


@pytest.mark.parametrize("form", FORMS)
def test_more_priorities_and_attributes_than_any_memory_holds_are_refused(form):
    huge = FORMS[form]((HUGE,))
    storage = PrioritizedReplayStorage(BOX, DISCRETE, storage_size=30, num_envs=3)
    step = replay_step(3)
    del step["cost"]
    storage.add(**step)
    for rows, priorities in ((np.arange(3), huge), (huge, np.ones(3)), (huge, huge)):
        with pytest.raises(InvalidInputError, match=rf"{HUGE}|rows are"):
            storage.update(rows, priorities)
    with pytest.raises(InvalidInputError, match=f"{HUGE}"):
        storage.add(**step, priorities=huge)
    rollout = RolloutStorage("rl", 3, 2, {"policy": torch.zeros(3, 2)}, [1])
    with pytest.raises(InvalidInputError, match=rf"rewards (are|is|cannot become) .*({HUGE}|ndarray)"):
        rollout.rewards = huge
    assert len(storage) == 3


@pytest.mark.parametrize("envs", [1, 2])
def test_a_range_is_its_numbers_as_for_numpy_and_an_iterator_is_refused(envs):
    storage = ReplayStorage(BOX, DISCRETE, storage_size=30, num_envs=envs)
    step = replay_step(envs)
    del step["cost"]
    numbers = range(envs)
    storage.add(**{**step, "actions": numbers, "rewards": numbers, "truncateds": numbers})
    data = storage.get_all_buffer_data()
    assert data["actions"].flatten().tolist() == data["rewards"].flatten().tolist() == list(numbers)
    assert data["truncated"].flatten().tolist() == [bool(number) for number in numbers]
    for name in ("actions", "rewards", "truncateds", "terminateds", "observations"):
        with pytest.raises(InvalidInputError, match=rf"{name.rstrip('s')}.*Nothing was written"):
            storage.add(**{**step, name: iter(numbers)})


def test_pixels_and_whole_numbers_hold_what_fits_and_nothing_else():
    pixels = spaces.Box(0, 255, (2,), np.uint8)
    extra = {"tally": ((), torch.int64), "small": ((), torch.int8)}
    storage = ReplayStorage(pixels, DISCRETE, storage_size=30, extra_fields=extra)

    def add(**given: Any) -> None:
        obs = np.zeros((1, 2), np.uint8)
        step = {"observations": obs, "actions": [0], "rewards": [0.0], "terminateds": [0], "truncateds": [0]}
        storage.add(**{**step, "infos": {}, "next_observations": obs, "tally": [0], "small": [0], **given})

    add(observations=[[255, 0]], tally=[2**63 - 1], small=[-128])
    data = storage.get_all_buffer_data()
    assert data["observations"].flatten().tolist() == [255, 0]
    assert (data["tally"].item(), data["small"].item()) == (2**63 - 1, -128)
    for odd in (256, -1, 0.5, 1e300, NAN, "1", None, 2**64, Fraction(1), Decimal(1)):
        with pytest.raises(InvalidInputError, match=r"observations.*Nothing was written"):
            add(observations=[[odd, odd]])
        if odd not in (256, -1):
            with pytest.raises(InvalidInputError, match=r"tally.*Nothing was written"):
                add(tally=[odd])
        if odd != -1:
            with pytest.raises(InvalidInputError, match=r"small.*Nothing was written"):
                add(small=[odd])
    assert len(storage) == 1
