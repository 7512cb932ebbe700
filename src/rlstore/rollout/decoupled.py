"""DecoupledRolloutStorage: rollouts for DAAC, whose actor predicts advantages beside a separate critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rlstore.engine import returns
from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.memory.tensors import allocate
from rlstore.engine.rows.ring import Column, Ring
from rlstore.engine.rows.schema import Field, Structure, as_tensor
from rlstore.engine.rows.spaces import SpaceLike, action_spec, observation_fields
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.rollout.attributes import BlockAttribute, ObservationAttribute
from rlstore.rollout.saved import SavedOnPolicyStorage, saved_leaves, saved_observations
from rlstore.storage import Sample


class DecoupledBatch(NamedTuple):
    """A mini-batch of :meth:`DecoupledRolloutStorage.sample`, all float32, scalars ``[rows, 1]``.

    ``terminateds`` and ``truncateds`` are those before the step: the previous step ended an episode.
    """

    obs: Any
    actions: Tensor
    values: Tensor
    adv_preds: Tensor
    returns: Tensor
    terminateds: Tensor
    truncateds: Tensor
    old_log_probs: Tensor
    advantages: Tensor


class DecoupledRolloutStorage(SavedOnPolicyStorage):
    """A rollout of ``num_steps`` steps of ``num_envs`` environments for DAAC (Raileanu and Fergus 2021).

    The blocks are attributes: ``obs`` ``[steps + 1, envs, ...]``, ``actions`` ``[steps, envs]`` for Discrete or
    ``[steps, envs, ...]``; ``rewards``, ``log_probs``, ``values``, ``returns``, ``advantages`` and ``adv_preds``, all
    ``[steps, envs]``; ``terminateds`` and ``truncateds`` ``[steps + 1, envs]``: row t + 1 tells of step t, row 0 of the
    rollout before. All but ``obs`` are float32. After ``num_steps`` adds the next add begins a new rollout.

    Args:
        observation_space: A gymnasium space (Dict and Tuple too), or a mapping with a ``shape`` and perhaps a ``dtype``
            (float32 if it names none).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: Where the data lie.
        num_steps: Steps of a rollout.
        num_envs: Environments side by side.
        discount: The discount factor gamma.
        gae_lambda: The weight lambda of longer estimates.
        seed: The seed of everything drawn at random; None draws one from torch's own generator.
    """

    obs = ObservationAttribute()
    actions = BlockAttribute()
    rewards = BlockAttribute()
    terminateds = BlockAttribute()
    truncateds = BlockAttribute()
    log_probs = BlockAttribute()
    values = BlockAttribute()
    adv_preds = BlockAttribute()
    returns = BlockAttribute()
    advantages = BlockAttribute()

    _fractions: ClassVar[tuple[str, ...]] = ("discount", "gae_lambda")
    _size_name: ClassVar[str] = "num_steps"
    _data_names: ClassVar[tuple[str, ...]] = ("returns", "advantages", "flags_before")
    _sample_names = (
        "observations",
        "actions",
        "rewards",
        "terminated",
        "truncated",
        "next_observations",
        "log_probs",
        "values",
        "adv_preds",
        "final_values",
    )

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        device: str | torch.device = "cpu",
        num_steps: int = 256,
        num_envs: int | None = 8,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        *,
        seed: int | None = None,
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, num_steps=num_steps)
        check_fraction(owner, discount=discount, gae_lambda=gae_lambda)
        super().__init__(num_steps, device, seed=seed)
        self.observation_space, self.action_space = observation_space, action_space
        self.num_envs, self.discount, self.gae_lambda = num_envs, discount, gae_lambda
        self._handed_lists = {}
        # Both None: a storage from create_factory(), which learns them from its first sample.
        if observation_space is not None or action_space is not None:
            check_positive(owner, num_envs=num_envs)
            structure, fields = observation_fields(
                _given(observation_space, "observation_space"), "obs", owner, torch.float32
            )
            shape = action_spec(_given(action_space, "action_space")).shape
            self._allocate(structure, fields, shape, int(num_envs or 0))

    @classmethod
    def create_factory(  # type: ignore[override]
        cls,
        size: int,
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        num_envs: int | None = None,
        *,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        seed: int | None = None,
    ) -> Callable[..., DecoupledRolloutStorage]:
        """A function ``f(device, actor, algorithm)`` that makes storages of ``size`` steps.

        Without spaces they learn the number of environments and all shapes from their first sample.
        """

        def create(
            device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None
        ) -> DecoupledRolloutStorage:
            storage = cls(observation_space, action_space, device, size, num_envs, discount, gae_lambda, seed=seed)
            storage._give(actor, algorithm)
            return storage

        return create

    @property
    def num_steps(self) -> int:
        """Steps of a rollout."""
        return self.max_size

    def _allocate_for(self, sample: Sample) -> None:
        num_envs = (*as_tensor(sample.get("rewards"), "rewards").shape, 1)[0]
        if self.num_envs not in (None, num_envs):
            raise InvalidInputError(f"the first sample has {num_envs} environments, and num_envs is {self.num_envs}")
        structure = Structure.of(sample["observations"], "obs")
        leaves = [as_tensor(leaf, "observations") for leaf in structure.leaves(sample["observations"])]
        fields = [
            Field(name, tuple(leaf.shape[1:]), leaf.dtype, "the first sample")
            for name, leaf in zip(structure.names, leaves, strict=True)
        ]
        self._allocate(structure, fields, tuple(as_tensor(sample.get("actions"), "actions").shape[1:]), num_envs)

    def _allocate(self, structure: Structure, obs: list[Field], action_shape: tuple[int, ...], num_envs: int) -> None:
        own = f"num_envs={num_envs}"

        def scalar(name: str, *, is_flag: bool = False) -> Field:
            return Field(name, (), torch.float32, own, is_flag=is_flag)

        columns = [Column(field, field.name) for field in obs]
        # What follows a step stands beside the step after it; the next add writes its obs over the same row.
        columns += [Column(replace(field, name="next_" + field.name), field.name, lead=1) for field in obs]
        columns.append(Column(Field("actions", action_shape, torch.float32, "the action space"), "actions"))
        columns += [
            Column(scalar(name), name) for name in ("rewards", "log_probs", "values", "adv_preds", "final_values")
        ]
        columns += [Column(scalar(name, is_flag=True), name, lead=1) for name in ("terminateds", "truncateds")]
        self._ring = Ring(columns, self.max_size, num_envs, self._torch_device)
        self._ring.reserve([scalar("returns"), scalar("advantages")])
        self._unknown = allocate((num_envs,), torch.float32, self._torch_device, torch.nan)
        self._observations, self.num_envs = structure, num_envs

    # ---------------------------------------------------------------------------------------------- writing

    def add(
        self,
        obs: Any,
        actions: Tensor,
        rewards: Tensor,
        terminateds: Tensor,
        truncateds: Tensor,
        next_obs: Any,
        log_probs: Tensor,
        values: Tensor,
        adv_preds: Tensor,
        final_values: Tensor | None = None,
    ) -> None:
        """Add one step of all environments; everything is checked before anything is written.

        Args:
            obs: Observations ``[envs, ...]``.
            actions: ``[envs]`` or ``[envs, ...]``.
            rewards: ``[envs]``.
            terminateds: The episode really ended with this step.
            truncateds: The episode was cut off after this step.
            next_obs: What the environment showed after the step.
            log_probs: The log-probability of the actions.
            values: The critic's estimates, ``[envs]`` or ``[envs, 1]``.
            adv_preds: The actor's predictions of the advantage, likewise.
            final_values: The value of the observation in which an episode was truncated, read there alone; None or NaN
                where it is not known: the advantage of that step is then 0.
        """
        ring = self._ready_ring()
        self._follow_callers()
        row = self._row(
            obs, next_obs, (actions, rewards, log_probs, values, adv_preds), final_values, terminateds, truncateds
        )
        if ring.size == ring.steps:
            row = ring.fit(row)  # before the old rollout is given up
            self._begin_rollout()
        ring.write(row)
        self._spent = False

    def _row(
        self,
        obs: Any,
        next_obs: Any,
        values: tuple[Any, ...],
        final_values: Any,
        terminateds: Any,
        truncateds: Any,
    ) -> tuple[Any, ...]:
        """The values of a step in the order of the columns."""
        following = Structure(self._observations.paths, "next_obs")
        leaves = (*self._observations.leaves(obs), *following.leaves(next_obs))
        final = self._unknown if final_values is None else final_values
        return (*leaves, *values, final, terminateds, truncateds)

    def _begin_rollout(self) -> None:
        self._carry_flags()
        super()._begin_rollout()

    def update(self) -> None:
        """Carry the flags of a complete rollout's last step over to row 0, for the next one."""
        if self._ready_ring().size == self.max_size:
            self._carry_flags()

    def _carry_flags(self) -> None:
        ring = self._ready_ring()
        for block in (self.terminateds, self.truncateds):
            block[0].copy_(block[ring.size])

    # ---------------------------------------------------------------------------------------------- learning

    def compute_returns_and_advantages(self, last_values: Tensor) -> None:
        """Fill ``returns`` and ``advantages`` by generalised advantage estimation.

        ``delta_t = r_t + discount * V_{t+1} - V_t``, ``A_t = delta_t + discount * gae_lambda * A_{t+1}``,
        ``returns_t = A_t + V_t``; V of the step after the last is ``last_values``. Where an episode ended nothing flows
        in from later steps. Terminated: no bootstrap. Truncated: bootstrap from ``final_values`` where given to
        :meth:`add`, else A of that step is 0. Both: terminated. ``advantages`` are then normalised over the rollout:
        ``(A - mean) / (std + 1e-5)``, std unbiased.

        Args:
            last_values: The value of the observations after the last step, ``[envs]`` or ``[envs, 1]``.
        """
        self._compute(last_values, self.discount, self.gae_lambda)

    def _compute(self, last_values: Tensor, gamma: float, lam: float) -> None:
        self._require_rows()
        ring = self._ready_ring()
        last = self._fit_last_values(last_values)
        flags = returns.readable_flags(self.terminateds[1:]), returns.readable_flags(self.truncateds[1:])
        final = ring.blocks["final_values"]
        out = {"advantages": self.advantages, "returns": self.returns}
        returns.fill_gae(self.rewards, self.values, last, *flags, final, gamma=gamma, lam=lam, **out, epsilon=1e-5)

    def sample(self, num_mini_batch: int = 8) -> Iterator[DecoupledBatch]:
        """Yield mini-batches of ``steps * envs // num_mini_batch`` rows, as many as there are, in a new order.

        Args:
            num_mini_batch: Mini-batches to cut the rollout into.
        """
        held = self._require_rows() * self._ready_ring().lanes
        size = self._batch_rows(held, num_mini_batch)
        leaves = len(self._observations.paths)
        dtypes, batch_size = [torch.float32] * (leaves + 8), torch.Size((size,))
        for _, batches in self._serve(self._batch_sources, held // size, size, 1, dtypes=dtypes):
            for tensors in batches:
                yield DecoupledBatch(self._observations.build(tensors[:leaves], batch_size), *tensors[leaves:])

    def _batch_sources(self, steps: int) -> tuple[Tensor, ...]:
        """The blocks behind a batch, in its order; flags of rows 0 to T - 1, those before each step."""
        self._follow_callers()
        blocks = self._ready_ring().blocks
        names = ("actions", "values", "adv_preds", "returns", "terminateds", "truncateds", "log_probs", "advantages")
        return (
            *(blocks[name][:steps] for name in self._observations.names),
            *(_with_last_axis(blocks[name][:steps]) for name in names),
        )

    def _require_rows(self) -> int:
        rows = super()._require_rows()
        if rows < self.max_size:
            raise NotReadyError(f"the rollout is not complete: {rows} of {self.max_size} steps are added")
        return rows

    # ---------------------------------------------------------------------------------------------- the ten methods

    def _insert(self, sample: Sample) -> None:
        self.add(*self._arguments(sample))

    def _check(self, sample: Sample) -> None:
        obs, actions, rewards, terminateds, truncateds, next_obs, log_probs, values, adv_preds, final = self._arguments(
            sample
        )
        row = self._row(obs, next_obs, (actions, rewards, log_probs, values, adv_preds), final, terminateds, truncateds)
        self._ready_ring().fit(row)

    def _arguments(self, sample: Sample) -> tuple[Any, ...]:
        """The arguments of :meth:`add` from a sample."""
        words = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations", "log_probs")
        return tuple(sample.get(name) for name in (*words, "values", "adv_preds", "final_values"))

    def _discounts(self) -> tuple[float, float]:
        return self.discount, self.gae_lambda

    def _following(self) -> list[Tensor]:
        blocks, rows = self._ready_ring().blocks, self._ready_ring().size
        return [blocks[name][rows] for name in self._observations.names]

    def _columns(self, rows: int) -> dict[str, Any]:
        self._follow_callers()
        ring = self._ready_ring()
        leaves = (ring.blocks[name][:rows] for name in self._observations.names)
        names = ("actions", "rewards", "values", "log_probs", "adv_preds", "returns", "advantages")
        return {
            "observations": self._observations.build(leaves, (rows, ring.lanes)),
            **{name: _with_last_axis(ring.blocks[name][:rows]) for name in names},
            "terminated": _with_last_axis(self.terminateds[1 : rows + 1] != 0),
            "truncated": _with_last_axis(self.truncateds[1 : rows + 1] != 0),
        }

    def _apart(self, rows: int) -> dict[str, Any]:
        ring = self._ready_ring()
        leaves = (ring.blocks[name][1 : rows + 1] for name in self._observations.names)
        return {
            "next_observations": self._observations.build(leaves, (rows, ring.lanes)),
            "final_values": _with_last_axis(ring.blocks["final_values"][:rows]),
            "flags_before": torch.stack([self.terminateds[0], self.truncateds[0]]),
        }

    def _restore(self, data: Sample) -> None:
        if "flags_before" in data:
            lanes = self._ready_ring().lanes
            field = Field("flags_before", (2,), torch.float32, f"num_envs={lanes}", lane_axis=1)
            self.terminateds[0], self.truncateds[0] = field.fit(data["flags_before"], lanes, self._torch_device)

    # ---------------------------------------------------------------------------------------------- save and load

    def _settings(self) -> dict[str, Any]:
        names = ("observation_space", "action_space", "num_steps", "num_envs", "discount", "gae_lambda")
        settings = {name: getattr(self, name) for name in names}
        if self._ring is not None and self.observation_space is None:  # learnt from the first sample
            settings["learnt"] = {**saved_leaves(self), "action_shape": list(self.actions.shape[2:])}
        return settings

    @classmethod
    def _from_settings(cls, settings: Mapping[str, Any], device: str | torch.device) -> DecoupledRolloutStorage:
        given = {name: value for name, value in settings.items() if name != "learnt"}
        storage = cls(device=device, seed=0, **given)
        if "learnt" in settings:
            structure, fields = saved_observations(settings["learnt"], "obs")
            storage._allocate(structure, fields, tuple(settings["learnt"]["action_shape"]), settings["num_envs"])
        return storage


def _given(space: SpaceLike | None, name: str) -> SpaceLike:
    if space is None:
        raise InvalidInputError(f"{name} is None; give both spaces")
    return space


def _with_last_axis(block: Tensor) -> Tensor:
    """Scalars ``[time, lanes]`` as ``[time, lanes, 1]``."""
    return block.unsqueeze(-1) if block.dim() == 2 else block
