"""Which implementation an operation has on which device: :func:`kernel` is the only dispatch.

Every operation of :mod:`rlstore.kernels.protocol` exists in plain torch (``portable``), for any device. On the CPU most
have a native version, on CUDA most have one in Triton; all have the signature of the protocol.

What processes do with words of shared memory (:class:`SlotTable`, :class:`Limiter`, ``exchange_word`` ...) is no
operation on tensors: it exists in C++ alone. So do :class:`Guard`, the lock of a storage, :class:`OutputPool`, memory
that serves again once no tensor uses it, :class:`RowReader`, which takes the values of a row from an object's
attributes, ``is_in_memory``, which is False for a tensor that has elements but no memory, ``join_flags``, which reads
the two end flags of a step, ``count_readable`` and ``kind_of``, which look at tensors in less time than Python,
``restore_tables``, which reads what came from a disk, ``crc32``, the same checksum as that of zlib, and
``instruction_set``, which names the version of the C++ that this CPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, overload

from rlstore.kernels import _native, portable, protocol
from rlstore.kernels._native import (
    Block,
    Guard,
    GuardBlock,
    Limiter,
    OutputPool,
    RowReader,
    SlotTable,
    add_to_word,
    await_event,
    count_readable,
    crc32,
    event_count,
    exchange_word,
    gather_at_once,
    instruction_set,
    is_in_memory,
    join_flags,
    kind_of,
    make_event,
    process_start,
    restore_tables,
    start_writeback,
)

__all__ = [
    "Block",
    "Guard",
    "GuardBlock",
    "Limiter",
    "OutputPool",
    "RowReader",
    "SlotTable",
    "add_to_word",
    "await_event",
    "count_readable",
    "crc32",
    "event_count",
    "exchange_word",
    "gather_at_once",
    "instruction_set",
    "is_in_memory",
    "join_flags",
    "kernel",
    "kind_of",
    "make_event",
    "process_start",
    "restore_tables",
    "start_writeback",
]

OLDEST_TRITON = (3, 4)  # that comes with torch 2.8; those before it refuse the kernels

# What a device has besides the portable version; that for CUDA is imported when it is first asked for.
_VERSIONS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "cpu": {
        "RowWriter": _native.RowWriter,
        "EpisodeRing": _native.EpisodeRing,
        "ReplayGather": _native.ReplayGather,
        "WindowIndex": _native.WindowIndex,
        "Priorities": _native.Priorities,
        "draw_units": _native.draw_units,
        "gather": _native.gather,
        "gather_slots": _native.gather_slots,
        "gae": _native.gae,
        "fill_gae": _native.fill_gae,
        "discounted_returns": _native.discounted_returns,
        "n_step_returns": _native.n_step_returns,
        "vtrace": _native.vtrace,
        "normalize": _native.normalize,
        "count_segments": _native.count_segments,
        "split_segments": _native.split_segments,
        "pad_segments": _native.pad_segments,
        "copy_lanes": _native.copy_lanes,
        "first_states": _native.first_states,
    }
}


@overload
def kernel(operation: Literal["RowWriter"], device_type: str) -> type[protocol.RowWriter]: ...
@overload
def kernel(operation: Literal["EpisodeRing"], device_type: str) -> type[protocol.EpisodeRing]: ...
@overload
def kernel(operation: Literal["ReplayGather"], device_type: str) -> type[protocol.ReplayGather]: ...
@overload
def kernel(operation: Literal["WindowIndex"], device_type: str) -> type[protocol.WindowIndex]: ...
@overload
def kernel(operation: Literal["Priorities"], device_type: str) -> type[protocol.Priorities]: ...
@overload
def kernel(operation: Literal["draw_units"], device_type: str) -> protocol.DrawUnits: ...
@overload
def kernel(operation: Literal["gather"], device_type: str) -> protocol.Gather: ...
@overload
def kernel(operation: Literal["gather_batches"], device_type: str) -> protocol.GatherBatches: ...
@overload
def kernel(operation: Literal["permutation"], device_type: str) -> protocol.Permutation: ...
@overload
def kernel(operation: Literal["gather_slots"], device_type: str) -> protocol.GatherSlots: ...
@overload
def kernel(operation: Literal["gae"], device_type: str) -> protocol.Gae: ...
@overload
def kernel(operation: Literal["fill_gae"], device_type: str) -> protocol.FillGae: ...
@overload
def kernel(operation: Literal["discounted_returns"], device_type: str) -> protocol.DiscountedReturns: ...
@overload
def kernel(operation: Literal["n_step_returns"], device_type: str) -> protocol.NStepReturns: ...
@overload
def kernel(operation: Literal["vtrace"], device_type: str) -> protocol.Vtrace: ...
@overload
def kernel(operation: Literal["normalize"], device_type: str) -> protocol.Normalize: ...
@overload
def kernel(operation: Literal["count_segments"], device_type: str) -> protocol.CountSegments: ...
@overload
def kernel(operation: Literal["split_segments"], device_type: str) -> protocol.SplitSegments: ...
@overload
def kernel(operation: Literal["pad_segments"], device_type: str) -> protocol.PadSegments: ...
@overload
def kernel(operation: Literal["copy_lanes"], device_type: str) -> protocol.CopyLanes: ...
@overload
def kernel(operation: Literal["first_states"], device_type: str) -> protocol.FirstStates: ...
@overload
def kernel(operation: Literal["tabulate_trajectories"], device_type: str) -> protocol.TabulateTrajectories: ...
@overload
def kernel(operation: Literal["fill_trajectories"], device_type: str) -> protocol.FillTrajectories: ...


def kernel(operation: str, device_type: str) -> Any:
    """The implementation of ``operation`` for tensors on ``device_type`` ("cpu", "cuda", ...)."""
    version = _cuda() if device_type == "cuda" else _VERSIONS.get(device_type, {})
    return version.get(operation) or portable.OPERATIONS[operation]


@cache
def _cuda() -> Mapping[str, Callable[..., Any]]:
    """The operations in Triton, which comes with torch for CUDA; none where it is not installed, or too old."""
    try:
        from triton import __version__
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return {}
    if tuple(map(int, __version__.split(".")[:2])) < OLDEST_TRITON:
        return {}
    from rlstore.kernels import cuda

    return cuda.OPERATIONS
