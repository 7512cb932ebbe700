"""What one step of replay consists of: observations, actions, rewards, recurrent states and a user's extra fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlstore.engine.calls import did_you_mean
from rlstore.engine.checks import check_positive, check_shape
from rlstore.engine.rows.layout import Leaf
from rlstore.engine.rows.schema import (
    Field,
    Structure,
    as_tensor,
    check_real,
    describe_fields,
    described_fields,
    fields_of_example,
    reward_field,
)
from rlstore.engine.rows.spaces import ActionSpec, SpaceLike, action_spec, observation_fields
from rlstore.errors import InvalidInputError

# Names that an extra field cannot have: arguments of add(), the vocabulary, and what is saved beside the fields.
TAKEN = (
    *("observations", "actions", "rewards", "terminateds", "truncateds", "infos", "next_observations", "mask", "self"),
    *("terminated", "truncated", "final_observations", "masks", "hidden_states"),
    *("discounts", "is_first", "weights", "rows", "count", "index"),
    *("records", "episode", "counters", "episodes", "free_slots", "random", "priorities"),
)


class StepFields:
    """The fields of a step, and how what a caller gives becomes the values that a ring takes.

    The columns are actions, rewards, recurrent states and extra fields, in this order.

    Args:
        owner: The storage's class name, for errors.
        frame_stack: Frames in each observation leaf.
        stack_axis: Their axis, or None.
        reward_shape: The shape of one reward.
        hidden_shapes: ``(layers, hidden)`` of each recurrent state.
        extra: The user's extra fields.
        allow_nonfinite_rewards: Whether rewards may be NaN or infinite.
    """

    structure: Structure
    next_structure: Structure
    observations: list[Field]
    action: ActionSpec

    def __init__(
        self,
        owner: str,
        frame_stack: int,
        stack_axis: int | None,
        reward_shape: Sequence[int],
        hidden_shapes: Sequence[tuple[int, int]],
        extra: Sequence[Field],
        allow_nonfinite_rewards: bool = False,
    ) -> None:
        check_positive(owner, frame_stack=frame_stack)
        if stack_axis is not None and (isinstance(stack_axis, bool) or not isinstance(stack_axis, int)):
            raise InvalidInputError(f"stack_axis is {stack_axis!r}; {owner} needs a whole number, or None")
        self._owner, self._stack, self._axis = owner, int(frame_stack), stack_axis
        self.reward_shape = check_shape(owner, "reward_shape", reward_shape)
        self.hidden_shapes, self.extra = tuple(hidden_shapes), tuple(extra)
        self.extra_names = tuple(field.name for field in extra)
        self._allows_nonfinite = allow_nonfinite_rewards
        self.leaves: list[Leaf] = []
        self.columns: list[Field] = []

    # ---------------------------------------------------------------------------------------------- where they are from

    def read_spaces(self, observation_space: SpaceLike | None, action_space: SpaceLike | None) -> None:
        """Take the fields from the spaces."""
        if observation_space is None or action_space is None:
            missing = "observation_space" if observation_space is None else "action_space"
            raise InvalidInputError(f"{missing} is None; give both spaces")
        structure, fields = observation_fields(observation_space, "observations", self._owner, torch.float32)
        self._set(structure, fields, action_spec(action_space), f"the action_space given to {self._owner}()")

    def read_sample(self, sample: Mapping[str, Any]) -> int:
        """Take the fields from a first sample; returns its number of environments."""
        origin = "the first sample"
        structure, fields = fields_of_example(sample["observations"], "observations", 1, origin)
        actions = as_tensor(sample.get("actions"), "actions")
        if not actions.dim():
            raise InvalidInputError(
                "actions is a single number; it has to be [environments, ...]. Nothing was written."
            )
        kind = "Box" if actions.dtype.is_floating_point else "Discrete"
        self._set(structure, fields, ActionSpec(kind, tuple(actions.shape[1:]), actions.dtype), origin)
        return len(actions)

    def described(self) -> dict[str, Any]:
        """The fields as settings of a snapshot, for :meth:`read_described`."""
        action = self.action
        return {
            **describe_fields(self.structure, self.observations),
            "action": (action.kind, action.shape, action.dtype, action.choices),
        }

    def read_described(self, settings: Mapping[str, Any]) -> None:
        """Take the fields from what :meth:`described` returned."""
        structure, fields = described_fields(settings, "observations")
        kind, shape, dtype, choices = settings["action"]
        self._set(structure, fields, ActionSpec(kind, tuple(shape), dtype, tuple(choices)), "the snapshot")

    def _set(self, structure: Structure, fields: list[Field], action: ActionSpec, origin: str) -> None:
        actions = Field("actions", action.shape, action.dtype, origin, rule=action.rule)
        check_real((*fields, actions), self._owner)
        leaves = [self._leaf(field) for field in fields]
        self.structure, self.observations, self.leaves, self.action = structure, fields, leaves, action
        self.next_structure = Structure(structure.paths, "next_observations")  # the same, as errors call it
        own = f"{self._owner}()"
        self.columns = [
            actions,
            reward_field("rewards", self.reward_shape, f"the reward_shape given to {own}", self._allows_nonfinite),
            *(
                Field(f"hidden_states[{i}]", shape, torch.float32, f"the hidden_shape given to {own}")
                for i, shape in enumerate(self.hidden_shapes)
            ),
            *self.extra,
        ]

    def _leaf(self, field: Field) -> Leaf:
        if self._stack == 1:
            return Leaf(field)
        shape = field.shape
        axis = self._axis
        if axis is None:
            axis = -1 if len(shape) == 3 and shape[-1] < shape[0] else 0
        if not -len(shape) <= axis < len(shape) or shape[axis] % self._stack:
            raise InvalidInputError(
                f"{field.name} is {shape}, and frame_stack={self._stack} does not divide its axis {axis}; the "
                "space is that of whole stacks. Give stack_axis if the frames are stacked along another axis"
            )
        return Leaf(replace(field), self._stack, axis % len(shape))

    # ---------------------------------------------------------------------------------------------- columns

    @property
    def hidden_columns(self) -> range:
        """The places of recurrent states among the columns."""
        return range(2, 2 + len(self.hidden_shapes))

    @property
    def extra_columns(self) -> range:
        """The places of extra fields among the columns."""
        return range(2 + len(self.hidden_shapes), len(self.columns))

    @property
    def obs_shape(self) -> Any:
        """The shape of one observation, or a nest of shapes."""
        if self.structure.is_leaf:
            return self.observations[0].shape
        nest: dict[Any, Any] = {}
        for path, field in zip(self.structure.paths, self.observations, strict=True):
            inner = nest
            for step in path[:-1]:
                inner = inner.setdefault(step, {})
            inner[path[-1]] = field.shape
        return nest

    @property
    def action_dim(self) -> int:
        """Numbers in one action."""
        return 1 if self.action.kind == "Discrete" else math.prod(self.action.shape)

    @property
    def policy_action_dim(self) -> int:
        """Outputs of a policy for one action."""
        return sum(self.action.choices) if self.action.choices else self.action_dim

    # ---------------------------------------------------------------------------------------------- one step

    @property
    def named(self) -> tuple[str, ...]:
        """What ``add`` needs by name, besides its documented arguments."""
        return (*(("hidden_states",) if self.hidden_shapes else ()), *self.extra_names)

    def named_columns(self, given: Mapping[str, Any], lanes: int) -> tuple[Any, ...]:
        """The values of the columns behind rewards, from what was given to ``add`` by name."""
        states = given.get("hidden_states")
        values = self._hidden_columns(states, lanes) if self.hidden_shapes or states is not None else ()
        unknown = [name for name in given if name not in self.extra_names and name != "hidden_states"]
        missing = [name for name in self.extra_names if given.get(name) is None]
        if unknown or missing:
            problem = f"got {unknown}, which it does not hold" if unknown else f"needs {missing}"
            known = list(self.extra_names) or "none"
            meant = did_you_mean(unknown[0], (*self.named, "mask")) if unknown else ""
            if unknown and not meant:
                meant = f" Declare it in the constructor to hold it: extra_fields={{{unknown[0]!r}: ((), 'float32')}}."
            raise InvalidInputError(
                f"add() {problem}; the extra_fields of this storage are {known}.{meant} Nothing was written."
            )
        return (*values, *[given[name] for name in self.extra_names])

    def _hidden_columns(self, states: Any, lanes: int) -> tuple[Any, ...]:
        """Recurrent states ``[layers, envs, hidden]`` as ``[envs, layers, hidden]``."""
        states = states if isinstance(states, tuple) else (states,)
        if len(states) != len(self.hidden_shapes):
            raise InvalidInputError(
                f"hidden_states holds {len(states)} states; this storage holds {len(self.hidden_shapes)}, fixed by its "
                "hidden_shape. Nothing was written."
            )
        columns = []
        for index, (state, shape) in enumerate(zip(states, self.hidden_shapes, strict=True)):
            given = as_tensor(state, f"hidden_states[{index}]")
            if tuple(given.shape) != (shape[0], lanes, shape[1]):
                raise InvalidInputError(
                    f"hidden_states[{index}] is {tuple(given.shape)}; this storage holds [layers, envs, hidden] = "
                    f"{(shape[0], lanes, shape[1])}, fixed by its hidden_shape. Nothing was written."
                )
            columns.append(given.transpose(0, 1))
        return tuple(columns)

    def places(self, lanes: int) -> list[Field]:
        """The field of each value of a step, in the order in which a ring takes them."""
        origin = f"num_envs={lanes}"
        flags = [Field(n, (), torch.uint8, origin, is_flag=True) for n in ("terminateds", "truncateds", "mask")]
        following = [_renamed(field, "next_observations") for field in self.observations]
        finals = [_renamed(field, "final observations") for field in self.observations]
        given = Field("which final observations are given", (), torch.uint8, origin, is_flag=True)
        return [*self.observations, *following, *self.columns, *flags, *finals, given]


def _renamed(field: Field, name: str) -> Field:
    """The field as errors call it when it is given under another name."""
    rest = field.name.removeprefix("observations")
    return Field(name + rest, field.shape, field.dtype, field.origin)
