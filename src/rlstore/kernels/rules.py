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
    if not all(
        type(value) is Tensor and value.device == device and value.is_contiguous() for value in (rows, priorities)
    ):
        return False
    is_apart = not (priorities.requires_grad or priorities.is_neg() or rows.is_neg())
    shapes = ((len(rows),), (len(rows), 1)) if rows.dim() == 1 else ()
    return is_apart and rows.dtype == torch.int64 and priorities.dtype == torch.float32 and priorities.shape in shapes


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
