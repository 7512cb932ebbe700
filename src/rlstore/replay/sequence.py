"""SequenceReplayStorage: windows of consecutive steps, for learners with a memory (R2D2, Dreamer)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.checks import check_positive, check_shape
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike
from rlstore.errors import InvalidInputError
from rlstore.replay.core import ReplayCore, of_part
from rlstore.replay.options import Options
from rlstore.replay.samplers import WindowSampler
from rlstore.replay.views import SequenceBatch, SequenceView


class SequenceReplayStorage(ReplayCore):
    """The newest ``storage_size`` transitions, served as windows of consecutive steps of one episode.

    Windows begin every ``sequence_length - overlap`` steps of an episode, as far as they fit into it. When it is over
    it gives one more, which ends with it, unless one does already; and if it is shorter than a window, a single
    shorter one. They are drawn uniformly, or with ``alpha`` above 0 by priority. ``sample()`` gives a
    :class:`~rlstore.SequenceBatch`; ``update(batch.rows, priorities)`` sets priorities.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (float32 if it names none).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served, and the data are stored.
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

    _own_settings: ClassVar[tuple[str, ...]] = (
        *("sequence_length", "burn_in", "overlap", "across_episodes", "hidden_shape", "alpha", "beta", "beta_steps"),
    )
    _sampler: WindowSampler
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
        sequence_length: int,
        burn_in: int = 0,
        overlap: int = 0,
        across_episodes: bool = False,
        hidden_shape: Sequence[Any] | None = None,
        alpha: float = 0.0,
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
        check_positive(owner, sequence_length=sequence_length)
        _check_steps(owner, "burn_in", burn_in, None)
        _check_steps(owner, "overlap", overlap, sequence_length - 1)
        self.sequence_length, self.burn_in, self.overlap = sequence_length, burn_in, overlap
        self.across_episodes, self.hidden_shape = bool(across_episodes), hidden_shape
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
        length, stride = burn_in + sequence_length, sequence_length - overlap
        sampler = WindowSampler(owner, length, stride, self.across_episodes, alpha, beta, beta_steps)
        super().__init__(options, SequenceView(length, burn_in), sampler, _hidden_shapes(owner, hidden_shape))

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Mapping[str, Any] | None,
        next_observations: Any,
        *,
        mask: Any = None,
        hidden_states: Any = None,
        **extra: Any,
    ) -> None:
        """Add one step of all environments, as :meth:`ReplayStorage.add <rlstore.ReplayStorage.add>` does.

        Args:
            observations: What the agent saw, ``[envs, ...]``.
            actions: What it did, ``[envs, ...]``.
            rewards: What it got, ``[envs]``.
            terminateds: The episode really ended with this step, ``[envs]``.
            truncateds: The episode was cut off after this step, ``[envs]``.
            infos: May hold ``final_obs`` or ``final_observation``, read where an episode ended.
            next_observations: What the environment showed after the step.
            mask: False for environments that take no part in this step, bool ``[envs]``.
            hidden_states: The recurrent state before the step, ``[layers, envs, hidden]``, or for an LSTM a pair of
                them.
            **extra: The storage's extra fields by name, ``[envs, ...]``: all of them.
        """
        if self.hidden_shape is not None or hidden_states is not None:
            extra["hidden_states"] = hidden_states
        step = (observations, actions, rewards, terminateds, truncateds, infos, next_observations)
        super().add(*step, mask=mask, **extra)

    def sample(self, batch_size: int | None = None) -> SequenceBatch:
        """A batch of ``batch_size``, or (None) of the storage's own size, drawn at random."""
        batch: SequenceBatch = self._sample(batch_size)
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


def _check_steps(owner: str, name: str, value: object, limit: int | None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < 0 or (limit is not None and value > limit):  # type: ignore[operator]
        bound = "not negative" if limit is None else f"from 0 to sequence_length - 1 = {limit}"
        raise InvalidInputError(f"{name} is {value!r}; {owner} needs a whole number that is {bound}")


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
