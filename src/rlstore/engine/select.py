"""Which rows. Selectors see counts and a generator, never data."""

from __future__ import annotations

import torch
from torch import Tensor


def epoch_rows(held: int, wanted: int, generator: torch.Generator, *, shuffle: bool = True) -> Tensor:
    """``wanted`` of the ``held`` rows for one epoch, none twice: int64 ``[wanted]``.

    Shuffled, any row may be among those left out; in order, the last ones are.
    """
    if not shuffle:
        return torch.arange(wanted, device=generator.device)
    return torch.randperm(held, generator=generator, device=generator.device)[:wanted]
