"""What a batch of replay is drawn from: rows or windows, uniformly or by priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlstore.engine.batches.draw_counts import DrawCounts
from rlstore.engine.batches.pipeline import Drawn, Gather
from rlstore.engine.batches.priorities import Priorities
from rlstore.engine.batches.select import Windows, random_units, rows_in_order, uniform_rows
from rlstore.engine.checks import check_counted, check_fraction, check_positive
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.measures import Measures, Most, Ratio
from rlstore.engine.rows.appender import Kernels
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidCallError, InvalidInputError, NotReadyError
from rlstore.parameters import Check, fraction, whole_number_or_none

_STRATEGIES = ("future", "final", "episode")
_UNSEEN = torch.empty(0, dtype=torch.int64)  # in the place of rows that a batch does not show


class Sampler:
    """Draws rows of a ring, and keeps what it needs to know of them.

    Attributes:
        parameters: What ``update_storage_parameter`` may change, and the check of each.
        can_fuse: Whether kernels can draw and gather in one call.
    """

    parameters: ClassVar[dict[str, Check]] = {}
    can_fuse: bool = False
    _owner: str
    _ring: EpisodeRing
    _counts: DrawCounts | None = None

    def bind(self, owner: str, ring: EpisodeRing) -> None:
        """Draw from a new ring.

        Args:
            owner: The storage's class name, for errors.
            ring: The rows.
        """
        self._owner, self._ring = owner, ring
        self._has_rows = False  # until it is known: once there are rows, there are some until clear()

    def count_draws(self) -> None:
        """Give what is drawn its probability, and the number of its draws so far."""
        self._counts = DrawCounts(self._ring)
        self.can_fuse = False  # kernels that draw and gather in one call do not count

    @property
    def counts_draws(self) -> bool:
        """Whether what is drawn has probabilities and counts."""
        return self._counts is not None

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The axes of the rows of a batch, behind the first."""
        return ()

    def draw(self, count: int, random: Tensor) -> Drawn:
        """The rows of a batch of ``count``.

        Raises:
            NotReadyError: (a RuntimeError) if there is nothing to draw from.
        """
        drawn = self._draw(count, random)
        if self._counts is None:
            return drawn
        rows = self._first_rows(drawn)
        return drawn._replace(probabilities=self._chances(rows), counts=self._counts.add(rows))

    def in_order(self) -> Tensor:
        """The row of each item that can be drawn, oldest first, int64 ``[n]``.

        Raises:
            NotReadyError: (a RuntimeError) if there are none.
        """
        self._require_rows()
        rows = rows_in_order(self._ring)
        return rows[rows >= 0]

    def pick(self, items: Tensor, total: int, random: Tensor) -> Drawn:
        """These of the ``total`` items of :meth:`in_order`, as if each were as likely as any other."""
        drawn = self._pick(items, random)
        if self.has_weights:
            drawn = drawn._replace(weights=torch.ones((len(items), 1), device=items.device))
        if self._counts is None:
            return drawn
        chances = torch.full(items.shape, 1 / total, dtype=torch.float32, device=items.device)
        return drawn._replace(probabilities=chances, counts=self._counts.add(items))

    def _pick(self, items: Tensor, random: Tensor) -> Drawn:
        return Drawn(items)

    def take_back(self, drawn: Drawn) -> None:
        """A batch that was drawn was not served."""
        if self._counts is not None:
            self._counts.take_back(self._first_rows(drawn))

    def _draw(self, count: int, random: Tensor) -> Drawn:
        raise NotImplementedError

    def _first_rows(self, drawn: Drawn) -> Tensor:
        """The row that stands for each item of a batch, int64 ``[count]``."""
        return drawn.rows

    def _chances(self, rows: Tensor) -> Tensor:
        """The probability of each of these rows in a draw, float32 ``[count]``."""
        return torch.full(rows.shape, 1 / self.total, dtype=torch.float32, device=rows.device)

    def draw_and_gather(self, gather: Gather, count: int, random: Tensor) -> tuple[Drawn, tuple[Tensor, ...]] | None:
        """The same rows as :meth:`draw` and their tensors in one call; None where the kernel cannot."""
        return None

    @property
    def has_weights(self) -> bool:
        """Whether what is drawn has weights."""
        return False

    def _require_rows(self) -> None:
        if not self._has_rows:
            if not self._ring.has_rows:
                raise NotReadyError(f"this {self._owner} holds no data yet; add transitions first")
            self._has_rows = True

    def schema(self) -> dict[str, Any]:
        """What it keeps in a mapped folder beside the rows, as JSON."""
        return {"priorities": None}

    @property
    def kernels(self) -> Kernels:
        """The kernels that do all of :meth:`follow`."""
        return None, None

    def follow(self) -> None:
        """Take in the rows that were written since."""

    def begin(self, priorities: Any, mask: Any, lanes: range) -> Callable[[], None]:
        """Check the first priorities of the next rows of some lanes; returns what sets them once they are written.

        Raises:
            InvalidInputError: If they are no priorities, or rows have none here.
        """
        raise InvalidInputError(
            f"priorities were given, and this {self._owner} draws uniformly; a PrioritizedReplayStorage draws by them. "
            "Nothing was written."
        )

    def forget(self, lanes: Tensor) -> None:
        """What is known of the rows of some lanes may be wrong: take them in again when next asked to follow."""

    def clear(self) -> None:
        """The ring was emptied."""
        self._has_rows = False
        if self._counts is not None:
            self._counts.clear()

    def update(self, *args: Any) -> None:
        """Take what a learner reports of rows; nothing, where draws are uniform."""

    def learn(self, batch: Mapping[str, Any], info: dict[str, Any]) -> None:
        """Take what a learner reports of a batch in ``info``, and add to it."""

    @property
    def total(self) -> float:
        """What draws are in proportion to: here, rows."""
        return float(self._ring.size)

    @property
    def count(self) -> Tensor:
        """The rows, or windows, that there are to draw, int64 ``[]`` where the ring is: a device is not waited for."""
        return self._ring.held().sum()

    def measure(self) -> Measures:
        """How often the rows or windows that are held were drawn, if that is counted."""
        if self._counts is None:
            return {}
        draws, count = self._counts.of_held(self._ring), self.count
        return {
            "draws_mean": Ratio(draws.sum(), count),
            "draws_max": Most(draws.amax()),
            "draws_never": count - draws.count_nonzero(),
        }

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return 0 if self._counts is None else self._counts.nbytes

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What it holds beside the rows: plain values, and tensors by name."""
        return {}, {} if self._counts is None else self._counts.state()

    def set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        """The ring was filled from a snapshot: put back what :meth:`state` returned."""
        if self._counts is not None:
            self._counts.set_state(reader)


class UniformSampler(Sampler):
    """Rows, each as likely as any other."""

    can_fuse = True

    def _draw(self, count: int, random: Tensor) -> Drawn:
        """``count`` rows; some may come twice."""
        self._require_rows()
        return Drawn(uniform_rows(self._ring, count, random))

    def draw_and_gather(self, gather: Gather, count: int, random: Tensor) -> tuple[Drawn, tuple[Tensor, ...]] | None:
        """The tensors of ``count`` rows."""
        self._require_rows()
        tensors = gather.kernel.sample(random, count)
        return None if tensors is None else (Drawn(_UNSEEN), tensors)


def _strategy(owner: str, name: str, value: Any) -> str:
    """Where goals are taken from."""
    if value not in _STRATEGIES:
        raise InvalidInputError(f"{name} is {value!r}; {owner} knows {list(_STRATEGIES)}")
    return str(value)


class GoalSampler(UniformSampler):
    """Rows, each as likely as any other, and for some of them a row of the same episode whose outcome is their goal.

    Args:
        owner: The storage's class name, for errors.
        strategy: "future", "final" or "episode".
        relabel_fraction: The part of a batch that is given a goal.
    """

    parameters: ClassVar[dict[str, Check]] = {"strategy": _strategy, "relabel_fraction": fraction}
    can_fuse = False

    def __init__(self, owner: str, strategy: str, relabel_fraction: float) -> None:
        self.strategy = _strategy(owner, "strategy", strategy)
        self.relabel_fraction = fraction(owner, "relabel_fraction", relabel_fraction)

    def _draw(self, count: int, random: Tensor) -> Drawn:
        """``count`` rows, and in ``others`` those of their goals, or -1."""
        return self._pick(super()._draw(count, random).rows, random)

    def _pick(self, items: Tensor, random: Tensor) -> Drawn:
        rows, ring = items, self._ring
        chosen, units = random_units(2 * len(rows), random).chunk(2)
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


class PrioritySampler(Sampler):
    """Rows by priority (Schaul et al. 2016): ``P(i) = p_i / sum(p)``, ``p_i = priority_i ** alpha``.

    Args:
        owner: The storage's class name, for errors.
        alpha: The exponent of the priorities: 0 is uniform sampling.
        beta: The exponent of the importance weights: 1 corrects the bias completely.
        beta_steps: Batches over which ``beta`` is annealed to 1; None keeps it constant.

    Attributes:
        tree: The priorities; None where draws are uniform.
    """

    parameters: ClassVar[dict[str, Check]] = {"beta": fraction, "beta_steps": whole_number_or_none}
    can_fuse = True
    tree: Priorities | None = None

    def __init__(self, owner: str, alpha: float, beta: float, beta_steps: int | None) -> None:
        check_fraction(owner, alpha=alpha, beta=beta)
        if beta_steps is not None:
            check_positive(owner, beta_steps=beta_steps)
        self.alpha, self.beta, self.beta_steps = float(alpha), float(beta), beta_steps
        self._drawn = 0  # batches drawn by priority

    def bind(self, owner: str, ring: EpisodeRing) -> None:
        """Draw from a new ring."""
        super().bind(owner, ring)
        self.tree = Priorities(ring, self.alpha)

    def schema(self) -> dict[str, Any]:
        """What it keeps in a mapped folder beside the rows, as JSON."""
        return {"priorities": "rows"}

    @property
    def current_beta(self) -> float:
        """The current exponent of the weights, annealed from ``beta`` to 1 over ``beta_steps`` batches."""
        if self.beta_steps is None:
            return self.beta
        return self.beta + (1 - self.beta) * min(self._drawn / self.beta_steps, 1.0)

    def _draw(self, count: int, random: Tensor) -> Drawn:
        """``count`` rows and their weights."""
        self._require_rows()
        return Drawn(*self._draw_by_priority(count, random))

    def _draw_by_priority(self, count: int, random: Tensor) -> tuple[Tensor, Tensor]:
        assert self.tree is not None
        drawn = self.tree.draw(count, self.current_beta, random)
        self._drawn += 1
        return drawn

    def draw_and_gather(self, gather: Gather, count: int, random: Tensor) -> tuple[Drawn, tuple[Tensor, ...]] | None:
        """The tensors of ``count`` rows, with rows and weights."""
        self._require_rows()
        assert self.tree is not None
        made = gather.kernel.sample_by_priority(self.tree.kernel, random, self.current_beta, count)
        if made is None:
            return None
        tensors, weights, rows = made
        self._drawn += 1
        return Drawn(rows, weights), tensors

    def _chances(self, rows: Tensor) -> Tensor:
        """The probability of each of these rows in a draw, float32 ``[count]``."""
        return super()._chances(rows) if self.tree is None else self.tree.of(rows) / self.tree.total

    @property
    def kernels(self) -> Kernels:
        """The kernels that do all of :meth:`follow`."""
        return None, None if self.tree is None else self.tree.kernel

    def follow(self) -> None:
        """New rows take the largest priority, and overwritten ones lose theirs."""
        if self.tree is not None:
            self.tree.follow()

    def begin(self, priorities: Any, mask: Any, lanes: range) -> Callable[[], None]:
        """Check the first priorities of the next rows of some lanes; returns what sets them once they are written."""
        assert self.tree is not None
        return self.tree.begin(priorities, mask, lanes)

    def clear(self) -> None:
        """The ring was emptied."""
        super().clear()
        if self.tree is not None:
            self.tree.clear()

    def update(self, *args: Any) -> None:
        """Set priorities, ``update(rows, priorities)``: all of them, or if one is refused none."""
        if len(args) != 2:
            raise InvalidCallError(f"update() takes rows and priorities; {len(args)} arguments were given")
        if self.tree is None:
            raise InvalidInputError(f"this {self._owner} draws uniformly: alpha is 0, and there are no priorities")
        self.tree.update(*args)

    def learn(self, batch: Mapping[str, Any], info: dict[str, Any]) -> None:
        """Set the priorities that ``info`` holds, for the rows there or of the batch."""
        rows = info.get("rows", batch.get("rows"))
        if self.tree is None or info.get("priorities") is None:
            return
        if rows is None:
            raise InvalidInputError("info holds priorities; give the rows they are for, there or in the batch")
        self.tree.update(rows, info["priorities"])
        info["stale_updates"] = self.stale_updates

    @property
    def has_weights(self) -> bool:
        """Whether what is drawn has weights: not, where draws are uniform."""
        return self.tree is not None

    @property
    def stale_updates(self) -> int:
        """Priorities that came for rows overwritten since, and were dropped."""
        return 0 if self.tree is None else self.tree.stale

    @property
    def priority_total(self) -> float:
        """The sum of all ``p_i``."""
        return 0.0 if self.tree is None else self.tree.total

    @property
    def total(self) -> float:
        """What draws are in proportion to: the sum of all ``p_i``."""
        return self.priority_total

    def priorities(self, rows: Any) -> Tensor:
        """``p_i`` of rows that are held, float32 ``[n]``."""
        ring = self._ring
        ids = as_tensor(rows, "rows").to(ring.device, torch.int64)
        time, lane = ids // ring.lanes, ids % ring.lanes
        if bool(((time < ring.written[lane] - ring.held()[lane]) | (time >= ring.written[lane]) | (ids < 0)).any()):
            raise InvalidInputError("rows holds some that are not held now; give the rows that a batch has")
        return torch.ones(len(ids), device=ring.device) if self.tree is None else self.tree.of(ids)

    def measure(self) -> Measures:
        """The draws of what is held, and its priorities."""
        return {**super().measure(), **({} if self.tree is None else self.tree.measure(self.count))}

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return super().nbytes + (0 if self.tree is None else self.tree.nbytes)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Counters and priorities."""
        numbers = {"drawn": self._drawn, "stale": self.stale_updates}
        counts = super().state()[1]
        return numbers, counts if self.tree is None else {**counts, "priorities": self.tree.leaves}

    def set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        """The ring was filled from a snapshot: put back what :meth:`state` returned."""
        super().set_state(numbers, reader)
        self._drawn = check_counted(self._owner, "drawn", numbers["drawn"])
        if self.tree is not None:
            reader.read_into("priorities", self.tree.leaves)
            self.tree.restore(reader.unusable)
            self.tree.rebuild()
            self.tree.stale = check_counted(self._owner, "stale", numbers["stale"])


class WindowSampler(PrioritySampler):
    """Windows of consecutive rows, by priority or, with an ``alpha`` of 0, each as likely as any other.

    Args:
        owner: The storage's class name, for errors.
        length: Rows of a window.
        stride: Rows from the beginning of one window to that of the next.
        across: Whether windows may reach beyond the end of an episode.
        alpha: The exponent of the priorities: 0 is uniform sampling.
        beta: The exponent of the importance weights: 1 corrects the bias completely.
        beta_steps: Batches over which ``beta`` is annealed to 1; None keeps it constant.
    """

    _windows: Windows

    def __init__(
        self, owner: str, length: int, stride: int, across: bool, alpha: float, beta: float, beta_steps: int | None
    ) -> None:
        super().__init__(owner, alpha, beta, beta_steps)
        self._length, self._stride, self._across = length, stride, across

    @property
    def row_axes(self) -> tuple[int, ...]:
        """Those of a window."""
        return (self._length,)

    def bind(self, owner: str, ring: EpisodeRing) -> None:
        """Draw from a new ring."""
        Sampler.bind(self, owner, ring)
        self._windows = Windows(ring, self._length, self._stride, across=self._across)
        self.tree = Priorities(ring, self.alpha, self._windows) if self.alpha > 0 else None

    def schema(self) -> dict[str, Any]:
        """What it keeps in a mapped folder beside the rows, as JSON."""
        windows = ["windows", self._length, self._stride, self._across]
        return {"priorities": windows if self.alpha > 0 else None}

    def begin(self, priorities: Any, mask: Any, lanes: range) -> Callable[[], None]:
        """Refuse them: a priority is that of a sequence."""
        if self.tree is None:
            return Sampler.begin(self, priorities, mask, lanes)
        raise InvalidInputError(
            f"priorities were given to add(), and those of this {self._owner} are of sequences, which are complete "
            "only after more steps: give them to update(). Nothing was written."
        )

    def _require_windows(self) -> None:
        self._require_rows()
        if not self._windows.has_windows:
            raise NotReadyError(
                f"no sequence of {self._length} steps is complete yet, and no shorter episode is over; add more steps"
            )

    def in_order(self) -> Tensor:
        """The first row of each window."""
        self._require_windows()
        return self._windows.in_order()

    def _pick(self, items: Tensor, random: Tensor) -> Drawn:
        return Drawn(self._windows.rows(items), others=items)

    def _draw(self, count: int, random: Tensor) -> Drawn:
        """The rows of ``count`` windows, ``[count, length]``, their weights if they have any, and their first rows."""
        self._require_windows()
        weights = None
        if self.tree is None:
            begins = self._windows.draw(count, random)
        else:
            begins, weights = self._draw_by_priority(count, random)
        return Drawn(self._windows.rows(begins), weights, others=begins)

    def _first_rows(self, drawn: Drawn) -> Tensor:
        """The row at which each window begins."""
        assert drawn.others is not None
        return drawn.others

    def draw_and_gather(self, gather: Gather, count: int, random: Tensor) -> tuple[Drawn, tuple[Tensor, ...]] | None:
        """The tensors of ``count`` windows, with their first rows and weights."""
        self._require_rows()
        tree = None if self.tree is None else self.tree.kernel
        made = gather.kernel.sample_windows(self._windows.kernel, tree, random, self.current_beta, count)
        if made is None:
            return None
        tensors, weights, begins = made
        self._drawn += tree is not None
        return Drawn(begins, weights, others=begins), tensors

    @property
    def total(self) -> float:
        """What draws are in proportion to: windows, or the sum of their priorities."""
        return float(len(self._windows)) if self.tree is None else self.tree.total

    @property
    def count(self) -> Tensor:
        """The windows that there are."""
        return self._windows.count

    @property
    def kernels(self) -> Kernels:
        """The kernels that do all of :meth:`follow`."""
        return self._windows.kernel, super().kernels[1]

    def follow(self) -> None:
        """Take in the rows that were written since."""
        self._windows.follow()
        super().follow()

    def forget(self, lanes: Tensor) -> None:
        """What is known of the rows of some lanes may be wrong."""
        self._windows.forget(lanes)

    def clear(self) -> None:
        """The ring was emptied."""
        self._windows.rebuild()
        super().clear()

    def set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        """The ring was filled from a snapshot: put back what :meth:`state` returned."""
        self._windows.rebuild()
        super().set_state(numbers, reader)
