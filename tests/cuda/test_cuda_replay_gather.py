"""Drawing and gathering in Triton against the portable version, for every part, dtype, stack and n-step window."""

from __future__ import annotations

import pytest
import torch
from device_rings import LAYOUTS, DeviceTwins, Layout, Leaf, as_bytes
from test_replay_gather import requests_of

from rlstore.kernels.cuda import replay_gather
from rlstore.kernels.cuda.replay_gather import ReplayGather
from rlstore.kernels.portable import OPERATIONS as PORTABLE


def gathers_of(twins: DeviceTwins, n_step: int, gamma: float, requests=None):
    requests = requests or requests_of(twins.layout)
    mine = ReplayGather(twins.mine.ring, requests, n_step, gamma)
    return mine, PORTABLE["ReplayGather"](twins.truth.ring, requests, n_step, gamma)


def assert_same(mine, truth, requests):
    for result, expected, request in zip(mine, truth, requests, strict=True):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        if request[2] or request[0] == 3:  # converted, or summed: on a GPU, with one rounding less
            torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert torch.equal(as_bytes(result.cpu()), as_bytes(expected))


@pytest.mark.parametrize(("name", "n_step"), [*zip(LAYOUTS, [1, 3, 1, 2, 2, 2**40, 1], strict=True), ("plain", 3)])
def test_batches_agree(name, n_step, device):
    layout = LAYOUTS[name]
    twins, requests = DeviceTwins(layout, device), requests_of(layout)
    mine, truth = gathers_of(twins, n_step, 0.9)
    for count in (6, 4):
        twins.write(count)
        rows = twins.some_rows(9)
        assert_same(mine.gather(rows.to(device), None), truth.gather(rows, None), requests)
    first = twins.truth.held()[:3]
    windows = torch.empty(len(first) * 2, dtype=torch.int64)
    twins.truth.ring.windows(first, 2, False, windows)
    assert_same(mine.gather(windows.view(-1, 2), None), truth.gather(windows.view(-1, 2), None), requests)


@pytest.mark.parametrize(("name", "few_programs"), [("plain", 1), ("one lane", 128)])
def test_samples_agree_and_the_generator_moves_on(name, few_programs, device, monkeypatch):
    monkeypatch.setattr(replay_gather, "_FEW_PROGRAMS", few_programs)  # 128: a program makes fewer rows
    layout = LAYOUTS[name]
    twins, requests = DeviceTwins(layout, device), requests_of(layout)
    mine, truth = gathers_of(twins, 2, 0.9)
    generators = torch.tensor([2**62 + 7, 5], device=device), torch.tensor([2**62 + 7, 5])
    for _ in range(2):
        twins.write(4)
        assert_same(mine.sample(generators[0], 20), truth.sample(generators[1], 20), requests)
        assert generators[0].tolist() == generators[1].tolist()


@pytest.mark.parametrize(("lanes", "out"), [(1, 0.4), (2, 0.0), (40, 0.0), (40, 0.4)])
def test_draws_agree(lanes, out, device):
    layout = Layout(
        lanes, 30, (Leaf(torch.float32, 1, 1, 1),), torch.int64, (), 2, 0, seed=7, trouble=(0.2, 0.0, out, 0.0)
    )
    twins = DeviceTwins(layout, device, deep=20)
    mine, truth = torch.tensor([3, 0], device=device), torch.tensor([3, 0])
    for _ in range(2):
        twins.write(5)
        rows, expected = torch.empty(300, dtype=torch.int64, device=device), torch.empty(300, dtype=torch.int64)
        twins.mine.ring.draw(mine, rows)
        twins.truth.ring.draw(truth, expected)
        assert torch.equal(rows.cpu(), expected)
        assert mine.tolist() == truth.tolist()


def test_rows_that_are_not_held_give_zeros(device):
    twins = DeviceTwins(LAYOUTS["plain"], device)
    twins.write(20)
    held = twins.truth.held()
    wrong = [int(held.min()) - 5, int(held.max()) + 5, -1, -(2**63), 2**62 + 1, 2**63 - 1]
    mine, truth = gathers_of(twins, 2, 0.9)
    rows = torch.tensor([int(held[0]), *wrong])
    expected = truth.gather(torch.tensor([int(held[0])] + [-1] * len(wrong)), None)
    assert_same(mine.gather(rows, None), expected, requests_of(twins.layout))


def test_outputs_that_are_given_are_filled(device):
    twins = DeviceTwins(LAYOUTS["plain"], device)
    twins.write(6)
    requests = ((0, 0, False, (3,)), (2, 0, True, (2,)))
    mine, truth = gathers_of(twins, 1, 0.9, requests)
    rows = twins.some_rows(4)
    out = torch.empty(4, 3, device=device)
    made = mine.gather(rows, (out, None))
    assert made[0] is out
    assert_same(made, truth.gather(rows, None), requests)
    with pytest.raises(ValueError, match="does not fit"):
        mine.gather(rows, (torch.empty(4, 3, dtype=torch.float64, device=device), None))
