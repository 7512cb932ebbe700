"""ReplayStorage and NStepReplayStorage under any interleaving of calls: every value is traced to its (env, step)."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from replay_machine import LIMITS, TargetsMachine, configs, match, read_batch
from replay_model import Transition

from rlstore import NStepReplayStorage, ReplayStorage


class UniformMachine(TargetsMachine):
    storage_class = ReplayStorage

    @initialize(config=configs())
    def make(self, config):
        self.begin(config)


class NStepMachine(TargetsMachine):
    """Batches may be prepared ahead, and then tell of the storage as it was a while ago, but not too long."""

    storage_class = NStepReplayStorage

    @initialize(
        config=configs(
            num_workers=st.integers(0, 3), fetch_every=st.integers(1, 4), pin_memory=st.booleans(), dtype=st.none()
        )
    )
    def make(self, config):
        self.begin(config)
        self.past: list[list[Transition]] = []

    def stored(self, rows, in_slice=False):
        if not rows:
            self.past = []  # after a reset nothing of before may come
        self.past = [*self.past[1 - self.config.options["fetch_every"] :], self.model.transitions()]
        if in_slice or self.config.options["fetch_every"] == 1:
            self.past = self.past[-1:]

    def targets_changed(self):
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


def test_any_interleaving_of_calls_of_replay_storage():
    run_state_machine_as_test(UniformMachine, settings=LIMITS)


def test_any_interleaving_of_calls_of_n_step_replay_storage():
    run_state_machine_as_test(NStepMachine, settings=LIMITS)
