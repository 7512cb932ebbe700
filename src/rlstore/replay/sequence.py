"""SequenceReplayStorage: windows of consecutive steps, for learners with a memory (R2D2, Dreamer)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlstore.engine.batches.priorities import Priorities
from rlstore.engine.batches.select import Windows
from rlstore.engine.batches.staging import moved
from rlstore.engine.batches.transitions import Part, Request
from rlstore.engine.checks import check_positive, check_shape
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.replay.options import ReplayOptions
from rlstore.replay.prepare import Drawn
from rlstore.replay.prioritization import PriorityStorage
from rlstore.storage import BatchDict


class SequenceBatch(NamedTuple):
    """A batch of windows of ``length = burn_in + sequence_length`` steps; zeros after the end of a shorter one.

    - ``observations``, ``next_observations`` ``[batch, length, ...]``: before and after each step, exact where an
      episode ends;
    - ``actions`` ``[batch, length, ...]``, ``rewards`` ``[batch, length, 1]``;
    - ``terminated``, ``truncated`` bool ``[batch, length, 1]``;
    - ``is_first`` bool ``[batch, length]``: the step is the first of its episode, before which a memory is to be reset;
    - ``masks`` bool ``[batch, length]``: True where to learn: there is a step, and the burn-in is over;
    - ``hidden_states``: the recurrent state stored with the first step, ``[layers, batch, hidden]``, a pair of them
      for an LSTM, or None;
    - ``weights`` ``[batch, 1]``: importance weights; 1 where windows are drawn uniformly;
    - ``rows`` ``[batch]``: the row id of each first step, with which priorities come back.
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


class SequenceReplayStorage(PriorityStorage):
    """The newest ``storage_size`` transitions, served as windows of consecutive steps of one episode.

    Windows begin every ``sequence_length - overlap`` steps of an episode, as far as they fit into it. When it is over
    it gives one more, which ends with it, unless one does already; and if it is shorter than a window, a single
    shorter one. They are drawn uniformly, or with ``alpha`` above 0 by priority.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (float32 if it names none).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served, and the data lie.
        storage_size: Transitions held, over all environments.
        num_envs: Environments side by side.
        batch_size: Windows in a batch.
        sequence_length: Steps of a window to learn from.
        burn_in: Steps before them, to warm the memory up. The first ``burn_in`` steps of an episode are never learnt
            from.
        overlap: Steps that a window shares with the next, at most ``sequence_length - 1``.
        across_episodes: Windows of an environment's whole stream instead, whatever ends inside them: ``is_first``
            tells where.
        hidden_shape: ``(layers, hidden)`` of the recurrent state that ``add`` takes, or a pair of those for an LSTM;
            None if there is none.
        alpha: How much priorities count: 0 not at all, 1 in full.
        beta: How much of the bias the weights undo: 0 nothing, 1 all.
        beta_steps: Batches over which ``beta`` rises to 1; None leaves it where it is.
        **options: See :class:`~rlstore.replay.options.ReplayOptions`.
    """

    if TYPE_CHECKING:

        def sample(self, batch_size: int | None = None) -> SequenceBatch:
            """A batch of ``batch_size``, or (None) of the storage's own size, drawn at random."""

    _own_settings: ClassVar[tuple[str, ...]] = (
        *("sequence_length", "burn_in", "overlap", "across_episodes", "hidden_shape", "alpha", "beta", "beta_steps"),
    )
    _fractions: ClassVar[tuple[str, ...]] = ("beta",)
    _windows: Windows

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        device: str | torch.device = "cpu",
        storage_size: int = 1_000_000,
        num_envs: int | None = 1,
        batch_size: int = 256,
        *,
        sequence_length: int,
        burn_in: int = 0,
        overlap: int = 0,
        across_episodes: bool = False,
        hidden_shape: Sequence[Any] | None = None,
        alpha: float = 0.0,
        beta: float = 0.4,
        beta_steps: int | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, sequence_length=sequence_length)
        for name, value, limit in (("burn_in", burn_in, None), ("overlap", overlap, sequence_length - 1)):
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or value < 0
                or (limit is not None and value > limit)
            ):
                bound = "not negative" if limit is None else f"from 0 to sequence_length - 1 = {limit}"
                raise InvalidInputError(f"{name} is {value!r}; {owner} needs a whole number that is {bound}")
        self.sequence_length, self.burn_in, self.overlap = sequence_length, burn_in, overlap
        self.across_episodes, self.hidden_shape = bool(across_episodes), hidden_shape
        self._set_priorities(alpha, beta, beta_steps)
        shapes = _hidden_shapes(owner, hidden_shape)
        super().__init__(
            observation_space, action_space, device, storage_size, num_envs, batch_size, options, hidden_shapes=shapes
        )

    @property
    def draw_total(self) -> float:
        """What draws are in proportion to: the windows, or with priorities their sum."""
        if self._replay is None:
            return 0.0
        self._catch_up()
        return float(len(self._windows)) if self._priorities is None else super().draw_total

    @property
    def _length(self) -> int:
        return self.burn_in + self.sequence_length

    def _longest(self) -> tuple[str, int]:
        return "burn_in + sequence_length", self._length

    def _beside(self) -> dict[str, Any]:
        windows = [self._length, self.sequence_length - self.overlap, self.across_episodes]
        return {"priorities": ["windows", *windows] if self.alpha > 0 else None}

    def _prepared(self, ring: EpisodeRing) -> None:
        stride = self.sequence_length - self.overlap
        self._windows = Windows(ring, self._length, stride, across=self.across_episodes)
        self._priorities = Priorities(ring, self.alpha, self._windows) if self.alpha > 0 else None

    def _follow(self) -> None:
        self._windows.follow()
        super()._follow()

    def _forget(self, lanes: Tensor) -> None:
        self._windows.forget(lanes)

    def _cleared(self) -> None:
        self._windows.rebuild()
        super()._cleared()

    def _restored(self, reader: SnapshotReader) -> None:
        self._windows.rebuild()
        super()._restored(reader)

    # ---------------------------------------------------------------------------------------------- writing

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
        *,
        mask: Any = None,
        hidden_states: Any = None,
    ) -> None:
        """Add one step of all environments, as :meth:`ReplayStorage.add <rlstore.ReplayStorage.add>` does.

        Args:
            observations: What the agent saw, ``[envs, ...]``.
            actions: What it did, ``[envs, ...]``.
            rewards: What it got, ``[envs]``.
            terminateds: The episode really ended with this step, ``[envs]``.
            truncateds: The episode was cut off after this step, ``[envs]``.
            infos: Of it, ``final_obs`` or ``final_observation`` is read where an episode ended.
            next_observations: What the environment showed after the step.
            mask: False for environments that sat this step out, bool ``[envs]``.
            hidden_states: The recurrent state before the step, ``[layers, envs, hidden]``, or for an LSTM a pair of
                them.
        """
        hidden = self._hidden_of(hidden_states)
        self._write(observations, actions, rewards, hidden, terminateds, truncateds, infos, next_observations, mask)

    # ---------------------------------------------------------------------------------------------- reading

    def _requests(self) -> list[Request]:
        fields, (action, reward) = self._fields, self._fields.columns[:2]
        observations, following = (
            [Request(part, i, f.shape, self._served(f.dtype)) for i, f in enumerate(fields.observations)]
            for part in (Part.OBSERVATION, Part.NEXT_OBSERVATION)
        )
        return [
            *observations,
            *following,
            Request(Part.COLUMN, 0, action.shape, action.dtype),
            Request(Part.COLUMN, 1, reward.shape or (1,), reward.dtype),
            Request(Part.TERMINATED, 0, (1,), torch.bool),
            Request(Part.TRUNCATED, 0, (1,), torch.bool),
            Request(Part.IS_FIRST, 0, (), torch.bool),
            Request(Part.IS_HELD, 0, (), torch.bool),
        ]

    def _other_requests(self) -> list[Request]:
        states = enumerate(self._fields.columns[2:], start=2)
        return [Request(Part.COLUMN, i, column.shape, column.dtype) for i, column in states]

    def _draw(self, count: int) -> Drawn:
        if not self._windows.has_windows:
            raise NotReadyError(
                f"no sequence of {self._length} steps is complete yet, and no shorter episode is over; add more steps"
            )
        weights = None
        if self._priorities is None:
            begins = self._windows.draw(count, self._random)
        else:
            begins, weights = self._draw_by_priority(count, self._priorities)
        return Drawn(self._windows.rows(begins), weights, others=begins)

    def _batch(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> SequenceBatch:
        assert drawn.others is not None
        leaves, structure, begins = len(self._fields.structure.paths), self._fields.structure, drawn.others
        size = drawn.rows.shape
        actions, rewards, terminated, truncated, is_first, held = tensors[2 * leaves : 2 * leaves + 6]
        if self.burn_in:
            held[:, : self.burn_in] = False
        weights = torch.ones(size[0], 1, device=begins.device) if drawn.weights is None else drawn.weights
        if self._torch_device != begins.device:
            begins, weights = moved(begins, self._torch_device), moved(weights, self._torch_device)
        return SequenceBatch(
            structure.build(tensors[:leaves], size),
            actions,
            rewards,
            terminated,
            truncated,
            structure.build(tensors[leaves : 2 * leaves], size),
            is_first,
            held,
            self._states(tensors[2 * leaves + 6 :]),
            weights,
            begins,
        )

    @staticmethod
    def _states(tensors: Sequence[Tensor]) -> Any:
        """Recurrent states ``[batch, layers, hidden]`` as networks take them, ``[layers, batch, hidden]``."""
        states = tuple(state.transpose(0, 1).contiguous() for state in tensors)
        return states if len(states) > 1 else states[0] if states else None

    def _as_dict(self, batch: Any) -> BatchDict:
        return dict(batch._asdict())


def _hidden_shapes(owner: str, shape: Sequence[Any] | None) -> list[tuple[int, int]]:
    """One ``(layers, hidden)`` for each recurrent state."""
    if shape is None:
        return []
    parts = list(shape) if isinstance(shape, (tuple, list)) else []
    pairs = [parts] if all(isinstance(part, int) for part in parts) else parts
    checked = [check_shape(owner, "hidden_shape", pair) for pair in pairs]
    if not checked or any(len(pair) != 2 for pair in checked):
        raise InvalidInputError(f"hidden_shape is {shape!r}; {owner} needs (layers, hidden), or a pair of those")
    return [(pair[0], pair[1]) for pair in checked]
