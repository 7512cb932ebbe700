"""Fields from spaces: gymnasium spaces, or mappings as Hydra passes them."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlstore.engine.checks import check_shape
from rlstore.engine.rows.schema import Field, Path, Structure, check_dtype, check_real
from rlstore.errors import InvalidInputError, UnsupportedSpaceError
from rlstore.kernels.rules import Rule

SpaceLike = spaces.Space[Any] | Mapping[str, Any]
# By name a space, or a shape and a dtype.
ExtraFields = Mapping[str, SpaceLike | tuple[Any, Any]]
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class ActionSpec:
    """What a storage needs to know of an action space.

    Attributes:
        kind: "Discrete", "Box", "MultiDiscrete" or "MultiBinary".
        shape: The shape of one action: ``()`` for Discrete.
        dtype: The dtype of the space.
        choices: The number of choices: ``(n,)`` for Discrete, one for each entry for MultiDiscrete, else ``()``.
        starts: The first of the choices, likewise; ``()`` for zeros.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    choices: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def rule(self) -> Rule | None:
        """Which numbers an action may be; None where they are not whole, or not known."""
        if self.dtype in (torch.float16, torch.bfloat16):  # which kernels do not compare
            return None
        if self.kind == "MultiBinary":
            return ((0, 1),)
        if not self.choices:
            return None
        starts = self.starts or (0,) * len(self.choices)
        pairs = tuple((start, start + count - 1) for start, count in zip(starts, self.choices, strict=True))
        return pairs[:1] if len(set(pairs)) == 1 else pairs


def observation_fields(
    space: SpaceLike, name: str, owner: str, default_dtype: torch.dtype
) -> tuple[Structure, list[Field]]:
    """The structure of the observations of a space and one field for each leaf.

    Args:
        space: A gymnasium space (Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them) or a mapping
            with a ``shape`` and optionally a ``dtype``.
        name: What the storage calls observations.
        owner: The storage's class name, for errors.
        default_dtype: The dtype of a mapping without one.
    """
    leaves = _leaves(space)
    if not leaves:
        raise InvalidInputError(f"the observation space {space} has no part that could be stored")
    structure = Structure([path for path, _ in leaves], name)
    forms = [_form(leaf, default_dtype) for _, leaf in leaves]
    origin = f"the observation_space given to {owner}()"
    return structure, [Field(leaf, *form, origin) for leaf, form in zip(structure.names, forms, strict=True)]


def action_spec(space: SpaceLike) -> ActionSpec:
    """The action space, given as a gymnasium space or a mapping with ``shape``, ``type`` and ``range`` or ``n``."""
    if isinstance(space, spaces.Discrete):
        return ActionSpec("Discrete", (), torch.int64, (int(space.n),), (int(space.start),) if space.start else ())
    if isinstance(space, spaces.Box):
        return ActionSpec("Box", tuple(space.shape), _torch_dtype(space.dtype, space))
    if isinstance(space, spaces.MultiDiscrete):
        choices, starts = ([int(n) for n in part.flatten()] for part in (space.nvec, space.start))
        first = tuple(starts) if any(starts) else ()
        return ActionSpec("MultiDiscrete", tuple(space.shape), torch.int64, tuple(choices), first)
    if isinstance(space, spaces.MultiBinary):
        return ActionSpec("MultiBinary", tuple(space.shape), torch.int8)
    if _is_mapping(space):
        return _mapped_action_spec(space)
    raise _unsupported(space)


def extra_fields(given: ExtraFields | None, owner: str, taken: Collection[str]) -> tuple[Field, ...]:
    """The user's own fields, in the order given.

    Args:
        given: By name a Box, Discrete, MultiDiscrete or MultiBinary space, a pair of a shape and a dtype, or a mapping
            with ``shape`` and ``dtype``.
        owner: The storage's class name, for errors.
        taken: Names that the storage itself uses.

    Raises:
        InvalidInputError: If a name cannot be an attribute or is taken, or a form is none of these.
    """
    if given is None:
        return ()
    if not _is_mapping(given):
        raise InvalidInputError(
            f"extra_fields is a {type(given).__name__}; {owner} needs a dict of name: space, or name: (shape, dtype)"
        )
    fields = []
    for name, form in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
            raise InvalidInputError(
                f"extra_fields has {name!r}; {owner} needs a name that can be an attribute and does not begin with _"
            )
        if name in taken:
            raise InvalidInputError(f"extra_fields has {name!r}, which {owner} uses itself; give it another name")
        fields.append(Field(name, *_extra_form(name, form), f"the extra_fields given to {owner}()"))
    check_real(fields, owner)
    return tuple(fields)


def describe_extra_fields(fields: Sequence[Field]) -> dict[str, Any]:
    """The fields as :func:`extra_fields` takes them, in a form that can be saved."""
    return {field.name: {"shape": list(field.shape), "dtype": field.dtype} for field in fields}


def _extra_form(name: str, form: Any) -> Form:
    if _is_leaf_space(form) or _is_mapping(form):
        return _form(form, torch.float32)
    if isinstance(form, (tuple, list)) and len(form) == 2:
        return _form({"shape": form[0], "dtype": form[1]}, torch.float32)
    raise InvalidInputError(
        f"extra_fields[{name!r}] is {form!r}; give a Box, Discrete, MultiDiscrete or MultiBinary space, or a pair of a "
        "shape and a dtype"
    )


def _mapped_action_spec(space: Any) -> ActionSpec:
    kind = space.get("type")
    shape, dtype = _form(space, torch.float32 if kind == "Box" else torch.int64)
    if kind == "Discrete":
        return ActionSpec("Discrete", (), dtype, *_choices(space, shape))
    if kind == "Box":
        return ActionSpec("Box", shape, dtype)
    if kind in ("MultiDiscrete", "MultiBinary"):
        return ActionSpec(kind, shape, dtype, tuple(int(n) for n in space.get("nvec") or ()))
    raise UnsupportedSpaceError(
        f"an action space of type {kind!r} is not supported; give 'type' as Discrete, Box, MultiDiscrete or MultiBinary"
    )


def _choices(space: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of choices and, unless it is 0, the first."""
    low, high = (0, None) if space.get("range") is None else space["range"]
    first = (int(low),) if int(low) else ()
    if space.get("n") is not None:
        return (int(space["n"]),), first
    return (shape[0] if high is None else int(high) - int(low) + 1,), first


def _leaves(space: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """The spaces in nested Dict and Tuple spaces and mappings of spaces, with the path to each."""
    parts: Iterable[tuple[str | int, Any]]
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise UnsupportedSpaceError(f"a Dict space whose keys are not all strings is not supported: {space}")
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    elif _is_mapping(space) and "shape" not in space and any(_is_space_like(part) for part in space.values()):
        parts = [(str(key), part) for key, part in space.items()]
    else:
        return [(path, space)]
    return [leaf for key, part in parts for leaf in _leaves(part, (*path, key))]


def _form(space: Any, default_dtype: torch.dtype) -> Form:
    """The shape and the dtype of a space that is not nested, or of a mapping that stands for one."""
    if _is_leaf_space(space):
        return tuple(space.shape or ()), _torch_dtype(space.dtype, space)
    if not _is_mapping(space):
        raise _unsupported(space)
    shape, dtype = space.get("shape"), space.get("dtype")
    if shape is None:
        raise InvalidInputError(f"a space given as a mapping needs a 'shape'; got the keys {sorted(space.keys())}")
    sizes = check_shape("a space", "shape", (shape,) if isinstance(shape, int) else shape)
    return sizes, default_dtype if dtype is None else _torch_dtype(dtype, space)


def _is_leaf_space(space: object) -> bool:
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def _is_space_like(space: object) -> bool:
    return isinstance(space, spaces.Space) or _is_mapping(space)


def _is_mapping(space: object) -> bool:
    # A DictConfig of omegaconf is not a Mapping for isinstance, and gymnasium's Dict space is one.
    return not isinstance(space, spaces.Space) and all(hasattr(space, part) for part in ("keys", "items", "get"))


def _torch_dtype(dtype: Any, space: object) -> torch.dtype:
    # torch has more than one name for some dtypes: "float", "long".
    known = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if isinstance(known, torch.dtype):
        return check_dtype(known, f"a dtype in {space}")
    try:
        dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
        return torch.from_numpy(np.empty(0, dtype=np.dtype(dtype))).dtype
    except (TypeError, ValueError) as error:
        raise UnsupportedSpaceError(f"a dtype of {dtype!r} is not supported, in {space}") from error


def _unsupported(space: object) -> UnsupportedSpaceError:
    if hasattr(space, "observation_space"):  # an environment
        name = "single_observation_space" if hasattr(space, "single_observation_space") else "observation_space"
        return UnsupportedSpaceError(
            f"a {type(space).__name__} is an environment; give its spaces, {name} and "
            f"{name.replace('observation', 'action')}"
        )
    return UnsupportedSpaceError(
        f"a space of type {type(space).__name__} is not supported: {space}. Supported are Box, Discrete, MultiDiscrete "
        "and MultiBinary, and for observations Dict and Tuple of them."
    )
