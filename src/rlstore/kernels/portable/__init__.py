"""The operations in plain torch, for any device: used where a device has no kernels of its own.

They implement :mod:`rlstore.kernels.protocol` to the last bit as the native version does, and may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstore.kernels.portable import draws, episodes, replay_gather, rows, scans, segments

OPERATIONS: dict[str, Callable[..., Any]] = {
    "RowWriter": rows.RowWriter,
    "EpisodeRing": episodes.EpisodeRing,
    "ReplayGather": replay_gather.ReplayGather,
    "WindowIndex": draws.WindowIndex,
    "Priorities": draws.Priorities,
    "draw_units": draws.draw_units,
    "gather": rows.gather,
    "gather_batches": rows.gather_batches,
    "permutation": rows.permutation,
    "gather_slots": rows.gather_slots,
    "gae": scans.gae,
    "fill_gae": scans.fill_gae,
    "discounted_returns": scans.discounted_returns,
    "n_step_returns": scans.n_step_returns,
    "vtrace": scans.vtrace,
    "normalize": scans.normalize,
    "count_segments": segments.count_segments,
    "split_segments": segments.split_segments,
    "pad_segments": segments.pad_segments,
    "copy_lanes": segments.copy_lanes,
    "first_states": segments.first_states,
    "tabulate_trajectories": segments.tabulate_trajectories,
    "fill_trajectories": segments.fill_trajectories,
}
