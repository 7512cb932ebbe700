"""What the replay storages share: transitions of many environments, kept until they are overwritten."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.batches.ahead import Ahead
from rlstore.engine.batches.select import moved_random, new_random
from rlstore.engine.batches.staging import Staging, at_hand, launched, received
from rlstore.engine.batches.transitions import Part, Request, TransitionGather
from rlstore.engine.checks import check_count, check_positive, check_seconds, check_seed
from rlstore.engine.memory.backing import Backing
from rlstore.engine.processes.lanes import LaneControl
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.finals import find_final, fit_final
from rlstore.engine.rows.spaces import SpaceLike
from rlstore.errors import InvalidInputError, NotReadyError
from rlstore.replay.fields import ReplayFields, check_autoreset
from rlstore.replay.options import MEMORIES, OPTIONS, ReplayOptions
from rlstore.replay.prepare import Drawn, Prepared, prepare
from rlstore.storage import Storage


class ReplayBase(Storage):
    """Transitions of ``num_envs`` environments: of each, the newest ``storage_size // num_envs``.

    A subclass says what a batch holds (:meth:`_requests`, :meth:`_batch`), and may draw in a way of its own.
    """

    _default_memory: ClassVar[str] = "device"
    _default_dtype: ClassVar[torch.dtype | None] = None
    _replay: EpisodeRing | None = None
    _ahead: Ahead[Drawn] | None = None
    _control: LaneControl | None = None  # of writers and of a rate limit, where there are any
    _closed = False

    def __init__(
        self,
        observation_space: SpaceLike | None,
        action_space: SpaceLike | None,
        device: str | torch.device,
        storage_size: int,
        num_envs: int | None,
        batch_size: int,
        options: ReplayOptions,
        *,
        hidden_shapes: Sequence[tuple[int, int]] = (),
    ) -> None:
        owner = type(self).__name__
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise TypeError(f"{owner}() got unexpected keyword arguments {unknown}")
        check_positive(owner, storage_size=storage_size, batch_size=batch_size)
        super().__init__(storage_size, device, seed=options.get("seed"))
        self._options = options
        self.device = self._torch_device
        self.observation_space, self.action_space = observation_space, action_space
        self.storage_size, self.batch_size = int(storage_size), int(batch_size)
        self.num_envs = num_envs
        self.dtype = options.get("dtype", self._default_dtype)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise InvalidInputError(
                f"dtype is {self.dtype!r}; {owner} serves observations as a float dtype, or None: as stored"
            )
        self.num_workers = check_count(owner, "num_workers", options.get("num_workers", 0))
        self.pin_memory = bool(options.get("pin_memory", False))
        self.fetch_every = options.get("fetch_every", 1000)
        check_positive(owner, fetch_every=self.fetch_every)
        self.timeout = float(options.get("timeout", 60.0))
        check_seconds(owner, timeout=self.timeout)
        self._autoreset = check_autoreset(owner, options.get("autoreset"))
        self._memory, self._path = options.get("memory", self._default_memory), options.get("path")
        if self._memory not in MEMORIES:
            raise InvalidInputError(f"memory is {self._memory!r}; {owner} knows {list(MEMORIES)}")
        self._fields = ReplayFields(
            owner,
            options.get("frame_stack", 1),
            options.get("stack_axis"),
            options.get("reward_shape", ()),
            tuple(hidden_shapes),
        )
        self._added, self._warned = 0, False
        # Both None: a storage from create_factory(), which learns them from its first sample.
        if observation_space is not None or action_space is not None:
            check_positive(owner, num_envs=num_envs)
            self._fields.read_spaces(observation_space, action_space)
            self._allocate(int(num_envs or 0))

    def seed(self, seed: int | None = None) -> None:
        """Start the storage's generator anew: everything that is drawn at random comes from it."""
        random = new_random(check_seed(type(self).__name__, seed))
        if self._replay is None:
            self._random = random
        else:
            self._random.copy_(random)  # in place: a CUDA graph draws from it
        if self._ahead is not None:
            self._ahead.clear()

    def register_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a CUDA graph draw from the storage, anew in each replay; to be called before it is captured.

        Room is made for an episode for each row, so that no table has to move while a graph reads it.

        Raises:
            NotReadyError: (a RuntimeError) if the storage waits for its first sample, so that there are no tables yet.
        """
        ring = self._ring_of()
        super().register_graph(graph)
        if ring.device.type == "cuda":
            ring.fix_tables()

    # ---------------------------------------------------------------------------------------------- for subclasses

    @abstractmethod
    def _requests(self) -> list[Request]:
        """The tensors of a batch."""

    def _other_requests(self) -> list[Request]:
        """What is gathered from ``Drawn.others``, behind the tensors of :meth:`_requests`."""
        return []

    @abstractmethod
    def _draw(self, count: int) -> Drawn:
        """What goes into a batch of ``count``."""

    @abstractmethod
    def _batch(self, drawn: Drawn, tensors: tuple[Tensor, ...]) -> Any:
        """The batch as it is served."""

    def _gather_with(self) -> tuple[int, float]:
        """n_step and the discount factor."""
        return 1, 1.0

    def _longest(self) -> tuple[str, int]:
        """What has to fit into the rows of one environment: its name and its length."""
        return "n_step", self._gather_with()[0]

    def _beside(self) -> dict[str, Any]:
        """What is kept in a mapped folder beside the rows, as JSON."""
        return {"priorities": None}

    def _follow(self) -> None:
        """Take in what was written: priorities, windows."""

    def _prepared(self, ring: EpisodeRing) -> None:
        """The ring is made: what goes with it can be."""

    # ---------------------------------------------------------------------------------------------- memory

    def _allocate(self, num_envs: int) -> None:
        owner = type(self).__name__
        steps = self.storage_size // num_envs
        if steps < 1:
            raise InvalidInputError(f"storage_size is {self.storage_size} for {num_envs} environments; each needs one")
        self._check_longest(steps, num_envs)
        on_device = self._memory == "device"
        place = self._torch_device if on_device else torch.device("cpu")
        backing = Backing(owner, "ram" if on_device else self._memory, place, self._path)
        fields = self._fields
        ring = EpisodeRing(fields.leaves, fields.columns, steps, num_envs, backing, self._autoreset, self._beside())
        self._replay, self.num_envs, self._random = ring, num_envs, moved_random(self._random, ring.device)
        self._prepared(ring)
        self._bind()

    def _check_longest(self, steps: int, num_envs: int) -> None:
        name, longest = self._longest()
        if longest > steps:
            raise InvalidInputError(
                f"{name} is {longest}, and {type(self).__name__} holds {steps} steps of each environment (storage_size="
                f"{self.storage_size}, num_envs={num_envs}); make the storage larger or {name} smaller"
            )

    def _bind(self) -> None:
        """Make what gathers, from the parameters as they are now."""
        ring, (n_step, gamma) = self._ring_of(), self._gather_with()
        on_host = ring.device.type == "cpu"
        moves = on_host and self._torch_device.type != "cpu"
        pin = self.pin_memory and moves and self._torch_device.type == "cuda"
        requests, others = self._requests(), self._other_requests()
        casts = self._casts([*requests, *others])
        staging = Staging(self._torch_device)

        def preparer(*, ahead: bool) -> Callable[[Drawn], Prepared | None]:
            gather = TransitionGather(ring, requests, n_step, gamma, pin_memory=pin)
            gather_others = TransitionGather(ring, others, 1, gamma, pin_memory=pin) if others else None
            hand_over: Any = staging.send if moves else launched if ahead and not on_host else at_hand
            return partial(prepare, gather, gather_others, casts, hand_over)

        self._prepare = preparer(ahead=False)
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None
        if self.num_workers:
            # The thread has a gatherer of its own: two threads must not share outputs. A device needs no thread: what
            # it is to do is launched, on the stream that writes the rows.
            ahead = preparer(ahead=True)
            self._ahead = Ahead(self.num_workers, self.fetch_every, ahead, in_background=on_host)

    def _casts(self, requests: Sequence[Request]) -> tuple[torch.dtype | None, ...]:
        """The dtype that each tensor is converted to after it was gathered, which knows float32 only."""
        if self.dtype in (None, torch.float32):
            return ()
        observed = (Part.OBSERVATION, Part.NEXT_OBSERVATION)
        return tuple(self.dtype if request.part in observed else None for request in requests)

    def _ring_of(self) -> EpisodeRing:
        if self._closed:
            raise NotReadyError(f"this {type(self).__name__} is closed")
        if self._replay is None:
            raise NotReadyError(
                f"this {type(self).__name__} waits for its first sample: call init_tensors() or insert one"
            )
        return self._replay

    def _served(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which observations are gathered."""
        return torch.float32 if self.dtype == torch.float32 else stored

    def close(self) -> None:
        """End the thread that prepares batches and let go of a mapped folder. The storage cannot be used any more."""
        if self._ahead is not None:
            self._ahead.close()
        if self._replay is not None:
            self._replay.backing.close()
        self._closed = True

    # ---------------------------------------------------------------------------------------------- attributes

    def __len__(self) -> int:
        """Transitions held now, over all environments."""
        return 0 if self._replay is None else self._replay.size

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        return self._ring_of().nbytes

    @property
    def step(self) -> int:
        """The row at which the first environment's next step goes, from 0 to its capacity."""
        ring = self._replay
        return 0 if ring is None else int(ring.written[0] - ring.begun[0]) % ring.steps

    @property
    def full(self) -> bool:
        """True if every environment's next step overwrites its oldest."""
        ring = self._replay
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
        """Numbers that a policy puts out for an action: one for each choice, or for each number of a Box."""
        return self._fields.policy_action_dim

    @property
    def action_type(self) -> str:
        """The kind of the action space: "Discrete", "Box", "MultiDiscrete" or "MultiBinary"."""
        return self._fields.action.kind

    def __repr__(self) -> str:
        if self._replay is None:
            return (
                f"{type(self).__name__}({self.storage_size} transitions on {self.device}: waits for its first sample)"
            )
        ring = self._replay
        return (
            f"{type(self).__name__}({ring.steps} steps x {ring.lanes} envs on {self.device}: "
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
    ) -> None:
        """Add one step of all environments; everything is checked before anything is written.

        With one environment its axis may be left out everywhere. Where the data lie on CUDA and so does what is given,
        nobody waits for the device: a flag that is NaN counts as True there, and the warning of observations that do
        not go on comes with a later step.

        Args:
            observations: What the agent saw, ``[envs, ...]``.
            actions: What it did, ``[envs, ...]``.
            rewards: What it got, ``[envs]``.
            terminateds: The episode really ended with this step, ``[envs]``.
            truncateds: The episode was cut off after this step, ``[envs]``.
            infos: Of it, ``final_obs`` or ``final_observation`` is read where an episode ended: the observation in
                which it did. Without it that is ``next_observations``.
            next_observations: What the environment showed after the step.
            mask: False for environments that sat this step out, bool ``[envs]``; nothing of theirs is stored.
        """
        ring = self._replay
        if (
            infos
            or infos is None
            or ring is None
            or not self._fields.is_plain
            or self._ahead is not None
            or self._control is not None
            or self._closed
        ):
            self._write(observations, actions, rewards, (), terminateds, truncateds, infos, next_observations, mask)
            return
        # The short way for the usual step: nothing to look for, nothing to wait for.
        values = (observations, next_observations, actions, rewards, terminateds, truncateds, mask, None, None)
        broken = ring.write(values)
        self._added += 1
        self._follow()
        if broken:
            self._warn(_BROKEN)

    def _write(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        hidden: tuple[Any, ...],
        terminateds: Any,
        truncateds: Any,
        infos: Any,
        next_observations: Any,
        mask: Any,
    ) -> None:
        ring, fields = self._ring_of(), self._fields
        if self._ahead is not None:
            self._ahead.settle()
        final: tuple[Any, ...] = fields.no_final
        found = find_final(infos)
        if found is not None:
            key, value = found
            final = fit_final(f"infos[{key!r}]", value, fields.structure, fields.observations, ring.lanes)
        observed = (*fields.structure.leaves(observations), *fields.next_structure.leaves(next_observations))
        self._put((*observed, actions, rewards, *hidden, terminateds, truncateds, mask, *final))

    def _put(self, values: tuple[Any, ...]) -> None:
        """Write a step whose values are in the order of the ring."""
        broken = self._ring_of().write(values)
        self._added += 1
        self._follow()
        if broken:
            self._warn(_BROKEN)

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=3)

    # ---------------------------------------------------------------------------------------------- reading

    def sample(self, batch_size: int | None = None) -> Any:
        """A batch drawn at random, of ``batch_size`` or (None) the storage's own."""
        size = self.batch_size
        if batch_size is not None:
            check_positive("sample()", batch_size=batch_size)
            size = int(batch_size)
        if self._ahead is not None and size == self.batch_size and self._prepares_ahead:
            draws = partial(self._draw_checked, size), partial(self._may_draw_ahead, size)
            return self._batch(*self._finished(*self._ahead.take(self._added, *draws)))
        return self._batch(*self._take(size))

    @property
    def _prepares_ahead(self) -> bool:
        """False if rows may change while a thread gathers them."""
        return not self._closed

    def _take(self, size: int) -> tuple[Drawn, tuple[Tensor, ...]]:
        """A batch of ``size``: what was drawn, and its tensors."""
        drawn = self._draw_checked(size)
        return self._finished(drawn, self._prepare(drawn))

    def _finished(self, drawn: Drawn, prepared: Prepared | None) -> tuple[Drawn, tuple[Tensor, ...]]:
        """A batch, drawn anew if other processes have overwritten some of it while it was read."""
        while prepared is None:
            self._catch_up()
            drawn = self._draw(len(drawn.rows))
            prepared = self._prepare(drawn)
        return drawn, received(prepared)

    def _catch_up(self) -> None:
        """Take in what others have added."""

    def _draw_checked(self, size: int) -> Drawn:
        if not self._ring_of().has_rows:
            raise NotReadyError(f"this {type(self).__name__} holds no data yet; add transitions first")
        return self._draw(size)

    def _may_draw_ahead(self, size: int) -> bool:
        """Whether a batch more than was asked for can be drawn without a wait."""
        return True

    def update(self, *args: Any) -> None:
        """Nothing is to be updated here: data are served as soon as they are added."""

    # ---------------------------------------------------------------------------------------------- the whole

    def reset(self) -> None:
        """Make the storage empty."""
        if self._replay is not None:
            if self._ahead is not None:
                self._ahead.clear()
            self._ring_of().clear()
            self._cleared()

    def _cleared(self) -> None:
        """The ring was emptied."""


_BROKEN = (
    "the observations of an environment are not the next_observations given for it before, and no end was "
    "flagged there. "
    "The episode was taken to be cut off at that point: the step before keeps its own next observation, and n-step "
    "targets and sequences stop there. If you normalise or augment observations, add them as the environment "
    "gave them. (This is said once.)"
)
