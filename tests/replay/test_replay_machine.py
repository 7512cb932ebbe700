"""ReplayStorage and NStepReplayStorage under any interleaving of calls: every value is traced to its (env, step)."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from replay_batches import configs, match, read_batch
from replay_envs import Place
from replay_machine import EXAMPLES, ReplayMachine, explore
from replay_model import Transition

from rlstore import NStepReplayStorage, ReplayStorage


class UniformMachine(ReplayMachine):
    storage_class = ReplayStorage
    parameters = ("batch_size", "n_step", "discount")

    @initialize(config=configs(memory=st.sampled_from(["device", "ram", "shared"])))
    def make(self, config):
        self.begin(config)


class MappedMachine(ReplayMachine):
    """Memory in files, which the next storage of the same folder finds again."""

    storage_class = ReplayStorage
    parameters = ("batch_size", "n_step", "discount")
    goes_on_with_copies = False  # they lie in RAM

    @initialize(config=configs(memory=st.just("mapped")))
    def make(self, config):
        self.folders: list[tempfile.TemporaryDirectory[str]] = []
        self.begin(config)

    def new_storage(self, again: bool = False):
        if not again:
            self.folders.append(tempfile.TemporaryDirectory())
        options = {**self.config.options, "path": Path(self.folders[-1].name) / "mapped"}
        self.config = replace(self.config, options=options)
        return super().new_storage()

    def reload(self, storage):
        return copy.deepcopy(storage)  # a folder has one storage at a time: see close_and_load

    @rule()
    def close_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.storage.save(Path(folder) / "saved")
            self.storage.close()
            folders = {"path": self.config.options["path"]}
            self.storage = ReplayStorage.load(Path(folder) / "saved", folders=folders)
            self.has_warned = False
            self.model.resume()

    @rule()
    def close_and_open_again(self):
        self.storage.close()
        self.storage, self.has_warned = self.new_storage(again=True), False
        self.model.resume()
        for env, lane in enumerate(self.model.lanes):
            lane.resets_after, lane.is_after_end = None, False
            if self.envs.places[env].is_after_end:
                self.envs.places[env] = Place()

    def teardown(self):
        super().teardown()
        for folder in getattr(self, "folders", []):
            folder.cleanup()


class NStepMachine(ReplayMachine):
    """Batches may be prepared ahead, and then tell of the storage as it was a while ago, but not too long."""

    storage_class = NStepReplayStorage
    parameters = ("batch_size", "n_step", "discount")

    @initialize(
        config=configs(
            num_workers=st.integers(0, 3),
            fetch_every=st.integers(1, 4),
            pin_memory=st.booleans(),
            dtype=st.sampled_from([None, torch.float32]),
        )
    )
    def make(self, config):
        self.begin(config)
        self.past: list[list[Transition]] = []

    def stored(self, rows, in_slice=False):
        self.past = [*self.past, self.model.transitions()][-self.config.options["fetch_every"] :]

    def emptied(self):
        self.past = []

    def parameters_changed(self, **values):
        super().parameters_changed(**values)
        self.past = [self.model.transitions()]

    def check(self, batch, size):
        served, now = read_batch(self.config, batch, size), self.model.transitions()
        ahead = self.config.options["num_workers"] and size == self.config.batch_size and isinstance(batch, tuple)
        if not ahead:
            return match(served, now)
        match(served, [one for moment in self.past for one in moment] or now)
        return set()

    @rule(called=st.booleans())
    def iterate(self, called):
        if self.can_sample():
            batch = next(self.storage.replay_iter() if called else self.storage.replay_iter)
            self.check(batch, self.config.batch_size)

    def see_all(self):
        if self.config.options["num_workers"] == 0:
            super().see_all()


@EXAMPLES
def test_any_interleaving_of_calls_of_replay_storage(examples):
    explore(UniformMachine, examples)


@EXAMPLES
def test_any_interleaving_of_calls_of_replay_storage_in_files(examples):
    explore(MappedMachine, examples // 4)  # files take their time


@EXAMPLES
def test_any_interleaving_of_calls_of_n_step_replay_storage(examples):
    explore(NStepMachine, examples)
