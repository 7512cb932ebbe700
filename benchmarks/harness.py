"""Times contenders side by side: in every round each has its turn of a few cycles, in an order that rotates.

The first cycle of a turn finds the caches full of the others' data and is kept apart, as the cold one.

The clock is the processor time of the one thread that works, so that waiting for a processor does not count. Reading it
costs up to a microsecond, which is part of each figure. It does not hide that other work takes cache and memory
bandwidth: that slows contenders unequally, those that move most memory the most. So each result carries the load.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from time import thread_time
from typing import ClassVar, Literal

import torch

Role = Literal["ours", "peer", "floor"]
PHASES = ("add", "returns", "returns again", "batches")
CYCLE = "cycle"
COLD_CYCLE = "cold cycle"
CYCLES_IN_A_TURN = 4
WARM_UP_ROUNDS = 3


class Contender(ABC):
    """A buffer together with the way in which its own training loop drives it.

    A cycle is that of training: ``add``, then ``compute_returns``, then ``serve``, each timed. Between the last two
    ``compute_returns`` runs once more, with its data in the cache; that is timed apart and no part of the cycle.
    """

    role: ClassVar[Role] = "peer"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def add(self) -> None:
        """Write one rollout."""

    @abstractmethod
    def compute_returns(self) -> None:
        """Compute returns and advantages of what was written."""

    @abstractmethod
    def serve(self) -> int:
        """Iterate over the mini-batches of all epochs and return their number."""

    def returns(self) -> torch.Tensor | None:
        """The returns ``[steps, envs]`` of the last cycle, or None where they cannot be told."""
        return None


@dataclass(frozen=True)
class Target:
    """An aim of ours: in ``phase``, take at most ``ratio`` of the time of ``peer``."""

    phase: str
    peer: str
    ratio: float


@dataclass(frozen=True)
class Workload:
    """A named set of contenders that do the same work."""

    name: str
    title: str
    labels: Mapping[str, str]
    contenders: Mapping[str, Callable[[], Contender]]
    batches: int
    rounds: int
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender in one phase: the median of all rounds and the quartiles around it."""

    contender: str
    role: Role
    phase: str
    median: float
    quartiles: tuple[float, float]


@dataclass
class Result:
    """What one workload gave; ``load`` is the machine's load average before and after, our own work included."""

    name: str
    title: str
    labels: Mapping[str, str]
    targets: tuple[Target, ...]
    rounds: int
    load: tuple[float, float] = (0.0, 0.0)
    timings: list[Timing] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def median(self, contender: str, phase: str) -> float | None:
        """The median of a contender in a phase; None where it did not run."""
        found = (t.median for t in self.timings if (t.contender, t.phase) == (contender, phase))
        return next(found, None)

    def best(self, phase: str, role: Role) -> float | None:
        """The shortest median in a phase among the contenders of a role."""
        return min((t.median for t in self.timings if (t.role, t.phase) == (role, phase)), default=None)


def run_alone(make_workload: Callable[[], Workload]) -> Result:
    """Measure a workload in a process of its own, so that no workload inherits the memory of another."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, make_workload).result()


def measure(make_workload: Callable[[], Workload]) -> Result:
    """Run all rounds of a workload in this process, on one torch thread."""
    torch.set_num_threads(1)
    workload = make_workload()
    result = Result(workload.name, workload.title, workload.labels, workload.targets, workload.rounds)
    contenders = _build(workload, result)
    for _ in range(WARM_UP_ROUNDS):
        for contender in contenders:
            _time_cycle(contender)
    _check(workload, contenders)
    before = os.getloadavg()[0]
    laps = _time_rounds(contenders, workload.rounds)
    result.load = before, os.getloadavg()[0]
    for contender in contenders:
        for phase, seconds in laps[contender.name].items():
            low, median, high = statistics.quantiles(seconds, n=4)
            result.timings.append(Timing(contender.name, contender.role, phase, median, (low, high)))
    return result


def _build(workload: Workload, result: Result) -> list[Contender]:
    contenders = []
    for name, make in workload.contenders.items():
        try:
            contenders.append(make())
        except ImportError as error:
            result.missing[name] = f"{type(error).__name__}: {error}"
    return contenders


def _check(workload: Workload, contenders: list[Contender]) -> None:
    """Refuse to compare contenders that do not do the same work."""
    first: tuple[str, torch.Tensor] | None = None
    for contender in contenders:
        served = contender.serve()
        if served != workload.batches:
            raise RuntimeError(f"{contender.name} served {served} batches, not {workload.batches}")
        returns = contender.returns()
        if returns is None:
            continue
        if first is None:
            first = contender.name, returns.clone()
        elif not torch.allclose(returns, first[1], rtol=1e-4, atol=1e-4):
            raise RuntimeError(f"{contender.name} and {first[0]} computed different returns")


def _time_rounds(contenders: list[Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    laps: dict[str, dict[str, list[float]]] = {
        c.name: {p: [] for p in (*PHASES, CYCLE, COLD_CYCLE)} for c in contenders
    }
    # What lives now stays: without it each collection between the laps would walk all loaded modules.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for i in range(rounds):
            turn = i % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                laps[contender.name][COLD_CYCLE].append(_time_cycle(contender)[CYCLE])
                for _ in range(CYCLES_IN_A_TURN - 1):
                    gc.collect()
                    for phase, seconds in _time_cycle(contender).items():
                        laps[contender.name][phase].append(seconds)
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return laps


def _time_cycle(contender: Contender) -> dict[str, float]:
    begun = thread_time()
    contender.add()
    added = thread_time()
    contender.compute_returns()
    computed = thread_time()
    contender.compute_returns()
    computed_again = thread_time()
    contender.serve()
    served = thread_time()
    return {
        "add": added - begun,
        "returns": computed - added,
        "returns again": computed_again - computed,
        "batches": served - computed_again,
        CYCLE: (computed - begun) + (served - computed_again),
    }
