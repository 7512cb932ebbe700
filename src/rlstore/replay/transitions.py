"""Batches of transitions with n-step targets, for every storage that serves them."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rlstore.engine.batches.select import uniform_rows
from rlstore.engine.batches.transitions import Part, Request, TransitionGather
from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.replay.options import ReplayOptions
from rlstore.replay.prepare import Drawn
from rlstore.replay.trainer import OffPolicyStorage
from rlstore.storage import BatchDict


class ReplayBatch(NamedTuple):
    """A batch of transitions.

    With a window of k steps, k at most ``n_step`` and fewer where the episode ends or the newest row comes before:

    - ``observations`` ``[batch, ...]``: before the first step;
    - ``actions`` ``[batch, ...]``: of the first step, ``[batch]`` for Discrete;
    - ``rewards`` ``[batch, 1]``: ``sum_{i<k} discount^i r_i``;
    - ``discounts`` ``[batch, 1]``: ``discount^k``, or 0 if the episode terminated with the last step;
    - ``next_observations`` ``[batch, ...]``: after the last step.

    So the target of a value is ``rewards + discounts * V(next_observations)``, whatever ended.
    """

    observations: Any
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    next_observations: Any


class TransitionStorage(OffPolicyStorage):
    """Replay that serves transitions, drawn uniformly from all that are held.

    Every transition can begin a window.
    """

    _own_settings: ClassVar[tuple[str, ...]] = ("n_step", "discount")
    _sizes: ClassVar[tuple[str, ...]] = ("batch_size", "n_step")
    _fractions: ClassVar[tuple[str, ...]] = ("discount",)
    _gather: TransitionGather | None = None

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        device: str | torch.device,
        storage_size: int,
        num_envs: int | None,
        batch_size: int,
        n_step: int,
        discount: float,
        options: ReplayOptions,
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, n_step=n_step)
        check_fraction(owner, discount=discount)
        self.n_step, self.discount = int(n_step), float(discount)
        super().__init__(observation_space, action_space, device, storage_size, num_envs, batch_size, options)

    def _gather_with(self) -> tuple[int, float]:
        return self.n_step, self.discount

    def _requests(self) -> list[Request]:
        fields, action = self._fields, self._fields.columns[0]
        observations, following = (
            [Request(part, i, f.shape, self._served(f.dtype)) for i, f in enumerate(fields.observations)]
            for part in (Part.OBSERVATION, Part.NEXT_OBSERVATION)
        )
        return [
            *observations,
            Request(Part.COLUMN, 0, action.shape, self._served_actions(action.dtype)),
            Request(Part.REWARDS, 0, fields.reward_shape or (1,), torch.float32),
            Request(Part.DISCOUNTS, 0, (1,), torch.float32),
            *following,
        ]

    def _served_actions(self, stored: torch.dtype) -> torch.dtype:
        return stored

    def sample(self, batch_size: int | None = None) -> Any:
        """A batch drawn at random, of ``batch_size`` or (None) the storage's own."""
        if self._gather is None or self._closed or self._ahead is not None or self._control is not None:
            return super().sample(batch_size)
        if batch_size is not None:
            check_positive("sample()", batch_size=batch_size)
        size = self.batch_size if batch_size is None else int(batch_size)
        if self._gather.is_small(size) and self._ring_of().has_rows:
            # The short way, without a stop between drawing and gathering; what it gives is the same.
            tensors = self._gather.sample(size, self._random)
            if tensors is not None:
                return ReplayBatch(*self._parts(tensors))
        return super().sample(batch_size)

    def _bind(self) -> None:
        super()._bind()
        ring = self._ring_of()
        is_there = self._torch_device == ring.device and self.dtype in (None, torch.float32)
        is_plain = type(self)._draw is TransitionStorage._draw and type(self)._batch is TransitionStorage._batch
        n_step, gamma = self._gather_with()
        self._gather = TransitionGather(ring, self._requests(), n_step, gamma) if is_there and is_plain else None

    def _draw(self, count: int) -> Drawn:
        return Drawn(uniform_rows(self._ring_of(), count, self._random))

    def _parts(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Tensor, Tensor, Tensor, Any]:
        """Observations, actions, rewards, discounts and next observations of a batch."""
        structure = self._fields.structure
        if structure.is_leaf and len(tensors) == 5:
            return tensors
        count, size = len(structure.paths), (len(tensors[0]),)
        observations, following = tensors[:count], tensors[count + 3 :]
        return (structure.build(observations, size), *tensors[count : count + 3], structure.build(following, size))

    def _batch(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> Any:
        return ReplayBatch(*self._parts(tensors))

    def _as_dict(self, batch: Any) -> BatchDict:
        return dict(batch._asdict())
