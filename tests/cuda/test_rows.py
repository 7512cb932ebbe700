"""The writer of rows on CUDA against the portable version: what is written, what is not, and what is counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlstore.kernels.cuda.launch import Launcher
from rlstore.kernels.cuda.rows import RowWriter
from rlstore.kernels.portable import OPERATIONS as PORTABLE

GUARD = 64
FLAG_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64]
STEPS = 3


def fields(lanes: int) -> dict[str, tuple]:
    """Each field's row shape and dtype, its lead, whether it is a flag, and the shapes that fit."""
    scalars = [(lanes,), (lanes, 1)]
    return {
        "vector": ((lanes, 5), torch.float32, 0, False, [(lanes, 5)]),
        "wide": ((lanes, 2100), torch.float32, 0, False, [(lanes, 2100)]),
        "image": ((lanes, 2, 3), torch.uint8, 0, False, [(lanes, 2, 3)]),
        "ahead": ((lanes, 2), torch.float64, 1, False, [(lanes, 2)]),
        "scalar": ((lanes,), torch.float32, 0, False, scalars),
        "column": ((lanes, 1), torch.bfloat16, 0, False, scalars),
        "short": ((lanes, 3), torch.int16, 0, False, [(lanes, 3)]),
        "unsigned": ((lanes, 3), torch.uint32, 0, False, [(lanes, 3)]),
        "long": ((lanes,), torch.int64, 0, False, scalars),
        "mask": ((lanes, 3), torch.bool, 0, False, [(lanes, 3)]),
        "byte flag": ((lanes, 1), torch.uint8, 0, True, scalars),
        "float flag": ((lanes,), torch.float32, 1, True, scalars),
        "empty": ((lanes, 0), torch.int64, 0, False, [(lanes, 0)]),
        "state": ((2, lanes, 4), torch.float16, 0, False, [(2, lanes, 4)]),
    }


def value(rng: np.random.Generator, field: tuple, choice: int) -> torch.Tensor:
    _, dtype, _, is_flag, shapes = field
    shape = shapes[choice % len(shapes)]
    if is_flag:
        marks = rng.choice([1, 2, 127]) * rng.integers(0, 2, shape)
        marks = torch.from_numpy(marks).to(FLAG_DTYPES[choice % len(FLAG_DTYPES)])
        return marks / 256 if marks.is_floating_point() else marks  # a part of a yes is a yes
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    if dtype.is_floating_point:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape) if raw.size else torch.empty(shape, dtype=dtype)


class Writer:
    """A writer with memory of its own, poisoned, with guards around each block."""

    def __init__(self, make, names: list[str], lanes: int, device, optional: bool = True):
        self.memory, targets = [], []
        for name in names:
            row_shape, dtype, lead, is_flag, _ = fields(lanes)[name]
            shape = (STEPS + lead, *row_shape)
            count = math.prod(shape) * dtype.itemsize
            whole = torch.full((GUARD + count + GUARD,), 0xA5, dtype=torch.uint8, device=device)
            targets.append((whole[GUARD : GUARD + count].view(dtype).view(shape), lead, is_flag, optional))
            self.memory.append(whole)
        self.writer = make(targets)

    def contents(self) -> list[list[int]]:
        return [whole.tolist() for whole in self.memory]


@pytest.mark.parametrize("lanes", [1, 17])
def test_rows_are_written_as_by_the_portable_version(lanes, device):
    rng, names = np.random.default_rng(lanes), list(fields(lanes))
    mine = Writer(RowWriter, names, lanes, device)
    truth = Writer(PORTABLE["RowWriter"], names, lanes, torch.device("cpu"))
    for row in range(STEPS):
        values = [value(rng, fields(lanes)[name], row + place) for place, name in enumerate(names)]
        if row == 1:
            values[0] = values[10] = None
        assert mine.writer.write(row, tuple(v if v is None else v.to(device) for v in values)) == -1
        assert truth.writer.write(row, tuple(values)) == -1
        assert mine.contents() == truth.contents()


@pytest.mark.parametrize("dtype", FLAG_DTYPES)
def test_flags_of_every_dtype(dtype, device):
    given = torch.tensor([0, 1, 0, 1, 1]).to(device, dtype)
    block = torch.full((1, 5), 7, dtype=torch.uint8, device=device)
    assert RowWriter([(block, 0, True, False)]).write(0, (given,)) == -1
    assert block.tolist() == [[0, 1, 0, 1, 1]]


def test_strided_values_and_values_that_take_part_in_a_graph_are_written(device):
    blocks = [torch.zeros(2, 4, 3, device=device), torch.zeros(2, 4, 1, dtype=torch.uint8, device=device)]
    writer = RowWriter([(blocks[0], 0, False, False), (blocks[1], 0, True, False)])
    strided = torch.arange(12.0, device=device, requires_grad=True).view(3, 4).t()
    flags = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], device=device)[:, 0]
    assert writer.write(1, (strided, flags)) == -1
    assert blocks[0].tolist() == [[[0.0] * 3] * 4, strided.tolist()]
    assert blocks[1][1].flatten().tolist() == [1, 0, 1, 0]


def some(device, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + math.prod(shape), device=device).view(shape)


STRIDED = {
    "a row for all": lambda device: some(device, 3).expand(4, 3),
    "columns of a wider one": lambda device: some(device, 4, 8)[:, 2:5],
    "rows of a longer one": lambda device: some(device, 8, 3)[::2],
    "one number for all": lambda device: some(device, 1, 1).expand(4, 3),
    "transposed": lambda device: some(device, 3, 4).t(),
    "with a hole within": lambda device: some(device, 4, 6)[:, ::2],
}


@pytest.mark.parametrize("kind", STRIDED)
def test_values_that_are_not_contiguous(kind, device):
    """The last ones are copied first, the others read as they are."""
    blocks = torch.zeros(2, 4, 3, device=device), torch.zeros(2, 4, 1, dtype=torch.uint8, device=device)
    writer = RowWriter([(blocks[0], 0, False, False), (blocks[1], 0, True, False)])
    vectors = STRIDED[kind](device)
    flags = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], device=device)[:, :1]
    for row in (0, 1):
        assert not vectors.is_contiguous()
        assert writer.write(row, (vectors, flags)) == -1
        assert blocks[0][row].tolist() == vectors.tolist()
        assert blocks[1][row].tolist() == flags.tolist()
    assert writer.write(0, (vectors.contiguous() + 1, flags.contiguous() * 0)) == -1
    assert blocks[0][0].tolist() == (vectors + 1).tolist()
    assert not blocks[1][0].any()


def test_states_of_some_layers_and_expanded_scalars(device):
    blocks = torch.zeros(1, 2, 3, 2, device=device), torch.zeros(1, 3, device=device)
    writer = RowWriter([(blocks[0], 0, False, False), (blocks[1], 0, False, False)])
    states, scalars = some(device, 4, 3, 2)[::2], some(device, 1).expand(3)
    assert writer.write(0, (states, scalars)) == -1
    assert blocks[0][0].tolist() == states.tolist()
    assert blocks[1][0].tolist() == [1.0] * 3


def test_values_that_lie_far_apart(device):
    """As a step of [envs, steps, ...] of many bytes: what is between the first value and the last is never touched."""
    memory = torch.empty(2**31 + 2, dtype=torch.uint8, device=device)
    far = memory.as_strided((3, 2), (2**30, 1))
    far.copy_(torch.arange(6, dtype=torch.uint8).view(3, 2))
    block = torch.zeros(2, 3, 2, dtype=torch.uint8, device=device)
    assert RowWriter([(block, 0, False, False)]).write(1, (far,)) == -1
    assert block.tolist() == [[[0, 0]] * 3, [[0, 1], [2, 3], [4, 5]]]


MISFITS = {
    "nothing": lambda good: None,
    "dtype": lambda good: good.to(torch.int32 if good.dtype != torch.uint8 else torch.float16),
    "shape": lambda good: torch.zeros((*good.shape[:-1], good.shape[-1] + 1), dtype=good.dtype),
    "rank": lambda good: good.unsqueeze(0),
    "list": lambda good: good.tolist(),
    "sparse": lambda good: good.to_sparse(),
    "no memory": lambda good: torch._efficientzerotensor(good.shape, dtype=good.dtype, device=good.device),
    "elsewhere": lambda good: good.to("cpu" if good.is_cuda else "meta"),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", MISFITS)
def test_a_misfit_is_told_and_nothing_is_written(kind, place, device):
    writer = Writer(RowWriter, ["vector", "byte flag"], 3, device, optional=False)
    before = writer.contents()
    values = [torch.ones(3, 5, device=device), torch.ones(3, 1, dtype=torch.uint8, device=device)]
    values[place] = MISFITS[kind](values[place])
    assert writer.writer.write(0, tuple(values)) == place
    assert writer.contents() == before


def test_a_row_beyond_the_end_and_a_row_of_another_length_are_refused(device):
    writer = Writer(RowWriter, ["vector", "ahead"], 3, device)
    good = torch.ones(3, 5, device=device), torch.ones(3, 2, dtype=torch.float64, device=device)
    before = writer.contents()
    with pytest.raises(IndexError):
        writer.writer.write(STEPS, good)
    with pytest.raises(ValueError, match="one value for each field"):
        writer.writer.write(0, good[:1])
    assert writer.contents() == before


def test_a_row_of_nothing_but_absent_values_is_a_row(device):
    writer = Writer(RowWriter, ["vector", "empty"], 3, device)
    before = writer.contents()
    assert writer.writer.write(0, (None, torch.empty(3, 0, dtype=torch.int64, device=device))) == -1
    assert writer.contents() == before


def test_rows_follow_one_another_whatever_their_number(device):
    """The number of the row is no constant of the kernel: one compiled for row 0 serves row 1 and row 16."""
    block = torch.zeros(20, 4, device=device)
    writer = RowWriter([(block, 0, False, False)])
    for row in (0, 1, 2, 16, 19):
        assert writer.write(row, (torch.full((4,), row + 1.0, device=device),)) == -1
    assert block[:, 0].tolist() == [1.0, 2.0, 3.0, *[0.0] * 13, 17.0, 0.0, 0.0, 20.0]


def test_rows_of_one_kind_are_launched_in_the_same_way_and_others_in_their_own(device):
    """What tells kinds apart: dtypes, strides of the first dimension, and which values there are."""
    vectors, flags = torch.zeros(2, 4, 3, device=device), torch.zeros(2, 4, 1, dtype=torch.uint8, device=device)
    targets = [(vectors, 0, False, True), (flags, 0, True, False)]
    writer = RowWriter(targets)
    marks = torch.tensor([1, 0, 0, 1], device=device)
    kinds = (
        (some(device, 4, 3), marks),
        (some(device, 4, 3), marks.int()),
        (some(device, 4, 3), marks.float()),
        (some(device, 4, 8)[:, 2:5], marks),
        (some(device, 4, 9)[:, 2:5], marks),
        (some(device, 3).expand(4, 3), marks),
        (some(device, 4, 3), some(device, 1).long().expand(4)),
        (None, marks),
    )
    for _ in range(2):
        for number, (vector, given) in enumerate(kinds):
            vectors.zero_()
            assert writer.write(number % 2, (vector, given)) == -1
            assert vectors[number % 2].tolist() == ([[0.0] * 3] * 4 if vector is None else vector.tolist())
            assert flags[number % 2].flatten().tolist() == (given != 0).tolist()
        assert len(writer._plans) == len(kinds)


@pytest.mark.parametrize("lanes", [1, 4])
def test_lazily_negated_values_are_written_as_they_read(lanes, device):
    block = torch.zeros(1, lanes, 1, device=device)
    writer = RowWriter([(block, 0, False, False)])
    lazy = torch.complex(some(device, lanes), some(device, lanes)).conj().imag
    assert lazy.is_neg()
    assert writer.write(0, (lazy,)) == -1
    assert block.flatten().tolist() == [-1.0, -2.0, -3.0, -4.0][:lanes]


def test_a_misfit_behind_a_value_that_is_copied_first_is_told_too(device):
    writer = Writer(RowWriter, ["vector", "scalar"], 3, device)
    before = writer.contents()
    assert writer.writer.write(0, (some(device, 5, 3).t(), some(device, 4))) == 1
    assert writer.contents() == before


def test_a_block_whose_memory_was_moved_is_written_where_it_is(device):
    block = torch.zeros(2, 4, device=device)
    writer = RowWriter([(block, 0, False, False)])
    assert writer.write(0, (some(device, 4),)) == -1
    before, other = block[:], torch.zeros(2, 4, device=device)
    block.data = other
    assert writer.write(1, (some(device, 4),)) == -1
    assert other.tolist() == [[0.0] * 4, [1.0, 2.0, 3.0, 4.0]]
    assert before.tolist() == [[1.0, 2.0, 3.0, 4.0], [0.0] * 4]


def test_a_row_whose_launch_fails_is_not_counted(device, monkeypatch):
    def fail(*_):
        raise RuntimeError("no launch")

    writer = Writer(RowWriter, ["vector"], 3, device)
    before = writer.contents()
    monkeypatch.setattr(Launcher, "__call__", fail)
    with pytest.raises(RuntimeError, match="no launch"):
        writer.writer.write(0, (some(device, 3, 5),))
    assert writer.contents() == before
