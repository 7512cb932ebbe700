"""The writer of rows, native against portable: what is written, what is not, and what is counted."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, assert_guards_whole, covers, guarded, native, random_tensor

from rlstore.kernels.portable import OPERATIONS as PORTABLE

LANES_OF_ROW = 3
# name: (block's row shape, block dtype, lead, is_flag, shapes that fit)
FIELDS = {
    "vector": ((LANES_OF_ROW, 5), torch.float32, 0, False, [(LANES_OF_ROW, 5)]),
    "image": ((LANES_OF_ROW, 2, 3), torch.uint8, 0, False, [(LANES_OF_ROW, 2, 3)]),
    "ahead": ((LANES_OF_ROW, 2), torch.float64, 1, False, [(LANES_OF_ROW, 2)]),
    "scalar": ((LANES_OF_ROW,), torch.float32, 0, False, [(LANES_OF_ROW,), (LANES_OF_ROW, 1)]),
    "column": ((LANES_OF_ROW, 1), torch.bfloat16, 0, False, [(LANES_OF_ROW,), (LANES_OF_ROW, 1)]),
    "byte_flag": ((LANES_OF_ROW, 1), torch.uint8, 0, True, [(LANES_OF_ROW,), (LANES_OF_ROW, 1)]),
    "float_flag": ((LANES_OF_ROW,), torch.float32, 1, True, [(LANES_OF_ROW,), (LANES_OF_ROW, 1)]),
    "empty": ((LANES_OF_ROW, 0), torch.int64, 0, False, [(LANES_OF_ROW, 0)]),
    "state": ((2, LANES_OF_ROW, 4), torch.float16, 0, False, [(2, LANES_OF_ROW, 4)]),
}
FLAG_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64]
MISFITS = ["none", "nan", "dtype", "shape", "rank", "strided", "list", "number", "array", "text"]


def fitting_value(rng: np.random.Generator, name: str, choice: int) -> torch.Tensor:
    _, dtype, _, is_flag, shapes = FIELDS[name]
    if is_flag:
        marks = rng.choice([1, 2, 127]) * random_tensor(rng, (LANES_OF_ROW,), torch.bool).to(torch.uint8)
        marks = marks.to(FLAG_DTYPES[choice % len(FLAG_DTYPES)])
        marks = marks / 256 if marks.is_floating_point() else marks  # a part of a yes is a yes
        return marks.reshape(shapes[choice % len(shapes)])
    return random_tensor(rng, shapes[choice % len(shapes)], dtype)


def misfit_value(rng: np.random.Generator, name: str, kind: str):
    row_shape, _, _, is_flag, _ = FIELDS[name]
    good = fitting_value(rng, name, 0)
    other = torch.float16 if is_flag else torch.complex64
    if kind == "nan" and is_flag:
        return torch.tensor([0.0, math.nan, 1.0]).reshape(good.shape)
    if kind in ("dtype", "nan"):
        return good.to(other)
    if kind == "shape":
        return torch.zeros((*row_shape[:-1], row_shape[-1] + 1), dtype=good.dtype)
    if kind == "rank":
        return good.unsqueeze(0)
    if kind == "strided":
        # Only flags must be contiguous. What else is strided is written as it is, see below.
        return torch.stack([good, good], dim=-1)[..., 0] if is_flag else good.to(other)
    others = {"none": None, "list": good.tolist(), "number": 1.0, "array": np.empty(good.shape, object), "text": "no"}
    return others[kind]


def writers(names: list[str], steps: int, optional: bool):
    """The native writer and the portable one, each with its own poisoned blocks."""
    pairs = []
    for make in (native("RowWriter"), PORTABLE["RowWriter"]):
        blocks, wholes = [], []
        for name in names:
            row_shape, dtype, lead, _, _ = FIELDS[name]
            block, whole = guarded((steps + lead, *row_shape), dtype)
            blocks.append(block)
            wholes.append(whole)
        targets = [(block, *FIELDS[name][2:4], optional) for block, name in zip(blocks, names, strict=True)]
        pairs.append((make(targets), wholes))
    return pairs


def contents(wholes: list[torch.Tensor]) -> list[list[int]]:
    return [whole.tolist() for whole in wholes]


@covers("RowWriter")
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(-1, 13), min_size=6, max_size=6), min_size=1, max_size=4),
)
def test_row_writer_agrees(seed, names, steps):
    rng = np.random.default_rng(seed)
    (mine, my_memory), (truth, true_memory) = writers(names, len(steps), optional=True)
    for row, choices in enumerate(steps):
        values = tuple(
            None if choice < 0 else fitting_value(rng, name, choice)
            for name, choice in zip(names, choices[: len(names)], strict=True)
        )
        assert mine.write(row, values) == -1
        assert truth.write(row, values) == -1
        assert contents(my_memory) == contents(true_memory)
        for name, value, whole in zip(names, values, my_memory, strict=True):
            row_shape, dtype, lead, is_flag, _ = FIELDS[name]
            if value is not None:
                block = whole[64:-64].view(dtype).view(len(steps) + lead, *row_shape)
                expected = (value != 0).to(dtype) if is_flag else value
                assert block[row + lead].tolist() == expected.reshape(row_shape).tolist()


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=6, unique=True),
    st.integers(0, 5),
    st.sampled_from(MISFITS),
)
@example(0, sorted(FIELDS), 8, "strided")
def test_row_writer_with_a_misfit_writes_nothing_at_all(seed, names, position, kind):
    rng = np.random.default_rng(seed)
    position %= len(names)
    pair = writers(names, 2, optional=False)
    values = [fitting_value(rng, name, 0) for name in names]
    values[position] = misfit_value(rng, names[position], kind)
    for later in range(position + 1, len(names)):
        if rng.random() < 0.3:
            values[later] = misfit_value(rng, names[later], kind)  # the first misfit is the one that is named
    for writer, memory in pair:
        before = contents(memory)
        assert writer.write(1, tuple(values)) == position
        assert contents(memory) == before


@pytest.mark.parametrize("side", [0, 1], ids=["native", "portable"])
def test_row_writer_refuses_a_row_beyond_the_end_and_writes_nothing(side):
    names = ["vector", "scalar"]
    writer, memory = writers(names, 2, optional=True)[side]
    before = contents(memory)
    values = tuple(fitting_value(np.random.default_rng(0), name, 0) for name in names)
    with pytest.raises(IndexError):
        writer.write(2, values)
    assert contents(memory) == before


@pytest.mark.parametrize("side", [0, 1], ids=["native", "portable"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_row_writer_needs_one_value_for_each_field(side, count):
    writer, memory = writers(["vector", "scalar"], 2, optional=True)[side]
    before = contents(memory)
    values = [fitting_value(np.random.default_rng(0), name, 0) for name in ("vector", "scalar", "scalar")]
    with pytest.raises(ValueError, match="one value for each field"):
        writer.write(0, tuple(values[:count]))
    assert contents(memory) == before


def test_row_writer_writes_on_after_what_it_refuses():
    """Between rows that are written: a misfit, a row beyond the end, too few values."""
    for make in (native("RowWriter"), PORTABLE["RowWriter"]):
        blocks = [torch.zeros(3, 2), torch.zeros(3, 2)]
        writer, good = make([(block, 0, False, False) for block in blocks]), torch.ones(2)
        assert writer.write(0, (good, good)) == -1
        for misfit in (good.cfloat(), torch.ones(3), None, [1.0, 2.0]):
            assert writer.write(1, (good, misfit)) == 1
        for row, values, error in [(3, (good, good), IndexError), (1, (good,), ValueError)]:
            with pytest.raises(error):
                writer.write(row, values)
        assert [block.tolist() for block in blocks] == [[[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]] * 2
        assert writer.write(1, (good, good)) == -1
        assert [block.tolist() for block in blocks] == [[[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]] * 2


def test_row_writer_writes_nothing_where_a_block_has_changed_its_size():
    block = torch.zeros(3, 2)
    writer = native("RowWriter")([(block, 0, False, False)])
    block.resize_(2, 2)
    with pytest.raises(ValueError, match="changed its size"):
        writer.write(0, (torch.ones(2),))
    assert block.tolist() == [[0.0, 0.0]] * 2


def test_row_writer_leaves_other_rows_alone():
    block = torch.full((4, 2), torch.nan)
    writer = native("RowWriter")([(block, 0, False, False)])
    writer.write(2, (torch.tensor([10.0, 11.0]),))
    assert block[2].tolist() == [10.0, 11.0]
    assert block[[0, 1, 3]].isnan().all()


def write_one(block: torch.Tensor, row: int, value: torch.Tensor) -> int:
    return native("RowWriter")([(block, 0, False, False)]).write(row, (value,))


# ------------------------------------------------------------------------------------------ views of other memory


def lazily_negated(shape: tuple[int, ...]) -> torch.Tensor:
    """The imaginary part of a conjugate: a view whose memory holds the opposite sign."""
    return torch.full(shape, 1 + 2j).conj().imag


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3,), (3, 2)], ids=str)
def test_row_writer_writes_a_lazily_negated_value_as_what_it_is_or_not_at_all(shape):
    value = lazily_negated(shape)
    assert (value == -2.0).all()
    block = torch.zeros(1, *shape)
    written = write_one(block, 0, value) == -1
    assert torch.equal(block[0], value if written else torch.zeros(shape))


@pytest.mark.parametrize("shape", [(1,), (3,), (3, 2)], ids=str)
def test_row_writer_writes_a_lazily_conjugated_value_as_what_it_is_or_not_at_all(shape):
    value = torch.full(shape, 1 + 2j).conj()
    block = torch.zeros((1, *shape), dtype=value.dtype)
    written = write_one(block, 0, value) == -1
    assert block[0].flatten().tolist() == [1 - 2j if written else 0j] * value.numel()


STRIDED = {
    "stride 0 in all": lambda make: make(1, 1).expand(6, 4),
    "stride 0 over the lanes": lambda make: make(4).expand(6, 4),
    "stride 0 in a row": lambda make: make(6, 1).expand(6, 4),
    "transposed": lambda make: make(4, 6).t(),
    "a slice of each row": lambda make: make(6, 9)[:, 3:7],
    "every second row": lambda make: make(12, 4)[::2],
    "every second entry": lambda make: make(6, 8)[:, 1::2],
    "both": lambda make: make(13, 9)[1::2, ::2][:, :4],
    "a diagonal of rows": lambda make: make(6, 4, 6).diagonal(dim1=0, dim2=2).t(),
    "permuted": lambda make: make(4, 2, 6).permute(2, 0, 1)[..., 1],
    "windows that overlap": lambda make: make(9).unfold(0, 4, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", STRIDED)
def test_row_writer_writes_strided_values_directly(form, dtype):
    rng = np.random.default_rng(5)
    value = STRIDED[form](lambda *shape: random_tensor(rng, shape, dtype))
    assert tuple(value.shape) == (6, 4)
    assert not value.is_contiguous()
    block, whole = guarded((3, 6, 4), dtype)
    before = whole.clone()
    assert write_one(block, 1, value) == -1
    assert block[1].tolist() == value.tolist()
    assert torch.equal(whole[: 64 + block[0].nbytes], before[: 64 + block[0].nbytes])
    assert torch.equal(whole[-64 - block[0].nbytes :], before[-64 - block[0].nbytes :])


@st.composite
def strided_values(draw):
    """Any tensor of up to four dimensions that a caller can come to by permuting, slicing and expanding."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    starts = [draw(st.integers(0, 2)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    memory = random_tensor(
        rng, tuple(start + size * step for size, step, start in zip(shape, steps, starts, strict=True)), torch.int16
    )
    value = memory[
        tuple(slice(start, start + size * step, step) for size, step, start in zip(shape, steps, starts, strict=True))
    ].permute(order)
    expanded = [draw(st.sampled_from([1, 1, 4])) if size == 1 else size for size in value.shape]
    return value.expand(expanded)


@given(strided_values())
def test_row_writer_writes_any_strides(value):
    block, whole = guarded((2, *value.shape), torch.int16)
    assert write_one(block, 1, value) == -1
    assert block[1].tolist() == value.tolist()
    assert (whole[64 : 64 + block[0].nbytes] == 0xA5).all()
    assert_guards_whole(whole)
    truth = torch.zeros_like(block)
    assert PORTABLE["RowWriter"]([(truth, 0, False, False)]).write(1, (value.contiguous(),)) == -1
    assert torch.equal(truth[1], block[1])


@pytest.mark.parametrize("held", [(5,), (5, 1)], ids=str)
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(10.0)[::2],
        torch.arange(10.0)[::2].unsqueeze(-1),
        torch.arange(15.0).view(5, 3)[:, 1:2],
        torch.tensor(3.0).expand(5),
        torch.tensor([3.0]).expand(5, 1),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.stride()}",
)
def test_row_writer_writes_strided_scalars_into_either_form(held, value):
    block = torch.full((2, *held), torch.nan)
    assert write_one(block, 1, value) == -1
    assert block[1].flatten().tolist() == value.flatten().tolist()
    assert block[0].isnan().all()


def test_row_writer_does_not_take_strided_values_of_another_shape_or_dtype():
    block = torch.zeros(2, 6, 4)
    for value in (
        torch.ones(6, 4).t(),
        torch.ones(6, 1),
        torch.ones(4, 6, dtype=torch.float64).t(),
        torch.ones(4, 6, dtype=torch.int32).t(),
        torch.ones(4, 6, 1).permute(1, 0, 2),
    ):
        assert write_one(block, 0, value) == 0
    assert (block == 0).all()


@pytest.mark.parametrize(
    "view", [lambda row: row.t(), lambda row: row[:, :1].expand(4, 4), lambda row: row[0].expand(4, 4)]
)
def test_row_writer_writes_a_strided_view_of_the_very_row_as_it_was(view):
    block = torch.arange(32.0).reshape(2, 4, 4)
    value = view(block[1])
    expected = value.tolist()
    if write_one(block, 1, value) == -1:
        assert block[1].tolist() == expected
    else:
        assert torch.equal(block, torch.arange(32.0).reshape(2, 4, 4))


# ---------------------------------------------------------------------------------------------------- large rows

# Rows of 128 KiB and more are written past the cache, in lines of 64 bytes and what is left at both ends.
LARGE = 128 << 10
SIZES = [LARGE - 64, LARGE - 1, LARGE, LARGE + 1, LARGE + 15, LARGE + 16, LARGE + 63, LARGE + 64, LARGE + 65, 200003]


def bytes_of(seed: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 4, 16, 33, 63])
def test_row_writer_writes_large_rows_to_any_address(size, shift):
    """Three rows in a buffer; the address of the middle one depends on the shift and on the size."""
    buffer, given_ = bytes_of(1, 3 * size + 200), bytes_of(2, size + 100)
    block, value = buffer[shift : shift + 3 * size].view(3, size), given_[100 - shift : 100 - shift + size]
    start = shift + size
    expected = torch.cat([buffer[:start], value, buffer[start + size :]])
    assert write_one(block, 1, value) == -1
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.bool], ids=str)
def test_row_writer_writes_large_rows_of_any_dtype_among_others(dtype):
    rng = np.random.default_rng(3)
    big, small = random_tensor(rng, (7, 21001), dtype), random_tensor(rng, (7,), torch.float32)
    blocks = [torch.zeros((2, 7, 21001), dtype=dtype), torch.zeros(2, 7, 1), torch.zeros(3, 7, 21001, dtype=dtype)]
    leads = (0, 0, 1)
    targets = [(block, lead, False, False) for block, lead in zip(blocks, leads, strict=True)]
    assert native("RowWriter")(targets).write(1, (big, small, big)) == -1
    assert torch.equal(blocks[0][1], big)
    assert blocks[1][1].flatten().tolist() == small.tolist()
    assert torch.equal(blocks[2][2], big)
    assert all(bool((block[:-1] == 0).all()) for block in blocks)


def test_row_writer_writes_large_strided_rows():
    value = bytes_of(4, 400 * 500).view(400, 500).t()
    block = torch.zeros(2, 500, 400, dtype=torch.uint8)
    assert write_one(block, 1, value) == -1
    assert torch.equal(block[1], value)
    assert (block[0] == 0).all()


@pytest.mark.parametrize("size", [100, LARGE - 1, LARGE, LARGE + 17])
@pytest.mark.parametrize("shift", ["-size", -LARGE // 2, -65, -64, -1, 0, 1, 16, 64, 65, LARGE // 2, "size"])
def test_row_writer_writes_what_overlaps_the_row_itself_as_it_was(size, shift):
    """The value begins ``shift`` bytes after the row that it is written to, in the same memory."""
    shift = {"-size": -size, "size": size}.get(shift, shift)
    buffer = bytes_of(5, 3 * size + 2 * LARGE)
    block, start = buffer[LARGE : LARGE + 3 * size].view(3, size), LARGE + size
    value = buffer[start + shift : start + shift + size]
    expected = torch.cat([buffer[:start], value, buffer[start + size :]])
    assert write_one(block, 1, value) == -1
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("size", [100, LARGE + 17])
def test_row_writer_copies_one_row_of_a_block_to_another(size):
    block = bytes_of(6, 3 * size).view(3, size)
    for source, target in [(0, 1), (2, 0), (1, 1)]:
        expected = block.clone()
        expected[target] = expected[source]
        assert write_one(block, target, block[source]) == -1
        assert torch.equal(block, expected)


class Meddling(torch.Tensor):
    """A tensor whose methods would free other values, or write another row."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_row_writer_runs_no_code_of_a_value_while_it_reads_a_row():
    block, last = torch.zeros(2, 500), torch.zeros(2, 1)
    writer = native("RowWriter")([(block, 0, False, False), (last, 0, False, False)])
    for size in (1, 500):
        meddling = torch.ones(500)[:size].as_subclass(Meddling)
        Meddling.asked.clear()
        assert writer.write(0, (torch.ones(500), meddling)) == (-1 if size == 1 else 1)
        assert not Meddling.asked
    assert block.sum() == 500
    assert last.sum() == 1
