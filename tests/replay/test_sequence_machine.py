"""SequenceReplayStorage under any interleaving of calls: which windows there are, and every value in them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from replay_batches import configs, flattened
from replay_machine import EXAMPLES, explore
from replay_model import ReplayModel, Window
from replay_priorities import PriorityMachine

from rlstore import SequenceReplayStorage

HIDDEN = {"none": None, "gru": (2, 2), "lstm": ((1, 2), (1, 2))}


class SequenceMachine(PriorityMachine):
    storage_class = SequenceReplayStorage
    is_optional = True

    @initialize(
        config=configs(
            sequence_length=st.integers(1, 5),
            burn_in=st.integers(0, 3),
            overlap=st.integers(0, 4),
            across_episodes=st.booleans(),
            hidden_shape=st.sampled_from(list(HIDDEN.values())),
            alpha=st.sampled_from([0.0, 0.5, 1.0]),
            beta=st.sampled_from([0.0, 0.4, 1.0]),
            beta_steps=st.sampled_from([None, 5]),
        )
    )
    def make(self, config):
        options = dict(config.options)
        options["sequence_length"] = min(options["sequence_length"], config.capacity)
        options["burn_in"] = min(options["burn_in"], config.capacity - options["sequence_length"])
        options["overlap"] = min(options["overlap"], options["sequence_length"] - 1)
        self.begin(replace(config, options=options))
        if self.is_prioritized:
            self.parameters = ("batch_size", "beta")

    def new_storage(self):
        return SequenceReplayStorage(**self.config.arguments())

    def new_model(self):
        return ReplayModel(self.config.num_envs, self.config.capacity, autoreset=self.config.autoreset)

    def add_options(self, step):
        shape = self.config.options["hidden_shape"]
        if shape is None:
            return {}
        if isinstance(shape[0], tuple):
            return {"hidden_states": (self.envs.hidden(step), -self.envs.hidden(step))}
        return {"hidden_states": self.envs.hidden(step, shape[0])}

    # ---------------------------------------------------------------------------------------------- windows

    @property
    def length(self) -> int:
        return self.config.options["burn_in"] + self.config.options["sequence_length"]

    def windows(self) -> list[Window]:
        options = self.config.options
        stride = options["sequence_length"] - options["overlap"]
        return self.model.windows(self.length, stride, options["across_episodes"])

    def drawable(self):
        return {window.row for window in self.windows()}

    def check(self, batch, size):
        windows = {window.row: (place, window) for place, window in enumerate(self.windows())}
        get = batch.get if isinstance(batch, dict) else lambda name: getattr(batch, name)
        if isinstance(batch, dict):
            self.check_weights(batch["rows"].tolist(), batch["weights"])
        for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations"):
            self.check_shape(name, get(name), size)
        columns = self.read(get)
        seen = set()
        for place, row in enumerate(get("rows").tolist()):
            assert row in windows, f"row {row} begins no window; {sorted(windows)} do"
            number, window = windows[row]
            seen.add(number)
            found = {name: column[place * self.length : (place + 1) * self.length] for name, column in columns.items()}
            assert found == self.expected(window), f"window of row {row}"
        self.check_hidden(get("hidden_states"), [windows[row][1] for row in get("rows").tolist()])
        return seen

    def check_shape(self, name: str, values: Any, size: int) -> None:
        last = {"rewards": self.config.reward_size or 1, "terminated": 1, "truncated": 1}.get(name)
        if last is not None:
            assert tuple(values.shape) == (size, self.length, last), name

    def read(self, get: Any) -> dict[str, list[Any]]:
        """Each field of a batch, window after window."""
        kind, action = self.config.kind, self.config.action
        for name in ("terminated", "truncated", "is_first", "masks"):
            assert get(name).dtype is torch.bool, name
        assert get("is_first").shape == get("masks").shape == get("terminated").shape[:2]
        return {
            "observations": kind.read(flattened(get("observations"), kind.space)),
            "next_observations": kind.read(flattened(get("next_observations"), kind.space)),
            "actions": action.read(get("actions").flatten(0, 1)),
            "rewards": [tuple(reward) for reward in get("rewards").flatten(0, 1).tolist()],
            **{name: get(name).flatten().tolist() for name in ("terminated", "truncated", "is_first", "masks")},
        }

    def expected(self, window: Window) -> dict[str, list[Any]]:
        """What a window must hold, zeros where its steps are over."""
        steps, rest = window.steps, self.length - len(window.steps)
        blank = tuple(0 for _ in steps[0].observation)
        none = tuple(0.0 for _ in steps[0].reward)
        learnt = range(self.config.options["burn_in"], len(steps))
        return {
            "observations": [step.observation for step in steps] + [blank] * rest,
            "next_observations": [step.following for step in steps] + [blank] * rest,
            "actions": [step.action for step in steps] + [0] * rest,
            "rewards": [step.reward for step in steps] + [none] * rest,
            "terminated": [step.terminated for step in steps] + [False] * rest,
            "truncated": [step.truncated for step in steps] + [False] * rest,
            "is_first": [*window.firsts, *[False] * rest],
            "masks": [place in learnt for place in range(self.length)],
        }

    def check_hidden(self, states: Any, windows: list[Window]) -> None:
        shape = self.config.options["hidden_shape"]
        if shape is None:
            assert states is None
            return
        numbers = torch.tensor([float(window.steps[0].hidden) for window in windows])
        layers = 1 if isinstance(shape[0], tuple) else shape[0]
        wanted = torch.stack([torch.stack([numbers, numbers + 0.25 * (one + 1)], -1) for one in range(layers)])
        if isinstance(shape[0], tuple):
            assert torch.equal(states[0], wanted)
            assert torch.equal(states[1], -wanted)
            return
        assert torch.equal(states, wanted)

    def check_steps(self, found, steps):
        super().check_steps(found, steps)
        shape = self.config.options["hidden_shape"]
        if shape is None:
            assert "hidden_states" not in found
            return
        numbers = torch.tensor([float(step.hidden) for step in steps])
        layers, is_pair = 1 if isinstance(shape[0], tuple) else shape[0], isinstance(shape[0], tuple)
        each = [torch.stack([numbers, numbers + 0.25 * (one + 1)], -1) for one in range(layers)]
        wanted = torch.stack(each, 1)  # [steps, layers, hidden]
        states = found["hidden_states"]
        assert torch.equal(states[0] if is_pair else states, wanted)
        assert not is_pair or torch.equal(states[1], -wanted)

    def see_all(self):
        if self.is_prioritized:
            super().see_all()
            return
        windows = self.windows()
        size = max(1, int((30 + math.log(len(windows) + 1)) * len(windows)))
        batch = self.serve(size)
        if batch is not None:
            assert self.check(batch, size) == set(range(len(windows)))


@EXAMPLES
def test_any_interleaving_of_calls_of_sequence_replay_storage(examples):
    explore(SequenceMachine, examples)
