"""What a rollout of DistributedStorage holds: its keys, their shapes and dtypes, and the check of what is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.rows.schema import Field, Structure, as_tensor
from rlstore.engine.rows.spaces import ActionSpec, SpaceLike, action_spec, observation_fields
from rlstore.errors import InvalidInputError

_CPU = torch.device("cpu")
# What comes from the environment and what from the actor; the observations are the environment's first part.
ENV_KEYS = ("obs", "reward", "terminated", "truncated", "episode_return", "episode_step", "last_action")
ACTOR_KEYS = ("policy_outputs", "baseline", "action")


@dataclass(frozen=True)
class RolloutFields:
    """The fields of a row, in the order of the keys.

    Attributes:
        structure: How the observations hang together; their keys are its names: ``obs``, or ``obs["camera"]``.
        fields: One for each key.
        action_kind: "Discrete", "Box", "MultiDiscrete" or "MultiBinary".
        state_shapes: ``(layers, hidden)`` of each recurrent state.
    """

    structure: Structure
    fields: tuple[Field, ...]
    action_kind: str
    state_shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of_spaces(
        cls, owner: str, observation_space: SpaceLike, action_space: SpaceLike, state_shapes: Sequence[tuple[int, int]]
    ) -> RolloutFields:
        """The fields for a pair of spaces; the observations of a mapping that names no dtype are uint8."""
        structure, observed = observation_fields(observation_space, "obs", owner, torch.uint8)
        spec = action_spec(action_space)
        origin = f"the action_space given to {owner}()"
        action = Field("action", spec.shape, torch.float32 if spec.kind == "Box" else torch.int64, origin)
        return cls.of_parts(structure, observed, action, spec.kind, _policy_width(spec), state_shapes)

    @classmethod
    def of_sample(
        cls, sample: Mapping[str, Any], state_shapes: Sequence[tuple[int, int]], lead: int = 1
    ) -> RolloutFields:
        """The fields for samples like this one, in the words of :mod:`rlstore.storage`.

        Args:
            sample: Of N environments, or (``lead`` 2) of some steps and N of them.
            state_shapes: ``(layers, hidden)`` of each recurrent state.
            lead: The axes before a field's own.
        """
        origin = "the first sample"
        structure = Structure.of(sample["observations"], "obs")
        leaves = [as_tensor(leaf, "observations") for leaf in structure.leaves(sample["observations"])]
        observed = [
            Field(name, tuple(leaf.shape[lead:]), leaf.dtype, origin)
            for name, leaf in zip(structure.names, leaves, strict=True)
        ]
        actions, params = as_tensor(sample["actions"], "actions"), sample.get("distribution_params")
        is_float = actions.dtype.is_floating_point
        kind = "Box" if is_float else "Discrete" if actions.dim() == lead else "MultiDiscrete"
        action = Field("action", tuple(actions.shape[lead:]), torch.float32 if is_float else torch.int64, origin)
        width = 0 if params is None else join_params(params, lead).shape[-1]
        return cls.of_parts(structure, observed, action, kind, width, state_shapes)

    @classmethod
    def of_parts(
        cls,
        structure: Structure,
        observed: Sequence[Field],
        action: Field,
        kind: str,
        policy_width: int,
        state_shapes: Sequence[tuple[int, int]],
    ) -> RolloutFields:
        """The fields for these observations and actions."""

        def scalar(name: str, dtype: torch.dtype = torch.float32) -> Field:
            return Field(name, (), dtype, "DistributedStorage", is_flag=dtype == torch.bool)

        fields = (
            *observed,
            scalar("reward"),
            scalar("terminated", torch.bool),
            scalar("truncated", torch.bool),
            scalar("episode_return"),
            scalar("episode_step", torch.int32),
            Field("last_action", action.shape, action.dtype, action.origin),
            Field("policy_outputs", (policy_width,), torch.float32, action.origin),
            scalar("baseline"),
            action,
        )
        shapes = tuple((int(layers), int(hidden)) for layers, hidden in state_shapes)
        return cls(structure, fields, kind, shapes)

    @property
    def observations(self) -> tuple[Field, ...]:
        """The fields of the observations."""
        return self.fields[: len(self.structure.paths)]

    @property
    def policy_width(self) -> int:
        """The numbers in ``policy_outputs``."""
        return self.fields[-3].shape[0]

    @property
    def action(self) -> Field:
        """The field of the actions."""
        return self.fields[-1]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of one rollout."""
        return sum(math.prod(field.shape) * field.dtype.itemsize for field in self.fields)

    def leaves(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by key, a nest of observations under ``obs`` taken apart; unknown keys are refused."""
        flat: dict[str, Any] = {}
        for key, value in values.items():
            if key == "obs" and not self.structure.is_leaf:
                flat.update(zip(self.structure.names, self.structure.leaves(value), strict=True))
            else:
                flat[key] = value
        known = [field.name for field in self.fields]
        unknown = flat.keys() - known
        if unknown:
            raise InvalidInputError(f"a row cannot hold {sorted(unknown)}; it holds {known}. Nothing was written.")
        return flat

    def fit_row(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """The values of one row of one slot, each of its field's shape and dtype; all are checked.

        A value may have axes of 1 before its own shape, as ``(1, 1, ...)``.
        """
        flat = self.leaves(values)
        return {
            field.name: flat[field.name]
            if _fits_as_it_is(field, flat[field.name])
            else _fit_one(field, flat[field.name])
            for field in self.fields
            if field.name in flat
        }

    def fit_states(self, states: Any) -> list[Tensor]:
        """The recurrent states of one rollout, ``(layers, 1, hidden)`` or ``(layers, hidden)`` each."""
        given = list(states) if isinstance(states, (tuple, list)) else [states]
        if len(given) != len(self.state_shapes):
            raise InvalidInputError(
                f"{len(given)} states were given; this storage holds {len(self.state_shapes)}, fixed by state_shapes. "
                "Nothing was written."
            )
        fitted = []
        for index, (state, (layers, hidden)) in enumerate(zip(given, self.state_shapes, strict=True)):
            field = Field(f"states[{index}]", (layers, 1, hidden), torch.float32, "state_shapes")
            tensor = as_tensor(state, field.name)
            if tuple(tensor.shape) == (layers, hidden):
                tensor = tensor.unsqueeze(1)
            fitted.append(field.fit(tensor.unsqueeze(0), 1, _CPU)[0])
        return fitted

    def described(self) -> dict[str, Any]:
        """The fields that came from a first sample, as settings."""
        return {
            "paths": [list(path) for path in self.structure.paths],
            "shapes": [list(field.shape) for field in self.observations],
            "dtypes": [field.dtype for field in self.observations],
            "action_shape": list(self.action.shape),
            "action_kind": self.action_kind,
            "policy_width": self.policy_width,
        }

    @classmethod
    def of_described(cls, settings: Mapping[str, Any], state_shapes: Sequence[tuple[int, int]]) -> RolloutFields:
        """The fields that :meth:`described` gave."""
        structure, kind = Structure([tuple(path) for path in settings["paths"]], "obs"), settings["action_kind"]
        parts = zip(structure.names, settings["shapes"], settings["dtypes"], strict=True)
        observed = [Field(name, tuple(shape), dtype, "the snapshot") for name, shape, dtype in parts]
        dtype = torch.float32 if kind == "Box" else torch.int64
        action = Field("action", tuple(settings["action_shape"]), dtype, "the snapshot")
        return cls.of_parts(structure, observed, action, kind, settings["policy_width"], state_shapes)


def join_params(params: Any, lead: int) -> Tensor:
    """The parameters of a distribution, a tensor or several of them ``[*lead, ...]``, behind one another."""
    parts = params if isinstance(params, (tuple, list)) else (params,)
    tensors = [as_tensor(part, "distribution_params") for part in parts]
    if not tensors or any(tensor.dim() < lead for tensor in tensors):
        raise InvalidInputError("distribution_params is a tuple of tensors, one row for each environment")
    return torch.cat([tensor.reshape(*tensor.shape[:lead], -1) for tensor in tensors], dim=-1)


def _fits_as_it_is(field: Field, value: Any) -> bool:
    """True for a tensor that needs no conversion, as most do."""
    if type(value) is not Tensor or value.dtype != field.dtype or value.device != _CPU:
        return False
    shape = value.shape
    lead = len(shape) - len(field.shape)
    return shape[lead:] == field.shape and all(size == 1 for size in shape[:lead]) and value.layout == torch.strided


def _fit_one(field: Field, value: Any) -> Tensor:
    given = as_tensor(value, field.name)
    lead = given.dim() - len(field.shape)
    if lead >= 0 and all(size == 1 for size in given.shape[:lead]) and given.shape[lead:] == field.shape:
        given = given.reshape(1, *field.shape)
    fitted = field.fit(given, 1, _CPU)[0]
    return fitted.to(field.dtype)


def _policy_width(spec: ActionSpec) -> int:
    """One number for each choice; for a Box a mean and a deviation for each number of an action."""
    if spec.kind == "Box":
        return 2 * math.prod(spec.shape)
    if spec.kind == "MultiBinary":
        return math.prod(spec.shape)
    if not spec.choices:
        raise InvalidInputError("an action space of type MultiDiscrete needs 'nvec', the number of choices of each")
    return sum(spec.choices)


def check_state_shapes(owner: str, state_shapes: Any) -> tuple[tuple[int, int], ...]:
    """The shapes of the recurrent states, each ``(layers, hidden)``."""
    try:
        shapes = tuple((layers, hidden) for layers, hidden in state_shapes)
    except (TypeError, ValueError):
        shapes = ((0, 0),)
    if not all(isinstance(size, int) and size > 0 for shape in shapes for size in shape):
        raise InvalidInputError(
            f"state_shapes is {state_shapes!r}; {owner} needs (layers, hidden) for each recurrent state, as in "
            "((1, 256), (1, 256)) for an LSTM"
        )
    return shapes
