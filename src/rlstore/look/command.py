"""``rlstore inspect``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from rlstore.errors import DoesNotFitError, NotReadyError, SnapshotError
from rlstore.look.opened import folders_in, opened
from rlstore.look.page import write_page
from rlstore.look.subject import Subject
from rlstore.look.summary import summarize


class NothingShownError(Exception):
    """There is nothing that could be shown, for the reason that is given."""


def inspect(path: Path, page: Path | None) -> int:
    """Show what is in a folder, in the terminal or in a page; returns the exit status.

    Raises:
        NothingShownError: If nothing can be shown, though nothing is damaged.
    """
    if page is not None and not page.absolute().parent.is_dir():
        raise NothingShownError(f"{page} cannot be written: there is no folder {page.absolute().parent}")
    if page is not None and page.is_dir():
        raise NothingShownError(f"{page} cannot be written: it is a folder")
    path = path.absolute()
    try:
        found = folders_in(path)
    except OSError as error:
        hint = ". It shows folders; files of experience are read with rlstore.data" if path.is_file() else ""
        raise NothingShownError(f"{path} cannot be read: {error.strerror or error}{hint}") from error
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
        print(f"rlstore: {error}\n`rlstore verify {path}` tells what is damaged and what is left.", file=sys.stderr)
        return 1


def _list(path: Path, found: list[tuple[Path, str]], page: Path | None) -> int:
    names = [f"  {folder}: {kind}" for folder, kind in found]
    if page is not None:
        raise NothingShownError("\n".join([f"{path} holds {len(found)} folders; a page is of one of them:", *names]))
    print("\n".join([f"{path} holds {len(found)} folders. Inspect one of them:", *names]))
    return 0


def _show(subject: Subject, page: Path | None) -> int:
    if page is None:
        from rich.console import Console

        from rlstore.look.terminal import rendered

        console = Console()
        with console.capture() as shown:  # rich itself would exit with the status for damage where nobody reads
            console.print(rendered(summarize(subject), console.width))
        print(shown.get(), end="")
        return 0
    try:
        summary = write_page(subject, page)
    except OSError as error:
        raise NothingShownError(f"{page} cannot be written: {error.strerror or error}") from error
    size = page.stat().st_size / 1e6
    print(f"{page}: {summary.held:,} transitions, {summary.episodes.count:,} episodes, {size:.1f} MB")
    return 0
