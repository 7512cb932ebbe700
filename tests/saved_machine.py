"""Any interleaving of calls, saves, commits and loads: a storage that was saved and loaded is a twin that never was."""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from called_worlds import WORLDS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from rlstore import Journal, Storage

FOLDERS = st.sampled_from(["one", "other", "journal"])


class SavedMachine(RuleBasedStateMachine):
    """Drives a storage that is saved and loaded, and a twin that is not, through the same calls."""

    name = "uniform"

    @initialize()
    def make(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.folder, self.journals = Path(self.place.name), 0
        self.world, self.twin = WORLDS[self.name](), WORLDS[self.name]()
        self.world.storage, self.twin.storage = self.world.make(journal=self.new_journal()), self.twin.make()
        # By folder the twin as it was when it was saved there; and the saves in progress.
        self.saved: dict[str, Any] = {}
        self.saves: dict[str, Any] = {}

    def new_journal(self) -> Journal:
        """A journal in a folder of its own, which commits when it is told to."""
        self.journals += 1
        return Journal(self.folder / f"journal {self.journals}", interval=3600.0)

    def teardown(self) -> None:
        if hasattr(self, "place"):
            for save in self.saves.values():
                save.wait()
            self.world.storage.journal.close()
            self.place.cleanup()

    @rule(seed=st.integers(0, 99), count=st.integers(1, 40))
    def call(self, seed: int, count: int) -> None:
        for world in (self.world, self.twin):
            random_ = random.Random(seed)
            for _ in range(count):
                world.call(random_)
        self.compare()

    @rule()
    def reset(self) -> None:
        for world in (self.world, self.twin):
            world.reset()

    @rule(folder=FOLDERS, in_background=st.booleans())
    def save(self, folder: str, in_background: bool) -> None:
        self.wait(folder)
        self.saved[folder] = self.twin.twin()
        if folder == "journal":
            self.world.storage.journal.commit()
            shutil.rmtree(self.folder / folder, ignore_errors=True)
            shutil.copytree(self.world.storage.journal.path, self.folder / folder)
        elif in_background:
            self.saves[folder] = self.world.storage.save(self.folder / folder, background=True)
        else:
            self.world.storage.save(self.folder / folder)

    def wait(self, folder: str) -> None:
        if folder in self.saves:
            self.saves.pop(folder).wait()

    @precondition(lambda self: self.saved)
    @rule(folder=FOLDERS)
    def load(self, folder: str) -> None:
        if folder not in self.saved:
            return
        self.wait(folder)
        self.world.storage.journal.close()
        self.twin, self.world = (self.saved[folder].twin() for _ in range(2))
        self.world.storage = Storage.load(self.folder / folder, journal=self.new_journal())
        self.compare()
        self.twin.twin().judge(Storage.load(self.folder / folder))

    def compare(self) -> None:
        assert self.world.state(self.world.storage) == self.twin.state(self.twin.storage)


def explore(name: str, examples: int) -> None:
    """Try so many interleavings with one kind of storage."""
    limits = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the observations of an environment")
        run_state_machine_as_test(type(f"Saved {name}", (SavedMachine,), {"name": name}), settings=limits)
