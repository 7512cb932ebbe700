"""Which implementation an operation has on which device: the dispatch is this table and, for CUDA, kernels.cuda.

Every operation exists in one of the modules named reference, in plain torch, for any device. Where a faster version is
listed it has the same signature and agrees with the reference (``tests/kernels``, ``tests/cuda``), except that kernels
for CUDA do not look at values: see docs/cuda.md. All of them write into tensors that the caller gives.

What processes do with words of shared memory (:class:`SlotTable`, :class:`Limiter`, ``exchange_word`` ...) is no
operation on tensors: it exists in C++ alone, and is tested against models of what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, overload

from rlstore.kernels import _native, draws_reference, gather_reference, protocol, reference, replay_reference
from rlstore.kernels._native import (
    Limiter,
    SlotTable,
    add_to_word,
    await_event,
    event_count,
    exchange_word,
    make_event,
    process_start,
)

__all__ = [
    "OPERATIONS",
    "REFERENCES",
    "Limiter",
    "SlotTable",
    "add_to_word",
    "await_event",
    "event_count",
    "exchange_word",
    "kernel",
    "make_event",
    "process_start",
    "reference_of",
]

_TABLE: dict[str, dict[str, Callable[..., Any]]] = {
    "RowWriter": {"cpu": _native.RowWriter},
    "EpisodeRing": {"cpu": _native.EpisodeRing},
    "ReplayGather": {"cpu": _native.ReplayGather},
    "WindowIndex": {"cpu": _native.WindowIndex},
    "Priorities": {"cpu": _native.Priorities},
    "draw_units": {"cpu": _native.draw_units},
    "gather": {"cpu": _native.gather},
    "gather_batches": {},
    "permutation": {},
    "gather_slots": {"cpu": _native.gather_slots},
    "gae": {"cpu": _native.gae},
    "fill_gae": {},
    "discounted_returns": {"cpu": _native.discounted_returns},
    "n_step_returns": {"cpu": _native.n_step_returns},
    "vtrace": {"cpu": _native.vtrace},
    "normalize": {"cpu": _native.normalize},
    "count_segments": {"cpu": _native.count_segments},
    "split_segments": {"cpu": _native.split_segments},
    "pad_segments": {"cpu": _native.pad_segments},
    "copy_lanes": {"cpu": _native.copy_lanes},
    "tabulate_trajectories": {},
    "fill_trajectories": {},
    "first_states": {"cpu": _native.first_states},
}

OPERATIONS = tuple(_TABLE)
REFERENCES = (reference, replay_reference, gather_reference, draws_reference)


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
    faster = _cuda().get(operation) if device_type == "cuda" else _TABLE[operation].get(device_type)
    return faster or reference_of(operation)


@cache
def _cuda() -> Mapping[str, Callable[..., Any]]:
    """What there is in Triton, which comes with torch for CUDA; nothing where it is not installed."""
    try:
        from rlstore.kernels import cuda
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return {}
    return cuda.OPERATIONS


def reference_of(operation: str) -> Callable[..., Any]:
    """The implementation of ``operation`` in plain torch."""
    found: Callable[..., Any] = next(vars(module)[operation] for module in REFERENCES if operation in vars(module))
    return found
