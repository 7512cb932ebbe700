"""Threads that work in the background."""

from __future__ import annotations

import threading

from rlstore.errors import DoesNotFitError


def start_thread(owner: str, thread: threading.Thread) -> threading.Thread:
    """Start a thread.

    Args:
        owner: Who needs it, for the error.
        thread: The thread.

    Raises:
        DoesNotFitError: (a MemoryError) if the system starts no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise DoesNotFitError(
            f"{owner} needs a thread, and the system starts no more ({error}): memory, or a limit of processes and "
            "threads (`ulimit -u`, the control group), is used up. Nothing was changed."
        ) from error
    return thread
