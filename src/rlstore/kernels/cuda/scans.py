"""Targets, advantages and their normalization: one launch each, two for advantages that are normalized.

In a scan one thread has one lane: it loads what it needs of many steps at once, waits once, and then goes through them
from the last to the first. Loops are written with ``while``: Triton's interpreter cannot count to a number that was an
argument.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.pieces import scratch

# The steps that a scan loads at once: a multiple of the first number, and at most the second. A program is one group of
# threads, with a lane in each.
_STEP_GRAIN, _MOST_STEPS, _LANES = 8, 32, 32
# What one program normalizes, and what one measures.
_ENTRIES, _MEASURED = 2048, 4096
# The parts that are merged at once, where there are few and where there are many.
_FEW_PARTS, _MOST_PARTS = 512, 1024


# ---------------------------------------------------------------------------------------------------- kernels: scans


@triton.jit
def _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED: tl.constexpr, FINAL: tl.constexpr):
    """The flags of a step as they are held, and the value of its final observation; anything for what is absent."""
    ended = tl.load(terminated + at, mask=inside, other=0)
    cut, final = ended, tl.zeros(at.shape, final_values.dtype.element_ty)
    if TRUNCATED:
        cut = tl.load(truncated + at, mask=inside, other=0)
        if FINAL:
            final = tl.load(final_values + at, mask=inside, other=0.0)
    return ended, cut, final


@triton.jit
def _read_ends(ended, cut, final, TRUNCATED: tl.constexpr, FINAL: tl.constexpr, DONES: tl.constexpr):
    """Where an episode really ended, where it was only cut off, and where its final value is not known.

    With DONES ``ended`` flags every end, and those that ``cut`` flags too were only cut off.
    """
    over = ended != 0
    cut_off = over & (over == 0)
    if TRUNCATED:
        cut_off = cut != 0
        if DONES:
            over = over & (cut_off == 0)
        cut_off = cut_off & (over == 0)
    unknown = cut_off
    if FINAL:
        unknown = cut_off & (final != final)
    return over, cut_off, unknown


@triton.jit(do_not_specialize=["steps", "lanes", "gamma", "rate"])
def scan_advantages(
    rewards, values, last_values, terminated, truncated, final_values, advantages, returns, moments, steps: tl.int64,
    lanes: tl.int64, gamma: tl.float64, rate: tl.float64, TRUNCATED: tl.constexpr, FINAL: tl.constexpr,
    DONES: tl.constexpr, MOMENTS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Generalised advantage estimation for LANES lanes, STEPS steps at a time.

    With MOMENTS, each program leaves the moments of its advantages: see :func:`store_moments`.
    """
    kind: tl.constexpr = rewards.dtype.element_ty
    first_lane = tl.program_id(0).to(tl.int64) * LANES
    lane = first_lane + tl.arange(0, LANES)
    there = lane < lanes
    zero = tl.zeros([LANES], kind)
    discount, flow = tl.full([LANES], gamma, kind), tl.full([LANES], rate, kind)
    following = tl.load(last_values + lane, mask=there, other=0.0)
    carried = zero
    shift = tl.sum(zero.to(tl.float64), 0)
    sums, squares = zero.to(tl.float64), zero.to(tl.float64)
    stop = steps
    while stop > 0:
        loaded = ()  # type: tuple[tl.tensor, ...]
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward = tl.load(rewards + at, mask=inside, other=0.0)
            value = tl.load(values + at, mask=inside, other=0.0)
            ended, cut, final = _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED, FINAL)
            loaded = loaded + ((reward, value, ended, cut, final),)  # noqa: RUF005  (Triton unpacks no tuples)
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward, value, ended, cut, final = loaded[back - 1]
            over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, DONES)
            bootstrap = tl.where(over, zero, tl.where(cut_off, final, following))
            delta = tl.where(unknown, zero, reward + discount * bootstrap - value)
            carried = tl.where(over | cut_off, delta, delta + flow * carried)
            following = value
            tl.store(advantages + at, carried, mask=inside)
            tl.store(returns + at, carried + value, mask=inside)
            if MOMENTS:
                # Deviations from one of the advantages, that of the first lane's last step, so that equal ones have no
                # spread at all.
                if back == 1:
                    here = tl.sum(tl.where(lane == first_lane, carried, zero).to(tl.float64), 0)
                    shift = tl.where(stop == steps, here, shift)
                away = tl.where(inside, carried.to(tl.float64) - shift, 0.0)
                sums += away
                squares += away * away
        stop -= STEPS
    if MOMENTS:
        count = (steps * tl.minimum(lanes - first_lane, LANES)).to(tl.float64)
        total, squared = tl.reduce((sums, squares), 0, add_pairs)
        store_moments(moments, count, shift, total, squared)


@triton.jit(do_not_specialize=["steps", "lanes", "gamma"])
def scan_returns(
    rewards, last_values, terminated, truncated, final_values, returns, steps: tl.int64, lanes: tl.int64,
    gamma: tl.float64, TRUNCATED: tl.constexpr, FINAL: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Discounted returns for LANES lanes, STEPS steps at a time."""
    kind: tl.constexpr = rewards.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = lane < lanes
    zero, discount = tl.zeros([LANES], kind), tl.full([LANES], gamma, kind)
    carried = tl.load(last_values + lane, mask=there, other=0.0)
    stop = steps
    while stop > 0:
        loaded = ()  # type: tuple[tl.tensor, ...]
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward = tl.load(rewards + at, mask=inside, other=0.0)
            ended, cut, final = _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED, FINAL)
            loaded = loaded + ((reward, ended, cut, final),)  # noqa: RUF005
        for back in tl.static_range(1, STEPS + 1):
            reward, ended, cut, final = loaded[back - 1]
            over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, False)
            after = tl.where(over | unknown, zero, discount * tl.where(cut_off, final, carried))
            carried = reward + after
            at = (stop - back) * lanes + lane
            tl.store(returns + at, carried, mask=there & (stop - back >= 0))
        stop -= STEPS


@triton.jit(do_not_specialize=["steps", "lanes", "n", "gamma"])
def fold_windows(
    rewards, values, last_values, terminated, truncated, final_values, returns, steps: tl.int64, lanes: tl.int64,
    n: tl.int64, gamma: tl.float64, TRUNCATED: tl.constexpr, FINAL: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """n-step returns, each window by itself, from its last step to its first; n is at most ``steps``."""
    kind: tl.constexpr = rewards.dtype.element_ty
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < steps * lanes
    start, lane = entry // lanes, entry % lanes
    stop = start + n
    after = tl.load(values + stop * lanes + lane, mask=inside & (stop < steps), other=0.0)
    last = tl.load(last_values + lane, mask=inside & (stop >= steps), other=0.0)
    after = tl.where(stop < steps, after, last)
    zero = tl.zeros([ENTRIES], kind)
    discount = tl.full([ENTRIES], gamma, kind)
    back = 0
    while back < n:
        t = stop - 1 - back
        there = inside & (t < steps)
        at = t * lanes + lane
        ended, cut, final = _load_ends(terminated, truncated, final_values, at, there, TRUNCATED, FINAL)
        over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, False)
        bootstrap = tl.where(over, zero, tl.where(cut_off, final, after))
        target = tl.load(rewards + at, mask=there, other=0.0) + discount * bootstrap
        own = tl.load(values + at, mask=there & unknown, other=0.0)
        after = tl.where(there, tl.where(unknown, own, target), after)
        back += 1
    tl.store(returns + entry, after, mask=inside)


@triton.jit
def _at_most(x, bound):
    """The smaller one; NaN if x is."""
    return tl.where(x > bound, bound, x)


@triton.jit(do_not_specialize=["steps", "lanes", "gamma", "rate", "clip_rho", "clip_c", "clip_pg_rho"])
def scan_vtrace(
    rewards, values, last_values, terminated, truncated, final_values, log_rhos, targets, advantages, steps: tl.int64,
    lanes: tl.int64, gamma: tl.float64, rate: tl.float64, clip_rho: tl.float64, clip_c: tl.float64,
    clip_pg_rho: tl.float64, TRUNCATED: tl.constexpr, FINAL: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """V-trace for LANES lanes, STEPS steps at a time."""
    kind: tl.constexpr = rewards.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = lane < lanes
    zero = tl.zeros([LANES], kind)
    discount, flow = tl.full([LANES], gamma, kind), tl.full([LANES], rate, kind)
    most_rho, most_c = tl.full([LANES], clip_rho, kind), tl.full([LANES], clip_c, kind)
    most_pg_rho = tl.full([LANES], clip_pg_rho, kind)
    next_value = tl.load(last_values + lane, mask=there, other=0.0)
    next_target = next_value
    stop = steps
    while stop > 0:
        loaded = ()  # type: tuple[tl.tensor, ...]
        for back in tl.static_range(1, STEPS + 1):
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            reward = tl.load(rewards + at, mask=inside, other=0.0)
            value = tl.load(values + at, mask=inside, other=0.0)
            log_rho = tl.load(log_rhos + at, mask=inside, other=0.0)
            ended, cut, final = _load_ends(terminated, truncated, final_values, at, inside, TRUNCATED, FINAL)
            loaded = loaded + ((reward, value, log_rho, ended, cut, final),)  # noqa: RUF005
        for back in tl.static_range(1, STEPS + 1):
            reward, value, log_rho, ended, cut, final = loaded[back - 1]
            over, cut_off, unknown = _read_ends(ended, cut, final, TRUNCATED, FINAL, False)
            rho = tl.exp(log_rho)
            bootstrap = tl.where(over, zero, tl.where(cut_off, final, next_value))
            delta = _at_most(rho, most_rho) * (reward + discount * bootstrap - value)
            flowing = tl.where(over | cut_off, zero, next_target - next_value)
            target = value + delta + flow * _at_most(rho, most_c) * flowing
            bootstrap = tl.where(over, zero, tl.where(cut_off, final, next_target))
            advantage = _at_most(rho, most_pg_rho) * (reward + discount * bootstrap - value)
            next_target = tl.where(unknown, value, target)
            next_value = value
            inside = there & (stop - back >= 0)
            at = (stop - back) * lanes + lane
            tl.store(targets + at, next_target, mask=inside)
            tl.store(advantages + at, tl.where(unknown, zero, advantage), mask=inside)
        stop -= STEPS


# ------------------------------------------------------------------------------------- kernels: normalization


@triton.jit
def add_pairs(a, b, other_a, other_b):
    """For sums of two tensors in one pass: threads meet once, not twice."""
    return a + other_a, b + other_b


@triton.jit
def _add_triples(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def store_moments(moments, count, shift, total, squares):
    """What a program's part counts, a number near it, and the sums of the differences from that and of their squares.

    One row of ``moments[4, programs]`` each.
    """
    parts = tl.num_programs(0)
    place = moments + tl.program_id(0)
    tl.store(place, count)
    tl.store(place + parts, shift)
    tl.store(place + 2 * parts, total)
    tl.store(place + 3 * parts, squares)


@triton.jit(do_not_specialize=["count"])
def measure(x, moments, count: tl.int64, ENTRIES: tl.constexpr):
    """The moments of each program's part of ``x``: see :func:`store_moments`."""
    first = tl.program_id(0).to(tl.int64) * ENTRIES
    entry = first + tl.arange(0, ENTRIES)
    inside = entry < count
    shift = tl.load(x + first).to(tl.float64)
    away = tl.where(inside, tl.load(x + entry, mask=inside, other=0.0).to(tl.float64) - shift, 0.0)
    held = tl.minimum(count - first, ENTRIES).to(tl.float64)
    store_moments(moments, held, shift, tl.sum(away, 0), tl.sum(away * away, 0))


@triton.jit(do_not_specialize=["parts", "count", "epsilon"])
def normalize_entries(
    x, moments, parts: tl.int64, count: tl.int64, epsilon: tl.float64, EVEN: tl.constexpr, PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """``x = (x - mean) / (std + epsilon)`` in place, with the moments that its parts were found to have."""
    if EVEN:  # a multiple of 16: this makes for wider accesses
        count = count // 16 * 16
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    own = tl.load(x + entry, mask=inside, other=0.0).to(tl.float64)
    base = tl.load(moments + parts)
    counts = tl.zeros([PARTS], tl.float64)
    sums = tl.zeros([PARTS], tl.float64)
    squares = tl.zeros([PARTS], tl.float64)
    first = 0
    while first < parts:
        part = first + tl.arange(0, PARTS)
        there = part < parts
        held = tl.load(moments + part, mask=there, other=0.0)
        away = tl.load(moments + parts + part, mask=there, other=0.0) - base
        own_sum = tl.load(moments + 2 * parts + part, mask=there, other=0.0)
        own_squares = tl.load(moments + 3 * parts + part, mask=there, other=0.0)
        counts += held
        sums += own_sum + held * away
        squares += own_squares + away * (2 * own_sum + held * away)
        first += PARTS
    total, summed, squared = tl.reduce((counts, sums, squares), 0, _add_triples)
    mean = summed / total
    spread = squared - mean * mean * total
    # Of a single entry there is no spread; rounding may leave a little less than none.
    variance = tl.where(total > 1, spread / tl.where(total > 1, total - 1, total), 0.0)
    std = tl.sqrt(tl.where(variance < 0, 0.0, variance))
    scale = 1.0 / (std + epsilon)  # one division in all: those of float64 are slow
    tl.store(x + entry, (((own - base) - mean) * scale).to(x.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------- operations


def gae(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, gamma: float, lam: float, advantages: Tensor, returns: Tensor,
) -> None:  # fmt: skip
    """``A_t = delta_t + gamma * lam * A_{t+1}``, ``R_t = A_t + V_t``; cut where an episode ends."""
    inputs = rewards, values, last_values, terminated, truncated, final_values
    fill_gae(*inputs, False, gamma, lam, None, advantages, returns)


def fill_gae(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, dones: bool, gamma: float, lam: float, epsilon: float | None, advantages: Tensor,
    returns: Tensor,
) -> None:  # fmt: skip
    """As :func:`gae`, from flags of any dtype, and normalized where an ``epsilon`` is given."""
    ends = _ends(terminated, truncated, final_values, rewards)
    has = (truncated is not None, final_values is not None, dones, epsilon is not None)
    device = rewards.device
    plan = _plan_advantages(rewards.shape, rewards.dtype, ends[0].dtype, ends[1].dtype, has)
    moments = returns if epsilon is None else scratch(4 * plan.parts, torch.float64, device)
    plan.scan(
        (plan.parts, 1, 1), device, rewards, values, last_values, *ends, advantages, returns, moments,
        plan.steps, plan.lanes, gamma, gamma * lam,
    )  # fmt: skip
    if epsilon is not None:
        plan.normalize(plan.grid, device, advantages, moments, plan.parts, plan.count, epsilon)


@dataclass(frozen=True)
class _AdvantagesPlan:
    """How advantages of one shape are made and normalized."""

    steps: int
    lanes: int
    parts: int  # programs, and so parts that have moments
    scan: Launcher
    count: int
    normalize: Launcher
    grid: tuple[int, int, int]


@lru_cache(256)
def _plan_advantages(
    size: torch.Size, dtype: torch.dtype, ended: torch.dtype, cut: torch.dtype, has: tuple[bool, bool, bool, bool]
) -> _AdvantagesPlan:
    """For rewards of a size and dtype, and flags of these dtypes, which distinguish launchers."""
    steps, lanes = size[0], size[1:].numel()
    parts = -(-lanes // _LANES)
    scan = Launcher(scan_advantages, (*has, _at_once(steps, dtype), _LANES), num_warps=1)
    return _AdvantagesPlan(steps, lanes, parts, scan, size.numel(), *_plan_normalization(size.numel(), parts, dtype))


def discounted_returns(
    rewards: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None, final_values: Tensor | None,
    gamma: float, returns: Tensor,
) -> None:  # fmt: skip
    """``R_t = r_t + gamma * R_{t+1}``. There are no values here: an unknown final value counts as 0."""
    steps, lanes = _steps_and_lanes(rewards)
    constants = (truncated is not None, final_values is not None, _at_once(steps, rewards.dtype), _LANES)
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher(scan_returns, constants, (rewards.dtype, *_dtypes(ends)), num_warps=1)
    arguments = (rewards, last_values, *ends, returns, steps, lanes, gamma)
    launcher((-(-lanes // _LANES), 1, 1), rewards.device, *arguments)


def n_step_returns(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, gamma: float, n: int, returns: Tensor,
) -> None:  # fmt: skip
    """``G_t = sum_{i<k} gamma^i r_{t+i} + gamma^k V_{t+k}``, k the smaller of n and the steps to the end."""
    steps, lanes = _steps_and_lanes(rewards)
    constants = (truncated is not None, final_values is not None, 256)
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher(fold_windows, constants, (rewards.dtype, *_dtypes(ends)))
    arguments = (rewards, values, last_values, *ends, returns, steps, lanes, min(n, steps), gamma)
    launcher((-(-steps * lanes // 256), 1, 1), rewards.device, *arguments)


def vtrace(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, log_rhos: Tensor, gamma: float, lam: float, clip_rho: float, clip_c: float,
    clip_pg_rho: float, targets: Tensor, advantages: Tensor,
) -> None:  # fmt: skip
    """V-trace (Espeholt et al. 2018): ``v_t = V_t + delta_t + gamma * lam * c_t * (v_{t+1} - V_{t+1})``."""
    steps, lanes = _steps_and_lanes(rewards)
    constants = (truncated is not None, final_values is not None, _at_once(steps, rewards.dtype), _LANES)
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher(scan_vtrace, constants, (rewards.dtype, *_dtypes(ends)), num_warps=1)
    numbers = (steps, lanes, gamma, gamma * lam, clip_rho, clip_c, clip_pg_rho)
    arguments = (rewards, values, last_values, *ends, log_rhos, targets, advantages, *numbers)
    launcher((-(-lanes // _LANES), 1, 1), rewards.device, *arguments)


def normalize(x: Tensor, epsilon: float) -> None:
    """``x = (x - mean) / (std + epsilon)`` in place, std unbiased, moments in float64."""
    count = x.numel()
    parts = -(-count // _MEASURED)
    moments = scratch(4 * parts, torch.float64, x.device)
    _launcher(measure, (_MEASURED,), (x.dtype,))((parts, 1, 1), x.device, x, moments, count)
    launcher, grid = _plan_normalization(count, parts, x.dtype)
    launcher(grid, x.device, x, moments, parts, count, epsilon)


@lru_cache(256)
def _plan_normalization(count: int, parts: int, dtype: torch.dtype) -> tuple[Launcher, tuple[int, int, int]]:
    constants = (count % 16 == 0, _FEW_PARTS if parts <= _FEW_PARTS else _MOST_PARTS, _ENTRIES)
    return _launcher(normalize_entries, constants, (dtype,)), (-(-count // _ENTRIES), 1, 1)


@cache
def _launcher(kernel: Any, constants: tuple[Any, ...], dtypes: tuple[torch.dtype, ...], num_warps: int = 4) -> Launcher:
    """What launches a kernel for arguments of these dtypes, which only distinguish launchers."""
    return Launcher(kernel, constants, num_warps)


def _steps_and_lanes(rewards: Tensor) -> tuple[int, int]:
    return rewards.shape[0], rewards.shape[1:].numel()


def _at_once(steps: int, dtype: torch.dtype) -> int:
    """The steps that a scan loads at once: half as many of float64, for which a thread has no more room."""
    grains = -(-min(steps, _MOST_STEPS // (dtype.itemsize // 4)) // _STEP_GRAIN)
    return max(grains, 1) * _STEP_GRAIN


def _ends(
    terminated: Tensor, truncated: Tensor | None, final_values: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The three, with something in the place of what is absent; the kernels do not read that."""
    return terminated, terminated if truncated is None else truncated, like if final_values is None else final_values


def _dtypes(tensors: tuple[Tensor, ...]) -> tuple[torch.dtype, ...]:
    return tuple([tensor.dtype for tensor in tensors])
