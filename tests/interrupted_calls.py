"""Storages whose calls are interrupted, as by Ctrl-C, at any moment; then each was made whole, or not at all.

A seed decides which calls are made and where each is interrupted: at a moment at which Python handles signals (a
function has begun, a call has returned, a loop goes on), counted from the beginning of the call, or by a signal that a
thread sends some microseconds later. Afterwards the storage is what a twin, to which the same was done without
interruptions, is before the call or after it; another thread can use it; and what it saves is what it is.

    python tests/interrupted_calls.py KIND [COUNT [SEED]]
"""

from __future__ import annotations

import dis
import faulthandler
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from called_worlds import WORLDS, ReplayWorld, World
from killed_storages import ADD, RESET, SAMPLE, UPDATE

from rlstore import Journal, RateLimit, Storage

PATIENCE = 20.0  # seconds after which something hangs
# Python 3.12 does not trace the opcodes of a function that asks for it when it begins: there signals alone interrupt.
TRACES_OPCODES = sys.version_info[:2] != (3, 12)

# ---------------------------------------------------------------------------------------------------- interruptions

_CHECKS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "CALL_FUNCTION", "CALL_METHOD"}
_CHECKS |= {"CALL_FUNCTION_KW", "JUMP_ABSOLUTE"}


@lru_cache(None)
def _moments(code: CodeType) -> dict[int, int]:
    """Where an exception would be handled, by the instruction that raises it; of those after which signals are."""
    table = getattr(dis, "_parse_exception_table", lambda code: ())(code)
    handlers = {}
    for it in dis.get_instructions(code):
        if it.opname in _CHECKS:
            handlers[it.offset] = max((e.target for e in table if e.start <= it.offset < e.end), default=-1)
    return handlers


@lru_cache(None)
def _handler(code: CodeType, offset: int) -> int:
    table = getattr(dis, "_parse_exception_table", lambda code: ())(code)
    return max((entry.target for entry in table if entry.start <= offset < entry.end), default=-1)


# Where it is interrupted: here, and in what the standard library does in Python between two calls of ours.
_TRACED = re.compile(r"/src/rlstore/|/(contextlib|threading|queue|weakref|_base|thread|util|_weakrefset)\.py$")


class Interruption(KeyboardInterrupt):
    """What the harness raises."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interruption


class AtMoment:
    """Interrupts what runs in this thread at its n-th moment at which Python would handle a signal.

    Args:
        number: Which moment, from 0; none if there are fewer.
    """

    def __init__(self, number: int) -> None:
        self.left, self.seen, self.hit = number, 0, ""
        self._last: dict[FrameType, int] = {}

    def __enter__(self) -> AtMoment:
        self._before = signal.signal(signal.SIGINT, _interrupt)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self._last.clear()
        signal.signal(signal.SIGINT, self._before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.hit or not _TRACED.search(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            before, now = self._last.get(frame, -1), frame.f_lasti
            self._last[frame] = now
            handler = _moments(frame.f_code).get(before)
            if handler is not None and handler == _handler(frame.f_code, now):
                self.seen += 1
                if not self.hit and self.left == self.seen - 1:
                    code = frame.f_code
                    name = getattr(code, "co_qualname", code.co_name)  # the former from Python 3.11 on
                    self.hit = f"{code.co_filename.rpartition('src/')[2]}:{frame.f_lineno} {name}"
                    handler: Any = signal.getsignal(signal.SIGINT)
                    handler(signal.SIGINT, frame)  # as Python does
        return self._trace


class BySignal:
    """Interrupts the main thread so many seconds after the block has begun, by SIGINT."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._armed, self.hit = seconds, False, ""
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> BySignal:
        self._before, self._begun = signal.signal(signal.SIGINT, self._handle), threading.Event()
        self._thread.start()
        self._armed = True
        self._begun.set()
        return self

    def __exit__(self, *error: object) -> None:
        self._armed = False
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _send(self) -> None:
        self._begun.wait()
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.hit = "by a signal" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise Interruption


# ---------------------------------------------------------------------------------------------------- what is called

AHEAD = {"num_workers": 2}
Calls = dict[str, Callable[[], object]]


class Played:
    """A world of some kind whose calls are interrupted.

    Args:
        name: One of :data:`PLAYED`.
        folder: An empty one.
        seed: Decides everything.
    """

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self._root, self.random = name, folder, random.Random(seed)
        self._worlds = 0
        self._begin()
        self.most: Counter[str] = Counter()  # the moments of each call, as far as they are known
        self.hits: Counter[str] = Counter()
        self.problems: list[str] = []
        self.last = ""  # what was interrupted last, and where

    def _begin(self) -> None:
        """A new world: at first, and after one that was found wrong, so that no problem hides behind another."""
        world, given = PLAYED[self.name]
        self.folder, options = self._root / str(self._worlds), dict(given)
        self.folder.mkdir()
        self._worlds += 1
        if options.get("memory") == "mapped":
            options["path"] = self.folder / "rows"
        if options.get("journal"):
            options["journal"] = Journal(self.folder / "journal", interval=0.02, fsync=False)
        if options.get("save_snapshot"):
            options["snapshot_dir"] = self.folder / "episodes"
        self.world = WORLDS[world]()
        self.world.storage = self.world.make(**options)

    # ------------------------------------------------------------------------------------------ one call

    def interrupt(self, call: str) -> None:
        """Make a call, interrupt it, and judge what it has left."""
        world, seed = self.world, self.random.random()
        before = self._twin()
        after = self._twin()
        self._make(after, call, seed)
        states = self._state(before), self._state(after)
        by_signal = self.random.random() < 0.25 or not TRACES_OPCODES
        how: Any
        if by_signal:
            how = BySignal(self.random.random() ** 2 * self.most.get(call + " ns", 500_000) / 1e9)
        else:
            how = AtMoment(self.random.randrange((self.most[call] or 18) + 2))  # a later one may come
        begun, raised = time.perf_counter_ns(), False
        try:
            with how:
                self._make(world, call, seed)
        except Interruption:
            raised = True
        if not raised and by_signal:
            self.most[call + " ns"] = time.perf_counter_ns() - begun
        if not by_signal:
            self.most[call] = max(self.most[call], how.seen)
        self.hits[call] += bool(how.hit)
        self.last = f"{call} at {how.hit}"
        self._use_elsewhere()
        state = self._state(world)
        found = [twin for twin, known in zip((before, after), states, strict=True) if known == state]
        if not found and raised and call == "sample" and self._has_drawn(before):
            found = [before]
        if not found or (not raised and states[1] != state):
            raise AssertionError("neither made nor not made")
        storage, self.world = world.storage, found[-1] if not raised else found[0]
        self.world.storage = storage

    def _make(self, world: World, call: str, seed: float) -> None:
        storage, random_ = world.storage, random.Random(seed)
        if call == "save":
            storage.save(self.folder / f"saved by {id(world)}")
        elif call == "commit":
            if storage.journal is not None:
                storage.journal.commit()
        elif isinstance(world, ReplayWorld):
            chosen = {"add": ADD, "sample": SAMPLE, "update": UPDATE, "reset": RESET}[call]
            world.call(Chosen(chosen, seed))
        else:
            world.call(random_)

    def _twin(self) -> World:
        return self.world.twin()

    def _state(self, world: World) -> str:
        return self._state_of(world.storage)

    def _has_drawn(self, before: World) -> bool:
        """Whether a sample was interrupted after the draw: that batch is lost, and all else is as before."""
        storage, twin = self.world.storage, before.storage
        twin._random.copy_(storage._random)
        if hasattr(twin._sampler, "_drawn"):
            twin._sampler._drawn = storage._sampler._drawn
        return self._state(before) == self._state(self.world)

    def _use_elsewhere(self) -> None:
        """Another thread can use the storage."""
        done = threading.Event()

        def use() -> None:
            len(self.world.storage)
            self.world.storage.stats()
            done.set()

        threading.Thread(target=use, daemon=True).start()
        if not done.wait(PATIENCE):
            raise TimeoutError("another thread waits")

    # ------------------------------------------------------------------------------------------ all of them

    def play(self, calls: tuple[str, ...], count: int) -> None:
        """So many interruptions of each call."""
        for call in calls:
            tries = 0
            while self.hits[call] < count and tries < 4 * count + 20:
                tries += 1
                try:
                    for _ in range(self.random.randrange(3)):
                        self.world.call(random.Random(self.random.random()))
                    self.interrupt(call)
                    if tries % 10 == 0:
                        self.check()
                except Exception as error:
                    if os.environ.get("TRACE"):
                        traceback.print_exc()
                    self.problems.append(f"{self.last}: {error!r}"[:300])
                    self._begin()
        self.check()

    def check(self) -> None:
        """What is held is as a model has it, what is saved is what is held, and the journal commits."""
        world = self.world
        world.judge(world.storage)
        path = self.folder / "checked"
        shutil.rmtree(path, ignore_errors=True)
        world.storage.save(path)
        folders = {}
        if "path" in (used := type(world.storage)._used_folders(world.storage._settings())):
            folders["path"] = self.folder / f"loaded {self.random.random()}"
        if "snapshot_dir" in used:
            folders["snapshot_dir"] = self.folder / f"kept {self.random.random()}"
        loaded = Storage.load(path, folders=folders)
        if self._state_of(loaded) != self._state_of(world.storage):
            raise AssertionError("what was saved is not what is held")
        if hasattr(loaded, "close"):
            loaded.close()
        if world.storage.journal is not None:
            world.storage.journal.commit()
            assert world.storage.journal.error is None

    def _state_of(self, storage: Any) -> str:
        with storage._guard:  # a journal that commits has slots meanwhile
            return self.world.state(storage)


class Chosen(random.Random):
    """Numbers for :meth:`ReplayWorld.call` that choose one call."""

    def __new__(cls, call: int, seed: float) -> Chosen:
        return super().__new__(cls, seed)

    def __init__(self, call: int, seed: float) -> None:
        super().__init__(seed)
        self._call = call

    def choices(self, population: Any, weights: Any = None, **more: Any) -> list[Any]:
        return [self._call]


PLAYED: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {}),
    "prioritized": ("prioritized", {}),
    "sequence": ("sequence", {}),
    "n-step": ("n-step", {}),
    "hindsight": ("hindsight", {}),
    "frames": ("frames", {}),
    "shared": ("shared", {}),
    "rollout": ("rollout", {}),
    "distributed": ("distributed", {}),
    "ahead": ("n-step ahead", {}),
    "prioritized with a journal": ("prioritized", {"journal": True}),
    "sequence with a journal": ("sequence", {"journal": True}),
    "shared with a journal": ("shared", {"journal": True}),
    "ahead with a journal": ("n-step ahead", {"journal": True}),
    "rollout with a journal": ("rollout", {"journal": True}),
    "distributed with a journal": ("distributed", {"journal": True}),
    "prioritized in files": ("prioritized", {"memory": "mapped"}),
    "sequence in files": ("sequence", {"memory": "mapped", "journal": True}),
    "kept episodes": ("n-step", {"save_snapshot": True}),
    "limited": ("prioritized", {"rate_limit": RateLimit(min_size=1)}),
    "informed": ("prioritized", {"sample_info": True}),
}
REPLAY_CALLS = ("add", "sample", "update", "reset", "save", "commit")
OTHER_CALLS = ("call", "save", "commit")


def calls_of(name: str) -> tuple[str, ...]:
    calls = OTHER_CALLS if PLAYED[name][0] in ("rollout", "distributed") else REPLAY_CALLS
    if not PLAYED[name][1].get("journal"):
        calls = tuple(call for call in calls if call != "commit")
    if PLAYED[name][0] in ("uniform", "n-step", "n-step ahead", "hindsight", "frames"):
        calls = tuple(call for call in calls if call != "update")
    return calls


def interrupt(name: str, folder: Path, count: int, seed: int = 0) -> Played:
    """Interrupt each call of a kind so often."""
    played = Played(name, folder, seed)
    played.play(calls_of(name), count)
    if hasattr(played.world.storage, "close"):
        played.world.storage.close()
    return played


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.enable()
    names = list(PLAYED) if sys.argv[1] == "all" else [sys.argv[1]]
    for kind in names:
        faulthandler.dump_traceback_later(300, exit=True)
        began = time.perf_counter()
        given = [int(argument) for argument in sys.argv[2:4]] or [50]
        result = interrupt(kind, Path(tempfile.mkdtemp()), *given)
        print(f"{kind}: {dict(result.hits)}, {len(result.problems)} problems, {time.perf_counter() - began:.1f} s")
        for problem, often in Counter(result.problems).most_common(int(os.environ.get("SHOWN", "12"))):
            print(f"    {often} x {problem}")
        sys.stdout.flush()
