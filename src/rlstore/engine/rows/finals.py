"""The observations in which episodes ended, as vector environments report them among their infos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.schema import Field, Structure, as_tensor, can_hold
from rlstore.errors import InvalidInputError

# The value of final observations [k, ...], as [k] or [k, 1].
FinalCritic = Callable[[Any], Tensor]

KEYS = ("final_obs", "final_observation")
ORDER = (
    "add() takes observations, actions, rewards, terminateds, truncateds, infos, next_observations, in this order, not "
    "in that of Stable-Baselines3 (obs, next_obs, action, reward, done, infos)."
)
_OF_A_LIST = 'of one dict for each environment give {"final_obs": [info.get("terminal_observation") for info in infos]}'


def find_final(infos: Any, order: str = ORDER) -> tuple[str, Any] | None:
    """The final observations among the infos of a step, and the key they stand under.

    Args:
        infos: As an environment gave them; None for none.
        order: What errors say of the order of arguments, where infos may be another one of them.
    """
    if not isinstance(infos, (dict, Mapping)):  # a dict is recognised much faster than a Mapping
        if infos is None:
            return None
        listed = isinstance(infos, (list, tuple)) and any(isinstance(info, Mapping) for info in infos)
        advice = _OF_A_LIST if listed else "give the dict that the environment gave, or {}"
        raise InvalidInputError(f"infos is a {type(infos).__name__}; {advice}. {order} Nothing was written.")
    for key in KEYS:
        if infos.get(key) is not None:
            return key, infos[key]
    return None


def final_of_next_step(given: str) -> InvalidInputError:
    """The error for final observations that are given to a storage of next-step autoreset, where there are none."""
    return InvalidInputError(
        f'{given}, and this storage was made with autoreset="NextStep", in which an '
        "episode's final observation is that of its reset step. Environments that reset themselves in the step "
        'in which an episode ends need autoreset="SameStep". Nothing was written.'
    )


def fit_final(name: str, value: Any, structure: Structure, fields: Sequence[Field], lanes: int) -> tuple[Any, ...]:
    """Final observations as the leaves that a ring takes, ``[lanes, ...]`` each, and a flag for each lane that has one.

    Args:
        name: What they are called in errors.
        value: An array or tensor ``[lanes, ...]``, a list or object array with an entry for each lane and None for
            the others, or a nest of these in the observations' structure, or a list of such nests.
        structure: The structure of the observations.
        fields: The field of each leaf.
        lanes: The number of lanes.
    """
    structure = Structure(structure.paths, name)  # as errors call it
    given = torch.zeros(lanes, dtype=torch.bool)
    leaves = [torch.zeros(lanes, *field.shape, dtype=field.dtype) for field in fields]
    if _is_listed(value) and not (structure.paths[0] and isinstance(value, tuple)):
        entries = _entries(name, value, lanes)
        for lane, entry in enumerate(entries):
            if entry is None:
                continue
            given[lane] = True
            for leaf, field, part in zip(leaves, fields, structure.leaves(entry), strict=True):
                leaf[lane] = _fit_entry(name, field, part)
        return (*leaves, given)
    if lanes == 1 and structure.is_leaf and tuple(np.shape(value)) == fields[0].shape:
        value = [value]
    for leaf, field, part in zip(leaves, fields, structure.leaves(_without_masks(value, structure)), strict=True):
        if lanes == 1 and not _is_listed(part) and tuple(np.shape(part)) == field.shape:
            part = [part]  # noqa: PLW2901 - the axis of a single environment may be left out
        for lane, entry in enumerate(_entries(name, part, lanes)):
            if entry is not None:
                given[lane] = True
                leaf[lane] = _fit_entry(name, field, entry)
    return (*leaves, given)


def ask_critic(
    critic: FinalCritic,
    infos: Any,
    cut_off: Tensor,
    structure: Structure,
    fields: Sequence[Field],
    device: torch.device,
) -> Tensor | None:
    """The values of the final observations of truncated episodes, float32 ``[envs]``, NaN elsewhere; None if none is.

    Args:
        critic: Gives the values.
        infos: Of the step, with ``final_obs``.
        cut_off: Which episodes were truncated; on a device the host waits for them.
        structure: Of the observations.
        fields: A field for each leaf.
        device: Where the critic gets the final observations.

    Raises:
        InvalidInputError: If the infos lack a final observation, or the critic returns something else than values.
    """
    host = cut_off.cpu().numpy()
    places, lanes = np.flatnonzero(host), len(host)
    if not len(places):
        return None
    found = find_final(infos, "")
    leaves: Sequence[Tensor] = ()
    has_final = np.zeros(lanes, np.bool_)
    if found is not None:
        *leaves, given = fit_final(f"infos[{found[0]!r}]", found[1], structure, fields, lanes)
        has_final = given.numpy()
    if not has_final[places].all():
        raise InvalidInputError(
            f"environment {places[~has_final[places]][0]} was truncated, and the infos hold no final_obs of it to ask "
            "the critic about; give add() the infos of the step, or final_values. Nothing was written."
        )
    chosen = torch.from_numpy(places)
    with torch.no_grad():
        values = critic(structure.build([leaf[chosen].to(device) for leaf in leaves], (len(places),)))
        known = Field("what the critic returned", (), torch.float32, f"{len(places)} final observations")
        final_values = torch.full((lanes,), torch.nan, device=device)
        final_values[chosen.to(device)] = known.fit(values, len(places), device)
    return final_values


def _is_listed(value: Any) -> bool:
    """True for one entry a lane, each of them an observation or None."""
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object)


def _entries(name: str, value: Any, lanes: int) -> Sequence[Any]:
    if not _is_listed(value):
        value = as_tensor(value, name)
    if value.ndim == 0 if isinstance(value, Tensor) else False:
        raise InvalidInputError(f"{name} is a single number; give one entry for each environment. Nothing was written.")
    if len(value) != lanes:
        raise InvalidInputError(
            f"{name} has {len(value)} entries; give one for each of {lanes} environments, None for the others. "
            "Nothing was written."
        )
    return value  # type: ignore[no-any-return]


def _without_masks(value: Any, structure: Structure) -> Any:
    """Gymnasium puts a mask ``_key`` beside each ``key`` of a dict of infos."""
    if not isinstance(value, Mapping):
        return value
    known = {path[0] for path in structure.paths if path}
    return {key: part for key, part in value.items() if key in known or not str(key).startswith("_")}


def _fit_entry(name: str, field: Field, entry: Any) -> Tensor:
    held = as_tensor(entry, name)
    if {tuple(held.shape), field.shape} == {(), (1,)}:
        held = held.reshape(field.shape)
    if tuple(held.shape) != field.shape or not can_hold(held, field.dtype):
        raise InvalidInputError(
            f"{name} has an entry of {tuple(held.shape)} {held.dtype} for {field.name}; this storage holds "
            f"{field.shape} "
            f"{field.dtype}, fixed by {field.origin}. Nothing was written."
        )
    return held.to("cpu", field.dtype)
