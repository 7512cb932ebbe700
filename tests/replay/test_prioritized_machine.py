"""PrioritizedReplayStorage under any interleaving of calls, with priorities that come late, wrong or not at all."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize
from replay_batches import configs
from replay_machine import EXAMPLES, explore
from replay_priorities import PriorityMachine

from rlstore import PrioritizedReplayStorage


class PrioritizedMachine(PriorityMachine):
    storage_class = PrioritizedReplayStorage
    parameters = ("batch_size", "n_step", "discount", "beta")

    @initialize(
        config=configs(
            alpha=st.sampled_from([0.0, 0.5, 0.6, 1.0]),
            beta=st.sampled_from([0.0, 0.4, 1.0]),
            beta_steps=st.sampled_from([None, 1, 5]),
        )
    )
    def make(self, config):
        self.begin(config)

    def drawable(self):
        return self.model.rows()

    def check(self, batch, size):
        if isinstance(batch, dict):
            self.check_weights(batch["rows"].tolist(), batch["weights"])
        return super().check(batch, size)


@EXAMPLES
def test_any_interleaving_of_calls_of_prioritized_replay_storage(examples):
    explore(PrioritizedMachine, examples)
