"""Which shards answer. One that does not is left out, so that the others serve on, and asked now and then."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from rlstore.errors import PeerLostError, WaitTimeoutError
from rlstore.ray.calls import Deadline, answer, is_done
from rlstore.ray.connection import Connection

# How long a shard that is gone is left in peace before it is asked again.
_REST_SECONDS = 0.5


class Health:
    """The shards that answer, for the threads of one learner.

    Args:
        connection: The served storage.
    """

    def __init__(self, connection: Connection) -> None:
        self._served = connection
        self._lock = threading.Lock()
        self._probes: dict[int, tuple[Any, float]] = {}  # of shards that are left out: a question, and when it was put
        self._messages: list[str] = []
        self.absences = 0

    def answering(self) -> list[int]:
        """The shards to ask: those that never failed, and those that came back."""
        with self._lock:
            for shard, (ref, since) in list(self._probes.items()):
                if is_done(ref):
                    self._look(shard, ref, since)
            return [shard for shard in range(len(self._served.shards)) if shard not in self._probes]

    def _look(self, shard: int, ref: Any, since: float) -> None:
        try:
            answer(ref, self._served.who(shard), 1.0)
        except (PeerLostError, WaitTimeoutError):
            if time.monotonic() - since >= _REST_SECONDS:
                self._probe(shard)
        else:
            del self._probes[shard]

    def _probe(self, shard: int) -> None:
        self._probes[shard] = self._served.shards[shard].totals.remote(), time.monotonic()

    def leave_out(self, shard: int, error: Exception) -> None:
        """A shard did not answer."""
        with self._lock:
            if shard not in self._probes:
                self.absences += 1
                self._messages.append(f"{error}. The other shards serve on; it is asked again now and then")
                self._probe(shard)

    def wait(self, deadline: Deadline) -> None:
        """Wait until one of the shards that are left out may be back, or a while has passed."""
        with self._lock:
            refs = [ref for ref, _ in self._probes.values() if not is_done(ref)]
        if refs:
            ray.wait(refs, num_returns=1, timeout=min(_REST_SECONDS, deadline.left))
        else:
            self._served.pause(deadline)

    def left_out(self) -> str:
        """The shards that are left out, for errors."""
        with self._lock:
            return ", ".join(self._served.who(shard) for shard in self._probes) or "none"

    def take_messages(self) -> list[str]:
        """What is to be said of shards that failed since the last call."""
        with self._lock:
            messages, self._messages = self._messages, []
        return messages
