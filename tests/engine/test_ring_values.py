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


@pytest.mark.parametrize("width", [32767, 32768, 40001])
def test_large_rows_are_written_whole(width):
    """A row of float32 for one lane: just under 128 KiB, just there, and beyond."""
    ring = Ring([Column(field("obs", (width,)), "obs"), Column(field("after", (width,)), "obs", lead=1)], 2, 1, CPU)
    rows = torch.arange(3.0 * width).reshape(3, 1, width)
    for step in (0, 1):
        ring.write((rows[step], rows[step + 1]))
    assert torch.equal(ring.blocks["obs"], rows)
    assert ring.written == 2
