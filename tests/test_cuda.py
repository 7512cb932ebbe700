"""On CUDA the storages give what they give on the CPU."""

import multiprocessing
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from replay_play import STORAGES, flat, make, play
from tensordict import TensorDict

from rlstore import (
    DecoupledRolloutStorage,
    DistributedStorage,
    DoesNotFitError,
    ReplayStorage,
    RolloutStorage,
    Storage,
)
from rlstore.engine.memory.backing import Backing

STEPS, ENVS = 6, 10

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),  # that there is such a mode
]


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


def from_spaces(device: str, mode: str, flags_on: str) -> RolloutStorage:
    """Two rollouts one after the other; the second begins with reset steps."""
    random = np.random.default_rng(2)
    options = {"autoreset": mode, "critic": (lambda final: final[:, 0]) if mode == "SameStep" else None, "seed": 0}
    storage = RolloutStorage.from_spaces(spaces.Box(-9, 9, (3,)), spaces.Discrete(4), ENVS, STEPS, device, **options)
    due = np.zeros(ENVS, bool)
    for t in range(2 * STEPS):
        if t == STEPS:
            storage.clear()
        ends = (random.random((2, ENVS)) < 0.3) & ~due
        rewards = np.where(due, 0, random.normal(size=ENVS))
        due = ends.any(0) if mode == "NextStep" else due
        storage.add(
            observations=random.normal(size=(ENVS, 3)).astype(np.float32),
            actions=random.integers(4, size=ENVS),
            rewards=torch.from_numpy(rewards).to(device),
            terminated=torch.from_numpy(ends[0]).to(flags_on),
            truncated=torch.from_numpy(ends[1]).to(flags_on),
            values=torch.from_numpy(random.normal(size=ENVS)).to(device),
            log_probs=torch.from_numpy(random.normal(size=ENVS)).to(device),
            infos={"final_obs": random.normal(size=(ENVS, 3)).astype(np.float32)} if mode == "SameStep" else {},
            hidden_states=(torch.from_numpy(random.normal(size=(1, ENVS, 4))).to(device), None),
        )
    storage.compute_returns(torch.from_numpy(random.normal(size=ENVS)), 0.9, 0.8)
    return storage


@pytest.mark.parametrize("flags_on", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_rollouts_from_spaces_agree(mode, flags_on):
    on_cuda, on_cpu = from_spaces("cuda", mode, flags_on), from_spaces("cpu", mode, "cpu")
    assert_close(on_cuda.reset_steps, on_cpu.reset_steps)
    assert on_cpu.reset_steps.any() == (mode == "NextStep")
    assert_close(on_cuda.returns, on_cpu.returns)
    assert_close(on_cuda.advantages, on_cpu.advantages)
    rows = [
        [
            torch.cat([b.observations, b.actions[:, None], b.advantages[:, None]], -1)
            for b in s.mini_batch_generator(1, 1)
        ]
        for s in (on_cuda, on_cpu)
    ]
    assert_close(by_first_column(rows[0]), by_first_column(rows[1]))
    pairs = zip(on_cuda.recurrent_mini_batch_generator(2, 1), on_cpu.recurrent_mini_batch_generator(2, 1), strict=True)
    for ours, expected in pairs:
        for name in ("masks", "observations", "step_masks", "advantages"):
            assert_close(getattr(ours, name), getattr(expected, name))
        assert_close(ours.hidden_states[0], expected.hidden_states[0])


def test_reset_steps_that_the_host_knows_are_left_out_without_a_wait():
    storage = from_spaces("cuda", "NextStep", "cpu")
    list(storage.mini_batch_generator(2, 1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        storage.compute_returns(torch.zeros(ENVS, device="cuda"), 0.9, 0.8)
        list(storage.mini_batch_generator(2, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_listing_of_episodes_waits_for_the_device_once():
    storages = [from_spaces("cuda", "SameStep", "cpu"), from_spaces("cuda", "NextStep", "cpu"), make("uniform", "cuda")]
    play("uniform", storages[-1])
    for storage in storages:
        storage.episodes()  # kernels are compiled
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                storage.episodes()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert len([one for one in waits if "synchronizing" in str(one.message)]) == 1


def test_rollouts_show_the_same_episodes():
    on_cuda, on_cpu = (from_spaces(device, "NextStep", "cpu") for device in ("cuda", "cpu"))
    for ours, expected in zip(on_cuda.episodes()._listing, on_cpu.episodes()._listing, strict=True):
        assert_close(ours, expected)
    rows = on_cpu.held_rows()
    assert torch.equal(on_cuda.held_rows(), rows)
    for name, expected in on_cpu[rows].items():
        for ours, leaf in zip(flat(on_cuda[rows][name]), flat(expected), strict=True):
            assert_close(ours, leaf)


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


def test_a_saved_rollout_goes_on_exactly_and_can_change_its_device(tmp_path):
    storage = rollout("cuda")
    list(storage.mini_batch_generator(2, 1))
    storage.save(tmp_path)
    same, moved = Storage.load(tmp_path), Storage.load(tmp_path, device="cpu")
    assert (same.rewards.device.type, moved.rewards.device.type) == ("cuda", "cpu")
    for name, block in storage._ring.blocks.items():
        for loaded in (same, moved):
            torch.testing.assert_close(loaded._ring.blocks[name].cpu(), block.cpu(), rtol=0, atol=0, equal_nan=True)
    for one, other in zip(storage.mini_batch_generator(2, 1), same.mini_batch_generator(2, 1), strict=True):
        assert torch.equal(one.values, other.values)
    moved.save(tmp_path)
    back = Storage.load(tmp_path, device="cuda")
    assert torch.equal(back.rewards, storage.rewards)


def test_blocks_on_the_device_are_zero_and_what_does_not_fit_is_refused():
    backing = Backing("S", "ram", torch.device("cuda"))
    block = backing.zeros("obs", (3, 2), torch.float32)
    block[0] = 1
    assert backing.extend("obs", block, 4).tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    free, _ = torch.cuda.mem_get_info()
    backing.require(free // 2, "half")
    with pytest.raises(DoesNotFitError, match="free on cuda"):
        backing.require(1 << 50, "a petabyte")
    with pytest.raises(DoesNotFitError, match="which the system does not provide"):
        backing.zeros("obs", (1 << 50,), torch.uint8)


@pytest.mark.parametrize("name", STORAGES)
def test_replay_batches_agree(name):
    """The same rows, drawn under the same seed, and the same values of them."""
    storage = make(name, "cuda")
    mine, truth = play(name, storage), play(name, make(name, "cpu"))
    assert len(mine) > 30
    for ours, expected in zip(mine, truth, strict=True):
        for tensor, other in zip(ours, expected, strict=True):
            assert tensor.dtype == other.dtype
            assert_close(tensor, other)
    assert all(tensor.is_cuda for tensor in storage.sample() if isinstance(tensor, torch.Tensor))
    kept_on = "cpu" if name == "in RAM, prepared ahead" else "cuda"
    assert {block.device.type for block in storage._ring_of().blocks.values()} == {kept_on}


def test_replay_takes_what_is_on_the_device_and_what_is_not():
    def held(device: str, given_on: str) -> list[torch.Tensor]:
        storage, random = make("uniform", device), torch.Generator().manual_seed(0)
        observations = torch.randn(3, 2, generator=random).to(given_on)
        for step in range(30):
            following = torch.randn(3, 2, generator=random).to(given_on)
            actions, ends = torch.randint(5, (3,), generator=random).to(given_on), torch.tensor([step % 7 == 6] * 3)
            storage.add(observations, actions, following.sum(1), ends.to(given_on), ends & False, {}, following)
            observations = following
        return flat(storage.get_all_buffer_data())

    truth = held("cpu", "cpu")
    for given_on in ("cuda", "cpu"):
        for ours, expected in zip(held("cuda", given_on), truth, strict=True):
            assert_close(ours, expected)


def test_rollouts_of_actors_are_served_on_the_device():
    storage = DistributedStorage(
        spaces.Box(0, 255, (3, 8, 8), np.uint8), spaces.Discrete(4), "cuda", 5, 8, 2, state_shapes=((1, 4),)
    )
    actor, learner = storage.actor(), storage.learner(prefetch=2)
    for number in range(6):
        with actor.rollout(version=number) as written:
            written["obs"][:], written["reward"][:] = number, torch.arange(6.0) + number
            written.set_states([torch.full((1, 1, 4), float(number))])
    for first in (0, 2, 4):
        batch = next(learner)
        assert batch["obs"].device.type == batch.states[0].device.type == "cuda"
        assert batch.versions.tolist() == [first, first + 1]
        assert batch["obs"][-1, :, 0, 0, 0].tolist() == [first, first + 1]
        assert torch.equal(batch["reward"].cpu(), torch.arange(6.0)[:, None] + batch.versions)
        assert batch.states[0][0, :, 0].tolist() == [first, first + 1]
    learner.close()
    storage.close()


def act(writer) -> None:
    for step in range(50):
        seen, shown = np.full(3, step, np.float32), np.full(3, step + 1, np.float32)
        writer.add(seen, step, float(step), False, False, {}, shown)
    writer.close()


def test_what_another_process_adds_is_served_on_the_device():
    storage = ReplayStorage(
        spaces.Box(-np.inf, np.inf, (3,)), spaces.Discrete(50), "cuda", 100, 1, 32, memory="shared", seed=0
    )
    process = multiprocessing.get_context("spawn").Process(target=act, args=(storage.writer(),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    batch = storage.sample()
    assert batch.observations.device.type == "cuda"
    assert len(storage) == 50
    assert torch.equal(batch.observations[:, 0], batch.actions.float())
    assert torch.equal(batch.next_observations[:, 2], batch.actions.float() + 1)
    assert torch.equal(batch.rewards[:, 0], batch.actions.float())
