"""Priorities by row: a tree of sums, 16 children a node, that draws rows in proportion to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.batches.select import Windows
from rlstore.engine.checks import check_positive
from rlstore.engine.measures import Measures, Number, Ratio, spread
from rlstore.engine.memory.backing import Backing
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.schema import as_tensor, dtype_name
from rlstore.errors import InvalidInputError, NotReadyError, SnapshotError
from rlstore.kernels import kernel, protocol


class Priorities:
    """``p_i = priority_i ** alpha`` for every row i, and draws with ``P(i) = p_i / sum(p)``.

    A new row takes the largest p that is held (1 if none is above 0).

    On CUDA, in Triton, nothing here waits for the device but :attr:`total`, :attr:`stale` and what looks at the leaves.
    So there a draw does not notice that every priority is 0 (the weights are), and an update refuses nothing: what
    would be refused is dropped and counted as stale.

    Args:
        ring: The rows.
        alpha: How much priorities count: 0 not at all, 1 in full.
        windows: If given, only rows at which one of these windows begins have a priority.
    """

    def __init__(self, ring: EpisodeRing, alpha: float, windows: Windows | None = None) -> None:
        self.alpha, self._stale = alpha, 0
        self._ring, self._windows = ring, windows
        leaves = -(-ring.steps * ring.lanes // 16) * 16
        above = sum(kernel("Priorities", ring.device.type).level_sizes(leaves))
        # Of memory="shared" they are this process's own; and to read memory that is shared is to take it.
        own = Backing(ring.backing.owner, "ram", ring.device) if ring.backing.kind == "shared" else ring.backing
        make = own.zeros
        self._leaves = make("priorities", (leaves,), torch.float32)
        ring.beside["priorities"] = self._leaves
        self._sums = make("priority sums", (above,), torch.float64)
        self._maxima = make("priority maxima", (above,), torch.float32)
        # Rows that were followed. In a mapped folder it is a file too: a process may be killed between a row and its
        # priority. Older folders have none.
        is_known = ring.reopened and ring.backing.holds("priorities seen")
        self._seen = make("priorities seen", (ring.lanes,), torch.int64, is_late=True)
        if ring.reopened:
            self._sums.zero_()  # what lies behind the last node is read, and the kernel does not write it
            self._maxima.zero_()
            # A count that cannot be is from before a snapshot was loaded into the folder.
            can_be = (self._seen >= 0) & (self._seen <= ring.written)
            self.restore(ring.backing.unusable, torch.where(can_be, self._seen, 0) if is_known else ring.written)
        else:
            self._seen.copy_(ring.written)
        if windows is not None:
            windows.keep_priorities(self._leaves)
        self._kernel: protocol.Priorities | None = self._bound()

    @property
    def kernel(self) -> protocol.Priorities:
        """The tree itself, bound to the ring when it is first needed."""
        if self._kernel is None:
            self._kernel = self._bound()
        return self._kernel

    def _bound(self) -> protocol.Priorities:
        if self._windows is not None:
            self._seen.copy_(self._ring.written)  # rows have theirs with their windows, and none is new
        memory = (self._leaves, self._sums, self._maxima, self._seen)
        made: protocol.Priorities = kernel("Priorities", self._ring.device.type)(self._ring.kernel, memory)
        return made

    @property
    def leaves(self) -> Tensor:
        """Every p, float32, by row: that of ``time`` in ``lane`` is at ``lane * steps + time % steps``."""
        self.kernel.settle()
        return self._leaves

    @property
    def stale(self) -> int:
        """Priorities that came for rows overwritten since, and were dropped."""
        return self._stale + int(self.kernel.dropped())

    @stale.setter
    def stale(self, count: int) -> None:
        self._stale += count - self.stale

    @property
    def total(self) -> float:
        """The sum of all p."""
        return self.kernel.total()

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return self._leaves.nbytes + self._sums.nbytes + self._maxima.nbytes

    def measure(self, count: Number) -> Measures:
        """The priorities of the ``count`` rows that have one, and the updates that were dropped."""
        ring = self._ring
        by_lane = self.leaves[: ring.lanes * ring.steps].view(ring.lanes, ring.steps)
        leaves = by_lane[:, : ring.reached(ring.steps)].flatten()
        return {
            **spread("priority", leaves, leaves > 0),
            "priority_mean": Ratio(leaves.sum(dtype=torch.float64), count),
            "stale_updates": self._stale + self.kernel.dropped(),
        }

    def follow(self) -> None:
        """Give what was written since its first priority, and drop what was overwritten."""
        if self._windows is None:
            self.kernel.follow()
        else:
            self.kernel.follow_windows(self._windows.kernel)

    def begin(self, priorities: Any, mask: Any, lanes: range) -> Callable[[], None]:
        """Check the first priorities of the next rows of some lanes.

        Args:
            priorities: Finite and not negative, ``[lanes]`` or ``[lanes, 1]``; on CUDA they are not looked at.
            mask: False for lanes that take no part, or None.
            lanes: Which lanes of the ring.

        Returns:
            What sets them, to be called once the rows are written. Lanes that have written none keep what they have.

        Raises:
            InvalidInputError: If they are no priorities.
        """
        ring, count, given = self._ring, len(lanes), as_tensor(priorities, "priorities")
        if tuple(given.shape) not in ((count,), (count, 1), *([()] if count == 1 else [])) or given.dtype.is_complex:
            raise InvalidInputError(
                f"priorities are {tuple(given.shape)} {dtype_name(given.dtype)}; give a real number for each of "
                f"{count} environments. Nothing was written."
            )
        given = given.to(ring.device).flatten()
        values = _as_float32(given)
        if not values.is_cuda:
            taken = torch.ones(count, dtype=torch.bool) if mask is None else as_tensor(mask, "mask").flatten() != 0
            wrong = ~((values >= 0) & (values < torch.inf))
            if len(taken) == count and bool((wrong & taken).any()):  # else the mask is refused with the step
                lane = int((wrong & taken).nonzero()[0])
                raise InvalidInputError(
                    f"the priority of environment {lane} is {given[lane].item()}; priorities must be finite (as "
                    "float32) and >= 0. Nothing was written."
                )
            values = torch.where(wrong, 0.0, values)
        new = torch.zeros(ring.lanes, device=ring.device)
        new[lanes.start : lanes.stop] = values
        before = ring.written.clone()

        def begin() -> None:
            self.follow()
            self.kernel.begin(before, new, self.alpha)

        return begin

    def clear(self) -> None:
        """No row has a priority any more."""
        ring = self._ring
        by_lane = self._leaves[: ring.lanes * ring.steps].view(ring.lanes, ring.steps)
        by_lane[:, : ring.reached(ring.steps)].zero_()  # to write the others would take their memory
        self.rebuild()

    def rebuild(self) -> None:
        """Every sum from the leaves, as they are now."""
        self._seen.copy_(self._ring.written)
        self.kernel.rebuild()

    def restore(self, damaged: Callable[[str, str], SnapshotError], followed: Tensor | None = None) -> None:
        """The leaves come from a disk: leave a priority to every row that can be drawn, and to no other.

        Args:
            damaged: Makes the error from the name of a tensor and what is wrong with it.
            followed: How many rows of each lane were followed when whoever wrote them stopped, which may have been at
                any moment; the others get their first priority. None: the leaves were saved, and each is as it was.
        """
        ring, steps = self._ring, self._ring.steps
        if not bool((self._leaves.isfinite() & (self._leaves >= 0)).all()):
            raise damaged("priorities", "one is not a finite number of at least 0")
        self._leaves[ring.lanes * steps :] = 0
        by_lane = self._leaves[: ring.lanes * steps].view(ring.lanes, steps)
        counts = enumerate(zip(*(count.tolist() for count in (ring.written, ring.held())), strict=True))
        new = [
            self._restore_lane(
                by_lane[lane], lane, written - held, written, None if followed is None else followed[lane]
            )
            for lane, (written, held) in counts
        ]
        largest = self._leaves.max()
        for lane, places in enumerate(new):
            by_lane[lane, places] = torch.where(largest > 0, largest, 1.0)
        self._seen.copy_(ring.written)

    def _restore_lane(self, leaves: Tensor, lane: int, oldest: int, written: int, seen: Tensor | None) -> Tensor:
        """Drop what is no row's, and find the places of rows that have no priority yet."""
        if self._windows is None:
            starts = known_since = torch.arange(oldest, written, device=leaves.device)
        else:
            starts, known_since = self._windows.of_lane(lane)
        is_new = torch.zeros_like(starts, dtype=torch.bool) if seen is None else known_since >= seen
        if self._windows is not None and seen is not None and not (leaves[starts % len(leaves)][~is_new] > 0).any():
            # The oldest row was lost, and windows that begin every so many rows begin at others now.
            is_new = torch.ones_like(is_new)
        gone = torch.ones_like(leaves, dtype=torch.bool)
        gone[starts % len(leaves)] = False
        leaves.masked_fill_(gone, 0)
        return starts[is_new] % len(leaves)

    def draw(self, count: int, beta: float, random: Tensor) -> tuple[Tensor, Tensor]:
        """``count`` rows, one drawn in each of as many equal parts of the total, and their weights.

        Returns:
            rows int64 ``[count]``, weights float32 ``[count, 1]``: ``(P(i) * size) ** -beta`` over the largest of them.
        """
        rows = torch.empty(count, dtype=torch.int64, device=self._ring.device)
        weights = torch.empty((count, 1), dtype=torch.float32, device=self._ring.device)
        if not self.kernel.draw(random, beta, rows, weights):
            raise NotReadyError("every priority is 0, so no row can be drawn; give some row a priority above 0")
        return rows, weights

    def update(self, rows: Any, priorities: Any) -> None:
        """Set priorities; all, or if one is refused none. Rows that are overwritten since are dropped and counted.

        Args:
            rows: Row ids, int64 ``[n]``.
            priorities: Finite and not negative, ``[n]`` or ``[n, 1]``.
        """
        windows = None if self._windows is None else self._windows.kernel
        refused, index, _ = self.kernel.update(rows, priorities, self.alpha, windows)
        if refused:
            ids, given, values = self._converted(rows, priorities)
            if refused == protocol.NOT_READ:
                refused, index, _ = self.kernel.update(ids, values, self.alpha, windows)
            if refused:
                self._refuse(refused, index, ids, given)

    def _converted(self, rows: Any, priorities: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, int64 ``[n]``, and priorities, ``[n]``, as given and as float32."""
        ids = as_tensor(rows, "rows").flatten()
        if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.dtype.is_complex:
            raise InvalidInputError(f"rows are {ids.dtype}; give the whole numbers that a batch has. {_UNCHANGED}")
        given = as_tensor(priorities, "priorities")
        if tuple(given.shape) not in ((len(ids),), (len(ids), 1)) or given.dtype.is_complex:
            raise InvalidInputError(
                f"priorities are {tuple(given.shape)} {given.dtype} for {len(ids)} rows; give a real number for each. "
                f"{_UNCHANGED}"
            )
        ids = ids.to(self._ring.device, torch.int64).contiguous()
        given = given.to(self._ring.device).flatten()
        return ids, given, _as_float32(given)

    def _refuse(self, reason: int, index: int, rows: Tensor, priorities: Tensor) -> None:
        row, count = int(rows[index]), len(rows)
        if reason == 1:
            raise InvalidInputError(
                f"priority {index} of {count} (row {row}) is {priorities[index].item()}; priorities must be finite "
                f"(as float32) and >= 0. {_UNCHANGED}"
            )
        if reason == 2:
            raise InvalidInputError(
                f"row {row} (number {index} of {count}) was never written; give the rows that a batch has. {_UNCHANGED}"
            )
        raise InvalidInputError(
            f"no sequence begins at row {row} (number {index} of {count}); give the rows that a batch has. {_UNCHANGED}"
        )

    def of(self, rows: Tensor) -> Tensor:
        """P of rows that are held, float32 ``[n]``."""
        time, lane = rows // self._ring.lanes, rows % self._ring.lanes
        return self.leaves[lane * self._ring.steps + time % self._ring.steps]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stale": self.stale, "_leaves": self.leaves, "_kernel": None}


def kept_priorities(ring: EpisodeRing, kept: Any) -> tuple[Priorities | None, Windows | None]:
    """The priorities of the rows or windows of a mapped folder, and the windows.

    Args:
        ring: Its rows.
        kept: What it says that it keeps beside them: None, "rows" or ``["windows", length, stride, across]``.

    Raises:
        TypeError or ValueError: If it says something else.
        SnapshotError: If they cannot be priorities of these rows.
    """
    windows = None
    if isinstance(kept, list):
        _, length, stride, across = kept
        check_positive("a mapped storage", length=length, stride=stride)
        if length > ring.steps:
            raise ValueError(f"windows of {length} steps, and {ring.steps} are held")
        windows = Windows(ring, length, stride, across=bool(across))
    # Without rows there are none, and their files need not be there.
    return (None if kept is None or not ring.size else Priorities(ring, 1.0, windows)), windows


def _as_float32(given: Tensor) -> Tensor:
    values = given.to(torch.float32).contiguous()
    if given.dtype == torch.float64:  # what is above 0 stays so, though a float32 cannot tell
        values = torch.where(given > 0, values.clamp(min=torch.finfo(torch.float32).tiny), values)
    return values


_UNCHANGED = "No priority was changed."
