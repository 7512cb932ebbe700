"""Reports the GPU figures as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.gpu_measure import Counts, Measured
from benchmarks.gpu_training import PARTS, TrainingTimes

OURS = ("rlstore", "rlstore, bounded", "rlstore, reuse", "one graph")


def environment() -> dict[str, Any]:
    """The machine, its GPU, and the versions of the packages."""
    gpu: dict[str, Any] = {}
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        gpu = {"name": found.name, "memory_gib": round(found.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    versions = {**report.versions(), "triton": _version("triton"), "torch": torch.__version__}
    return {"machine": report.machine(), "gpu": gpu, "versions": versions}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def header() -> str:
    """The environment in one line."""
    known = environment()
    names = ("rlstore", "torch", "triton", "rsl-rl-lib", "torchrl", "tensordict")
    versions = ", ".join(f"{name} {known['versions'][name]}" for name in names)
    return f"{known['gpu'].get('name', 'no GPU')}; {known['machine']['cpu']}; {versions}"


@dataclass(frozen=True)
class Line:
    """One work of one contender. Times are in microseconds; None where they were not measured."""

    work: str
    contender: str
    call: float | None
    first_call: float | None  # of a turn
    host: float | None  # of the call, spent on the host
    quartiles: tuple[float, float] | None
    counts: Counts | None
    floor: float | None  # the time that the bytes take at the bandwidth of a large copy


class Figures:
    """The measurements of a group: the times, None if there are none, and the counts."""

    def __init__(self, timed: Measured | None, profiled: Measured) -> None:
        self.group, self.title, self.floors = profiled.group, profiled.title, profiled.floors
        self.missing = {**profiled.missing, **(timed.missing if timed else {})}
        self.bytes_a_second = (timed or profiled).bytes_a_second
        seconds = timed.seconds if timed else {}
        firsts = timed.first_seconds if timed else {}
        hosts = timed.host_seconds if timed else {}
        contenders = list(dict.fromkeys([*seconds, *profiled.counts]))
        self.lines = [
            self._line(
                work,
                contender,
                seconds.get(contender, {}).get(work),
                firsts.get(contender, {}).get(work),
                hosts.get(contender, {}).get(work),
                profiled.counts.get(contender, {}).get(work),
            )
            for work in self.floors
            for contender in contenders
            if work in seconds.get(contender, {}) or work in profiled.counts.get(contender, {})
        ]

    def _line(
        self,
        work: str,
        contender: str,
        seconds: list[float] | None,
        firsts: list[float] | None,
        hosts: list[float] | None,
        counts: Counts | None,
    ) -> Line:
        floor = self.floors[work] / self.bytes_a_second * 1e6 if self.bytes_a_second else None
        if not seconds:
            return Line(work, contender, None, None, None, None, counts, floor)
        low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        first, host = (statistics.median(each) * 1e6 if each else None for each in (firsts, hosts))
        return Line(work, contender, middle * 1e6, first, host, (low * 1e6, high * 1e6), counts, floor)

    def peer(self, line: Line, time_of: Callable[[Line], float | None] = lambda line: line.call) -> float | None:
        """The time of the fastest peer divided by the time of a line of ours; None for other lines."""
        peers = [time_of(other) for other in self.lines if other.work == line.work and other.contender not in OURS]
        times, own = [time for time in peers if time is not None], time_of(line)
        return min(times) / own if times and own and line.contender in OURS else None


def _first_call(line: Line) -> float | None:
    return line.first_call


def _host(line: Line) -> float | None:
    return line.host


def table(figures: Figures) -> Table:
    """The table of a group: a line for each work and contender."""
    copied = f", {figures.bytes_a_second / 1e12:.2f} TB/s" if figures.bytes_a_second else ""
    drawn = Table(title=f"{figures.title}{copied}", title_justify="left")
    drawn.add_column("work")
    drawn.add_column("contender")
    times = ("call us", "times faster", "first us", "times faster", "host us", "times faster")
    for heading in (*times, "launches", "syncs", "GPU us", "floor us", "GPU to floor"):
        drawn.add_column(heading, justify="right")
    for line in figures.lines:
        counts = line.counts
        drawn.add_row(
            line.work,
            line.contender,
            _number(line.call),
            _number(figures.peer(line)),
            _number(line.first_call),
            _number(figures.peer(line, _first_call)),
            _number(line.host),
            _number(figures.peer(line, _host)),
            str(counts.launches) if counts else "-",
            str(counts.syncs) if counts else "-",
            _number(counts.gpu_us if counts else None),
            _number(line.floor),
            _number(_to_floor(line)),
            style="bold" if line.contender in OURS else None,
        )
    return drawn


def _to_floor(line: Line) -> float | None:
    return line.counts.gpu_us / line.floor if line.counts and line.floor else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def as_json(figures: Figures) -> dict[str, Any]:
    """A group as JSON."""
    return {
        "name": figures.group,
        "title": figures.title,
        "bytes_a_second": figures.bytes_a_second,
        "missing": figures.missing,
        "lines": [
            {
                "work": line.work,
                "contender": line.contender,
                "call_us": line.call,
                "quartiles_us": line.quartiles,
                "times_faster_than_best_peer": figures.peer(line),
                "first_call_us": line.first_call,
                "first_times_faster": figures.peer(line, _first_call),
                "host_us": line.host,
                "host_times_faster": figures.peer(line, _host),
                "launches": line.counts.launches if line.counts else None,
                "syncs": line.counts.syncs if line.counts else None,
                "gpu_us": line.counts.gpu_us if line.counts else None,
                "floor_bytes": figures.floors[line.work],
                "floor_us": line.floor,
                "gpu_to_floor": _to_floor(line),
                "kernels": line.counts.kernels if line.counts else None,
            }
            for line in figures.lines
        ],
    }


def training_table(times: TrainingTimes) -> Table:
    """The table of a training: a line for each contender."""
    drawn = Table(title=f"{times.title}; milliseconds, medians of {times.iterations} iterations", title_justify="left")
    drawn.add_column("contender")
    for part in PARTS:
        drawn.add_column(part, justify="right")
    for contender, medians in times.medians.items():
        drawn.add_row(contender, *(f"{medians[part] * 1e3:.2f}" for part in PARTS))
    return drawn


def training_json(times: TrainingTimes) -> dict[str, Any]:
    """A training as JSON."""
    medians = {name: {part: s * 1e3 for part, s in parts.items()} for name, parts in times.medians.items()}
    return {"title": times.title, "iterations": times.iterations, "milliseconds": medians}


def markdown(result: dict[str, Any]) -> str:
    """All results as Markdown tables, for the documentation."""
    versions, gpu = result["versions"], result["gpu"].get("name", "no GPU")
    names = ("torch", "triton", "rsl-rl-lib", "tensordict")
    text = [f"{gpu}; " + ", ".join(f"{name} {versions[name]}" for name in names) + ".", ""]
    for group in result["groups"]:
        copied = f", {group['bytes_a_second'] / 1e12:.2f} TB/s" if group["bytes_a_second"] else ""
        text += [f"### {group['title']}{copied}", ""]
        text.append(
            "| work | contender | call, us | times faster | first of a turn, us | times faster | host, us | "
            "times faster | launches | waits | GPU, us | floor, us | GPU to floor |"
        )
        text.append("| --- | --- |" + " ---: |" * 11)
        times = ("call_us", "times_faster_than_best_peer", "first_call_us", "first_times_faster")
        numbers = (*times, "host_us", "host_times_faster", "launches", "syncs", "gpu_us", "floor_us", "gpu_to_floor")
        text += [_row(line["work"], line["contender"], *(line[name] for name in numbers)) for line in group["lines"]]
        text += ["", *(f"{name} did not take part: {reason}" for name, reason in group["missing"].items()), ""]
    for training in result["trainings"]:
        text += [f"### {training['title']}", "", f"| milliseconds | {' | '.join(PARTS)} |"]
        text.append("| --- |" + " ---: |" * len(PARTS))
        medians = training["milliseconds"].items()
        text += [_row(contender, *(parts[part] for part in PARTS)) for contender, parts in medians] + [""]
    return "\n".join(text)


def _row(*cells: str | float | None) -> str:
    return f"| {' | '.join(cell if isinstance(cell, str) else _number(cell) for cell in cells)} |"
