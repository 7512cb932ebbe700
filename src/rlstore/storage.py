"""Storage: the ten methods through which a trainer drives any storage, and what every storage shares.

Vocabulary
----------
The ten methods pass experience in dicts. A name means the same in every storage; ``N`` is the number of environments.
A scalar is accepted as ``[N]`` or ``[N, 1]`` and served as ``[..., 1]``:

======================= ================================================================================================
``observations``        what the agent observed before acting: a tensor ``[N, ...]``, or a dict or TensorDict of them
``actions``             the actions taken
``rewards``             the rewards received
``terminated``          the episode ended with this step in a terminal state: no bootstrap
``truncated``           the episode was cut off after this step, for instance by a time limit
``next_observations``   the observations after the step (after an automatic reset: the first of the new episode)
``final_values``        the value of the observation in which an episode was truncated; NaN where it is not known
``final_observations``  the observations in which episodes ended, where ``next_observations`` are already of the next
``values``              the critic's estimate for ``observations``
``log_probs``           the log-probability of ``actions`` under the policy that chose them
``distribution_params`` a tuple of the parameters of that policy's distribution
``adv_preds``           the actor's own prediction of the advantage (DAAC)
``privileged_actions``  the teacher's actions (distillation)
``hidden_states``       the recurrent states before the step, ``(actor, critic)``, each None, a tensor or a tuple
``returns``             value targets, computed by ``before_gradients``
``advantages``          computed by ``before_gradients``
``masks``               True where a padded sequence holds data, bool ``[steps, trajectories]``
``step_masks``          False for reset steps of next-step autoreset, bool ``[steps, N]``, beside ``masks``
``weights``             importance weights of a batch that was not drawn uniformly
``rows``                the row ids of a batch, int64, by which priorities are updated
``last_observations``   the observations after the newest step, only in ``get_all_buffer_data``
``reset_steps``         True for reset steps of next-step autoreset, not in batches
any other name          a field of the user, declared in ``extra_fields``: required with every step, stored and served
                        with the declared shape and dtype
======================= ================================================================================================
"""

from __future__ import annotations

import copy
import copyreg
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from rlstore.dataset import StepDataset
from rlstore.engine.checks import check_counted, check_device, check_path, check_positive, check_seed
from rlstore.engine.disk.background import BackgroundSave
from rlstore.engine.disk.journal import Journal, RunningJournal, as_journal
from rlstore.engine.disk.manifest import NAME
from rlstore.engine.disk.snapshot import (
    Content,
    Rows,
    SnapshotReader,
    SnapshotWriter,
    generator_state,
    restore_generator,
)
from rlstore.engine.guard import Guard, new_guard, uninterrupted
from rlstore.engine.measures import Measures, Number, flat, on_host
from rlstore.engine.memory.capacity import enough_memory
from rlstore.engine.memory.tensors import Recycler
from rlstore.engine.rows.ring import Ring
from rlstore.episodes import Episodes, HeldSteps, check_names, row_ids
from rlstore.errors import DiskFullError, DoesNotFitError, InvalidInputError, SnapshotError, StorageError
from rlstore.parameters import Check, Yielding, no_parameter

Sample = Mapping[str, Any]
BatchDict = dict[str, Any]
_AnyStorage = TypeVar("_AnyStorage", bound="Storage")


def _remade_generator(device: torch.device, state: Tensor) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


if torch.Generator.__reduce__ is object.__reduce__:  # torch before 2.5 neither copies nor pickles generators
    copyreg.pickle(torch.Generator, lambda it: (_remade_generator, (it.device, it.get_state())))


class Critic(Protocol):
    """What ``before_gradients`` needs of an actor: the value of the observations after the newest step."""

    def get_values(self, observations: Any) -> Tensor:
        """``V(observations)``, ``[N]`` or ``[N, 1]``."""
        ...


class Storage(ABC):
    """The base class of every storage: ten methods to implement, and nothing that a subclass must call.

    A subclass that has an ``__init__`` of its own, and does not call this one, may use any name for its attributes.

    Args:
        size: Capacity along the time axis.
        device: The device of the data.
        actor: The actor that ``before_gradients`` uses when it is called without one.
        algorithm: The algorithm whose discounts it uses when it is called without one, and whose attributes
            ``update_storage_parameter`` changes.
        *args: For subclasses.
        seed: The seed of the storage's own generator; None draws one from torch's default generator.
    """

    max_size: int
    _ring: Ring | None = None
    _journal: RunningJournal | None = None
    _samples = 0  # entries of all batches that were served

    def __init__(
        self,
        size: int,
        device: str | torch.device = "cpu",
        actor: Any = None,
        algorithm: Any = None,
        *args: Any,
        seed: int | None = None,
    ) -> None:
        owner = type(self).__name__
        check_positive(owner, size=size)
        self.max_size = int(size)
        self.device = device
        self._torch_device = check_device(owner, device)
        # What is saved. An integer, which torch accepts too, would not be read back.
        self._given_device = device if isinstance(device, (str, torch.device)) else self._torch_device
        self._give(actor, algorithm)
        self._generator = torch.Generator(self._torch_device)
        self._outputs = Recycler()
        self._guard = new_guard()
        self.seed(seed)

    def _give(self, actor: Any, algorithm: Any) -> None:
        """Set the actor and the algorithm for ``before_gradients()`` without arguments."""
        self._given_actor, self._given_algorithm = Shared(actor), Shared(algorithm)

    def _see(self, algorithm: Any) -> None:
        """Remember an algorithm for ``update_storage_parameter``; weakly, because it may hold the storage."""
        if algorithm is not None:
            try:
                seen: Callable[[], Any] = weakref.ref(algorithm)
            except TypeError:  # of a class without weak references
                seen = lambda: algorithm  # noqa: E731
            self._given_algorithm = Shared(self._given_algorithm.value, seen)

    def seed(self, seed: int | None = None) -> None:
        """Seed the storage's generator, from which all its random numbers come; None draws a seed from torch's."""
        number = check_seed(type(self).__name__, seed)
        with self._guarding():
            self._generator.manual_seed(number)

    def register_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register the storage's generator with a CUDA graph; call it before the graph captures the storage's work.

        Each replay then draws new random numbers, as another call would::

            graph = torch.cuda.CUDAGraph()
            storage.register_graph(graph)
            with torch.cuda.graph(graph):
                storage.compute_returns(last_values, 0.99, 0.95)
                batches = list(storage.mini_batch_generator(4, 5))
            graph.replay()  # with the current contents of the storage and of last_values

        Everything but adding can be captured, on storages whose data are on CUDA. Run the same work once before, so
        that its kernels are compiled.
        """
        generator = self.__dict__.get("_generator")
        with self._guarding():
            if generator is not None and generator.device.type == "cuda":
                graph.register_generator_state(generator)

    # ---------------------------------------------------------------------------------------------- the ten methods

    @classmethod
    @abstractmethod
    def create_factory(cls, size: int, *args: Any) -> Callable[..., Storage]:
        """A function ``f(device, actor, algorithm)`` that creates storages.

        Args:
            size: Capacity along the time axis.
            *args: For subclasses.
        """

    @abstractmethod
    def init_tensors(self, sample: Sample, *args: Any) -> None:
        """Allocate the data tensors from a sample of one environment step; the sample itself is not stored.

        Args:
            sample: One step, by the names of the vocabulary.
            *args: For subclasses.
        """

    @abstractmethod
    def get_all_buffer_data(self, data_to_cpu: bool = False, *args: Any) -> BatchDict:
        """All data stored now, as copies, on the CPU if ``data_to_cpu``.

        Args:
            data_to_cpu: Return the copies on the CPU, wherever the storage is.
            *args: For subclasses.
        """

    @abstractmethod
    def insert_data_slice(self, new_data: Sample, *args: Any) -> None:
        """Add data in the form of ``get_all_buffer_data``; each storage documents whether it replaces or appends.

        Args:
            new_data: The data, by the names of the vocabulary.
            *args: For subclasses.
        """

    @abstractmethod
    def insert_transition(self, sample: Sample, *args: Any) -> None:
        """Store one environment step.

        Args:
            sample: The step, by the names of the vocabulary.
            *args: For subclasses.
        """

    @abstractmethod
    def before_gradients(self, actor: Any, algo: Any, *args: Any) -> None:
        """Prepare the data for an update of the actor.

        Args:
            actor: The actor, with ``get_values``.
            algo: The algorithm, with its discounts.
            *args: For subclasses.
        """

    @abstractmethod
    def after_gradients(self, actor: Any, algo: Any, info: dict[str, Any], *args: Any) -> dict[str, Any]:
        """Follow up on an update of the actor.

        Args:
            actor: The actor.
            algo: The algorithm.
            info: What a trainer reports of the update.
            *args: For subclasses.

        Returns:
            ``info``, with the storage's own entries added.
        """

    @abstractmethod
    def generate_batches(
        self,
        num_mini_batch: int,
        mini_batch_size: int,
        num_epochs: int = 1,
        *args: Any,
    ) -> Iterator[BatchDict]:
        """Batches to learn from: ``num_mini_batch`` of ``mini_batch_size`` in each of ``num_epochs``.

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rows in each batch.
            num_epochs: Epochs.
            *args: For subclasses.
        """

    @abstractmethod
    def reset(self, *args: Any) -> None:
        """Remove all data.

        Args:
            *args: For subclasses.
        """

    @abstractmethod
    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any, *args: Any) -> None:
        """Change an attribute of the algorithm, a parameter of the storage, or both where both have the name.

        The algorithm is the one given to the factory's function, and the one that ``before_gradients`` was last called
        with. If one of them refuses the value, nothing is changed.

        Args:
            parameter_name: Its name.
            new_parameter_value: Its new value.
            *args: For subclasses.
        """

    def _checks(self) -> Mapping[str, Check]:
        """The parameters of the storage that can be changed, and the check of each."""
        return {}

    def _apply(self, name: str, value: Any) -> None:  # noqa: B027 - a storage need not have parameters
        """Change one of :meth:`_checks` to a checked value: entirely, or not at all if it raises."""

    def _same_as(self, name: str) -> Sequence[str]:
        """The names under which an algorithm may have a parameter."""
        return (name,)

    def _change(self, name: str, value: Any) -> None:
        """:meth:`update_storage_parameter`, of storages that have :meth:`_checks` and :meth:`_apply`."""
        checks, names, given = self._checks(), self._same_as(name), self._given_algorithm
        algorithms = [algorithm for algorithm in (given.value, given.seen()) if algorithm is not None]
        if name not in checks and not any(hasattr(algorithm, name) for algorithm in algorithms):
            raise no_parameter(self, name, checks, next(iter(algorithms), None))
        own = next((other for other in names if other in checks), None)
        checked = None if own is None else checks[own](type(self).__name__, own, value)
        undo: list[tuple[Any, str, Any]] = []
        try:
            for algorithm in algorithms:
                for other in names:
                    if hasattr(algorithm, other):
                        before = getattr(algorithm, other)
                        setattr(algorithm, other, value)
                        undo.append((algorithm, other, before))
            if own is not None:
                self._apply(own, checked)
        except BaseException:
            for algorithm, other, before in reversed(undo):
                setattr(algorithm, other, before)
            raise

    def _assign(self, name: str, value: Any) -> None:
        """An argument of the storage is assigned as an attribute: see :class:`rlstore.parameters.Argument`."""
        with self._guard:
            checks = self._checks()
            if name in checks:
                self._change(name, value)
            elif not (isinstance(value, (int, float, str)) and value == getattr(self, name)):
                raise no_parameter(self, name, checks)  # subclasses may assign what they have passed on

    def _guarding(self) -> AbstractContextManager[None]:
        """The guard; nothing in a subclass that does not call ``__init__`` of this class."""
        guard = getattr(self, "_guard", None)  # not of __dict__: to ask for that makes each later access slower
        return guard if isinstance(guard, Guard) else nullcontext()

    def __deepcopy__(self: _AnyStorage, memo: dict[int, Any]) -> _AnyStorage:
        """A copy with memory of its own, as it is at one moment: other threads wait."""
        with self._guarding():
            reduced: Any = self.__reduce_ex__(2)
            twin: _AnyStorage = reduced[0](*reduced[1])
            memo[id(self)] = twin
            state = copy.deepcopy(reduced[2], memo)
            if hasattr(twin, "__setstate__"):
                twin.__setstate__(state)
            else:
                twin.__dict__.update(state)
        return twin

    # ---------------------------------------------------------------------------------------------- a look inside

    __iter__: Any = None  # Python would ask for rows 0, 1, 2..., which need not be those that are held

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        """Copies of the steps of some rows, by the names of the vocabulary: ``storage[batch.rows]["observations"]``.

        Everything that is stored of a step is there: extra fields, too, and ``next_observations`` where they are known.
        Values are as they were added: no n-step targets, no relabeled goals. Each begins with the axes of ``rows``;
        scalars are ``[..., 1]``, as in batches, and recurrent states ``[..., layers, hidden]``.

        Args:
            rows: Row ids: a number (then there is no leading axis), a list, an array or a tensor.

        Raises:
            RowNotHeldError: (an IndexError) if any of the rows is not held, or not any more.
            InvalidInputError: (a ValueError) if they are no whole numbers.
        """
        ids, steps = row_ids(rows, f"{type(self).__name__}[rows]"), self._held_steps()
        return steps.read(ids, steps.names)

    def held_rows(self) -> Tensor:
        """The ids of all rows that are held now, oldest first, int64 ``[len]`` on the CPU."""
        return self._held_steps().rows()

    def episodes(self) -> Episodes:
        """All episodes that are held now: which they are, how long, what they earned and how they ended.

        The listing reads no observations: of a million transitions it takes some milliseconds. What is in an episode is
        read when it is asked for. Where the data are on CUDA, the host waits for the device once.
        """
        steps = self._held_steps()
        return Episodes(steps, steps.listing())

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Write a page about what is held, to be opened in a browser: fields, episodes, priorities, what is odd.

        It is one file that loads nothing from elsewhere. Episodes can be opened in it, step by step; of a large storage
        the page holds the steps of some of them, and says so: it has at most 10 MB or so. The storage may be used
        meanwhile.

        Args:
            path: The file; one that is there is replaced. A link stays one: the file that it leads to is replaced.
            title: What the page calls the storage; None for the name of its class.

        Raises:
            InvalidInputError: (a ValueError) if a folder, a FIFO, a socket or a device is there, or there is no folder
                for it. Nothing was written.
            DoesNotFitError: (a MemoryError) if there is not enough memory to make it. Nothing was written.
        """
        # Only a storage that is looked at needs what draws the page.
        from rlstore.look.page import write_page
        from rlstore.look.subject import of_storage

        target = check_path("to_html()", "path", path, "a file")
        if title is not None and not isinstance(title, str):
            raise InvalidInputError(f"title is {title!r}; to_html() needs a string, or None. Nothing was written.")
        write_page(of_storage(self, title), target)

    def as_dataset(self, rows: Any = None, names: Sequence[str] | None = None) -> StepDataset:
        """Steps that are held now as a dataset of torch, for example for behavior cloning.

        A ``DataLoader`` with ``collate_fn=dict`` gathers each of its batches in one call. Steps that are overwritten
        later cannot be read any more: make another dataset then.

        Args:
            rows: The row ids of its entries, as ``episodes[mask].rows``; None for :meth:`held_rows`.
            names: Which fields it has, a list; None for all, as ``storage[rows]``.

        Raises:
            InvalidInputError: (a ValueError) for rows that are no list of ids, and names that are no list of fields.
        """
        owner, steps = type(self).__name__, self._held_steps()
        ids = steps.rows() if rows is None else row_ids(rows, f"{owner}.as_dataset()").cpu()
        if ids.dim() != 1:
            raise InvalidInputError(f"rows are {tuple(ids.shape)}; {owner}.as_dataset() needs a list of row ids")
        check_names(() if names is None else names, steps.names)
        return StepDataset(steps, ids, steps.names if names is None else tuple(names))

    def _held_steps(self) -> HeldSteps:
        """What episodes and rows are read from."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot show its episodes and rows. Implement _held_steps(), which returns an "
            "rlstore.episodes.HeldSteps."
        )

    # ---------------------------------------------------------------------------------------------- numbers

    def stats(self) -> dict[str, int | float]:
        """Numbers of the storage for a logger: how full it is, what came in and went out, returns, waits, losses.

        All are of one moment, and a name means the same in every storage; the page *A look inside* lists them::

            for name, value in storage.stats().items():
                writer.add_scalar(f"replay/{name}", value, step)

        Returns:
            Plain numbers by name. None is NaN or infinite: what is not known, as a mean return before an episode is
            over, is left out. Every reward that is held is read for it; a CUDA device is waited for once. Returns and
            lengths of a rollout are of the episodes that began and ended in it, not the score of a policy whose
            episodes are longer.
        """
        return flat(self._measured())

    def _measured(self) -> Measures:
        """:meth:`_measure` as plain numbers, with the lag of the journal."""
        with self._guarding():
            measures = self._measure()
            if self._journal is not None:
                measures.update(self._journal.measure(cast("Number", measures["inserts"])))
        return on_host(measures)

    def _measure(self) -> Measures:
        """What :meth:`stats` is made of; numbers may be on the device."""
        raise NotImplementedError(
            f"{type(self).__name__} has no stats(). Implement it: it returns a dict of numbers, by the names that "
            "other storages have for them."
        )

    def _count_inserts(self) -> int:
        """Transitions ever added, which is ``inserts`` of :meth:`stats`."""
        return 0

    # ---------------------------------------------------------------------------------------------- save and load

    @Yielding
    def journal(self) -> RunningJournal | None:
        """The storage's journal, with ``commit()``, ``close()``, ``path`` and ``error``; None if it has none."""
        return self._journal

    def _begin_journal(
        self, journal: str | os.PathLike[str] | Journal | None, loaded: SnapshotReader | None = None
    ) -> None:
        """Begin to commit, if there is a journal; the storage is complete. See :class:`RunningJournal`."""
        owner = type(self).__name__
        wanted = as_journal(owner, journal)
        if wanted is not None:
            self._journal = RunningJournal(owner, self, wanted, loaded)

    def __del__(self) -> None:
        if isinstance(self._journal, RunningJournal):  # a subclass may use the name for its own
            self._journal.leave(self)

    @overload
    def save(self, path: str | os.PathLike[str], background: Literal[False] = False) -> None: ...
    @overload
    def save(self, path: str | os.PathLike[str], background: Literal[True]) -> BackgroundSave: ...

    def save(self, path: str | os.PathLike[str], background: bool = False) -> BackgroundSave | None:
        """Save everything needed to resume exactly: data, counters, parameters, the generator.

        A snapshot is a folder of a JSON manifest and files of tensors. Saving to a folder with a snapshot replaces it;
        a crash leaves the old one or the new one, complete. Of replay, a save to the folder of the last one only writes
        the rows that were added since. The actor and the algorithm are not saved.

        Args:
            path: The folder: new, empty, or with a snapshot.
            background: Return at once, and write while the storage is used. What is saved is the state at the time of
                the call: rows of replay are copied before they are overwritten, everything else is copied at once.

        Returns:
            With ``background`` the save in progress, whose ``wait()`` raises what the save fails with.

        Raises:
            InvalidInputError: (a ValueError) if the folder holds something else, or is in use: by a journal, or by a
                save in the background that is not complete. Nothing was changed.
            DiskFullError: (an OSError) if the disk is full. The snapshot that was there still is.
        """
        check_path("save()", "path", path)
        if not isinstance(background, bool):
            raise InvalidInputError(f"background is {background!r}; save() needs True or False")
        return self._save(path, background=background)

    def _save(
        self, path: str | os.PathLike[str], *, background: bool, note: Mapping[str, Any] | None = None
    ) -> BackgroundSave | None:
        """:meth:`save`, with a ``note``: JSON that whoever loads the snapshot can read."""
        rows = None
        with ExitStack() as stack:
            try:
                with self._still():
                    content = self._content(copy=background, note=note)
                    writer = stack.enter_context(SnapshotWriter("save()", path))
                    content.rows = rows = self._rows_for(writer)
                    if rows is not None:
                        rows.hold()
                    if not background and self._changes_unasked():
                        writer.write(content)
                        return None
                if not background:
                    writer.write(content)
                    return None
                with uninterrupted():  # once its thread runs, the folder and the rows are its own
                    saving = BackgroundSave(writer, content)
                    rows = None
                    stack.pop_all()
            except BaseException:
                if rows is not None:
                    rows.close(None)  # if it was not written: whoever adds would wait for it
                raise
        return saving

    def _changes_unasked(self) -> bool:
        """Whether what is saved may change as soon as it need not be still, without a copy being made before."""
        return True

    def _still(self) -> AbstractContextManager[None]:
        """Nothing changes meanwhile."""
        return self._guarding()

    def _content(self, *, copy: bool, note: Mapping[str, Any] | None = None) -> Content:
        """What a snapshot of the state as it is now holds, but for :meth:`_rows_for`; the caller is in :meth:`_still`.

        Args:
            copy: Whether the state may change before it is written.
            note: See :meth:`_save`.
        """
        settings = self._settings()
        numbers, tensors = self._state()
        if "_generator" in self.__dict__:
            tensors = {**tensors, **generator_state(self._generator)}
        if copy:
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        # As it was given: "cuda" then means the current device of the process that loads it.
        device = self.__dict__.get("_given_device", getattr(self, "device", "cpu"))
        return Content(_saved_name(type(self)), str(device), settings, numbers, tensors, note or {})

    def _rows_for(self, writer: SnapshotWriter) -> Rows | None:
        """The rows that a folder does not hold yet; None if they are among the tensors of :meth:`_content`."""
        return None

    @classmethod
    def load(
        cls: type[_AnyStorage],
        path: str | os.PathLike[str],
        device: str | torch.device | None = None,
        folders: Mapping[str, str | os.PathLike[str]] | None = None,
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> _AnyStorage:
        """Load the storage that was saved in a folder.

        A snapshot is data: loading it runs no code that it chooses, reads and writes no other folder than those given
        here, and allocates no more than a storage of its size needs.

        Args:
            path: The folder.
            device: The device of the data; None for the one that the storage was created with: "cuda" then means the
                current CUDA device, "cuda:1" that one.
            folders: The other folders that the storage uses, by the argument that it was created with: ``path`` for
                ``memory="mapped"``, ``snapshot_dir`` for ``save_snapshot``. They may have moved since. What they hold
                is replaced by the snapshot, as far as it is in the snapshot.
            journal: The folder, or the :class:`~rlstore.Journal`, of the storage's journal: the same folder, to go on
                with a journal that is loaded, or a new one. None for no journal. If it had an ``interval`` or
                ``fsync`` of its own, pass the Journal again: they are not saved.

        Returns:
            A storage of the class that was saved, which must be this one or a subclass of it.

        Raises:
            SnapshotError: (a RuntimeError) if there is no snapshot, or it cannot be loaded.
            DoesNotFitError: (a MemoryError) if there is not enough memory for it.
            InvalidInputError: (a ValueError) if the folder of the journal holds something else, or is in use.
        """
        check_path("load()", "path", path)
        as_journal("load()", journal)
        for name, folder in (folders or {}).items():
            check_path("load()", f"folders[{name!r}]", folder)
        if device is not None:
            check_device(cls.__name__, device)
        with _refusing(path), SnapshotReader(path) as reader:
            kind = _saved_class(cls, reader)
            if device is None:
                device = reader.device
                try:
                    check_device(kind.__name__, device)
                except InvalidInputError as error:
                    raise SnapshotError(
                        f"the storage in {reader.folder} was saved on {device!r}, which is not available here. Give "
                        f'another device, as in load(path, device="cpu"). ({error})'
                    ) from error
            settings = _placed(reader, kind._used_folders(reader.settings), folders or {})
            storage = kind._restored(settings, device, reader)
        try:
            storage._begin_journal(journal, reader)
        except BaseException:
            storage._give_up()
            raise
        return storage

    @classmethod
    def _restored(
        cls: type[_AnyStorage], settings: Mapping[str, Any], device: str | torch.device, reader: SnapshotReader
    ) -> _AnyStorage:
        """A storage of these settings with the state that a snapshot has."""
        cls._check_sizes(settings, reader)
        storage = cls._from_settings(settings, device)
        try:
            storage._set_state(reader.numbers, reader)
            if "_generator" in storage.__dict__:
                restore_generator(storage._generator, reader)
        except BaseException:
            storage._give_up()
            raise
        return storage

    @classmethod
    def _without_folders(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a storage that is the same and uses none of :meth:`_used_folders`."""
        return dict(settings)

    @classmethod
    def _used_folders(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The folders that a storage of these settings would use, by the argument that names each."""
        return {}

    def _rows_in_folders(self) -> tuple[int, int] | None:
        """The rows ever written, and how many of those held a new storage with the same folders would not have.

        None if the storage keeps no rows in a folder of its own, or has not opened it yet.
        """
        return None

    @classmethod  # noqa: B027 - what is allocated when it is written need not be checked
    def _check_sizes(cls, settings: Mapping[str, Any], reader: SnapshotReader) -> None:
        """Refuse settings for which more would be allocated than the snapshot can fill."""

    def _give_up(self) -> None:  # noqa: B027 - a storage need not hold anything
        """The storage could not be loaded: release what it holds."""

    def _settings(self) -> dict[str, Any]:
        """The arguments of :meth:`_from_settings`: plain values, dtypes, spaces; tuples, lists and dicts of them."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be saved. Implement _settings(), _state(), _set_state(numbers, reader) and "
            "the classmethod _from_settings(settings, device), which rlstore.Storage documents."
        )

    @classmethod
    def _from_settings(cls: type[_AnyStorage], settings: Mapping[str, Any], device: str | torch.device) -> _AnyStorage:
        """An empty storage, created from what :meth:`_settings` returned."""
        raise NotImplementedError(f"{cls.__name__} cannot be loaded: implement _from_settings()")

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The rest: plain values, as in :meth:`_settings`, and tensors by name, which may be large views."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved: implement _state()")

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        """Restore what :meth:`_state` returned; ``reader.read_into(name, target)`` fills a tensor or a view of one."""
        raise NotImplementedError(f"{type(self).__name__} cannot be loaded: implement _set_state()")

    # ---------------------------------------------------------------------------------------------- what all share

    def __len__(self) -> int:
        """The number of transitions stored, over all environments."""
        return self._ring.size * self._ring.lanes if isinstance(self._ring, Ring) else 0

    @Yielding
    def draw_total(self) -> float:
        """The total that random draws are proportional to: transitions, or windows, or the sum of priorities."""
        return float(len(self))

    def __bool__(self) -> bool:
        """True, also if it is empty: ``if storage`` tests for None."""
        return True

    def __repr__(self) -> str:
        name = type(self).__name__
        if "_torch_device" not in self.__dict__:
            return object.__repr__(self)
        if self._ring is None:
            return f"{name}({self.max_size} steps on {self.device}: waits for its first sample)"
        ring = self._ring
        return (
            f"{name}({ring.steps} steps x {ring.lanes} envs on {self.device}: "
            f"{ring.size} steps held, {ring.nbytes / 1e6:.1f} MB)"
        )


# What a file may say at most. Somebody who loads it has not asked to wait for longer, or for more batches at once.
_MOST = {"timeout": 3600.0, "num_workers": 1024}
_KINDS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def saved_arguments(
    make: Callable[..., Any], settings: Mapping[str, Any], needed: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, Any]:
    """The settings of a snapshot, if they are those that are saved: nothing else that a file says is an argument.

    Args:
        make: What they are arguments of.
        settings: What the file says.
        needed: The names that are always saved.
        optional: Those that are saved where they are not as usual.

    Raises:
        InvalidInputError: If a name is missing or unknown, or a plain value is not of its parameter's kind.
    """
    needed = tuple(needed)
    missing = [name for name in needed if name not in settings]
    unknown = sorted(settings.keys() - {*needed, *optional})
    if missing or unknown:  # the default of a missing one would be another storage
        problem = f"lack {missing}" if missing else f"have {unknown}, which is never saved"
        raise InvalidInputError(f"the settings of {getattr(make, '__qualname__', make)} {problem}")
    parameters = signature(make).parameters
    for name, value in settings.items():
        annotation = str(parameters[name].annotation) if name in parameters else ""
        kinds = _KINDS.get(annotation.removesuffix(" | None"))
        may_be_none = annotation.endswith(" | None") and value is None
        if kinds is not None and type(value) not in kinds and not may_be_none:
            raise InvalidInputError(f"{name} is {str(value)[:80]!r}, and {annotation} is saved")
    return {name: min(value, _MOST[name]) if name in _MOST else value for name, value in settings.items()}


def saved_samples(owner: str, numbers: Mapping[str, Any]) -> int:
    """The samples that a snapshot counts; those of earlier versions count none."""
    return check_counted(owner, "samples", numbers.get("samples", 0))


class Shared:
    """An object that the storage does not own: copies of the storage share it, and a pickle leaves it out.

    Attributes:
        value: The object.
        seen: Returns another one, which the storage was only called with; or None, as when that is gone.
    """

    def __init__(self, value: Any = None, seen: Callable[[], Any] = lambda: None) -> None:
        self.value, self.seen = value, seen

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self

    def __reduce__(self) -> tuple[type[Shared], tuple[()]]:
        return Shared, ()


def _saved_name(kind: type[Storage]) -> str:
    """The name of a class in snapshots. Classes of rlstore go by their public names, wherever they are defined."""
    module = "rlstore" if kind.__module__.startswith("rlstore.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _saved_class(wanted: type[_AnyStorage], reader: SnapshotReader) -> type[_AnyStorage]:
    """The class that was saved, among those that are imported: a snapshot cannot cause an import."""
    found = _find_class(wanted, reader.class_name)
    if found is not None:
        return found
    name = reader.class_name
    if any(_find_class(kind, name) for kind in Storage.__subclasses__()):
        raise SnapshotError(
            f"{reader.folder} holds a {name}, and {wanted.__name__}.load() was called. Call Storage.load(), or that of "
            "its own class."
        )
    raise SnapshotError(f"{reader.folder} holds a {name}, and no class of that name is imported. Import it first.")


@contextmanager
def _refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise whatever else a damaged snapshot causes as a SnapshotError: nothing that it says is trusted."""
    try:
        with enough_memory(f"to load the snapshot in {os.fspath(path)}"):
            yield
    except (SnapshotError, DoesNotFitError, DiskFullError):
        raise
    except OSError as error:
        raise SnapshotError(f"the snapshot in {os.fspath(path)} cannot be read: {error}") from error
    except StorageError as error:
        raise SnapshotError(
            f"{Path(path).absolute() / NAME} cannot be loaded: its settings are refused. {error}"
        ) from error
    except Exception as error:
        raise SnapshotError(f"{Path(path).absolute() / NAME} is damaged: it cannot be loaded ({error!r})") from error


def check_snapshot(reader: SnapshotReader) -> bool:
    """Refuse a snapshot that :meth:`Storage.load` would refuse; folders that the storage uses are left alone.

    Args:
        reader: A reader that keeps no rows.

    Returns:
        False if its class is not imported, so that nobody knows what it has to hold.

    Raises:
        SnapshotError: If it cannot be loaded.
        DoesNotFitError: If there is not enough memory to tell.
    """
    storage = restored_alone(reader)
    if storage is None:
        return False
    storage._give_up()
    return True


def restored_alone(reader: SnapshotReader) -> Storage | None:
    """The storage that a snapshot holds, on the CPU and without the folders that it uses, which are left alone.

    Returns:
        None if its class is not imported.

    Raises:
        SnapshotError: If it cannot be loaded.
        DoesNotFitError: If there is not enough memory.
    """
    kind = _find_class(Storage, reader.class_name)  # type: ignore[type-abstract]
    if kind is None:
        return None
    with _refusing(reader.folder):
        torch.device(reader.device)  # which need not be here
        return kind._restored(kind._without_folders(reader.settings), "cpu", reader)


def _placed(
    reader: SnapshotReader, used: Mapping[str, Any], given: Mapping[str, str | os.PathLike[str]]
) -> Mapping[str, Any]:
    """The settings, with the caller's folders in the place of those that the snapshot names."""
    unknown = sorted(given.keys() - used.keys())
    if unknown:
        raise SnapshotError(f"folders has {unknown}; the storage in {reader.folder} uses {sorted(used) or 'none'}")
    for name, folder in used.items():
        if name not in given:
            raise SnapshotError(
                f"the storage in {reader.folder} also uses the folder {folder!r} (its {name}), and a snapshot cannot "
                f"choose which folders are read and written. Name it, as in load(path, folders={{{name!r}: ...}})."
            )
    return {**reader.settings, **{name: os.fspath(folder) for name, folder in given.items()}}


def _find_class(base: type[_AnyStorage], name: str) -> type[_AnyStorage] | None:
    for kind in reversed(base.__subclasses__()):  # of two that were defined under one name, the newer
        found = _find_class(kind, name)
        if found is not None:
            return found
    return base if _saved_name(base) == name else None
