"""The snapshots of a shard: one folder, in which the newest whole snapshot is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlstore import HindsightReplayStorage
from rlstore.engine.disk.files import write_whole
from rlstore.errors import SnapshotError
from rlstore.storage import Storage

_FILE = "newest.json"


class ShardFolder:
    """Snapshots of one shard.

    A snapshot is a folder of its own, and a file names the newest with the numbers that go with it. A crash leaves the
    snapshot before or the new one, and its own numbers.

    Args:
        root: The folder of all shards.
        shard: Which.
    """

    def __init__(self, root: str, shard: int) -> None:
        self._folder = Path(root) / f"shard-{shard}"

    def save(self, storage: Storage, numbers: dict[str, int]) -> None:
        """Save the storage, with numbers of the shard's own."""
        self._folder.mkdir(parents=True, exist_ok=True)
        before = self._newest()
        place = f"snapshot-{(before or {'count': 0})['count'] + 1}"
        shutil.rmtree(self._folder / place, ignore_errors=True)  # left by a crash
        storage.save(self._folder / place)
        newest = {"folder": place, "count": (before or {"count": 0})["count"] + 1, "numbers": numbers}
        write_whole(self._folder / _FILE, json.dumps(newest).encode())
        for other in self._folder.glob("snapshot-*"):
            if other.name != place:
                shutil.rmtree(other, ignore_errors=True)

    def load(self, factory: Callable[..., Storage]) -> tuple[Storage, dict[str, int]] | None:
        """The newest snapshot and its numbers; None if there is none."""
        newest = self._newest()
        if newest is None:
            return None
        fresh = factory("cpu", None, None)  # its class is known now, and what a snapshot cannot hold
        storage = type(fresh).load(self._folder / newest["folder"], device="cpu")
        if isinstance(storage, HindsightReplayStorage) and isinstance(fresh, HindsightReplayStorage):
            storage.compute_reward = fresh.compute_reward
        return storage, newest["numbers"]

    def _newest(self) -> dict[str, Any] | None:
        file = self._folder / _FILE
        if not file.exists():
            return None
        try:
            newest = json.loads(file.read_bytes())
            return {key: newest[key] for key in ("folder", "count", "numbers")}
        except (ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"{file} does not name a snapshot: {error}") from error
