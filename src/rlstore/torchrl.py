"""A replay buffer for TorchRL's TensorDicts: ``extend``, ``sample``, ``update_tensordict_priority``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlstore import PrioritizedReplayStorage, ReplayStorage
from rlstore.engine.calls import explained
from rlstore.engine.checks import check_positive
from rlstore.errors import InvalidInputError
from rlstore.replay.tensordicts import Key, entry, insert_steps, sample_with_ends

__all__ = ["ReplayBuffer"]

_FLAGS = ("done", "terminated", "truncated")
_SERVED = ("index", "_weight", "priority_weight", "steps_to_next_obs")  # what a sample holds besides its data


class _Layout(NamedTuple):
    """Which entries of a TensorDict are what.

    Attributes:
        observations: Keys that are before a step and, under "next", after it.
        extra: The key of each other entry, by the name of the extra field that holds it.
        extra_shapes: The shape of one row of it.
    """

    observations: list[Key]
    extra: dict[str, Key]
    extra_shapes: dict[str, tuple[int, ...]]


class ReplayBuffer:
    """Transitions as TorchRL's collectors return them, in place of its ``TensorDictReplayBuffer``.

    Entries that are both at the root and under "next" (``observation`` and the like) are observations, of which each is
    stored once. ``action``, ``("next", "reward")`` and the flags ``("next", "done")``, ``("next", "terminated")`` and
    ``("next", "truncated")`` are known; flags at the root are not stored. All other entries are stored as they are; in
    an n-step transition they are those of the first step. Shapes and dtypes are taken from the first data.

    Args:
        size: The number of transitions held, over all environments; then the oldest are overwritten.
        num_envs: The number of environments that the data are from.
        batch_size: Transitions in a sample, where ``sample`` is given no number.
        n_step: Steps over which rewards are summed before the bootstrap.
        gamma: The discount factor of that sum.
        alpha: The exponent of the priorities; None draws uniformly.
        beta: The exponent of the importance weights: 1 corrects the bias completely.
        eps: Added to every priority, so that none is 0.
        priority_key: The entry that holds priorities.
        device: The device of the data and of the samples.
        seed: The seed of the random generator; None draws one from torch's default generator.

    Attributes:
        storage: The storage that holds the data, for example to save it.
    """

    @explained
    def __init__(
        self,
        size: int,
        *,
        num_envs: int = 1,
        batch_size: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        alpha: float | None = None,
        beta: float = 0.4,
        eps: float = 1e-8,
        priority_key: Key = "td_error",
        device: str | torch.device = "cpu",
        seed: int | None = None,
    ) -> None:
        check_positive("ReplayBuffer", size=size, num_envs=num_envs)
        if batch_size is not None:
            check_positive("ReplayBuffer", batch_size=batch_size)
        if not eps >= 0:
            raise InvalidInputError(f"eps is {eps!r}; ReplayBuffer needs a number that is not negative")
        self.num_envs, self.batch_size, self.eps, self.priority_key = num_envs, batch_size, eps, priority_key
        self._options: dict[str, Any] = {"n_step": n_step, "discount": gamma, "device": device, "seed": seed}
        self._options.update(storage_size=size, num_envs=num_envs, autoreset="Disabled")
        self._is_prioritized = alpha is not None
        if self._is_prioritized:
            self._options.update(alpha=alpha, beta=beta)
        self._layout: _Layout | None = None  # None until the first data
        self.storage = self._make_storage()

    def _make_storage(self, **options: Any) -> ReplayStorage | PrioritizedReplayStorage:
        kind = PrioritizedReplayStorage if self._is_prioritized else ReplayStorage
        return kind(None, None, **self._options, **options)

    def __len__(self) -> int:
        """Transitions held now."""
        return len(self.storage)

    # ---------------------------------------------------------------------------------------------- writing

    def extend(self, data: TensorDictBase) -> Tensor:
        """Append steps of all environments; everything is checked before anything is written.

        A step that does not begin with the observation in which the one before it ended, or after an end, begins a new
        episode.

        Args:
            data: TensorDict ``[num_envs, steps]``, or flattened to ``[num_envs * steps]``; of one environment
                ``[steps]``. Steps are in the order of time. An entry ``priority_key`` is their first priorities.

        Returns:
            The row of each, as ``index`` of a sample has it, int64 of the shape of ``data``.
        """
        entry(data, "action", "data")
        shape = self._shape(data)
        layout = self._layout or _layout(data, self.priority_key)
        steps = _by_time(data, shape)
        sample = _sample(steps, layout)
        storage = self.storage
        if self._layout is None:
            forms = {name: (layout.extra_shapes[name], steps.get(key).dtype) for name, key in layout.extra.items()}
            reward_shape = tuple(sample["rewards"].shape[2:])
            storage = self._make_storage(extra_fields=forms, reward_shape=() if reward_shape == (1,) else reward_shape)
        rows = insert_steps(storage, sample).transpose(0, 1)
        self.storage, self._layout = storage, layout
        if self._is_prioritized and data.get(self.priority_key, None) is not None:
            self.update_priority(rows.flatten(), self._priorities(data.reshape(-1)))
        return rows.reshape(data.shape)

    def add(self, data: TensorDictBase) -> Tensor:
        """Append one step.

        Args:
            data: A TensorDict ``[]``, or of several environments ``[num_envs]``.

        Returns:
            Its row or rows.
        """
        entry(data, "action", "data")
        expected = (self.num_envs,) if data.ndim else ()
        if tuple(data.shape) != expected or (self.num_envs > 1 and not data.ndim):
            raise InvalidInputError(
                f"data is {tuple(data.shape)}; add() takes one step of {self.num_envs} environments, and extend() "
                "several. Nothing was written."
            )
        return self.extend(data.reshape(-1)).reshape(data.shape)

    def _shape(self, data: TensorDictBase) -> tuple[int, int]:
        """The number of environments and of steps."""
        given, envs = tuple(data.shape), self.num_envs
        count = data.numel()
        if not 1 <= len(given) <= 2 or count == 0 or count % envs or (len(given) == 2 and given[0] != envs):
            raise InvalidInputError(
                f"data is {given}; give [num_envs, steps], num_envs={envs}, or flattened to [num_envs * steps]. "
                "Nothing was written."
            )
        return envs, count // envs

    # ---------------------------------------------------------------------------------------------- reading

    @torch.inference_mode(False)  # a batch is trained on
    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw transitions: a TensorDict ``[batch]`` with the entries of the data, and some more.

        For a window of k steps, ``("next", "reward")`` is ``sum_{i<k} gamma^i r_i``, and the other entries under "next"
        are those after its last step; flags and rewards are ``[batch, 1]``. Besides there are

        - ``index`` int64 ``[batch]``: the row, for ``update_priority``;
        - with priorities ``priority_weight`` and ``_weight``, the same tensor, ``[batch]``: importance weights divided
          by the largest of the batch;
        - with ``n_step`` above 1 ``steps_to_next_obs`` int64 ``[batch, 1]``: k, which TorchRL's losses read.

        Args:
            batch_size: The number of transitions; None for that given to the buffer.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise InvalidInputError("batch_size is None; give it to sample() or to ReplayBuffer()")
        batch, ends = sample_with_ends(self.storage, size)
        assert self._layout is not None
        served = batch["observations"].set("action", batch["actions"])
        following = batch["next_observations"].set("reward", batch["rewards"])
        following.set("done", ends.terminated | ends.truncated)
        following.set("terminated", ends.terminated).set("truncated", ends.truncated)
        served.set("next", following).set("index", batch["rows"])
        for name, key in self._layout.extra.items():
            served.set(key, batch[name].reshape(size, *self._layout.extra_shapes[name]))
        if self._is_prioritized:
            weights = batch["weights"].squeeze(1)
            served.set("priority_weight", weights).set("_weight", weights)  # its name before TorchRL 0.9
        if self._options["n_step"] > 1:
            served.set("steps_to_next_obs", ends.steps)
        return served

    # ---------------------------------------------------------------------------------------------- priorities

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of rows; those overwritten since are dropped. Does nothing without ``alpha``.

        Args:
            index: ``index`` of a sample, ``[n]``, or what ``extend`` returned.
            priority: A number, or one for each row; finite and not negative.
        """
        if not self._is_prioritized:
            return
        rows = torch.as_tensor(index).reshape(-1)
        values = torch.as_tensor(priority).detach().reshape(-1) + self.eps
        self.storage.update(rows, values.expand(len(rows)) if values.numel() == 1 else values)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample to its entry ``priority_key``, of several numbers a row to their largest.

        Args:
            data: The sample, with that entry and ``index``.
        """
        if self._is_prioritized:
            index = entry(data, "index", "data")
            self.update_priority(index, self._priorities(data))

    def _priorities(self, data: TensorDictBase) -> Tensor:
        """One priority for each row of data ``[rows]``."""
        return entry(data, self.priority_key, "data").reshape(len(data), -1).amax(1)


def _layout(data: TensorDictBase, priority_key: Key) -> _Layout:
    """Which entries of the first data are what."""
    root = _leaves(data, ("next", *_FLAGS, "reward", "action", priority_key, *_SERVED))
    following = _leaves(data.get("next"), (*_FLAGS, "reward"))
    observations = [key for key in root if key in following]
    if not observations:
        raise InvalidInputError(
            f"data has no entry that is before and, under 'next', after the step: {root} and {following}. "
            "Nothing was written."
        )
    extra = [key for key in root if key not in observations]
    after = [("next", *_parts(key)) for key in following if key not in observations]
    named = {f"entry_{i}": key for i, key in enumerate((*extra, *after))}
    return _Layout(observations, named, {name: tuple(data.get(key).shape[data.ndim :]) for name, key in named.items()})


def _leaves(data: TensorDictBase, others: tuple[Key, ...]) -> list[Key]:
    """The keys of all tensors but some, sorted."""
    keys = data.keys(include_nested=True, leaves_only=True)
    found = [key for key in keys if key not in others and _parts(key)[0] not in others]
    return sorted(found, key=_parts)


def _parts(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _by_time(data: TensorDictBase, shape: tuple[int, int]) -> TensorDictBase:
    """The data as ``[steps, num_envs]``."""
    return data.detach().reshape(shape).transpose(0, 1)


def _sample(steps: TensorDictBase, layout: _Layout) -> dict[str, Any]:
    """Steps in the words of the vocabulary."""
    terminated, truncated = _ends(steps)
    before = {name: entry(steps, key, "data") for name, key in layout.extra.items()}
    for place, inner in (("data", steps), ("data['next']", steps.get("next"))):
        for key in layout.observations:
            entry(inner, key, place)
    return {
        "observations": steps.select(*layout.observations),
        "next_observations": steps.get("next").select(*layout.observations),
        "actions": entry(steps, "action", "data"),
        "rewards": entry(steps, ("next", "reward"), "data"),
        "terminated": terminated,
        "truncated": truncated,
        **before,
    }


def _ends(steps: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Whether each step terminated its episode, and whether the episode was truncated after it."""
    flags = {name: steps.get(("next", name), None) for name in _FLAGS}
    given = {name: flag != 0 for name, flag in flags.items() if flag is not None}
    if not given:
        entry(steps, ("next", "done"), "data")
    done = torch.stack(list(given.values())).any(0)
    terminated = given.get("terminated")
    if terminated is None:
        terminated = done & ~given["truncated"] if "truncated" in given else done
    truncated = done & ~terminated
    return terminated, truncated | given["truncated"] if "truncated" in given else truncated
