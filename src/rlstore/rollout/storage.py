"""RolloutStorage: rollouts for PPO, recurrent PPO and distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from rlstore.engine import returns
from rlstore.engine.checks import check_fraction, check_positive, check_shape
from rlstore.engine.rows.ring import Ring
from rlstore.engine.rows.schema import Field, Structure, as_tensor
from rlstore.errors import InvalidInputError, NotReadyError, RolloutFullError
from rlstore.rollout.attributes import BlockAttribute, BlockGroup, ObservationAttribute
from rlstore.rollout.core import repeated
from rlstore.rollout.recurrent import hidden_state, recurrent_batches
from rlstore.rollout.saved import SavedRollout
from rlstore.rollout.transition import (
    MODES,
    SAMPLE_NAMES,
    VOCABULARY,
    RolloutBatch,
    RolloutTransition,
    TransitionLayout,
    group_blocks,
)
from rlstore.storage import BatchDict, Sample


class RolloutStorage(SavedRollout):
    """A rollout of ``num_transitions_per_env`` steps of ``num_envs`` environments.

    The blocks are attributes, ``[steps, envs, ...]``: ``observations`` (a TensorDict), ``actions``, ``rewards`` and
    ``dones``; for "rl" also ``values``, ``actions_log_prob``, ``returns``, ``advantages`` and ``distribution_params``;
    for "distillation" ``privileged_actions``. Write into them or put other tensors in their place: what they hold when
    a generator runs is what is served.

    Args:
        training_type: "rl" or "distillation".
        num_envs: Environments side by side.
        num_transitions_per_env: Steps of a rollout.
        obs: An example of the observations, TensorDict ``[envs]``; nested ones too.
        actions_shape: The shape of one action.
        device: Where the data lie.
        gamma: The discount that ``before_gradients`` takes when the algorithm names none.
        lam: The lambda that it takes then.
        seed: The seed of everything drawn at random; None draws one from torch's own generator.
    """

    Transition = RolloutTransition
    Batch = RolloutBatch

    observations = ObservationAttribute()
    rewards = BlockAttribute()
    actions = BlockAttribute()
    dones = BlockAttribute()
    values = BlockAttribute()
    actions_log_prob = BlockAttribute()
    returns = BlockAttribute()
    advantages = BlockAttribute()
    privileged_actions = BlockAttribute()
    distribution_params = BlockGroup(tuple, mode="rl")
    saved_hidden_state_a = BlockGroup(list)
    saved_hidden_state_c = BlockGroup(list)

    _fractions: ClassVar[tuple[str, ...]] = ("gamma", "lam")
    _size_name: ClassVar[str] = "num_transitions_per_env"
    _data_names: ClassVar[tuple[str, ...]] = ("returns", "advantages", "last_observations")

    def __init__(
        self,
        training_type: str,
        num_envs: int | None,
        num_transitions_per_env: int,
        obs: TensorDict | None,
        actions_shape: Sequence[int] | None,
        device: str | torch.device = "cpu",
        *,
        gamma: float = 0.99,
        lam: float = 0.95,
        seed: int | None = None,
    ) -> None:
        owner = type(self).__name__
        if training_type not in MODES:
            raise InvalidInputError(f"training_type is {training_type!r}; {owner} knows {sorted(MODES)}")
        check_positive(owner, num_transitions_per_env=num_transitions_per_env)
        check_fraction(owner, gamma=gamma, lam=lam)
        super().__init__(num_transitions_per_env, device, seed=seed)
        self.training_type = training_type
        self.gamma, self.lam = gamma, lam
        self.num_envs, self.actions_shape = num_envs, actions_shape
        self._last_observations: list[Tensor] | None = None
        self._handed_lists = {}
        # All three None: a storage from create_factory(), which learns them from its first sample.
        if (num_envs, obs, actions_shape) != (None, None, None):
            check_positive(owner, num_envs=num_envs)
            shape = check_shape(owner, "actions_shape", actions_shape if actions_shape is not None else ())
            self._allocate(int(num_envs or 0), obs, shape, f"the obs given to {owner}()")

    @classmethod
    def create_factory(  # type: ignore[override]
        cls,
        size: int,
        training_type: str = "rl",
        *,
        gamma: float = 0.99,
        lam: float = 0.95,
        seed: int | None = None,
    ) -> Callable[..., RolloutStorage]:
        """A function ``f(device, actor, algorithm)`` that makes storages of ``size`` steps.

        They learn the number of environments and all shapes from their first sample.
        """

        def create(device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None) -> RolloutStorage:
            storage = cls(training_type, None, size, None, None, device, gamma=gamma, lam=lam, seed=seed)
            storage._give(actor, algorithm)
            return storage

        return create

    # ---------------------------------------------------------------------------------------------- memory

    @property
    def num_transitions_per_env(self) -> int:
        """Steps of a rollout."""
        return self.max_size

    @property
    def step(self) -> int:
        """Steps written since :meth:`clear`."""
        return 0 if self._ring is None else self._ring.size

    def _allocate_for(self, sample: Sample) -> None:
        actions = as_tensor(sample.get("actions"), "actions")
        num_envs = (*as_tensor(sample.get("rewards"), "rewards").shape, 1)[0]
        actions_shape = tuple(actions.shape[1:]) if actions.dim() > 1 else (1,)
        self._allocate(num_envs, sample["observations"], actions_shape, "the first sample")

    def _allocate(self, num_envs: int, obs: Any, actions_shape: tuple[int, ...], origin: str) -> None:
        structure = Structure.of(obs, "observations")
        if not structure.paths:
            raise InvalidInputError(f"the observations {obs} have no part that could be held")
        fields = []
        for name, leaf in zip(structure.names, structure.leaves(obs), strict=True):
            example = as_tensor(leaf, name)
            if example.dim() < 1 or example.shape[0] != num_envs:
                raise InvalidInputError(
                    f"{name} is {tuple(example.shape)}; its first dimension must be the {num_envs} environments"
                )
            fields.append(Field(name, tuple(example.shape[1:]), example.dtype, origin))
        own = f"num_envs={num_envs}"
        actions_origin = f"actions_shape={list(actions_shape)} and num_envs={num_envs}"
        fields.append(Field("actions", actions_shape, torch.float32, actions_origin))
        fields.append(Field("rewards", (1,), torch.float32, own))
        fields.append(Field("dones", (1,), torch.uint8, own, is_flag=True))
        if self.training_type == "distillation":
            fields.append(Field("privileged_actions", actions_shape, torch.float32, actions_origin))
        else:
            fields.extend(Field(name, (1,), torch.float32, own) for name in MODES["rl"])
        self._layout = TransitionLayout(structure, fields, self.training_type, num_envs, self._torch_device)
        self._ring = Ring(self._layout.columns, self.max_size, num_envs, self._torch_device)
        if self.training_type == "rl":
            self._ring.reserve([Field(name, (1,), torch.float32, own) for name in ("returns", "advantages")])
        self._observations, self.num_envs, self.actions_shape = structure, num_envs, actions_shape

    def clear(self) -> None:
        """Begin a new rollout: the cursor goes back to the first step."""
        self._begin_rollout()

    def reset(self) -> None:
        """Make the storage empty, every tensor zero, and forget hidden states and distribution parameters."""
        if self._ring is not None:
            groups = self._layout.groups
            self._ring.drop([block for group, count in groups.items() for block in group_blocks(group, count)])
            groups.clear()
            self._handed_lists.clear()
        self._last_observations = None
        super().reset()

    # ---------------------------------------------------------------------------------------------- writing

    def add_transition(self, transition: RolloutTransition) -> None:
        """Add one step of all environments at the cursor; everything is checked before anything is written.

        Raises:
            RolloutFullError: (an OverflowError) if the rollout is full.
            InvalidInputError: (a ValueError) if a field is missing or does not fit. Other attributes are not looked at.
        """
        ring = self._ready_ring()
        if ring.size >= ring.steps:
            raise RolloutFullError(
                f"the rollout is full: {ring.size} of {ring.steps} steps since clear(). Call clear() after the update "
                "(or after_gradients(), before insert_transition()) or raise num_transitions_per_env. "
                "Nothing was written."
            )
        self._follow_callers()
        values, optional = self._layout.row(transition)
        if optional:
            values = self._extend(values, optional)
        ring.write(values)
        self._spent, self._last_observations = False, None

    def _extend(self, values: tuple[Any, ...], optional: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
        """Make room for optional fields met for the first time, once the whole row is known to fit."""
        ring = self._ready_ring()
        if "distribution_params" in optional and ring.size:
            raise InvalidInputError(
                "distribution_params are given, and earlier steps of this rollout had none. Nothing was written."
            )
        columns, new = self._layout.first_met(optional)
        values = (*ring.fit(values), *new)
        ring.extend(columns, fills={"final_values": torch.nan})
        self._layout.groups.update({group: len(parts) for group, parts in optional.items()})
        return values

    # ---------------------------------------------------------------------------------------------- targets

    def compute_returns(
        self,
        last_values: Tensor,
        gamma: float,
        lam: float,
        normalize_advantage: bool = True,
    ) -> None:
        """Fill ``returns`` and ``advantages`` of the steps since :meth:`clear`, by generalised advantage estimation.

        ``delta_t = r_t + gamma * V_{t+1} - V_t``, ``A_t = delta_t + gamma * lam * A_{t+1}``, ``R_t = A_t + V_t``; V of
        the step after the last is ``last_values``. Where an episode ended nothing flows in from later steps, and there
        is no bootstrap, or, where it was truncated, one from ``final_values`` (see :class:`RolloutTransition`).

        Args:
            last_values: The value of the observations after the last step, ``[envs]`` or ``[envs, 1]``.
            gamma: The discount.
            lam: The weight of longer estimates.
            normalize_advantage: Bring the advantages to mean 0 and (unbiased) standard deviation 1, plus 1e-8.
        """
        self._require_mode("rl")
        rows, ring = self._require_rows(), self._ready_ring()
        check_fraction("compute_returns()", gamma=gamma, lam=lam)
        last = self._fit_last_values(last_values)
        truncated = ring.first("truncated", rows) if "truncated" in ring.blocks else None
        final = ring.first("final_values", rows) if "final_values" in ring.blocks else None
        returns.fill_gae(
            ring.first("rewards", rows),
            ring.first("values", rows),
            last,
            ring.first("dones", rows),
            truncated,
            final,
            dones=True,
            gamma=gamma,
            lam=lam,
            advantages=ring.first("advantages", rows),
            returns=ring.first("returns", rows),
            epsilon=1e-8 if normalize_advantage else None,
        )

    def _end_flags(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """``terminated`` and ``truncated``, ``[rows, envs, 1]``: what ended an episode that is done."""
        ring = self._ready_ring()
        dones = ring.first("dones", rows)
        if "truncated" not in ring.blocks:
            return dones, None
        truncated = ring.first("truncated", rows)
        return (dones != 0) & (truncated == 0), truncated

    def _compute(self, last_values: Tensor, gamma: float, lam: float) -> None:
        self.compute_returns(last_values, gamma, lam)

    # ---------------------------------------------------------------------------------------------- batches

    def generator(self) -> Iterator[RolloutBatch]:
        """Yield one batch for each written step, in order: observations, privileged actions and dones."""
        self._require_mode("distillation")
        rows, ring = self._require_rows(), self._ready_ring()
        self._follow_callers()
        for t in range(rows):
            leaves = [ring.blocks[name][t].clone() for name in self._observations.names]
            yield RolloutBatch(
                observations=self._observations.build(leaves, (ring.lanes,)),
                privileged_actions=self.privileged_actions[t].clone(),
                dones=self.dones[t].clone(),
            )

    def mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, *, reshuffle: bool = False, reuse: bool = False
    ) -> Iterator[RolloutBatch]:
        """Yield shuffled flat mini-batches of the steps written since :meth:`clear`, for feed-forward networks.

        Each holds ``rows // num_mini_batches`` rows, no row twice in an epoch; those left over are chosen at random.
        Every batch of every epoch is gathered for you: change it in place as you like.

        Args:
            num_mini_batches: Batches in each epoch.
            num_epochs: Epochs.
            reshuffle: Draw a new order for every epoch; otherwise one order serves them all.
            reuse: Gather the first epoch only, and yield the same batches and tensors in every epoch. What you change
                in them in place you will meet again. Not together with ``reshuffle``.
        """
        self._require_mode("rl")
        if reuse:
            if reshuffle:
                raise InvalidInputError(
                    "reshuffle=True needs other batches in every epoch, and reuse=True the same; give one of the two"
                )
            check_positive("mini_batch_generator()", num_epochs=num_epochs)
            yield from repeated(self.mini_batch_generator(num_mini_batches, 1), num_epochs)
            return
        held = self._require_rows() * self._ready_ring().lanes
        size = self._batch_rows(held, num_mini_batches)
        check_positive("mini_batch_generator()", num_epochs=num_epochs)
        leaves = len(self._observations.paths)
        build, batch_size = self._observations.build, torch.Size((size,))
        for _, batches in self._serve(self._batch_sources, num_mini_batches, size, num_epochs, reshuffle=reshuffle):
            for tensors in batches:
                actions, values, advantages, returns_, log_prob = tensors[leaves : leaves + 5]
                params = tensors[leaves + 5 :] or None
                observations = build(tensors[:leaves], batch_size)
                yield RolloutBatch(observations, actions, values, advantages, returns_, log_prob, params)

    def _batch_sources(self, steps: int) -> tuple[Tensor, ...]:
        """The blocks behind a batch of the "rl" mode, in the order of its arguments."""
        self._follow_callers()
        ring = self._ready_ring()
        names = [*self._observations.names, "actions", "values", "advantages", "returns", "actions_log_prob"]
        names += group_blocks("distribution_params", self._layout.groups.get("distribution_params", 0))
        return tuple([ring.first(name, steps) for name in names])

    def recurrent_mini_batch_generator(
        self,
        num_mini_batches: int,
        num_epochs: int = 8,
        *,
        max_trajectories: int | None = None,
        reuse: bool = False,
    ) -> Iterator[RolloutBatch]:
        """Yield mini-batches of whole trajectories, for recurrent networks; not shuffled.

        A mini-batch holds ``num_envs // num_mini_batches`` environments, in order. Their observations are split where
        episodes ended and padded with zeros to ``[steps, trajectories, ...]``, environment by environment; ``masks``
        tells data from padding, and ``hidden_states`` are those saved at each trajectory's start. The other fields are
        ``[steps, envs, ...]``.

        Args:
            num_mini_batches: Batches in each epoch.
            num_epochs: Epochs.
            max_trajectories: Trajectories in every batch, those that are not there all padding. On CUDA the host then
                need not wait for the device, and the shapes are always the same, as a CUDA graph needs them. If there
                are more it is an InvalidInputError; on CUDA nobody can tell, and the last ones are left out.
            reuse: Make the batches of the first epoch only, and yield the same ones in every epoch. What you change in
                them in place you will meet again.
        """
        self._require_mode("rl")
        if reuse:
            check_positive("recurrent_mini_batch_generator()", num_epochs=num_epochs)
            batches = self.recurrent_mini_batch_generator(num_mini_batches, 1, max_trajectories=max_trajectories)
            yield from repeated(batches, num_epochs)
            return
        rows, ring = self._require_rows(), self._ready_ring()
        self._outputs.begin()
        counts = (rows, num_mini_batches, num_epochs, max_trajectories)
        yield from recurrent_batches(ring, self._layout, self._batch_sources, *counts, self._outputs.empty)

    def _require_mode(self, mode: str) -> None:
        if self.training_type != mode:
            raise InvalidInputError(
                f"this is only for training_type {mode!r}; this storage was built for {self.training_type!r}"
            )

    # ---------------------------------------------------------------------------------------------- the ten methods

    @property
    def _sample_names(self) -> tuple[str, ...]:
        return SAMPLE_NAMES[self.training_type]

    def before_gradients(self, actor: Any = None, algo: Any = None) -> None:
        """For "rl", make returns and advantages (see the base class). Distillation needs none."""
        if self.training_type == "distillation":
            self._require_rows()
        else:
            super().before_gradients(actor, algo)

    def generate_batches(  # type: ignore[override]
        self,
        num_mini_batch: int,
        mini_batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        *,
        recurrent: bool = False,
        max_trajectories: int | None = None,
        reuse: bool = False,
    ) -> Iterator[BatchDict]:
        """Batches in the words of the vocabulary.

        With ``recurrent`` they are those of :meth:`recurrent_mini_batch_generator`, which hold whole environments: then
        ``mini_batch_size`` must be None, and they are never shuffled. ``max_trajectories`` is for these alone. With
        ``reuse`` the first epoch is gathered, and the same tensors, in the same order, come in every epoch.
        """
        if not recurrent:
            if max_trajectories is not None:
                raise InvalidInputError("max_trajectories is for recurrent=True")
            yield from super().generate_batches(num_mini_batch, mini_batch_size, num_epochs, shuffle, reuse=reuse)
            return
        if mini_batch_size is not None:
            raise InvalidInputError("recurrent batches hold whole environments: give mini_batch_size=None")
        options: dict[str, Any] = {"max_trajectories": max_trajectories, "reuse": reuse}
        for batch in self.recurrent_mini_batch_generator(num_mini_batch, num_epochs, **options):
            yield {VOCABULARY.get(name, name): value for name, value in vars(batch).items() if value is not None}

    def _insert(self, sample: Sample) -> None:
        nexts = sample.get("next_observations")
        following = None if nexts is None else self._fit_observations(nexts)
        self.add_transition(self._layout.transition(sample))
        self._last_observations = following

    def _check(self, sample: Sample) -> None:
        values, optional = self._layout.row(self._layout.transition(sample))
        self._ready_ring().fit(values)
        self._layout.first_met(optional)
        if sample.get("next_observations") is not None:
            self._fit_observations(sample["next_observations"])

    def _following(self) -> list[Tensor]:
        if self._last_observations is None:
            raise NotReadyError(
                "the newest sample had no 'next_observations', whose values before_gradients() asks for"
            )
        return self._last_observations

    def _discounts(self) -> tuple[float, float]:
        return self.gamma, self.lam

    def _columns(self, rows: int) -> dict[str, Any]:
        self._follow_callers()
        blocks = self._ready_ring().blocks
        terminated, truncated = self._end_flags(rows)
        leaves = (blocks[name][:rows] for name in self._observations.names)
        columns = {
            "observations": self._observations.build(leaves, (rows, self._ready_ring().lanes)),
            "actions": blocks["actions"][:rows],
            "rewards": blocks["rewards"][:rows],
            "terminated": terminated != 0,
            "truncated": torch.zeros_like(terminated, dtype=torch.bool) if truncated is None else truncated != 0,
        }
        for name in (*MODES[self.training_type], "returns", "advantages"):
            if name in blocks:
                columns[VOCABULARY.get(name, name)] = blocks[name][:rows]
        if self.training_type == "rl" and self.distribution_params is not None:
            columns["distribution_params"] = tuple(params[:rows] for params in self.distribution_params)
        return columns

    def _apart(self, rows: int) -> dict[str, Any]:
        blocks = self._ready_ring().blocks
        apart: dict[str, Any] = {}
        if "final_values" in blocks:
            apart["final_values"] = blocks["final_values"][:rows]
        saved = (self.saved_hidden_state_a, self.saved_hidden_state_c)
        if saved != (None, None):
            apart["hidden_states"] = tuple(hidden_state([s[:rows] for s in states or ()]) for states in saved)
        if self._last_observations is not None:
            apart["last_observations"] = self._observations.build(self._last_observations, (self._ready_ring().lanes,))
        return apart

    def _restore(self, data: Sample) -> None:
        if data.get("last_observations") is not None:
            self._last_observations = self._fit_observations(data["last_observations"])
