"""How much memory is free, as far as the system reports it, and the refusal of what needs more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlstore.engine.disk.mapped import size_text
from rlstore.errors import DoesNotFitError

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
MUCH = 1 << 26  # bytes from which on it is worth asking whether they fit: the answer takes a millisecond


def free_ram(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, str] | None:
    """The bytes of RAM that this process may still use, and what limits them; None if the system does not report it.

    They are limited by the available memory of the system and by the control groups of the process.
    """
    limits = [*_system_limit(proc), *_group_limits(proc, cgroups)]
    return min(limits, default=None)


def free_device(device: torch.device) -> int | None:
    """The bytes free on a CUDA device, including unused memory that torch has reserved; None for other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def require_memory(owner: str, nbytes: int, what: str, device: torch.device, advice: str) -> None:
    """Refuse what cannot fit into a device's memory, before any of it is allocated.

    Args:
        owner: What needs it, for the error: the storage's class name.
        nbytes: The bytes that are to be allocated.
        what: What they are for: "24 steps of 4096 environments".
        device: Where they are to be allocated.
        advice: What to do about it, a sentence.

    Raises:
        DoesNotFitError: (a MemoryError) with the bytes needed, the bytes free, and what to do.
    """
    if device.type == "cpu":
        ram = free_ram()
        free, where = (None, "") if ram is None else (ram[0], f"free in RAM ({ram[1]})")
    else:
        free, where = free_device(device), f"free on {device}"
    if free is not None and nbytes > free:
        raise DoesNotFitError(
            f"{owner} needs {size_text(nbytes)} for {what}, and {size_text(free)} are {where}. Nothing was allocated. "
            f"{advice}"
        )


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise what numpy, torch and Python raise where memory has run out as a DoesNotFitError.

    Args:
        what: What it is needed for: "to load the snapshot".
    """
    try:
        yield
    except DoesNotFitError:
        raise
    except (MemoryError, RuntimeError) as error:
        is_other = not isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))
        if is_other and "can't allocate memory" not in str(error):  # as torch says on a CPU
            raise
        raise DoesNotFitError(f"there is not enough memory {what}") from error


def _system_limit(proc: Path) -> list[tuple[int, str]]:
    for name, value in _words(proc / "meminfo"):
        if name == "MemAvailable:":
            return [(int(value) * 1024, "the system's available memory")]
    return []


def _group_limits(proc: Path, cgroups: Path) -> list[tuple[int, str]]:
    """The free bytes of each control group with a limit, from the process's own to the root; versions 1 and 2."""
    limits: list[tuple[int, str]] = []
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            limits += _limits_upward(cgroups / "memory", own, "limit_in_bytes", "usage_in_bytes", "total_")
        elif number == "0":
            for root in (cgroups, cgroups / "unified"):
                limits += _limits_upward(root, own, "max", "current", "")
    return limits


def _limits_upward(root: Path, own: str, limit: str, usage: str, prefix: str) -> list[tuple[int, str]]:
    # Inside a container the path may be one of the host, of which only the root is visible.
    inside = Path(own.lstrip("/"))
    limits = []
    for folder in (root / part for part in (inside, *inside.parents)):
        most, used = _number(folder / f"memory.{limit}"), _number(folder / f"memory.{usage}")
        if most is not None and used is not None:
            # The page cache counts as used, and is evicted when memory is needed.
            stat = dict(_words(folder / "memory.stat"))
            cached = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
            limits.append((max(most - max(used - cached, 0), 0), f"the limit of the control group, {most:,} bytes"))
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[tuple[str, str]]:
    """The first two words of each line that has them."""
    words = (line.split() for line in _lines(path))
    return [(line[0], line[1]) for line in words if len(line) > 1]


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
