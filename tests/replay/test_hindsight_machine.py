"""HindsightReplayStorage under any interleaving of calls: whose goals may be given to which step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from replay_batches import configs, read_batch
from replay_machine import EXAMPLES, ReplayMachine, explore
from replay_model import ReplayModel
from replay_world import Goal

from rlstore import HindsightReplayStorage

CALLS: list[int] = []


def compute_reward(achieved, desired, info):
    """A reward that tells both goals, as a reward is known only by its goals."""
    assert info == {}
    assert achieved.shape == desired.shape
    assert (achieved[:, 1] == -achieved[:, 0]).all()
    CALLS.append(len(achieved))
    return achieved[:, 0] - 2 * desired[:, 0]


class HindsightMachine(ReplayMachine):
    storage_class = HindsightReplayStorage
    parameters = ("batch_size", "discount")

    @initialize(
        config=configs(
            kinds=st.just(Goal()),
            largest=6,
            strategy=st.sampled_from(["future", "final", "episode"]),
            relabel_fraction=st.sampled_from([0.0, 0.5, 1.0]),
        )
    )
    def make(self, config):
        self.begin(replace(config, reward_size=0, num_envs=min(config.num_envs, 2), n_step=1))

    def new_storage(self):
        return HindsightReplayStorage(
            **self.config.arguments(), discount=self.config.discount, compute_reward=compute_reward
        )

    def new_model(self):
        config = self.config
        return ReplayModel(config.num_envs, config.capacity, 1, config.discount, config.autoreset)

    def reload(self, storage):
        loaded = super().reload(storage)
        loaded.compute_reward = compute_reward  # a function is not saved
        return loaded

    def serve(self, size=None):
        CALLS.clear()
        batch = super().serve(size)
        asked = self.config.batch_size if size is None else size
        assert ([] if batch is None else [asked]) == CALLS
        return batch

    def check(self, batch, size):
        """Returns which pairs of a row and its new goal were served; the goal is None where it was left alone."""
        steps = {one.observation[:2]: one for one in self.model.transitions()}
        twins: dict[tuple[int, ...], list[int]] = {}
        for one in self.model.transitions():
            twins.setdefault(one.observation[:2], []).append(one.row)
        goals = self.model.goals(self.config.options["strategy"])
        served = set()
        for one in read_batch(self.config, batch, size):
            assert one.observation[:2] in steps, f"{one} is no step that is held"
            step = steps[one.observation[:2]]
            rows = twins[one.observation[:2]] if one.row == -1 else [one.row]
            assert (one.action, one.following[:2]) == (step.action, step.following[:2])
            assert one.observation[2] == one.following[2]
            is_own = one.observation[2] == step.observation[2]
            assert one.reward == (step.reward if is_own else (one.following[1] - 2 * one.observation[2],))
            assert math.isclose(one.discount, step.discount, rel_tol=1e-6)
            if is_own:
                assert self.config.options["relabel_fraction"] < 1
                served |= {(row, None) for row in rows}
                continue
            assert self.config.options["relabel_fraction"] > 0
            allowed = {(row, one.observation[2]) for row in rows if one.observation[2] in goals[row]}
            assert allowed, f"{one} has a goal that is none of {[goals[row] for row in rows]}"
            served |= allowed
        return served

    def see_all(self):
        fraction = self.config.options["relabel_fraction"]
        goals = self.model.goals(self.config.options["strategy"])
        pairs = {(row, goal) for row in goals for goal in goals[row] if fraction > 0}
        pairs |= {(row, None) for row in goals if fraction < 1}
        most = max(map(len, goals.values()), default=1)
        size = int(35 * len(goals) * most * (1 if fraction in (0, 1) else 2)) or 1
        batch = self.serve(size)
        if batch is not None:
            assert self.check(batch, size) == pairs


@EXAMPLES
def test_any_interleaving_of_calls_of_hindsight_replay_storage(examples):
    explore(HindsightMachine, examples)


def test_a_reward_tells_both_goals():
    achieved, desired = torch.tensor([[3.0, -3.0]]), torch.tensor([[5.0, -5.0]])
    assert compute_reward(achieved, desired, {}).tolist() == [-7.0]
