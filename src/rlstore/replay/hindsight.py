"""HindsightReplayStorage: transitions whose goals are relabeled with achieved goals."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from rlstore.engine.calls import explained
from rlstore.engine.disk.journal import Journal
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike
from rlstore.errors import NotReadyError
from rlstore.replay.core import ReplayCore, of_part
from rlstore.replay.options import Options
from rlstore.replay.samplers import GoalSampler
from rlstore.replay.views import ComputeReward, HindsightView, ReplayBatch, a_function


def _lost_reward(achieved: Any, desired: Any, info: dict[str, Any]) -> Any:
    raise NotReadyError("a function cannot be saved with a storage: set compute_reward of the one that was loaded")


class HindsightReplayStorage(ReplayCore):
    """Hindsight experience replay (Andrychowicz et al. 2017) over observations with goals.

    Each transition of a batch is relabeled with probability ``relabel_fraction``: its desired goal is replaced by the
    goal that was achieved after a step t' of the same episode. t' is uniform over the transition's own step and all
    later ones (``future``), the last step (``final``), or uniform over all steps of the episode that are held
    (``episode``); in an unfinished episode, over the steps so far.

    ``sample()`` returns a :class:`~rlstore.ReplayBatch` with TensorDict observations.

    A transition that is not relabeled keeps the reward of the environment. A relabeled one keeps its ``discounts``: if
    reaching a goal terminates an episode, set them to 0 where the reward shows that the new goal was reached.

    Args:
        observation_space: A Dict space with "observation", "achieved_goal" and "desired_goal".
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: The device of the batches and, with ``memory="device"``, of the data.
        storage_size: The number of transitions held, over all environments; then the oldest are overwritten. Each
            environment has ``storage_size // num_envs`` of them: with 10 for 4 environments 8 are held.
        num_envs: The number of environments that are stepped together.
        batch_size: Transitions in a batch.
        compute_reward: ``compute_reward(achieved, desired, info)``, called once for a whole batch with tensors
            ``[batch, ...]`` and an empty dict (infos are not stored); returns ``batch`` rewards. It is not saved in
            snapshots: set ``storage.compute_reward`` after ``load``.
        strategy: "future", "final" or "episode".
        relabel_fraction: The fraction of a batch that is relabeled.
        discount: The discount factor.
        dtype: The dtype of served observations; None serves them as they are stored.
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
        num_workers: Batches prefetched in the background; 0 for none.
        pin_memory: Copy batches to a CUDA device through pinned (page-locked) memory.
        fetch_every: A batch prefetched this many or more added steps ago is stale: it is dropped and drawn again.
        extra_fields: Additional fields by name, each a space or ``(shape, dtype)``. They are passed to ``add`` by name
            with every step, and batches contain them by name.
        allow_nonfinite_rewards: Store rewards that are NaN or infinite; otherwise ``add`` refuses them.
        sample_info: Add to each batch ``probabilities``, float32 ``[batch]``: the probability with which each item was
            drawn, and ``draw_counts``, int64 ``[batch]``: how often it was drawn so far, this batch included. On CUDA
            ``sample`` then synchronizes.
        journal: A folder to which a thread commits the storage every two seconds, or a :class:`~rlstore.Journal` with
            other options. ``Storage.load(folder)`` gives back the last commit. None for no journal.
    """

    _own_settings: ClassVar[tuple[str, ...]] = ("discount", "strategy", "relabel_fraction")
    _not_saved: ClassVar[Mapping[str, Any]] = {"compute_reward": _lost_reward}
    _view: HindsightView
    strategy: str = of_part("_sampler", "strategy", 'Where goals are taken from: "future", "final" or "episode".')
    relabel_fraction: float = of_part("_sampler", "relabel_fraction", "The fraction of a batch that is relabeled.")
    n_step: int = of_part("_view", "n_step", "1.")
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
        *,
        compute_reward: ComputeReward,
        strategy: str = "future",
        relabel_fraction: float = 0.8,
        discount: float = 0.99,
        dtype: torch.dtype | None = None,
        frame_stack: int = 1,
        stack_axis: int | None = None,
        reward_shape: Sequence[int] = (),
        autoreset: Any = None,
        memory: str = "device",
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        rate_limit: RateLimit | None = None,
        timeout: float = 60.0,
        num_workers: int = 0,
        pin_memory: bool = False,
        fetch_every: int = 1000,
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        sample_info: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        owner = type(self).__name__
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
        sampler = GoalSampler(owner, strategy, relabel_fraction)
        super().__init__(options, HindsightView(owner, discount, compute_reward), sampler)

    @property
    def compute_reward(self) -> ComputeReward:
        """The reward of achieved and desired goals. It is not part of a snapshot: set it after loading."""
        view: HindsightView = self._view
        return view.compute_reward

    @compute_reward.setter
    def compute_reward(self, compute_reward: ComputeReward) -> None:
        self._view.compute_reward = a_function(type(self).__name__, "compute_reward", compute_reward)

    def sample(self, batch_size: int | None = None) -> ReplayBatch:
        """Draw a random batch of ``batch_size``, or (None) of the storage's ``batch_size``."""
        batch: ReplayBatch = self._sample(batch_size)
        return batch
