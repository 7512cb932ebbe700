"""Targets, advantages and their normalisation: one launch each, two for advantages that are normalised.

All tensors are contiguous, and shaped as in :mod:`rlstore.kernels.reference`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlstore.kernels.cuda import scans_kernels
from rlstore.kernels.cuda.launch import Launcher, next_power_of_2

# A scan goes over so many steps at once, and over so many entries (steps times lanes) in one program: over more where
# there are many lanes, so that not too many parts have moments to merge.
_MOST_STEPS, _TILE, _LARGE_TILE = 128, 256, 512
_LEAST_LANES, _MANY_LANES = 8, 8192
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
    steps, lanes = _steps_and_lanes(rewards)
    tile_steps, tile_lanes, warps = _tile(steps, lanes)
    parts = -(-lanes // tile_lanes)
    measured = epsilon is not None
    moments = torch.empty(4 * parts, dtype=torch.float64, device=rewards.device) if measured else returns
    constants = (
        truncated is not None,
        final_values is not None,
        dones,
        measured,
        lanes % 16 == 0,
        steps > tile_steps,
        tile_steps,
        tile_lanes,
    )
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher("scan_advantages", constants, (rewards.dtype, *_dtypes(ends)), warps)
    arguments = (rewards, values, last_values, *ends, advantages, returns, moments, steps, lanes, gamma, gamma * lam)
    launcher((parts, 1, 1), rewards.device, *arguments)
    if epsilon is not None:
        _normalize(advantages, moments, parts, epsilon)


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
    tile_steps, tile_lanes, warps = _tile(steps, lanes)
    constants = (truncated is not None, final_values is not None, tile_steps, tile_lanes)
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher("scan_returns", constants, (rewards.dtype, *_dtypes(ends)), warps)
    arguments = (rewards, last_values, *ends, returns, steps, lanes, gamma)
    launcher((-(-lanes // tile_lanes), 1, 1), rewards.device, *arguments)


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
    launcher = _launcher("fold_windows", constants, (rewards.dtype, *_dtypes(ends)))
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
    constants = (truncated is not None, final_values is not None, 32)
    ends = _ends(terminated, truncated, final_values, rewards)
    launcher = _launcher("scan_vtrace", constants, (rewards.dtype, *_dtypes(ends)), num_warps=1)
    numbers = (steps, lanes, gamma, gamma * lam, clip_rho, clip_c, clip_pg_rho)
    arguments = (rewards, values, last_values, *ends, log_rhos, targets, advantages, *numbers)
    launcher((-(-lanes // 32), 1, 1), rewards.device, *arguments)


def normalize(x: Tensor, epsilon: float) -> None:
    """``x = (x - mean) / (std + epsilon)`` in place, std unbiased, moments in float64."""
    count = x.numel()
    parts = -(-count // _MEASURED)
    moments = torch.empty(4 * parts, dtype=torch.float64, device=x.device)
    _launcher("measure", (_MEASURED,), (x.dtype,))((parts, 1, 1), x.device, x, moments, count)
    _normalize(x, moments, parts, epsilon)


def _normalize(x: Tensor, moments: Tensor, parts: int, epsilon: float) -> None:
    count = x.numel()
    constants = (count % 16 == 0, _FEW_PARTS if parts <= _FEW_PARTS else _MOST_PARTS, _ENTRIES)
    launcher = _launcher("normalize_entries", constants, (x.dtype,))
    launcher((-(-count // _ENTRIES), 1, 1), x.device, x, moments, parts, count, epsilon)


@cache
def _launcher(name: str, constants: tuple[Any, ...], dtypes: tuple[torch.dtype, ...], num_warps: int = 4) -> Launcher:
    """What launches a kernel for arguments of these dtypes, which only tell launchers apart."""
    return Launcher(getattr(scans_kernels, name), constants, num_warps)


def _steps_and_lanes(rewards: Tensor) -> tuple[int, int]:
    steps = rewards.shape[0]
    return steps, rewards.numel() // steps


@cache
def _tile(steps: int, lanes: int) -> tuple[int, int, int]:
    """The steps and the lanes of a program's tile, and its groups of threads."""
    tile_steps = min(max(next_power_of_2(steps), 4), _MOST_STEPS)
    tile_lanes = max((_TILE if lanes <= _MANY_LANES else _LARGE_TILE) // tile_steps, _LEAST_LANES)
    return tile_steps, tile_lanes, 2 if tile_steps * tile_lanes <= _LARGE_TILE else 4


def _ends(
    terminated: Tensor, truncated: Tensor | None, final_values: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The three, with something in the place of what is absent; the kernels do not read that."""
    return terminated, terminated if truncated is None else truncated, like if final_values is None else final_values


def _dtypes(tensors: tuple[Tensor, ...]) -> tuple[torch.dtype, ...]:
    return tuple([tensor.dtype for tensor in tensors])
