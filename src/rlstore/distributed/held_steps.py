"""The steps of complete rollouts in slots as they are read one by one: by row id, or as episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.distributed.memory import RolloutMemory
from rlstore.distributed.rows import transition_keys, transition_value
from rlstore.episodes import Listing
from rlstore.errors import RowNotHeldError
from rlstore.fragments import Fragments, find_fragments, list_fragments


def fragments_of(terminated: Tensor, truncated: Tensor, rewards: Tensor) -> Fragments:
    """The episodes, and parts of episodes, in complete rollouts ``[rollouts, steps + 1]``."""
    begins = terminated[:, 0] | truncated[:, 0]  # an episode ended with the step before
    ends = terminated[:, 1:].T, truncated[:, 1:].T
    return find_fragments(*ends, rewards[:, 1:].T, torch.zeros_like(ends[0]), begins)


class SlotSteps:
    """The steps of the rollouts that are complete now, as :class:`~rlstore.episodes.HeldSteps`.

    No slot is taken for it: learners go on. A rollout whose slot was freed meanwhile is not held any more.

    Args:
        memory: The slots.
        device: Where what is read goes.
    """

    def __init__(self, memory: RolloutMemory, device: torch.device) -> None:
        self._memory, self.device, self.lanes = memory, device, memory.count
        self._keys, columns = transition_keys(memory.fields), memory.fields.columns
        self.names = tuple(self._keys)
        self.scalars = frozenset(
            name
            for name, (keys, _) in self._keys.items()
            if name not in ("observations", "actions") and not columns[keys[0]].shape
        )
        memory.handoff.check_open()
        self._contents = self._contents_now()

    def read(self, rows: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Copies of some fields of rows, ``[*rows.shape, ...]`` each.

        Raises:
            RowNotHeldError: (an IndexError) if any of the rows is not held now, or not any more when it was read.
        """
        keys = {key: self._keys[name][1] for name in names for key in self._keys[name][0]}
        tensors = self._read(rows, keys)
        fields = self._memory.fields
        return {
            name: transition_value(fields, name, [tensors[key] for key in self._keys[name][0]], rows.shape)
            for name in names
        }

    def final_observations(self, row: Tensor, is_over: bool) -> Any:
        """What follows the last step of an episode that goes on; of one that is over nothing is known."""
        if is_over:
            return None
        structure = self._memory.fields.structure
        tensors = self._read(row, dict.fromkeys(structure.names, 1))
        return structure.build([tensors[name] for name in structure.names], row.shape)

    def rows(self) -> Tensor:
        """The rows that are held, rollout by rollout, the oldest first, int64 on the CPU."""
        self._memory.handoff.check_open()
        times = torch.arange(self._memory.steps) * self.lanes
        return (self._slots().unsqueeze(1) + times).flatten()

    def columns(self, keys: Sequence[str], newest: int | None = None) -> tuple[Tensor, list[Tensor]]:
        """What the complete rollouts hold of some keys.

        Args:
            keys: Which.
            newest: Only of the newest so many; None for all.

        Returns:
            Their slots, the oldest first, and copies ``[slots, steps + 1, ...]`` of each key.
        """
        self._memory.handoff.check_open()
        slots = self._slots() if newest is None else self._slots()[-newest:]
        found = [self._memory.blocks[key][slots] for key in keys]
        still = self._contents_now()[slots] == self._contents[slots]  # what was read of the others may be anything
        return slots[still], [column[still] for column in found]

    def listing(self) -> Listing:
        """The episodes, and parts of episodes, that are held, rollout by rollout, the oldest first."""
        slots, (terminated, truncated, rewards) = self.columns(("terminated", "truncated", "reward"))
        return list_fragments(fragments_of(terminated, truncated, rewards), slots, self.lanes)

    def _slots(self) -> Tensor:
        """The slots with complete rollouts, the oldest first."""
        order = self._contents.argsort()
        return order[self._contents[order] >= 0]

    def _contents_now(self) -> Tensor:
        return torch.from_numpy(self._memory.handoff.slots.contents())

    def _read(self, rows: Tensor, keys: dict[str, int]) -> dict[str, Tensor]:
        """Copies of some keys, each of so many rows behind the given ones, ``[*rows.shape, ...]``."""
        given, blocks = rows.flatten().cpu(), self._memory.blocks
        self._require_held(given)
        time, slot = given // self.lanes, given % self.lanes
        found = {key: blocks[key][slot, time + behind] for key, behind in keys.items()}
        self._require_held(given)
        return {key: t.reshape((*rows.shape, *t.shape[1:])).to(self.device) for key, t in found.items()}

    def _require_held(self, rows: Tensor) -> None:
        self._memory.handoff.check_open()
        slot, now = rows % self.lanes, self._contents_now()
        is_held = (rows >= 0) & (rows < self._memory.steps * self.lanes) & (self._contents[slot] >= 0)
        is_held &= now[slot] == self._contents[slot]
        if not bool(is_held.all()):
            row = int(rows[int((~is_held).nonzero()[0])])
            raise RowNotHeldError(
                f"row {row} is not held: slot {row % self.lanes} of {self.lanes} has no complete rollout with it, or "
                f"another one by now. Rollouts have {self._memory.steps} steps; held_rows() lists the rows that can be "
                "read. Nothing was read."
            )
