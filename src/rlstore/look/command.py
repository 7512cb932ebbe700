"""``rlstore inspect``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from rlstore.engine.disk.files import replaceable
from rlstore.engine.memory.capacity import enough_memory
from rlstore.errors import DoesNotFitError, InvalidInputError, NotReadyError, SnapshotError
from rlstore.look.opened import folders_in, opened
from rlstore.look.page import write_page
from rlstore.look.subject import Subject
from rlstore.look.summary import summarize
from rlstore.plain import plain


class NothingShownError(Exception):
    """There is nothing that could be shown, for the reason that is given."""


def inspect(path: Path, page: Path | None) -> int:
    """Show what is in a folder, in the terminal or in a page; returns the exit status.

    Raises:
        NothingShownError: If nothing can be shown, though nothing is damaged.
    """
    try:
        if page is not None:
            replaceable(page)
    except (InvalidInputError, OSError) as error:
        raise _cannot_be_written(page, error) from error
    path = path.absolute()
    try:
        found = folders_in(path)
    except OSError as error:
        is_file = isinstance(error, NotADirectoryError)
        hint = ". It shows folders; files of experience are read with rlstore.data" if is_file else ""
        raise NothingShownError(f"{path} cannot be read: {_reason(error)}{hint}") from error
    if not found:
        raise NothingShownError(f"{path} is not a folder that rlstore has written, and has none in it")
    if found[0][0] != path:
        return _list(path, found, page)
    if page is None and find_spec("rich") is None:
        raise NothingShownError("in the terminal it needs rich: pip install 'rlstore[inspect]', or give --html FILE")
    try:
        with opened(path) as subject:
            return _show(subject, page)
    except (NotReadyError, DoesNotFitError) as error:
        raise NothingShownError(str(error)) from error
    except SnapshotError as error:
        print(f"rlstore: {plain(error)}", file=sys.stderr)
        print(f"`rlstore verify {plain(path)}` tells what is damaged and what is left.", file=sys.stderr)
        return 1


def _cannot_be_written(page: Path | None, error: Exception) -> NothingShownError:
    return NothingShownError(f"{page} cannot be written: {_reason(error)}")


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def _list(path: Path, found: list[tuple[Path, str]], page: Path | None) -> int:
    names = [f"  {plain(folder)}: {kind}" for folder, kind in found]
    if page is not None:
        lead = f"{plain(path)} holds {len(found)} folders; a page is of one of them:"
        raise NothingShownError("\n".join([lead, *names]))
    print("\n".join([f"{plain(path)} holds {len(found)} folders. Inspect one of them:", *names]))
    return 0


def _show(subject: Subject, page: Path | None) -> int:
    if page is None:
        from rich.console import Console

        from rlstore.look.terminal import rendered

        console = Console()
        # Rich itself would exit with the status for damage where nobody reads.
        with console.capture() as shown, enough_memory(f"to look at {subject.title}"):
            console.print(rendered(summarize(subject), console.width))
        print(shown.get(), end="")
        return 0
    try:
        summary = write_page(subject, page)
    except (InvalidInputError, OSError) as error:
        raise _cannot_be_written(page, error) from error
    size = page.stat().st_size / 1e6
    print(f"{plain(page)}: {summary.held:,} transitions, {summary.episodes.count:,} episodes, {size:.1f} MB")
    return 0
