"""How episodes end in a step, as environments report it: two flags, and final observations to ask a critic about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.rows.finals import find_final, fit_final
from rlstore.engine.rows.schema import Field, Structure, is_in_memory
from rlstore.errors import InvalidInputError

# Flags of a step, bool [envs]: an array of the host's own, or a tensor on another device.
_BOOL = np.dtype(np.bool_)
Flags = np.ndarray[Any, np.dtype[np.bool_]] | Tensor
# The value of final observations [k, ...], as [k] or [k, 1].
FinalCritic = Callable[[Any], Tensor]


def read_flags(name: str, value: Any, lanes: int) -> Flags:
    """The flags of a step, checked; what is in the host's memory stays there, and may be that of the caller.

    Raises:
        InvalidInputError: If they do not fit.
    """
    kind = type(value)
    if kind is np.ndarray and value.dtype is _BOOL and value.shape == (lanes,):
        return value  # type: ignore[no-any-return]
    if not (kind is Tensor and value.dtype is torch.bool and value.shape == (lanes,) and is_in_memory(value)):
        device = value.device if isinstance(value, Tensor) else torch.device("cpu")
        value = Field(name, (), torch.uint8, f"num_envs={lanes}", is_flag=True).fit(value, lanes, device) != 0
    return value if value.is_cuda else value.numpy()  # type: ignore[no-any-return]


def joined_flags(terminated: Any, truncated: Any, lanes: int) -> tuple[Flags, Flags]:
    """Which episodes ended, and which of them were only truncated: where both flags are set, termination wins.

    Both are new, whatever the caller does with its own later.
    """
    over, cut_off = read_flags("terminated", terminated, lanes), read_flags("truncated", truncated, lanes)
    if isinstance(over, Tensor) or isinstance(cut_off, Tensor):
        over, cut_off = alike(over, cut_off)
        return over | cut_off, cut_off > over
    ended = over | cut_off
    # In most steps no episode ends.
    return ended, cut_off > over if np.count_nonzero(ended) else ended


def alike(one: Flags, other: Flags) -> tuple[Any, Any]:
    """Both where the one of them is that is on a device."""
    if isinstance(one, Tensor) and not isinstance(other, Tensor):
        return one, torch.from_numpy(other).to(one.device)
    if isinstance(other, Tensor) and not isinstance(one, Tensor):
        return torch.from_numpy(one).to(other.device), other
    return one, other


def ask_critic(
    critic: FinalCritic,
    infos: Any,
    cut_off: Flags,
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
    host = cut_off.cpu().numpy() if isinstance(cut_off, Tensor) else cut_off
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
