"""Which processes have the memory of shared storages, by the numbers of its files."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/memfd:rlstore", re.MULTILINE)


def inodes_of(process: int | str) -> set[int]:
    """The segments that a process has mapped or open; none if it is gone or not ours to look at."""
    folder = Path("/proc", str(process))
    try:
        found = {int(inode) for inode in _MAPPED.findall((folder / "maps").read_text())}
        descriptors = os.listdir(folder / "fd")
    except OSError:
        return set()
    for descriptor in descriptors:
        try:
            path = folder / "fd" / descriptor
            if os.readlink(path).startswith("/memfd:rlstore"):
                found.add(os.stat(path).st_ino)
        except OSError:
            continue
    return found


def processes_with(inodes: set[int]) -> set[int]:
    """The live processes that have any of these segments."""
    numbers = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return {number for number in numbers if inodes_of(number) & inodes}
