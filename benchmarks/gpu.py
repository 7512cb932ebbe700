"""Measures the storages on a GPU: ``python -m benchmarks.gpu [group ...] [--out FILE] [--profile-only] [--small]``.

Each group is timed in one process and profiled in another. ``--small`` runs everything with small sizes on the CPU, as
a test: its figures are meaningless.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import gpu_report
from benchmarks.gpu_measure import SECONDS_OF_ROUNDS, Group, Measured, profile_group, time_group
from benchmarks.gpu_replay import ReplaySizes, replay
from benchmarks.gpu_rollout import PixelSizes, Sizes, captured, pixels, rollouts
from benchmarks.gpu_training import TrainingSizes, TrainingTimes, time_training

OUTPUT = Path("out/gpu/gpu.json")
MakeGroup = Callable[[torch.device], Group]

GROUPS: dict[str, MakeGroup] = {
    "rollout_4096": partial(rollouts, Sizes(4096)),
    "rollout_16384": partial(rollouts, Sizes(16384)),
    "recurrent_4096": partial(rollouts, Sizes(4096, hidden=256)),
    "recurrent_16384": partial(rollouts, Sizes(16384, hidden=256)),
    "graph": partial(captured, Sizes(4096)),
    "pixels": partial(pixels, PixelSizes()),
    "replay": partial(replay, ReplaySizes()),
}
SMALL: dict[str, MakeGroup] = {
    "rollout_4096": partial(rollouts, Sizes(8, 5, 3, 4, 2)),
    "recurrent_4096": partial(rollouts, Sizes(8, 5, 3, 4, 2, hidden=6)),
    "graph": partial(captured, Sizes(8, 5, 3, 4, 2)),
    "pixels": partial(pixels, PixelSizes(4, 8, (1, 6, 6), 2)),
    "replay": partial(replay, ReplaySizes(8, 6, 3, 2, 16, 4)),
}
TRAININGS = {"training": False, "training_recurrent": True}
SMALL_TRAINING = TrainingSizes(8, 4, 6, 3, 16, warm_up=1, turns=1, iterations=1)


def _device(*, small: bool) -> torch.device:
    return torch.device("cpu") if small else torch.device("cuda", 0)


def measure(name: str, *, profiled: bool, small: bool) -> Measured:
    """One group, in this process."""
    device = _device(small=small)
    group = (SMALL if small else GROUPS)[name](device)
    if profiled:
        return profile_group(group, device)
    return time_group(group, device, seconds=0.0 if small else SECONDS_OF_ROUNDS)


def train(name: str, *, small: bool) -> TrainingTimes:
    """One training, in this process."""
    sizes = SMALL_TRAINING if small else TrainingSizes()
    return time_training(sizes, _device(small=small), recurrent=TRAININGS[name])


def _alone(work: Callable[[], Any]) -> Any:
    """Run in a separate process, which inherits no state."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result()


def _here(work: Callable[[], Any]) -> Any:
    return work()


def run(names: list[str], *, small: bool, profile_only: bool, console: Console) -> Iterator[dict[str, Any]]:
    """Measure the groups in order, print each table, and yield all results so far after each group."""
    result: dict[str, Any] = {**gpu_report.environment(), "small": small, "groups": [], "trainings": [], "failed": {}}
    start = _here if small else _alone
    for name in names:
        try:
            if name not in TRAININGS:
                timed = None if profile_only else start(partial(measure, name, profiled=False, small=small))
                profiled = start(partial(measure, name, profiled=True, small=small))
                figures = gpu_report.Figures(timed, profiled)
                console.print(gpu_report.table(figures))
                for contender, reason in figures.missing.items():
                    console.print(f"{contender} did not take part: {reason}", style="yellow", markup=False)
                result["groups"].append(gpu_report.as_json(figures))
            elif not profile_only:
                times = start(partial(train, name, small=small))
                console.print(gpu_report.training_table(times))
                result["trainings"].append(gpu_report.training_json(times))
        except Exception as error:  # the other groups can still be measured
            if small:
                raise
            result["failed"][name] = f"{type(error).__name__}: {error}"
            console.print(f"{name} failed: {result['failed'][name]}", style="red", markup=False)
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    known = [*GROUPS, *TRAININGS]
    parser.add_argument("groups", nargs="*", metavar="group", help=f"any of: {', '.join(known)}; all by default")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    parser.add_argument("--profile-only", action="store_true", help="no times: launches, synchronisations, GPU time")
    parser.add_argument("--small", action="store_true", help="small sizes on the CPU, as a test")
    given = parser.parse_args()
    unknown = [name for name in given.groups if name not in known]
    if unknown:
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(known)}")
    if not given.small and not torch.cuda.is_available():
        parser.error("no CUDA device; --small runs on the CPU")
    names = given.groups or [name for name in known if not given.small or name in SMALL or name in TRAININGS]
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(gpu_report.header(), markup=False)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for result in run(names, small=given.small, profile_only=given.profile_only, console=console):
        given.out.write_text(json.dumps(result, indent=2) + "\n")
        given.out.with_suffix(".md").write_text(gpu_report.markdown(result))
        failed = result["failed"]
    console.print(f"Written to {given.out} and, as tables, {given.out.with_suffix('.md')}", markup=False)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
