"""Rows in, tensors out: the right rows, in memory of their own, and kept only while nobody could tell."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstore.engine import gather
from rlstore.engine.gather import KeptBatches, gather_batches, gather_rows

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
    assert_rows(gather_rows(sources, torch.tensor(rows), dtypes_of(sources)), rows)
    assert [
        tuple(out.shape) for out in gather_rows(sources, torch.tensor([], dtype=torch.int64), dtypes_of(sources))
    ] == [
        (0, 1),
        (0, 2, 3),
        (0,),
    ]


def test_each_result_has_the_dtype_asked_for():
    images = torch.arange(STEPS * LANES * 4).reshape(STEPS, LANES, 4).to(torch.uint8)
    rows = torch.tensor([3, 29])
    kept, floats = gather_rows((images, images), rows, [torch.uint8, torch.float32])
    assert kept.dtype == torch.uint8
    assert floats.dtype == torch.float32
    assert floats.tolist() == kept.tolist() == [[12, 13, 14, 15], [116, 117, 118, 119]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.uint16], ids=str)
def test_any_dtype_is_served_as_float32_if_asked_for(dtype):
    source = torch.arange(STEPS * LANES).reshape(STEPS, LANES).to(dtype)
    (floats,) = gather_rows((source,), torch.tensor([29, 3]), [torch.float32])
    assert floats.tolist() == [29.0, 3.0]


def test_results_are_copies():
    sources = blocks()
    batch = gather_rows(sources, torch.tensor([4]), dtypes_of(sources))
    for out in batch:
        out.zero_()
    assert_rows(gather_rows(sources, torch.tensor([4]), dtypes_of(sources)), [4])


def test_results_are_plain_tensors_in_inference_mode_too():
    sources = blocks()
    with torch.inference_mode():
        batch = gather_rows(sources, torch.tensor([4]), dtypes_of(sources))
    assert not any(out.is_inference() for out in batch)


@pytest.mark.parametrize("row", [-1, STEPS * LANES])
def test_a_row_that_is_not_there_is_refused(row):
    with pytest.raises(IndexError):
        gather_rows(blocks(), torch.tensor([0, row]), dtypes_of(blocks()))


# ---------------------------------------------------------------------------------------------------- gather_batches


@given(
    st.integers(1, 10),
    st.integers(1, 5),
    st.sampled_from([1, 40, 100, 333, 1 << 20]),
    st.integers(0, 2**32),
)
def test_batches_are_the_rows_cut_in_equal_parts(count, size, group_bytes, seed):
    """Whatever is gathered together: each batch holds its own rows, and all of an epoch's come once."""
    size = min(size, STEPS * LANES // count)
    rows = torch.randperm(STEPS * LANES, generator=torch.Generator().manual_seed(seed))[: count * size]
    sources = blocks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "GROUP_BYTES", group_bytes)
        batches = list(gather_batches(sources, rows, count, dtypes_of(sources)))
    assert len(batches) == count
    for index, batch in enumerate(batches):
        assert_rows(batch, rows[index * size : (index + 1) * size].tolist())


# A row of the three fields is 4 + 24 + 1 = 29 bytes; a batch of 5 rows is 145.
@pytest.mark.parametrize(("group_bytes", "together"), [(1, 1), (145, 1), (289, 1), (290, 2), (600, 4), (1 << 20, 6)])
def test_small_batches_are_gathered_together_within_the_bound(monkeypatch, calls, group_bytes, together):
    monkeypatch.setattr(gather, "GROUP_BYTES", group_bytes)
    sources = blocks()
    list(gather_batches(sources, torch.arange(30), 6, dtypes_of(sources)))
    assert len(calls) == math.ceil(6 / together)
    assert sum(calls) == 30
    assert max(calls) == 5 * together


def test_batches_are_gathered_as_they_are_needed(monkeypatch, calls):
    monkeypatch.setattr(gather, "GROUP_BYTES", 290)
    sources = blocks()
    batches = gather_batches(sources, torch.arange(30), 6, dtypes_of(sources))
    assert calls == []
    taken = []
    for _ in batches:
        taken.append(len(calls))
    assert taken == [1, 1, 2, 2, 3, 3]


def test_batches_gathered_together_are_tensors_in_their_own_right():
    sources = blocks()
    batches = list(gather_batches(sources, torch.arange(30), 6, dtypes_of(sources)))
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


def test_the_given_allocator_makes_every_result():
    made = []

    def empty(shape, dtype, device):
        made.append(torch.empty(tuple(shape), dtype=dtype, device=device))
        return made[-1]

    sources = blocks()
    batch = gather_rows(sources, torch.tensor([1, 2]), dtypes_of(sources), empty)
    assert all(out is expected for out, expected in zip(batch, made, strict=True))
    made.clear()
    list(gather_batches(sources, torch.arange(30), 6, dtypes_of(sources), empty))
    assert len(made) == len(sources)


# ---------------------------------------------------------------------------------------------------- KeptBatches


class Maker:
    """Makes batch ``index`` of two tensors that tell the index, and counts how often it was asked to."""

    def __init__(self, entries: int = 4):
        self.made: list[int] = []
        self._entries = entries

    def __call__(self, index: int):
        def make():
            self.made.append(index)
            return torch.full((self._entries,), float(index)), torch.full((self._entries,), index + 0.5)

        return make


def get(kept: KeptBatches, make: Maker, index: int) -> tuple[torch.Tensor, ...]:
    batch = kept.get(index, make(index))
    assert batch[0].tolist() == [float(index)] * len(batch[0])
    assert batch[1].tolist() == [index + 0.5] * len(batch[1])
    return batch


def test_an_untouched_batch_is_served_again():
    kept, make = KeptBatches(keep=True), Maker()
    for _ in range(3):
        for index in range(2):
            get(kept, make, index)
    assert make.made == [0, 1]


def test_nothing_is_kept_that_will_not_be_asked_for_again():
    kept, make = KeptBatches(keep=False), Maker()
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
def test_a_change_is_not_met_again(change, place):
    """``get`` compares what is served with what was made."""
    kept, make = KeptBatches(keep=True), Maker()
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
def test_a_batch_that_somebody_holds_is_made_anew(holder, place):
    kept, make = KeptBatches(keep=True), Maker()
    held = HOLDERS[holder](get(kept, make, 0)[place])
    before = held.tolist()
    again = get(kept, make, 0)
    for tensor in again:
        tensor.zero_()
    assert held.tolist() == before
    assert make.made == [0, 0]


def test_a_batch_that_was_let_go_is_kept_from_then_on():
    kept, make = KeptBatches(keep=True), Maker()
    held = get(kept, make, 0)
    del held
    get(kept, make, 0)
    assert make.made == [0]


def test_what_becomes_of_a_batch_does_not_cling_to_the_next():
    kept, make = KeptBatches(keep=True), Maker()
    batch = get(kept, make, 0)
    batch[0].requires_grad_()
    (batch[0] * 2).sum().backward()
    del batch
    again = get(kept, make, 0)
    assert not again[0].requires_grad
    assert again[0].grad is None


def test_new_data_make_all_batches_anew():
    kept, make = KeptBatches(keep=True), Maker()
    for stamp in ("a", "a", "b", "b", "a"):
        kept.follow(stamp)
        get(kept, make, 0)
    assert make.made == [0, 0, 0]


def test_no_more_is_kept_than_the_bound(monkeypatch):
    """A batch of two times 4 floats is 32 bytes; room for two of them."""
    monkeypatch.setattr(gather, "KEEP_BYTES", 64)
    kept, make = KeptBatches(keep=True), Maker()
    for _ in range(3):
        for index in range(4):
            get(kept, make, index)
    assert make.made == [0, 1, 2, 3, 2, 3, 2, 3]


def test_room_is_free_again_after_a_change_and_after_new_data(monkeypatch):
    monkeypatch.setattr(gather, "KEEP_BYTES", 64)
    kept, make = KeptBatches(keep=True), Maker()
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
