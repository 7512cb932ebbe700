"""The episodes of a ring of replay in one table: no observation is read, and no device is waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlstore.engine.rows.episode_ring import EpisodeRing


@dataclass(frozen=True)
class EpisodeTable:
    """What is held of each episode, by episode index ``[slots]``, on the device of the ring.

    Indices that no held row has are in the table too: their ``lengths`` are 0, and the rest means nothing.

    Attributes:
        lanes: Its environment, int64.
        firsts: The time of its first row that is held, int64; its rows are ``time * lanes + lane``.
        lengths: Rows of it that are held, int64.
        totals: The sum of their rewards, float64 ``[slots, *reward_shape]``.
        ends: How it ended, int64: bits 1 (terminated) and 2 (truncated); 0 if it is open or was cut off without a flag.
        is_over: False for an episode that goes on, bool.
        is_whole: Whether its first row is held, bool.
    """

    lanes: Tensor
    firsts: Tensor
    lengths: Tensor
    totals: Tensor
    ends: Tensor
    is_over: Tensor
    is_whole: Tensor


def held_places(ring: EpisodeRing) -> Tensor:
    """Which rows of the blocks are held, bool ``[lanes, rows]``: of ``rows`` as many as were ever written.

    Memory that was never written is left out, because on the CPU it is taken when it is first read.
    """
    rows, held = ring.rows, ring.held().int().unsqueeze(1)
    is_cpu = ring.device.type == "cpu"
    extent = min(int(ring.written.max()), rows) if is_cpu else rows
    oldest = (ring.written % rows).int().unsqueeze(1) - held
    since = torch.arange(extent, dtype=torch.int32, device=ring.device) - torch.where(oldest < 0, oldest + rows, oldest)
    return torch.where(since < 0, since + rows, since) < held


def episode_table(ring: EpisodeRing, is_held: Tensor | None = None) -> EpisodeTable:
    """The table of all episodes. Rewards are added in float64 by one ``index_add`` over their column.

    Args:
        ring: The rows.
        is_held: What :func:`held_places` gives, if it is known.
    """
    is_held = held_places(ring) if is_held is None else is_held
    extent, slots = is_held.shape[1], ring.slots
    # The rows that are not held are added to an entry of their own, behind the others.
    index = torch.where(is_held, ring.blocks["episode"][:, :extent], slots).flatten()
    rewards = ring.blocks["rewards"][:, :extent].double().flatten(0, 1)
    totals = rewards.new_zeros((slots + 1, *rewards.shape[1:])).index_add_(0, index, rewards)
    ones = torch.ones((), dtype=torch.int64, device=ring.device).expand(index.shape)
    lengths = torch.zeros(slots + 1, dtype=torch.int64, device=ring.device).index_add_(0, index, ones)
    start, stop, ends = ring.episodes[:, 0], ring.episodes[:, 1], ring.episodes[:, 2]
    lanes = torch.arange(slots, device=ring.device) % ring.lanes
    written, oldest = ring.written[lanes], (ring.written - ring.held())[lanes]
    # Another process may have ended an episode by rows that were not taken in yet: here it goes on.
    is_over = (stop >= 0) & (stop <= written)
    return EpisodeTable(
        lanes=lanes,
        firsts=torch.maximum(start, oldest),
        lengths=lengths[:slots],
        totals=totals[:slots],
        ends=torch.where(is_over, ends, 0),
        is_over=is_over,
        is_whole=start >= oldest,
    )
