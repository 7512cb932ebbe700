"""The steps of a rollout as they are read one by one: by row id, or as episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlstore.engine.guard import Guard
from rlstore.engine.rows.ring import Ring
from rlstore.engine.rows.schema import Structure
from rlstore.episodes import Listing
from rlstore.errors import RowNotHeldError
from rlstore.fragments import Fragments, find_fragments, list_fragments
from rlstore.rollout.resets import BLOCK as RESETS


class StepField(NamedTuple):
    """A field of all steps of a rollout.

    Attributes:
        leaves: ``[steps, envs, ...]`` each.
        build: What is served, from its leaves ``[*shape, ...]`` and their shape.
        is_scalar: Whether it is one number a step, whose leaf has an axis of 1 for it.
    """

    leaves: list[Tensor]
    build: Callable[[Sequence[Tensor], torch.Size], Any]
    is_scalar: bool = False


class Rollout(Protocol):
    """What is asked of a rollout storage."""

    @property
    def _guard(self) -> Guard: ...

    @property
    def _ring(self) -> Ring | None: ...

    @property
    def _observations(self) -> Structure: ...

    def _step_fields(self) -> dict[str, StepField]:
        """The fields of the steps that are held, by name."""
        ...

    def _row_ids(self) -> Tensor | None:
        """The rows that batches are made of, int64; None if they are all that are held."""
        ...

    def _first_begins(self) -> Tensor:
        """Whether the first step is known to begin an episode, bool ``[envs]``."""
        ...

    def _after_newest(self) -> list[Tensor] | None:
        """The leaves of the observations after the newest step; None if they are not known."""
        ...


class RolloutSteps:
    """The steps of the rollout that a storage holds now, as :class:`~rlstore.episodes.HeldSteps`.

    They are those of this rollout only: when the next one has begun, they are not held any more.

    Args:
        storage: The storage, whose guard is held.
        ring: Its ring.
    """

    def __init__(self, storage: Rollout, ring: Ring) -> None:
        self._storage, self._ring, self._begin = storage, ring, ring.begin
        self.lanes, self.device = ring.lanes, ring.device
        fields = storage._step_fields()
        self.names = tuple(fields)
        self.scalars = frozenset(name for name, field in fields.items() if field.is_scalar)

    def read(self, rows: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Copies of some fields of rows, ``[*rows.shape, ...]`` each.

        Raises:
            RowNotHeldError: (an IndexError) if any of the rows is not held now.
        """
        with self._storage._guard:
            self._require_held(rows)
            fields, there = self._storage._step_fields(), rows.flatten().to(self.device)
            time, lane = there // self.lanes, there % self.lanes
            found = {name: [leaf[time, lane] for leaf in fields[name].leaves] for name in names}
        return {
            name: fields[name].build([leaf.reshape((*rows.shape, *leaf.shape[1:])) for leaf in leaves], rows.shape)
            for name, leaves in found.items()
        }

    def final_observations(self, row: Tensor, is_over: bool) -> Any:
        """What follows the last step of an episode, if it is the next observation in the rollout.

        It is so for an episode that goes on, and with next-step autoreset for all of them.
        """
        with self._storage._guard:
            self._require_held(row)
            if is_over and RESETS not in self.names:
                return None
            if row + self.lanes < self._ring.size * self.lanes:
                return self.read(row + self.lanes, ("observations",))["observations"]
            leaves = self._storage._after_newest()
            if leaves is None:
                return None
            lane = int(row) % self.lanes
            return self._storage._observations.build([leaf[lane].clone() for leaf in leaves], row.shape)

    def rows(self) -> Tensor:
        """The rows that are held, but for reset steps, oldest first, int64 on the CPU."""
        with self._storage._guard:
            self._require_current()
            rows = self._storage._row_ids() if self._ring.size else None
            return torch.arange(self._ring.size * self.lanes) if rows is None else rows.cpu()

    def fragments(self) -> Fragments:
        """The episodes, and parts of episodes, that are held. A device is not waited for."""
        with self._storage._guard:
            self._require_current()
            fields = self._storage._step_fields()
            names = ("terminated", "truncated", "rewards")
            terminated, truncated, rewards = (fields[name].leaves[0].squeeze(-1) for name in names)
            resets = fields[RESETS].leaves[0].squeeze(-1) if RESETS in fields else torch.zeros_like(terminated)
            return find_fragments(terminated, truncated, rewards, resets, self._storage._first_begins())

    def listing(self) -> Listing:
        """The episodes, and parts of episodes, that are held. A device is waited for once."""
        found = list_fragments(self.fragments(), torch.arange(self.lanes), self.lanes)
        order = found.first_rows.argsort()
        return Listing(*(column[order] for column in found))

    def _require_current(self) -> None:
        if self._storage._ring is not self._ring or self._ring.begin != self._begin:
            raise RowNotHeldError(
                "the rollout that these steps were of is not held any more: another one was begun. List the episodes, "
                "or the rows, again. Nothing was read."
            )

    def _require_held(self, rows: Tensor) -> None:
        self._require_current()
        steps, given = self._ring.size, rows.flatten().cpu()
        held = steps * self.lanes
        missing = ((given < 0) | (given >= held)).nonzero()
        if len(missing):
            which = f"rows 0 to {held - 1} are" if held else "no row is"
            raise RowNotHeldError(
                f"row {int(given[int(missing[0])])} is not held: the rollout has {steps} steps of {self.lanes} "
                f"environments so far, and {which}. Nothing was read."
            )
