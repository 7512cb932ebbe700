"""The command line, also ``python -m rlstore``.

``rlstore verify PATH``, ``rlstore inspect PATH``, ``rlstore doctor``, ``rlstore demo ALGO``.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# Not `from rlstore import`, which would import torch: the report is wanted most when it cannot be imported.
import rlstore.demo as demo
import rlstore.doctor as doctor
from rlstore.plain import plain, plain_lines

_FAILED = 3  # Python's own status for an exception, 1, says that something is damaged
_UNREAD = 141  # that of programs that SIGPIPE ends

_VERIFY = """Checks every checksum and every table of what rlstore has written: a snapshot, a journal, the folder
of memory="mapped" or of save_snapshot, or a folder of such folders. Nothing is changed, and a storage may use the
folder meanwhile. Exit status: 0 if everything is whole, 1 if something is damaged, 2 if it is no such folder,
3 if the check itself failed."""

_INSPECT = """Shows what is in a folder of rlstore: how full it is, its fields with their distributions, NaN and
outliers, episodes, priorities. The folder is a snapshot, a journal, the folder of memory="mapped" or of save_snapshot;
of a folder of such folders they are listed. Nothing is changed, and a storage may use the folder meanwhile. Exit
status: 0 if it was shown, 1 if it is damaged, 2 if there is nothing that could be shown, or FILE cannot be written, 3
if something else failed."""

_DOCTOR = """Shows what is installed, what the machine offers, what is slow or missing, and what to do about it. Exit
status: 0 if rlstore works here, 1 if something that it needs is missing or broken, 3 if the report itself failed."""

_DEMO = """Trains an agent with one of the examples, with live progress and a table at the end. Without ALGO, lists
them. What follows ALGO is passed on: "rlstore demo ppo --help" shows the options, such as --out FOLDER."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = _Parser("rlstore")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verifying = commands.add_parser("verify", help="check a folder on disk", description=_VERIFY)
    verifying.add_argument("path", type=Path, metavar="PATH", help="the folder")
    verifying.set_defaults(run=_verify)
    inspecting = commands.add_parser("inspect", help="show what is in a folder on disk", description=_INSPECT)
    inspecting.add_argument("path", type=Path, metavar="PATH", help="the folder")
    inspecting.add_argument("--html", type=Path, metavar="FILE", help="write a page for the browser instead")
    inspecting.set_defaults(run=_inspect)
    examining = commands.add_parser("doctor", help="check the installation and the machine", description=_DOCTOR)
    examining.set_defaults(run=_doctor)
    showing = commands.add_parser("demo", help="run an example", description=_DEMO)
    showing.add_argument("algorithm", nargs="?", metavar="ALGO", help="such as ppo")
    showing.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")
    showing.set_defaults(run=_demo)
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given, parser)
        sys.stdout.flush()
    except BrokenPipeError:  # what reads the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes when it exits
        return _UNREAD
    except Exception:
        print(plain_lines(traceback.format_exc()), file=sys.stderr, end="")
        return _FAILED
    return status


class _Parser(argparse.ArgumentParser):
    """One whose errors any terminal takes: paths may hold anything."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status, None if message is None else plain_lines(message))


def _verify(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch

    import rlstore._public  # noqa: F401 - the classes that snapshots name
    from rlstore.verify import verify

    path: Path = given.path
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for one another, with 2 cores six times as long
    try:
        report = verify(path.absolute())
    except OSError as error:
        parser.exit(2, f"rlstore: {plain(path)} cannot be read: {error.strerror or error}\n")
    finally:
        torch.set_num_threads(threads)
    if report is None:
        parser.exit(2, f"rlstore: {plain(path)} is not a folder that rlstore has written\n")
    print("\n".join(report.lines()))
    return 0 if report.is_whole else 1


def _inspect(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import rlstore._public  # noqa: F401 - the classes that snapshots name
    from rlstore.look.command import NothingShownError, inspect

    try:
        return inspect(given.path, given.html)
    except NothingShownError as error:
        parser.exit(2, f"rlstore: {error}\n")


def _doctor(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = doctor.examine()
    print("\n".join(map(plain, doctor.report(found))))
    return int(any(finding.is_broken for finding in found))


def _demo(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if given.algorithm is None:
        print("\n".join(f"{name:<15}{title}" for name, title in demo.titles().items()))
        return 0
    known = list(demo.examples())
    if given.algorithm not in known:
        parser.error(f"there is no example {given.algorithm!r}; choose from {', '.join(known)}")
    if missing := demo.missing():
        parser.exit(1, f"rlstore: the examples need {' and '.join(missing)}: pip install 'rlstore[examples]'\n")
    return demo.run(given.algorithm, given.options)


if __name__ == "__main__":
    sys.exit(main())
