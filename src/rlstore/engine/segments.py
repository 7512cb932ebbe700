"""Trajectories: a rollout split where episodes end, padded to one length, with masks and first hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlstore.engine.memory import Allocator, allocate_empty
from rlstore.kernels import kernel


@dataclass(frozen=True)
class Trajectories:
    """Stretches of lanes between episode ends, lane by lane; each tensor is int64 ``[trajectories]``."""

    lanes: Tensor
    starts: Tensor
    lengths: Tensor


def split(dones: Tensor, first: int, last: int) -> Trajectories:
    """The trajectories of the lanes ``[first, last)``.

    Args:
        dones: One-byte flags ``[steps, lanes]`` or ``[steps, lanes, 1]``: the episode ended with this step. The last
            step ends a trajectory in any case.
        first: The first lane.
        last: The lane after the last.
    """
    device = dones.device
    count = kernel("count_segments", device.type)(dones, first, last)
    trajectories = Trajectories(*(allocate_empty((count,), torch.int64, device) for _ in range(3)))
    kernel("split_segments", device.type)(
        dones, first, last, trajectories.lanes, trajectories.starts, trajectories.lengths
    )
    return trajectories


def pad(
    sources: tuple[Tensor, ...], trajectories: Trajectories, steps: int, empty: Allocator = allocate_empty
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Each source ``[time, lanes, *shape]`` as ``[steps, trajectories, *shape]``, zeros after a trajectory's end.

    Returns:
        The padded tensors, dtypes kept, and the mask, bool ``[steps, trajectories]``.
    """
    device, count = trajectories.lanes.device, trajectories.lanes.shape[0]
    outs = tuple(empty((steps, count, *source.shape[2:]), source.dtype, device) for source in sources)
    mask = empty((steps, count), torch.bool, device)
    kernel("pad_segments", device.type)(
        sources, trajectories.lanes, trajectories.starts, trajectories.lengths, outs, mask
    )
    return outs, mask


def cut(sources: tuple[Tensor, ...], first: int, last: int, empty: Allocator = allocate_empty) -> tuple[Tensor, ...]:
    """The lanes ``[first, last)`` of each source ``[steps, lanes, *shape]``, as copies."""
    outs = tuple(
        empty((source.shape[0], last - first, *source.shape[2:]), source.dtype, source.device) for source in sources
    )
    kernel("copy_lanes", sources[0].device.type)(sources, first, last, outs)
    return outs


def first_states(states: Tensor, trajectories: Trajectories, empty: Allocator = allocate_empty) -> Tensor:
    """The hidden state at each trajectory's start.

    Args:
        states: ``[steps, layers, lanes, hidden]``.
        trajectories: Where they start.
        empty: What makes the result.

    Returns:
        ``[layers, trajectories, hidden]``, contiguous.
    """
    shape = (states.shape[1], trajectories.lanes.shape[0], states.shape[3])
    out = empty(shape, states.dtype, states.device)
    kernel("first_states", states.device.type)(states, trajectories.lanes, trajectories.starts, out)
    return out
