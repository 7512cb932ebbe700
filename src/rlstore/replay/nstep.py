"""NStepReplayStorage: transitions with n-step targets, as DrQ-v2 learns from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.replay.kept_episodes import KeptEpisodes
from rlstore.replay.options import ReplayOptions, StorageOptions
from rlstore.replay.transitions import ReplayBatch, TransitionStorage


class ReplayIterator:
    """Batches without end.

    Calling it gives itself, so ``next(storage.replay_iter)`` and ``storage.replay_iter()`` both work.
    """

    def __init__(self, storage: NStepReplayStorage) -> None:
        self._storage = storage

    def __iter__(self) -> Iterator[ReplayBatch]:
        return self

    def __next__(self) -> ReplayBatch:
        return self._storage.sample()

    def __call__(self) -> ReplayIterator:
        """Itself."""
        return self


class NStepReplayStorage(TransitionStorage):
    """The newest ``storage_size`` transitions, served with n-step targets and as float32.

    ``sample()`` gives a :class:`~rlstore.replay.transitions.ReplayBatch`, on ``device``; the data are kept in RAM.

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
        save_snapshot: Whether finished episodes are kept on disk, as long as they are in the storage; a restarted run
            finds them there.
        dtype: The dtype of served observations; None serves observations and actions as they are stored.
        snapshot_dir: The folder of the episodes; of one live storage at a time.
        **options: See :class:`~rlstore.replay.options.StorageOptions`.
    """

    if TYPE_CHECKING:

        def sample(self, batch_size: int | None = None) -> ReplayBatch:
            """A batch of ``batch_size``, or (None) of the storage's own size, drawn at random."""

    _own_settings: ClassVar[tuple[str, ...]] = ("n_step", "discount", "save_snapshot", "snapshot_dir")
    _kept: KeptEpisodes | None = None
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
        self.save_snapshot, self.snapshot_dir = bool(save_snapshot), os.fspath(snapshot_dir)
        super().__init__(
            observation_space, action_space, device, storage_size, num_envs, batch_size, n_step, discount, given
        )

    @property
    def replay_iter(self) -> ReplayIterator:
        """Batches without end, as :meth:`sample` gives them."""
        return ReplayIterator(self)

    def _served_actions(self, stored: torch.dtype) -> torch.dtype:
        return stored if self.dtype is None else torch.float32

    # ---------------------------------------------------------------------------------------------- episodes on disk

    def _prepared(self, ring: EpisodeRing) -> None:
        if self._kept is not None:
            self._kept.close()
        if not self.save_snapshot:
            return
        self._kept = KeptEpisodes(type(self).__name__, self.snapshot_dir, ring, self._fields)
        self._kept.restore(partial(self._put_episode, ring))

    def _put_episode(self, ring: EpisodeRing, episode: dict[str, Tensor], lane: int) -> None:
        """Write an episode that was read from the disk into a lane."""
        names = [field.name for field in self._fields.observations]
        order = [*names, *(f"next {name}" for name in names), *(column.name for column in self._fields.columns)]
        order += ["terminated", "truncated"]
        mask = torch.arange(ring.lanes) == lane
        for step in range(len(episode["terminated"])):
            row = [episode[name][step].unsqueeze(0).expand(ring.lanes, *episode[name].shape[1:]) for name in order]
            values = [value.to(ring.device).contiguous() for value in row]
            ring.write((*values, mask, *values[len(names) : 2 * len(names)], None))
            ring.after_end.fill_(-1)  # no reset step follows from what is on the disk

    def _follow(self) -> None:
        if self._kept is not None:
            self._kept.follow()

    def _restored(self, reader: SnapshotReader) -> None:
        if self._kept is not None:
            self._kept.count_anew()

    def _cleared(self) -> None:
        if self._kept is not None:
            self._kept.mark()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": None}  # the folder stays with the original

    def close(self) -> None:
        """End the thread that prepares batches and let go of folders. The storage cannot be used any more."""
        if self._kept is not None:
            self._kept.close()
        super().close()
