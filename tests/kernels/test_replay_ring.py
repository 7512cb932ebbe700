"""The ring of episodes: native against portable, in every byte of its memory, and what both refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import covers
from replay_rings import Layout, Leaf, Twins, layouts

PLAIN = Layout(2, 3, (Leaf(torch.float32, 1, 1, 2),), torch.int64, (), 0, 0, seed=0)


@covers("EpisodeRing")
@settings(max_examples=40)
@given(layouts, st.integers(1, 40))
def test_writes_agree_in_every_byte(layout, writes):
    twins = Twins(layout)
    for write in range(writes):
        twins.write()
        twins.assert_same()
        if write == 25:
            twins.clear()


def test_the_steps_lead_to_every_outcome():
    """So that a comparison on them means something: writes, breaks, repeats, new slots and new tables of starts."""
    twins = Twins(Layout(2, 5, (Leaf(torch.uint8, 3, 1, 2),), torch.int64, (), 0, 0, seed=1))
    assert {outcome for _ in range(60) for outcome in twins.write()} == {-1, -2, -3, -4, -7}


def step_of(shown, following, reward, ended=(False, False), final=None, mask=None):
    """A step of two lanes; the observation of lane i is [number, i]."""

    def both(numbers):
        return torch.tensor([[number, lane] for lane, number in enumerate(numbers)], dtype=torch.float32)

    flags = torch.tensor(ended), torch.zeros(2, dtype=torch.bool)
    finals = (None, None) if final is None else (both(final), torch.tensor(ended))
    mask = None if mask is None else torch.tensor(mask)
    return (both(shown), both(following), torch.zeros(2, 2).long(), torch.tensor(reward), *flags, mask, *finals)


@pytest.mark.parametrize(
    ("resets", "reward", "outcome", "held"),
    [(0, 0.0, -1, 1), (0, 0.5, -7, 2), (1, 0.5, -1, 1), (2, 0.0, -1, 2), (3, 0.0, -7, 2), (3, 0.5, -7, 2)],
)
def test_a_step_that_repeats_the_final_observation(resets, reward, outcome, held):
    """Lane 1 ends its episode in observation 6. It sits a step out; the next begins with 6."""
    twins = Twins(replace(PLAIN, resets=resets))
    for memory in twins.both:
        assert memory.write(step_of([1, 5], [2, 6], [1.0, 1.0], [False, True]))[-1] == -1
        assert memory.write(step_of([2, 0], [3, 0], [1.0, 1.0], mask=[True, False])) == [-1]
        assert memory.ring.repeated() == -1
        assert memory.write(step_of([3, 6], [4, 7], [1.0, reward]))[-1] == outcome
        assert memory.ring.repeated() == (1 * 2 + 1 if outcome == -7 else -1)  # the second row of lane 1
        assert memory.counters[0].tolist() == [3, held]
        assert memory.write(step_of([4, 7], [5, 8], [1.0, 1.0]))[-1] == -1  # it is told once
    twins.assert_same()


@pytest.mark.parametrize("resets", [0, 3])
@pytest.mark.parametrize("why", ["a final observation was given", "another observation", "it ends the next episode"])
def test_a_step_after_an_end_that_repeats_nothing(resets, why):
    twins = Twins(replace(PLAIN, resets=resets))
    final = [0, 6] if "given" in why else None
    shown = [2, 7 if "another" in why else 6]
    for memory in twins.both:
        memory.write(step_of([1, 5], [2, 6], [1.0, 1.0], [False, True], final))
        assert memory.write(step_of(shown, [3, 8], [1.0, 0.5], [False, "ends" in why]))[-1] == -1
        assert memory.counters[0].tolist() == [2, 2]
    twins.assert_same()


def test_of_a_break_and_a_repeat_in_one_step_the_break_is_told():
    twins = Twins(PLAIN)
    for memory in twins.both:
        memory.write(step_of([1, 5], [2, 6], [1.0, 1.0], [False, True]))
        assert memory.write(step_of([9, 6], [3, 8], [1.0, 0.5]))[-1] == -4
    twins.assert_same()


def test_of_several_lanes_that_repeat_the_largest_row_is_told():
    twins = Twins(PLAIN)
    for memory in twins.both:
        memory.grow()
        assert memory.write(step_of([1, 5], [2, 6], [1.0, 1.0], [True, True]))[-1] == -1
        assert memory.write(step_of([2, 6], [3, 7], [1.0, 0.5]))[-1] == -7
        assert memory.ring.repeated() == 1 * 2 + 1


@pytest.mark.parametrize("breaks", [None, 1, 3])
def test_of_several_steps_a_break_is_told_and_else_a_repeat(breaks):
    """Lane 1 ends in the first step and shows what it ended in in the third; lane 0 breaks off before or after."""
    twins = Twins(PLAIN)
    numbers = [1, 2, 3, 4]
    shown = [number + 50 * (breaks == time) for time, number in enumerate(numbers)]
    steps = [
        step_of([shown[0], 5], [2, 6], [1.0, 1.0], [False, True]),
        step_of([shown[1], 0], [3, 0], [1.0, 1.0], mask=[True, False]),
        step_of([shown[2], 6], [4, 7], [1.0, 0.5]),
        step_of([shown[3], 7], [5, 8], [1.0, 1.0]),
    ]
    everybody = torch.ones(2, dtype=torch.bool)
    masks = torch.stack([everybody if step[6] is None else step[6] for step in steps])
    stacked = [torch.stack(part) for part in zip(*(step[:6] for step in steps), strict=True)]
    values = (*stacked, masks, None, None)
    for memory in twins.both:
        for _ in range(5):
            memory.grow()
        done, outcomes = 0, []
        while done < 4:
            done, outcome = memory.ring.write_steps(values, 4, done, 4, False, True)
            outcomes.append(outcome)
        assert (-4 in outcomes) == (breaks is not None)
        assert (outcomes == [-7]) == (breaks is None and memory is twins.native)
        assert memory.ring.repeated() == 3
        assert memory.counters[0].tolist() == [4, 3]
    twins.assert_same()


@settings(max_examples=15)
@given(layouts, st.integers(1, 40), st.integers(1, 50), st.integers(-(2**63), 2**63 - 1))
def test_draws_agree(layout, writes, count, seed):
    twins = Twins(layout)
    for _ in range(writes):
        twins.write()
    states, drawn = [torch.tensor([seed, 5]) for _ in twins.both], [torch.empty(count).long() for _ in twins.both]
    if len(twins.native.held()) == 0:
        for memory, state, rows in zip(twins.both, states, drawn, strict=True):
            with pytest.raises(ValueError, match="no rows"):
                memory.ring.draw(state, rows)
        return
    for memory, state, rows in zip(twins.both, states, drawn, strict=True):
        memory.ring.draw(state, rows)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(states[0], states[1])
    assert states[0].tolist() == [seed, 5 + count]
    assert set(drawn[0].tolist()) <= set(twins.native.held().tolist())


@settings(max_examples=20)
@given(layouts, st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_bounds_and_windows_agree(layout, writes, length, across):
    twins = Twins(layout)
    for _ in range(writes):
        twins.write()
    rows = twins.native.held()
    found = []
    for memory in twins.both:
        first, stop, windows = torch.empty_like(rows), torch.empty_like(rows), torch.empty(len(rows) * length).long()
        memory.ring.bounds(rows, first, stop)
        memory.ring.windows(rows, length, across, windows)
        found.append((first, stop, windows))
    for mine, truth in zip(*found, strict=True):
        assert torch.equal(mine, truth)
    first, stop, windows = found[0]
    time = rows // layout.lanes
    assert bool(((first <= time) & (time < stop)).all())
    assert torch.equal(windows[::length], rows)


@pytest.mark.parametrize("row", [-1, 6, 7, 2**52, 2**62 + 1, 2**63 - 1, -(2**63)])
def test_rows_that_are_not_held_are_refused(row):
    twins = Twins(PLAIN)
    while len(twins.native.held()) < 6:
        twins.write()
    held = twins.native.held()
    oldest = int(held.min()) - PLAIN.lanes
    for wrong in {row + int(held.max()) - 5 if row in (6, 7) else row, oldest}:
        rows = torch.tensor([int(held[0]), wrong])
        for memory in twins.both:
            with pytest.raises(IndexError, match="not held"):
                memory.ring.bounds(rows, torch.empty(2).long(), torch.empty(2).long())
            with pytest.raises(IndexError, match="not held"):
                memory.ring.windows(rows, 2, False, torch.empty(4).long())


def values_of(layout: Layout, place: int, value: object) -> tuple:
    """A step whose values are all ready but one."""
    values = list(Twins(layout).steps.next())
    values[4:8] = [torch.zeros(layout.lanes, dtype=torch.bool)] * 2 + [None, torch.zeros(layout.lanes, 2)]
    values[8] = torch.zeros(layout.lanes, dtype=torch.bool)
    values[place] = value
    return tuple(values)


NOT_READY = {
    "a half": torch.zeros(2, 2, dtype=torch.float16),
    "of other lanes": torch.zeros(3, 2),
    "of another shape": torch.zeros(2, 3),
    "without lanes": torch.zeros(2),
    "transposed": torch.zeros(2, 2).t(),
    "negated lazily": torch.complex(torch.zeros(2, 2), torch.zeros(2, 2)).conj().imag,
    "sparse": torch.zeros(2, 2).to_sparse(),
    "a list": [[0.0, 0.0], [0.0, 0.0]],
    "missing": None,
}


@pytest.mark.parametrize("name", NOT_READY)
@pytest.mark.parametrize("place", [0, 1, 7])
def test_values_that_are_not_ready_are_told_by_their_place(name, place):
    if name == "missing" and place == 7:
        pytest.skip("final observations may be missing")
    twins = Twins(PLAIN)
    for memory in twins.both:
        assert memory.ring.write(values_of(PLAIN, place, NOT_READY[name])) == place
    twins.assert_same()
    assert int(twins.native.counters[0].sum()) == 0


@pytest.mark.parametrize("place", [0, 1, 7])
def test_values_without_memory_are_not_ready(place):
    twins = Twins(PLAIN)
    assert twins.native.ring.write(values_of(PLAIN, place, torch._efficientzerotensor(2, 2))) == place
    assert int(twins.native.counters[0].sum()) == 0


@pytest.mark.parametrize("place", [4, 5, 6, 8])
@pytest.mark.parametrize(
    "flags",
    [
        torch.tensor([0.0, torch.nan]),
        torch.zeros(2, dtype=torch.float16),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(4, dtype=torch.bool)[::2],
        [[True], [False]],
    ],
    ids=["nan", "float16", "of other lanes", "strided", "list"],
)
def test_flags_that_are_not_ready_are_told_by_their_place(place, flags):
    twins = Twins(PLAIN)
    for memory in twins.both:
        assert memory.ring.write(values_of(PLAIN, place, flags)) == place


def test_one_lane_may_come_without_its_axis():
    layout = Layout(1, 3, (Leaf(torch.float32, 1, 1, 1),), torch.int64, (), 0, 0, seed=0)
    no, one = torch.zeros((), dtype=torch.bool), torch.ones(())
    values = (one, one + 1, torch.zeros(2, dtype=torch.int64), one, no, no, None, None, None)
    twins = Twins(layout)
    for memory in twins.both:
        assert memory.write(values)[-1] == -1
    twins.assert_same()
    assert twins.native.blocks[0][0, :2, 0].tolist() == [1.0, 2.0]


def test_plain_numbers_are_each_a_value_of_their_own():
    """Two columns given as numbers once shared one place, and a leaf read half a double."""
    from replay_rings import Memory

    from rlstore.kernels import kernel

    layout = Layout(1, 3, (Leaf(torch.float32, 1, 1, 1),), torch.float32, (), 0, 0, seed=0)
    memory = Memory(layout, kernel("EpisodeRing", "cpu"))
    action, one = torch.tensor([3.0, 4.0]), torch.ones(1, 1)
    assert memory.write((one, one, action, 0.5, False, True, None, None, None))[-1] == -1
    assert memory.columns[1][0, 0].item() == 0.5
    assert memory.columns[0][0, 0].tolist() == [3.0, 4.0]
    assert memory.write((0.25, one, action, 0.75, False, False, None, None, None))[-1] == -1
    assert memory.blocks[0][0, 1].item() == 0.25
    assert memory.columns[1][0, 1].item() == 0.75
    assert memory.write((one, 0.125, action, 0.5, False, True, None, 0.625, None))[-1] == -1
    assert memory.finals[0][int(memory.episode_of[0, 2])].item() == 0.625


def test_without_room_nothing_is_written():
    twins = Twins(PLAIN)
    values = values_of(PLAIN, 6, torch.zeros(2, dtype=torch.bool))  # no lane takes part
    for memory in twins.both:
        memory.ring.allow(2)
        assert [memory.ring.write(values) for _ in range(3)] == [-1, -1, -6]
        assert memory.ring.write(values_of(PLAIN, 0, None)) == 0
        with pytest.raises(ValueError, match="no fewer steps than none"):
            memory.ring.allow(-1)
        memory.ring.allow(1)
        memory.ring.allow(0)
    outcomes = twins.write()
    assert outcomes[-1] == -6
    for memory in twins.both:
        memory.ring.allow(1)
    twins.assert_same()
    assert int(twins.native.counters[0].sum()) == 0
