"""Rows in, tensors out: the right rows, in memory of their own, and kept only while nobody could tell."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstore.engine.batches import gather
from rlstore.engine.batches.gather import gather_batches, gather_rows
from rlstore.engine.memory.tensors import Recycler
from rlstore.kernels.portable import OPERATIONS as PORTABLE

STEPS, LANES = 6, 5


def blocks() -> tuple[torch.Tensor, ...]:
    """Three fields whose every entry tells its row: the id, the id with its place, and the id as a byte."""
    ids = torch.arange(STEPS * LANES, dtype=torch.float32).reshape(STEPS, LANES)
    places = torch.arange(6.0).reshape(2, 3) / 8
    return ids.unsqueeze(-1).clone(), ids[..., None, None] + places, ids.to(torch.uint8)


def dtypes_of(sources):
    return [source.dtype for source in sources]


def assert_rows(batch, rows) -> None:
    """A batch of the three fields of :func:`blocks` is of these rows."""
    ids, places, bytes_ = batch
    assert ids.flatten().tolist() == rows
    assert places[:, 0, 0].tolist() == rows
    assert places[:, 1, 2].tolist() == [row + 5 / 8 for row in rows]
    assert bytes_.tolist() == rows


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of rows of each gather that is made."""
    made: list[int] = []
    real = gather.gather_rows

    def counted(sources, rows, *others):
        made.append(len(rows))
        return real(sources, rows, *others)

    monkeypatch.setattr(gather, "gather_rows", counted)
    return made


# ---------------------------------------------------------------------------------------------------- gather_rows


def test_rows_come_as_asked_for_and_in_that_order():
    sources = blocks()
    rows = [7, 0, 29, 7, 12]
    assert_rows(gather_rows(sources, torch.tensor(rows), dtypes_of(sources), Recycler()), rows)
    assert [
        tuple(out.shape)
        for out in gather_rows(sources, torch.tensor([], dtype=torch.int64), dtypes_of(sources), Recycler())
    ] == [
        (0, 1),
        (0, 2, 3),
        (0,),
    ]


def test_each_result_has_the_dtype_asked_for():
    images = torch.arange(STEPS * LANES * 4).reshape(STEPS, LANES, 4).to(torch.uint8)
    rows = torch.tensor([3, 29])
    kept, floats = gather_rows((images, images), rows, [torch.uint8, torch.float32], Recycler())
    assert kept.dtype == torch.uint8
    assert floats.dtype == torch.float32
    assert floats.tolist() == kept.tolist() == [[12, 13, 14, 15], [116, 117, 118, 119]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.uint16], ids=str)
def test_any_dtype_is_served_as_float32_if_asked_for(dtype):
    source = torch.arange(STEPS * LANES).reshape(STEPS, LANES).to(dtype)
    (floats,) = gather_rows((source,), torch.tensor([29, 3]), [torch.float32], Recycler())
    assert floats.tolist() == [29.0, 3.0]


def test_results_are_copies():
    sources = blocks()
    batch = gather_rows(sources, torch.tensor([4]), dtypes_of(sources), Recycler())
    for out in batch:
        out.zero_()
    assert_rows(gather_rows(sources, torch.tensor([4]), dtypes_of(sources), Recycler()), [4])


def test_results_are_plain_tensors_in_inference_mode_too():
    sources = blocks()
    with torch.inference_mode():
        batch = gather_rows(sources, torch.tensor([4]), dtypes_of(sources), Recycler())
    assert not any(out.is_inference() for out in batch)


@pytest.mark.parametrize("row", [-1, STEPS * LANES])
def test_a_row_that_is_not_there_is_refused(row):
    with pytest.raises(IndexError):
        gather_rows(blocks(), torch.tensor([0, row]), dtypes_of(blocks()), Recycler())


# ---------------------------------------------------------------------------------------------------- gather_batches


@given(
    st.integers(1, 10),
    st.integers(1, 5),
    st.sampled_from([1, 40, 100, 333, 1 << 20]),
    st.sampled_from([1, 29, 58, 59, 1 << 20]),
    st.integers(0, 2**32),
)
def test_batches_are_the_rows_cut_in_equal_parts(count, size, group_bytes, large_bytes, seed):
    """Whatever is gathered together: each batch holds its own rows, and all of an epoch's come once."""
    size = min(size, STEPS * LANES // count)
    rows = torch.randperm(STEPS * LANES, generator=torch.Generator().manual_seed(seed))[: count * size]
    sources = blocks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "GROUP_BYTES", group_bytes)
        patch.setattr(gather, "LARGE_BYTES", large_bytes)
        batches = list(gather_batches(sources, rows, count, dtypes_of(sources), Recycler()))
    assert len(batches) == count
    for index, batch in enumerate(batches):
        assert_rows(batch, rows[index * size : (index + 1) * size].tolist())


# A row of the three fields is 4 + 24 + 1 = 29 bytes; a batch of 5 rows is 145.
@pytest.mark.parametrize(("group_bytes", "together"), [(1, 1), (145, 1), (289, 1), (290, 2), (600, 4), (1 << 20, 6)])
def test_small_batches_are_gathered_together_within_the_bound(monkeypatch, calls, group_bytes, together):
    monkeypatch.setattr(gather, "GROUP_BYTES", group_bytes)
    sources = blocks()
    list(gather_batches(sources, torch.arange(30), 6, dtypes_of(sources), Recycler()))
    assert len(calls) == math.ceil(6 / together)
    assert sum(calls) == 30
    assert max(calls) == 5 * together


def test_batches_are_gathered_as_they_are_needed(monkeypatch, calls):
    monkeypatch.setattr(gather, "GROUP_BYTES", 290)
    sources = blocks()
    batches = gather_batches(sources, torch.arange(30), 6, dtypes_of(sources), Recycler())
    assert calls == []
    taken = []
    for _ in batches:
        taken.append(len(calls))
    assert taken == [1, 1, 2, 2, 3, 3]


def test_batches_gathered_together_are_tensors_in_their_own_right():
    sources = blocks()
    batches = list(gather_batches(sources, torch.arange(30), 6, dtypes_of(sources), Recycler()))
    batches[2][0].zero_()
    batches[3][1].mul_(-1)
    for index in (0, 1, 4, 5):
        assert_rows(batches[index], list(range(index * 5, index * 5 + 5)))
    weights = torch.ones(5, 1, requires_grad=True)
    leaf = batches[4][0].requires_grad_()
    (leaf * weights).sum().backward()
    batches[5][0].add_(1)
    assert leaf.grad.flatten().tolist() == [1.0] * 5
    assert weights.grad.flatten().tolist() == [20.0, 21.0, 22.0, 23.0, 24.0]


def test_results_are_in_the_memory_of_the_outputs(monkeypatch):
    outputs, sources = Recycler(), blocks()
    batch = gather_rows(sources, torch.tensor([1, 2]), dtypes_of(sources), outputs)
    place = batch[0].data_ptr()
    assert outputs.idle_bytes == 0
    del batch
    assert outputs.idle_bytes == 3 * 64  # each begins with a cache line
    assert gather_rows(sources, torch.tensor([1, 2]), dtypes_of(sources), outputs)[0].data_ptr() == place
    monkeypatch.setattr(gather, "LARGE_BYTES", 145)
    outputs = Recycler()
    kept = list(gather_batches(sources, torch.arange(30), 6, dtypes_of(sources), outputs))
    assert len({batch[0].data_ptr() for batch in kept}) == 6
    assert outputs.idle_bytes == 0
    kept.clear()
    assert outputs.idle_bytes == 6 * (64 + 128 + 64)


def test_outputs_gather_what_the_portable_kernel_gathers():
    random = torch.Generator().manual_seed(0)
    dtypes = [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.float32, torch.bool]
    sources = tuple(
        torch.randint(0, 2 if dtype == torch.bool else 200, (7, 30, *shape), generator=random).to(dtype)
        for dtype in dtypes
        for shape in [(), (1,), (3,), (24,), (5, 80), (0,)]
    )
    rows = torch.randint(0, 210, (50,), generator=random)
    for served in (dtypes_of(sources), [torch.float32] * len(sources)):
        expected = tuple(torch.empty((50, *s.shape[2:]), dtype=dtype) for s, dtype in zip(sources, served, strict=True))
        PORTABLE["gather"](sources, rows, expected)
        for found, right in zip(Recycler().gather(sources, rows, served), expected, strict=True):
            assert found.dtype == right.dtype
            assert torch.equal(found, right)
    with pytest.raises(ValueError, match="not converted"):
        Recycler()._pool.gather((torch.zeros(2, 2, dtype=torch.complex64),), torch.tensor([0]), [True])
    for wrong in ([4], [-1]):
        with pytest.raises(IndexError, match="out of range"):
            Recycler().gather((torch.zeros(2, 2),), torch.tensor(wrong), [torch.float32])


# ----------------------------------------------------------------------------------- gather_batches, small and large

BATCH = 145  # bytes of 5 rows of the three fields


def epoch(sources, rows=range(30), count=6):
    return gather_batches(sources, torch.tensor(rows), count, dtypes_of(sources), Recycler())


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch) -> str:
    """The batches of :func:`epoch` on either side of the bound."""
    monkeypatch.setattr(gather, "LARGE_BYTES", BATCH + (request.param == "small"))
    return request.param


def test_large_batches_are_gathered_one_by_one_when_they_are_needed(size, calls):
    batches = epoch(blocks())
    assert calls == []
    assert_rows(next(batches), list(range(5)))
    assert calls == ([5] if size == "large" else [30])
    for index, batch in enumerate(batches, 1):
        assert_rows(batch, list(range(index * 5, index * 5 + 5)))
    assert calls == ([5] * 6 if size == "large" else [30])


# uint8 served as float32: it is the bytes that are served that count. A row of 8 bytes is then one of 32.
@pytest.mark.parametrize(("rows", "large"), [(8191, False), (8192, True), (8193, True)])
def test_a_batch_is_large_from_256_kib_on(calls, rows, large):
    assert gather.LARGE_BYTES == 256 << 10
    source = torch.arange(2 * 8200 * 8).to(torch.uint8).view(4, 4100, 8)
    ids = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(0))
    for index, (out,) in enumerate(gather_batches((source,), ids, 2, [torch.float32], Recycler())):
        assert torch.equal(out, source.flatten(0, 1)[ids[index * rows : (index + 1) * rows]].float())
    assert calls == ([rows] * 2 if large else [2 * rows])
    calls.clear()
    list(gather_batches((source,), ids, 2, [torch.uint8], Recycler()))
    assert calls == [2 * rows]


def test_batches_share_no_memory_with_the_sources_or_one_another(size):
    sources = blocks()
    for number, batch in enumerate([batch for _ in range(2) for batch in epoch(sources)]):
        index = number % 6
        assert_rows(batch, list(range(index * 5, index * 5 + 5)))
        for tensor in batch:
            tensor.zero_()
    assert all(torch.equal(source, expected) for source, expected in zip(sources, blocks(), strict=True))


def test_what_a_backward_pass_still_needs_stays_as_it_was(size):
    sources, weight = blocks(), torch.ones(1, requires_grad=True)
    losses = [(batch[0] * weight, float(batch[0].sum())) for _ in range(2) for batch in epoch(sources)]
    for loss, total in losses:
        weight.grad = None
        loss.sum().backward()
        assert weight.grad.item() == total


def test_batches_of_no_rows_and_of_no_bytes_are_batches():
    (batch,) = gather_batches(blocks(), torch.arange(0), 1, dtypes_of(blocks()), Recycler())
    assert [tuple(out.shape) for out in batch] == [(0, 1), (0, 2, 3), (0,)]
    nothing = torch.zeros(STEPS, LANES, 0)
    batches = list(gather_batches((nothing,), torch.arange(30), 6, [torch.float32], Recycler()))
    assert [tuple(out.shape) for (out,) in batches] == [(5, 0)] * 6
