"""NStepReplayStorage: transitions with n-step targets, as DrQ-v2 learns from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from rlstore.engine.calls import explained
from rlstore.engine.checks import check_path
from rlstore.engine.disk.journal import Journal
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.appender import Appender
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike
from rlstore.errors import InvalidCallError
from rlstore.parameters import with_arguments
from rlstore.replay.core import ReplayCore, of_part
from rlstore.replay.kept_episodes import KeptEpisodes
from rlstore.replay.options import Options
from rlstore.replay.samplers import UniformSampler
from rlstore.replay.views import ReplayBatch, TransitionView


class ReplayIterator(IterableDataset[ReplayBatch]):
    """An infinite iterator over batches.

    Calling it returns itself, so ``next(storage.replay_iter)`` and ``storage.replay_iter()`` both work.

    It is a dataset for ``torch.utils.data.DataLoader(storage.replay_iter(), batch_size=None)``; where observations are
    TensorDicts, which a DataLoader does not know, with ``collate_fn=lambda batch: batch``. The DataLoader cannot have
    workers: they would draw from copies of the storage, to which nothing is added. ``num_workers`` of the storage
    prefetches batches.
    """

    def __init__(self, storage: NStepReplayStorage) -> None:
        self._storage = storage

    def __iter__(self) -> Iterator[ReplayBatch]:
        if get_worker_info() is not None:
            raise InvalidCallError(
                "a worker of a DataLoader has a copy of the storage, to which nothing is added: give the DataLoader "
                f"num_workers=0. num_workers of {type(self._storage).__name__} prefetches batches."
            )
        return self

    def __next__(self) -> ReplayBatch:
        return self._storage.sample()

    def __call__(self) -> ReplayIterator:
        """Itself."""
        return self


@with_arguments("save_snapshot", "snapshot_dir")
class NStepReplayStorage(ReplayCore):
    """The newest ``storage_size`` transitions, served with n-step targets and as float32.

    ``sample()`` returns a :class:`~rlstore.ReplayBatch`, on ``device``; the data are held in host memory.

    Args:
        observation_space: A Gymnasium space (also Dict and Tuple), or a mapping with ``shape`` and optionally ``dtype``
            (default: float32).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: The device of the batches.
        storage_size: The number of transitions held, over all environments; then the oldest are overwritten. Each
            environment has ``storage_size // num_envs`` of them: with 10 for 4 environments 8 are held.
        num_envs: The number of environments that are stepped together.
        batch_size: Transitions in a batch.
        num_workers: Batches prefetched in the background; 0 for none.
        pin_memory: Copy batches to a CUDA device through pinned (page-locked) memory.
        n_step: Steps over which rewards are summed before the bootstrap.
        discount: The discount factor.
        fetch_every: A batch prefetched this many or more added steps ago is stale: it is dropped and drawn again.
            With 1, batches are always fresh.
        save_snapshot: Keep finished episodes on disk until they are evicted; a restarted run resumes with them.
        snapshot_dir: The folder of the episodes. Only one live storage can use it.
        dtype: The dtype of served observations; None serves observations and actions as they are stored.
        frame_stack: Frames stacked in an observation, the oldest first; the next observation is moved by one frame.
            Each frame is stored once; sampling rebuilds the stacks.
        stack_axis: The axis of the frames; None is the last of three axes if it is shorter than the first, else 0.
        reward_shape: The shape of one reward; ``()`` for a number.
        autoreset: The autoreset mode of the environments, a Gymnasium ``AutoresetMode`` or its value. None detects
            reset steps from the data: steps that repeat the final observation, with a reward of 0 and no flag.
        memory: Where the data are held. "device": on the device. "ram": in host memory. "shared": in host memory that
            other processes can write to. "mapped": in memory-mapped files in the folder ``path``, which may be larger
            than RAM and which the next storage with the same arguments resumes from.
        path: The folder of ``memory="mapped"``.
        seed: The seed of the storage's random generator; None draws one from torch's default generator.
        rate_limit: A limit on samples per insert, for which ``add`` and ``sample`` wait; None for no limit.
        timeout: Seconds after which a wait for the rate limit, or for writers to pause, raises an error.
        extra_fields: Additional fields by name, each a space or ``(shape, dtype)``. They are passed to ``add`` by name
            with every step, and batches contain them by name.
        allow_nonfinite_rewards: Store rewards that are NaN or infinite; otherwise ``add`` refuses them.
        sample_info: Add to each batch ``probabilities``, float32 ``[batch]``: the probability with which each item was
            drawn, and ``draw_counts``, int64 ``[batch]``: how often it was drawn so far, this batch included. On CUDA
            ``sample`` then synchronizes.
        journal: A folder to which a thread commits the storage every two seconds, or a :class:`~rlstore.Journal` with
            other options. ``Storage.load(folder)`` gives back the last commit. None for no journal.
    """

    _own_settings: ClassVar[tuple[str, ...]] = ("n_step", "discount", "save_snapshot", "snapshot_dir")
    _folders: ClassVar[tuple[str, ...]] = ("path", "snapshot_dir")
    save_snapshot: bool
    snapshot_dir: str
    n_step: int = of_part("_view", "n_step", "Steps over which rewards are summed before the bootstrap.")
    discount: float = of_part("_view", "discount", "The discount factor.")

    @explained
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
        dtype: torch.dtype | None = torch.float32,
        frame_stack: int = 1,
        stack_axis: int | None = None,
        reward_shape: Sequence[int] = (),
        autoreset: Any = None,
        memory: str = "ram",
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        rate_limit: RateLimit | None = None,
        timeout: float = 60.0,
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        sample_info: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        self._save_snapshot = bool(save_snapshot)
        self._snapshot_dir = check_path(type(self).__name__, "snapshot_dir", snapshot_dir)
        options = Options(
            observation_space,
            action_space,
            device,
            storage_size,
            num_envs,
            batch_size,
            dtype=dtype,
            frame_stack=frame_stack,
            stack_axis=stack_axis,
            reward_shape=reward_shape,
            autoreset=autoreset,
            memory=memory,
            path=path,
            seed=seed,
            rate_limit=rate_limit,
            timeout=timeout,
            num_workers=num_workers,
            pin_memory=pin_memory,
            fetch_every=fetch_every,
            extra_fields=extra_fields,
            allow_nonfinite_rewards=allow_nonfinite_rewards,
            sample_info=sample_info,
            journal=journal,
        )
        view = TransitionView(type(self).__name__, n_step, discount, float_actions=True)
        super().__init__(options, view, UniformSampler())

    def sample(self, batch_size: int | None = None) -> ReplayBatch:
        """Draw a random batch of ``batch_size``, or (None) of the storage's ``batch_size``."""
        batch: ReplayBatch = self._sample(batch_size)
        return batch

    @property
    def replay_iter(self) -> ReplayIterator:
        """An infinite iterator over the batches of :meth:`sample`."""
        return ReplayIterator(self)

    @classmethod
    def _used_folders(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        kept = {"snapshot_dir": settings["snapshot_dir"]} if settings["save_snapshot"] is True else {}
        return {**super()._used_folders(settings), **kept}

    @classmethod
    def _without_folders(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        in_ram = super()._without_folders(settings)
        return {**in_ram, "save_snapshot": False} if settings["save_snapshot"] is True else in_ram

    def _opened(self, ring: EpisodeRing, appender: Appender) -> None:
        if self._kept is not None:
            self._kept.close()
        if self.save_snapshot:
            self._kept = KeptEpisodes(type(self).__name__, self.snapshot_dir, ring, self._fields)
            self._kept.restore(appender)
            appender.keep = self._kept.follow
