"""Measures all workloads, or those named on the command line: ``python -m benchmarks.run [workload ...]``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console

from benchmarks import decoupled, recurrent, replay_vector, report, rollout, small_batches
from benchmarks.harness import run_alone

WORKLOADS = {
    "rollout": rollout.workload,
    "recurrent": recurrent.workload,
    "small_batches": small_batches.workload,
    "decoupled": decoupled.workload,
    "replay_vector": replay_vector.workload,
}
OUTPUT = Path("out/bench.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"any of: {', '.join(WORKLOADS)}")
    names = parser.parse_args().workloads or list(WORKLOADS)
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print("  ".join(f"{key}: {value}" for key, value in report.machine().items()))
    console.print("  ".join(f"{package} {number}" for package, number in report.versions().items()))
    if os.getloadavg()[0] > 1:
        console.print("[yellow]The machine is busy. Peers that move more memory suffer more: the ratios flatter us.")
    results = []
    for name in names:
        result = run_alone(WORKLOADS[name])
        results.append(result)
        console.print()
        console.print(report.table(result))
        for contender, reason in result.missing.items():
            console.print(f"[yellow]{contender} did not take part: {reason}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report.as_json(results), indent=2) + "\n")
    console.print(f"\nWritten to {OUTPUT}")


if __name__ == "__main__":
    main()
