"""The operations in Triton, for CUDA: they implement :mod:`rlstore.kernels.protocol` without waiting for the device.

Imported when something on CUDA is first asked for, and only where Triton is installed. A file has the kernels of an
operation and, below them, the code that launches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstore.kernels.cuda import gather, priorities, replay_gather, ring, rows, scans, segments, windows

OPERATIONS: dict[str, Callable[..., Any]] = {
    "RowWriter": rows.RowWriter,
    "EpisodeRing": ring.EpisodeRing,
    "ReplayGather": replay_gather.ReplayGather,
    "WindowIndex": windows.WindowIndex,
    "Priorities": priorities.Priorities,
    "gather": gather.gather,
    "gather_batches": gather.gather_batches,
    "permutation": gather.permutation,
    "gae": scans.gae,
    "fill_gae": scans.fill_gae,
    "discounted_returns": scans.discounted_returns,
    "n_step_returns": scans.n_step_returns,
    "vtrace": scans.vtrace,
    "normalize": scans.normalize,
    "tabulate_trajectories": segments.tabulate_trajectories,
    "fill_trajectories": segments.fill_trajectories,
}
