"""The power fails at any moment of a save: the snapshot before is there, or the new one, complete.

Of a file the disk is sure to have what it held when it was last synchronized, and of a folder the names; whatever was
changed since may be there or not.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from resumed_training import TRAININGS, digest

from rlstore import Journal, SnapshotError, Storage

pytestmark = pytest.mark.filterwarnings("ignore:the observations of an environment")


class Disk:
    """A folder, and what a power failure could leave of it after each change of its names and each synchronization."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._open = folder, {}  # all files stay open, so that no number is given to another one
        self._synced: dict[int, bytes] = {}  # by the number of a file
        self._names: dict[str, int] = {}  # as they were synchronized
        self.images: list[dict[str, bytes]] = []
        for call in ("fsync", "replace", "unlink"):
            monkeypatch.setattr(os, call, self._watched(getattr(os, call), call == "fsync"))

    def _watched(self, call, is_sync):
        def watched(*args, **named):
            self._note(None)
            result = None if is_sync else call(*args, **named)  # this disk needs no time
            self._note(args[0] if is_sync else None)
            return result

        return watched

    def _note(self, synced: int | None) -> None:
        """Note what could be left, now that a descriptor was synchronized or names have changed."""
        if not self._folder.is_dir():
            return
        now = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        for name, number in now.items():
            if number not in self._open:
                self._open[number] = os.open(self._folder / name, os.O_RDONLY)
        if synced is not None:
            number = os.fstat(synced).st_ino
            if number == self._folder.stat().st_ino:
                self._names = now
            elif number in self._open:
                self._synced[number] = self._content(number)
        self.images += [image for image in self.now() if image not in self.images]

    def now(self) -> list[dict[str, bytes]]:
        """What could be left: what is sure, that with all names, or that with all contents."""
        now = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        surely = {name: self._synced.get(number, b"") for name, number in self._names.items()}
        all_names = {name: self._synced.get(number, b"") for name, number in now.items()}
        all_contents = {name: self._content(number) for name, number in self._names.items()}
        return [surely, all_names, all_contents]

    def _content(self, number: int) -> bytes:
        return os.pread(self._open[number], 1 << 30, 0)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def loaded_from(image, folder):
    """What a storage holds that is loaded after the failure; None if there is none."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in image.items():
        (folder / name).write_bytes(content)
    try:
        storage = Storage.load(folder)
    except SnapshotError:
        return None
    return digest(storage.get_all_buffer_data(), len(storage))


@pytest.mark.parametrize(("name", "is_journaled"), [("prioritized", False), ("prioritized", True), ("rollout", False)])
def test_what_is_saved_outlives_the_machine_and_the_next_save_does_not_endanger_it(
    name, is_journaled, tmp_path, monkeypatch
):
    training, disk = TRAININGS[name], Disk(tmp_path / "saved", monkeypatch)
    journal = {"journal": Journal(tmp_path / "saved", interval=3600.0)} if is_journaled else {}
    storage = training.start(tmp_path, **journal)
    before = digest({}, 0) if is_journaled else None
    for turn in range(3):
        training.turn(storage, turn)
        here = digest(storage.get_all_buffer_data(), len(storage))
        disk.images.clear()
        storage.journal.commit() if is_journaled else storage.save(tmp_path / "saved")
        images, last = list(disk.images), disk.now()
        assert {loaded_from(image, tmp_path / "image") for image in images} == {before, here}
        assert {loaded_from(image, tmp_path / "image") for image in last} == {here}
        before = here
    if is_journaled:
        storage.journal.close()
    disk.close()
