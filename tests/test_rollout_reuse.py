"""reuse=True: one epoch is gathered, and its tensors come again in every epoch; without it every batch is new."""

import pytest
from rollout_ids import ENVS, assert_equal, build, fill, tensors_of

from rlstore.engine.batches import gather

EPOCHS = 3


def state_of(step, ids):
    return (ids.expand(1, ENVS, 2) + 0.5, (ids.expand(2, ENVS, 3) + 0.5, ids.expand(2, ENVS, 3) - 0.5))


def rollout():
    return fill(build(seed=3), hidden=state_of)


GENERATORS = {
    "flat": lambda storage, **options: storage.mini_batch_generator(3, EPOCHS, **options),
    "recurrent": lambda storage, **options: storage.recurrent_mini_batch_generator(2, EPOCHS, **options),
    "dicts": lambda storage, **options: storage.generate_batches(3, None, EPOCHS, **options),
    "dicts in order": lambda storage, **options: storage.generate_batches(3, None, EPOCHS, False, **options),
    "recurrent dicts": lambda storage, **options: storage.generate_batches(2, None, EPOCHS, recurrent=True, **options),
}


@pytest.fixture(params=GENERATORS)
def batches(request):
    return GENERATORS[request.param]


@pytest.fixture(params=["small", "large"], autouse=True)
def size(request, monkeypatch) -> None:
    monkeypatch.setattr(gather, "LARGE_BYTES", 1 if request.param == "large" else 1 << 30)


def epochs_of(served):
    count = len(served) // EPOCHS
    return [served[start : start + count] for start in range(0, len(served), count)]


def test_with_reuse_the_very_same_tensors_come_again(batches):
    first, *others = epochs_of([tensors_of(batch) for batch in batches(rollout(), reuse=True)])
    for other in others:
        for batch, again in zip(first, other, strict=True):
            assert list(batch) == list(again)
            assert all(batch[name] is again[name] for name in batch)


def test_without_reuse_no_tensor_comes_twice(batches):
    served = [tensor for batch in batches(rollout()) for tensor in tensors_of(batch).values()]
    assert len({id(tensor) for tensor in served}) == len(served)
    addresses = {tensor.data_ptr() for tensor in served if tensor.numel()}
    assert len(addresses) == sum(tensor.numel() > 0 for tensor in served)


def test_the_first_epoch_is_the_same_with_and_without_reuse(batches):
    reused, expected = list(batches(rollout(), reuse=True)), list(batches(rollout()))
    for batch, truth in zip(epochs_of(reused)[0], epochs_of(expected)[0], strict=True):
        assert_equal(tensors_of(batch), tensors_of(truth))
    assert len(reused) == len(expected)


def test_with_reuse_what_is_changed_in_place_is_met_again(batches):
    first, second, _ = epochs_of(list(batches(rollout(), reuse=True)))
    for tensor in tensors_of(first[0]).values():
        tensor.zero_()
    assert all(not bool(tensor.any()) for tensor in tensors_of(second[0]).values())
    assert any(bool(tensor.any()) for tensor in tensors_of(second[1]).values())


def test_a_change_of_the_storage_is_not_met_by_what_is_reused(batches):
    storage = rollout()
    served = batches(storage, reuse=True)
    expected = [{name: t.clone() for name, t in tensors_of(b).items()} for b in batches(rollout(), reuse=True)]
    count = len(expected) // EPOCHS
    for number, (batch, truth) in enumerate(zip(served, expected, strict=True)):
        assert_equal(tensors_of(batch), truth)
        if number == count - 1:
            storage.advantages.zero_()


def test_reuse_together_with_reshuffle_is_refused():
    with pytest.raises(ValueError, match=r"reshuffle=True.*reuse=True"):
        next(rollout().mini_batch_generator(2, 2, reshuffle=True, reuse=True))


@pytest.mark.parametrize("epochs", [0, -1, 1.5])
def test_epochs_are_checked_with_reuse_too(epochs):
    for served in (
        rollout().mini_batch_generator(2, epochs, reuse=True),
        rollout().recurrent_mini_batch_generator(2, epochs, reuse=True),
        rollout().generate_batches(2, None, epochs, reuse=True),
    ):
        with pytest.raises(ValueError, match="num_epochs"):
            next(served)
