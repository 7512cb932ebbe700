"""Fields take what means the same and refuse what does not; structures find leaves and put them together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlstore.engine.rows.schema import Field, Structure, as_tensor, can_hold, dtype_name, walk

CPU = torch.device("cpu")


def field(shape=(2,), dtype=torch.float32, **others) -> Field:
    return Field("rewards", shape, dtype, "the first sample", **others)


# ---------------------------------------------------------------------------------------------------- Field.fit

FORMS = {
    "tensor": lambda rows: torch.tensor(rows),
    "float64 tensor": lambda rows: torch.tensor(rows, dtype=torch.float64),
    "integer tensor": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "strided tensor": lambda rows: torch.tensor(rows).t().contiguous().t(),
    "tensor with gradients": lambda rows: torch.tensor(rows, requires_grad=True),
    "array": lambda rows: np.array(rows, dtype=np.float32),
    "float64 array": lambda rows: np.array(rows),
    "reversed array": lambda rows: np.array(rows)[::-1, ::-1][::-1, ::-1],
    "lists": lambda rows: rows,
    "tuples": lambda rows: tuple(map(tuple, rows)),
    "list of tensors": lambda rows: [torch.tensor(row) for row in rows],
    "list of arrays": lambda rows: [np.array(row) for row in rows],
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_the_same_numbers_fits(form):
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    held = field().fit(FORMS[form](rows), 3, CPU)
    assert held.tolist() == rows
    assert held.dtype == torch.float32
    assert held.is_contiguous()
    assert not held.requires_grad


def test_an_array_that_may_not_be_written_fits_without_a_warning():
    """Simulators hand out arrays that are read-only; warnings are errors here."""
    rows = np.array([[1.0, 2.0]], dtype=np.float32)
    rows.flags.writeable = False
    assert field().fit(rows, 1, CPU).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("given", [(3,), (3, 1)])
def test_rows_of_scalars_come_with_or_without_a_last_dimension(shape, given):
    held = field(shape).fit(torch.tensor([7.0, 8.0, 9.0]).reshape(given), 3, CPU)
    assert tuple(held.shape) == (3, *shape)
    assert held.flatten().tolist() == [7.0, 8.0, 9.0]


@pytest.mark.parametrize("wrong", [(3,), (3, 3), (2, 2), (2, 3), (3, 2, 1), (1, 3, 2), (6,), ()])
def test_a_wrong_shape_is_refused(wrong):
    with pytest.raises(ValueError, match="rewards is") as refusal:
        field((2,)).fit(torch.zeros(wrong), 3, CPU)
    said = str(refusal.value)
    for part in (str(wrong), "(3, 2) float32", "the first sample", "Nothing was written"):
        assert part in said


def test_scalar_rows_do_not_excuse_a_wrong_number_of_lanes():
    for wrong in [(2,), (4,), (1, 3), (3, 2), ()]:
        with pytest.raises(ValueError, match="rewards is"):
            field(()).fit(torch.zeros(wrong), 3, CPU)


def test_lanes_may_stand_behind_another_axis():
    """A hidden state is [layers, lanes, hidden]."""
    state = Field("state", (2, 4), torch.float32, "the first transition", lane_axis=1)
    assert state.row_shape(3) == (2, 3, 4)
    given = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(state.fit(given, 3, CPU), given)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        state.fit(given.transpose(0, 1), 3, CPU)


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([True, False, True]),
        torch.tensor([1, 0, 255], dtype=torch.uint8),
        torch.tensor([-3, 0, 1], dtype=torch.int64),
        torch.tensor([1.0, 0.0, 0.25]),
        np.array([True, False, True]),
        np.array([1.0, 0.0, 1.0]),
        [True, False, True],
        [1, 0, 1],
    ],
    ids=str,
)
def test_flags_of_any_kind_become_bytes_of_0_and_1(given):
    for shape in [(), (1,)]:
        held = field(shape, torch.uint8, is_flag=True).fit(given, 3, CPU)
        assert held.dtype == torch.uint8
        assert held.flatten().tolist() == [1, 0, 1]


def test_a_flag_that_is_nan_or_complex_is_refused():
    flag = field((), torch.uint8, is_flag=True)
    with pytest.raises(ValueError, match=r"nan at 2 of 3 entries, first at 1"):
        flag.fit(torch.tensor([0.0, math.nan, math.nan]), 3, CPU)
    with pytest.raises(ValueError, match="complex"):
        flag.fit(torch.zeros(3, dtype=torch.complex64), 3, CPU)


@pytest.mark.parametrize("value", [None, "words", object, [[1.0], [1.0, 2.0]], {"a": 1.0}], ids=str)
def test_what_is_no_tensor_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"rewards .*Nothing was written"):
        field().fit(value, 2, CPU)


# ---------------------------------------------------------------------------------------------------- dtypes

# given dtype, entries, held dtype, whether they mean the same there
HOLDS = [
    (torch.float32, [0.5], torch.float32, True),
    (torch.float64, [0.1], torch.float32, True),
    (torch.float32, [0.1], torch.float16, True),
    (torch.int64, [3], torch.float32, True),
    (torch.bool, [True], torch.float32, True),
    (torch.bool, [True], torch.uint8, True),
    (torch.uint8, [255], torch.int64, True),
    (torch.int64, [255], torch.uint8, True),
    (torch.int64, [256], torch.uint8, False),
    (torch.int64, [-1], torch.uint8, False),
    (torch.int8, [-1], torch.uint8, False),
    (torch.uint8, [200], torch.int8, False),
    (torch.uint8, [127], torch.int8, True),
    (torch.int8, [127], torch.uint8, True),
    (torch.int64, [2**40], torch.int32, False),
    (torch.int32, [-5], torch.int64, True),
    (torch.int64, [-1], torch.uint64, False),
    (torch.int16, [-1], torch.uint16, False),
    (torch.float32, [1.0], torch.int64, False),
    (torch.float32, [1.0], torch.uint8, False),
    (torch.uint8, [1], torch.bool, False),
    (torch.complex64, [1.0], torch.float32, False),
]


@pytest.mark.parametrize(("given", "entries", "held", "holds"), HOLDS, ids=lambda part: str(part))
def test_what_can_be_held(given, entries, held, holds):
    assert can_hold(torch.tensor(entries, dtype=given), held) is holds


@pytest.mark.parametrize(("given", "entries", "held", "holds"), HOLDS, ids=lambda part: str(part))
def test_what_is_held_means_the_same(given, entries, held, holds):
    value = torch.tensor(entries, dtype=given)
    scalar = Field("levels", (), held, "the space")
    if holds:
        assert scalar.fit(value, 1, CPU).tolist() == pytest.approx([float(entry) for entry in entries], rel=1e-3)
        assert scalar.fit(value, 1, CPU).dtype == held
    else:
        with pytest.raises(ValueError, match=f"levels is .*{dtype_name(given)}.*{dtype_name(held)}"):
            scalar.fit(value, 1, CPU)


def test_dtypes_are_named_without_their_module():
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_as_tensor_does_not_copy_what_is_a_tensor():
    given = torch.arange(3.0)
    assert as_tensor(given, "x").data_ptr() == given.data_ptr()


# ---------------------------------------------------------------------------------------------------- Structure


def nested():
    return {"camera": {"left": torch.tensor([1.0]), "right": torch.tensor([2.0])}, "joints": torch.tensor([3.0])}


def test_leaves_are_named_by_the_way_to_them():
    structure = Structure.of(nested(), "obs")
    assert structure.names == ('obs["camera"]["left"]', 'obs["camera"]["right"]', 'obs["joints"]')
    assert Structure.of((torch.zeros(1), {"a": torch.zeros(1)}), "obs").names == ("obs[0]", 'obs[1]["a"]')
    assert Structure.of(torch.zeros(1), "obs").names == ("obs",)
    assert Structure.of(torch.zeros(1), "obs").is_leaf
    assert not structure.is_leaf


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("wrap", [dict, lambda parts: TensorDict(parts, batch_size=[1])], ids=["dict", "TensorDict"])
def test_leaves_come_in_the_structures_own_order(flat, wrap):
    example = {"b": torch.tensor([1.0]), "a": torch.tensor([2.0])} if flat else nested()
    structure = Structure.of(example, "obs")
    expected = [float(leaf) for _, leaf in walk(example)]
    for given in (wrap(example), wrap(dict(reversed(example.items())))):
        assert [float(leaf) for leaf in structure.leaves(given)] == expected


def test_build_is_the_inverse_of_leaves():
    for example in (nested(), {"a": torch.tensor([1.0])}):
        structure = Structure.of(example, "obs")
        built = structure.build(structure.leaves(example), (1,))
        assert isinstance(built, TensorDict)
        assert tuple(built.batch_size) == (1,)
        for path, leaf in walk(example):
            assert built[path] is leaf
    pair = (torch.tensor([1.0]), {"a": torch.tensor([2.0])})
    built = Structure.of(pair, "obs").build([pair[0], pair[1]["a"]], (1,))
    assert isinstance(built, tuple)
    assert built[0] is pair[0]
    assert built[1]["a"] is pair[1]["a"]
    leaf = torch.tensor([1.0])
    assert Structure.of(leaf, "obs").build([leaf], (1,)) is leaf


def test_tuples_of_more_than_ten_keep_their_order():
    many = tuple(torch.tensor([float(place)]) for place in range(12))
    built = Structure.of(many, "obs").build(many, (1,))
    assert [float(part) for part in built] == list(range(12))


@pytest.mark.parametrize("wrap", [dict, lambda parts: TensorDict(parts, batch_size=[1])], ids=["dict", "TensorDict"])
def test_missing_and_unknown_leaves_are_named(wrap):
    structure = Structure.of({"policy": torch.zeros(1), "critic": torch.zeros(1)}, "observations")
    for given, parts in [
        ({"policy": torch.zeros(1)}, ["missing ['observations[\"critic\"]']", "unknown none"]),
        ({"policy": torch.zeros(1), "critic": torch.zeros(1), "extra": torch.zeros(1)}, ['["extra"]', "missing none"]),
        ({"policy": torch.zeros(1), "Critic": torch.zeros(1)}, ['["critic"]', '["Critic"]']),
    ]:
        with pytest.raises(ValueError, match="observations has the wrong keys") as refusal:
            structure.leaves(wrap(given))
        for part in [*parts, "Nothing was written"]:
            assert part in str(refusal.value)


@pytest.mark.parametrize("wrap", [dict, lambda parts: TensorDict(parts, batch_size=[1])], ids=["dict", "TensorDict"])
def test_a_nest_in_the_place_of_a_leaf_is_refused_by_name(wrap):
    structure = Structure.of({"policy": torch.zeros(1)}, "observations")
    policy = Field(structure.names[0], (), torch.float32, "the first sample")
    with pytest.raises(ValueError, match=r'observations.*"policy".*Nothing was written'):
        policy.fit(structure.leaves(wrap({"policy": {"inner": torch.zeros(1)}}))[0], 1, CPU)


def test_a_tensor_in_the_place_of_a_nest_and_the_other_way_round_is_refused():
    with pytest.raises(ValueError, match="wrong keys"):
        Structure.of({"policy": torch.zeros(1)}, "obs").leaves(torch.zeros(1))
    with pytest.raises(ValueError, match="wrong keys"):
        Structure.of(torch.zeros(1), "obs").leaves({"policy": torch.zeros(1)})
