"""Spaces of gymnasium, mappings as Hydra passes them, and what looks like them, become fields."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import DecoupledRolloutStorage
from rlstore.engine.disk.space_json import from_json, to_json
from rlstore.engine.rows.schema import Field
from rlstore.engine.rows.spaces import (
    ActionSpec,
    action_spec,
    describe_extra_fields,
    extra_fields,
    observation_fields,
)


class ListConfig:
    """A list as omegaconf has it: no list, no tuple and no Sequence, only iterable and indexable."""

    def __init__(self, *parts):
        self._parts = [config(part) for part in parts]

    def __iter__(self):
        return iter(self._parts)

    def __len__(self):
        return len(self._parts)

    def __getitem__(self, index):
        return self._parts[index]


class DictConfig:
    """A dict as omegaconf has it, and no Mapping: what it is shows only in what it can do."""

    def __init__(self, parts):
        self._parts = {key: config(part) for key, part in parts.items()}

    def __getitem__(self, key):
        return self._parts[key]

    def __contains__(self, key):
        return key in self._parts

    def __iter__(self):
        return iter(self._parts)

    def __len__(self):
        return len(self._parts)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._parts.get(name)

    def keys(self):
        return self._parts.keys()

    def values(self):
        return self._parts.values()

    def items(self):
        return self._parts.items()

    def get(self, key, default=None):
        return self._parts.get(key, default)


def config(part):
    if isinstance(part, dict):
        return DictConfig(part)
    if isinstance(part, (list, tuple)):
        return ListConfig(*part)
    return part


WRAPS = {"dict": dict, "OrderedDict": OrderedDict, "DictConfig": DictConfig}
WRAP = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def described(space, default=torch.float32):
    """Each leaf's name, shape and dtype."""
    structure, fields = observation_fields(space, "obs", "Storage", default)
    assert structure.names == tuple(field.name for field in fields)
    assert all("Storage()" in field.origin for field in fields)
    return {field.name: (field.shape, field.dtype) for field in fields}


# ---------------------------------------------------------------------------------------------------- observations


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(-1, 1, (3,)), (3,), torch.float32),
        (spaces.Box(0, 255, (4, 5, 3), np.uint8), (4, 5, 3), torch.uint8),
        (spaces.Box(-1, 1, (), np.float64), (), torch.float64),
        (spaces.Box(-1, 1, (2,), np.float16), (2,), torch.float16),
        (spaces.Box(0, 9, (2,), np.int16), (2,), torch.int16),
        (spaces.Box(0, 9, (0,)), (0,), torch.float32),
        (spaces.Discrete(5), (), torch.int64),
        (spaces.MultiDiscrete([2, 3]), (2,), torch.int64),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), (2, 2), torch.int64),
        (spaces.MultiBinary(4), (4,), torch.int8),
        (spaces.MultiBinary([2, 3]), (2, 3), torch.int8),
    ],
    ids=str,
)
def test_a_gymnasium_space_keeps_its_shape_and_dtype(space, shape, dtype):
    assert described(space) == {"obs": (shape, dtype)}


def test_dict_and_tuple_spaces_are_walked_into():
    space = spaces.Dict(
        {
            "camera": spaces.Tuple((spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(3))),
            "body": spaces.Dict({"joints": spaces.Box(-1, 1, (7,))}),
        }
    )
    assert described(space) == {
        'obs["body"]["joints"]': ((7,), torch.float32),
        'obs["camera"][0]': ((2, 2), torch.uint8),
        'obs["camera"][1]': ((), torch.int64),
    }


@WRAP
@pytest.mark.parametrize("default", [torch.float32, torch.uint8], ids=str)
def test_a_mapping_without_dtype_takes_the_storages_default(wrap, default):
    assert described(wrap({"shape": (4, 3)}), default) == {"obs": ((4, 3), default)}
    assert described(wrap({"shape": [4]}), default) == {"obs": ((4,), default)}
    assert described(wrap({"shape": []}), default) == {"obs": ((), default)}


@WRAP
@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        ("uint8", torch.uint8),
        ("float64", torch.float64),
        ("torch.float16", torch.float16),
        ("bool", torch.bool),
        (np.uint8, torch.uint8),
        (np.dtype("int32"), torch.int32),
        (torch.bfloat16, torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
    ],
    ids=str,
)
def test_the_dtype_of_a_mapping_is_honoured(wrap, dtype, held):
    assert described(wrap({"shape": (4,), "dtype": dtype})) == {"obs": ((4,), held)}


@WRAP
def test_a_mapping_of_mappings_is_walked_into(wrap):
    space = wrap({"image": wrap({"shape": (2, 2), "dtype": "uint8"}), "state": wrap({"shape": [3]})})
    assert described(space) == {'obs["image"]': ((2, 2), torch.uint8), 'obs["state"]': ((3,), torch.float32)}


@WRAP
def test_spaces_and_mappings_stand_side_by_side(wrap):
    space = wrap({"image": spaces.Box(0, 255, (2, 2), np.uint8), "state": wrap({"shape": [3]})})
    assert described(space) == {'obs["image"]': ((2, 2), torch.uint8), 'obs["state"]': ((3,), torch.float32)}


@WRAP
def test_a_space_of_one_kind_for_observations_and_of_the_other_for_actions(wrap):
    box, choice = spaces.Box(-1, 1, (3,)), wrap({"shape": (4,), "type": "Discrete", "range": [0, 3]})
    storage = DecoupledRolloutStorage(box, choice, num_steps=2, num_envs=5)
    assert tuple(storage.obs.shape) == (3, 5, 3)
    assert tuple(storage.actions.shape) == (2, 5)
    other = DecoupledRolloutStorage(wrap({"shape": (3,)}), spaces.Box(-1, 1, (6,)), num_steps=2, num_envs=5)
    assert tuple(other.obs.shape) == (3, 5, 3)
    assert tuple(other.actions.shape) == (2, 5, 6)


# ---------------------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (spaces.Discrete(4), ActionSpec("Discrete", (), torch.int64, (4,))),
        (spaces.Discrete(4, start=-1), ActionSpec("Discrete", (), torch.int64, (4,), (-1,))),
        (spaces.Box(-1, 1, (3,)), ActionSpec("Box", (3,), torch.float32)),
        (spaces.Box(-1, 1, (2, 3), np.float64), ActionSpec("Box", (2, 3), torch.float64)),
        (spaces.MultiDiscrete([2, 3]), ActionSpec("MultiDiscrete", (2,), torch.int64, (2, 3))),
        (spaces.MultiBinary(4), ActionSpec("MultiBinary", (4,), torch.int8)),
    ],
    ids=str,
)
def test_the_action_spec_of_a_gymnasium_space(space, spec):
    assert action_spec(space) == spec


@WRAP
@pytest.mark.parametrize(
    ("space", "spec"),
    [
        ({"shape": (6,), "type": "Discrete", "range": [0, 5]}, ActionSpec("Discrete", (), torch.int64, (6,))),
        ({"shape": (6,), "type": "Discrete", "n": 6}, ActionSpec("Discrete", (), torch.int64, (6,))),
        ({"shape": (1,), "type": "Discrete", "n": 6}, ActionSpec("Discrete", (), torch.int64, (6,))),
        ({"shape": (6,), "type": "Discrete"}, ActionSpec("Discrete", (), torch.int64, (6,))),
        ({"shape": (3,), "type": "Box", "range": [-1.0, 1.0]}, ActionSpec("Box", (3,), torch.float32)),
        (
            {"shape": (3,), "type": "Box", "range": [-1.0, 1.0], "dtype": "float64"},
            ActionSpec("Box", (3,), torch.float64),
        ),
        (
            {"shape": (2,), "type": "MultiDiscrete", "nvec": [2, 3]},
            ActionSpec("MultiDiscrete", (2,), torch.int64, (2, 3)),
        ),
    ],
    ids=str,
)
def test_the_action_spec_of_a_mapping(wrap, space, spec):
    assert action_spec(wrap(space)) == spec


# ---------------------------------------------------------------------------------------------------- refused

UNSUPPORTED = [
    spaces.Text(5),
    spaces.Sequence(spaces.Discrete(2)),
    spaces.Graph(spaces.Discrete(2), None),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
]


@pytest.mark.parametrize("space", UNSUPPORTED, ids=lambda space: type(space).__name__)
def test_a_space_that_cannot_be_held_is_named(space):
    name = type(space).__name__
    for nest in (space, spaces.Dict({"a": spaces.Discrete(2), "b": space}), spaces.Tuple((space,))):
        with pytest.raises(NotImplementedError, match=name):
            observation_fields(nest, "obs", "Storage", torch.float32)
    with pytest.raises(NotImplementedError, match=name):
        action_spec(space)
    with pytest.raises(NotImplementedError, match=name):
        DecoupledRolloutStorage(space, spaces.Discrete(2))


@pytest.mark.parametrize(
    "space",
    [spaces.Dict({"a": spaces.Discrete(2)}), spaces.Tuple((spaces.Discrete(2),))],
    ids=lambda s: type(s).__name__,
)
def test_actions_that_are_nested_cannot_be_held(space):
    with pytest.raises(NotImplementedError, match=type(space).__name__):
        action_spec(space)


@WRAP
def test_a_mapping_of_an_unknown_kind_is_named(wrap):
    with pytest.raises(NotImplementedError, match="'Gaussian'"):
        action_spec(wrap({"shape": (3,), "type": "Gaussian"}))
    with pytest.raises(NotImplementedError, match="None"):
        action_spec(wrap({"shape": (3,)}))


@WRAP
def test_a_mapping_without_a_shape_is_refused(wrap):
    with pytest.raises(ValueError, match="shape"):
        observation_fields(wrap({"dtype": "uint8"}), "obs", "Storage", torch.float32)
    with pytest.raises(ValueError, match="shape"):
        action_spec(wrap({"type": "Box"}))


def test_a_dtype_that_torch_has_not_is_refused():
    with pytest.raises(NotImplementedError, match="U5"):
        observation_fields({"shape": (3,), "dtype": "U5"}, "obs", "Storage", torch.float32)


@pytest.mark.parametrize("space", [7, "Box", None, [3]], ids=str)
def test_what_is_no_space_at_all_is_refused(space):
    with pytest.raises(NotImplementedError, match=type(space).__name__):
        observation_fields(space, "obs", "Storage", torch.float32)
    with pytest.raises(NotImplementedError, match=type(space).__name__):
        action_spec(space)


# ---------------------------------------------------------------------------------------------------- extra fields


@WRAP
def test_extra_fields_are_spaces_pairs_and_mappings_in_the_order_given(wrap):
    given = {
        "costs": ((), torch.float32),
        "task_id": spaces.Discrete(5),
        "goal": spaces.Box(-1, 1, (2, 3), np.float64),
        "levels": spaces.MultiDiscrete([2, 3]),
        "bits": spaces.MultiBinary(4),
        "code": ([3], "uint8"),
        "one": (2, np.int16),
        "shaped": wrap({"shape": (2,)}),
        "typed": wrap({"shape": [], "dtype": "bool"}),
    }
    expected = {
        "costs": ((), torch.float32),
        "task_id": ((), torch.int64),
        "goal": ((2, 3), torch.float64),
        "levels": ((2,), torch.int64),
        "bits": ((4,), torch.int8),
        "code": ((3,), torch.uint8),
        "one": ((2,), torch.int16),
        "shaped": ((2,), torch.float32),
        "typed": ((), torch.bool),
    }
    origin = "the extra_fields given to Storage()"
    assert extra_fields(given, "Storage", ("rewards",)) == tuple(
        Field(n, *form, origin) for n, form in expected.items()
    )


def test_no_extra_fields():
    assert extra_fields(None, "Storage", ()) == ()
    assert extra_fields({}, "Storage", ()) == ()
    assert extra_fields(DictConfig({}), "Storage", ()) == ()


def test_extra_fields_that_were_saved_come_back():
    fields = extra_fields({"costs": ((), torch.float32), "goal": spaces.Box(0, 1, (2,))}, "Storage", ())
    assert extra_fields(from_json(to_json(describe_extra_fields(fields))), "Storage", ()) == fields
    assert describe_extra_fields(()) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([("costs", ((), torch.float32))], "extra_fields is a list; Storage needs a dict of name: space"),
        ("costs", "extra_fields is a str; Storage needs a dict"),
        (spaces.Dict({"costs": spaces.Discrete(2)}), "extra_fields is a Dict; Storage needs a dict"),
        ({"rewards": ((), torch.float32)}, "extra_fields has 'rewards', which Storage uses itself"),
        ({"two words": ((), torch.float32)}, "extra_fields has 'two words'; Storage needs a name"),
        ({"_costs": ((), torch.float32)}, "extra_fields has '_costs'; Storage needs a name"),
        ({"class": ((), torch.float32)}, "extra_fields has 'class'; Storage needs a name"),
        ({"": ((), torch.float32)}, "extra_fields has ''; Storage needs a name"),
        ({3: ((), torch.float32)}, "extra_fields has 3; Storage needs a name"),
        ({"costs": torch.float32}, r"extra_fields\['costs'\] is torch.float32; give a Box"),
        ({"costs": None}, r"extra_fields\['costs'\] is None; give a Box"),
        ({"costs": ((), torch.float32, 3)}, r"extra_fields\['costs'\] is .*, 3\); give a Box"),
        ({"costs": spaces.Tuple((spaces.Discrete(2),))}, r"extra_fields\['costs'\] is Tuple.*; give a Box"),
        ({"costs": spaces.Text(3)}, r"extra_fields\['costs'\] is Text.*; give a Box"),
        ({"costs": ((-1,), torch.float32)}, "needs sizes that are not negative"),
        ({"costs": ((1.5,), torch.float32)}, "needs a sequence of whole numbers"),
        ({"costs": {"dtype": "uint8"}}, "needs a 'shape'"),
        ({"costs": ((), torch.complex64)}, "costs is complex64, fixed by the extra_fields given to Storage"),
    ],
    ids=str,
)
def test_extra_fields_that_are_none_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        extra_fields(given, "Storage", ("rewards",))


def test_an_extra_field_of_a_dtype_that_torch_has_not_is_refused():
    with pytest.raises(NotImplementedError, match="U5"):
        extra_fields({"costs": ((), "U5")}, "Storage", ())
