"""Targets and advantages, one step of all lanes after another from the last to the first; and normalization."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, gamma: float, lam: float, advantages: Tensor, returns: Tensor,
) -> None:  # fmt: skip
    """``A_t = delta_t + gamma * lam * A_{t+1}``, ``R_t = A_t + V_t``; cut where an episode ends."""
    ends, values = _Ends(rewards, terminated, truncated, final_values), values.reshape(rewards.shape)
    advantages, returns = advantages.view(rewards.shape), returns.view(rewards.shape)
    carried = rewards.new_zeros(rewards.shape[1:])
    next_value = last_values.reshape(rewards.shape[1:])
    for t in reversed(range(rewards.shape[0])):
        delta = rewards[t] + gamma * ends.bootstrap(t, next_value) - values[t]
        carried = delta + gamma * lam * torch.where(ends.cut[t], 0.0, carried)
        carried = torch.where(ends.unknown[t], 0.0, carried)
        advantages[t] = carried
        returns[t] = carried + values[t]
        next_value = values[t]


def fill_gae(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, dones: bool, gamma: float, lam: float, epsilon: float | None, advantages: Tensor,
    returns: Tensor,
) -> None:  # fmt: skip
    """:func:`gae` from flags of any dtype; with an ``epsilon`` the advantages are normalized, a single one to 0.

    With ``dones``, ``terminated`` flags every end, and those that ``truncated`` flags too were only cut off.
    """
    if dones and truncated is not None:
        terminated = (terminated != 0) & (truncated == 0)
    gae(rewards, values, last_values, terminated, truncated, final_values, gamma, lam, advantages, returns)
    if epsilon is not None and advantages.numel() < 2:
        advantages.zero_()
    elif epsilon is not None:
        normalize(advantages, epsilon)


def discounted_returns(
    rewards: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None, final_values: Tensor | None,
    gamma: float, returns: Tensor,
) -> None:  # fmt: skip
    """``R_t = r_t + gamma * R_{t+1}``. There are no values here: an unknown final value counts as 0."""
    ends = _Ends(rewards, terminated, truncated, final_values)
    after = last_values.reshape(rewards.shape[1:])
    for t in reversed(range(rewards.shape[0])):
        after = torch.where(ends.unknown[t], rewards[t], rewards[t] + gamma * ends.bootstrap(t, after))
        returns[t] = after


def n_step_returns(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, gamma: float, n: int, returns: Tensor,
) -> None:  # fmt: skip
    """``G_t = sum_{i<k} gamma^i r_{t+i} + gamma^k V_{t+k}``, k the smaller of n and the steps to the end."""
    ends, values = _Ends(rewards, terminated, truncated, final_values), values.reshape(rewards.shape)
    steps = rewards.shape[0]
    for start in range(steps):
        stop = min(start + n, steps)
        after = values[stop] if stop < steps else last_values.reshape(rewards.shape[1:])
        for t in reversed(range(start, stop)):
            after = torch.where(ends.unknown[t], values[t], rewards[t] + gamma * ends.bootstrap(t, after))
        returns[start] = after


def vtrace(
    rewards: Tensor, values: Tensor, last_values: Tensor, terminated: Tensor, truncated: Tensor | None,
    final_values: Tensor | None, log_rhos: Tensor, gamma: float, lam: float, clip_rho: float, clip_c: float,
    clip_pg_rho: float, targets: Tensor, advantages: Tensor,
) -> None:  # fmt: skip
    """V-trace (Espeholt et al. 2018): ``v_t = V_t + delta_t + gamma * lam * c_t * (v_{t+1} - V_{t+1})``."""
    ends, values = _Ends(rewards, terminated, truncated, final_values), values.reshape(rewards.shape)
    rhos = log_rhos.exp().reshape(rewards.shape)
    next_value = next_target = last_values.reshape(rewards.shape[1:])
    for t in reversed(range(rewards.shape[0])):
        delta = rhos[t].clamp(max=clip_rho) * (rewards[t] + gamma * ends.bootstrap(t, next_value) - values[t])
        carried = torch.where(ends.cut[t], 0.0, next_target - next_value)
        target = values[t] + delta + gamma * lam * rhos[t].clamp(max=clip_c) * carried
        pg = rhos[t].clamp(max=clip_pg_rho) * (rewards[t] + gamma * ends.bootstrap(t, next_target) - values[t])
        targets[t] = torch.where(ends.unknown[t], values[t], target)
        advantages[t] = torch.where(ends.unknown[t], 0.0, pg)
        next_value, next_target = values[t], targets[t]


class _Ends:
    """What the end flags of a rollout say of each step."""

    def __init__(self, like: Tensor, terminated: Tensor, truncated: Tensor | None, final_values: Tensor | None) -> None:
        self._terminated = terminated.reshape(like.shape) != 0
        self._truncated = (
            torch.zeros_like(self._terminated) if truncated is None else truncated.reshape(like.shape) != 0
        )
        self._final = torch.full_like(like, torch.nan) if final_values is None else final_values.reshape(like.shape)
        self.cut = self._terminated | self._truncated
        self.unknown = self._truncated & ~self._terminated & self._final.isnan()

    def bootstrap(self, t: int, next_value: Tensor) -> Tensor:
        value = torch.where(self._truncated[t], self._final[t], next_value)
        return torch.where(self._terminated[t], 0.0, value)


def normalize(x: Tensor, epsilon: float) -> None:
    """``x = (x - mean) / (std + epsilon)`` in place, std unbiased, moments in float64."""
    wide = x.double() - x.flatten()[0].double()  # equal entries stay exactly equal, whatever a sum is rounded to
    x.copy_((wide - wide.mean()) / (wide.std() + epsilon))
