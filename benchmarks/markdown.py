"""Writes results of ``make bench`` into docs/benchmarks.md: ``python -m benchmarks.markdown RUN.json [RUN.json ...]``.

The aims are shown for all runs, everything else for the first. What stands between the two marks is replaced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path("docs/benchmarks.md")
BEGIN, END = "<!-- results: written by benchmarks.markdown -->", "<!-- end of results -->"

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.markdown", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="written by benchmarks.run")
    runs = [json.loads(path.read_text()) for path in parser.parse_args().runs]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join((before + BEGIN, *section(runs), END)) + rest.partition(END)[2])


def section(runs: Sequence[Run]) -> Iterator[str]:
    """The lines of the section."""
    first = runs[0]
    machine = first["machine"]
    installed = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    yield f"\n{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}; {installed}.\n"
    yield "### Aims\n"
    yield from aims(runs)
    for workload in first["workloads"]:
        yield from figures(workload)
    yield "\n### Bytes per transition\n"
    for kind in first["bytes_a_transition"]:
        sizes = ", ".join(f"{size['buffer']} {size['size']:,.0f}" for size in kind["sizes"])
        yield f"- {kind['title']} ({kind['capacity']:,} held): {sizes}."


def aims(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each aim, with a column for each run."""
    measured = [f"run {i}" for i in range(1, len(runs) + 1)]
    yield from head(("row", "aim", ""), (*measured, "rlstore, us", "fastest peer, us", "ratio to it"))
    for lines in zip(*(run["aims"] for run in runs), strict=True):
        line = lines[0]
        met = {same["met"] for same in lines}
        outcome = "in some runs" if len(met) > 1 else "met" if met == {True} else "missed"
        peer = ("-", "-")
        if line["peer"]:
            peer = f"{line['peer']} {_us(line['peer_us'])}", f"{line['us'] / line['peer_us']:.3g}"
        measured = [f"{same['measured']:.3g}" for same in lines]
        yield row((line["row"], line["aim"], outcome, *measured, _us(line["us"]), *peer))


def figures(workload: dict[str, Any]) -> Iterator[str]:
    """A line for each phase of a workload, with a column for each contender."""
    contenders = list(dict.fromkeys(timing["contender"] for timing in workload["timings"]))
    found = {(timing["phase"], timing["contender"]): timing["median_us"] for timing in workload["timings"]}
    clock = "" if workload["clock"] == "thread" else f", {workload['clock']} clock"
    low, high = workload["load"]
    yield f"\n### {workload['title']}\n"
    yield f"Microseconds; medians of {workload['rounds']} rounds{clock}, load {low:.1f} to {high:.1f}.\n"
    yield from head(("",), contenders)
    for phase, label in workload["labels"].items():
        times = (found.get((phase, contender)) for contender in contenders)
        yield row((label, *("" if us is None else _us(us) for us in times)))


def head(words: Sequence[str], numbers: Sequence[str]) -> Iterator[str]:
    """The first two lines of a table: columns of words, then columns of numbers."""
    yield row((*words, *numbers))
    yield row((*("---" for _ in words), *("---:" for _ in numbers)))


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


if __name__ == "__main__":
    main()
