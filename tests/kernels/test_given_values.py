"""What the kernel reads by itself: arrays of any dtype and layout, numbers, lists; all as torch would convert them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlstore.engine.rows.schema import as_tensor, can_hold
from rlstore.kernels import _native as native

REWARDS, ACTIONS, TERMINATED = 3, 2, 4


class Ring:
    """A ring of a few lanes, with an action of any dtype and shape and a reward; nothing has been written."""

    def __init__(self, lanes: int, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> None:
        counters = tuple(torch.full((lanes,), value) for value in (0, 0, -1, -1, 1))
        self.actions = torch.zeros(lanes, 4, *shape, dtype=dtype)
        self.rewards, self.episodes = torch.zeros(lanes, 4), torch.zeros(lanes, 4, dtype=torch.int64)
        observations, self._zeros = torch.zeros(lanes, 4), torch.zeros(lanes)
        self.ring = native.EpisodeRing(
            3,
            counters,
            torch.zeros(lanes, 4, dtype=torch.int32),
            ((observations, (), 1, 1),),
            ((self.actions, shape), (self.rewards, ())),
            1,
            0,
            0,
        )
        slots = torch.arange(lanes, dtype=torch.int32).view(1, lanes)
        self.ring.set_tables(self.episodes, slots, (torch.zeros(lanes),), (None,))
        self.ring.allow(1)

    def write(self, **given: object) -> int:
        zeros = self._zeros
        actions = torch.zeros(len(zeros), *self.actions.shape[2:], dtype=self.actions.dtype)
        values = {"actions": actions, "rewards": zeros, "terminated": zeros, **given}
        return self.ring.write((zeros, zeros, *values.values(), zeros, None, None, None))


FROM = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"]
NUMBERS = {
    "bool": [True, False],
    "small": [1, 0],
    "negative": [-1, 7],
    "a byte": [255, 128],
    "float's last": [2**24, -(2**24)],
    "beyond": [2**24 + 1, 5],
    "long": [2**31, 2**40],
    "largest": [2**64 - 1, 0],
    "fractions": [0.1, -1e-40],
    "not finite": [float("nan"), 1e300],
}


@pytest.mark.parametrize("held", FROM)
def test_dtypes_are_converted_as_torch_does_or_not_at_all(held):
    dtype = getattr(torch, held)
    for given in FROM:
        for name, numbers in NUMBERS.items():
            try:
                with np.errstate(over="ignore"):
                    array = np.array(numbers, given)
            except (OverflowError, ValueError, DeprecationWarning):  # the last of NumPy 1, which wraps
                continue
            ring, tensor = Ring(2, dtype), torch.from_numpy(array)
            outcome = ring.write(actions=array)
            if not can_hold(tensor, dtype):
                assert outcome == ACTIONS, (given, name)
                continue
            if dtype.is_floating_point and name in ("long", "largest") and outcome == ACTIONS:
                continue  # whether it is one of the few that a float holds is not looked at here
            assert outcome == -1, (given, name)
            assert torch.equal(
                ring.actions[:, 0].view(torch.uint8) if held == "bool" else ring.actions[:, 0].double().nan_to_num(9),
                tensor.to(dtype).view(torch.uint8) if held == "bool" else tensor.to(dtype).double().nan_to_num(9),
            ), (given, name)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(24.0).reshape(4, 6)[::2, ::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(6, dtype=np.float32).reshape(2, 3)[::-1, ::-1],
        np.arange(12, dtype=np.uint8).reshape(2, 3, 2)[..., 1],
    ],
    ids=["every other", "Fortran", "backwards", "a channel"],
)
def test_arrays_that_are_not_contiguous_are_read_by_their_strides(value):
    ring = Ring(2, torch.float32, (3,))
    assert ring.write(actions=value) == -1
    assert ring.actions[:, 0].tolist() == value.tolist()


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (0.1, 0.1),
        (True, 1.0),
        (-3, -3.0),
        (np.float64(0.1), 0.1),
        (np.float32(0.1), 0.1),
        (np.int64(-3), -3.0),
        (np.uint8(200), 200.0),
        (np.True_, 1.0),
        (np.array(0.1), 0.1),
        ([0.1], 0.1),
        ((2,), 2.0),
        ([np.float32(0.5)], 0.5),
    ],
    ids=repr,
)
def test_a_number_of_a_single_environment_is_read_whatever_it_is(value, held):
    ring = Ring(1, torch.int64)
    assert ring.write(rewards=value) == -1
    assert ring.rewards[0, 0].item() == torch.tensor(held).item()


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ([True, False], [1, 0]),
        ((0, 3), [0, 1]),
        ([0.0, 0.5], [0, 1]),
        ([np.True_, np.False_], [1, 0]),
        ([1, 0.0], [1, 0]),
    ],
)
def test_flags_are_read_from_lists(flags, ends):
    ring = Ring(2, torch.int64)
    assert ring.write(terminated=flags) == -1
    assert ring.episodes[:, 2].tolist() == ends


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        [1, 2**70],
        [2**53 + 1, 0.5],
        np.uint64(2**64 - 1),
        [[1], [2]],
        ["1", "2"],
        [],
        [None, 1],
        np.array([1, 2], ">i4"),
        np.array([1, 2], object),
        np.array([1, 2], "m8[s]"),
        float("inf"),
    ],
    ids=repr,
)
def test_everything_else_is_left_to_be_converted_or_refused(value):
    ring = Ring(2, torch.int64)
    assert ring.write(actions=value) == ACTIONS
    assert not ring.actions.any()


def test_a_whole_number_is_one_of_a_discrete_action():
    ring = Ring(1, torch.uint8)
    assert ring.write(actions=255) == -1
    assert ring.actions[0, 0].item() == 255
    assert Ring(1, torch.uint8).write(actions=256) == ACTIONS
    assert Ring(1, torch.uint8).write(actions=1.0) == ACTIONS
    assert not can_hold(as_tensor(1.0, "actions"), torch.uint8)
