"""Finished episodes, one file each, in a folder that one live storage has for itself.

manifest.json                "format": "rlstore episodes", "version": 1, "schema": what the tensors are
episode-000000000001.safetensors ...
the tensors of one episode, and in the metadata the number of steps and the environment
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rlstore.engine.disk.files import telling_full_disk, write_whole
from rlstore.engine.disk.folder_lock import FolderLock
from rlstore.errors import InvalidInputError, SnapshotError

FORMAT, VERSION = "rlstore episodes", 1
MANIFEST = "manifest.json"
_EPISODE = re.compile(r"episode-(\d+)\.safetensors")


class Entry(NamedTuple):
    """An episode on the disk: its number, its steps, and the environment that it came from."""

    number: int
    steps: int
    lane: int


class EpisodeFiles:
    """The episodes in a folder, in the order in which they ended.

    Args:
        owner: Whose they are, for errors.
        path: The folder; it is made if it is not there.
        schema: What an episode holds, as JSON: a folder with episodes of another schema is refused.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str], schema: Mapping[str, Any]) -> None:
        self._owner, self._folder = owner, Path(path).absolute()
        if self._folder.exists() and not self._folder.is_dir():
            raise InvalidInputError(f"snapshot_dir is {self._folder}, which is a file; {owner} needs a folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(owner, self._folder)
        try:
            self._check(json.loads(json.dumps(schema)))
        except BaseException:
            self._lock.release()
            raise
        self._last = max((number for number, _ in self._found()), default=0)

    def _check(self, schema: Any) -> None:
        path = self._folder / MANIFEST
        if not path.exists():
            if self._found():
                raise InvalidInputError(f"the folder {self._folder} holds episodes without a {MANIFEST}")
            manifest = {"format": FORMAT, "version": VERSION, "schema": schema}
            with telling_full_disk(path, "Give a snapshot_dir on a larger disk."):
                write_whole(path, json.dumps(manifest, indent=1).encode())
            return
        try:
            manifest = json.loads(path.read_bytes())
            known = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise InvalidInputError(f"{path} is not that of episodes which this version of rlstore can read")
        if manifest["schema"] != schema:
            raise InvalidInputError(
                f"the folder {self._folder} holds episodes of another kind: {json.dumps(manifest['schema'])} there, "
                f"{json.dumps(schema)} here. Give {self._owner} another snapshot_dir, or the same spaces as before."
            )

    def _found(self) -> list[tuple[int, Path]]:
        names = ((_EPISODE.fullmatch(entry.name), entry) for entry in self._folder.iterdir())
        return sorted((int(match[1]), entry) for match, entry in names if match)

    def write(self, tensors: Mapping[str, Tensor], steps: int, lane: int) -> int:
        """Keep an episode, and give its number. When this returns it is on the disk, whole.

        Args:
            tensors: By name, contiguous and on the CPU.
            steps: Its steps.
            lane: The environment that it came from.
        """
        content = save(dict(tensors), metadata={"steps": str(steps), "lane": str(lane)})
        with telling_full_disk(self._folder, "Free some space, or make the storage without save_snapshot."):
            write_whole(self._path(self._last + 1), content)
        self._last += 1
        return self._last

    def _path(self, number: int) -> Path:
        return self._folder / f"episode-{number:012}.safetensors"

    def entries(self) -> list[Entry]:
        """The episodes that there are, the oldest first."""
        found = []
        for number, path in self._found():
            metadata = self._metadata(path)
            found.append(Entry(number, int(metadata["steps"]), int(metadata["lane"])))
        return found

    def read(self, number: int) -> dict[str, Tensor]:
        """The tensors of an episode."""
        with safe_open(self._path(number), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def remove(self, number: int) -> None:
        """Forget an episode."""
        self._path(number).unlink(missing_ok=True)

    def _metadata(self, path: Path) -> dict[str, str]:
        try:
            with safe_open(path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata()
                return metadata
        except SafetensorError as error:
            raise SnapshotError(f"{path} is damaged: {error}. Remove it to go on without that episode.") from error

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.release()
