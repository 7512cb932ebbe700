"""The operations on CUDA, in Triton: each has the signature of its reference, and agrees with it (``tests/cuda``).

Imported when something on CUDA is first asked for, and only where Triton is installed. Files named ``*_kernels`` hold
what runs on the device; the file of the same name without it says how it is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstore.kernels.cuda import (
    gather,
    replay_gather,
    replay_priorities,
    replay_ring,
    replay_windows,
    rows,
    scans,
    segments,
)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "EpisodeRing": replay_ring.EpisodeRing,
    "Priorities": replay_priorities.Priorities,
    "ReplayGather": replay_gather.ReplayGather,
    "RowWriter": rows.RowWriter,
    "WindowIndex": replay_windows.WindowIndex,
    "discounted_returns": scans.discounted_returns,
    "fill_gae": scans.fill_gae,
    "fill_trajectories": segments.fill_trajectories,
    "gae": scans.gae,
    "gather": gather.gather,
    "gather_batches": gather.gather_batches,
    "n_step_returns": scans.n_step_returns,
    "normalize": scans.normalize,
    "permutation": gather.permutation,
    "tabulate_trajectories": segments.tabulate_trajectories,
    "vtrace": scans.vtrace,
}
