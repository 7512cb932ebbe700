"""The reset steps of next-step autoreset: which rows of a rollout they are, and what cannot be one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.memory.tensors import allocate_empty
from rlstore.engine.rows.finals import find_final
from rlstore.engine.rows.ring import Ring
from rlstore.engine.rows.schema import Field
from rlstore.errors import InvalidInputError
from rlstore.rollout.ends import Flags

BLOCK = "reset_steps"
_OTHERS = (
    "If the environments reset themselves in the step in which an episode ends, make the storage with "
    'autoreset="SameStep"; if you reset them yourself, with autoreset="Disabled".'
)


class ResetSteps:
    """The steps after an end, in which an environment only begins its next episode; its action is ignored.

    They have a block of flags, one row longer than a rollout: row t + 1 holds the ends of step t, row 0 those of the
    last step of the rollout before. The host knows how many there are, unless the flags of a step were given on a
    device: then it waits for them when it has to know.

    Args:
        lanes: The number of environments.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.forget()

    def forget(self) -> None:
        """No episode has ended."""
        self._due: Any = np.zeros(self._lanes, np.bool_)  # the lanes whose next step is one; on a device: None
        self._due_count = 0  # -1: not known
        self._count = 0  # in this rollout; -1: not known
        self._coming: Flags = self._due  # the ends of a step that was checked and is not written yet

    def check(self, rewards: Any, ended: Flags, field: Field, infos: Any = None) -> None:
        """Refuse a step that cannot follow the one before it, as far as its values are in the host's memory.

        Once it is written, :meth:`follow` has to be called.

        Args:
            rewards: As given.
            ended: Which episodes ended.
            field: That of rewards.
            infos: As given.

        Raises:
            InvalidInputError: If a reset step has a reward, or ends an episode; or there are final observations, which
                environments report that reset themselves in the same step.
        """
        found = None if infos is None or (type(infos) is dict and not infos) else find_final(infos, "")
        if found is not None:
            raise InvalidInputError(
                f'infos holds {found[0]!r}, and this storage was made with autoreset="NextStep", in which an '
                "episode's final observation is that of its reset step. Environments that reset themselves in the step "
                'in which an episode ends need autoreset="SameStep". Nothing was written.'
            )
        self._coming = ended
        if self._due_count <= 0:
            return
        if not isinstance(ended, Tensor) and (ended & self._due).any():
            self._refuse(ended & self._due, "ends an episode, and a reset step cannot")
        if not (isinstance(rewards, Tensor) and rewards.is_cuda):
            given = field.fit(rewards, self._lanes, torch.device("cpu")).flatten().numpy()
            wrong = (given != 0) & self._due
            if wrong.any():
                self._refuse(wrong, f"has the reward {given[wrong][0]}, and that of a reset step is 0")

    def _refuse(self, lanes: np.ndarray[Any, np.dtype[np.bool_]], problem: str) -> None:
        raise InvalidInputError(
            f'environment {np.flatnonzero(lanes)[0]} ended its episode in the step before: with autoreset="NextStep" '
            f"this step only resets it. It {problem}. {_OTHERS} Nothing was written."
        )

    def follow(self) -> None:
        """The step that was checked is written."""
        ended = self._coming
        known = self._count >= 0 and self._due_count >= 0
        self._count = self._count + self._due_count if known else -1
        is_known = not isinstance(ended, Tensor)
        self._due = ended if is_known else None
        self._due_count = int(np.count_nonzero(ended)) if is_known else -1

    def carry(self, ring: Ring) -> None:
        """A new rollout begins: its first step is a reset step where the newest one ended an episode."""
        block = ring.blocks[BLOCK]
        if ring.size:
            block[0].copy_(block[ring.size])
        self._count = 0

    def learn(self, ring: Ring) -> None:
        """The block was written otherwise: read what there is to know of it."""
        block = ring.blocks[BLOCK]
        self._due = (block[ring.size] != 0).flatten().cpu().numpy()
        self._due_count, self._count = int(np.count_nonzero(self._due)), -1

    def count(self, ring: Ring) -> int:
        """How many of the rows held are reset steps."""
        if self._count < 0:
            self._count = int(torch.count_nonzero(ring.blocks[BLOCK][: ring.size]))
        return self._count

    def flags(self, ring: Ring) -> Tensor:
        """Of each row held whether it is one, uint8 ``[steps, envs]``."""
        return ring.blocks[BLOCK][: ring.size]

    def other_rows(self, ring: Ring) -> Tensor | None:
        """The ids of the rows that are none, int64 ``[rows]``, in order; None if that is all of them."""
        count = ring.size * ring.lanes - self.count(ring)
        if count == ring.size * ring.lanes:
            return None
        is_other = self.flags(ring).flatten() == 0
        places = torch.where(is_other, is_other.cumsum(0) - 1, count)  # one behind the end for the others
        rows = allocate_empty((count + 1,), torch.int64, ring.device)
        rows.scatter_(0, places, torch.arange(len(places), device=ring.device))
        return rows[:count]
