"""Snapshots of a content that tests make up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstore.engine.disk.snapshot import Content, SavedRows, SnapshotWriter


class _GivenRecord(dict[str, Tensor]):
    """A record that is written as it is given. The writer asks it for where rows end, and a forged record may lie."""

    def __init__(self, tensors: Mapping[str, Tensor], lanes: int) -> None:
        super().__init__(tensors)
        self._stop = torch.zeros(lanes, dtype=torch.int64)

    def __getitem__(self, name: str) -> Tensor:
        return self._stop if name == "stop" else super().__getitem__(name)


class GivenRows:
    """Records as they are given."""

    def __init__(self, records: Sequence[Mapping[str, Tensor]], lanes: int) -> None:
        self._records = [_GivenRecord(record, lanes) for record in records]
        self.saved, self.nbytes = None, 0
        self.tensors: dict[str, Tensor] = {}
        self.first = self.oldest = torch.zeros(lanes, dtype=torch.int64)

    def records(self) -> Iterator[Mapping[str, Tensor]]:
        """The records."""
        yield from self._records

    def close(self, saved: SavedRows | None) -> None:
        """Does nothing."""


def write_snapshot(
    path: str | os.PathLike[str],
    class_name: str,
    device: str,
    settings: Mapping[str, Any],
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    rows: GivenRows | None = None,
) -> None:
    """Write a snapshot, as ``save()`` does."""
    content = Content(class_name, device, settings, numbers, tensors, rows=rows)
    with SnapshotWriter("save()", path) as writer:
        writer.write(content)
