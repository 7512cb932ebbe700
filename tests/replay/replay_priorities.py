"""What the state machines of prioritized storages share: priorities that come back by row, late or wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from replay_machine import ReplayMachine
from replay_model import Priorities

PRIORITIES = st.sampled_from([0.0, 0.25, 1.0, 2.0, 4.0])
FORMS = {
    "vector": lambda values: torch.tensor(values),
    "column": lambda values: torch.tensor(values).unsqueeze(-1),
    "array": lambda values: np.array(values),
    "list": lambda values: values,
}
BAD = {"nan": math.nan, "negative": -1.0, "infinite": math.inf, "row to come": 1.5, "row below 0": 1.5}


class PriorityMachine(ReplayMachine):
    """``drawable`` says which rows can be drawn: those that have a priority."""

    def drawable(self) -> set[int]:
        raise NotImplementedError

    @property
    def is_prioritized(self) -> bool:
        return self.config.options["alpha"] > 0 or not self.is_optional

    is_optional = False  # whether alpha = 0 means that there are no priorities

    def begin(self, config):
        super().begin(config)
        self.clear_priorities()

    def clear_priorities(self) -> None:
        options = self.config.options
        self.priorities = Priorities(options["alpha"], options["beta"], options["beta_steps"])
        self.ever: set[int] = set()

    def storage_replaced(self):
        self.clear_priorities()

    def stored(self, rows, in_slice=False):
        if not self.is_prioritized:
            return
        now = self.drawable()
        new = sorted(now - self.priorities.held.keys())
        before, rest = self.priorities.largest(), self.priorities.largest(now)
        # The oldest rows go when new ones come: the largest priority may be one of theirs, and both readings are right.
        allowed = {before, rest} | (set(self.priorities.held.values()) | {1.0} if in_slice else set())
        self.priorities.keep(now)
        self.ever |= now
        for row, value in zip(new, self.held_in_storage(new), strict=True):
            near = min(allowed, key=lambda other: abs(other - value))
            assert math.isclose(near, value, rel_tol=1e-6), f"row {row} has {value} and not one of {allowed}"
            self.priorities.held[row] = near

    def emptied(self):
        self.stored([])

    def held_in_storage(self, rows: list[int]) -> list[float]:
        return self.storage.priorities(torch.tensor(rows, dtype=torch.int64)).flatten().tolist() if rows else []

    def can_sample(self):
        return any(self.priorities.held.values()) if self.is_prioritized else bool(self.drawable())

    def serve(self, size=None):
        batch = super().serve(size)
        if batch is not None:
            self.check_weights(batch.rows.tolist(), batch.weights)
        return batch

    def check_weights(self, rows: list[int], weights: torch.Tensor) -> None:
        assert tuple(weights.shape) == (len(rows), 1)
        if not self.is_prioritized:
            assert (weights == 1).all()
            return
        expected = self.priorities.weights(rows, self.priorities.next_beta())
        assert weights.flatten().tolist() == pytest.approx(expected, rel=1e-4)

    def same_draws(self, twin):
        super().same_draws(twin)
        if self.can_sample() and self.is_prioritized:
            self.priorities.next_beta()
        assert self.storage.stale_updates == twin.stale_updates

    # ---------------------------------------------------------------------------------------------- drawing

    def see_all(self):
        """One draw falls in each of equal parts of the total, so that how often a row comes is known to within two."""
        held, total = self.priorities.held, sum(self.priorities.held.values())
        least = min((value for value in held.values() if value), default=1.0)
        size = math.ceil(3 * total / least) + 1
        batch = self.serve(size)
        if batch is None:
            return
        self.check(batch, size)
        counts = dict.fromkeys(held, 0)
        for row in batch.rows.tolist():
            counts[row] += 1
        for row, count in counts.items():
            share = size * held[row] / total
            assert (share - 2 < count < share + 2) if held[row] else count == 0, (row, count, share)

    # ---------------------------------------------------------------------------------------------- updates

    def choose(self, places: list[int]) -> list[int]:
        """Some of the rows that there are or were."""
        known = sorted(self.ever)
        return list(dict.fromkeys(known[place % len(known)] for place in places)) if known else []

    @precondition(lambda self: self.is_prioritized)
    @rule(
        given=st.dictionaries(st.integers(0, 500), PRIORITIES, min_size=1, max_size=12),
        form=st.sampled_from(sorted(FORMS)),
        way=st.sampled_from(["update", "batch, info", "info"]),
    )
    def update(self, given, form, way):
        rows = self.choose(list(given))
        values = list(given.values())[: len(rows)]
        if not rows:
            return
        priorities, ids = FORMS[form](values), torch.tensor(rows)
        if way == "update":
            assert self.storage.update(ids, priorities) is None
        else:
            info = {"priorities": priorities, **({"rows": ids} if way == "info" else {})}
            given_in = ({"rows": ids}, info) if way == "batch, info" else (None, None, info)
            assert self.storage.after_gradients(*given_in)["storage_size"] == len(self.model.held())
        self.priorities.update(rows, values)

    @precondition(lambda self: self.is_prioritized)
    @rule(places=st.lists(st.integers(0, 500), min_size=2, max_size=5), bad=st.sampled_from(sorted(BAD)))
    def update_with_something_bad(self, places, bad):
        rows = self.choose(places)
        values = [1.5] * len(rows)
        if bad.startswith("row"):
            beyond = max(lane.written for lane in self.model.lanes) * self.config.num_envs + places[0]
            rows, values = [*rows, beyond if bad == "row to come" else -1 - places[0]], [*values, 1.5]
        elif rows:
            values[-1] = BAD[bad]
        if rows:
            with pytest.raises(ValueError, match=rf"\b{len(rows) - 1} of {len(rows)}\b") as caught:
                self.storage.update(torch.tensor(rows), torch.tensor(values))
            assert f"row {rows[-1]} " in str(caught.value).replace(")", " ")

    def parameters_changed(self, beta=None, **values):
        super().parameters_changed(**values)
        if beta is not None:
            self.priorities.beta = beta
            self.config.options["beta"] = beta

    # ---------------------------------------------------------------------------------------------- at all times

    def check_data(self, data: dict[str, Any]) -> None:
        super().check_data(data)
        if not self.is_prioritized:
            return
        rows = sorted(self.priorities.held)
        assert self.held_in_storage(rows) == pytest.approx([self.priorities.held[row] for row in rows], rel=1e-6)
        assert float(self.storage.priority_total) == pytest.approx(sum(self.priorities.held.values()), rel=1e-6)
        assert self.storage.stale_updates == self.priorities.stale
