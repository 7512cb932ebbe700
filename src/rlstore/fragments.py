"""The episodes, and parts of episodes, in steps that lie side by side: those of rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstore.episodes import Listing


def list_fragments(
    terminated: Tensor,
    truncated: Tensor,
    rewards: Tensor,
    resets: Tensor,
    begins: Tensor,
    envs: Tensor,
    lanes: int,
) -> Listing:
    """The runs of steps from one end to the next, environment by environment. A device is waited for once.

    Args:
        terminated: bool ``[steps, n]``.
        truncated: Likewise.
        rewards: ``[steps, n]``.
        resets: Steps that only begin an episode and are part of none, bool ``[steps, n]``.
        begins: Whether the first step is known to begin an episode, bool ``[n]``.
        envs: The number of each environment, int64 ``[n]`` on the CPU: row ids are ``step * lanes + env``.
        lanes: See ``envs``.
    """
    steps = len(rewards)
    numbers = torch.stack([part.double() for part in (rewards, terminated, truncated, resets)]).flatten(0, 1)
    numbers = torch.cat((numbers, begins.double().unsqueeze(0))).cpu()
    begins = numbers[-1] != 0
    earned, *flags = numbers[:-1].view(4, steps, len(begins)).transpose(1, 2)  # [n, steps] each
    terminated, truncated, resets = (flag != 0 for flag in flags)
    is_first = ~resets
    is_first[:, 1:] &= (terminated | truncated | resets)[:, :-1]
    index = (is_first.flatten().cumsum(0) - 1)[~resets.flatten()]
    lane, first = is_first.nonzero().unbind(1)
    lengths = torch.bincount(index, minlength=len(lane))
    totals = torch.zeros(len(lane), dtype=torch.float64).index_add_(0, index, earned[~resets])
    last = first + lengths - 1
    ends = terminated[lane, last], truncated[lane, last]
    is_whole = (first > 0) | begins[lane]
    return Listing(first * lanes + envs[lane], envs[lane], lengths, totals, *ends, ends[0] | ends[1], is_whole)
