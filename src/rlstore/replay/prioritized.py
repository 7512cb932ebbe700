"""PrioritizedReplayStorage: transitions drawn by priority."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlstore.engine.batches.priorities import Priorities
from rlstore.engine.batches.staging import moved
from rlstore.engine.batches.transitions import TransitionGather
from rlstore.engine.checks import check_positive
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.replay.options import ReplayOptions
from rlstore.replay.prepare import Drawn
from rlstore.replay.prioritization import PriorityStorage
from rlstore.replay.transitions import TransitionStorage


class PrioritizedBatch(NamedTuple):
    """A :class:`~rlstore.replay.transitions.ReplayBatch` with two fields more.

    - ``weights`` ``[batch, 1]``: ``(P(i) * size) ** -beta`` over the largest of them, for the loss of each row;
    - ``rows`` ``[batch]``: the row ids, with which priorities come back.
    """

    observations: Any
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    next_observations: Any
    weights: Tensor
    rows: Tensor


class PrioritizedReplayStorage(PriorityStorage, TransitionStorage):
    """The newest ``storage_size`` transitions, drawn in proportion to ``priority ** alpha`` (Schaul et al. 2016).

    ``sample()`` gives a :class:`PrioritizedBatch`; ``update(batch.rows, priorities)`` sets priorities. New transitions
    take the largest there is. A batch has one row from each of ``batch_size`` equal parts of the total. A transition
    whose priority is exactly 0 is not drawn again: add a small number to errors that may become 0.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (float32 if it names none).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served, and the data lie.
        storage_size: Transitions held, over all environments.
        num_envs: Environments side by side.
        batch_size: Transitions in a batch.
        n_step: Steps over which rewards are summed before the bootstrap.
        discount: The discount factor.
        alpha: How much priorities count: 0 not at all, 1 in full.
        beta: How much of the bias the weights undo: 0 nothing, 1 all.
        beta_steps: Batches over which ``beta`` rises to 1; None leaves it where it is.
        **options: See :class:`~rlstore.replay.options.ReplayOptions`.
    """

    _fused: TransitionGather | None = None

    _own_settings: ClassVar[tuple[str, ...]] = ("n_step", "discount", "alpha", "beta", "beta_steps")
    _fractions: ClassVar[tuple[str, ...]] = ("discount", "beta")

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        device: str | torch.device = "cpu",
        storage_size: int = 1_000_000,
        num_envs: int | None = 1,
        batch_size: int = 256,
        *,
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_steps: int | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        self._set_priorities(alpha, beta, beta_steps)
        super().__init__(
            observation_space, action_space, device, storage_size, num_envs, batch_size, n_step, discount, options
        )

    def _beside(self) -> dict[str, Any]:
        return {"priorities": "rows"}

    def _prepared(self, ring: EpisodeRing) -> None:
        self._priorities = Priorities(ring, self.alpha)

    def _bind(self) -> None:
        super()._bind()
        ring = self._ring_of()
        is_there = self._torch_device == ring.device and self.dtype in (None, torch.float32)
        self._fused = TransitionGather(ring, self._requests(), *self._gather_with()) if is_there else None

    def sample(self, batch_size: int | None = None) -> PrioritizedBatch:
        """A batch drawn at random, of ``batch_size`` or (None) the storage's own."""
        is_plain = not self._closed and self._ahead is None and self._control is None
        if self._fused is None or not is_plain or not self._ring_of().has_rows:
            return super().sample(batch_size)  # type: ignore[no-any-return]
        if batch_size is not None:
            check_positive("sample()", batch_size=batch_size)
        assert self._priorities is not None
        size = self.batch_size if batch_size is None else int(batch_size)
        # The short way, where the kernels have one; what it gives is the same.
        made = self._fused.sample_by_priority(self._priorities, size, self.current_beta, self._random)
        if made is None:
            return super().sample(batch_size)  # type: ignore[no-any-return]
        self._drawn += 1
        tensors, weights, rows = made
        return PrioritizedBatch(*self._parts(tensors), weights, rows)

    def _draw(self, count: int) -> Drawn:
        assert self._priorities is not None
        return Drawn(*self._draw_by_priority(count, self._priorities))

    def _batch(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> PrioritizedBatch:
        assert drawn.weights is not None
        rows, weights = drawn.rows, drawn.weights
        if self._torch_device != rows.device:
            rows, weights = moved(rows, self._torch_device), moved(weights, self._torch_device)
        return PrioritizedBatch(*self._parts(tensors), weights, rows)
