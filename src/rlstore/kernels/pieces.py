"""Many tensors cut from few pieces of memory: what it costs to make a tensor on CUDA is its memory, not the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_ENTRIES = 16  # tensors of a piece begin at multiples of this


class Pieces:
    """How tensors of some shapes are arranged in pieces of memory, one for each dtype: few calls make many tensors.

    Args:
        shapes: The shape of each tensor.
        dtypes: The dtype of each tensor.
        device: The device of all.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self._device = device
        own = list(dict.fromkeys(dtypes))
        self.places = tuple([own.index(dtype) for dtype in dtypes])  # the piece that holds each tensor
        lengths = [0] * len(own)
        self._parts = []  # the piece that holds each tensor, its shape, its strides, and where it begins
        for shape, place in zip(shapes, self.places, strict=True):
            self._parts.append((place, tuple(shape), _strides(shape), lengths[place]))
            lengths[place] += -(-math.prod(shape) // _ENTRIES) * _ENTRIES
        self._pieces = list(zip(lengths, own, strict=True))
        self.nbytes = sum(length * dtype.itemsize for length, dtype in self._pieces)

    def empty(self) -> tuple[Tensor, ...]:
        """New pieces, flat."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.empty()
        return tuple([scratch(length, dtype, self._device) for length, dtype in self._pieces])

    def cut(self, pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tensors, in the order of their shapes; each has a version counter of its own and is no view."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.cut(pieces)
        cut = _CUT
        if (
            torch.compiler.is_compiling() or type(pieces[0]) is not Tensor
        ):  # there are modes with tensors of other kinds
            cut = _cut_by_view
        return tuple([cut(pieces[place], shape, strides, first) for place, shape, strides, first in self._parts])

    def tensors(self) -> tuple[Tensor, ...]:
        """New tensors, in the order of their shapes."""
        return self.cut(self.empty())


def scratch(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory, flat: where inference mode is enabled, an inference tensor, which must not be handed out."""
    index, make = device.index, _EMPTY_ON_CUDA  # which allocates on the current device; the CPU has no index
    if index is None or make is None or index != torch.cuda.current_device() or torch.compiler.is_compiling():
        return torch.empty(length, dtype=dtype, device=device)
    return make((length,), (1,), dtype)


@lru_cache(64)
def pieces_for(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> Pieces:
    """:class:`Pieces`, made once for what is asked for again and again."""
    return Pieces(shapes, dtypes, device)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _cut_by_view(piece: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Tensor:
    return piece.as_strided(shape, strides, first).data


def _find_cut() -> Callable[..., Tensor]:
    """A private function of torch that does as :func:`_cut_by_view`, in half the time; that one where it does not."""
    try:
        cut: Any = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False):  # ordinary tensors, whatever mode this is
            piece = torch.empty(2, device="cpu")
            tensor = cut(piece, (1,), (1,), 1).zero_()
    except (AttributeError, RuntimeError, TypeError):
        return _cut_by_view
    is_plain = tensor._base is None and piece._version == 0 and tensor.data_ptr() == piece.data_ptr() + piece.itemsize
    return cut if is_plain else _cut_by_view


def _find_empty_on_cuda() -> Callable[..., Tensor] | None:
    """A private function of torch that takes a third of the time of ``torch.empty``; None where there is none."""
    try:
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined,no-any-return]
    except AttributeError:
        return None


# Torch's compiler calls both in the code that it generates.
_EMPTY_ON_CUDA, _CUT = _find_empty_on_cuda(), _find_cut()
