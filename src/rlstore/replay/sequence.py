"""SequenceReplayStorage: windows of consecutive steps, for learners with a memory (R2D2, Dreamer)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.calls import explained
from rlstore.engine.checks import check_positive, check_shape
from rlstore.engine.disk.journal import Journal
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike
from rlstore.errors import InvalidInputError
from rlstore.parameters import with_arguments
from rlstore.replay.core import ReplayCore, of_part
from rlstore.replay.options import Options
from rlstore.replay.samplers import WindowSampler
from rlstore.replay.views import SequenceBatch, SequenceView


@with_arguments("sequence_length", "burn_in", "overlap", "across_episodes", "hidden_shape")
class SequenceReplayStorage(ReplayCore):
    """The newest ``storage_size`` transitions, served as windows of consecutive steps of one episode.

    Windows begin every ``sequence_length - overlap`` steps of an episode, as long as they fit into it. A finished
    episode has one more window that ends with it, unless one does already; an episode shorter than a window has a
    single, shorter one. Windows are drawn uniformly, or with ``alpha`` above 0 by priority. ``sample()`` returns a
    :class:`~rlstore.SequenceBatch`; ``update(batch.rows, priorities)`` sets priorities.

    Args:
        observation_space: A Gymnasium space (also Dict and Tuple), or a mapping with ``shape`` and optionally ``dtype``
            (default: float32).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: The device of the batches and, with ``memory="device"``, of the data.
        storage_size: The number of transitions held, over all environments; then the oldest are overwritten. Each
            environment has ``storage_size // num_envs`` of them: with 10 for 4 environments 8 are held.
        num_envs: The number of environments that are stepped together.
        batch_size: Windows in a batch.
        sequence_length: Steps of a window to train on.
        burn_in: Steps before them, to warm up the recurrent state. ``masks`` is False for them, so the first
            ``burn_in`` steps of an episode are never trained on.
        overlap: Steps that a window shares with the next, at most ``sequence_length - 1``.
        across_episodes: Let windows span several episodes of an environment; ``is_first`` marks their first steps.
        hidden_shape: ``(layers, hidden)`` of the recurrent state that ``add`` takes, or a pair of those for an LSTM;
            None if there is none.
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

    _own_settings: ClassVar[tuple[str, ...]] = (
        *("sequence_length", "burn_in", "overlap", "across_episodes", "hidden_shape", "alpha", "beta", "beta_steps"),
    )
    sequence_length: int
    burn_in: int
    overlap: int
    across_episodes: bool
    hidden_shape: Sequence[Any] | None
    _sampler: WindowSampler
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
        allow_nonfinite_rewards: bool = False,
        sample_info: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, sequence_length=sequence_length)
        _check_steps(owner, "burn_in", burn_in, None)
        _check_steps(owner, "overlap", overlap, sequence_length - 1)
        self._sequence_length, self._burn_in, self._overlap = sequence_length, burn_in, overlap
        self._across_episodes, self._hidden_shape = bool(across_episodes), hidden_shape
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
            observations: Observations before the step, ``[envs, ...]``.
            actions: Actions, ``[envs, ...]``.
            rewards: Rewards, ``[envs]``.
            terminateds: The episode terminated in this step, ``[envs]``.
            truncateds: The episode was truncated after this step, ``[envs]``.
            infos: May contain ``final_obs`` or ``final_observation``, used where an episode ended.
            next_observations: Observations after the step, ``[envs, ...]``.
            mask: False for environments that did not take part in this step, bool ``[envs]``.
            hidden_states: The recurrent state before the step, ``[layers, envs, hidden]``, or for an LSTM a pair of
                them.
            **extra: All extra fields of the storage, by name, ``[envs, ...]``.
        """
        if self._hidden_shape is not None or hidden_states is not None:
            extra["hidden_states"] = hidden_states
        step = (observations, actions, rewards, terminateds, truncateds, infos, next_observations)
        super().add(*step, mask=mask, **extra)

    def sample(self, batch_size: int | None = None) -> SequenceBatch:
        """Draw a random batch of ``batch_size``, or (None) of the storage's ``batch_size``."""
        batch: SequenceBatch = self._sample(batch_size)
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
