"""PrioritizedReplayStorage: transitions drawn by priority."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.calls import explained
from rlstore.engine.disk.journal import Journal
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike
from rlstore.replay.core import ReplayCore, of_part
from rlstore.replay.options import Options
from rlstore.replay.samplers import PrioritySampler
from rlstore.replay.views import PrioritizedBatch, TransitionView


class PrioritizedReplayStorage(ReplayCore):
    """The newest ``storage_size`` transitions, drawn in proportion to ``priority ** alpha`` (Schaul et al. 2016).

    ``sample()`` returns a :class:`~rlstore.PrioritizedBatch`; ``update(batch.rows, priorities)`` sets priorities. New
    transitions get the largest priority so far, or those that were given to ``add(..., priorities=)``. A batch has one
    row from each of ``batch_size`` equal parts of the total (stratified sampling). A transition with priority 0 is
    never drawn: add a small constant to errors that may become 0.

    Args:
        observation_space: A Gymnasium space (also Dict and Tuple), or a mapping with ``shape`` and optionally ``dtype``
            (default: float32).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: The device of the batches and, with ``memory="device"``, of the data.
        storage_size: The number of transitions held, over all environments; then the oldest are overwritten. Each
            environment has ``storage_size // num_envs`` of them: with 10 for 4 environments 8 are held.
        num_envs: The number of environments that are stepped together.
        batch_size: Transitions in a batch.
        n_step: Steps over which rewards are summed before the bootstrap.
        discount: The discount factor.
        alpha: The exponent of the priorities: 0 is uniform sampling.
        beta: The exponent of the importance weights: 1 corrects the bias completely.
        beta_steps: Batches over which ``beta`` is annealed to 1; None keeps it constant.
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

    _own_settings: ClassVar[tuple[str, ...]] = ("n_step", "discount", "alpha", "beta", "beta_steps")
    _sampler: PrioritySampler
    n_step: int = of_part("_view", "n_step", "Steps over which rewards are summed before the bootstrap.")
    discount: float = of_part("_view", "discount", "The discount factor.")
    alpha: float = of_part("_sampler", "alpha", "The exponent of the priorities: 0 is uniform sampling.")
    beta: float = of_part("_sampler", "beta", "The initial exponent of the importance weights.")
    beta_steps: int | None = of_part("_sampler", "beta_steps", "Batches over which ``beta`` is annealed to 1, or None.")

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
        n_step: int = 1,
        discount: float = 0.99,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_steps: int | None = None,
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
        view = TransitionView(owner, n_step, discount, weighted=True)
        super().__init__(options, view, PrioritySampler(owner, alpha, beta, beta_steps))

    def sample(self, batch_size: int | None = None) -> PrioritizedBatch:
        """Draw a random batch of ``batch_size``, or (None) of the storage's ``batch_size``."""
        batch: PrioritizedBatch = self._sample(batch_size)
        return batch

    @property
    def current_beta(self) -> float:
        """The current exponent of the weights, annealed from ``beta`` to 1 over ``beta_steps`` batches."""
        return self._sampler.current_beta

    @property
    def stale_updates(self) -> int:
        """Stale priority updates: their rows were overwritten, so they were dropped. On CUDA this synchronizes."""
        return self._sampler.stale_updates

    @property
    def priority_total(self) -> float:
        """The sum of all ``p_i``."""
        self._ring_of()
        self._catch_up()
        return self._sampler.priority_total

    def priorities(self, rows: Any) -> Tensor:
        """``p_i`` of rows that are held, float32 ``[n]``."""
        self._ring_of()
        self._catch_up()
        return self._sampler.priorities(rows)
