"""Saving: how long it takes beside plain files and peers, how long an adding thread waits for it, what a journal costs.

All of it is timed with the wall clock, since most of it happens in threads and on the disk; of a thread that adds with
a journal the CPU time is told, too. Contenders take turns, and figures are medians of the rounds. Files are written to
``out``, read back from the page cache, and removed; before each turn the disk may write what others left.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from benchmarks import replay_pixels, replay_vector
from benchmarks.replay_buffers import Cpprb, Rlstore, SavableBuffer
from benchmarks.replay_data import check_batches

LARGE = 140_000  # transitions of pixels: 1 GB
PAUSED = 80_000  # 570 MB
PIECE = 1 << 20  # what a plain file is written and read by; with larger pieces it is no faster
COMMITS = 2  # in a turn with a journal
INTERVAL = 2.0

# What cpprb loads of compressed stacks is not what it saved: here it keeps them whole.
BUFFERS = replay_pixels.BUFFERS | {"cpprb": partial(Cpprb, replay_pixels.source())}


@dataclass(frozen=True)
class Figure:
    """One measured value; ``ratio`` is what ``target`` limits."""

    what: str
    contender: str
    value: float
    unit: str
    ratio: float | None = None
    target: str = ""


@dataclass
class Figures:
    """The figures of one part; ``load`` is the load average before and after."""

    name: str
    title: str
    rounds: int
    load: tuple[float, float] = (0.0, 0.0)
    figures: list[Figure] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def parts() -> dict[str, Callable[[], Figures]]:
    return {
        "large": large,
        "peers": peers,
        "pauses": pauses,
        "journal_vectors": partial(journaling, "vectors"),
        "journal_pixels": partial(journaling, "pixels"),
    }


def measure(part: Callable[[], Figures]) -> Figures:
    """Measure a part in this process."""
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    result = part()
    result.load = before, os.getloadavg()[0]
    return result


# ---------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder on the disk of the repository, which is not in memory as /tmp may be."""
    Path("out").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="out") as folder:
        yield Path(folder)


def _emptied(folder: Path) -> Path:
    """A path at which there is nothing, on a disk that is idle."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    return folder


def _seconds(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _bytes_written() -> int:
    """The bytes that this process has ever passed to the system to be written."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["wchar"])


def _warm(nbytes: int) -> None:
    """Leave so much memory that is free and was used a moment ago.

    What the host of a virtual machine has to provide anew takes ten times as long to touch: chance would decide.
    """
    np.empty(nbytes, dtype=np.uint8)[::4096] = 1


def _pixels(capacity: int, **options: Any) -> Rlstore:
    """A full storage of pixels, whose steps are repeated."""
    made = Rlstore(replay_pixels.source(), capacity, tensors=True, frame_stack=replay_pixels.STACK, **options)
    made.adding(made.source.loop(), capacity)()
    return made


# ---------------------------------------------------------------------------------------------------- 1 GB


def large(rounds: int = 5) -> Figures:
    """A storage of 1 GB and a plain file of as many bytes."""
    result = Figures("large", f"Saving {LARGE:,} transitions of 4 x 84 x 84", rounds)
    seconds: dict[str, list[float]] = defaultdict(list)
    ours = _pixels(LARGE)
    change = ours.adding(ours.source.loop(), LARGE // 100)
    with _scratch() as folder:
        ours.storage.save(folder / "ours")
        content = np.random.default_rng(0).integers(0, 256, _bytes_in(folder / "ours"), dtype=np.uint8)
        turns = [partial(_large_turn, ours, folder / "ours", change), partial(_plain_turn, content, folder / "plain")]
        for i in range(rounds + 1):
            for turn in turns[i % 2 :] + turns[: i % 2]:
                for what, value in turn().items():
                    if i:  # the first round warms up
                        seconds[what].append(value)
    medians = {what: statistics.median(values) for what, values in seconds.items()}
    gigabytes = content.nbytes / 1e9
    for what, plain in (("save", "write"), ("load", "read")):
        ratio = medians[plain] / medians[what]
        result.figures += [
            Figure(what, "rlstore", gigabytes / medians[what], "GB/s", ratio, "at least 0.7 of the plain file"),
            Figure(what, "plain file", gigabytes / medians[plain], "GB/s"),
        ]
    again, first = medians["save again"], medians["save"]
    written, size = medians["bytes again"], medians["bytes"]
    limit = "at most 0.05 of the first save"
    result.figures += [
        Figure("save again after 1 % was added", "rlstore", again, "s", again / first, limit),
        Figure("bytes that it writes", "rlstore", written / 1e6, "MB", written / size, limit),
    ]
    ours.close()
    return result


def _large_turn(ours: Rlstore, path: Path, change: Callable[[], object]) -> dict[str, float]:
    _emptied(path)
    begun = _bytes_written()
    found = {"save": _seconds(lambda: ours.storage.save(path))}
    found["bytes"] = _bytes_written() - begun
    change()
    os.sync()
    begun = _bytes_written()
    found["save again"] = _seconds(lambda: ours.storage.save(path))
    found["bytes again"] = _bytes_written() - begun
    made = []
    _warm(_bytes_in(path))
    found["load"] = _seconds(lambda: made.append(type(ours.storage).load(path)))
    made.pop().close()
    _emptied(path)
    return found


def _plain_turn(content: Any, path: Path) -> dict[str, float]:
    _emptied(path)
    path.mkdir()
    found = {"write": _seconds(lambda: _write(path / "file", content))}
    _warm(len(content))
    found["read"] = _seconds(lambda: _read(path / "file"))
    _emptied(path)
    return found


def _write(path: Path, content: Any) -> None:
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, len(content), PIECE):
            file.write(content[begin : begin + PIECE])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    """Read into memory that is new, as a storage that is loaded has it."""
    with open(path, "rb", buffering=0) as file:
        memory = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
        for begin in range(0, len(memory), PIECE):
            file.readinto(memory.data[begin : begin + PIECE])


# ---------------------------------------------------------------------------------------------------- peers


def peers(rounds: int = 2) -> Figures:
    """The same transitions in buffers of all libraries that save pixels. Only ours waits for the disk."""
    capacity = replay_pixels.CAPACITY
    result = Figures("peers", f"Saving {capacity:,} transitions of 4 x 84 x 84", rounds)
    contenders = {}
    for name, make in BUFFERS.items():
        try:
            contenders[name] = make(capacity)
            contenders[name].fill()
        except ImportError as error:
            result.missing[name] = f"{type(error).__name__}: {error}"
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with _scratch() as folder:
        for i in range(rounds + 1):
            names = [*contenders][i % len(contenders) :] + [*contenders][: i % len(contenders)]
            for name in names:
                for what, value in _peer_turn(name, contenders[name], folder / "saved", is_checked=i == 0).items():
                    if i:
                        found[what, name].append(value)
    for what, unit in (("save", "s"), ("load", "s"), ("bytes", "MB")):
        result.figures += [Figure(what, name, statistics.median(found[what, name]), unit) for name in contenders]
    return result


def _peer_turn(name: str, filled: SavableBuffer, path: Path, *, is_checked: bool) -> dict[str, float]:
    _emptied(path)
    fresh = BUFFERS[name](replay_pixels.CAPACITY)
    values = {"save": _seconds(lambda: filled.save(path)), "bytes": _bytes_in(path) / 1e6}
    values["load"] = _seconds(lambda: fresh.load(path))
    if is_checked:
        check_batches(replay_pixels.source(), (256,), 1, {name: fresh.drawn(256)})
    fresh.close()
    _emptied(path)
    return values


# ---------------------------------------------------------------------------------------------------- pauses


def pauses(rounds: int = 5) -> Figures:
    """How long a thread that adds as fast as it can is held back by a save in the background, and without one."""
    result = Figures("pauses", f"Adding during a save of {PAUSED:,} transitions of 4 x 84 x 84", rounds)
    ours = _pixels(PAUSED)
    given = cycle([ours.step_arguments(step, {}) for step in ours.source.loop().each()])
    gaps: dict[str, list[Any]] = {"a save": [], "nothing": []}
    calls, lengths = [], []
    with _scratch() as folder:
        for i in range(rounds + 1):
            path = _emptied(folder / "saved")
            begun = perf_counter()
            saving = ours.storage.save(path, background=True)
            call = perf_counter() - begun
            during = _add_while(ours.storage.add, given, partial(_is_going_on, saving))
            length = perf_counter() - begun
            saving.wait()
            _emptied(path)
            alone = _add_while(ours.storage.add, given, partial(_is_before, perf_counter() + length))
            if i:
                calls.append(call)
                lengths.append(length)
                gaps["a save"].append(during)
                gaps["nothing"].append(alone)
    result.figures.append(Figure("the call of save", "rlstore", 1e3 * statistics.median(calls), "ms"))
    result.figures.append(Figure("until the save is complete", "rlstore", 1e3 * statistics.median(lengths), "ms"))
    for beside, found in gaps.items():
        longest = [1e3 * float(values.max()) for values in found]
        tail = [1e6 * float(np.quantile(values, 0.999)) for values in found]
        rate = [1 / float(values.mean()) for values in found]
        target = "at most 5 ms" if beside == "a save" else ""
        result.figures += [
            Figure("longest add, median", f"beside {beside}", statistics.median(longest), "ms", None, target),
            Figure("longest add of all rounds", f"beside {beside}", max(longest), "ms"),
            Figure("99.9 % of adds within", f"beside {beside}", statistics.median(tail), "us"),
            Figure("adds", f"beside {beside}", statistics.median(rate), "1/s"),
        ]
    ours.close()
    return result


def _is_going_on(saving: Any) -> bool:
    return not saving.done


def _is_before(end: float) -> bool:
    return perf_counter() < end


def _add_while(add: Callable[..., object], given: Iterator[tuple[Any, ...]], goes_on: Callable[[], bool]) -> Any:
    """The seconds from each add to the next."""
    stamps, count = array("d", bytes(8 << 22)), 0
    gc.collect()
    gc.disable()
    stamps[0] = perf_counter()
    while goes_on():
        add(*next(given))
        count += 1
        stamps[count] = perf_counter()
    gc.enable()
    return np.diff(np.frombuffer(stamps)[: count + 1])


# ---------------------------------------------------------------------------------------------------- journal


def journaling(kind: str, rounds: int = 3) -> Figures:
    """What a journal takes from the thread that adds as fast as it can, over a few commits."""
    limit = {"vectors": 0.15, "pixels": 0.10}[kind]
    result = Figures(f"journal_{kind}", f"Adding {kind} with a journal, a commit every {INTERVAL:g} seconds", rounds)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    with _scratch() as folder:
        plain, journaled = _journaling_storage(kind), _journaling_storage(kind, journal=folder / "journal")
        contenders = {"without": plain, "with a journal": journaled}
        for i in range(rounds + 1):
            turns = [*contenders.items()]
            for name, ours in turns[i % 2 :] + turns[: i % 2]:
                for clock, rate in _adding_turn(ours).items():
                    if i:
                        rates[clock, name].append(rate)
                if ours is journaled:
                    ours.storage.journal.commit()
                os.sync()
        plain.close()
        journaled.close()
    for clock in ("wall clock", "CPU time of the thread"):
        medians = {name: statistics.median(rates[clock, name]) for name in contenders}
        for name, rate in medians.items():
            is_with = name != "without"
            ratio, target = (1 - rate / medians["without"], f"at most {limit} less") if is_with else (None, "")
            result.figures.append(Figure(f"adds, {clock}", name, rate, "1/s", ratio, target))
    return result


def _journaling_storage(kind: str, **options: Any) -> Rlstore:
    if kind == "pixels":
        return _pixels(replay_pixels.CAPACITY, **options)
    made = Rlstore(replay_vector.source(replay_vector.ENVS), replay_vector.CAPACITY, tensors=True, **options)
    steps = made.source.loop()
    made.adding(steps, replay_vector.CAPACITY // replay_vector.ENVS // len(steps.rewards) * len(steps.rewards))()
    return made


def _adding_turn(ours: Rlstore) -> dict[str, float]:
    """The adds a second, by both clocks, over a few intervals of a journal."""
    calls = 800  # whole episodes
    loop, count = ours.adding(ours.source.loop(), calls), 0
    begun, used = perf_counter(), thread_time()
    while (passed := perf_counter() - begun) < COMMITS * INTERVAL:
        loop()
        count += calls
    return {"wall clock": count / passed, "CPU time of the thread": count / (thread_time() - used)}
