"""What a batch of replay looks like: which tensors are gathered for it, and how they become a named tuple."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.batches.named import extended
from rlstore.engine.batches.pipeline import Drawn, Part, Request
from rlstore.engine.batches.staging import Casts, moved
from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.rows.schema import as_tensor
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError
from rlstore.parameters import Check, fraction, whole_number

ComputeReward = Callable[[Any, Any, dict[str, Any]], Any]
_GOAL_KEYS = ("observation", "achieved_goal", "desired_goal")


class ReplayBatch(NamedTuple):
    """A batch of transitions.

    For a window of k steps, where k is ``n_step``, or less at the end of the episode and at the newest row:

    - ``observations`` ``[batch, ...]``: before the first step;
    - ``actions`` ``[batch, ...]``: of the first step, ``[batch]`` for Discrete;
    - ``rewards`` ``[batch, 1]``: ``sum_{i<k} discount^i r_i``;
    - ``discounts`` ``[batch, 1]``: ``discount^k``, or 0 if the episode terminated with the last step;
    - ``next_observations`` ``[batch, ...]``: after the last step.

    So the target is ``rewards + discounts * V(next_observations)``, also at the end of an episode. The extra fields of
    the storage follow by name, with the values of the first step.
    """

    observations: Any
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    next_observations: Any


class PrioritizedBatch(NamedTuple):
    """A :class:`ReplayBatch` with two more fields.

    - ``weights`` ``[batch, 1]``: ``(P(i) * size) ** -beta`` divided by the largest, to weight the loss of each row;
    - ``rows`` ``[batch]``: the row ids, for ``update`` of the storage.
    """

    observations: Any
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    next_observations: Any
    weights: Tensor
    rows: Tensor


class SequenceBatch(NamedTuple):
    """A batch of windows of ``length = burn_in + sequence_length`` steps; zeros after the end of a shorter one.

    - ``observations``, ``next_observations`` ``[batch, length, ...]``: before and after each step, exact where an
      episode ends;
    - ``actions`` ``[batch, length, ...]``, ``rewards`` ``[batch, length, 1]``;
    - ``terminated``, ``truncated`` bool ``[batch, length, 1]``;
    - ``is_first`` bool ``[batch, length]``: the first step of an episode, before which to reset the recurrent state;
    - ``masks`` bool ``[batch, length]``: True for the steps to train on: not padding, and after the burn-in;
    - ``hidden_states``: the recurrent state stored with the first step, ``[layers, batch, hidden]``, a pair of them
      for an LSTM, or None;
    - ``weights`` ``[batch, 1]``: importance weights; 1 if windows are drawn uniformly;
    - ``rows`` ``[batch]``: the row id of each first step, for ``update`` of the storage.

    Extra fields of the storage follow by name, ``[batch, length, ...]``.
    """

    observations: Any
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    next_observations: Any
    is_first: Tensor
    masks: Tensor
    hidden_states: Any
    weights: Tensor
    rows: Tensor


_ROW_ID = 8  # bytes
INFO = ("probabilities", "draw_counts")  # what a batch holds at the end, if it is asked for


def _row_bytes(request: Request) -> int:
    return math.prod(request.shape) * request.dtype.itemsize


class View(ABC):
    """Which tensors a batch needs, and how it is built from them.

    Attributes:
        parameters: What ``update_storage_parameter`` may change, and the check of each.
        requests: The tensors gathered from the rows that were drawn.
        others: The tensors gathered from ``Drawn.others``, which follow those.
        casts: The dtype that each is converted to after it was gathered, which knows float32 only.
        nbytes: The bytes of a batch of one.
    """

    parameters: ClassVar[dict[str, Check]] = {}
    requests: list[Request]
    others: list[Request]
    casts: Casts
    nbytes: int
    asks_caller: ClassVar[bool] = False  # whether a batch is built with a function of the caller's, which may raise
    _informs = False  # whether a batch holds INFO
    _rows = 1  # that are gathered for one item of a batch

    def bind(
        self, fields: StepFields, dtype: torch.dtype | None, device: torch.device, *, informs: bool = False
    ) -> None:
        """Serve these fields.

        Args:
            fields: The fields of a step.
            dtype: The dtype of served observations; None for that in which they are stored.
            device: The device of the batches.
            informs: Serve the probability and the number of draws of each item, too.
        """
        self._fields, self._dtype, self._device, self._informs = fields, dtype, device, informs
        self._structure, self._leaves = fields.structure, len(fields.observations)
        self.requests, self.others = self._rows_requests(), self._other_requests()
        self.nbytes = self._rows * (_ROW_ID + sum(map(_row_bytes, self.requests))) + sum(map(_row_bytes, self.others))
        observed = (Part.OBSERVATION, Part.NEXT_OBSERVATION)
        self.casts = ()
        if dtype not in (None, torch.float32):
            self.casts = tuple(dtype if r.part in observed else None for r in [*self.requests, *self.others])

    @property
    def fold(self) -> tuple[int, float]:
        """n_step and the discount factor."""
        return 1, 1.0

    @property
    @abstractmethod
    def longest(self) -> tuple[str, int]:
        """What has to fit into the rows of one environment: its name and its length."""

    @abstractmethod
    def _rows_requests(self) -> list[Request]:
        """The tensors gathered from the rows that were drawn."""

    def _other_requests(self) -> list[Request]:
        """The tensors gathered from ``Drawn.others``."""
        return []

    @abstractmethod
    def build(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> Any:
        """The batch as it is served."""

    def build_dict(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        """The batch in the words of the vocabulary, with its rows."""
        named: dict[str, Any] = self.build(drawn, tensors)._asdict()
        if "rows" not in named:
            named["rows"] = moved(drawn.rows, self._device)
        return named

    def _observed(self, part: Part) -> list[Request]:
        return [Request(part, i, f.shape, self._served(f.dtype)) for i, f in enumerate(self._fields.observations)]

    def _extra(self) -> list[Request]:
        columns = self._fields.columns
        return [Request(Part.COLUMN, i, columns[i].shape or (1,), columns[i].dtype) for i in self._fields.extra_columns]

    def _served(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which observations are gathered."""
        return torch.float32 if self._dtype == torch.float32 else stored

    def _names_behind(self) -> tuple[str, ...]:
        """The names of what follows the documented fields of a batch."""
        return (*self._fields.extra_names, *(INFO if self._informs else ()))

    def _info(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        assert drawn.probabilities is not None
        assert drawn.counts is not None
        return self._here(drawn.probabilities), self._here(drawn.counts)

    def _here(self, tensor: Tensor) -> Tensor:
        """A small tensor where batches are served."""
        return tensor if tensor.device == self._device else moved(tensor, self._device)


class TransitionView(View):
    """Transitions with n-step targets, as :class:`ReplayBatch` or (``weighted``) :class:`PrioritizedBatch`.

    Args:
        owner: The storage's class name, for errors.
        n_step: Steps over which rewards are summed before the bootstrap.
        discount: The discount factor.
        weighted: Whether batches have weights and rows.
        float_actions: Whether actions are served as float32 whenever observations are converted.
    """

    parameters: ClassVar[dict[str, Check]] = {"n_step": whole_number, "discount": fraction}

    def __init__(
        self, owner: str, n_step: int, discount: float, *, weighted: bool = False, float_actions: bool = False
    ) -> None:
        check_positive(owner, n_step=n_step)
        check_fraction(owner, discount=discount)
        self.n_step, self.discount = int(n_step), float(discount)
        self._weighted, self._float_actions = weighted, float_actions

    def bind(
        self, fields: StepFields, dtype: torch.dtype | None, device: torch.device, *, informs: bool = False
    ) -> None:
        """Serve these fields."""
        super().bind(fields, dtype, device, informs=informs)
        self._is_leaf, self._batch = fields.structure.is_leaf, self._batch_class()

    def _batch_class(self) -> Any:
        base: Any = PrioritizedBatch if self._weighted else ReplayBatch
        return extended(base, self._names_behind())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_batch"}  # no module has that class

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_fields" in state:
            self._batch = self._batch_class()

    @property
    def fold(self) -> tuple[int, float]:
        """n_step and the discount factor."""
        return self.n_step, self.discount

    @property
    def longest(self) -> tuple[str, int]:
        """What has to fit into the rows of one environment: its name and its length."""
        return "n_step", self.n_step

    def _rows_requests(self) -> list[Request]:
        action, keeps = self._fields.columns[0], self._dtype is None or not self._float_actions
        return [
            *self._observed(Part.OBSERVATION),
            Request(Part.COLUMN, 0, action.shape, action.dtype if keeps else torch.float32),
            Request(Part.REWARDS, 0, self._fields.reward_shape or (1,), torch.float32),
            Request(Part.DISCOUNTS, 0, (1,), torch.float32),
            *self._observed(Part.NEXT_OBSERVATION),
            *self._extra(),
        ]

    def build(self, drawn: Drawn, tensors: Sequence[Tensor]) -> Any:
        """The batch as it is served."""
        if not self._is_leaf:
            count, build, size = self._leaves, self._structure.build, (len(tensors[0]),)
            observations, following = tensors[:count], tensors[count + 3 : 2 * count + 3]
            middle, extra = tensors[count : count + 3], tensors[2 * count + 3 :]
            tensors = (build(observations, size), *middle, build(following, size), *extra)
        if self._informs:
            tensors = (*tensors, *self._info(drawn))
        if not self._weighted:
            return self._batch._make(tensors)
        assert drawn.weights is not None
        return self._batch(*tensors[:5], self._here(drawn.weights), self._here(drawn.rows), *tensors[5:])


def a_function(owner: str, name: str, value: Any) -> Any:
    """Something to call."""
    if not callable(value):
        raise InvalidInputError(f"{name} is {value!r}; {owner} needs a function")
    return value


class HindsightView(TransitionView):
    """Transitions, some with the goal that was achieved at ``Drawn.others`` and the reward for it.

    Args:
        owner: The storage's class name, for errors.
        discount: The discount factor.
        compute_reward: The reward of achieved and desired goals.
    """

    parameters: ClassVar[dict[str, Check]] = {"discount": fraction}
    asks_caller = True

    def __init__(self, owner: str, discount: float, compute_reward: ComputeReward) -> None:
        super().__init__(owner, 1, discount)
        self._owner = owner
        self.compute_reward: ComputeReward = a_function(owner, "compute_reward", compute_reward)

    def bind(
        self, fields: StepFields, dtype: torch.dtype | None, device: torch.device, *, informs: bool = False
    ) -> None:
        """Serve these fields, which have to have goals."""
        names = [path[0] if path else "" for path in fields.structure.paths]
        if set(_GOAL_KEYS) - set(names):
            raise InvalidInputError(
                f"the observations hold {names}; {self._owner} needs a Dict space with {list(_GOAL_KEYS)}"
            )
        self._achieved, self._desired = (names.index(key) for key in _GOAL_KEYS[1:])
        achieved, desired = fields.observations[self._achieved], fields.observations[self._desired]
        if (achieved.shape, achieved.dtype) != (desired.shape, desired.dtype):
            raise InvalidInputError(
                f"achieved_goal is {achieved.shape} {achieved.dtype} and desired_goal {desired.shape} "
                f"{desired.dtype}; a goal that was achieved has to be one that can be desired"
            )
        super().bind(fields, dtype, device, informs=informs)

    def _other_requests(self) -> list[Request]:
        goal = self._fields.observations[self._achieved]
        return [Request(Part.NEXT_OBSERVATION, self._achieved, goal.shape, self._served(goal.dtype))]

    def build(self, drawn: Drawn, tensors: Sequence[Tensor]) -> Any:
        """The batch as it is served."""
        assert drawn.others is not None
        *transition, goals = tensors
        batch, following = len(drawn.rows), self._leaves + 3
        replaced = moved(drawn.others >= 0, self._device)
        for place in (self._desired, following + self._desired):
            mask = replaced.view(-1, *[1] * (goals.dim() - 1))
            transition[place] = torch.where(mask, goals, transition[place])
        achieved, desired = transition[following + self._achieved], transition[following + self._desired]
        rewards = as_tensor(self.compute_reward(achieved, desired, {}), "what compute_reward gave")
        if rewards.numel() != batch or rewards.dtype.is_complex:
            raise InvalidInputError(
                f"compute_reward gave {tuple(rewards.shape)} {rewards.dtype}; it has to give {batch} rewards, "
                "one for each transition of the batch"
            )
        computed, given = rewards.reshape(batch, 1).to(self._device, torch.float32), transition[self._leaves + 1]
        if not computed.is_cuda:
            values = computed.numpy()
            if not math.isfinite(np.vdot(values, values)):  # the quickest to find that all are finite
                self._check_finite(computed, replaced)
        transition[self._leaves + 1] = torch.where(replaced.unsqueeze(1), computed, given)
        return super().build(drawn, transition)

    def _check_finite(self, computed: Tensor, replaced: Tensor) -> None:
        """Refuse rewards that ``add`` would refuse, where they count."""
        wrong = (~computed.isfinite().flatten() & replaced).nonzero().flatten().tolist()
        if wrong and self._fields.columns[1].rule is not None:
            raise InvalidInputError(
                f"compute_reward gave {computed[wrong[0]].item()} for transition {wrong[0]} of the batch; a reward has "
                "to be finite. Fix it where it comes from, or give the storage allow_nonfinite_rewards=True. No batch "
                "was served."
            )


class SequenceView(View):
    """Windows of consecutive steps, as :class:`SequenceBatch`.

    Args:
        length: Steps of a window.
        burn_in: Steps at its beginning that are not learnt from.
    """

    def __init__(self, length: int, burn_in: int) -> None:
        self._length = self._rows = length
        self._burn_in = burn_in

    @property
    def longest(self) -> tuple[str, int]:
        """What has to fit into the rows of one environment: its name and its length."""
        return "burn_in + sequence_length", self._length

    def _rows_requests(self) -> list[Request]:
        action, reward = self._fields.columns[:2]
        return [
            *self._observed(Part.OBSERVATION),
            *self._observed(Part.NEXT_OBSERVATION),
            Request(Part.COLUMN, 0, action.shape, action.dtype),
            Request(Part.COLUMN, 1, reward.shape or (1,), reward.dtype),
            Request(Part.TERMINATED, 0, (1,), torch.bool),
            Request(Part.TRUNCATED, 0, (1,), torch.bool),
            Request(Part.IS_FIRST, 0, (), torch.bool),
            Request(Part.IS_HELD, 0, (), torch.bool),
            *self._extra(),
        ]

    def _other_requests(self) -> list[Request]:
        columns = self._fields.columns
        return [Request(Part.COLUMN, i, columns[i].shape, columns[i].dtype) for i in self._fields.hidden_columns]

    def build(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> SequenceBatch:
        """The batch as it is served."""
        assert drawn.others is not None
        leaves, build, begins = self._leaves, self._structure.build, drawn.others
        actions, rewards, terminated, truncated, is_first, held = tensors[2 * leaves : 2 * leaves + 6]
        size = held.shape
        if self._burn_in:
            held[:, : self._burn_in] = False
        behind = tensors[2 * leaves + 6 :]
        extra, hidden = behind[: len(self._fields.extra)], behind[len(self._fields.extra) :]
        # [batch, layers, hidden] as networks take it: [layers, batch, hidden].
        states = tuple(state.transpose(0, 1).contiguous() for state in hidden)
        weights = torch.ones(size[0], 1, device=begins.device) if drawn.weights is None else drawn.weights
        return extended(SequenceBatch, self._names_behind())(
            build(tensors[:leaves], size),
            actions,
            rewards,
            terminated,
            truncated,
            build(tensors[leaves : 2 * leaves], size),
            is_first,
            held,
            states if len(states) > 1 else states[0] if states else None,
            self._here(weights),
            self._here(begins),
            *extra,
            *(self._info(drawn) if self._informs else ()),
        )
