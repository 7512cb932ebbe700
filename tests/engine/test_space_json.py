"""Settings go to JSON and come back."""

from __future__ import annotations

import json
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import InvalidInputError
from rlstore.engine.disk.space_json import from_json, to_json


def there_and_back(value):
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))


class HydraConfig:
    """A mapping to all who ask it, and none to isinstance."""

    def __init__(self, **entries):
        self._entries = entries

    def keys(self):
        return self._entries.keys()

    def items(self):
        return self._entries.items()

    def get(self, key):
        return self._entries.get(key)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**62),
        0.1,
        1e-310,
        math.inf,
        -math.inf,
        "",
        "wörter",
        (),
        (1, (2.5, "a"), [3, None]),
        [],
        {"a": {"b": (1,)}, "c": [torch.uint8, torch.bfloat16]},
    ],
)
def test_plain_values(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_not_a_number():
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.bool_(True), True),
        (np.uint8, torch.uint8),
        (np.dtype("float64"), torch.float64),
        (HydraConfig(shape=[3, 4], dtype="uint8"), {"shape": [3, 4], "dtype": "uint8"}),
    ],
)
def test_values_that_come_back_in_a_plainer_form(value, expected):
    back = there_and_back(value)
    assert back == expected
    assert type(back) is type(expected)


SPACES = [
    spaces.Box(-math.inf, math.inf, (3,), np.float32),
    spaces.Box(0, 255, (2, 3, 4), np.uint8),
    spaces.Box(np.array([-1.0, 0.1, -math.inf]), np.array([1.0, 0.3, math.inf]), dtype=np.float64),
    spaces.Box(np.array([[0], [-5]], dtype=np.int16), np.array([[7], [6]], dtype=np.int16), dtype=np.int16),
    spaces.Box(-(2**63), 2**63 - 2, (2,), np.int64),
    spaces.Box(0.1, 0.7, (), np.float32),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-2),
    spaces.MultiDiscrete([3, 4, 5]),
    spaces.MultiDiscrete([[3, 3], [3, 3]], start=[[0, 1], [2, 3]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Tuple([spaces.Discrete(2), spaces.Tuple([spaces.Box(0, 1, (2,))])]),
    spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Dict({"deep": spaces.MultiBinary(3)}))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces(space):
    back = there_and_back(space)
    assert back == space
    assert (type(back), back.dtype, back.shape) == (type(space), space.dtype, space.shape)
    if isinstance(space, spaces.Box):
        assert back.low.tobytes() == space.low.tobytes()
        assert back.high.tobytes() == space.high.tobytes()


def test_a_subclass_of_a_space_comes_back_as_that_space():
    back = there_and_back(type("MyBox", (spaces.Box,), {})(0, 1, (2,)))
    assert type(back) is spaces.Box
    assert back == spaces.Box(0, 1, (2,))


def test_the_keys_of_a_dict_keep_their_order():
    back = there_and_back(SPACES[-1])
    assert list(back.spaces) == ["z", "a"]


def test_a_space_in_a_mapping():
    back = there_and_back({"image": spaces.Discrete(3), "other": {"shape": (2,)}})
    assert back == {"image": spaces.Discrete(3), "other": {"shape": (2,)}}


def test_bounds_that_are_all_equal_are_one_number():
    form = to_json(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert (form["low"], form["high"]) == (0, 255)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": [1, object()]}}, r"settings\.a\.b\[1\] is a object, which cannot be saved"),
        ({"$space": 1}, "begin with"),
        ({3: 1}, r"the keys \[3\]"),
        (spaces.Text(4), "Text cannot be saved"),
    ],
)
def test_what_has_no_form_is_refused(value, words):
    with pytest.raises(InvalidInputError, match=words):
        to_json(value)
