"""HindsightReplayStorage: transitions whose goals are replaced by what was reached instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlstore.engine.batches.select import random_units, uniform_rows
from rlstore.engine.batches.staging import moved
from rlstore.engine.batches.transitions import Part, Request
from rlstore.engine.checks import check_fraction
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.schema import as_tensor
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.replay.options import ReplayOptions
from rlstore.replay.prepare import Drawn
from rlstore.replay.transitions import ReplayBatch, TransitionStorage

_STRATEGIES = ("future", "final", "episode")
_KEYS = ("observation", "achieved_goal", "desired_goal")

ComputeReward = Callable[[Any, Any, dict[str, Any]], Any]


def _lost_reward(achieved: Any, desired: Any, info: dict[str, Any]) -> Any:
    raise NotReadyError("a function cannot be saved with a storage: set compute_reward of the one that was loaded")


class HindsightReplayStorage(TransitionStorage):
    """Hindsight experience replay (Andrychowicz et al. 2017) over observations with goals.

    Each transition of a batch is relabelled with the probability ``relabel_fraction``: its desired goal becomes the
    goal that was achieved after a step t' of the same episode. t' is uniform over the steps from its own on
    (``future``), the last step (``final``), or uniform over all steps held of the episode (``episode``); of an episode
    that goes on, the steps so far. ``sample()`` gives a :class:`ReplayBatch` with TensorDict observations.

    A transition that was not relabelled keeps the reward that the environment gave. One that was keeps its
    ``discounts``: where reaching a goal ends the episode, make them 0 for those whose reward says that the new goal was
    reached.

    Args:
        observation_space: A Dict space with "observation", "achieved_goal" and "desired_goal".
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where batches are served, and the data lie.
        storage_size: Transitions held, over all environments.
        num_envs: Environments side by side.
        batch_size: Transitions in a batch.
        compute_reward: ``compute_reward(achieved, desired, info)``, called once for a whole batch with tensors
            ``[batch, ...]`` and an empty dict (infos are not kept); gives ``batch`` rewards. A snapshot does not hold
            it: set ``storage.compute_reward`` after ``load``.
        strategy: "future", "final" or "episode".
        relabel_fraction: The part of a batch that is relabelled.
        discount: The discount factor.
        **options: See :class:`~rlstore.replay.options.ReplayOptions`.
    """

    if TYPE_CHECKING:

        def sample(self, batch_size: int | None = None) -> ReplayBatch:
            """A batch of ``batch_size``, or (None) of the storage's own size, drawn at random."""

    _own_settings: ClassVar[tuple[str, ...]] = ("discount", "strategy", "relabel_fraction")
    _sizes: ClassVar[tuple[str, ...]] = ("batch_size",)

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
        **options: Unpack[ReplayOptions],
    ) -> None:
        owner = type(self).__name__
        if strategy not in _STRATEGIES:
            raise InvalidInputError(f"strategy is {strategy!r}; {owner} knows {list(_STRATEGIES)}")
        check_fraction(owner, relabel_fraction=relabel_fraction)
        if not callable(compute_reward):
            raise InvalidInputError(f"compute_reward is {compute_reward!r}; {owner} needs a function")
        self.compute_reward: ComputeReward = compute_reward
        self.strategy, self.relabel_fraction = strategy, float(relabel_fraction)
        super().__init__(
            observation_space, action_space, device, storage_size, num_envs, batch_size, 1, discount, options
        )

    @classmethod
    def _from_settings(cls, settings: Mapping[str, Any], device: str | torch.device) -> HindsightReplayStorage:
        return super()._from_settings({**settings, "compute_reward": _lost_reward}, device)

    def _prepared(self, ring: EpisodeRing) -> None:
        names = [path[0] if path else "" for path in self._fields.structure.paths]
        if sorted(set(_KEYS) - set(names)):
            raise InvalidInputError(
                f"the observations hold {names}; {type(self).__name__} needs a Dict space with {list(_KEYS)}"
            )
        achieved, desired = (self._fields.observations[names.index(key)] for key in _KEYS[1:])
        if (achieved.shape, achieved.dtype) != (desired.shape, desired.dtype):
            raise InvalidInputError(
                f"achieved_goal is {achieved.shape} {achieved.dtype} and desired_goal {desired.shape} "
                f"{desired.dtype}; a goal "
                "that was achieved has to be one that can be desired"
            )
        self._achieved, self._desired = (names.index(key) for key in _KEYS[1:])

    def _draw(self, count: int) -> Drawn:
        ring = self._ring_of()
        rows = uniform_rows(ring, count, self._random)
        chosen, units = random_units(2 * count, self._random).chunk(2)
        first, stop = torch.empty_like(rows), torch.empty_like(rows)
        ring.kernel.bounds(rows, first, stop)
        time, lane = rows // ring.lanes, rows % ring.lanes
        if self.strategy == "final":
            outcome = stop - 1
        else:
            begin = time if self.strategy == "future" else first
            outcome = begin + (units * (stop - begin)).long()
        goals = torch.where(chosen < self.relabel_fraction, outcome * ring.lanes + lane, -1)
        return Drawn(rows, others=goals)

    def _other_requests(self) -> list[Request]:
        goal = self._fields.observations[self._achieved]
        return [Request(Part.NEXT_OBSERVATION, self._achieved, goal.shape, self._served(goal.dtype))]

    def _batch(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> ReplayBatch:
        assert drawn.others is not None
        *transition, goals = tensors
        count, batch = len(self._fields.observations), len(drawn.rows)
        replaced = moved(drawn.others >= 0, self._torch_device)
        following = count + 3
        for place in (self._desired, following + self._desired):
            mask = replaced.view(-1, *[1] * (goals.dim() - 1))
            transition[place] = torch.where(mask, goals, transition[place])
        achieved, desired = transition[following + self._achieved], transition[following + self._desired]
        rewards = as_tensor(self.compute_reward(achieved, desired, {}), "what compute_reward gave")
        if rewards.numel() != batch or rewards.dtype.is_complex:
            raise InvalidInputError(
                f"compute_reward gave {tuple(rewards.shape)} {rewards.dtype}; it has to give {batch} rewards, "
                "one for each transition of the batch"
            )
        computed = rewards.reshape(batch, 1).to(self._torch_device, torch.float32)
        transition[count + 1] = torch.where(replaced.unsqueeze(1), computed, transition[count + 1])
        return ReplayBatch(*self._parts(tuple(transition)))
