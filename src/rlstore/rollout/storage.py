"""RolloutStorage: rollouts for PPO, recurrent PPO and distillation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from inspect import signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.batches.trajectories import SplitTrajectories, TabulatedTrajectories, find_trajectories
from rlstore.engine.calls import explained, spaces_hint, warn_caller
from rlstore.engine.checks import check_autoreset, check_count, check_fraction, check_positive, check_shape
from rlstore.engine.disk.journal import Journal
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.guard import guarded, guarded_steps
from rlstore.engine.measures import Measures
from rlstore.engine.memory.tensors import allocate
from rlstore.engine.rows.ends import JoinedFlags, on_one_device, read_flags
from rlstore.engine.rows.finals import FinalCritic, ask_critic
from rlstore.engine.rows.ring import Ring
from rlstore.engine.rows.schema import (
    Field,
    Structure,
    as_tensor,
    check_dtype,
    describe_fields,
    described_fields,
    fields_of_example,
)
from rlstore.engine.rows.spaces import ExtraFields, SpaceLike, action_spec, observation_fields
from rlstore.errors import InvalidInputError, NotReadyError, RolloutFullError
from rlstore.parameters import Check, argument, fraction, whole_number, with_arguments
from rlstore.rollout.core import (
    SAVED_OPTIONS,
    BlockAttribute,
    ObservationAttribute,
    RolloutColumn,
    RolloutCore,
    Sources,
    flatten,
    repeated,
)
from rlstore.rollout.held_steps import StepField
from rlstore.rollout.resets import BLOCK as RESETS
from rlstore.rollout.resets import ResetSteps
from rlstore.storage import BatchDict, Critic, Sample, Shared, saved_arguments
from rlstore.trainer import at_step, check_names

if TYPE_CHECKING:
    from tensordict import TensorDict

# The hidden state of one network: a GRU's tensor or an LSTM's pair, [layers, envs, hidden]; None for no recurrence.
HiddenState = Tensor | tuple[Tensor, ...] | None
_NO_STATES: tuple[HiddenState, HiddenState] = (None, None)
_FLAG_ALONE = {"truncated": 1}  # of the late columns
_ALMOST = 0.88  # how alike two names are of which one is taken to be a misspelling of the other
_HIDDEN_STATES = ("saved_hidden_state_a", "saved_hidden_state_c")
# The arguments that are saved, of a storage made from spaces and of another one.
_OF_SPACES = ("observation_space", "action_space", "num_envs", "num_steps", "autoreset", "gamma", "lam")
_OF_EXAMPLE = ("training_type", "num_envs", "num_transitions_per_env", "obs", "actions_shape", "gamma", "lam")

# The columns of a rollout, in the order of a row; late ones follow in the order in which they are first given.
_COLUMNS = {
    "rl": (
        RolloutColumn("observations", "observations", word="observations", batch="observations"),
        RolloutColumn("actions", "actions", word="actions", batch="actions"),
        RolloutColumn("rewards", word="rewards"),
        RolloutColumn("dones", "flag"),
        RolloutColumn("values", word="values", batch="values"),
        RolloutColumn("actions_log_prob", word="log_probs", batch="old_actions_log_prob"),
        RolloutColumn("returns", word="returns", batch="returns", computed=True),
        RolloutColumn("advantages", word="advantages", batch="advantages", computed=True),
        RolloutColumn(
            "distribution_params", "nest", word="distribution_params", batch="old_distribution_params", late=True
        ),
        RolloutColumn("truncated", "flag", late=True),
        RolloutColumn("final_values", word="final_values", late=True, whole=True),
        *(RolloutColumn(name, "nest", late=True) for name in _HIDDEN_STATES),
    ),
    "distillation": (
        RolloutColumn("observations", "observations", word="observations", batch="observations"),
        RolloutColumn("actions", "actions", word="actions"),
        RolloutColumn("rewards", word="rewards"),
        RolloutColumn("dones", "flag", batch="dones"),
        RolloutColumn("privileged_actions", "actions", word="privileged_actions", batch="privileged_actions"),
        RolloutColumn("distribution_params", "nest", late=True),
        RolloutColumn("truncated", "flag", late=True),
        RolloutColumn("final_values", late=True),
        *(RolloutColumn(name, "nest", late=True) for name in _HIDDEN_STATES),
    ),
}


class BlockGroup:
    """Several blocks as one attribute, a tuple or a list of tensors; None while there are none.

    Args:
        container: ``tuple`` or ``list``.
        mode: The training_type that has it; None for all.
    """

    def __init__(self, container: type[tuple[Any, ...]] | type[list[Any]], mode: str | None = None) -> None:
        self._container, self._mode = container, mode

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, storage: RolloutStorage | None, owner: type) -> Any:
        if storage is None:
            return self
        if self._mode is not None and storage.training_type != self._mode:
            raise AttributeError(f"this {owner.__name__} has no {self._name!r}")
        blocks = storage._columns[self._name].blocks
        if not blocks:
            return None
        tensors = [storage._ready_ring().blocks[name] for name in blocks]
        # A list may be written into: the one that is handed out is read again before the blocks are used.
        return tuple(tensors) if self._container is tuple else storage._handed_lists.setdefault(self._name, tensors)

    def __set__(self, storage: RolloutStorage, value: Sequence[Tensor]) -> None:
        blocks = storage._columns[self._name].blocks
        if not isinstance(value, (tuple, list)) or len(value) != len(blocks):
            given = f"{len(value)} tensors" if isinstance(value, (tuple, list)) else type(value).__name__
            raise InvalidInputError(
                f"{self._name} is {len(blocks)} tensors and cannot become {given}; it was not changed"
            )
        with storage._guard:
            storage._handed_lists.pop(self._name, None)
            storage._ready_ring().bind_all(blocks, value)


@with_arguments("training_type", "gamma", "lam", "actions_shape")
class RolloutStorage(RolloutCore):
    """A rollout of ``num_transitions_per_env`` steps of ``num_envs`` environments.

    For a Gymnasium vector environment it is made by :meth:`from_spaces` and filled by :meth:`add`. The constructor and
    :meth:`add_transition` are those of rsl_rl.

    The blocks are attributes, ``[steps, envs, ...]``: ``observations`` (a TensorDict), ``actions``, ``rewards`` and
    ``dones``; for "rl" also ``values``, ``actions_log_prob``, ``returns``, ``advantages`` and ``distribution_params``;
    for "distillation" ``privileged_actions``; extra fields are in ``extra`` by name. You may write into them or
    replace them: the generators serve what they hold at that time.

    Args:
        training_type: "rl" or "distillation".
        num_envs: The number of environments that are stepped together.
        num_transitions_per_env: The number of steps of a rollout.
        obs: An example of the observations, TensorDict ``[envs]``, possibly nested.
        actions_shape: The shape of one action.
        device: The device of the data.
        gamma: The discount factor that ``before_gradients`` uses if the algorithm has none.
        lam: The GAE lambda that it uses then.
        seed: The seed of the storage's random generator; None draws one from torch's default generator.
        extra_fields: Additional fields by name, each a Box, Discrete, MultiDiscrete or MultiBinary space, or a pair of
            shape and dtype. They are attributes of every transition and of every batch.
        allow_nonfinite_rewards: Store rewards that are NaN or infinite; otherwise adding them is refused.
        journal: A folder to which a thread commits the storage every two seconds, or a :class:`~rlstore.Journal` with
            other options. ``Storage.load(folder)`` gives back the last commit. Each commit writes all blocks, if
            anything has changed. None for no journal.
    """

    class Transition:
        """One step of all environments, assigned field by field and passed to :meth:`RolloutStorage.add_transition`.

        Extra fields are attributes too, with the names given to the storage.

        Attributes:
            observations: Observations before the step, TensorDict ``[envs]``.
            actions: Actions, ``[envs, *actions_shape]``.
            rewards: ``[envs]`` or ``[envs, 1]``.
            dones: The episode ended in this step; any dtype, ``[envs]`` or ``[envs, 1]``. NaN raises an error, except
                on CUDA, where values are not checked and it counts as set.
            values: The critic's estimate, ``[envs, 1]`` (rl only).
            actions_log_prob: ``[envs]`` or ``[envs, 1]`` (rl only).
            distribution_params: The parameters of the action distribution (rl only).
            privileged_actions: The teacher's actions (distillation only).
            hidden_states: The recurrent states before the step, ``(actor, critic)``.
            truncated: Which of the ended episodes were truncated, for example by a time limit; None for none. Their
                returns bootstrap from ``final_values``. Do not also add a bootstrap value to the rewards.
            final_values: The value of the final observation, used where truncated; None or NaN where it is unknown:
                the advantage of that step is then 0.
        """

        # Defaults of the class, so that a transition is made at no cost.
        observations: TensorDict | None = None
        actions: Tensor | None = None
        rewards: Tensor | None = None
        dones: Tensor | None = None
        values: Tensor | None = None
        actions_log_prob: Tensor | None = None
        distribution_params: tuple[Tensor, ...] | None = None
        privileged_actions: Tensor | None = None
        hidden_states: tuple[HiddenState, HiddenState] = (None, None)
        truncated: Tensor | None = None
        final_values: Tensor | None = None

        def clear(self) -> None:
            """Reset all fields to None."""
            known = RolloutStorage.Transition.__annotations__
            self.__dict__ = {name: None for name in self.__dict__ if name not in known}

    class Batch:
        """A batch of the generators; fields that a mode does not have are None.

        Flat batches hold ``[rows, ...]``, scalars ``[rows, 1]``. Recurrent ones hold observations
        ``[steps, trajectories, ...]`` with ``masks``, hidden states ``[layers, trajectories, hidden]``, and the other
        fields ``[steps, envs, ...]``. Extra fields are attributes with their names.

        In a storage made by :meth:`RolloutStorage.from_spaces`, scalars are ``[rows]`` or ``[steps, envs]``, and
        recurrent batches have ``step_masks``, bool ``[steps, envs]``: False for reset steps, which are part of no
        trajectory. ``x.transpose(0, 1)[batch.step_masks.transpose(0, 1)]`` are the steps of a field ``x`` in the order
        of ``y.transpose(0, 1)[batch.masks.transpose(0, 1)]`` for trajectories ``y``.
        """

        # The parts of a flat batch, in the order of the arguments.
        _fields = (
            *("observations", "actions", "values", "advantages", "returns"),
            *("old_actions_log_prob", "old_distribution_params"),
        )
        # The types of what the batch in question has, so that programs need no checks for None.
        observations: Any
        actions: Tensor
        values: Tensor
        advantages: Tensor
        returns: Tensor
        old_actions_log_prob: Tensor
        old_distribution_params: tuple[Tensor, ...]
        hidden_states: tuple[HiddenState, HiddenState]
        masks: Tensor
        privileged_actions: Tensor
        dones: Tensor
        step_masks: Tensor = None  # type: ignore[assignment]

        def __init__(
            self,
            observations: Any = None,
            actions: Tensor | None = None,
            values: Tensor | None = None,
            advantages: Tensor | None = None,
            returns: Tensor | None = None,
            old_actions_log_prob: Tensor | None = None,
            old_distribution_params: tuple[Tensor, ...] | None = None,
            hidden_states: tuple[HiddenState, HiddenState] = (None, None),
            masks: Tensor | None = None,
            privileged_actions: Tensor | None = None,
            dones: Tensor | None = None,
            **extra: Tensor,
        ) -> None:
            self.__dict__.update(
                observations=observations,
                actions=actions,
                values=values,
                advantages=advantages,
                returns=returns,
                old_actions_log_prob=old_actions_log_prob,
                old_distribution_params=old_distribution_params,
                hidden_states=hidden_states,
                masks=masks,
                privileged_actions=privileged_actions,
                dones=dones,
                **extra,
            )

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

    training_type: str
    gamma: float
    lam: float
    actions_shape: Sequence[int] | None
    _actions_shape: Sequence[int] | None
    num_transitions_per_env: int = argument("num_transitions_per_env", attrgetter("_max_size"), "Steps of a rollout.")

    _parameters: ClassVar[Mapping[str, Check]] = {
        "gamma": fraction,
        "lam": fraction,
        "num_transitions_per_env": whole_number,
    }
    _data_words: tuple[str, ...] = ("last_observations",)
    _warned_of_left_out = False  # of environments that recurrent mini-batches leave out
    _how_to_compute: ClassVar[str] = "call compute_returns() or before_gradients(), or write both attributes yourself"

    @explained
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
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        owner = type(self).__name__
        self._allows_nonfinite = bool(allow_nonfinite_rewards)
        if training_type not in list(_COLUMNS):
            hint = spaces_hint(self, (training_type,))
            raise InvalidInputError(f"training_type is {training_type!r}; {owner} knows {sorted(_COLUMNS)}.{hint}")
        check_positive(owner, num_transitions_per_env=num_transitions_per_env)
        check_fraction(owner, gamma=gamma, lam=lam)
        super().__init__(num_transitions_per_env, device, seed=seed)
        self._training_type, self._gamma, self._lam = training_type, gamma, lam
        self._num_envs, self._actions_shape = num_envs, actions_shape
        self._last_observations: list[Tensor] | None = None
        self._spaces: tuple[SpaceLike, SpaceLike] | None = None  # of a storage made from spaces
        self._autoreset: str | None = None  # likewise
        self._resets: ResetSteps | None = None  # where there are any
        self._critic = Shared()
        self._read_row: Callable[[Any], tuple[Any, ...] | None] | None = None  # made when it is first needed
        self._describe(_COLUMNS[training_type], extra_fields, reserved=_RESERVED)
        stored = [name for name in self.Transition.__annotations__ if name in self._columns]
        self._stored = {*stored, "hidden_states", *(field.name for field in self._extra)}  # of a transition
        self._judged = set(self._stored)  # attributes that need no look at their spelling any more
        # All three None: a storage from create_factory(), which learns them from its first sample.
        if (num_envs, obs, actions_shape) != (None, None, None):
            check_positive(owner, num_envs=num_envs)
            shape = check_shape(owner, "actions_shape", actions_shape if actions_shape is not None else ())
            self._allocate_like(int(num_envs or 0), obs, shape, f"the obs given to {owner}()")
        self._begin_journal(journal)

    @classmethod
    @explained
    def from_spaces(
        cls,
        observation_space: SpaceLike,
        action_space: SpaceLike,
        num_envs: int,
        num_steps: int,
        device: str | torch.device = "cpu",
        *,
        autoreset: Any = "NextStep",
        critic: FinalCritic | None = None,
        gamma: float = 0.99,
        lam: float = 0.95,
        seed: int | None = None,
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> RolloutStorage:
        """A storage for PPO on the environments of a Gymnasium vector environment, filled by :meth:`add`.

        Observations and actions are held and served in the shape and dtype of their spaces: a Discrete action is int64
        ``[rows]``; observations of a Dict space are a TensorDict, those of a Tuple space a tuple, and others a tensor.
        Scalars are held as ``[steps, envs]``, and served as ``[rows]`` by the generators.

        With ``autoreset="NextStep"``, the default of Gymnasium, the step after the end of an episode is a reset step:
        its action is ignored, and it returns the first observation of the next episode. It keeps its row, and is left
        out of mini-batches, trajectories, and the normalization of advantages; its own advantage is 0. Its observation
        is the final one of the episode before it, so a truncated step bootstraps from the ``values`` of the reset
        step, or from ``last_values`` at the end of the rollout. Which rows they are is in :attr:`reset_steps`; an
        episode that ends in the last step makes the first step of the next rollout a reset step. If you call
        ``envs.reset()`` between rollouts, call :meth:`reset` too, in place of :meth:`clear`: it forgets that end, and
        without it the first step of the new episode would be left out as a reset step.

        With "SameStep" an environment is reset in the step in which its episode ends, and with "Disabled" by you.
        There are no reset steps. A truncated step bootstraps from the value of its final observation: from
        ``final_values`` given to :meth:`add`, or from what the ``critic`` says of ``infos["final_obs"]``. Without both
        its advantage is 0 before normalization.

        Args:
            observation_space: A Gymnasium space, ``envs.single_observation_space``, or a mapping with ``shape`` and
                optionally ``dtype`` (default: float32).
            action_space: A Discrete, Box, MultiDiscrete or MultiBinary space, ``envs.single_action_space``, or a
                mapping with ``shape`` and ``type``.
            num_envs: The number of environments that are stepped together.
            num_steps: The number of steps of a rollout. As an attribute, and for ``update_storage_parameter``, it has
                the name that rsl_rl gives it: ``num_transitions_per_env``.
            device: The device of the data.
            autoreset: How the environments are reset, a Gymnasium ``AutoresetMode`` or its value: "NextStep",
                "SameStep" or "Disabled".
            critic: Not with "NextStep": a function that gives the values ``[k]`` or ``[k, 1]`` of the final
                observations ``[k, ...]`` of truncated episodes. It is called without gradients. It is not saved: set
                :attr:`critic` after loading.
            gamma: The discount factor that ``before_gradients`` uses if the algorithm has none.
            lam: The GAE lambda that it uses then.
            seed: The seed of the storage's random generator; None draws one from torch's default generator.
            extra_fields: Additional fields by name, each a Box, Discrete, MultiDiscrete or MultiBinary space, or a pair
                of shape and dtype. They are keyword arguments of :meth:`add`, and attributes of every batch.
            allow_nonfinite_rewards: Store rewards that are NaN or infinite; otherwise adding them is refused.
            journal: A folder to which a thread commits the storage every two seconds, or a :class:`~rlstore.Journal`
                with other options; None for no journal.
        """
        owner = f"{cls.__name__}.from_spaces()"
        check_positive(owner, num_envs=num_envs, num_steps=num_steps)
        options: dict[str, Any] = {"gamma": gamma, "lam": lam, "seed": seed, "extra_fields": extra_fields}
        options["allow_nonfinite_rewards"] = allow_nonfinite_rewards
        storage = cls("rl", None, num_steps, None, None, device, **options)
        storage._autoreset = check_autoreset(owner, autoreset)
        storage._take_spaces(observation_space, action_space, int(num_envs), extra_fields)
        storage.critic = critic
        storage._begin_journal(journal)
        return storage

    def _take_spaces(
        self, observation_space: SpaceLike, action_space: SpaceLike, lanes: int, given: ExtraFields | None
    ) -> None:
        """Allocate for observations and actions of these spaces, and for scalars without an axis of their own."""
        owner = f"{type(self).__name__}.from_spaces"
        structure, fields = observation_fields(observation_space, "observations", owner, torch.float32)
        spec = action_spec(action_space)
        actions = Field("actions", spec.shape, spec.dtype, f"the action_space given to {owner}()", rule=spec.rule)
        columns = tuple(replace(c, said=c.word) if c.form == "scalar" else c for c in _COLUMNS["rl"])
        if self._autoreset == "NextStep":
            columns = (*columns, RolloutColumn(RESETS, "flag", lead=1))
            self._resets, self._data_words = ResetSteps(lanes), (*self._data_words, RESETS)
        self._scalar_shape, self._spaces = (), (observation_space, action_space)
        self._describe(columns, given, reserved={*_RESERVED, "step_masks", "final_observations", "infos"})
        self._allocate(structure, fields, actions, lanes)
        self._actions_shape = spec.shape

    @classmethod
    @explained
    def create_factory(  # type: ignore[override]
        cls,
        size: int,
        training_type: str = "rl",
        *,
        gamma: float = 0.99,
        lam: float = 0.95,
        seed: int | None = None,
        extra_fields: ExtraFields | None = None,
        allow_nonfinite_rewards: bool = False,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> Callable[..., RolloutStorage]:
        """A function ``f(device, actor, algorithm)`` that creates storages of ``size`` steps.

        The number of environments and all shapes are taken from their first sample.

        Args:
            size: Steps of a rollout.
            training_type: "rl" or "distillation".
            gamma: The discount factor that ``before_gradients`` uses if the algorithm has none.
            lam: The GAE lambda that it uses then.
            seed: The seed of each storage's random generator.
            extra_fields: Additional fields by name; see the class.
            allow_nonfinite_rewards: Store rewards that are NaN or infinite.
            journal: The folder of a journal; it is that of one storage.
        """
        options: dict[str, Any] = {"gamma": gamma, "lam": lam, "seed": seed, "extra_fields": extra_fields}
        options.update(allow_nonfinite_rewards=allow_nonfinite_rewards, journal=journal)

        def create(device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None) -> RolloutStorage:
            storage = cls(training_type, None, size, None, None, device, **options)
            storage._give(actor, algorithm)
            return storage

        return create

    # ---------------------------------------------------------------------------------------------- memory

    @property
    def critic(self) -> FinalCritic | None:
        """What gives the values of the final observations of truncated episodes; None if there is none.

        It is not part of a snapshot, nor of a pickle: set it after loading.
        """
        return self._critic.value  # type: ignore[no-any-return]

    @critic.setter
    def critic(self, critic: FinalCritic | None) -> None:
        if critic is not None and not callable(critic):
            raise InvalidInputError(
                f"critic is a {type(critic).__name__}; it has to be a function of final observations, or None"
            )
        if critic is not None and self._resets is not None:
            raise InvalidInputError(
                'a critic was given, and with autoreset="NextStep" there is nothing to ask it: the value of a final '
                "observation is among the values of the next step. Give no critic, or another autoreset."
            )
        self._critic = Shared(critic)

    @property
    def reset_steps(self) -> Tensor:
        """Which of the steps since :meth:`clear` are reset steps, bool ``[steps, envs]``; see :meth:`from_spaces`."""
        ring = self._ready_ring()
        if self._resets is None:
            return torch.zeros((ring.size, ring.lanes), dtype=torch.bool, device=self._torch_device)
        return self._resets.flags(ring) != 0

    @property
    def step(self) -> int:
        """Steps written since :meth:`clear`."""
        return 0 if self._ring is None else self._ring.size

    def _allocate_for(self, sample: Sample) -> None:
        actions = as_tensor(sample.get("actions"), "actions")
        num_envs = (*as_tensor(sample.get("rewards"), "rewards").shape, 1)[0]
        actions_shape = tuple(actions.shape[1:]) if actions.dim() > 1 else (1,)
        self._allocate_like(num_envs, sample["observations"], actions_shape, "the first sample")

    def _allocate_like(self, num_envs: int, obs: Any, actions_shape: tuple[int, ...], origin: str) -> None:
        structure, fields = fields_of_example(obs, "observations", 1, origin)
        for name, leaf in zip(structure.names, structure.leaves(obs), strict=True):
            example = as_tensor(leaf, name)
            if example.shape[0] != num_envs:
                raise InvalidInputError(
                    f"{name} is {tuple(example.shape)}; its first axis has to be the environments, num_envs={num_envs}"
                )
        origin = f"actions_shape={list(actions_shape)} and num_envs={num_envs}"
        actions = Field("actions", actions_shape, torch.float32, origin)
        self._allocate(structure, fields, actions, num_envs)
        self._actions_shape = actions_shape

    def _allocate(
        self,
        structure: Structure,
        observations: Sequence[Field],
        actions: Field,
        lanes: int,
    ) -> None:
        super()._allocate(structure, observations, actions, lanes)
        # What every transition brings besides observations.
        self._row_names = [c.name for c in self._columns.values() if not (c.computed or c.late or c.structure)]
        self._places = {name: len(structure.paths) + place for place, name in enumerate(self._row_names)}
        self._dones_place = self._places["dones"]
        self._flags = JoinedFlags(lanes)
        self._late: dict[str, int] = {}  # late columns that were given and their leaves, in the order of a row
        # What is written for a late column that a transition does not bring: not truncated, no known value.
        self._absent = {
            "truncated": allocate((lanes, *self._scalar_shape), torch.uint8, self._torch_device),
            "final_values": allocate((lanes, *self._scalar_shape), torch.float32, self._torch_device, torch.nan),
        }

    @guarded
    def clear(self) -> None:
        """Start a new rollout: the cursor moves back to the first step."""
        self._start_rollout()

    def _start_rollout(self) -> None:
        if self._resets is not None:
            self._resets.carry(self._ready_ring())
        super()._start_rollout()

    @guarded
    def reset(self) -> None:
        """Remove all data and set all tensors to zero; hidden states and distribution parameters are removed too.

        Ends before it are forgotten: the next step is no reset step.
        """
        if self._resets is not None:
            self._resets.forget()
        if self._ring is not None:
            self._ring.drop([block for name in self._late for block in self._columns[name].blocks])
            self._columns = {name: c.holding(()) if c.late else c for name, c in self._columns.items()}
            self._late, self._read_row = {}, None
            self._handed_lists = {}
        self._last_observations = None
        super().reset()

    def _apply(self, name: str, value: Any) -> None:
        ended = None if self._resets is None else self._ready_ring().blocks[RESETS][0].clone()
        super()._apply(name, value)
        if ended is not None:
            self._ready_ring().blocks[RESETS][0].copy_(ended)  # where the next step is a reset step

    # ---------------------------------------------------------------------------------------------- writing

    def add(
        self,
        *,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminated: Any,
        truncated: Any,
        values: Any,
        log_probs: Any,
        infos: Mapping[str, Any] | None = None,
        final_values: Any = None,
        distribution_params: tuple[Any, ...] | None = None,
        hidden_states: tuple[HiddenState, HiddenState] = _NO_STATES,
        **extra_fields: Any,
    ) -> None:
        """Add one step of all environments: numpy arrays, tensors or lists. All is checked before anything is written.

        After ``after_gradients`` it is the first of a new rollout, as after :meth:`clear`.

        Args:
            observations: Observations before the step, ``[envs, ...]``.
            actions: ``[envs, ...]``.
            rewards: ``[envs]``.
            terminated: The episode terminated in this step, ``[envs]``. Where both flags are set, this one counts.
            truncated: The episode was truncated after this step, ``[envs]``.
            values: The critic's estimates for ``observations``, ``[envs]`` or ``[envs, 1]``.
            log_probs: The log-probability of the actions, ``[envs]``.
            infos: What the environments returned besides. ``final_obs`` (or ``final_observation``) is read if the
                storage has a critic.
            final_values: The value of the final observation, read where truncated; NaN where it is unknown. Not with
                ``autoreset="NextStep"``, where it is the value of the next step.
            distribution_params: The parameters of the action distribution.
            hidden_states: The recurrent states before the step, ``(actor, critic)``, each ``[layers, envs, hidden]``, a
                pair of them for an LSTM, or None. What one step has, every later one has to have, also of other
                rollouts, until :meth:`reset`.
            **extra_fields: The extra fields given to the storage, by their names.

        Raises:
            RolloutFullError: (an OverflowError) if the rollout is full.
            InvalidInputError: (a ValueError) if a value is missing or does not fit; with ``autoreset="NextStep"`` also
                if a reset step has a reward or ends an episode, which values on CUDA are not checked for.
        """
        with self._guard:
            ring = self._ring
            if ring is None or ring.size >= ring.steps or self._observation_view is not None or self._handed_lists:
                ring = self._open_step()
            if self._training_type != "rl":
                self._require_mode("rl")
            ended, cut_off, count = self._flags.join(terminated, truncated)
            row = [*self._observations.leaves(observations), actions, rewards, ended, values, log_probs]
            resets = self._resets
            if resets is not None:
                if infos or final_values is not None or resets.due_count:
                    resets.check(rewards, ended, count, self._columns["rewards"].fields[0], final_values, infos)
                row.append(ended)
            elif count and final_values is None and self._critic.value is not None:
                final_values = self._ask_critic(infos, cut_off)
            if extra_fields or self._extra:
                row.extend(self._extra_values(extra_fields))
            is_plain = final_values is distribution_params is None and hidden_states is _NO_STATES
            if is_plain and self._late == _FLAG_ALONE:
                self._append(ring, (*row, cut_off))
            else:
                late = _late_values(distribution_params, hidden_states, cut_off, final_values)
                self._append(ring, *self._with_late(row, late, needs_states=True))
            if resets is not None and (count or resets.due_count):
                resets.follow(ended, count)

    def _open_step(self) -> Ring:
        """The ring once there is room for a step, and once what callers have put into the storage is bound."""
        ring = self._ready_ring()
        if ring.size >= ring.steps and not self._spent:
            raise _full(ring, "num_transitions_per_env" if self._spaces is None else "num_steps")
        self._follow_callers()
        return ring

    def _append(self, ring: Ring, values: tuple[Any, ...], new: Mapping[str, tuple[Any, ...]] | None = None) -> bool:
        """Write a step, or refuse it.

        Args:
            ring: The ring.
            values: In the order of a row.
            new: Of late columns that are not held yet.

        Returns:
            Whether it is the first step of a rollout.
        """
        if self._spent:
            self._check_row(values, new or {})  # before the old rollout is given up
            self._start_rollout()
        ring.write(self._extend(values, new) if new else values)
        self._last_observations = None
        if ring.size > 1:
            return False
        self._targets.blank(ring)
        return True

    def _check_row(self, values: tuple[Any, ...], new: Mapping[str, tuple[Any, ...]]) -> None:
        self._ready_ring().fit(values)
        self._fit_late(self._late_columns(new), new)

    def _extra_values(self, given: Mapping[str, Any]) -> list[Any]:
        names = [field.name for field in self._extra]
        if given.keys() != set(names):
            self._refuse_names(given, names)
        return [given[name] for name in names]

    def _refuse_names(self, given: Mapping[str, Any], extra: list[str]) -> None:
        """Say what is wrong with the names of arguments that are no fields of every step."""
        if "dones" in given:
            raise InvalidInputError(
                "there is no extra field 'dones': pass terminated= and truncated= instead. Nothing was written."
            )
        for name in ("next_observations", "next_obs"):
            if name in given:
                raise InvalidInputError(
                    f"add() takes no {name!r}: rollouts need none; leave it out. Nothing was written."
                )
        known = [name for name in signature(RolloutStorage.add).parameters if name not in ("self", "extra_fields")]
        check_names(given, "a step", type(self).__name__, [*known, *extra], extra)

    def _ask_critic(self, infos: Any, cut_off: Tensor) -> Tensor | None:
        fields = self._columns["observations"].fields
        return ask_critic(self._critic.value, infos, cut_off, self._observations, fields, self._torch_device)

    def add_transition(self, transition: RolloutStorage.Transition) -> None:
        """Add one step of all environments at the cursor; everything is checked before anything is written.

        After ``after_gradients`` it is the first of a new rollout, as after :meth:`clear`.

        Args:
            transition: The step; its fields may be tensors, arrays or lists. Where ``hidden_states`` are None, those
                saved in the same row by an earlier rollout stay.

        Raises:
            RolloutFullError: (an OverflowError) if the rollout is full.
            InvalidInputError: (a ValueError) if a field is missing or does not fit. Other attributes are not read; one
                of the first step of a rollout that is named almost like a field that is not set is warned of.
        """
        with self._guard:
            ring = self._ring
            if ring is None or ring.size >= ring.steps or self._observation_view is not None or self._handed_lists:
                ring = self._open_step()
            if self._read_row is None:
                self._read_row = self._row_reader()
            values = self._read_row(transition)
            if values is not None:
                begins = self._append(ring, values)
            else:
                begins = self._append(ring, *self._row(transition))
                if self._resets is not None:
                    self._resets.follow(*self._settled)
            if begins and not (given := getattr(transition, "__dict__", {})).keys() <= self._judged:
                self._check_spelling(given)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_read_row": None}

    def _row_reader(self) -> Callable[[Any], tuple[Any, ...] | None]:
        """What takes the values of a row from a transition that brings every column held, and no other."""
        if self._resets is not None or self._late.keys() - {"distribution_params"}:
            return lambda transition: None
        absent = {"distribution_params": 0, "hidden_states": 2, "truncated": 0, "final_values": 0}
        others: dict[str, int | None] = {**dict.fromkeys(self._row_names), **self._late}
        return self._observations.row_reader(others, {k: v for k, v in absent.items() if k not in self._late})

    def _row(self, transition: RolloutStorage.Transition) -> tuple[tuple[Any, ...], dict[str, tuple[Any, ...]]]:
        """A transition's values in the order of a row, not yet checked, and those of late columns not yet held."""
        try:
            observations = transition.observations
        except AttributeError:
            raise InvalidInputError(
                f"a {type(transition).__name__} is no RolloutStorage.Transition; dicts go to insert_transition()"
            ) from None
        if observations is None:
            raise InvalidInputError("observations are missing (None). Nothing was written.")
        values = self._observations.leaves(observations)
        values.extend([getattr(transition, name, None) for name in self._row_names])
        # A transition of the original class has neither of the last two.
        ends = (getattr(transition, name, None) for name in ("truncated", "final_values"))
        late = _late_values(transition.distribution_params, transition.hidden_states, *ends)
        if self._resets is not None:
            self._settle_ends(values, late, self._resets)
        elif "truncated" in late:
            # A truncated environment is done, whether or not dones says so.
            lanes, device = self._ready_ring().lanes, self._torch_device
            dones, truncated = (self._flag(name) for name in ("dones", "truncated"))
            ended = dones.fit(values[self._dones_place], lanes, device)
            values[self._dones_place] = ended | truncated.fit(late["truncated"][0], lanes, device)
        elif "final_values" in late:
            raise InvalidInputError(
                "final_values are read where an episode was truncated, and truncated is None. Nothing was written."
            )
        return self._with_late(values, late)

    def _settle_ends(self, values: list[Any], late: dict[str, tuple[Any, ...]], resets: ResetSteps) -> None:
        """Put the ends of a transition where they belong in a rollout with reset steps, once it is checked."""
        lanes, places = self._ready_ring().lanes, self._places
        ended = read_flags("dones", values[places["dones"]], lanes)
        if "truncated" in late:
            # A truncated environment is done, whether or not dones says so.
            ended, cut_off = on_one_device(ended, read_flags("truncated", late["truncated"][0], lanes))
            ended, late["truncated"] = ended | cut_off, (cut_off,)
        count = -1 if ended.is_cuda else int(ended.count_nonzero())
        field = self._columns["rewards"].fields[0]
        resets.check(values[places["rewards"]], ended, count, field, late.get("final_values"))
        values[places["dones"]] = values[places[RESETS]] = ended
        self._settled = ended, count

    def _with_late(
        self, values: list[Any], late: dict[str, tuple[Any, ...]], needs_states: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, tuple[Any, ...]]]:
        """The values of a row with those of late columns that are held, and the others.

        Args:
            values: Without them.
            late: Those that were given; what is left of them belongs to columns that are not held.
            needs_states: Refuse a step without the recurrent states that earlier ones had.
        """
        for name, count in self._late.items():
            values.extend(self._late_row(name, count, late.pop(name, None), needs_states))
        return tuple(values), late

    def _check_spelling(self, given: Mapping[str, Any]) -> None:
        """Warn of attributes that are not stored and named almost like one that is not set; once for each name."""
        for name in sorted(given.keys() - self._judged):
            self._judged.add(name)
            near = get_close_matches(name, self._stored, 1, _ALMOST)
            if near and given[name] is not None and given.get(near[0]) is None:
                warn_caller(
                    f"the transition has {name!r}, which is not stored, and no {near[0]!r}. If you meant {near[0]!r}, "
                    "rename it. (This warning is shown once for each name.)"
                )

    def _flag(self, name: str) -> Field:
        return Field(name, self._scalar_shape, torch.uint8, f"{self.num_envs} environments", is_flag=True)

    def _late_row(self, name: str, count: int, given: tuple[Any, ...] | None, needs_states: bool) -> Sequence[Any]:
        """The values of a late column that the ring has."""
        if given is None:
            if name == "distribution_params":
                raise InvalidInputError(
                    "distribution_params are missing (None), and earlier transitions had them. Nothing was written."
                )
            if needs_states and name in _HIDDEN_STATES:
                raise InvalidInputError(
                    f"hidden_states were given in earlier steps; missing now. {_said(name)} is None, and what an "
                    "earlier rollout left would be served. Give it in every step, zeros where there is none, or call "
                    "reset() first, which forgets them. Nothing was written."
                )
            # A hidden state that is not given leaves the saved one as it was.
            return [self._absent[name]] if name in self._absent else [None] * count
        if len(given) != count:
            raise InvalidInputError(
                f"{_said(name)} has {len(given)} tensors; this storage holds {count} of them. Nothing was written."
            )
        return given

    def _extend(self, values: tuple[Any, ...], new: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
        """Add late columns, once the row is known to fit."""
        ring = self._ready_ring()
        if "distribution_params" in new and ring.size:
            raise InvalidInputError(
                "distribution_params are given, and earlier steps of this rollout had none. Nothing was written."
            )
        columns = self._late_columns(new)
        fitted = (*ring.fit(values), *self._fit_late(columns, new))
        self._hold_late(columns)
        return fitted

    def _late_columns(self, new: Mapping[str, tuple[Any, ...]]) -> list[RolloutColumn]:
        """The late columns of these names, with fields like the values."""
        columns = []
        for name, parts in new.items():
            column, structure = self._columns[name], None
            if column.form == "nest":
                structure = Structure([(index,) for index in range(len(parts))], name)
                said = _said(name)
                names = [said] if len(parts) == 1 and said != name else [f"{said}[{i}]" for i in range(len(parts))]
                fields = [self._nest_field(name, *part) for part in zip(names, parts, strict=True)]
            elif column.form == "flag":
                fields = [self._flag(name)]
            else:
                fields = [Field(name, self._scalar_shape, torch.float32, f"{self.num_envs} environments")]
            columns.append(column.holding(fields, structure))
        return columns

    def _nest_field(self, column: str, name: str, part: Any) -> Field:
        """A field like an example: hidden states have the environments second, distribution parameters first."""
        example, lanes = as_tensor(part, name), self._ready_ring().lanes
        lane_axis = 0 if column == "distribution_params" else 1
        shape = list(example.shape)
        right_dims = len(shape) == 3 if lane_axis else len(shape) >= 1
        if not right_dims or shape[lane_axis] != lanes:
            form = "[layers, envs, hidden]" if lane_axis else "[envs, ...]"
            raise InvalidInputError(
                f"{name} is {tuple(shape)}; it must be {form} for {lanes} environments. Nothing was written."
            )
        if example.dtype.is_complex:
            raise InvalidInputError(f"{name} is {example.dtype}; it must be real. Nothing was written.")
        del shape[lane_axis]
        dtype = check_dtype(example.dtype, name) if example.dtype.is_floating_point else torch.float32
        return Field(name, tuple(shape), dtype, "the first transition that had it", lane_axis=lane_axis)

    def _fit_late(self, columns: Sequence[RolloutColumn], new: Mapping[str, tuple[Any, ...]]) -> list[Tensor]:
        parts = [(field, part) for c in columns for field, part in zip(c.fields, new[c.name], strict=True)]
        return [field.fit(part, self._ready_ring().lanes, self._torch_device) for field, part in parts]

    def _hold_late(self, columns: Sequence[RolloutColumn]) -> None:
        parts = [part for c in columns for part in c.row_columns(optional=c.name in _HIDDEN_STATES)]
        self._ready_ring().extend(parts, fills={"final_values": torch.nan})
        self._columns = {**self._columns, **{column.name: column for column in columns}}
        self._read_row = None
        self._late = {**self._late, **{column.name: len(column.fields) for column in columns}}

    # ---------------------------------------------------------------------------------------------- targets

    def compute_returns(
        self,
        last_values: Tensor,
        gamma: float,
        lam: float,
        normalize_advantage: bool = True,
    ) -> None:
        """Fill ``returns`` and ``advantages`` of the steps since :meth:`clear`, by generalized advantage estimation.

        ``delta_t = r_t + gamma * V_{t+1} - V_t``, ``A_t = delta_t + gamma * lam * A_{t+1}``, ``R_t = A_t + V_t``; V of
        the step after the last is ``last_values``. Where an episode ended, later steps do not contribute: a terminated
        episode does not bootstrap, a truncated one bootstraps from ``final_values`` (see :class:`Transition`). In a
        storage for next-step autoreset it bootstraps from the value of the reset step behind it, and a reset step has
        the advantage 0 and is not part of the normalization: see :meth:`from_spaces`.

        Args:
            last_values: The value of the observations after the last step, ``[envs]`` or ``[envs, 1]``.
            gamma: The discount factor.
            lam: The GAE lambda.
            normalize_advantage: Normalize the advantages: ``(A - mean) / (std + 1e-8)``, std unbiased.
        """
        with self._guard:
            self._require_mode("rl")
            blocks = self._ready_ring().blocks
            flags = (blocks["dones"], blocks.get("truncated"), blocks.get("final_values"))
            epsilon = 1e-8 if normalize_advantage else None
            resets = blocks.get(RESETS)
            self._fill_targets(last_values, *flags, gamma, lam, epsilon=epsilon, dones=True, resets=resets)

    def _compute(self, last_values: Tensor, gamma: float, lam: float) -> None:
        self.compute_returns(last_values, gamma, lam)

    def _discounts(self) -> tuple[float, float]:
        return self.gamma, self.lam

    def before_gradients(self, actor: Critic | None = None, algo: Any = None) -> None:
        """For "rl", compute returns and advantages (see the base class). Distillation needs none.

        Args:
            actor: Gives the values of the observations after the newest step; None for that of the factory.
            algo: Has the discounts; None for that of the factory, or the storage's own.
        """
        if self.training_type == "distillation":
            self._see(algo)
            self._require_rows()
        else:
            super().before_gradients(actor, algo)

    # ---------------------------------------------------------------------------------------------- batches

    @guarded_steps
    def generator(self) -> Iterator[RolloutStorage.Batch]:
        """Yield one batch for each written step, in order: observations, privileged actions, dones, extra fields."""
        self._require_mode("distillation")
        rows, lanes = self._require_rows(), self._ready_ring().lanes
        leaves, build = flatten(self._sources(rows), torch.Size((lanes,)), self.Batch)
        for t in range(rows):
            self._samples += lanes
            yield build([leaf[t].clone() for leaf in leaves])

    @guarded_steps
    def mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, *, reshuffle: bool = False, reuse: bool = False
    ) -> Iterator[RolloutStorage.Batch]:
        """Yield shuffled flat mini-batches of the steps written since :meth:`clear`, for feed-forward networks.

        Each holds ``rows // num_mini_batches`` rows, no row twice in an epoch; rows that do not fill a mini-batch are
        chosen at random. Every batch is a new copy: you may keep it or change it in place.

        Args:
            num_mini_batches: Batches in each epoch.
            num_epochs: Epochs.
            reshuffle: Draw a new permutation for every epoch; otherwise all epochs use the same one.
            reuse: Gather once, and yield the same tensors in every epoch. In-place changes to a batch are then seen in
                the next epoch. Cannot be combined with ``reshuffle``.
        """
        self._require_mode("rl")
        if reuse and reshuffle:
            raise InvalidInputError(
                "reshuffle=True needs other batches in every epoch, and reuse=True the same; give one of the two"
            )
        size = self._batch_rows(num_mini_batches, num_epochs)
        self._warn_of_missing_targets()
        how: dict[str, Any] = {"reshuffle": reshuffle, "reuse": reuse, "make": self.Batch}
        yield from self._counted(self._serve(self._sources, num_mini_batches, size, num_epochs, **how), size)

    @guarded_steps
    def recurrent_mini_batch_generator(
        self,
        num_mini_batches: int,
        num_epochs: int = 8,
        *,
        max_trajectories: int | None = None,
        reuse: bool = False,
    ) -> Iterator[RolloutStorage.Batch]:
        """Yield mini-batches of whole trajectories, for recurrent networks; not shuffled.

        A mini-batch holds ``num_envs // num_mini_batches`` environments, in order; the last ``num_envs %
        num_mini_batches`` environments are in none, in any epoch, so give a number that divides ``num_envs``. A storage
        made by :meth:`from_spaces` warns of it once. Their observations are split where
        episodes ended (as ``dones`` says when the generator starts) and padded with zeros to
        ``[steps, trajectories, ...]``, environment by environment; ``masks`` is False for padding, and
        ``hidden_states`` are those saved at each trajectory's start. The other fields are ``[steps, envs, ...]``.

        Args:
            num_mini_batches: Batches in each epoch; best a divisor of ``num_envs``.
            num_epochs: Epochs.
            max_trajectories: The number of trajectories in every batch; missing ones are padding. On CUDA the host then
                does not synchronize, and the shapes are constant, as a CUDA graph needs. If there are more, an
                InvalidInputError is raised; on CUDA, where the number is not known, the last ones are omitted.
            reuse: Gather once, and yield the same tensors in every epoch. In-place changes to a batch are then seen in
                the next epoch.
        """
        self._require_mode("rl")
        rows, ring = self._require_rows(), self._ready_ring()
        given = {"num_mini_batches": num_mini_batches, "num_epochs": num_epochs}
        if max_trajectories is not None:
            given["max_trajectories"] = max_trajectories
        check_positive("recurrent_mini_batch_generator()", **given)
        if num_mini_batches > ring.lanes:
            raise InvalidInputError(f"{num_mini_batches} mini-batches were asked for of {ring.lanes} environments")
        self._warn_of_missing_targets()
        self._warn_of_left_out(num_mini_batches)
        self._outputs.begin()
        self._follow_callers()
        resets = None if self._resets is None else self._resets.flags(ring)
        found = find_trajectories(ring.blocks["dones"][:rows], num_mini_batches, max_trajectories, resets)
        size = rows * (ring.lanes // num_mini_batches)
        if reuse:
            yield from self._counted(repeated(self._recurrent_epoch(rows, found), num_epochs), size)
            return
        for _ in range(num_epochs):
            if ring.size < rows:
                raise NotReadyError("a new rollout was started while a generator was still serving the one before")
            yield from self._counted(self._recurrent_epoch(rows, found), size)

    def _warn_of_left_out(self, count: int) -> None:
        """Warn once of environments that are in none of ``count`` mini-batches; not where rsl_rl omits them too."""
        lanes = self._ready_ring().lanes
        first = lanes - lanes % count
        if self._spaces is None or self._warned_of_left_out or first == lanes:
            return
        self._warned_of_left_out = True
        which = f"environments {first} to {lanes - 1} are" if first < lanes - 1 else f"environment {first} is"
        divisors = [number for number in range(1, lanes + 1) if lanes % number == 0]
        near = [max(n for n in divisors if n < count), min(n for n in divisors if n > count)]
        warn_caller(
            f"{lanes} environments cannot be divided into {count} mini-batches: {which} in none of them, in no epoch, "
            f"so nothing is learned from their steps. {near[0]} or {near[1]} mini-batches would hold all environments. "
            "(This warning is shown once.)"
        )

    def _recurrent_epoch(
        self, rows: int, found: SplitTrajectories | TabulatedTrajectories
    ) -> Iterator[RolloutStorage.Batch]:
        sources, ring = self._sources(rows), self._ready_ring()
        if self._spaces is not None:
            sources["step_masks"] = None, [~self.reset_steps]
        observations = tuple(sources.pop("observations")[1])
        others, build = flatten(sources, torch.Size((rows, ring.lanes)), self.Batch)
        states = [self._columns[name].held(ring, rows) for name in _HIDDEN_STATES]
        for made in found.batches(observations, (*states[0], *states[1]), others, self._outputs.empty_group):
            first = made.states[: len(states[0])], made.states[len(states[0]) :]
            yield build(
                made.others,
                observations=self._observations.build(made.observations, made.masks.shape),
                hidden_states=(_hidden_state(first[0]), _hidden_state(first[1])),
                masks=made.masks,
            )

    def _require_mode(self, mode: str) -> None:
        if self._training_type != mode:
            raise InvalidInputError(
                f"this is only for training_type {mode!r}; this storage was built for {self.training_type!r}"
            )

    # ---------------------------------------------------------------------------------------------- the ten methods

    @guarded_steps
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
        """Batches by the names of :mod:`rlstore.storage`.

        With ``recurrent`` they are those of :meth:`recurrent_mini_batch_generator`, which hold whole environments: then
        ``mini_batch_size`` must be None, and they are never shuffled. ``max_trajectories`` is for these alone. With
        ``reuse`` the first epoch is gathered, and the same tensors, in the same order, come in every epoch.

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rows in each; None divides all rows evenly.
            num_epochs: Epochs, each with its own permutation.
            shuffle: False serves the rows in temporal order.
            recurrent: Serve whole trajectories.
            max_trajectories: See :meth:`recurrent_mini_batch_generator`.
            reuse: See above.
        """
        if not recurrent:
            if max_trajectories is not None:
                raise InvalidInputError("max_trajectories is for recurrent=True")
            yield from super().generate_batches(num_mini_batch, mini_batch_size, num_epochs, shuffle, reuse=reuse)
            return
        if mini_batch_size is not None:
            raise InvalidInputError("recurrent batches hold whole environments: give mini_batch_size=None")
        self._require_targets()
        words = {column.batch: column.word for column in self._columns.values() if column.batch}
        how: dict[str, Any] = {"max_trajectories": max_trajectories, "reuse": reuse}
        for batch in self.recurrent_mini_batch_generator(num_mini_batch, num_epochs, **how):
            yield {words.get(name, name): value for name, value in vars(batch).items() if value is not None}

    def _known_words(self) -> list[str]:
        words = [*super()._known_words(), "terminated", "truncated", "next_observations", "hidden_states"]
        return words if self._spaces is None or self._resets is not None else [*words, "final_observations"]

    def _transition(self, sample: Sample) -> RolloutStorage.Transition:
        """A sample as a transition. Where both flags are set, termination wins."""
        transition = self.Transition()
        names = {column.word: column.name for column in self._columns.values()}
        for word, value in sample.items():
            if word not in ("terminated", "truncated", "next_observations", "final_observations"):
                setattr(transition, names.get(word, word), value)
        transition.dones, cut_off, count = self._flags.join(sample.get("terminated"), sample.get("truncated"))
        transition.truncated = cut_off
        if count and transition.final_values is None and self._critic.value is not None:
            transition.final_values = self._ask_critic({"final_obs": sample.get("final_observations")}, cut_off)
        return transition

    def _insert(self, sample: Sample) -> None:
        nexts = sample.get("next_observations")
        following = None if nexts is None else self._fit_observations(nexts)
        self.add_transition(self._transition(sample))
        self._last_observations = following

    def _check(self, sample: Sample) -> None:
        self._check_row(*self._row(self._transition(sample)))
        if sample.get("next_observations") is not None:
            self._fit_observations(sample["next_observations"])

    def _step_fields(self) -> dict[str, StepField]:
        fields, ring = super()._step_fields(), self._ready_ring()
        actor, critic = (
            [block.transpose(1, 2) for block in self._columns[name].held(ring, ring.size)] for name in _HIDDEN_STATES
        )
        if actor or critic:

            def build(leaves: Sequence[Tensor], shape: torch.Size) -> tuple[HiddenState, HiddenState]:
                return _hidden_state(leaves[: len(actor)]), _hidden_state(leaves[len(actor) :])

            fields["hidden_states"] = StepField([*actor, *critic], build)
        if self._resets is not None:
            fields[RESETS] = StepField([self.reset_steps.unsqueeze(-1)], lambda leaves, shape: leaves[0], True)
        return fields

    def _after_newest(self) -> list[Tensor] | None:
        return self._last_observations

    def _measure(self) -> Measures:
        resets = {} if self._resets is None else {"reset_steps": self.reset_steps.count_nonzero()}
        return {**super()._measure(), **resets}

    def _following(self) -> list[Tensor]:
        if self._last_observations is None:
            raise NotReadyError("the newest sample had no 'next_observations', whose values before_gradients() needs")
        return self._last_observations

    def _word_sources(self, rows: int, *, whole: bool = False) -> Sources:
        sources = super()._word_sources(rows, whole=whole)
        blocks = self._ready_ring().blocks
        ended = blocks["dones"][:rows] != 0
        cut_off = blocks["truncated"][:rows] != 0 if "truncated" in blocks else torch.zeros_like(ended)
        for word, flags in (("terminated", ended & ~cut_off), ("truncated", cut_off)):
            sources[word] = None, [flags if self._scalar_shape else flags.unsqueeze(-1)]
        return sources

    def _served(self, column: RolloutColumn, leaves: list[Tensor], *, own: bool) -> list[Tensor]:
        # Actions are served as their space has them and, in the storage's own batches, scalars as they are held.
        return leaves if own or column.form == "actions" else super()._served(column, leaves, own=own)

    def _count_rows(self) -> int:
        count, ring = super()._count_rows(), self._ready_ring()
        return count if self._resets is None else count - self._resets.count(ring)

    def _row_ids(self) -> Tensor | None:
        return None if self._resets is None else self._resets.other_rows(self._ready_ring())

    def _besides(self, rows: int) -> dict[str, Any]:
        besides: dict[str, Any] = {}
        states = [self._columns[name].held(self._ready_ring(), rows) for name in _HIDDEN_STATES]
        if any(states):
            besides["hidden_states"] = tuple(_hidden_state(state) for state in states)
        if self._last_observations is not None:
            lanes = self._ready_ring().lanes
            besides["last_observations"] = self._observations.build(self._last_observations, (lanes,))
        if self._resets is not None:
            besides[RESETS] = self.reset_steps.unsqueeze(-1)
        return besides

    def _restore(self, data: Sample) -> None:
        if data.get("last_observations") is not None:
            self._last_observations = self._fit_observations(data["last_observations"])
        if self._resets is not None and data.get(RESETS) is not None:
            ring, first = self._ready_ring(), at_step(data[RESETS], 0, self.step, RESETS)
            ring.blocks[RESETS][0].copy_(self._flag(RESETS).fit(first, ring.lanes, self._torch_device))
            self._resets.learn(ring)

    # ---------------------------------------------------------------------------------------------- save and load

    def _settings(self) -> dict[str, Any]:
        sizes, both = (self.num_envs, self.max_size), (self.gamma, self.lam)
        names, values = _OF_SPACES, (*(self._spaces or ()), *sizes, self._autoreset, *both)
        if self._spaces is None:
            fields = self._columns["observations"].fields
            obs = None if self._ring is None else describe_fields(self._observations, fields)
            shape = None if self.actions_shape is None else list(self.actions_shape)
            names, values = _OF_EXAMPLE, (self.training_type, *sizes, obs, shape, *both)
        return {**dict(zip(names, values, strict=True)), **self._saved_options()}

    @classmethod
    def _saved_fields(cls, settings: Mapping[str, Any]) -> tuple[int, int, list[Field]]:
        if "observation_space" in settings:
            steps, lanes = settings["num_steps"], settings["num_envs"]
            check_positive(cls.__name__, num_steps=steps, num_envs=lanes)
            fields = observation_fields(settings["observation_space"], "observations", cls.__name__, torch.float32)[1]
            spec = action_spec(settings["action_space"])
            return steps, lanes, [*fields, Field("actions", spec.shape, spec.dtype, "")]
        steps, lanes, obs = (settings[name] for name in ("num_transitions_per_env", "num_envs", "obs"))
        if obs is None:
            return 0, 0, []
        check_positive(cls.__name__, num_transitions_per_env=steps, num_envs=lanes)
        actions = check_shape(cls.__name__, "actions_shape", settings["actions_shape"])
        return steps, lanes, [*described_fields(obs, "observations")[1], Field("actions", actions, torch.float32, "")]

    @classmethod
    def _from_settings(cls, settings: Mapping[str, Any], device: str | torch.device) -> RolloutStorage:
        if "observation_space" in settings:
            given = saved_arguments(cls.from_spaces, settings, _OF_SPACES, SAVED_OPTIONS)
            return cls.from_spaces(**given, device=device, seed=0)
        given = saved_arguments(cls, settings, _OF_EXAMPLE, SAVED_OPTIONS)
        obs = given.pop("obs")
        if obs is not None:
            structure, fields = described_fields(obs, "observations")
            lanes = settings["num_envs"]
            examples = [torch.zeros((lanes, *field.shape), dtype=field.dtype) for field in fields]
            obs = structure.build(examples, (lanes,))
        return cls(**given, obs=obs, device=device, seed=0)

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers, tensors = super()._state()
        following = self._last_observations
        numbers["following"] = following is not None
        for index, leaf in enumerate(following or ()):
            tensors[f"last_observations[{index}]"] = leaf
        if self._ring is not None:
            numbers["groups"] = dict(self._late)
        return numbers, tensors

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        if self._ring is not None:
            late = {}
            for name, count in numbers["groups"].items():
                if check_count("a snapshot", name, count) > len(reader.names):
                    raise reader.unusable(name, f"{count} tensors of it are not there")
                nested = self._columns[name].form == "nest"
                blocks = [f"{name}[{index}]" for index in range(count)] if nested else [name]
                for block in blocks:
                    if reader.shape(block)[:1] != (self.max_size,):  # else its steps may have any size
                        raise reader.unusable(block, f"it is {reader.shape(block)}, and {self.max_size} steps are held")
                late[name] = tuple(torch.zeros(reader.shape(b)[1:], dtype=reader.dtype(b)) for b in blocks)
            self._hold_late(self._late_columns(late))
        super()._set_state(numbers, reader)
        if numbers["following"]:
            names = [f"last_observations[{index}]" for index in range(len(self._observations.paths))]
            leaves = [reader.tensor(name, self._torch_device) for name in names]
            lanes = self._ready_ring().lanes
            self._last_observations = self._fit_observations(self._observations.build(leaves, (lanes,)))
        if self._resets is not None:
            self._resets.learn(self._ready_ring())


# What a transition or a batch of either mode has: no names for extra fields.
_RESERVED = {
    *RolloutStorage.Transition.__annotations__,
    *vars(RolloutStorage.Batch()),
    "terminated",
    "next_observations",
}


def _full(ring: Ring, length: str) -> RolloutFullError:
    return RolloutFullError(
        f"the rollout is full: {ring.size} of {ring.steps} steps since clear(). Call clear() after the "
        f"update (or after_gradients()) or raise {length}. "
        "Nothing was written."
    )


def _late_values(params: Any, states: Any, truncated: Any, final_values: Any) -> dict[str, tuple[Any, ...]]:
    """The leaves of what a step need not have, by column."""
    found: dict[str, tuple[Any, ...]] = {}
    if params is not None:
        if not isinstance(params, (tuple, list)):
            raise InvalidInputError("distribution_params must be a tuple of tensors. Nothing was written.")
        found["distribution_params"] = tuple(params)
    if not isinstance(states, (tuple, list)) or len(states) != 2:
        raise InvalidInputError("hidden_states must be a pair (actor, critic), each may be None. Nothing was written.")
    if states[0] is not None:
        found[_HIDDEN_STATES[0]] = _as_tuple(states[0])
    if states[1] is not None:
        found[_HIDDEN_STATES[1]] = _as_tuple(states[1])
    if truncated is not None:
        found["truncated"] = (truncated,)
    if final_values is not None:
        found["final_values"] = (final_values,)
    return found


def _said(name: str) -> str:
    """What a late column is called in errors: as a user gives it."""
    return f"hidden_states[{_HIDDEN_STATES.index(name)}]" if name in _HIDDEN_STATES else name


def _as_tuple(state: Any) -> tuple[Any, ...]:
    return tuple(state) if isinstance(state, (tuple, list)) else (state,)


def _hidden_state(states: Sequence[Tensor]) -> HiddenState:
    """A GRU's single state as a tensor, an LSTM's as a tuple, none as None."""
    return None if not states else states[0] if len(states) == 1 else tuple(states)
