"""Trajectories of a rollout, found and padded: recurrent mini-batches."""

from __future__ import annotations

import torch
from torch import Tensor


def count_segments(dones: Tensor, first: int, last: int) -> int:
    """The number of trajectories in the lanes ``[first, last)`` of ``dones``."""
    if dones.shape[0] == 0:
        return 0
    return int((dones[:-1, first:last] != 0).sum()) + last - first


def split_segments(dones: Tensor, first: int, last: int, lanes: Tensor, starts: Tensor, lengths: Tensor) -> None:
    """Each trajectory's lane, first step and length, lane by lane."""
    ends = (dones[:, first:last] != 0).reshape(dones.shape[0], last - first).t().clone()
    ends[:, -1] = True
    found = ends.nonzero()
    stops = found[:, 1] + 1
    is_first = torch.ones_like(stops, dtype=torch.bool)
    is_first[1:] = found[1:, 0] != found[:-1, 0]
    starts.copy_(torch.where(is_first, 0, stops.roll(1)))
    lanes.copy_(found[:, 0] + first)
    lengths.copy_(stops - starts)


# Not every torch can index or fill the unsigned types; the bits of the signed ones are the same, and so is their zero.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _signed(tensor: Tensor) -> Tensor:
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def pad_segments(
    sources: tuple[Tensor, ...], lanes: Tensor, starts: Tensor, lengths: Tensor, targets: tuple[Tensor, ...],
    mask: Tensor,
) -> None:  # fmt: skip
    """``target[t, s] = source[starts[s] + t, lanes[s]]`` within the trajectory, else zeros; and the mask of it."""
    t = torch.arange(mask.shape[0], device=mask.device)[:, None]
    inside = t < lengths
    mask.copy_(inside)
    for source, target in zip(sources, targets, strict=True):
        picked = _signed(source)[(starts + t).clamp(max=max(source.shape[0] - 1, 0)), lanes]
        target.copy_(picked.view(source.dtype))
        _signed(target)[~inside] = 0


def copy_lanes(sources: tuple[Tensor, ...], first: int, last: int, targets: tuple[Tensor, ...]) -> None:
    """``target[t, i] = source[t, first + i]`` for the lanes ``[first, last)``."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source[:, first:last])


def first_states(states: Tensor, lanes: Tensor, starts: Tensor, target: Tensor) -> None:
    """``target[l, s] = states[starts[s], l, lanes[s]]`` for states ``[steps, layers, lanes, hidden]``."""
    target.copy_(_signed(states)[starts, :, lanes].view(states.dtype).transpose(0, 1))


def tabulate_trajectories(dones: Tensor, width: int, table: Tensor, totals: Tensor) -> None:
    """Where the trajectories of each mini-batch of ``width`` lanes are, lane by lane."""
    for batch in range(totals.shape[0]):
        first, last = batch * width, (batch + 1) * width
        found = torch.empty((3, count_segments(dones, first, last)), dtype=torch.int64, device=dones.device)
        split_segments(dones, first, last, *found)
        table[:, first * dones.shape[0] :][:, : found.shape[1]] = found
        totals[batch] = found.shape[1]


def fill_trajectories(
    padded: tuple[Tensor, ...], states: tuple[Tensor, ...], copied: tuple[Tensor, ...], table: Tensor, totals: Tensor,
    batch: int, width: int, targets: tuple[Tensor, ...], mask: Tensor,
) -> None:  # fmt: skip
    """The tensors of one recurrent mini-batch, from the table of :func:`tabulate_trajectories`."""
    steps, count = mask.shape[0], min(int(totals[batch]), mask.shape[1])
    lanes, starts, lengths = table[:, batch * width * steps :][:, :count].long()
    for target in (*targets[: len(padded) + len(states)], mask):
        _signed(target[:, count:]).zero_()
    there = [target[:, :count] for target in targets]
    pad_segments(padded, lanes, starts, lengths, tuple(there[: len(padded)]), mask[:, :count])
    for state, target in zip(states, there[len(padded) :], strict=False):
        first_states(state, lanes, starts, target)
    copy_lanes(copied, batch * width, (batch + 1) * width, targets[len(padded) + len(states) :])
