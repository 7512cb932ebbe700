"""Trajectories: where they start, how they are padded, and the state each begins with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstore.engine.batches.trajectories import cut, first_states, pad, split

# Lane 0: steps 0-1, 2-3. Lane 1: one whole. Lane 2: 0, 1, 2-3 (its last flag ends nothing new).
DONES = torch.tensor([[0, 0, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.uint8)
LANES = [0, 0, 1, 2, 2, 2]
STARTS = [0, 2, 0, 0, 1, 2]
LENGTHS = [2, 2, 4, 1, 1, 2]


def ids(*shape: int) -> torch.Tensor:
    """``[4, 3, *shape]``: entry 100 * step + 10 * lane, plus a little that tells the place in the row."""
    rows = 100.0 * torch.arange(4).unsqueeze(-1) + 10.0 * torch.arange(3)
    places = torch.arange(torch.Size(shape).numel()).reshape(shape) / 16
    return rows.reshape(4, 3, *[1] * len(shape)) + places


def test_split_by_hand():
    for dones in (DONES, DONES.unsqueeze(-1), DONES != 0):
        found = split(dones, 0, 3)
        assert found.lanes.tolist() == LANES
        assert found.starts.tolist() == STARTS
        assert found.lengths.tolist() == LENGTHS


def test_split_of_some_lanes_names_them_as_they_are():
    found = split(DONES, 1, 3)
    assert found.lanes.tolist() == LANES[2:]
    assert found.starts.tolist() == STARTS[2:]
    assert found.lengths.tolist() == LENGTHS[2:]
    assert split(DONES, 2, 2).lanes.tolist() == []


def test_pad_by_hand():
    found = split(DONES, 0, 3)
    (plain, wide), mask = pad((ids() + 1, ids(2) + 1), found, 4)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert plain.tolist() == [
        [1, 201, 11, 21, 121, 221],
        [101, 301, 111, 0, 0, 321],
        [0, 0, 211, 0, 0, 0],
        [0, 0, 311, 0, 0, 0],
    ]
    assert torch.equal(wide[..., 0], plain)
    assert torch.equal(wide[..., 1], torch.where(mask, plain + 1 / 16, 0))


def test_pad_keeps_dtypes_and_zeros_what_was_nan():
    found = split(DONES, 0, 3)
    images = ids(2, 2).to(torch.uint8)
    poisoned = torch.full((4, 3), torch.nan, dtype=torch.float64)
    poisoned[0] = 7.0
    (bytes_, floats), mask = pad((images, poisoned), found, 4)
    assert bytes_.dtype == torch.uint8
    assert floats.dtype == torch.float64
    assert floats[~mask].tolist() == [0.0] * int((~mask).sum())
    assert [bool(entry.isnan()) for entry in floats[0]] == [start > 0 for start in STARTS]


def test_pad_to_the_longest_is_enough():
    """Fewer rows than the source has, where the longest trajectory needs no more."""
    found = split(DONES, 2, 3)
    (padded,), mask = pad((ids() + 1,), found, 2)
    assert padded.tolist() == [[21, 121, 221], [0, 0, 321]]
    assert mask.int().tolist() == [[1, 1, 1], [0, 0, 1]]


def test_cut_by_hand():
    plain, wide = cut((ids() + 1, ids(2) + 1), 1, 3)
    assert plain.tolist() == [[11, 21], [111, 121], [211, 221], [311, 321]]
    assert torch.equal(wide[..., 0], plain)
    assert torch.equal(wide[..., 1], plain + 1 / 16)
    assert plain.is_contiguous()
    assert wide.is_contiguous()


@given(st.integers(0, 6), st.integers(1, 9), st.data(), st.integers(0, 2**32))
def test_cut_is_a_copy_of_the_lanes(steps, lanes, data, seed):
    first = data.draw(st.integers(0, lanes))
    last = data.draw(st.integers(first, lanes))
    rng = torch.Generator().manual_seed(seed)
    sources = (
        torch.randn(steps, lanes, generator=rng),
        torch.randint(0, 256, (steps, lanes, 3, 5), generator=rng, dtype=torch.uint8),
        torch.randint(-9, 9, (steps, lanes, 0), generator=rng),
        torch.randn(steps, lanes, 1, generator=rng, dtype=torch.float64),
        torch.randn(steps, lanes, 2, generator=rng) < 0,
    )
    before = [source.clone() for source in sources]
    outs = cut(sources, first, last)
    for out, source in zip(outs, before, strict=True):
        assert out.dtype == source.dtype
        assert out.shape == (steps, last - first, *source.shape[2:])
        assert torch.equal(out, source[:, first:last])
        out.zero_()
    assert all(torch.equal(source, was) for source, was in zip(sources, before, strict=True))


def test_cut_takes_its_memory_from_the_given_allocator():
    made = []

    def empty(shape, dtype, device):
        made.append(torch.empty(tuple(shape), dtype=dtype, device=device))
        return made[-1]

    outs = cut((ids(), ids(2)), 0, 2, empty)
    assert len(made) == 2
    assert all(out is expected for out, expected in zip(outs, made, strict=True))


def test_cut_makes_plain_tensors_in_inference_mode_too():
    with torch.inference_mode():
        outs = cut((ids(), ids(2)), 0, 2)
    assert not any(out.is_inference() for out in outs)


@pytest.mark.parametrize(("first", "last"), [(0, 4), (3, 5), (2, 1)])
def test_cut_of_lanes_that_are_not_there_is_refused(first, last):
    with pytest.raises((IndexError, RuntimeError)):
        cut((ids(),), first, last)


def test_first_states_by_hand():
    states = torch.stack([ids(2), ids(2) + 0.5], dim=1)  # [steps, layers, lanes, hidden]
    got = first_states(states, split(DONES, 0, 3))
    assert got.is_contiguous()
    for trajectory, (lane, start) in enumerate(zip(LANES, STARTS, strict=True)):
        base = 100.0 * start + 10.0 * lane
        assert got[:, trajectory].tolist() == [[base, base + 1 / 16], [base + 0.5, base + 0.5 + 1 / 16]]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0]))
def test_padding_loses_nothing_and_adds_nothing(steps, lanes, seed, share):
    """Unpadded again, lane by lane, the trajectories are the rollout."""
    dones = torch.rand(steps, lanes, generator=torch.Generator().manual_seed(seed)) < share
    source = torch.arange(steps * lanes).reshape(steps, lanes)
    found = split(dones, 0, lanes)
    (padded,), mask = pad((source,), found, steps)
    assert padded.t()[mask.t()].tolist() == source.t().flatten().tolist()
    assert mask.sum(0).tolist() == found.lengths.tolist()
    # A trajectory starts where its lane does, or right after an end; and ends with one, or with the rollout.
    parts = (found.lanes, found.starts, found.lengths)
    for lane, start, length in zip(*(part.tolist() for part in parts), strict=True):
        assert start == 0 or dones[start - 1, lane]
        assert start + length == steps or dones[start + length - 1, lane]
        assert not dones[start : start + length - 1, lane].any()
