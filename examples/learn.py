"""Runs every example in full, over several seeds, and checks that each one reaches its score.

``python examples/learn.py --out out`` takes about 45 minutes and exits with 1 if a check fails. The checks on MinAtar
and on Ray are skipped where these are not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import apex_dqn
import daac
import distill
import dqn
import drqv2
import her
import impala
import offline
import ppo
import recurrent_ppo
import sac
from common import Result, save
from rich.console import Console
from rich.table import Table


@dataclass
class Check:
    """One example, the quantity that is measured, and its bound."""

    title: str
    train: Callable[[int], Result]
    measure: Callable[[Result], float]
    at_least: float = float("-inf")
    below: float = float("inf")

    def bound(self) -> str:
        """The bound as text."""
        return f">= {self.at_least:g}" if self.below == float("inf") else f"< {self.below:g}"


def mean_return(result: Result) -> float:
    """The mean return of the last 100 episodes; of TD3+BC they are an evaluation after the last update."""
    return result.mean_return


def percent(result: Result) -> float:
    """The mean return of the last 100 episodes, which is a rate, in percent."""
    return 100 * result.mean_return


def of_teacher(result: Result) -> float:
    """The student's return in percent of its teacher's."""
    return result.extra["student_in_percent_of_teacher"]


CHECKS = [
    Check("PPO", lambda seed: ppo.train(300_000, seed, 475.0), mean_return, at_least=475),
    Check("PPO + GRU", lambda seed: recurrent_ppo.train(200_000, seed, 400.0), mean_return, at_least=400),
    Check(
        "PPO + LSTM",
        lambda seed: recurrent_ppo.train(200_000, seed, 400.0, memory="lstm"),
        mean_return,
        at_least=400,
    ),
    Check(
        "no memory",
        lambda seed: recurrent_ppo.train(200_000, seed, 400.0, memory="none"),
        mean_return,
        below=150,
    ),
    Check("DAAC", lambda seed: daac.train(300_000, seed, 475.0), mean_return, at_least=475),
    Check("student, %", lambda seed: distill.train(120_000, seed), of_teacher, at_least=90),
    Check("DQN", lambda seed: dqn.train(500_000, seed, 475.0), mean_return, at_least=475),
    Check("Ape-X DQN", lambda seed: apex_dqn.train(600_000, seed, 475.0), mean_return, at_least=475),
    Check("IMPALA", lambda seed: impala.train(1_500_000, seed, 475.0), mean_return, at_least=475),
    Check(
        "IMPALA + LSTM",
        lambda seed: impala.train(1_500_000, seed, 400.0, memory="lstm"),
        mean_return,
        at_least=400,
    ),
    Check("SAC", lambda seed: sac.train(100_000, seed, -200.0), mean_return, at_least=-200),
    Check("TD3+BC, dataset", lambda seed: offline.train(8_000, seed), mean_return, at_least=-200),
    Check("TD3+BC, half own", lambda seed: offline.train(8_000, seed, 0.5), mean_return, at_least=-200),
    Check("DrQ-v2", lambda seed: drqv2.train(60_000, seed, drqv2.THRESHOLD), mean_return, at_least=drqv2.THRESHOLD),
    Check("HER, %", lambda seed: her.train(100_000, seed, 0.9), percent, at_least=90),
    Check("no hindsight, %", lambda seed: her.train(60_000, seed, 0.9, relabel_fraction=0.0), percent, below=5),
]
if find_spec("minatar"):
    CHECKS.append(
        Check(
            "DQN, Breakout",
            lambda seed: dqn.train(500_000, seed, dqn.MINATAR.threshold, "MinAtar/Breakout-v1"),
            mean_return,
            at_least=dqn.MINATAR.threshold,
        )
    )
if find_spec("ray"):
    CHECKS.append(
        Check(
            "IMPALA on Ray",
            lambda seed: impala.train(1_500_000, seed, 475.0, use_ray=True),
            mean_return,
            at_least=475,
        )
    )


def main() -> None:
    """Read the command line, run all checks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--out", type=Path, help="folder for the learning curves and results, one folder per seed")
    options = parser.parse_args()
    table = Table("example", "seed", "measured", "wanted", "steps", "seconds", "in storage", "", title="learning")
    failures = 0
    for check in CHECKS:
        for seed in options.seeds:
            result = check.train(seed)
            measured = check.measure(result)
            kept = check.at_least <= measured < check.below
            failures += not kept
            table.add_row(
                check.title,
                str(seed),
                f"{measured:.1f}",
                check.bound(),
                f"{result.env_steps:,}",
                f"{result.seconds:.1f}",
                f"{result.storage_seconds / result.seconds:.1%}",
                "ok" if kept else "[bold red]FAILED[/bold red]",
            )
            if options.out:
                save(result, options.out / f"seed{seed}")
    Console().print(table)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
