"""The scans on CUDA against the portable version, and advantages brought to mean 0 and spread 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlstore.kernels import _native, kernel
from rlstore.kernels.cuda import scans
from rlstore.kernels.portable import OPERATIONS as PORTABLE
from rlstore.kernels.portable import scans as portable_scans

# Steps and lanes: one of each, ragged, a whole tile, several tiles of time, more lanes than one program takes.
SIZES = [(1, 1), (3, 7), (8, 8), (11, 6)]
if torch.cuda.is_available():  # few: each kind is a kernel to compile
    SIZES = [(1, 1), (21, 9), (24, 4096), (300, 33)]
# The shares of steps that end so; None for no such flags at all.
ENDS = [(0.2, None, "absent"), (0.2, 0.3, "absent"), (0.3, 0.3, "some nan"), (1.0, 1.0, "known")]


pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter


@pytest.fixture(autouse=True)
def small_tiles(device, monkeypatch):
    """Triton's interpreter is slow: where it runs, little takes several programs and several turns of their loops."""
    if device.type == "cpu":
        monkeypatch.setattr(scans, "_LANES", 4)
        monkeypatch.setattr(scans, "_MOST_STEPS", 8)
        monkeypatch.setattr(scans, "_STEP_GRAIN", 2)
        monkeypatch.setattr(scans, "_MEASURED", 256)
        monkeypatch.setattr(scans, "_FEW_PARTS", 16)
        monkeypatch.setattr(scans, "_MOST_PARTS", 64)


class Rollout:
    """Random arguments of a scan, in the order in which all of them take them."""

    def __init__(self, size, ends, dtype, device):
        rng = np.random.default_rng(size[0] * 1000 + size[1])
        self.size, self.dtype, self.device = size, dtype, device

        def uniform(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.uniform(-2, 2, shape)).to(device, dtype)

        def flags(share: float) -> torch.Tensor:
            # Any byte that is not 0 is a yes.
            marks = np.where(rng.random(size) < share, rng.choice([1, 2, 255], size), 0)
            return torch.from_numpy(marks.astype(np.uint8)).to(device)

        self.rewards, self.values, self.log_rhos = uniform(*size), uniform(*size), uniform(*size)
        self.last_values = uniform(size[1])
        self.terminated = flags(ends[0])
        self.truncated = None if ends[1] is None else flags(ends[1])
        self.final_values = None if ends[2] == "absent" else uniform(*size)
        if ends[2] == "some nan":
            self.final_values[torch.from_numpy(rng.random(size) < 0.4).to(device)] = math.nan

    @property
    def ends(self):
        return self.terminated, self.truncated, self.final_values

    @property
    def inputs(self):
        return self.rewards, self.values, self.last_values, *self.ends

    def assert_agree(self, operation: str, arguments: tuple, outputs: int) -> None:
        mine, truth = ([torch.full_like(self.rewards, math.nan) for _ in range(outputs)] for _ in range(2))
        getattr(scans, operation)(*arguments, *mine)
        PORTABLE[operation](*arguments, *truth)
        for out, expected in zip(mine, truth, strict=True):
            assert_near(out, expected)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-12 if out.dtype == torch.float64 else 64 * torch.finfo(torch.float32).eps
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * scale)


# Every size and every kind of ends; all pairs of them on a GPU. Both dtypes meet all of them, if not every pair.
PAIRS = [
    (size, ends, [torch.float32, torch.float64][(i + j) % 2])
    for i, size in enumerate(SIZES)
    for j, ends in enumerate(ENDS)
    if torch.cuda.is_available() or (i * 3 + j) % 4 == 2
]


@pytest.fixture(params=PAIRS, ids=str)
def rollout(request, device):
    return Rollout(*request.param, device)


def test_gae_agrees(rollout):
    rollout.assert_agree("gae", (*rollout.inputs, 0.99, 0.95), outputs=2)


@pytest.mark.parametrize(("dones", "epsilon"), [(True, None), (False, 1e-5), (True, 1e-5)])
def test_gae_with_normalisation_agrees(rollout, dones, epsilon):
    rollout.assert_agree("fill_gae", (*rollout.inputs, dones, 0.99, 0.95, epsilon), outputs=2)


def test_discounted_returns_agree(rollout):
    rollout.assert_agree("discounted_returns", (rollout.rewards, rollout.last_values, *rollout.ends, 0.99), outputs=1)


@pytest.mark.parametrize("n", [1, 3, 2**63 - 1])
def test_n_step_returns_agree(rollout, n):
    if rollout.size[0] > 24 and n > 3:
        pytest.skip("the portable version takes long")
    rollout.assert_agree("n_step_returns", (*rollout.inputs, 0.9, n), outputs=1)


@pytest.mark.parametrize("clips", [(1.0, 1.0, 1.0), (0.5, 3.0, math.inf)])
def test_vtrace_agrees(rollout, clips):
    rollout.assert_agree("vtrace", (*rollout.inputs, rollout.log_rhos, 0.99, 0.9, *clips), outputs=2)


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (0, 0), (0, 2, 1)])
def test_nothing_in_is_nothing_out(size, device):
    """No steps or no lanes: every version returns, with nothing written anywhere."""
    nothing, last = torch.zeros(size, device=device), torch.ones(size[1:], device=device)
    flags, held = torch.zeros(size, dtype=torch.uint8, device=device), torch.arange(4.0, device=device)
    inputs = (nothing, nothing, last, flags, flags, nothing)
    out, other = held[2:2].view(size), held[3:3].view(size)
    on_device = (scans, portable_scans) if device.type == "cuda" else (scans, portable_scans, _native)
    for version in on_device:
        version.gae(*inputs, 0.9, 0.9, out, other)
        version.discounted_returns(nothing, *inputs[2:], 0.9, out)
        version.n_step_returns(*inputs, 0.9, 3, out)
        version.vtrace(*inputs, nothing, 0.9, 0.9, 1.0, 1.0, 1.0, out, other)
    for version in (scans, portable_scans):
        version.fill_gae(*inputs, True, 0.9, 0.9, 1e-5, out, other)
    assert held.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.int64])
def test_flags_of_every_dtype_and_a_trailing_dimension_of_one(dtype, device):
    rollout = Rollout((6, 5), (0.3, 0.3, "some nan"), torch.float32, device)
    truth = [torch.empty(6, 5, device=device) for _ in range(2)]
    PORTABLE["gae"](*rollout.inputs, 0.9, 0.8, *truth)
    flags = [(flags != 0).to(dtype) for flags in rollout.ends[:2]]
    given = [rollout.rewards, rollout.values, rollout.last_values, *flags, rollout.final_values]
    mine = [torch.empty(6, 5, 1, device=device) for _ in range(2)]
    scans.gae(*(tensor.unsqueeze(-1) for tensor in given), 0.9, 0.8, *mine)
    for out, expected in zip(mine, truth, strict=True):
        assert_near(out.squeeze(-1), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("operation", ["gae", "discounted_returns", "vtrace"])
def test_what_is_not_finite_stays_in_its_episode(operation, bad, device):
    rollout = Rollout((6, 2), (0.0, 0.0, "known"), torch.float32, device)
    rollout.terminated[2, 0] = 1
    rollout.truncated[2, 1] = 1
    rollout.rewards[4] = bad
    inputs, numbers, outputs = {
        "gae": (rollout.inputs, (0.9, 0.9), 2),
        "discounted_returns": ((rollout.rewards, rollout.last_values, *rollout.ends), (0.9,), 1),
        "vtrace": ((*rollout.inputs, rollout.log_rhos), (0.9, 0.9, 1.0, 1.0, 1.0), 2),
    }[operation]
    out = [torch.zeros(6, 2, device=device) for _ in range(outputs)]
    getattr(scans, operation)(*inputs, *numbers, *out)
    for tensor in out:
        assert tensor[:3].isfinite().all()
        assert not tensor[3:5].isfinite().any()
        assert tensor[5].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rate", [0.0, 1e-9])
@pytest.mark.parametrize("operation", ["gae", "discounted_returns"])
def test_what_is_not_finite_flows_at_any_rate(operation, rate, bad, device):
    """0 times NaN is NaN, in every version: a NaN reaches back to its episode's start, however little it counts."""
    rollout = Rollout((20, 2), (0.0, 0.0, "known"), torch.float32, device)
    rollout.terminated[2, 0] = 1
    rollout.truncated[2, 1] = 1
    rollout.rewards[18] = bad
    inputs, numbers, outputs = {
        "gae": (rollout.inputs, (0.9, rate / 0.9), 2),
        "discounted_returns": ((rollout.rewards, rollout.last_values, *rollout.ends), (rate,), 1),
    }[operation]
    on_host = tuple(None if tensor is None else tensor.cpu() for tensor in inputs)
    for version, given in (
        (getattr(scans, operation), inputs),
        (kernel(operation, "cpu"), on_host),
        (PORTABLE[operation], on_host),
    ):
        out = [torch.zeros_like(given[0]) for _ in range(outputs)]
        version(*given, *numbers, *out)
        for tensor in out:
            assert tensor[:3].isfinite().all()
            assert not tensor[3:19].isfinite().any()
            assert tensor[19].isfinite().all()


def test_vtrace_shows_a_ratio_that_is_nan(device):
    one = torch.ones(1, 3, device=device)
    log_rhos = torch.tensor([[0.0, math.nan, 0.0]], device=device)
    flags = torch.zeros(1, 3, dtype=torch.uint8, device=device)
    targets, advantages = torch.zeros_like(one), torch.zeros_like(one)
    scans.vtrace(one, one, one[0].clone(), flags, None, None, log_rhos, 0.5, 1.0, 1.0, 1.0, 1.0, targets, advantages)
    assert targets.isnan().tolist() == [[False, True, False]]
    assert advantages.isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 4096, 9000])
def test_normalize_agrees(count, dtype, device):
    x = torch.from_numpy(np.random.default_rng(count).normal(3, 10, count)).to(device, dtype)
    expected = x.clone()
    PORTABLE["normalize"](expected, 1e-5)
    scans.normalize(x, 1e-5)
    tolerance = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


def test_more_parts_than_are_merged_at_once(device, monkeypatch):
    monkeypatch.setattr(scans, "_MEASURED", 8)
    monkeypatch.setattr(scans, "_FEW_PARTS", 4)
    monkeypatch.setattr(scans, "_MOST_PARTS", 16)
    x = torch.from_numpy(np.random.default_rng(0).normal(3, 10, 1001)).to(device)
    expected = x.clone()
    PORTABLE["normalize"](expected, 1e-5)
    scans.normalize(x, 1e-5)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("value", "dtype"), [(0.1, torch.float32), (-3.3, torch.float64), (1000.1, torch.float32)])
def test_equal_entries_become_exactly_0(value, dtype, device):
    x = torch.full((9001,), value, dtype=dtype, device=device)
    scans.normalize(x, 1e-8)
    assert not x.any()


@pytest.mark.parametrize(
    ("size", "dtype"), [((1, 1), torch.float64), ((7, 26), torch.float32), ((20, 9), torch.float64)]
)
def test_equal_advantages_become_exactly_0(size, dtype, device):
    """Every step ends its episode, so that each advantage is its reward."""
    rewards = torch.full(size, 0.1, dtype=dtype, device=device)
    values, flags = torch.zeros_like(rewards), torch.ones(size, dtype=torch.uint8, device=device)
    advantages, returns = torch.ones_like(rewards), torch.ones_like(rewards)
    scans.fill_gae(rewards, values, values[0], flags, None, None, False, 0.9, 0.9, 1e-8, advantages, returns)
    assert not advantages.any()
    assert torch.equal(returns, rewards)
