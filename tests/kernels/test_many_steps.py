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
        assert outcome in (-1, -2, -3, -4, -7)
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
        assert not (resumed and broken[0] and count == 1)
        twins.assert_same()


TWO_LEAVES = (Leaf(torch.float32, 1, 1, 17), Leaf(torch.uint8, 1, 1, 3))


@pytest.mark.parametrize(
    ("gap", "resumed", "trouble"), [(0, False, (0.004, 0.002, 0.0, 0.0)), (3, True, (0.01, 0.002, 0.004, 0.0))]
)
def test_long_runs_of_a_single_lane(gap, resumed, trouble):
    """What continues an episode is written at once, until the lane is full: up to the end of its memory and around."""
    twins = Twins(Layout(1, 700, TWO_LEAVES, torch.int64, (), 0, gap, 1, trouble))
    for count in (300, 1, 350, 120, 40):
        values = stacked(twins, count)
        broken = [write_steps(memory, values, count, resumed=resumed) for memory in twins.both]
        assert broken[0] == broken[1]
        twins.assert_same()


@pytest.mark.parametrize("cleared", [0, 650])
def test_the_next_observation_may_be_the_memory_of_the_next_step(cleared):
    """After a clear the rows of a lane may begin anywhere, also near the end of its memory."""
    twins = Twins(Layout(1, 700, (Leaf(torch.float32, 1, 1, 5),), torch.int64, (), 2, 0, seed=0))
    for memory in twins.both:
        memory.counters[:2] = cleared
    chain = torch.arange(601 * 5.0).reshape(601, 1, 5)
    ended = torch.zeros(600, 1, dtype=torch.bool)
    ended[[99, 400]] = True
    mask = torch.ones(600, 1, dtype=torch.bool)
    mask[250] = False  # so that step 251 does not continue step 249
    actions = torch.arange(1200).reshape(600, 1, 2)
    values = (chain[:-1], chain[1:], actions, actions[..., 0].float(), ended, ~ended & False, mask, chain[1:], None)
    broken = [write_steps(memory, values, 600, resumed=False) for memory in twins.both]
    assert broken == [True, True]
    twins.assert_same()
    ring = twins.native
    assert ring.counters[0].item() == cleared + 599
    places = (cleared + torch.cat((torch.arange(250), torch.arange(250, 599)))) % 701
    rows = torch.cat((torch.arange(250), torch.arange(251, 600)))
    assert torch.equal(ring.blocks[0][0, places], chain[rows, 0])
    assert torch.equal(ring.columns[0][0, places], actions[rows, 0])


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


def test_a_run_stops_where_there_is_no_room():
    ring = Twins(Layout(1, 20, (Leaf(torch.float32, 1, 1, 2),), torch.int64, (), 0, 0, seed=0)).native
    zeros, flags = torch.zeros(10, 1, 2), torch.zeros(10, 1, dtype=torch.bool)
    values = (zeros, zeros, zeros.long(), torch.zeros(10, 1), flags, flags, None, None, None)
    for first, room in ((0, 3), (3, 1), (4, 0), (4, 4)):
        ring.ring.allow(room)
        assert ring.ring.write_steps(values, 10, first, 9, False, True) == (first + room, -1 if room else -6)
    ring.ring.allow(4)
    assert ring.ring.write_steps(values, 10, 8, 9, False, True) == (9, -1)  # no further than asked for
    assert ring.counters[0].tolist() == [9]


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
