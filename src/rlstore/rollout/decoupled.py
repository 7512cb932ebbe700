"""DecoupledRolloutStorage: rollouts for DAAC, whose actor predicts advantages beside a separate critic."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rlstore.engine import returns
from rlstore.engine.batches.named import extended
from rlstore.engine.calls import explained
from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.disk.journal import Journal
from rlstore.engine.guard import guarded, guarded_steps
from rlstore.engine.memory.tensors import allocate
from rlstore.engine.rows.schema import (
    Field,
    Structure,
    as_tensor,
    describe_fields,
    described_fields,
    fields_of_example,
)
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike, action_spec, observation_fields
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.parameters import Check, argument, fraction, whole_number, with_arguments
from rlstore.rollout.core import SAVED_OPTIONS, BlockAttribute, ObservationAttribute, RolloutColumn, RolloutCore
from rlstore.storage import Sample, saved_arguments
from rlstore.trainer import check_names

# The arguments that are always saved.
_SETTINGS = ("observation_space", "action_space", "num_steps", "num_envs", "discount", "gae_lambda")

# The columns of a rollout, in the order of a row.
_COLUMNS = (
    RolloutColumn("obs", "observations", word="observations", batch="obs"),
    # What follows a step is held beside the step after it; the next add writes its obs over the same row.
    RolloutColumn("next_obs", "observations", word="next_observations", whole=True, lead=1, block="obs"),
    RolloutColumn("actions", "actions", word="actions", batch="actions"),
    RolloutColumn("rewards", word="rewards"),
    RolloutColumn("log_probs", word="log_probs", batch="old_log_probs"),
    RolloutColumn("values", word="values", batch="values"),
    RolloutColumn("adv_preds", word="adv_preds", batch="adv_preds"),
    RolloutColumn("final_values", word="final_values", whole=True),
    RolloutColumn("terminateds", "flag", word="terminated", batch="terminateds", lead=1),
    RolloutColumn("truncateds", "flag", word="truncated", batch="truncateds", lead=1),
    RolloutColumn("returns", word="returns", batch="returns", computed=True),
    RolloutColumn("advantages", word="advantages", batch="advantages", computed=True),
)


class DecoupledBatch(NamedTuple):
    """A mini-batch of :meth:`DecoupledRolloutStorage.sample`, all float32, scalars and Discrete actions ``[rows, 1]``.

    ``terminateds`` and ``truncateds`` are those before the step: the previous step ended an episode. Extra fields
    follow behind the documented ones, each with its own dtype.
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


@with_arguments("observation_space", "action_space", "discount", "gae_lambda")
class DecoupledRolloutStorage(RolloutCore):
    """A rollout of ``num_steps`` steps of ``num_envs`` environments for DAAC (Raileanu and Fergus 2021).

    The blocks are attributes: ``obs`` ``[steps + 1, envs, ...]``, ``actions`` ``[steps, envs]`` for Discrete or
    ``[steps, envs, ...]``; ``rewards``, ``log_probs``, ``values``, ``returns``, ``advantages`` and ``adv_preds``, all
    ``[steps, envs]``; ``terminateds`` and ``truncateds`` ``[steps + 1, envs]``: row t + 1 is for step t, row 0 for the
    previous rollout. All but ``obs`` are float32. After ``num_steps`` adds the next add starts a new rollout.

    Args:
        observation_space: A Gymnasium space (also Dict and Tuple), or a mapping with ``shape`` and optionally ``dtype``
            (default: float32).
        action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, or a mapping with ``shape`` and ``type``.
        device: The device of the data.
        num_steps: Steps of a rollout.
        num_envs: The number of environments that are stepped together.
        discount: The discount factor gamma.
        gae_lambda: The GAE lambda.
        seed: The seed of the storage's random generator; None draws one from torch's default generator.
        extra_fields: Additional fields by name, each a Box, Discrete, MultiDiscrete or MultiBinary space, or a pair of
            shape and dtype. They are keyword arguments of :meth:`add`, and batches have them after the other fields.
            Their blocks are in ``extra``, by name.
        allow_nonfinite_rewards: Store rewards that are NaN or infinite; otherwise adding them is refused.
        journal: A folder to which a thread commits the storage every two seconds, or a :class:`~rlstore.Journal` with
            other options. ``Storage.load(folder)`` gives back the last commit. Each commit writes all blocks, if
            anything has changed. None for no journal.
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

    observation_space: SpaceLike | None
    action_space: SpaceLike | None
    discount: float
    gae_lambda: float
    num_steps: int = argument("num_steps", attrgetter("_max_size"), "Steps of a rollout.")

    _parameters: ClassVar[Mapping[str, Check]] = {
        "discount": fraction,
        "gae_lambda": fraction,
        "num_steps": whole_number,
    }
    _data_words = ("flags_before",)
    _how_to_compute: ClassVar[str] = (
        "call compute_returns_and_advantages() or before_gradients(), or write both attributes yourself"
    )
    _scalar_shape = ()
    _flag_dtype: ClassVar[torch.dtype] = torch.float32

    @explained
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
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        owner = type(self).__name__
        self._allows_nonfinite = bool(allow_nonfinite_rewards)
        check_positive(owner, num_steps=num_steps)
        check_fraction(owner, discount=discount, gae_lambda=gae_lambda)
        super().__init__(num_steps, device, seed=seed)
        self._observation_space, self._action_space = observation_space, action_space
        self._num_envs, self._discount, self._gae_lambda = num_envs, discount, gae_lambda
        self._describe(_COLUMNS, extra_fields)
        # Both None: a storage from create_factory(), which learns them from its first sample.
        if observation_space is not None or action_space is not None:
            check_positive(owner, num_envs=num_envs)
            structure, fields = observation_fields(
                _given_space(observation_space, "observation_space"), "obs", owner, torch.float32
            )
            spec = action_spec(_given_space(action_space, "action_space"))
            origin = f"the action_space given to {owner}()"
            actions = Field("actions", spec.shape, torch.float32, origin, rule=spec.rule)
            self._allocate(structure, fields, actions, int(num_envs or 0))
        self._begin_journal(journal)

    @classmethod
    @explained
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
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> Callable[..., DecoupledRolloutStorage]:
        """A function ``f(device, actor, algorithm)`` that creates storages of ``size`` steps.

        Without spaces, the number of environments and all shapes are taken from their first sample.

        Args:
            size: Steps of a rollout.
            observation_space: See the class.
            action_space: See the class.
            num_envs: The number of environments; None takes it from the first sample.
            discount: The discount factor.
            gae_lambda: The GAE lambda.
            seed: The seed of each storage's random generator.
            extra_fields: Additional fields by name; see the class.
            allow_nonfinite_rewards: Store rewards that are NaN or infinite.
            journal: The folder of a journal; it is that of one storage.
        """
        options: dict[str, Any] = {"seed": seed, "extra_fields": extra_fields}
        options.update(allow_nonfinite_rewards=allow_nonfinite_rewards, journal=journal)

        def create(
            device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None
        ) -> DecoupledRolloutStorage:
            storage = cls(observation_space, action_space, device, size, num_envs, discount, gae_lambda, **options)
            storage._give(actor, algorithm)
            return storage

        return create

    def _allocate_for(self, sample: Sample) -> None:
        num_envs = (*as_tensor(sample.get("rewards"), "rewards").shape, 1)[0]
        if self.num_envs not in (None, num_envs):
            raise InvalidInputError(f"the first sample has {num_envs} environments, and num_envs is {self.num_envs}")
        structure, fields = fields_of_example(sample["observations"], "obs", 1, "the first sample")
        shape = tuple(as_tensor(sample.get("actions"), "actions").shape[1:])
        self._allocate(structure, fields, Field("actions", shape, torch.float32, "the action space"), num_envs)

    def _allocate(
        self,
        structure: Structure,
        observations: Sequence[Field],
        actions: Field,
        lanes: int,
    ) -> None:
        super()._allocate(structure, observations, actions, lanes)
        self._unknown = allocate((lanes,), torch.float32, self._torch_device, torch.nan)
        self._row_columns = [column for column in self._columns.values() if not column.computed]

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
        **extra: Tensor,
    ) -> None:
        """Add one step of all environments; everything is checked before anything is written.

        Args:
            obs: Observations ``[envs, ...]``.
            actions: ``[envs]`` or ``[envs, ...]``.
            rewards: ``[envs]``.
            terminateds: The episode terminated in this step.
            truncateds: The episode was truncated after this step.
            next_obs: Observations after the step.
            log_probs: The log-probability of the actions.
            values: The critic's estimates, ``[envs]`` or ``[envs, 1]``.
            adv_preds: The actor's predictions of the advantage, likewise.
            final_values: The value of the final observation, used where truncated; None or NaN where it is unknown:
                the advantage of that step is then 0.
            **extra: The extra fields given to the storage, by their names.
        """
        given = {
            "obs": obs,
            "next_obs": next_obs,
            "actions": actions,
            "rewards": rewards,
            "log_probs": log_probs,
            "values": values,
            "adv_preds": adv_preds,
            "final_values": final_values,
            "terminateds": terminateds,
            "truncateds": truncateds,
        }
        if extra or self._extra:
            names = [field.name for field in self._extra]
            check_names(extra, "a step", type(self).__name__, names, names)
            given.update(extra)
        self._add(given)

    def _add(self, given: Mapping[str, Any]) -> None:
        with self._guard:
            ring = self._ready_ring()
            self._follow_callers()
            row = self._row(given)
            if ring.size == ring.steps:
                row = ring.fit(row)  # before the old rollout is given up
                self._start_rollout()
            ring.write(row)
            if ring.size == 1:
                self._targets.blank(ring)
            self._spent = False

    def _row(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of a step, by column, in the order of a row."""
        row: list[Any] = []
        for column in self._row_columns:
            value = given[column.name]
            row.extend([self._unknown] if value is None and column.name == "final_values" else column.leaves(value))
        return tuple(row)

    def _start_rollout(self) -> None:
        self._carry_flags()
        super()._start_rollout()

    @guarded
    def update(self) -> None:
        """Copy the flags of the last step of a complete rollout to row 0, for the next one."""
        if self._ready_ring().size == self._max_size:
            self._carry_flags()

    def _first_begins(self) -> Tensor:
        begins: Tensor = (self.terminateds[0] != 0) | (self.truncateds[0] != 0)
        return begins

    def _carry_flags(self) -> None:
        ring = self._ready_ring()
        for block in (self.terminateds, self.truncateds):
            block[0].copy_(block[ring.size])

    # ---------------------------------------------------------------------------------------------- learning

    def compute_returns_and_advantages(
        self,
        last_values: Tensor,
        gamma: float | None = None,
        gae_lamdba: float | None = None,
        *,
        gae_lambda: float | None = None,
    ) -> None:
        """Fill ``returns`` and ``advantages`` by generalized advantage estimation.

        ``delta_t = r_t + gamma * V_{t+1} - V_t``, ``A_t = delta_t + gamma * gae_lambda * A_{t+1}``,
        ``returns_t = A_t + V_t``; V of the step after the last is ``last_values``. Where an episode ended, later steps
        do not contribute. Terminated: no bootstrap. Truncated: bootstrap from ``final_values`` where given to
        :meth:`add`, else A of that step is 0. Both: terminated. ``advantages`` are then normalized over the rollout:
        ``(A - mean) / (std + 1e-5)``, std unbiased.

        Args:
            last_values: The value of the observations after the last step, ``[envs]`` or ``[envs, 1]``.
            gamma: The discount factor; None for the storage's ``discount``.
            gae_lamdba: The GAE lambda, as the original spells it; None for the storage's ``gae_lambda``.
            gae_lambda: Another spelling of ``gae_lamdba``; give one of them.
        """
        if gae_lamdba is not None and gae_lambda is not None:
            raise InvalidInputError("gae_lamdba and gae_lambda are the same; give one of them. Nothing was changed.")
        lam = gae_lambda if gae_lamdba is None else gae_lamdba
        self._compute(last_values, self.discount if gamma is None else gamma, self.gae_lambda if lam is None else lam)

    @guarded
    def _compute(self, last_values: Tensor, gamma: float, lam: float) -> None:
        self._require_rows()
        ended, cut_off = returns.readable_flags(self.terminateds[1:]), returns.readable_flags(self.truncateds[1:])
        final_values = self._ready_ring().blocks["final_values"]
        self._fill_targets(last_values, ended, cut_off, final_values, gamma, lam, epsilon=1e-5)

    @guarded_steps
    def sample(self, num_mini_batch: int = 8) -> Iterator[DecoupledBatch]:
        """Yield mini-batches of ``steps * envs // num_mini_batch`` rows, in a new random order.

        Args:
            num_mini_batch: The number of mini-batches.
        """
        size = self._batch_rows(num_mini_batch, 1)
        self._warn_of_missing_targets()
        count = self._require_rows() * self._ready_ring().lanes // size
        kind = extended(DecoupledBatch, [field.name for field in self._extra])
        batches = self._serve(self._sources, count, size, observations_as=torch.float32, make=kind)
        yield from self._counted(batches, size)

    def _require_rows(self) -> int:
        rows = super()._require_rows()
        if rows < self._max_size:
            raise NotReadyError(f"the rollout is not complete: {rows} of {self.max_size} steps are added")
        return rows

    # ---------------------------------------------------------------------------------------------- the ten methods

    def _insert(self, sample: Sample) -> None:
        self._add(self._given(sample))

    def _check(self, sample: Sample) -> None:
        self._ready_ring().fit(self._row(self._given(sample)))

    def _given(self, sample: Sample) -> dict[str, Any]:
        """A sample by column."""
        return {column.name: sample.get(column.word) for column in self._row_columns}

    def _discounts(self) -> tuple[float, float]:
        return self.discount, self.gae_lambda

    def _following(self) -> list[Tensor]:
        blocks, rows = self._ready_ring().blocks, self._ready_ring().size
        return [blocks[name][rows] for name in self._observations.names]

    def _besides(self, rows: int) -> dict[str, Any]:
        return {"flags_before": torch.stack([self.terminateds[0], self.truncateds[0]])}

    def _restore(self, data: Sample) -> None:
        if "flags_before" in data:
            lanes = self._ready_ring().lanes
            field = Field("flags_before", (2,), torch.float32, f"num_envs={lanes}", lane_axis=1)
            self.terminateds[0], self.truncateds[0] = field.fit(data["flags_before"], lanes, self._torch_device)

    # ---------------------------------------------------------------------------------------------- save and load

    def _settings(self) -> dict[str, Any]:
        settings = {**{name: getattr(self, name) for name in _SETTINGS}, **self._saved_options()}
        if self._ring is not None and self.observation_space is None:  # learnt from the first sample
            fields = describe_fields(self._observations, self._columns["obs"].fields)
            settings["learnt"] = {**fields, "action_shape": list(self.actions.shape[2:])}
        return settings

    @classmethod
    def _saved_fields(cls, settings: Mapping[str, Any]) -> tuple[int, int, list[Field]]:
        steps, lanes, space = (settings[name] for name in ("num_steps", "num_envs", "observation_space"))
        if "learnt" in settings:
            fields, actions = described_fields(settings["learnt"], "obs")[1], tuple(settings["learnt"]["action_shape"])
        elif space is None:
            return 0, 0, []
        else:
            fields = observation_fields(space, "obs", cls.__name__, torch.float32)[1]
            actions = action_spec(settings["action_space"]).shape
        check_positive(cls.__name__, num_steps=steps, num_envs=lanes)
        return steps, lanes, [*fields, Field("actions", actions, torch.float32, "")]

    @classmethod
    def _from_settings(cls, settings: Mapping[str, Any], device: str | torch.device) -> DecoupledRolloutStorage:
        given = saved_arguments(cls, settings, _SETTINGS, (*SAVED_OPTIONS, "learnt"))
        learnt = given.pop("learnt", None)
        storage = cls(device=device, seed=0, **given)
        if learnt is not None:
            structure, fields = described_fields(learnt, "obs")
            actions = Field("actions", tuple(learnt["action_shape"]), torch.float32, "the action space")
            storage._allocate(structure, fields, actions, settings["num_envs"])
        return storage


def _given_space(space: SpaceLike | None, name: str) -> SpaceLike:
    if space is None:
        raise InvalidInputError(f"{name} is None; give both spaces")
    return space
