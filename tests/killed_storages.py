"""Mapped storages whose process is killed, and what they must hold when they are opened again.

Every value of a row is a function of its environment, its time, and the time of the last reset before it; so is where
episodes begin, end and are broken off. What a storage holds after a kill is compared with that, row by row.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
    Storage,
)

LANES, STEPS = 2, 24
OPERATIONS = ("add", "masked add", "sample", "update", "reset", "save")
ADD, MASKED, SAMPLE, UPDATE, RESET, SAVE = range(6)
TOLD, FINAL = (
    0.25,
    0.5,
)  # what is not the next row's observation, though it was said to follow; and what ended an episode


# ---------------------------------------------------------------------------------------------------- the world


def ended(lane: int, time: int) -> bool:
    """Every fifth step; of some forty steps each, so that tables have to grow."""
    return time // 40 % 2 == 1 or (time + 3 * lane) % 5 == 4


def broken(lane: int, time: int) -> bool:
    """Whether this row does not continue the one before, though no end was told."""
    return time % 13 == 6 and not ended(lane, time - 1)


def start_of(lane: int, time: int, since: int) -> int:
    """Where the episode of a row begins, after a reset at ``since``."""
    while time > since and not ended(lane, time - 1) and not broken(lane, time):
        time -= 1
    return time


def follows(lane: int, time: int) -> tuple[int, float]:
    """What is said to follow a row: an observation, by its time and how it differs."""
    if ended(lane, time):
        return time, FINAL
    return time + 1, TOLD if broken(lane, time + 1) else 0.0


class Vectors:
    """Six numbers that tell the row."""

    space: spaces.Space[Any] = spaces.Box(-1e9, 1e9, (6,), np.float32)

    def render(self, lane: int, time: int, differs: float, start: int) -> Any:
        return (2 * time + lane + 1 + differs) * np.array([1, -1, 1, -1, 1, -1], np.float32)


class Goals(Vectors):
    """Observations with goals."""

    space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), Vectors.space))

    def render(self, lane: int, time: int, differs: float, start: int) -> Any:
        vector = super().render(lane, time, differs, start)
        return {"observation": vector, "achieved_goal": vector + 10, "desired_goal": vector - 10}


class Stacks(Vectors):
    """Three frames; before the first of an episode there are zeros, that frame again, or others."""

    space = spaces.Box(0, 255, (3, 2), np.uint8)

    def render(self, lane: int, time: int, differs: float, start: int) -> Any:
        before = {0: (201, 202), 1: (0, 0), 2: (self._frame(lane, start),) * 2}[start % 3]
        older = [self._frame(lane, t) if t >= start else before[t - start + 2] for t in (time - 2, time - 1)]
        if differs == FINAL:  # one frame further than the row that it ends with
            older = [older[1], self._frame(lane, time)]
        newest = {0.0: self._frame(lane, time), TOLD: 251, FINAL: 250}[differs]
        return np.array([*older, newest], np.uint8)[:, None].repeat(2, 1)

    def _frame(self, lane: int, time: int) -> int:
        return (2 * time + lane) % 199 + 1


_VECTORS = Vectors()


@dataclass(frozen=True)
class Kind:
    """A class of storages."""

    name: str
    storage: Callable[..., Any]
    options: dict[str, Any]
    observed: Vectors = _VECTORS

    def make(self, **more: Any) -> Any:
        return self.storage(
            self.observed.space, spaces.Discrete(9), storage_size=LANES * STEPS, num_envs=LANES, batch_size=16,
            autoreset="SameStep", seed=0, **self.options, **more,
        )  # fmt: skip

    def open(self, path: Path) -> Any:
        """In mapped memory."""
        return self.make(memory="mapped", path=path)

    @property
    def by_priority(self) -> bool:
        return self.storage is PrioritizedReplayStorage or self.options.get("alpha", 0) > 0

    def step(self, times: list[int], since: list[int]) -> tuple[Any, ...]:
        """The arguments of ``add``."""
        lanes = list(enumerate(times))
        starts = [start_of(lane, time, since[lane]) for lane, time in lanes]
        here = _stacked([self.observed.render(lane, time, 0.0, starts[lane]) for lane, time in lanes])
        after = _stacked([self.observed.render(lane, *follows(lane, time), starts[lane]) for lane, time in lanes])
        over = np.array([ended(lane, time) for lane, time in lanes])
        odd = np.array([time % 2 == 1 for time in times])
        infos = {"final_obs": after} if over.any() else {}
        rewards = np.array([2 * time + lane for lane, time in lanes], np.float32)
        return here, np.array(times) % 9, rewards, over & odd, over & ~odd, infos, after


def _stacked(nests: list[Any]) -> Any:
    if isinstance(nests[0], dict):
        return {key: np.stack([nest[key] for nest in nests]) for key in nests[0]}
    return np.stack(nests)


def _same_goal(achieved: Any, desired: Any, info: Any) -> Any:
    return (achieved == desired).all(-1).float()


KINDS = {
    kind.name: kind
    for kind in (
        Kind("replay", ReplayStorage, {}),
        Kind("frames", ReplayStorage, {"frame_stack": 3, "stack_axis": 0}, Stacks()),
        Kind("n-step", NStepReplayStorage, {"n_step": 3, "num_workers": 0}),
        Kind("prioritized", PrioritizedReplayStorage, {"alpha": 0.6}),
        Kind("sequences", SequenceReplayStorage, {"sequence_length": 4, "overlap": 2}),
        Kind("sequences by priority", SequenceReplayStorage, {"sequence_length": 4, "overlap": 2, "alpha": 0.6}),
        Kind("sequences across", SequenceReplayStorage,
             {"sequence_length": 4, "overlap": 1, "across_episodes": True, "alpha": 0.6}),
        Kind("hindsight", HindsightReplayStorage, {"compute_reward": _same_goal}, Goals()),
    )
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- who is killed


class Progress:
    """What a process has done, in memory that outlives it: operations, the one in progress, rows, and resets."""

    def __init__(self) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, 8 * (3 + 2 * LANES)), np.int64)
        self.written, self.since = self._words[3 : 3 + LANES], self._words[3 + LANES :]

    @property
    def finished(self) -> int:
        return int(self._words[0])

    @property
    def doing(self) -> int:
        """The operation that was not acknowledged, or -1."""
        return int(self._words[1]) - 1

    def begin(self, operation: int) -> None:
        self._words[1] = operation + 1

    def end(self) -> None:
        self._words[1] = 0
        self._words[0] += 1


def operate(kind: Kind, storage: Any, operation: int, progress: Progress, random_: random.Random, saved: Path) -> None:
    """One operation, acknowledged once it has returned."""
    progress.begin(operation)
    mask = [operation == ADD or random_.random() < 0.5 for _ in range(LANES)]
    if operation in (ADD, MASKED):
        step = kind.step(progress.written.tolist(), progress.since.tolist())
        storage.add(*step, mask=None if all(mask) else np.array(mask))
        progress.written += np.array(mask)
    elif operation == RESET:
        storage.reset()
        progress.since[:] = progress.written
    elif operation == SAVE:
        storage.save(saved)
    elif len(storage) >= STEPS // 2:
        batch = storage.sample()
        if operation == UPDATE and kind.by_priority:
            storage.update(batch.rows, 0.5 + batch.rows % 7)
    progress.end()


def forked(body: Callable[[], None]) -> int:
    """The process in which a function runs; it ends with 1 if that raises."""
    child = os.fork()
    if child:
        return child
    try:
        warnings.simplefilter("ignore")  # that episodes are broken off
        body()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def kill_at_random(kind: Kind, folder: Path, progress: Progress, random_: random.Random) -> None:
    """Run operations in another process, and kill that at some time after it has done some of them."""
    weights, first = (60, 8, 6, 12, 1, 1), progress.finished

    def body() -> None:
        storage = kind.open(folder / "mapped")
        while True:
            operate(kind, storage, random_.choices(range(6), weights)[0], progress, random_, folder / "saved")

    wanted = first + random_.randrange(1, 30)
    child = forked(body)
    while progress.finished < wanted:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process ended by itself"
        os.sched_yield()
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    random_.seed(random_.random())  # the child's draws are not known here


# ---------------------------------------------------------------------------------------------------- every instant

_TRACE_ME, _CONTINUE, _SINGLE_STEP = 0, 7, 9
Image = tuple[dict[str, bytes], np.ndarray]  # what the files held, and the words of the progress


def images(kind: Kind, folder: Path, before: list[int], watched: list[int], seed: int) -> list[Image]:
    """Do operations in another process, and look at the files at every instant of the last of them.

    Each line of Python is an instant, and so is each machine instruction of the native code that writes.

    Args:
        kind: The storage.
        folder: Where it is.
        before: The operations that go before, at least two additions.
        watched: The operations that are watched.
        seed: Of what they choose.

    Returns:
        What the files of the mapped folder held whenever any of them had changed: if the process had been killed at
        some instant, one of these would have been left.
    """
    progress, libc = Progress(), ctypes.CDLL(None)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    path, seen = folder / "mapped", folder / "seen"

    def body() -> None:
        gc.disable()  # a collection in the middle of a call would be gone through step by step, which takes a minute
        random_ = random.Random(seed)
        storage = kind.open(path)
        for operation in before:
            operate(kind, storage, operation, progress, random_, folder / "saved")
        by_line = _LineImages(path, progress)
        if libc.ptrace(_TRACE_ME, 0, None, None) == 0:  # else processes may not be traced here, and lines have to do
            _stop_at_appends(storage._appender)
            if kind.by_priority:
                _stop_at_updates(storage._sampler.tree)
        sys.settrace(by_line.enter)
        for operation in watched:
            operate(kind, storage, operation, progress, random_, folder / "saved")
        sys.settrace(None)
        seen.write_bytes(pickle.dumps(by_line.found))

    found: list[Image] = []
    child, stepping, files = forked(body), False, None
    while True:
        status = os.waitpid(child, 0)[1]
        if not os.WIFSTOPPED(status):
            break
        if os.WSTOPSIG(status) == signal.SIGSTOP:
            stepping = not stepping
            files = _Files(path) if stepping else None
        if files is not None and files.changed():
            found.append((files.contents(), progress._words.copy()))
        libc.ptrace(_SINGLE_STEP if stepping else _CONTINUE, child, None, None)
    assert status == 0, "it ended in the middle of an operation"
    return [*found, *pickle.loads(seen.read_bytes())]


class _Stopped:
    """A native object; the process stops before and after each call of it, so that another can go through that."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._native, name)

        def stopped(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            result = method(*args)
            os.kill(os.getpid(), signal.SIGSTOP)
            return result

        return stopped


def _stop_at_appends(appender: Any) -> None:
    """Stop at whatever writes a step; after a save that is found anew."""
    find = appender._find_direct

    def stop() -> None:
        for name in ("_kernel", "_direct"):
            native = getattr(appender, name)
            setattr(appender, name, native and _Stopped(native))

    def find_and_stop() -> None:
        find()
        stop()

    stop()
    appender._find_direct = find_and_stop


def _stop_at_updates(priorities: Any) -> None:
    """Stop at native calls of an update; others are given the native object itself."""
    update = priorities.update

    def update_with_stops(*args: Any) -> None:
        native, priorities._kernel = priorities.kernel, _Stopped(priorities.kernel)
        try:
            update(*args)
        finally:
            priorities._kernel = native

    priorities.update = update_with_stops


class _LineImages:
    """What the files of a folder hold after each line of the library that changed any of them."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder, self._progress = folder, progress
        self._last: dict[str, bytes] = {}
        self.found: list[Image] = []

    def enter(self, frame: Any, event: str, argument: Any) -> Any:
        return self.line if "rlstore" in frame.f_code.co_filename else None

    def line(self, frame: Any, event: str, argument: Any) -> Any:
        now = contents(self._folder)
        if now != self._last:
            self._last = now
            self.found.append((now, self._progress._words.copy()))
        return self.line


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class _Files:
    """The files of a folder, seen through memory that is shared with the process that writes them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, {}
        self._map()

    def _map(self) -> None:
        self._kept = contents(self._folder)
        self._open = {}
        for name in self._kept:
            if name.endswith(".bin") and self._kept[name]:
                with open(self._folder / name, "rb") as file:
                    self._open[name] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def changed(self) -> bool:
        sizes = {name: os.stat(self._folder / name).st_size for name in ("episodes.bin", "free_slots.bin")}
        grown = any(len(self._kept[name]) != size for name, size in sizes.items())
        if grown or len(os.listdir(self._folder)) != len(self._kept):
            self._map()
            return True
        changed = [name for name, memory in self._open.items() if memory[:] != self._kept[name]]
        self._kept.update({name: self._open[name][:] for name in changed})
        return bool(changed)

    def contents(self) -> dict[str, bytes]:
        return dict(self._kept)


# ---------------------------------------------------------------------------------------------------- what must hold


def judge(kind: Kind, path: Path, progress: Progress) -> None:
    """Open the folder again: what was acknowledged is there, every row is right, and every row can be drawn.

    ``progress`` then says what is there.
    """
    storage = kind.open(path)
    try:
        _judge_counts(storage, progress)
        judge_held(kind, storage, progress)
    finally:
        storage.close()


def judge_held(kind: Kind, storage: Any, progress: Progress) -> None:
    """Every row that is held is right, every row can be drawn, and nothing else can."""
    _judge_rows(kind, storage, progress)
    _judge_draws(kind, storage, progress)


def _bounds(storage: Any) -> list[tuple[int, int]]:
    """By lane the first row that is held, and one past the last."""
    ring = storage._ring_of()
    return [(int(w - h), int(w)) for w, h in zip(ring.written, ring.held(), strict=True)]


def _judge_counts(storage: Any, progress: Progress) -> None:
    more = progress.doing in (ADD, MASKED)
    for lane, (oldest, written) in enumerate(_bounds(storage)):
        assert progress.written[lane] <= written <= progress.written[lane] + more, (
            "acknowledged rows, and at most one more"
        )
        progress.written[lane] = written
        if progress.doing == RESET and oldest == written:
            progress.since[lane] = written
        # The oldest row of a full lane may be half overwritten by the one that was being added.
        assert written - oldest >= min(written - progress.since[lane], STEPS - 1)
        assert oldest >= progress.since[lane]
    assert len(storage) == sum(written - oldest for oldest, written in _bounds(storage))


def _judge_rows(kind: Kind, storage: Any, progress: Progress) -> None:
    data = storage.get_all_buffer_data()
    for lane, (oldest, written) in enumerate(_bounds(storage)):
        assert not data or data["masks"][:, lane].sum() == written - oldest
        for place, time in enumerate(range(oldest, written)):
            start = start_of(lane, time, int(progress.since[lane]))
            here = kind.observed.render(lane, time, 0.0, start)
            after = kind.observed.render(lane, *follows(lane, time), start)
            row = {name: _at(value, (place, lane)) for name, value in data.items() if name != "last_observations"}
            assert _same(row["observations"], here), f"row {time} of {lane}: {row['observations']}, and not {here}"
            assert _same(row["next_observations"], after), f"row {time} of {lane}: {row['next_observations']} {after}"
            assert (row["actions"].item(), row["rewards"].item()) == (time % 9, 2 * time + lane)
            flags = ended(lane, time) and time % 2 == 1, ended(lane, time) and time % 2 == 0
            assert (bool(row["terminated"]), bool(row["truncated"])) == flags


def _at(value: Any, index: tuple[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value[index]
    return {key: value[key][index] for key in list(value.keys())}


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(np.array_equal(found[key].numpy(), expected[key]) for key in expected)
    return np.array_equal(found.numpy(), expected)


def _is_closed(storage: Any, lane: int, written: int) -> bool:
    """Whether the newest episode was closed for a row that does not continue it, and that was not written any more."""
    ring = storage._ring_of()
    stop = int(ring.episodes[ring.blocks["episode"][lane, (written - 1) % ring.rows], 1])
    assert stop in (-1, written)
    assert stop == -1 or ended(lane, written - 1) or broken(lane, written)
    return stop == written


def windows_of(storage: Any, progress: Progress) -> set[int]:
    """The rows at which windows begin, found by looking at each."""
    length, stride = storage.sequence_length, storage.sequence_length - storage.overlap
    found = set()
    for lane, (oldest, written) in enumerate(_bounds(storage)):
        since = int(progress.since[lane])
        for time in range(oldest, written):
            if storage.across_episodes:
                begun = int(storage._ring_of().begun[lane])
                begins = (time - begun) % stride == 0 and time + length <= written
            else:
                start = start_of(lane, time, since)
                stop = next((t for t in range(time + 1, written) if start_of(lane, t, since) == t), written)
                over = stop < written or ended(lane, written - 1) or _is_closed(storage, lane, written)
                regular = (time - start) % stride == 0 and time + length <= stop
                begins = regular or (over and time == max(start, stop - length))
            if begins:
                found.add(time * LANES + lane)
    return found


def _judge_draws(kind: Kind, storage: Any, progress: Progress) -> None:
    """Every row can be drawn, or every window; nothing else can; and priorities of what was drawn can be set."""
    rows = {time * LANES + lane for lane, (first, last) in enumerate(_bounds(storage)) for time in range(first, last)}
    if isinstance(storage, SequenceReplayStorage):
        rows = windows_of(storage, progress)
        windows = storage._sampler._windows
        ends = enumerate(windows._counters[:2].T.tolist())
        queued = [int(windows._queue[lane, i % STEPS]) * LANES + lane for lane, (a, b) in ends for i in range(a, b)]
        assert sorted(queued) == sorted(rows)
    if not rows:
        return
    if kind.by_priority:
        given = storage.priorities(sorted(rows))
        assert (given > 0).all(), f"without a priority: {torch.tensor(sorted(rows))[~(given > 0)]}"
        total = given.double().sum().item()
        assert abs(storage.draw_total - total) < 1e-6 * total, "a priority that no row has"
    batch = storage.sample(64)
    if hasattr(batch, "rows"):
        assert set(batch.rows.tolist()) <= rows
    if kind.by_priority:
        stale = storage.stale_updates
        storage.update(batch.rows, torch.ones(64))
        assert storage.stale_updates == stale


def judge_image(kind: Kind, image: Image, folder: Path) -> None:
    """:func:`judge` of what was found at some instant."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files, words = image
    for name, content in files.items():
        (folder / name).write_bytes(content)
    progress = Progress()
    progress._words[:] = words
    judge(kind, folder, progress)


def judge_saved(folder: Path) -> None:
    """The snapshot that is there, if any, can be loaded."""
    if not (folder / "manifest.json").exists():
        return
    shutil.rmtree(folder.parent / "loaded", ignore_errors=True)
    Storage.load(folder, folders={"path": folder.parent / "loaded"}).close()


# ---------------------------------------------------------------------------------------------------- again and again


def kill_again_and_again(name: str, folder: Path, kills: int) -> None:
    """Each process opens the folder that the one before it left, and is killed; what it leaves is judged."""
    kind, progress, random_ = KINDS[name], Progress(), random.Random(name)
    for _ in range(kills):
        kill_at_random(kind, folder, progress, random_)
        judge(kind, folder / "mapped", progress)
        judge_saved(folder / "saved")
        progress.end()


# What goes before, and what is watched: the first rows, rows that overwrite others, tables that grow, and so on.
PLANS = {
    "first rows": ([ADD] * 2, [ADD] * 8),
    "overwritten rows": ([ADD] * 30, [ADD] * 6),
    "tables that grow": ([ADD] * 54, [ADD] * 6),
    "priorities": ([ADD] * 30, [UPDATE, ADD, UPDATE]),
    "some lanes": ([ADD] * 30, [MASKED] * 4),
    "reset": ([ADD] * 30, [RESET, ADD, ADD]),
    "saves": ([ADD] * 20, [SAVE, ADD, SAVE]),
}


def judge_every_instant(name: str, folder: Path, before: list[int], watched: list[int]) -> int:
    """What is left at every instant of some operations is judged. Returns how many differed."""
    found = images(KINDS[name], folder, before, watched, seed=0)
    for image in found:
        judge_image(KINDS[name], image, folder / "image")
    judge_saved(folder / "saved")
    return len(found)
