"""Rows of rollouts, written and gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlstore.kernels.protocol import FLAG_DTYPES, Target
from rlstore.kernels.rules import NO_RULES, Rule, obeys


class RowWriter:
    """Writes one time row into several blocks, one copy after another."""

    def __init__(self, targets: Sequence[Target], rules: Mapping[int, Rule] = NO_RULES) -> None:
        self._targets, self._rules = list(targets), rules

    def write(self, row: int, values: tuple[Tensor | None, ...]) -> int:
        """Write, and return -1; or the index of the first value that does not fit as it is, having written nothing."""
        if len(values) != len(self._targets):
            raise ValueError("a row has one value for each field")
        for index, (value, (block, lead, is_flag, optional)) in enumerate(zip(values, self._targets, strict=True)):
            if value is None and optional:
                continue
            if row + lead >= block.shape[0]:
                raise IndexError("a row beyond the end of its block")
            if not self._fits(value, block, is_flag):
                return index
        for index, rule in self._rules.items():
            value, shape = values[index], self._targets[index][0].shape[1:]
            if value is not None and not bool(obeys(value.detach().reshape(shape), rule).all()):
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
    """An epoch's rows as mini-batches in pieces of memory."""
    for index, own in enumerate(rows.chunk(len(pieces[0])) if sources else ()):
        used = [0] * len(pieces)
        for source, place in zip(sources, places, strict=True):
            count = own.shape[0] * source.shape[2:].numel()
            piece = pieces[place][index].view(-1)[used[place] : used[place] + count]
            gather((source,), own, (piece.view(own.shape[0], *source.shape[2:]),))
            used[place] += -(-count // 16) * 16


def permutation(keys: Tensor, held: int, rows: Tensor) -> None:
    """Row e of ``rows``: the first entries of the permutation of ``[0, held)`` that ``keys[e]`` gives."""
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
    """``targets[k][t, i] = sources[k][slots[i], t]``: the rollouts of some hand-off slots, side by side."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.index_select(0, slots).transpose(0, 1).reshape(target.shape))
