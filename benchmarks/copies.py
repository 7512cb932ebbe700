"""The floor under replay: the bytes of each call, copied flat between tensors that exist already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.harness import Contender


class Copies(Contender):
    """A flat copy for each phase."""

    role = "floor"

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Take the bytes of one call, and the number of calls, of each phase."""
        super().__init__("memcpy")
        self._phases = {name: partial(_copy, *_pair(size), calls) for name, (size, calls) in sizes.items()}

    def phases(self) -> Mapping[str, Callable[[], object]]:
        return self._phases


def _pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor, calls: int) -> None:
    copy = target.copy_
    for _ in range(calls):
        copy(source)
