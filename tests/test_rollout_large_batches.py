"""RolloutStorage with mini-batches on both sides of the size up to which they are gathered together."""

import copy
from itertools import chain

import pytest
import torch
from rollout_ids import assert_equal, build, fill, ids_in, ids_of_step, observations_of, snapshot, tensors_of

from rlstore.engine.batches import gather

ENVS, STEPS = 800, 8
# A row is 83 bytes: half of the rollout is a little over 256 KiB, a quarter is not.
COUNTS = {"large": 2, "small": 4}
EPOCHS = 3


@pytest.fixture(params=COUNTS)
def size(request) -> str:
    return request.param


@pytest.fixture
def count(size) -> int:
    return COUNTS[size]


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of rows of each gather that is made."""
    made: list[int] = []
    real = gather.gather_rows

    def counted(sources, rows, *others):
        made.append(len(rows))
        return real(sources, rows, *others)

    monkeypatch.setattr(gather, "gather_rows", counted)
    return made


def rollout(offset=0):
    return fill(build(envs=ENVS, steps=STEPS, seed=3), offset=offset, dones=None)


def add_one(tensor):
    tensor.add_(1) if tensor.dtype != torch.bool else tensor.logical_not_()


def write_a_slice(tensor):
    tensor[:1] = 0


def write_a_view(tensor):
    tensor.detach().flatten()[3:].zero_()


def write_in_inference_mode(tensor):
    with torch.inference_mode():
        add_one(tensor)


CHANGES = [add_one, write_a_slice, write_a_view, write_in_inference_mode]


def test_the_two_sizes_are_on_either_side_of_the_bound(size, count, calls):
    """Large batches are gathered one by one."""
    for batch in rollout().mini_batch_generator(count, EPOCHS):
        assert sum(tensor.nbytes for tensor in tensors_of(batch).values()) == 83 * ENVS * STEPS // count
        del batch
    assert calls == ([ENVS * STEPS // 2] * 2 * EPOCHS if size == "large" else [ENVS * STEPS] * EPOCHS)


def test_every_epoch_serves_the_same_whole_batches(count):
    drawn = [ids_in(batch) for batch in rollout().mini_batch_generator(count, EPOCHS)]
    assert drawn[:count] == drawn[count : 2 * count] == drawn[2 * count :]
    assert sorted(chain(*drawn[:count])) == list(range(ENVS * STEPS))


def test_reshuffled_epochs_serve_batches_of_their_own(size, count, calls):
    storage = rollout()
    drawn = [ids_in(batch) for batch in storage.mini_batch_generator(count, EPOCHS, reshuffle=True)]
    assert len(calls) == (2 * EPOCHS if size == "large" else EPOCHS)
    epochs = [list(chain(*drawn[start : start + count])) for start in range(0, EPOCHS * count, count)]
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
    assert all(sorted(epoch) == list(range(ENVS * STEPS)) for epoch in epochs)


@pytest.mark.parametrize("how", CHANGES)
def test_a_batch_changed_in_place_is_not_seen_again(count, how):
    storage = rollout()
    before = snapshot(storage)
    drawn = []
    for batch in storage.mini_batch_generator(count, EPOCHS):
        drawn.append(ids_in(batch))  # which holds every field against the others
        for tensor in tensors_of(batch).values():
            how(tensor)
        del batch, tensor
    assert drawn[:count] == drawn[count : 2 * count] == drawn[2 * count :]
    assert_equal(snapshot(storage), before)


@pytest.mark.parametrize("name", [".advantages", ".observations.image", ".old_distribution_params.1"])
def test_one_changed_tensor_is_not_seen_again(count, name):
    for batch in rollout().mini_batch_generator(count, EPOCHS):
        ids_in(batch)
        tensors_of(batch)[name].zero_()


def test_batches_kept_in_a_list_share_no_memory(count):
    storage = rollout()
    before = snapshot(storage)
    kept = list(storage.mini_batch_generator(count, 2))
    expected = copy.deepcopy(kept)
    for batch, copied in zip(kept, expected, strict=True):
        assert_equal(batch, copied)
        for tensor in tensors_of(batch).values():
            add_one(tensor)
    assert_equal(snapshot(storage), before)


def test_what_is_kept_of_a_batch_is_not_written_over_in_later_updates(count):
    storage, kept = rollout(), []
    for update in range(3):
        for batch in storage.mini_batch_generator(count, 2):
            kept.append((batch.values[1:], batch.values[1:].tolist()))
            del batch
        storage.clear()
        fill(storage, offset=10000 * (update + 1), dones=None)
    assert all(view.tolist() == numbers for view, numbers in kept)


def test_a_batch_asked_for_gradients_comes_back_plain(count):
    for batch in rollout().mini_batch_generator(count, EPOCHS):
        ids_in(batch)
        for name, tensor in tensors_of(batch).items():
            assert not tensor.requires_grad, name
            assert tensor.grad is None, name
            assert tensor.is_leaf, name
        inputs = batch.observations["policy"].requires_grad_()
        inputs.square().sum().backward()
        assert inputs.grad is not None
        del inputs, batch, tensor


def in_place(storage):
    storage.advantages.add_(1)


def an_entry(storage):
    storage.observations["policy"][3, 4] = -1.0


def rebound(storage):
    storage.returns = storage.returns + 5


def a_new_observation(storage):
    storage.observations["image"] = torch.full_like(storage.observations["image"], 9)


def a_parameter_in_place(storage):
    storage.distribution_params[1].mul_(2)


def computed(storage):
    storage.compute_returns(torch.zeros(ENVS, 1), 0.9, 0.8)


@pytest.mark.parametrize("change", [in_place, an_entry, rebound, a_new_observation, a_parameter_in_place, computed])
def test_what_changed_between_epochs_is_served_anew(count, change):
    """The last epoch is what a storage with the change in it from the start would have served."""
    storage, changed = rollout(), rollout()
    change(changed)
    expected = list(changed.mini_batch_generator(count, 1))
    batches = storage.mini_batch_generator(count, 3)
    for _ in range(2 * count):
        ids_in(next(batches))
    change(storage)
    for batch, truth in zip(batches, expected, strict=True):
        assert_equal(batch, truth)


def test_the_next_rollout_is_served_as_it_is(count):
    storage = rollout()
    for update in range(3):
        drawn = [row for batch in storage.mini_batch_generator(count, 2) for row in ids_in(batch)]
        assert sorted(set(drawn)) == [update * 10000 + row for row in range(ENVS * STEPS)]
        storage.clear()
        fill(storage, offset=10000 * (update + 1), dones=None)


def test_two_generators_side_by_side_do_not_disturb_each_other(count):
    storage = rollout()
    one, other = (storage.mini_batch_generator(count, 2) for _ in range(2))
    drawn = [(ids_in(batch), ids_in(twin)) for batch, twin in zip(one, other, strict=True)]
    for place in (0, 1):
        assert [pair[place] for pair in drawn[:count]] == [pair[place] for pair in drawn[count:]]
    assert drawn[0][0] != drawn[0][1]


def test_batches_in_the_order_of_time_are_served_whole_in_every_epoch(size, count, calls):
    storage = rollout()
    expected = ids_of_step(0, envs=ENVS * STEPS)
    part = ENVS * STEPS // count
    for index, batch in enumerate(storage.generate_batches(count, None, EPOCHS, shuffle=False)):
        ids = expected[index % count * part : (index % count + 1) * part]
        assert_equal(batch["observations"], observations_of(ids))
        assert torch.equal(batch["rows"], ids.flatten().long())
        batch["observations"]["policy"].zero_()
        batch["rows"].zero_()
    assert len(calls) == (2 * EPOCHS if size == "large" else EPOCHS)
