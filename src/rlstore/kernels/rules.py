"""Which values a field may hold."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# Pairs (low, high) of whole numbers: one for all entries of a lane, or one for each. Without pairs: any finite number.
Rule = tuple[tuple[int, int], ...]
FINITE: Rule = ()
NO_RULES: Mapping[int, Rule] = MappingProxyType({})  # by the index of a field

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch cannot compare


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
