"""NStepReplayStorage: transitions with n-step targets, as DrQ-v2 learns from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

import torch
from typing_extensions import Unpack

from rlstore.engine.spaces import SpaceLike
from rlstore.replay_base import ReplayOptions, StorageOptions
from rlstore.transition_batch import ReplayBatch, TransitionStorage


class ReplayIterator:
    """Batches without end.

    Calling it gives itself, so ``next(storage.replay_iter)`` and ``storage.replay_iter()`` both work.
    """

    def __init__(self, storage: NStepReplayStorage) -> None:
        self._storage = storage

    def __iter__(self) -> Iterator[ReplayBatch]:
        return self

    def __next__(self) -> ReplayBatch:
        batch: ReplayBatch = self._storage.sample()
        return batch

    def __call__(self) -> ReplayIterator:
        """Itself."""
        return self


class NStepReplayStorage(TransitionStorage):
    """The newest ``storage_size`` transitions, served with n-step targets and as float32.

    ``sample()`` gives a :class:`~rlstore.transition_batch.ReplayBatch`, on ``device``; the data are kept in RAM.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (float32 if it names none).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served.
        storage_size: Transitions held, over all environments.
        num_envs: Environments side by side.
        batch_size: Transitions in a batch.
        num_workers: Batches prepared ahead in the background; 0 for none.
        pin_memory: Whether batches for a CUDA device go through page-locked memory.
        n_step: Steps over which rewards are summed before the bootstrap.
        discount: The discount factor.
        fetch_every: A batch prepared this many or more added steps ago is thrown away and drawn anew; 1: always fresh.
        save_snapshot: Whether finished episodes are kept on disk, where a restarted run finds them.
        dtype: The dtype of served observations; None serves observations and actions as they are stored.
        snapshot_dir: The folder of the episodes; of one live storage at a time.
        **options: See :class:`~rlstore.replay_base.StorageOptions`.
    """

    _default_memory: ClassVar[str] = "ram"
    _default_dtype: ClassVar[torch.dtype | None] = torch.float32

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        device: str | torch.device = "cpu",
        storage_size: int = 1_000_000,
        num_envs: int | None = 1,
        batch_size: int = 256,
        num_workers: int = 4,
        pin_memory: bool = True,
        n_step: int = 3,
        discount: float = 0.99,
        fetch_every: int = 1000,
        save_snapshot: bool = False,
        *,
        snapshot_dir: str | os.PathLike[str] = "storage",
        **options: Unpack[StorageOptions],
    ) -> None:
        given: ReplayOptions = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "fetch_every": fetch_every,
            **options,
        }
        self.save_snapshot, self.snapshot_dir = bool(save_snapshot), snapshot_dir
        super().__init__(
            observation_space, action_space, device, storage_size, num_envs, batch_size, n_step, discount, given
        )

    @property
    def replay_iter(self) -> ReplayIterator:
        """Batches without end, as :meth:`sample` gives them."""
        return ReplayIterator(self)

    def _served_actions(self, stored: torch.dtype) -> torch.dtype:
        return stored if self.dtype is None else torch.float32
