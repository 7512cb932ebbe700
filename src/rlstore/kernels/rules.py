"""Which values a field may hold."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# Pairs (low, high) of whole numbers: one for all entries of a lane, or one for each. Without pairs: any finite number.
Rule = tuple[tuple[int, int], ...]
FINITE: Rule = ()
NO_RULES: Mapping[int, Rule] = MappingProxyType({})  # by the index of a field

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch cannot compare


def are_priorities(rows: Any, priorities: Any, device: torch.device) -> bool:
    """True for rows int64 ``[n]`` and priorities float32 ``[n]`` or ``[n, 1]`` that can be used as they are."""
    if not (_is_plain(rows, torch.int64, device) and _is_plain(priorities, torch.float32, device)):
        return False
    shape, count = priorities.shape, len(rows)
    return bool(rows.dim() == 1 and (shape == (count,) or shape == (count, 1)))


def _is_plain(given: Any, dtype: torch.dtype, device: torch.device) -> bool:
    if type(given) is not Tensor or given.dtype is not dtype or given.device != device or given.dim() == 0:
        return False
    is_apart = not (given.is_neg() or given.requires_grad)
    has_memory = given.numel() == 0 or given.untyped_storage().data_ptr() != 0
    return is_apart and has_memory and given.is_contiguous()


def obeys(values: Tensor, rule: Rule) -> Tensor:
    """True for each of the values ``[lanes, ...]`` that the rule allows."""
    if rule == FINITE:
        return values.isfinite()
    values = values.long() if values.dtype in _UNSIGNED else values
    low, high = torch.tensor(rule, device=values.device).unbind(1)
    if len(rule) > 1:
        low, high = low.view(values.shape[1:]), high.view(values.shape[1:])
    within = (values >= low) & (values <= high)
    return within & (values == values.floor()) if values.dtype.is_floating_point else within


def invalid_counts(writer: Any) -> Tensor | None:
    """The invalid rewards and actions that a kernel has written, int64 ``[2]``; None if it refuses them."""
    counted: Tensor | None = getattr(writer, "invalid", None)
    return counted
