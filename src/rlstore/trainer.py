"""What the ten methods of every family of storages share: names in a sample, leading axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.calls import did_you_mean
from rlstore.engine.rows.schema import Field, as_tensor
from rlstore.errors import InvalidInputError

# ---------------------------------------------------------------------------------------------------- samples


def check_names(given: object, what: str, owner: str, known: Sequence[str], needed: Sequence[str] = ()) -> None:
    """Refuse a mapping that lacks something or holds what a storage does not know.

    Args:
        given: The mapping.
        what: What errors call it: "a sample", "new_data".
        owner: The storage's class name.
        known: The names that it may hold.
        needed: Those that it must hold, and not as None.
    """
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{what} is a {type(given).__name__}; give a dict. Nothing was written.")
    unknown = [name for name in given.keys() if name not in known]  # noqa: SIM118 - a TensorDict iterates over rows
    missing = [name for name in needed if given.get(name) is None]
    if unknown or missing:
        problem = f"cannot hold {unknown}" if unknown else f"needs {missing}"
        meant = did_you_mean(unknown[0], known) if unknown else ""
        raise InvalidInputError(f"{what} for {owner} {problem}; it takes {list(known)}.{meant} Nothing was written.")


def fit(field: Field, value: Any, lead: Sequence[int], device: torch.device) -> Tensor:
    """A value ``[*lead, ...]`` as the field holds it, contiguous on ``device``; its last leading axis is the lanes.

    Scalars may have an axis of 1 behind the leading ones.

    Raises:
        InvalidInputError: If the value does not begin with ``lead``, or cannot be held.
    """
    given, lead = as_tensor(value, field.name), tuple(lead)
    if tuple(given.shape[: len(lead)]) != lead:
        raise InvalidInputError(
            f"{field.name} is {tuple(given.shape)}; it has to begin with {lead}, as rewards do. Nothing was written."
        )
    flat = given.reshape(math.prod(lead), *given.shape[len(lead) :])
    fitted: Tensor = field.fit(flat, math.prod(lead), device, math.prod(lead[:-1])).unflatten(0, lead)
    return fitted


def at_step(value: Any, step: int, steps: int, name: str) -> Any:
    """Entry ``step`` of a tensor ``[steps, ...]``, or of each tensor in a nest of dicts and tuples."""
    if value is None:
        return None
    is_list_of_tensors = isinstance(value, list) and all(part is None or isinstance(part, Tensor) for part in value)
    if isinstance(value, tuple) or is_list_of_tensors:
        return tuple(at_step(part, step, steps, name) for part in value)
    if isinstance(value, Mapping):
        return {key: at_step(part, step, steps, name) for key, part in value.items()}
    value = as_tensor(value, name)
    if len(value) != steps:
        raise InvalidInputError(f"{name} has {len(value)} steps and observations {steps}. Nothing was changed.")
    return value[step]


def copied(nest: Any, device: str | torch.device) -> Any:
    """A copy of a nest of tensors, on a device."""
    if nest is None:
        return None
    if isinstance(nest, (tuple, list)):
        return type(nest)(copied(part, device) for part in nest)
    return nest.clone().to(device)


def learning_info(actor: Any, algo: Any, info: dict[str, Any] | None) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The batch and the info of ``after_gradients(actor, algo, info)`` or ``after_gradients(batch, info)``.

    Returns:
        The batch, empty if none was given, and the info, which the storage adds to.
    """
    if info is None:
        info = algo if isinstance(algo, dict) else {}
    elif not isinstance(info, dict):
        raise InvalidInputError(f"info is a {type(info).__name__}; give a dict. Nothing was changed.")
    return actor if isinstance(actor, Mapping) else {}, info
