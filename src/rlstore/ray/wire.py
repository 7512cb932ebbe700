"""Nests of tensors on their way through Ray: a description, and one plain numpy array for each tensor.

Ray moves numpy arrays as they lie in memory, and hands them out as read-only views of its object store. What is made of
them here is memory of its own, filled in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlstore.errors import InvalidInputError

Array = NDArray[Any]
Allocator = Callable[[Sequence[int], torch.dtype], Tensor]

# Of the entries of a batch, these have the batch on their second axis: [layers, batch, hidden].
_BATCH_ON_SECOND_AXIS = ("hidden_states",)


class Packed(NamedTuple):
    """A nest as Ray is to move it: ``spec`` says how it hangs together, and what dtype each array stands for."""

    spec: Any
    arrays: list[Array]


def pack(nest: Any) -> Packed:
    """A nest of tensors in dicts, TensorDicts, tuples and lists; whatever else is in it goes as it is."""
    arrays: list[Array] = []
    return Packed(_describe(nest, arrays), arrays)


def _describe(nest: Any, arrays: list[Array]) -> Any:
    if isinstance(nest, Tensor):
        arrays.append(as_array(nest))
        return ("tensor", str(nest.dtype).removeprefix("torch."))
    if isinstance(nest, TensorDictBase):
        return ("tensordict", nest.batch_dims, {str(key): _describe(part, arrays) for key, part in nest.items()})
    if isinstance(nest, Mapping):
        return ("dict", {key: _describe(part, arrays) for key, part in nest.items()})
    if isinstance(nest, (tuple, list)):
        return ("tuple" if isinstance(nest, tuple) else "list", [_describe(part, arrays) for part in nest])
    return ("value", nest)


def as_array(tensor: Tensor) -> Array:
    """The tensor's numbers as numpy knows them; those that it does not know (bfloat16) as plain bits."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        array: Array = plain.numpy()
    except TypeError:
        array = plain.view(_BITS[plain.dtype.itemsize]).numpy()
    return array


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def join(parts: Sequence[Packed], allocate: Allocator) -> Any:
    """The nest whose tensors are those of the parts one after another, in memory of its own.

    Args:
        parts: Nests of the same form, of a batch each. Entries of a batch called ``hidden_states`` are joined on the
            second axis, all others on the first.
        allocate: Makes the tensors.
    """
    if any(part.spec != parts[0].spec for part in parts):
        raise InvalidInputError(
            f"the parts of a batch differ: {sorted({str(part.spec) for part in parts})}; every shard has to hold the "
            "same kind of data"
        )
    columns = iter(list(zip(*(part.arrays for part in parts), strict=True)))
    return _build(parts[0].spec, columns, 0, allocate)


def _build(spec: Any, columns: Any, axis: int, allocate: Allocator) -> Any:
    kind = spec[0]
    if kind == "tensor":
        return _join_arrays(next(columns), getattr(torch, spec[1]), axis, allocate)
    if kind == "value":
        return spec[1]
    if kind in ("tuple", "list"):
        built = [_build(part, columns, axis, allocate) for part in spec[1]]
        return tuple(built) if kind == "tuple" else built
    entries = {
        key: _build(part, columns, 1 if kind == "dict" and key in _BATCH_ON_SECOND_AXIS else axis, allocate)
        for key, part in spec[-1].items()
    }
    if kind == "dict":
        return entries
    first = next(iter(entries.values()))
    return TensorDict(entries, batch_size=first.shape[: spec[1]])


def _join_arrays(arrays: Sequence[Array], dtype: torch.dtype, axis: int, allocate: Allocator) -> Tensor:
    shape = list(arrays[0].shape)
    axis = min(axis, len(shape) - 1)
    if not shape:
        return torch.from_numpy(arrays[0].copy())
    shape[axis] = sum(array.shape[axis] for array in arrays)
    joined = allocate(shape, dtype)
    np.concatenate(arrays, axis=axis, out=_bits_of(joined))
    return joined


def stack(rollouts: Sequence[Sequence[Array]], dtypes: Sequence[torch.dtype], allocate: Allocator) -> list[Tensor]:
    """The arrays ``[T, ...]`` of several rollouts side by side, ``[T, rollouts, ...]``."""
    stacked = []
    for arrays, dtype in zip(zip(*rollouts, strict=True), dtypes, strict=True):
        first = arrays[0]
        out = allocate([first.shape[0], len(arrays), *first.shape[1:]], dtype)
        np.stack(arrays, axis=1, out=_bits_of(out))
        stacked.append(out)
    return stacked


def _bits_of(tensor: Tensor) -> Array:
    """The memory of a tensor, as :func:`as_array` would give it."""
    try:
        array: Array = tensor.numpy()
    except TypeError:
        array = tensor.view(_BITS[tensor.dtype.itemsize]).numpy()
    return array


def own_tensors(packed: Packed) -> Any:
    """The nest with tensors of their own."""
    return join([packed], lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
