"""What is worked out once for tensors of a kind, found again in less time than it takes to read their shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from rlstore.kernels._native import kind_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MOST = 256
_UNKNOWN = object()


def planned(
    make: Callable[Concatenate[tuple[Tensor, ...], _P], _R],
) -> Callable[Concatenate[tuple[Tensor, ...], _P], _R]:
    """A function of tensors and of hashable arguments that is called once for tensors of the same dtypes and shapes.

    Tensors that are not contiguous, or have no memory, are of no kind: for them it is called each time.
    """
    known: dict[tuple[Any, ...], Any] = {}

    @wraps(make)
    def plan(tensors: tuple[Tensor, ...], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        kind = kind_of(tensors)
        form = (kind, *args)
        found = known.get(form, _UNKNOWN)
        if found is _UNKNOWN or kind is None:
            found = make(tensors, *args, **kwargs)
            if len(known) >= _MOST:
                known.clear()
            known[form] = found
        return found  # type: ignore[no-any-return]

    return plan
