"""Any interleaving of calls, saves and loads: a storage that was saved and loaded is the twin that never was."""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from pathlib import Path

import pytest
from called_worlds import WORLDS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from rlstore import Storage

FOLDERS = st.sampled_from(["one", "other"])


class SavedMachine(RuleBasedStateMachine):
    """Drives a storage that is saved and loaded, and a twin that is not, through the same calls."""

    name = "uniform"

    @initialize()
    def make(self):
        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name)
        self.world, self.twin = WORLDS[self.name](), WORLDS[self.name]()
        self.world.storage, self.twin.storage = self.world.make(), self.twin.make()
        self.saved, self.saves = {}, {}  # by folder, the twin as it was then, and saves in progress

    def teardown(self):
        if hasattr(self, "place"):
            for save in self.saves.values():
                save.wait()
            self.place.cleanup()

    @rule(seed=st.integers(0, 99), count=st.integers(1, 40))
    def call(self, seed, count):
        for world in (self.world, self.twin):
            random_ = random.Random(seed)
            for _ in range(count):
                world.call(random_)
        self.compare()

    @rule()
    def reset(self):
        for world in (self.world, self.twin):
            world.reset()

    @rule(folder=FOLDERS, in_background=st.booleans())
    def save(self, folder, in_background):
        self.wait(folder)
        self.saved[folder] = self.twin.twin()
        if in_background:
            self.saves[folder] = self.world.storage.save(self.folder / folder, background=True)
        else:
            self.world.storage.save(self.folder / folder)

    def wait(self, folder):
        if folder in self.saves:
            self.saves.pop(folder).wait()

    @precondition(lambda self: self.saved)
    @rule(folder=FOLDERS)
    def load(self, folder):
        if folder not in self.saved:
            return
        self.wait(folder)
        self.twin = self.saved[folder].twin()
        self.world = self.saved[folder].twin()
        self.world.storage = Storage.load(self.folder / folder)
        self.compare()
        self.saved[folder].judge(Storage.load(self.folder / folder))

    def compare(self):
        assert self.world.state(self.world.storage) == self.twin.state(self.twin.storage)


@pytest.mark.parametrize("name", WORLDS)
def test_any_interleaving_of_saves_and_loads(name, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here outlives the machine
    limits = settings(
        max_examples=int(os.environ.get("RLSTORE_EXAMPLES", "4")),
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the observations of an environment")
        run_state_machine_as_test(type(f"Saved {name}", (SavedMachine,), {"name": name}), settings=limits)
