"""Returns and advantages as functions of tensors, each computed in one backward scan.

All functions treat the end of an episode in the same way (terminated and truncated are separate flags):

- ``terminated``: no bootstrap, and later steps do not contribute;
- ``truncated`` and not terminated: bootstrap from ``final_values``, the value of the final observation of the episode,
  and later steps do not contribute. Where the final value is unknown (``final_values`` is None, or NaN there), the
  target of the step is its own value and its advantage is 0; :func:`discounted_returns`, which has no value estimates,
  counts it as 0;
- neither: bootstrap from the value of the next step; in the last step from ``last_values``. If an episode ended in the
  last step, ``last_values`` (the value of the next episode's first observation) is not used there.

Shapes: ``[steps, lanes]`` or ``[steps, lanes, 1]``, where a lane is an environment; float32 or float64, as the rewards;
``last_values`` ``[lanes]`` or ``[lanes, 1]``; flags of any dtype. Results have the shape and dtype of ``rewards``, also
if it is empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlstore.engine.checks import check_number
from rlstore.engine.memory.tensors import allocate_empty
from rlstore.engine.rows.schema import check_memory, is_in_memory
from rlstore.errors import InvalidInputError
from rlstore.kernels import kernel


def gae(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016).

    ``delta_t = r_t + gamma * V_{t+1} - V_t``, ``A_t = delta_t + gamma * lam * A_{t+1}``, ``R_t = A_t + V_t``.

    Args:
        rewards: ``r``.
        values: ``V``.
        last_values: The value of the observation after the last step.
        terminated: The episode terminated in this step.
        truncated: The episode was truncated after this step, for example by a time limit.
        final_values: The value of the final observation; used where truncated.
        gamma: The discount factor.
        lam: The trade-off between bias (0) and variance (1).

    Returns:
        Advantages and returns.
    """
    check_number("gae()", gamma=gamma, lam=lam)
    inputs = _Inputs(rewards, values, last_values, terminated, truncated, final_values)
    advantages, returns = inputs.empty(), inputs.empty()
    kernel("gae", inputs.device_type)(*inputs.all, gamma, lam, advantages, returns)
    return advantages, returns


def fill_gae(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_values: Tensor | None,
    *,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
    epsilon: float | None = None,
    dones: bool = False,
) -> None:
    """:func:`gae` on the blocks of a ring, which are float32 and contiguous, with flags from :func:`readable_flags`.

    With an ``epsilon`` the advantages are normalized, see :func:`normalize`. With ``dones``, ``terminated`` is set at
    every end, and where ``truncated`` is set too the episode was only truncated.
    """
    inputs = (rewards, values, last_values, terminated, truncated, final_values)
    kernel("fill_gae", rewards.device.type)(*inputs, dones, gamma, lam, epsilon, advantages, returns)


def fill_gae_around_resets(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    dones: Tensor,
    truncated: Tensor | None,
    resets: Tensor,
    *,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
    epsilon: float | None = None,
) -> None:
    """:func:`fill_gae` for next-step autoreset, where the step after an end only resets the environment.

    The observation of such a reset step is the final one of the episode before it. So a truncated step bootstraps from
    the value of the next step, or from ``last_values``. A reset step has the advantage 0 and its own value as target,
    and advantages are normalized over the other steps.

    Args:
        rewards: As for :func:`fill_gae`, and so the others that are not named here.
        values: ``[steps, lanes]``.
        last_values: ``[lanes]`` or ``[lanes, 1]``.
        dones: Flags of every end, one byte each.
        truncated: Flags of the ends that are truncations; None for none.
        resets: Flags of the reset steps.
        gamma: The discount factor.
        lam: The trade-off between bias and variance.
        advantages: Filled.
        returns: Filled.
        epsilon: Normalize with it; None to leave the advantages as they are.
    """
    is_reset = resets != 0
    final_values = torch.cat((values[1:], last_values.view(1, *values.shape[1:]))).masked_fill_(is_reset, torch.nan)
    # A truncated step whose final value is not known has the advantage 0, and nothing flows through it.
    cut_off = resets if truncated is None else truncated | resets
    fill_gae(
        rewards,
        values,
        last_values,
        dones | resets,
        cut_off,
        final_values,
        gamma=gamma,
        lam=lam,
        advantages=advantages,
        returns=returns,
        dones=True,
    )
    if epsilon is not None:
        _normalize_where(~is_reset, advantages, epsilon)


def _normalize_where(counts: Tensor, x: Tensor, epsilon: float) -> None:
    """:func:`normalize` over the entries that count; the others become 0. The host does not wait for the device."""
    wide = x.double()
    # Relative to one of them, so that equal entries give exactly 0, however their sum is rounded.
    wide = torch.where(counts, wide - torch.where(counts, wide, -torch.inf).amax(), 0.0)
    number = counts.sum()
    away = torch.where(counts, wide - wide.sum() / number, 0.0)
    std = (away.square().sum() / (number - 1).clamp(min=1)).sqrt()
    x.copy_(away / (std + epsilon))


def readable_flags(block: Tensor) -> Tensor:
    """Flags in a form that :func:`fill_gae` can read: one byte each or, on CUDA, any dtype."""
    return block if block.is_cuda or block.element_size() == 1 else block != 0


def lambda_returns(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """TD(lambda) targets: ``G_t = r_t + gamma * ((1 - lam) * V_{t+1} + lam * G_{t+1})``.

    Arguments as for :func:`gae`.
    """
    return gae(rewards, values, last_values, terminated, truncated, final_values, gamma=gamma, lam=lam)[1]


def discounted_returns(
    rewards: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float,
) -> Tensor:
    """``R_t = r_t + gamma * R_{t+1}``. Arguments as for :func:`gae`.

    Without value estimates, an unknown final value counts as 0.
    """
    check_number("discounted_returns()", gamma=gamma)
    inputs = _Inputs(rewards, rewards, last_values, terminated, truncated, final_values)
    returns = inputs.empty()
    kernel("discounted_returns", inputs.device_type)(inputs.all[0], *inputs.all[2:], gamma, returns)
    return returns


def n_step_returns(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float,
    n: int,
) -> Tensor:
    """``G_t = r_t + gamma * r_{t+1} + ... + gamma^(k-1) * r_{t+k-1} + gamma^k * V_{t+k}``.

    ``k`` is ``n``, or less where the episode or the rollout ends earlier; how it bootstraps depends on the end.
    Other arguments as for :func:`gae`.
    """
    check_number("n_step_returns()", n=n)
    if n < 1:
        raise InvalidInputError(f"n is {n}; n-step returns need at least 1 step")
    check_number("n_step_returns()", gamma=gamma)
    inputs = _Inputs(rewards, values, last_values, terminated, truncated, final_values)
    returns = inputs.empty()
    kernel("n_step_returns", inputs.device_type)(*inputs.all, gamma, n, returns)
    return returns


def vtrace(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    log_rhos: Tensor,
    gamma: float,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018).

    ``delta_t = min(clip_rho, rho_t) * (r_t + gamma * V_{t+1} - V_t)``,
    ``v_t = V_t + delta_t + gamma * lam * min(clip_c, rho_t) * (v_{t+1} - V_{t+1})``,
    ``A_t = min(clip_pg_rho, rho_t) * (r_t + gamma * v_{t+1} - V_t)``.

    Args:
        rewards: As for :func:`gae`.
        values: As for :func:`gae`.
        last_values: As for :func:`gae`.
        terminated: As for :func:`gae`.
        truncated: As for :func:`gae`.
        final_values: As for :func:`gae`.
        log_rhos: ``log(pi(a|s) / mu(a|s))``: log-probability of the target policy minus that of the behavior policy.
        gamma: The discount factor.
        lam: The factor of the trace.
        clip_rho: The upper bound of the ratio in the temporal difference.
        clip_c: The upper bound of the ratio in the trace.
        clip_pg_rho: The upper bound of the ratio in the advantage.

    Returns:
        Targets and advantages.
    """
    check_number("vtrace()", gamma=gamma, lam=lam, clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=clip_pg_rho)
    inputs = _Inputs(rewards, values, last_values, terminated, truncated, final_values)
    ratios = inputs.like_rewards(log_rhos, "log_rhos")
    targets, advantages = inputs.empty(), inputs.empty()
    kernel("vtrace", inputs.device_type)(
        *inputs.all, ratios, gamma, lam, clip_rho, clip_c, clip_pg_rho, targets, advantages
    )
    return targets, advantages


def normalize(x: Tensor, epsilon: float) -> None:
    """``x = (x - mean) / (std + epsilon)`` in place, over all entries, std unbiased.

    A single entry becomes 0.
    """
    _check_readable(x, "x")
    if x.numel() < 2:
        x.zero_()
        return
    kernel("normalize", x.device.type)(x, epsilon)


class _Inputs:
    """The arguments that all scans share, checked and converted to the form that kernels take."""

    def __init__(
        self,
        rewards: Tensor,
        values: Tensor,
        last_values: Tensor,
        terminated: Tensor,
        truncated: Tensor | None,
        final_values: Tensor | None,
    ) -> None:
        _check_readable(rewards, "rewards")
        _check_readable(last_values, "last_values")
        if rewards.dtype not in (torch.float32, torch.float64) or rewards.dim() < 2:
            raise InvalidInputError(
                f"rewards are {tuple(rewards.shape)} {rewards.dtype}; returns need [steps, lanes] of float32 or float64"
            )
        self._rewards = _plain_memory(rewards, rewards.dtype, rewards.device, "rewards")
        self.device_type = rewards.device.type
        if last_values.numel() != rewards.shape[1:].numel():
            raise InvalidInputError(
                f"last_values are {tuple(last_values.shape)}; the rewards have {rewards.shape[1:].numel()} lanes"
            )
        self.all = (
            self._rewards,
            self.like_rewards(values, "values"),
            _plain_memory(last_values, rewards.dtype, rewards.device, "last_values"),
            self._flags(terminated, "terminated"),
            None if truncated is None else self._flags(truncated, "truncated"),
            None if final_values is None else self.like_rewards(final_values, "final_values"),
        )

    def empty(self) -> Tensor:
        result = allocate_empty(self._rewards.shape, self._rewards.dtype, self._rewards.device)
        _check_readable(result, "the result")  # there may be a mode in which all new tensors are fake
        return result

    def like_rewards(self, given: Tensor, name: str) -> Tensor:
        self._check_size(given, name)
        return _plain_memory(given, self._rewards.dtype, self._rewards.device, name)

    def _flags(self, given: Tensor, name: str) -> Tensor:
        self._check_size(given, name)
        flags = given if given.dtype in (torch.bool, torch.uint8) else given != 0
        return _plain_memory(flags, flags.dtype, self._rewards.device, name)

    def _check_size(self, given: Tensor, name: str) -> None:
        _check_readable(given, name)
        if given.shape != self._rewards.shape and _plain(given.shape) != _plain(self._rewards.shape):
            raise InvalidInputError(f"{name} are {tuple(given.shape)}; the rewards are {tuple(self._rewards.shape)}")


def _plain(shape: torch.Size) -> tuple[int, ...]:
    """``[steps, lanes]`` for ``[steps, lanes, 1]`` too."""
    return tuple(shape[:-1]) if len(shape) == 3 and shape[-1] == 1 else tuple(shape)


def _plain_memory(given: Tensor, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """The tensor itself if a kernel can read its memory, else a contiguous copy."""
    is_plain = given.dtype == dtype and given.device == device and not given.requires_grad and not given.is_neg()
    if is_plain and given.is_contiguous():
        return given
    if given.is_complex():
        raise InvalidInputError(f"{name} is {given.dtype}; returns need real numbers. Nothing was computed.")
    return given.detach().to(device, dtype).resolve_neg().contiguous()


def _check_readable(given: Tensor, name: str) -> None:
    if type(given) is Tensor and is_in_memory(given):
        return  # as nearly all are
    if not isinstance(given, Tensor):
        raise InvalidInputError(f"{name} is a {type(given).__name__}; returns need a tensor. Nothing was computed.")
    check_memory(given, name)
