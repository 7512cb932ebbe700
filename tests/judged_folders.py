"""What load, verify and inspect make of a folder: in a child process whose time is bounded, and which is watched."""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from watched import room_of, watched

from rlstore import Storage
from rlstore.errors import StorageError
from rlstore.look.opened import opened
from rlstore.look.page import page
from rlstore.look.summary import summarize
from rlstore.verify import verify

SECONDS = 10


class Verdicts:
    """What became of one folder.

    Attributes:
        load: "loaded", or the class and the text of the error.
        verify: "whole" or "damaged", with what was found.
        inspect: "shown", or the class and the text of the error.
        changes: What was opened for writing, made, renamed or removed, by its name.
        nbytes: The memory that was taken at most, beyond what the process had.
    """

    load = verify = inspect = ""
    changes: list[str]
    nbytes: int

    def __init__(self, told: dict[str, Any]) -> None:
        self.__dict__.update(told)

    @property
    def are_refusals(self) -> bool:
        """Whether all three refuse the folder."""
        refusals = self.load.startswith("SnapshotError"), self.inspect.startswith("SnapshotError")
        return all(refusals) and self.verify.startswith("damaged")


def judged(folder: Path, load: Callable[[Path], object] = Storage.load) -> Verdicts:
    """Load, verify and inspect a folder in a child process.

    Raises:
        AssertionError: If it ended in a crash or not at all, if something was opened for writing, or if more memory was
            taken than 64 MiB and 16 times the folder.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_judge(folder, load)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert told, f"{folder}: ended with {status}"
    verdicts = Verdicts(json.loads(told))
    assert not verdicts.changes, verdicts.changes
    outcomes = verdicts.load, verdicts.verify, verdicts.inspect
    assert not any(outcome.startswith("raw ") for outcome in outcomes), outcomes
    assert verdicts.nbytes <= room_of(folder), f"{verdicts.nbytes:,} bytes of {room_of(folder):,}"
    return verdicts


def _judge(folder: Path, load: Callable[[Path], object]) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    with watched() as seen:
        told["load"] = _outcome(lambda: load(folder) and "loaded")
        told["verify"] = _outcome(lambda: _verified(folder))
        told["inspect"] = _outcome(lambda: _inspected(folder))
    return {**told, "changes": seen.changes, "nbytes": seen.nbytes}


def _outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except StorageError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"raw {error!r}"


def _verified(folder: Path) -> str:
    report = verify(folder)
    if report is None:
        return "damaged: not a folder of rlstore"
    return f"{'whole' if report.is_whole else 'damaged'}: {'; '.join(report.lines())}"


def _inspected(folder: Path) -> str:
    with opened(folder) as subject:
        page(summarize(subject))
    return "shown"
