"""Reports results as tables and as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.footprint import Footprints
from benchmarks.harness import Outcome, Result, Timing
from benchmarks.saving import Figures

PACKAGES = (
    "rlstore",
    "torch",
    "tensordict",
    "numpy",
    "gymnasium",
    "rsl-rl-lib",
    "stable-baselines3",
    "torchrl",
    "rllte-core",
    "cpprb",
    "rlox",
    "tianshou",
    "ray",
)


def machine() -> dict[str, str | int]:
    """The processor, its cores, the system and Python."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "torch_threads": 1,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The version of each package, or "not installed"."""

    def version_of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {package: version_of(package) for package in PACKAGES}


def table(result: Result) -> Table:
    """One workload: a line per phase and contender."""
    load = "load {:.1f} to {:.1f}".format(*result.load)
    clock = "" if result.clock == "thread" else f", {result.clock} clock"
    drawn = Table(title=f"{result.title} (medians of {result.rounds} rounds{clock}, {load})", title_justify="left")
    drawn.add_column("phase")
    drawn.add_column("contender")
    for heading in ("median", "to best peer", "to memcpy"):
        drawn.add_column(heading, justify="right")
    drawn.add_column("target")
    for phase, label in result.labels.items():
        shown = [timing for timing in result.timings if timing.phase == phase]
        for i, timing in enumerate(shown):
            drawn.add_row(
                label if i == 0 else "",
                timing.contender,
                _microseconds(timing.median),
                _ratio(timing, result.best(phase, "peer")),
                _ratio(timing, result.best(phase, "floor")),
                _targets(result, timing),
                style="bold" if timing.role == "ours" else None,
                end_section=i == len(shown) - 1,
            )
    return drawn


def _microseconds(seconds: float) -> str:
    time = seconds * 1e6
    return f"{time:,.1f} us" if time >= 10 else f"{time:.2f} us"


def _ratio(timing: Timing, other: Timing | None) -> str:
    return "-" if other is None else f"{timing.median / other.median:.3g}"


def _targets(result: Result, timing: Timing) -> str:
    return ", ".join(_words(aim) for aim in aims([result]) if aim.timing is timing)


@dataclass(frozen=True)
class Aim:
    """What became of a target, with the fastest peer of its phase, whoever that is."""

    row: str
    timing: Timing
    peer: Timing | None
    aim: str
    measured: float
    met: bool


def aims(results: list[Result]) -> list[Aim]:
    """All targets of all workloads."""
    return [
        Aim(
            _row(result, outcome),
            outcome.timing,
            result.best(outcome.timing.phase, "peer"),
            outcome.target.aim(),
            outcome.measured,
            outcome.met,
        )
        for result in results
        for outcome in result.outcomes()
    ]


def _row(result: Result, outcome: Outcome) -> str:
    row = outcome.target.row or f"{result.title}: {result.labels[outcome.timing.phase]}"
    variant = outcome.timing.contender.partition(", ")[2]
    return f"{row}, {variant}" if variant and len(outcome.target.ours) != 1 else row


def _words(aim: Aim) -> str:
    return f"{aim.measured:.3g}, at most {aim.aim}: {'met' if aim.met else 'missed'}"


def summary(results: list[Result]) -> Table:
    """All aims: a line each."""
    drawn = Table(title="All aims", title_justify="left")
    drawn.add_column("row")
    for heading in ("rlstore", "fastest peer", "ratio"):
        drawn.add_column(heading, justify="right")
    drawn.add_column("aim")
    for aim in aims(results):
        fastest = "-" if aim.peer is None else f"{_microseconds(aim.peer.median)} ({aim.peer.contender})"
        style = None if aim.met else "yellow"
        ours = _microseconds(aim.timing.median)
        drawn.add_row(aim.row, ours, fastest, _ratio(aim.timing, aim.peer), _words(aim), style=style)
    return drawn


def footprint_table(result: Footprints) -> Table:
    """Bytes per transition: a line per buffer."""
    drawn = Table(title=f"Bytes a transition, {result.title} ({result.capacity:,} held)", title_justify="left")
    drawn.add_column("buffer")
    drawn.add_column("bytes", justify="right")
    drawn.add_column("target")
    for size in result.sizes:
        ours = size.role == "ours"
        target = f"at most {result.at_most:,}" if ours else ""
        drawn.add_row(size.buffer, f"{size.size:,.0f}", target, style="bold" if ours else None)
    return drawn


def figures_table(result: Figures) -> Table:
    """A part of saving: a line per figure."""
    load = "load {:.1f} to {:.1f}".format(*result.load)
    drawn = Table(title=f"{result.title} (medians of {result.rounds} rounds, {load})", title_justify="left")
    for heading in ("measured", "contender"):
        drawn.add_column(heading)
    for heading in ("value", "ratio"):
        drawn.add_column(heading, justify="right")
    drawn.add_column("target")
    for figure in result.figures:
        value = f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.3g}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
        drawn.add_row(figure.what, figure.contender, f"{value} {figure.unit}", ratio, figure.target)
    return drawn


def as_json(results: list[Result], saves: list[Figures], footprints: list[Footprints]) -> dict[str, Any]:
    """All measurements, with the machine and the versions."""
    return {
        "machine": machine(),
        "versions": versions(),
        "aims": [_aim_json(aim) for aim in aims(results)],
        "workloads": [_workload_json(result) for result in results],
        "saving": [asdict(result) for result in saves],
        "bytes_a_transition": [asdict(result) for result in footprints],
    }


def _aim_json(aim: Aim) -> dict[str, Any]:
    return {
        "row": aim.row,
        "us": aim.timing.median * 1e6,
        "peer": aim.peer.contender if aim.peer else None,
        "peer_us": aim.peer.median * 1e6 if aim.peer else None,
        "aim": aim.aim,
        "measured": aim.measured,
        "met": aim.met,
    }


def _workload_json(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "title": result.title,
        "rounds": result.rounds,
        "clock": result.clock,
        "labels": result.labels,
        "calls": result.calls,
        "load": result.load,
        "missing": result.missing,
        "timings": [
            {
                "contender": timing.contender,
                "role": timing.role,
                "phase": timing.phase,
                "median_us": timing.median * 1e6,
                "quartiles_us": [edge * 1e6 for edge in timing.quartiles],
            }
            for timing in result.timings
        ],
    }
