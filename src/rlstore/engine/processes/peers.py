"""Peers: the handles, in any process, that share one piece of memory, and which of their processes died."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstore.errors import StorageError
from rlstore.kernels import add_to_word, exchange_word, process_start

ROLES = ("maker", "actor", "learner", "writer")
MOST = 1024  # lines of the table
_WORDS = 8
_PID, _STARTED, _ROLE, _STATUS, _NAME = 0, 1, 2, 3, 4  # the name takes the rest
_NAME_BYTES = (_WORDS - _NAME) * 8
_UNUSED, _HERE, _LEFT, _LOST, _REUSED = range(5)


class Peers:
    """A table of peers in shared memory, zero at first.

    A peer is a handle in a process. Its number is that of its line, from 1 on (line 0 counts the lost peers whose lines
    were reused). A process is identified by its id and its start time together, so a new process with the id of a dead
    one is not mistaken for it.

    Each word is written by the peer that has the line, except the status, which any process that finds a peer dead
    exchanges atomically.

    Args:
        memory: int64, of the shape :meth:`shape`.
    """

    def __init__(self, memory: Tensor) -> None:
        self._words = memory.view(-1)
        self._table: Any = memory.numpy()

    @staticmethod
    def shape() -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of the table's memory."""
        return (MOST, _WORDS), torch.int64

    def join(self, role: str, name: str | None = None) -> int:
        """Add a peer of this process.

        Returns:
            Its number.
        """
        pid, text = os.getpid(), (name or "").encode()[:_NAME_BYTES]
        peer = self._new_line(pid)
        line = self._table[peer]
        line[_STARTED], line[_ROLE] = process_start(pid), ROLES.index(role)
        line[_NAME:] = np.frombuffer(text.ljust(_NAME_BYTES, b"\0"), dtype=np.int64)
        line[_STATUS] = _HERE
        return peer

    def _new_line(self, pid: int) -> int:
        for peer in range(1, MOST):
            if self._table[peer, _PID] == 0 and exchange_word(self._words, peer * _WORDS + _PID, 0, pid):
                return peer
        for status in (_LEFT, _LOST):
            for peer in range(2, MOST):  # line 1 is the maker's, which is checked even after it left
                if self._table[peer, _STATUS] == status and self._exchange_status(peer, status, _REUSED):
                    if status == _LOST:
                        add_to_word(self._words, int(self._table[peer, _ROLE]), 1)
                    self._table[peer, _PID] = pid
                    return peer
        raise StorageError(f"{MOST - 1} processes take part already; close handles that are not used")

    def _exchange_status(self, peer: int, expected: int, wanted: int) -> bool:
        return exchange_word(self._words, peer * _WORDS + _STATUS, expected, wanted)

    def leave(self, peer: int) -> None:
        """Remove a peer of this process; it must not hold anything any more."""
        self._exchange_status(peer, _HERE, _LEFT)

    def is_alive(self, peer: int) -> bool:
        """True if the process of a peer is alive, though the peer may have left."""
        line = self._table[peer]
        return bool(process_start(int(line[_PID])) == line[_STARTED])

    def is_here(self, peer: int) -> bool:
        """True if a peer has not left and its process is alive."""
        return bool(self._table[peer, _STATUS] == _HERE) and self.is_alive(peer)

    def sweep(self, reclaim: Callable[[int], None]) -> list[int]:
        """Find the peers whose process died, and reclaim what they held.

        Args:
            reclaim: Reclaims what a dead peer held. Several processes may call it for one peer, and again if one of
                them dies meanwhile.

        Returns:
            The dead peers that this call counted: each is counted once, by one process.
        """
        found = []
        for peer in np.flatnonzero(self._table[:, _STATUS] == _HERE).tolist():
            if peer and not self.is_here(peer):
                reclaim(peer)
                if self._exchange_status(peer, _HERE, _LOST):
                    found.append(peer)
        return found

    def here(self, role: str) -> list[int]:
        """The peers of a role that have not left and were not found dead."""
        return self._with_status(_HERE, role)

    def lost(self, role: str) -> list[int]:
        """The peers of a role that were found dead and whose line was not reused."""
        return self._with_status(_LOST, role)

    def _with_status(self, status: int, role: str) -> list[int]:
        table = self._table[1:]
        found = np.flatnonzero((table[:, _STATUS] == status) & (table[:, _ROLE] == ROLES.index(role)))
        return [int(peer) + 1 for peer in found]

    def lost_count(self, role: str) -> int:
        """How many peers of a role were ever found dead."""
        return int(self._table[0, ROLES.index(role)]) + len(self.lost(role))

    def describe(self, peer: int) -> str:
        """A peer, for messages: ``actor "left" (process 1234)``."""
        line = self._table[peer]
        name = line[_NAME:].tobytes().rstrip(b"\0").decode(errors="replace")
        return f"{ROLES[int(line[_ROLE])]} {json_name(name)}(process {int(line[_PID])})"


def json_name(name: str) -> str:
    """A name in quotes followed by a space, or an empty string."""
    return f'"{name}" ' if name else ""
