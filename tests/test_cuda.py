"""On CUDA, in plain torch, the rollouts give what they give on the CPU."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlstore import DecoupledRolloutStorage, RolloutStorage

STEPS, ENVS = 6, 10

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def rollout(device: str) -> RolloutStorage:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device)

    def flags(share: float) -> torch.Tensor:
        return (torch.rand(ENVS, generator=random) < share).to(device)

    def observations() -> TensorDict:
        image = torch.randint(255, (ENVS, 2, 2), generator=random).to(device, torch.uint8)
        return TensorDict({"policy": normal(ENVS, 3), "image": image}, batch_size=[ENVS])

    storage = RolloutStorage("rl", ENVS, STEPS, observations(), [2], device, seed=1)
    with torch.inference_mode():
        for _ in range(STEPS):
            step = RolloutStorage.Transition()
            step.observations, step.actions, step.rewards = observations(), normal(ENVS, 2), normal(ENVS)
            step.values, step.actions_log_prob, step.dones = normal(ENVS, 1), normal(ENVS), flags(0.3).long()
            step.distribution_params = (normal(ENVS, 2), normal(ENVS, 2))
            step.hidden_states = ((normal(2, ENVS, 4), normal(2, ENVS, 4)), normal(1, ENVS, 4))
            step.truncated, step.final_values = flags(0.2), normal(ENVS)
            storage.add_transition(step)
    storage.compute_returns(normal(ENVS, 1), 0.99, 0.95)
    return storage


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


def by_first_column(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows in an order that does not depend on the permutation, which is another one on each device."""
    joined = torch.cat(rows).cpu()
    return joined[joined[:, 0].argsort()]


def test_returns_and_flat_batches_agree():
    on_cuda, on_cpu = rollout("cuda"), rollout("cpu")
    assert_close(on_cuda.returns, on_cpu.returns)
    assert_close(on_cuda.advantages, on_cpu.advantages)

    def epoch(storage: RolloutStorage) -> torch.Tensor:
        batches = storage.mini_batch_generator(3, 1)
        return by_first_column(
            [torch.cat([b.observations["policy"], b.actions, b.returns, b.old_actions_log_prob], -1) for b in batches]
        )

    assert_close(epoch(on_cuda), epoch(on_cpu))


def test_recurrent_batches_agree():
    pairs = zip(
        rollout("cuda").recurrent_mini_batch_generator(3, 2),
        rollout("cpu").recurrent_mini_batch_generator(3, 2),
        strict=True,
    )
    for ours, expected in pairs:
        assert ours.masks.is_cuda
        assert_close(ours.masks, expected.masks)
        assert_close(ours.observations["policy"], expected.observations["policy"])
        assert_close(ours.observations["image"], expected.observations["image"])
        assert_close(ours.hidden_states[0][1], expected.hidden_states[0][1])
        assert_close(ours.hidden_states[1], expected.hidden_states[1])
        assert_close(ours.advantages, expected.advantages)


def test_decoupled_rollouts_agree():
    def sampled(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        random = np.random.default_rng(0)
        space = spaces.Box(-1, 1, (3,))
        storage = DecoupledRolloutStorage(space, spaces.Discrete(4), device, STEPS, ENVS, seed=0)
        for _ in range(STEPS):
            obs, next_obs = random.normal(size=(2, ENVS, 3)).astype(np.float32)
            ends = random.random((2, ENVS)) < 0.2
            rewards, log_probs, values, adv_preds, final_values = random.normal(size=(5, ENVS))
            actions = random.integers(4, size=ENVS)
            storage.add(obs, actions, rewards, *ends, next_obs, log_probs, values, adv_preds, final_values)
        storage.compute_returns_and_advantages(torch.from_numpy(random.normal(size=ENVS)))
        batches = storage.sample(4)
        rows = [torch.cat([b.obs, b.actions, b.values, b.returns, b.terminateds, b.advantages], -1) for b in batches]
        return storage.returns, by_first_column(rows)

    for ours, expected in zip(sampled("cuda"), sampled("cpu"), strict=True):
        assert_close(ours, expected)
