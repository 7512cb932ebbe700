"""Replay served to other processes, beside Reverb: two writers and one learner.

Everybody works as fast as they can: the writers add steps of one environment each, the learner takes batches of 256, on
the same cores. Told are the rows that go in and out, and the CPU time of all processes of a contender for each of these
rows. The contenders take turns; all of them run all the time, but those whose turn it is not are idle.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from benchmarks.saving import Figure, Figures
from benchmarks.served_work import WORKS, Order, answer

REVERB_PYTHON = Path(os.environ.get("REVERB_PYTHON", ".venv-reverb/bin/python"))
# Before rows count, and while they do.
LEAD, SECONDS = 0.25, 1.0
_TICK = os.sysconf("SC_CLK_TCK")

TITLES = {
    "vectors": "vectors",
    "priority": "vectors by priority",
    "pixels": "pixels 4 x 84 x 84",
}
# The CPU milliseconds that a row may take on Ray when only writers work.
TARGETS = {"vectors": 0.1, "pixels": 0.15}


class Turn(NamedTuple):
    """What is measured: the rows a second that came in and out, and the CPU milliseconds of one."""

    added: float
    drawn: float
    cpu: float


class Contender:
    """A process with all that serves, writes and learns.

    Args:
        command: How it is started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "GLOG_minloglevel": "3", "RAY_USAGE_STATS_ENABLED": "0"}
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, **quiet},
        )

    def wait(self) -> tuple[int, int]:
        """Wait until it has started, or carried out an order; the rows that it added and drew."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            rows = answer(line)
            if rows is not None:
                return rows
        self._said.seek(0)
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}: {self._said.read()[-6000:]}")

    def work(self, work: str, *, learns: bool, writer: str = "", seconds: float = SECONDS) -> Turn:
        """Let it work for a while."""
        assert self._process.stdin is not None
        start = monotonic() + LEAD
        order = Order(work, learns, start, start + seconds, writer)
        self._process.stdin.write(json.dumps(order._asdict()) + "\n")
        self._process.stdin.flush()
        used = []
        for moment in (order.start, order.stop):
            sleep(max(moment - monotonic(), 0))
            used.append(cpu_seconds(self._process.pid))
        added, drawn = self.wait()
        rows = max(added + drawn, 1)
        return Turn(added / seconds, drawn / seconds, (used[1] - used[0]) * 1e3 / rows)

    def close(self) -> None:
        """End it, and what it has started."""
        for pid in reversed(family(self._process.pid)):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self._process.wait()
        self._said.close()


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children[int(stat[1])].append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(children[one])
    return found


def cpu_seconds(pid: int) -> float:
    """The CPU time, user and system, of a process and all that descend from it."""
    return sum(int(stat[11]) + int(stat[12]) for one in family(pid) if (stat := _stat(one))) / _TICK


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _commands(result: Figures) -> dict[str, list[str]]:
    ours = {
        "rlstore on Ray": [sys.executable, "-m", "benchmarks.served_ours", "ray"],
        "rlstore in shared memory": [sys.executable, "-m", "benchmarks.served_ours", "shared"],
    }
    if not REVERB_PYTHON.exists():
        result.missing["Reverb"] = f"there is no {REVERB_PYTHON}; `make reverb` makes it, with Python 3.11"
        return ours
    return {"Reverb": [str(REVERB_PYTHON), "-m", "benchmarks.reverb_served"], **ours}


def part(rounds: int = 3) -> Figures:
    """Both sides at work, then the writers alone."""
    result = Figures("served", "Replay served to a learner, two writers beside it", rounds)
    with ExitStack() as stack:
        contenders = {}
        for name, command in _commands(result).items():
            contenders[name] = Contender(command)
            stack.callback(contenders[name].close)
        for contender in contenders.values():
            contender.wait()
            for work in WORKS:  # fill, and start what starts late
                contender.work(work, learns=False, seconds=1.0)
                contender.work(work, learns=True, seconds=0.3)
        turns = _take_turns(contenders, rounds)
    for (work, learns, name), taken in turns.items():
        result.figures += _figures(work, name, taken, learns=learns)
    return result


def _take_turns(contenders: dict[str, Contender], rounds: int) -> dict[tuple[str, bool, str], list[Turn]]:
    turns: dict[tuple[str, bool, str], list[Turn]] = {}
    jobs = [(work, True) for work in WORKS] + [(work, False) for work in TARGETS]
    for first in range(rounds):
        for work, learns in jobs:
            for i in range(len(contenders)):
                name = list(contenders)[(first + i) % len(contenders)]
                for kind in ("", "structured") if name == "Reverb" and not learns else ("",):
                    told = f"{name}, {'StructuredWriter' if kind else 'TrajectoryWriter'}" if name == "Reverb" else name
                    turn = contenders[name].work(work, learns=learns, writer=kind)
                    turns.setdefault((work, learns, told), []).append(turn)
    return dict(sorted(turns.items(), key=lambda item: (jobs.index(item[0][:2]), item[0][2])))


def _figures(work: str, name: str, turns: list[Turn], *, learns: bool) -> list[Figure]:
    added, drawn, cpu = (statistics.median(values) for values in zip(*turns, strict=True))
    what = f"{TITLES[work]}, {'both at work' if learns else 'writers alone'}"
    least = TARGETS[work] if name == "rlstore on Ray" and not learns else None
    return [
        Figure(f"{what}: rows in", name, added / 1e3, "thousand a second"),
        *([Figure(f"{what}: rows out", name, drawn / 1e3, "thousand a second")] if learns else []),
        Figure(
            f"{what}: CPU of a row",
            name,
            cpu,
            "ms",
            None if least is None else cpu / least,
            "" if least is None else f"at most {least} ms: a ratio of 1",
        ),
    ]


if __name__ == "__main__":
    for figure in part().figures:
        print(f"{figure.what:50} {figure.contender:30} {figure.value:10.4f} {figure.unit}")
