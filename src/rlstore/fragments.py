"""The episodes, and parts of episodes, in steps that lie side by side: those of rollouts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlstore.episodes import Listing


class Fragments(NamedTuple):
    """Runs of steps from one end to the next, ``[envs * steps]`` by the place ``env * steps + step`` of the first one.

    Where none begins the length is 0, and the rest means nothing.
    """

    lengths: Tensor
    returns: Tensor
    terminated: Tensor
    truncated: Tensor
    is_whole: Tensor


def find_fragments(terminated: Tensor, truncated: Tensor, rewards: Tensor, resets: Tensor, begins: Tensor) -> Fragments:
    """The runs of steps from one end to the next. A device is not waited for.

    Args:
        terminated: bool ``[steps, envs]``.
        truncated: Likewise.
        rewards: ``[steps, envs]``.
        resets: Steps that only begin an episode and are part of none, bool ``[steps, envs]``.
        begins: Whether the first step is known to begin an episode, bool ``[envs]``.
    """
    steps, places = len(rewards), rewards.numel()
    is_first = ~resets
    is_first[1:] &= (terminated | truncated | resets)[:-1]
    place = torch.arange(places, device=rewards.device)
    first = torch.where(is_first.T.flatten(), place, 0).cummax(0).values
    index = torch.where(resets.T.flatten(), places, first)  # those of none are added to an entry behind the others
    ones = torch.ones((), dtype=torch.int64, device=rewards.device).expand(places)
    lengths = torch.zeros(places + 1, dtype=torch.int64, device=rewards.device).index_add_(0, index, ones)[:-1]
    earned = rewards.T.flatten().double()
    returns = earned.new_zeros(places + 1).index_add_(0, index, earned)[:-1]
    last = (place + lengths - 1).clamp(min=0)
    ends = terminated.T.flatten()[last], truncated.T.flatten()[last]
    is_whole = (place % max(steps, 1) > 0) | begins.unsqueeze(1).expand(-1, steps).flatten()
    return Fragments(lengths, returns, *ends, is_whole)


def list_fragments(found: Fragments, envs: Tensor, lanes: int) -> Listing:
    """The same as a listing, environment by environment. A device is waited for once.

    Args:
        found: The fragments.
        envs: The number of each environment, int64 ``[n]`` on the CPU: row ids are ``step * lanes + env``.
        lanes: See ``envs``.
    """
    numbers = torch.stack([part.double() for part in found]).cpu()
    place = numbers[0].nonzero().flatten()
    lengths, returns, *flags = numbers[:, place].unbind()
    terminated, truncated, is_whole = (flag != 0 for flag in flags)
    steps = max(numbers.shape[1] // max(len(envs), 1), 1)
    env = envs[place // steps]
    first_rows = place % steps * lanes + env
    return Listing(first_rows, env, lengths.long(), returns, terminated, truncated, terminated | truncated, is_whole)
