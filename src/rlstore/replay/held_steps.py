"""The steps of a ring of replay as they are read one by one: by row id, or as episodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlstore.engine.batches.pipeline import Gather, Part, Request
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.engine.rows.episode_table import episode_table
from rlstore.engine.rows.schema import Structure
from rlstore.episodes import Listing
from rlstore.errors import RowNotHeldError

_ATTEMPTS = 3  # to read while other processes write, before they have to wait
_HIDDEN = "hidden_states"
_STEP = re.compile(r'\["(.*?)"\]|\[(\d+)\]')

_Read = TypeVar("_Read")
# What rows are read in: nobody changes the ring in this process meanwhile and, if True is given, in no other either.
Reading = Callable[[bool], AbstractContextManager[None]]


class RingSteps:
    """The steps that a ring holds, as :class:`~rlstore.episodes.HeldSteps`.

    Args:
        ring: The rows.
        structure: How the observations are nested; None takes it from the names of the ring's leaves.
        device: Where what is read goes; None for the device of the ring.
        reading: See :data:`Reading`; None if nobody writes.
    """

    def __init__(
        self,
        ring: EpisodeRing,
        structure: Structure | None = None,
        device: torch.device | None = None,
        reading: Reading | None = None,
    ) -> None:
        self._ring, self._structure = ring, structure or structure_of([leaf.field.name for leaf in ring.leaves])
        self.device = device or ring.device
        self._reading = reading or _alone
        self._requests = _requests(ring)
        self.lanes, self.names = ring.lanes, tuple(self._requests)
        scalars = [c.name for c in ring.columns[1:] if c.shape == () and c.name in self.names]
        self.scalars = frozenset(("terminated", "truncated", *scalars))

    def read(self, rows: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Copies of some fields of rows, ``[*rows.shape, ...]`` each.

        Raises:
            RowNotHeldError: (an IndexError) if any of the rows is not held now.
        """
        requests = [request for name in names for request in self._requests[name]]
        gather, there = Gather(self._ring, requests, 1, 1.0), rows.to(self._ring.device)

        def attempt() -> tuple[Tensor, ...] | None:
            self._require_held(there)
            return gather.attempt(there.flatten().contiguous())

        return self._named(self._settled(attempt), names, rows.shape)

    def read_or_zeros(self, rows: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """:meth:`read`, with zeros where a row is -1, of rows that are known to be held while nobody writes."""
        requests = [request for name in names for request in self._requests[name]]
        with torch.inference_mode(False):
            tensors = Gather(self._ring, requests, 1, 1.0)(rows.flatten().contiguous())
        return self._named(tensors, names, rows.shape)

    def _named(self, tensors: Sequence[Tensor], names: Sequence[str], shape: torch.Size) -> dict[str, Any]:
        left = iter(tensors)
        named = {}
        for name in names:
            parts = [next(left).to(self.device) for _ in self._requests[name]]
            parts = [part.reshape((*shape, *part.shape[1:])) for part in parts]
            if name in ("observations", "next_observations"):
                named[name] = self._structure.build(parts, shape)
            else:
                named[name] = parts[0] if len(parts) == 1 else tuple(parts)
        return named

    def final_observations(self, row: Tensor, is_over: bool) -> Any:
        """What followed a row; at the end of an episode that is its final observation."""
        return self.read(row, ("next_observations",))["next_observations"]

    def rows(self) -> Tensor:
        """The rows that are held, oldest first, int64 on the CPU."""
        ring = self._ring
        with self._reading(False):
            written, held = torch.stack((ring.written, ring.held())).cpu()
        oldest, steps = written - held, torch.arange(int(held.max())).unsqueeze(1)
        rows: Tensor = ((oldest + steps) * ring.lanes + torch.arange(ring.lanes))[steps < held]
        return rows if bool((oldest == oldest[0]).all()) else rows.sort().values

    def listing(self) -> Listing:
        """The episodes that are held. A device is waited for once."""
        return self._settled(self._list)

    def _list(self) -> Listing | None:
        ring = self._ring
        table = episode_table(ring)
        totals = table.totals.flatten(1) if table.totals.dim() > 1 else table.totals.unsqueeze(1)
        flags = (table.ends & 1, table.ends >> 1 & 1, table.is_over.long(), table.is_whole.long())
        first_rows = table.firsts * ring.lanes + table.lanes
        numbers = torch.stack((first_rows, table.lanes, table.lengths, *flags, *totals.view(torch.int64).unbind(1)))
        numbers = numbers.cpu()
        if ring.is_shared and ring.overrun() is not None:
            return None
        numbers = numbers[:, numbers[2] > 0]
        numbers = numbers[:, numbers[0].argsort()]
        first_rows, envs, lengths, terminated, truncated, is_over, is_whole, *sums = numbers.contiguous().unbind()
        returns = torch.stack(sums, 1).view(torch.float64).reshape(-1, *table.totals.shape[1:])
        ends = (flag.bool() for flag in (terminated, truncated, is_over, is_whole))
        return Listing(first_rows, envs, lengths, returns, *ends)

    def _settled(self, read: Callable[[], _Read | None]) -> _Read:
        """What ``read`` returns, tried again if it is None because other processes overwrote something meanwhile."""
        for attempt in range(_ATTEMPTS + 1):
            with self._reading(attempt == _ATTEMPTS):
                result = read()
            if result is not None:
                return result
        raise RuntimeError("rows were overwritten while nobody may write")

    def _require_held(self, rows: Tensor) -> None:
        """Refuse rows of which any is not held. On a device this waits for it."""
        ring = self._ring
        rows, oldest = rows.flatten(), ring.written - ring.held()
        lane, time = rows % ring.lanes, rows // ring.lanes
        is_held = (time >= oldest[lane]) & (time < ring.written[lane])
        if bool(is_held.all()):
            return
        row = int(rows[int((~is_held).nonzero()[0])])
        lane_, time_ = row % ring.lanes, row // ring.lanes
        first, written = int(oldest[lane_]), int(ring.written[lane_])
        if row < 0:
            problem = "is negative, and no row is"
        elif time_ >= written:
            problem = f"was never written: it would be step {time_:,} of environment {lane_}"
        else:
            problem = f"is not held any more: step {time_:,} of environment {lane_} was overwritten or removed"
        held = f"steps {first:,} to {written - 1:,} of it are held" if first < written else "none of its steps is held"
        raise RowNotHeldError(
            f"row {row} {problem}{'; ' + held if row >= 0 else ''}. held_rows() lists the rows that can be read. "
            "Nothing was read."
        )


def _alone(still: bool) -> AbstractContextManager[None]:
    return nullcontext()


def _requests(ring: EpisodeRing) -> dict[str, list[Request]]:
    """The tensors of each field of a step, by the names of the vocabulary; scalars are ``[1]``."""

    def observed(part: Part) -> list[Request]:
        return [Request(part, i, leaf.field.shape, leaf.field.dtype) for i, leaf in enumerate(ring.leaves)]

    columns = {
        # An action is served in the shape of its space.
        c.name: Request(Part.COLUMN, i, c.shape or ((1,) if i else ()), c.dtype)
        for i, c in enumerate(ring.columns)
    }
    hidden = [name for name in columns if name.startswith(f"{_HIDDEN}[")]
    return {
        "observations": observed(Part.OBSERVATION),
        "actions": [columns.pop("actions")],
        "rewards": [columns.pop("rewards")],
        "terminated": [Request(Part.TERMINATED, 0, (1,), torch.bool)],
        "truncated": [Request(Part.TRUNCATED, 0, (1,), torch.bool)],
        "next_observations": observed(Part.NEXT_OBSERVATION),
        **({_HIDDEN: [columns.pop(name) for name in hidden]} if hidden else {}),
        **{name: [request] for name, request in columns.items()},
    }


def structure_of(names: Sequence[str]) -> Structure:
    """How observations are nested, from the names of their leaves."""
    paths = [tuple(int(at) if at else key for key, at in _STEP.findall(name)) for name in names]
    return Structure(paths, "observations")
