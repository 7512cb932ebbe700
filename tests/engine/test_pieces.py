"""Many tensors in few pieces of memory, each independent of the others."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlstore.kernels import pieces as pieces_module
from rlstore.kernels.pieces import Pieces

CPU = torch.device("cpu")
FLOAT, BYTE, WIDE = torch.float32, torch.uint8, torch.float64

LAYOUTS = {
    "one": [((5, 3), FLOAT)],
    "no gaps": [((16, 2), FLOAT), ((4, 4, 1), FLOAT), ((48,), FLOAT)],
    "gaps": [((5, 3), FLOAT), ((1,), FLOAT), ((17,), FLOAT)],
    "a scalar": [((), FLOAT), ((2, 2), FLOAT)],
    "without entries": [((5, 0), FLOAT), ((5, 2), FLOAT), ((0,), BYTE)],
    "several dtypes": [((5, 3), FLOAT), ((7,), BYTE), ((2, 8), FLOAT), ((4,), WIDE), ((3,), BYTE)],
}
MODES = {
    "usual": nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
}


@pytest.fixture(params=["at once", "one by one"], autouse=True)
def way(request, monkeypatch) -> None:
    if request.param == "one by one":  # as in a torch without the private functions
        monkeypatch.setattr(pieces_module, "_FUNCTIONS", {})
    elif not pieces_module._FUNCTIONS:
        pytest.skip("this torch does not have the private functions")


def make(layout: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    shapes, dtypes = zip(*LAYOUTS[layout], strict=True)
    pieces = Pieces(shapes, dtypes, CPU)
    memories = pieces.empty()
    return pieces.cut(memories), memories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_as_asked_for_and_apart(layout):
    tensors, memories = make(layout)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == LAYOUTS[layout]
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        tensor.fill_(number + 1)
    assert [set(tensor.flatten().tolist()) - {number + 1} for number, tensor in enumerate(tensors)] == [set()] * len(
        tensors
    )
    for tensor in tensors:
        if tensor.numel():
            (piece,) = (piece for piece in memories if piece.dtype == tensor.dtype)
            assert tensor.untyped_storage().data_ptr() == piece.data_ptr()
            assert tensor.storage_offset() % 16 == 0


def test_a_layout_knows_its_bytes():
    shapes, dtypes = zip(*LAYOUTS["several dtypes"], strict=True)
    pieces = Pieces(shapes, dtypes, CPU)
    assert pieces.places == (0, 1, 0, 2, 1)
    assert pieces.nbytes == (16 + 16) * 4 + (16 + 16) + 16 * 8
    made = [pieces.empty() for _ in range(3)]
    assert [[(piece.dtype, piece.numel()) for piece in one] for one in made] == [
        [(FLOAT, 32), (BYTE, 32), (WIDE, 16)]
    ] * 3
    assert len({piece.data_ptr() for one in made for piece in one}) == 9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensor_is_one_in_its_own_right_whatever_the_mode(layout, mode):
    with MODES[mode]():
        tensors, memories = make(layout)
    for tensor in tensors:
        assert tensor.device == CPU
        assert not tensor.is_inference()
        assert tensor._base is None
        assert tensor.is_leaf
        assert not tensor.requires_grad
    for tensor in tensors:
        versions = [other._version for other in (*tensors, *memories) if other is not tensor]
        before = tensor._version
        tensor.zero_()
        assert tensor._version == before + 1
        assert [other._version for other in (*tensors, *memories) if other is not tensor] == versions


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_a_mode_that_only_pretends_are_not_met_after_it(layout):
    with FakeTensorMode():
        pretended, _ = make(layout)
    kind = torch.Tensor if pieces_module._FUNCTIONS else FakeTensor  # the private functions know of no modes
    assert [(type(tensor), tuple(tensor.shape)) for tensor in pretended] == [
        (kind, shape) for shape, _ in LAYOUTS[layout]
    ]
    assert {type(tensor) for tensor in make(layout)[0]} == {torch.Tensor}


def test_what_a_caller_may_do_to_a_tensor():
    first, second, third = make("gaps")[0]
    first.fill_(2.0).requires_grad_()
    second.fill_(3.0)
    product = (first * second).sum()
    third.zero_()  # not seen by the graph of the others
    product.backward()
    assert first.grad.tolist() == [[3.0] * 3] * 5
    second.requires_grad_().detach_()
    assert second.resize_(2, 2).shape == (2, 2)
    assert copy.deepcopy(third.t_()).tolist() == [0.0] * 17


@pytest.mark.skipif(not hasattr(torch, "OutOfMemoryError"), reason="torch before 2.5 counts their versions together")
def test_a_compiled_caller_gets_the_same():
    pieces = Pieces([(5, 3), (4,)], [FLOAT, FLOAT], CPU)

    def cut_and_fill() -> list[torch.Tensor]:
        return [tensor.fill_(7.0) for tensor in pieces.tensors()]

    first, second = torch.compile(cut_and_fill, backend="eager")()
    torch._dynamo.reset()
    assert first.tolist() == [[7.0] * 3] * 5
    assert second.tolist() == [7.0] * 4
    first.requires_grad_().sum().backward()
    assert second._version == 1
