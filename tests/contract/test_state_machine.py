"""Any interleaving of calls against the plain Python model: every value that comes out is traced to its (env, step)."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rollout_model import RolloutModel, same_data
from storages import CASES, NUM_ENVS, Actor, Algorithm
from where import DEVICE, SEES_VALUES

ENVS = st.frozensets(st.integers(0, NUM_ENVS - 1))
DISCOUNT = st.sampled_from([0.0, 0.5, 0.99, 1.0])
BAD = {
    "rewards of another shape": lambda sample: {**sample, "rewards": torch.zeros(NUM_ENVS + 2)},
    "nan for a flag": lambda sample: {**sample, "terminated": torch.full((NUM_ENVS,), float("nan"))},
    "an unknown name": lambda sample: {**sample, "reward": torch.zeros(NUM_ENVS)},
    "no actions": lambda sample: {name: value for name, value in sample.items() if name != "actions"},
    "a complex observation": lambda sample: {**sample, "observations": torch.zeros(NUM_ENVS, 2) * 1j},
    "bad next observations": lambda sample: {**sample, "next_observations": torch.zeros(NUM_ENVS + 1, 2)},
}
if not SEES_VALUES:
    del BAD["nan for a flag"]


class RolloutMachine(RuleBasedStateMachine):
    """Drives a storage and its model through the same calls; ``case`` is set for each storage class."""

    case = CASES[0]

    @initialize(size=st.integers(1, 4), seed=st.integers(0, 9), prepared=st.booleans())
    def make(self, size, seed, prepared):
        self.storage = self.case.create_factory(size, gamma=0.9, lam=0.5, seed=seed)(DEVICE, Actor(), None)
        self.model = RolloutModel(self.case, size, 0.9, 0.5)
        self.step = 0
        if prepared:
            self.storage.init_tensors(self.case.sample(500))

    # ---------------------------------------------------------------------------------------------- writing

    def next_sample(self, terminated=(), truncated=()):
        self.step += 1  # no id is ever used twice, not even by a sample that is refused
        return self.case.sample(self.step, terminated, truncated)

    @rule(terminated=ENVS, truncated=ENVS)
    def insert(self, terminated, truncated):
        sample = self.next_sample(terminated, truncated)
        if self.model.is_full():
            with pytest.raises(OverflowError):
                self.storage.insert_transition(sample)
            return
        self.storage.insert_transition(sample)
        self.model.insert(sample)

    @rule(what=st.sampled_from(sorted(BAD)))
    def insert_something_bad(self, what):
        with pytest.raises((ValueError, OverflowError)):
            self.storage.insert_transition(BAD[what](self.next_sample()))

    @rule(what=st.sampled_from(sorted(BAD)))
    def insert_a_bad_slice(self, what):
        before = self.storage.get_all_buffer_data()
        sample = {name: value for name, value in BAD[what](self.next_sample()).items() if name != "reward"}
        sample["rewards"] = torch.zeros(NUM_ENVS + 2)
        steps = {name: value.unsqueeze(0) for name, value in sample.items() if isinstance(value, torch.Tensor)}
        with pytest.raises(ValueError, match=r"\w"):
            self.storage.insert_data_slice(steps)
        same_data(before, self.storage.get_all_buffer_data())

    # ---------------------------------------------------------------------------------------------- learning

    def can_learn(self):
        rows = len(self.model.rows)
        return rows == self.model.size or (rows > 0 and self.case.learns_midway)

    @rule(gamma=DISCOUNT, lam=DISCOUNT, own=st.booleans())
    def compute(self, gamma, lam, own):
        arguments = () if own else (Actor(), Algorithm(gamma=gamma, lam=lam))
        if not self.can_learn():
            with pytest.raises(ValueError, match=r"no data|first sample|not complete"):
                self.storage.before_gradients(*arguments)
            return
        self.storage.before_gradients(*arguments)
        if self.case.computes_targets:
            self.model.compute(*(() if own else (gamma, lam)))

    @rule(count=st.integers(1, 6), epochs=st.integers(1, 3), shuffle=st.booleans(), spoil=st.booleans())
    def serve(self, count, epochs, shuffle, spoil):
        held = len(self.model.rows) * NUM_ENVS
        batches = self.storage.generate_batches(count, None, epochs, shuffle=shuffle)
        if not self.can_learn() or count > held:
            with pytest.raises(ValueError, match=r"\w"):
                next(batches)
            return
        size, served = held // count, []
        for batch in batches:
            served.append(self.model.check_batch(batch, size))
            if spoil:
                for name in ("rewards", "actions", "terminated"):
                    batch[name].fill_(True)
        assert len(served) == epochs * count
        for epoch in range(epochs):
            rows = [row for batch in served[epoch * count : (epoch + 1) * count] for row in batch]
            assert len(set(rows)) == len(rows)
            assert shuffle or rows == list(range(count * size))

    @precondition(lambda self: self.can_learn())
    @rule(workers_way=st.booleans())
    def finish(self, workers_way):
        info = {"loss": 1}
        given = ({}, info) if workers_way else (None, None, info)
        assert self.storage.after_gradients(*given) == {"loss": 1, "storage_size": len(self.model.rows) * NUM_ENVS}
        self.model.spent = True

    # ---------------------------------------------------------------------------------------------- the whole

    @rule()
    def reset(self):
        self.storage.reset()
        self.model.reset()

    @precondition(lambda self: hasattr(self.storage, "clear") and self.storage._ring is not None)
    @rule()
    def clear(self):
        self.storage.clear()
        self.model.clear()

    @precondition(lambda self: hasattr(self.storage, "update") and self.storage._ring is not None)
    @rule()
    def update(self):
        self.storage.update()
        if len(self.model.rows) == self.model.size:
            newest = self.model.rows[-1]
            self.model.flags_before = list(
                zip(newest["terminated"].tolist(), newest["truncated"].tolist(), strict=True)
            )

    @rule(frozen=st.booleans())
    def go_on_with_a_copy(self, frozen):
        actor = self.storage._given_actor
        self.storage = pickle.loads(pickle.dumps(self.storage)) if frozen else copy.deepcopy(self.storage)
        self.storage._given_actor = actor  # not pickled, and needed by compute()

    @rule(through_reset=st.booleans())
    def take_everything_out_and_put_it_back(self, through_reset):
        data = self.storage.get_all_buffer_data(data_to_cpu=True)
        if through_reset:
            self.storage.reset()
        self.storage.insert_data_slice(data)
        same_data(data, self.storage.get_all_buffer_data())
        self.model.spent = False
        if not data:
            self.model.reset()

    # ---------------------------------------------------------------------------------------------- at all times

    @invariant()
    def everything_is_as_in_the_model(self):
        if not hasattr(self, "storage"):
            return
        assert len(self.storage) == len(self.model.rows) * NUM_ENVS
        self.model.check_data(self.storage.get_all_buffer_data())
        if hasattr(self.storage, "update") and self.model.rows:
            flags = zip(self.storage.terminateds[0].tolist(), self.storage.truncateds[0].tolist(), strict=True)
            assert list(flags) == self.model.flags_before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_interleaving_of_calls(case):
    machine = type(f"Machine_{case.name}", (RolloutMachine,), {"case": case})
    limits = settings(
        max_examples=25,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)
