"""What the on-policy storages share: a rollout of named columns, its batches, the ten methods, save and load."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor

from rlstore.engine import returns
from rlstore.engine.batches.gather import gather_batches
from rlstore.engine.batches.select import epoch_orders, epoch_rows
from rlstore.engine.calls import warn_caller
from rlstore.engine.checks import check_count, check_fraction, check_positive
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.guard import guarded, guarded_steps
from rlstore.engine.measures import Measures, episodes, held, invalid, nonfinite, used
from rlstore.engine.rows.ring import Column, Ring
from rlstore.engine.rows.schema import Field, Structure, as_tensor, count_readable, reward_field, walk
from rlstore.engine.rows.spaces import ExtraFields, describe_extra_fields, extra_fields
from rlstore.episodes import HeldSteps, NoSteps
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.parameters import Check, fraction, require_empty, with_arguments
from rlstore.rollout.held_steps import RolloutSteps, StepField
from rlstore.rollout.targets import Targets
from rlstore.storage import BatchDict, Critic, Sample, Storage, saved_samples
from rlstore.trainer import at_step, check_names, copied, learning_info

_Batch = TypeVar("_Batch")
# Blocks to serve, by the name that they are served under: how their leaves are nested (None: one tensor), the leaves.
Sources = dict[str, tuple[Structure | None, list[Tensor]]]
SAVED_OPTIONS = ("extra_fields", "allow_nonfinite_rewards")  # arguments that are saved where they are given
_SCALAR_BYTES = 64  # at most, of all columns of a step but the observations and the actions
_PLAIN = Structure([()], "")  # of what is one tensor
# The names of a discount and a lambda, here and in algorithms; of two that an algorithm has, the second counts.
_GAMMAS, _LAMBDAS = ("gamma", "discount"), ("lam", "gae_lambda")


@dataclass(frozen=True, eq=False)
class RolloutColumn:
    """One named column of a rollout. A storage lists its columns once; rows, batches and snapshots follow from them.

    Attributes:
        name: Of the argument, or the transition's attribute, that brings the column, and of its block.
        form: "observations", "actions", "scalar", "flag", "nest" (a tuple of tensors, as first given) or "extra".
        word: Its name in the dicts of the ten methods (see :mod:`rlstore.storage`); "" if they do not have it.
        batch: Its name in the storage's own batches; "" if they do not have it.
        computed: Not part of a row, but computed from the rollout.
        late: Added with the first step that brings it.
        whole: Of the ten methods, only ``get_all_buffer_data`` serves it.
        lead: Row t of the column is row ``t + lead`` of its block. A batch serves the rows of the block.
        block: The name of its block, if it is not its own.
        said: What errors call it, if not by its name.
        fields: One for each leaf; empty until the shapes are known.
        structure: How the leaves are nested; None for a single tensor.
    """

    name: str
    form: str = "scalar"
    word: str = ""
    batch: str = ""
    computed: bool = False
    late: bool = False
    whole: bool = False
    lead: int = 0
    block: str = ""
    said: str = ""
    fields: tuple[Field, ...] = ()
    structure: Structure | None = None

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks that hold the leaves."""
        own = self.block or self.name
        if self.structure is None:
            return (own,) if self.fields else ()
        return self.structure.names if not self.block else Structure(self.structure.paths, own).names

    def holding(self, fields: Sequence[Field], structure: Structure | None = None) -> RolloutColumn:
        """The same column with its fields."""
        return replace(self, fields=tuple(fields), structure=structure)

    def row_columns(self, *, optional: bool = False) -> list[Column]:
        """What the column is in a row of the ring; see there for ``optional``."""
        return [
            Column(field, block, self.lead, optional) for field, block in zip(self.fields, self.blocks, strict=True)
        ]

    def leaves(self, value: Any) -> list[Any]:
        """The leaves of a step's value."""
        return [value] if self.structure is None else self.structure.leaves(value)

    def held(self, ring: Ring, rows: int, lead: int = 0) -> list[Tensor]:
        """Rows ``lead`` to ``lead + rows`` of its blocks."""
        blocks = list(map(ring.blocks.__getitem__, self.blocks))
        if not blocks or (not lead and blocks[0].shape[0] == rows):
            return blocks
        return [block[lead : lead + rows] for block in blocks]


class BlockAttribute:
    """A block of the ring as an attribute: read it, write into it, or put another tensor in its place."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, storage: None, owner: type) -> BlockAttribute: ...
    @overload
    def __get__(self, storage: RolloutCore, owner: type) -> Tensor: ...
    def __get__(self, storage: RolloutCore | None, owner: type) -> BlockAttribute | Tensor:
        if storage is None:
            return self
        if storage._ring is None or self._name not in storage._ring.blocks:
            raise AttributeError(f"this {owner.__name__} has no {self._name!r}")
        return storage._ring.blocks[self._name]

    def __set__(self, storage: RolloutCore, value: Tensor) -> None:
        if storage._ring is None or self._name not in storage._ring.blocks:
            raise AttributeError(f"this {type(storage).__name__} has no {self._name!r}")
        with storage._guard:
            storage._ring.bind(self._name, value)


class ObservationAttribute:
    """The observations as one attribute: a tensor, or a TensorDict or tuple whose leaves are the blocks."""

    def __get__(self, storage: RolloutCore | None, owner: type) -> Any:
        if storage is None:
            return self
        if storage._ring is None:
            raise AttributeError(f"this {owner.__name__} has no observations before its first sample")
        with storage._guard:
            if storage._observation_view is None:
                blocks = [storage._ring.blocks[name] for name in storage._observations.names]
                storage._observation_view = storage._observations.build(blocks, blocks[0].shape[:2])
            return storage._observation_view

    def __set__(self, storage: RolloutCore, value: Any) -> None:
        with storage._guard:
            storage._ready_ring().bind_all(storage._observations.names, storage._observations.leaves(value))
            storage._observation_view = value
            storage._follow_callers()


@with_arguments("device", "max_size", "num_envs")
class RolloutCore(Storage):
    """A rollout of ``max_size`` steps of named columns, and the ten methods on it.

    A subclass lists its columns (:attr:`_columns`, observations first), says how a sample becomes a row
    (:meth:`_insert`, :meth:`_check`), and what follows the newest step.
    """

    # What update_storage_parameter may change: fractions, and the number of steps.
    _parameters: ClassVar[Mapping[str, Check]] = {}
    # What to do about missing targets.
    _how_to_compute: ClassVar[str]
    # Words of get_all_buffer_data that are no columns.
    _data_words: tuple[str, ...] = ()
    # How a scalar and a flag of an environment are held. The ten methods serve scalars with an axis of 1 in any case.
    _scalar_shape: tuple[int, ...] = (1,)
    _flag_dtype: ClassVar[torch.dtype] = torch.uint8

    num_envs: int | None
    _num_envs: int | None
    _max_size: int
    _allows_nonfinite: bool
    _columns: dict[str, RolloutColumn]
    _observations: Structure
    _extra: tuple[Field, ...] = ()
    _observation_view: Any = None  # the observations as a caller sees them; None until they are read
    _handed_lists: dict[str, list[Tensor]]  # lists of blocks as a caller sees them
    _targets: Targets  # there are both a ring and these, or neither
    _warned = False  # of missing targets
    _spent = False  # the learner is done with this rollout: the next sample starts a new one

    # ---------------------------------------------------------------------------------------------- for subclasses

    @abstractmethod
    def _allocate_for(self, sample: Sample) -> None:
        """Allocate a ring for samples like this one."""

    @abstractmethod
    def _insert(self, sample: Sample) -> None:
        """Write a sample whose names are already checked."""

    @abstractmethod
    def _check(self, sample: Sample) -> None:
        """Refuse a sample that cannot be written, and write nothing."""

    @abstractmethod
    def _restore(self, data: Sample) -> None:
        """Put back what ``get_all_buffer_data`` returns and neither a sample nor a computed column holds."""

    @abstractmethod
    def _following(self) -> list[Tensor]:
        """The leaves of the observations that follow the newest step."""

    @abstractmethod
    def _compute(self, last_values: Tensor, gamma: float, lam: float) -> None:
        """Compute ``returns`` and ``advantages``."""

    @abstractmethod
    def _discounts(self) -> tuple[float, float]:
        """The storage's own gamma and lambda."""

    # ---------------------------------------------------------------------------------------------- columns

    def _describe(
        self, columns: Sequence[RolloutColumn], given: ExtraFields | None, reserved: Collection[str] = ()
    ) -> None:
        """Set the columns of the storage, with a user's extra fields, whose names must not be among ``reserved``."""
        words = [word for c in columns for word in (c.name, c.word, c.batch) if word]
        taken = {*words, *reserved, *self._data_words, "rows"}
        self._extra = extra_fields(given, type(self).__name__, taken)
        held = [replace(field, shape=field.shape or self._scalar_shape) for field in self._extra]
        extra = [RolloutColumn(f.name, "extra", f.name, f.name).holding([f]) for f in held]
        self._columns = {column.name: column for column in (*columns, *extra)}
        self._handed_lists = {}

    def _allocate(
        self,
        structure: Structure,
        observations: Sequence[Field],
        actions: Field,
        lanes: int,
    ) -> None:
        """Allocate the ring.

        Args:
            structure: Of the observations.
            observations: A field for each leaf.
            actions: The field of actions.
            lanes: The number of environments.
        """
        own, scalar = f"num_envs={lanes}", self._scalar_shape
        for name, column in self._columns.items():
            if column.late or column.form == "extra":
                continue
            if column.form == "observations":
                nest = Structure(structure.paths, name, self._torch_device)
                fields = [replace(field, name=leaf) for field, leaf in zip(observations, nest.names, strict=True)]
                self._columns[name] = column.holding(fields, nest)
            elif column.form == "actions":
                self._columns[name] = column.holding([replace(actions, name=name)])
            elif column.form == "flag":
                self._columns[name] = column.holding([Field(name, scalar, self._flag_dtype, own, is_flag=True)])
            elif name == "rewards":
                self._columns[name] = column.holding([reward_field(name, scalar, own, self._allows_nonfinite)])
            else:
                self._columns[name] = column.holding([Field(column.said or name, scalar, torch.float32, own)])
        held = [column for column in self._columns.values() if column.fields]
        rows = [part for column in held if not column.computed for part in column.row_columns()]
        computed = [field for column in held if column.computed for field in column.fields]
        self._ring = Ring(rows, self.max_size, lanes, self._torch_device, computed)
        self._targets = Targets([field.name for field in computed])
        structure.device = self._torch_device
        self._observations = structure
        self._num_envs = lanes

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """The blocks of the extra fields by name, ``[steps, envs, ...]``; you may write into them."""
        ring = self._ready_ring()
        return MappingProxyType({field.name: ring.blocks[field.name] for field in self._extra})

    def _known_words(self) -> list[str]:
        """The names that a sample may hold."""
        return [column.word for column in self._columns.values() if column.word and not column.computed]

    def _sources(self, rows: int) -> Sources:
        """The first ``rows`` steps by the names of the storage's own batches."""
        ring, sources = self._current_ring(), {}
        for column in self._columns.values():
            if column.batch and column.fields:
                sources[column.batch] = column.structure, self._served(column, column.held(ring, rows), own=True)
        return sources

    def _word_sources(self, rows: int, *, whole: bool = False) -> Sources:
        """The first ``rows`` steps by the words of the ten methods; ``whole`` for those of get_all_buffer_data."""
        ring, sources = self._current_ring(), {}
        for column in self._columns.values():
            if column.word and column.fields and (whole or not column.whole):
                leaves = column.held(ring, rows, column.lead)
                if column.form == "flag":
                    leaves = [leaves[0] != 0]
                sources[column.word] = column.structure, self._served(column, leaves, own=False)
        return sources

    def _served(self, column: RolloutColumn, leaves: list[Tensor], *, own: bool) -> list[Tensor]:
        """The leaves as they are served: scalars held as ``[steps, envs]`` get a last axis of 1.

        Args:
            column: Whose leaves they are.
            leaves: As they are held.
            own: For the storage's own batches, not for the ten methods.
        """
        if self._scalar_shape or column.structure is not None or column.fields[0].shape:
            return leaves
        return [leaf.unsqueeze(-1) for leaf in leaves]

    def _require_rows(self) -> int:
        """The rows held by each environment, at least one."""
        rows = 0 if self._ring is None else self._ring.size
        if rows == 0:
            raise NotReadyError(f"this {type(self).__name__} holds no data yet; add transitions first")
        return rows

    def _ready_ring(self) -> Ring:
        if self._ring is None:
            raise NotReadyError(
                f"this {type(self).__name__} waits for its first sample: call init_tensors() or insert one"
            )
        return self._ring

    def _current_ring(self) -> Ring:
        """The ring with what callers have assigned, all of it in memory."""
        self._follow_callers()
        ring = self._ready_ring()
        ring.check_blocks()
        return ring

    def _start_rollout(self) -> None:
        self._ready_ring().restart()
        self._spent = False

    def _missing_targets(self) -> str:
        """What is wrong with the returns and advantages, if nobody has written those of all steps; else ""."""
        if self._ring is None or self._ring.size == 0 or not self._targets.are_missing(self._ring):
            return ""
        known, steps = self._targets.computed, self._ring.size
        which, why = "this rollout", "they were not computed since it began"
        if known:
            which = "the newest steps"
            why = f"they were computed when the rollout had {known} steps, and now it has {steps}"
        return f"the returns and advantages of {which} are NaN: {why}; {self._how_to_compute}"

    def _require_targets(self) -> None:
        """Refuse to serve returns and advantages that nobody has written."""
        if missing := self._missing_targets():
            raise NotReadyError(missing)

    def _warn_of_missing_targets(self) -> None:
        """Warn once: a program may iterate over batches for their other fields."""
        if not self._warned and (missing := self._missing_targets()):
            self._warned = True
            warn_caller(f"{missing}. (This warning is shown once.)")

    def _follow_callers(self) -> None:
        """Bind what a caller has put into the observations' TensorDict, or a list of blocks, in the meantime."""
        if self._observation_view is not None:
            try:
                held = self._observations.leaves(self._observation_view)
                changed = self._ready_ring().bind_all(self._observations.names, held)
            except InvalidInputError:
                self._observation_view = None  # what was put there cannot be held: show what is
                raise
            if changed:
                self._observation_view = None  # what is held may be a converted copy: show that one
        for name in list(self._handed_lists):
            handed, blocks = self._handed_lists.pop(name), self._columns[name].blocks
            if len(blocks) != len(handed):
                raise InvalidInputError(f"{name} holds {len(blocks)} tensors and cannot become {len(handed)} of them")
            if not self._ready_ring().bind_all(blocks, handed):
                self._handed_lists[name] = handed

    def _fit_observations(self, value: Any) -> list[Tensor]:
        """The leaves of observations of one step, checked and copied: an environment may write over its own."""
        ring = self._ready_ring()
        fields = next(iter(self._columns.values())).fields
        return [
            field.fit(leaf, ring.lanes, self._torch_device).clone()
            for field, leaf in zip(fields, self._observations.leaves(value), strict=True)
        ]

    @guarded
    def __getstate__(self) -> dict[str, Any]:
        self._follow_callers()
        return {**self.__dict__, "_observation_view": None, "_handed_lists": {}}

    # ---------------------------------------------------------------------------------------------- numbers

    def _measure(self) -> Measures:
        if self._ring is None:
            lanes = self.num_envs if isinstance(self.num_envs, int) else 0
            return {**held(0, self.max_size * lanes, 0), **used(0, self._samples)}
        ring = self._current_ring()
        observations = next(iter(self._columns.values())).held(ring, ring.size)
        return {
            **held(ring.size * ring.lanes, ring.steps * ring.lanes, ring.nbytes),
            **used(self._count_inserts(), self._samples),
            **episodes(**RolloutSteps(self, ring).fragments()._asdict()),
            **nonfinite(ring.blocks["rewards"][: ring.size], observations, ring.lanes),
            **invalid(ring.invalid),
        }

    def _count_inserts(self) -> int:
        return 0 if self._ring is None else self._ring.written * self._ring.lanes

    def _counted(self, batches: Iterator[_Batch], rows: int) -> Iterator[_Batch]:
        """The same batches, each counted as so many samples when it is served."""
        for batch in batches:
            self._samples += rows
            yield batch

    # ---------------------------------------------------------------------------------------------- writing

    @guarded
    def init_tensors(self, sample: Sample) -> None:
        """Allocate the blocks for samples like this one. If they exist already, the sample must fit them."""
        check_names(sample, "a sample", type(self).__name__, self._known_words(), ["observations"])
        blank = {**self.__dict__, "_columns": dict(self._columns)}
        try:
            if self._ring is None:
                self._allocate_for(sample)
            self._check(sample)
        except Exception:
            self.__dict__ = blank  # a sample that is refused leaves no shapes behind
            raise

    @guarded
    def insert_transition(self, sample: Sample) -> None:
        """Store one step of all environments, given by the names of :mod:`rlstore.storage`.

        The first sample after ``after_gradients`` starts a new rollout. Extra fields are given by their names.
        """
        if self._ring is None:
            self.init_tensors(sample)
        check_names(sample, "a sample", type(self).__name__, self._known_words(), ["observations"])
        if self._spent:
            self._check(sample)  # before the old rollout is given up
            self._start_rollout()
        self._insert(sample)

    # ---------------------------------------------------------------------------------------------- targets

    def before_gradients(self, actor: Critic | None = None, algo: Any = None) -> None:
        """Compute returns and advantages, with the actor's values of the observations after the newest step.

        Args:
            actor: A :class:`~rlstore.storage.Critic`; without one, the actor given to the factory's function.
            algo: Its ``gamma`` (or ``discount``) and ``lam`` (or ``gae_lambda``) are used where it has them; else the
                storage's own.
        """
        self._require_rows()
        actor = actor if actor is not None else self._given_actor.value
        self._see(algo)
        algo = algo if algo is not None else self._given_algorithm.value
        if actor is None:
            raise NotReadyError(
                "before_gradients() needs an actor with get_values(observations): give it here, or to the factory"
            )
        with torch.no_grad():
            following = self._observations.build(self._following(), (self._ready_ring().lanes,))
            last_values = actor.get_values(following)
        gamma, lam = self._discounts()
        for name in _GAMMAS:
            gamma = getattr(algo, name, gamma)
        for name in _LAMBDAS:
            lam = getattr(algo, name, lam)
        check_fraction("before_gradients()", **{"the algorithm's gamma": gamma, "the algorithm's lambda": lam})
        self._compute(last_values, float(gamma), float(lam))

    def _fill_targets(
        self,
        last_values: Any,
        ended: Tensor,
        truncated: Tensor | None,
        final_values: Tensor | None,
        gamma: float,
        lam: float,
        *,
        epsilon: float | None,
        dones: bool = False,
        resets: Tensor | None = None,
    ) -> None:
        """Fill ``returns`` and ``advantages`` of the rows held, from the whole blocks of flags and final values.

        See :func:`rlstore.engine.returns.fill_gae`; with ``resets``, the flags of reset steps,
        :func:`rlstore.engine.returns.fill_gae_around_resets`.
        """
        ring, rows = self._ready_ring(), self._require_rows()
        ring.check_blocks()
        if not (type(gamma) is type(lam) is float and 0 <= gamma <= 1 and 0 <= lam <= 1):
            check_fraction("compute_returns()", gamma=gamma, lam=lam)
        if not _is_ready(last_values, ring):
            field = Field("last_values", (), torch.float32, f"{ring.lanes} environments")
            last_values = field.fit(last_values, ring.lanes, ring.device)
        blocks = ring.blocks
        rewards, values, *out = blocks["rewards"], blocks["values"], blocks["advantages"], blocks["returns"]
        if rows < ring.steps:
            rewards, values, *out = (block[:rows] for block in (rewards, values, *out))
            ended = ended[:rows]
            truncated = None if truncated is None else truncated[:rows]
            final_values = None if final_values is None else final_values[:rows]
        if resets is not None:
            how: dict[str, Any] = {"gamma": gamma, "lam": lam, "advantages": out[0], "returns": out[1]}
            ends = (ended, truncated, resets[:rows])
            returns.fill_gae_around_resets(rewards, values, last_values, *ends, **how, epsilon=epsilon)
        else:
            returns.fill_gae(
                rewards,
                values,
                last_values,
                ended,
                truncated,
                final_values,
                gamma=gamma,
                lam=lam,
                advantages=out[0],
                returns=out[1],
                epsilon=epsilon,
                dones=dones,
            )
        self._targets.were_computed(ring)

    @guarded
    def after_gradients(
        self, actor: Any = None, algo: Any = None, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Mark the rollout as used: the next step starts a new one.

        It may also be called as ``after_gradients(batch, info)``.

        Args:
            actor: Not used; with two arguments, the batch that was trained on.
            algo: Not used; with two arguments, ``info``.
            info: What a trainer reports; None for an empty dict.

        Returns:
            ``info`` with ``storage_size``, the transitions held.
        """
        info = learning_info(actor, algo, info)[1]
        self._spent = True
        info["storage_size"] = len(self)
        return info

    # ---------------------------------------------------------------------------------------------- batches

    @guarded_steps
    def generate_batches(  # type: ignore[override]
        self,
        num_mini_batch: int,
        mini_batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        *,
        reuse: bool = False,
    ) -> Iterator[BatchDict]:
        """Flat batches of the rollout by the names of :mod:`rlstore.storage`: tensors ``[mini_batch_size, ...]``.

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rows in each; None divides all rows evenly. No row occurs twice in an epoch.
            num_epochs: Epochs, each with its own permutation.
            shuffle: False serves the rows in temporal order.
            reuse: Gather once, and yield the same dicts and tensors, in the same order, in every epoch. In-place
                changes to a batch are then seen in the next epoch.

        Yields:
            Dicts, with the row ids as ``rows``.

        Raises:
            NotReadyError: (a RuntimeError) if nobody has written the returns and advantages of this rollout.
        """
        size = self._batch_rows(num_mini_batch, num_epochs, mini_batch_size)
        self._require_targets()
        how: dict[str, Any] = {"shuffle": shuffle, "reuse": reuse, "with_rows": True}
        yield from self._counted(self._serve(self._word_sources, num_mini_batch, size, num_epochs, **how), size)

    def _count_rows(self) -> int:
        """The rows that batches are made of."""
        return self._require_rows() * self._ready_ring().lanes

    def _row_ids(self) -> Tensor | None:
        """Their ids, int64 ``[rows]``; None if they are all that are held."""
        return None

    def _batch_rows(self, count: int, num_epochs: int, size: int | None = None) -> int:
        """The rows of each of ``count`` mini-batches, once all numbers are checked."""
        held = self._count_rows()
        given = {"the number of mini-batches": count, "num_epochs": num_epochs}
        if size is not None and type(count) is int and count <= held:
            given["the rows of a mini-batch"] = size
        for name, value in given.items():
            if type(value) is not int or not 1 <= value < 2**63:
                check_positive("a batch generator", **{name: value})
        rows = held // count if size is None else size
        if count > held or count * rows > held:
            most, of = (held, "") if size is None else (held // size, f" of {size} rows")
            raise InvalidInputError(
                f"{count} mini-batches{of} were asked for; there are {held} rows, enough for at most {most}"
            )
        return rows

    def _serve(
        self,
        sources: Callable[[int], Sources],
        count: int,
        size: int,
        num_epochs: int = 1,
        *,
        shuffle: bool = True,
        reshuffle: bool = True,
        reuse: bool = False,
        with_rows: bool = False,
        observations_as: torch.dtype | None = None,
        make: Callable[..., Any] = dict,
    ) -> Iterator[Any]:
        """Mini-batches of ``size`` rows, as the sources are when each epoch starts.

        Args:
            sources: Returns the blocks to gather from, of the steps that it is asked for.
            count: Mini-batches in each epoch.
            size: Rows in each.
            num_epochs: Epochs.
            shuffle: False for the order of time.
            reshuffle: A new order for every epoch.
            reuse: Gather the first epoch only.
            with_rows: Serve the row ids as ``rows``.
            observations_as: The dtype to serve the first of the sources as; None for its own.
            make: Makes a batch of its parts; see :func:`flatten`.
        """
        if reuse:
            how: dict[str, Any] = {"with_rows": with_rows, "observations_as": observations_as, "make": make}
            yield from repeated(self._serve(sources, count, size, shuffle=shuffle, **how), num_epochs)
            return
        ring, steps = self._ready_ring(), self._require_rows()
        self._outputs.begin()
        held, wanted, served = self._count_rows(), count * size, self._row_ids()
        if shuffle and reshuffle:
            orders = epoch_orders(held, wanted, self._generator, num_epochs)
        else:
            orders = repeat(epoch_rows(held, wanted, self._generator, shuffle=shuffle), num_epochs)
        for order in orders:
            rows = order if served is None else served[order]
            if ring.size < steps:
                raise NotReadyError("a new rollout was started while a generator was still serving the one before")
            leaves, dtypes, build = self._parts(sources, steps, size, observations_as, make)
            batches = gather_batches(leaves, rows, count, dtypes, self._outputs)
            if with_rows:
                own_rows = torch.unsafe_split(rows.clone(), size)
                for tensors, ids in zip(batches, own_rows, strict=True):
                    yield build(tensors, rows=ids)
            else:
                yield from map(build, batches)

    def _parts(
        self,
        sources: Callable[[int], Sources],
        steps: int,
        size: int,
        observations_as: torch.dtype | None,
        make: Callable[..., _Batch],
    ) -> tuple[tuple[Tensor, ...], tuple[torch.dtype, ...], Callable[..., _Batch]]:
        """What to gather, the dtypes to serve it in, and what builds a batch: arguments as for :meth:`_serve`."""
        ring, form = self._current_ring(), (make, steps, size, observations_as)
        known = ring.derived.get(form)
        if known is not None:
            return known  # type: ignore[no-any-return]
        leaves, build = flatten(sources(steps), torch.Size((size,)), make)
        dtypes = [leaf.dtype for leaf in leaves]
        if observations_as is not None:
            first = len(self._observations.paths)
            dtypes[:first] = [observations_as] * first
        parts = leaves, tuple(dtypes), build
        # What is no block itself but made of one may be another in the next epoch.
        if {id(block) for block in ring.blocks.values()}.issuperset(map(id, leaves)):
            ring.derived[form] = parts
        return parts

    # ---------------------------------------------------------------------------------------------- a look inside

    @guarded
    def _held_steps(self) -> HeldSteps:
        return NoSteps(type(self).__name__) if self._ring is None else RolloutSteps(self, self._ring)

    def _step_fields(self) -> dict[str, StepField]:
        """The fields of the steps that are held, by the words of the ten methods."""
        scalars = {"terminated", "truncated", *(field.name for field in self._extra if not field.shape)}
        for column in self._columns.values():
            is_number = column.form == "actions" and not any(field.shape for field in column.fields)
            scalars |= {column.word} if is_number or column.form in ("scalar", "flag") else set()
        fields = {}
        for word, (structure, leaves) in self._word_sources(self._ready_ring().size, whole=True).items():
            is_scalar = word in scalars and leaves[0].shape[2:] == (1,)
            fields[word] = StepField(leaves, (structure or _PLAIN).build, is_scalar)
        return fields

    def _first_begins(self) -> Tensor:
        """Whether the first step is known to begin an episode, bool ``[envs]``."""
        return torch.zeros(self._ready_ring().lanes, dtype=torch.bool, device=self._torch_device)

    def _after_newest(self) -> list[Tensor] | None:
        """The leaves of the observations after the newest step; None if they are not known."""
        return self._following()

    # ---------------------------------------------------------------------------------------------- all data

    @guarded
    def get_all_buffer_data(self, data_to_cpu: bool = False) -> BatchDict:
        """Copies of everything held, ``[steps, envs, ...]`` by the names of :mod:`rlstore.storage`.

        Args:
            data_to_cpu: Return the copies on the CPU, wherever the storage is.
        """
        if self._ring is None or self._ring.size == 0:
            return {}
        rows = self._ring.size
        data = {
            word: leaves[0] if structure is None else structure.build(leaves, (rows, self._ring.lanes))
            for word, (structure, leaves) in self._word_sources(rows, whole=True).items()
        }
        device = "cpu" if data_to_cpu else self._torch_device
        return {word: copied(value, device) for word, value in {**data, **self._besides(rows)}.items()}

    def _besides(self, rows: int) -> dict[str, Any]:
        """What ``get_all_buffer_data`` returns besides the columns."""
        return {}

    @guarded
    def insert_data_slice(self, new_data: Sample) -> None:
        """Replace everything held with ``new_data``, of the form that ``get_all_buffer_data`` returns.

        The data count as a rollout that no learner has used yet.
        """
        known = self._known_words()
        computed = [column.word for column in self._columns.values() if column.computed]
        needed = ["observations"] if new_data else []
        check_names(new_data, "new_data", type(self).__name__, [*known, *computed, *self._data_words], needed)
        twin = copy.deepcopy(self)
        twin.reset()
        if new_data:
            samples = {name: value for name, value in new_data.items() if name in known}
            steps = len(walk(new_data["observations"])[0][1])
            if steps > self.max_size:
                raise InvalidInputError(
                    f"new_data has {steps} steps; there is room for {self.max_size}. Nothing was changed."
                )
            for t in range(steps):
                twin.insert_transition({name: at_step(value, t, steps, name) for name, value in samples.items()})
            for name in computed:
                if name in new_data:
                    twin._restore_block(name, new_data[name], steps)
                    twin._targets.came_from_elsewhere()
            twin._restore(new_data)
        self.__dict__ = {**twin.__dict__, "_guard": self._guard, "_journal": self._journal}

    def _restore_block(self, name: str, value: Any, rows: int) -> None:
        """Put values that are not part of a row back into the first ``rows`` of a block."""
        block = self._ready_ring().blocks[name][:rows]
        given = as_tensor(value, name)
        if given.numel() != block.numel() or given.shape[:2] != block.shape[:2]:
            raise InvalidInputError(
                f"{name} is {tuple(given.shape)}, and {tuple(block.shape)} is needed. Nothing was changed."
            )
        block.copy_(given.reshape(block.shape))

    @guarded
    def reset(self) -> None:
        """Remove all data and set all tensors to zero."""
        self._observation_view = None
        if self._ring is not None:
            self._ring.zero()
        self._spent = False

    @guarded
    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change a parameter of the storage, an attribute of the algorithm, or both where both have it.

        Parameters of the storage are a discount, a lambda, and (while the storage is empty) the number of steps. The
        algorithm is the one given to the factory's function, and the one that ``before_gradients`` was last called
        with. It may have the discount as ``gamma`` or ``discount``, and the lambda as ``lam`` or ``gae_lambda``.

        Args:
            parameter_name: Its name.
            new_parameter_value: Its new value.

        Raises:
            UnknownParameterError: (an AttributeError and a ValueError) if neither has it.
            InvalidInputError: (a ValueError) if the storage refuses the value. Nothing was changed.
        """
        self._change(parameter_name, new_parameter_value)

    def _checks(self) -> Mapping[str, Check]:
        return self._parameters

    def _same_as(self, name: str) -> Sequence[str]:
        return next((names for names in (_GAMMAS, _LAMBDAS) if name in names), (name,))

    def _apply(self, name: str, value: Any) -> None:
        if self._parameters[name] is fraction:
            setattr(self, f"_{name}", value)
            return
        require_empty(len(self), name)
        if self._ring is not None:
            self._ring = self._ring.resized(value)
        self._observation_view, self._handed_lists, self._max_size = None, {}, value

    # ---------------------------------------------------------------------------------------------- save and load

    def _saved_options(self) -> dict[str, Any]:
        """Settings that snapshots of earlier versions do not have, where they are not as in those."""
        options = zip(SAVED_OPTIONS, (describe_extra_fields(self._extra), self._allows_nonfinite), strict=True)
        return {name: value for name, value in options if value}

    @classmethod
    def _saved_fields(cls, settings: Mapping[str, Any]) -> tuple[int, int, list[Field]]:
        """Of settings: the steps, the environments, and the fields of observations and actions; none if not known."""
        raise NotImplementedError

    @classmethod
    def _check_sizes(cls, settings: Mapping[str, Any], reader: SnapshotReader) -> None:
        # Blocks are saved in full, so each is as large in memory as in the file.
        steps, lanes, fields = cls._saved_fields(settings)
        for field in fields:
            nbytes = steps * lanes * math.prod(field.shape) * field.dtype.itemsize
            reader.room.charge(nbytes, f"{field.name} in {steps:,} steps of {lanes:,} environments")
        reader.room.charge(steps * lanes * _SCALAR_BYTES, f"{steps:,} steps of {lanes:,} environments")

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        # Blocks are saved in full: what a new rollout has not yet overwritten can still be read.
        counted = {"samples": self._samples} if self._samples else {}  # which earlier versions do not know
        numbers: dict[str, Any] = {"spent": self._spent, **counted}
        if self._ring is None:
            return numbers, {}
        ring, computed = self._current_ring(), self._targets.computed
        if 0 < computed < ring.size:
            numbers["computed"] = computed  # likewise; otherwise the blocks tell
        return {**numbers, "ring": ring.counters()}, dict(ring.blocks)

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        self._spent, self._samples = bool(numbers["spent"]), saved_samples(type(self).__name__, numbers)
        if self._ring is not None:
            self._ring.set_counters(numbers["ring"])
            for name, block in self._ring.blocks.items():
                reader.read_rows(name, block)
            computed = check_count("a snapshot", "computed", numbers.get("computed", 0))
            self._targets.came_from_elsewhere(min(computed, self._ring.size))


def flatten(
    sources: Sources, batch_size: torch.Size, make: Callable[..., _Batch]
) -> tuple[tuple[Tensor, ...], Callable[..., _Batch]]:
    """The leaves of the sources, contiguous, and what builds a batch of as many tensors.

    Args:
        sources: The sources by the names of the parts of a batch.
        batch_size: Of nested parts.
        make: A class whose ``_fields`` are the names that it takes by position, in this order; or one that takes parts
            by keyword. The builder takes further parts by keyword too.
    """
    fields: tuple[str, ...] = getattr(make, "_fields", ())
    names = sorted(sources, key=lambda name: fields.index(name) if name in fields else len(fields))
    by_position = sum(name == field for name, field in zip(names, fields, strict=False))
    leaves: list[Tensor] = []
    nests: list[tuple[Callable[..., Any], int, int]] = []
    for name in names:
        structure, part = sources[name]
        if structure is not None and structure.paths != ((),):  # more than a single tensor
            nests.insert(0, (structure.build, len(leaves), len(leaves) + len(part)))
        leaves.extend(part)
    keywords = names[by_position:]

    def build(tensors: Sequence[Tensor], **more: Any) -> _Batch:
        parts: list[Any] = list(tensors)
        for nest, first, last in nests:  # from the last to the first, so that places stay as they are
            parts[first:last] = (nest(parts[first:last], batch_size),)
        if not keywords and not more:
            return make(*parts)
        return make(*parts[:by_position], **dict(zip(keywords, parts[by_position:], strict=True)), **more)

    return tuple([leaf.contiguous() for leaf in leaves]), build


def repeated(batches: Iterator[_Batch], epochs: int) -> Iterator[_Batch]:
    """The batches of one epoch, and the same ones in every further epoch."""
    kept = []
    for batch in batches:
        kept.append(batch)
        yield batch
    for _ in range(epochs - 1):
        yield from kept


def _is_ready(last_values: Any, ring: Ring) -> bool:
    """True for values that a kernel can read as they are."""
    return count_readable(last_values, ring.blocks["rewards"]) == ring.lanes and not last_values.requires_grad
