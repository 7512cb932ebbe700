"""What a field refuses: every kind of field with every kind of bad value, and what the message says.

A storage that checks its values with Field.fit or trainer.fit, before it writes, needs no such matrix of its own: only
one test that a refused call changes nothing.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlstore import InvalidInputError
from rlstore.engine.rows.schema import Field
from rlstore.engine.rows.spaces import extra_fields
from rlstore.trainer import fit

CPU, LANES = torch.device("cpu"), 3
ORIGIN = "the first sample"
FIELDS = {
    "float": Field("rewards", (), torch.float32, ORIGIN),
    "float vector": Field('observations["policy"]', (2,), torch.float32, ORIGIN),
    "half": Field("observations", (2,), torch.float16, ORIGIN),
    "integer": Field("actions", (), torch.int64, ORIGIN),
    "pixels": Field("observations", (2, 2), torch.uint8, ORIGIN),
    "flag": Field("terminated", (), torch.uint8, ORIGIN, is_flag=True),
    "float flag": Field("dones", (1,), torch.float32, ORIGIN, is_flag=True),
    "hidden state": Field("hidden_states[0]", (2, 4), torch.float32, ORIGIN, lane_axis=1),
    "extra scalar": extra_fields({"costs": ((), torch.float32)}, "ReplayStorage", ())[0],
    "extra vector": extra_fields({"code": ((4,), torch.uint8)}, "ReplayStorage", ())[0],
}


def good(field: Field) -> torch.Tensor:
    return torch.ones(field.row_shape(LANES), dtype=field.dtype)


def wrong_shapes(field: Field) -> list[torch.Tensor]:
    """One lane more, one fewer, an axis more or fewer, no axis, the axes in another order, an entry too many."""
    row = field.row_shape(LANES)
    axis = field.lane_axis
    shapes = [
        (*row[:axis], LANES + 1, *row[axis + 1 :]),
        (*row[:axis], LANES - 1, *row[axis + 1 :]),
        (1, *row),
        (*row, 1, 1),
        (),
        (math.prod(row) + 1,),
        (*row, 2),
    ]
    if len(set(row)) > 1 and row != (LANES, 1):
        shapes.append(tuple(reversed(row)))
    if field.shape not in ((), (1,)):
        shapes += [row[:-1], (*row[:-1], row[-1] + 1), (math.prod(row),)]
    return [torch.ones(shape, dtype=field.dtype) for shape in shapes]


def wrong_lanes(field: Field, value: torch.Tensor) -> bool:
    """Whether only the number of lanes is wrong; a scalar may have an axis of 1."""
    rows = [field.row_shape(count) for count in range(10)]
    if field.shape in ((), (1,)):
        rows += [(count,) for count in range(10)] + [(count, 1) for count in range(10)]
    return tuple(value.shape) in rows


def wrong_dtypes(field: Field) -> list[torch.Tensor]:
    """Complex for all; fractions and numbers out of range for integers."""
    row = field.row_shape(LANES)
    values = [torch.ones(row, dtype=torch.complex64), torch.ones(row, dtype=torch.complex128)]
    if not field.dtype.is_floating_point and not field.is_flag:
        values += [torch.full(row, 0.5), torch.full(row, 1.0, dtype=torch.float64)]
    if field.dtype == torch.uint8 and not field.is_flag:
        values += [torch.full(row, 256), torch.full(row, -1), torch.full(row, -1, dtype=torch.int8)]
    if field.dtype == torch.int64:
        values.append(torch.full(row, 2**63, dtype=torch.uint64))
    return values


def not_tensors(field: Field) -> dict[str, object]:
    row = field.row_shape(LANES)
    return {
        "missing": None,
        "text": "words",
        "an object": object(),
        "a dict": {"a": good(field)},
        "a ragged list": [[1.0], [1.0, 2.0], [3.0]],
        "a list of tensors of two shapes": [torch.zeros(2), torch.zeros(3)],
        "an array of objects": np.array([None] * LANES, dtype=object),
        "an array of strings": np.array(["a"] * LANES),
        "a meta tensor": torch.zeros(row, device="meta"),
        "a sparse tensor": torch.ones(row).to_sparse(),
        "a nested tensor": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    }


CHECKS = {
    "one row": lambda field, value: field.fit(value, LANES, CPU),
    # Several rows at a time, as insert_data_slice and init_tensors take them: here one.
    "leading axes": lambda field, value: fit(field, value, (LANES,), CPU),
}


def refused(check, field, value):
    with pytest.raises(InvalidInputError) as error:
        CHECKS[check](field, value)
    message = str(error.value)
    assert message.startswith((f"{field.name} is ", f"{field.name} cannot be converted")), message
    assert "Nothing was written." in message
    assert isinstance(error.value, ValueError)
    return message


EACH = pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
CHECK = pytest.mark.parametrize("check", CHECKS)


@EACH
@CHECK
def test_the_right_value_is_taken(check, field):
    if check == "leading axes" and field.lane_axis:
        pytest.skip("the lanes of a hidden state are not the first axis")
    assert torch.equal(CHECKS[check](field, good(field)), good(field))


@EACH
@CHECK
def test_a_wrong_shape(check, field):
    for value in wrong_shapes(field):
        if check == "leading axes" and field.lane_axis:
            continue
        message = refused(check, field, value)
        assert str(tuple(value.shape)) in message
        begins_wrong = tuple(value.shape[:1]) != (LANES,)
        if check == "leading axes" and begins_wrong:
            assert f"has to begin with ({LANES},)" in message
        else:
            counts_lanes = tuple(value.shape) == field.shape or wrong_lanes(field, value)
            origin = f"num_envs={LANES}" if counts_lanes else field.origin
            expected = str(field.row_shape(LANES)), str(field.dtype).removeprefix("torch."), origin
            assert all(part in message for part in expected), message


@EACH
def test_a_wrong_dtype(field):
    for value in wrong_dtypes(field):
        message = refused("one row", field, value)
        assert str(value.dtype).removeprefix("torch.") in message
        if field.is_flag:
            assert "a flag is 0 or 1" in message
        else:
            assert all(part in message for part in (str(field.dtype).removeprefix("torch."), field.origin)), message
            assert "without loss" in message or "Some values do not fit into" in message


@pytest.mark.parametrize("field", [field for field in FIELDS.values() if field.is_flag], ids=lambda field: field.name)
@CHECK
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_flag_that_is_nan(check, field, dtype):
    message = refused(check, field, torch.tensor([0.0, math.nan, math.nan], dtype=dtype))
    assert "is nan at 2 of 3 entries, first at 1; a flag is 0 or 1" in message


@EACH
@CHECK
def test_what_is_no_tensor(check, field):
    for name, value in not_tensors(field).items():
        message = refused(check, field, value)
        if name == "missing":
            assert "is missing (None)" in message
        elif name in ("a meta tensor", "a sparse tensor", "a nested tensor"):
            assert "has no plain memory" in message


@pytest.mark.parametrize("lead", [(2, LANES), (4, 1, LANES)], ids=str)
def test_several_rows_with_one_that_is_wrong(lead):
    """The leading axes are named as they were given."""
    field = FIELDS["float vector"]
    assert tuple(fit(field, torch.zeros(*lead, 2), lead, CPU).shape) == (*lead, 2)
    for shape in [(*lead, 3), (*lead,), (lead[0] + 1, *lead[1:], 2), (LANES, 2)]:
        with pytest.raises(InvalidInputError, match=r'observations\["policy"\] is .*Nothing was written'):
            fit(field, torch.zeros(shape), lead, CPU)
