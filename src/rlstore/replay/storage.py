"""ReplayStorage: transitions drawn uniformly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import Unpack

from rlstore.engine.rows.spaces import SpaceLike
from rlstore.replay.options import ReplayOptions
from rlstore.replay.transitions import ReplayBatch, TransitionStorage


class ReplayStorage(TransitionStorage):
    """The newest ``storage_size`` transitions, drawn uniformly: for DQN, SAC, TD3 and their kin.

    ``sample()`` gives a :class:`~rlstore.replay.transitions.ReplayBatch`.

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
        **options: See :class:`~rlstore.replay.options.ReplayOptions`.
    """

    if TYPE_CHECKING:

        def sample(self, batch_size: int | None = None) -> ReplayBatch:
            """A batch of ``batch_size``, or (None) of the storage's own size, drawn at random."""

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
        **options: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(
            observation_space, action_space, device, storage_size, num_envs, batch_size, n_step, discount, options
        )
