"""Values that lie in memory in another way than their blocks: strided, lazy, large, or in the block itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstore import ReplayStorage
from rlstore.engine.rows import ring as ring_module
from rlstore.engine.rows.ring import Column, Ring
from rlstore.engine.rows.schema import Field
from rlstore.errors import InvalidInputError
from rlstore.kernels.rules import FINITE

CPU = torch.device("cpu")
LANES = 3


def field(name, shape=(), dtype=torch.float32) -> Field:
    return Field(name, shape, dtype, "the test")


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
def test_a_lazily_negated_value_is_written_as_what_it_is(lanes, shape):
    """The imaginary part of a conjugate is a strided view whose memory holds the opposite sign."""
    ring = Ring([Column(field("rewards", shape), "rewards")], 2, lanes, CPU)
    value = torch.full((lanes, *shape), 1 + 2j).conj().imag
    for view in (value, value.transpose(0, -1).contiguous().transpose(0, -1), value[:1].expand(lanes, *shape)):
        ring.write((view,))
        assert (ring.blocks["rewards"][(ring.size - 1) % 2] == -2.0).all()
        ring.restart()
        ring.blocks["rewards"].zero_()


@pytest.mark.parametrize("index", [0, slice(0, 1)], ids=["a number", "one of them"])
def test_a_lazily_negated_reward_of_one_environment_is_stored_as_what_it_is(index):
    """Also as a number, which has no strides that would tell."""
    storage = ReplayStorage(spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(4), storage_size=8)
    value = torch.full((2,), 1 + 2j).conj().imag[index]
    assert value.is_neg()
    storage.add(torch.zeros(1), 1, value, True, False, {}, torch.ones(1))
    assert storage.get_all_buffer_data()["rewards"].flatten().tolist() == [-2.0]


def test_a_lazily_conjugated_value_is_written_as_what_it_is():
    ring = Ring([Column(field("waves", (2,), torch.complex64), "waves")], 2, LANES, CPU)
    ring.write((torch.full((LANES, 2), 1 + 2j).conj(),))
    ring.write((torch.full((2, LANES), 3 + 4j).conj().t(),))
    assert ring.blocks["waves"].flatten().tolist() == [1 - 2j] * 6 + [3 - 4j] * 6


def test_a_value_without_memory_is_refused():
    """Zeros that were never made; the tensors of torch.distributed, which stand for others, look the same."""
    ring = Ring([Column(field("rewards", (2,)), "rewards")], 2, LANES, CPU)
    with pytest.raises(InvalidInputError, match="no plain memory"):
        ring.write((torch._efficientzerotensor(LANES, 2),))
    assert ring.written == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_on_cuda_complex_numbers_are_refused_before_anything_is_allocated(dtype, monkeypatch):
    monkeypatch.setattr(ring_module, "allocate", None)
    columns = [Column(field("rewards"), "rewards"), Column(field('obs["waves"]', (2,), dtype), "waves")]
    said = (
        rf'obs\["waves"\] is {str(dtype)[6:]}, fixed by the test; a rollout on CUDA holds real .*Nothing was allocated'
    )
    with pytest.raises(InvalidInputError, match=said):
        Ring(columns, 2, LANES, torch.device("cuda"))


STRIDED_FORMS = {
    "expanded": lambda value: value[:1].expand(value.shape),
    "transposed": lambda value: value.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1),
    "sliced": lambda value: torch.cat([value, value + 100], dim=-1)[..., : value.shape[-1]],
    "every second row": lambda value: torch.stack([value, value + 100], dim=1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("form", STRIDED_FORMS)
def test_strided_values_are_written_without_a_copy(form, monkeypatch):
    """As they lie: nothing has to be made contiguous first."""
    columns = [Column(field("mean", (4,)), "mean"), Column(field("std", (4,)), "std", lead=1)]
    ring = Ring(columns, 2, LANES, CPU)
    mean = torch.arange(12.0).reshape(LANES, 4)
    std = STRIDED_FORMS[form](torch.arange(12.0).reshape(LANES, 4) + 0.5)
    assert not std.is_contiguous()
    monkeypatch.setattr(Field, "fit", None)
    ring.write((mean, std))
    assert ring.blocks["mean"][0].tolist() == mean.tolist()
    assert ring.blocks["std"][1].tolist() == std.tolist()
    assert (ring.blocks["std"][0] == 0).all()


@pytest.mark.parametrize(
    "view", [lambda row: row.t(), lambda row: row[:, :1].expand(3, 3), lambda row: row.roll(1, 0)], ids=["t", "e", "r"]
)
def test_a_view_of_the_very_row_is_written_as_it_was(view):
    ring = Ring([Column(field("square", (LANES,)), "square")], 2, LANES, CPU)
    ring.blocks["square"].copy_(torch.arange(18.0).reshape(2, LANES, LANES))
    value = view(ring.blocks["square"][0])
    expected = value.tolist()
    ring.write((value,))
    assert ring.blocks["square"][0].tolist() == expected


def outcome(write):
    """What a call returns, bit for bit, or what it says when it refuses."""
    try:
        return write().clone().view(torch.uint8).tolist()
    except InvalidInputError as error:
        return str(error)


NUMBERS = [0, 1, -1, 2, 127, 128, -129, 255, 256, 2**24, 2**24 + 1, -(2**24) - 2, 2**31, 2**53 + 1, -(2**63), 2**63]
REALS = [0.5, -0.0, 0.1, 1e-46, 3e38, 1e300, np.inf, np.nan]
GIVEN = ["b1", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">f4", "c8"]
HELD = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("held", [*HELD, "flag", "rule"], ids=str)
@pytest.mark.parametrize("given", GIVEN)
def test_what_the_writer_converts_is_what_fit_makes_of_it(given, held):
    """The same numbers or the same refusal, one number at a time: of arrays, of tensors, and of views of either."""
    dtype = held if isinstance(held, torch.dtype) else torch.uint8 if held == "flag" else torch.float32
    target = Field("x", (), dtype, "the test", is_flag=held == "flag", rule=FINITE if held == "rule" else None)
    ring = Ring([Column(target, "x")], 1, LANES, CPU)
    limits = np.iinfo(given) if given[0] in "ui" else None
    for number in [*NUMBERS, *([] if limits else REALS)]:
        if limits and not limits.min <= number <= limits.max:
            continue
        with np.errstate(over="ignore"):
            array = np.array([1, number, 0], object).astype(given)
        views = [array, np.stack([array, array], 1)[:, 1], array.reshape(LANES, 1), array[::-1]]
        if given != ">f4":
            views.extend([torch.from_numpy(array), torch.from_numpy(views[1])])
        for value in views:

            def written(value=value):
                ring.restart()
                ring.write((value,))
                return ring.blocks["x"][0]

            assert outcome(written) == outcome(lambda value=value: target.fit(value, LANES, CPU)), number


def test_what_environments_return_is_written_in_one_call(monkeypatch):
    """Arrays, of another width too, need no detour through tensors."""
    types = {"obs": torch.float32, "pixels": torch.uint8, "rewards": torch.float32, "actions": torch.float32}
    columns = [Column(Field(name, (2,), dtype, "the test"), name) for name, dtype in types.items()]
    flags = Column(Field("dones", (1,), torch.uint8, "the test", is_flag=True), "dones")
    ring = Ring([*columns, flags], 2, LANES, CPU)
    monkeypatch.setattr(Field, "fit", None)
    numbers = np.arange(2 * LANES).reshape(LANES, 2)
    pixels = np.stack([numbers, numbers]).astype(np.uint8)[:, ::-1][1]
    pixels.flags.writeable = False
    ring.write(
        (numbers + 0.1, pixels, numbers.astype(np.float32), torch.from_numpy(numbers), np.array([True, False, True]))
    )
    found = {name: block[0].tolist() for name, block in ring.blocks.items()}
    assert found.pop("dones") == [[1], [0], [1]]
    tenth = [[float(np.float32(number + 0.1)) for number in row] for row in numbers.tolist()]
    assert found == {
        "obs": tenth,
        "pixels": [[4, 5], [2, 3], [0, 1]],
        "rewards": numbers.tolist(),
        "actions": numbers.tolist(),
    }


def test_an_array_that_moves_while_another_value_is_read_is_written_as_it_is_then():
    """Where Python has to read a value, as one that is negated lazily, code of its class runs and may do anything."""
    array = np.zeros((LANES, 2), np.float32)

    class Meddling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            array.resize((LANES * 10000, 2), refcheck=False)
            array.resize((LANES, 2), refcheck=False)
            array[:] = 7.0
            return super().__torch_function__(function, types, args, kwargs or {})

    ring = Ring([Column(field("a", (2,)), "a"), Column(field("b", (2,)), "b")], 4, LANES, CPU)
    ring.write((array, torch._neg_view(torch.zeros(LANES, 2)).as_subclass(Meddling)))
    assert ring.blocks["a"][:, 0, 0].tolist() == [7.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("width", [32767, 32768, 40001])
def test_large_rows_are_written_whole(width):
    """A row of float32 for one lane: just under 128 KiB, just there, and beyond."""
    ring = Ring([Column(field("obs", (width,)), "obs"), Column(field("after", (width,)), "obs", lead=1)], 2, 1, CPU)
    rows = torch.arange(3.0 * width).reshape(3, 1, width)
    for step in (0, 1):
        ring.write((rows[step], rows[step + 1]))
    assert torch.equal(ring.blocks["obs"], rows)
    assert ring.written == 2
