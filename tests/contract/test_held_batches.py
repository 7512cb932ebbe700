"""A learner may keep any part of a batch for as long as it likes: what it holds is never written over."""

from __future__ import annotations

import mmap
import os
import threading
from itertools import cycle

import numpy as np
import pytest
import torch
from rollout_model import SIZE, RolloutModel, collect, make
from storages import Actor
from where import DEVICE

# What a learner may keep of a tensor besides the tensor itself, and how to read the numbers in it later.
WAYS = {
    "tensor": (lambda tensor: tensor, lambda kept: kept.tolist()),
    "row": (lambda tensor: tensor[0], lambda kept: kept.tolist()),
    "view": (lambda tensor: tensor.flatten()[1:], lambda kept: kept.tolist()),
    "detached": (lambda tensor: tensor.detach(), lambda kept: kept.tolist()),
    "data": (lambda tensor: tensor.data, lambda kept: kept.tolist()),
    "numpy array": (lambda tensor: tensor.cpu().numpy(), lambda kept: kept.tolist()),
    "slice of a numpy array": (lambda tensor: np.asarray(tensor)[:1], lambda kept: kept.tolist()),
    "dlpack": (lambda tensor: np.from_dlpack(tensor), lambda kept: kept.tolist()),
    "storage": (lambda tensor: tensor.untyped_storage(), lambda kept: list(kept)),
    "parameter": (lambda tensor: torch.nn.Parameter(tensor), lambda kept: kept.tolist()),
    "closure": (lambda tensor: lambda: tensor, lambda kept: kept().tolist()),
}
if DEVICE != "cpu":  # numpy looks into the memory of the host alone
    del WAYS["slice of a numpy array"], WAYS["dlpack"]


def test_what_is_held_of_a_batch_is_never_written_over(case):
    storage, model = make(case)
    kept, ways = [], cycle(WAYS.values())  # one way for each batch, two batches for each way
    for rollout in range(4):
        collect(case, storage, model, first=rollout * SIZE)
        storage.before_gradients(Actor(), None)
        for batch in storage.generate_batches(3, 4, 2):
            model.check_batch(batch, 4)
            keep, read = next(ways)
            for name in ("actions", "rewards"):
                part = keep(batch[name])
                kept.append((read, part, read(part)))
            del batch, part
        storage.after_gradients({}, {})
        model.spent = True
    for read, part, as_served in kept:
        assert read(part) == as_served


def test_what_a_backward_pass_still_needs_is_never_written_over(case):
    storage, model = make(case)
    weight = torch.ones(1, requires_grad=True)
    losses = []
    for rollout in range(3):
        collect(case, storage, model, first=rollout * SIZE)
        for batch in storage.generate_batches(3, 4, 2):
            model.check_batch(batch, 4)
            total = float(batch["rewards"].sum())
            losses.append((batch["rewards"] * weight, total))  # the graph alone holds the rewards
            del batch
        storage.after_gradients({}, {})
        model.spent = True
    for loss, total in losses:
        weight.grad = None
        loss.sum().backward()
        assert weight.grad.item() == total


@pytest.mark.skipif(
    DEVICE != "cpu" or not hasattr(torch.UntypedStorage, "_share_fd_cpu_"), reason="needs memory shared by descriptor"
)
def test_what_was_sent_to_another_process_is_never_written_over(case):
    """A tensor sent through a torch.multiprocessing queue is a descriptor: the receiver looks into the same memory."""
    storage, model = make(case)
    received = []
    for rollout in range(3):
        collect(case, storage, model, first=rollout * SIZE)
        for batch in storage.generate_batches(3, 4):
            rewards = batch["rewards"]
            descriptor, size = rewards.untyped_storage()._share_fd_cpu_()[:2]
            with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as window:
                as_sent = window[:]
            received.append((os.dup(descriptor), size, as_sent))
            del batch, rewards
        storage.after_gradients({}, {})
        model.spent = True
    for descriptor, size, as_sent in received:
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as window:
            assert window[:] == as_sent
        os.close(descriptor)


def test_two_generators_side_by_side_do_not_disturb_each_other(case):
    storage, model = make(case)
    collect(case, storage, model)
    one, other = storage.generate_batches(3, 4, 3), storage.generate_batches(6, 2, 3)
    for _ in range(9):
        batch, second, third = next(one), next(other), next(other)
        model.check_batch(batch, 4)
        model.check_batch(second, 2)
        model.check_batch(third, 2)
        assert len(list(storage.generate_batches(2, 1))) == 2
        model.check_batch(batch, 4)
        del batch, second, third


def test_a_generator_given_up_midway_leaves_no_trace(case):
    storage, model = make(case)
    collect(case, storage, model)
    batches = storage.generate_batches(3, 4, 3)
    first = next(batches)
    batches.close()
    for batch in storage.generate_batches(3, 4, 3):
        model.check_batch(batch, 4)
    model.check_batch(first, 4)


def test_batches_may_be_let_go_in_another_thread(case):
    storage, model = make(case)
    collect(case, storage, model)
    results = []

    def learn(batch):
        results.append((batch["rows"].tolist(), batch["rewards"].flatten().tolist()))

    for batch in storage.generate_batches(3, 4, 8):
        thread = threading.Thread(target=learn, args=(batch,))
        del batch
        thread.start()
        thread.join()
    assert len(results) == 24
    for rows, rewards in results:
        assert rewards == [(row + 1) / 4 + 1 for row in rows]


def test_the_next_rollout_does_not_touch_the_batches_of_the_last(case):
    storage, model = make(case)
    collect(case, storage, model)
    batches = list(storage.generate_batches(3, 4))
    storage.after_gradients({}, {})
    fresh = RolloutModel(case, SIZE)
    collect(case, storage, fresh, first=50)
    list(storage.generate_batches(3, 4))
    storage.reset()
    for batch in batches:
        model.check_batch(batch, 4)
