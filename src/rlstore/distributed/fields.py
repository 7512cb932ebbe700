"""The columns of a rollout of DistributedStorage: their keys, shapes and dtypes, and the check of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.rows.schema import (
    Field,
    Rule,
    Structure,
    as_tensor,
    describe_fields,
    described_fields,
    fields_of_example,
    is_in_memory,
    reward_field,
)
from rlstore.engine.rows.spaces import ActionSpec, SpaceLike, action_spec, observation_fields
from rlstore.errors import InvalidInputError

CPU = torch.device("cpu")
# The keys of a row besides the observations and the extra fields: what the environment returned with the observation,
# and what the actor computed from it.
STEP_KEYS = ("reward", "terminated", "truncated", "episode_return", "episode_step", "last_action")
ACTOR_KEYS = ("policy_outputs", "baseline", "action")


@dataclass(frozen=True)
class RolloutFields:
    """What a row of a rollout holds.

    Attributes:
        structure: How the observations are nested; their keys are its names: ``obs``, or ``obs["camera"]``.
        columns: The field of each key, in the order of the keys: observations, :data:`STEP_KEYS`, :data:`ACTOR_KEYS`,
            extra fields.
        extra: The keys of the extra fields.
        action_kind: "Discrete", "Box", "MultiDiscrete" or "MultiBinary".
        state_shapes: ``(layers, hidden)`` of each recurrent state.
    """

    structure: Structure
    columns: dict[str, Field]
    extra: tuple[str, ...]
    action_kind: str
    state_shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of_spaces(
        cls,
        owner: str,
        observation_space: SpaceLike,
        action_space: SpaceLike,
        state_shapes: Sequence[tuple[int, int]],
        extra: Sequence[Field] = (),
        allow_nonfinite_rewards: bool = False,
    ) -> RolloutFields:
        """The fields for a pair of spaces; the observations of a mapping without a dtype are uint8."""
        structure, observed = observation_fields(observation_space, "obs", owner, torch.uint8)
        spec = action_spec(action_space)
        action = _action_field(spec.kind, spec.shape, f"the action_space given to {owner}()", spec.rule)
        parts = (structure, observed, action, spec.kind, _policy_width(spec), state_shapes, extra)
        return cls._of_parts(*parts, allow_nonfinite_rewards)

    @classmethod
    def of_sample(
        cls,
        sample: Mapping[str, Any],
        state_shapes: Sequence[tuple[int, int]],
        extra: Sequence[Field] = (),
        allow_nonfinite_rewards: bool = False,
        lead: int = 1,
    ) -> RolloutFields:
        """The fields for samples like this one, in the vocabulary of :mod:`rlstore.storage`.

        Args:
            sample: One step ``[N, ...]``, or with ``lead`` 2 several steps ``[steps, N, ...]``.
            state_shapes: ``(layers, hidden)`` of each recurrent state.
            extra: The extra fields.
            allow_nonfinite_rewards: Whether rewards may be NaN or infinite.
            lead: The number of axes before a field's own.
        """
        origin = "the first sample"
        structure, observed = fields_of_example(sample["observations"], "obs", lead, origin)
        actions, params = as_tensor(sample["actions"], "actions"), sample.get("distribution_params")
        is_float = actions.dtype.is_floating_point
        kind = "Box" if is_float else "Discrete" if actions.dim() == lead else "MultiDiscrete"
        action = _action_field(kind, tuple(actions.shape[lead:]), origin)
        width = 0 if params is None else join_params(params, lead).shape[-1]
        parts = (structure, observed, action, kind, width, state_shapes, extra)
        return cls._of_parts(*parts, allow_nonfinite_rewards)

    @classmethod
    def of_settings(
        cls,
        settings: Mapping[str, Any],
        state_shapes: Sequence[tuple[int, int]],
        extra: Sequence[Field] = (),
        allow_nonfinite_rewards: bool = False,
    ) -> RolloutFields:
        """The fields that :meth:`settings` described."""
        structure, observed = described_fields(settings, "obs")
        kind = settings["action_kind"]
        action = _action_field(kind, tuple(settings["action_shape"]), "the snapshot")
        parts = (structure, observed, action, kind, settings["policy_width"], state_shapes, extra)
        return cls._of_parts(*parts, allow_nonfinite_rewards)

    def settings(self) -> dict[str, Any]:
        """The fields as settings of a snapshot, but for the states and the extra fields."""
        return {
            **describe_fields(self.structure, self.observations),
            "action_shape": list(self.columns["action"].shape),
            "action_kind": self.action_kind,
            "policy_width": self.policy_width,
        }

    @classmethod
    def _of_parts(
        cls,
        structure: Structure,
        observed: Sequence[Field],
        action: Field,
        kind: str,
        policy_width: int,
        state_shapes: Sequence[tuple[int, int]],
        extra: Sequence[Field],
        allow_nonfinite_rewards: bool,
    ) -> RolloutFields:
        def scalar(name: str, dtype: torch.dtype = torch.float32) -> Field:
            return Field(name, (), dtype, "DistributedStorage", is_flag=dtype == torch.bool)

        fields = (
            *observed,
            reward_field("reward", (), "DistributedStorage", allow_nonfinite_rewards),
            scalar("terminated", torch.bool),
            scalar("truncated", torch.bool),
            scalar("episode_return"),
            scalar("episode_step", torch.int32),
            Field("last_action", action.shape, action.dtype, action.origin),
            Field("policy_outputs", (policy_width,), torch.float32, action.origin),
            scalar("baseline"),
            action,
            *extra,
        )
        shapes = tuple((int(layers), int(hidden)) for layers, hidden in state_shapes)
        names = tuple(field.name for field in extra)
        return cls(structure, {field.name: field for field in fields}, names, kind, shapes)

    @property
    def observations(self) -> list[Field]:
        """The fields of the observations."""
        return [self.columns[name] for name in self.structure.names]

    @property
    def policy_width(self) -> int:
        """The numbers in ``policy_outputs``."""
        return self.columns["policy_outputs"].shape[0]

    def fit_row(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Values by key for one row of one slot, each of its field's shape and dtype; all are checked.

        A value may have axes of 1 before its own shape, as ``(1, 1, ...)``. Nested observations are given as ``obs``.
        """
        flat = dict(values)
        if "obs" in flat and not self.structure.is_leaf:
            flat.update(zip(self.structure.names, self.structure.leaves(flat.pop("obs")), strict=True))
        unknown = flat.keys() - self.columns.keys()
        if unknown:
            raise InvalidInputError(
                f"a row cannot hold {sorted(unknown)}; it holds {list(self.columns)}. Nothing was written."
            )
        fitted = {}
        for key, value in flat.items():
            field = self.columns[key]
            fitted[key] = value if _fits_unchanged(field, value) and field.allows(value) else _fit_one(field, value)
        return fitted

    def fit_states(self, states: Any, name: str, lanes: int) -> list[Tensor]:
        """Recurrent states of some rollouts ``[layers, lanes, hidden]``, as ``[lanes, layers, hidden]``.

        Args:
            states: A tensor or several; those of one rollout may be ``[layers, hidden]``.
            name: Their name in errors.
            lanes: The number of rollouts.
        """
        given = () if states is None else states if isinstance(states, (tuple, list)) else (states,)
        count = len(self.state_shapes)
        if len(given) != count:
            raise InvalidInputError(
                f"{name} holds {len(given)} states; this storage holds {count}, fixed by state_shapes. Nothing was "
                "written."
            )
        fitted = []
        for index, (state, shape) in enumerate(zip(given, self.state_shapes, strict=True)):
            field = Field(f"{name}[{index}]", shape, torch.float32, "state_shapes", lane_axis=1)
            tensor = as_tensor(state, field.name)
            if lanes == 1 and tuple(tensor.shape) == shape:
                tensor = tensor.unsqueeze(1)
            fitted.append(field.fit(tensor, lanes, CPU).transpose(0, 1))
        return fitted


def join_params(params: Any, lead: int) -> Tensor:
    """The parameters of a distribution, a tensor or several ``[*lead, ...]``, concatenated along the last axis."""
    parts = params if isinstance(params, (tuple, list)) else (params,)
    tensors = [as_tensor(part, "distribution_params") for part in parts]
    if not tensors or any(tensor.dim() < lead for tensor in tensors):
        raise InvalidInputError("distribution_params is a tuple of tensors, one row for each environment")
    return torch.cat([tensor.reshape(*tensor.shape[:lead], -1) for tensor in tensors], dim=-1)


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


def _action_field(kind: str, shape: tuple[int, ...], origin: str, rule: Rule | None = None) -> Field:
    return Field("action", shape, torch.float32 if kind == "Box" else torch.int64, origin, rule=rule)


def _policy_width(spec: ActionSpec) -> int:
    """One number for each choice; for a Box a mean and a deviation for each number of an action."""
    if spec.kind == "Box":
        return 2 * math.prod(spec.shape)
    if spec.kind == "MultiBinary":
        return math.prod(spec.shape)
    if not spec.choices:
        raise InvalidInputError("an action space of type MultiDiscrete needs 'nvec', the number of choices of each")
    return sum(spec.choices)


def _fits_unchanged(field: Field, value: Any) -> bool:
    """True for a tensor that needs no conversion, as most do."""
    if type(value) is not Tensor or value.dtype != field.dtype or value.device != CPU or not is_in_memory(value):
        return False
    shape = value.shape
    lead = len(shape) - len(field.shape)
    return shape[lead:] == field.shape and all(size == 1 for size in shape[:lead]) and value.layout == torch.strided


def _fit_one(field: Field, value: Any) -> Tensor:
    given = as_tensor(value, field.name)
    lead = given.dim() - len(field.shape)
    if lead >= 0 and all(size == 1 for size in given.shape[:lead]) and given.shape[lead:] == field.shape:
        given = given.reshape(1, *field.shape)
    return field.fit(given, 1, CPU)[0].to(field.dtype)
