"""ReplayCore: what the replay storages have in common, composed of a sampler, a view, a pipeline and their like."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from rlstore.engine.batches.pipeline import Pipeline
from rlstore.engine.batches.select import moved_random, new_random
from rlstore.engine.calls import check_keywords, explained, warn_caller
from rlstore.engine.checks import check_counted, check_path, check_positive, check_seed
from rlstore.engine.disk.snapshot import Content, SnapshotReader, SnapshotWriter
from rlstore.engine.guard import as_block, close_guard, guarded, guarded_steps, uninterrupted
from rlstore.engine.measures import Measures, held, used
from rlstore.engine.memory.backing import Backing
from rlstore.engine.memory.capacity import MUCH, require_memory
from rlstore.engine.processes.limiter import RateLimit
from rlstore.engine.rows.appender import Appender
from rlstore.engine.rows.episode_ring import LANE_BYTES, EpisodeRing
from rlstore.engine.rows.saved_rows import RowCut, restore_rows
from rlstore.engine.rows.schema import as_tensor
from rlstore.engine.rows.spaces import SpaceLike, describe_extra_fields, extra_fields
from rlstore.engine.rows.step_fields import TAKEN, StepFields
from rlstore.episodes import HeldSteps, NoSteps
from rlstore.errors import DoesNotFitError, InvalidInputError, NotReadyError, StorageClosedError
from rlstore.parameters import Check, argument, require_empty, whole_number, with_arguments
from rlstore.replay.held_steps import RingSteps
from rlstore.replay.inherited import Inherited
from rlstore.replay.kept_episodes import KeptEpisodes
from rlstore.replay.loading.fill import check, store
from rlstore.replay.loading.lanes import Lanes
from rlstore.replay.loading.progress import Bar
from rlstore.replay.loading.sources import Arrays, EpisodeList, Source, fitting_size
from rlstore.replay.measures import measured_rows, measured_sharing
from rlstore.replay.options import Options
from rlstore.replay.samplers import Sampler, WindowSampler
from rlstore.replay.sharing import Sharing
from rlstore.replay.views import INFO, View
from rlstore.replay.vocabulary import check_sample, fit_steps, step_arguments, steps_at_once, whole_data
from rlstore.replay.writer import ReplayWriter
from rlstore.storage import BatchDict, Sample, Storage, saved_arguments, saved_samples
from rlstore.trainer import at_step, learning_info

_AnyReplay = TypeVar("_AnyReplay", bound="ReplayCore")
_SETTINGS = ("observation_space", "action_space", "storage_size", "num_envs", "batch_size")


@with_arguments(
    *("device", "max_size", "observation_space", "action_space", "storage_size", "num_envs", "batch_size"),
    *("dtype", "timeout", "num_workers", "pin_memory", "fetch_every"),
)
class ReplayCore(Storage):
    """Transitions of ``num_envs`` environments: of each, the newest ``storage_size // num_envs``.

    It holds a ring of rows and what goes with it: a :class:`Sampler` that draws them, a :class:`View` that builds
    batches, a :class:`Pipeline` from one to the other, and where there are writers or a rate limit a :class:`Sharing`.

    Args:
        options: The arguments that all replay storages have in common.
        view: What a batch holds.
        sampler: What is drawn.
        hidden_shapes: ``(layers, hidden)`` of each recurrent state that is kept.
    """

    observation_space: SpaceLike | None
    action_space: SpaceLike | None
    storage_size: int | None  # None in one from create_factory(), until its first sample tells the environments
    num_envs: int | None
    batch_size: int
    dtype: torch.dtype | None
    timeout: float
    num_workers: int
    pin_memory: bool
    fetch_every: int
    # Where they are kept.
    _storage_size: int | None
    _num_envs: int | None
    _batch_size: int
    # Arguments of a public class that are attributes of the same name, for snapshots.
    _own_settings: ClassVar[tuple[str, ...]] = ()
    # Other arguments that it has to be given, and what a storage that was loaded has instead.
    _not_saved: ClassVar[Mapping[str, Any]] = {}
    # Arguments of a public class that name folders: a snapshot says that they are used, and never where they are.
    _folders: ClassVar[tuple[str, ...]] = ("path",)
    _pipeline: Pipeline | None = None  # None until the fields are known, and after close()
    _rows: EpisodeRing | None = None
    _appender: Appender  # there are both or neither
    _sharing: Sharing | None = None  # where there are writers or a rate limit
    _kept: KeptEpisodes | None = None  # where finished episodes are written to disk
    _dropped = 0  # batches that pipelines before this one have dropped

    def __init__(
        self, options: Options, view: View, sampler: Sampler, hidden_shapes: Sequence[tuple[int, int]] = ()
    ) -> None:
        owner = type(self).__name__
        options.check(owner)
        _STORAGES.add(self)
        try:
            super().__init__(options.storage_size, options.device, seed=options.seed)
        except InvalidInputError as error:
            if not isinstance(options.device, int):
                raise
            hint = f"It is the third argument of {owner}. Did you mean storage_size={options.device!r}?"
            raise InvalidInputError(f"{error}. {hint}") from None
        shown = ("observation_space", "action_space", "storage_size", "num_envs", "batch_size", "dtype", "timeout")
        for name in (*shown, "num_workers", "pin_memory", "fetch_every"):
            setattr(self, f"_{name}", getattr(options, name))
        self._device = self._torch_device
        if options.num_envs is not None:
            check_positive(owner, num_envs=options.num_envs)
            self._set_size(options.storage_size)
        self._options, self._view, self._sampler = options, view, sampler
        extra = extra_fields(options.extra_fields, owner, (*TAKEN, *INFO) if options.sample_info else TAKEN)
        stack = (options.frame_stack, options.stack_axis)
        allowed = options.allow_nonfinite_rewards
        self._fields = StepFields(owner, *stack, options.reward_shape, hidden_shapes, extra, allowed)
        # Both None: a storage from create_factory(), which takes them from its first sample.
        if self.observation_space is not None or self.action_space is not None:
            check_positive(owner, num_envs=self.num_envs)
            self._fields.read_spaces(self.observation_space, self.action_space)
            self._allocate(int(self.num_envs or 0))
        try:
            self._begin_journal(options.journal)
        except BaseException:
            self.close()
            raise

    @guarded
    def seed(self, seed: int | None = None) -> None:
        """Seed the storage's random generator; None draws a seed from torch's default generator."""
        random = new_random(check_seed(type(self).__name__, seed))
        if self._rows is None:
            self._random = random
        else:
            self._random.copy_(random)  # in place: a CUDA graph draws from it
        if self._pipeline is not None:
            self._pipeline.clear()

    @guarded
    def register_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register the storage with a CUDA graph, so that each replay draws new numbers; call it before the capture.

        The tables are enlarged to one episode per row, so that no table is reallocated while a graph reads it.

        Raises:
            NotReadyError: (a RuntimeError) if the storage waits for its first sample, so that there are no tables yet.
        """
        ring = self._ring_of()
        super().register_graph(graph)
        if ring.device.type == "cuda":
            ring.fix_tables()

    # ---------------------------------------------------------------------------------------------- memory

    def _allocate(self, num_envs: int) -> None:
        """Make the ring and bind the parts to it."""
        owner, options = type(self).__name__, self._options
        if self._sharing is not None and self._sharing.control.has_writers:
            raise InvalidInputError("the size cannot change while there are writers; close them. Nothing was changed.")
        steps = self.max_size if self.storage_size is None else _steps_of_each(self.storage_size, num_envs)
        self._check_longest(steps, num_envs)
        view, sampler = copy.copy(self._view), copy.copy(self._sampler)  # those of before stay as they are
        view.bind(self._fields, self.dtype, self._torch_device, informs=options.sample_info)
        self._require_batches(view, self.batch_size, self.num_workers)
        on_device = options.memory == "device"
        place = self._torch_device if on_device else torch.device("cpu")
        backing = Backing(owner, "ram" if on_device else options.memory, place, options.path)
        fields = self._fields
        held = (fields.leaves, fields.columns, steps, num_envs)
        try:
            ring = EpisodeRing(*held, backing, options.autoreset, sampler.schema())
            sampler.bind(owner, ring)
        except BaseException:
            backing.close()  # who keeps the error keeps the storage, and must not keep the folder
            raise
        if options.sample_info:
            sampler.count_draws()
        appender = Appender(ring, fields, self._guard, sampler)
        if self._rows is not None:
            appender.added, appender.warned = self._appender.added, self._appender.warned
            appender.warned_of_repeat = self._appender.warned_of_repeat
            self._appender.close()  # a thread may be about to use it
        self._appender = appender
        self._rows, self._view, self._sampler, self._sharing = ring, view, sampler, None
        size = steps * num_envs if self.storage_size is None else self.storage_size
        self._num_envs, self._storage_size, self._max_size = num_envs, size, steps
        self._random = moved_random(self._random, ring.device)
        self._opened(ring, appender)
        self._connect()
        if options.rate_limit is not None:
            self.set_rate_limit(options.rate_limit)

    def _opened(self, ring: EpisodeRing, appender: Appender) -> None:
        """The ring was made."""

    def _check_longest(self, steps: int, num_envs: int) -> None:
        name, longest = self._view.longest
        if longest > steps:
            raise InvalidInputError(
                f"{name} is {longest}, and {type(self).__name__} holds {steps} steps of each environment (storage_size="
                f"{steps * num_envs}, num_envs={num_envs}); make the storage larger or {name} smaller"
            )

    def _require_batches(self, view: View, size: int, ahead: int = 0) -> None:
        """Refuse batches of ``size`` that do not fit into memory together with those that are prefetched."""
        nbytes = view.nbytes * size * (1 + ahead)
        if nbytes >= MUCH:
            what = f"{1 + ahead:,} batches of {size:,}" if ahead else f"a batch of {size:,}"
            place = self._torch_device if self._options.memory == "device" else torch.device("cpu")
            advice = "Give a smaller batch_size or, of batches ahead, a smaller num_workers."
            require_memory(type(self).__name__, nbytes, what, place, advice)

    def _connect(self) -> None:
        """Make the pipeline, with the parameters as they are now."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._dropped += self._pipeline.dropped
        view = self._view
        self._pipeline = Pipeline(
            self._ring_of(),
            self._sampler,
            self._random,
            view.requests,
            view.others,
            view.fold,
            view.casts,
            self._torch_device,
            pin_memory=self.pin_memory,
            depth=self.num_workers,
            batch_size=self.batch_size,
            max_age=self.fetch_every,
            guard=self._guard,
        )
        prefetch = self._pipeline.prefetch
        self._appender.settle = None if prefetch is None else prefetch.settle

    @property
    def _closed(self) -> bool:
        return self._guard.is_closed

    def _not_ready(self) -> NotReadyError:
        """Why there is no pipeline, or no ring, to use."""
        owner = f"this {type(self).__name__}"
        if self._closed:
            return StorageClosedError(f"{owner} is closed. Nothing was changed.")
        return NotReadyError(f"{owner} waits for its first sample: call init_tensors() or insert one")

    def _ring_of(self) -> EpisodeRing:
        if self._rows is None or self._closed:
            raise self._not_ready()
        return self._rows

    @property
    def _added(self) -> int:
        """Steps added so far, by this storage or, on the average of the environments, by its writers."""
        if self._rows is None:
            return 0
        added = self._appender.added
        return added if self._sharing is None else max(added, self._rows.total_written // self._rows.lanes)

    def _shared(self) -> Sharing:
        if self._sharing is None:
            self._sharing = Sharing(type(self).__name__, self._ring_of(), self._sampler, self.timeout, self._guard)
            self._appender.permit = self._sharing.require_no_writers
        return self._sharing

    def _catch_up(self) -> None:
        """Take in what writers have added."""
        if self._sharing is not None and not self._closed and self._sharing.is_own:
            with self._guard:
                self._sharing.catch_up()

    def _paused(self) -> AbstractContextManager[None]:
        """Holds all writers back, and takes in what they have added."""
        return nullcontext() if self._sharing is None or self._closed else self._sharing.paused()

    def _leave_to_parent(self) -> None:
        """In a forked child: what lies in RAM is a copy, and everything else is still the parent's."""
        self._kept, ring = None, self._rows
        if ring is not None:
            self._appender.keep = None
            ring.holds.clear()  # of saves that the parent's threads are about
            ring.ask_again()
        is_own = self._sharing is None or self._sharing.is_own  # else the parent was forked, too
        if ring is not None and ring.backing.kind != "ram" and is_own and not self._closed:
            self._sharing = Inherited(type(self).__name__, ring)

    def _require_own(self) -> None:
        if self._sharing is not None:
            self._sharing.require_own()

    def close(self) -> None:
        """Commit to the journal, stop prefetching, release folders and close all writers.

        The storage cannot be used afterwards: but for ``close``, ``len`` and ``repr`` its methods raise
        StorageClosedError.
        """
        if self._closed:
            return
        with self._guard:  # what is added until here is committed, and nothing is added any more
            if self._sharing is not None:
                self._sharing.control.close()
            if self._rows is not None:
                self._appender.close()
        try:
            if self._journal is not None:
                self._journal.close()
        finally:
            self._release()

    @guarded
    def _release(self) -> None:
        if self._kept is not None:
            self._kept.close()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._rows is not None:
            if self._rows.backing.kind == "mapped":
                self._rows.settle_holds()  # another storage may open the folder
            self._rows.backing.close(still=self._sharing is None)
        self._pipeline = None
        close_guard(self._guard, type(self).__name__)

    # ---------------------------------------------------------------------------------------------- attributes

    def __len__(self) -> int:
        """Transitions held now, over all environments."""
        self._catch_up()
        return 0 if self._rows is None else self._rows.size

    @property
    @guarded
    def draw_total(self) -> float:
        """The total that draws are proportional to: transitions, or windows; with priorities, their sum."""
        self._catch_up()
        return 0.0 if self._rows is None else self._sampler.total

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the storage uses when it is full."""
        return self._ring_of().nbytes + self._sampler.nbytes

    @property
    def step(self) -> int:
        """The index at which the next step of the first environment is written, from 0 to its capacity."""
        ring = self._rows
        return 0 if ring is None else int(ring.written[0] - ring.begun[0]) % ring.steps

    @property
    def full(self) -> bool:
        """True if the next step of every environment overwrites its oldest one."""
        ring = self._rows
        return ring is not None and bool((ring.held() == ring.steps).all())

    @property
    def obs_shape(self) -> Any:
        """The shape of one observation; for Dict and Tuple observations a nest of shapes."""
        return self._fields.obs_shape

    @property
    def action_shape(self) -> tuple[int, ...]:
        """The shape of one action; ``()`` for Discrete."""
        return self._fields.action.shape

    @property
    def action_dim(self) -> int:
        """Numbers in one action."""
        return self._fields.action_dim

    @property
    def policy_action_dim(self) -> int:
        """Outputs of a policy for one action: one for each choice, or for each number of a Box."""
        return self._fields.policy_action_dim

    @property
    def action_type(self) -> str:
        """The kind of the action space: "Discrete", "Box", "MultiDiscrete" or "MultiBinary"."""
        return self._fields.action.kind

    def __repr__(self) -> str:
        name, ring = type(self).__name__, self._rows
        if ring is None:
            unknown = self.storage_size is None
            held = f"{self.max_size} steps of each environment" if unknown else f"{self.storage_size} transitions"
            return f"{name}({held} on {self.device}: waits for its first sample)"
        return (
            f"{name}({ring.steps} steps x {ring.lanes} envs on {self.device}: "
            f"{len(self)} transitions held, {ring.nbytes / 1e6:.1f} MB)"
        )

    # ---------------------------------------------------------------------------------------------- writing

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
        priorities: Any = None,
        **extra: Any,
    ) -> None:
        """Add one step of all environments; everything is checked before anything is written.

        With a single environment its axis may be omitted. If the storage and the arguments are on CUDA, the host does
        not synchronize: a flag that is NaN then counts as True, and the warning about observations that do not continue
        their episode is issued with a later step.

        Args:
            observations: Observations before the step, ``[envs, ...]``.
            actions: Actions, ``[envs, ...]``.
            rewards: Rewards, ``[envs]``.
            terminateds: The episode terminated in this step, ``[envs]``.
            truncateds: The episode was truncated after this step, ``[envs]``.
            infos: May contain ``final_obs`` or ``final_observation``: the final observation, used where an episode
                ended. Without it, ``next_observations`` is the final observation.
            next_observations: Observations after the step, ``[envs, ...]``.
            mask: False for environments that did not take part in this step, bool ``[envs]``; nothing is stored for
                them.
            priorities: The first priorities of these transitions, ``[envs]``, finite and not negative like those given
                to ``update``; None for the largest so far. Only for storages that draw transitions by priority.
            **extra: All extra fields of the storage, by name, ``[envs, ...]``.

        Raises:
            DoesNotFitError: (a MemoryError) if the rows so far have taken all memory. Nothing was written; everything
                that is held can still be sampled and saved.
        """
        if self._pipeline is None:
            raise self._not_ready()
        if self._sharing is None:
            self._appender.append(
                observations,
                actions,
                rewards,
                terminateds,
                truncateds,
                infos,
                next_observations,
                mask,
                extra,
                priorities,
            )
        else:
            given = (observations, actions, rewards, terminateds, truncateds, infos, next_observations)
            step = (*given, mask, extra, priorities)
            with self._guard:
                self._sharing.append(self._appender, step, mask)

    add.__qualname__ = "add"  # Python's error for missing arguments shows it, and programs do not know this class

    @guarded
    def writer(self, lanes: int | range | None = None, name: str | None = None) -> ReplayWriter:
        """Create a handle that appends the steps of some environments, while this storage samples.

        With ``memory="shared"`` it can be passed to other processes of this machine and user, forked or spawned: it is
        picklable. A row can be sampled as soon as it is complete. There is no lock, and a batch never contains a row
        that was overwritten while it was read. If a writer dies, its complete rows are kept, its open episode is closed
        there, and its environments are reclaimed for another writer.

        While there are writers, ``add`` of the storage itself raises an error. Without ``memory="shared"`` writers are
        for threads of this process: they wait while a batch is gathered, and no batch is prefetched.

        Args:
            lanes: The environments of the writer: a range, a number of free ones, or None for all.
            name: Its name in errors and warnings.
        """
        ring = self._ring_of()
        if self._kept is not None:
            raise InvalidInputError("save_snapshot keeps the episodes of one writer; it does not go with writer()")
        if self._pipeline is not None and not ring.is_shared:
            self._pipeline.clear()
        with self._guard:
            if ring.is_shared:
                ring.settle_holds()  # who adds may have the guard, and then nobody could copy for it
            return self._shared().writer(self._fields, lanes, name)

    @property
    @guarded
    def lost_writers(self) -> int:
        """Writers that died, and whose environments were reclaimed."""
        if self._sharing is None:
            return 0
        self._sharing.sweep()
        return self._sharing.lost_writers

    @guarded
    def set_rate_limit(self, limit: RateLimit | None) -> None:
        """Change the limit on samples per insert, also while other processes run; None removes it.

        It applies from now on: what was added and sampled before counts as balanced.
        """
        if limit is not None and not isinstance(limit, RateLimit):
            raise InvalidInputError(f"rate_limit is {limit!r}; give a rlstore.RateLimit, or None. Nothing was changed.")
        self._shared().set_limit(limit, self.batch_size * (1 + self.num_workers))  # the first call also prefetches

    def _limit(self) -> RateLimit | None:
        """The current limit on samples per insert."""
        return None if self._sharing is None else self._sharing.control.limiter.limit

    rate_limit: RateLimit | None = argument("rate_limit", _limit, "The current limit on samples per insert.")

    # ---------------------------------------------------------------------------------------------- data from elsewhere

    @classmethod
    @explained
    def from_arrays(
        cls: type[_AnyReplay],
        arrays: Mapping[str, Any],
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        storage_size: int | None = None,
        **arguments: Any,
    ) -> _AnyReplay:
        """Create a storage that holds the steps of arrays ``[steps, ...]``, one episode after another.

        The names are those of d4rl, Minari and Gymnasium: ``observations``, ``actions``, ``rewards``; where episodes
        terminated as ``terminated``, ``terminations``, ``terminals`` or ``terminateds``, and where they were truncated
        as ``truncated``, ``truncations``, ``timeouts`` or ``truncateds``, at least one of the two; extra fields and
        ``hidden_states`` (``[steps, layers, hidden]``) by their names. ``infos`` and ``metadata``, also with a path
        behind them (``infos/qpos``), are left out.

        With ``next_observations`` every step is stored. Where one of them is not the observation of the next step and
        no end is flagged, the episode was cut off there.

        Without them, the observation after a step is that of the next step, and what followed the last step of an
        episode is not known. A step that terminated is stored, with its own observation as the final one, which no
        target needs. A step that was truncated is left out, and so is the very last one unless it terminated; the step
        before a truncated one is then truncated. A warning says how many these are.

        Args:
            arrays: Arrays, tensors or lists by name; observations may be nested dicts or tuples of them. Values are
                stored as ``add`` stores them; observations and actions that are NaN are refused. Everything is checked
                before the storage is created or written to.
            observation_space: See the class. None takes shapes and dtypes from the arrays.
            action_space: See the class. None takes them from the arrays; whole numbers are then Discrete or
                MultiDiscrete, with as many choices as the largest number there needs: give the space if an agent has
                more.
            storage_size: See the class. None makes room for all steps.
            **arguments: Other arguments of the class. With ``num_envs`` above 1 each episode goes to the environment
                with the fewest steps.

        Raises:
            InvalidInputError: (a ValueError) if the arrays have other names, different lengths or no end flags, or if
                values do not fit the spaces. No storage was made.
        """
        return cls._made_of(Arrays(arrays), observation_space, action_space, storage_size, arguments, Bar(shown=False))

    @classmethod
    @explained
    def from_episodes(
        cls: type[_AnyReplay],
        episodes: Iterable[Any],
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        storage_size: int | None = None,
        progress: bool = False,
        **arguments: Any,
    ) -> _AnyReplay:
        """Create a storage that holds some episodes: of a list, a generator, a file or another storage.

        Args:
            episodes: See :meth:`add_episodes`.
            observation_space: See the class. None takes that of a reader of a file, or shapes and dtypes from the
                first episode.
            action_space: See the class. None takes that of a reader of a file, or what the actions of all episodes
                need; see :meth:`from_arrays`.
            storage_size: See the class. None makes room for all steps.
            progress: Show a progress bar.
            **arguments: Other arguments of the class.

        Raises:
            InvalidInputError: (a ValueError) if an episode does not fit. No storage was made.
        """
        source, bar = EpisodeList(episodes, "from_episodes()"), Bar(shown=progress)
        return cls._made_of(source, observation_space, action_space, storage_size, arguments, bar)

    @classmethod
    def _made_of(
        cls: type[_AnyReplay],
        source: Source,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        storage_size: int | None,
        arguments: Mapping[str, Any],
        bar: Bar,
    ) -> _AnyReplay:
        check_keywords(cls, arguments)
        if observation_space is None or action_space is None:
            observed, acted = source.spaces()
            observation_space = observed if observation_space is None else observation_space
            action_space = acted if action_space is None else action_space
        if storage_size is None:
            num_envs = arguments.get("num_envs", 1)
            check_positive(cls.__name__, num_envs=num_envs)
            storage_size = source.steps() if num_envs == 1 else fitting_size(source.lengths(), num_envs)
        make: Any = cls
        # Without spaces it takes no memory and no folder: data that are refused leave nothing behind.
        apart = ("memory", "journal", "save_snapshot", *cls._folders)
        options = {name: value for name, value in arguments.items() if name not in apart}
        fields = make(None, None, storage_size=storage_size, **options)._fields
        fields.read_spaces(observation_space, action_space)
        check(source, fields, bar)
        storage: _AnyReplay = make(observation_space, action_space, storage_size=storage_size, **arguments)
        try:
            if len(storage):
                raise InvalidInputError(
                    f"there is a {cls.__name__} in this folder, with {len(storage):,} transitions; open it without "
                    "data, and add_episodes() to it. Nothing was changed."
                )
            storage._store(source, bar)
        except BaseException:
            storage.close()
            raise
        return storage

    def add_episodes(self, episodes: Iterable[Any], progress: bool = False) -> int:
        """Add whole episodes that were collected before; each goes to the environment with the fewest steps.

        An episode is a dict of arrays: ``observations`` ``[steps + 1, ...]``, the last one after the last step;
        ``actions`` and ``rewards`` ``[steps, ...]``; end flags under the names of :meth:`from_arrays`, ``[steps]`` or
        a single bool each; extra fields by name. Instead of the last observation there may be ``final_observations``
        (one, without an axis for steps) or ``next_observations``; without any of them, steps are left out as
        :meth:`from_arrays` does. An episode without an end flag was cut off after its last step. Episodes of a storage
        (:meth:`episodes`) are taken as well: ``b.add_episodes(a.episodes())``.

        What is added neither continues what was there nor is continued: the open episode of an environment is cut off
        before, and the next step that is added to it begins another one. An environment that is full loses its oldest
        steps. With a rate limit the steps count, and make neither side wait.

        Args:
            episodes: The episodes: a list, a reader of a file, or a generator. One is in memory at a time. They are
                all checked before the first is stored, unless they can be read only once, as those of a generator:
                then each is checked before it is stored.
            progress: Show a progress bar; it needs rich, of the extra ``data``.

        Returns:
            The transitions that were added.

        Raises:
            InvalidInputError: (a ValueError) if an episode does not fit. Nothing was added, or the message says what
                was.
            DoesNotFitError: (a MemoryError) if there is no memory for the next episode. Those before it were added.
        """
        with self._guard:
            self._ring_of()
            self._require_no_writers()
        source, bar = EpisodeList(episodes, "add_episodes()"), Bar(shown=progress)
        check(source, self._fields, bar)
        return self._store(source, bar)

    def _store(self, source: Source, bar: Bar) -> int:
        """Write the steps of a source, which were checked; returns how many."""
        parts = (self._ring_of(), self._fields, self._guard, self._appender, self._sampler, self._kept)
        lanes = Lanes(*parts, self._require_no_writers, self._count_without_wait)
        return store(source, self._fields, lanes, bar)

    def _require_no_writers(self) -> None:
        if self._sharing is not None:
            self._sharing.require_no_writers()

    def _count_without_wait(self, rows: int) -> None:
        """Rows were added that a rate limit did not hold back."""
        if self._sharing is not None:
            self._sharing.count_slice(rows)

    # ---------------------------------------------------------------------------------------------- reading

    def _measure(self) -> Measures:
        ring, sharing = self._rows, self._sharing
        if ring is None:
            return {**held(0, self.storage_size or 0, 0), **used(0, self._samples)}
        ring = self._ring_of()
        if sharing is not None:
            sharing.sweep()  # first: it closes the episodes of dead writers
            sharing.catch_up()
        measures = {
            **held(ring.held().sum(), ring.steps * ring.lanes, self.nbytes),
            **used(ring.written.sum(), self._samples),
            **measured_rows(ring),
            **self._sampler.measure(),
            "dropped_batches": self._dropped + (0 if self._pipeline is None else self._pipeline.dropped),
            **({} if sharing is None else measured_sharing(sharing)),
        }
        if ring.is_shared and ring.overrun() is not None:  # writers have overwritten rows meanwhile
            with self._paused():
                return self._measure()
        return measures

    def _count_inserts(self) -> int:
        return 0 if self._rows is None else self._rows.total_written

    def _sample(self, batch_size: int | None) -> Any:
        """Draw a random batch of ``batch_size``, or (None) of the storage's ``batch_size``."""
        size = self._batch_size
        if batch_size is not None:
            check_positive("sample()", batch_size=batch_size)
            size = int(batch_size)
        with self._guard:
            if self._pipeline is None:
                raise self._not_ready()
            if batch_size is not None and size * self._view.nbytes >= MUCH:
                self._require_batches(self._view, size)
            place = (size, self._added, self._sharing)
            if self._view.asks_caller:
                batch = self._pipeline.serve(*place, self._view.build, ahead=True)
            else:
                batch = self._view.build(*self._pipeline.take(*place))
            self._samples += size
            return batch

    def update(self, *args: Any) -> None:
        """Set priorities, ``update(rows, priorities)``. A storage that draws uniformly ignores the call.

        A :class:`~rlstore.SequenceReplayStorage` with ``alpha=0`` refuses priorities.

        Either all priorities are set or, if one is invalid, none. On CUDA the host does not synchronize to check the
        values: invalid entries are dropped, and counted in ``stale_updates`` too.

        Args:
            *args: ``rows`` of a batch, int64 ``[n]``, and ``priorities``, finite and not negative, ``[n]`` or
                ``[n, 1]``. Stale rows, which were overwritten, are dropped and counted in ``stale_updates``.
        """
        with self._guard:
            self._ring_of()
            self._require_own()
            self._catch_up()
            self._sampler.update(*args)

    def _require_written(self, rows: Tensor) -> None:
        """Refuse rows that were never written, for a mixture that updates two storages or none of them."""
        with self._guard:
            ring = self._ring_of()
            self._require_own()
            self._catch_up()
            ids = rows.to(ring.written.device)
            unknown = ids[ids // ring.lanes >= ring.written[ids % ring.lanes]]
            if len(unknown):
                raise InvalidInputError(
                    f"row {int(unknown[0])} was never written; give the rows that a batch has. No priority was changed."
                )

    def _held_steps(self) -> HeldSteps:
        if self._rows is None and not self._closed:
            return NoSteps(type(self).__name__)
        return RingSteps(self._ring_of(), self._fields.structure, self._torch_device, self._reading)

    @as_block
    def _reading(self, still: bool) -> Iterator[None]:
        """Hold everybody in this process back who would change rows and, with ``still``, other writers, too."""
        with self._guard:
            self._ring_of()  # which refuses if it was closed since
            with self._paused() if still else nullcontext():
                if self._sharing is not None:
                    self._sharing.catch_up()
                yield

    # ---------------------------------------------------------------------------------------------- the ten methods

    @classmethod
    @explained
    def create_factory(  # type: ignore[override]
        cls: type[_AnyReplay],
        size: int,
        observation_space: SpaceLike | None = None,
        action_space: SpaceLike | None = None,
        num_envs: int | None = None,
        **arguments: Any,
    ) -> Callable[..., _AnyReplay]:
        """A function ``f(device, actor, algorithm)`` that creates storages of ``size`` steps of each environment.

        Without spaces they take the number of environments and all shapes from their first sample. Other arguments are
        those of the class, by keyword. Of a storage with folders (``path``, ``snapshot_dir``), only one can use them:
        ``f(device, actor, algorithm, subfolder="a")`` creates one that uses the folders ``a`` in them.

        Args:
            size: Steps held of each environment, ``max_size`` of the storage. Its ``storage_size`` is
                ``size * num_envs``, and None until the number of environments is known.
            observation_space: See the class.
            action_space: See the class.
            num_envs: The number of environments; None takes it from the first sample.
            **arguments: Other arguments of the class.
        """
        check_keywords(cls, arguments)
        check_positive(f"{cls.__name__}.create_factory()", size=size)
        if num_envs is not None:
            check_positive(f"{cls.__name__}.create_factory()", num_envs=num_envs)

        def create(
            device: str | torch.device = "cpu", actor: Any = None, algorithm: Any = None, *, subfolder: str = ""
        ) -> _AnyReplay:
            total = size * (num_envs or 1)
            given: dict[str, Any] = {"device": device, "storage_size": total, "num_envs": num_envs, **arguments}
            if subfolder:
                given.update(cls._folders_in(subfolder, given))
            make: Any = cls
            storage: _AnyReplay = make(observation_space, action_space, **given)
            if num_envs is None:
                storage._storage_size = None  # the size is that of each of them
            storage._give(actor, algorithm)
            return storage

        return create

    @classmethod
    def _folders_in(cls, subfolder: str, given: Mapping[str, Any]) -> dict[str, str]:
        """The folders that the class would use with these arguments, each with a subfolder appended."""
        defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        used = {name: given.get(name, defaults.get(name)) for name in cls._folders}
        owner = cls.__name__
        return {name: os.path.join(check_path(owner, name, f), subfolder) for name, f in used.items() if f is not None}

    @guarded
    def init_tensors(self, sample: Sample) -> None:
        """Allocate memory for samples like this one. If it was allocated already, the sample must fit it."""
        check_sample(sample, self._fields, type(self).__name__)
        if self._rows is not None:
            fit_steps(sample, self._fields, (), self._rows.lanes, self._rows.device)
            return
        before = dict(self.__dict__)
        try:
            self._fields = copy.copy(self._fields)
            num_envs = self._fields.read_sample(sample)
            if self.num_envs not in (None, num_envs):
                raise InvalidInputError(
                    f"the first sample has {num_envs} environments, and num_envs is {self.num_envs}"
                )
            fit_steps(sample, self._fields, (), num_envs, torch.device("cpu"))  # before anything is allocated
            self._allocate(num_envs)
        except BaseException:
            self.__dict__ = before  # a sample that is refused leaves no shapes behind
            raise

    def insert_transition(self, sample: Sample) -> None:
        """Append one step of all environments, with the keys of the vocabulary (see :mod:`rlstore.storage`).

        It takes ``observations``, ``actions``, ``rewards``, ``terminated``, ``truncated``, ``next_observations`` and
        the storage's extra fields; optional are ``final_observations``, used where an episode ended, ``masks``, False
        for environments that did not take part, and ``priorities`` (see :meth:`add`).

        Args:
            sample: One step of all environments, by the names of the vocabulary (see :mod:`rlstore.storage`).
        """
        if self._rows is None:
            self.init_tensors(sample)
        step, named = step_arguments(sample, self._fields, type(self).__name__)
        self.add(*step, **named)

    def before_gradients(self, actor: Any = None, algo: Any = None) -> None:
        """Computes nothing: targets are computed when a batch is read.

        Args:
            actor: Not used.
            algo: Whose attributes ``update_storage_parameter`` changes.
        """
        self._see(algo)

    @guarded
    def after_gradients(
        self, actor: Any = None, algo: Any = None, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Report the state of the storage. It may also be called as ``after_gradients(batch, info)``.

        Args:
            actor: Not used; with two arguments, the batch that was trained on.
            algo: Not used; with two arguments, ``info``.
            info: What a trainer reports; None for an empty dict. In a storage with priorities, its ``priorities`` are
                set for its ``rows``, or for those of the batch.

        Returns:
            ``info`` with ``storage_size``, the transitions held.
        """
        batch, info = learning_info(actor, algo, info)
        self._require_own()
        self._sampler.learn(batch, info)
        info["storage_size"] = len(self)
        return info

    @guarded_steps
    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1, shuffle: bool = True
    ) -> Iterator[BatchDict]:
        """``num_mini_batch * num_epochs`` batches, with the keys of the vocabulary (see :mod:`rlstore.storage`).

        Args:
            num_mini_batch: Batches in each epoch.
            mini_batch_size: Rows (or sequences) in each; None takes the storage's ``batch_size``.
            num_epochs: Epochs.
            shuffle: True serves random batches, as ``sample`` does; then epochs do not differ. False serves the rows in
                order, in each epoch from the first: the oldest step first, of each step all environments, as in
                :meth:`get_all_buffer_data`, and no row twice. Sequences are in the order in which they begin. Weights
                are 1, goals are still relabeled at random, and a CUDA device is waited for.

        Raises:
            InvalidInputError: (a ValueError) if, in order, an epoch asks for more rows than are held.
            NotReadyError: (a RuntimeError) if the rows of the epoch were overwritten before they were served.
        """
        check_positive("generate_batches()", num_mini_batch=num_mini_batch, num_epochs=num_epochs)
        if mini_batch_size is not None:
            check_positive("generate_batches()", mini_batch_size=mini_batch_size)
        size = self._batch_size if mini_batch_size is None else int(mini_batch_size)
        if not shuffle:
            for _ in range(num_epochs):
                yield from self._in_order(num_mini_batch, size)
            return
        for _ in range(num_mini_batch * num_epochs):
            if self._pipeline is None:
                raise self._not_ready()
            self._require_batches(self._view, size)
            place = (size, self._added, self._sharing)
            if self._view.asks_caller:
                batch = self._pipeline.serve(*place, self._view.build_dict, ahead=False)
            else:
                batch = self._view.build_dict(*self._pipeline.read(size, self._sharing))
            self._samples += size
            yield batch

    def _in_order(self, count: int, size: int) -> Iterator[BatchDict]:
        """``count`` batches of ``size`` rows or windows, oldest first."""
        ring = self._ring_of()
        self._catch_up()
        items = self._sampler.in_order()
        if count * size > len(items):
            what = "sequences" if isinstance(self._sampler, WindowSampler) else "rows"
            raise InvalidInputError(
                f"{count} mini-batches of {size} {what} were asked for in order (shuffle=False); {len(items)} are held"
            )
        self._require_batches(self._view, size)
        for part in items[: count * size].split(size):
            if self._pipeline is None:
                raise self._not_ready()
            if bool((part // ring.lanes < (ring.written - ring.held())[part % ring.lanes]).any()):
                raise NotReadyError("rows were overwritten while a generator was still serving them")
            pick = partial(self._sampler.pick, part, len(items), self._random)
            batch = self._view.build_dict(*self._pipeline.read_these(pick, size, self._sharing))
            self._samples += size
            yield batch

    @guarded
    def get_all_buffer_data(self, data_to_cpu: bool = False) -> BatchDict:
        """Copies of everything held, ``[steps, envs, ...]`` with the keys of the vocabulary, oldest step first.

        Environments that hold fewer steps than others are padded with zeros; ``masks`` is False there.

        Args:
            data_to_cpu: Return the copies on the CPU, wherever the storage is.
        """
        with self._paused():
            if not len(self):
                return {}
            return whole_data(self._ring_of(), self._fields, "cpu" if data_to_cpu else self._torch_device)

    @guarded
    def insert_data_slice(self, new_data: Sample) -> None:
        """Append data in the form of ``get_all_buffer_data``, ``[steps, envs, ...]``, oldest step first.

        Args:
            new_data: The data, by the names of the vocabulary; an empty dict adds nothing.
        """
        if not isinstance(new_data, Mapping):
            raise InvalidInputError(f"new_data is a {type(new_data).__name__}; give a dict. Nothing was changed.")
        if not new_data:
            return
        check_sample(new_data, self._fields, type(self).__name__)
        if "final_observations" in new_data or "priorities" in new_data:
            raise InvalidInputError(
                "new_data has no final_observations, which its next_observations are, and no priorities: give those to "
                "add() or update(). Nothing was changed."
            )
        rewards = as_tensor(new_data["rewards"], "rewards")
        if rewards.dim() < 2:
            raise InvalidInputError(f"rewards is {tuple(rewards.shape)}; give [steps, envs, ...]. Nothing was changed.")
        steps = len(rewards)
        if self._rows is None:
            self.init_tensors({name: at_step(value, 0, steps, name) for name, value in new_data.items()})
        ring = self._ring_of()
        self._require_no_writers()
        data = {**new_data, "final_observations": new_data["next_observations"]}
        given, fit = steps_at_once(data, self._fields, steps, ring)
        ring.require_room(steps)
        before = ring.total_written
        self._appender.write_steps(given, steps, fit, resumed=True)
        ring.resume()
        self._count_without_wait(ring.total_written - before)

    @guarded
    def reset(self) -> None:
        """Remove all data."""
        if self._rows is None:
            return
        with self._paused(), uninterrupted():
            if self._pipeline is not None:
                self._pipeline.clear()
            self._ring_of().clear()
            self._sampler.clear()
            if self._kept is not None:
                self._kept.mark()
            if self._sharing is not None:
                self._sharing.control.limiter.set_counts(0, 0)

    @guarded
    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Change a parameter of the storage, an attribute of the algorithm, or both where both have the name.

        The algorithm is the one given to the factory's function, and the one that ``before_gradients`` was last called
        with. Assigning a parameter as an attribute (``storage.n_step = 3``) is the same.

        Args:
            parameter_name: Its name. ``storage_size`` can change only while the storage is empty.
            new_parameter_value: Its new value.

        Raises:
            UnknownParameterError: (an AttributeError and a ValueError) if neither has it.
            InvalidInputError: (a ValueError) if the storage refuses the value. Nothing was changed.
        """
        self._change(parameter_name, new_parameter_value)

    def _checks(self) -> Mapping[str, Check]:
        return {
            "batch_size": whole_number,
            **self._view.parameters,
            **self._sampler.parameters,
            "rate_limit": lambda owner, name, value: value,
            "storage_size": whole_number,
        }

    def _apply(self, name: str, value: Any) -> None:
        self._require_own()
        if name == "rate_limit":
            self.set_rate_limit(value)
        elif name == "storage_size":
            self._resize(value)
        else:
            parts: tuple[Any, ...] = (self._view, self._sampler)
            part, place = next(((part, name) for part in parts if name in part.parameters), (self, f"_{name}"))
            before = getattr(part, place)
            setattr(part, place, value)
            if self._rows is not None:
                try:
                    self._check_longest(self._rows.steps, self._rows.lanes)
                    self._require_batches(self._view, self.batch_size, self.num_workers)
                except (InvalidInputError, DoesNotFitError):
                    setattr(part, place, before)
                    raise
                self._connect()

    def _resize(self, storage_size: int) -> None:
        require_empty(len(self), "storage_size")
        if self._options.memory == "mapped":
            raise InvalidInputError(
                "the size of a mapped storage is fixed by its folder; make another one. Nothing was changed."
            )
        before = dict(self.__dict__)
        try:
            self._set_size(storage_size)
            if self._rows is not None:
                self._allocate(self._rows.lanes)
        except BaseException:
            self.__dict__ = before
            raise

    def _set_size(self, storage_size: int) -> None:
        steps = storage_size if self.num_envs is None else _steps_of_each(storage_size, self.num_envs)
        self._storage_size, self._max_size = storage_size, steps

    # ---------------------------------------------------------------------------------------------- saving

    @as_block
    def _still(self) -> Iterator[None]:
        with self._guard, self._paused():
            yield

    def _content(self, *, copy: bool, note: Mapping[str, Any] | None = None) -> Content:
        return super()._content(copy=copy or self._rows is not None, note=note)  # rows are written after the guard

    def _rows_for(self, writer: SnapshotWriter) -> RowCut | None:
        return None if self._rows is None else RowCut(self._rows, self._guard, writer, self._limit_writers)

    def _limit_writers(self) -> bool:
        return self._sharing is not None and self._sharing.limit()

    def _changes_unasked(self) -> bool:
        return self._rows is None

    def _settings(self) -> dict[str, Any]:
        names = (*_SETTINGS, *self._own_settings)
        options, ring = self._options.settings(), self._rows
        if ring is not None and ring.backing.kind == "ram" and options["memory"] == "mapped":
            options.update(memory="ram", path=None)  # a copy of such a storage is in RAM
        learnt = self._fields.described() if ring is not None and self.observation_space is None else None
        extra = describe_extra_fields(self._fields.extra)
        own = {name: getattr(self, name) for name in names}
        if self.storage_size is None:
            own["storage_size"] = own["max_size"] = self.max_size
        return {**own, "extra_fields": extra, "options": options, "learnt": learnt}

    @classmethod
    def _from_settings(cls: type[_AnyReplay], settings: Mapping[str, Any], device: str | torch.device) -> _AnyReplay:
        folders = cls._used_folders(settings)  # as the caller of load() has named them
        needed = (*_SETTINGS, *cls._own_settings, "options", "learnt")
        given = saved_arguments(cls, settings, needed, ("extra_fields", "max_size", *folders))
        waits = given.pop("max_size", None) is not None
        if waits and settings["num_envs"] is not None:
            raise InvalidInputError(f"num_envs is {settings['num_envs']!r}, and a storage with max_size waits for it")
        options = saved_arguments(cls, settings["options"], (), Options.SAVED)
        if options.get("rate_limit") is not None:
            options["rate_limit"] = RateLimit(*options["rate_limit"])
        arguments = {**options, **given}
        for name in ("options", "learnt", *cls._folders):
            arguments.pop(name, None)
        arguments.update({name: settings[name] for name in folders}, **cls._not_saved)
        make: Any = cls
        storage: _AnyReplay = make(**arguments, device=device, seed=0)
        if waits:
            storage._storage_size = None
        if settings["learnt"] is not None:
            storage._fields.read_described(settings["learnt"])
            storage._allocate(settings["num_envs"])
        return storage

    @classmethod
    def _check_sizes(cls, settings: Mapping[str, Any], reader: SnapshotReader) -> None:
        # Rows take memory as they come, but not what is kept of each environment and, if there is any, of all places.
        lanes, size = settings.get("num_envs"), settings.get("storage_size")
        if lanes is None or size is None:
            return  # it waits for its first sample, or is refused
        check_positive(cls.__name__, num_envs=lanes, storage_size=size)
        reader.room.charge(lanes * LANE_BYTES, f"tables of {lanes:,} environments")
        shared = settings["options"].get("memory") == "shared"
        nbytes = 5 * shared + 2 * bool(settings.get("alpha", "alpha" in cls._own_settings))
        reader.room.charge(size * nbytes, f"tables of {size:,} transitions")

    @classmethod
    def _used_folders(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        options = settings["options"]
        return {"path": options.get("path")} if options.get("memory") == "mapped" else {}

    @classmethod
    def _without_folders(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        options = settings["options"]
        # Nobody else is to write, either: and shared memory is taken where it is read.
        in_ram = {"memory": "ram"} if options.get("memory") in ("mapped", "shared") else {}
        return {**settings, "options": {**options, **in_ram}}

    @guarded
    def _rows_in_folders(self) -> tuple[int, int] | None:
        ring = self._rows
        if ring is None or (ring.backing.kind != "mapped" and self._kept is None):
            return None
        unfinished = self._kept.unfinished if self._kept is not None and ring.backing.kind != "mapped" else 0
        return ring.total_written, unfinished

    def _give_up(self) -> None:
        self.close()

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers: dict[str, Any] = {
            "added": self._added,
            "samples": self._samples,
            "limit": None if self._sharing is None else self._sharing.limit_state(),
        }
        if self._rows is None:
            return numbers, {"random": self._random}
        numbers["prepared"], prepared = ([], {}) if self._pipeline is None else self._pipeline.state()
        numbers["layout"] = self._rows.described()
        own, tensors = self._sampler.state()
        return {**numbers, **own}, {"random": self._random, **prepared, **tensors}

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        self._samples = saved_samples(type(self).__name__, numbers)
        if self._rows is None or self._pipeline is None:
            reader.read_into("random", self._random)
            return
        reader.read_into("random", self._random)
        self._appender.added = check_counted(type(self).__name__, "added", numbers["added"])
        if reader.has_rows:
            if numbers["layout"] != self._rows.described():
                raise reader.damaged("numbers.layout", numbers["layout"])
            self._rows.saved[reader.folder] = restore_rows(self._rows, reader)
        else:
            self._rows.set_state(reader)
        if numbers.get("limit") is not None:
            self._shared().set_limit_state(numbers["limit"])
        self._sampler.set_state(numbers, reader)
        if self._kept is not None:
            self._kept.count_again()
        self._pipeline.set_state(numbers["prepared"], reader, self._torch_device)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        ForkingPickler.register(cls, _sent_by_value)

    @guarded
    def __getstate__(self) -> dict[str, Any]:
        # A copy has no writers and counts for itself; folders stay with the original.
        limited = None if self._sharing is None else self._sharing.limit_state()
        return {**self.__dict__, "_sharing": None, "_kept": None, "limit state": limited}

    def __setstate__(self, state: dict[str, Any]) -> None:
        limited = state.pop("limit state")
        self.__dict__.update(state)
        _STORAGES.add(self)
        if limited is not None:
            self._shared().set_limit_state(limited)


def _steps_of_each(storage_size: int, num_envs: int) -> int:
    if storage_size < num_envs:
        raise InvalidInputError(f"storage_size is {storage_size} for {num_envs} environments; each needs one")
    return storage_size // num_envs


def _sent_by_value(storage: ReplayCore) -> Any:
    """How a storage goes to another process: torch would move its tensors, whose addresses kernels hold."""
    if storage._rows is not None and storage._rows.backing.kind == "shared":
        warn_caller(
            f'this {type(storage).__name__} with memory="shared" is sent to another process, which gets a copy of its '
            "own: nothing that is added there reaches this one, or the other way round. Send storage.writer() instead, "
            "which adds to this one. If it is to have a copy, send pickle.dumps(storage)."
        )
    return pickle.loads, (pickle.dumps(storage),)


_STORAGES: weakref.WeakSet[ReplayCore] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for storage in list(_STORAGES):
        storage._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def of_part(part: str, name: str, doc: str) -> Any:
    """An argument that one of a storage's parts keeps, as an attribute."""
    return argument(name, attrgetter(f"{part}.{name}"), doc)
