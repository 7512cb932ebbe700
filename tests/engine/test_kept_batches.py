"""Batches kept from epoch to epoch, as long as nobody could tell."""

from __future__ import annotations

import pytest
import torch

from rlstore.engine import gather
from rlstore.engine.gather import KeptBatches


class Maker:
    """Makes batch ``index`` of two tensors that tell the index, and counts how often it was asked to."""

    def __init__(self, *, cut: bool = False):
        self.made: list[int] = []
        self._cut = cut

    def __call__(self, index: int):
        def make():
            self.made.append(index)
            piece = torch.tensor([float(index)] * 4 + [index + 0.5] * 4)
            if self._cut:
                return (piece[:4], piece[4:]), (piece,)
            tensors = piece[:4].clone(), piece[4:].clone()
            return tensors, tensors

        return make


@pytest.fixture(params=[False, True], ids=["apart", "cut from one piece"])
def make(request) -> Maker:
    return Maker(cut=request.param)


def get(kept: KeptBatches, make: Maker, index: int) -> tuple[torch.Tensor, ...]:
    batch = kept.get(index, make(index))
    assert batch[0].tolist() == [float(index)] * len(batch[0])
    assert batch[1].tolist() == [index + 0.5] * len(batch[1])
    return batch


def test_an_untouched_batch_is_served_again(make):
    kept = KeptBatches(keep=True)
    for _ in range(3):
        for index in range(2):
            get(kept, make, index)
    assert make.made == [0, 1]


def test_nothing_is_kept_that_will_not_be_asked_for_again(make):
    kept = KeptBatches(keep=False)
    for _ in range(2):
        get(kept, make, 0)
    assert make.made == [0, 0]


CHANGES = {
    "in place": lambda tensor: tensor.mul_(2),
    "an entry": lambda tensor: tensor.__setitem__(0, 99.0),
    "through a view": lambda tensor: tensor[1:].zero_(),
    "through a detached one": lambda tensor: tensor.detach().zero_(),
    "in inference mode": lambda tensor: torch.inference_mode()(tensor.zero_)(),
    "by an out argument": lambda tensor: torch.add(torch.ones(4), 1, out=tensor),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_not_met_again(change, place, make):
    """``get`` compares what is served with what was made."""
    kept = KeptBatches(keep=True)
    for _ in range(3):
        CHANGES[change](get(kept, make, 0)[place])
        get(kept, make, 1)
    assert make.made == [0, 1, 0, 0]


HOLDERS = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[1:],
    "a detached one": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "a graph": lambda tensor: tensor * torch.ones(4, requires_grad=True),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_batch_that_somebody_holds_is_made_anew(holder, place, make):
    kept = KeptBatches(keep=True)
    held = HOLDERS[holder](get(kept, make, 0)[place])
    before = held.tolist()
    again = get(kept, make, 0)
    for tensor in again:
        tensor.zero_()
    assert held.tolist() == before
    assert make.made == [0, 0]


def test_a_batch_that_was_let_go_is_kept_from_then_on(make):
    kept = KeptBatches(keep=True)
    held = get(kept, make, 0)
    del held
    get(kept, make, 0)
    assert make.made == [0]


def test_what_becomes_of_a_batch_does_not_cling_to_the_next(make):
    kept = KeptBatches(keep=True)
    batch = get(kept, make, 0)
    batch[0].requires_grad_()
    (batch[0] * 2).sum().backward()
    del batch
    again = get(kept, make, 0)
    assert not again[0].requires_grad
    assert again[0].grad is None


def test_new_data_make_all_batches_anew(make):
    kept = KeptBatches(keep=True)
    for stamp in ("a", "a", "b", "b", "a"):
        kept.follow(stamp)
        get(kept, make, 0)
    assert make.made == [0, 0, 0]


def test_no_more_is_kept_than_the_bound(monkeypatch, make):
    """A batch of two times 4 floats is 32 bytes; room for two of them."""
    monkeypatch.setattr(gather, "KEEP_BYTES", 64)
    kept = KeptBatches(keep=True)
    for _ in range(3):
        for index in range(4):
            get(kept, make, index)
    assert make.made == [0, 1, 2, 3, 2, 3, 2, 3]


def test_room_is_free_again_after_a_change_and_after_new_data(monkeypatch, make):
    monkeypatch.setattr(gather, "KEEP_BYTES", 64)
    kept = KeptBatches(keep=True)
    for _ in range(5):
        get(kept, make, 0)[0].zero_()  # always made anew, and never counted twice
        get(kept, make, 1)
    assert make.made == [0, 1, 0, 0, 0, 0]
    make.made.clear()
    for stamp in range(5):
        kept.follow(stamp)
        for _ in range(2):
            get(kept, make, 0)
            get(kept, make, 1)
    assert make.made == [0, 1] * 5
