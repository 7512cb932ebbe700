"""Several steps in one call: native against portable, which writes them one by one, in every byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_rings import Layout, Leaf, Memory, Twins, layouts

PLAIN = Layout(2, 3, (Leaf(torch.float32, 1, 1, 2),), torch.int64, (), 0, 0, seed=0)


def stacked(twins: Twins, steps: int) -> tuple[torch.Tensor | None, ...]:
    """The values of some steps, one after another; what some of them lack the others lack too."""
    layout, given = twins.layout, [twins.steps.next() for _ in range(steps)]
    columns = [[torch.as_tensor(v) if v is not None else None for v in values] for values in zip(*given, strict=True)]
    mask = 2 * len(layout.leaves) + len(layout.columns) + 2
    ones = torch.ones(layout.lanes, dtype=torch.bool)
    columns[mask] = [ones if value is None else value for value in columns[mask]]
    return tuple(None if any(v is None for v in values) else torch.stack(values) for values in columns)


def write_steps(memory: Memory, values: tuple, steps: int, *, resumed: bool) -> bool:
    """Write all; returns whether an episode was broken off."""
    done, broken = 0, False
    while done < steps:
        done, outcome = memory.ring.write_steps(values, steps, done, steps, resumed, True)
        broken |= outcome == -4
        assert outcome in (-1, -2, -3, -4)
        if outcome in (-2, -3):
            memory.grow() if outcome == -2 else memory.make_starts()
    return broken


@settings(max_examples=25)
@given(layouts, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
def test_several_steps_are_one_step_after_another(layout, counts, resumed):
    twins = Twins(layout)
    for count in counts:
        values = stacked(twins, count)
        broken = [write_steps(memory, values, count, resumed=resumed) for memory in twins.both]
        assert broken[0] == broken[1]
        assert not (resumed and broken[0] and values[2 * len(layout.leaves) + len(layout.columns) + 2] is None)
        twins.assert_same()


def test_a_value_that_does_not_fit_is_found_before_anything_is_written():
    twins = Twins(PLAIN)
    values = list(stacked(twins, 4))
    values[5] = values[5].float()
    values[5][-1, -1] = torch.nan
    assert twins.native.ring.write_steps(tuple(values), 4, 0, 4, False, True) == (0, 5)
    assert int(twins.native.counters[0].sum()) == 0


def test_steps_stop_where_there_is_no_room():
    ring = Twins(PLAIN).native
    ring.grow(), ring.grow()
    zeros = torch.zeros(4, 2, 2)
    flags = torch.zeros(4, 2, dtype=torch.bool)
    values = (zeros, zeros, zeros.long(), torch.zeros(4, 2, 1), flags, flags, None, None, None)
    ring.ring.allow(3)
    assert ring.ring.write_steps(values, 4, 0, 4, False, True) == (3, -1)
    assert ring.ring.write_steps(values, 4, 3, 4, False, True) == (3, -6)
    assert ring.counters[0].tolist() == [3, 3]
    ring.ring.allow(3)
    assert ring.ring.write_steps(values, 4, 3, 4, False, True) == (4, -1)
    assert ring.counters[0].tolist() == [4, 4]


@pytest.mark.parametrize(("steps", "begin", "end"), [(0, 0, 0), (2, -1, 1), (2, 1, 0), (2, 0, 3), (2**52, 0, 1)])
def test_steps_that_are_not_there_are_refused(steps, begin, end):
    with pytest.raises(ValueError, match="no such steps"):
        Twins(PLAIN).native.ring.write_steps((), steps, begin, end, False, True)


@pytest.mark.parametrize("kind", ["list", "tuple", "array"])
def test_a_list_of_final_observations_has_none_for_the_others(kind):
    import numpy as np

    memory = Twins(PLAIN).native
    finals: object = [None, np.array([7.0, 8.0])]
    if kind == "tuple":
        finals = (None, torch.tensor([7.0, 8.0]))
    elif kind == "array":
        finals = np.empty(2, object)
        finals[1] = np.array([7, 8])
    zeros, ended = torch.zeros(2, 2), torch.ones(2, dtype=torch.bool)
    shown = torch.full((2, 2), 3.0)
    values = (zeros, shown, torch.zeros(2, 2).long(), torch.zeros(2), ended, ~ended, None, finals, None)
    assert memory.write(values)[-1] == -1
    assert [memory.finals[0][int(memory.episode_of[lane, 0])].tolist() for lane in (0, 1)] == [[3.0, 3.0], [7.0, 8.0]]
    for wrong in ([None], [None, np.zeros(3)], [None, np.zeros(2, complex)], [None, "7"], [None, None, None]):
        assert memory.ring.write((*values[:7], wrong, None)) == 7
    assert memory.counters[0].tolist() == [1, 1]
