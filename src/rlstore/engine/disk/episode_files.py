"""Finished episodes, one file each, in a folder that one storage uses at a time.

manifest.json                     see manifest.py; "schema": the shape and dtype of each tensor
episode-000000000001.safetensors  the tensors of one episode, and in the metadata its "steps" and its "lane"
lock
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rlstore.engine.disk.files import raising_disk_full, write_whole
from rlstore.engine.disk.folder import Folder
from rlstore.errors import SnapshotError

_EPISODE = re.compile(r"episode-(\d+)\.safetensors")


class Entry(NamedTuple):
    """An episode on disk: its number, its steps, and the environment it came from."""

    number: int
    steps: int
    lane: int


class EpisodeFiles:
    """The episodes in a folder, in the order in which they ended.

    Args:
        owner: The class name of the storage, for errors.
        path: The folder; created if it does not exist.
        schema: What an episode holds, as JSON: a folder with episodes of another schema is refused.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str], schema: Mapping[str, Any]) -> None:
        if_full = "Give a snapshot_dir on a larger disk."
        is_foreign = lambda name: bool(_EPISODE.fullmatch(name))  # noqa: E731 - the user's other files may stay
        self._folder = Folder(owner, path, "episodes", {"schema": dict}, is_foreign, if_full)
        self._folder.match(schema)
        self._last = max((number for number, _ in self._found()), default=0)

    def _found(self) -> list[tuple[int, Path]]:
        names = ((_EPISODE.fullmatch(entry.name), entry) for entry in self._folder.path.iterdir())
        return sorted((int(match[1]), entry) for match, entry in names if match)

    def write(self, tensors: Mapping[str, Tensor], steps: int, lane: int) -> int:
        """Append an episode and return its number. It is on disk, complete, when this returns.

        Args:
            tensors: By name, contiguous and on the CPU.
            steps: The number of its steps.
            lane: The environment it came from.
        """
        content = save(dict(tensors), metadata={"steps": str(steps), "lane": str(lane)})
        with raising_disk_full(self._folder.path, "Free some space, or create the storage without save_snapshot."):
            write_whole(self._path(self._last + 1), content)
        self._last += 1
        return self._last

    def _path(self, number: int) -> Path:
        return self._folder.path / f"episode-{number:012}.safetensors"

    def entries(self) -> list[Entry]:
        """The episodes on disk, the oldest first."""
        return [_entry(number, path) for number, path in self._found()]

    def read(self, number: int) -> dict[str, Tensor]:
        """The tensors of an episode."""
        with safe_open(self._path(number), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def remove(self, number: int) -> None:
        """Delete an episode."""
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the folder."""
        self._folder.release()


def _entry(number: int, path: Path) -> Entry:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return Entry(number, int(metadata["steps"]), int(metadata["lane"]))
    except (SafetensorError, KeyError, ValueError) as error:
        raise SnapshotError(
            f"{path} is damaged: {error!r}. Remove the file to continue without that episode."
        ) from error
