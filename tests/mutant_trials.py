"""Trials of hostile folders, in processes whose memory and time are bounded: what came of each."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from saved_folders import Saved, content_of, saved_folders
from watched import Watched, room_of, watched

import rlstore
from rlstore.look.opened import folders_in, opened
from rlstore.look.page import page
from rlstore.look.summary import summarize
from rlstore.look.terminal import rendered
from rlstore.verify import verify

SPARE_BYTES = 1 << 30  # of address space, beyond what a process has when it begins
SECONDS = 10.0  # of work on one folder: it hangs
SILENCE = 60.0  # seconds without any news: it waits for something, and the machine is not just busy
GOOD = ("refused", "refused later", "same", "other values")


class Hostile(Protocol):
    """A folder that was made from a saved one.

    Attributes:
        how: What was done to it.
        saved: What it was made from.
        path: The folder.
        may_differ: Whether other content is right: values were forged along with their checksums, or there were none.
    """

    how: str
    saved: Saved
    path: Path
    may_differ: bool


Maker = Callable[[int, Path, Path], Hostile]  # of the folder of a number: in which folder, beside which witness


class Trial(NamedTuple):
    """A hostile folder, and what came of it: one of GOOD, or what was wrong.

    What was forged may be refused as late as it is used: a folder may say that there are no rows.
    """

    number: int
    outcome: str
    how: str
    error: str = ""


class Trials:
    """Tries hostile folders in child processes; another continues when one has died.

    Args:
        root: A folder for all of it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.saved = saved_folders(root / "saved")
        for saved in self.saved:  # what is imported when it is first needed is not what a folder costs
            verdict_on(saved.path), look_at(saved.path, terminal=False), look_at(saved.path, terminal=True)

    def run(self, numbers: Sequence[int], make: Maker, processes: int = 1) -> list[Trial]:
        """Try the folders of these numbers."""
        workers = [_Worker(self._root, index, numbers[index::processes], make) for index in range(processes)]
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                worker.start(selector)
            while selector.get_map():
                for key, _ in selector.select(1.0):
                    key.data.listen(selector)
                for worker in workers:
                    worker.look_at_the_time()
        return [trial for worker in workers for trial in worker.finish()]


class _Worker:
    """A process after another, each of which takes the next number when the one before it has died; and its witness."""

    def __init__(self, root: Path, index: int, numbers: Sequence[int], make: Maker) -> None:
        self._numbers, self._make = numbers, make
        self._trials: list[Trial] = []
        self._pipe, self._child, self._rest, self._begun, self._news = -1, 0, b"", "", 0.0
        self._is_hung = False
        self._scratch = root / f"worker {index}" / "scratch"
        self._witness = _make_witness(self._scratch / "witness", root / "saved")
        self._before = _beside(self._scratch, content=True)

    def start(self, selector: selectors.BaseSelector) -> None:
        """Start the next process, if any number is left."""
        if len(self._trials) >= len(self._numbers):
            return
        self._pipe, writing = os.pipe()
        self._rest, self._begun, self._news, self._is_hung = b"", "before it began", time.monotonic(), False
        self._child = os.fork()
        if self._child == 0:
            try:
                _try_all(self._numbers[len(self._trials) :], self._make, self._scratch, self._witness, writing)
            except BaseException as error:
                os.write(writing, json.dumps(f"the trial itself: {error!r}").encode() + b"\n")
                os._exit(1)
            os._exit(0)
        os.close(writing)
        selector.register(self._pipe, selectors.EVENT_READ, self)

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Read what the process says; if that has ended, start the next."""
        piece = os.read(self._pipe, 1 << 16)
        self._news = time.monotonic()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            heard = json.loads(line)
            if isinstance(heard, str):
                self._begun = heard
            else:
                self._trials.append(Trial(*heard))
                self._begun = ""
        if piece:
            return
        selector.unregister(self._pipe)
        os.close(self._pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        for left in (*self._scratch.glob("[fm]*-[0-9]*"), self._scratch / "saved again"):
            shutil.rmtree(left, ignore_errors=True)
        if self._begun:
            outcome = "hang" if self._is_hung or status == -signal.SIGPROF else f"crash {status}"
            self._trials.append(Trial(self._numbers[len(self._trials)], outcome, self._begun))
        self.start(selector)

    def look_at_the_time(self) -> None:
        """Kill a process of which nothing is heard."""
        if not self._is_hung and time.monotonic() - self._news > SILENCE and len(self._trials) < len(self._numbers):
            self._is_hung = True
            os.kill(self._child, signal.SIGKILL)

    def finish(self) -> Iterator[Trial]:
        """All trials, and one more if what is beside the folders has changed."""
        yield from self._trials
        if _beside(self._scratch, content=True) != self._before:
            yield Trial(-1, "touched the witness", "some of them")
        shutil.rmtree(self._scratch.parent)


def _make_witness(witness: Path, saved: Path) -> Path:
    """What lies beside the folders and must stay as it is: notes, and folders with the same spaces as some of them."""
    witness.mkdir(parents=True)
    (witness / "notes.txt").write_text("dear to me")
    shutil.copytree(saved, witness / "copies" / "saved")
    for kind, name in (("snapshot", "n-step"), ("mapped", "replay, closed"), ("", "episodes")):
        shutil.copytree(saved / kind / name, witness / (kind or name))
    return witness


# ---------------------------------------------------------------------------------------------------- in the child


def _try_all(numbers: Sequence[int], make: Maker, scratch: Path, witness: Path, writing: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.fsync = lambda descriptor: None  # type: ignore[assignment] # nothing here outlives the machine
    os.chdir(witness)  # where relative names would lead
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES, held + SPARE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = _beside(scratch)
    for number in numbers:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        hostile = make(number, scratch, witness)
        how = f"{hostile.saved.kind} {hostile.saved.name} {hostile.saved.state}: {hostile.how}"
        os.write(writing, json.dumps(how).encode() + b"\n")
        outcome, error = _try(hostile, number)
        shutil.rmtree(hostile.path)
        after = _beside(scratch)
        if after != before:
            outcome, error, before = "touched the witness", str(after ^ before), after
        os.write(writing, json.dumps([number, outcome, how, error[:300]]).encode() + b"\n")


def _try(hostile: Hostile, number: int) -> tuple[str, str]:
    """Verify, inspect and load a folder, and use what was loaded; what came of it, and why."""
    path, room = hostile.path, room_of(hostile.path)
    wrong: list[tuple[str, str]] = []
    with watched() as seen:
        verdict, finding = verdict_on(path)
    wrong += _excess("verify", seen, room, may_write=False)
    with watched() as seen:
        looked = look_at(path, terminal=number % 2 == 0)
    wrong += _excess("inspect", seen, room, may_write=False)
    if looked:
        wrong.append(("inspect", looked))
    with watched() as seen:
        storage, outcome, error = _load(hostile)
    wrong += _excess("load", seen, room, may_write=hostile.saved.writes)
    if storage is not None:
        outcome, error = _use(storage, hostile)
    if verdict == "damaged" and outcome == "same" and not hostile.may_differ:
        wrong.append(("verify: damaged, load: same", finding))
    elif verdict != "damaged" and (verdict != "whole" or (outcome == "refused" and not _is_elsewhere(error))):
        wrong.append((f"verify: {verdict}, load: {outcome}", f"{finding} / {error}"))
    if outcome not in GOOD:
        wrong.append((outcome, error))
    return wrong[0] if wrong else (outcome, error)


def verdict_on(path: Path) -> tuple[str, str]:
    """What ``rlstore verify`` says of a folder, and the lines that it prints; or what it did wrong."""
    before = _state(path)
    try:
        report = verify(path)
    except Exception as error:
        return "raised", repr(error)
    if _state(path) != before:
        return "changed the folder", ""
    if report is None:
        return "damaged", ""  # the status is not 0
    return "whole" if report.is_whole else "damaged", "; ".join(report.lines())


def look_at(path: Path, *, terminal: bool) -> str:
    """What ``rlstore inspect`` does wrong with a folder: it raises something else, or changes it."""
    before = _state(path)
    try:
        folders_in(path)
        with opened(path) as subject:
            if terminal:
                rendered(summarize(subject), 100)
            else:
                page(summarize(subject))
    except rlstore.errors.StorageError:
        pass
    except Exception as error:
        return repr(error)
    return "" if _state(path) == before else "it changed the folder"


def _is_elsewhere(error: str) -> bool:
    """Whether a folder is refused for what is not in it: other arguments than its storage has, or too little memory.

    Or for a lock that nobody needs who only reads.
    """
    elsewhere = (
        "of another form than",
        "no class of that name is imported",
        "is not the manifest of",
        "also uses the folder",
        "which is not available here",
        "lock is not a plain file",
        "DoesNotFitError",
    )
    return any(part in error for part in elsewhere)


def _load(hostile: Hostile) -> tuple[Any, str, str]:
    """The storage of a folder; None if it was refused, or what came of it, and why."""
    try:
        return hostile.saved.load(hostile.path), "", ""
    except rlstore.errors.StorageError as error:
        return None, "refused", repr(error)
    except BaseException as error:
        return None, "raw error of load", repr(error)


def _use(storage: Any, hostile: Hostile) -> tuple[str, str]:
    """Compare, use and save a storage; what came of it, and why."""
    saved, path, may_differ = hostile.saved, hostile.path, hostile.may_differ
    step = "read"
    try:
        if may_differ and getattr(storage, "rate_limit", None) is not None:
            storage.set_rate_limit(None)  # a limit that was made up lets nothing be sampled for as long as it says
        same = content_of(storage) == saved.content
        step = "use"
        with contextlib.suppress(rlstore.errors.StorageError):
            saved.use(storage)
        step = "save"
        with contextlib.suppress(rlstore.errors.StorageError):
            storage.save(path if saved.kind == "snapshot" else path.with_name("saved again"))
        with contextlib.suppress(rlstore.errors.StorageError):
            storage.reset()
    except rlstore.errors.StorageError as error:
        return ("refused later" if may_differ else f"refused by {step}"), repr(error)
    except BaseException as error:
        return f"raw error of {step}", repr(error)
    finally:
        with contextlib.suppress(Exception):
            storage.close()
        shutil.rmtree(path.with_name("saved again"), ignore_errors=True)
    if same:
        return "same", ""
    return ("other values", "") if may_differ else ("changed", "")


def _excess(step: str, seen: Watched, room: int, *, may_write: bool) -> list[tuple[str, str]]:
    """What a step should not have written."""
    memory = f"{seen.nbytes >> 20} MiB of {room >> 20}"
    files = "" if may_write else "; ".join(seen.changes)
    return [(f"memory of {step}", memory)] * (seen.nbytes > room) + [(f"{step} writes", files)] * bool(files)


def _state(folder: Path, *, content: bool = False) -> set[tuple[Any, ...]]:
    """Every name in a folder and when it was last changed; with ``content`` also what is in it, and the copies."""
    found = set()
    for parent, inner, files in os.walk(folder):
        if not content and "copies" in inner:
            inner.remove("copies")
        for path in (parent, *(f"{parent}/{name}" for name in files)):
            stat = os.lstat(path)
            held = Path(path).read_bytes() if content and path != parent else b""
            found.add((path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, held))
    return found


def _beside(scratch: Path, *, content: bool = False) -> set[tuple[Any, ...]]:
    """What is beside the folders that are tried: the witness, and the names of all else."""
    names = [f"{folder}/{name}" for folder in (scratch, scratch.parent) for name in os.listdir(folder)]
    return {(name,) for name in names} | _state(scratch / "witness", content=content)


def summary(trials: list[Trial]) -> str:
    """How many came to what, and the bad ones."""
    counts = Counter(trial.outcome for trial in trials)
    bad = [trial for trial in trials if trial.outcome not in GOOD]
    return "\n".join([str(dict(counts)), *(str(tuple(trial)) for trial in bad)])
