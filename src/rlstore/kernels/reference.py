"""Every operation in plain torch, on any device: the truth that each faster kernel is tested against.

The end of an episode means the same in every scan here:

- terminated: no bootstrap, and nothing flows in from later steps;
- truncated and not terminated: bootstrap from ``final_values``, and nothing flows in from later steps; where the final
  value is not known (``final_values`` is None, or NaN there) the target of the step is its own value;
- neither: bootstrap from the next step's value; after the last step from ``last_values``.

Shapes: ``[steps, lanes]``, ``last_values`` ``[lanes]``, each with or without a trailing dimension of 1. Flags are
one-byte tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# What a flag may be given as.
FLAG_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64)


class RowWriter:
    """Writes one time row into several blocks ``[rows, ...]`` at once, or into none of them.

    Each target is ``(block, lead, is_flag, optional)``: a value given for row t goes to ``block[t + lead]``, and None
    may be given for an optional one.
    """

    def __init__(self, targets: Sequence[tuple[Tensor, int, bool, bool]]) -> None:
        self._targets = list(targets)

    def write(self, row: int, values: tuple[Tensor | None, ...]) -> int:
        """Write, and return -1; or the index of the first value that does not fit as it is, having written nothing.

        None leaves an optional field's row as it was.
        """
        if len(values) != len(self._targets):
            raise ValueError("a row has one value for each field")
        for index, (value, (block, lead, is_flag, optional)) in enumerate(zip(values, self._targets, strict=True)):
            if value is None and optional:
                continue
            if row + lead >= block.shape[0]:
                raise IndexError("a row beyond the end of its block")
            if not self._fits(value, block, is_flag):
                return index
        for value, (block, lead, is_flag, _) in zip(values, self._targets, strict=True):
            if value is not None:
                target = block[row + lead]
                target.copy_((value != 0 if is_flag else value).detach().reshape(target.shape))
        return -1

    @staticmethod
    def _fits(value: object, block: Tensor, is_flag: bool) -> bool:
        if not isinstance(value, Tensor) or value.device != block.device:
            return False
        if is_flag:
            same_type = value.dtype in FLAG_DTYPES and not (value.dtype.is_floating_point and bool(value.isnan().any()))
        else:
            same_type = value.dtype == block.dtype
        given, held = value.shape, block.shape[1:]
        scalar_rows = ((held[0],), (held[0], 1)) if len(held) else ()
        same_shape = given == held or (given in scalar_rows and held in scalar_rows)
        return same_type and same_shape and (value.is_contiguous() or not is_flag)


def gather(sources: tuple[Tensor, ...], rows: Tensor, targets: tuple[Tensor, ...]) -> None:
    """``targets[k][i] = sources[k].flatten(0, 1)[rows[i]]``, converted to the target's dtype."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.flatten(0, 1).index_select(0, rows))


def gather_batches(
    sources: tuple[Tensor, ...], rows: Tensor, places: tuple[int, ...], pieces: Sequence[Sequence[Tensor]]
) -> None:
    """:func:`gather` of an epoch's rows ``[batches * size]``, as mini-batches in pieces of memory.

    Mini-batch b has the fields f with ``places[f] == p`` in ``pieces[p][b]``, which is flat and of the dtype to serve:
    one field ``[size, ...]`` after another, each beginning at a multiple of 16 entries.
    """
    for index, own in enumerate(rows.chunk(len(pieces[0])) if sources else ()):
        used = [0] * len(pieces)
        for source, place in zip(sources, places, strict=True):
            count = own.shape[0] * source.shape[2:].numel()
            piece = pieces[place][index].view(-1)[used[place] : used[place] + count]
            gather((source,), own, (piece.view(own.shape[0], *source.shape[2:]),))
            used[place] += -(-count // 16) * 16


def permutation(keys: Tensor, held: int, rows: Tensor) -> None:
    """Row e of ``rows``, int64 ``[epochs, wanted]``: the first entries of a permutation of ``[0, held)``, ``keys[e]``.

    A Feistel network of six rounds shuffles ``[0, 2**bits)``, the smallest such range that holds them and is no smaller
    than 64; what falls outside of ``[0, held)`` is shuffled again until it falls inside. Keys are any int64; equal keys
    give equal permutations.
    """
    bits = max(6, (held - 1).bit_length())
    half, word = bits // 2, 0xFFFFFFFF
    low, high = keys[:, None] & word, (keys[:, None] >> 32) & word

    def mixed(x: Tensor, key: Tensor) -> Tensor:
        x = ((x ^ key) * 0x5BD1E995) & word
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & word
        return x ^ (x >> 16)

    def shuffled(x: Tensor) -> Tensor:
        left, right = x >> half, x & ((1 << half) - 1)
        for r in range(3):
            left = (left ^ mixed(right, (low + r * 0x13C6EF36) & word)) & ((1 << bits - half) - 1)
            right = (right ^ mixed(left, (high + r * 0x13C6EF36) & word)) & ((1 << half) - 1)
        return (left << half) | right

    x = shuffled(torch.arange(rows.shape[1], device=rows.device).expand(rows.shape))
    while bool((x >= held).any()):
        x = torch.where(x >= held, shuffled(x), x)
    rows.copy_(x)


def gather_slots(sources: tuple[Tensor, ...], slots: Tensor, targets: tuple[Tensor, ...]) -> None:
    """``targets[k][t, i] = sources[k][slots[i], t]``: the rollouts of some slots, side by side."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.index_select(0, slots).transpose(0, 1).reshape(target.shape))


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
    """:func:`gae` from flags of any dtype; with an ``epsilon`` the advantages are normalised, a single one to 0.

    With ``dones``, ``terminated`` tells of every end, and those that ``truncated`` tells of too were only cut off.
    """
    if dones and truncated is not None:
        terminated = (terminated != 0) & (truncated == 0)
    gae(rewards, values, last_values, terminated, truncated, final_values, gamma, lam, advantages, returns)
    if epsilon is not None and advantages.numel() < 2:
        advantages.zero_()
    elif epsilon is not None:
        normalize(advantages, epsilon)


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
    ends = _Ends(rewards, terminated, truncated, final_values)
    after = last_values.reshape(rewards.shape[1:])
    for t in reversed(range(rewards.shape[0])):
        after = torch.where(ends.unknown[t], rewards[t], rewards[t] + gamma * ends.bootstrap(t, after))
        returns[t] = after


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
    ends, values = _Ends(rewards, terminated, truncated, final_values), values.reshape(rewards.shape)
    steps = rewards.shape[0]
    for start in range(steps):
        stop = min(start + n, steps)
        after = values[stop] if stop < steps else last_values.reshape(rewards.shape[1:])
        for t in reversed(range(start, stop)):
            after = torch.where(ends.unknown[t], values[t], rewards[t] + gamma * ends.bootstrap(t, after))
        returns[start] = after


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


def count_segments(dones: Tensor, first: int, last: int) -> int:
    """How many trajectories the lanes ``[first, last)`` of ``dones`` fall into."""
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


# Not every torch can fill the unsigned types; their zero is the same in the signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def pad_segments(
    sources: tuple[Tensor, ...],
    lanes: Tensor,
    starts: Tensor,
    lengths: Tensor,
    targets: tuple[Tensor, ...],
    mask: Tensor,
) -> None:
    """``target[t, s] = source[starts[s] + t, lanes[s]]`` within the trajectory, else zeros; and the mask of it."""
    t = torch.arange(mask.shape[0], device=mask.device)[:, None]
    inside = t < lengths
    mask.copy_(inside)
    for source, target in zip(sources, targets, strict=True):
        picked = source[(starts + t).clamp(max=max(source.shape[0] - 1, 0)), lanes]
        target.copy_(picked)
        target.view(_SIGNED.get(target.dtype, target.dtype))[~inside] = 0


def copy_lanes(sources: tuple[Tensor, ...], first: int, last: int, targets: tuple[Tensor, ...]) -> None:
    """``target[t, i] = source[t, first + i]`` for the lanes ``[first, last)``."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source[:, first:last])


def first_states(states: Tensor, lanes: Tensor, starts: Tensor, target: Tensor) -> None:
    """``target[l, s] = states[starts[s], l, lanes[s]]`` for states ``[steps, layers, lanes, hidden]``."""
    target.copy_(states[starts, :, lanes].transpose(0, 1))


def tabulate_trajectories(dones: Tensor, width: int, table: Tensor, totals: Tensor) -> None:
    """Where the trajectories of each mini-batch of ``width`` lanes are, lane by lane.

    Args:
        dones: ``[steps, lanes]``, perhaps with a trailing dimension of 1.
        width: Mini-batch b has the lanes from ``b * width`` on.
        table: int32 ``[3, batches * width * steps]``: lane, first step and length of each trajectory. Mini-batch b has
            its own from ``b * width * steps`` on; what is left is not written.
        totals: int32 ``[batches]``: how many they are.
    """
    for batch in range(totals.shape[0]):
        first, last = batch * width, (batch + 1) * width
        found = torch.empty((3, count_segments(dones, first, last)), dtype=torch.int64, device=dones.device)
        split_segments(dones, first, last, *found)
        table[:, first * dones.shape[0] :][:, : found.shape[1]] = found
        totals[batch] = found.shape[1]


def fill_trajectories(
    padded: tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    copied: tuple[Tensor, ...],
    table: Tensor,
    totals: Tensor,
    batch: int,
    width: int,
    targets: tuple[Tensor, ...],
    mask: Tensor,
) -> None:
    """The tensors of a mini-batch of which :func:`tabulate_trajectories` has told where its trajectories are.

    Args:
        padded: What :func:`pad_segments` is to pad.
        states: What :func:`first_states` is to pick from.
        copied: What :func:`copy_lanes` is to copy.
        table: As for :func:`tabulate_trajectories`, and so totals.
        totals: How many trajectories the mini-batches have.
        batch: Which mini-batch.
        width: Its lanes.
        targets: Where to, in this order.
        mask: bool ``[steps, trajectories]``. Where there is room for more than there are, the rest is padding; where
            there is room for fewer, the last ones are left out.
    """
    steps, count = mask.shape[0], min(int(totals[batch]), mask.shape[1])
    lanes, starts, lengths = table[:, batch * width * steps :][:, :count].long()
    for target in (*targets[: len(padded) + len(states)], mask):
        target[:, count:].view(_SIGNED.get(target.dtype, target.dtype)).zero_()
    there = [target[:, :count] for target in targets]
    pad_segments(padded, lanes, starts, lengths, tuple(there[: len(padded)]), mask[:, :count])
    for state, target in zip(states, there[len(padded) :], strict=False):
        first_states(state, lanes, starts, target)
    copy_lanes(copied, batch * width, (batch + 1) * width, targets[len(padded) + len(states) :])
