"""Reports results as tables and as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.footprint import Footprints
from benchmarks.harness import Result, Target, Timing
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
                _ratio(timing.median, result.best(phase, "peer")),
                _ratio(timing.median, result.best(phase, "floor")),
                _targets(result, timing),
                style="bold" if timing.role == "ours" else None,
                end_section=i == len(shown) - 1,
            )
    return drawn


def _microseconds(seconds: float) -> str:
    time = seconds * 1e6
    return f"{time:,.1f} us" if time >= 10 else f"{time:.2f} us"


def _ratio(time: float, other: float | None) -> str:
    return "-" if other is None else f"{time / other:.3g}"


def _targets(result: Result, timing: Timing) -> str:
    """The targets of a phase, each with the measured ratio."""
    measured = [(target, _to_peer(result, timing, target)) for target in result.targets]
    return ", ".join(
        f"{ratio:.3f} of {_named(target)} (at most {target.ratio})" for target, ratio in measured if ratio is not None
    )


def _named(target: Target) -> str:
    return target.peers[0] if len(target.peers) == 1 else "the best of " + ", ".join(target.peers)


def _to_peer(result: Result, timing: Timing, target: Target) -> float | None:
    """The ratio that a target limits; None where it does not apply to this timing."""
    peer = result.best_of(target.phase, target.peers)
    return timing.median / peer if peer is not None and target.concerns(timing) else None


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
        "workloads": [_workload_json(result) for result in results],
        "saving": [asdict(result) for result in saves],
        "bytes_a_transition": [asdict(result) for result in footprints],
    }


def _workload_json(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "title": result.title,
        "rounds": result.rounds,
        "clock": result.clock,
        "calls": result.calls,
        "load": result.load,
        "missing": result.missing,
        "timings": [_timing_json(result, timing) for timing in result.timings],
    }


def _timing_json(result: Result, timing: Timing) -> dict[str, Any]:
    best, floor = result.best(timing.phase, "peer"), result.best(timing.phase, "floor")
    ratios = [(target, _to_peer(result, timing, target)) for target in result.targets]
    return {
        "contender": timing.contender,
        "phase": timing.phase,
        "median_us": timing.median * 1e6,
        "quartiles_us": [edge * 1e6 for edge in timing.quartiles],
        "ratio_to_best_peer": timing.median / best if best else None,
        "ratio_to_memcpy": timing.median / floor if floor else None,
        "targets": [
            {"peers": target.peers, "at_most": target.ratio, "measured": ratio}
            for target, ratio in ratios
            if ratio is not None
        ],
    }
