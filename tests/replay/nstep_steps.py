"""Steps for replay storages whose numbers tell their (step, env), what a storage serves, and a plain n-step model."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces

from rlstore import NStepReplayStorage

BOX = spaces.Box(-1e9, 1e9, (2,))
MANY = 4096  # drawn from a few dozen transitions, none of them is missed


def make_storage(num_envs=2, steps=8, action_space=None, observation_space=None, **options):
    """A small NStepReplayStorage that prepares nothing ahead; ``steps`` is what each environment has room for."""
    return NStepReplayStorage(
        observation_space if observation_space is not None else BOX,
        action_space if action_space is not None else spaces.Discrete(1_000_000),
        **{
            "storage_size": steps * num_envs,
            "num_envs": num_envs,
            "batch_size": MANY,
            "num_workers": 0,
            "pin_memory": False,
            **options,
        },
    )


def ids_of(step, num_envs=2):
    """One number for each environment of a step, never used twice; 0 belongs to nobody."""
    return torch.arange(1, num_envs + 1, dtype=torch.float32) + step * num_envs


def obs_of(ids):
    return torch.stack([10 * ids, 10 * ids + 1], -1)


def make_step(step, num_envs=2, terminated=(), truncated=(), **changes):
    """The arguments of add() for a step, in their order.

    The observation after a step is that of the step after it. Where an episode ends, it is the next episode's start
    and the final observation, that of minus the id, is in the infos.
    """
    ids = ids_of(step, num_envs)
    ended = [env in terminated or env in truncated for env in range(num_envs)]
    final = np.full(num_envs, None, dtype=object)
    for env in range(num_envs):
        if ended[env]:
            final[env] = obs_of(-ids[env]).numpy()
    arguments = {
        "observations": obs_of(ids),
        "actions": ids.long(),
        "rewards": ids + 0.25,
        "terminateds": torch.tensor([env in terminated for env in range(num_envs)]),
        "truncateds": torch.tensor([env in truncated for env in range(num_envs)]),
        "infos": {"final_obs": final} if any(ended) else {},
        "next_observations": obs_of(ids + num_envs),
    }
    assert set(changes) <= {*arguments, "mask"}
    return {**arguments, **changes}


def fill(storage, steps, first=0, **changes):
    """Add steps numbered from ``first``."""
    for step in range(first, first + steps):
        storage.add(**make_step(step, storage.num_envs, **changes))


def id_of(observation):
    """The id in an observation, once both of its numbers have been found to agree."""
    first, second = (float(number) for number in observation)
    assert second == first + 1
    assert first % 10 == 0
    return int(first) // 10


def table(batch):
    """What a batch says of each transition in it: id -> (action, reward, discount, id of the next observation).

    A transition that was drawn twice has to be the same both times.
    """
    scalars = torch.stack([batch.actions.double(), batch.rewards[:, 0].double(), batch.discounts[:, 0].double()], -1)
    drawn = torch.cat([batch.observations.double(), scalars, batch.next_observations.double()], -1).unique(dim=0)
    found = {}
    for line in drawn.tolist():
        number, rest = id_of(line[:2]), (*line[2:5], id_of(line[5:]))
        assert found.setdefault(number, rest) == rest
    return found


def served(storage):
    """Everything that a small storage can serve."""
    return table(storage.sample())


class Lane:
    """What one environment did, as a list; knows what each of its last ``steps`` steps must be served as."""

    def __init__(self, steps, n_step, gamma):
        self.steps, self.n_step, self.gamma, self.rows = steps, n_step, gamma, []

    def add(self, number, reward, after, end=None):
        """``after``: the id of the observation that followed; ``end``: None, "terminated", "truncated", "both"."""
        self.rows.append((number, reward, after, end))

    def table(self):
        held = self.rows[-self.steps :]
        return {held[t][0]: (float(held[t][0]), *self.window(held[t:])) for t in range(len(held))}

    def window(self, rows):
        total, factor = 0.0, 1.0
        for taken, (_, reward, after, end) in enumerate(rows, start=1):
            total += factor * reward
            factor *= self.gamma
            if end is not None or taken == min(self.n_step, len(rows)):
                return total, 0.0 if end in ("terminated", "both") else factor, after
        raise AssertionError("a window has a step")


def assert_tables(got, expected, tolerance=1e-6):
    """The same transitions, each with its action, its target and its next observation."""
    assert got.keys() == expected.keys()
    for number, (action, reward, discount, after) in expected.items():
        line = got[number]
        assert (line[0], line[3]) == (action, after), f"transition {number}"
        assert abs(line[1] - reward) <= tolerance * max(1.0, abs(reward)), f"transition {number}"
        assert abs(line[2] - discount) <= tolerance, f"transition {number}"
