"""DecoupledRolloutStorage: nested observations, images, and blocks that a caller writes into or replaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoupled_ids import BLOCKS, fill, ids_of, leaves, make_step, make_storage, obs_of
from gymnasium import spaces

# Most of these read other fields of batches whose returns and advantages nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages:RuntimeWarning")

BOX = spaces.Box(-1.0, 1.0, (2,))

# ------------------------------------------------------------------------------------------------- nests and images


NEST = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (1, 2, 2), np.uint8),
        "inner": spaces.Dict({"speed": spaces.Box(-1e9, 1e9, (2,)), "gear": spaces.Discrete(99)}),
        "pair": spaces.Tuple([spaces.Box(-1e9, 1e9, (1,), np.float64), spaces.MultiBinary(2)]),
    }
)


def nest_of(step, num_envs=2):
    ids = ids_of(step, num_envs)
    return {
        "image": ids.to(torch.uint8).view(-1, 1, 1, 1) + torch.tensor([[[100, 110], [120, 130]]], dtype=torch.uint8),
        "inner": {"speed": obs_of(ids), "gear": ids.long()},
        "pair": (ids.double().unsqueeze(-1) / 3, torch.stack([ids % 2, ids % 3 == 0], -1).to(torch.int8)),
    }


def test_nested_observations_are_kept_and_served_leaf_by_leaf():
    storage = make_storage(2, 2, observation_space=NEST)
    for step in range(2):
        storage.add(**make_step(step, obs=nest_of(step), next_obs=nest_of(step + 1)))
    expected = {
        path: torch.stack([dict(leaves(nest_of(step)))[path] for step in range(3)]) for path, _ in leaves(nest_of(0))
    }
    held = dict(leaves(storage.obs))
    assert held.keys() == expected.keys()
    for path, leaf in held.items():
        assert leaf.dtype is expected[path].dtype
        assert torch.equal(leaf, expected[path])
    for batch in storage.sample(2):
        rows = (batch.values.squeeze(-1) - 1.5).long()
        served = dict(leaves(batch.obs))
        assert served.keys() == expected.keys()
        for path, leaf in served.items():
            assert leaf.dtype is torch.float32
            assert torch.equal(leaf, expected[path][:2].flatten(0, 1)[rows].float())


def test_the_order_of_keys_in_an_observation_does_not_matter():
    space = spaces.Dict({"a": BOX, "b": BOX})
    storage = make_storage(1, 2, observation_space=space)
    a, b = torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[5.0, 6], [7, 8]])
    storage.add(**make_step(0, obs={"b": b, "a": a}, next_obs={"a": b, "b": a}))
    assert torch.equal(storage.obs["a"], torch.stack([a, b]))
    assert torch.equal(storage.obs["b"], torch.stack([b, a]))


def test_bytes_stay_bytes_in_memory_and_are_served_as_float32():
    space = spaces.Box(0, 255, (2,), np.uint8)
    storage = make_storage(2, 2, observation_space=space)
    for step in range(2):
        ids = ids_of(step, 2)
        pixels = torch.stack([ids, 255 - ids], -1)
        storage.add(**make_step(step, obs=pixels.to(torch.uint8), next_obs=pixels.to(torch.uint8)))
    assert storage.obs.dtype is torch.uint8
    assert storage.obs.tolist() == [[[1, 254], [2, 253]], [[3, 252], [4, 251]], [[3, 252], [4, 251]]]
    (batch,) = storage.sample(1)
    assert batch.obs.dtype is torch.float32
    assert sorted(batch.obs.tolist()) == [[1, 254], [2, 253], [3, 252], [4, 251]]


def test_integers_that_fit_the_dtype_are_taken():
    storage = make_storage(1, 2, observation_space=spaces.Box(0, 255, (2,), np.uint8))
    pixels = torch.tensor([[0, 255], [7, 8]])
    storage.add(**make_step(0, obs=pixels, next_obs=pixels.numpy()))
    assert storage.obs.tolist() == [[[0, 255], [7, 8]]] * 2


# ------------------------------------------------------------------------------------------------- writing into blocks


def test_blocks_can_be_changed_in_place():
    storage = make_storage(2, 2, discount=0.5, gae_lambda=0.5)
    fill(storage)
    before = storage.rewards.clone()
    storage.rewards += torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(storage.rewards, before + torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    storage.values[1, 0] = -5
    storage.obs[0] += 1000
    storage.terminateds[2] = 1
    storage.compute_returns_and_advantages(torch.full((2,), 1e6))
    # Step 1 ended in both environments, so the return there is the reward alone: 3.25 + 3 and 4.25 + 4.
    assert storage.returns[1].tolist() == [6.25, 8.25]
    (batch,) = storage.sample(1)
    assert sorted(batch.obs[:, 0].tolist()) == [30, 40, 1010, 1020]
    assert sorted(batch.values.flatten().tolist()) == [-5, 1.5, 2.5, 4.5]


@pytest.mark.parametrize("name", BLOCKS)
def test_another_tensor_can_take_the_place_of_a_block(name):
    storage = make_storage(2, 2)
    fill(storage)
    block = torch.arange(getattr(storage, name).numel(), dtype=torch.float32).view_as(getattr(storage, name)) % 2
    setattr(storage, name, block)
    assert torch.equal(getattr(storage, name), block)
    if name != "rewards":
        served = {"log_probs": "old_log_probs"}.get(name, name)
        (batch,) = storage.sample(1)
        assert sorted(getattr(batch, served).flatten().tolist()) == sorted(block[:2].flatten().tolist())


def test_a_block_of_another_shape_is_refused():
    storage = make_storage(2, 2)
    fill(storage)
    before = storage.rewards.clone()
    with pytest.raises(ValueError, match="rewards"):
        storage.rewards = torch.zeros(2, 3)
    assert torch.equal(storage.rewards, before)
