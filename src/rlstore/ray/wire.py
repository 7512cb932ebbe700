"""Nests of tensors on their way through Ray: a description of the nest and one numpy array per tensor.

Ray transfers numpy arrays without a copy and hands them out as read-only views of its object store. Tensors built from
them here have memory of their own, filled in one copy.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlstore.engine.batches.staging import Staging, received
from rlstore.engine.memory.tensors import Recycler, allocate_empty
from rlstore.engine.rows.schema import tensordict_class
from rlstore.errors import InvalidInputError

Array = NDArray[Any]
Allocator = Callable[[Sequence[int], torch.dtype], Tensor]

# Entries of a batch that always have the batch on the second axis: [layers, batch, hidden].
_BATCH_ON_SECOND_AXIS = ("hidden_states",)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU = torch.device("cpu")
# Allocating smaller tensors costs little.
_RECYCLED_BYTES = 1 << 16


class Packed(NamedTuple):
    """A nest as Ray transfers it: ``form`` describes the nest, ``dtypes`` and ``arrays`` its tensors in order."""

    form: Any
    dtypes: list[torch.dtype]
    arrays: list[Array]

    @classmethod
    def of(cls, form: Any, tensors: Sequence[Tensor]) -> Packed:
        """The tensors of a nest of this form."""
        return cls(form, [tensor.dtype for tensor in tensors], [_as_array(tensor) for tensor in tensors])


def pack(nest: Any) -> Packed:
    """A nest of tensors in dicts, TensorDicts, tuples and lists; other values are transferred as they are."""
    tensors: list[Tensor] = []
    form = _describe(nest, tensors)
    return Packed.of(form, tensors)


def _describe(nest: Any, tensors: list[Tensor]) -> Any:
    if isinstance(nest, Tensor):
        tensors.append(nest)
        return ("tensor",)
    if isinstance(nest, Mapping):
        parts = {key: _describe(part, tensors) for key, part in nest.items()}
        # A TensorDict is known by its attribute: to import its class takes longer than to import torch.
        return ("tensordict", nest.batch_dims, parts) if hasattr(nest, "batch_dims") else ("dict", parts)
    if isinstance(nest, (tuple, list)):
        return ("tuple" if isinstance(nest, tuple) else "list", [_describe(part, tensors) for part in nest])
    return ("value", nest)


def build(form: Any, tensors: Iterator[Tensor]) -> Any:
    """The nest that was described, of other tensors."""
    kind = form[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return form[1]
    if kind in ("tuple", "list"):
        parts = [build(part, tensors) for part in form[1]]
        return tuple(parts) if kind == "tuple" else parts
    entries = {key: build(part, tensors) for key, part in form[-1].items()}
    if kind == "dict":
        return entries
    return tensordict_class()(entries, batch_size=next(iter(entries.values())).shape[: form[1]])


def _as_array(tensor: Tensor) -> Array:
    return bits_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def bits_of(tensor: Tensor) -> Array:
    """The memory of a tensor as a numpy array; as integers where numpy does not know the dtype (bfloat16)."""
    try:
        array: Array = tensor.numpy()
    except TypeError:
        array = tensor.view(_BITS[tensor.dtype.itemsize]).numpy()
    return array


@lru_cache
def bits_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of :func:`bits_of`."""
    return bits_of(torch.empty(0, dtype=dtype)).dtype


def join(parts: Sequence[Packed], allocate: Allocator, axis: int = 0) -> Any:
    """The nest whose tensors are those of the parts concatenated, in memory of its own.

    Args:
        parts: Nests of the same form, each with a part of the batch.
        allocate: Allocates the tensors.
        axis: The axis of the batch; it is the second one for the entry ``hidden_states`` of a dict.
    """
    if any(part[:2] != parts[0][:2] for part in parts):
        raise InvalidInputError(
            f"the parts of a batch differ: {sorted({str(part[:2]) for part in parts})}; every shard has to hold the "
            "same kind of data"
        )
    form, dtypes, _ = parts[0]
    columns = zip(dtypes, _axes(form, axis), zip(*(part.arrays for part in parts), strict=True), strict=True)
    return build(form, (_concatenate(arrays, dtype, at, allocate) for dtype, at, arrays in columns))


def _axes(form: Any, axis: int) -> Iterator[int]:
    """The batch axis of each tensor of a nest, in order."""
    if form[0] == "tensor":
        yield axis
    elif form[0] in ("tuple", "list"):
        for part in form[1]:
            yield from _axes(part, axis)
    elif form[0] != "value":
        for key, part in form[-1].items():
            yield from _axes(part, 1 if form[0] == "dict" and key in _BATCH_ON_SECOND_AXIS else axis)


def _concatenate(arrays: Sequence[Array], dtype: torch.dtype, axis: int, allocate: Allocator) -> Tensor:
    shape = list(arrays[0].shape)
    if not shape:
        return torch.from_numpy(arrays[0].copy()).view(dtype)
    axis = min(axis, len(shape) - 1)
    shape[axis] = sum(array.shape[axis] for array in arrays)
    joined = allocate(shape, dtype)
    np.concatenate(arrays, axis=axis, out=bits_of(joined))
    return joined


def own_tensors(packed: Packed) -> list[Tensor]:
    """The tensors of a nest, with memory of their own."""
    return [
        _concatenate([array], dtype, 0, lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
        for array, dtype in zip(packed.arrays, packed.dtypes, strict=True)
    ]


with warnings.catch_warnings():
    # Of arrays that may not be written torch warns once; from here on it does not.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(1), np.uint8))


def read_only(array: Array, dtype: torch.dtype) -> Tensor:
    """A tensor in the memory of an array; the memory may be one that nobody may write."""
    return torch.from_numpy(array).view(dtype)


class Output:
    """The memory of the batches of a learner; its threads fill the tensors and send them to the learner's device.

    On the CPU the memory of batches that are not referenced any more is used again. For another device batches are
    assembled in pinned memory and copied on a stream of their own.

    Args:
        device: The device of the batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._recycler, self._lock = device, Recycler(), threading.Lock()
        self._staging = Staging(device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor on the host."""
        if self._device.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        if math.prod(shape) * dtype.itemsize < _RECYCLED_BYTES:
            return allocate_empty(shape, dtype, _CPU)
        with self._lock:
            return self._recycler.empty(tuple(shape), dtype, _CPU)

    def pinned(self, tensor: Tensor) -> Tensor:
        """A small tensor in the kind of memory in which batches are assembled."""
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def send(self, nest: Any) -> Any:
        """Start the copy of a nest of tensors to the device, for :meth:`receive`; in any thread."""
        return nest if self._device.type == "cpu" else self._staging.send(nest)

    def receive(self, sent: Any) -> Any:
        """What was sent, for use by the calling thread."""
        return received(sent)
