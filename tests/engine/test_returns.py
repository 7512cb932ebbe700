"""Targets and advantages: worked examples, an independent model, and what is refused."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from cases.naive_returns import Lane, discounted_return, lambda_return, n_step, vtrace_target
from cases.returns import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstore.engine import returns

CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def column(numbers, dtype=torch.float64) -> torch.Tensor:
    """One lane, ``[steps, 1]``."""
    return torch.tensor(numbers, dtype=dtype).unsqueeze(-1)


def inputs(case, dtype=torch.float64, flag_dtype=torch.bool):
    """The arguments that all of them share, of one lane."""
    final = None if case.final_values is None else column(case.final_values, dtype)
    return {
        "rewards": column(case.rewards, dtype),
        "values": column(case.values, dtype),
        "last_values": torch.tensor([case.last_value], dtype=dtype),
        "terminated": column(case.terminated, flag_dtype),
        "truncated": column(case.truncated, flag_dtype),
        "final_values": final,
    }


def without_values(arguments):
    return {name: argument for name, argument in arguments.items() if name != "values"}


def assert_column(got, expected):
    """Exact: the worked examples are chosen so that no rounding happens."""
    torch.testing.assert_close(got, column(expected, got.dtype), rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------- by hand


@CASE
@DTYPE
def test_gae_by_hand(case, dtype):
    advantages, targets = returns.gae(**inputs(case, dtype), gamma=case.gamma, lam=case.lam)
    assert_column(advantages, case.advantages)
    assert_column(targets, case.returns)


@CASE
@DTYPE
def test_lambda_returns_by_hand(case, dtype):
    assert_column(returns.lambda_returns(**inputs(case, dtype), gamma=case.gamma, lam=case.lam), case.returns)


@CASE
@DTYPE
def test_discounted_returns_by_hand(case, dtype):
    got = returns.discounted_returns(**without_values(inputs(case, dtype)), gamma=case.gamma)
    assert_column(got, case.discounted)


@CASE
@DTYPE
@pytest.mark.parametrize("n", [1, 2, 9])
def test_n_step_returns_by_hand(case, dtype, n):
    assert_column(returns.n_step_returns(**inputs(case, dtype), gamma=case.gamma, n=n), case.n_step[n])


@pytest.mark.parametrize("n", [4, 5, 1000, sys.maxsize, 2**64 - 1])
def test_n_longer_than_the_rollout_means_all_of_it(n):
    case = CASES[0]
    assert_column(returns.n_step_returns(**inputs(case), gamma=case.gamma, n=n), case.n_step[9])


@CASE
@DTYPE
def test_vtrace_on_policy_is_the_lambda_return(case, dtype):
    arguments = inputs(case, dtype)
    log_rhos = torch.zeros_like(arguments["rewards"])
    targets, _ = returns.vtrace(**arguments, log_rhos=log_rhos, gamma=case.gamma, lam=case.lam)
    assert_column(targets, case.returns)


def test_vtrace_clips_by_hand():
    # gamma = 1/2, rho = 4 then 1/2; clips: 2 in the difference, 1 in the trace, 3 in the advantage
    # t = 1: delta = 1/2 (2 + 8/2 - 4) = 1, v_1 = 4 + 1, A_1 = 1/2 (2 + 8/2 - 4)
    # t = 0: delta = 2 (1 + 4/2 - 2) = 2, v_0 = 2 + 2 + 1/2 * 1 * (5 - 4), A_0 = 3 (1 + 5/2 - 2)
    targets, advantages = returns.vtrace(
        column([1, 2]),
        column([2, 4]),
        torch.tensor([8.0], dtype=torch.float64),
        column([0, 0]),
        log_rhos=column([math.log(4), math.log(0.5)]),
        gamma=0.5,
        clip_rho=2.0,
        clip_c=1.0,
        clip_pg_rho=3.0,
    )
    torch.testing.assert_close(targets, column([4.5, 5]), rtol=1e-14, atol=0)
    torch.testing.assert_close(advantages, column([4.5, 1]), rtol=1e-14, atol=0)


def test_vtrace_advantages_at_the_ends_by_hand():
    # gamma = 1/2, rho = 1. Step 0 truncated, final value 12: A = 1 + 12/2 - 2; step 1 truncated, unknown: 0, v = V;
    # step 2 terminated: A = 3 - 6; step 3 goes on: A = 4 + 10/2 - 8
    targets, advantages = returns.vtrace(
        column([1, 2, 3, 4]),
        column([2, 4, 6, 8]),
        torch.tensor([10.0], dtype=torch.float64),
        column([0, 0, 1, 0]),
        column([1, 1, 0, 0]),
        column([12, math.nan, math.nan, math.nan]),
        log_rhos=column([0, 0, 0, 0]),
        gamma=0.5,
    )
    assert_column(targets, [7, 4, 3, 9])
    assert_column(advantages, [5, 0, -3, 1])


# ------------------------------------------------------------------------------------------ against definitions


@st.composite
def lanes(draw):
    """A random lane, and its tensors ``[steps, 1]``."""
    steps = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    numbers = rng.uniform(-3, 3, (3, steps))
    ends = rng.random((2, steps)) < draw(st.sampled_from([0.0, 0.2, 0.6]))
    final = None
    if draw(st.booleans()):
        final = np.where(rng.random(steps) < 0.3, math.nan, numbers[2]).tolist()
    gamma = draw(st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
    lane = Lane(*numbers[:2].tolist(), float(rng.uniform(-3, 3)), *ends.tolist(), final, gamma)
    tensors = {
        "rewards": column(lane.rewards),
        "values": column(lane.values),
        "last_values": torch.tensor([lane.last_value], dtype=torch.float64),
        "terminated": column(lane.terminated, torch.bool),
        "truncated": column(lane.truncated, torch.bool),
        "final_values": None if final is None else column(final),
    }
    return lane, tensors, rng


def assert_near(got, expected):
    torch.testing.assert_close(got, column(expected), rtol=1e-12, atol=1e-12)


@given(lanes(), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_is_the_mean_of_n_step_returns(drawn, lam):
    lane, tensors, _ = drawn
    expected = [lambda_return(lane, t, lam) for t in range(len(lane.rewards))]
    advantages, targets = returns.gae(**tensors, gamma=lane.gamma, lam=lam)
    assert_near(targets, expected)
    assert_near(advantages, [target - value for target, value in zip(expected, lane.values, strict=True)])
    assert_near(returns.lambda_returns(**tensors, gamma=lane.gamma, lam=lam), expected)


@given(lanes(), st.integers(1, 15))
def test_n_step_and_discounted_returns_are_their_sums(drawn, n):
    lane, tensors, _ = drawn
    steps = range(len(lane.rewards))
    assert_near(
        returns.n_step_returns(**tensors, gamma=lane.gamma, n=n), [n_step(lane, t, n, lane.values) for t in steps]
    )
    assert_near(
        returns.discounted_returns(**without_values(tensors), gamma=lane.gamma),
        [discounted_return(lane, t) for t in steps],
    )


@given(lanes(), st.sampled_from([0.0, 0.5, 1.0]), st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3))
def test_vtrace_is_its_sum(drawn, lam, clips):
    lane, tensors, rng = drawn
    clip_rho, clip_c, clip_pg_rho = clips
    steps = range(len(lane.rewards))
    rhos = np.exp(rng.normal(0, 0.7, len(lane.rewards))).tolist()
    targets, advantages = returns.vtrace(
        **tensors,
        log_rhos=column(rhos).log(),
        gamma=lane.gamma,
        lam=lam,
        clip_rho=clip_rho,
        clip_c=clip_c,
        clip_pg_rho=clip_pg_rho,
    )
    expected = [vtrace_target(lane, t, rhos, lam, clip_rho, clip_c) for t in steps]
    assert_near(targets, expected)

    def advantage(t):
        if lane.unknown(t):
            return 0.0
        goes_on = t + 1 < len(expected) and not lane.terminated[t] and not lane.truncated[t]
        after = expected[t + 1] if goes_on else lane.window(t, 1)[1]
        return min(clip_pg_rho, rhos[t]) * (lane.rewards[t] + lane.gamma * after - lane.values[t])

    assert_near(advantages, [advantage(t) for t in steps])


@settings(max_examples=30)
@given(st.lists(lanes(), min_size=2, max_size=9))
def test_lanes_do_not_touch_one_another(drawn):
    """Many lanes at once give what each gives alone."""
    steps = min(len(lane.rewards) for lane, _, _ in drawn)
    cut = [
        {name: None if part is None else part[:steps] for name, part in tensors.items() if name != "last_values"}
        for _, tensors, _ in drawn
    ]
    for part in cut:
        if part["final_values"] is None:
            part["final_values"] = torch.full((steps, 1), torch.nan, dtype=torch.float64)
    last = [tensors["last_values"] for _, tensors, _ in drawn]
    together = returns.gae(
        **{name: torch.cat([part[name] for part in cut], dim=1) for name in cut[0]},
        last_values=torch.cat(last),
        gamma=0.9,
        lam=0.8,
    )
    for lane, (part, value) in enumerate(zip(cut, last, strict=True)):
        alone = returns.gae(**part, last_values=value, gamma=0.9, lam=0.8)
        for whole, single in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[:, lane : lane + 1], single, rtol=1e-14, atol=1e-14)


# ------------------------------------------------------------------------------------- an episode over two rollouts


def long_rollout(steps=6, lanes=3):
    rng = torch.Generator().manual_seed(3)
    return {
        "rewards": torch.rand(steps, lanes, generator=rng, dtype=torch.float64),
        "values": torch.rand(steps, lanes, generator=rng, dtype=torch.float64),
        "last_values": torch.rand(lanes, generator=rng, dtype=torch.float64),
        "terminated": torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]),
        "truncated": torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]),
        "final_values": torch.rand(steps, lanes, generator=rng, dtype=torch.float64),
    }


def halves(whole, bootstrap):
    """The rollout as two, the first bootstrapping from ``bootstrap``."""
    first = {name: part[:3] for name, part in whole.items() if name != "last_values"}
    second = {name: part[3:] for name, part in whole.items() if name != "last_values"}
    return {**first, "last_values": bootstrap}, {**second, "last_values": whole["last_values"]}


def assert_joined(parts, whole):
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-14, atol=1e-14)


def test_two_rollouts_are_one_where_lambda_is_0():
    whole = long_rollout()
    parts = [returns.gae(**half, gamma=0.9, lam=0.0) for half in halves(whole, whole["values"][3])]
    for place, expected in enumerate(returns.gae(**whole, gamma=0.9, lam=0.0)):
        assert_joined([part[place] for part in parts], expected)


def test_two_rollouts_are_one_where_the_value_between_them_is_exact():
    whole = long_rollout()
    exact = returns.lambda_returns(**whole, gamma=0.9, lam=0.8)[3]
    whole["values"][3] = exact  # the critic is right there, so the advantage that would flow over is 0
    parts = [returns.gae(**half, gamma=0.9, lam=0.8) for half in halves(whole, exact)]
    for place, expected in enumerate(returns.gae(**whole, gamma=0.9, lam=0.8)):
        assert_joined([part[place] for part in parts], expected)


def test_two_rollouts_are_one_where_all_episodes_end_between_them():
    whole = long_rollout()
    whole["terminated"][2] = 1
    parts = [returns.gae(**half, gamma=0.9, lam=0.8) for half in halves(whole, torch.full((3,), torch.nan))]
    for place, expected in enumerate(returns.gae(**whole, gamma=0.9, lam=0.8)):
        assert_joined([part[place] for part in parts], expected)


def test_discounted_returns_of_two_rollouts_are_those_of_one():
    whole = without_values(long_rollout())
    expected = returns.discounted_returns(**whole, gamma=0.9)
    parts = [returns.discounted_returns(**half, gamma=0.9) for half in halves(whole, expected[3])]
    assert_joined(parts, expected)


def test_one_step_returns_of_two_rollouts_are_those_of_one():
    whole = long_rollout()
    parts = [returns.n_step_returns(**half, gamma=0.9, n=1) for half in halves(whole, whole["values"][3])]
    assert_joined(parts, returns.n_step_returns(**whole, gamma=0.9, n=1))


# ---------------------------------------------------------------------------------------------------- forms of input


@pytest.mark.parametrize("flag_dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float32], ids=str)
def test_flags_of_any_dtype(flag_dtype):
    for case in CASES:
        got = returns.gae(**inputs(case, flag_dtype=flag_dtype), gamma=case.gamma, lam=case.lam)[0]
        assert_column(got, case.advantages)


def test_a_flag_that_is_a_part_of_one_is_a_yes():
    case = next(case for case in CASES if case.name == "both kinds in one rollout")
    arguments = inputs(case, flag_dtype=torch.float32)
    arguments.update({name: arguments[name] / 4 for name in ("terminated", "truncated")})
    assert_column(returns.gae(**arguments, gamma=0.5, lam=0.5)[0], case.advantages)


def test_truncated_may_be_left_out():
    case = next(case for case in CASES if case.name == "terminated in the middle")
    arguments = {name: part for name, part in inputs(case).items() if name not in ("truncated", "final_values")}
    assert_column(returns.gae(**arguments, gamma=0.5, lam=0.5)[0], case.advantages)


def test_a_last_dimension_of_one_and_none_mix():
    case = CASES[7]
    flat = inputs(case)
    deep = {name: part.unsqueeze(-1) for name, part in flat.items()}
    for mixed in (deep, {**flat, "values": deep["values"], "last_values": deep["last_values"]}):
        advantages, targets = returns.gae(**mixed, gamma=0.5, lam=0.5)
        assert advantages.shape == mixed["rewards"].shape
        assert_column(advantages.reshape(4, 1), case.advantages)
        assert_column(targets.reshape(4, 1), case.returns)
    back = returns.gae(**{**deep, "values": flat["values"]}, gamma=0.5, lam=0.5)[1]
    assert_column(back.reshape(4, 1), case.returns)


def test_strided_input_and_other_dtypes_are_read_as_they_are_meant():
    whole = long_rollout()
    expected = returns.gae(**whole, gamma=0.9, lam=0.8)
    odd = {name: torch.stack([part, part + 100], dim=-1)[..., 0] for name, part in whole.items()}
    odd["values"] = odd["values"].t().contiguous().t()
    got = returns.gae(**odd, gamma=0.9, lam=0.8)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    mixed = {**whole, "rewards": whole["rewards"].float()}
    assert returns.gae(**mixed, gamma=0.9, lam=0.8)[0].dtype == torch.float32
    torch.testing.assert_close(returns.gae(**mixed, gamma=0.9, lam=0.8)[0].double(), expected[0], rtol=1e-5, atol=1e-6)


def test_values_with_gradients_give_targets_without():
    whole = long_rollout()
    values = whole["values"].clone().requires_grad_()
    advantages, targets = returns.gae(**{**whole, "values": values}, gamma=0.9, lam=0.8)
    assert not advantages.requires_grad
    assert not targets.requires_grad
    torch.testing.assert_close(targets, returns.lambda_returns(**whole, gamma=0.9, lam=0.8), rtol=0, atol=0)


def test_results_made_in_inference_mode_are_plain_tensors():
    whole = long_rollout()
    with torch.inference_mode():
        made = [
            *returns.gae(**whole, gamma=0.9, lam=0.8),
            returns.discounted_returns(**without_values(whole), gamma=0.9),
            returns.n_step_returns(**whole, gamma=0.9, n=2),
            *returns.vtrace(**whole, log_rhos=torch.zeros(6, 3, dtype=torch.float64), gamma=0.9),
        ]
    for tensor in made:
        assert not tensor.is_inference()
        tensor.add_(1)


@pytest.mark.parametrize(("steps", "lanes"), [(0, 3), (6, 0)])
def test_no_steps_or_no_lanes_give_empty_results(steps, lanes):
    whole = {name: part[:steps, :lanes] for name, part in long_rollout().items() if name != "last_values"}
    whole["last_values"] = torch.zeros(lanes)
    made = [
        *returns.gae(**whole, gamma=0.9, lam=0.8),
        returns.lambda_returns(**whole, gamma=0.9, lam=0.8),
        returns.discounted_returns(**without_values(whole), gamma=0.9),
        returns.n_step_returns(**whole, gamma=0.9, n=2),
        *returns.vtrace(**whole, log_rhos=torch.zeros(steps, lanes), gamma=0.9),
    ]
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in made} == {((steps, lanes), torch.float64)}


# ---------------------------------------------------------------------------------------------------- refused


def refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def all_of(arguments):
    """One call of each function."""
    log_rhos = torch.zeros_like(long_rollout()["rewards"])
    return [
        lambda: returns.gae(**arguments, gamma=0.9, lam=0.8),
        lambda: returns.lambda_returns(**arguments, gamma=0.9, lam=0.8),
        lambda: returns.n_step_returns(**arguments, gamma=0.9, n=2),
        lambda: returns.vtrace(**arguments, log_rhos=log_rhos, gamma=0.9),
        lambda: returns.discounted_returns(**without_values(arguments), gamma=0.9),
    ]


@pytest.mark.parametrize("name", ["rewards", "values", "last_values", "terminated", "truncated", "final_values"])
def test_a_wrong_shape_is_refused_by_name(name):
    whole = long_rollout()
    for wrong in (whole[name][..., :2], whole[name][..., [0, 1, 2, 2]]):
        calls = all_of({**whole, name: wrong})
        for call in calls if name != "values" else calls[:-1]:
            # Rewards set the size for all others, so there it is another that is named.
            refused(call, "are .*the rewards" if name == "rewards" else f"{name} are ")


def test_steps_and_lanes_the_wrong_way_round_are_refused():
    whole = long_rollout(6, 3)
    for name in ("values", "terminated", "truncated", "final_values"):
        refused(lambda name=name: returns.gae(**{**whole, name: whole[name].t()}, gamma=0.9, lam=0.8), f"{name} are")


def test_log_rhos_of_a_wrong_shape_are_refused():
    refused(lambda: returns.vtrace(**long_rollout(), log_rhos=torch.zeros(6, 2), gamma=0.9), "log_rhos are")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16], ids=str)
def test_rewards_that_are_no_floats_are_refused(dtype):
    whole = long_rollout()
    for call in all_of({**whole, "rewards": whole["rewards"].to(dtype)}):
        refused(call, "rewards are .*float32 or float64")


def test_rewards_of_one_dimension_are_refused():
    whole = long_rollout()
    for call in all_of({**whole, "rewards": whole["rewards"].flatten()}):
        refused(call, "rewards are")


@pytest.mark.parametrize("n", [0, -1])
def test_n_below_1_is_refused(n):
    refused(lambda: returns.n_step_returns(**long_rollout(), gamma=0.9, n=n), f"n is {n}")
