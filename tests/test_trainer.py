"""What the ten methods of every family of storages share."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlstore import InvalidInputError
from rlstore.engine.rows.schema import Field
from rlstore.trainer import (
    at_step,
    check_names,
    copied,
    fit,
    learning_info,
)

CPU = torch.device("cpu")
KNOWN = ("rewards", "costs")


# ---------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("wrap", [dict, lambda parts: TensorDict(parts, batch_size=[2])], ids=["dict", "TensorDict"])
def test_names_that_are_known_are_taken_and_others_refused(wrap):
    given = {"rewards": torch.zeros(2), "costs": torch.zeros(2)}
    check_names(wrap(given), "a sample", "S", KNOWN, KNOWN)
    check_names(wrap({}), "a sample", "S", KNOWN)
    words = r"S cannot hold \['cost'\]; it takes \['rewards', 'costs'\]\. Did you mean 'costs'\? Nothing was written"
    with pytest.raises(InvalidInputError, match=words):
        check_names(wrap({**given, "cost": torch.zeros(2)}), "a sample", "S", KNOWN)
    with pytest.raises(InvalidInputError, match=r"new_data for S needs \['costs'\]; it takes"):
        check_names(wrap({"rewards": torch.zeros(2)}), "new_data", "S", KNOWN, KNOWN)


def test_none_is_missing_and_what_is_no_mapping_is_refused():
    with pytest.raises(InvalidInputError, match=r"needs \['rewards'\]"):
        check_names({"rewards": None}, "a sample", "S", KNOWN, ("rewards",))
    for given in (None, [("rewards", 1)], torch.zeros(2), SimpleNamespace(rewards=1)):
        with pytest.raises(InvalidInputError, match=f"a sample is a {type(given).__name__}; give a dict"):
            check_names(given, "a sample", "S", KNOWN)


SCALAR = Field("rewards", (), torch.float32, "the first sample")
PIXELS = Field("pixels", (2, 2), torch.uint8, "the first sample")


@pytest.mark.parametrize("lead", [(6,), (2, 3), (1, 2, 3)], ids=str)
def test_leading_axes(lead):
    scalars = torch.arange(6, dtype=torch.float64).reshape(lead)
    for given in (scalars, scalars.unsqueeze(-1), scalars.numpy(), scalars.tolist()):
        held = fit(SCALAR, given, lead, CPU)
        assert (held.shape, held.dtype) == (lead, torch.float32)
        assert held.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    pixels = np.arange(24).reshape(*lead, 2, 2)
    held = fit(PIXELS, pixels, list(lead), CPU)
    assert (tuple(held.shape), held.dtype) == ((*lead, 2, 2), torch.uint8)
    assert held.flatten().tolist() == list(range(24))


def test_wrong_leading_axes_are_refused():
    with pytest.raises(InvalidInputError, match=r"rewards is \(3, 2\); it has to begin with \(2, 3\), as rewards do"):
        fit(SCALAR, torch.zeros(3, 2), (2, 3), CPU)
    with pytest.raises(InvalidInputError, match=r"pixels is \(2,\); it has to begin with \(2, 3\)"):
        fit(PIXELS, torch.zeros(2), (2, 3), CPU)


def test_a_step_of_a_nest():
    two = torch.tensor([[1.0], [2.0]])
    nest = {"a": two, "b": (two + 2, None, [two + 4]), "c": np.array([7, 8]), "d": TensorDict({"x": two}, [2])}
    found = at_step(nest, 1, 2, "data")
    assert found["a"].tolist() == [2]
    assert (found["b"][0].tolist(), found["b"][1], found["b"][2][0].tolist()) == ([4], None, [6])
    assert int(found["c"]) == 8
    assert found["d"]["x"].tolist() == [2]
    assert at_step(None, 1, 2, "data") is None
    assert at_step([5, 6], 0, 2, "data") == 5  # a list of numbers is a tensor to be, not a nest
    with pytest.raises(InvalidInputError, match=r"data has 2 steps and observations 3\. Nothing was changed"):
        at_step((two,), 0, 3, "data")


def test_copies_are_apart():
    tensor = torch.zeros(2)
    nest = (tensor, [TensorDict({"x": tensor}, [2]), None])
    twin = copied(nest, "cpu")
    twin[0].fill_(1)
    twin[1][0]["x"].fill_(2)
    assert tensor.tolist() == [0, 0]
    assert (type(twin), type(twin[1]), twin[1][1]) == (tuple, list, None)


def test_the_two_forms_of_after_gradients():
    batch, info = {"rows": 1}, {"loss": 2}
    assert learning_info(object(), object(), info) == ({}, info)
    assert learning_info(object(), object(), info)[1] is info
    assert learning_info(batch, info, None) == (batch, info)
    assert learning_info(batch, info, None)[1] is info
    assert learning_info(batch, object(), info) == (batch, info)
    assert learning_info(None, None, None) == ({}, {})
