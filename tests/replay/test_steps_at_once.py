"""Writers that are given several steps in one call, against those that are given one at a time."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from replay_kinds import assert_same, leaves

from rlstore import (
    InvalidInputError,
    PrioritizedReplayStorage,
    RateLimit,
    ReplayStorage,
    SequenceReplayStorage,
)

STEPS, ENVS = 11, 3
ACTIONS = Box(-1, 1, (2,), np.float32)
PLAIN = Box(-9, 9, (2,), np.float32)
NESTED = Dict({"a": PLAIN, "b": Box(0, 9, (), np.int64)})


def observations(rng: np.random.Generator, nested: bool) -> object:
    plain = torch.from_numpy(rng.integers(0, 3, (STEPS, ENVS, 2)).astype(np.float32))
    return {"a": plain, "b": torch.from_numpy(rng.integers(0, 3, (STEPS, ENVS)))} if nested else plain


def data_of(seed: int, nested: bool, masked: bool) -> dict[str, object]:
    """Steps whose observations follow on now and then, as small whole numbers do by chance."""
    rng = np.random.default_rng(seed)
    ends = rng.random((2, STEPS, ENVS)) < 0.2
    data = {
        "observations": observations(rng, nested),
        "actions": torch.from_numpy(rng.random((STEPS, ENVS, 2))),
        "rewards": torch.from_numpy(rng.integers(0, 2, (STEPS, ENVS)).astype(np.float64)),
        "terminated": ends[0],
        "truncated": torch.from_numpy(ends[1]),
        "next_observations": observations(rng, nested),
        "final_observations": observations(rng, nested),
    }
    return {**data, "masks": rng.random((STEPS, ENVS)) < 0.7} if masked else data


def at(nest: object, step: int) -> object:
    return {name: part[step] for name, part in nest.items()} if isinstance(nest, dict) else nest[step]  # type: ignore[index]


MAKERS = {
    "replay": ReplayStorage,
    "prioritized": PrioritizedReplayStorage,
    "sequence": lambda *args, **kwargs: SequenceReplayStorage(*args, **kwargs, sequence_length=3, alpha=0.5),
}


@pytest.mark.filterwarnings("ignore:the observations of an environment are not")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("kind", "memory"), [(kind, "ram") for kind in MAKERS] + [("replay", "shared")])
def test_steps_at_once_are_steps_one_by_one(kind, memory, nested, masked):
    made = [
        MAKERS[kind](NESTED if nested else PLAIN, ACTIONS, storage_size=7 * ENVS, num_envs=ENVS, memory=memory, seed=1)
        for _ in range(2)
    ]
    writers = [storage.writer() for storage in made]
    for seed in range(3):
        data, has_final = data_of(seed, nested, masked), torch.arange(STEPS) % 2 == 0
        stored = 0
        for step in range(STEPS):
            sample = {name: at(value, step) for name, value in data.items()}
            if not has_final[step]:
                del sample["final_observations"]
            before = int(made[0]._ring_of().counters[0].sum())
            writers[0].insert_transition(sample)
            stored += int(made[0]._ring_of().counters[0].sum()) - before
        assert writers[1]._insert_steps(data, STEPS, has_final) == stored
        assert_same(*(leaves(storage.get_all_buffer_data()) for storage in made))
        assert_same(*(leaves(next(iter(storage.generate_batches(1, 16)))) for storage in made))
    for storage in made:
        storage.close()


def test_steps_of_which_one_is_refused_write_nothing():
    storage = ReplayStorage(PLAIN, ACTIONS, storage_size=60, num_envs=ENVS)
    writer, data = storage.writer(), data_of(0, nested=False, masked=False)
    data["rewards"][-1, 1] = torch.nan  # type: ignore[index]
    with pytest.raises(InvalidInputError, match=rf"rewards of environment 1 in step {STEPS - 1} is nan"):
        writer._insert_steps(data, STEPS)
    assert len(storage) == 0


@pytest.mark.filterwarnings("ignore:the observations of an environment are not")
def test_steps_at_once_keep_to_the_rate_limit():
    storage = ReplayStorage(PLAIN, ACTIONS, storage_size=60, num_envs=ENVS, timeout=0.05)
    storage.set_rate_limit(RateLimit(1.0, 1, tolerance=256))
    writer, data = storage.writer(), data_of(0, nested=False, masked=False)
    before = storage._shared().control.limiter.inserted
    stored = writer._insert_steps(data, STEPS)
    assert storage._shared().control.limiter.inserted - before == stored == int(storage._ring_of().counters[0].sum())


def test_steps_at_once_warn_of_a_broken_episode():
    storage = ReplayStorage(PLAIN, ACTIONS, storage_size=60, num_envs=ENVS)
    data = data_of(0, nested=False, masked=False)
    with pytest.warns(UserWarning, match="are not the next_observations given"):
        storage.writer()._insert_steps({**data, "terminated": torch.zeros(STEPS, ENVS)}, STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = ReplayStorage(PLAIN, ACTIONS, storage_size=60, num_envs=ENVS)
        other.insert_data_slice({name: part for name, part in data.items() if name != "final_observations"})
    assert len(other) == STEPS * ENVS


def test_a_slice_without_steps_is_checked_too():
    storage = ReplayStorage(Box(-9, 9, (2,)), Discrete(3), storage_size=8, batch_size=1)
    flags, seen = np.zeros((2, 1), bool), np.zeros((2, 1, 2), np.float32)
    rest = {"actions": np.zeros((2, 1), int), "terminated": flags, "truncated": flags, "next_observations": seen}
    with pytest.raises(InvalidInputError, match=r"it has to begin with \(0, 1\)"):
        storage.insert_data_slice({"observations": seen, "rewards": np.zeros((0, 1)), **rest})
    assert len(storage) == 0
