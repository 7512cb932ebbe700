"""A save that goes on in the background."""

from __future__ import annotations

import os
import threading
import warnings

from rlstore.engine.disk.snapshot import Content, SnapshotWriter
from rlstore.engine.threads import start_thread
from rlstore.errors import NotReadyError


class BackgroundSave:
    """A save in progress, as ``save(path, background=True)`` returns it.

    The storage may be used, changed and closed meanwhile: what is saved is the state at the time of the call. The
    interpreter does not exit before it is done.

    Args:
        writer: The folder, which is closed in the end.
        content: What is to be written.

    Attributes:
        path: The folder.
    """

    def __init__(self, writer: SnapshotWriter, content: Content) -> None:
        self.path, self._process = writer.path, os.getpid()
        self._error: BaseException | None = None
        self._done = threading.Event()
        start_thread("save()", threading.Thread(target=self._run, args=(writer, content), name="rlstore save"))

    def _run(self, writer: SnapshotWriter, content: Content) -> None:
        try:
            with writer:
                writer.write(content)
        except BaseException as error:
            self._error = error
            warnings.warn(f"the save to {self.path} failed: {error}", RuntimeWarning, stacklevel=2)
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """True if it is complete, or has failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it has failed; None if it has not."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the snapshot is complete.

        Args:
            timeout: Seconds after which to give up; None for never.

        Raises:
            NotReadyError: (a RuntimeError) if it takes longer than that, or is done by the process that was forked.
            OSError: Or whatever else the save has failed with. The snapshot that was there before still is.
        """
        if os.getpid() != self._process:
            raise NotReadyError(f"process {self._process} saves to {self.path}, and this is a fork of it")
        if not self._done.wait(timeout):
            raise NotReadyError(f"the save to {self.path} is not complete after {timeout} seconds")
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "in progress" if not self.done else "done" if self._error is None else f"failed: {self._error!r}"
        return f"BackgroundSave({str(self.path)!r}: {state})"
