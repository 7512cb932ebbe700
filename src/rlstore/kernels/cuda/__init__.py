"""The operations on CUDA, in Triton: each has the signature of its reference, and agrees with it (``tests/cuda``).

Imported when something on CUDA is first asked for, and only where Triton is installed. Files named ``*_kernels`` hold
what runs on the device; the file of the same name without it says how it is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstore.kernels.cuda.replay_gather import ReplayGather
from rlstore.kernels.cuda.replay_priorities import Priorities
from rlstore.kernels.cuda.replay_ring import EpisodeRing
from rlstore.kernels.cuda.rows import RowWriter
from rlstore.kernels.cuda.scans import discounted_returns, fill_gae, gae, n_step_returns, normalize, vtrace

OPERATIONS: dict[str, Callable[..., Any]] = {
    "EpisodeRing": EpisodeRing,
    "Priorities": Priorities,
    "ReplayGather": ReplayGather,
    "RowWriter": RowWriter,
    "discounted_returns": discounted_returns,
    "fill_gae": fill_gae,
    "gae": gae,
    "n_step_returns": n_step_returns,
    "normalize": normalize,
    "vtrace": vtrace,
}
