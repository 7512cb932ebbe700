"""The command line: ``rlstore verify PATH``, or ``python -m rlstore verify PATH``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rlstore.verify import verify

_DESCRIPTION = """Checks every checksum and every table of what rlstore has written: a snapshot, a journal, the folder
of memory="mapped" or of save_snapshot, or a folder of such folders. Nothing is changed, and a storage may use the
folder meanwhile. Exit status: 0 if everything is whole, 1 if something is damaged, 2 if it is no such folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser("rlstore")
    commands = parser.add_subparsers(required=True)
    verifying = commands.add_parser("verify", help="check a folder on disk", description=_DESCRIPTION)
    verifying.add_argument("path", type=Path, metavar="PATH", help="the folder")
    path = parser.parse_args(arguments).path
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for one another, with 2 cores six times as long
    try:
        report = verify(path.absolute())
    except OSError as error:
        parser.exit(2, f"rlstore: {path} cannot be read: {error}\n")
    finally:
        torch.set_num_threads(threads)
    if report is None:
        parser.exit(2, f"rlstore: {path} is not a folder that rlstore has written\n")
    print("\n".join(report.lines()))
    return 0 if report.is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
