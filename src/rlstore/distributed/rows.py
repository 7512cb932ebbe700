"""Between the words of the vocabulary and the rows of rollouts.

Transition t of a rollout is row t (the observation, and what the actor made of it) and row t + 1 (what came of it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.distributed.fields import ACTOR_KEYS, ENV_KEYS, RolloutFields, join_params
from rlstore.distributed.memory import RolloutMemory
from rlstore.engine.rows.schema import Field, Structure, as_tensor
from rlstore.errors import InvalidInputError
from rlstore.storage import BatchDict, Sample

_CPU = torch.device("cpu")
_NEEDED = ("observations", "actions", "rewards", "terminated", "truncated")
_OPTIONAL = ("values", "distribution_params", "hidden_states")
_BESIDE = ("last_actions", "episode_returns", "episode_steps", "versions", "first_rows", "last_rows")
# What a row holds of the step that led to it: the end of a rollout, and the beginning of the next.
CARRIED = ENV_KEYS[1:]
# What the vocabulary calls the keys of a row t + 1.
_AFTER = {
    "rewards": "reward",
    "terminated": "terminated",
    "truncated": "truncated",
    "last_actions": "last_action",
    "episode_returns": "episode_return",
    "episode_steps": "episode_step",
}

Gathered = tuple[dict[str, Tensor], tuple[Tensor, ...], Tensor]


def _check_names(given: Sample, what: str, needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{what} is a {type(given).__name__}; give a dict. Nothing was written.")
    unknown = [name for name in given if name not in known]
    missing = [name for name in needed if given.get(name) is None]
    if unknown or missing:
        problem = f"cannot hold {unknown}" if unknown else f"needs {missing}"
        raise InvalidInputError(
            f"{what} for DistributedStorage {problem}; it takes {list(known)}. Nothing was written."
        )


def _fit(field: Field, value: Any, lead: tuple[int, ...]) -> Tensor:
    """A value ``[*lead, ...]`` as the field holds it; a scalar may have an axis of 1 behind it."""
    given = as_tensor(value, field.name)
    if tuple(given.shape[: len(lead)]) != lead:
        raise InvalidInputError(
            f"{field.name} is {tuple(given.shape)}; it has to begin with {lead}, as rewards do. Nothing was written."
        )
    count = 1
    for size in lead:
        count *= size
    flat = given.reshape(count, *given.shape[len(lead) :])
    fitted: Tensor = field.fit(flat, count, _CPU).to(field.dtype).unflatten(0, lead)
    return fitted


def _lead(rewards: Any, axes: int) -> tuple[int, ...]:
    shape = tuple(as_tensor(rewards, "rewards").shape)
    if len(shape) < axes or 0 in shape:
        raise InvalidInputError(
            f"rewards is {shape}; give {'[steps, rollouts]' if axes == 2 else '[environments]'}. Nothing was written."
        )
    return shape[:axes]


def _states(fields: RolloutFields, states: Any, lanes: int) -> list[Tensor]:
    """Recurrent states ``[layers, lanes, hidden]`` as ``[lanes, layers, hidden]``."""
    given = () if states is None else states if isinstance(states, (tuple, list)) else (states,)
    shapes = fields.state_shapes
    if len(given) != len(shapes):
        raise InvalidInputError(
            f"hidden_states holds {len(given)} states; this storage holds {len(shapes)}, fixed by state_shapes. "
            "Nothing was written."
        )
    fitted = []
    for index, (state, (layers, hidden)) in enumerate(zip(given, shapes, strict=True)):
        field = Field(f"hidden_states[{index}]", (layers, hidden), torch.float32, "state_shapes", lane_axis=1)
        fitted.append(field.fit(state, lanes, _CPU).transpose(0, 1))
    return fitted


@dataclass(frozen=True)
class Steps:
    """One transition of each of some environments, checked.

    Attributes:
        before: What row t holds, by key, ``[lanes, ...]``.
        after: What row t + 1 holds.
        states: The recurrent states before the step, ``[lanes, layers, hidden]``.
        lanes: The environments.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    states: list[Tensor]
    lanes: int

    @staticmethod
    def check_names(sample: Sample) -> None:
        """Refuse a sample that lacks something, or holds what it cannot."""
        _check_names(sample, "a sample", (*_NEEDED, "next_observations"), (*_NEEDED, "next_observations", *_OPTIONAL))

    @classmethod
    def of_sample(cls, fields: RolloutFields, sample: Sample) -> Steps:
        """The transition that a sample holds, or an error; nothing is written."""
        cls.check_names(sample)
        lead = _lead(sample["rewards"], 1)
        before = _acted(fields, sample, lead)
        before.update(_observed(fields, sample["observations"], "observations", lead))
        after = _observed(fields, sample["next_observations"], "next_observations", lead)
        after.update(_came(fields, {**sample, "last_actions": sample["actions"]}, lead))
        return cls(before, after, _states(fields, sample.get("hidden_states"), lead[0]), lead[0])

    def write(self, memory: RolloutMemory, slots: Tensor, step: int, carried: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write transition ``step`` of the rollouts in these slots.

        Args:
            memory: Where to.
            slots: One for each environment.
            step: From 0 on.
            carried: What the row before came with, or nothing.

        Returns:
            What the row behind this step came with.
        """
        if not carried or len(carried["reward"]) != self.lanes:
            carried = {key: torch.zeros_like(memory.blocks[key][slots, 0]) for key in CARRIED}
        if step == 0:
            _put(memory, slots, 0, carried)
            for block, state in zip(memory.states, self.states, strict=True):
                block[slots] = state
        goes_on = ~(carried["terminated"] | carried["truncated"])
        after = {
            **self.after,
            "episode_return": carried["episode_return"] * goes_on + self.after["reward"],
            "episode_step": carried["episode_step"] * goes_on + 1,
        }
        _put(memory, slots, step, self.before)
        _put(memory, slots, step + 1, after)
        if step + 1 == memory.steps:
            _put(memory, slots, step + 1, {key: torch.zeros_like(self.before[key]) for key in ACTOR_KEYS})
        return {key: after[key] for key in CARRIED}


def _put(memory: RolloutMemory, slots: Tensor, row: int, values: Mapping[str, Tensor]) -> None:
    for key, value in values.items():
        memory.blocks[key][slots, row] = value


def _field(fields: RolloutFields, key: str) -> Field:
    return next(field for field in fields.fields if field.name == key)


def _observed(fields: RolloutFields, value: Any, name: str, lead: tuple[int, ...]) -> dict[str, Tensor]:
    leaves = Structure(fields.structure.paths, name).leaves(value)
    return {field.name: _fit(field, leaf, lead) for field, leaf in zip(fields.observations, leaves, strict=True)}


def _acted(fields: RolloutFields, data: Sample, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """What the actor made of each observation; zeros for what is not told."""
    params, values = data.get("distribution_params"), data.get("values")
    outputs, baseline = _field(fields, "policy_outputs"), _field(fields, "baseline")
    joined = torch.zeros(*lead, *outputs.shape) if params is None else join_params(params, len(lead))
    return {
        "policy_outputs": _fit(outputs, joined, lead),
        "baseline": torch.zeros(lead) if values is None else _fit(baseline, values, lead),
        "action": _fit(fields.action, data["actions"], lead),
    }


def _came(fields: RolloutFields, data: Sample, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """What came of each step, as far as it is told."""
    return {key: _fit(_field(fields, key), data[name], lead) for name, key in _AFTER.items() if name in data}


# ---------------------------------------------------------------------------------------------------- reading


def _params(fields: RolloutFields, outputs: Tensor) -> tuple[Tensor, ...]:
    if fields.action_kind != "Box":
        return (outputs,)
    half = outputs.shape[-1] // 2
    return outputs[..., :half], outputs[..., half:]


def _transitions(memory: RolloutMemory, tensors: Mapping[str, Tensor], states: tuple[Tensor, ...]) -> BatchDict:
    fields, size = memory.fields, tensors["reward"][1:].shape
    data: BatchDict = {
        "observations": fields.structure.build([tensors[name][:-1] for name in fields.structure.names], size),
        "actions": tensors["action"][:-1],
        **{name: tensors[_AFTER[name]][1:].unsqueeze(-1) for name in ("rewards", "terminated", "truncated")},
        "values": tensors["baseline"][:-1].unsqueeze(-1),
    }
    if fields.policy_width:
        data["distribution_params"] = _params(fields, tensors["policy_outputs"][:-1])
    if states:
        data["hidden_states"] = states
    return data


def batch_of(memory: RolloutMemory, gathered: Gathered, slots: list[int], device: torch.device) -> BatchDict:
    """The rollouts of these slots as a batch of transitions ``[steps, rollouts, ...]`` on a device."""
    tensors = {key: tensor.to(device) for key, tensor in gathered[0].items()}
    states = tuple(state.to(device) for state in gathered[1])
    batch = _transitions(memory, tensors, states)
    # Copies, or who changes the observations in place would change those.
    leaves = [tensors[name][1:].clone() for name in memory.fields.structure.names]
    batch["next_observations"] = memory.fields.structure.build(leaves, leaves[0].shape[:2])
    times = torch.arange(memory.steps, device=device).unsqueeze(1)
    batch["rows"] = times * memory.count + torch.tensor(slots, device=device)
    return batch


def slice_of(memory: RolloutMemory, gathered: Gathered, device: torch.device) -> BatchDict:
    """The same rollouts whole, with what the vocabulary has no word for."""
    fields, versions = memory.fields, gathered[2]
    tensors = {key: tensor.to(device) for key, tensor in gathered[0].items()}
    data = _transitions(memory, tensors, tuple(state.to(device) for state in gathered[1]))
    last = [tensors[name][-1] for name in fields.structure.names]
    data["last_observations"] = fields.structure.build(last, last[0].shape[:1])
    data["last_actions"] = tensors["last_action"][1:]
    for name in ("episode_returns", "episode_steps"):
        data[name] = tensors[_AFTER[name]][1:].unsqueeze(-1)
    data["first_rows"] = {key: tensors[key][0] for key in CARRIED}
    data["last_rows"] = {key: tensors[key][-1] for key in ACTOR_KEYS}
    data["versions"] = versions.to(device)
    return data


# ---------------------------------------------------------------------------------------------------- a whole slice


def check_slice_names(data: Sample) -> None:
    """Refuse data that lack something, or hold what they cannot."""
    known = (*_NEEDED, "next_observations", "last_observations", *_OPTIONAL, *_BESIDE)
    _check_names(data, "new_data", _NEEDED if data else (), known)


@dataclass(frozen=True)
class Rows:
    """Whole rollouts, checked: by key ``[steps + 1, rollouts, ...]``, and their states and versions."""

    tensors: dict[str, Tensor]
    states: list[Tensor]
    versions: Tensor
    count: int

    def write(self, memory: RolloutMemory, slot: int, index: int) -> None:
        """Write one of them into a slot."""
        for key, tensor in self.tensors.items():
            memory.blocks[key][slot] = tensor[:, index]
        for block, state in zip(memory.states, self.states, strict=True):
            block[slot] = state[index]
        memory.versions[slot] = self.versions[index]


def rows_of(fields: RolloutFields, steps: int, data: Sample) -> Rows:
    """The rollouts that data of the form of :func:`slice_of` hold, or an error."""
    check_slice_names(data)
    if not data:
        return Rows({}, [], torch.zeros(0, dtype=torch.int64), 0)
    lead = _lead(data["rewards"], 2)
    if lead[0] != steps:
        raise InvalidInputError(
            f"new_data has rollouts of {lead[0]} steps, and this storage of {steps}. Nothing was changed."
        )
    count = lead[1]
    acted, came = _acted(fields, data, lead), _came(fields, {"last_actions": data["actions"], **data}, lead)
    first = _parts(fields, data, "first_rows", CARRIED, count)
    last = _parts(fields, data, "last_rows", ACTOR_KEYS, count)
    came = {**_episodes(came, first), **came}
    seen, following = _observed(fields, data["observations"], "observations", lead), _following(fields, data, lead)
    tensors = {key: torch.cat([seen[key], following[key].unsqueeze(0)]) for key in seen}
    tensors.update({key: torch.cat([first[key].unsqueeze(0), came[key]]) for key in CARRIED})
    tensors.update({key: torch.cat([acted[key], last[key].unsqueeze(0)]) for key in ACTOR_KEYS})
    versions = Field("versions", (), torch.int64, f"the {count} rollouts of new_data")
    told = data.get("versions", torch.zeros(count, dtype=torch.int64))
    return Rows(tensors, _states(fields, data.get("hidden_states"), count), _fit(versions, told, (count,)), count)


def _following(fields: RolloutFields, data: Sample, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """The observations behind the last step."""
    if data.get("last_observations") is not None:
        return _observed(fields, data["last_observations"], "last_observations", lead[1:])
    if data.get("next_observations") is None:
        raise InvalidInputError("new_data needs 'last_observations' or 'next_observations'. Nothing was changed.")
    seen = _observed(fields, data["next_observations"], "next_observations", lead)
    return {key: value[-1] for key, value in seen.items()}


def _parts(fields: RolloutFields, data: Sample, name: str, keys: tuple[str, ...], count: int) -> dict[str, Tensor]:
    """Single rows of all rollouts, by key; zeros for what is not told."""
    given = data.get(name) or {}
    _check_names(given, name, (), keys)
    blank = {key: torch.zeros((count, *_field(fields, key).shape), dtype=_field(fields, key).dtype) for key in keys}
    return {**blank, **{key: _fit(_field(fields, key), given[key], (count,)) for key in given}}


def _episodes(came: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The return and the steps of the episode up to each step."""
    total, length = first["episode_return"], first["episode_step"]
    ended = first["terminated"] | first["truncated"]
    totals, lengths = [], []
    for reward, terminated, truncated in zip(came["reward"], came["terminated"], came["truncated"], strict=True):
        total, length = total * ~ended + reward, length * ~ended + 1
        ended = terminated | truncated
        totals.append(total)
        lengths.append(length)
    return {"episode_return": torch.stack(totals), "episode_step": torch.stack(lengths)}
