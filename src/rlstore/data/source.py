"""What a reader returns: episodes of a file, one after another, and what a storage for them needs to know."""

from __future__ import annotations

import importlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from rlstore.engine.disk.json_text import parse_json
from rlstore.engine.rows.schema import Path
from rlstore.errors import InvalidInputError, SnapshotError

Array = np.ndarray[Any, Any]
# The arrays of an episode, by the names of `add_episodes`.
GivenEpisode = dict[str, Any]
# The shape and the dtype of a step.
Form = tuple[tuple[int, ...], np.dtype[Any]]


class EpisodeSource(ABC):
    """Episodes that are read from a file while they are iterated, each time anew, one in memory at a time.

    Each is a dict of arrays, as ``add_episodes`` takes it: ``observations`` ``[T, ...]``, ``actions``, ``rewards``,
    ``terminations`` and ``truncations`` ``[T]``, ``final_observations`` (the one after the last step) and extra fields.

    Attributes:
        origin: What errors call it.
        num_steps: How many steps it has.
    """

    origin: str
    num_steps: int

    @property
    @abstractmethod
    def observation_space(self) -> Any:
        """The space of its observations: as the file has it, else one that holds all values of their dtype."""

    @property
    @abstractmethod
    def action_space(self) -> Any:
        """The space of its actions, likewise; for whole numbers the range of those in the file."""

    @property
    @abstractmethod
    def num_episodes(self) -> int:
        """How many episodes it has."""

    @abstractmethod
    def __iter__(self) -> Iterator[GivenEpisode]: ...

    def __repr__(self) -> str:
        return f"EpisodeSource({self.origin}: {self.num_steps:,} steps)"


def required(module: str, owner: str) -> Any:
    """A module of an optional dependency.

    Raises:
        ImportError: If it cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = module.partition(".")[0]
        raise ImportError(
            f"{owner} needs {needed}, which cannot be imported ({error}): pip install 'rlstore[data]'"
        ) from error


def plain_file(file: FilePath) -> FilePath:
    """A file that is about to be opened, which a FIFO or a device would make wait, or read without end.

    Raises:
        InvalidInputError: If it is there and no plain file, or a link to one.
        FileNotFoundError: If there is none; or another OSError.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise InvalidInputError(
            f"{file} is a folder, a FIFO, a socket or a device; give the name of a plain file. Nothing was read."
        )
    return file


def read_description(file: FilePath, most: int) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        InvalidInputError: If it has more than ``most`` bytes, or is none.
    """
    with open(plain_file(file), "rb") as opened:
        text = opened.read(most + 1)
    if len(text) > most:
        raise InvalidInputError(f"{file} is damaged: it has more than {most:,} bytes. Write or copy it again")
    try:
        return parse_json(text, str(file))
    except SnapshotError as error:
        raise InvalidInputError(f"{error}. Write or copy it again") from error


def nested(leaves: Mapping[Path, Any]) -> Any:
    """A nest with these leaves: one leaf, or dicts and tuples of them."""
    if () in leaves:
        return leaves[()]
    inner: dict[str | int, dict[Path, Any]] = {}
    for path, leaf in leaves.items():
        inner.setdefault(path[0], {})[path[1:]] = leaf
    parts = {key: nested(part) for key, part in inner.items()}
    if all(isinstance(key, int) for key in parts):
        return tuple(parts[index] for index in range(len(parts)))
    return parts
