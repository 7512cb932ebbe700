"""Batches kept from epoch to epoch, as long as nobody could tell."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from rlstore.engine.batches import gather
from rlstore.engine.batches.gather import KeptBatches
from rlstore.engine.memory import tensors as memory
from rlstore.kernels import _native


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
                return torch.unsafe_split(piece, 4), (piece,)
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
    "its data": lambda tensor: tensor.data,
    "an array": lambda tensor: tensor.numpy(),
    "an array by dlpack": lambda tensor: np.from_dlpack(tensor),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a list": lambda tensor: [tensor],
    "a graph": lambda tensor: tensor * torch.ones(4, requires_grad=True),
    "a graph that leads to it": lambda tensor: tensor.requires_grad_() * 1,
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_batch_that_somebody_holds_is_made_anew(holder, place, make):
    kept = KeptBatches(keep=True)
    held = HOLDERS[holder](get(kept, make, 0)[place])
    before = str(held)
    for tensor in get(kept, make, 0):
        tensor.zero_()
    assert str(held) == before
    assert make.made == [0, 0]


def test_a_batch_that_was_let_go_is_kept_from_then_on(make):
    kept = KeptBatches(keep=True)
    held = get(kept, make, 0)
    del held
    get(kept, make, 0)
    assert make.made == [0]


def test_a_batch_that_nobody_touched_comes_again_as_the_very_same_tensors(make):
    kept = KeptBatches(keep=True)
    weight = torch.ones(4, requires_grad=True)
    handed = [[id(tensor) for tensor in get(kept, make, index)] for index in range(2)]
    for _ in range(2):
        for index in range(2):
            batch = get(kept, make, index)
            assert [id(tensor) for tensor in batch] == handed[index]
            (batch[0] * weight + batch[1].exp()).sum().backward()  # read, as a learner reads it
    assert make.made == [0, 1]


class Marked(torch.Tensor):
    """A class that a tensor may be given."""


def add_hook(tensor, register) -> None:
    register(tensor.requires_grad_(), lambda *given: None)
    tensor.requires_grad_(False)


# What a caller may do to a tensor that neither holds it nor counts as a change of its entries.
MARKS = {
    "a wish for gradients": lambda tensor: tensor.requires_grad_(),
    "a gradient": lambda tensor: (tensor.requires_grad_() * 2).sum().backward(),
    "a gradient put there": lambda tensor: setattr(tensor, "grad", torch.ones(4)),
    "a hook": lambda tensor: add_hook(tensor, torch.Tensor.register_hook),
    "a later hook": lambda tensor: add_hook(tensor, torch.Tensor.register_post_accumulate_grad_hook),
    "an attribute": lambda tensor: setattr(tensor, "mark", 1),
    "a class": lambda tensor: setattr(tensor, "__class__", Marked),
    "a shape": lambda tensor: tensor.unsqueeze_(0),
    "a size": lambda tensor: tensor.resize_(2),
    "a stride": lambda tensor: setattr(tensor, "data", tensor.data[:1].expand(4)),
    "other memory": lambda tensor: setattr(tensor, "data", torch.zeros(4)),
    "a part of its memory": lambda tensor: setattr(tensor, "data", tensor.data[:2]),
    "a view of its memory": lambda tensor: setattr(tensor, "data", tensor.data.expand(2, 4)),
    "a dtype": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "a dtype that tells nobody its memory": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.bits8)),
    "memory that is shared": lambda tensor: tensor.share_memory_(),
    "larger memory": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("mark", MARKS)
def test_what_becomes_of_a_tensor_does_not_cling_to_the_next(mark, place, make):
    kept = KeptBatches(keep=True)
    for _ in range(3):
        tensor = get(kept, make, 0)[place]
        assert type(tensor) is torch.Tensor
        assert tensor.dtype == torch.float32
        assert (tensor.shape, tensor.stride()) == ((4,), (1,))
        assert not tensor.requires_grad
        assert tensor.grad is None
        assert not tensor._backward_hooks
        assert not tensor._post_accumulate_grad_hooks
        assert not tensor.__dict__
        MARKS[mark](tensor)
        del tensor
        get(kept, make, 1)
    assert make.made == [0, 1, 0, 0]


def test_one_tensor_in_the_place_of_another_is_not_met_again(make):
    kept = KeptBatches(keep=True)
    batch = get(kept, make, 0)
    batch[0].data = batch[1].data
    del batch
    get(kept, make, 0)
    assert make.made == [0, 0]


def test_where_holders_cannot_be_told_nothing_is_kept(make, monkeypatch):
    monkeypatch.setattr(gather, "CAN_KEEP", False)
    kept = KeptBatches(keep=True)
    for _ in range(2):
        get(kept, make, 0)
    assert make.made == [0, 0]


BLIND = {
    "everything": lambda tensors, storages: b"",
    "holders of storages": lambda tensors, storages: _native.unheld_state(tensors, ()),
    "holders of tensors": lambda tensors, storages: bytes(map(sys.getrefcount, storages)),
}


@pytest.mark.parametrize("blind", BLIND)
def test_it_is_seen_that_holders_are_not(blind, monkeypatch):
    assert memory._tells_holders()
    monkeypatch.setattr(memory, "unheld_state", BLIND[blind])
    assert not memory._tells_holders()


def test_a_torch_that_has_not_the_names_is_no_error(monkeypatch):
    def ask(tensors, storages):
        raise AttributeError("type object 'torch._C.TensorBase' has no attribute '_version'")

    monkeypatch.setattr(memory, "unheld_state", ask)
    assert not memory._tells_holders()


def test_the_state_of_tensors_is_asked_of_tensors_and_storages_alone():
    tensors = (torch.ones(3),)
    storages = (tensors[0].untyped_storage(),)
    assert _native.unheld_state(tensors, storages) == _native.unheld_state(tensors, storages) != b""
    assert _native.unheld_state((np.ones(3),), ()) is None
    assert _native.unheld_state((torch.nn.Parameter(torch.ones(3)),), ()) is None
    assert _native.unheld_state((), ()) == b""
    for other in (torch.ones(3), np.ones(3), 1):
        with pytest.raises(TypeError, match="storage"):
            _native.unheld_state((), (other,))


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
