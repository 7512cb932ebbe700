"""Settings as JSON and back: plain values, dtypes, gymnasium spaces, and mappings as Hydra passes them.

Values that JSON does not have are objects with a key that begins with "$": ``{"$dtype": "uint8"}``,
``{"$tuple": [1, 2]}``, ``{"$float": "inf"}``, ``{"$space": "Discrete", "n": 4, ...}``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlstore.engine.disk.directory import Room
from rlstore.engine.rows.schema import DTYPES, dtype_name
from rlstore.errors import InvalidInputError


def to_json(value: Any, name: str = "settings") -> Any:
    """A value in a form that ``json.dumps`` takes and :func:`from_json` turns back.

    Args:
        value: None, a bool, a number, a string, a dtype, a space, or a tuple, list or mapping of such.
        name: What errors call it.
    """
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, (np.bool_, np.integer)):
        return value.item()
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"$dtype": np.dtype(value).name}
    if isinstance(value, spaces.Space):
        return _space_to_json(value)
    if isinstance(value, tuple):
        return {"$tuple": [to_json(part, f"{name}[{index}]") for index, part in enumerate(value)]}
    if all(hasattr(value, part) for part in ("keys", "items", "get")):
        bad = [key for key in value.keys() if not isinstance(key, str) or key.startswith("$")]  # noqa: SIM118
        if bad:
            raise InvalidInputError(
                f'{name} has the keys {bad}; what is saved needs strings that do not begin with "$"'
            )
        return {key: to_json(part, f"{name}.{key}") for key, part in value.items()}
    if isinstance(value, Sequence):
        return [to_json(part, f"{name}[{index}]") for index, part in enumerate(value)]
    raise InvalidInputError(f"{name} is a {type(value).__name__}, which cannot be saved")


def from_json(value: Any, room: Room | None = None) -> Any:
    """The value that :func:`to_json` was given. A numpy dtype becomes torch's, a mapping a dict.

    Args:
        value: The form.
        room: That of the folder that it comes from: the bounds of a space may be one number in the form and an array in
            memory. None for that of a folder without files.

    Raises:
        ValueError: If it is no form of a value; or a LookupError, TypeError, AttributeError or AssertionError.
        SnapshotError: If arrays would take more memory than there is room for.
    """
    return _Decoder(room or Room(Path(), 0)).decode(value)


class _Decoder:
    def __init__(self, room: Room) -> None:
        self._room = room

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(part) for part in value]
        if not isinstance(value, dict):
            return value
        marked = next((key for key in value if key.startswith("$")), None)
        if marked is None:
            return {key: self.decode(part) for key, part in value.items()}
        if marked == "$space":
            return self._space(value)
        (content,) = value.values()
        if marked == "$float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if marked == "$dtype" and content in DTYPES:
            return DTYPES[content]
        if marked == "$tuple" and isinstance(content, list):
            return tuple(self.decode(part) for part in content)
        raise ValueError(f"{marked} is {str(content)[:40]!r}")

    def _space(self, form: Mapping[str, Any]) -> spaces.Space[Any]:
        kind = form["$space"]
        if kind == "Box":
            low, high = (self._array(form[bound], form) for bound in ("low", "high"))
            if (low > high).any():
                raise ValueError("a Box whose low is above its high")
            return spaces.Box(low, high, tuple(form["shape"]), _numpy_dtype(form["dtype"]).type)
        if kind == "MultiDiscrete":
            nvec, start = (self._array(form[part], form) for part in ("nvec", "start"))
            return spaces.MultiDiscrete(nvec, dtype=_numpy_dtype(form["dtype"]).type, start=start)
        if kind == "Discrete":
            # Older versions of gymnasium have no other dtype.
            dtype: dict[str, Any] = {} if form["dtype"] == "int64" else {"dtype": _numpy_dtype(form["dtype"]).type}
            return spaces.Discrete(form["n"], start=form["start"], **dtype)
        if kind == "MultiBinary":
            return spaces.MultiBinary(self.decode(form["n"]))
        if kind == "Dict":  # gymnasium sorts the keys of a plain dict
            return spaces.Dict(OrderedDict((key, self.decode(part)) for key, part in form["spaces"]))
        if kind == "Tuple":
            return spaces.Tuple([self.decode(part) for part in form["spaces"]])
        raise ValueError(f"unknown space {str(kind)[:40]!r}")

    def _array(self, entries: Any, space: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        shape = space["shape"]
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"a space of shape {str(shape)[:40]}")
        dtype = _numpy_dtype(space["dtype"])
        # What gymnasium makes of it is a copy, and of a Box a table of what is bounded.
        self._room.charge(math.prod(shape) * (2 * dtype.itemsize + 1), f"a space of shape {str(shape)[:40]}")
        value = np.array(self.decode(entries), dtype=dtype)
        return value.reshape(shape) if value.ndim else np.full(shape, value)


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    """A dtype of numbers: an object in an array would be anything."""
    dtype = np.dtype(name) if isinstance(name, str) else None
    if dtype is None or dtype.kind not in "biuf":
        raise ValueError(f"unknown dtype {str(name)[:40]!r}")
    return dtype


# ---------------------------------------------------------------------------------------------------- spaces


_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)


def _space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    form: dict[str, Any] = {"$space": next((kind.__name__ for kind in _SPACES if isinstance(space, kind)), None)}
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete)):
        bounds = ("low", "high") if isinstance(space, spaces.Box) else ("nvec", "start")
        form.update(shape=list(space.shape), dtype=np.dtype(space.dtype).name)
        return {**form, **{bound: _array_to_json(getattr(space, bound)) for bound in bounds}}
    if isinstance(space, spaces.Discrete):
        return {**form, "n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.MultiBinary):
        return {**form, "n": to_json(space.n)}
    if isinstance(space, spaces.Dict):
        return {**form, "spaces": [[key, _space_to_json(part)] for key, part in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {**form, "spaces": [_space_to_json(part) for part in space.spaces]}
    raise InvalidInputError(f"a space of type {type(space).__name__} cannot be saved: {space}")


def _array_to_json(array: np.ndarray[Any, Any]) -> Any:
    """One number if all entries are equal, else a flat list."""
    flat = array.reshape(-1)
    if flat.size and (flat == flat[0]).all():
        return to_json(flat[0])
    return [to_json(entry) for entry in flat]
