"""The values of a row, taken from the attributes of an object in one call: all of them in order, or None."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlstore.engine.rows.schema import Structure
from rlstore.kernels import RowReader

A, B, C, D = torch.zeros(2), np.ones(2), torch.ones(2), torch.zeros(1)
OTHERS = {"actions": None, "params": 2}
ABSENT = {"states": 2, "truncated": 0}


def given(observations, **changed):
    made = {"observations": observations, "actions": C, "params": (D, A), "states": (None, None), "truncated": None}
    return SimpleNamespace(**{**made, **changed})


def is_row(found, expected):
    return found is not None and [id(value) for value in found] == [id(value) for value in expected]


@pytest.mark.parametrize(
    ("paths", "observations", "leaves"),
    [
        ([()], A, [A]),
        ([()], B, [B]),
        ([("x",)], {"x": B}, [B]),
        ([("x",), ("y",)], {"y": B, "x": A}, [A, B]),
        ([(0,), (1,)], (A, B), [A, B]),
        ([(0,), (1,)], [A, B], [A, B]),
    ],
    ids=str,
)
def test_the_values_are_taken_in_the_order_of_the_row(paths, observations, leaves):
    read = Structure(paths, "observations").row_reader(OTHERS, ABSENT)
    assert is_row(read(given(observations)), [*leaves, C, D, A])
    assert is_row(read(given(observations, params=[A, D], actions=B, other=1)), [*leaves, B, A, D])


def test_the_parts_of_a_tensordict_are_taken_by_name():
    nest = TensorDict({"y": A, "x": C}, batch_size=[2])
    read = Structure([("x",), ("y",)], "observations").row_reader(OTHERS, ABSENT)
    assert is_row(read(given(nest)), [nest.get("x"), nest.get("y"), C, D, A])
    assert read(given(TensorDict({"y": A}, batch_size=[2]))) is None


FLAT = given({"x": A})
NOT_PLAIN = {
    "a nest for a tensor": ([()], given({"x": A})),
    "no observations": ([()], given(None)),
    "a list for a tensor": ([()], given([1.0, 2.0])),
    "a key missing": ([("x",), ("y",)], given({"x": A})),
    "a key more": ([("x",)], given({"x": A, "y": A})),
    "another key": ([("x",)], given({"y": A})),
    "another mapping": ([("x",)], given(OrderedDict(x=A))),
    "a tensor for a dict": ([("x",)], given(A)),
    "a tuple too long": ([(0,)], given((A, A))),
    "nested": ([("x", "y")], given({"x": {"y": A}})),
    "a value missing": ([("x",)], given({"x": A}, actions=None)),
    "params missing": ([("x",)], given({"x": A}, params=None)),
    "params too few": ([("x",)], given({"x": A}, params=(A,))),
    "states given": ([("x",)], given({"x": A}, states=(A, None))),
    "no pair of states": ([("x",)], given({"x": A}, states=None)),
    "truncated given": ([("x",)], given({"x": A}, truncated=A)),
    "an attribute missing": ([("x",)], SimpleNamespace(observations={"x": A}, actions=C)),
    "a dict": ([("x",)], vars(FLAT)),
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_what_is_anything_else_is_left_to_others(case):
    paths, value = NOT_PLAIN[case]
    assert Structure(paths, "observations").row_reader(OTHERS, ABSENT)(value) is None


def test_an_attribute_that_must_be_absent_may_be_missing():
    value = given({"x": A})
    del value.truncated, value.states
    assert is_row(Structure([("x",)], "observations").row_reader(OTHERS, ABSENT)(value), [A, C, D, A])


def test_a_nest_without_its_private_dict_is_left_to_others():
    class Nest:
        pass

    read = RowReader((("observations", ("x",)),), (), (Nest, "_inner")).read
    nest = Nest()
    assert read(given(nest)) is None
    nest._inner = {"x": A}
    assert is_row(read(given(nest)), [A])


def test_no_reference_is_kept_or_lost():
    value, leaf = given({"x": torch.zeros(2)}), object()
    read = Structure([("x",)], "observations").row_reader(OTHERS, ABSENT)
    gc.collect()
    value.params = (leaf, A)
    before = [sys.getrefcount(each) for each in (leaf, A, C, D, None, value, value.observations)]
    for _ in range(1000):
        read(value)
        value.states = (A, None)
        read(value)
        value.states = (None, None)
    after = [sys.getrefcount(each) for each in (leaf, A, C, D, None, value, value.observations)]
    assert [abs(new - old) < 100 for new, old in zip(after, before, strict=True)] == [True] * 7


@pytest.mark.parametrize("nest", [(dict,), (1, "a"), (dict, 1)], ids=str)
def test_a_reader_of_something_else_is_not_made(nest):
    with pytest.raises((TypeError, ValueError)):
        RowReader((("observations", None),), (), nest)
