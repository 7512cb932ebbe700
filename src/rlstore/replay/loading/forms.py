"""Spaces of data that come without: shapes, dtypes and bounds are taken from the arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rlstore.errors import InvalidInputError
from rlstore.replay.loading.names import NOTHING
from rlstore.replay.loading.steps import as_array, as_numpy, numpy_dtype

Space = spaces.Space[Any]
_MOST_ACTIONS = 2**63 - 1  # that int64 counts


def observation_space_of(observations: Any, name: str = "observations") -> Space:
    """The space of observations ``[steps, ...]``: a Box that holds every value of their dtype, for a nest a nest."""
    if isinstance(observations, Mapping) or hasattr(observations, "keys"):
        named = dict(observations.items())
        return spaces.Dict({key: observation_space_of(part, f'{name}["{key}"]') for key, part in named.items()})
    if isinstance(observations, tuple):
        return spaces.Tuple([observation_space_of(part, f"{name}[{i}]") for i, part in enumerate(observations)])
    return box_of(*_form(observations, name))


def action_space_of(episodes: Iterable[Any]) -> Space:
    """The space of the actions ``[steps, ...]`` of some episodes.

    Floats are a Box. Whole numbers are Discrete or, with several in an action, MultiDiscrete: up to the largest that
    there is, and from 0 or from the least that there is, if that is below 0.
    """
    lows, highs = [], []
    for actions in episodes:
        array = as_array(actions, "actions")
        shape, dtype = _form(array, "actions")
        if dtype.kind == "f":
            return box_of(shape, dtype)
        values = as_numpy(array).reshape(len(array), -1)
        if values.size:
            lows.append(values.min(0))
            highs.append(values.max(0))
    if not lows:
        raise InvalidInputError(f"there are no actions to take a space from; give action_space. {NOTHING}")
    low = [min(0, *map(int, entry)) for entry in zip(*lows, strict=True)]
    counts = [max(map(int, entry)) - least + 1 for entry, least in zip(zip(*highs, strict=True), low, strict=True)]
    if (most := max(counts, default=1)) > _MOST_ACTIONS:
        raise InvalidInputError(
            f"actions are {most:,} whole numbers from the least to the largest, and a space has {_MOST_ACTIONS:,} at "
            f"most; give action_space. {NOTHING}"
        )
    if shape in ((), (1,)):
        return spaces.Discrete(counts[0], start=low[0])
    return spaces.MultiDiscrete(np.array(counts).reshape(shape), start=np.array(low).reshape(shape))


def _form(value: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    array = as_array(value, name)
    if not array.shape:
        raise InvalidInputError(f"{name} is a single number; it has to be [steps, ...]. {NOTHING}")
    dtype = numpy_dtype(array.dtype) if isinstance(array, Tensor) else array.dtype
    return tuple(array.shape[1:]), dtype or np.dtype(np.float32)


def box_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> spaces.Box:
    """The space of all values of a dtype."""
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, shape, dtype.type)
