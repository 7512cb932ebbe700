"""Whether anybody has written the returns and advantages of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.rows.ring import Ring


class Targets:
    """The blocks that are computed from a rollout: NaN from its first step on, until somebody writes them.

    They are written by the storage, or by a program, into the attributes or in place of them. Torch counts the changes
    of a tensor. Where it has counted none (it does not see a write through numpy, or by a CUDA graph) the data tell;
    on CUDA the host waits for them then.

    Args:
        names: The names of the blocks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        # The blocks, each with the changes that torch had counted when it was filled. Empty: they were written since.
        # None: unknown, as in a copy, whose tensors count for themselves.
        self._filled: list[tuple[Tensor, int]] | None = []

    def blank(self, ring: Ring) -> None:
        """The first step of a rollout was added: fill the blocks with NaN."""
        blocks = self._blocks(ring)
        if not blocks or (blocks[0].is_cuda and self._are_untouched(blocks)):  # no launch for what is NaN already
            return
        for block in blocks:
            (block.detach() if block.requires_grad else block).fill_(torch.nan)
        self._filled = [(block, block._version) for block in blocks]

    def were_computed(self) -> None:
        """The storage has written the blocks, by a kernel, which torch does not see."""
        self._filled = []

    def came_from_elsewhere(self) -> None:
        """The blocks were copied from somewhere: the data tell whether they were ever written."""
        self._filled = None

    def are_missing(self, ring: Ring) -> bool:
        """True if nobody has written any of the blocks since the first step of the rollout."""
        blocks = self._blocks(ring)
        if not blocks or (self._filled is not None and not self._are_untouched(blocks)):
            return False
        if ring.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        return all(bool(block[: ring.size].isnan().all()) for block in blocks)

    def _blocks(self, ring: Ring) -> list[Tensor]:
        return [ring.blocks[name] for name in self._names]

    def _are_untouched(self, blocks: Sequence[Tensor]) -> bool:
        filled = self._filled or ()
        return len(filled) == len(blocks) and all(
            block is was and block._version == version for block, (was, version) in zip(blocks, filled, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_filled": None}
