"""Priorities and windows in Triton against the portable version: leaves, draws, weights, and what is dropped."""

from __future__ import annotations

import pytest
import torch
from device_rings import DeviceTwins, Layout, Leaf
from test_replay_draws import PriorityMemory, WindowMemory

from rlstore.kernels.cuda import priorities as on_cuda
from rlstore.kernels.cuda.priorities import Priorities
from rlstore.kernels.cuda.windows import WindowIndex
from rlstore.kernels.portable import OPERATIONS as PORTABLE

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of Triton's interpreter


def twins_of(lanes: int, steps: int, device: torch.device) -> DeviceTwins:
    leaf = Leaf(torch.float32, 1, 1, 1)
    return DeviceTwins(Layout(lanes, steps, (leaf,), torch.int64, (), 2, 0, seed=9), device, deep=min(steps, 8))


def priorities_of(twins: DeviceTwins) -> tuple[PriorityMemory, PriorityMemory]:
    return PriorityMemory(twins.mine, Priorities), PriorityMemory(twins.truth, PORTABLE["Priorities"])


def write(twins: DeviceTwins, both: tuple[PriorityMemory, ...], count: int) -> None:
    for _ in range(count):
        twins.write()
        for priorities in both:
            priorities.tree.follow()


def assert_draws_agree(both, generators, count: int) -> torch.Tensor:
    drawn = []
    for priorities, generator in zip(both, generators, strict=True):
        rows = torch.empty(count, dtype=torch.int64, device=generator.device)
        weights = torch.empty(count, 1, device=generator.device)
        priorities.tree.draw(generator, 0.7, rows, weights)
        drawn.append((rows.cpu(), weights.cpu()))
    assert torch.equal(drawn[0][0], drawn[1][0])
    torch.testing.assert_close(drawn[0][1], drawn[1][1], rtol=1e-5, atol=0)
    torch.testing.assert_close(both[0].leaves.cpu(), both[1].leaves, rtol=1e-6, atol=0)
    assert generators[0].tolist() == generators[1].tolist()
    return drawn[1][0]


ON_GPU = torch.cuda.is_available()  # where there is none, Triton's interpreter is slow
SIZES = [(1, 40), (5, 7), (3, 700), (40, 30), (20, 64)] if ON_GPU else [(1, 40), (5, 7), (3, 700)]


@pytest.mark.parametrize(("lanes", "steps"), SIZES)
def test_draws_and_updates_agree(lanes, steps, device):
    assert_draws_and_updates_agree(lanes, steps, device)


def test_first_priorities_agree_and_those_that_are_none_are_dropped(device):
    twins = twins_of(5, 7, device)
    both = priorities_of(twins)
    generators = [torch.tensor([3, 0], device=device), torch.tensor([3, 0])]
    for write_number in range(12):
        given = torch.rand(5) * (torch.arange(5) != write_number % 5)
        before = [memory.counters[0].clone() for memory in (twins.mine, twins.truth)]
        write(twins, both, 1)
        if write_number % 3:
            both[0].tree.begin(before[0], given.to(device), 0.6)
            both[1].tree.begin(before[1], given, 0.6)
        if write_number % 2:
            assert_draws_agree(both, generators, 6)
    before = twins.mine.counters[0].clone()
    write(twins, both, 1)
    moved = (twins.mine.counters[0] > before).cpu()
    both[0].tree.begin(before, torch.full((5,), torch.nan, device=device), 0.6)
    assert both[0].tree.dropped() == int(moved.sum()) > 0
    assert_draws_agree(both, generators, 6)  # they have the largest, as if none had been given


def test_above_very_many_leaves_there_are_wider_sums(device, monkeypatch):
    narrow = Priorities.level_sizes(2112)
    monkeypatch.setattr(on_cuda, "_MOST_BLOCKS", 1)
    assert (narrow, Priorities.level_sizes(2112)) == ([3 * 32, 3], [64, 1])
    assert_draws_and_updates_agree(3, 700, device)


def assert_draws_and_updates_agree(lanes: int, steps: int, device: torch.device) -> None:
    twins = twins_of(lanes, steps, device)
    both = priorities_of(twins)
    generators = torch.tensor([5, 3], device=device), torch.tensor([5, 3])
    for turn in range(3):
        write(twins, both, 4)
        rows = assert_draws_agree(both, generators, 21)
        if turn == 1:
            write(twins, both, 1)  # rows without a priority, and then an update
        values = torch.from_numpy(twins.rng.exponential(1, 21)).float()
        values[:3] = torch.tensor([0.0, 1e-42, 100.0])
        rows[4] = rows[5]  # twice: the later one counts
        both[0].tree.update(rows.to(device), values.to(device), 0.6, None)
        both[1].tree.update(rows, values, 0.6, None)
    assert both[0].tree.total() == pytest.approx(both[1].tree.total(), rel=1e-6)


@pytest.mark.parametrize(
    ("is_sorted", "rows_held"), [(False, 1), (True, 9), *([(False, 9), (True, 1)] if ON_GPU else [])]
)
def test_of_all_priorities_of_a_row_the_last_counts(is_sorted, rows_held, device):
    """Update after update, with so many entries for few rows that on a device programs meet at them."""
    count, turns = (20_000, 30) if device.type == "cuda" else (200, 3)
    twins = twins_of(5, 7, device)
    both = priorities_of(twins)
    write(twins, both, rows_held)
    held = twins.truth.held()
    for _ in range(turns):
        rows = held[torch.from_numpy(twins.rng.integers(0, len(held), count))]
        if is_sorted:
            leaves = rows % 5 * 7 + rows // 5 % 7
            rows = rows[leaves.argsort()]
        values = torch.from_numpy(twins.rng.permutation(count)).float() + 1
        both[0].tree.update(rows.to(device), values.to(device), 0.6, None)
        both[1].tree.update(rows, values, 0.6, None)
        torch.testing.assert_close(both[0].leaves.cpu(), both[1].leaves, rtol=1e-6, atol=0)


def test_one_that_comes_later_and_was_there_first_stays(device):
    """Entry 2 has stamped a row before entry 0, which has the same one, gets there: the priority of entry 2 counts."""
    twins = twins_of(4, 5, device)
    mine, _ = both = priorities_of(twins)
    write(twins, both, 5)
    mine.tree.settle()
    row, other = twins.truth.held()[[3, 8]].tolist()
    leaf, other_leaf = (row % 4 * 5 + row // 4 % 5 for row in (row, other))
    mine.tree.update(torch.tensor([other], device=device), torch.tensor([1.0], device=device), 1.0, None)
    update = on_cuda.UPDATE.value  # the second: stamps begin there
    mine.tree._stamps[leaf] = update + 3
    mine.tree.update(
        torch.tensor([row, other], device=device), torch.tensor([5.0, 6.0, 7.0], device=device)[:2], 1.0, None
    )
    assert (float(mine.leaves[leaf]), float(mine.leaves[other_leaf])) == (7.0, 6.0)
    assert mine.tree._stamps[[leaf, other_leaf]].tolist() == [update + 3, update + 2]
    assert int(mine.tree._updates) == 2 * update


def test_the_programs_of_an_update_count_one_together(device):
    """However many they are: 3 programs, which share what cannot be shared evenly."""
    twins = twins_of(16, 8, device)
    mine, _ = both = priorities_of(twins)
    write(twins, both, 8)
    rows = twins.truth.held()[:96].to(device)
    for turn in range(1, 4):
        mine.tree.update(rows, torch.full((len(rows),), 2.0 * turn, device=device), 1.0, None)
        assert int(mine.tree._updates) == turn * on_cuda.UPDATE.value
        leaves = rows % 16 * 8 + rows // 16 % 8
        assert mine.leaves[leaves].tolist() == [2.0 * turn] * len(rows)


def test_an_update_of_too_many_is_refused(device, monkeypatch):
    monkeypatch.setattr(on_cuda, "_MOST_UPDATED", 4)
    twins = twins_of(4, 5, device)
    mine, _ = both = priorities_of(twins)
    write(twins, both, 5)
    rows = twins.truth.held()[:4].to(device)
    with pytest.raises(ValueError, match="4 priorities at once"):
        mine.tree.update(rows, torch.ones(4, device=device), 1.0, None)


def test_powers_are_right_to_the_last_places(device):
    """Over all sizes of floats, the smallest ones too; what is too small for a float is its smallest full one."""
    lanes, steps = (64, 16) if ON_GPU else (64, 4)
    twins = twins_of(lanes, steps, device)
    mine, _ = both = priorities_of(twins)
    write(twins, both, steps)
    mine.tree.settle()
    rows = twins.truth.held()
    for alpha in (0.0, 0.3, 0.6, 1.0, 2.5):
        values = torch.from_numpy(10.0 ** twins.rng.uniform(-44, 38, len(rows))).float()
        values[:6] = torch.tensor([0.0, 1.0, 2.0, 0.5, 3.4e38, 1e-45])
        mine.tree.update(rows.to(device), values.to(device), alpha, None)
        exponent = torch.tensor(alpha).double()  # that of a float32
        expected = (values.double() ** exponent).clamp(2.0**-126, None).float()
        expected[0] = float(alpha == 0)
        leaves = mine.leaves.cpu()[rows % lanes * steps + rows // lanes % steps]
        torch.testing.assert_close(leaves, expected, rtol=2.5e-7, atol=0)


def test_what_cannot_be_is_dropped_and_counted(device):
    twins = twins_of(2, 4, device)
    both = priorities_of(twins)
    write(twins, both, 12)
    held = twins.truth.held()
    good = held[:3].tolist()
    both[1].tree.update(torch.tensor(good), torch.tensor([1.0, 2.0, 3.0]), 1.0, None)
    rows = [good[0], -1, good[1], int(held.max()) + 2, 2**62, good[2], int(held.min()) - 2, held[3], held[4], held[5]]
    values = [1.0, 1.0, 2.0, 1.0, 1.0, 3.0, 1.0, torch.nan, -1.0, torch.inf]
    both[0].tree.update(torch.tensor(rows, device=device), torch.tensor(values, device=device), 1.0, None)
    torch.testing.assert_close(both[0].leaves.cpu(), both[1].leaves)
    assert both[0].tree.dropped() == 7


def test_when_all_are_0_nothing_is_weighed(device):
    twins = twins_of(1, 4, device)
    mine, _ = both = priorities_of(twins)
    write(twins, both, 4)
    held = twins.truth.held().to(device)
    mine.tree.update(held, torch.zeros(len(held), device=device), 1.0, None)
    rows, weights = torch.empty(5, dtype=torch.int64, device=device), torch.empty(5, device=device)
    mine.tree.draw(torch.tensor([0, 0], device=device), 0.5, rows, weights)
    assert weights.tolist() == [0.0] * 5
    assert set(rows.tolist()) <= set(held.tolist())


def windows_of(twins: DeviceTwins, length: int, stride: int, across: bool) -> list[WindowMemory]:
    kinds = zip(twins.both, (WindowIndex, PORTABLE["WindowIndex"]), strict=True)
    return [WindowMemory(memory, kind, length, stride, across) for memory, kind in kinds]


def test_windows_have_the_priorities(device):
    twins = twins_of(2, 12, device)
    both, windows = priorities_of(twins), windows_of(twins, 3, 2, False)
    windows[0].index.keep_priorities(both[0].leaves)
    generators = torch.tensor([5, 3], device=device), torch.tensor([5, 3])
    for _ in range(5 if ON_GPU else 3):
        for _ in range(4):
            twins.write()
            for priorities, memory in zip(both, windows, strict=True):
                memory.index.follow()
                priorities.tree.follow_windows(memory.index)
        rows = assert_draws_agree(both, generators, 9)
        values = torch.linspace(0.1, 2, 9)
        for priorities, memory, place in zip(both, windows, (device, "cpu"), strict=True):
            priorities.tree.update(rows.to(place), values.to(place), 0.6, memory.index)


@pytest.mark.parametrize(("lanes", "length", "stride", "across"), [(5, 3, 2, False), (2, 1, 1, False), (3, 4, 3, True)])
def test_windows_and_draws_of_them_agree(lanes, length, stride, across, device):
    twins = twins_of(lanes, 9, device)
    mine, truth = both = windows_of(twins, length, stride, across)
    generators = torch.tensor([5, 3], device=device), torch.tensor([5, 3])
    for turn in range(12 if ON_GPU else 7):
        twins.write((1 if ON_GPU or turn else 5) + 10 * (turn == 5))  # more than are held
        for memory in both:
            memory.index.rebuild() if turn == 3 else memory.index.follow()
        assert mine.windows() == truth.windows()
        assert mine.counters[2:].tolist() == truth.counters[2:].tolist()
        assert mine.index.count() == truth.index.count()
        every = torch.arange(-1, int(twins.truth.held().max()) + 9)
        assert torch.equal(mine.index.contain(every.to(device)).cpu(), truth.index.contain(every))
        if truth.index.count():
            drawn = [torch.empty(40, dtype=torch.int64, device=generator.device) for generator in generators]
            for memory, generator, rows in zip(both, generators, drawn, strict=True):
                memory.index.draw(generator, rows)
            assert torch.equal(drawn[0].cpu(), drawn[1])
            assert generators[0].tolist() == generators[1].tolist()


def test_without_windows_nothing_is_drawn(device):
    mine = windows_of(twins_of(2, 9, device), 3, 1, False)[0]
    rows = torch.empty(5, dtype=torch.int64, device=device)
    mine.index.draw(torch.tensor([0, 0], device=device), rows)
    assert rows.tolist() == [-1] * 5
