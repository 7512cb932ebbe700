"""What the on-policy storages share: a rollout of all environments, turned into batches through the ten methods."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlstore.engine.batches.gather import gather_batches
from rlstore.engine.batches.select import epoch_orders
from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.rows.ring import Ring
from rlstore.engine.rows.schema import Field, Structure, as_tensor, walk
from rlstore.errors import InvalidInputError, NotReadyError, UnknownParameterError
from rlstore.storage import BatchDict, Sample, Storage

_Any = TypeVar("_Any")


class OnPolicyStorage(Storage):
    """A rollout of ``max_size`` steps, and the ten methods on it.

    A subclass says what a sample is (:meth:`_insert`), which columns there are (:meth:`_columns`), and how targets are
    made (:meth:`_compute`).
    """

    # What update_storage_parameter may change.
    _fractions: ClassVar[tuple[str, ...]] = ()
    _size_name: ClassVar[str] = ""
    # What get_all_buffer_data gives and a sample does not hold.
    _data_names: ClassVar[tuple[str, ...]] = ("returns", "advantages")

    _observations: Structure
    _observation_view: Any = None  # the observations as a caller sees them; None until asked for
    _handed_lists: dict[str, list[Tensor]]  # lists of blocks as a caller sees them
    _spent = False  # the rollout was learnt from: the next sample begins a new one

    # ---------------------------------------------------------------------------------------------- for subclasses

    @property
    @abstractmethod
    def _sample_names(self) -> tuple[str, ...]:
        """The names that a sample may hold."""

    @abstractmethod
    def _allocate_for(self, sample: Sample) -> None:
        """Make a ring for samples like this one."""

    @abstractmethod
    def _insert(self, sample: Sample) -> None:
        """Write a sample whose names are already checked."""

    @abstractmethod
    def _check(self, sample: Sample) -> None:
        """Refuse a sample that cannot be written, and write nothing."""

    @abstractmethod
    def _columns(self, rows: int) -> dict[str, Any]:
        """The first ``rows`` steps by the names of the vocabulary: ``[rows, envs, ...]`` tensors and nests of them."""

    @abstractmethod
    def _apart(self, rows: int) -> dict[str, Any]:
        """What ``get_all_buffer_data`` gives besides the columns."""

    @abstractmethod
    def _restore(self, data: Sample) -> None:
        """Put back what :meth:`_apart` gives and a sample does not hold."""

    @abstractmethod
    def _following(self) -> list[Tensor]:
        """The leaves of the observations that follow the newest step."""

    @abstractmethod
    def _compute(self, last_values: Tensor, gamma: float, lam: float) -> None:
        """Make ``returns`` and ``advantages``."""

    @abstractmethod
    def _discounts(self) -> tuple[float, float]:
        """The storage's own gamma and lambda."""

    def _begin_rollout(self) -> None:
        self._ready_ring().restart()
        self._spent = False

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

    # ---------------------------------------------------------------------------------------------- observations

    def _view_observations(self) -> Any:
        ring = self._ready_ring()
        if self._observation_view is None:
            blocks = [ring.blocks[name] for name in self._observations.names]
            self._observation_view = self._observations.build(blocks, blocks[0].shape[:2])
        return self._observation_view

    def _bind_observations(self, value: Any) -> None:
        self._ready_ring().bind_all(self._observations.names, self._observations.leaves(value))
        self._observation_view = value
        self._follow_callers()

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
        for group in list(self._handed_lists) if self._handed_lists else ():
            handed = self._handed_lists.pop(group)
            names = [name for name in self._ready_ring().blocks if name.startswith(f"{group}[")]
            if len(names) != len(handed):
                raise InvalidInputError(f"{group} holds {len(names)} tensors and cannot become {len(handed)} of them")
            if not self._ready_ring().bind_all(names, handed):
                self._handed_lists[group] = handed

    def _fit_observations(self, value: Any) -> list[Tensor]:
        """The leaves of observations of one step, checked and copied: an environment may write over its own."""
        ring = self._ready_ring()
        fields = {column.field.name: column.field for column in ring.columns}
        return [
            fields[name].fit(leaf, ring.lanes, self._torch_device).clone()
            for name, leaf in zip(self._observations.names, self._observations.leaves(value), strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        self._follow_callers()
        return {**self.__dict__, "_observation_view": None, "_handed_lists": {}}

    # ---------------------------------------------------------------------------------------------- writing

    def init_tensors(self, sample: Sample) -> None:
        """Allocate the blocks for samples like this one. If they are there already, the sample must fit them."""
        self._check_names(sample)
        blank = dict(self.__dict__)
        try:
            if self._ring is None:
                self._allocate_for(sample)
            self._check(sample)
        except Exception:
            self.__dict__ = blank  # a sample that is refused leaves no shapes behind
            raise

    def insert_transition(self, sample: Sample) -> None:
        """Store one step of all environments, in the words of the vocabulary (see :mod:`rlstore.storage`).

        The first sample after ``after_gradients`` begins a new rollout. Which names a storage takes it says itself.
        """
        if self._ring is None:
            self.init_tensors(sample)
        self._check_names(sample)
        if self._spent:
            self._check(sample)  # before the old rollout is given up
            self._begin_rollout()
        self._insert(sample)

    def _check_names(self, sample: Sample) -> None:
        unknown = [name for name in sample if name not in self._sample_names]
        if unknown:
            raise InvalidInputError(
                f"a sample for {type(self).__name__} cannot hold {unknown}; it takes {list(self._sample_names)}. "
                "Nothing was written."
            )
        if "observations" not in sample:
            raise InvalidInputError("a sample needs 'observations'. Nothing was written.")

    # ---------------------------------------------------------------------------------------------- learning

    def before_gradients(self, actor: Any = None, algo: Any = None) -> None:
        """Make returns and advantages, with the value of what follows the newest step from the actor.

        Args:
            actor: A :class:`~rlstore.storage.Critic`; without one, the actor given to the factory's function.
            algo: Its ``gamma`` (or ``discount``) and ``lam`` (or ``gae_lambda``) are taken where it has them; else the
                storage's own.
        """
        self._require_rows()
        actor = actor if actor is not None else self._given_actor.value
        algo = algo if algo is not None else self._given_algorithm.value
        if actor is None:
            raise NotReadyError(
                "before_gradients() needs an actor with get_values(observations): give it here, or to the factory"
            )
        with torch.no_grad():
            following = self._observations.build(self._following(), (self._ready_ring().lanes,))
            last_values = actor.get_values(following)
        gamma, lam = self._discounts()
        self._compute(last_values, *_algorithm_discounts(algo, gamma, lam))

    def _fit_last_values(self, last_values: Any) -> Tensor:
        """The values after the last step, ``[envs]`` or ``[envs, 1]``, ready for a kernel."""
        ring = self._ready_ring()
        if (
            isinstance(last_values, Tensor)
            and last_values.shape in ((ring.lanes,), (ring.lanes, 1))
            and last_values.dtype == torch.float32
            and last_values.device == ring.device
            and last_values.is_contiguous()
            and not last_values.requires_grad
        ):
            return last_values
        field = Field("last_values", (), torch.float32, f"{ring.lanes} environments")
        return field.fit(last_values, ring.lanes, ring.device)

    def after_gradients(
        self, actor: Any = None, algo: Any = None, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The rollout is learnt from: the next sample begins a new one.

        It may also be called as ``after_gradients(batch, info)``.

        Returns:
            ``info`` with ``storage_size``, the transitions held.
        """
        if info is None:
            info = algo if isinstance(algo, dict) else {}
        self._spent = True
        info["storage_size"] = len(self)
        return info

    def generate_batches(  # type: ignore[override]
        self,
        num_mini_batch: int,
        mini_batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        *,
        reuse: bool = False,
    ) -> Iterator[BatchDict]:
        """Flat batches of the rollout, in the words of the vocabulary: tensors ``[mini_batch_size, ...]``.

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rows in each; None shares the rows out. No row comes twice in an epoch.
            num_epochs: Epochs, each with an order of its own.
            shuffle: False serves the rows in the order of time.
            reuse: Gather the first epoch only, and yield the same dicts and tensors, in the same order, in every
                epoch. What you change in them in place you will meet again.

        Yields:
            Dicts, with the row ids as ``rows``.
        """
        if reuse:
            check_positive("generate_batches()", num_epochs=num_epochs)
            yield from repeated(
                OnPolicyStorage.generate_batches(self, num_mini_batch, mini_batch_size, 1, shuffle), num_epochs
            )
            return
        held = self._require_rows() * self._ready_ring().lanes
        size = self._batch_rows(held, num_mini_batch, mini_batch_size)
        check_positive("generate_batches()", num_epochs=num_epochs)

        structures: dict[str, Structure] = {}

        def sources(steps: int) -> tuple[Tensor, ...]:
            columns = self._columns(steps)
            structures.update({name: Structure.of(column, name) for name, column in columns.items()})
            leaves = [leaf for name, column in columns.items() for leaf in structures[name].leaves(column)]
            return tuple(leaf.contiguous() for leaf in leaves)

        for rows, batches in self._serve(sources, num_mini_batch, size, num_epochs, shuffle=shuffle):
            own_rows = torch.unsafe_split(rows.clone(), size)
            for index, leaves in enumerate(batches):
                remaining = iter(leaves)
                batch: BatchDict = {
                    name: structure.build([next(remaining) for _ in structure.paths], (size,))
                    for name, structure in structures.items()
                }
                batch["rows"] = own_rows[index]
                yield batch

    @staticmethod
    def _batch_rows(held: int, count: int, size: int | None = None) -> int:
        """The rows of each of ``count`` mini-batches out of ``held``."""
        check_positive("a batch generator", **{"the number of mini-batches": count})
        if size is None:
            size = held // count
        elif count <= held:
            check_positive("a batch generator", **{"the rows of a mini-batch": size})
        if count > held or count * size > held:
            raise InvalidInputError(
                f"{count} mini-batches of {max(size, 1)} rows were asked for, and there are {held} rows"
            )
        return size

    def _serve(
        self,
        sources: Callable[[int], tuple[Tensor, ...]],
        count: int,
        size: int,
        num_epochs: int,
        *,
        shuffle: bool = True,
        reshuffle: bool = True,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> Iterator[tuple[Tensor, Iterator[tuple[Tensor, ...]]]]:
        """Epochs: the row ids of each, and its mini-batches of ``size`` rows, as the sources hold them now.

        Args:
            sources: Gives the blocks to gather from, of the steps that it is asked for.
            count: Mini-batches in each epoch.
            size: Rows in each.
            num_epochs: Epochs.
            shuffle: False for the order of time.
            reshuffle: A new order for every epoch.
            dtypes: The dtypes to serve; None for those of the sources.
        """
        ring, steps = self._ready_ring(), self._require_rows()
        self._outputs.begin()
        anew = shuffle and reshuffle
        rows = None
        epochs = num_epochs if anew else 1
        orders = epoch_orders(steps * ring.lanes, count * size, self._generator, epochs, shuffle=shuffle)
        for _ in range(num_epochs):
            if ring.size < steps:
                raise NotReadyError("the rollout was begun anew while a generator was still serving the one before")
            if rows is None or anew:
                rows = next(orders)
            blocks = sources(steps)
            types = dtypes or [block.dtype for block in blocks]
            yield rows, gather_batches(blocks, rows, count, types, self._outputs.empty)

    # ---------------------------------------------------------------------------------------------- the whole

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> BatchDict:
        """Copies of everything held, ``[steps, envs, ...]`` by the names of the vocabulary."""
        if self._ring is None or self._ring.size == 0:
            return {}
        rows = self._ring.size
        data = {**self._columns(rows), **self._apart(rows)}
        return {name: _copied(value, "cpu" if data_to_cpu else self._torch_device) for name, value in data.items()}

    def insert_data_slice(self, new_data: Sample) -> None:
        """Replace everything held with ``new_data``, of the form that ``get_all_buffer_data`` gives.

        The data count as a rollout that nobody has learnt from yet.
        """
        if not isinstance(new_data, Mapping):
            raise InvalidInputError(f"new_data is a {type(new_data).__name__}; give a dict. Nothing was changed.")
        unknown = [name for name in new_data if name not in (*self._sample_names, *self._data_names)]
        if unknown or (new_data and "observations" not in new_data):
            problem = f"cannot hold {unknown}" if unknown else "needs 'observations' [steps, envs, ...]"
            raise InvalidInputError(f"new_data for {type(self).__name__} {problem}. Nothing was changed.")
        twin = copy.deepcopy(self)
        twin.reset()
        if new_data:
            samples = {name: value for name, value in new_data.items() if name in self._sample_names}
            steps = len(walk(new_data["observations"])[0][1])
            if steps > self.max_size:
                raise InvalidInputError(
                    f"new_data has {steps} steps; there is room for {self.max_size}. Nothing was changed."
                )
            for t in range(steps):
                twin.insert_transition({name: _at_step(value, t, steps, name) for name, value in samples.items()})
            for name in ("returns", "advantages"):
                if name in new_data:
                    twin._restore_block(name, new_data[name], steps)
            twin._restore(new_data)
        self.__dict__ = twin.__dict__

    def _restore_block(self, name: str, value: Any, rows: int) -> None:
        """Put values that are no part of a row back into the first ``rows`` of a block."""
        block = self._ready_ring().first(name, rows)
        given = as_tensor(value, name)
        if given.numel() != block.numel() or given.shape[:2] != block.shape[:2]:
            raise InvalidInputError(
                f"{name} is {tuple(given.shape)}, and {tuple(block.shape)} is needed. Nothing was changed."
            )
        block.copy_(given.reshape(block.shape))

    def reset(self) -> None:
        """Make the storage empty, every tensor zero."""
        self._observation_view = None
        if self._ring is not None:
            self._ring.zero()
        self._spent = False

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change a discount, a lambda, or (while the storage is empty) the number of steps."""
        owner = type(self).__name__
        if parameter_name in self._fractions:
            check_fraction(owner, **{parameter_name: new_parameter_value})
            setattr(self, parameter_name, float(new_parameter_value))
        elif parameter_name == self._size_name:
            check_positive(owner, **{parameter_name: new_parameter_value})
            if len(self):
                raise NotReadyError(
                    f"{parameter_name} can change only while the storage is empty; it holds {len(self)} transitions. "
                    "Call reset() first. Nothing was changed."
                )
            self._resize(int(new_parameter_value))
        else:
            known = [*self._fractions, self._size_name]
            raise UnknownParameterError(
                f"{owner} has no parameter {parameter_name!r}; it has {known}. Nothing was changed."
            )

    def _resize(self, steps: int) -> None:
        if self._ring is not None:
            self._ring = self._ring.resized(steps)
        self._observation_view = None
        self._handed_lists = {}
        self.max_size = steps


def repeated(batches: Iterator[_Any], epochs: int) -> Iterator[_Any]:
    """The batches of one epoch, and the same ones in every further epoch."""
    kept = []
    for batch in batches:
        kept.append(batch)
        yield batch
    for _ in range(epochs - 1):
        yield from kept


def _algorithm_discounts(algo: object, gamma: float, lam: float) -> tuple[float, float]:
    for name in ("gamma", "discount"):
        gamma = getattr(algo, name, gamma)
    for name in ("lam", "gae_lambda"):
        lam = getattr(algo, name, lam)
    check_fraction("before_gradients()", **{"the algorithm's gamma": gamma, "the algorithm's lambda": lam})
    return float(gamma), float(lam)


def _copied(value: Any, device: str | torch.device) -> Any:
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(part, device) for part in value)
    copied = value.clone()
    return copied.to(device)


def _at_step(value: Any, t: int, steps: int, name: str) -> Any:
    """Entry t of a tensor, or of each tensor in a nest."""
    if value is None:
        return None
    is_list_of_tensors = isinstance(value, list) and all(part is None or isinstance(part, Tensor) for part in value)
    if isinstance(value, tuple) or is_list_of_tensors:
        return tuple(_at_step(part, t, steps, name) for part in value)
    if isinstance(value, dict):
        return {key: _at_step(part, t, steps, name) for key, part in value.items()}
    if len(value) != steps:
        raise InvalidInputError(f"{name} has {len(value)} steps and observations {steps}. Nothing was changed.")
    return value[t] if isinstance(value, (Tensor, TensorDictBase)) else as_tensor(value, name)[t]
