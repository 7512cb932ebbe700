"""DecoupledRolloutStorage: the mini-batches of sample(), update() and the way from one rollout to the next."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from decoupled_ids import BLOCKS, assert_same, fill, make_step, make_storage, obs_of, snapshot
from gymnasium import spaces

# Most of these read other fields of batches whose returns and advantages nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages:RuntimeWarning")

ORDER = ("obs", "actions", "values", "adv_preds", "returns", "terminateds", "truncateds", "old_log_probs", "advantages")


def served_ids(batches):
    return [batch.actions.flatten().int().tolist() for batch in batches]


# ------------------------------------------------------------------------------------------------- sample


def test_a_batch_is_a_named_tuple_in_the_documented_order():
    storage = make_storage()
    fill(storage)
    storage.compute_returns_and_advantages(torch.zeros(2))
    (batch,) = storage.sample(1)
    assert isinstance(batch, tuple)
    assert batch._fields == ORDER
    obs, actions, *others = batch
    assert obs.shape == (6, 2)
    assert actions.shape == (6, 1)
    assert {tuple(tensor.shape) for tensor in others} == {(6, 1)}
    assert {tensor.dtype for tensor in batch} == {torch.float32}
    assert not any(tensor.requires_grad for tensor in batch)


@pytest.mark.parametrize("space", [spaces.Discrete(100_000), spaces.Box(-1e9, 1e9, (3,))])
@pytest.mark.parametrize(
    ("steps", "envs", "count"), [(3, 2, 1), (3, 2, 3), (4, 3, 5), (5, 4, 20), (7, 3, 2), (16, 4, 8)]
)
def test_every_served_value_belongs_to_the_row_it_came_with(space, steps, envs, count):
    box = isinstance(space, spaces.Box)
    storage = make_storage(steps, envs, space, discount=0.5, gae_lambda=0.5)
    flags = {t: ((t % envs,), ((t + 1) % envs,)) for t in range(steps)}
    for t in range(steps):
        given = make_step(t, envs, *flags[t])
        if box:
            given["actions"] = torch.stack([given["actions"], given["actions"] + 0.25, -given["actions"]], -1)
        storage.add(**given)
    storage.compute_returns_and_advantages(torch.zeros(envs))
    for batch in storage.sample(count):
        for i, action in enumerate(batch.actions.tolist()):
            number = int(action[0])
            assert action == ([number, number + 0.25, -number] if box else [number])
            t, env = divmod(number - 1, envs)
            assert batch.obs[i].tolist() == [10 * number, 10 * number + 1]
            assert batch.values[i].item() == number + 0.5
            assert batch.adv_preds[i].item() == number + 0.75
            assert batch.old_log_probs[i].item() == -number
            assert batch.returns[i].item() == storage.returns[t, env].item()
            assert batch.advantages[i].item() == storage.advantages[t, env].item()
            before = flags[t - 1] if t > 0 else ((), ())
            assert (batch.terminateds[i].item(), batch.truncateds[i].item()) == (env in before[0], env in before[1])


@pytest.mark.parametrize(
    ("steps", "envs", "count", "size", "batches"),
    [
        (3, 2, 1, 6, 1),
        (3, 2, 2, 3, 2),
        (3, 2, 4, 1, 6),  # 6 // 4 = 1 row each, and 6 of them
        (5, 2, 4, 2, 5),
        (5, 2, 3, 3, 3),  # one row is left out
        (4, 4, 8, 2, 8),
        (2, 5, 10, 1, 10),
    ],
)
def test_the_size_and_the_number_of_batches(steps, envs, count, size, batches):
    storage = make_storage(steps, envs)
    fill(storage)
    ids = served_ids(storage.sample(count))
    assert [len(batch) for batch in ids] == [size] * batches
    flat = [number for batch in ids for number in batch]
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(range(1, steps * envs + 1))


def test_the_default_is_8_mini_batches():
    storage = make_storage(8, 2)
    fill(storage)
    assert [len(batch) for batch in served_ids(storage.sample())] == [2] * 8


def test_each_call_draws_a_new_order_and_any_row_may_be_left_out():
    storage = make_storage(5, 2, seed=3)
    fill(storage)
    orders, left_out = set(), set()
    for _ in range(60):
        flat = [number for batch in served_ids(storage.sample(3)) for number in batch]
        orders.add(tuple(flat))
        left_out |= set(range(1, 11)) - set(flat)
    assert len(orders) > 50
    assert left_out == set(range(1, 11))


def test_batches_are_copies():
    storage = make_storage(3, 2)
    fill(storage)
    before = snapshot(storage)[0]
    for batch in storage.sample(3):
        for tensor in batch:
            tensor.fill_(-1)
    after = snapshot(storage)[0]
    for name, tensor in before.items():
        assert torch.equal(after[name].nan_to_num(), tensor.nan_to_num())
    for batch in storage.sample(3):
        assert (batch.actions > 0).all()


def test_what_the_blocks_hold_is_served_also_without_computing():
    storage = make_storage(2, 2)
    fill(storage)
    (batch,) = storage.sample(1)
    assert batch.returns.isnan().all()
    storage.returns[1, 0] = 7
    storage.advantages[0, 1] = 8
    (batch,) = storage.sample(1)
    assert batch.returns[batch.actions == 3].tolist() == [7]
    assert batch.advantages[batch.actions == 2].tolist() == [8]


# ------------------------------------------------------------------------------------------------- seeds and copies


def test_the_same_seed_draws_the_same_rows():
    first, second, third = make_storage(seed=5), make_storage(seed=5), make_storage(seed=6)
    for storage in (first, second, third):
        fill(storage)
    drawn = [[served_ids(storage.sample(3)) for _ in range(5)] for storage in (first, second, third)]
    assert drawn[0] == drawn[1] != drawn[2]
    first.seed(5)
    assert [served_ids(first.sample(3)) for _ in range(5)] == drawn[1]


def test_without_a_seed_torch_s_own_seed_decides():
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        storage = make_storage()
        fill(storage)
        drawn.append([served_ids(storage.sample(3)) for _ in range(5)])
    assert drawn[0] == drawn[1] != drawn[2]


def test_sampling_leaves_torch_s_own_generator_alone():
    storage = make_storage(seed=1)
    fill(storage)
    state = torch.get_rng_state()
    list(storage.sample(2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))])
@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_a_copy_goes_on_like_the_original_and_shares_nothing(twin_of, rows):
    storage = make_storage(3, 2, seed=9)
    for step in range(rows):
        storage.add(**make_step(step, 2, (1,), (0,), final_values=[5.0, 6.0]))
    twin = twin_of(storage)
    assert_same(snapshot(storage), snapshot(twin))
    for step in range(rows, 3):
        for one in (storage, twin):
            one.add(**make_step(step))
    for one in (storage, twin):
        one.compute_returns_and_advantages(torch.ones(2))
    assert_same(snapshot(storage), snapshot(twin))
    assert served_ids(storage.sample(3)) == served_ids(twin.sample(3))
    for name in ("obs", *BLOCKS):
        getattr(twin, name).fill_(4321)
        assert not (getattr(storage, name) == 4321).any()


# ------------------------------------------------------------------------------------------------- the next rollout


def test_update_copies_the_last_flags_to_row_0():
    storage = make_storage(2, 3)
    storage.add(**make_step(0, 3, (1,), (0, 1)))
    storage.add(**make_step(1, 3, (0,), (2,)))
    storage.update()
    assert storage.terminateds.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert storage.truncateds.tolist() == [[0, 0, 1], [1, 1, 0], [0, 0, 1]]
    storage.update()
    assert storage.terminateds[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("remember_update", [True, False])
def test_the_add_after_the_last_begins_a_new_rollout_with_the_flags_carried_over(remember_update):
    storage = make_storage(2, 2)
    for rollout in range(4):
        first = 2 * rollout
        storage.add(**make_step(first, 2, (rollout % 2,)))
        assert len(storage) == 2
        storage.add(**make_step(first + 1, 2, (), (1 - rollout % 2,)))
        assert len(storage) == 4
        storage.compute_returns_and_advantages(torch.zeros(2))
        before = [[0, 0], [0, 1], [1, 0], [0, 1]][rollout]  # the truncations after the rollout before
        (batch,) = storage.sample(1)
        expected = {2 * first + 1: before[0], 2 * first + 2: before[1], 2 * first + 3: 0, 2 * first + 4: 0}
        assert dict(zip(batch.actions.flatten().tolist(), batch.truncateds.flatten().tolist(), strict=True)) == expected
        ended = {2 * first + 1: 0, 2 * first + 2: 0, 2 * first + 3: rollout % 2 == 0, 2 * first + 4: rollout % 2 == 1}
        assert dict(zip(batch.actions.flatten().tolist(), batch.terminateds.flatten().tolist(), strict=True)) == ended
        if remember_update:
            storage.update()


def test_a_new_rollout_overwrites_the_old_one():
    storage = make_storage(3, 2)
    fill(storage)
    fill(storage, first=10)
    ids = torch.arange(21, 27, dtype=torch.float32).view(3, 2)
    assert torch.equal(storage.actions, ids)
    assert torch.equal(storage.obs[:3], obs_of(ids))
    assert torch.equal(storage.obs[3], obs_of(ids[2] + 2))


def test_final_values_of_an_old_rollout_are_not_read_in_the_next():
    storage = make_storage(1, 1, discount=0.5, gae_lambda=0.5)
    storage.add(**make_step(0, 1, (), (0,), rewards=[1.0], values=[4.0], final_values=[10.0]))
    storage.compute_returns_and_advantages([0.0])
    assert storage.returns.tolist() == [[6]]
    storage.add(**make_step(1, 1, (), (0,), rewards=[1.0], values=[4.0]))
    storage.compute_returns_and_advantages([0.0])
    assert storage.returns.tolist() == [[4]]
