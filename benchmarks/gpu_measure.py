"""Times calls on a GPU, and counts their launches.

A call is timed from an idle GPU until the GPU is idle again, including the host. The host's part is timed apart: many
calls one after another, before the GPU is waited for. Launches, host synchronizations and
the busy time of the GPU come from torch's profiler, in another process: a process that has used the profiler launches
at half speed.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

WARM_UP_CALLS = 5
# The turn of a contender: its first call finds the host's caches filled by another contender.
CALLS_A_TURN = 4
SECONDS_OF_ROUNDS = 1.5
FEWEST_ROUNDS, MOST_ROUNDS = 7, 300
# For the host's part: rounds, the most calls between two waits for the GPU, and the seconds they take at most.
HOST_ROUNDS, HOST_CALLS, HOST_SECONDS = 25, 100, 0.004
LONG_CALL = 0.02  # seconds; a longer one is profiled once
PROFILED_CALLS = 5
WINDOW = "rlstore benchmark call"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME_CALLS = ("cuda_runtime", "cuda_driver")
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")


def nothing() -> None:
    """The default of ``Work.before``."""


@dataclass(frozen=True)
class Work:
    """A call that is measured; ``before`` is called before each one, and ``context`` entered, and not measured."""

    call: Callable[[], object]
    before: Callable[[], object] = nothing
    context: Callable[[], AbstractContextManager[object]] = nullcontext


Works = Mapping[str, Work]


@dataclass(frozen=True)
class Group:
    """Contenders that do the same work.

    Attributes:
        name: Its name on the command line.
        title: Its name in the report.
        floors: For each work, the bytes that every contender must read and write.
        contenders: A function that creates each contender, ours first.
    """

    name: str
    title: str
    floors: Mapping[str, int]
    contenders: Mapping[str, Callable[[], Works]]


@dataclass
class Counts:
    """GPU work of one call; ``kernels`` has the number of runs and the total microseconds of each kernel."""

    launches: int = 0
    syncs: int = 0
    gpu_us: float = 0.0
    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass
class Measured:
    """The measurements of a group in one process, by contender and work."""

    group: str = ""
    title: str = ""
    floors: dict[str, int] = field(default_factory=dict)  # bytes, by work
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    bytes_a_second: float = 0.0
    first_seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # of the first call of each turn
    host_seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # of the host alone


def synchronize() -> None:
    """Wait until the GPU is idle; does nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy within the device's memory; 0 on the CPU."""
    if device.type != "cuda":
        return 0.0
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


def _make(group: Group, measured: Measured) -> dict[str, Works]:
    """Create the contenders; the reasons for missing ones are recorded."""
    made: dict[str, Works] = {}
    for name, make in group.contenders.items():
        try:
            made[name] = make()
        except Exception as error:
            measured.missing[name] = _reason(error)
    return made


def _reason(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return " ".join(lines)[:400]


def _warm_up(made: Mapping[str, Works], measured: Measured) -> dict[tuple[str, str], float]:
    """The seconds of a call, by work and contender, of the works that run."""
    running = {}
    for contender, works in made.items():
        for name, work in works.items():
            try:
                seconds = [_timed(work) for _ in range(WARM_UP_CALLS)]
            except Exception as error:
                measured.missing[f"{contender}, {name}"] = _reason(error)
                continue
            running[name, contender] = min(seconds)
    return running


def _timed(work: Work) -> float:
    work.before()
    synchronize()
    with work.context():
        begin = perf_counter()
        work.call()
        synchronize()
        return perf_counter() - begin


def _host_time(work: Work, calls: int) -> float:
    """The seconds that the host spends on a call: so few of them that the GPU's queue has room for all launches."""
    synchronize()
    spent = 0.0
    with work.context():
        for _ in range(calls):
            work.before()
            begin = perf_counter()
            work.call()
            spent += perf_counter() - begin
    synchronize()
    return spent / calls


def time_group(group: Group, device: torch.device, *, seconds: float = SECONDS_OF_ROUNDS) -> Measured:
    """Time all calls, with the contenders in turn, each work for about ``seconds``."""
    measured = Measured(group.name, group.title, dict(group.floors))
    made = _make(group, measured)
    running = _warm_up(made, measured)
    for name in group.floors:
        names = [contender for contender in made if (name, contender) in running]
        if not names:
            continue
        together = CALLS_A_TURN * sum(running[name, contender] for contender in names)
        rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(seconds / together))) if seconds else 1
        for turn in range(rounds):
            for place in range(len(names)):
                contender = names[(place + turn) % len(names)]
                first, *others = [_timed(made[contender][name]) for _ in range(CALLS_A_TURN)]
                measured.first_seconds.setdefault(contender, {}).setdefault(name, []).append(first)
                measured.seconds.setdefault(contender, {}).setdefault(name, []).extend(others)
        for turn in range(HOST_ROUNDS if seconds else 1):
            for place in range(len(names)):
                contender = names[(place + turn) % len(names)]
                calls = max(1, min(HOST_CALLS, int(HOST_SECONDS / running[name, contender])))
                spent = _host_time(made[contender][name], calls)
                measured.host_seconds.setdefault(contender, {}).setdefault(name, []).append(spent)
    measured.bytes_a_second = bandwidth(device)
    return measured


def profile_group(group: Group, device: torch.device) -> Measured:
    """Count the GPU work of each call."""
    measured = Measured(group.name, group.title, dict(group.floors))
    made = _make(group, measured)
    for (name, contender), seconds in _warm_up(made, measured).items():
        calls = 1 if seconds > LONG_CALL else PROFILED_CALLS
        windows = _profiled(made[contender][name], calls)
        measured.counts.setdefault(contender, {})[name] = sorted(windows, key=lambda w: w.gpu_us)[len(windows) // 2]
    measured.bytes_a_second = bandwidth(device)
    return measured


def _profiled(work: Work, calls: int) -> list[Counts]:
    """The counts of each of some profiled calls."""
    from torch.profiler import ProfilerActivity, profile, record_function

    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    work.before()
    synchronize()
    # In each process torch says once that it forgets events between cycles; here there is one cycle.
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    with profile(activities=activities) as profiler:
        for _ in range(calls):
            with work.context(), record_function(WINDOW):
                work.call()
            synchronize()
            work.before()
            synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"])


def read_trace(events: Iterable[Mapping[str, Any]]) -> list[Counts]:
    """The counts of each window of a trace, in order.

    Work on the device belongs to the window in which the host launched it. Everything launched by one call of the host,
    such as all kernels of a CUDA graph, is one launch.
    """
    events = list(events)
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name") == WINDOW
    )
    windows = [Counts() for _ in spans]

    def window_at(time: float) -> int | None:
        return next((i for i, (begin, end) in enumerate(spans) if begin <= time <= end), None)

    launched_in: dict[int, int | None] = {}  # the window of each correlation id; None: in none
    for event in events:
        if event.get("cat") in RUNTIME_CALLS:
            window = window_at(event["ts"])
            launched_in[event.get("args", {}).get("correlation", -1)] = window
            if window is not None:
                windows[window].syncs += event["name"] in SYNCS
    launches: dict[int, set[int]] = defaultdict(set)
    ran: dict[int, tuple[Counter[str], Counter[str]]] = defaultdict(lambda: (Counter(), Counter()))
    for event in events:
        correlation = event.get("args", {}).get("correlation", -2)
        if event.get("cat") not in DEVICE_WORK:
            continue
        # Where the host call was not recorded, the work belongs to the window that began last.
        latest = max((i for i, (begin, _) in enumerate(spans) if begin <= event["ts"]), default=None)
        window = launched_in.get(correlation, latest)
        if window is None:
            continue
        launches[window].add(correlation)
        ran[window][0][event["name"]] += 1
        ran[window][1][event["name"]] += event["dur"]
    for i, counts in enumerate(windows):
        times, durations = ran[i]
        counts.launches, counts.gpu_us = len(launches[i]), float(sum(durations.values()))
        counts.kernels = {name: (times[name], round(float(us), 2)) for name, us in durations.most_common()}
    return windows
