"""Every replay storage in small, the steps they take, and what tells whether one of them was changed."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from nstep_steps import BOX, ids_of, make_step, obs_of
from tensordict import TensorDict

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))


def distance(achieved, desired, info):
    """A reward for each row of the goals."""
    return -(torch.as_tensor(achieved) - torch.as_tensor(desired)).abs().sum(-1)


class Kind:
    """One storage class with the options that a small one of it needs."""

    def __init__(self, name, storage_class, space=BOX, **options):
        self.name, self.storage_class, self.space, self.options = name, storage_class, space, options

    def __repr__(self):
        return self.name

    def make(self, num_envs=2, steps=6, **options):
        given = {
            "storage_size": steps * num_envs,
            "num_envs": num_envs,
            "batch_size": 24,
            "num_workers": 0,
            "pin_memory": False,
            "seed": 0,
            **self.options,
            **options,
        }
        space = given.pop("observation_space", self.space)
        return self.storage_class(space, given.pop("action_space", spaces.Discrete(1_000_000)), **given)

    def observations(self, ids):
        if self.space is BOX:
            return obs_of(ids)
        return {"observation": obs_of(ids), "achieved_goal": obs_of(ids + 0.25), "desired_goal": obs_of(ids + 0.5)}

    def step(self, step, num_envs=2, terminated=(), truncated=(), **changes):
        """The arguments of add(); final observations are those of minus the id."""
        ids = ids_of(step, num_envs)
        ended = set(terminated) | set(truncated)
        made = {
            "observations": self.observations(ids),
            "next_observations": self.observations(ids + num_envs),
            "infos": {"final_obs": self.observations(-ids)} if ended else {},
        }
        return make_step(step, num_envs, terminated, truncated, **{**made, **changes})

    def fill(self, storage, steps, first=0):
        """Steps with an end here and there, of which environment 0 has most."""
        for step in range(first, first + steps):
            ends = {"terminated": (0,)} if step % 4 == 2 else {"truncated": (1,)} if step % 5 == 4 else {}
            storage.add(**self.step(step, storage.num_envs, **ends))


KINDS = [
    Kind("replay", ReplayStorage),
    Kind("replay of 3 steps", ReplayStorage, n_step=3),
    Kind("n-step", NStepReplayStorage),
    Kind("n-step prepared ahead", NStepReplayStorage, num_workers=2),
    Kind("prioritized", PrioritizedReplayStorage),
    Kind("sequence", SequenceReplayStorage, sequence_length=3),
    Kind("prioritized sequence", SequenceReplayStorage, sequence_length=2, burn_in=1, alpha=0.6),
    Kind("hindsight", HindsightReplayStorage, GOALS, compute_reward=distance),
]
PRIORITIZED = [kind for kind in KINDS if kind.name.startswith("prioritized")]
FLAT = [kind for kind in KINDS if kind.space is BOX]


def make_prioritized(num_envs=1, steps=8, **options):
    """Priorities as they are (alpha 1), and weights that tell them (beta 1)."""
    given = {"num_envs": num_envs, "storage_size": num_envs * steps, "batch_size": 1000, "alpha": 1.0, "beta": 1.0}
    return PrioritizedReplayStorage(BOX, spaces.Discrete(1_000_000), **{**given, "seed": 0, **options})


def leaves(value, path=""):
    """Every tensor inside a dict, a batch or a nest of them, by a name that says where it is."""
    if value is None:
        return {}
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, (dict, TensorDict)):
        parts = value.items()
    elif hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
    else:
        parts = enumerate(value)
    return {name: leaf for key, part in parts for name, leaf in leaves(part, f"{path}/{key}").items()}


COUNTERS = ("step", "full", "stale_updates", "storage_size", "batch_size", "nbytes")


def state(storage):
    """All data and all counters, as copies."""
    numbers = {name: getattr(storage, name) for name in COUNTERS if hasattr(storage, name)}
    return {**leaves(storage.get_all_buffer_data()), **numbers, "len": len(storage)}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got[name], value, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")
        else:
            assert got[name] == value, name


def assert_same_draws(storage, other, batches=3):
    for _ in range(batches):
        assert_same(leaves(storage.sample()), leaves(other.sample()))


def assert_untouched(kind, storage, twin, next_step):
    """What was refused has changed nothing: neither data nor counters, nor what is drawn now and later."""
    assert_same(state(storage), state(twin))
    if len(twin):
        assert_same_draws(storage, twin)
    for either in (storage, twin):
        kind.fill(either, 3, first=next_step)
    assert_same(state(storage), state(twin))
    assert_same_draws(storage, twin)
    storage.close()
    twin.close()


def twins(kind, rows, **options):
    """Two storages with the same seed and the same steps."""
    made = kind.make(**options), kind.make(**options)
    for storage in made:
        kind.fill(storage, rows)
    return made


def assert_tells(error, *parts):
    """The message of an error has all of these in it."""
    message = str(error.value)
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"


def objects(*entries):
    array = np.full(len(entries), None, dtype=object)
    for i, entry in enumerate(entries):
        array[i] = entry
    return array
