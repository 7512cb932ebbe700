"""Times contenders side by side: in every round each contender has a turn of a few laps, in a rotating order.

A lap runs the phases of the workload in order and times each. The first lap of a turn finds the caches full of the
others' data and is recorded separately, as the cold one.

The clock is the CPU time of the one working thread, so that waiting for a processor does not count. Reading it takes up
to a microsecond, which is part of each figure; so a phase that short makes many calls, and its figure is the time per
call. CPU time still includes the effect of other processes on caches and memory bandwidth: it slows contenders
unequally, most of all those that move the most memory. So each result records the load. Where contenders use their own
threads or processes, a workload is timed with the wall clock instead.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter, thread_time
from typing import Any, Literal

import torch

Role = Literal["ours", "peer", "floor"]
Clock = Literal["thread", "wall"]
CLOCKS: dict[Clock, Callable[[], float]] = {"thread": thread_time, "wall": perf_counter}
CYCLE = "cycle"
LAPS_IN_A_TURN = 4
WARM_UP_ROUNDS = 3


def cold(phase: str) -> str:
    """The name of a phase in the first lap of a turn."""
    return f"cold {phase}"


class Contender(ABC):
    """A buffer, driven as its own training loop drives it."""

    role: Role = "peer"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def phases(self) -> Mapping[str, Callable[[], object]]:
        """The work of each phase of a lap; a phase that the buffer does not support is omitted."""

    def evidence(self) -> Mapping[str, torch.Tensor]:
        """What it served or computed, by names that all contenders of a workload share, for the workload's check."""
        return {}

    def rest(self) -> None:  # noqa: B027
        """Called after each turn: wait until background work has finished."""

    def close(self) -> None:  # noqa: B027
        """Called once after all rounds."""


@dataclass(frozen=True)
class Phase:
    """A part of a lap that is timed separately; it makes ``calls`` calls, and the figure is the time per call."""

    name: str
    label: str
    calls: int = 1


@dataclass(frozen=True)
class Target:
    """In ``phase``, take at most ``ratio`` of the time of the fastest of ``peers``, or so many ``microseconds``.

    No peers are all that take part. It applies to all our contenders, or to those that ``ours`` names. ``row`` names
    it in the summary.
    """

    phase: str
    peers: tuple[str, ...] = ()
    ratio: float = 1.0
    ours: tuple[str, ...] = ()
    row: str = ""
    microseconds: float | None = None

    def concerns(self, timing: Timing) -> bool:
        """Whether the target applies to this timing."""
        ours = timing.contender in self.ours if self.ours else timing.role == "ours"
        return ours and timing.phase == self.phase

    def aim(self) -> str:
        """What was aimed at, in words."""
        if self.microseconds is not None:
            return f"{self.microseconds:g} us"
        return f"{self.ratio:g} x {' or '.join(self.peers) or 'the fastest peer'}"

    def is_against(self, timing: Timing) -> bool:
        """Whether this timing is one of those that the ratio is to."""
        peer = timing.contender in self.peers if self.peers else timing.role == "peer"
        return peer and timing.phase == self.phase


@dataclass(frozen=True)
class Workload:
    """A named set of contenders that do the same work.

    Attributes:
        phases: the parts of a lap, in this order.
        contenders: a function that creates each contender, by name.
        check: takes the evidence of each contender and raises RuntimeError if they did not do the same work.
        cycle: the phases that together are one training cycle, whose sum is reported too; none if empty.
        cycle_label: the name of that sum.
        cycle_calls: the number of cycles in a lap.
    """

    name: str
    title: str
    phases: tuple[Phase, ...]
    contenders: Mapping[str, Callable[[], Contender]]
    check: Callable[[Mapping[str, Mapping[str, torch.Tensor]]], None]
    rounds: int
    cycle: tuple[str, ...] = ()
    cycle_label: str = "whole cycle"
    cycle_calls: int = 1
    targets: tuple[Target, ...] = ()
    clock: Clock = "thread"


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
    """The result of one workload; ``load`` is the load average before and after, including the benchmark itself."""

    name: str
    title: str
    labels: Mapping[str, str]
    calls: Mapping[str, int]
    targets: tuple[Target, ...]
    rounds: int
    clock: Clock
    load: tuple[float, float] = (0.0, 0.0)
    timings: list[Timing] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def best(self, phase: str, role: Role) -> Timing | None:
        """The shortest median in a phase among the contenders of a role."""
        found = (t for t in self.timings if (t.role, t.phase) == (role, phase))
        return min(found, key=lambda timing: timing.median, default=None)

    def outcomes(self) -> Iterator[Outcome]:
        """What became of each target, for each of our contenders that it applies to."""
        for target in self.targets:
            peers = [timing.median for timing in self.timings if target.is_against(timing)]
            for timing in self.timings:
                if not target.concerns(timing):
                    continue
                if target.microseconds is not None:
                    yield Outcome(target, timing, timing.median * 1e6, timing.median * 1e6 <= target.microseconds)
                elif peers:
                    ratio = timing.median / min(peers)
                    yield Outcome(target, timing, ratio, ratio <= target.ratio)


@dataclass(frozen=True)
class Outcome:
    """What became of a target: the ratio that was measured (or microseconds), and whether that meets it."""

    target: Target
    timing: Timing
    measured: float
    met: bool


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, so that no workload inherits the memory of another.

    It is forked from a process that has imported most of what is needed, and done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.report"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def measure(make_workload: Callable[[], Workload], rounds: int | None = None) -> Result:
    """Run all rounds of a workload, or so many, in this process, on one torch thread."""
    torch.set_num_threads(1)
    workload = make_workload()
    if rounds is not None:
        workload = replace(workload, rounds=rounds)
    result = _empty_result(workload)
    with ExitStack() as stack:
        contenders = _build(workload, result, stack)
        for _ in range(WARM_UP_ROUNDS):
            for contender in contenders:
                _time_lap(workload, contender)
                contender.rest()
        workload.check({contender.name: contender.evidence() for contender in contenders})
        before = os.getloadavg()[0]
        laps = _time_rounds(workload, contenders)
        result.load = before, os.getloadavg()[0]
    for contender in contenders:
        for phase, seconds in laps[contender.name].items():
            low, median, high = statistics.quantiles(seconds, n=4)
            result.timings.append(Timing(contender.name, contender.role, phase, median, (low, high)))
    return result


def _empty_result(workload: Workload) -> Result:
    labels = {phase.name: phase.label for phase in workload.phases}
    if workload.cycle:
        labels |= {CYCLE: workload.cycle_label}
    calls = {phase.name: phase.calls for phase in workload.phases}
    return Result(workload.name, workload.title, labels, calls, workload.targets, workload.rounds, workload.clock)


def _build(workload: Workload, result: Result, stack: ExitStack) -> list[Contender]:
    contenders = []
    for name, make in workload.contenders.items():
        try:
            contender = make()
        except ImportError as error:
            result.missing[name] = f"{type(error).__name__}: {error}"
        else:
            stack.callback(contender.close)
            contenders.append(contender)
    return contenders


def _time_rounds(workload: Workload, contenders: list[Contender]) -> dict[str, dict[str, list[float]]]:
    laps: dict[str, dict[str, list[float]]] = {contender.name: {} for contender in contenders}
    with _collector_held():
        for i in range(workload.rounds):
            turn = i % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                kept = laps[contender.name]
                for lap in range(LAPS_IN_A_TURN):
                    for phase, seconds in _time_lap(workload, contender).items():
                        kept.setdefault(phase if lap else cold(phase), []).append(seconds)
                    gc.collect()
                contender.rest()
    return laps


@contextmanager
def _collector_held() -> Iterator[None]:
    """Disable the garbage collector; calls of ``gc.collect()`` then only see objects created inside the block."""
    gc.collect()
    # Without freezing, each collection between the laps would traverse all loaded modules.
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _time_lap(workload: Workload, contender: Contender) -> dict[str, float]:
    clock = CLOCKS[workload.clock]
    work = contender.phases()
    seconds = {}
    for phase in workload.phases:
        if phase.name in work:
            do = work[phase.name]
            begun = clock()
            do()
            seconds[phase.name] = clock() - begun
    figures = {phase.name: seconds[phase.name] / phase.calls for phase in workload.phases if phase.name in seconds}
    if seconds.keys() >= set(workload.cycle or (CYCLE,)):
        figures[CYCLE] = sum(seconds[name] for name in workload.cycle) / workload.cycle_calls
    return figures
