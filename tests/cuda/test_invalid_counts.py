"""On CUDA, where the host does not look at values, the kernels count what the CPU refuses, and a later step tells."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from gymnasium import spaces

from rlstore import DecoupledRolloutStorage, ReplayStorage, kernels
from rlstore.kernels import cuda

NAN, INF = math.nan, math.inf
ENVS = 5


@pytest.fixture
def place(monkeypatch, device):
    """The device of the storages; without a GPU the CPU has the kernels in Triton."""
    if device.type == "cpu":
        monkeypatch.setitem(kernels._VERSIONS, "cpu", cuda.OPERATIONS)
    return device


def told(work):
    """The warnings of some work."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message).split(" were stored")[0] for warning in caught]


SPACES = {
    "whole numbers": (
        spaces.MultiDiscrete([3, 4], start=[1, 0]),
        [[1, 0], [2, 3], [3, 1], [1, 0], [1, 3]],
        [[0, 0], [2, 4], [3, 1], [4, 4], [1, 3]],
        4,
    ),
    "floats": (
        {"shape": (3,), "type": "Discrete", "dtype": "float32"},
        [0.0, 1.0, 2.0, 0.0, 1.0],
        [0.5, NAN, 2.0, INF, -1.0],
        4,
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_later_add_of_replay_tells_how_many_were_stored(name, place):
    space, good, bad, outside = SPACES[name]
    storage = ReplayStorage(spaces.Box(-9, 9, (1,)), space, place, storage_size=100, num_envs=ENVS, seed=0)
    obs, flags = torch.zeros(ENVS, 1, device=place), torch.zeros(ENVS, dtype=torch.bool, device=place)
    dtype = storage._fields.action.dtype
    good, bad = (torch.tensor(actions, dtype=dtype, device=place) for actions in (good, bad))
    fine, rewards = torch.zeros(ENVS, device=place), torch.tensor([NAN, 1.0, INF, -INF, 3e38], device=place)
    mask = torch.tensor([False, True, True, True, True], device=place)

    def add(rewards, actions, times=1, **options):
        for _ in range(times):
            storage.add(obs, actions, rewards, flags, flags, {}, obs, **options)
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    assert told(lambda: (add(rewards, good, mask=mask), add(fine, bad), add(fine, good, 9))) == [
        f"2 rewards that are not finite and {outside} actions outside of their space"
    ]
    assert len(storage) == 11 * ENVS - 1  # they are stored all the same


def test_the_option_counts_nothing(place):
    storage = ReplayStorage(
        spaces.Box(-9, 9, (1,)), spaces.Box(-1, 1, (1,)), place, storage_size=60, allow_nonfinite_rewards=True
    )
    assert not storage._ring_of().kernel.rules


def test_a_rollout_later_a_rollout_tells(place):
    space = spaces.MultiDiscrete([3, 4])
    storage = DecoupledRolloutStorage(spaces.Box(-9, 9, (1,)), space, place, num_steps=2, num_envs=ENVS)
    obs, zeros = torch.zeros(ENVS, 1, device=place), torch.zeros(ENVS, device=place)
    flags, still = torch.zeros(ENVS, dtype=torch.bool, device=place), torch.zeros(ENVS, 2, device=place)

    def rollout(rewards=zeros, actions=still):
        storage.add(obs, still, zeros, flags, flags, obs, zeros, zeros, zeros)
        storage.add(obs, actions, rewards, flags, flags, obs, zeros, zeros, zeros)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    actions = torch.tensor([[0.0, 3.0], [2.0, 4.0], [3.0, 0.0], [0.5, 0.0], [1.0, 1.0]], device=place)
    rewards = torch.tensor([0.0, NAN, 0.0, INF, 1.0], device=place)
    strided = torch.stack([rewards, zeros], 1)[:, 0]
    assert told(lambda: [rollout(rewards, actions), rollout(), rollout()]) == [
        "2 rewards that are not finite and 3 actions outside of their space"
    ]
    assert told(lambda: [rollout(strided), rollout(), rollout()]) == ["2 rewards that are not finite"]
