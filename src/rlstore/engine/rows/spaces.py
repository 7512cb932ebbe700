"""From a description of observations and actions (a gymnasium space, or a mapping as Hydra passes it) to fields."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlstore.engine.checks import check_shape
from rlstore.engine.rows.schema import Field, Structure, walk
from rlstore.errors import InvalidInputError, UnsupportedSpaceError

SpaceLike = spaces.Space[Any] | Mapping[str, Any]
# By name a space, or a shape and a dtype.
ExtraFields = Mapping[str, SpaceLike | tuple[Any, Any]]


@dataclass(frozen=True)
class ActionSpec:
    """What a storage needs to know of an action space.

    Attributes:
        kind: "Discrete", "Box", "MultiDiscrete" or "MultiBinary".
        shape: The shape of one action: ``()`` for Discrete.
        dtype: The dtype of the space.
        choices: The number of choices: ``(n,)`` for Discrete, one for each entry for MultiDiscrete, else ``()``.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    choices: tuple[int, ...] = ()


def observation_fields(
    space: SpaceLike, name: str, owner: str, default_dtype: torch.dtype
) -> tuple[Structure, list[Field]]:
    """The structure of the observations of a space and one field for each leaf.

    Args:
        space: A gymnasium space (Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them) or a mapping
            with a ``shape`` and perhaps a ``dtype``.
        name: What the storage calls observations.
        owner: The storage's class name, for errors.
        default_dtype: The dtype of a mapping that names none.
    """
    leaves = walk(_unfold(space))
    if not leaves:
        raise InvalidInputError(f"the observation space {space} has no part that could be held")
    structure = Structure([path for path, _ in leaves], name)
    origin = f"the observation_space given to {owner}()"
    fields = []
    for leaf_name, (_, leaf) in zip(structure.names, leaves, strict=True):
        if _is_space(leaf):
            shape, dtype = _space_shape(leaf), _torch_dtype(leaf.dtype, leaf)
        elif isinstance(leaf, _MappedSpace):
            shape, dtype = leaf.shape, leaf.dtype or default_dtype
        else:
            raise _unsupported(leaf)
        fields.append(Field(leaf_name, shape, dtype, origin))
    return structure, fields


def action_spec(space: SpaceLike) -> ActionSpec:
    """The action space, given as a gymnasium space or a mapping with ``shape``, ``type`` and ``range`` or ``n``."""
    if isinstance(space, spaces.Discrete):
        return ActionSpec("Discrete", (), torch.int64, (int(space.n),))
    if isinstance(space, spaces.Box):
        return ActionSpec("Box", tuple(space.shape), _torch_dtype(space.dtype, space))
    if isinstance(space, spaces.MultiDiscrete):
        return ActionSpec("MultiDiscrete", tuple(space.shape), torch.int64, tuple(int(n) for n in space.nvec.flatten()))
    if isinstance(space, spaces.MultiBinary):
        return ActionSpec("MultiBinary", tuple(space.shape), torch.int8)
    if _looks_like_mapping(space):
        return _mapped_action_spec(space)
    raise _unsupported(space)


def extra_fields(given: ExtraFields | None, owner: str, taken: Collection[str]) -> tuple[Field, ...]:
    """The fields of a user's own, by name, in the order given.

    Args:
        given: By name a Box, Discrete, MultiDiscrete or MultiBinary space, a pair of a shape and a dtype, or a mapping
            with ``shape`` and ``dtype``.
        owner: The storage's class name, for errors.
        taken: Names that the storage itself uses.
    """
    if given is None:
        return ()
    if not _looks_like_mapping(given):
        raise InvalidInputError(
            f"extra_fields is a {type(given).__name__}; {owner} needs a dict of name: space, or name: (shape, dtype)"
        )
    fields = []
    for name, form in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
            raise InvalidInputError(f"extra_fields has {name!r}; a field's name has to be one that Python takes")
        if name in taken:
            raise InvalidInputError(f"extra_fields has {name!r}, which {owner} uses itself; give it another name")
        shape, dtype = _extra_form(name, form)
        if dtype.is_complex:
            raise InvalidInputError(f"extra_fields[{name!r}] is {dtype}; {owner} holds real numbers only")
        fields.append(Field(name, shape, dtype, f"the extra_fields given to {owner}()"))
    return tuple(fields)


def describe_extra_fields(fields: Sequence[Field]) -> dict[str, Any]:
    """The fields as :func:`extra_fields` takes them, in a form that can be saved."""
    return {field.name: {"shape": list(field.shape), "dtype": field.dtype} for field in fields}


def _extra_form(name: str, form: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if _is_space(form):
        return _space_shape(form), _torch_dtype(form.dtype, form)
    if _looks_like_mapping(form):
        mapped = _MappedSpace.of(form)
        return mapped.shape, mapped.dtype or torch.float32
    if isinstance(form, (tuple, list)) and len(form) == 2:
        shape = check_shape("extra_fields", name, (form[0],) if isinstance(form[0], int) else form[0])
        return shape, _torch_dtype(form[1], form)
    raise InvalidInputError(
        f"extra_fields[{name!r}] is {form!r}; give a Box, Discrete, MultiDiscrete or MultiBinary space, or a pair of a "
        "shape and a dtype"
    )


def _mapped_action_spec(space: Any) -> ActionSpec:
    kind = space.get("type")
    mapped = _MappedSpace.of(space)
    if kind == "Discrete":
        return ActionSpec("Discrete", (), mapped.dtype or torch.int64, (_choices(space, mapped.shape),))
    if kind == "Box":
        return ActionSpec("Box", mapped.shape, mapped.dtype or torch.float32)
    if kind in ("MultiDiscrete", "MultiBinary"):
        nvec = tuple(int(n) for n in space.get("nvec") or ())
        return ActionSpec(kind, mapped.shape, mapped.dtype or torch.int64, nvec)
    raise UnsupportedSpaceError(
        f"an action space of type {kind!r} cannot be held; give 'type' as Discrete, Box, MultiDiscrete or MultiBinary"
    )


def _choices(space: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    if space.get("n") is not None:
        return int(space["n"])
    if space.get("range") is not None:
        low, high = space["range"]
        return int(high) - int(low) + 1
    return shape[0]


@dataclass(frozen=True)
class _MappedSpace:
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, space: Mapping[str, Any]) -> _MappedSpace:
        shape = space.get("shape")
        if shape is None:
            raise InvalidInputError(f"a space given as a mapping needs a 'shape'; got the keys {sorted(space.keys())}")
        sizes = check_shape("a space", "shape", (shape,) if isinstance(shape, int) else shape)
        dtype = space.get("dtype")
        return cls(sizes, None if dtype is None else _torch_dtype(dtype, space))


def _unfold(space: Any) -> Any:
    """Dict and Tuple spaces as nests of their parts; a mapping with a shape as one leaf."""
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise UnsupportedSpaceError(f"a Dict space whose keys are not all strings cannot be held: {space}")
        return {key: _unfold(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_unfold(part) for part in space.spaces)
    if _looks_like_mapping(space):
        if "shape" in space or not any(_is_space_like(part) for part in space.values()):
            return _MappedSpace.of(space)
        return {str(key): _unfold(part) for key, part in space.items()}
    return space


def _is_space(space: object) -> bool:
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def _is_space_like(space: object) -> bool:
    return isinstance(space, spaces.Space) or _looks_like_mapping(space)


def _looks_like_mapping(space: object) -> bool:
    # A DictConfig is no Mapping to isinstance, and gymnasium's Dict is one.
    return not isinstance(space, spaces.Space) and all(hasattr(space, part) for part in ("keys", "items", "get"))


def _space_shape(space: spaces.Space[Any]) -> tuple[int, ...]:
    return tuple(space.shape or ())


def _torch_dtype(dtype: Any, space: object) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        if isinstance(dtype, str):
            dtype = dtype.removeprefix("torch.")
            known = getattr(torch, dtype, None)
            if isinstance(known, torch.dtype):
                return known
        return torch.from_numpy(np.empty(0, dtype=np.dtype(dtype))).dtype
    except (TypeError, ValueError) as error:
        raise UnsupportedSpaceError(f"a dtype of {dtype!r} cannot be held, in {space}") from error


def _unsupported(space: object) -> UnsupportedSpaceError:
    return UnsupportedSpaceError(
        f"a space of type {type(space).__name__} cannot be held: {space}. Supported are Box, Discrete, MultiDiscrete "
        "and MultiBinary, and for observations Dict and Tuple of them."
    )
