"""The reset steps of next-step autoreset: which rows of a rollout they are, and what cannot be one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.engine.memory.tensors import allocate_empty
from rlstore.engine.rows.finals import final_of_next_step, find_final
from rlstore.engine.rows.ring import Ring
from rlstore.engine.rows.schema import Field
from rlstore.errors import InvalidInputError

BLOCK = "reset_steps"
_REMEDY = (
    "If you have called envs.reset() since, call storage.reset() too, after the update and in place of clear(): then "
    "the next step begins an episode. If the environments reset themselves in the step in which an episode ends, make "
    'the storage with autoreset="SameStep"; if you reset them yourself, with autoreset="Disabled".'
)


class ResetSteps:
    """The steps after an end, in which an environment only begins its next episode; its action is ignored.

    They have a block of flags, one row longer than a rollout: row t + 1 holds the ends of step t, row 0 those of the
    last step of the rollout before. The host knows how many there are, unless the flags of a step were given on a
    device: then it waits for them when it has to know.

    Args:
        lanes: The number of environments.

    Attributes:
        due_count: The environments whose next step is a reset step; -1 if that is known on a device alone.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.forget()

    def forget(self) -> None:
        """No episode has ended."""
        self._due: np.ndarray[Any, np.dtype[np.bool_]] | None = (
            None  # the lanes whose next step is one, if the host knows of any
        )
        self.due_count = 0
        self._count = 0  # in this rollout; -1: not known

    def check(
        self, rewards: Any, ended: Tensor, count: int, field: Field, final_values: Any, infos: Any = None
    ) -> None:
        """Refuse a step that cannot follow the one before it, as far as its values are in the host's memory.

        Args:
            rewards: As given.
            ended: Which episodes ended, uint8 ``[envs]``.
            count: How many; -1 if that is known on a device alone.
            field: That of rewards.
            final_values: As given.
            infos: As given.

        Raises:
            InvalidInputError: If a reset step has a reward, or ends an episode; or there are final observations, which
                environments report that reset themselves in the same step, or values of them.
        """
        if final_values is not None:
            raise InvalidInputError(
                'final_values were given, and with autoreset="NextStep" they are the values of the next step. '
                "Nothing was written."
            )
        found = None if infos is None or (type(infos) is dict and not infos) else find_final(infos, "")
        if found is not None:
            raise final_of_next_step(f"infos holds {found[0]!r}")
        if self._due is None:
            return
        if count > 0 and (wrong := (ended.numpy() != 0) & self._due).any():
            self._refuse(wrong, "ends an episode, and a reset step cannot")
        if not (isinstance(rewards, Tensor) and rewards.is_cuda):
            given = field.fit(rewards, self._lanes, torch.device("cpu")).flatten().numpy()
            wrong = (given != 0) & self._due
            if wrong.any():
                self._refuse(
                    wrong, f"has the reward {given[wrong][0]}, and that of a reset step is 0: do not change it"
                )

    def _refuse(self, lanes: np.ndarray[Any, Any], problem: str) -> None:
        raise InvalidInputError(
            f'environment {np.flatnonzero(lanes)[0]} ended its episode in the step before: with autoreset="NextStep" '
            f"this step only resets it. It {problem}. {_REMEDY} Nothing was written."
        )

    def follow(self, ended: Tensor, count: int) -> None:
        """A step was written, in which these episodes ended, uint8 ``[envs]``; how many, or -1 as for :meth:`check`."""
        if self.due_count:
            is_known = self._count >= 0 and self.due_count > 0
            self._count = self._count + self.due_count if is_known else -1
        self.due_count, self._due = count, ended.numpy() != 0 if count > 0 else None

    def carry(self, ring: Ring) -> None:
        """A new rollout begins: its first step is a reset step where the newest one ended an episode."""
        block = ring.blocks[BLOCK]
        if ring.size:
            block[0].copy_(block[ring.size])
        self._count = 0

    def learn(self, ring: Ring) -> None:
        """The block was written otherwise: read what there is to know of it."""
        block = ring.blocks[BLOCK]
        due = (block[ring.size] != 0).cpu().numpy()
        self.due_count, self._count = int(np.count_nonzero(due)), -1
        self._due = due if self.due_count else None

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
