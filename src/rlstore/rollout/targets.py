"""Whether somebody has written the returns and advantages of a rollout, of all of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.rows.ring import Ring


class Targets:
    """The blocks that are computed from a rollout: NaN from its first step on, until somebody writes them.

    The storage writes them, of the steps that there are then. Those of a step that is added later are missing, until
    they are written too.

    A program may write them as well, into the attributes or in place of them. Torch counts the changes of a tensor.
    Where it has counted none (it does not see a write through numpy, or by a CUDA graph), and of a step that was added
    later, the data tell; on CUDA the host waits for them then.

    Args:
        names: The names of the blocks.

    Attributes:
        computed: The steps of this rollout of which the storage has written them last; 0 if it has not.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.computed = 0
        # The blocks, each with the changes that torch had counted when it was filled. Empty: they were written since.
        # None: unknown, as in a copy, whose tensors count for themselves.
        self._filled: list[tuple[Tensor, int]] | None = []

    def blank(self, ring: Ring) -> None:
        """The first step of a rollout was added: fill the blocks with NaN."""
        self.computed = 0
        blocks = self._blocks(ring)
        if not blocks or (blocks[0].is_cuda and self._are_untouched(blocks)):  # no launch for what is NaN already
            return
        for block in blocks:
            (block.detach() if block.requires_grad else block).fill_(torch.nan)
        self._filled = [(block, block._version) for block in blocks]

    def were_computed(self, ring: Ring) -> None:
        """The storage has written the blocks of all steps that are held, by a kernel, which torch does not see."""
        self._filled, self.computed = [], ring.size

    def came_from_elsewhere(self, computed: int = 0) -> None:
        """The blocks were copied from somewhere: the data tell whether they were ever written."""
        self._filled, self.computed = None, computed

    def are_missing(self, ring: Ring) -> bool:
        """True if nobody has written them since the first step of the rollout, or since a step was added to it."""
        blocks = self._blocks(ring)
        if not blocks or self.computed == ring.size:
            return False
        if not self.computed and self._filled is not None and not self._are_untouched(blocks):
            return False
        if ring.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        first = ring.size - 1 if self.computed else 0  # of steps that were added, the newest stands for all
        return all(bool(block[first : ring.size].isnan().all()) for block in blocks)

    def _blocks(self, ring: Ring) -> list[Tensor]:
        return [ring.blocks[name] for name in self._names]

    def _are_untouched(self, blocks: Sequence[Tensor]) -> bool:
        filled = self._filled or ()
        return len(filled) == len(blocks) and all(
            block is was and block._version == version for block, (was, version) in zip(blocks, filled, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_filled": None}
