"""Advantages and returns into a ring's own blocks, and advantages brought to mean 0 and spread 1."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases.returns import CASES
from hypothesis import given
from hypothesis import strategies as st

from rlstore.engine import returns

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def column(numbers, dtype=torch.float32) -> torch.Tensor:
    """One lane, ``[steps, 1]``."""
    return torch.tensor(numbers, dtype=dtype).unsqueeze(-1)


def assert_column(got, expected):
    """Exact: the worked examples are chosen so that no rounding happens."""
    torch.testing.assert_close(got, column(expected), rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------- normalize


def test_normalize_by_hand():
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64)
    returns.normalize(x, 1.0)
    # mean 3; squares 4 + 1 + 0 + 9 = 14, unbiased std sqrt(14 / 3)
    scale = math.sqrt(14 / 3) + 1
    torch.testing.assert_close(
        x, torch.tensor([[-2 / scale, -1 / scale], [0, 3 / scale]], dtype=torch.float64), rtol=1e-14, atol=1e-15
    )


@DTYPE
def test_normalize_of_equal_and_of_single_entries_is_zero(dtype):
    for x in (torch.full((5,), 3.0, dtype=dtype), torch.full((1, 1), 3.0, dtype=dtype)):
        returns.normalize(x, 1e-8)
        assert (x == 0).all()


@DTYPE
@pytest.mark.parametrize("value", [0.1, -3.3, 1000.1])
@pytest.mark.parametrize("count", [7, 100, 5000])
def test_normalize_of_equal_entries_is_zero_whatever_the_mean_is_rounded_to(dtype, value, count):
    """Equal advantages say nothing: what little a rounded mean leaves must not be blown up to plus or minus 1."""
    x = torch.full((count,), value, dtype=dtype)
    returns.normalize(x, 1e-8)
    assert float(x.abs().max()) < 1e-3


# ---------------------------------------------------------------------------------------------------- fill_gae


def block_inputs(seed, steps, lanes, shape, ends):
    """Random arguments of fill_gae as a ring holds them, ``ends`` telling which of the three it has."""
    rng = torch.Generator().manual_seed(seed)
    reals = [torch.randn(steps, lanes, generator=rng).view(steps, lanes, *shape) for _ in range(3)]
    flags = [(torch.rand(steps, lanes, generator=rng) < 0.3).to(torch.uint8).view(reals[0].shape) for _ in range(2)]
    reals[2][torch.rand(reals[2].shape, generator=rng) < 0.4] = torch.nan
    return {
        "rewards": reals[0],
        "values": reals[1],
        "last_values": torch.randn(lanes, generator=rng).view(lanes, *shape),
        "terminated": flags[0],
        "truncated": flags[1] if ends > 0 else None,
        "final_values": reals[2] if ends > 1 else None,
    }


@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.sampled_from([1, 2, 7, 8, 17, 33]),
    st.sampled_from([(), (1,)]),
    st.integers(0, 2),
    st.sampled_from([None, 1e-8, 0.5]),
)
def test_fill_gae_is_gae_into_given_blocks(seed, steps, lanes, shape, ends, epsilon):
    """To the bit; and the first rows of longer blocks are filled, the others left alone."""
    arguments = block_inputs(seed, steps, lanes, shape, ends)
    before = copy.deepcopy(arguments)
    advantages, targets = returns.gae(**arguments, gamma=0.9, lam=0.8)
    if epsilon is not None:
        returns.normalize(advantages, epsilon)
    blocks = [torch.full((steps + 2, lanes, *shape), 77.0) for _ in range(2)]
    filled = {"advantages": blocks[0][:steps], "returns": blocks[1][:steps]}
    assert returns.fill_gae(**arguments, gamma=0.9, lam=0.8, **filled, epsilon=epsilon) is None
    assert torch.equal(blocks[0][:steps], advantages)
    assert torch.equal(blocks[1][:steps], targets)
    assert all(bool((block[steps:] == 77.0).all()) for block in blocks)
    for name, argument in arguments.items():
        torch.testing.assert_close(argument, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fill_gae_by_hand(case):
    arguments = {
        "rewards": column(case.rewards),
        "values": column(case.values),
        "last_values": torch.tensor([case.last_value], dtype=torch.float32),
        "terminated": column(case.terminated, torch.uint8),
        "truncated": column(case.truncated, torch.uint8),
        "final_values": None if case.final_values is None else column(case.final_values),
    }
    advantages, targets = (torch.full((len(case.rewards), 1), torch.nan) for _ in range(2))
    returns.fill_gae(**arguments, gamma=case.gamma, lam=case.lam, advantages=advantages, returns=targets)
    assert_column(advantages, case.advantages)
    assert_column(targets, case.returns)


def test_fill_gae_normalises_advantages_by_hand_and_leaves_returns_alone():
    # gamma = 0: A = r - V = 0, 2, 4 and R = r; mean 2, unbiased std 2
    out = {"advantages": torch.empty(3, 1), "returns": torch.empty(3, 1)}
    arguments = (torch.tensor([[1.0], [3.0], [5.0]]), torch.ones(3, 1), torch.tensor([9.0]))
    flags = torch.zeros(3, 1, dtype=torch.uint8)
    returns.fill_gae(*arguments, flags, None, None, gamma=0.0, lam=0.5, **out, epsilon=0.0)
    assert out["advantages"].flatten().tolist() == [-1.0, 0.0, 1.0]
    assert out["returns"].flatten().tolist() == [1.0, 3.0, 5.0]


def test_fill_gae_of_a_single_step_normalises_to_0():
    out = {"advantages": torch.empty(1, 1), "returns": torch.empty(1, 1)}
    one, flags = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8)
    returns.fill_gae(one, one, one[0], flags, None, None, gamma=0.5, lam=0.5, **out, epsilon=1e-8)
    assert out["advantages"].item() == 0.0
    assert out["returns"].item() == 1.5


@pytest.mark.parametrize("name", ["rewards", "values", "last_values", "terminated", "advantages", "returns"])
def test_fill_gae_refuses_what_it_cannot_read_or_write_as_it_is(name):
    arguments = {**block_inputs(0, 4, 3, (), 2), "advantages": torch.zeros(4, 3), "returns": torch.zeros(4, 3)}
    given_ = arguments[name]
    for wrong in (torch.stack([given_, given_], dim=-1)[..., 0], given_[..., :2].contiguous(), given_.to(torch.int16)):
        with pytest.raises(ValueError):  # noqa: PT011
            returns.fill_gae(**{**arguments, name: wrong}, gamma=0.9, lam=0.8)
    assert (arguments["advantages"] == 0).all()
    assert (arguments["returns"] == 0).all()
