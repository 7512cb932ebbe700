"""Cost as work grows: ``python -m benchmarks.growth`` times calls of our storages by rows held and by environments.

Nothing but the cache should make a call dearer: adding, drawing, updating priorities and drawing sequences take as long
in a storage of 10M rows as in one of 10k that has the same number of environments, but for memory that is out of the
cache. Beside it stands what plain torch needs to read as many random rows. Figures are medians of laps of many calls,
in CPU time of one thread. Writes ``out/growth.json`` and a plot, ``docs/growth.svg``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.replay_buffers import Loop, Rlstore
from benchmarks.replay_data import VectorSource

ROWS = (10_000, 100_000, 1_000_000, 10_000_000)
ENVS = (1, 16, 256, 4096)
OBS, ACTIONS = 4, 1
BATCH = 256
WINDOWS, LENGTH = 64, 16
FEWEST = 2 * LENGTH  # rows of an environment
LAPS, CALLS = 15, 40
OUTPUT, PLOT = Path("out/growth.json"), Path("docs/growth.svg")
# What is timed, with its title in the plot.
WORK = {
    "add": "add, per environment",
    "sample": f"sample {BATCH}",
    "prioritized": f"sample {BATCH} by priority",
    "update": f"update {BATCH} priorities",
    "sequences": f"sample {WINDOWS} x {LENGTH}",
}
FLOOR = "plain torch"


def filled(rows: int, envs: int, storage: str, **options: Any) -> Rlstore:
    """A full storage of one of our classes."""
    made = Rlstore(VectorSource(envs, OBS, ACTIONS), rows // envs * envs, storage, **options)
    made.fill()
    return made


def microseconds(loop: Loop, calls: int) -> float:
    """The time of one of the calls that a loop makes."""
    seconds = []
    for _ in range(LAPS):
        begun = thread_time()
        loop()
        seconds.append(thread_time() - begun)
    return statistics.median(seconds) / calls * 1e6


def times(rows: int, envs: int) -> Iterator[tuple[str, float]]:
    """Microseconds of a call of each kind of work."""
    uniform = filled(rows, envs, "ReplayStorage")
    steps = uniform.source.loop(20)
    yield "add", microseconds(uniform.adding(steps, CALLS), CALLS) / envs
    yield "sample", microseconds(uniform.sampling(BATCH, CALLS), CALLS)
    yield FLOOR, microseconds(reading(rows), CALLS)
    uniform.close()

    ranked = filled(rows, envs, "PrioritizedReplayStorage")
    generator = torch.Generator().manual_seed(0)
    priorities = torch.rand(rows, generator=generator)
    ranked.storage.update(torch.arange(rows // envs * envs), priorities[: rows // envs * envs])
    yield "prioritized", microseconds(ranked.sampling(BATCH, CALLS), CALLS)
    drawn = [ranked.storage.sample(BATCH).rows for _ in range(CALLS)]
    yield "update", microseconds(updating(ranked.storage.update, drawn, priorities[:BATCH]), CALLS)
    ranked.close()

    options = {"sequence_length": LENGTH, "overlap": LENGTH - 1, "batch_size": WINDOWS}
    sequences = filled(rows, envs, "SequenceReplayStorage", **options)
    yield "sequences", microseconds(sequences.sampling(WINDOWS, CALLS), CALLS)
    sequences.close()


def reading(rows: int) -> Loop:
    """A loop that draws random rows of as many bytes from one tensor, and copies them."""
    held = torch.zeros(rows, 2 * OBS + ACTIONS + 2)

    def loop() -> None:
        for _ in range(CALLS):
            held.index_select(0, torch.randint(rows, (BATCH,)))

    return loop


def updating(update: Callable[..., object], drawn: list[torch.Tensor], priorities: torch.Tensor) -> Loop:
    def loop() -> None:
        for rows in drawn:
            update(rows, priorities)

    return loop


def plot(found: list[dict[str, Any]]) -> None:
    """One panel for each kind of work: time by rows, a line for each number of environments."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "rlstore", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(WORK), figsize=(3 * len(WORK), 3.2), layout="constrained")
    for panel, (work, title) in zip(panels, WORK.items(), strict=True):
        for envs in ENVS:
            points = [(line["rows"], line["us"][work]) for line in found if line["envs"] == envs]
            panel.plot(*np.transpose(points), marker=".", label=f"{envs}")
        if work == "sample":
            points = [(line["rows"], line["us"][FLOOR]) for line in found if line["envs"] == 1]
            panel.plot(*np.transpose(points), color="grey", linestyle=":", label=FLOOR)
            panel.legend(fontsize="small", title="environments")
        panel.set(xscale="log", xlabel="rows", title=title)
        panel.set_ylim(bottom=0)
        panel.minorticks_off()
    panels[0].set_ylabel("microseconds")
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    found: list[dict[str, Any]] = []
    for rows in ROWS:
        for envs in ENVS:
            if rows // envs >= FEWEST:
                found.append({"rows": rows, "envs": envs, "us": dict(times(rows, envs))})
                figures = ", ".join(f"{work} {us:.3g}" for work, us in found[-1]["us"].items())
                console.print(f"{rows:,} rows, {envs} environments: {figures} us")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(found, indent=2) + "\n")
    plot(found)
    console.print(f"Written to {OUTPUT} and {PLOT}")


if __name__ == "__main__":
    main()
