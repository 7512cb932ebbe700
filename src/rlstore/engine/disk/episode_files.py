"""Finished episodes, one file each, in a folder that one storage uses at a time.

manifest.json                     see manifest.py; "schema": the shape and dtype of each tensor
episode-000000000001.safetensors  the tensors of one episode, and in the metadata its "steps" and "lane", its "number"
                                  and "crc32", of these and of all tensors; older files do not have the last two
lock
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlstore.engine.disk import manifest
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.files import raising_disk_full
from rlstore.engine.disk.folder import Folder
from rlstore.engine.disk.tensor_file import TensorFile, checksum_of, storable, write_tensors
from rlstore.engine.rows.schema import is_observation, read_form
from rlstore.errors import SnapshotError
from rlstore.kernels import crc32

_EPISODE = re.compile(r"episode-([0-9]{12}|[1-9][0-9]{12,})\.safetensors")
KIND, FIELDS = "episodes", {"schema": dict}
_REMEDY = "Remove the file to continue without that episode."


class Entry(NamedTuple):
    """An episode on disk: its number, its steps, and the environment it came from."""

    number: int
    steps: int
    lane: int


class EpisodeReader:
    """The episodes in a folder, in the order in which they ended.

    Args:
        directory: The folder.
        schema: By name the shape and the dtype of each field of a step, as JSON.

    Attributes:
        forms: By name the shape and the dtype of each tensor of an episode, of one step.

    Raises:
        SnapshotError: If the schema is none.
    """

    def __init__(self, directory: Directory, schema: Mapping[str, Any]) -> None:
        self._directory = directory
        try:
            self.forms = {name: read_form(*form) for name, form in schema.items()}
        except (TypeError, ValueError) as error:
            path = directory.path / manifest.NAME
            raise SnapshotError(f'{path} is damaged: "schema" is not that of episodes ({error})') from error
        self.forms.update(dict.fromkeys(("terminated", "truncated"), ((), torch.bool)))

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of an episode."""
        return tuple(self.forms)

    def numbers(self) -> list[int]:
        """The numbers of the episodes on disk, the oldest first."""
        found = (_EPISODE.fullmatch(name) for name in self._directory.names())
        return sorted(int(match[1]) for match in found if match)

    def entries(self) -> list[Entry]:
        """The episodes on disk, the oldest first."""
        return [self.entry(number) for number in self.numbers()]

    def entry(self, number: int) -> Entry:
        """What the file of an episode says of it.

        Raises:
            SnapshotError: If it is damaged.
        """
        with self._open(number) as file:
            entry = _entry(number, file)
            self._check_forms(file, entry)  # before anybody counts on so many steps
            return entry

    def _open(self, number: int) -> TensorFile:
        path = self._directory.path / episode_name(number)
        try:
            return TensorFile(self._directory.open(path.name), path)
        except SnapshotError as error:
            raise SnapshotError(f"{str(error).rstrip('.')}. {_REMEDY}") from error

    def read(self, entry: Entry) -> dict[str, Tensor]:
        """The tensors of an episode: the fields of each step, of observations one more, and the two flags.

        Raises:
            SnapshotError: If it is not what was written, or of another form.
        """
        with self._open(entry.number) as file:
            tensors = self._read(file, entry, self.names)
            expected, rest = file.metadata.get("crc32"), dict(file.metadata)
            rest.pop("crc32", None)
            if expected is not None and expected != _checksum(rest, tensors):
                raise _damaged(file.path, "its checksum is not that of what it holds")
        return tensors

    def read_some(self, entry: Entry, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors of an episode, whose checksum is not looked at.

        Raises:
            SnapshotError: If the file is of another form.
        """
        with self._open(entry.number) as file:
            return self._read(file, entry, names)

    def _check_forms(self, file: TensorFile, entry: Entry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The form of each tensor of an episode; refuses a file with others."""
        forms = {
            name: ((entry.steps + is_observation(name), *shape), dtype) for name, (shape, dtype) in self.forms.items()
        }
        found = {name: (shape, file.dtypes[name]) for name, shape in file.shapes.items()}
        if found != forms:
            raise _damaged(file.path, f"it holds {str(found)[:400]}, and {str(forms)[:400]} is needed")
        return forms

    def _read(self, file: TensorFile, entry: Entry, names: Sequence[str]) -> dict[str, Tensor]:
        forms = self._check_forms(file, entry)
        tensors = {name: torch.empty(forms[name][0], dtype=forms[name][1]) for name in names}
        for name, tensor in tensors.items():
            file.read_into(name, tensor, None)
        return tensors

    def damaged(self, number: int, how: object) -> SnapshotError:
        """The error of an episode that cannot be used."""
        return _damaged(self._directory.path / episode_name(number), how)


class EpisodeFiles(EpisodeReader):
    """A folder of episodes, locked for one storage.

    Args:
        owner: The class name of the storage, for errors.
        path: The folder; created if it does not exist.
        schema: What an episode holds, as JSON: a folder with episodes of another schema is refused.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str], schema: Mapping[str, Any]) -> None:
        if_full = "Give a snapshot_dir on a larger disk."
        is_foreign = lambda name: bool(_EPISODE.fullmatch(name))  # noqa: E731 - the user's other files may stay
        self._folder = Folder(owner, path, KIND, FIELDS, is_foreign, if_full)
        self._folder.match(schema)
        super().__init__(self._folder.directory, schema)
        self._last = max(self.numbers(), default=0)

    def write(self, tensors: Mapping[str, Tensor], steps: int, lane: int) -> int:
        """Append an episode and return its number. It is on disk, complete, when this returns.

        Args:
            tensors: By name.
            steps: The number of its steps.
            lane: The environment it came from.
        """
        forms = {name: storable(name, tensor) for name, tensor in tensors.items()}
        metadata = {"steps": str(steps), "lane": str(lane), "number": str(self._last + 1)}
        metadata["crc32"] = _checksum(metadata, forms)
        directory, name = self._directory, episode_name(self._last + 1)
        with raising_disk_full(self._folder.path, "Free some space, or create the storage without save_snapshot."):
            try:
                write_tensors(directory.create(f"{name}.new"), forms, metadata)
                directory.replace(f"{name}.new", name)
            except BaseException:
                directory.remove(f"{name}.new")
                raise
        self._last += 1
        return self._last

    def remove(self, number: int) -> None:
        """Delete an episode."""
        self._directory.remove(episode_name(number))

    def close(self) -> None:
        """Release the folder."""
        self._folder.release()


def episode_name(number: int) -> str:
    """The file of an episode."""
    return f"episode-{number:012}.safetensors"


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The checksum of all that an episode holds."""
    forms = {name: [str(tensor.dtype), list(tensor.shape), checksum_of(tensor)] for name, tensor in tensors.items()}
    return str(crc32(json.dumps([metadata, forms], sort_keys=True).encode()))


def _entry(number: int, file: TensorFile) -> Entry:
    """What the metadata say of an episode; they are held against its tensors."""
    if set(file.metadata) not in ({"steps", "lane"}, {"steps", "lane", "number", "crc32"}):
        raise _damaged(file.path, f"its metadata are {sorted(file.metadata)}")
    try:
        steps, lane = (int(file.metadata[name]) for name in ("steps", "lane"))
    except ValueError as error:
        raise _damaged(file.path, repr(error)) from error
    lengths = {shape[0] if shape else 0 for shape in file.shapes.values()}
    if steps < 1 or not 0 <= lane < 1 << 48 or not lengths <= {steps, steps + 1}:
        raise _damaged(file.path, f"it tells of {steps} steps of lane {lane}, and its tensors have {sorted(lengths)}")
    if file.metadata.get("number", str(number)) != str(number):
        raise _damaged(file.path, f"it is episode {file.metadata['number']}")
    return Entry(number, steps, lane)


def _damaged(path: Path, how: object) -> SnapshotError:
    return SnapshotError(f"{path} is damaged: {how}. {_REMEDY}")
