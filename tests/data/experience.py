"""Small storages of every class, filled with steps that each have a number, and what their episodes are."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import (
    HindsightReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    SequenceReplayStorage,
)

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
IMAGE = spaces.Box(0, 255, (2, 3, 1), np.uint8)
CONTINUOUS = spaces.Box(-9, 9, (3,), np.float32)
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))
NEST = spaces.Dict(
    {"state": BOX, "camera": spaces.Dict({"left": IMAGE}), "pair": spaces.Tuple([BOX, spaces.Discrete(9)])}
)
EXTRA = {"costs": ((), torch.float32), "contacts": ((2,), torch.int16), "is_safe": ((), torch.bool)}
ENVS, STEPS = 2, 16

# Twelve steps as d4rl has them: an episode that terminates, one that is truncated, and one that goes on.
IDS = np.arange(12)
D4RL = {
    "observations": np.stack([IDS, IDS * 10], -1).astype(np.float32),
    "actions": (IDS[:, None] / 8).astype(np.float32),
    "rewards": (IDS / 4).astype(np.float32),
    "terminals": IDS == 3,
    "timeouts": IDS == 7,
}


def no_reward(achieved, desired, info):
    return -achieved[:, 0]


# By name the class, the spaces and the options of a storage.
KINDS = {
    "replay": (ReplayStorage, BOX, spaces.Discrete(5), {}),
    "replay of a nest": (ReplayStorage, NEST, CONTINUOUS, {"extra_fields": EXTRA}),
    "replay of images": (ReplayStorage, IMAGE, spaces.MultiDiscrete([3, 4]), {"reward_shape": (2,)}),
    "n-step": (NStepReplayStorage, BOX, spaces.Discrete(5, start=-1), {"n_step": 3, "num_workers": 0}),
    "prioritized": (PrioritizedReplayStorage, BOX, CONTINUOUS, {"extra_fields": EXTRA}),
    "sequence": (SequenceReplayStorage, NEST, spaces.MultiBinary(3), {"sequence_length": 3}),
    "recurrent": (SequenceReplayStorage, BOX, CONTINUOUS, {"sequence_length": 2, "hidden_shape": ((1, 4), (2, 3))}),
    "hindsight": (HindsightReplayStorage, GOALS, CONTINUOUS, {"compute_reward": no_reward}),
}


def make(name, steps=STEPS):
    kind, observation_space, action_space, options = KINDS[name]
    sizes = {"storage_size": steps * ENVS, "num_envs": ENVS, "batch_size": 2, "seed": 0}
    return kind(observation_space, action_space, **sizes, **options)


def values(space, ids):
    """A value of a space for each number: ``[len(ids), ...]``."""
    if isinstance(space, spaces.Dict):
        return {key: values(part, ids + 7 * place) for place, (key, part) in enumerate(space.spaces.items())}
    if isinstance(space, spaces.Tuple):
        return tuple(values(part, ids + 7 * place) for place, part in enumerate(space.spaces))
    if isinstance(space, spaces.Discrete):
        return ids % int(space.n) + int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return ids[:, None] % space.nvec
    if isinstance(space, spaces.MultiBinary):
        return ((ids[:, None] >> np.arange(space.n)) & 1).astype(np.int8)
    entries = np.arange(np.prod(space.shape)).reshape(space.shape)
    if space.dtype == np.uint8:
        return ((ids.reshape(-1, *[1] * entries.ndim) * 3 + entries) % 256).astype(np.uint8)
    return (ids[:, None] + entries / 16).astype(np.float32) % 1000


def step(name, number):
    """The fields of step ``number`` of all environments, and the observations after it."""
    _, observation_space, action_space, options = KINDS[name]
    ids = np.arange(ENVS) + ENVS * number
    # Environment 0 terminates in every fourth step at first, 1 is truncated in every fifth; then 0 is broken off once.
    ended = np.array([number % 4 == 3 and number < 8, number % 5 == 4])
    reward = np.stack([ids / 8, -ids], -1) if "reward_shape" in options else ids / 8
    fields = {
        "observations": values(observation_space, ids),
        "actions": values(action_space, ids),
        "rewards": reward.astype(np.float32),
        "terminated": ended & [True, False],
        "truncated": ended & [False, True],
    }
    if "extra_fields" in options:
        contacts = np.stack([ids, ids + 1], -1).astype(np.int16)
        fields |= {"costs": (ids / 4).astype(np.float32), "contacts": contacts, "is_safe": ids % 3 == 0}
    if "hidden_shape" in options:
        fields["hidden_states"] = tuple(
            (ids.reshape(-1, 1, 1) + np.arange(np.prod(shape)).reshape(shape) / 32).astype(np.float32)
            for shape in options["hidden_shape"]
        )
    is_moved = ended | [number == 11, False]
    return fields, values(observation_space, ids + np.where(is_moved, 500, ENVS))


def fill(storage, name, steps=STEPS):
    """Add the steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an episode was broken off
        for number in range(steps):
            fields, following = step(name, number)
            terminated, truncated = fields.pop("terminated"), fields.pop("truncated")
            first = [fields.pop(key) for key in ("observations", "actions", "rewards")]
            infos = {"final_obs": following} if (terminated | truncated).any() else {}
            if "hidden_states" in fields:
                states = (np.swapaxes(state, 0, 1) for state in fields["hidden_states"])
                fields["hidden_states"] = tuple(map(torch.tensor, states))
            storage.add(*first, terminated, truncated, infos, following, **fields)


def episodes(name, steps=STEPS):
    """The episodes of these steps as plain arrays, oldest first."""
    made = [step(name, number) for number in range(steps)]
    found = []
    for env in range(ENVS):
        begin = 0
        for number, (fields, _) in enumerate(made):
            is_over = fields["terminated"][env] or fields["truncated"][env] or (number == 11 and env == 0)
            if is_over or number == steps - 1:
                found.append(((begin, env), _episode(made[begin : number + 1], env)))
                begin = number + 1
    return [episode for _, episode in sorted(found, key=lambda entry: entry[0])]


def _episode(made, env):
    fields = {key: stack([only(fields[key], env) for fields, _ in made]) for key in made[0][0]}
    return {**fields, "final_observations": only(made[-1][1], env)}


def only(value, env):
    if isinstance(value, dict):
        return {key: only(part, env) for key, part in value.items()}
    return tuple(only(part, env) for part in value) if isinstance(value, tuple) else value[env]


def stack(parts):
    if isinstance(parts[0], dict):
        return {key: stack([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(map(stack, zip(*parts, strict=True)))
    return np.stack(parts)


def plain(value):
    """A nest of arrays, of tensors or arrays."""
    if isinstance(value, (dict, TensorDict)):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def held(storage):
    """The episodes of a storage as plain arrays."""
    found = []
    for episode in storage.episodes():
        fields = {key: plain(episode[key]) for key in episode.names if key != "next_observations"}
        found.append({**fields, "final_observations": plain(episode.final_observations)})
    return found


def assert_same(got, expected, where=""):
    """Equal in structure, shape, dtype and every value."""
    if isinstance(expected, (dict, list, tuple)):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        assert (set(got) == set(keys)) if isinstance(expected, dict) else (len(got) == len(expected)), where
        for key in keys:
            assert_same(got[key], expected[key], f"{where}/{key}")
        return
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), where
    np.testing.assert_array_equal(got, expected, err_msg=where)


def without_row_ids(storage):
    """The episodes that a storage holds, in an order that does not depend on where they are."""
    return sorted(held(storage), key=lambda episode: episode["rewards"].reshape(-1)[0])


def copied(name, source):
    """A storage of the same class that is made from a source."""
    kind, _, _, options = KINDS[name]
    return kind.from_episodes(source, num_envs=ENVS, batch_size=2, seed=0, **options)


class InterruptedWriteError(Exception):
    pass


def interrupted(given):
    """Some episodes, and then an error."""
    yield from given
    raise InterruptedWriteError
