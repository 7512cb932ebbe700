"""PrioritizedReplayStorage: transitions drawn by priority."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike
from rlstore.replay.core import ReplayCore, of_part
from rlstore.replay.options import Options
from rlstore.replay.samplers import PrioritySampler
from rlstore.replay.views import PrioritizedBatch, TransitionView


class PrioritizedReplayStorage(ReplayCore):
    """The newest ``storage_size`` transitions, drawn in proportion to ``priority ** alpha`` (Schaul et al. 2016).

    ``sample()`` gives a :class:`~rlstore.PrioritizedBatch`; ``update(batch.rows, priorities)`` sets priorities. New
    transitions take the largest there is. A batch has one row from each of ``batch_size`` equal parts of the total. A
    transition whose priority is exactly 0 is not drawn again: add a small number to errors that may become 0.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (float32 if it names none).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served, and the data are stored.
        storage_size: Transitions held, over all environments.
        num_envs: Environments side by side.
        batch_size: Transitions in a batch.
        n_step: Steps over which rewards are summed before the bootstrap.
        discount: The discount factor.
        alpha: How much priorities count: 0 not at all, 1 in full.
        beta: How much of the bias the weights undo: 0 nothing, 1 all.
        beta_steps: Batches over which ``beta`` rises to 1; None leaves it where it is.
        dtype: The dtype of served observations; None serves them as they are stored.
        frame_stack: Frames stacked in an observation. Each is stored once, and stacks are put together on reading.
        stack_axis: The axis of the frames; None takes the last one of three if it is shorter than the first, else 0.
        reward_shape: The shape of one reward; ``()`` for a number.
        autoreset: What the environments do after an end, as gymnasium's ``AutoresetMode`` or its value; None tells by
            the data: the final observation once more, with a reward of 0 and no flag, is a reset step.
        memory: "device": that of the device. "ram": the host's, whatever the device. "shared": RAM that other
            processes can use too. "mapped": files in the folder ``path``, which may be larger than RAM and are reopened
            by the next storage that is made with the same arguments.
        path: The folder of "mapped".
        seed: The seed of everything drawn at random; None draws one from torch's own generator.
        rate_limit: A limit on samples for each insert, which holds adding and sampling back; None for none.
        timeout: Seconds after which a wait is given up, for the rate limit or for writers to pause.
        num_workers: Batches prefetched in the background; 0 for none.
        pin_memory: Whether batches for a CUDA device go through page-locked memory.
        fetch_every: A batch prefetched this many or more added steps ago is thrown away and drawn again.
        extra_fields: Further fields of a step, by name a space or ``(shape, dtype)``: given to ``add`` by name with
            every step, and served under that name.
    """

    _own_settings: ClassVar[tuple[str, ...]] = ("n_step", "discount", "alpha", "beta", "beta_steps")
    _sampler: PrioritySampler
    n_step: int = of_part("_view", "n_step", "Steps over which rewards are summed before the bootstrap.")
    discount: float = of_part("_view", "discount", "The discount factor.")
    alpha: float = of_part("_sampler", "alpha", "How much priorities count: 0 not at all, 1 in full.")
    beta: float = of_part("_sampler", "beta", "How much of the bias the weights undo, at first: 0 nothing, 1 all.")
    beta_steps: int | None = of_part("_sampler", "beta_steps", "Batches over which ``beta`` rises to 1, or None.")

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
        )
        view = TransitionView(owner, n_step, discount, weighted=True)
        super().__init__(options, view, PrioritySampler(owner, alpha, beta, beta_steps))

    def sample(self, batch_size: int | None = None) -> PrioritizedBatch:
        """A batch of ``batch_size``, or (None) of the storage's own size, drawn at random."""
        batch: PrioritizedBatch = self._sample(batch_size)
        return batch

    @property
    def current_beta(self) -> float:
        """The exponent of the weights now: from ``beta`` it rises to 1 over ``beta_steps`` batches."""
        return self._sampler.current_beta

    @property
    def stale_updates(self) -> int:
        """Priorities that came for rows overwritten since, and were dropped. On CUDA this waits for the device."""
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
