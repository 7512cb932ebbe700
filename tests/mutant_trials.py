"""Trials of mutants, in processes whose memory and time are bounded: what came of each."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from folder_mutants import Mutant
from saved_folders import Saved, content_of, saved_folders

import rlstore
from rlstore.look.opened import opened
from rlstore.look.page import page
from rlstore.look.summary import summarize as summarize_subject
from rlstore.verify import verify

SPARE_BYTES = 1 << 30  # beyond what a process has when it begins
SECONDS = 20.0  # without any news: it hangs
LOOKED_AT = 3  # one of so many mutants is shown, too, which takes longer than to load it
GOOD = ("refused", "same", "other values")


class Trial(NamedTuple):
    """A mutant, and what came of it: one of GOOD, or what was wrong."""

    number: int
    outcome: str
    how: str
    error: str = ""


class Trials:
    """Tries mutants in a child process after another; each takes the next when the one before it died.

    Args:
        root: A folder for all of it.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._witness = root, root / "scratch" / "witness"
        self.saved = saved_folders(root / "saved")
        self._witness.mkdir(parents=True)
        (self._witness / "notes.txt").write_text("dear to me")
        shutil.copytree(root / "saved", self._witness / "copies" / "saved")
        for kind, name in (("snapshot", "n-step"), ("mapped", "replay, closed"), ("", "episodes")):
            shutil.copytree(root / "saved" / kind / name, self._witness / (kind or name))
        self._before = _state(self._witness, content=True)

    def run(self, first: int, last: int) -> list[Trial]:
        """Try the mutants of these numbers."""
        trials: list[Trial] = []
        while first + len(trials) < last:
            trials += self._run_child(first + len(trials), last)
        if _state(self._witness, content=True) != self._before:
            trials.append(Trial(-1, "touched the witness", "some of them"))
        return trials

    def _run_child(self, first: int, last: int) -> list[Trial]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            with contextlib.suppress(BaseException):
                self._work(first, last, writing)
            os._exit(0)
        os.close(writing)
        trials, begun, hung = [], "", False
        with open(reading, "rb") as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(reading, False)
            rest = b""
            while True:
                if not selector.select(SECONDS):
                    hung = True
                    os.kill(child, signal.SIGKILL)
                    break
                piece = os.read(reading, 1 << 16)
                if not piece:
                    break
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    told = json.loads(line)
                    if isinstance(told, str):
                        begun = told
                    else:
                        trials.append(Trial(*told))
                        begun = ""
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if begun or not trials:
            trials.append(Trial(first + len(trials), "hang" if hung else f"crash {status}", begun or "before it began"))
        return trials

    # ---------------------------------------------------------------------------------------------- in the child

    def _work(self, first: int, last: int, writing: int) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        os.fsync = lambda descriptor: None  # type: ignore[assignment] # nothing here outlives the machine
        os.chdir(self._witness)  # where relative names would lead
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES, held + SPARE_BYTES))
        scratch, before = self._root / "scratch", _state(self._witness)
        for number in range(first, last):
            mutant = Mutant(self.saved, number, scratch, self._witness)
            how = f"{mutant.saved.kind} {mutant.saved.name} {mutant.saved.state}: {mutant.how}"
            os.write(writing, json.dumps(how).encode() + b"\n")
            verdict, finding = verdict_on(mutant.path)
            looked = look_at(mutant.path) if number % LOOKED_AT == 0 else ""
            outcome, error = try_mutant(mutant.saved, mutant.path, mutant.may_differ)
            if verdict == "damaged" and outcome == "same" and not mutant.may_differ:
                outcome, error = "verify: damaged, load: same", finding
            if verdict != "damaged" and (verdict != "whole" or (outcome == "refused" and not _is_elsewhere(error))):
                outcome, error = f"verify: {verdict}, load: {outcome}", f"{finding} / {error}"
            if looked:
                outcome, error = "inspect", looked
            after = _state(self._witness)
            if after != before:
                outcome, error, before = "touched the witness", str(after ^ before), after
            shutil.rmtree(mutant.path)
            os.write(writing, json.dumps([number, outcome, how, error[:300]]).encode() + b"\n")


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


def look_at(path: Path) -> str:
    """What ``rlstore inspect`` does wrong with a folder: it raises something else, or changes it."""
    before = _state(path)
    try:
        with opened(path) as subject:
            page(summarize_subject(subject))
    except rlstore.errors.StorageError:
        pass
    except Exception as error:
        return repr(error)
    return "" if _state(path) == before else "it changed the folder"


def _is_elsewhere(error: str) -> bool:
    """Whether a folder is refused for what is not in it: other arguments than its storage has, or too little memory."""
    elsewhere = (
        "of another form than",
        "no class of that name is imported",
        "is not the manifest of",
        "also uses the folder",
        "DoesNotFitError",
    )
    return any(part in error for part in elsewhere)


def try_mutant(saved: Saved, path: Path, may_differ: bool) -> tuple[str, str]:
    """Load a folder, compare, use and save; what came of it."""
    storage: Any = None
    step = "load"
    try:
        storage = saved.load(path)
        if may_differ and getattr(storage, "rate_limit", None) is not None:
            storage.set_rate_limit(None)  # a limit that was made up lets nothing be sampled for as long as it says
        step = "read"
        same = content_of(storage) == saved.content
        step = "use"
        with contextlib.suppress(rlstore.errors.StorageError):
            saved.use(storage)
        step = "save"
        with contextlib.suppress(rlstore.errors.StorageError):
            storage.save(path if saved.kind == "snapshot" else path.with_name("saved again"))
        step = "close"
    except rlstore.errors.StorageError as error:
        if step == "load" or may_differ:
            return "refused", repr(error)
        return f"refused by {step}", repr(error)
    except BaseException as error:
        return f"raw error of {step}", repr(error)
    finally:
        with contextlib.suppress(Exception):
            storage.close()
        shutil.rmtree(path.with_name("saved again"), ignore_errors=True)
    if same:
        return "same", ""
    return ("other values", "") if may_differ else ("changed", "")


def _state(folder: Path, *, content: bool = False) -> set[tuple[Any, ...]]:
    """Every name in a folder, when it was last changed, and what is in it."""
    found = set()
    for parent, _, files in os.walk(folder):
        stat = os.stat(parent)
        found.add((parent, stat.st_mtime_ns, stat.st_ctime_ns))
        for name in files:
            path = Path(parent, name)
            stat = path.lstat()
            found.add(
                (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, path.read_bytes() if content else b"")
            )
    return found


def summary(trials: list[Trial]) -> str:
    """How many came to what, and the bad ones."""
    counts = Counter(trial.outcome for trial in trials)
    bad = [trial for trial in trials if trial.outcome not in GOOD]
    return "\n".join([str(dict(counts)), *(str(tuple(trial)) for trial in bad)])
