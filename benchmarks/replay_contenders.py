"""What the replay workloads share: a contender that samples batches, the memcpy floor, and the malloc setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from benchmarks.harness import Contender
from benchmarks.replay_buffers import Buffer, Loop


class Sampling(Contender):
    """A full buffer from which batches are drawn."""

    def __init__(self, name: str, make: Callable[[], Buffer], draws: Mapping[str, tuple[int, int]]) -> None:
        """Take, for each phase, the size of a batch and the number of batches."""
        super().__init__(name)
        self.buffer = make()
        self.role = self.buffer.role
        self.buffer.fill()
        self._loops = {phase: self.buffer.sampling(*draw) for phase, draw in draws.items()}
        self._largest = max(size for size, _ in draws.values())

    def phases(self) -> Mapping[str, Loop]:
        return self._loops

    def evidence(self) -> Mapping[str, torch.Tensor]:
        return self.buffer.drawn(self._largest)

    def rest(self) -> None:
        self.buffer.rest()

    def close(self) -> None:
        self.buffer.close()


class Copies(Contender):
    """The floor: a flat copy of the bytes of each call between preallocated tensors."""

    role = "floor"

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Take, for each phase, the bytes of a call and the number of calls."""
        super().__init__("memcpy")
        self._loops = {phase: partial(_copy, *_pair(size), calls) for phase, (size, calls) in sizes.items()}

    def phases(self) -> Mapping[str, Loop]:
        return self._loops


def _pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor, calls: int) -> None:
    copy = target.copy_
    for _ in range(calls):
        copy(source)


def keep_freed_memory() -> None:
    """Make malloc keep freed blocks of up to 31 MiB, for all contenders.

    glibc returns large blocks to the system immediately until a block of that size has been freed, which soon happens
    in a training process. Here the order of the contenders would decide whether a batch of pixels pays for new pages,
    which takes longer than copying it.
    """
    np.ones(31 << 20, dtype=np.uint8)
