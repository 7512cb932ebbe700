"""Measures all workloads, or those named on the command line: ``python -m benchmarks.run [workload ...]``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from benchmarks import (
    decoupled,
    footprint,
    handoff,
    loading,
    ppo,
    ray_replay,
    replay_nstep_pixels,
    replay_pixels,
    replay_prioritized,
    replay_sequences,
    replay_vector,
    report,
    rollout,
    saving,
    served,
)
from benchmarks.harness import Result, Workload, alone, measure

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "ppo": ppo.workload,
    "replay_vector": replay_vector.workload,
    "prioritized_1M": partial(replay_prioritized.workload, 1_000_000),
    "prioritized_100k": partial(replay_prioritized.workload, 100_000),
    "rollout": rollout.workload,
    "recurrent": rollout.recurrent,
    "decoupled": decoupled.workload,
    "replay_sequences": replay_sequences.workload,
    "replay_pixels": replay_pixels.workload,
    "replay_nstep_pixels": replay_nstep_pixels.workload,
    "loading": loading.workload,
    "handoff": handoff.workload,
    "handoff_written": partial(handoff.workload, writes=True),
    "ray_pixels": ray_replay.pixels,
    "ray_vector": ray_replay.vectors,
}
BYTES = "bytes"
PARTS = {"served": served.part} | {f"saving_{name}": part for name, part in saving.parts().items()}
OUTPUT = Path("out/bench.json")


def show(console: Console, table: Table, missing: Mapping[str, str]) -> None:
    console.print()
    console.print(table)
    for contender, reason in missing.items():
        console.print(f"[yellow]{contender} did not take part: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    known = [*WORKLOADS, *PARTS, BYTES]
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"any of: {', '.join(known)}")
    parser.add_argument("--rounds", type=int, metavar="N", help="so many rounds (at least 2) of each workload")
    given = parser.parse_args()
    names = given.workloads or known
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(known)}")
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print("  ".join(f"{key}: {value}" for key, value in report.machine().items()))
    console.print("  ".join(f"{package} {number}" for package, number in report.versions().items()))
    if os.getloadavg()[0] > 1:
        console.print("[yellow]The machine is busy. Peers that move more memory suffer more: the ratios flatter us.")
    results, begun = [], perf_counter()
    for name in names:
        if name in WORKLOADS:
            result: Result = alone(measure, WORKLOADS[name], given.rounds)
            results.append(result)
            show(console, report.table(result), result.missing)
    saves = []
    for name in names:
        if name in PARTS:
            figures = saving.measure(PARTS[name])
            saves.append(figures)
            show(console, report.figures_table(figures), figures.missing)
    footprints = []
    for kind in footprint.kinds() if BYTES in names else ():
        held = footprint.measure(kind)
        footprints.append(held)
        show(console, report.footprint_table(held), held.missing)
    show(console, report.summary(results), {})
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report.as_json(results, saves, footprints), indent=2) + "\n")
    console.print(f"\nWritten to {OUTPUT} after {(perf_counter() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
