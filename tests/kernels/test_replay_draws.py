"""Windows, priorities and random numbers: native against portable, and against a few lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import covers
from replay_rings import Layout, Leaf, Memory, Twins, layouts

from rlstore import ReplayStorage
from rlstore.kernels import kernel
from rlstore.kernels.portable import OPERATIONS as PORTABLE
from rlstore.kernels.protocol import NOT_A_PRIORITY, NOT_READ

seeds = st.integers(-(2**63), 2**63 - 1)


# ---------------------------------------------------------------------------------------------------- random numbers


def split_mix(seed: int, counter: int) -> float:
    """SplitMix64 in Python's own numbers."""
    mask = 2**64 - 1
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


@covers("draw_units")
@given(seeds, st.one_of(st.integers(0, 1000), seeds), st.integers(0, 20))
def test_units_agree(seed, counter, count):
    state, other = torch.tensor([seed, counter]), torch.tensor([seed, counter])
    units, truth = torch.empty(count, dtype=torch.float64), torch.empty(count, dtype=torch.float64)
    kernel("draw_units", "cpu")(state, units)
    PORTABLE["draw_units"](other, truth)
    assert torch.equal(units, truth)
    assert torch.equal(state, other)
    assert units.tolist() == [split_mix(seed, counter + i) for i in range(count)]


# ---------------------------------------------------------------------------------------------------- windows


class WindowMemory:
    """An index of windows of a ring, and its memory."""

    def __init__(self, memory: Memory, make, length: int, stride: int, across: bool) -> None:
        lanes, self.steps = memory.layout.lanes, memory.layout.steps
        self.queue = torch.zeros(lanes, self.steps, dtype=torch.int64, device=memory.device)
        self.counters = torch.zeros(4, lanes, dtype=torch.int64, device=memory.device)
        self.index = make(memory.ring, length, stride, across, (self.queue, *self.counters))

    def windows(self) -> list[list[int]]:
        """The beginnings of each lane's windows."""
        heads, tails = self.counters[:2].tolist()
        return [
            [int(self.queue[lane, place % self.steps]) for place in range(head, tail)]
            for lane, (head, tail) in enumerate(zip(heads, tails, strict=True))
        ]


def window_twins(twins: Twins, length: int, stride: int, across: bool) -> list[WindowMemory]:
    classes = kernel("WindowIndex", "cpu"), PORTABLE["WindowIndex"]
    return [
        WindowMemory(memory, make, length, stride, across) for memory, make in zip(twins.both, classes, strict=True)
    ]


@covers("WindowIndex")
@settings(max_examples=25)
@given(layouts, st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.data())
def test_windows_agree(layout, writes, length, stride, across, data):
    twins = Twins(layout)
    mine, truth = window_twins(twins, length, stride, across)
    waited = 0
    for _ in range(writes):
        twins.write()
        # It must follow before a row is overwritten that it has not seen.
        choices = ["follow", "follow", "follow", "rebuild", "clear"] + ["wait"] * (waited + 1 < layout.steps)
        action = data.draw(st.sampled_from(choices))
        waited = waited + 1 if action == "wait" else 0
        if action == "clear":
            twins.clear()
        for windows in (mine, truth) if action != "wait" else ():
            windows.index.follow() if action == "follow" else windows.index.rebuild()
        assert mine.windows() == truth.windows()
        assert mine.counters[2].tolist() == truth.counters[2].tolist()  # the rows that were seen
        assert mine.counters[3].tolist() == truth.counters[3].tolist()  # the episodes that are open
    assert mine.index.count() == truth.index.count() == sum(map(len, mine.windows()))
    beginnings = {time * layout.lanes + lane for lane, times in enumerate(mine.windows()) for time in times}
    for row in [-1, 2**62, *twins.native.held().tolist()]:
        assert mine.index.contains(row) == truth.index.contains(row) == (row in beginnings)


@settings(max_examples=12)
@given(layouts, st.integers(1, 40), st.integers(1, 4), st.integers(0, 30), seeds)
def test_draws_of_windows_agree(layout, writes, length, count, seed):
    twins = Twins(layout)
    both = window_twins(twins, length, length, False)
    for _ in range(writes):
        twins.write()
        for windows in both:
            windows.index.follow()
    states, drawn = [torch.tensor([seed, 3]) for _ in both], [torch.empty(count).long() for _ in both]
    for windows, state, rows in zip(both, states, drawn, strict=True):
        if windows.index.count() == 0:
            with pytest.raises(ValueError, match="no windows"):
                windows.index.draw(state, rows)
        else:
            windows.index.draw(state, rows)
            assert all(windows.index.contains(row) for row in rows.tolist())
    assert torch.equal(drawn[0], drawn[1]) or both[0].index.count() == 0
    assert torch.equal(states[0], states[1])


# ---------------------------------------------------------------------------------------------------- priorities


class PriorityMemory:
    """Priorities of a ring, and their memory."""

    def __init__(self, memory: Memory, make) -> None:
        count = -(-memory.layout.lanes * memory.layout.steps // 16) * 16
        above = sum(make.level_sizes(count))
        self.leaves = torch.zeros(count, device=memory.device)
        self.sums = torch.zeros(above, dtype=torch.float64, device=memory.device)
        self.maxima = torch.zeros(above, device=memory.device)
        self.seen = torch.zeros(memory.layout.lanes, dtype=torch.int64, device=memory.device)
        self.tree = make(memory.ring, (self.leaves, self.sums, self.maxima, self.seen))


def priority_twins(twins: Twins) -> list[PriorityMemory]:
    classes = kernel("Priorities", "cpu"), PORTABLE["Priorities"]
    return [PriorityMemory(memory, make) for memory, make in zip(twins.both, classes, strict=True)]


def assert_trees_agree(mine: PriorityMemory, truth: PriorityMemory) -> None:
    """Leaves but for the rounding of a power; from the same leaves, the same tree to the last bit."""
    torch.testing.assert_close(mine.leaves, truth.leaves, rtol=1e-6, atol=0)
    truth.leaves.copy_(mine.leaves)
    truth.tree.rebuild()
    assert torch.equal(mine.sums, truth.sums)
    assert torch.equal(mine.maxima, truth.maxima)
    assert mine.tree.total() == truth.tree.total()
    assert mine.seen.tolist() == truth.seen.tolist()


wide_layouts = st.builds(
    Layout,
    lanes=st.integers(1, 5),
    steps=st.sampled_from([1, 3, 10, 33, 100, 300]),
    leaves=st.just((Leaf(torch.float32, 1, 1, 1),)),
    action=st.just(torch.int64),
    reward_shape=st.just(()),
    resets=st.integers(0, 2),
    gap=st.just(0),
    seed=st.integers(0, 2**32),
)
given_priorities = st.sampled_from(["fine", "fine", "fine", "tiny", "zeros", "nan", "negative", "infinite"])
given_rows = st.sampled_from(["held", "held", "held", "any written", "to come", "negative", "huge"])


def priorities_of(kind: str, count: int, twins: Twins) -> torch.Tensor:
    values = torch.from_numpy(twins.rng.exponential(1, count)).float()
    values[torch.from_numpy(twins.rng.random(count) < 0.2)] = 0
    wrong = {"nan": torch.nan, "negative": -0.5, "infinite": torch.inf}.get(kind)
    if kind == "zeros":
        values.zero_()
    elif kind == "tiny":  # below what a float32 holds in full
        values[values > 0] = 1e-42
    elif wrong is not None and count:
        values[int(twins.rng.integers(count))] = wrong
    return values


def rows_of(kind: str, count: int, twins: Twins) -> torch.Tensor:
    held, written = twins.native.held(), twins.native.counters[0]
    rows = held[torch.from_numpy(twins.rng.integers(len(held), size=count))] if len(held) else torch.zeros(0).long()
    lanes = twins.layout.lanes
    if kind == "any written":  # some of them are overwritten
        lane = rows % lanes
        rows = torch.from_numpy((twins.rng.random(len(rows)) * written[lane].numpy()).astype("int64")) * lanes + lane
    elif kind != "held" and len(rows):
        newest = int(held.max())
        rows[int(twins.rng.integers(len(rows)))] = {"to come": newest + lanes, "negative": -1, "huge": 2**62 + 1}[kind]
    return rows


@covers("Priorities")
@settings(max_examples=25)
@given(
    wide_layouts,
    st.lists(st.tuples(given_rows, given_priorities), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    st.sampled_from([None, 1, 3]),
    st.integers(0, 40),
    seeds,
)
def test_priorities_agree(layout, updates, alpha, length, count, seed):
    twins = Twins(layout)
    both = priority_twins(twins)
    windows = [None, None] if length is None else window_twins(twins, length, 2, False)
    states = [torch.tensor([seed, 0]) for _ in both]
    for row_kind, priority_kind in updates:
        for _ in range(4):
            twins.write()
            for priorities, index in zip(both, windows, strict=True):
                if index is None:
                    priorities.tree.follow()
                else:
                    index.index.follow()
                    priorities.tree.follow_windows(index.index)
        assert_trees_agree(*both)
        rows = rows_of(row_kind, count, twins)
        values = priorities_of(priority_kind, len(rows), twins)
        before = both[0].leaves.clone()
        outcomes = [
            priorities.tree.update(rows, values, alpha, None if index is None else index.index)
            for priorities, index in zip(both, windows, strict=True)
        ]
        assert outcomes[0] == outcomes[1]
        if outcomes[0][0]:
            assert torch.equal(both[0].leaves, before)
        assert_trees_agree(*both)
        assert_draws_agree(both, states, count)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_first_priorities_agree(alpha):
    twins = Twins(Layout(3, 5, (Leaf(torch.float32, 1, 1, 2),), torch.int64, (), 0, 0, seed=1))
    both = priority_twins(twins)
    for number in range(12):
        given, before = torch.tensor([0.0, 1e-30, 2.5]).roll(number), twins.native.counters[0].clone()
        twins.write()
        for priorities in both:
            priorities.tree.follow()
            priorities.tree.begin(before, given, alpha)
        assert_trees_agree(*both)
    before = twins.native.counters[0] - 1
    for priorities in both:
        with pytest.raises(ValueError, match="not a priority"):
            priorities.tree.begin(before, torch.full((3,), -1.0), alpha)
    assert_trees_agree(*both)


def assert_draws_agree(both: list[PriorityMemory], states: list[torch.Tensor], count: int) -> None:
    rows, weights = [torch.empty(count).long() for _ in both], [torch.empty(count, 1) for _ in both]
    for priorities, state, drawn, weight in zip(both, states, rows, weights, strict=True):
        before = state.clone()
        if not priorities.tree.draw(state, 0.7, drawn, weight):
            assert priorities.tree.total() == 0
            assert torch.equal(state, before)
            drawn.zero_(), weight.zero_()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(states[0], states[1])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=0)


def one_lane(rows: int) -> tuple[Twins, list[PriorityMemory]]:
    leaf = Leaf(torch.float32, 1, 1, 1)
    twins = Twins(Layout(1, 16, (leaf,), torch.int64, (), 0, 0, 0, trouble=(0, 0, 0, 0)))
    both = priority_twins(twins)
    for _ in range(rows):
        twins.write()
    for priorities in both:
        priorities.tree.follow()
    return twins, both


TINY = torch.finfo(torch.float32).tiny
FINE = [
    (torch.tensor([1, 3]), torch.tensor([0.25, 4.0])),
    (torch.tensor([1, 3]), torch.tensor([[0.25], [4.0]])),
    (torch.tensor([1, 3]), torch.tensor([0.25, 4.0], requires_grad=True)),
    (torch.tensor([1, 3]), torch.tensor([0.25, 4.0], dtype=torch.float64)),
    (np.array([1, 3]), np.array([0.25, 4.0], np.float32)),
    (np.array([1, 3]), np.array([0.25, 0.0, 4.0])[::2]),
]
ODD = [
    (torch.tensor([1, 3], dtype=torch.int32), torch.ones(2)),
    (torch.tensor([[1], [3]]), torch.ones(2)),
    (torch.tensor([1, 3]), torch.ones(1)),
    (torch.tensor([1, 3]), torch.ones(2, 2)),
    (torch.tensor([1, 3]), torch.ones(2, dtype=torch.float16)),
    (torch.tensor([1, 3]), torch.ones(4)[::2]),
    ([1, 3], torch.ones(2)),
    (torch.tensor([1, 3]), 1.0),
]


@pytest.mark.parametrize("case", range(len(FINE)))
def test_priorities_are_read_as_they_are_given(case):
    _, (mine, truth) = one_lane(5)
    for priorities in (mine, truth):
        refused = priorities.tree.update(*FINE[case], 0.5, None)[0]
        assert refused in ((0,) if priorities is mine else (0, NOT_READ))
    assert mine.leaves[:5].tolist() == [1.0, 0.5, 1.0, 2.0, 1.0]
    assert mine.tree.total() == 5.5


@pytest.mark.parametrize("case", range(len(ODD)))
def test_what_has_to_be_converted_first_changes_nothing(case):
    _, both = one_lane(5)
    for priorities in both:
        assert priorities.tree.update(*ODD[case], 0.5, None) == (NOT_READ, 0, 0)
        assert priorities.leaves[:5].tolist() == [1.0] * 5


def test_a_double_above_zero_stays_so():
    _, (mine, _) = one_lane(5)
    given = torch.tensor([1e-300, 0.0, 1e300, 1.0], dtype=torch.float64)
    assert mine.tree.update(torch.arange(4), given, 1.0, None) == (NOT_A_PRIORITY, 2, 0)
    assert mine.tree.update(torch.arange(2), given[:2], 1.0, None) == (0, 0, 0)
    assert mine.leaves[:3].tolist() == [TINY, 0.0, 1.0]
    assert mine.tree.update(torch.tensor([2]), torch.tensor([9.0]), 0.5, None) == (0, 0, 0)
    assert mine.leaves[2] == 3.0


@given(st.integers(0, 10**7))
def test_levels_agree(leaves):
    assert kernel("Priorities", "cpu").level_sizes(leaves) == PORTABLE["Priorities"].level_sizes(leaves)


def test_a_draw_by_hand():
    """Four rows of priority 1, 0, 3, 4: a draw in each half of the total of 8, at what SplitMix64 says."""
    layout = Layout(1, 4, (Leaf(torch.float32, 1, 1, 1),), torch.int64, (), 2, 0, seed=0, trouble=(0, 0, 0, 0))
    twins = Twins(layout)
    for _ in range(4):
        twins.write()
    bounds = [1, 1, 4, 8]
    for priorities in priority_twins(twins):
        priorities.tree.follow()
        assert priorities.tree.update(torch.arange(4), torch.tensor([1.0, 0.0, 3.0, 4.0]), 1.0, None) == (0, 0, 0)
        assert priorities.tree.total() == 8
        for counter in range(20):
            rows, weights = torch.empty(2).long(), torch.empty(2)
            priorities.tree.draw(torch.tensor([9, counter]), 1.0, rows, weights)
            targets = [(i + split_mix(9, counter + i)) * 4 for i in range(2)]
            expected = [next(row for row, end in enumerate(bounds) if target < end) for target in targets]
            assert rows.tolist() == expected
            least = min(torch.tensor([1.0, 0.0, 3.0, 4.0])[expected])
            torch.testing.assert_close(weights, least / torch.tensor([1.0, 0.0, 3.0, 4.0])[expected])


def test_full_lanes_are_counted_by_time_whenever_they_began():
    storage = ReplayStorage(Box(-9, 9, (1,)), Discrete(2), storage_size=6, num_envs=2, seed=7)

    def add(*masks: tuple[bool, bool]) -> None:
        for mask in masks:
            storage.add(np.zeros((2, 1)), [0, 0], [0, 0], [False] * 2, [False] * 2, {}, np.zeros((2, 1)), mask=mask)

    add((True, True), (True, False))
    storage.reset()
    add((False, True), *[(True, True)] * 4)  # both lanes have written 6 rows, of which 3 are held
    rows = torch.empty(20, dtype=torch.int64)
    storage._ring_of().kernel.draw(torch.tensor([7, 0]), rows)
    assert rows.tolist() == [3 * 2 + int(split_mix(7, i) * 6) for i in range(20)]
