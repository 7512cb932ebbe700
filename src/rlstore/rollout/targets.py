"""Whether anybody has written the returns and advantages of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.rows.ring import Ring


class Targets:
    """The blocks that are computed from a rollout: NaN from its start until somebody writes them.

    They are written by the storage, or by a program, into the attributes or in place of them. Torch counts the changes
    of a tensor, so that nothing has to be read. What it cannot count (a write through numpy, a CUDA graph) is found in
    the data on the CPU; on CUDA, once a graph computes targets, they count as written.

    Args:
        names: The names of the blocks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        # The blocks as they were filled, with the changes that torch had counted. Empty: they were written since. None:
        # only the data can tell, as after a copy.
        self._filled: list[tuple[Tensor, int]] | None = []
        self._in_graph = False

    def blank(self, ring: Ring) -> None:
        """Fill the blocks with NaN. On CUDA there is no launch for those that are still as they were filled."""
        blocks = [ring.blocks[name] for name in self._names]
        if ring.device.type == "cpu" or not self._is_untouched(blocks):
            with torch.no_grad():
                for block in blocks:
                    block.detach().fill_(torch.nan)
        self._filled = [(block, block._version) for block in blocks]

    def were_computed(self) -> None:
        """The storage has written the blocks."""
        self._filled = []
        self._in_graph = self._in_graph or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

    def may_be_written(self) -> None:
        """The blocks were filled from elsewhere: the data tell."""
        self._filled = None

    def are_missing(self, ring: Ring, rows: int) -> bool:
        """True if nobody has written the first ``rows`` of any of the blocks."""
        blocks = [ring.blocks[name] for name in self._names]
        if self._filled == [] or self._in_graph or (self._filled is not None and not self._is_untouched(blocks)):
            return False
        if self._filled is not None and ring.device.type != "cpu":
            return True
        return all(bool(block[:rows].isnan().all()) for block in blocks)

    def _is_untouched(self, blocks: Sequence[Tensor]) -> bool:
        filled = self._filled or ()
        return len(filled) == len(blocks) and all(
            block is was and block._version == version for block, (was, version) in zip(blocks, filled, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a tensor counts its own changes.
        return {**self.__dict__, "_filled": None if self._filled else self._filled}
