"""What a step of this process writes: memory, and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LEAST_BYTES, TIMES = (
    64 << 20,
    16,
)  # of memory that a folder may make a process write: so many, and so many times its own
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "truncate", "link", "symlink", "chmod")}
_all_changes: list[str] | None = None  # None until somebody asks for them


class Watched:
    """What was written.

    Attributes:
        changes: What was opened for writing, made, renamed or removed.
        nbytes: The memory that was taken at most, beyond what the process had; 0 under a sanitizer, which holds on to
            what was freed.
    """

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.nbytes = 0


def room_of(folder: Path) -> int:
    """The memory that may be written because a folder says so."""
    stats = [file.lstat() for file in folder.rglob("*")]
    return LEAST_BYTES + TIMES * sum(min(stat.st_size, stat.st_blocks * 512) for stat in stats)


@contextmanager
def watched() -> Iterator[Watched]:
    """What is written meanwhile."""
    global _all_changes
    if _all_changes is None:
        sys.addaudithook(_note)
    _all_changes, seen = [], Watched()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    before = _resident("VmRSS")
    _all_changes.clear()
    try:
        yield seen
    finally:
        seen.changes = list(_all_changes)
        seen.nbytes = 0 if "SANITIZED_NATIVE" in os.environ else _resident("VmHWM") - before


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _all_changes is None or (event != "open" and event not in _CHANGES) or isinstance(arguments[0], int):
        return  # what has a number was opened before
    if event != "open" or arguments[2] & _WRITING:
        _all_changes.append(f"{event} {arguments[0]}")


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10
