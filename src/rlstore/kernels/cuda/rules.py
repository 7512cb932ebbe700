"""Values that break the rule of their field: counted by the kernels that write them, reported by a later write."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlstore.kernels.rules import FINITE, Rule

# The rule of a field, as a kernel knows it.
_ANY, _FINITE, _WITHIN = 0, 1, 2
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def count_invalid(counts, value, entry, inside, limits, RULE: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr):
    """Add to ``counts[0]`` the values that are not finite, or to ``counts[1]`` those outside of their bounds.

    ``entry`` is the place of each value among those of its lane.
    """
    if RULE == 1:
        bits = value.to(tl.int32, bitcast=True)
        bad = inside & ((bits & _EXPONENT) == _EXPONENT)
    else:
        place = limits + 2 * (FIRST + entry % PAIRS)
        low, high = tl.load(place), tl.load(place + 1)
        if value.dtype.is_floating():
            fits = (value >= low.to(value.dtype)) & (value <= high.to(value.dtype)) & (tl.floor(value) == value)
        else:
            fits = (value.to(tl.int64) >= low) & (value.to(tl.int64) <= high)
        bad = inside & (fits == 0)
    number = tl.sum(bad.to(tl.int64))
    tl.atomic_add(counts + RULE - 1, number, mask=number > 0, sem="relaxed")


class RuleTable(NamedTuple):
    """The rules of some fields: bounds on the device, and constants of a kernel, one for each field."""

    limits: Tensor  # int64 [pairs, 2]
    kinds: tuple[int, ...]
    firsts: tuple[int, ...]
    pairs: tuple[int, ...]


def rule_table(rules: Mapping[int, Rule], count: int, device: torch.device) -> RuleTable:
    """The rules of ``count`` fields, by their index."""
    kinds, firsts, pairs = [_ANY] * count, [0] * count, [1] * count
    limits: list[tuple[int, int]] = []
    for index, rule in rules.items():
        kinds[index] = _FINITE if rule == FINITE else _WITHIN
        firsts[index], pairs[index] = len(limits), max(len(rule), 1)
        limits.extend(rule)
    with torch.inference_mode(False):
        table = torch.tensor(limits or [(0, 0)], dtype=torch.int64, device=device)
    return RuleTable(table, tuple(kinds), tuple(firsts), tuple(pairs))


class Report:
    """Warns of counts that have grown; a count is named once."""

    def __init__(self) -> None:
        self._told = (0, 0)
        self._found = (0, 0)

    def find(self, nonfinite: int, outside: int) -> None:
        """The counts on the device, as the host knows them now."""
        self._found = (nonfinite, outside)

    def tell(self) -> None:
        """Warn, if there is anything new."""
        if self._found == self._told:
            return
        new = [found - told for found, told in zip(self._found, self._told, strict=True)]
        self._told = self._found
        names = ("rewards that are not finite", "actions outside of their space")
        found = " and ".join(f"{count} {name}" for count, name in zip(new, names, strict=True) if count)
        warnings.warn(
            f"{found} were stored by earlier steps, and will be served. On CUDA values are counted and not refused. "
            "Fix them where they come from; allow_nonfinite_rewards=True stores rewards without a look at them.",
            RuntimeWarning,
            stacklevel=2,
        )


def is_done(event: Any) -> bool:
    """Whether the device has come to an event; None is one that is done.

    Raises:
        RuntimeError: While a CUDA graph is captured, which nobody may ask in.
    """
    try:
        return event is None or bool(event.query())
    except RuntimeError as error:
        if not torch.cuda.is_current_stream_capturing():
            raise
        raise RuntimeError(
            "adding to a storage cannot be captured in a CUDA graph. Add before the capture, and between replays; "
            "returns, batches, draws and updates can be captured."
        ) from error


class Counts:
    """The counts of a kernel that writes rollouts, read by the host without a wait: a rollout later.

    Args:
        device: Where the counts are.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self.memory = torch.zeros(2, dtype=torch.int64, device=device)
            self._seen = torch.zeros(2, dtype=torch.int64, pin_memory=on_cuda)
        self._event: Any = torch.cuda.Event() if on_cuda else None
        self._looking = False
        self._report = Report()

    def look(self) -> None:
        """Report what the last look has found, if its copy is done, and begin another one."""
        if self._looking:
            if not is_done(self._event):
                return
            self._looking = False
            self._report.find(*self._seen.tolist())
            self._report.tell()
        self._seen.copy_(self.memory, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self.memory.device))
        self._looking = True
