"""RolloutStorage as its users know it: feed-forward batches, and clients that write into attributes and batches."""

import copy
from collections import Counter
from itertools import chain, product

import pytest
import torch
import torch.multiprocessing
from combinations import each
from rollout_ids import (
    ACTIONS,
    ENVS,
    STEPS,
    assert_equal,
    build,
    fill,
    filled,
    ids_in,
    ids_of_step,
    observations_of,
    snapshot,
    tensors_of,
    transition_of,
)
from tensordict import TensorDict

from rlstore import RolloutStorage

# Most of these read other fields of batches whose returns and advantages nobody has written.
pytestmark = pytest.mark.filterwarnings("ignore:the returns and advantages:RuntimeWarning")

ROWS = ENVS * STEPS


# ---------------------------------------------------------------------------------------------------------------------
# Feed-forward batches


@pytest.mark.parametrize(("num_mini_batches", "num_epochs"), [(1, 1), (1, 3), (4, 2), (7, 1), (ROWS, 2)])
def test_batches_have_the_promised_number_size_and_rows(num_mini_batches, num_epochs):
    batches = list(filled().mini_batch_generator(num_mini_batches, num_epochs))
    assert len(batches) == num_mini_batches * num_epochs
    size = ROWS // num_mini_batches
    for epoch in range(num_epochs):
        rows = [ids_in(batch) for batch in batches[epoch * num_mini_batches : (epoch + 1) * num_mini_batches]]
        assert {len(part) for part in rows} == {size}
        drawn = [row for part in rows for row in part]
        assert len(set(drawn)) == len(drawn) == size * num_mini_batches
        assert set(drawn) <= set(range(ROWS))


def test_feed_forward_batches_carry_no_masks_or_states():
    batch = next(filled().mini_batch_generator(3))
    assert batch.masks is None
    assert batch.hidden_states == (None, None)
    assert batch.observations.batch_size[0] == 10
    assert batch.values.shape == batch.advantages.shape == batch.returns.shape == (10, 1)
    assert batch.old_actions_log_prob.shape == (10, 1)
    assert batch.actions.shape == (10, ACTIONS)
    assert isinstance(batch.old_distribution_params, tuple)


def test_eight_epochs_unless_told_otherwise():
    assert sum(1 for _ in filled().mini_batch_generator(2)) == 16


def test_one_permutation_is_reused_in_every_epoch_of_a_call_and_the_next_call_has_another():
    storage = filled()
    first, second = ([ids_in(batch) for batch in storage.mini_batch_generator(4, 3)] for _ in range(2))
    for drawn in (first, second):
        assert drawn[:4] == drawn[4:8] == drawn[8:]
        assert list(chain(*drawn[:4])) != sorted(chain(*drawn[:4]))
    assert first[:4] != second[:4]


def test_reshuffle_asks_for_a_new_permutation_every_epoch():
    drawn = [ids_in(batch) for batch in filled().mini_batch_generator(4, 3, reshuffle=True)]
    epochs = [list(chain(*drawn[i : i + 4])) for i in (0, 4, 8)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for epoch in epochs:
        assert len(set(epoch)) == 28


def narrow(steps, seed):
    """One environment and one number for each field, so that many draws take little time; values are row + 0.5."""
    example = TensorDict({"policy": torch.zeros(1, 1)}, batch_size=[1])
    storage = RolloutStorage("rl", 1, steps, example, [ACTIONS], "cpu", seed=seed)
    for step in range(steps):
        transition = transition_of(ids_of_step(step, envs=1))
        transition.observations = example
        storage.add_transition(transition)
    return storage


def rows_of(batch):
    return (batch.values.flatten() - 0.5).long().tolist()


def test_rows_that_do_not_fill_a_mini_batch_are_chosen_at_random():
    storage, left_out = narrow(7, seed=0), Counter()
    for _ in range(140):
        drawn = chain(*(rows_of(batch) for batch in storage.mini_batch_generator(2, 1)))
        left_out.update(set(range(7)) - set(drawn))
    # 20 expected for each row; 5 deviations of a binomial are 21.
    assert set(left_out) == set(range(7))
    assert max(left_out.values()) < 41


def test_every_row_is_as_likely_as_any_other_at_every_place():
    storage, places = narrow(5, seed=1), Counter()
    for _ in range(500):
        places.update(enumerate(rows_of(next(storage.mini_batch_generator(1, 1)))))
    # 100 expected for each of 25 pairs. Anderson's statistic has 16 degrees of freedom: above 58 once in 10**6 seeds.
    assert 4 / 5 * sum((places[pair] - 100) ** 2 / 100 for pair in product(range(5), range(5))) < 58


@pytest.mark.parametrize("written", [1, 2, 5])
def test_only_rows_written_since_clear_are_served(written):
    storage = filled()
    storage.clear()
    fill(storage, written, offset=700)
    batches = list(storage.mini_batch_generator(2, 2))
    assert len(batches) == 4
    drawn = [ids_in(batch) for batch in batches[:2]]
    assert [len(part) for part in drawn] == [written * ENVS // 2] * 2
    assert set(drawn[0] + drawn[1]) <= set(range(700, 700 + written * ENVS))


@pytest.mark.parametrize("width", [0, 1, 3, 7, 8, 9, 17, 31, 64, 65, 511, 513])
def test_rows_of_any_number_of_bytes_are_served_whole(width):
    envs, steps = 3, 4
    rows = (torch.arange(envs * steps * width) * 37 % 251).to(torch.uint8).view(steps, envs, width)
    example = TensorDict({"bytes": rows[0], "id": torch.zeros(envs)}, batch_size=[envs])
    storage = RolloutStorage("rl", envs, steps, example, [ACTIONS], "cpu")
    for step in range(steps):
        ids = ids_of_step(step, envs=envs)
        transition = transition_of(ids)
        transition.observations = TensorDict({"bytes": rows[step], "id": ids.squeeze(1)}, batch_size=[envs])
        storage.add_transition(transition)
    for batch in storage.mini_batch_generator(5, 2):
        expected = rows.flatten(0, 1)[batch.observations["id"].long()]
        assert torch.equal(batch.observations["bytes"], expected)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert torch.equal(batch.observations["bytes"], rows)


def test_batches_of_megabytes_stay_whole_in_every_epoch():
    envs, steps, width = 32, 64, 2048
    example = TensorDict({"wide": torch.zeros(envs, width)}, batch_size=[envs])
    storage = RolloutStorage("rl", envs, steps, example, [ACTIONS], "cpu", seed=0)
    for step in range(steps):
        ids = ids_of_step(step, envs=envs)
        transition = transition_of(ids)
        transition.observations = TensorDict({"wide": ids.expand(envs, width).contiguous()}, batch_size=[envs])
        storage.add_transition(transition)
    for count in (1, 6, 300):
        drawn = []
        for index, batch in enumerate(storage.mini_batch_generator(count, 2)):
            ids = batch.values - 0.5
            assert torch.equal(batch.observations["wide"], ids.expand(-1, width))
            drawn += ids.flatten().tolist()
            if index % 3 == 0:
                batch.observations["wide"].zero_()
        half = len(drawn) // 2
        assert drawn[:half] == drawn[half:]
        assert len(set(drawn)) == half == envs * steps // count * count


# ---------------------------------------------------------------------------------------------------------------------
# Clients that write into the attributes


def served(storage):
    """The rollout in time order, as the batches tell it."""
    batch = next(storage.mini_batch_generator(1, 1))
    order = (batch.observations["policy"][:, 0]).argsort()
    return {
        name: getattr(batch, name)[order]
        for name in ("actions", "values", "returns", "advantages", "old_actions_log_prob")
    }


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *each(
            ["actions", "values", "returns", "advantages", "actions_log_prob"],
            ["rebound", "in place", "strided", "expanded", "rebound in inference mode"],
        ),
        ("advantages", "rebound"),
        ("returns", "in place"),
    ],
)
def test_what_an_attribute_holds_when_the_generator_runs_is_served(name, how):
    storage = filled()
    list(storage.mini_batch_generator(2, 2))
    shape = getattr(storage, name).shape
    new = torch.arange(getattr(storage, name).numel(), dtype=torch.float32).view(shape) + 9000.0
    if how == "rebound":
        setattr(storage, name, new)
    elif how == "in place":
        getattr(storage, name)[2:4] = new[2:4]
        new = getattr(storage, name).clone()
    elif how == "strided":
        setattr(storage, name, new.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    elif how == "expanded":
        new = new[:, :1].expand(shape)
        setattr(storage, name, new)
    else:
        with torch.inference_mode():
            setattr(storage, name, new + 0.0)
    key = "old_actions_log_prob" if name == "actions_log_prob" else name
    for _ in range(2):
        assert torch.equal(served(storage)[key], new.flatten(0, 1))
    assert torch.equal(getattr(storage, name), new)


def test_a_generator_serves_what_is_there_when_it_starts_to_run():
    storage = filled()
    batches = storage.mini_batch_generator(1, 1)
    storage.advantages = torch.full((STEPS, ENVS, 1), 3.0)
    assert torch.equal(next(batches).advantages, torch.full((ROWS, 1), 3.0))


def test_observations_and_distribution_params_can_be_replaced():
    storage = filled()
    storage.observations = observations_of(torch.stack([ids_of_step(step, 800) for step in range(STEPS)]))
    storage.distribution_params = tuple(torch.full_like(p, 4.0) for p in storage.distribution_params)
    batch = next(storage.mini_batch_generator(1, 1))
    assert sorted(batch.observations["policy"][:, 0].tolist()) == list(range(800, 800 + ROWS))
    assert_equal(batch.observations, observations_of(batch.observations["policy"][:, :1]))
    assert all(torch.equal(p, torch.full_like(p, 4.0)) for p in batch.old_distribution_params)
    storage.observations["policy"] = torch.full((STEPS, ENVS, 3), 6.0)
    assert torch.equal(next(storage.mini_batch_generator(1, 1)).observations["policy"], torch.full((ROWS, 3), 6.0))


def test_the_next_rollout_is_written_into_a_rebound_attribute():
    storage = filled()
    for name in ("actions", "values", "actions_log_prob", "rewards", "returns", "advantages"):
        setattr(storage, name, torch.zeros_like(getattr(storage, name)))
    storage.dones = torch.zeros_like(storage.dones)
    storage.clear()
    fill(storage, offset=300)
    assert_equal(snapshot(storage), snapshot(fill(build(), offset=300)))
    assert sorted(ids_in(next(storage.mini_batch_generator(1, 1)))) == list(range(300, 300 + ROWS))


def move_to_shared_memory(storage):
    storage.rewards.share_memory_()
    storage.observations.share_memory_()


def send_through_a_queue(storage):
    torch.multiprocessing.get_context("spawn").SimpleQueue().put(storage.rewards)


def swap_the_data(storage):
    storage.rewards.data = storage.rewards.data.clone()


@pytest.mark.parametrize("move", [move_to_shared_memory, send_through_a_queue, swap_the_data])
def test_the_next_steps_are_written_where_the_block_is_now(move):
    storage = fill(build())
    move(storage)
    storage.clear()
    fill(storage, offset=500)
    assert_equal(snapshot(storage), snapshot(fill(build(), offset=500)))


# ---------------------------------------------------------------------------------------------------------------------
# Clients that keep what they were given


def test_a_distillation_batch_changed_in_place_is_not_seen_by_the_next_epoch():
    storage = filled("distillation")
    before = snapshot(storage)
    expected = copy.deepcopy(list(storage.generator()))
    for batch in list(storage.generator()):
        for tensor in tensors_of(batch).values():
            tensor.zero_()
    assert_equal(list(storage.generator()), expected)
    assert_equal(snapshot(storage), before)


def test_two_generators_side_by_side_do_not_disturb_each_other():
    storage, untouched = filled(seed=3), filled(seed=3)
    pairs = zip(storage.mini_batch_generator(3, 2), storage.mini_batch_generator(3, 2), strict=True)
    mixed = [[ids_in(batch) for batch in pair] for pair in pairs]
    assert sorted(row for pair in mixed[:3] for row in pair[0]) == list(range(ROWS))
    assert sorted(row for pair in mixed[:3] for row in pair[1]) == list(range(ROWS))
    assert [pair[0] for pair in mixed] == [ids_in(batch) for batch in untouched.mini_batch_generator(3, 2)]


def test_a_batch_outlives_the_rollout_it_came_from():
    storage = filled()
    kept = list(storage.mini_batch_generator(2, 1))
    drawn = [ids_in(batch) for batch in kept]
    storage.clear()
    fill(storage, offset=900)
    list(storage.mini_batch_generator(2, 1))
    assert [ids_in(batch) for batch in kept] == drawn


def test_observations_have_the_device_of_the_storage():
    storage = filled()
    place = storage.rewards.device
    assert storage.observations.device == place
    for batch in (*storage.mini_batch_generator(2, 1), *storage.recurrent_mini_batch_generator(2, 1)):
        assert batch.observations.device == batch.actions.device == place
    nested = TensorDict({"a": torch.zeros(2, 1), "b": {"c": torch.zeros(2, 3)}}, batch_size=[2])
    storage = RolloutStorage("rl", 2, 1, nested, [1])
    assert storage.observations.device == storage.observations["b"].device == torch.device("cpu")
    storage.observations["a"] = torch.ones(1, 2, 1)  # which is what the storage holds then
    assert copy.deepcopy(storage).observations["a"].flatten().tolist() == [1, 1]
