"""What goes into a RolloutStorage, a transition, how it becomes a row, and what comes out, a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlstore.engine.memory.tensors import allocate
from rlstore.engine.rows.ring import Column
from rlstore.engine.rows.schema import Field, Structure, as_tensor
from rlstore.errors import InvalidInputError

# What every transition of a mode has besides observations, actions, rewards and dones.
MODES = {"rl": ("values", "actions_log_prob"), "distillation": ("privileged_actions",)}

# The blocks of the hidden states of actor and critic.
HIDDEN_STATES = ("saved_hidden_state_a", "saved_hidden_state_c")

# What a sample of a mode may hold (see rlstore.storage for the vocabulary).
_ALWAYS = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations")
SAMPLE_NAMES = {
    "rl": (*_ALWAYS, "values", "log_probs", "final_values", "distribution_params", "hidden_states"),
    "distillation": (*_ALWAYS, "privileged_actions"),
}

# The vocabulary's word for what this storage's own verbs call otherwise.
VOCABULARY = {
    "actions_log_prob": "log_probs",
    "old_actions_log_prob": "log_probs",
    "old_distribution_params": "distribution_params",
}

# The hidden state of one network: a GRU's tensor or an LSTM's pair, [layers, envs, hidden]; None for no recurrence.
HiddenState = Tensor | tuple[Tensor, ...] | None


class RolloutTransition:
    """One step of all environments, filled in bit by bit and given to :meth:`RolloutStorage.add_transition`.

    Attributes:
        observations: What the agent saw before acting, TensorDict ``[envs]``.
        actions: What it did, ``[envs, *actions_shape]``.
        rewards: ``[envs]`` or ``[envs, 1]``.
        dones: The episode ended with this step; any dtype, ``[envs]`` or ``[envs, 1]``. NaN is refused; on CUDA, where
            flags are not looked at, it is a yes.
        values: The critic's estimate, ``[envs, 1]`` (rl only).
        actions_log_prob: ``[envs]`` or ``[envs, 1]`` (rl only).
        distribution_params: The parameters of the action distribution (rl only).
        privileged_actions: The teacher's actions (distillation only).
        hidden_states: The recurrent states before the step, ``(actor, critic)``.
        truncated: Which of the ended episodes were only cut off, by a time limit; None for none of them. For those the
            return bootstraps from ``final_values``. Do not also add a bootstrap to the rewards.
        final_values: The value of the observation in which an episode was truncated, read there alone; None or NaN
            where it is not known: the advantage of that step is then 0.
    """

    # Defaults of the class, so that a transition is made and cleared at no cost.
    observations: TensorDict | None = None
    actions: Tensor | None = None
    rewards: Tensor | None = None
    dones: Tensor | None = None
    values: Tensor | None = None
    actions_log_prob: Tensor | None = None
    distribution_params: tuple[Tensor, ...] | None = None
    privileged_actions: Tensor | None = None
    hidden_states: tuple[HiddenState, HiddenState] = (None, None)
    truncated: Tensor | None = None
    final_values: Tensor | None = None

    def clear(self) -> None:
        """Reset all fields to None."""
        self.__dict__.clear()


class RolloutBatch:
    """What the generators yield; fields that a mode does not have are None.

    Flat batches hold ``[rows, ...]``, scalars ``[rows, 1]``. Recurrent ones hold observations
    ``[steps, trajectories, ...]`` with ``masks``, hidden states ``[layers, trajectories, hidden]``, and the other
    fields ``[steps, envs, ...]``.
    """

    def __init__(
        self,
        observations: TensorDict | None = None,
        actions: Tensor | None = None,
        values: Tensor | None = None,
        advantages: Tensor | None = None,
        returns: Tensor | None = None,
        old_actions_log_prob: Tensor | None = None,
        old_distribution_params: tuple[Tensor, ...] | None = None,
        hidden_states: tuple[HiddenState, HiddenState] = (None, None),
        masks: Tensor | None = None,
        privileged_actions: Tensor | None = None,
        dones: Tensor | None = None,
    ) -> None:
        self.observations = observations
        self.actions = actions
        self.values = values
        self.advantages = advantages
        self.returns = returns
        self.old_actions_log_prob = old_actions_log_prob
        self.old_distribution_params = old_distribution_params
        self.hidden_states = hidden_states
        self.masks = masks
        self.privileged_actions = privileged_actions
        self.dones = dones


class TransitionLayout:
    """Turns transitions into rows: the values in the order of the ring's columns.

    Some fields are optional, and get their columns with the first transition that brings them: distribution
    parameters, hidden states, ``truncated`` and ``final_values``.
    """

    def __init__(
        self, observations: Structure, fields: Sequence[Field], training_type: str, lanes: int, device: torch.device
    ) -> None:
        self.columns = [Column(field, field.name) for field in fields]
        self.groups: dict[str, int] = {}  # optional fields met so far, with their number of blocks, in column order
        self.observations, self._lanes, self._device = observations, lanes, device
        self._core = ("actions", "rewards", "dones", *MODES[training_type])
        self._get_core = attrgetter(*self._core)
        # What is written for an optional field that a transition does not bring: no truncation, no known value.
        self._absent = {
            "truncated": allocate((lanes, 1), torch.uint8, device),
            "final_values": allocate((lanes, 1), torch.float32, device, torch.nan),
        }

    def transition(self, sample: Mapping[str, Any]) -> RolloutTransition:
        """A sample, in the words of the vocabulary, as a transition. Where both flags are set, termination wins."""
        transition = RolloutTransition()
        for name, value in sample.items():
            if name not in ("terminated", "truncated", "next_observations"):
                setattr(transition, "actions_log_prob" if name == "log_probs" else name, value)
        flags = []
        for name in ("terminated", "truncated"):
            field = Field(name, (1,), torch.uint8, f"{self._lanes} environments", is_flag=True)
            flags.append(field.fit(sample.get(name), self._lanes, self._device))
        terminated, truncated = flags
        transition.dones = terminated | truncated
        transition.truncated = truncated & (terminated ^ 1)
        return transition

    def row(self, transition: RolloutTransition) -> tuple[tuple[Any, ...], dict[str, tuple[Any, ...]]]:
        """A transition's values in the order of the columns, and the optional fields that have no columns yet.

        Values are not yet checked against their columns; that is for the ring to do.
        """
        if not hasattr(transition, "observations"):
            raise InvalidInputError(
                f"a {type(transition).__name__} is no RolloutStorage.Transition; dicts go to insert_transition()"
            )
        if transition.observations is None:
            raise InvalidInputError("observations are missing (None). Nothing was written.")
        values = self.observations.leaves(transition.observations)
        values.extend(self._get_core(transition))
        optional = _optional_fields(transition)
        if not optional and not self.groups:
            return tuple(values), optional
        if "truncated" in optional:
            self._end_truncated(values, optional["truncated"][0])
        elif "final_values" in optional:
            raise InvalidInputError(
                "final_values are read where an episode was truncated, and truncated is None. Nothing was written."
            )
        for group, count in self.groups.items():
            values.extend(self._group_values(group, count, optional.pop(group, None)))
        return tuple(values), optional

    def first_met(self, optional: dict[str, tuple[Any, ...]]) -> tuple[list[Column], list[Tensor]]:
        """Columns for optional fields that have none yet, and their checked values."""
        columns = [
            Column(self._optional_field(group, name, as_tensor(part, name)), name, optional=group in HIDDEN_STATES)
            for group, parts in optional.items()
            for name, part in zip(group_blocks(group, len(parts)), parts, strict=True)
        ]
        parts = [part for group in optional.values() for part in group]
        values = [
            column.field.fit(part, self._lanes, self._device) for column, part in zip(columns, parts, strict=True)
        ]
        return columns, values

    def _end_truncated(self, values: list[Any], truncated: Any) -> None:
        """A truncated environment is done, whether or not dones says so."""
        place = len(self.observations.paths) + self._core.index("dones")
        dones = self.columns[place].field
        flags = Field("truncated", dones.shape, dones.dtype, dones.origin, is_flag=True)
        ended = dones.fit(values[place], self._lanes, self._device)
        values[place] = ended | flags.fit(truncated, self._lanes, self._device)

    def _group_values(self, group: str, count: int, given: tuple[Any, ...] | None) -> Sequence[Any]:
        if given is None:
            if group == "distribution_params":
                raise InvalidInputError(
                    "distribution_params are missing (None), and earlier transitions had them. Nothing was written."
                )
            # A hidden state that is not given leaves the saved one as it was.
            return [self._absent[group]] if group in self._absent else [None] * count
        if len(given) != count:
            raise InvalidInputError(
                f"{group} has {len(given)} tensors; this storage holds {count} of them. Nothing was written."
            )
        return given

    def _optional_field(self, group: str, name: str, example: Tensor) -> Field:
        origin = "the first transition that had it"
        if group in self._absent:
            absent = self._absent[group]
            return Field(name, (1,), absent.dtype, f"{self._lanes} environments", is_flag=group == "truncated")
        lane_axis = 0 if group == "distribution_params" else 1
        shape = list(example.shape)
        right_dims = len(shape) == 3 if lane_axis else len(shape) >= 1
        if not right_dims or shape[lane_axis] != self._lanes:
            form = "[layers, envs, hidden]" if lane_axis else "[envs, ...]"
            raise InvalidInputError(
                f"{name} is {tuple(shape)}; it must be {form} for {self._lanes} environments. Nothing was written."
            )
        if example.dtype.is_complex:
            raise InvalidInputError(f"{name} is {example.dtype}; it must be real. Nothing was written.")
        del shape[lane_axis]
        dtype = example.dtype if example.dtype.is_floating_point else torch.float32
        return Field(name, tuple(shape), dtype, origin, lane_axis=lane_axis)


def group_blocks(group: str, count: int) -> list[str]:
    """The names of the blocks of an optional field."""
    return [group] if group in ("truncated", "final_values") else [f"{group}[{index}]" for index in range(count)]


def _optional_fields(transition: RolloutTransition) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    params, states = transition.distribution_params, transition.hidden_states
    if params is not None:
        if not isinstance(params, (tuple, list)):
            raise InvalidInputError("distribution_params must be a tuple of tensors. Nothing was written.")
        found["distribution_params"] = tuple(params)
    if states is None or len(states) != 2:
        raise InvalidInputError("hidden_states must be a pair (actor, critic), each may be None. Nothing was written.")
    if states[0] is not None:
        found[HIDDEN_STATES[0]] = _as_tuple(states[0])
    if states[1] is not None:
        found[HIDDEN_STATES[1]] = _as_tuple(states[1])
    # A transition of the original class has neither of these two.
    truncated = getattr(transition, "truncated", None)
    if truncated is not None:
        found["truncated"] = (truncated,)
    final_values = getattr(transition, "final_values", None)
    if final_values is not None:
        found["final_values"] = (final_values,)
    return found


def _as_tuple(state: Any) -> tuple[Any, ...]:
    return tuple(state) if isinstance(state, (tuple, list)) else (state,)
