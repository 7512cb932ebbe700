"""Prioritized replay of vectors: spread priorities; 256 transitions are drawn, and their priorities set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch

from benchmarks.harness import CYCLE, Contender, Phase, Target, Workload
from benchmarks.replay_buffers import AddableBuffer, Cpprb, Loop, Rlox, Rlstore, Tianshou, TorchRl, require_tree
from benchmarks.replay_contenders import Copies
from benchmarks.replay_data import Array, check_batches
from benchmarks.replay_vector import ADDS, BATCH, GIVEN, LOOP, SERVED, source

ALPHA, BETA = 0.6, 0.4
CALLS = 50
# An update takes a priority and a row each; a row and a weight are served with each transition.
UPDATED = DRAWN = 8 + 4


def spread(size: int, seed: int) -> Array:
    """Priorities that are distributed like TD errors: few are large."""
    return np.random.default_rng(seed).exponential(size=size).astype(np.float32) + np.float32(1e-3)


class PrioritizedBuffer(AddableBuffer):
    """A buffer whose rows have priorities.

    Attributes:
        update: sets the priorities of rows.
    """

    update: Callable[[Any, Any], object]

    @abstractmethod
    def spread(self, priorities: Array) -> None:
        """Set the priorities of all rows."""

    @abstractmethod
    def rows(self, drawn: Any) -> Any:
        """The rows of a batch, as ``update`` takes them."""

    @abstractmethod
    def weights(self, drawn: Any) -> torch.Tensor:
        """The importance weights of a batch, ``[B]``."""

    def given(self, priorities: Array) -> Any:
        """Priorities in the form in which ``update`` takes them."""
        return priorities


class RlstorePrioritized(Rlstore, PrioritizedBuffer):
    """Our PrioritizedReplayStorage."""

    def __init__(self, capacity: int) -> None:
        super().__init__(source(), capacity, "PrioritizedReplayStorage", alpha=ALPHA, beta=BETA)
        self.update = self.storage.update

    def spread(self, priorities: Array) -> None:
        self.update(torch.arange(self.capacity), torch.from_numpy(priorities))

    def rows(self, drawn: Any) -> Any:
        return drawn.rows

    def weights(self, drawn: Any) -> torch.Tensor:
        weights: torch.Tensor = drawn.weights
        return weights.squeeze(-1)

    def given(self, priorities: Array) -> Any:
        return torch.from_numpy(priorities)


class CpprbPrioritized(Cpprb, PrioritizedBuffer):
    """cpprb's PrioritizedReplayBuffer."""

    def __init__(self, capacity: int) -> None:
        super().__init__(source(), capacity, kind="PrioritizedReplayBuffer", alpha=ALPHA)
        self.update = self.buffer.update_priorities

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        return repeat((batch_size, BETA), calls)

    def spread(self, priorities: Array) -> None:
        self.update(np.arange(self.capacity), priorities)

    def rows(self, drawn: Any) -> Any:
        return drawn["indexes"]

    def weights(self, drawn: Any) -> torch.Tensor:
        return torch.from_numpy(drawn["weights"])


class RloxPrioritized(Rlox, PrioritizedBuffer):
    """rlox's PrioritizedReplayBuffer; new rows get the priority 1."""

    def __init__(self, capacity: int) -> None:
        super().__init__(source(), capacity, "PrioritizedReplayBuffer", ALPHA, BETA)
        self.update = self.buffer.update_priorities

    def fill(self) -> None:
        for steps in self.source.fill(self.capacity):
            for step in steps.each():
                self.buffer.push(*self.single(step))

    def spread(self, priorities: Array) -> None:
        self.update(np.arange(self.capacity, dtype=np.uint64), self.given(priorities))

    def rows(self, drawn: Any) -> Any:
        return drawn["indices"]

    def weights(self, drawn: Any) -> torch.Tensor:
        return torch.from_numpy(drawn["weights"])

    def given(self, priorities: Array) -> Any:
        return priorities.astype(np.float64)


class TianshouPrioritized(Tianshou, PrioritizedBuffer):
    """tianshou's PrioritizedReplayBuffer, whose tree is compiled by numba."""

    def __init__(self, capacity: int) -> None:
        super().__init__(source(), capacity, "PrioritizedReplayBuffer", alpha=ALPHA, beta=BETA)
        self.update = self.buffer.update_weight

    def spread(self, priorities: Array) -> None:
        self.update(np.arange(self.capacity), priorities)

    def rows(self, drawn: Any) -> Any:
        return drawn[1]

    def weights(self, drawn: Any) -> torch.Tensor:
        return torch.from_numpy(drawn[0].weight).float()


class TorchRlPrioritized(TorchRl, PrioritizedBuffer):
    """TorchRL's ReplayBuffer with a PrioritizedSampler."""

    def __init__(self, capacity: int) -> None:
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        require_tree()
        super().__init__(source(), capacity, sampler=PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA))
        self.update = self.buffer.update_priority

    def arguments(self, batch_size: int, calls: int) -> Iterable[tuple[Any, ...]]:
        return repeat((batch_size, True), calls)

    def spread(self, priorities: Array) -> None:
        self.update(torch.arange(self.capacity), torch.from_numpy(priorities))

    def batch(self, drawn: Any) -> dict[str, torch.Tensor]:
        return super().batch(drawn[0])

    def rows(self, drawn: Any) -> Any:
        return drawn[1]["index"]

    def weights(self, drawn: Any) -> torch.Tensor:
        weights: torch.Tensor = drawn[1]["priority_weight"]
        return weights

    def given(self, priorities: Array) -> Any:
        return torch.from_numpy(priorities)


class Prioritized(Contender):
    """Adds, draws batches, and sets the priorities of the rows that were drawn."""

    def __init__(self, name: str, make: Callable[[int], PrioritizedBuffer], capacity: int) -> None:
        super().__init__(name)
        self._buffer = make(capacity)
        self.role = self._buffer.role
        self._buffer.fill()
        self._buffer.spread(spread(capacity, seed=0))
        self._add = self._buffer.adding(source().loop(LOOP), ADDS)
        self._rows: list[Any] = []
        self._priorities = [self._buffer.given(spread(BATCH, seed=1 + i)) for i in range(CALLS)]

    def phases(self) -> Mapping[str, Loop]:
        return {"add": self._add, "sample": self._sample, "update": self._update}

    def _sample(self) -> None:
        sample, rows_of, drawn_rows = self._buffer.sample, self._buffer.rows, []
        for arguments in self._buffer.arguments(BATCH, CALLS):
            drawn = sample(*arguments)
            drawn_rows.append(rows_of(drawn))
        self._rows = drawn_rows

    def _update(self) -> None:
        update = self._buffer.update
        for rows, priorities in zip(self._rows, self._priorities, strict=True):
            update(rows, priorities)

    def evidence(self) -> Mapping[str, torch.Tensor]:
        (arguments,) = self._buffer.arguments(BATCH, 1)
        drawn = self._buffer.sample(*arguments)
        return self._buffer.batch(drawn) | {"weights": self._buffer.weights(drawn)}

    def close(self) -> None:
        self._buffer.close()


def check(evidence: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Check the batches and their importance weights."""
    check_batches(source(), (BATCH,), 1, evidence)
    for name, batch in evidence.items():
        weights = batch.get("weights", torch.ones(BATCH))
        if weights.shape != (BATCH,) or not bool(((weights > 0) & (weights < 1.00001)).all()):
            raise RuntimeError(f"{name} served weights {weights}")


MAKERS: dict[str, Callable[[int], PrioritizedBuffer]] = {
    "rlstore": RlstorePrioritized,
    "rlox": RloxPrioritized,
    "cpprb": CpprbPrioritized,
    "tianshou": TianshouPrioritized,
    "TorchRL": TorchRlPrioritized,
}
# By capacity: what may be taken of the time of the fastest peer.
AIMS = {1_000_000: {"sample": 0.22, "update": 0.5, CYCLE: 0.28}, 100_000: {"update": 0.7}}


def workload(capacity: int) -> Workload:
    size = f"{capacity // 1000}k" if capacity < 1_000_000 else f"{capacity // 1_000_000}M"
    floor = Copies(
        {
            "add": (GIVEN, ADDS),
            "sample": (BATCH * (SERVED + DRAWN), CALLS),
            "update": (BATCH * UPDATED, CALLS),
        }
    )
    return Workload(
        name=f"prioritized_{size}",
        title=f"Prioritized replay of {size} transitions, observations 17, actions 6",
        phases=(
            Phase("add", "add of one environment", ADDS),
            Phase("sample", "sample 256", CALLS),
            Phase("update", "update 256 priorities", CALLS),
        ),
        cycle=("sample", "update"),
        cycle_label="both",
        cycle_calls=CALLS,
        contenders={name: partial(Prioritized, name, make, capacity) for name, make in MAKERS.items()}
        | {"memcpy": lambda: floor},
        check=check,
        rounds=10,
        targets=tuple(
            Target(phase, ratio=ratio, row=f"prioritized {size}: {'both' if phase == CYCLE else phase}")
            for phase, ratio in AIMS[capacity].items()
        ),
    )
