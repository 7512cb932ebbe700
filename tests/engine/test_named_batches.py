"""Named tuples with extra fields: still of their base class, picklable, and complete."""

from __future__ import annotations

import copy
import pickle
from typing import NamedTuple

import pytest

from rlstore.engine.batches.named import extended


class Pair(NamedTuple):
    first: int
    second: int


def test_extra_fields_come_behind_those_of_the_base() -> None:
    kind = extended(Pair, ["costs", "task_id"])
    made = kind(1, 2, 3, 4)
    assert isinstance(made, Pair)
    assert kind._fields == ("first", "second", "costs", "task_id")
    assert tuple(made) == (1, 2, 3, 4)
    assert (made.first, made.second, made.costs, made.task_id) == (1, 2, 3, 4)  # type: ignore[attr-defined]
    assert made._asdict() == {"first": 1, "second": 2, "costs": 3, "task_id": 4}
    assert repr(made) == "Pair(first=1, second=2, costs=3, task_id=4)"
    assert kind(task_id=4, costs=3, second=2, first=1) == made  # type: ignore[call-arg]
    assert kind._make(range(4)) == (0, 1, 2, 3)
    with pytest.raises(TypeError):
        kind(1, 2, 3)  # type: ignore[call-arg]


def test_replace_keeps_the_class_and_knows_every_field() -> None:
    made = extended(Pair, ["costs"])(1, 2, 3)
    changed = made._replace(first=7, costs=9)  # type: ignore[call-arg]
    assert type(changed) is type(made)
    assert tuple(changed) == (7, 2, 9)
    with pytest.raises((TypeError, ValueError)):
        made._replace(unknown=1)  # type: ignore[call-arg]


def test_the_same_names_give_the_same_class_and_none_the_base() -> None:
    assert extended(Pair, ["costs"]) is extended(Pair, ("costs",))
    assert extended(Pair, ["costs"]) is not extended(Pair, ["other"])
    assert extended(Pair, []) is Pair


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_they_can_be_pickled(protocol: int) -> None:
    made = extended(Pair, ["costs"])(1, 2, 3)
    loaded = pickle.loads(pickle.dumps(made, protocol))
    assert type(loaded) is type(made)
    assert loaded == made


def test_they_can_be_copied() -> None:
    inner = [1]
    made = extended(Pair, ["costs"])(1, 2, inner)
    again = copy.deepcopy(made)
    assert type(again) is type(made)
    assert again == made
    assert again.costs is not inner  # type: ignore[attr-defined]
    assert copy.copy(made) == made
