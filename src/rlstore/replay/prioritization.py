"""Drawing by priority, for the storages that do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.batches.priorities import Priorities
from rlstore.engine.checks import check_fraction, check_positive
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.rows.schema import as_tensor
from rlstore.errors import InvalidInputError
from rlstore.replay.trainer import OffPolicyStorage


class PriorityStorage(OffPolicyStorage):
    """Replay with priorities (Schaul et al. 2016): ``P(i) = p_i / sum(p)``, ``p_i = priority_i ** alpha``."""

    _priorities: Priorities | None = None

    def _set_priorities(self, alpha: float, beta: float, beta_steps: int | None) -> None:
        owner = type(self).__name__
        check_fraction(owner, alpha=alpha, beta=beta)
        if beta_steps is not None:
            check_positive(owner, beta_steps=beta_steps)
        self.alpha, self.beta, self.beta_steps = float(alpha), float(beta), beta_steps
        self._drawn = 0  # batches drawn

    @property
    def current_beta(self) -> float:
        """The exponent of the weights now: from ``beta`` it rises to 1 over ``beta_steps`` batches."""
        if self.beta_steps is None:
            return self.beta
        return self.beta + (1 - self.beta) * min(self._drawn / self.beta_steps, 1.0)

    @property
    def stale_updates(self) -> int:
        """Priorities that came for rows overwritten since, and were dropped. On CUDA, to ask is to wait."""
        return 0 if self._priorities is None else self._priorities.stale

    @property
    def priority_total(self) -> float:
        """The sum of all ``p_i``."""
        self._ring_of()
        self._catch_up()
        return 0.0 if self._priorities is None else self._priorities.total

    @property
    def draw_total(self) -> float:
        """What draws are in proportion to: the sum of all ``p_i``; without priorities, what can be drawn."""
        self._catch_up()
        return super().draw_total if self._priorities is None else self._priorities.total

    def priorities(self, rows: Any) -> Tensor:
        """``p_i`` of rows that are held, float32 ``[n]``."""
        ring = self._ring_of()
        ids = as_tensor(rows, "rows").to(ring.device, torch.int64)
        self._catch_up()
        time, lane = ids // ring.lanes, ids % ring.lanes
        if bool(((time < ring.written[lane] - ring.held()[lane]) | (time >= ring.written[lane]) | (ids < 0)).any()):
            raise InvalidInputError("rows holds some that are not held now; give the rows that a batch has")
        if self._priorities is None:
            return torch.ones(len(ids), device=ring.device)
        return self._priorities.of(ids)

    def _draw_by_priority(self, count: int, priorities: Priorities) -> tuple[Tensor, Tensor]:
        drawn = priorities.draw(count, self.current_beta, self._random)
        self._drawn += 1
        return drawn

    def update(self, *args: Any) -> None:
        """Set the priorities of rows, ``update(rows, priorities)``: all of them, or if one is refused none.

        Where the data lie on CUDA nobody waits to see what is in ``rows`` and ``priorities``: what would be refused is
        dropped, and counted in ``stale_updates`` as well.

        Args:
            *args: ``rows`` as a batch gave them, int64 ``[n]``, and ``priorities``, finite and not negative, ``[n]`` or
                ``[n, 1]``. Rows that are overwritten since are dropped, and counted in ``stale_updates``.
        """
        if len(args) != 2:
            raise TypeError(f"update() takes rows and priorities; {len(args)} arguments were given")
        self._ring_of()
        self._catch_up()
        if self._priorities is None:
            raise InvalidInputError(
                f"this {type(self).__name__} draws uniformly: alpha is 0, and there are no priorities"
            )
        self._priorities.update(*args)

    def _learn(self, batch: Mapping[str, Any], info: dict[str, Any]) -> None:
        rows = info.get("rows", batch.get("rows"))
        if self._priorities is None or info.get("priorities") is None:
            return
        if rows is None:
            raise InvalidInputError("info holds priorities; give the rows they are for, there or in the batch")
        self._priorities.update(rows, info["priorities"])
        info["stale_updates"] = self.stale_updates

    def _cleared(self) -> None:
        if self._priorities is not None:
            self._priorities.clear()

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers, tensors = super()._state()
        numbers.update(drawn=self._drawn, stale=self.stale_updates)
        return numbers, tensors if self._priorities is None else {**tensors, "priorities": self._priorities.leaves}

    def _set_state(self, numbers: Mapping[str, Any], reader: SnapshotReader) -> None:
        super()._set_state(numbers, reader)
        self._drawn = numbers["drawn"]
        if self._priorities is not None:
            self._priorities.stale = numbers["stale"]

    def _restored(self, reader: SnapshotReader) -> None:
        if self._priorities is not None:
            reader.read_into("priorities", self._priorities.leaves)
            self._priorities.rebuild()

    def _follow(self) -> None:
        if self._priorities is not None:
            self._priorities.follow()

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        return super().nbytes + (0 if self._priorities is None else self._priorities.nbytes)
