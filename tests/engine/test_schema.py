"""Fields take what means the same and refuse what does not; structures find leaves and put them together."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlstore.engine.rows import schema
from rlstore.engine.rows.schema import (
    Field,
    Structure,
    as_tensor,
    can_hold,
    check_real,
    describe_fields,
    described_fields,
    dtype_name,
    fields_of_example,
    walk,
)

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


@pytest.mark.parametrize(("given", "entries", "held"), [part[:3] for part in HOLDS if not part[3]], ids=str)
def test_the_refusal_says_why_a_dtype_does_not_fit(given, entries, held):
    words = "Some values do not fit into" if not (given.is_floating_point or given.is_complex) else "without loss"
    if held == torch.bool:
        words = "uint8"
    with pytest.raises(ValueError, match=words):
        Field("levels", (), held, "the space").fit(torch.tensor(entries, dtype=given), 1, CPU)


@pytest.mark.parametrize(
    ("held", "remedy"),
    [
        (torch.uint8, "Add pixels as they are, from 0 to 255, and normalize after sampling."),
        (torch.int64, "give them as such, as in levels.astype(np.int64)."),
        (torch.bool, "If the data changed, build a new storage."),
    ],
    ids=str,
)
def test_the_refusal_of_floats_says_what_to_give(held, remedy):
    with pytest.raises(ValueError, match=f"Nothing was written. .*{re.escape(remedy)}$"):
        Field("levels", (), held, "the space").fit(torch.tensor([0.5]), 1, CPU)


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


def test_build_without_the_private_constructor_of_tensordict(monkeypatch):
    monkeypatch.setattr(schema, "_tensordict_maker", lambda: TensorDict)
    for example in (nested(), {"a": torch.tensor([1.0])}):
        structure = Structure.of(example, "obs")
        built = structure.build(structure.leaves(example), (1,))
        assert tuple(built.batch_size) == (1,)
        for path, leaf in walk(example):
            assert torch.equal(built[path], leaf)


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


OTHERS = {  # what a vector environment does not give, and what it is called
    "a dict": {"policy": torch.zeros(4, 3)},
    "a TensorDict": TensorDict({"policy": torch.zeros(4, 3)}, [4]),
    "a list of dicts": [{"policy": torch.zeros(3)}] * 4,
    "a tuple of dicts": ({"policy": torch.zeros(3)},) * 4,
    "an array of dicts": np.array([{"policy": np.zeros(3)}] * 4),
}


@pytest.mark.parametrize("what", OTHERS)
def test_dicts_in_the_place_of_a_tensor_are_refused_with_the_shape_that_is_held(what):
    (leaf,) = Structure.of(torch.zeros(4, 3), "observations").leaves(OTHERS[what])
    field = Field("observations", (3,), torch.float32, "the first sample")
    words = rf"^observations is {what}; this storage holds \(4, 3\) float32, fixed by the first sample\. Nothing was wr"
    with pytest.raises(ValueError, match=words):
        field.fit(leaf, 4, CPU)
    with pytest.raises(ValueError, match=f"^observations is {what}; give a tensor or an array. Nothing was wr"):
        as_tensor(OTHERS[what], "observations")


@pytest.mark.parametrize("what", [*list(OTHERS)[2:], "a list", r"an array \(4, 3\)"])
def test_another_form_in_the_place_of_a_dict_or_a_tuple_is_refused_with_what_to_give(what):
    given = {"a list": [np.zeros((4, 3))], r"an array \(4, 3\)": np.zeros((4, 3)), **OTHERS}[what]
    words = rf"^obs is {what}; give a dict with the keys \['policy', 'critic'\], each \[environments"
    with pytest.raises(ValueError, match=words):
        Structure.of({"policy": torch.zeros(4, 3), "critic": {"a": torch.zeros(4)}}, "obs").leaves(given)
    if what != "a tuple of dicts":  # which is a tuple, of other parts
        with pytest.raises(ValueError, match=f"^obs is {what}; give a tuple of 2, each "):
            Structure.of((torch.zeros(4, 3), torch.zeros(4)), "obs").leaves(given)


def test_nothing_in_the_place_of_a_nest_is_refused():
    for example in (nested(), {"policy": torch.zeros(1)}):
        with pytest.raises(ValueError, match="obs has the wrong keys: missing"):
            Structure.of(example, "obs").leaves({})
    with pytest.raises(ValueError, match="obs is a dict; give a tuple of 1"):
        Structure.of((torch.zeros(1),), "obs").leaves({})


# ---------------------------------------------------------------------------------------------------- from an example


def test_the_fields_of_an_example():
    example = {"image": torch.zeros(3, 5, 4, 4, dtype=torch.uint8), "state": (np.zeros((3, 5)), torch.zeros(3, 5, 2))}
    structure, fields = fields_of_example(example, "obs", 2, "the first sample")
    assert structure.names == ('obs["image"]', 'obs["state"][0]', 'obs["state"][1]')
    assert fields == [
        Field('obs["image"]', (4, 4), torch.uint8, "the first sample"),
        Field('obs["state"][0]', (), torch.float64, "the first sample"),
        Field('obs["state"][1]', (2,), torch.float32, "the first sample"),
    ]


def test_a_tensor_and_a_tensordict_are_examples():
    structure, fields = fields_of_example(torch.zeros(3, 2), "obs", 1, "the obs")
    assert structure.is_leaf
    assert fields == [Field("obs", (2,), torch.float32, "the obs")]
    _, fields = fields_of_example(TensorDict({"policy": torch.zeros(3, 2)}, [3]), "obs", 1, "the obs")
    assert fields == [Field('obs["policy"]', (2,), torch.float32, "the obs")]


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({}, "have no part that could be stored"),
        ((), "have no part that could be stored"),
        ({"a": torch.zeros(3)}, r'obs\["a"\] is \(3,\); expected \[environments, ...\]'),
        ({"a": None}, r'obs\["a"\] is missing'),
        ({"a": "words"}, r'obs\["a"\] cannot be converted'),
        (torch.zeros(3, 2, device="meta"), "has no plain memory"),
    ],
    ids=str,
)
def test_an_example_without_fields_is_refused(example, words):
    with pytest.raises(ValueError, match=words):
        fields_of_example(example, "obs", 2, "the first sample")


@pytest.mark.parametrize(
    "example", [torch.zeros(2, 3), {"b": torch.zeros(2, dtype=torch.uint8), "a": (torch.zeros(2),)}]
)
def test_described_fields_come_back(example):
    structure, fields = fields_of_example(example, "obs", 1, "the first sample")
    described = describe_fields(structure, fields)
    again, found = described_fields(described, "obs")
    assert (again.paths, again.names) == (structure.paths, structure.names)
    assert [(f.name, f.shape, f.dtype) for f in found] == [(f.name, f.shape, f.dtype) for f in fields]
    assert {f.origin for f in found} == {"the snapshot"}
    # They are saved as JSON: no tuples.
    assert all(isinstance(part, list) for part in (*described["paths"], *described["shapes"]))


def test_fields_of_complex_numbers_are_refused_where_kernels_support_real_ones_only():
    fields = [Field("rewards", (), torch.float32, "the space"), Field("waves", (2,), torch.complex64, "the space")]
    check_real(fields[:1], "ReplayStorage")
    with pytest.raises(ValueError, match=r"waves is complex64, fixed by the space; ReplayStorage holds real numbers"):
        check_real(fields, "ReplayStorage")
