"""Targets, advantages and their normalisation: one launch each, two for advantages that are normalised.

All tensors are contiguous, and shaped as in :mod:`rlstore.kernels.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.cuda.moments_kernels import measure, normalize_entries
from rlstore.kernels.cuda.scans_kernels import fold_windows, scan_advantages, scan_returns, scan_vtrace

# The steps that a scan loads at once: a multiple of the first number, and at most the second. A program is one group of
# threads, with a lane in each.
_STEP_GRAIN, _MOST_STEPS, _LANES = 8, 32, 32
# What one program normalises, and what one measures.
_ENTRIES, _MEASURED = 2048, 4096
# The parts that are merged at once, where there are few and where there are many.
_FEW_PARTS, _MOST_PARTS = 512, 1024


def gae(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
) -> None:
    """``A_t = delta_t + gamma * lam * A_{t+1}``, ``R_t = A_t + V_t``; cut where an episode ends."""
    inputs = rewards, values, last_values, terminated, truncated, final_values
    fill_gae(*inputs, False, gamma, lam, None, advantages, returns)


def fill_gae(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    dones: bool,
    gamma: float,
    lam: float,
    epsilon: float | None,
    advantages: Tensor,
    returns: Tensor,
) -> None:
    """As :func:`gae`, from flags of any dtype, and normalised where an ``epsilon`` is given: see the reference."""
    ends = _ends(terminated, truncated, final_values, rewards)
    has = (truncated is not None, final_values is not None, dones, epsilon is not None)
    plan, device = _plan_advantages(rewards.shape, (rewards.dtype, ends[0].dtype, ends[1].dtype), has), rewards.device
    moments = torch.empty(4 * plan.parts, dtype=torch.float64, device=device) if epsilon is not None else returns
    arguments = (rewards, values, last_values, *ends, advantages, returns, moments, plan.steps, plan.lanes)
    plan.scan((plan.parts, 1, 1), device, *arguments, gamma, gamma * lam)
    if epsilon is not None:
        _normalize(advantages, moments, plan.parts, epsilon)


@dataclass(frozen=True)
class _AdvantagesPlan:
    """How advantages of one shape are made."""

    steps: int
    lanes: int
    parts: int  # programs, and so parts that have moments
    scan: Launcher


@lru_cache(256)
def _plan_advantages(
    size: torch.Size, dtypes: tuple[torch.dtype, ...], has: tuple[bool, bool, bool, bool]
) -> _AdvantagesPlan:
    """For rewards of a size and flags of these dtypes. The dtypes tell launchers apart."""
    steps, lanes = size[0], size[1:].numel()
    constants = (*has, _at_once(steps, dtypes[0]), _LANES)
    return _AdvantagesPlan(steps, lanes, -(-lanes // _LANES), Launcher(scan_advantages, constants, num_warps=1))


def discounted_returns(
    rewards: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    gamma: float,
    returns: Tensor,
) -> None:
    """``R_t = r_t + gamma * R_{t+1}``. There are no values here: an unknown final value counts as 0."""
    steps, lanes = _steps_and_lanes(rewards)
    constants = (truncated is not None, final_values is not None, _at_once(steps, rewards.dtype), _LANES)
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher(scan_returns, constants, (rewards.dtype, *_dtypes(ends)), num_warps=1)
    arguments = (rewards, last_values, *ends, returns, steps, lanes, gamma)
    launcher((-(-lanes // _LANES), 1, 1), rewards.device, *arguments)


def n_step_returns(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    gamma: float,
    n: int,
    returns: Tensor,
) -> None:
    """``G_t = sum_{i<k} gamma^i r_{t+i} + gamma^k V_{t+k}``, k the smaller of n and the steps to the end."""
    steps, lanes = _steps_and_lanes(rewards)
    constants = (truncated is not None, final_values is not None, 256)
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher(fold_windows, constants, (rewards.dtype, *_dtypes(ends)))
    arguments = (rewards, values, last_values, *ends, returns, steps, lanes, min(n, steps), gamma)
    launcher((-(-steps * lanes // 256), 1, 1), rewards.device, *arguments)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    log_rhos: Tensor,
    gamma: float,
    lam: float,
    clip_rho: float,
    clip_c: float,
    clip_pg_rho: float,
    targets: Tensor,
    advantages: Tensor,
) -> None:
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
    moments = torch.empty(4 * parts, dtype=torch.float64, device=x.device)
    _launcher(measure, (_MEASURED,), (x.dtype,))((parts, 1, 1), x.device, x, moments, count)
    _normalize(x, moments, parts, epsilon)


def _normalize(x: Tensor, moments: Tensor, parts: int, epsilon: float) -> None:
    count = x.numel()
    launcher, grid = _plan_normalisation(count, parts, x.dtype)
    launcher(grid, x.device, x, moments, parts, count, epsilon)


@lru_cache(256)
def _plan_normalisation(count: int, parts: int, dtype: torch.dtype) -> tuple[Launcher, tuple[int, int, int]]:
    constants = (count % 16 == 0, _FEW_PARTS if parts <= _FEW_PARTS else _MOST_PARTS, _ENTRIES)
    return _launcher(normalize_entries, constants, (dtype,)), (-(-count // _ENTRIES), 1, 1)


@cache
def _launcher(kernel: Any, constants: tuple[Any, ...], dtypes: tuple[torch.dtype, ...], num_warps: int = 4) -> Launcher:
    """What launches a kernel for arguments of these dtypes, which only tell launchers apart."""
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
