"""Recurrent mini-batches on CUDA against the portable one, and where their trajectories are against plain Python."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from combinations import each

from rlstore.kernels.cuda import segments
from rlstore.kernels.portable import OPERATIONS as PORTABLE


@pytest.fixture(autouse=True)
def small_programs(device, monkeypatch):
    """Triton's interpreter is slow: where it runs, little takes several programs and several turns of their loops."""
    if device.type == "cpu":
        monkeypatch.setattr(segments, "_LANES", 4)
        monkeypatch.setattr(segments, "_MOST_STEPS", 8)
        monkeypatch.setattr(segments, "_COUNTED", 4)
        monkeypatch.setattr(segments, "_MASKED", 16)
        segments._finders.cache_clear()
        segments._filler.cache_clear()


def flags(steps: int, lanes: int, share: float, dtype=torch.uint8) -> torch.Tensor:
    rng = np.random.default_rng(steps * 100 + lanes)
    return torch.from_numpy((rng.random((steps, lanes)) < share) * rng.choice([1, 3, 255])).to(dtype)


def naive(dones: torch.Tensor, first: int, last: int) -> list[tuple[int, int, int]]:
    found = []
    for lane in range(first, last):
        start = 0
        for t in range(dones.shape[0]):
            if dones[t, lane] or t == dones.shape[0] - 1:
                found.append((lane, start, t + 1 - start))
                start = t + 1
    return found


def tabulated(operation, dones: torch.Tensor, width: int, batches: int):
    table = torch.full((3, batches * width * dones.shape[0]), -7, dtype=torch.int32, device=dones.device)
    totals = torch.full((batches,), -7, dtype=torch.int32, device=dones.device)
    operation(dones, width, table, totals)
    return table, totals


SIZES = [(1, 1, 1), (5, 3, 2), (8, 4, 1), (20, 9, 2), (3, 17, 1)]
SHARES = [0.0, 0.2, 0.7, 1.0]
PAIRS = [
    (*size, share)
    for i, size in enumerate(SIZES)
    for j, share in enumerate(SHARES)
    if torch.cuda.is_available() or (i + j) % 2
]


@pytest.mark.parametrize(("steps", "width", "batches", "share"), PAIRS)
def test_all_trajectories_are_found(steps, width, batches, share, device):
    dones = flags(steps, batches * width + 2, share).to(device)  # two lanes are of no mini-batch
    table, totals = tabulated(segments.tabulate_trajectories, dones.unsqueeze(-1), width, batches)
    truth, true_totals = tabulated(PORTABLE["tabulate_trajectories"], dones, width, batches)
    assert totals.tolist() == true_totals.tolist()
    assert table.tolist() == truth.tolist()
    for batch in range(batches):
        first = batch * width * steps
        found = table[:, first : first + int(totals[batch])].t().tolist()
        assert [tuple(row) for row in found] == naive(dones, batch * width, (batch + 1) * width)


KINDS = [((3,), torch.float32), ((), torch.uint8), ((2, 20), torch.bfloat16), ((0,), torch.float64)]


def tensors(steps: int, lanes: int, device) -> tuple[tuple[torch.Tensor, ...], ...]:
    """What is padded, hidden states, and what is copied; no entry is 0."""
    rng = np.random.default_rng(0)

    def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(rng.integers(1, 200, shape)).to(device, dtype)

    padded = tuple(some((steps, lanes, *shape), dtype) for shape, dtype in KINDS)
    states = some((steps, 2, lanes, 5), torch.float32), some((steps, 1, lanes, 1), torch.float16)
    copied = ((1,), torch.float32), ((), torch.bool), ((7,), torch.int64)
    return padded, states, tuple(some((steps, lanes, *shape), dtype) for shape, dtype in copied)


def filled(operation, fields, table, totals, batch: int, width: int, count: int):
    padded, states, copied = fields
    steps, device = padded[0].shape[0], padded[0].device
    shapes = [
        *((steps, count, *source.shape[2:]) for source in padded),
        *((source.shape[1], count, source.shape[3]) for source in states),
        *((steps, width, *source.shape[2:]) for source in copied),
    ]
    sources = (*padded, *states, *copied)
    targets = tuple(
        torch.full(shape, 77, dtype=source.dtype, device=device) for shape, source in zip(shapes, sources, strict=True)
    )
    mask = torch.ones((steps, count), dtype=torch.bool, device=device)
    operation(padded, states, copied, table, totals, batch, width, targets, mask)
    return [mask.tolist(), *(target.tolist() for target in targets)]


MINI_BATCHES = [(5, 5, 0.3), (6, 3, 0.9), (1, 1, 1.0), (2, 17, 0.0)]
ROOM = [0, 3, -2]  # for as many trajectories as there are, for more, and for fewer


@pytest.mark.parametrize(
    ("size", "extra"), list(product(MINI_BATCHES, ROOM)) if torch.cuda.is_available() else each(MINI_BATCHES, ROOM)
)
def test_a_mini_batch_is_that_of_the_portable_version(size, extra, device):
    steps, width, share = size
    dones = flags(steps, 2 * width, share).to(device)
    table, totals = tabulated(PORTABLE["tabulate_trajectories"], dones, width, 2)
    fields = tensors(steps, 2 * width, device)
    for batch in (1,) if extra else (0, 1):
        count = max(int(totals[batch]) + extra, 0)
        mine = filled(segments.fill_trajectories, fields, table, totals, batch, width, count)
        truth = filled(PORTABLE["fill_trajectories"], fields, table, totals, batch, width, count)
        assert mine == truth


def test_a_mini_batch_by_hand(device):
    """Three lanes of two steps; in lane 1 an episode ends after the first step. The mini-batch has lanes 1 and 2."""
    dones = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    table, totals = tabulated(segments.tabulate_trajectories, dones, 2, 2)
    ids = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], device=device)
    found = filled(segments.fill_trajectories, ((ids,), (ids.view(2, 1, 4, 1),), (ids,)), table, totals, 1, 2, 4)
    assert found == [
        [[True, True, True, False], [False, False, True, False]],
        [[3.0, 7.0, 4.0, 0.0], [0.0, 0.0, 8.0, 0.0]],
        [[[3.0], [7.0], [4.0], [0.0]]],
        [[3.0, 4.0], [7.0, 8.0]],
    ]


def test_rows_too_wide_for_one_program(device):
    dones = torch.tensor([[0, 1], [0, 0]], dtype=torch.uint8, device=device)
    table, totals = tabulated(PORTABLE["tabulate_trajectories"], dones, 2, 1)
    ids = torch.arange(2 * 2 * 2100, device=device).view(2, 2, 2100)
    fields = (ids,), (ids.view(2, 1, 2, 2100),), (ids,)
    mine = filled(segments.fill_trajectories, fields, table, totals, 0, 2, 4)
    assert mine == filled(PORTABLE["fill_trajectories"], fields, table, totals, 0, 2, 4)
