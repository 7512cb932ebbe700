"""The Ray actors of the workloads with Ray: writers, and the servers of the other contenders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.replay_data import GAMMA, Array, Source, Steps

Arrays = dict[str, Array]
# Steps that a writer sends in one call, and calls that it may have in flight.
STEPS_A_CALL, CALLS_UNDER_WAY = 32, 4


class StepWriter(Protocol):
    """The interface of a writer; ours implements it."""

    def add(self, sample: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...


class Inserter:
    """A Ray actor that inserts prepared steps."""

    def __init__(self, source: Source, make_writer: Callable[[], StepWriter]) -> None:
        torch.set_num_threads(1)
        self._source, self._writer = source, make_writer()
        self._steps = [sample_of(step) for step in source.loop().each()]
        self._place = 0

    def fill(self, transitions: int) -> None:
        """Insert this many transitions."""
        for piece in self._source.fill(transitions):
            for step in piece.each():
                self._writer.add(sample_of(step))
        self._writer.flush()

    def insert(self) -> None:
        """Insert the steps of one call."""
        for _ in range(STEPS_A_CALL):
            self._writer.add(self._steps[self._place])
            self._place = (self._place + 1) % len(self._steps)

    def flush(self) -> None:
        """Wait until everything is inserted."""
        self._writer.flush()


def sample_of(step: Steps) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in vars(step).items()}


class CallingWriter:
    """Collects steps as ours does, and passes them to ``add`` of an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._gathered: list[Mapping[str, torch.Tensor]] = []
        self._calls: deque[Any] = deque()

    def add(self, sample: Mapping[str, torch.Tensor]) -> None:
        self._gathered.append(sample)
        if len(self._gathered) == STEPS_A_CALL:
            self._send()

    def _send(self) -> None:
        import ray

        if len(self._calls) == CALLS_UNDER_WAY:
            ray.get(self._calls.popleft())
        steps, self._gathered = self._gathered, []
        if steps:
            arrays = {name: torch.cat([step[name] for step in steps]).numpy() for name in steps[0]}
            self._calls.append(self._actor.add.remote(arrays))

    def flush(self) -> None:
        import ray

        self._send()
        ray.get(list(self._calls))
        self._calls.clear()


class ReadyMade:
    """A Ray actor that returns batches prepared in advance, and drops the steps that it receives."""

    def __init__(self, source: Source, batch_size: int) -> None:
        steps = [piece.flat() for piece in source.fill(4 * batch_size)]
        whole = {name: np.concatenate([vars(piece)[name] for piece in steps]) for name in vars(steps[0])}
        order = np.random.default_rng(0).permutation(4 * batch_size).reshape(4, batch_size)
        self._batches = [served(whole, rows) for rows in order]
        self._given = 0

    def add(self, arrays: Arrays) -> None:
        """Drop the steps."""

    def batch(self) -> Arrays:
        self._given += 1
        return self._batches[self._given % len(self._batches)]


class OneReplay:
    """A Ray actor with a replay buffer of numpy arrays, as in many programs."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._written = capacity, 0
        self._data: Arrays = {}
        self._random = np.random.default_rng(0)

    def add(self, arrays: Arrays) -> None:
        if not self._data:
            self._data = {
                name: np.zeros((self._capacity, *values.shape[1:]), values.dtype) for name, values in arrays.items()
            }
        count = len(arrays["rewards"])
        rows = np.arange(self._written, self._written + count) % self._capacity
        for name, values in arrays.items():
            self._data[name][rows] = values
        self._written += count

    def sample(self, batch_size: int) -> Arrays:
        return served(self._data, self._random.integers(0, min(self._written, self._capacity), batch_size))


def served(data: Arrays, rows: Array) -> Arrays:
    """The batch of some rows."""
    names = ("observations", "actions", "rewards", "next_observations")
    discounts = (GAMMA * ~data["terminated"][rows]).astype(np.float32)
    return {name: data[name][rows] for name in names} | {"discounts": discounts}
