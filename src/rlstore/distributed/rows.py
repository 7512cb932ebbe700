"""Between the vocabulary of the ten methods and the rows of rollouts.

Transition t of a rollout is row t (the observation, what the actor computed from it, the extra fields) and row t + 1
(what the environment returned).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstore.distributed.fields import ACTOR_KEYS, CPU, STEP_KEYS, RolloutFields, join_params
from rlstore.distributed.memory import Gathered, RolloutMemory
from rlstore.engine.rows.schema import Field, Structure, as_tensor
from rlstore.errors import InvalidInputError
from rlstore.storage import BatchDict, Sample
from rlstore.trainer import check_names, fit

_OWNER = "DistributedStorage"
_NEEDED = ("observations", "actions", "rewards", "terminated", "truncated")
_OPTIONAL = ("values", "distribution_params", "hidden_states")
# In get_all_buffer_data and insert_data_slice only.
_SLICE_ONLY = ("last_actions", "episode_returns", "episode_steps", "versions", "first_rows", "last_rows")
# The names that the vocabulary has for the keys of row t + 1.
_STEP_NAMES = {
    "rewards": "reward",
    "terminated": "terminated",
    "truncated": "truncated",
    "last_actions": "last_action",
    "episode_returns": "episode_return",
    "episode_steps": "episode_step",
}
# What an extra field cannot be called: the keys of a row, and the names of the vocabulary.
_OTHER_NAMES = ("obs", "next_observations", "last_observations", "rows", "states", "version", "timestep", "self")
TAKEN_NAMES = frozenset((*STEP_KEYS, *ACTOR_KEYS, *_NEEDED, *_OPTIONAL, *_SLICE_ONLY, *_OTHER_NAMES))


# ---------------------------------------------------------------------------------------------------- checking


def check_sample_names(sample: Sample, extra: Sequence[str]) -> None:
    """Refuse a sample of one step with a missing or an unknown name."""
    needed = (*_NEEDED, "next_observations", *extra)
    check_names(sample, "a sample", _OWNER, (*needed, *_OPTIONAL), needed)


def check_slice_names(data: Sample, extra: Sequence[str]) -> None:
    """Refuse data for insert_data_slice with a missing or an unknown name."""
    known = (*_NEEDED, "next_observations", "last_observations", *_OPTIONAL, *_SLICE_ONLY, *extra)
    check_names(data, "new_data", _OWNER, known, (*_NEEDED, *extra) if data else ())


def _fit(field: Field, value: Any, lead: Sequence[int]) -> Tensor:
    return fit(field, value, lead, CPU).to(field.dtype)


def _zeros(field: Field, lead: Sequence[int]) -> Tensor:
    return torch.zeros((*lead, *field.shape), dtype=field.dtype)


def _lead(rewards: Any, axes: int) -> tuple[int, ...]:
    """The leading axes of a sample, which are those of its rewards."""
    shape = tuple(as_tensor(rewards, "rewards").shape)
    if len(shape) < axes or 0 in shape:
        raise InvalidInputError(
            f"rewards is {shape}; give {'[steps, rollouts]' if axes == 2 else '[environments]'}. Nothing was written."
        )
    return shape[:axes]


def _observed(fields: RolloutFields, value: Any, name: str, lead: Sequence[int]) -> dict[str, Tensor]:
    leaves = Structure(fields.structure.paths, name).leaves(value)
    return {field.name: _fit(field, leaf, lead) for field, leaf in zip(fields.observations, leaves, strict=True)}


def _acted(fields: RolloutFields, data: Sample, lead: Sequence[int]) -> dict[str, Tensor]:
    """What row t holds besides the observation: the actor's keys, zero if they are not given, and the extra fields."""
    columns, params = fields.columns, data.get("distribution_params")
    given = {
        "policy_outputs": None if params is None else join_params(params, len(lead)),
        "baseline": data.get("values"),
        "action": data["actions"],
        **{name: data[name] for name in fields.extra},
    }
    return {
        key: _zeros(columns[key], lead) if value is None else _fit(columns[key], value, lead)
        for key, value in given.items()
    }


def _stepped(fields: RolloutFields, data: Sample, lead: Sequence[int]) -> dict[str, Tensor]:
    """What row t + 1 holds besides the observation, as far as it is given."""
    return {key: _fit(fields.columns[key], data[name], lead) for name, key in _STEP_NAMES.items() if name in data}


# ---------------------------------------------------------------------------------------------------- one step


@dataclass(frozen=True)
class Step:
    """One transition of each of some environments, checked.

    Attributes:
        before: What row t holds, by key, ``[lanes, ...]``.
        after: What row t + 1 holds.
        states: The recurrent states before the step, ``[lanes, layers, hidden]``.
        lanes: The number of environments.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    states: list[Tensor]
    lanes: int

    @classmethod
    def of_sample(cls, fields: RolloutFields, sample: Sample) -> Step:
        """The transition of a sample."""
        check_sample_names(sample, fields.extra)
        lead = _lead(sample["rewards"], 1)
        before = {
            **_acted(fields, sample, lead),
            **_observed(fields, sample["observations"], "observations", lead),
        }
        after = {
            **_observed(fields, sample["next_observations"], "next_observations", lead),
            **_stepped(fields, {**sample, "last_actions": sample["actions"]}, lead),
        }
        return cls(before, after, fields.fit_states(sample.get("hidden_states"), "hidden_states", lead[0]), lead[0])

    def write(
        self, memory: RolloutMemory, slots: list[int], step: int, carried: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Write transition ``step`` of the rollouts in these slots.

        Args:
            memory: The slots.
            slots: One for each environment.
            step: From 0 to T - 1.
            carried: The :data:`STEP_KEYS` of the row before, or nothing.

        Returns:
            The :data:`STEP_KEYS` of the row that follows.
        """
        fields = memory.fields
        if not carried or len(carried["reward"]) != self.lanes:
            carried = {key: _zeros(fields.columns[key], (self.lanes,)) for key in STEP_KEYS}
        if step == 0:
            _put(memory, slots, 0, carried)
            memory.write_states(slots, self.states)
        continues = ~(carried["terminated"] | carried["truncated"])
        after = {
            **self.after,
            "episode_return": carried["episode_return"] * continues + self.after["reward"],
            "episode_step": carried["episode_step"] * continues + 1,
        }
        _put(memory, slots, step, self.before)
        _put(memory, slots, step + 1, after)
        if step + 1 == memory.steps:
            # The actor did not act on the last observation.
            unknown = (*ACTOR_KEYS, *fields.extra)
            _put(memory, slots, step + 1, {key: torch.zeros_like(self.before[key]) for key in unknown})
        return {key: after[key] for key in STEP_KEYS}


def carried_rows(fields: RolloutFields, read: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """What :meth:`Step.write` returned before it was saved: nothing, or the :data:`STEP_KEYS` of some environments."""
    found = {key: value for key, value in read.items() if value is not None}
    for key, value in found.items():
        like = _zeros(fields.columns[key], (len(found["reward"]),))
        if (value.shape, value.dtype) != (like.shape, like.dtype) or len(found) != len(read):
            raise InvalidInputError(
                f"carried {key} is {tuple(value.shape)} {value.dtype}; {tuple(like.shape)} is needed"
            )
    return found


def _put(memory: RolloutMemory, slots: list[int], row: int, values: Mapping[str, Tensor]) -> None:
    index = torch.tensor(slots)
    for key, value in values.items():
        memory.blocks[key][index, row] = value


# ---------------------------------------------------------------------------------------------------- reading


def batch_of(memory: RolloutMemory, gathered: Gathered, slots: Sequence[int], device: torch.device) -> BatchDict:
    """The rollouts of these slots as a batch of transitions ``[steps, rollouts, ...]`` on a device."""
    tensors = {key: tensor.to(device) for key, tensor in gathered.tensors.items()}
    batch = _transitions(memory.fields, tensors, gathered.states, device)
    # Copies, so that in-place changes of the observations do not reach them.
    leaves = [tensors[name][1:].clone() for name in memory.fields.structure.names]
    batch["next_observations"] = memory.fields.structure.build(leaves, leaves[0].shape[:2])
    times = torch.arange(memory.steps, device=device).unsqueeze(1)
    batch["rows"] = times * memory.count + torch.tensor(slots, device=device)
    return batch


def slice_of(memory: RolloutMemory, gathered: Gathered, device: torch.device) -> BatchDict:
    """The rollouts of some slots with everything that they hold, as :func:`rows_of` takes it."""
    fields = memory.fields
    tensors = {key: tensor.to(device) for key, tensor in gathered.tensors.items()}
    data = _transitions(fields, tensors, gathered.states, device)
    last = [tensors[name][-1] for name in fields.structure.names]
    data["last_observations"] = fields.structure.build(last, last[0].shape[:1])
    data["last_actions"] = tensors["last_action"][1:]
    for name in ("episode_returns", "episode_steps"):
        data[name] = tensors[_STEP_NAMES[name]][1:].unsqueeze(-1)
    data["first_rows"] = {key: tensors[key][0] for key in STEP_KEYS}
    data["last_rows"] = {key: tensors[key][-1] for key in (*ACTOR_KEYS, *fields.extra)}
    data["versions"] = gathered.versions.to(device)
    return data


def _transitions(
    fields: RolloutFields, tensors: Mapping[str, Tensor], states: Sequence[Tensor], device: torch.device
) -> BatchDict:
    size = tensors["reward"][1:].shape
    data: BatchDict = {}
    for name, (keys, behind) in transition_keys(fields).items():
        leaves = [tensors[key][behind : behind + size[0]] for key in keys]
        data[name] = transition_value(fields, name, leaves, size)
    if states:
        data["hidden_states"] = tuple(state.to(device) for state in states)
    return data


def transition_keys(fields: RolloutFields) -> dict[str, tuple[Sequence[str], int]]:
    """What a transition holds, by name: the keys that it is in, and whether in row t (0) or t + 1."""
    params: dict[str, tuple[Sequence[str], int]] = {"distribution_params": (["policy_outputs"], 0)}
    return {
        "observations": (fields.structure.names, 0),
        "actions": (["action"], 0),
        **{name: ([_STEP_NAMES[name]], 1) for name in ("rewards", "terminated", "truncated")},
        "values": (["baseline"], 0),
        **(params if fields.policy_width else {}),
        **{name: ([name], 0) for name in fields.extra},
    }


def transition_value(fields: RolloutFields, name: str, leaves: Sequence[Tensor], shape: torch.Size) -> Any:
    """What transitions hold under a name, from the tensors ``[*shape, ...]`` of its keys; scalars get an axis of 1."""
    if name == "observations":
        return fields.structure.build(leaves, shape)
    if name == "distribution_params":
        return _params(fields, leaves[0])
    is_scalar = name != "actions" and leaves[0].dim() == len(shape)
    return leaves[0].unsqueeze(-1) if is_scalar else leaves[0]


def _params(fields: RolloutFields, outputs: Tensor) -> tuple[Tensor, ...]:
    if fields.action_kind != "Box":
        return (outputs,)
    half = outputs.shape[-1] // 2
    return outputs[..., :half], outputs[..., half:]


# ---------------------------------------------------------------------------------------------------- whole rollouts


@dataclass(frozen=True)
class Rows:
    """Whole rollouts, checked.

    Attributes:
        tensors: By key ``[rollouts, steps + 1, ...]``.
        states: The recurrent states, ``[rollouts, layers, hidden]`` each.
        versions: int64 ``[rollouts]``.
    """

    tensors: dict[str, Tensor]
    states: list[Tensor]
    versions: Tensor

    def __len__(self) -> int:
        return len(self.versions)

    def write(self, memory: RolloutMemory, slots: list[int]) -> None:
        """Write them to slots, one for each."""
        index = torch.tensor(slots)
        for key, tensor in self.tensors.items():
            memory.blocks[key][index] = tensor
        memory.write_states(slots, self.states)
        memory.versions[index, 0] = self.versions


def rows_of(fields: RolloutFields, steps: int, data: Sample) -> Rows:
    """The rollouts in data of the form of :func:`slice_of`."""
    check_slice_names(data, fields.extra)
    if not data:
        return Rows({}, [], torch.zeros(0, dtype=torch.int64))
    lead = _lead(data["rewards"], 2)
    if lead[0] != steps:
        raise InvalidInputError(
            f"new_data has rollouts of {lead[0]} steps, and this storage of {steps}. Nothing was changed."
        )
    lanes = lead[1:]
    seen, last_seen = _observed(fields, data["observations"], "observations", lead), _following(fields, data, lead)
    acted, last_acted = _acted(fields, data, lead), _single_rows(fields, data, "last_rows", lanes)
    stepped = _stepped(fields, {"last_actions": data["actions"], **data}, lead)
    first = _single_rows(fields, data, "first_rows", lanes)
    stepped = {**_episodes(stepped, first), **stepped}
    tensors = {key: torch.cat([seen[key], last_seen[key].unsqueeze(0)]) for key in seen}
    tensors.update({key: torch.cat([first[key].unsqueeze(0), stepped[key]]) for key in STEP_KEYS})
    tensors.update({key: torch.cat([acted[key], last_acted[key].unsqueeze(0)]) for key in acted})
    version = Field("versions", (), torch.int64, f"the {lanes[0]} rollouts of new_data")
    versions = _fit(version, data["versions"], lanes) if "versions" in data else _zeros(version, lanes)
    states = fields.fit_states(data.get("hidden_states"), "hidden_states", lanes[0])
    return Rows({key: tensor.transpose(0, 1) for key, tensor in tensors.items()}, states, versions)


def _following(fields: RolloutFields, data: Sample, lead: Sequence[int]) -> dict[str, Tensor]:
    """The observations after the last step."""
    if data.get("last_observations") is not None:
        return _observed(fields, data["last_observations"], "last_observations", lead[1:])
    if data.get("next_observations") is None:
        raise InvalidInputError("new_data needs 'last_observations' or 'next_observations'. Nothing was changed.")
    seen = _observed(fields, data["next_observations"], "next_observations", lead)
    return {key: value[-1] for key, value in seen.items()}


def _single_rows(fields: RolloutFields, data: Sample, name: str, lanes: Sequence[int]) -> dict[str, Tensor]:
    """The first or the last rows of all rollouts, by key; zeros for what is not given."""
    keys = STEP_KEYS if name == "first_rows" else (*ACTOR_KEYS, *fields.extra)
    given = data.get(name) or {}
    check_names(given, name, _OWNER, keys)
    # The actor may not have acted on the last observation: then its action is 0, whether that is one or not.
    columns = {**fields.columns, "action": replace(fields.columns["action"], rule=None)}
    return {key: _fit(columns[key], given[key], lanes) if key in given else _zeros(columns[key], lanes) for key in keys}


def _episodes(stepped: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The return and the length of the episode up to each step."""
    total, length = first["episode_return"], first["episode_step"]
    ended = first["terminated"] | first["truncated"]
    totals, lengths = [], []
    for reward, terminated, truncated in zip(
        stepped["reward"], stepped["terminated"], stepped["truncated"], strict=True
    ):
        total, length = total * ~ended + reward, length * ~ended + 1
        ended = terminated | truncated
        totals.append(total)
        lengths.append(length)
    return {"episode_return": torch.stack(totals), "episode_step": torch.stack(lengths)}
