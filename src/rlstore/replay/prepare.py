"""How a batch of replay is prepared from what was drawn, in the calling thread or in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rlstore.engine.batches.staging import Casts, Staged
from rlstore.engine.batches.transitions import TransitionGather


class Drawn(NamedTuple):
    """What a batch is made of: the rows to gather, and what goes with them."""

    rows: Tensor
    weights: Tensor | None = None
    others: Tensor | None = None  # rows to gather something else from: where sequences begin, or goals come from


Prepared = tuple[Tensor, ...] | Staged


def prepare(
    gather: TransitionGather,
    gather_others: TransitionGather | None,
    casts: Casts,
    hand_over: Callable[[tuple[Tensor, ...], Casts], Prepared],
    drawn: Drawn,
) -> Prepared | None:
    """A batch's tensors, on the device or on their way to it. It knows nothing of the storage.

    None if rows were overwritten by other processes while they were read.

    Args:
        gather: What gathers the rows.
        gather_others: What gathers the other rows.
        casts: What each tensor is converted to afterwards.
        hand_over: What does it, and brings the tensors to the device.
        drawn: What was drawn.
    """
    tensors = gather.attempt(drawn.rows)
    if tensors is not None and gather_others is not None and drawn.others is not None:
        others = gather_others.attempt(drawn.others)
        tensors = None if others is None else (*tensors, *others)
    return None if tensors is None else hand_over(tensors, casts)
