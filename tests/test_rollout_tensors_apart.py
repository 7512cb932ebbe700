"""Each tensor of a batch stands for itself: what a learner does to one is not felt by another, nor seen again."""

import pytest
import torch
from rollout_ids import ENVS, assert_equal, build, fill, tensors_of

from rlstore.engine.batches import gather

KINDS = ["small", "large", "reshuffled", "recurrent"]


def state_of(step, ids):
    return (ids.expand(1, ENVS, 2) + 0.5, (ids.expand(2, ENVS, 3) + 0.5, ids.expand(2, ENVS, 3) - 0.5))


def rollout():
    return fill(build(seed=3), hidden=state_of)


@pytest.fixture(params=KINDS)
def batches(request, monkeypatch):
    """A function that gives the batches of a storage."""
    monkeypatch.setattr(gather, "LARGE_BYTES", 1 if request.param == "large" else 1 << 30)
    return {
        "small": lambda storage: storage.mini_batch_generator(3, 3),
        "large": lambda storage: storage.mini_batch_generator(3, 3),
        "reshuffled": lambda storage: storage.mini_batch_generator(3, 3, reshuffle=True),
        "recurrent": lambda storage: storage.recurrent_mini_batch_generator(2, 3),
    }[request.param]


def spoil(tensor) -> None:
    tensor.add_(1) if tensor.dtype != torch.bool else tensor.logical_not_()


def test_a_change_of_any_one_tensor_is_not_seen_again(batches):
    expected = list(batches(rollout()))
    for name in tensors_of(expected[0]):
        for batch, truth in zip(batches(rollout()), expected, strict=True):
            tensor = tensors_of(batch)[name]
            assert torch.equal(tensor, tensors_of(truth)[name]), name
            spoil(tensor)
            del batch, tensor


def test_any_one_tensor_that_is_kept_shares_no_memory_with_later_ones(batches):
    for name in tensors_of(next(iter(batches(rollout())))):
        kept = []
        for batch in batches(rollout()):
            kept.append(tensors_of(batch)[name])
            del batch
        expected = [tensor.clone() for tensor in kept]
        for tensor, truth in zip(kept, expected, strict=True):
            assert torch.equal(tensor, truth), name
            spoil(tensor)


def test_a_change_of_one_tensor_is_not_felt_by_the_others(batches):
    storage = rollout()
    expected = list(batches(rollout()))
    for number, (batch, truth) in enumerate(zip(batches(storage), expected, strict=True)):
        tensors = tensors_of(batch)
        name = list(tensors)[number % len(tensors)]
        spoil(tensors.pop(name))
        truths = tensors_of(truth)
        del truths[name]
        assert_equal(tensors, truths)
        del batch, tensors


def test_a_change_of_one_tensor_does_not_spoil_the_backward_pass_of_another(batches):
    """As a loss does that brings the advantages to mean 0 in place after the forward pass."""
    weight = torch.ones(1, requires_grad=True)
    for batch in batches(rollout()):
        expected = float(batch.values.sum())
        loss = (batch.values * weight).sum()
        batch.advantages.sub_(batch.advantages.mean())
        (gradient,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(gradient.item(), expected)


def test_a_change_in_the_next_batch_does_not_spoil_the_backward_pass_of_this_one(batches):
    weight = torch.ones(1, requires_grad=True)
    pending = []
    for batch in batches(rollout()):
        batch.values.add_(0.0)
        pending.append(((batch.values * weight).sum(), float(batch.values.sum())))
    for loss, expected in pending:
        (gradient,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(gradient.item(), expected)


def test_every_tensor_of_a_batch_may_ask_for_gradients(batches):
    for batch in batches(rollout()):
        leaves = [tensor for tensor in tensors_of(batch).values() if tensor.is_floating_point()]
        assert not any(leaf.requires_grad for leaf in leaves)
        total = sum(leaf.requires_grad_().double().sum() for leaf in leaves)
        total.backward()
        assert all(bool((leaf.grad == 1).all()) for leaf in leaves)
        del batch, leaves, total


def test_batches_taken_in_inference_mode_are_ordinary_tensors(batches):
    with torch.inference_mode():
        taken = [tensors_of(batch) for batch in batches(rollout())]
    assert not [name for tensors in taken for name, tensor in tensors.items() if tensor.is_inference()]


def test_an_attribute_of_any_one_tensor_is_not_met_again(batches):
    for name in tensors_of(next(iter(batches(rollout())))):
        for batch in batches(rollout()):
            assert not any(tensor.__dict__ for tensor in tensors_of(batch).values()), name
            tensors_of(batch)[name].seen = True
            del batch


def test_the_keys_and_fields_of_a_batch_are_its_own(batches):
    expected = list(batches(rollout()))
    for batch, truth in zip(batches(rollout()), expected, strict=True):
        assert_equal(batch, truth)
        batch.observations.clear()
        batch.observations["new"] = torch.zeros(batch.observations.batch_size)
        batch.actions = batch.values = batch.masks = None
        del batch
