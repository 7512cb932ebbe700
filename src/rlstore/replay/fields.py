"""From spaces, or a first sample, to the fields that a replay storage keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlstore.engine.checks import check_positive, check_shape
from rlstore.engine.rows.layout import Leaf
from rlstore.engine.rows.schema import Field, Structure, as_tensor, check_real
from rlstore.engine.rows.spaces import ActionSpec, SpaceLike, action_spec, observation_fields
from rlstore.errors import InvalidInputError

_AUTORESETS = ("NextStep", "SameStep", "Disabled")


def check_autoreset(owner: str, mode: Any) -> str | None:
    """Gymnasium's AutoresetMode, or its value, as the value."""
    value = getattr(mode, "value", mode)
    if value is not None and value not in _AUTORESETS:
        raise InvalidInputError(
            f"autoreset is {mode!r}; {owner} knows {list(_AUTORESETS)}, or None to tell by the data"
        )
    return value  # type: ignore[no-any-return]


class ReplayFields:
    """The fields of a row: observation leaves, actions, rewards, and recurrent states where they are kept.

    Args:
        owner: Whose they are, for errors.
        frame_stack: Frames in each observation leaf.
        stack_axis: Their axis, or None.
        reward_shape: The shape of one reward.
        hidden_shapes: ``(layers, hidden)`` of each recurrent state.
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
        hidden_shapes: tuple[tuple[int, int], ...],
    ) -> None:
        check_positive(owner, frame_stack=frame_stack)
        if stack_axis is not None and (isinstance(stack_axis, bool) or not isinstance(stack_axis, int)):
            raise InvalidInputError(f"stack_axis is {stack_axis!r}; {owner} needs a whole number, or None")
        self._owner, self._stack, self._axis = owner, int(frame_stack), stack_axis
        self.reward_shape = check_shape(owner, "reward_shape", reward_shape)
        self.hidden_shapes = hidden_shapes
        self.leaves: list[Leaf] = []
        self.columns: list[Field] = []
        self.no_final: tuple[None, ...] = ()  # what the ring takes where no final observations are given
        self.is_plain = False  # a step is one tensor each of observations, actions and rewards

    def read_spaces(self, observation_space: SpaceLike | None, action_space: SpaceLike | None) -> None:
        """Take the fields from the spaces."""
        for name, space in (("observation_space", observation_space), ("action_space", action_space)):
            if space is None:
                raise InvalidInputError(f"{name} is None; give both spaces")
        assert observation_space is not None
        assert action_space is not None
        structure, fields = observation_fields(observation_space, "observations", self._owner, torch.float32)
        self._set(structure, fields, action_spec(action_space), f"the action_space given to {self._owner}()")

    def read_sample(self, sample: Mapping[str, Any]) -> int:
        """Take the fields from a first sample; returns its number of environments."""
        structure = Structure.of(sample["observations"], "observations")
        leaves = [as_tensor(leaf, "observations") for leaf in structure.leaves(sample["observations"])]
        actions = as_tensor(sample.get("actions"), "actions")
        if not all(leaf.dim() for leaf in leaves) or not actions.dim():
            raise InvalidInputError(
                "observations and actions of a sample are [environments, ...]. Nothing was written."
            )
        fields = [
            Field(name, tuple(leaf.shape[1:]), leaf.dtype, "the first sample")
            for name, leaf in zip(structure.names, leaves, strict=True)
        ]
        kind = "Box" if actions.dtype.is_floating_point else "Discrete"
        self._set(structure, fields, ActionSpec(kind, tuple(actions.shape[1:]), actions.dtype), "the first sample")
        return len(actions)

    def described(self) -> dict[str, Any]:
        """What :meth:`read_described` takes the fields from."""
        action = self.action
        return {
            "paths": self.structure.paths,
            "shapes": [field.shape for field in self.observations],
            "dtypes": [field.dtype for field in self.observations],
            "action": (action.kind, action.shape, action.dtype, action.choices),
        }

    def read_described(self, description: Mapping[str, Any]) -> None:
        """Take the fields from what :meth:`described` gave."""
        structure = Structure([tuple(path) for path in description["paths"]], "observations")
        shapes, dtypes = description["shapes"], description["dtypes"]
        fields = [
            Field(name, tuple(shape), dtype, "the first sample")
            for name, shape, dtype in zip(structure.names, shapes, dtypes, strict=True)
        ]
        kind, shape, dtype, choices = description["action"]
        self._set(structure, fields, ActionSpec(kind, tuple(shape), dtype, tuple(choices)), "the first sample")

    def _set(self, structure: Structure, fields: list[Field], action: ActionSpec, origin: str) -> None:
        actions = Field("actions", action.shape, action.dtype, origin)
        check_real((*fields, actions), self._owner)
        leaves = [self._leaf(field) for field in fields]
        self.structure, self.observations, self.leaves, self.action = structure, fields, leaves, action
        self.next_structure = Structure(structure.paths, "next_observations")  # the same, as errors call it
        self.no_final = (None,) * (len(fields) + 1)
        self.is_plain = structure.is_leaf and not self.hidden_shapes
        own = f"{self._owner}()"
        self.columns = [
            actions,
            Field("rewards", self.reward_shape, torch.float32, f"the reward_shape given to {own}"),
            *(
                Field(f"hidden_states[{i}]", shape, torch.float32, f"the hidden_shape given to {own}")
                for i, shape in enumerate(self.hidden_shapes)
            ),
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

    # ---------------------------------------------------------------------------------------------- what they tell

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
        """Numbers that a policy puts out for an action."""
        return sum(self.action.choices) if self.action.choices else self.action_dim
