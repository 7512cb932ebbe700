"""Rollouts of random episodes in sequence against a model in plain Python, in every autoreset mode and by every add.

The observation of a step tells its number and its environment, and the hidden state too.
"""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstore import InvalidInputError, RolloutStorage

GAMMA, LAM = 0.75, 0.5
BOX = spaces.Box(-1e9, 1e9, (1,))


@dataclass
class Model:
    """The steps of a rollout as plain numbers, one list for each step, one entry for each environment."""

    lanes: int
    resets_in_next_step: bool
    due: list[bool] = field(default_factory=list)  # the next step is a reset step
    steps: list[dict[str, list]] = field(default_factory=list)

    def __post_init__(self):
        self.due = self.due or [False] * self.lanes

    def add(self, number, ends, final_known):
        """Step ``number``, with "-", "terminated", "truncated" or "both" for each environment."""
        is_reset = [due and self.resets_in_next_step for due in self.due]
        ends = ["-" if reset else end for reset, end in zip(is_reset, ends, strict=True)]
        ids = [number * self.lanes + lane for lane in range(self.lanes)]
        step = {
            "id": ids,
            "reset": is_reset,
            "reward": [0.0 if reset else (i * 7 % 11) / 4 for i, reset in zip(ids, is_reset, strict=True)],
            "terminated": [end in ("terminated", "both") for end in ends],
            "truncated": [end in ("truncated", "both") for end in ends],
            "value": [(i * 5 % 13) / 8 for i in ids],
            "final": [(i * 3 % 17) / 8 if known else math.nan for i, known in zip(ids, final_known, strict=True)],
        }
        self.due = [end != "-" for end in ends]
        self.steps.append(step)
        return step

    def clear(self):
        self.steps = []

    def rows(self):
        """The (step, environment) of what is no reset step."""
        return [(t, e) for t, step in enumerate(self.steps) for e in range(self.lanes) if not step["reset"][e]]

    def delta(self, t, env, last):
        """The temporal difference of a step, and whether the next step belongs to the same episode; None: unknown."""
        step = self.steps[t]
        following = self.steps[t + 1]["value"][env] if t + 1 < len(self.steps) else last[env]
        if step["terminated"][env]:
            return step["reward"][env] - step["value"][env], False
        if step["truncated"][env]:
            bootstrap = following if self.resets_in_next_step else step["final"][env]
            if math.isnan(bootstrap):
                return None, False
            return step["reward"][env] + GAMMA * bootstrap - step["value"][env], False
        return step["reward"][env] + GAMMA * following - step["value"][env], True

    def advantage(self, t, env, last):
        """Step by step forward to the end of the episode."""
        total, factor = 0.0, 1.0
        while t < len(self.steps):
            delta, goes_on = self.delta(t, env, last)
            total, factor, t = total + factor * (delta or 0.0), factor * GAMMA * LAM, t + 1
            if not goes_on:
                break
        return total

    def trajectories(self):
        """(environment, its steps) between ends and without reset steps, environment after environment."""
        found = []
        for env in range(self.lanes):
            current = []
            for t, step in enumerate(self.steps):
                if not step["reset"][env]:
                    current.append(t)
                if current and (step["reset"][env] or step["terminated"][env] or step["truncated"][env]):
                    found.append((env, current))
                    current = []
            if current:
                found.append((env, current))
        return found


def hidden_of(ids):
    return torch.tensor(ids, dtype=torch.float32).view(1, -1, 1) + 0.5


def insert(storage, step, how, recurrent):
    """Give a step of the model to the storage in one of four ways."""
    ids = np.array(step["id"], np.float32)
    scalars = {name: np.array(step[name], np.float32) for name in ("reward", "value", "final")}
    flags = {name: np.array(step[name]) for name in ("terminated", "truncated")}
    states = (hidden_of(step["id"]), None) if recurrent else (None, None)
    final = None if storage._resets is not None else scalars["final"]
    given = {
        "observations": ids[:, None],
        "actions": ids.astype(np.int64) % 5,
        "rewards": scalars["reward"],
        "values": scalars["value"],
        "log_probs": -ids,
        "hidden_states": states,
    }
    if how == "tensors":
        given = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}
        flags = {name: torch.from_numpy(flag) for name, flag in flags.items()}
    if how in ("arrays", "tensors"):
        storage.add(**given, **flags, final_values=final)
    elif how == "dict":
        storage.insert_transition({**given, **flags, **({} if final is None else {"final_values": final})})
    else:
        transition = RolloutStorage.Transition()
        for name, value in given.items():
            setattr(transition, {"log_probs": "actions_log_prob"}.get(name, name), value)
        transition.dones, transition.final_values = flags["terminated"] | flags["truncated"], final
        transition.truncated = flags["truncated"] & ~flags["terminated"]
        storage.add_transition(transition)


def check_targets(storage, model, last):
    storage.compute_returns(torch.tensor(last), GAMMA, LAM, normalize_advantage=False)
    rows = model.rows()
    expected = {row: model.advantage(*row, last) for row in rows}
    for t, step in enumerate(model.steps):
        for env in range(model.lanes):
            advantage = expected.get((t, env), 0.0)  # that of a reset step is 0
            assert storage.advantages[t, env].item() == pytest.approx(advantage, abs=1e-5)
            assert storage.returns[t, env].item() == pytest.approx(advantage + step["value"][env], abs=1e-5)
    storage.compute_returns(torch.tensor(last), GAMMA, LAM)
    numbers = list(expected.values())
    mean = sum(numbers) / max(len(numbers), 1)
    std = math.sqrt(sum((number - mean) ** 2 for number in numbers) / max(len(numbers) - 1, 1))
    for row, advantage in expected.items():
        assert storage.advantages[row].item() == pytest.approx((advantage - mean) / (std + 1e-8), abs=1e-4)
    assert (storage.advantages[: len(model.steps)][storage.reset_steps] == 0).all()


def check_batches(storage, model, count):
    rows = model.rows()
    if count > len(rows):
        with pytest.raises(InvalidInputError, match=f"there are {len(rows)} rows"):
            next(storage.mini_batch_generator(count, 1))
        return
    expected = {model.steps[t]["id"][env]: (t, env) for t, env in rows}
    for reshuffle in (False, True):
        batches = list(storage.mini_batch_generator(count, 2, reshuffle=reshuffle))
        assert len(batches) == 2 * count
        for epoch in (batches[:count], batches[count:]):
            ids = [int(number) for batch in epoch for number in batch.observations.flatten()]
            assert len(set(ids)) == len(ids) == len(rows) // count * count
            assert set(ids) <= set(expected)
        for batch in batches:
            assert {len(batch.values), len(batch.actions), len(batch.observations)} == {len(rows) // count}
            for place, number in enumerate(batch.observations.flatten().tolist()):
                t, env = expected[int(number)]
                assert batch.values[place].item() == model.steps[t]["value"][env]
                assert batch.actions[place].item() == int(number) % 5
                assert batch.old_actions_log_prob[place].item() == -number
                assert batch.advantages[place] == storage.advantages[t, env]
    served = torch.cat([batch["rows"] for batch in storage.generate_batches(1, None, 1, shuffle=False)])
    assert served.tolist() == [t * model.lanes + env for t, env in rows]


def check_recurrent(storage, model):
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    trajectories = model.trajectories()
    steps = len(model.steps)
    assert batch.masks.shape == (steps, len(trajectories))
    assert batch.step_masks.tolist() == [[not reset for reset in step["reset"]] for step in model.steps]
    assert batch.values.tolist() == [step["value"] for step in model.steps]
    for place, (env, own) in enumerate(trajectories):
        ids = [model.steps[t]["id"][env] for t in own]
        padding = [0] * (steps - len(own))
        assert batch.observations[:, place, 0].tolist() == [*ids, *padding]
        assert batch.masks[:, place].tolist() == [True] * len(ids) + [False] * len(padding)
        assert batch.hidden_states[0][0, place].tolist() == [ids[0] + 0.5]
    by_row = batch.observations.transpose(0, 1)[batch.masks.transpose(0, 1)].flatten()
    assert (
        by_row.tolist()
        == storage.observations[:steps].transpose(0, 1)[batch.step_masks.transpose(0, 1)].flatten().tolist()
    )


def as_it_was(storage, how):
    """The storage after a detour, or a copy of it that must go on in the same way."""
    if how == "data":
        storage.insert_data_slice(storage.get_all_buffer_data())
        return storage
    if how == "pickle":
        return pickle.loads(pickle.dumps(storage))
    return copy.deepcopy(storage) if how == "copy" else storage


ENDS = st.sampled_from(["-", "-", "-", "terminated", "truncated", "both"])
WAYS = st.sampled_from(["arrays", "tensors", "dict", "transition"])


@settings(max_examples=60)
@given(st.data())
def test_rollouts_are_those_of_the_model(data):
    lanes, length = data.draw(st.integers(1, 3), "lanes"), data.draw(st.integers(1, 5), "length")
    mode = data.draw(st.sampled_from(["NextStep", "NextStep", "SameStep", "Disabled"]), "mode")
    recurrent = data.draw(st.booleans(), "recurrent")
    storage = RolloutStorage.from_spaces(BOX, spaces.Discrete(5), lanes, length, autoreset=mode, seed=1)
    model, number = Model(lanes, mode == "NextStep"), 1
    for _ in range(data.draw(st.integers(1, 3), "rollouts")):
        storage.clear()
        model.clear()
        for _ in range(data.draw(st.integers(1, length), "steps")):
            ends = data.draw(st.lists(ENDS, min_size=lanes, max_size=lanes), "ends")
            known = data.draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes), "known")
            insert(storage, model.add(number, ends, known), data.draw(WAYS, "way"), recurrent)
            number += 1
            storage = as_it_was(storage, data.draw(st.sampled_from([""] * 6 + ["data", "pickle", "copy"]), "detour"))
        assert storage.reset_steps.tolist() == [step["reset"] for step in model.steps]
        last = [(number + lane) / 16 for lane in range(lanes)]
        check_targets(storage, model, last)
        check_batches(storage, model, data.draw(st.integers(1, 4), "mini-batches"))
        if recurrent:
            check_recurrent(storage, model)
