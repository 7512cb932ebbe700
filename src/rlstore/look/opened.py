"""Folders that rlstore has written, opened to look at: nothing in them is changed, and a storage may use them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlstore.engine.batches.priorities import kept_priorities
from rlstore.engine.disk import episode_files, manifest, mapped
from rlstore.engine.disk.directory import Directory
from rlstore.engine.disk.episode_files import EpisodeReader
from rlstore.engine.disk.mapped import PrivateFiles
from rlstore.engine.disk.snapshot import SnapshotReader
from rlstore.engine.memory.backing import Backing
from rlstore.engine.rows.episode_ring import EpisodeRing
from rlstore.errors import DoesNotFitError, InvalidInputError, NotReadyError, SnapshotError
from rlstore.look.kept_steps import KeptSteps
from rlstore.look.subject import Subject, of_mapped, of_storage
from rlstore.replay.held_steps import RingSteps
from rlstore.storage import restored_alone
from rlstore.verify import WORDS, kind_of

_DEPTH = 2  # of the folders of a served storage: root/shard-0/snapshot
_LOOKS = 5  # at tables that change while they are read


def folders_in(path: Path, depth: int = _DEPTH) -> list[tuple[Path, str]]:
    """The folders of rlstore in a folder, or itself, and what each holds."""
    with Directory(path) as directory:
        kind = kind_of(directory)
        if kind is not None:
            return [(path, WORDS.get(kind, kind))]
    if not depth:
        return []
    inner = sorted(Path(entry.path) for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    return [found for folder in inner for found in folders_in(folder, depth - 1)]


@contextmanager
def opened(path: Path) -> Iterator[Subject]:
    """What a folder holds; it can be read as long as the context lasts.

    Raises:
        SnapshotError: (a RuntimeError) if it is damaged, or none of rlstore's.
        DoesNotFitError: (a MemoryError) if there is not enough memory for a snapshot.
        OSError: If it cannot be read.
    """
    with Directory(path) as directory:
        kind = kind_of(directory)
        if kind is None:
            raise SnapshotError(f"{path} is not a folder that rlstore has written")
        openers = {"snapshot": _snapshot, mapped.KIND: _mapped, episode_files.KIND: _episodes}
        with openers[kind](directory) as subject:
            subject.title = path.name or str(path)
            subject.origin = f"{WORDS.get(kind, kind)} in {path}"
            yield subject


@contextmanager
def _snapshot(directory: Directory) -> Iterator[Subject]:
    with SnapshotReader(directory.path) as reader:
        storage = restored_alone(reader)
        if storage is None:
            raise NotReadyError(
                f"{directory.path} holds a {reader.class_name}, and no class of that name is imported. Call its "
                "to_html() in a program that imports the class and loads the storage."
            )
    try:
        yield of_storage(storage)
    finally:
        storage._give_up()


@contextmanager
def _mapped(directory: Directory) -> Iterator[Subject]:
    schema = manifest.read_manifest(directory, mapped.KIND, mapped.FIELDS)["schema"]
    for look in range(_LOOKS):
        files = PrivateFiles("a mapped storage", directory.path)
        try:
            subject = _of_files(schema, files)
            break
        except SnapshotError:  # as it is, or while somebody writes to it
            files.close()
            if look == _LOOKS - 1:
                raise
        except DoesNotFitError:
            files.close()
            raise
        except Exception as error:  # nothing that a folder says is trusted
            files.close()
            raise _no_schema(directory, error) from error
    try:
        yield subject
    finally:
        files.close()


def _of_files(schema: Mapping[str, Any], files: PrivateFiles) -> Subject:
    ring = EpisodeRing.of_schema(schema, Backing.private("a mapped storage", files))
    tree, windows = kept_priorities(ring, schema.get("priorities"))
    subject = of_mapped(ring, RingSteps(ring), tree, windows)
    told = None if files.seal is None else files.seal.read()
    if told is None or not told["closed"]:
        subject.notes.append(
            "The folder was not closed: it is in use, or its process was killed. If a storage writes to it, its "
            "oldest transitions may have been overwritten by newer ones while they were read."
        )
    return subject


def _no_schema(directory: Directory, error: Exception) -> SnapshotError:
    path = directory.path / manifest.NAME
    return SnapshotError(f'{path} is damaged: "schema" is not that of a storage ({error!r})')


@contextmanager
def _episodes(directory: Directory) -> Iterator[Subject]:
    found = manifest.read_manifest(directory, episode_files.KIND, episode_files.FIELDS)
    reader = EpisodeReader(directory, found["schema"])
    if "rewards" not in reader.forms:
        raise _no_schema(directory, InvalidInputError("it has no rewards"))
    steps = KeptSteps(reader)
    held = len(steps.rows())
    yield Subject("", "episodes of save_snapshot", "", steps, held, steps.envs, held * steps.row_bytes, is_on_disk=True)
