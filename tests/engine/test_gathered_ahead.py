"""Mini-batches gathered several in one launch, as on CUDA; here by the reference."""

from __future__ import annotations

import pytest
import torch

from rlstore.engine.batches import gather, select
from rlstore.engine.batches.gather import gather_ahead

STEPS, LANES, COUNT, SIZE = 4, 6, 3, 7


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """The rows of each launch."""
    found, real = [], gather.kernel

    def counted(operation: str, device_type: str):
        def run(sources, rows, *others):
            found.append(len(rows))
            real(operation, device_type)(sources, rows, *others)

        return run

    monkeypatch.setattr(gather, "kernel", counted)
    return found


def sources() -> tuple[torch.Tensor, ...]:
    """Every entry tells its row and column."""
    ids = torch.arange(STEPS * LANES).view(STEPS, LANES)
    return (
        (ids[..., None] * 100 + torch.arange(3)).float(),
        ids.to(torch.uint8)[..., None, None].expand(STEPS, LANES, 2, 2).contiguous(),
        ids.to(torch.float64),
        torch.empty(STEPS, LANES, 0),
    )


DTYPES = (torch.float32, torch.float32, torch.float64, torch.float32)


def rows() -> torch.Tensor:
    return torch.randperm(STEPS * LANES, generator=torch.Generator().manual_seed(3))[: COUNT * SIZE]


def serve(most_bytes: int = 1 << 30) -> list[tuple[torch.Tensor, ...]]:
    return list(gather_ahead(sources(), rows(), COUNT, DTYPES, most_bytes))


def assert_right(batches: list[tuple[torch.Tensor, ...]]) -> None:
    for batch, own in zip(batches, rows().split(SIZE), strict=True):
        vectors, images, scalars, empty = batch
        assert vectors.tolist() == [[row * 100.0 + column for column in range(3)] for row in own.tolist()]
        assert images.tolist() == [[[float(row)] * 2] * 2 for row in own.tolist()]
        assert scalars.tolist() == own.tolist()
        assert tuple(tensor.dtype for tensor in batch) == DTYPES
        assert empty.shape == (SIZE, 0)
        assert all(tensor.is_contiguous() for tensor in batch)


def test_an_epoch_is_one_launch(launches):
    assert_right(serve())
    assert launches == [COUNT * SIZE]


def test_no_more_is_gathered_ahead_than_memory_allows(launches):
    one = (32 + 32) * 4 + 16 * 8  # what is needed, each field rounded up to 16 entries
    assert_right(serve(2 * one))
    assert launches == [2 * SIZE, SIZE]
    assert_right(serve(1))
    assert launches[2:] == [SIZE] * 3


def test_no_more_than_the_most_are_gathered_in_one_launch(launches, monkeypatch):
    monkeypatch.setattr(gather, "MOST_AHEAD", 2)
    assert_right(serve())
    assert launches == [2 * SIZE, SIZE]


def test_batches_are_gathered_when_they_are_needed(launches):
    batches = gather_ahead(sources(), rows(), COUNT, DTYPES, 1)
    assert launches == []
    next(batches)
    assert launches == [SIZE]


def test_the_tensors_are_apart(launches):
    batches = serve()
    tensors = [tensor for batch in batches for tensor in batch]
    versions = [tensor._version for tensor in tensors]
    tensors[0].zero_()
    assert [tensor._version for tensor in tensors[1:]] == versions[1:]
    assert len({batch[0].untyped_storage().data_ptr() for batch in batches}) == COUNT
    weight = torch.ones((), requires_grad=True)
    product = (weight * batches[0][0]).sum()
    batches[0][1].mul_(2)
    product.backward()


def test_in_inference_mode_ordinary_tensors_are_made():
    with torch.inference_mode():
        batches = serve()
    assert not any(tensor.is_inference() for batch in batches for tensor in batch)


def test_orders_from_keys_have_no_row_twice_and_differ():
    generator = torch.Generator().manual_seed(5)
    orders = select.keyed_orders(50, 48, generator, 3).tolist()
    for order in orders:
        assert len(set(order)) == 48
        assert set(order) <= set(range(50))
    orders += select.keyed_orders(50, 48, generator, 1).tolist()
    assert len({tuple(order) for order in orders}) == 4
    generator.manual_seed(5)
    assert select.keyed_orders(50, 48, generator, 3).tolist() == orders[:3]


def test_orders_are_drawn_as_they_are_asked_for():
    """On the CPU: what is not asked for is not drawn."""
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    orders = select.epoch_orders(20, 20, one, 4)
    assert [next(orders).tolist() for _ in range(2)] == [select.epoch_rows(20, 20, other).tolist() for _ in range(2)]
    assert torch.equal(one.get_state(), other.get_state())
