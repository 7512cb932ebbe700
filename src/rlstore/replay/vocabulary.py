"""Steps of replay in the words of the vocabulary (see :mod:`rlstore.storage`): taken in, and given out as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.batches.select import rows_in_order
from rlstore.engine.rows.appender import Fit
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.finals import fit_final
from rlstore.engine.rows.schema import Field, Structure, as_tensor
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError
from rlstore.replay.held_steps import RingSteps
from rlstore.storage import Sample
from rlstore.trainer import check_names, fit

# What a step must hold, and what it may hold.
_NEEDED = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations")
_OPTIONAL = ("final_observations", "masks", "priorities")


def check_sample(sample: Sample, fields: StepFields, owner: str) -> None:
    """Refuse steps that lack something or hold what there is no field for."""
    known = (*_NEEDED, *_OPTIONAL, *fields.named)
    check_names(sample, "a sample", owner, known, (*_NEEDED, *fields.extra_names))


def step_arguments(sample: Sample, fields: StepFields, owner: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A step as the arguments of ``add``."""
    check_sample(sample, fields, owner)
    final = sample.get("final_observations")
    infos = {} if final is None else {"final_obs": final}
    step = [sample[name] for name in _NEEDED[:-1]]
    named = {name: sample.get(name) for name in fields.named}
    optional = {"mask": sample.get("masks"), "priorities": sample.get("priorities")}
    return (*step, infos, sample["next_observations"]), {**optional, **named}


def steps_at_once(
    data: Sample, fields: StepFields, steps: int, ring: EpisodeRing, has_final: Tensor | None = None
) -> tuple[tuple[Any, ...] | None, Fit]:
    """Steps ``[steps, lanes, ...]`` as a kernel may be able to read them, and what fits them to the ring if it cannot.

    Args:
        data: The steps, which may hold ``final_observations`` of all lanes.
        fields: What a step consists of.
        steps: The number of steps.
        ring: Where they go.
        has_final: The steps whose final observations count, bool ``[steps]``; None for all.
    """
    where = None if has_final is None else has_final.unsqueeze(-1).repeat(1, ring.lanes)
    place = ((steps,), ring.lanes, ring.device)

    def fit_all() -> tuple[Tensor | None, ...]:
        return (*fit_steps(data, fields, *place), *_fit_finals(data, where, fields, *place))

    if fields.hidden_shapes or data.get("hidden_states") is not None:
        return None, fit_all  # their axes are in another order
    final, structure = data.get("final_observations"), fields.structure
    finals = (None,) * (len(structure.paths) + 1) if final is None else (*structure.leaves(final), where)
    columns = (data["actions"], data["rewards"], *(data[name] for name in fields.extra_names))
    flags = (data["terminated"], data["truncated"], data.get("masks"))
    leaves = (*structure.leaves(data["observations"]), *fields.next_structure.leaves(data["next_observations"]))
    return (*leaves, *columns, *flags, *finals), fit_all


def fit_steps(
    data: Sample, fields: StepFields, lead: tuple[int, ...], lanes: int, device: torch.device
) -> tuple[Tensor | None, ...]:
    """The values of steps ``[*lead, lanes, ...]``, up to the mask, as a ring takes them; nothing is written.

    Raises:
        InvalidInputError: If a value does not fit.
    """
    axes = (*lead, lanes)

    def flag(name: str) -> Tensor:
        return fit(Field(name, (), torch.uint8, f"num_envs={lanes}", is_flag=True), data[name], axes, device)

    leaves = [
        fit(field, leaf, axes, device)
        for name, structure in (("observations", fields.structure), ("next_observations", fields.next_structure))
        for field, leaf in zip(fields.observations, structure.leaves(data[name]), strict=True)
    ]
    states = data.get("hidden_states")
    states = states if isinstance(states, tuple) else () if states is None else (states,)
    if len(states) != len(fields.hidden_shapes):
        raise InvalidInputError(f"hidden_states has to hold {len(fields.hidden_shapes)} states. Nothing was changed.")
    hidden = [
        as_tensor(state, f"hidden_states[{i}]").transpose(len(lead), len(lead) + 1) for i, state in enumerate(states)
    ]
    given = (data["actions"], data["rewards"], *hidden, *(data[name] for name in fields.extra_names))
    masks = None if data.get("masks") is None else flag("masks")
    columns = [
        fit(column, value if masks is None or column.rule is None else _without(column, value, masks), axes, device)
        for column, value in zip(fields.columns, given, strict=True)
    ]
    if not lead and data.get("final_observations") is not None:
        fit_final("final_observations", data["final_observations"], fields.structure, fields.observations, lanes)
    return (*leaves, *columns, flag("terminated"), flag("truncated"), masks)


def _fit_finals(
    data: Sample, where: Tensor | None, fields: StepFields, lead: tuple[int, ...], lanes: int, device: torch.device
) -> tuple[Tensor | None, ...]:
    """What follows the mask of :func:`fit_steps`: final observations, and where they are given ``[*lead, lanes]``."""
    given = data.get("final_observations")
    if given is None:
        return (None,) * (len(fields.observations) + 1)
    structure = Structure(fields.structure.paths, "final_observations")
    named = zip(structure.names, fields.observations, structure.leaves(given), strict=True)
    finals = [fit(replace(field, name=name), leaf, (*lead, lanes), device) for name, field, leaf in named]
    return (*finals, None if where is None else where.to(device))


def _without(column: Field, value: Any, masks: Tensor) -> Any:
    """A value ``[*lead, lanes, ...]`` with something valid where masks are 0."""
    given = as_tensor(value, column.name)
    if given.shape[: masks.dim()] != masks.shape:
        return given  # it does not fit
    return column.without(given.flatten(0, masks.dim() - 1), masks.flatten()).view(given.shape)


def whole_data(ring: EpisodeRing, fields: StepFields, device: str | torch.device) -> dict[str, Any]:
    """Copies of all rows, ``[steps, envs, ...]`` by the names of the vocabulary, the oldest step first, on a device.

    Environments that hold fewer steps than others are padded with zeros; ``masks`` is False there.
    """
    rows = rows_in_order(ring)
    source = RingSteps(ring, fields.structure, torch.device(device))
    data = source.read_or_zeros(rows, source.names)
    data["masks"] = (rows >= 0).to(device)
    hidden = data.pop("hidden_states", None)
    if isinstance(hidden, Tensor):
        data["hidden_states"] = hidden.transpose(1, 2)  # [steps, layers, envs, hidden]
    elif hidden is not None:
        data["hidden_states"] = tuple(state.transpose(1, 2) for state in hidden)
    return data
