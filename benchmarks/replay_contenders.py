"""What workloads with replay share: a contender that draws batches, the floor under it, and how memory behaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from benchmarks.harness import Contender
from benchmarks.replay_buffers import Buffer, Loop


class Sampling(Contender):
    """A full buffer that batches are drawn from."""

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
    """The floor: the bytes of each call, copied flat between tensors that exist already."""

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
    """Let malloc keep blocks of up to 31 MiB when they are freed, for all contenders alike.

    glibc gives large blocks back to the system at once until it has seen one of that size freed, which in a training
    process is soon. Here it would depend on the order of the contenders whether a batch of pixels pays for new pages,
    and that takes longer than to copy it.
    """
    np.ones(31 << 20, dtype=np.uint8)
