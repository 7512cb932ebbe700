"""Every tensor of every batch is the caller's own: what is done to one reaches no other, no later one, no storage."""

import copy
from itertools import chain

import pytest
import torch
from combinations import each
from rollout_ids import ENVS, STEPS, assert_equal, build, fill, ids_in, snapshot, tensors_of

from rlstore.engine.batches import gather

KINDS = ["small", "large", "reshuffled", "recurrent"]
EPOCHS = 3


def state_of(step, ids):
    return (ids.expand(1, ENVS, 2) + 0.5, (ids.expand(2, ENVS, 3) + 0.5, ids.expand(2, ENVS, 3) - 0.5))


def rollout():
    return fill(build(seed=3), hidden=state_of)


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """Small batches are gathered together, large ones one by one."""
    monkeypatch.setattr(gather, "LARGE_BYTES", 1 if request.param == "large" else 1 << 30)
    return request.param


@pytest.fixture
def batches(kind):
    """A function that gives the batches of a storage."""
    return {
        "small": lambda storage: storage.mini_batch_generator(3, EPOCHS),
        "large": lambda storage: storage.mini_batch_generator(3, EPOCHS),
        "reshuffled": lambda storage: storage.mini_batch_generator(3, EPOCHS, reshuffle=True),
        "recurrent": lambda storage: storage.recurrent_mini_batch_generator(2, EPOCHS),
    }[kind]


def add_one(tensor):
    tensor.add_(1) if tensor.dtype != torch.bool else tensor.logical_not_()


def write_a_slice(tensor):
    tensor[:1] = 0


def write_past_autograd(tensor):
    add_one(tensor.data)


def write_a_view(tensor):
    tensor.detach().flatten()[3:].zero_()


def write_through_numpy(tensor):
    tensor.numpy()[...] = 0


def write_in_inference_mode(tensor):
    with torch.inference_mode():
        add_one(tensor)


CHANGES = [add_one, write_a_slice, write_past_autograd, write_a_view, write_through_numpy, write_in_inference_mode]


@pytest.mark.parametrize("how", CHANGES)
def test_a_batch_changed_in_place_is_not_seen_again(batches, how):
    storage, untouched = rollout(), rollout()
    before = snapshot(storage)
    for batch, expected in zip(batches(storage), batches(untouched), strict=True):
        assert_equal(batch, expected)
        for tensor in tensors_of(batch).values():
            how(tensor)
        del batch, tensor
    assert_equal(snapshot(storage), before)
    assert_equal(list(batches(storage)), list(batches(untouched)))


def test_batches_kept_until_the_end_share_no_memory(batches):
    storage = rollout()
    before = snapshot(storage)
    kept = list(batches(storage))
    expected = copy.deepcopy(kept)
    for batch, truth in zip(kept, expected, strict=True):
        assert_equal(batch, truth)
        for name, tensor in tensors_of(batch).items():
            assert torch.equal(tensor, tensors_of(truth)[name]), name  # those before it have been changed by now
            add_one(tensor)
    assert_equal(snapshot(storage), before)


def test_a_change_of_one_tensor_is_not_felt_by_the_others(batches):
    expected = list(batches(rollout()))
    for number, (batch, truth) in enumerate(zip(batches(rollout()), expected, strict=True)):
        tensors, truths = tensors_of(batch), tensors_of(truth)
        name = list(tensors)[number % len(tensors)]
        add_one(tensors.pop(name))
        del truths[name]
        assert_equal(tensors, truths)


def test_a_change_of_one_tensor_does_not_spoil_the_backward_pass_of_another(batches):
    """As a loss does that brings the advantages to mean 0 in place after the forward pass."""
    weight = torch.ones(1, requires_grad=True)
    pending = []
    for batch in batches(rollout()):
        pending.append(((batch.values * weight).sum(), float(batch.values.sum())))
        batch.advantages.sub_(batch.advantages.mean())
    for loss, expected in pending:
        (gradient,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(gradient.item(), expected)


def test_every_tensor_of_a_batch_may_ask_for_gradients(batches):
    scale = torch.ones(1, requires_grad=True)
    for batch in batches(rollout()):
        leaves = [tensor for tensor in tensors_of(batch).values() if tensor.is_floating_point()]
        assert not any(leaf.requires_grad or leaf.grad is not None for leaf in leaves)
        expected = batch.advantages.sum()
        batch.advantages.mul_(scale)
        (gradient,) = torch.autograd.grad(batch.advantages.sum(), scale)
        torch.testing.assert_close(gradient.squeeze(), expected)
        leaves = [leaf for leaf in leaves if leaf.is_leaf]
        total = sum(leaf.requires_grad_().double().sum() for leaf in leaves)
        total.backward()
        assert all(bool((leaf.grad == 1).all()) for leaf in leaves)


def test_batches_taken_in_inference_mode_are_ordinary_tensors(batches):
    with torch.inference_mode():
        taken = [tensors_of(batch) for batch in batches(rollout())]
    assert not [name for tensors in taken for name, tensor in tensors.items() if tensor.is_inference()]


def test_the_keys_and_fields_of_a_batch_are_its_own(batches):
    expected = list(batches(rollout()))
    for batch, truth in zip(batches(rollout()), expected, strict=True):
        assert_equal(batch, truth)
        assert not any(tensor.__dict__ for tensor in tensors_of(batch).values())
        batch.observations["policy"].seen = True
        batch.observations.clear()
        batch.observations["new"] = torch.zeros(batch.observations.batch_size)
        batch.actions = batch.values = batch.masks = None


# ---------------------------------------------------------------------------------------------------------------------
# What changes while a generator runs


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


def other_memory(storage):
    storage.values.data = storage.values + 7


def other_strides(storage):
    storage.actions.data = (storage.actions * 3).transpose(0, 1).contiguous().transpose(0, 1)


CHANGES = [in_place, an_entry, rebound, a_new_observation, a_parameter_in_place, computed, other_memory, other_strides]


@pytest.mark.parametrize(("kind", "change"), each(["small", "large"] * 4, CHANGES), indirect=["kind"])
def test_what_changed_between_epochs_is_served_by_the_next(batches, change):
    """The last epoch is what a storage with the change in it from the start would have served."""
    storage, changed = rollout(), rollout()
    change(changed)
    expected = list(changed.mini_batch_generator(3, 1))
    served = batches(storage)
    for _ in range(6):
        ids_in(next(served))
    change(storage)
    for batch, truth in zip(served, expected, strict=True):
        assert_equal(batch, truth)


@pytest.mark.parametrize("kind", ["small", "large"], indirect=True)
def test_every_epoch_serves_the_same_rows_and_the_next_rollout_its_own(batches):
    storage = rollout()
    for update in range(2):
        drawn = [ids_in(batch) for batch in batches(storage)]
        assert drawn[:3] == drawn[3:6] == drawn[6:]
        assert sorted(chain(*drawn[:3])) == [update * 10000 + row for row in range(ENVS * STEPS)]
        storage.clear()
        fill(storage, offset=10000 * (update + 1))


@pytest.mark.parametrize(("count", "gathers"), [(2, [3200] * 6), (4, [6400] * 3)], ids=["large", "small"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_256_kib_and_more_are_gathered_one_by_one(count, gathers, shuffle, monkeypatch):
    """A row is 83 bytes: half of 6400 rows is a little over 256 KiB, a quarter is not."""
    storage, real, calls = fill(build(envs=800, steps=8, seed=3), dones=None), gather.gather_rows, []
    monkeypatch.setattr(gather, "gather_rows", lambda *given: calls.append(len(given[1])) or real(*given))
    if shuffle:
        served = [ids_in(batch) for batch in storage.mini_batch_generator(count, EPOCHS)]
    else:
        served = [batch["rows"].tolist() for batch in storage.generate_batches(count, None, EPOCHS, shuffle=False)]
    epochs = [list(chain(*served[start : start + count])) for start in range(0, len(served), count)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert (sorted(epochs[0]) if shuffle else epochs[0]) == list(range(6400))
    assert calls == gathers


@pytest.mark.parametrize("kind", ["large", "recurrent"], indirect=True)
def test_batches_that_were_held_once_do_not_keep_their_memory(kind, batches):
    storage = rollout()

    def idle_after(update):
        update(batches(storage))
        return storage._outputs.idle_bytes

    alone = [idle_after(lambda served: [None for _ in served]) for _ in range(3)][-1]
    together = idle_after(list)  # all batches live until the end
    assert together > alone
    assert [idle_after(list) for _ in range(2)] == [together] * 2  # and their memory serves the next update
    assert [idle_after(lambda served: [None for _ in served]) for _ in range(3)][-1] == alone
